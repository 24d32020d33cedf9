"""Samplers that lie about their length, raise, and yield invalid indices, and collate_fns that
return unexpected objects. torch's loader without workers is the oracle."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import minato

SECONDS = float(os.environ.get("MINATO_FUZZ_SECONDS") or 0)
N = 8


class NoLength:
    """A batch of indices that supports only iteration."""

    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])

    def __len__(self) -> int:
        raise OSError("no length")

    def __eq__(self, other: object) -> bool:
        raise OSError("no comparison")


class Never:
    """Does not travel."""

    def __reduce__(self) -> Any:
        raise OSError("it does not travel")

    def __repr__(self) -> str:
        raise OSError("no text")


class Unmade:
    """Can be pickled, and not unpickled."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


#: built again for each test
INDICES: list[Callable[[], Any]] = [
    *[lambda i=i: i for i in range(N)], lambda: -1, lambda: N, lambda: 2**70, lambda: True,
    lambda: None, lambda: "a", lambda: 1.5, lambda: np.int64(3), lambda: torch.tensor(2),
    lambda: np.array([1]), NoLength, Never, Unmade, lambda: object(), lambda: (lambda: 1),
    lambda: [], lambda: [[0]], lambda: {2: 1}, lambda: b"12",
]  # fmt: skip
BATCHES: list[Callable[[], Any]] = [
    lambda: [0, 1], lambda: [2], lambda: [3, 4, 5], lambda: [], lambda: (6, 7), lambda: {1, 2},
    lambda: range(3), lambda: {4: 5}, lambda: np.arange(2), lambda: torch.arange(3), lambda: "12",
    lambda: iter([1, 2]), lambda: [N], lambda: [True, -1], lambda: [np.int64(1), 2],
    lambda: [1, None], lambda: [2**70], lambda: 5, lambda: None, NoLength, lambda: [Never()],
    lambda: [Unmade(), 1], Never, lambda: [[1], [2]], lambda: np.array(["a"]),
]  # fmt: skip
LENGTHS: list[Any] = ["its own", 0, 1, 1000, -1, 1.5, None, OSError]


class Order:
    """A sampler, of samples or of batches."""

    def __init__(self, of: list[Callable[[], Any]], length: Any, raises: bool) -> None:
        self.of, self.length, self.raises = of, length, raises

    def __iter__(self) -> Iterator[Any]:
        for made in self.of:
            yield made()
        if self.raises:
            raise OSError("the order ends")

    def __len__(self) -> Any:
        if self.length is OSError:
            raise OSError("no length")
        return len(self.of) if self.length == "its own" else self.length


class Items:
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: Any) -> int:
        return range(N)[index]


def itself(samples: Any) -> Any:
    samples.append(samples)
    return len(samples)


def fails(samples: Any) -> Any:
    raise OSError(samples)


def of_a_list(samples: Any) -> list[Any]:
    """An index that default_collate never sees."""
    return samples if isinstance(samples, list) else [samples]


COLLATES: dict[str, Callable[[Any], Any]] = {
    "list": of_a_list,
    "nothing": lambda samples: None,
    "never": lambda samples: Never(),
    "unmade": lambda samples: Unmade(),
    "error": lambda samples: ValueError(repr(samples)),
    "itself": itself,
    "fails": fails,
    "views": lambda samples: [torch.arange(9.0)[::2], torch.arange(4).expand(2, 4), samples],
    "sparse": lambda samples: torch.eye(2).to_sparse(),
    "large": lambda samples: torch.full((200_000,), len(samples)),
    "end": lambda samples: StopIteration,
}


class Case(NamedTuple):
    batched: bool
    of: tuple[int, ...]
    length: Any
    raises: bool
    size: int
    collate: str
    options: dict[str, Any]


cases = st.builds(
    Case,
    batched=st.booleans(),
    of=st.lists(st.integers(0, 99), max_size=7).map(tuple),
    length=st.sampled_from(LENGTHS),
    raises=st.sampled_from([False, False, True]),
    size=st.sampled_from([1, 2, 3]),
    collate=st.one_of(st.just("default"), st.sampled_from(sorted(COLLATES))),
    options=st.sampled_from([
        {}, {}, {"worker_type": "thread"}, {"scheduling": "static"}, {"on_error": "replace"},
        {"batching": "ready", "in_order": False}, {"prefetch_next_epoch": True},
        {"on_error": "skip", "worker_type": "thread"},
    ]),
)  # fmt: skip


def steps(case: Case, loader: Any, **options: Any) -> list[Any]:
    """Batches, and None for each error, of two epochs."""
    found = BATCHES if case.batched else INDICES
    order: Any = Order([found[k % len(found)] for k in case.of], case.length, case.raises)
    given = {"batch_sampler": order} if case.batched else {"sampler": order, "batch_size": case.size}
    made = loader(Items(), collate_fn=COLLATES.get(case.collate), **given, **options)
    seen: list[Any] = []
    for _ in range(2):
        try:
            iterator = iter(made)
        except Exception:
            seen.append(None)
            continue
        for _ in range(40):
            try:
                seen.append(next(iterator))
            except StopIteration:
                break
            except Exception:
                seen.append(None)
        else:
            raise AssertionError("the epoch does not end")
        if "persistent_workers" not in options:
            del iterator
    return seen


def text(batch: Any) -> str:
    try:
        return repr(batch)
    except OSError:
        return type(batch).__name__


def must_be_right(case: Case) -> None:
    """Without errors, all batches are equal; otherwise the same errors come in the same order."""
    hypothesis.assume(not (case.batched and "batching" in case.options))  # refused
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = steps(case, torch.utils.data.DataLoader)
        got = steps(case, minato.DataLoader, num_workers=1, timeout=60, persistent_workers=True,
                    **case.options)  # fmt: skip
    if None not in want and None not in got and case.options.get("in_order", True):
        assert list(map(text, got)) == list(map(text, want)), case
    if not {"on_error", "batching"} & case.options.keys():
        left = iter(map(text, filter(lambda step: step is not None, want)))
        assert all(any(one == text(step) for one in left) for step in got if step is not None), (
            case, got, want)  # fmt: skip
    travels = case.collate not in ("never", "unmade") and case.options.get("batching") is None
    assert None not in got or None in want or not travels or not plain(case), (case, got, want)


def plain(case: Case) -> bool:
    """Whether all of its indices travel."""
    found = BATCHES if case.batched else INDICES
    return all(k % len(found) < (7 if case.batched else N) for k in case.of)


@pytest.mark.limit(SECONDS + 120)
@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(case=cases)
def test_misbehaving_objects_give_no_wrong_batch(case: Case) -> None:
    must_be_right(case)


@pytest.mark.filterwarnings("ignore:worker_type='thread'. threads share")
@pytest.mark.parametrize("options", [
    {}, {"worker_type": "thread"}, {"batching": "ready", "in_order": False},
], ids=str)  # fmt: skip
def test_unplannable_indices_raise_once(options: dict) -> None:
    """And the rest of the epoch is delivered."""
    order: list[Any] = [*range(10), Never(), *range(11, 16)]
    loader = minato.DataLoader(Sixteen(), 2, sampler=order, num_workers=1, **options)
    iterator, errors = iter(loader), 0
    got: list[int] = []
    for _ in range(20):
        try:
            got += next(iterator).tolist()
        except StopIteration:
            break
        except Exception:
            errors += 1
    else:
        pytest.fail("the epoch does not end")
    assert errors == 1 and len(set(got)) == len(got) >= 12 and {12, 13, 14, 15} <= set(got)


class Sixteen(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        return index
