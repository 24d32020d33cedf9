"""Other orders of a chain of transforms: which would save time, and what they would do to the data.

A transform that leaves fewer bytes than it gets moves towards the front, one that leaves more moves
towards the end. Each swap of neighbours on the way runs in both orders, on the inputs of real
samples and on edge cases. Each transform has the same random numbers in both. "Exact" is only what
is known to commute for every input, and was equal in all of these.
"""

from __future__ import annotations

import contextlib
import copy
import statistics
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten

from .records import Move, Orders, Request
from .stages import (
    Clocks, copy_value, find_chains, hash_value, list_chain, name_of, seed_generators, size_of,
)  # fmt: skip
from .work import clock, is_iterable, sample_makers, time_in_turns

#: arguments of a transform, by position and by name
Given = tuple[tuple[Any, ...], dict[str, Any]]

#: classes of torchvision.transforms that only turn the image over, cut it, or map each pixel for
#: itself. This is true for any input, not just for the samples of a study
FLIPS = {"RandomHorizontalFlip", "RandomVerticalFlip"}
CROPS = {"CenterCrop", "RandomCrop"}
PIXELS = {
    "ConvertImageDtype", "Grayscale", "Normalize", "PILToTensor", "RandomGrayscale", "RandomInvert",
    "RandomPosterize", "RandomSolarize", "ToTensor",
}  # fmt: skip
LIBRARY = "torchvision.transforms"
#: inputs of a chain that are taken from samples, and draws that each swap is tried with
INPUTS, DRAWS = 16, 3
#: bytes out over bytes in, beyond which a transform counts as one that shrinks or grows
SHRINKS, GROWS = 0.95, 1.05
#: moves that are timed at most
MOVES = 6


# ---- one transform -------------------------------------------------------------------------


def kind_of(element: Any) -> set[str] | None:
    """Which of the sets a transform is of; a class below one of theirs may do anything."""
    kind = type(element)
    if kind.__module__ != LIBRARY and not kind.__module__.startswith(LIBRARY + "."):
        return None
    if kind.__name__ in CROPS:
        pads = getattr(element, "padding", None) or getattr(element, "pad_if_needed", False)
        return None if pads else CROPS
    return next((kinds for kinds in (FLIPS, PIXELS) if kind.__name__ in kinds), None)


def commute(one: Any, other: Any) -> bool:
    """Whether two transforms are known to give the same bytes in both orders."""
    kinds = [kind_of(one), kind_of(other)]
    return kinds in ([FLIPS, PIXELS], [PIXELS, FLIPS], [CROPS, PIXELS], [PIXELS, CROPS], [FLIPS, FLIPS])


def apply(element: Any, given: Given, seed: int) -> Given:
    """What the next transform is given. The element is a fresh copy, so that generators of its own
    begin alike; the global ones begin at the seed."""
    fresh = copy.deepcopy(element)
    place, named = tuple(copy_value(part) for part in given[0]), copy_value(given[1])
    seed_generators(seed)
    made = fresh(*place, **named)
    if named:
        if not isinstance(made, dict):
            raise TypeError(f"{name_of(element)} takes names and gives a {type(made).__name__}")
        return (), made
    if len(place) > 1:
        if not isinstance(made, tuple):
            raise TypeError(f"{name_of(element)} takes {len(place)} things and gives one")
        return made, {}
    return (made,), {}


def apply_all(elements: list[Any], given: Given, seeds: dict[int, int]) -> Given:
    """Several transforms, each with its own seed, by its identity."""
    for element in elements:
        given = apply(element, given, seeds[id(element)])
    return given


# ---- one swap ------------------------------------------------------------------------------


def describe(value: Any) -> Any:
    """Structure, types and shapes of a result."""
    def leaf(part: Any) -> Any:
        shape = (part.size, part.mode) if hasattr(part, "getbands") else getattr(part, "shape", None)
        return type(part), getattr(part, "dtype", None), shape

    parts, structure = tree_flatten(value)
    return structure, list(map(leaf, parts))


def _is_image(value: Any) -> bool:
    if hasattr(value, "getbands"):
        return True
    return isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim >= 2


