"""``device=`` from the dataset to the caller's stream, with a device that copies late."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract.support import Kind, await_batches, error_text, patiently, run_script, wait_for
from torch.utils.data import DistributedSampler

import minato
from minato import ops
from minato.device import copies
from minato.device import provider as providers

from .datasets import WIDTH, Rows, Stream, as_list
from .fake import SECONDS, Fake


def numbers(fake: Fake, batch: dict[str, Any]) -> list[int]:
    """The samples of a batch, as the caller's stream reads them."""
    large, labels = fake.read(batch["x"]), fake.read(batch["label"])
    assert fake.holds(batch["x"]) and fake.holds(batch["label"])
    rows, found = large.value(), labels.value().tolist()
    assert batch["name"] == [f"sample {n}" for n in found]
    assert rows.amin(dim=1).tolist() == found == rows.amax(dim=1).tolist()
    return [int(n) for n in found]


MODES: dict[str, dict[str, Any]] = {
    "balanced": {},
    "out of order": {"in_order": False},
    "ready": {"in_order": False, "batching": "ready"},
    "static": {"scheduling": "static"},
    "static out of order": {"scheduling": "static", "in_order": False},
    "persistent": {"persistent_workers": True},
    "next epoch": {"persistent_workers": True, "prefetch_next_epoch": True},
    "collate_fn": {"collate_fn": as_list},
    "autoscale": {"autoscale": (1, 3)},
    "no workers": {"num_workers": 0, "prefetch_factor": None},
    "seeded without workers": {
        "num_workers": 0, "prefetch_factor": None, "seed_per_sample": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_delivers_every_sample_once(fake: Fake, mode: str) -> None:
    fake.way = way = "pinned" if mode == "balanced" else "direct"
    options = {"num_workers": 2, "prefetch_factor": 4, "device": "cuda", **MODES[mode]}
    loader = minato.DataLoader(Rows(), batch_size=3, **options)
    for _ in range(2):
        got = []
        for batch in loader:
            got += numbers(fake, batch)
            del batch
        assert (got if options.get("in_order", True) else sorted(got)) == list(range(24))
    found = loader.stats()["device"]
    assert found["batches"] >= 8 and found["through"][way] == found["bytes"] > 0


@pytest.mark.parametrize("workers", [0, 2])
def test_iterable_datasets(fake: Fake, workers: int) -> None:
    loader = minato.DataLoader(Stream(), batch_size=3, num_workers=workers, device="cuda:1")
    got = [number for batch in loader for number in numbers(fake, batch)]
    assert sorted(got) == list(range(24))


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
def test_pin_memory_changes_nothing(fake: Fake) -> None:
    for workers in (0, 1):
        loader = minato.DataLoader(Rows(4), num_workers=workers, pin_memory=True, device="cuda")
        assert [n for batch in loader for n in numbers(fake, batch)] == [0, 1, 2, 3]


def test_native_workers(fake: Fake, tmp_path: Path) -> None:
    fake.way = "direct"
    files = []
    for number in range(6):
        files.append(tmp_path / f"{number}.npy")
        np.save(files[-1], np.full((1, 32, 32, 32), number, np.float32))
    data = ops.VolumeDataset(files, ops.Pipeline([ops.ReadNpy(), ops.RandCrop(32)]))
    loader = minato.DataLoader(data, num_workers=2, worker_type="native", device="cuda")
    got = []
    for batch in loader:
        part = batch[0] if isinstance(batch, (list, tuple)) else batch
        got.append(float(fake.values(part).mean()))
    assert got == list(range(6))


def late(fake: Fake, way: str) -> None:
    """No copy is made before most batches were delivered, and those exceed the arena's
    memory: workers write to all free memory meanwhile."""
    fake.way = way
    loader = minato.DataLoader(Rows(80), batch_size=4, num_workers=2, prefetch_factor=4,
                               memory_limit="2MiB", device="cuda")  # fmt: skip
    iterator = iter(loader)
    with fake.held():
        batches = itertools.islice(iterator, 18)
        reads = [fake.read(batch["x"]) for batch in batches]
    found = [read.value() for read in reads]
    first = [rows.amin(dim=1).tolist() for rows in found]
    assert first == [rows.amax(dim=1).tolist() for rows in found]
    assert sum(first, []) == list(range(72))


def test_arena_memory_is_not_reused_before_read(fake: Fake) -> None:
    late(fake, "direct")


def test_an_early_release_is_found(fake: Fake) -> None:
    fake.plant = lambda verb: verb == "passed"
    with pytest.raises(AssertionError):
        late(fake, "direct")


@pytest.mark.parametrize("scheduling", ["balanced", "static"])
def test_next_batch_is_copied_ahead(fake: Fake, scheduling: str) -> None:
    loader = minato.DataLoader(Rows(), num_workers=1, prefetch_factor=4, device="cuda",
                               scheduling=scheduling)  # fmt: skip
    iterator = iter(loader)
    await_batches(iterator, 4)
    assert not fake.copied
    first = next(iterator)
    large = [WIDTH * 4] * 2
    assert wait_for(lambda: [n for n in fake.copied if n > 1000] == large, SECONDS)
    assert threading.main_thread() not in fake.threads and len(fake.threads) == 1
    assert fake.entered == list(fake.threads)
    assert numbers(fake, first) == [0]


def test_the_caller_does_not_wait_for_copies(fake: Fake) -> None:
    iterator = iter(minato.DataLoader(Rows(), num_workers=1, device="cuda"))
    with fake.held():
        first, second = next(iterator), next(iterator)
        reads = [fake.read(first["x"]), fake.read(second["x"])]
        assert not any(read.done.is_set() for read in reads)
    assert [read.value()[0, 0].item() for read in reads] == [0.0, 1.0]


def test_state_on_device_counts_delivered_batches(fake: Fake) -> None:
    loader = minato.DataLoader(Rows(), batch_size=2, num_workers=2, device="cuda")
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    assert state["delivered"] == 3
    del iterator
    again = minato.DataLoader(Rows(), batch_size=2, num_workers=1, device="cuda")
    again.load_state_dict(state)
    got = [number for batch in again for number in numbers(fake, batch)]
    assert got == list(range(6, 24))


class Fails(Rows):
    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 5:
            raise ValueError("not this one")
        return super().__getitem__(index)


@pytest.mark.parametrize("options", [
    {"num_workers": 2}, {"num_workers": 2, "scheduling": "static"}, {"num_workers": 0},
], ids=str)  # fmt: skip
def test_error_keeps_its_place_and_loading_continues(fake: Fake, options: Any) -> None:
    iterator = iter(minato.DataLoader(Fails(), device="cuda", **options))
    for number in range(5):
        assert numbers(fake, next(iterator)) == [number]
    with pytest.raises(ValueError, match="not this one"):
        next(iterator)
    got = [number for batch in iterator for number in numbers(fake, batch)]
    assert got == list(range(6, 24))


def test_a_copy_that_fails_names_its_batch(fake: Fake) -> None:
    def fail(tensor: torch.Tensor) -> None:
        if tensor.numel() == WIDTH and float(tensor[0, 0]) == 2.0:
            raise RuntimeError("the link is down")

    fake.before = fail
    loader = minato.DataLoader(Rows(), num_workers=2, device="cuda")
    iterator = iter(loader)
    assert [numbers(fake, next(iterator)) for _ in range(2)] == [[0], [1]]
    with pytest.raises(RuntimeError, match="the link is down") as caught:
        next(iterator)
    assert "while it was copied to cuda:1" in str(caught.value)
    assert "minato: batch 2, sample indices [2]" in error_text(caught.value)
    assert numbers(fake, next(iterator)) == [3]
    assert loader.stats()["errors"] == 1


class Stays:
    """Part of a batch that cannot be moved."""

    def to(self, device: Any) -> Any:
        raise OSError(f"not to {device}")


def stays(samples: list[Any]) -> Any:
    batch = as_list(samples)
    return {**batch, "other": Stays()} if batch["label"][0] == 2 else batch


@pytest.mark.parametrize("scheduling", ["balanced", "static"])
def test_object_that_fails_to_move_fails_in_turn(fake: Fake, scheduling: str) -> None:
    fake.move = lambda data, waits: data.to("there")  # type: ignore[method-assign]
    loader = minato.DataLoader(Rows(5), num_workers=2, collate_fn=stays, device="cuda",
                               scheduling=scheduling)  # fmt: skip
    iterator = iter(loader)
    assert [numbers(fake, next(iterator)) for _ in range(2)] == [[0], [1]]
    with pytest.raises(OSError, match="not to there") as caught:
        next(iterator)
    assert "minato: batch 2, sample indices [2]" in error_text(caught.value)
    assert [n for batch in iterator for n in numbers(fake, batch)] == [3, 4]


def test_device_with_memory_for_one_batch(fake: Fake) -> None:
    fake.room = WIDTH * 4 + 64  # with the label
    loader = minato.DataLoader(Rows(), num_workers=2, prefetch_factor=4, device="cuda")
    iterator = iter(loader)
    await_batches(iterator, 4)
    got: list[int] = []
    for batch in iterator:
        got += numbers(fake, batch)
        del batch
        gc.collect()
    assert got == list(range(24))
    found = loader.stats()["device"]
    assert found["refused"] >= 1 and found["depth"] == 1


def test_batch_larger_than_device_memory_raises(fake: Fake) -> None:
    fake.room = 100
    iterator = iter(minato.DataLoader(Rows(), num_workers=1, device="cuda"))
    with pytest.raises(RuntimeError, match="not enough free memory besides what the program keeps"):
        next(iterator)


def test_pageable_copies_are_counted(fake: Fake) -> None:
    fake.way = "pageable"
    loader = minato.DataLoader(Rows(), num_workers=1, device="cuda")
    assert [n for batch in loader for n in numbers(fake, batch)] == list(range(24))
    found = loader.stats()["device"]
    assert found["through"]["pageable"] == found["bytes"]


# ---- ends ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduling", ["balanced", "static"])
def test_abandoned_epoch_does_not_affect_the_next(fake: Fake, scheduling: str) -> None:
    loader = minato.DataLoader(Rows(), num_workers=2, prefetch_factor=3, device="cuda",
                               persistent_workers=True, scheduling=scheduling)  # fmt: skip
    fake.way = "direct"
    for left_after in (1, 4, 2):
        iterator = iter(loader)
        with fake.held():
            reads = [fake.read(next(iterator)["x"]) for _ in range(left_after)]
        for number, read in enumerate(reads):
            assert read.value()[0, 0].item() == number
    assert [n for batch in loader for n in numbers(fake, batch)] == list(range(24))
    assert len(fake.threads) == 1


def test_a_dropped_iterator_ends_its_thread(fake: Fake) -> None:
    iterator = iter(minato.DataLoader(Rows(), num_workers=1, device="cuda"))
    next(iterator)
    (thread,) = fake.threads
    del iterator
    gc.collect()
    assert wait_for(lambda: not thread.is_alive())


def test_copies_that_never_end_keep_their_memory(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minato.device.send_ahead.STAGE_SECONDS", 0.05)
    fake.way = "direct"
    loader = minato.DataLoader(Rows(), num_workers=1, device="cuda")
    iterator = iter(loader)
    with fake.held():
        read = fake.read(next(iterator)["x"])
        del iterator
        gc.collect()
        assert wait_for(lambda: copies.sweep() == 1)
    assert read.value()[0, 0].item() == 0.0
    assert wait_for(lambda: copies.sweep() == 0)


def test_timeout_counts_for_copies_too(fake: Fake) -> None:
    go = threading.Event()
    fake.before = lambda tensor: go.wait(SECONDS) and None
    iterator = iter(minato.DataLoader(Rows(), num_workers=1, device="cuda", timeout=1))
    try:
        with pytest.raises(RuntimeError, match="^DataLoader timed out after 1 seconds$"):
            next(iterator)
    finally:
        go.set()
    assert [n for batch in patiently(iterator) for n in numbers(fake, batch)] == list(range(24))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_dead_copy_thread_is_reported(fake: Fake) -> None:
    def leave(tensor: torch.Tensor) -> None:
        raise SystemExit

    fake.before = leave
    iterator = iter(minato.DataLoader(Rows(), num_workers=1, device="cuda"))
    with pytest.raises(RuntimeError, match="copies batches to the device exited unexpectedly"):
        next(iterator)


class Kills(Rows):
    """Its third sample kills the worker that makes it, the first time."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.mark = mark

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 3 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_killed_worker_with_copies_under_way(fake: Fake, tmp_path: Path) -> None:
    fake.way = "direct"
    loader = minato.DataLoader(Kills(tmp_path / "mark"), num_workers=2, device="cuda")
    iterator = iter(loader)
    with fake.held():
        reads = [fake.read(next(iterator)["x"]) for _ in range(4)]
    assert [read.value()[0, 0].item() for read in reads] == [0, 1, 2, 3]
    assert [n for batch in iterator for n in numbers(fake, batch)] == list(range(4, 24))
    assert loader.stats()["deaths"] == 1


def test_a_fork_in_the_middle_of_a_copy(fake: Fake) -> None:
    inside, began, go = threading.Lock(), threading.Event(), threading.Event()

    def hold(tensor: torch.Tensor) -> None:
        with inside:
            began.set()
            go.wait(SECONDS)

    fake.before = hold
    iterator = iter(minato.DataLoader(Rows(), num_workers=1, device="cuda", timeout=1))
    with pytest.raises(RuntimeError, match="timed out"):
        next(iterator)
    assert began.wait(SECONDS)
    timer = threading.Timer(0.05, go.set)
    timer.start()
    pid = os.fork()
    if pid == 0:
        os._exit(int(inside.locked()))
    timer.join()
    assert os.waitpid(pid, 0)[1] == 0
    assert [n for batch in patiently(iterator) for n in numbers(fake, batch)] == list(range(24))


SCRIPT = """
import sys
import torch
from device.fake import Fake
from device.datasets import Rows
from minato.device import provider
fake = Fake()
provider._makers["cuda"] = lambda named: fake
made = make(Rows(100), num_workers={workers}, device="cuda", persistent_workers={workers} > 0)
iterator = iter(made)
next(iterator)
fake.stream().gate.clear()
kept = next(iterator)
{end}
"""


def test_exit_with_copies_under_way(tmp_path: Path) -> None:
    end = "import threading; threading.Timer(0.2, fake.stream().gate.set).start()"
    outcome = run_script(Kind("minato"), SCRIPT.format(workers=0, end=end), tmp_path)
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (0, "", ""), outcome
    assert not outcome.left


def test_exception_exits_program_during_copies(tmp_path: Path) -> None:
    end = (
        "import threading; threading.Timer(0.2, fake.stream().gate.set).start()\n"
        "raise ValueError('mine')\n"
    )
    outcome = run_script(Kind("minato"), SCRIPT.format(workers=2, end=end), tmp_path)
    said = outcome.stderr.splitlines()
    assert outcome.returncode == 1 and said[0].startswith("Traceback"), outcome
    assert said[-1] == "ValueError: mine" and not outcome.stdout and not outcome.left


def test_exit_with_copies_that_never_end(tmp_path: Path) -> None:
    end = "from minato.device import copies, send_ahead\nsend_ahead.STAGE_SECONDS = copies.COPIES_SECONDS = 0.2\n"
    outcome = run_script(Kind("minato"), SCRIPT.format(workers=2, end=end), tmp_path)
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (0, "", ""), outcome
    assert not outcome.left


def test_ranks_load_to_their_own_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a program under torchrun writes it, both ranks in one process."""
    fakes = {f"cuda:{rank}": Fake(f"cuda:{rank}") for rank in range(2)}
    monkeypatch.setitem(providers._makers, "cuda", lambda named: fakes[str(named)])
    got = []
    try:
        for rank, fake in enumerate(fakes.values()):
            sampler = DistributedSampler(Rows(), num_replicas=2, rank=rank, shuffle=False)
            loader = minato.DataLoader(Rows(), batch_size=3, num_workers=1, sampler=sampler,
                                       pin_memory=True, device=f"cuda:{rank}")  # fmt: skip
            got.append([n for batch in loader for n in numbers(fake, batch)])
            assert loader.stats()["device"]["device"] == f"cuda:{rank}"
    finally:
        gc.collect()
        for fake in fakes.values():
            fake.close()
    assert got == [list(range(0, 24, 2)), list(range(1, 24, 2))]


# ---- invalid combinations, and their errors --------------------------------------------------


@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:x", "", True, 1.5, object()])
def test_invalid_device_is_refused(device: Any) -> None:
    with pytest.raises(ValueError, match="device"):
        minato.DataLoader(Rows(), device=device)


@pytest.mark.parametrize("workers", [0, 1])
def test_missing_device_is_refused(workers: int) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is an accelerator")
    loader = minato.DataLoader(Rows(), num_workers=workers, device="cuda")  # made elsewhere
    with pytest.raises(ValueError, match="device='cuda' does not exist.*minato info"):
        iter(loader)


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_nothing_is_copied_to_the_cpu(fake: Fake, device: Any) -> None:
    loader = minato.DataLoader(Rows(), num_workers=1, device=device)
    iterator = iter(loader)
    assert next(iterator)["x"].device.type == "cpu" and iterator._pinner is None
    assert not fake.copied and loader.stats()["device"] is None


def test_device_with_torch_workers_is_refused(fake: Fake) -> None:
    pipe = torch.utils.data.datapipes.map.SequenceWrapper([1, 2])
    with pytest.raises(ValueError, match="device='cuda' has no effect .*DataPipes"):
        minato.DataLoader(pipe, num_workers=1, device="cuda")


def test_device_with_torch_workers_is_refused_at_iter(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minato.loader.refused", lambda: "there is no memfd")
    loader = minato.DataLoader(Rows(), num_workers=1, device="cuda")
    with pytest.raises(ValueError, match="there is no memfd. Leave out device"):
        iter(loader)


def test_workers_do_not_see_the_device(fake: Fake) -> None:
    class Looks(Rows):
        def __getitem__(self, index: int) -> Any:
            return torch.tensor([len(fake.threads), int(torch.cuda.is_initialized())])

    loader = minato.DataLoader(Looks(), num_workers=2, device="cuda")
    assert all(fake.values(batch).tolist() == [[0, 0]] for batch in loader)


def test_statistics_outlive_the_iterator(fake: Fake) -> None:
    loader = minato.DataLoader(Rows(), num_workers=1, device="cuda:1")
    for batch in loader:
        numbers(fake, batch)
    found = loader.stats()["device"]
    assert found["device"] == "cuda:1" and found["batches"] == 24 and found["copies"] == 48
    assert found["bytes"] == 24 * (WIDTH * 4 + 8)


def test_the_verdict_names_the_copy(fake: Fake) -> None:
    fake.seconds = lambda begin, end: 10.0  # type: ignore[method-assign]
    loader = minato.DataLoader(Rows(), num_workers=1, device="cuda")
    for batch in loader:
        numbers(fake, batch)
        time.sleep(0.001)
    said = loader.stats()["verdict"]
    assert "cuda:1 waits" in said and "for copies" in said and "Fewer bytes" in said
