"""Which lists of files are found in a dataset, and when their sizes are looked up."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

import minato
from minato import time_limits
from minato.iterators import dataset_hints as file_sizes
from minato.iterators.loader_memo import memo_of
from minato.iterators.dataset_hints import FileSizes, size_of

from .parts import Engine, Loader, planner_of

SIZE, BATCH = 12, 4


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """File i has 1000 + i bytes."""
    for i in range(SIZE):
        (tmp_path / f"{i}.bin").write_bytes(bytes(1000 + i))
    return [str(tmp_path / f"{i}.bin") for i in range(SIZE)]


class Listed(Dataset[Any]):
    """Samples are the lengths of the files in an attribute."""

    def __init__(self, listed: Any, files: list[str]) -> None:
        self.listed, self._files = listed, tuple(files[:1])  # one that is too short to be a list

    def __len__(self) -> int:
        return len(self.listed)

    def __getitem__(self, index: int) -> int:
        return index


def dicts(files: list[str]) -> Any:
    return [{"image": f, "id": i, "label": f} for i, f in enumerate(files)]


@pytest.mark.parametrize(("make", "times"), [
    (lambda files: files, 1), (tuple, 1), (lambda files: [Path(f) for f in files], 1),
    (np.array, 1), (lambda files: np.array(files, object), 1),
    (lambda files: [(f, 3) for f in files], 1), (lambda files: [("label", f, f) for f in files], 2),
    (dicts, 2),
], ids=["list", "tuple", "paths", "array", "objects", "pairs", "triples", "dicts"])  # fmt: skip
def test_sizes_are_found_in_lists(make: Any, times: int, files: list[str]) -> None:
    size = size_of(Listed(make(files), files))
    assert size is not None and [size(i) for i in range(SIZE)] == [
        times * (1000 + i) for i in range(SIZE)]


@pytest.mark.parametrize("listed", [
    [], ["cat", "dog"], [""], ["\0"], [("cat", 3)], [{"text": "a"}], list(range(5)), "text",
    [["some", "text"] * 99], np.zeros(5), np.array([["a"]]), [None, 1], ["/"], [object()],
], ids=["empty", "texts", "blank", "nul", "pairs", "dicts", "numbers", "text", "words", "array",
        "matrix", "none", "folder", "objects"])  # fmt: skip
def test_lists_without_files_are_left_alone(listed: Any) -> None:
    assert size_of(Listed(listed, [])) is None


def test_two_lists_of_files_are_added(files: list[str]) -> None:
    data: Any = Listed(files, files)
    data.masks, data.same = [*files[1:], files[0]], data.listed  # the last one counts once
    size = size_of(data)
    assert size is not None and size(0) == 1000 + 1001


def test_subsets_and_concatenations_are_looked_into(files: list[str]) -> None:
    whole = Listed(files, files)
    subset = Subset(Subset(whole, range(2, SIZE)), [1, 3])
    size = size_of(subset)
    assert size is not None and [size(0), size(1)] == [1003, 1005]
    both = size_of(ConcatDataset([Listed([1, 2], []), whole]))
    assert both is not None and [both(i) for i in (0, 1, 2, 5)] == [0, 0, 1000, 1003]
    assert size_of(ConcatDataset([Listed([1, 2], [])])) is None


def test_wrapped_dataset_of_same_length_is_looked_into(files: list[str]) -> None:
    class Wraps(Dataset[Any]):
        def __init__(self, inner: Any, length: int) -> None:
            self.inner, self.length = inner, length

        def __len__(self) -> int:
            return self.length

    size = size_of(Wraps(Subset(Listed(files, files), [4, 2]), 2))
    assert size is not None and size(0) == 1004
    assert size_of(Wraps(Listed(files, files), SIZE + 1)) is None
    itself = Wraps(None, 3)
    itself.inner = itself
    assert size_of(itself) is None


def look_up(sizes: FileSizes, batch: Any) -> None:
    sizes.look_up(batch)
    wait()


def wait() -> None:
    """Until all is looked up that was asked for."""
    for thread in threading.enumerate():
        if thread.name == "minato-file-sizes":
            thread.join()


def epochs(data: Any, count: int = 1, **options: Any) -> Any:
    loader = minato.DataLoader(data, BATCH, num_workers=1, **options)
    for _ in range(count):
        list(loader)
        wait()
    return loader


def test_every_file_is_looked_up_once(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(file_sizes, "FIRST_NS", 10**12)
    monkeypatch.setattr(file_sizes, "_size", lambda path: asked.append(path) or 1000)
    loader = epochs(Listed(files, files), 3, shuffle=True)
    assert sorted(asked) == sorted(files)
    assert loader.stats()["cost"]["sized"] == SIZE


def test_dataset_with_hints_is_not_looked_into(files: list[str]) -> None:
    kind = type("Hinted", (Listed,), {"cost_hint": lambda _, index: 1.0})
    cost = epochs(kind(files, files)).stats()["cost"]
    assert cost["hinted"] == SIZE and cost["sized"] == 0


def test_files_that_vanish_leave_their_samples_unknown(
    files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_sizes, "FIRST_NS", 10**12)
    for path in files[3:6]:
        os.unlink(path)
    assert epochs(Listed(files, files), 2).stats()["cost"]["sized"] == SIZE - 3


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    now = [0]
    monkeypatch.setattr(time_limits.time, "perf_counter_ns", lambda: now[0])
    yield now


def test_slow_storage_ends_looking_up_within_batch(
    files: list[str], clock: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(_path: str) -> int:
        clock[0] += file_sizes.FILES_FIRST_NS
        return 1000

    monkeypatch.setattr(file_sizes, "_size", slow)
    memo = memo_of(loader := Loader(SIZE))
    sizes = FileSizes(Listed(files, files), memo)
    look_up(sizes, list(range(SIZE)))
    assert sum(memo.sized) == 2  # the second one ended it
    look_up(sizes, list(range(SIZE)))
    assert sum(memo.sized) == 2
    clock[0] = round(1.25 * file_sizes.FILES_FIRST_NS / file_sizes.SHARE)  # allows another
    look_up(sizes, list(range(SIZE)))
    assert list(memo.sized) == [1] * 3 + [0] * (SIZE - 3)
    assert loader is not None


def test_a_file_that_does_not_answer_holds_up_no_batch(
    files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answers = threading.Event(), threading.Event()

    def hang(_path: Any) -> bool:
        asked.set()
        return not answers.wait(60)

    monkeypatch.setattr(file_sizes, "_is_file", hang)
    try:
        for batch in (loader := minato.DataLoader(Listed(files, files), BATCH, num_workers=1)):
            assert asked.wait(60) and len(batch) == BATCH
        assert loader.stats()["cost"]["sized"] == 0
    finally:
        answers.set()
        wait()


def test_sizes_stay_unknown_if_no_thread_starts(
    files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "minato-file-sizes":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert epochs(Listed(files, files)).stats()["cost"]["sized"] == 0


def test_planner_looks_up_earliest_batches_first(
    files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_sizes, "FIRST_NS", 10**12)
    loader = Loader(SIZE)
    loader.inner.__dict__["dataset"] = Listed(files, files)
    planner = planner_of(loader, engine := Engine())
    wait()
    planned = [i for plan in engine.plans for i in plan.indices]
    memo = planner.position.memo
    assert planned and [i for i in range(SIZE) if memo.sized[i]] == planned
    assert all(plan.hints is None for plan in engine.plans)
    assert memo.costs.summary()["sized"] == len(planned)


def test_indices_outside_the_dataset_are_passed_over(
    files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_sizes, "FIRST_NS", 10**12)
    memo = memo_of(loader := Loader(SIZE))
    sizes = FileSizes(Listed(files, files), memo)
    look_up(sizes, ["text", -1, SIZE, 2**70, (1, 2), torch.tensor(3)])
    assert [i for i in range(SIZE) if memo.sized[i]] == [1, 3]
    assert loader is not None
