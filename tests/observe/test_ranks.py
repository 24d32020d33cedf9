"""``minato ranks``: which rank and which sample holds up a step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minato.commands import slow_ranks as ranks

ROOT = Path(__file__).parents[2]

#: three ranks that meet after each batch, as DDP does. Rank 1 has three slow samples
PROGRAM = """
import sys, time, torch
import torch.distributed as dist
import minato

class Planted(torch.utils.data.Dataset):
    def __len__(self): return 96
    def __getitem__(self, index):
        time.sleep(0.4 if index in (31, 52, 76) else 0.002)
        return torch.zeros(2)

dist.init_process_group("gloo")
sampler = torch.utils.data.DistributedSampler(Planted(), shuffle=False)
for batch in minato.DataLoader(Planted(), 4, sampler=sampler, num_workers=1, prefetch_factor=1):
    dist.all_reduce(torch.zeros(1))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return launched(tmp_path_factory.mktemp("ranks"), PROGRAM, 3)


def launched(folder: Path, text: str, count: int) -> list[Path]:
    """The traces of a program that torchrun starts."""
    program = folder / "program.py"
    program.write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}",
         program],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MINATO_TRACE": str(folder / "trace-%p.json"),
             "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return sorted(folder.glob("trace-*"))


def test_planted_rank_and_samples_come_first(traces: list[Path], capsys: Any) -> None:
    assert ranks.run([str(path) for path in traces]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "3 ranks, 8 batches that all of them have"
    held = lines.index("held up the others: what a step would gain if this rank alone were faster")
    assert lines[held + 1].startswith("  rank 1 ")
    worst = lines[lines.index("worst steps") + 1 :][:3]
    assert all("rank 1, epoch 0" in line for line in worst)
    named = {word for line in worst for word in line.split() if word in ("31", "52", "76")}
    assert named == {"31", "52", "76"}
    assert "These are upper bounds, unless the program waits for the device in each step." in lines


def trace(
    folder: Path, rank: int, waits: list[float], samples: list[Any], number: int = 1,
    traits: dict[str, Any] | None = None,
) -> str:  # fmt: skip
    """A trace whose waits, in seconds, follow each other, and samples of (index, begin, length), or
    (index, begin, length, batch). number, traits: of the loader. An earlier version wrote no
    traits."""
    pid = 1000 * (rank + 1) + number
    name: dict[str, Any] = {"name": f"loader {number} of process {rank + 1} (rank {rank})"}
    if traits:
        name["loader"] = {**traits, "number": number}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": name}]
    at = rank * 1e9  # another clock
    events += [
        {"ph": "X", "name": f"sample {index}", "cat": "sample", "pid": pid, "tid": 10,
         "ts": at + begin * 1e6, "dur": length * 1e6,
         "args": {"index": index, "epoch": 0, **({"batch": batch[0]} if batch else {})}}
        for index, begin, length, *batch in samples
    ]  # fmt: skip
    for number, wait in enumerate(waits):
        args = {"epoch": 0, "batch": number}
        events.append({"ph": "b", "name": "batch", "cat": "batch", "pid": pid, "tid": 0, "ts": at,
                       "args": args})  # fmt: skip
        events.append({"ph": "X", "name": "wait", "cat": "wait", "pid": pid, "tid": 1, "ts": at,
                       "dur": wait * 1e6, "args": {"batch": number}})  # fmt: skip
        at += wait * 1e6
    path = folder / f"{rank}-{len(list(folder.iterdir()))}.json"
    path.write_text("[\n" + ",\n".join(map(json.dumps, events)))  # it ends as one that was killed
    return str(path)


def test_held_time_is_the_wait_beyond_the_second(tmp_path: Path, capsys: Any) -> None:
    files = [
        trace(tmp_path, 0, [1.0, 0.2, 0.5], [(7, 0.1, 0.8)]),
        trace(tmp_path, 1, [0.4, 2.2, 0.1], [(8, 0.0, 0.3), (9, 0.5, 2.0)]),
        trace(tmp_path, 2, [0.1, 0.3, 0.4], []),
    ]
    assert ranks.run(files) == 0
    text = capsys.readouterr().out
    assert "rank 1       1.900 s\n  rank 0       0.700 s\n  rank 2       0.000 s" in text
    assert "if no rank waited: 3.700 s" in text
    assert "1.900 s  rank 1, epoch 0, batch 1, sample 9 (2.000 s)" in text
    assert "0.600 s  rank 0, epoch 0, batch 0, sample 7 (0.800 s)" in text


@pytest.mark.parametrize("end, named", [(0.327, 38), (0.26, 38), (0.25, 9), (0.1, 9)])
def test_samples_of_the_batch_itself_come_first(
    tmp_path: Path, capsys: Any, end: float, named: int
) -> None:
    """A slow sample of batch 4 covers the wait for batch 1 wholly, and one of batch 1 a part of it."""
    slow = [(38, 0.1, end, 1), (9, 0.05, 0.418, 4), (2, 0.0, 0.3, 0)]
    assert ranks.run([trace(tmp_path, 0, [0.1, 0.1], []), trace(tmp_path, 1, [0.1, 0.341], slow)]) == 0
    assert f"rank 1, epoch 0, batch 1, sample {named} (" in capsys.readouterr().out


def test_missing_ranks_and_batches_are_named(tmp_path: Path, capsys: Any) -> None:
    files = [trace(tmp_path, 0, [1.0, 1.0, 1.0], []), trace(tmp_path, 3, [2.0, 1.0], [])]
    (tmp_path / "other").write_text("no trace\n")
    assert ranks.run([*files, str(tmp_path / "none"), str(tmp_path / "other")]) == 0
    text = capsys.readouterr().out
    assert "2 ranks, 2 batches that all of them have\n  1 batches are left out" in text
    assert "missing: rank 1" in text and "missing: rank 2" in text
    assert "none: No such file" in text and "other: it is not a trace of a rank" in text


def test_a_single_rank_is_an_error(tmp_path: Path, capsys: Any) -> None:
    one = trace(tmp_path, 0, [1.0], [])
    assert ranks.run([one, one]) == 1
    assert "at least two ranks" in capsys.readouterr().err


#: rank 0 validates before it trains, with the same classes of dataset and sampler as in training.
#: Rank 1 has a slow sample in each epoch; validation is slow throughout
VALIDATES = """
import os, time, torch
import torch.distributed as dist
import minato

class Planted(torch.utils.data.Dataset):
    def __init__(self, length, slow, seconds):
        self.length, self.slow, self.seconds = length, slow, seconds
    def __len__(self): return self.length
    def __getitem__(self, index):
        time.sleep(0.4 if index == self.slow else self.seconds)
        return torch.zeros(2)

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
own = {"num_replicas": 2, "rank": rank, "shuffle": False}
def loader(length, slow=None, seconds=0.002):
    data = Planted(length, slow, seconds)
    sampler = torch.utils.data.DistributedSampler(data, **own)
    return minato.DataLoader(data, 4, sampler=sampler, num_workers=1, prefetch_factor=1)

train, second, validation = loader(48, 25), loader(40), loader(32, seconds=0.03)
second.name = "other"
if rank == 0:
    len(list(validation))
for epoch in range(2):
    for one in (train, second) if rank else (second, train):  # the first iterated is another
        for batch in one:
            pass
    dist.all_reduce(torch.zeros(1))
dist.destroy_process_group()
"""


def test_validation_on_one_rank_is_left_out(tmp_path: Path, capsys: Any) -> None:
    assert ranks.run([str(path) for path in launched(tmp_path, VALIDATES, 2)]) == 0
    lines = capsys.readouterr().out.splitlines()
    validation = "Planted (batch_size=4, DistributedSampler, 32 samples), 4 batches of rank 0"
    assert lines[:3] == [
        "2 ranks, 22 batches that all of them have",
        f"  left out, as not every rank has the loader: {validation}",
        "",
    ]
    assert lines[4].startswith("  rank 1 ")
    worst = lines[lines.index("worst steps") + 1 :][:2]
    for line, epoch in zip(sorted(line.split("  ")[-1] for line in worst), "01", strict=True):
        name = "rank 1, Planted (batch_size=4, DistributedSampler, 48 samples), loader "
        assert line.startswith(name) and f", epoch {epoch}, batch 3, sample 25 (" in line
    assert sum(" rank " in line and ", other (" in line for line in lines) > 0


#: (samples, number) of the loaders of two ranks with equal names, and numbers of those that match
MATCHES = {
    "other order": ([(9, 1), (90, 2)], [(90, 1), (9, 2)], [(1, 2), (2, 1)]),
    "one more": ([(9, 1), (90, 2)], [(90, 1)], [(2, 1)]),
    "equal": ([(9, 1), (9, 2), (9, 3)], [(9, 2), (9, 4)], [(1, 2), (2, 4)]),
    "parts of a dataset": ([(9, 1), (91, 2)], [(90, 1), (9, 2)], [(1, 2), (2, 1)]),
    "too different": ([(9, 1)], [(90, 1)], []),
    "parts, and one more": ([(9, 1), (91, 2)], [(90, 1)], []),
    "no length": ([(None, 1)], [(None, 1)], [(1, 1)]),
}


@pytest.mark.parametrize("case", MATCHES)
def test_loaders_with_equal_traits_match(case: str) -> None:
    *both, expected = MATCHES[case]
    made = [
        ranks.Rank(rank, {n: ranks.Loader("A", 4, "S", size, n) for size, n in loaders}, {}, [])
        for rank, loaders in enumerate(both)
    ]
    found = [(one.number, other.number) for one, other in ranks.same_loaders(made)]
    assert sorted(found) == expected


EQUAL = {"name": "A", "batch_size": 4, "sampler": "S", "samples": 8}


@pytest.mark.parametrize("traits, text", [(EQUAL, "A (batch_size=4, S, 8 samples)"), (None, "loader {}")])
def test_equal_loaders_are_printed_by_number(
    tmp_path: Path, capsys: Any, traits: dict[str, Any] | None, text: str
) -> None:
    files = []
    for rank, waits in enumerate(([0.1, 0.1], [0.2, 0.5])):
        one = Path(trace(tmp_path, rank, waits[:1], [], 1, traits))
        more = Path(trace(tmp_path, rank, waits[1:], [], 2, traits))
        one.write_text(one.read_text() + ",\n" + more.read_text()[2:])
        files.append(str(one))
    assert ranks.run(files) == 0
    out = capsys.readouterr().out
    assert f"0.400 s  rank 1, {text.format(2)}, loader 2 of its trace, epoch 0, batch 0\n" in out
    assert f"0.100 s  rank 1, {text.format(1)}, loader 1 of its trace, epoch 0, batch 0\n" in out
