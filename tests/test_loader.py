"""The thin complete path: import, workers, batches, in the sampler's order."""

import pytest
import torch

import minato


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, index):
        return {"x": torch.full((3,), float(index)), "y": index}


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("scheduling", ["balanced", "static"])
def test_batches_are_those_of_torch(workers, scheduling):
    mine = minato.DataLoader(Squares(), batch_size=8, num_workers=workers, scheduling=scheduling)
    theirs = torch.utils.data.DataLoader(Squares(), batch_size=8)
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a["x"], b["x"]) and torch.equal(a["y"], b["y"])
