"""on_error: samples that cannot be made are left out or replaced."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract.support import error_text
from torch.utils.data import Dataset, Subset, default_collate

import minato

SIZE = 40
BAD = (3, 8, 9, 10, 11, 27, 39)  # all of a batch of four among them


class Broken(Dataset):
    """Some samples cannot be made."""

    def __init__(self, bad: Any = BAD, size: int = SIZE) -> None:
        self.bad, self.size = frozenset(bad), size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if int(index) in self.bad:
            raise ValueError(f"sample {index} is corrupt")
        return {"x": torch.full((3,), float(index)), "i": index, "noise": np.random.rand()}


class Odd(Broken):
    """Samples that do not travel as rows."""

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        return {**sample, "name": [f"s{index}"] * 2, "even": torch.zeros(1 + index % 2).sum()}


class Together(Broken):
    """Fetches whole batches."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [Broken.__getitem__(self, index) for index in indices]


def collate(samples: list[Any]) -> Any:
    return default_collate(samples)


def kinds() -> list[Any]:
    found = [
        pytest.param(dict(num_workers=workers, **more), id=f"{name}-{workers}")
        for name, more in {
            "balanced": {},
            "unseeded": {"seed_per_sample": False},
            "static": {"scheduling": "static"},
            "collate": {"collate_fn": collate},
            "any-order": {"in_order": False},
            "ready": {"in_order": False, "batching": "ready"},
            "ready-collate": {"in_order": False, "batching": "ready", "collate_fn": collate},
        }.items()
        for workers in ((1, 3) if name == "balanced" else (2,))
    ]
    found.append(pytest.param(dict(num_workers=0), id="inline"))
    found.append(pytest.param(dict(num_workers=0, seed_per_sample=True), id="inline-seeded"))
    return found


#: the kinds for samples that do not travel as rows, for whole batches and for a second mode
SOME = ("balanced-3", "static-2", "ready-2", "inline")


def kinds_and_datasets() -> list[Any]:
    return [
        pytest.param(*kind.values, dataset, id=f"{kind.id}-{dataset.__name__}")
        for kind in kinds() for dataset in (Broken, Odd, Together)
        if dataset is Broken or kind.id in SOME
    ]  # fmt: skip


def indices(batches: list[Any]) -> list[list[int]]:
    found = [batch["i"].tolist() for batch in batches]
    for batch in batches:
        assert batch["x"].tolist() == [[float(i)] * 3 for i in batch["i"].tolist()]
    return found


def same(found: list[list[int]], wanted: list[list[int]], kind: dict[str, Any]) -> bool:
    """Whether these are the expected batches: in any order where that is asked for, and for ready
    batches with any samples."""
    if "batching" in kind:
        return sorted(i for batch in found for i in batch) == sorted(i for b in wanted for i in b)
    return (sorted(found) if "in_order" in kind else found) == wanted


def expected(bad: Any = BAD, size: int = SIZE, batch: int = 4) -> list[list[int]]:
    chunks = [list(range(at, min(at + batch, size))) for at in range(0, size, batch)]
    return [left for chunk in chunks if (left := [i for i in chunk if i not in bad])]


@pytest.mark.parametrize("kind, dataset", kinds_and_datasets())
def test_skip_leaves_out_failed_samples(kind: dict[str, Any], dataset: type) -> None:
    """Batches are smaller by the failed samples, and empty ones are not delivered; twice, because
    later epochs know how samples travel."""
    loader = minato.DataLoader(
        dataset(), batch_size=4, on_error="skip", max_errors=len(BAD),
        persistent_workers=kind["num_workers"] > 0, **kind,
    )  # fmt: skip
    for epoch in range(2):
        found = indices(list(loader))
        assert same(found, expected(), kind)
        failed = loader.stats()["failed"]
        times = epoch + 1 if kind["num_workers"] else 1  # epochs of this iterator
        assert failed["left_out"] == len(BAD) * times and failed["replaced"] == 0
    assert sorted(index for index, *_ in failed["latest"][: len(BAD)]) == sorted(BAD)
    assert all(f"sample {i} is corrupt" in text and other is None for i, text, other in failed["latest"])
    assert loader.stats()["errors"] == 0