def _edge_case(value: Any, edge: int) -> Any:
    """An image of the same kind: of the least values, of the largest, of drawn ones; cut by one of the
    width, where that is even, and by two of the height, which stays as it is; cut to 2 x 3."""
    if not _is_image(value):
        return value
    if hasattr(value, "getbands"):
        from PIL import Image

        return Image.fromarray(_edge_case(np.asarray(value), edge), value.mode)
    if isinstance(value, torch.Tensor):
        made = torch.from_numpy(_edge_case(value.movedim((-2, -1), (0, 1)).numpy(), edge))
        return made.movedim((0, 1), (-2, -1)).contiguous().as_subclass(type(value))
    if edge > 2:
        high, wide = value.shape[:2]
        high, wide = (min(2, high), min(3, wide)) if edge == 4 else (max(1, high - 2), max(1, wide - 1))
        return value[:high, :wide].copy()
    largest, rng = np.iinfo(value.dtype).max if value.dtype.kind in "iu" else 1, np.random.default_rng(1)
    if edge < 2:
        return np.full_like(value, edge * largest)
    if value.dtype.kind in "iu":
        return rng.integers(0, min(largest, 255), value.shape, endpoint=True).astype(value.dtype)
    return rng.normal(0, 1, value.shape).astype(value.dtype)


def try_swap(one: Any, other: Any, given: Given, number: int) -> tuple[bool, bool, str] | None:
    """Both orders of two neighbours: whether their results are equal, and alike, and the error of one
    order that fails. None for an input that neither order can take."""
    seeds = {id(one): 2 * number + 1, id(other): 2 * number + 2}
    results: list[Given] = []
    error = ""
    for pair in ([one, other], [other, one]):
        try:
            results.append(apply_all(pair, given, seeds))
        except Exception as failed:
            error = f"{type(failed).__name__}: {failed}".partition("\n")[0]
    if len(results) < 2:
        return (False, False, error) if results else None
    alike, digests = describe(results[0]) == describe(results[1]), {hash_value(list(each)) for each in results}
    return alike and len(digests) == 1 and None not in digests, alike, ""


# ---- one chain -----------------------------------------------------------------------------


def set_elements(part: Any, new: list[Any]) -> None:
    """Puts the transforms of a chain into another order."""
    if isinstance(part, torch.nn.Sequential):
        part._modules = OrderedDict((str(n), module) for n, module in enumerate(new))
    elif isinstance(part.transforms, list):
        part.transforms[:] = new
    else:
        part.transforms = type(part.transforms)(new)


