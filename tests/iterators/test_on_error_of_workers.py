"""on_error: samples that exit, that cannot be pickled, and that kill their workers."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import pytest
import torch

import minato

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

BAD = 5


class Bad(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """One sample is bad."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return self.bad() if index == BAD else index

    def bad(self) -> Any:
        raise NotImplementedError


class Exits(Bad):
    def bad(self) -> Any:
        sys.exit(3)


class Locks(Bad):
    def bad(self) -> Any:
        return threading.Lock()


class Together(Bad):
    """Makes whole batches."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class ExitsTogether(Together, Exits):
    pass


class LocksTogether(Together, Locks):
    pass


def kinds() -> list[Any]:
    found: dict[str, dict[str, Any]] = {
        "rows": {},
        "collate": {"collate_fn": list},
        "static": {"scheduling": "static", "collate_fn": list},
        "static-rows": {"scheduling": "static"},
        "ready": {"batching": "ready", "in_order": False},
        "ready-collate": {"batching": "ready", "in_order": False, "collate_fn": list},
        "thread": {"worker_type": "thread", "seed_per_sample": False},
        "thread-collate": {
            "worker_type": "thread", "seed_per_sample": False, "collate_fn": list
        },
        "single": {"batch_size": None},
    }  # fmt: skip
    return [pytest.param(options, id=name) for name, options in found.items()]


def epoch(data: Bad, on_error: str, options: dict[str, Any]) -> tuple[list[int], Any]:
    """The samples of an epoch, in order, and the loader."""
    loader = minato.DataLoader(
        data, **{"batch_size": 4, "num_workers": 2, "on_error": on_error, "max_errors": 1, **options}
    )  # fmt: skip
    found: list[int] = []
    for batch in loader:
        found += [int(n) for n in (batch if isinstance(batch, (list, torch.Tensor)) else [batch])]
    return sorted(found), loader


@pytest.mark.parametrize("on_error", ["skip", "replace"])
@pytest.mark.parametrize("kind", [Exits, Locks, ExitsTogether, LocksTogether])
@pytest.mark.parametrize("options", kinds())
def test_exiting_or_unpicklable_sample_counts_as_failed(
    options: dict[str, Any], kind: type[Bad], on_error: str
) -> None:
    found, loader = epoch(kind(), on_error, options)
    [(index, text, instead)] = loader.stats()["failed"]["latest"]
    assert index == BAD and ("sys.exit(3)" in text or "pickle" in text)
    assert (instead is None) == (on_error == "skip")
    others = [] if instead is None else [instead]
    assert found == sorted([n for n in range(16) if n != BAD] + others)
    assert loader.stats()["deaths"] == 0


def test_exiting_sample_past_max_errors_raises() -> None:
    with pytest.raises(RuntimeError, match=r"called sys.exit\(3\) in a worker"):
        epoch(Exits(), "skip", {"max_errors": 0})


def test_sample_that_exits_without_workers_ends_the_program() -> None:
    """A handler of a signal may have called it."""
    with pytest.raises(SystemExit):
        epoch(Exits(), "skip", {"num_workers": 0})


def test_exiting_sample_without_on_error_loses_worker() -> None:
    with pytest.raises(minato.WorkerLost, match="exit code 3"):
        epoch(Exits(), "raise", {"max_errors": 0.01, "max_retries": 0})


# ---- samples that kill their workers -----------------------------------------------------------


class Kills(Bad):
    def bad(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


class KillsTogether(Together, Kills):
    pass


class KillsBehindAnError(Kills):
    """The sample before the bad one raises."""

    def __getitem__(self, index: int) -> Any:
        if index == BAD - 1:
            raise ValueError("no such sample")
        return super().__getitem__(index)


class Noisy(Kills):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) + torch.rand((), dtype=torch.float64).item() / 2


PROCESSES: list[Any] = [
    pytest.param({}, id="rows"), pytest.param({"collate_fn": list}, id="collate"),
    pytest.param({"in_order": False}, id="any-order"),
    pytest.param({"batch_size": None}, id="single"),
    pytest.param({"prefetch_next_epoch": True, "persistent_workers": True}, id="next-epoch"),
]  # fmt: skip


@pytest.mark.parametrize("on_error", ["skip", "replace"])
@pytest.mark.parametrize("kind", [Kills, KillsTogether])
@pytest.mark.parametrize("options", PROCESSES)
def test_deadly_sample_counts_as_failed(
    options: dict[str, Any], kind: type[Bad], on_error: str
) -> None:
    found, loader = epoch(kind(), on_error, options)
    [(index, text, instead)] = loader.stats()["failed"]["latest"][:1]
    assert index == BAD and "sample index 5 of batch" in text and "Killed" in text
    others = [] if on_error == "skip" else [instead]
    assert found == sorted([n for n in range(16) if n != BAD] + others)


class KillsOfATensor(Kills):
    """Makes whole batches that are not lists of samples."""

    def __getitems__(self, indices: list[int]) -> Any:
        return torch.tensor([self[index] for index in indices])


def test_sample_of_indivisible_batch_that_kills_raises() -> None:
    with pytest.raises(minato.WorkerLost):
        epoch(KillsOfATensor(), "skip", {"collate_fn": list})


def test_deadly_sample_after_raising_sample_is_found() -> None:
    found, loader = epoch(KillsBehindAnError(), "skip", {"collate_fn": list, "max_errors": 2})
    assert [index for index, *_ in loader.stats()["failed"]["latest"]] == [BAD - 1, BAD]
    assert found == [n for n in range(16) if n not in (BAD - 1, BAD)]


def test_neighbours_of_deadly_sample_are_unchanged() -> None:
    def batches(bad: int, workers: int) -> list[float]:
        torch.manual_seed(3)
        data = Noisy()
        loader = minato.DataLoader(
            data, 4, num_workers=workers, on_error="skip", max_errors=1, collate_fn=list
        )
        return sum(loader, [])

    assert batches(BAD, 1) == batches(BAD, 3)


def test_sample_that_kills_past_max_errors_raises() -> None:
    with pytest.raises(minato.WorkerLost, match="sample index 5 of batch 1"):
        epoch(Kills(), "skip", {"max_errors": 0})


def test_collate_fn_that_kills_its_worker_still_raises() -> None:
    with pytest.raises(minato.WorkerLost):
        epoch(Bad0(), "skip", {"collate_fn": killed_by_collating})


class Bad0(Bad):
    def bad(self) -> Any:
        return BAD


def killed_by_collating(samples: list[int]) -> list[int]:
    if BAD in samples:
        os.kill(os.getpid(), signal.SIGKILL)
    return samples
