"""Rows in the arena as the source of copies, with a driver that locks pages or refuses to."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract.support import wait_for
from torch.utils.data import Dataset

import minato
from minato.device import provider

from .datasets import WIDTH, Rows
from .fake import Fake, Locker
from .test_loader import late, numbers

CHUNK = 16 << 20


@pytest.fixture
def locker(fake: Fake) -> Locker:
    made = fake.locker = Locker(fake)
    return made


def ended(locker: Locker) -> bool:
    """All that was locked is unlocked, once nothing is read any more."""
    gc.collect()
    return wait_for(lambda: not locker.locked and locker.locks == locker.unlocks)


def told(loader: Any) -> dict[str, Any]:
    found: dict[str, Any] = loader.stats()["device"]
    return found


OPTIONS: dict[str, dict[str, Any]] = {
    "balanced": {},
    "ready": {"in_order": False, "batching": "ready"},
    "next epoch": {"persistent_workers": True, "prefetch_next_epoch": True},
}


@pytest.mark.parametrize("mode", OPTIONS)
def test_rows_are_copied_without_host_copy(
    fake: Fake, locker: Locker, mode: str
) -> None:
    loader = minato.DataLoader(Rows(), batch_size=3, num_workers=2, prefetch_factor=4,
                               device="cuda", **OPTIONS[mode])  # fmt: skip
    for _ in range(2):
        assert sorted(n for b in loader for n in numbers(fake, b)) == list(range(24))
    found = told(loader)
    # the first samples establish the layout, and travel otherwise
    assert found["through"]["locked"] >= 0.4 * found["bytes"]
    assert found["through"]["pinned"] == found["bytes"] - found["through"]["locked"]
    assert found["locked"] >= CHUNK and found["lock_error"] == 0
    assert locker.locks <= 4 and locker.inside == 0  # once a chunk, and two engines
    del loader
    assert ended(locker)


def test_memory_is_not_reused_before_it_was_read(fake: Fake, locker: Locker) -> None:
    late(fake, "pinned")
    assert locker.locks and ended(locker)


def test_an_early_release_is_found(fake: Fake, locker: Locker) -> None:
    fake.plant = lambda verb: verb == "passed"
    with pytest.raises(AssertionError):
        late(fake, "pinned")


def test_a_driver_that_refuses(fake: Fake, locker: Locker) -> None:
    locker.refuses = lambda address: 2
    loader = minato.DataLoader(Rows(), num_workers=2, device="cuda")
    assert [n for b in loader for n in numbers(fake, b)] == list(range(24))
    found = told(loader)
    assert found["through"]["pinned"] == found["bytes"] and found["locked"] == 0
    assert found["lock_error"] == 2


class Mixed(Rows):
    """From the twelfth sample on, it also has an array, which stays on the host."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        return {**sample, "array": [np.zeros(WIDTH)]} if index >= 12 else sample


def beside(samples: list[Any]) -> Any:
    (sample,) = samples
    return {"x": torch.from_numpy(sample["x"][None]), "label": torch.tensor([sample["label"]]),
            "name": [sample["name"]], "array": sample.get("array")}  # fmt: skip


def test_rows_with_opaque_objects_are_not_locked(fake: Fake, locker: Locker) -> None:
    loader = minato.DataLoader(Mixed(), num_workers=2, collate_fn=beside, device="cuda")
    for number, batch in enumerate(loader):
        assert numbers(fake, batch) == [number]
        if number == 8:
            assert locker.locked  # or there is nothing to be seen here
        if number >= 12:
            assert isinstance(batch["array"][0], np.ndarray) and not locker.locked
    assert ended(locker)


class Large(Dataset):  # type: ignore[type-arg]
    """Samples of 3 MiB: some batches lie in two chunks."""

    def __len__(self) -> int:
        return 36

    def __getitem__(self, index: int) -> Any:
        return np.full(3 << 18, index, np.float32)


def test_copies_do_not_cross_chunks(fake: Fake, locker: Locker) -> None:
    loader = minato.DataLoader(Large(), batch_size=4, num_workers=2, device="cuda")
    got = []
    for batch in loader:
        found = fake.values(batch)
        assert found.amin(1).tolist() == found.amax(1).tolist()
        got += found[:, 0].tolist()
        del batch, found
    assert got == list(range(36))
    assert locker.locks >= 2 and told(loader)["through"]["locked"] > 0


def test_copies_that_never_end_keep_their_lock(
    fake: Fake, locker: Locker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minato.device.send_ahead.STAGE_SECONDS", 0.05)
    iterator = iter(minato.DataLoader(Rows(), num_workers=2, device="cuda"))
    for _ in range(6):
        last = fake.read(next(iterator)["x"])
    with fake.held():
        read = fake.read(next(iterator)["x"])
        del iterator
        gc.collect()
        assert locker.locked
    assert (last.value()[0, 0].item(), read.value()[0, 0].item()) == (5.0, 6.0)
    assert wait_for(lambda: slots_swept() == 0) and ended(locker)


def slots_swept() -> int:
    from minato.device import copies

    return copies.sweep()


def test_a_forked_child_leaves_the_locks_alone(fake: Fake, locker: Locker) -> None:
    iterator = iter(minato.DataLoader(Rows(), num_workers=2, device="cuda"))
    for _ in range(6):
        batch = next(iterator)
    before = dict(locker.locked)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            del iterator
            gc.collect()
            code = int(locker.locked != before or locker.unlocks != 0)
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert numbers(fake, batch) == [5]
    assert [n for b in iterator for n in numbers(fake, b)] == list(range(6, 24))


def test_only_arena_pages_are_locked(fake: Fake, locker: Locker) -> None:
    iterator = iter(minato.DataLoader(Rows(), num_workers=1, device="cuda"))
    next(iterator)
    elsewhere = np.zeros(WIDTH, np.float32)
    engine = iterator._engine
    assert engine.lock_pages(elsewhere.ctypes.data, elsewhere.nbytes) is None
    with pytest.raises(OSError, match="cannot set the functions that lock pages"):
        engine.set_page_driver(*locker.driver())  # there is one


def test_without_a_driver_nothing_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider, "CUDA", "libnowhere.so.1")
    assert provider.cuda_driver() is None
    assert "no CUDA driver (libnowhere.so.1) was found" in provider.describe()
    monkeypatch.setattr(provider, "CUDA", "libc.so.6")  # a library without these functions
    assert provider.cuda_driver() is None
    assert "cuCtxPushCurrent" in provider.describe()


DRIVER = """
static void *current = (void *)0x1234;
int cuCtxGetCurrent(void **context) { *context = current; return 0; }
int cuCtxPushCurrent_v2(void *context) { return 0; }
int cuCtxPopCurrent_v2(void **context) { return 0; }
int cuMemHostRegister_v2(void *at, unsigned long bytes, unsigned flags) { return 0; }
int cuMemHostUnregister(void *at) { return 0; }
void no_context(void) { current = 0; }
"""


def test_the_drivers_functions_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "driver.c").write_text(DRIVER)
    library = tmp_path / "libdriver.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "driver.c"], check=True)
    monkeypatch.setattr(provider, "CUDA", str(library))
    found = provider.cuda_driver()
    assert found is not None and found.context == 0x1234 and found.flags == 1
    assert len({*found[:4]}) == 4 and all(found[:4])
    assert provider.describe().startswith("from the memory that workers wrote")
    ctypes.CDLL(str(library)).no_context()
    assert provider.cuda_driver() is None  # torch has not initialised this thread's device
