"""``--orders``: other orders of transforms, and what may be called exact."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from minato.analyze import keeper, loaders, orders, report
from minato.analyze.advice import candidates
from minato.analyze.facts import Facts
from minato.analyze.orders import Given, apply_all, commute, examine_move, find_moves
from minato.analyze.records import RateRequest, Request
from minato.analyze.report import page
from minato.analyze.stages import hash_value

from .support import Compose, in_a_fork
from .test_page import whole

Tensor = torch.Tensor


def library(kind: Any) -> Any:
    """As if torchvision had the class, which the tests do without."""
    kind.__module__ = "torchvision.transforms.transforms"
    return kind


@library
class RandomHorizontalFlip:
    def __call__(self, image: Tensor) -> Tensor:
        return image.flip(-1) if torch.rand(1) < 0.5 else image


@library
class RandomVerticalFlip:
    def __call__(self, image: Tensor) -> Tensor:
        return image.flip(-2) if torch.rand(1) < 0.5 else image


@library
class RandomCrop:
    def __init__(self, size: int, padding: int | None = None) -> None:
        self.size, self.padding, self.pad_if_needed = size, padding, False

    def __call__(self, image: Tensor) -> Tensor:
        if self.padding:
            image = torch.nn.functional.pad(image, [self.padding] * 4)
        high, wide = image.shape[-2] - self.size + 1, image.shape[-1] - self.size + 1
        if high < 1 or wide < 1:
            raise ValueError("the crop is larger than the image")
        top, left = int(torch.randint(0, high, (1,))), int(torch.randint(0, wide, (1,)))
        return image[..., top : top + self.size, left : left + self.size]


@library
class CenterCrop:
    """Pads what is too small with zeros, as torchvision's does."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, image: Tensor) -> Tensor:
        more = [max(0, self.size - side) for side in image.shape[-2:]]
        image = torch.nn.functional.pad(image, [0, more[1], 0, more[0]])
        top, left = ((side - self.size) // 2 for side in image.shape[-2:])
        return image[..., top : top + self.size, left : left + self.size]


@library
class RandomInvert:
    def __call__(self, image: Tensor) -> Tensor:
        return 255 - image if torch.rand(1) < 0.5 else image


@library
class RandomSolarize:
    def __call__(self, image: Tensor) -> Tensor:
        return torch.where(image >= 128, 255 - image, image)


class Normalize:
    """A program's own, of the name of a library's: it looks at the whole image."""

    def __call__(self, image: Tensor) -> Tensor:
        return image - image.min()


class HalfFlip(RandomHorizontalFlip):
    """Below a library's class, and something else."""

    def __call__(self, image: Tensor) -> Tensor:
        image = super().__call__(image).clone()
        image[..., :1] = 7
        return image


class Roll:
    def __call__(self, image: Tensor) -> Tensor:
        return image.roll(1, -1)


class Marked:
    """Does nothing, but to images that no study has seen."""

    def __call__(self, image: Tensor) -> Tensor:
        return image.roll(1, -1) if int(image.to(torch.int64).sum()) % 97 == 3 else image


class Grain:
    """With a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(4)

    def __call__(self, image: Tensor) -> Tensor:
        return image + torch.from_numpy(self.rng.integers(0, 3, image.shape, np.uint8))


class Half:
    def __call__(self, image: Tensor) -> Tensor:
        return image[..., ::2, ::2]


def image(seed: int, high: int = 9, wide: int = 12) -> Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(0, 256, (3, high, wide), np.uint8))


def inputs(count: int = 3) -> list[Given]:
    return [((image(seed),), {}) for seed in range(count)]


MAKERS: list[Any] = [
    RandomHorizontalFlip, RandomVerticalFlip, lambda: RandomCrop(6), lambda: RandomCrop(6, padding=2),
    lambda: CenterCrop(5), RandomInvert, RandomSolarize, Normalize, HalfFlip, Roll, Marked, Grain, Half,
]  # fmt: skip


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(MAKERS), min_size=2, max_size=4), st.data())
def test_an_unsafe_swap_is_never_exact(makers: list[Any], data: Any) -> None:
    """Bytes of both orders are compared for images and numbers that the study has not seen."""
    elements = [make() for make in makers]
    at = data.draw(st.integers(0, len(elements) - 2))
    found = examine_move(elements, inputs(2), at + 1, at)
    if not found.exact:
        return
    other = [*elements[:at], elements[at + 1], elements[at], *elements[at + 2 :]]
    for _ in range(3):
        high, wide = data.draw(st.integers(6, 14)), data.draw(st.integers(6, 14))
        fresh: Given = (image(data.draw(st.integers(100, 10_000)), high, wide),), {}
        seeds = {id(element): data.draw(st.integers(0, 1000)) for element in elements}
        try:
            expected = hash_value(list(apply_all(elements, fresh, seeds)))
        except ValueError:  # a crop before or after that is too large
            continue
        assert hash_value(list(apply_all(other, fresh, seeds))) == expected


@pytest.mark.parametrize("one, other, exact, equal", [
    (RandomInvert(), RandomCrop(4), True, True),
    (RandomHorizontalFlip(), RandomVerticalFlip(), True, True),
    (RandomSolarize(), RandomHorizontalFlip(), True, True),
    (RandomInvert(), RandomCrop(4, padding=1), False, False),  # zeros become 255
    (RandomInvert(), CenterCrop(5), False, False),  # of images that are too small
    (RandomHorizontalFlip(), RandomCrop(4), False, False),
    (Normalize(), RandomHorizontalFlip(), False, True),  # equal, and nothing is known of it
    (HalfFlip(), RandomInvert(), False, False), (Grain(), RandomCrop(4), False, False),
])  # fmt: skip
def test_swap_exact_requires_known_and_equal(one: Any, other: Any, exact: bool, equal: bool) -> None:
    found = examine_move([one, other], inputs(), 1, 0)
    assert (found.exact, found.equal) == (exact, equal)
    assert found.tried > 9 and (not exact or commute(one, other))


def test_transforms_replay_their_own_generators() -> None:
    """Else the second order would go on where the first has ended."""
    found = examine_move([Grain(), RandomHorizontalFlip()], inputs(), 1, 0)
    assert not found.equal and found.alike
    grain = Grain()
    one, other = (apply_all([grain], inputs()[0], {id(grain): 0}) for _ in range(2))
    assert hash_value(list(one)) == hash_value(list(other))


def test_transforms_that_shrink_move_to_the_front() -> None:
    """Pecan's example: what makes the image smaller comes after the augmentations."""
    elements = [RandomHorizontalFlip(), Roll(), Grain(), Half(), Normalize()]
    assert find_moves(elements, inputs()) == [(3, 0)]
    found = examine_move(elements, inputs(), 3, 0)
    assert found.alike and not found.exact and not found.equal


class Double:
    def __call__(self, image: Tensor) -> Tensor:
        return torch.cat([image, image], -1)


def test_neighbours_that_swap_are_one_move() -> None:
    """One shrinks and should go to the front, the other grows and should go to the end."""
    assert len(find_moves([Double(), Half()], inputs())) == 1


class ToFloat:
    def __call__(self, image: Tensor) -> Any:
        return image.numpy().astype(np.float32)


def test_nothing_crosses_a_change_of_type() -> None:
    """But what is known to commute with it."""
    assert find_moves([Roll(), ToFloat(), _Cut()], inputs()) == [] and _Cut.seen
    real = library(type("ToTensor", (ToFloat,), {}))()
    assert (2, 0) in find_moves([Roll(), real, library(type("CenterCrop", (_Cut,), {}))()], inputs())


class _Cut:
    seen: list[str] = []

    def __call__(self, image: Any) -> Any:
        self.seen.append(type(image).__name__)
        return image[..., :5, :5]


class Images(Dataset[Tensor]):
    def __init__(self, *transforms: Any) -> None:
        self.transform = Compose(*transforms)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        made: Tensor = self.transform(image(index, 64, 64))
        return made


def test_moves_are_found_timed_and_checked() -> None:
    loader: Any = DataLoader(Images(Roll(), Grain(), Half()), 4)

    def run() -> Any:
        told: list[dict[str, Any]] = []
        keeper.run(Request("orders", 0.5), loader, lambda found: told.append(asdict(found)))
        given = RateRequest("torch", 0, order=(0, [2, 0, 1]))
        made = next(iter(loaders.rebuild(loader, given)))
        names = [type(one).__name__ for one in loader.dataset.transform.transforms]
        return told[-1], list(made.shape), names

    found, shape, names = in_a_fork(run)
    [move] = found["moves"]
    assert move["names"] == ["Half", "Roll", "Grain"] == names
    assert move["before"] > 0 and move["after"] > 0 and move["samples"] >= 4
    assert shape == [4, 3, 32, 32]


def test_answer_names_effect_of_an_order() -> None:
    move = {"exact": True, "equal": True, "alike": True, "tried": 63, "error": "", "draws": True,
            "samples": 16, "chain": 0, "order": [1, 0], "name": "Crop", "names": ["Crop", "Blur"],
            "over": ["Blur"], "earlier": True, "before": 0.01, "after": 0.004}  # fmt: skip
    other = {**move, "exact": False, "equal": False, "draws": False, "name": "Scale"}
    shapes = {**other, "alike": False, "name": "Bad"}
    found = whole(orders={"moves": [move, other, shapes], "failed": []})
    said = report.answer(found)
    assert "Crop before Blur: predicted 400 samples/s (2.00 times)" in said
    assert "data exact: known to commute, and equal in 63 tries" in said
    assert "numbers, which come in another order" in said and "order: Crop, Blur" in said
    [change] = [c for c in candidates(Facts(found))[0] if c.what == "Scale before Blur"]
    assert change.data.startswith("changed: verified to run")
    assert any("Bad before Blur was left out: it gives other shapes" in note for note in found.notes)
    assert "<h2>Orders of transforms</h2>" in page(found)


def torchvision(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A version for another torch does as well: transforms run none of its native operators."""
    monkeypatch.syspath_prepend(str(Path(sys.prefix) / "torchvision"))  # `make libraries`
    if importlib.util.find_spec("torchvision") is None:
        pytest.importorskip("torchvision", exc_type=ImportError)
    with contextlib.suppress(RuntimeError):
        return importlib.import_module("torchvision.transforms")
    for name in ("nms", "qnms"):
        boxes = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(f"torchvision::{name}", boxes)
    return importlib.import_module("torchvision.transforms")


def test_torchvisions_own_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    transforms = torchvision(monkeypatch)
    image_ = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3)).astype(np.uint8)
    given: list[Given] = [((image_.fromarray(pixels),), {})]
    names = orders.FLIPS | orders.CROPS | orders.PIXELS
    assert all(hasattr(transforms, name) for name in names)
    chain = [transforms.RandomHorizontalFlip(), transforms.ToTensor(),
             transforms.Normalize([0.5] * 3, [0.2] * 3), transforms.RandomCrop(24)]  # fmt: skip
    assert (3, 1) in find_moves(chain, given)
    found = examine_move(chain, given, 3, 1)
    assert found.exact and not found.draws
    pecan = [transforms.RandomHorizontalFlip(), transforms.RandomRotation(20),
             transforms.ColorJitter(0.4, 0.4), transforms.Resize((16, 16)), transforms.ToTensor()]  # fmt: skip
    assert (3, 0) in find_moves(pecan, given)
    found = examine_move(pecan, given, 3, 0)
    assert found.alike and not found.equal and not found.exact
