"""What loaders lose and repeat if a run goes on with another number of ranks or batch size.

    pip install torchdata grain mosaicml-streaming litdata
    python benchmarks/elastic.py [--loaders NAME ...]

An epoch of 480 samples, each of which draws a random number, is left by all ranks after five
batches. The next ranks go on to the end of the epoch, each from its own state if there are as many,
else from that of rank 0. Each rank is a process of a gloo group with one worker (Grain: none). The
table counts samples that never came and that came twice, and says whether each sample drew the
number that it draws in a whole epoch of the first ranks. The name of an error is what a loader
raises when it loads the state.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import importlib.util
import io
import os
import pickle
import random
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch

SAMPLES, BATCHES, SEED = 480, 5, 7
#: (ranks, batch size) before and after
CHANGES = (((3, 8), (2, 12)), ((3, 8), (2, 8)), ((3, 8), (2, 10)), ((2, 12), (2, 8)))


class Draws(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(())


#: (batches of (indices, numbers), what gives the state)
Loaded = tuple[Iterator[Any], Callable[[], Any]]


def of_minato(kind: str, rank: int, world: int, batch: int, state: Any, folder: str) -> Loaded:
    import minato

    if kind == "ElasticSampler":
        sampler: Any = minato.ElasticSampler(Draws(), seed=SEED)
    else:
        sampler = torch.utils.data.DistributedSampler(Draws(), seed=SEED)
    loader: Any = minato.DataLoader(Draws(), batch, sampler=sampler, num_workers=1)
    if state is not None:
        loader.load_state_dict(state)
    return iter(loader), loader.state_dict


def of_torchdata(kind: str, rank: int, world: int, batch: int, state: Any, folder: str) -> Loaded:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    kinds = {"StatefulDistributedSampler": StatefulDistributedSampler,
             "DistributedSampler": torch.utils.data.DistributedSampler}  # fmt: skip
    sampler = kinds[kind](Draws(), seed=SEED)
    loader = StatefulDataLoader(Draws(), batch, sampler=sampler, num_workers=1)
    if state is not None:
        loader.load_state_dict(state)
    return iter(loader), loader.state_dict


def draw(index: int, rng: np.random.Generator) -> Any:
    return index, np.float32(rng.random())


def of_grain(kind: str, rank: int, world: int, batch: int, state: Any, folder: str) -> Loaded:
    import grain

    if kind == "MapDataset":
        source = grain.MapDataset.range(SAMPLES).seed(SEED).shuffle().random_map(draw)
        iterator = iter(source[rank::world].batch(batch).to_iter_dataset())
    else:
        class Draw(grain.transforms.RandomMap):
            def random_map(self, element: int, rng: np.random.Generator) -> Any:
                return draw(element, rng)

        shards = grain.sharding.ShardOptions(rank, world)
        sampler = grain.samplers.IndexSampler(SAMPLES, shards, shuffle=True, num_epochs=1, seed=SEED)
        iterator = iter(grain.DataLoader(
            data_source=grain.sources.RangeDataSource(0, SAMPLES, 1), sampler=sampler,
            operations=[Draw(), grain.transforms.Batch(batch)],
        ))  # fmt: skip
    if state is not None:
        iterator.set_state(state)
    return iterator, iterator.get_state


def of_mosaic(kind: str, rank: int, world: int, batch: int, state: Any, folder: str) -> Loaded:
    import streaming

    class Stored(streaming.StreamingDataset):
        def __getitem__(self, at: Any) -> Any:
            return int(super().__getitem__(at)["index"]), torch.rand(())

    data = Stored(local=f"{folder}/mosaic", shuffle=True, shuffle_seed=SEED, batch_size=batch,
                  num_canonical_nodes=1)  # fmt: skip
    loader = streaming.StreamingDataLoader(data, batch_size=batch, num_workers=1)
    if state is not None:
        loader.load_state_dict(state)
    return iter(loader), loader.state_dict


def of_litdata(kind: str, rank: int, world: int, batch: int, state: Any, folder: str) -> Loaded:
    import litdata

    class Stored(litdata.StreamingDataset):
        def __getitem__(self, at: Any) -> Any:
            return super().__getitem__(at), torch.rand(())

    data = Stored(f"{folder}/litdata", shuffle=True, seed=SEED, cache_dir=f"{folder}/cache-{rank}")
    loader = litdata.StreamingDataLoader(data, batch_size=batch, num_workers=1)
    if state is not None:
        loader.load_state_dict(state)
    return iter(loader), loader.state_dict


def index_of(index: int) -> int:
    return index


def store(name: str, folder: str) -> None:
    """Writes the samples' indices in the format that a loader reads."""
    if name == "Mosaic":
        import streaming

        with streaming.MDSWriter(out=f"{folder}/mosaic", columns={"index": "int"}) as out:
            for index in range(SAMPLES):
                out.write({"index": index})
    elif name == "LitData":
        import litdata

        with contextlib.redirect_stdout(io.StringIO()):
            litdata.optimize(index_of, list(range(SAMPLES)), f"{folder}/litdata", chunk_size=60, num_workers=1,
                             verbose=False)  # fmt: skip


