"""A sample's environment in a worker process, as with torch's workers."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import types
from typing import Any

import pytest
import torch

import minato
from minato.workers import zygote

SAYS = "import os; print(os.environ.get('OMP_NUM_THREADS'), os.environ.get('MKL_NUM_THREADS'))"


class Identities(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Each sample waits for the other, so two workers make one each."""

    def __init__(self, barrier: Any) -> None:
        self.barrier = barrier

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        self.barrier.wait(60)
        return multiprocessing.current_process()._identity  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_identities_count_up_as_in_torch(method: str) -> None:
    def first_numbers(kind: Any) -> list[int]:
        barrier = multiprocessing.get_context(method).Barrier(2)
        loader = kind(
            Identities(barrier), batch_size=None, num_workers=2, multiprocessing_context=method
        )
        child = multiprocessing.Process()  # takes the next number
        found = [list(loader), list(loader)]
        assert all(len(identity) == 1 for epoch in found for identity in epoch)
        last = child._identity[-1]  # type: ignore[attr-defined]
        return [number - last for epoch in found for number in sorted(sum(epoch, []))]

    assert first_numbers(minato.DataLoader) == first_numbers(torch.utils.data.DataLoader)
    assert first_numbers(minato.DataLoader) == [1, 2, 3, 4]


class Programs(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """What programs that it starts find in their environment."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> str:
        given = dict(os.environ) if index else None
        return subprocess.check_output([sys.executable, "-c", SAYS], env=given, text=True)


@pytest.mark.parametrize("said", [None, "3"])
def test_programs_of_a_dataset_inherit_the_trainers_variables(
    said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
        if said is not None:
            monkeypatch.setenv(name, said)
    assert set(minato.DataLoader(Programs(), batch_size=None, num_workers=1)) == {f"{said} {said}\n"}


@pytest.mark.parametrize("forked_after_use", [False, True])
def test_worker_seeds_an_accelerator_that_it_may_use(
    monkeypatch: pytest.MonkeyPatch, forked_after_use: bool
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "get_device_module", lambda: torch.cuda)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: forked_after_use)
    monkeypatch.setattr(torch, "manual_seed", asked.append)
    before = torch.get_rng_state()
    zygote.seed_torch(5)
    torch.set_rng_state(before)
    assert asked == ([] if forked_after_use else [5])


def test_worker_without_accelerator_seeds_only_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = types.ModuleType("cpu")
    monkeypatch.setattr(torch, "cpu", cpu)
    monkeypatch.setattr(torch, "get_device_module", lambda: cpu)
    monkeypatch.setattr(torch, "manual_seed", None)
    before = torch.get_rng_state()
    zygote.seed_torch(5)
    seed = torch.initial_seed()
    torch.set_rng_state(before)
    assert seed == 5
