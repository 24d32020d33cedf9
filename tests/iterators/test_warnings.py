"""Deaths and failed samples: one warning each an epoch, and the same words in the log."""

from __future__ import annotations

import gc
import logging
import os
import signal
import warnings
from typing import Any

import pytest
import torch

import minato
from minato import _core

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SIZE = 32
READY = {"batching": "ready", "in_order": False}


class Fragile(torch.utils.data.Dataset[int]):
    """Some samples kill their worker, the first time; others cannot be made."""

    def __init__(self, deadly: tuple[int, ...] = (), bad: tuple[int, ...] = ()) -> None:
        context = torch.multiprocessing.get_context("fork")
        self.left = {index: context.Value("i", 1) for index in deadly}
        self.bad = bad

    def __len__(self) -> int:
        return SIZE

    def again(self) -> None:
        for left in self.left.values():
            left.value = 1

    def __getitem__(self, index: int) -> int:
        if index in self.left:
            with self.left[index].get_lock():
                dies, self.left[index].value = self.left[index].value, 0
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
        if index in self.bad:
            raise ValueError(f"file {index}.jpg is corrupt")
        return index


def said(run: Any, caplog: pytest.LogCaptureFixture, word: str) -> list[Any]:
    """Warnings with a word in them; the log has the same."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "minato"), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run()
    found = [warning for warning in seen if word in str(warning.message)]
    texts = [str(warning.message) for warning in found]
    assert [record.getMessage() for record in caplog.records if word in record.getMessage()] == texts
    return found


@pytest.mark.parametrize("options", [{}, READY, {"collate_fn": list}], ids=["rows", "ready", "whole"])
@pytest.mark.parametrize("persistent", [False, True], ids=["new", "persistent"])
def test_first_death_of_an_epoch_warns_once(
    options: dict[str, Any], persistent: bool, caplog: pytest.LogCaptureFixture
) -> None:
    data = Fragile(deadly=(5, 20))
    loader: Any = minato.DataLoader(
        data, 4, num_workers=2, persistent_workers=persistent, **options
    )

    def epoch() -> None:
        data.again()
        assert sorted(int(i) for batch in loader for i in batch) == list(range(SIZE))

    for _ in range(2):
        [warning] = said(epoch, caplog, "is killed by signal: Killed")
        text = str(warning.message)
        assert "pid " in text and "Its samples are retried." in text
        assert "memory" in text and warning.filename == __file__


def test_death_of_an_idle_worker_warns(caplog: pytest.LogCaptureFixture) -> None:
    loader = minato.DataLoader(Fragile(), 4, num_workers=2)

    def epoch() -> None:
        it: Any = iter(loader)
        batches = [next(it) for _ in range(SIZE // 4)]  # nothing is left to be made
        os.kill(it._workers[0].pid, signal.SIGKILL)
        while it._engine.health()["deaths"] == 0:
            it._engine.wait(None, 0.01)
        assert next(it, None) is None and len(batches) == SIZE // 4

    [warning] = said(epoch, caplog, "is killed by signal")
    assert "It was idle." in str(warning.message)


@pytest.mark.parametrize(
    "options", [{"max_retries": 0}, {"scheduling": "static"}], ids=["retries", "static"]
)
def test_death_that_raises_does_not_warn(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    loader = minato.DataLoader(Fragile(deadly=(5,)), 4, num_workers=2, **options)

    def epoch() -> None:
        with pytest.raises(minato.WorkerLost):
            list(loader)

    assert said(epoch, caplog, "worker") == []


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode, done", [("skip", "skipped"), ("replace", "replaced")])
def test_failed_samples_of_an_epoch_warn_once(
    workers: int, mode: str, done: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = Fragile(bad=(2, 3, 9, 14, 21, 22, 30))
    loader: Any = minato.DataLoader(
        data, 4, num_workers=workers, on_error=mode, max_errors=7, persistent_workers=workers > 0
    )
    for _ in range(2):
        [warning] = said(lambda: list(loader), caplog, "of this epoch failed")
        text = str(warning.message)
        assert f"7 samples of this epoch failed (7 {done})" in text
        assert "first indices: 2, 3, 9, 14, 21. " in text and warning.filename == __file__
        assert "The first error: ValueError: file 2.jpg is corrupt" in text


@pytest.mark.parametrize("workers", [0, 2])
def test_failed_samples_of_a_left_epoch_warn(
    workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    loader = minato.DataLoader(
        Fragile(bad=(2, 30)), 4, num_workers=workers, on_error="skip", max_errors=7
    )

    def left() -> None:
        it = iter(loader)
        next(it)
        del it

    [warning] = said(left, caplog, "of this epoch failed")
    assert "1 sample of this epoch failed (1 skipped); first indices: 2." in str(warning.message)


def test_too_many_failed_samples_only_raise(caplog: pytest.LogCaptureFixture) -> None:
    loader = minato.DataLoader(
        Fragile(bad=(2, 3)), 4, num_workers=2, on_error="skip", max_errors=1
    )

    def epoch() -> None:
        with pytest.raises(ValueError) as raised:
            list(loader)
        notes = [*getattr(raised.value, "__notes__", []), str(raised.value)]
        assert any("raise max_errors" in note for note in notes)

    assert said(epoch, caplog, "of this epoch failed") == []


def test_warnings_as_errors_leave_no_worker(caplog: pytest.LogCaptureFixture) -> None:
    data = Fragile(deadly=(5,))
    loader: Any = minato.DataLoader(data, 4, num_workers=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(UserWarning, match="is killed by signal"):
            list(loader)
    data.again()
    with pytest.warns(UserWarning, match="is killed by signal"):
        assert sorted(int(i) for batch in loader for i in batch) == list(range(SIZE))


class Exit(BaseException):
    pass


class Exits(Fragile):
    def __getitem__(self, index: int) -> int:
        raise Exit("no sample")


def test_dropped_loader_of_a_lost_worker_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    unraisable: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", unraisable.append)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        loader: Any = minato.DataLoader(Exits(), 4, num_workers=1)
        with pytest.raises(BaseException, match="exited unexpectedly|no sample"):
            list(loader)
        del loader
        gc.collect()
    assert unraisable == []


def test_deaths_are_counted_without_a_dict() -> None:
    engine = _core.Engine(1, 0, False)
    assert engine.deaths() == engine.health()["deaths"] == 0


class Hinting(Fragile):
    def cost_hint(self, index: int) -> float:
        raise KeyError(index)


class Epochs(Fragile):
    epoch = 0


def read_failing_hints() -> None:
    list(minato.DataLoader(Hinting(), 4, num_workers=1))


def read_one_epoch_again() -> None:
    data = Fragile()
    loader = minato.DataLoader(data, 4, sampler=minato.ElasticSampler(data, 1, 0))
    for _ in range(2):
        list(loader)


def read_with_threads() -> None:
    list(minato.DataLoader(Fragile(), 4, num_workers=1, worker_type="thread"))


def change_the_epoch() -> None:
    data = Epochs()
    loader = minato.DataLoader(data, 4, num_workers=1, persistent_workers=True)
    for data.epoch in range(2):
        list(loader)


def load_a_state_of_another_sampler() -> None:
    made: Any = minato.DataLoader(Fragile(), 4, shuffle=True, generator=torch.Generator())
    next(iter(made))
    loader = minato.DataLoader(Fragile(), 4)
    loader.load_state_dict(made.state_dict(), strict=False)
    list(loader)


@pytest.mark.parametrize("run", [
    read_failing_hints, read_one_epoch_again, read_with_threads, change_the_epoch,
    load_a_state_of_another_sampler,
])  # fmt: skip
def test_warning_names_a_line_of_the_program(run: Any) -> None:
    with pytest.warns(UserWarning) as seen:
        run()
    assert {warning.filename for warning in seen} == {__file__}
