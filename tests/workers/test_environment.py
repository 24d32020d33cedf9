"""What a sample finds around it in a worker process, as with torch's workers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import minato

SAYS = "import os; print(os.environ.get('OMP_NUM_THREADS'), os.environ.get('MKL_NUM_THREADS'))"


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
