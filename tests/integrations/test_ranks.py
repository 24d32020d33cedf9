"""Several ranks: no number drawn twice, and each resumes with its own samples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from .conftest import ROOT
from .rank_programs import LENGTH, SAVED_AFTER

PROGRAM = Path(__file__).with_name("rank_programs.py")

#: by rank, batches of indices and of what each drew
Batches = list[list[list[int]]]


def run(folder: Path, world: int, *names: str) -> list[list[Batches]]:
    """By program: what each rank received."""
    start(PROGRAM, "ranks", world, folder, *names)
    return [received(folder, name, world) for name in names]


def torchrun(name: str, folder: Path, world: int, seeds: str) -> list[Batches]:
    start("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}", PROGRAM, name,
          seeds, folder)  # fmt: skip
    return received(folder, name, world)


def start(*arguments: object) -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=300,
        check=False, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]


def received(folder: Path, name: str, world: int) -> list[Batches]:
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(world)]


def draws(batches: Batches) -> list[int]:
    return [value for _, values in batches for value in values]


def order(batches: Batches) -> list[int]:
    return [index for indices, _ in batches for index in indices]


def no_number_twice(ranks: list[Batches]) -> bool:
    times = Counter(value for rank in ranks for value in draws(rank))
    return len(times) == 2 * LENGTH and set(times.values()) == {1}


def test_no_number_is_drawn_on_two_ranks(tmp_path: Path) -> None:
    """Their programs have set different seeds; equal ones are those of the other tests."""
    ranks = torchrun("torch", tmp_path, 2, "different")
    assert no_number_twice(ranks)
    assert sorted(i for rank in ranks for i in order(rank)) == sorted([*range(LENGTH)] * 2)


def test_transformers_ranks_draw_no_number_twice(tmp_path: Path) -> None:
    pytest.importorskip("transformers", exc_type=ImportError)
    (ranks,) = run(tmp_path, 3, "transformers")
    assert no_number_twice(ranks)
    assert sorted(i for rank in ranks for i in order(rank)) == sorted([*range(LENGTH)] * 2)


def test_tensor_parallel_ranks_get_equal_batches(tmp_path: Path) -> None:
    alone, pairs = run(tmp_path, 4, "torch", "mesh")
    assert no_number_twice(alone)
    assert pairs[0] == pairs[1] and pairs[2] == pairs[3]
    assert not set(draws(pairs[0])) & set(draws(pairs[2]))


def test_lightning_resumes_each_rank_exactly(tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch", exc_type=ImportError)
    whole, saved, rest = run(tmp_path, 2, "lightning", "lightning_save", "lightning_resume")
    assert no_number_twice(whole)
    assert [len(rank) for rank in saved] == [SAVED_AFTER] * 2
    assert [a + b for a, b in zip(saved, rest, strict=True)] == whole


def test_lightning_resumes_on_other_ranks_with_equal_global_batch(tmp_path: Path) -> None:
    """Each step of four ranks has the samples of that of two, with the same numbers."""
    pytest.importorskip("lightning.pytorch", exc_type=ImportError)
    whole, saved = run(tmp_path, 2, "lightning", "lightning_save")
    (rest,) = run(tmp_path, 4, "lightning_resume")

    def steps(ranks: list[Batches]) -> list[list[tuple[int, int]]]:
        together = zip(*ranks, strict=True)
        return [sorted(pair for batch in step for pair in zip(*batch, strict=True)) for step in together]

    assert [len(batch[0]) for batch in rest[3]] == [2] * 3
    assert steps(saved) + steps(rest) == steps(whole)


def test_lightning_resumes_each_ranks_own_stream(tmp_path: Path) -> None:
    """Lightning saves rank 0's state alone. It has then asked each stream for one batch more, since
    these have no length, and that batch does not come again."""
    pytest.importorskip("lightning.pytorch", exc_type=ImportError)
    whole, saved, rest = run(tmp_path, 2, "stream", "stream_save", "stream_resume")
    for everything, before, after in zip(whole, saved, rest, strict=True):
        assert order(before) == order(everything[:SAVED_AFTER])
        assert order(after) == order(everything[SAVED_AFTER + 1 :])