class _Inputs(Clocks):
    """Takes down what each chain's first transform is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[int, list[Given]] = {}

    def take(self, dataset: Any) -> None:
        for number, part in enumerate(find_chains(dataset)):
            with contextlib.suppress(Exception):
                self._set_element(str(number), part, 0)

    def run(self, label: str, kind: str, function: Any, given: Any, named: Any) -> Any:
        mine = given[1:] if label in self._by_object.values() else given
        with contextlib.suppress(Exception):
            self.given.setdefault(int(label), []).append(
                (tuple(copy_value(each) for each in mine), copy_value(named))
            )
        return function(*given, **named)


def find_moves(elements: list[Any], inputs: list[Given]) -> list[tuple[int, int]]:
    """(from, to) of the transforms to move: those that shrink to the front, those that grow to the
    end. None moves across one that turns its input into another type, but what is known to
    commute with it. Where only the first swaps on a way are known to, the shorter way is there too."""
    ratios, fixed = [], []
    for number, element in enumerate(elements):
        ratio, turns = [], False
        for seed, given in enumerate(inputs):
            before = apply_all(elements[:number], given, {id(each): seed for each in elements})
            after = apply(element, before, seed)
            ratio.append(size_of([after[0], after[1]]) / max(1, size_of([before[0], before[1]])))
            turns = turns or _image_types(before) != _image_types(after)
        ratios.append(statistics.fmean(ratio))
        fixed.append(turns)
    found = []
    for number, becomes in enumerate(ratios):
        step = -1 if becomes < SHRINKS else 1 if becomes > GROWS else 0
        to = exact = number
        while step and 0 <= to + step < len(elements):
            next_ = to + step
            if (fixed[number] or fixed[next_]) and not commute(elements[number], elements[next_]):
                break
            if (ratios[next_] < SHRINKS) if step < 0 else (ratios[next_] > GROWS):
                break  # of several, each keeps its place among the others
            if to == exact and commute(elements[number], elements[next_]):
                exact = next_
            to = next_
        found += [(number, at) for at in dict.fromkeys((exact, to)) if at != number]
    # of two neighbours, one to the front and the other to the end is the same move
    return list({tuple(order_after(len(elements), *move)): move for move in reversed(found)}.values())[::-1]


def _image_types(given: Given) -> list[Any]:
    parts = [*given[0], *given[1].values()]
    return [(type(part), getattr(part, "ndim", None)) for part in parts if _is_image(part)]


def order_after(count: int, start: int, to: int) -> list[int]:
    """Positions in the new order."""
    order = list(range(count))
    order.insert(to, order.pop(start))
    return order


def examine_move(elements: list[Any], inputs: list[Given], start: int, to: int) -> Move:
    """What a move does to the data: every swap on its way, on all inputs and on edge cases."""
    step = -1 if to < start else 1
    mover = elements[start]
    known, both_draw = True, False
    tries: list[tuple[bool, bool, str]] = []
    for at in range(start + step, to + step, step):
        other = elements[at]
        pair = (other, mover) if step < 0 else (mover, other)
        # what lies before the pair: for a move to the end, the mover has left it already
        prefix = elements[:at] if step < 0 else [e for e in elements[:at] if e is not mover]
        cases: list[Given] = []
        for number, given in enumerate(inputs):
            with contextlib.suppress(Exception):
                cases.append(apply_all(prefix, given, {id(each): number for each in prefix}))
        place, named = cases[0] if cases else ((), {})
        for edge in range(5) if any(map(_is_image, [*place, *named.values()])) else ():
            with contextlib.suppress(Exception):
                new = tuple(_edge_case(part, edge) for part in place)
                cases.append((new, {key: _edge_case(part, edge) for key, part in named.items()}))
        draws = enumerate(case for case in cases for _ in range(DRAWS))
        found = [found for n, case in draws if (found := try_swap(*pair, case, n)) is not None]
        tries += found
        known = known and commute(other, mover) and bool(found)
        both_draw = both_draw or all(name_of(each).startswith("Random") for each in pair)  # of the library's
    names, order = [name_of(element) for element in elements], order_after(len(elements), start, to)
    equal, alike = all(equal for equal, _, _ in tries), all(alike for _, alike, _ in tries)
    error = next((error for _, _, error in tries if error), "")
    return Move(
        known and equal, equal, alike, len(tries), error, both_draw, len(inputs), order=order, name=names[start],
        names=[names[n] for n in order], earlier=to < start,
        over=[names[n] for n in range(min(start, to), max(start, to) + 1) if n != start],
    )  # fmt: skip


# ---- the measurement -----------------------------------------------------------------------


def measure(request: Request, loader: Any) -> Orders:
    """Moves that save time: what a sample takes in both orders, and what the data become."""
    result = Orders()
    if is_iterable(loader):
        result.failed.append("an iterable dataset makes each sample once, so orders cannot be compared")
        return result
    end = clock() + request.seconds
    taking, seen, until = _Inputs(), set[Any](), clock() + 0.15 * request.seconds
    taking.take(loader.dataset)
    for index, make in sample_makers(loader):
        if (clock() > until and len(seen) >= 4) or len(seen) >= INPUTS or index in seen:
            break
        seen.add(index)
        with contextlib.suppress(Exception):
            taking.sample(make)
    taking.remove()
    inputs = {number: given[:INPUTS] for number, given in taking.given.items()}
    for number, part in enumerate(list(find_chains(loader.dataset))):
        elements = list_chain(part)
        if len(elements) < 2 or not inputs.get(number):
            continue
        try:
            found = find_moves(elements, inputs[number][:4])
        except Exception as error:
            result.failed.append(f"{type(error).__name__}: {error}".partition("\n")[0])
            continue
        for start, to in found[:MOVES]:
            result.moves.append(replace(examine_move(elements, inputs[number], start, to), chain=number))
    for move in result.moves:
        slot = clock() + (end - clock()) / max(1, sum(each.before is None for each in result.moves))
        _time_move(loader, move, slot)
    return result


def _time_move(loader: Any, move: Move, end: float) -> None:
    """Seconds of samples in both orders, by turns."""
    part = list(find_chains(loader.dataset))[move.chain]
    as_it_is = list_chain(part)
    setups = [partial(set_elements, part, order) for order in (as_it_is, [as_it_is[n] for n in move.order])]
    took, errors = time_in_turns(sample_makers(loader), setups, end)
    set_elements(part, as_it_is)
    if any(errors):
        move.error = move.error or max(errors)
        move.alike = move.exact = move.equal = False
    elif all(took):
        move.before, move.after = (statistics.fmean(wall for wall, _cpu in each) for each in took)


def reorder(dataset: Any, chain: int, order: list[int]) -> None:
    """Puts a dataset's chain into another order, for this process and what it forks."""
    part = list(find_chains(dataset))[chain]
    elements = list_chain(part)
    set_elements(part, [elements[n] for n in order])
