"""A loop over a loader inside a function that torch.compile has compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .support import Kind, run_script

SCRIPT = """
import sys, warnings
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

assert "torch._dynamo" not in sys.modules, "it takes a second"

class Numbers(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.full((3,), float(index))

class Stream(IterableDataset):
    def __iter__(self):
        return iter([torch.full((3,), float(index)) for index in range(12)])

class Reversed(Sampler):
    def __iter__(self):
        return iter(range(11, -1, -1))

    def __len__(self):
        return 12

MADE = {
    "plain": lambda **o: make(Numbers(), batch_size=4, **o),
    "shuffle": lambda **o: make(Numbers(), batch_size=4, shuffle=True, **o),
    "own sampler": lambda **o: make(Numbers(), batch_size=4, sampler=Reversed(), **o),
    "list of batches": lambda **o: make(Numbers(), batch_sampler=[[0, 1], [2, 3, 4]], **o),
    "iterable": lambda **o: make(Stream(), batch_size=4, **o),
    "tensor": lambda **o: make(torch.arange(12.0), batch_size=4, **o),
    "collate": lambda **o: make(Numbers(), batch_size=4, collate_fn=torch.stack, **o),
}

@torch.compile(backend="eager")
def total(loader):
    result = torch.zeros(())
    for batch in loader:
        result = result + batch.sum()
    return result

@torch.compile(backend="eager")
def first(loader):
    return next(iter(loader)).numel() * torch.ones(())

warnings.simplefilter("error")
warnings.filterwarnings("ignore", "This DataLoader will create")
for name, made in MADE.items():
    for workers in (0, 1):
        loader = made(num_workers=workers)
        print(name, workers, float(total(loader)), float(first(loader)), float(total(loader)))
    loader = made(num_workers=1, persistent_workers=True)
    print(name, float(total(loader)), float(total(loader)))
"""

OWN = """
@torch.compile(backend="eager")
def told(loader, value):
    loader.set_epoch(1)
    state = loader.state_dict()
    loader.load_state_dict(state)
    return value + len(loader) + loader.stats()["delivered"]

loader = made(num_workers=1)
print(float(total(loader)), float(told(loader, torch.zeros(()))), float(total(loader)))
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    where = tmp_path_factory.mktemp("torchs")
    outcome = run_script(Kind("torch"), SCRIPT, where, timeout=120)
    assert outcome.stderr == "" and outcome.stdout.count("\n") == 21
    return outcome.stdout


def test_compiled_loop_gets_the_same_batches(own: Kind, expected: str, tmp_path: Path) -> None:
    outcome: Any = run_script(own, SCRIPT, tmp_path, timeout=120)
    assert (outcome.stderr, outcome.stdout) == ("", expected)


def test_compiled_code_may_call_minatos_methods(own: Kind, tmp_path: Path) -> None:
    script = SCRIPT.partition("warnings.simplefilter")[0] + 'made = MADE["plain"]\n' + OWN
    outcome = run_script(own, script, tmp_path, timeout=120)
    assert outcome.stdout == "198.0 6.0 198.0\n", outcome.stderr