@pytest.mark.parametrize("kind, dataset", kinds_and_datasets())
def test_replace_substitutes_failed_samples(kind: dict[str, Any], dataset: type) -> None:
    """By the samples that come after them in their batch."""
    bad = (3, 8, 9, 27, 39)
    loader = minato.DataLoader(
        dataset(bad), batch_size=4, on_error="replace", max_errors=1.0,
        persistent_workers=kind["num_workers"] > 0, **kind,
    )  # fmt: skip
    instead = {3: 0, 8: 10, 9: 10, 27: 24, 39: 36}
    for _epoch in range(2):
        found = indices(list(loader))
        wanted = [[instead.get(i, i) for i in range(at, at + 4)] for at in range(0, SIZE, 4)]
        assert same(found, wanted, kind)
    latest = loader.stats()["failed"]["latest"]
    assert {index: other for index, _, other in latest} == instead
    assert loader.stats()["failed"]["replaced"] == (2 if kind["num_workers"] else 1) * len(bad)


@pytest.mark.parametrize("size", [None, 1, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_small_batches_are_replaced_from_others(size: int | None, shuffle: bool) -> None:
    """Of one sample, or of samples that all fail; also the first of the epoch. The same ones
    with any number of workers."""
    bad = (0, 1, 7, 20)
    seen = []
    for workers in (1, 3):
        torch.manual_seed(5)
        loader = minato.DataLoader(
            Broken(bad), batch_size=size, shuffle=shuffle, num_workers=workers,
            on_error="replace", max_errors=1.0,
        )  # fmt: skip
        found = [(batch["i"], batch["noise"]) for batch in loader]
        order = [int(i) for i, _ in found] if size is None else [n for i, _ in found for n in i.tolist()]
        assert len(order) == SIZE and not set(order) & set(bad)
        assert set(order) >= set(range(SIZE)) - set(bad)
        seen.append([(np.asarray(i).tolist(), np.asarray(n).tolist()) for i, n in found])
    assert seen[0] == seen[1]


def test_remaining_samples_do_not_depend_on_workers() -> None:
    """Random numbers of a sample depend on its place, also for a replacement."""
    for mode in ("skip", "replace"):
        seen = []
        for kind in ({"num_workers": 1}, {"num_workers": 4}, {"num_workers": 2, "collate_fn": collate},
                     {"num_workers": 0, "seed_per_sample": True}):  # fmt: skip
            torch.manual_seed(1)
            loader = minato.DataLoader(
                Broken((3, 8, 27)), batch_size=4, shuffle=True, on_error=mode, max_errors=9, **kind
            )
            seen.append([(b["i"].tolist(), b["noise"].tolist()) for b in loader])
        assert all(one == seen[0] for one in seen[1:])


@pytest.mark.parametrize("kind, mode", [
    pytest.param(*kind.values, mode, id=f"{kind.id}-{mode}")
    for kind in kinds() for mode in ("skip", "replace") if mode == "skip" or kind.id in SOME
])  # fmt: skip
def test_too_many_failures_raise_the_first(kind: dict[str, Any], mode: str) -> None:
    loader = minato.DataLoader(
        Broken((3, 21, 30)), batch_size=4, on_error=mode, max_errors=2, **kind
    )
    with pytest.raises(ValueError, match="sample (3|21|30) is corrupt") as caught:
        list(loader)
    notes = error_text(caught.value)
    assert "3 samples of this epoch failed, and max_errors=2 allows 2; this is the first" in notes
    assert "sample index" in notes
    assert loader.stats()["errors"] == 1
    strict = minato.DataLoader(Broken((3,)), batch_size=4, on_error=mode, max_errors=0, **kind)
    with pytest.raises(ValueError, match="sample 3 is corrupt"):
        list(strict)


def test_share_of_epoch_allows_one_failure() -> None:
    for bad, fine in (((5,), True), ((5, 6), False)):
        loader = minato.DataLoader(Broken(bad), batch_size=4, num_workers=1, on_error="skip")
        if fine:
            assert indices(list(loader)) == expected(bad)
        else:
            with pytest.raises(ValueError, match="is corrupt"):
                list(loader)


def test_errors_of_others_still_raise() -> None:
    """Errors of a collate_fn or a worker_init_fn: they belong to no sample."""

    def fails(_: Any) -> Any:
        raise KeyError("not a sample's")

    for options in ({"collate_fn": fails}, {"worker_init_fn": fails}):
        loader = minato.DataLoader(Broken(), batch_size=4, num_workers=1, on_error="skip", **options)
        with pytest.raises(KeyError, match="not a sample's"):
            list(loader)


@pytest.mark.parametrize("mode", ["skip", "replace"])
@pytest.mark.parametrize("stop", [1, 9])
def test_resume_goes_on_and_counts_on(mode: str, stop: int) -> None:
    def loader() -> Any:
        torch.manual_seed(3)
        return minato.DataLoader(
            Broken((3, 8, 27)), batch_size=4, shuffle=True, num_workers=2, on_error=mode, max_errors=3
        )

    whole = [(b["i"].tolist(), b["noise"].tolist()) for b in loader()]
    first = loader()
    iterator = iter(first)
    head = [next(iterator) for _ in range(stop)]
    state = first.state_dict()
    failed = first.stats()["failed"]["left_out"] + first.stats()["failed"]["replaced"]
    assert state["failed"] == failed
    del iterator
    second = loader()
    second.load_state_dict(state)
    tail = [(b["i"].tolist(), b["noise"].tolist()) for b in second]
    assert [(b["i"].tolist(), b["noise"].tolist()) for b in head] + tail == whole
    strict = loader()
    strict.max_errors = 2
    strict.load_state_dict(state)
    with pytest.raises(ValueError, match="is corrupt"):
        list(strict)


class Killing(Broken):
    """A worker that comes to sample 13 for the first time dies."""

    def __init__(self, flag: Path) -> None:
        super().__init__()
        self.flag = flag

    def __getitem__(self, index: int) -> Any:
        if index == 13:
            try:
                self.flag.unlink()
            except FileNotFoundError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.parametrize("options", [{}, {"collate_fn": collate}])
def test_a_death_among_errors(tmp_path: Path, options: dict[str, Any]) -> None:
    flag = tmp_path / "flag"
    flag.touch()
    loader = minato.DataLoader(
        Killing(flag), batch_size=4, num_workers=2, on_error="skip", max_errors=99, **options
    )
    assert indices(list(loader)) == expected()
    assert loader.stats()["retries"] >= 1


def test_options_that_make_no_sense() -> None:
    for options, words in (
        ({"on_error": "ignore"}, "'raise', 'skip' or 'replace'"),
        ({"max_errors": -1}, "max_errors"),
        ({"max_errors": 1.5}, "max_errors"),
        ({"max_errors": True}, "max_errors"),
        ({"max_errors": "1%"}, "max_errors"),
    ):
        with pytest.raises(ValueError, match=words):
            minato.DataLoader(Broken(), **options)

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(range(3))

    with pytest.raises(ValueError, match="on_error='skip' has no effect for an iterable dataset"):
        minato.DataLoader(Stream(), on_error="skip")


def test_stats_list_failed_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the trace, and from outside."""
    from minato.commands import top

    file = tmp_path / "trace.json"
    monkeypatch.setenv("MINATO_TRACE", str(file))
    loader = minato.DataLoader(
        Broken((3, 8)), batch_size=4, num_workers=1, on_error="replace", max_errors=9
    )
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    [seen] = top.snapshots(os.getpid())
    assert seen["failed"] == 2
    assert any("2 samples could not be made" in line for line in top.render(seen))
    del iterator
    text = file.read_text()
    assert text.count('"name":"replaced"') == 2 and '"index":8,"instead":9' in text


@pytest.mark.parametrize("size", [None, 1])
def test_replacement_is_the_same_for_every_worker_type(size: int | None) -> None:
    """Also for the first sample, and for batches that a resume skips."""
    seen = []
    for kind in ({"num_workers": 1}, {"num_workers": 2}, {"num_workers": 0},
                 {"num_workers": 0, "seed_per_sample": True},
                 {"num_workers": 2, "scheduling": "static"}):  # fmt: skip
        loader = minato.DataLoader(
            Broken((0, 6)), batch_size=size, on_error="replace", max_errors=5, **kind
        )
        seen.append([int(batch["i"]) for batch in loader])
        if "scheduling" not in kind:
            first, second = (minato.DataLoader(
                Broken((0, 6)), batch_size=size, on_error="replace", max_errors=5, **kind
            ) for _ in range(2))  # fmt: skip
            iterator = iter(first)
            for _ in range(6):
                next(iterator)
            state = first.state_dict()
            del iterator
            second.load_state_dict(state)
            assert [int(batch["i"]) for batch in second] == seen[0][6:]
    assert all(one == seen[0] for one in seen[1:])


class Columns(Broken):
    """Makes a batch that is no list of samples."""

    def __getitems__(self, indices: list[int]) -> Any:
        if set(indices) & self.bad:
            raise ValueError(f"{indices} is corrupt")
        return {"x": torch.tensor(indices)}


class OneTensor(Columns):
    def __getitems__(self, indices: list[int]) -> Any:
        return super().__getitems__(indices)["x"]


def as_it_is(batch: Any) -> Any:
    return batch


@pytest.mark.parametrize("mode", ["skip", "replace"])
@pytest.mark.parametrize("dataset", [Columns, OneTensor])
@pytest.mark.parametrize("workers", [0, 2])
def test_getitems_result_without_list_raises(
    workers: int, dataset: type, mode: str
) -> None:
    """Not even by its first sample, if that is the corrupt one."""
    for bad in (6, 4):
        loader = minato.DataLoader(
            dataset((bad,), 12), batch_size=4, num_workers=workers, collate_fn=as_it_is,
            on_error=mode, max_errors=5,
        )  # fmt: skip
        iterator = iter(loader)
        kind = type(next(iterator))
        with pytest.raises(ValueError, match="is corrupt"):
            next(iterator)
        assert type(next(iterator)) is kind
        assert loader.stats()["failed"]["left_out"] == 0


class Lists(Broken):
    """Is asked for lists of samples, one index each."""

    def __getitem__(self, index: Any) -> Any:
        if set(index) & self.bad:
            raise ValueError(f"{index} is corrupt")
        return torch.tensor(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_list_index_counts_as_one_index(workers: int) -> None:
    lists = [list(range(at, at + 3)) for at in range(0, 30, 3)]
    loader = minato.DataLoader(
        Lists((4,)), batch_size=None, sampler=lists, num_workers=workers,  # type: ignore
        on_error="replace", max_errors=5,
    )  # fmt: skip
    found = [batch.tolist() for batch in loader]
    assert found[1] in lists and [f for f in found if f != found[1]] == [
        one for one in lists if one != [3, 4, 5] and one != found[1]]  # fmt: skip
    [(index, _, other)] = loader.stats()["failed"]["latest"]
    assert index == [3, 4, 5] and other == found[1]


@pytest.mark.parametrize("mode", ["skip", "replace"])
@pytest.mark.parametrize("workers", [0, 2])
def test_list_index_of_subset_is_one_index(workers: int, mode: str) -> None:
    subset = Subset(Subset(Lists((14,)), list(range(10, 19))), list(range(9)))
    lists = [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    loader = minato.DataLoader(
        subset, batch_size=None, sampler=lists, num_workers=workers,  # type: ignore
        on_error=mode, max_errors=1,
    )  # fmt: skip
    first, last = [10, 11, 12], [16, 17, 18]
    found = [batch.tolist() for batch in loader]
    assert found[0] == first and found[-1] == last
    assert found[1:-1] in ([[]] if mode == "skip" else [[first], [last]])
    assert loader.stats()["failed"]["left_out"] == (mode == "skip")


@pytest.mark.parametrize("kind", kinds())
def test_replace_without_good_sample_raises_everywhere(kind: dict[str, Any]) -> None:
    loader = minato.DataLoader(
        Broken(range(SIZE)), batch_size=4, on_error="replace", max_errors=1.0, **kind
    )
    with pytest.raises(ValueError, match=r"sample \d+ is corrupt"):
        next(iter(loader))


@pytest.mark.parametrize("mode", ["raise", "skip", "replace"])
@pytest.mark.parametrize("scheduling", ["balanced", "static"])
def test_a_batch_of_nothing(mode: str, scheduling: str) -> None:
    class Batches:
        def __iter__(self) -> Any:
            return iter([[0, 2], [], [3]])

        def __len__(self) -> int:
            return 3

    loader = minato.DataLoader(
        Broken(()), batch_sampler=Batches(), collate_fn=len, num_workers=1,  # type: ignore
        on_error=mode, scheduling=scheduling,
    )  # fmt: skip
    assert list(loader) == [2, 0, 1]


def test_batches_of_sets_and_arrays_recover() -> None:
    """Sets, tuples and arrays of indices: the sample's own error, or a replacement."""
    for batch in ({1, 3, 5}, (1, 3, 5), np.array([1, 3, 5]), torch.tensor([1, 3, 5])):
        for mode, wanted in (("skip", [1, 5]), ("replace", [1, 5, 5])):
            loader = minato.DataLoader(
                Broken((3,)), batch_sampler=[batch], num_workers=1, on_error=mode,  # type: ignore
                collate_fn=lambda samples: [s["i"] for s in samples],
            )  # fmt: skip
            assert [[int(i) for i in found] for found in loader] == [wanted]


def test_max_errors_note_appears_once_per_error() -> None:
    loader = minato.DataLoader(
        Broken((3, 8, 12, 16)), batch_size=4, num_workers=1, on_error="skip", max_errors=1
    )
    iterator, notes = iter(loader), []
    while True:
        try:
            next(iterator)
        except StopIteration:
            break
        except ValueError as error:
            notes.append(error_text(error))
    assert len(notes) == 3 and all(one.count("of this epoch failed") == 1 for one in notes)


class Stumbles(list[list[int]]):
    """Batches; before the third the sampler raises once, and continues."""

    def __iter__(self) -> Any:
        return map(self._given, range(len(self)))

    def _given(self, number: int) -> list[int]:
        if number == 2:
            raise OSError("the list of samples cannot be read")
        return self[number]


def test_skipped_batch_before_sampler_error_counts_once() -> None:
    batches = Stumbles([[0, 1], [8, 9], [0, 0], [4, 5]])
    made = minato.DataLoader(Broken(), batch_sampler=batches, on_error="skip", max_errors=2)
    iterator = iter(made)
    assert next(iterator)["i"].tolist() == [0, 1]
    with pytest.raises(OSError, match="list of samples"):
        next(iterator)
    state = made.state_dict()
    assert (state["delivered"], state["delivered_beyond"]) == (2, [])
    assert [batch["i"].tolist() for batch in iterator] == [[4, 5]]


def drained(**options: Any) -> list[Any]:
    """What comes, and "error" in its place."""
    batches = Stumbles([[0, 1], [2, 4], [0, 0], [6, 8], [9, 11]])
    iterator = iter(minato.DataLoader(Broken(bad=()), batch_sampler=batches, **options))
    found: list[Any] = []
    while True:
        try:
            found.append(next(iterator)["i"].tolist())
        except StopIteration:
            return found
        except OSError:
            found.append("error")


@pytest.mark.parametrize("options", [
    dict(num_workers=0), dict(num_workers=1, prefetch_factor=1),
    dict(num_workers=1, prefetch_factor=1, scheduling="static"),
])  # fmt: skip
def test_sampler_error_loses_no_earlier_batch(options: dict[str, Any]) -> None:
    """Even though batches are drawn ahead because their samples might be needed."""
    found = drained(on_error="replace", **options)
    assert found == drained(**options)
    assert found[:3] == [[0, 1], [2, 4], "error"] or options["num_workers"]
