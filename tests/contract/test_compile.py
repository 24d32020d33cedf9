"""A loop over a loader inside a function that torch.compile has compiled."""

from __future__ import annotations

from pathlib import Path

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
    "plain": ((Numbers(),), dict(batch_size=4)),
    "shuffle": ((Numbers(),), dict(batch_size=4, shuffle=True)),
    "own sampler": ((Numbers(),), dict(batch_size=4, sampler=Reversed())),
    "list of batches": ((Numbers(),), dict(batch_sampler=[[0, 1], [2, 3, 4]])),
    "iterable": ((Stream(),), dict(batch_size=4)),
    "tensor": ((torch.arange(12.0),), dict(batch_size=4)),
    "collate": ((Numbers(),), dict(batch_size=4, collate_fn=torch.stack)),
}

def plain_total(loader):
    result = torch.zeros(())
    for batch in loader:
        result = result + batch.sum()
    return result

def plain_first(loader):
    return next(iter(loader)).numel() * torch.ones(())

@torch.compile(backend="eager")
def told(loader, value):
    loader.set_epoch(1)
    state = loader.state_dict()
    loader.load_state_dict(state)
    return value + len(loader) + loader.stats()["delivered"]

total, first = (torch.compile(f, backend="eager") for f in (plain_total, plain_first))
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "This DataLoader will create")
for name, (given, options) in MADE.items():
    eager = torch.utils.data.DataLoader(*given, **options)
    want = plain_total(eager)
    for workers in (0, 1):
        loader = make(*given, num_workers=workers, **options)
        assert total(loader) == want and first(loader) == plain_first(eager), (name, workers)
        assert total(loader) == want, (name, workers)
    loader = make(*given, num_workers=1, persistent_workers=True, **options)
    assert total(loader) == total(loader) == want, name
loader = make(*MADE["plain"][0], batch_size=4, num_workers=1)
if hasattr(loader, "stats"):
    assert (total(loader), told(loader, torch.zeros(())), total(loader)) == (198, 6, 198)
print("done")
"""


def test_compiled_loop_gets_the_same_batches(own: Kind, tmp_path: Path) -> None:
    """As an uncompiled one over torch's loader; compiled code may also call minato's methods."""
    outcome = run_script(own, SCRIPT, tmp_path, timeout=120)
    assert (outcome.stderr, outcome.stdout) == ("", "done\n")
