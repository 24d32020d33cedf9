"""Explains why default_collate failed: torch's texts name neither sample nor key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..errors import text_of

#: how many elements of each mapping or sequence are examined
_MOST = 64


def why(samples: Sequence[Any], name: Callable[[int], str]) -> str:
    """The explanation, or an empty text. name: names a sample by its position in the batch."""
    try:
        return _why(list(samples), name, "") if samples else ""
    except Exception:  # samples of the program's own classes: torch's error must do
        return ""


def by_index(indices: Any) -> Callable[[int], str]:
    """Names samples by the sampler's indices."""
    return lambda row: f"sample index {text_of(indices[row])}"


def _why(values: list[Any], name: Callable[[int], str], path: str) -> str:
    """Explains what is wrong with the samples' values at this path."""
    kinds = [_kind(value) for value in values]
    usual, count = Counter(kinds).most_common(1)[0]
    what = path or "the sample"
    for row, kind in enumerate(kinds):
        if kind != usual:
            others = "in most others" if count > 1 else f"in {name(kinds.index(usual))}"
            if kind[0] != usual[0]:
                return f"{what} is {type_name(kind)} in {name(row)} and {type_name(usual)} {others}"
            return f"{what} has {type_name(kind)} in {name(row)} and {type_name(usual)} {others}"
    first = values[0]
    for row, value in enumerate(values):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return (
                f"{what} requires grad in {name(row)}, but gradients cannot travel from "
                "a worker to the program: return its detach() from the dataset"
            )
    if isinstance(first, Mapping):
        places = [(f"{path}[{key!r}]", key) for key in list(first)[:_MOST]]
    elif _is_sequence(first):
        places = [(f"{path}[{at}]", at) for at in range(min(len(first), _MOST))]
    elif usual[0] == "other":
        return (
            f"{what} is {type_name(usual)} in {name(0)}, which default_collate cannot make a batch of: "
            "return a tensor, an array, a number or a text, or give the loader a collate_fn"
        )
    else:
        return ""
    found = (_why([value[key] for value in values], name, place) for place, key in places)
    return next(filter(None, found), "")


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _kind(value: Any) -> tuple[str, Hashable]:
    """The property that the values at one path must share."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return "shape", tuple(value.shape)
    if isinstance(value, Mapping):
        return "keys", tuple(value)
    if isinstance(value, (str, bytes)):
        return "text", None
    if isinstance(value, (int, float, np.number, np.bool_)):
        return "number", None
    if _is_sequence(value):
        return "length", len(value)
    return "other", type(value).__name__


def type_name(kind: tuple[str, Any]) -> str:
    name, value = kind
    if name == "shape":
        return f"shape {list(value)}"
    if name == "keys":
        return f"keys {list(value)}"
    if name == "length":
        return f"length {value}"
    return f"a {value}" if name == "other" else f"a {name}"