#: name -> (its package, how it begins)
LOADERS: dict[str, tuple[str, Callable[..., Loaded]]] = {
    "minato, ElasticSampler": ("minato", functools.partial(of_minato, "ElasticSampler")),
    "minato, DistributedSampler": ("minato", functools.partial(of_minato, "DistributedSampler")),
    "torchdata, StatefulDistributedSampler": (
        "torchdata", functools.partial(of_torchdata, "StatefulDistributedSampler")),
    "torchdata, DistributedSampler": ("torchdata", functools.partial(of_torchdata, "DistributedSampler")),
    "Grain, MapDataset": ("grain", functools.partial(of_grain, "MapDataset")),
    "Grain, DataLoader": ("grain", functools.partial(of_grain, "DataLoader")),
    "Mosaic": ("streaming", functools.partial(of_mosaic, "")),
    "LitData": ("litdata", functools.partial(of_litdata, "")),
}  # fmt: skip


def as_rank(name: str, batch: int, folder: str, begins: str, ends: str) -> None:
    """One rank: writes what it has got and its state, or the error. begins: the name of its state, or ""; ends:
    "early" after some batches, else with the epoch."""
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    state = pickle.loads(Path(folder, f"{begins}-{rank}").read_bytes()) if begins else None
    got: dict[str, Any] = {"samples": [], "error": None}
    try:
        batches, state_of = LOADERS[name][1](rank, world, batch, state, folder)
        for count, (indices, numbers) in enumerate(batches, start=1):
            got["samples"] += zip(map(int, indices), map(float, numbers))
            if ends == "early" and count == BATCHES:
                got["state"] = state_of()
                break
    except Exception as error:
        got["error"] = f"{type(error).__name__}: {error}"
    Path(folder, f"rank-{rank}").write_bytes(pickle.dumps(got))
    torch.distributed.barrier()
    os._exit(0)  # what loaders leave running does not count here


def ranks(name: str, world: int, batch: int, folder: str, begins: str = "", ends: str = "") -> list[Any]:
    """What each rank of a run got."""
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world),
         __file__, "--rank-of", name, str(batch), folder, begins, ends],
        check=True, timeout=common.CHILD_SECONDS, capture_output=True,
    )  # fmt: skip
    return [pickle.loads(Path(folder, f"rank-{rank}").read_bytes()) for rank in range(world)]


def samples(got: list[Any]) -> list[tuple[int, float]]:
    return [sample for rank in got for sample in rank["samples"]]


def result(name: str, change: Any) -> tuple[str, str]:
    """What became of the samples, and of their random numbers."""
    (world, batch), (then_world, then_batch) = change
    with tempfile.TemporaryDirectory() as folder:
        store(name, folder)
        whole = samples(ranks(name, world, batch, folder))
        before = ranks(name, world, batch, folder, ends="early")
        for rank in range(then_world):
            own = before[rank if world == then_world else 0]
            Path(folder, f"state-{rank}").write_bytes(pickle.dumps(own["state"]))
        after = ranks(name, then_world, then_batch, folder, begins="state")
    for rank in after:
        if rank["error"] is not None:
            return rank["error"].partition(":")[0], ""
    found = samples(before) + samples(after)
    assert len(samples(before)) == world * batch * BATCHES
    times = collections.Counter(index for index, _ in found)
    lost, doubled = SAMPLES - len(times), sum(times.values()) - len(times)
    words = [f"{lost} lost"] * (lost > 0) + [f"{doubled} twice"] * (doubled > 0)
    return ", ".join(words) or "exact", "equal" if set(found) <= set(whole) else "others"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loaders", nargs="+", choices=LOADERS, default=list(LOADERS))
    parser.add_argument("--rank-of", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        name, batch, *rest = options.rank_of
        warnings.simplefilter("ignore")
        return as_rank(name, int(batch), *rest)
    rows = []
    for name in options.loaders:
        if importlib.util.find_spec(LOADERS[name][0]) is None:
            print(f"{name}: not installed")
            continue
        found = [result(name, change) for change in CHANGES]
        numbers = {number for _, number in found if number}
        rows.append([name, *(text for text, _ in found), " and ".join(sorted(numbers))])
    titles = [f"{a} x {b} to {c} x {d}" for (a, b), (c, d) in CHANGES]
    for row in [["loader", *titles, "random numbers"], *rows]:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
