"""Workers killed at random instants: lost samples, repeated samples, and recovery times.

    python benchmarks/kills.py [--kills 2000] [--peers] [--json FILE] [--quick]

minato: kill -9 of random workers, 30 to 200 ms apart, spread evenly over the workloads and start
methods of the table. One kill in eight is of the process that forks the workers instead (``of
helpers``). Every sample draws noise and is compared, bit for bit, with what an
undisturbed loader with one worker makes; in order also the order. A worker is back when another
process stands in its place and is ready for samples. ``most waited`` is the longest that
``next()`` took. What is left behind is counted after the last epoch: processes, descriptors
and shared memory.

Others: one kill in the middle of an epoch, repeated --peer-runs times. torch's loader raises
or stays silent; SPDL (with --peers; spdl-core) runs the same fetch in a pool of processes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import glob
import hashlib
import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import common
import numpy as np
import psutil
import torch
from torch.utils.data import BatchSampler, Dataset, SequentialSampler

import minato

WORKERS = 4
#: this many seconds without a batch count as a hang
HUNG_SECONDS = 60.0
#: state of a worker that is ready for samples, csrc/workers/mn_crew.h
READY = 3


class Noise(Dataset):
    """Noise of some milliseconds; every tenth sample takes ten times as long."""

    def __init__(self, samples: int, values: int, ragged: bool = False) -> None:
        self.samples, self.values, self.ragged = samples, values, ragged
        self.sleeps = True

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        if self.sleeps:
            time.sleep(0.02 if index % 10 == 0 else 0.002)
        return torch.rand(self.values + (index % 7 if self.ragged else 0)), index


def as_list(samples: list[Any]) -> list[Any]:
    return samples


WORKLOADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rows": ({"samples": 400, "values": 4096}, {}),
    "messages": ({"samples": 400, "values": 4096, "ragged": True}, {"collate_fn": as_list}),
    "large samples": ({"samples": 200, "values": 1 << 18}, {"memory_limit": "64MiB"}),
    "ready first": (
        {"samples": 400, "values": 4096},
        {"in_order": False, "batching": "ready"},
    ),
    "next epoch early": ({"samples": 400, "values": 4096}, {"prefetch_next_epoch": True}),
}
METHODS = ("fork", "spawn", "forkserver")


def make(workload: str, loader: Any, **options: Any) -> Any:
    dataset, own = WORKLOADS[workload]
    generator = torch.Generator().manual_seed(7)  # the same epochs of every loader
    options = {"batch_size": 8, "shuffle": True, "generator": generator, **own, **options}
    return loader(Noise(**dataset), **options)


def samples_of(batch: Any) -> Iterator[tuple[int, str]]:
    pairs = batch if isinstance(batch, list) and isinstance(batch[0], tuple) else zip(*batch)
    for noise, index in pairs:
        digest = hashlib.blake2b(noise.numpy().tobytes(), digest_size=8)
        yield int(index), digest.hexdigest()


# ---- minato --------------------------------------------------------------------------------


class Killer(threading.Thread):
    """Kills a random worker now and then, and notices when another has replaced it."""

    def __init__(self, iterator: Any, seed: str, most: int) -> None:
        super().__init__(daemon=True)
        self.iterator, self.rng, self.most = iterator, random.Random(seed), most
        self.kills, self.helpers, self.recovered, self.dead = 0, 0, [], {}
        self.end = threading.Event()

    def run(self) -> None:
        next_kill = time.monotonic()
        while not self.end.wait(0.001):
            try:
                entries = self.iterator._engine.workers()
                begun = self.iterator._engine.segment.start  # before, ten deaths are an error
            except RuntimeError:
                return  # the iterator has ended
            now = time.monotonic()
            for place, (pid, since) in list(self.dead.items()):
                if entries[place]["pid"] != pid and entries[place]["state"] == READY:
                    self.recovered.append(now - since)
                    del self.dead[place]
            if now >= next_kill and self.kills < self.most:
                next_kill = now + self.rng.uniform(0.03, 0.2)
                if begun and self.rng.random() < 1 / 8:
                    self._kill_helpers()
                else:
                    self._kill(entries, now)

    def _kill(self, entries: list[dict[str, Any]], now: float) -> None:
        living = [p for p, e in enumerate(entries) if e["pid"] and p not in self.dead]
        if living:
            place = self.rng.choice(living)
            try:
                os.kill(entries[place]["pid"], signal.SIGKILL)
            except ProcessLookupError:
                return
            self.dead[place] = entries[place]["pid"], now
            self.kills += 1

    def _kill_helpers(self) -> None:
        with contextlib.suppress(ProcessLookupError, RuntimeError, ValueError):  # it ends by itself
            zygote = self.iterator._pool.zygote.pid
            if zygote != 0:
                os.kill(zygote, signal.SIGKILL)
                self.kills, self.helpers = self.kills + 1, self.helpers + 1


def watchdog() -> threading.Timer:
    """Ends this process, a child of the benchmark, if nothing is delivered any more."""
    timer = threading.Timer(HUNG_SECONDS, functools.partial(os._exit, 9))
    timer.daemon = True
    timer.start()
    return timer


def read(iterator: Any) -> tuple[list[Any], float]:
    """The samples of an epoch in order, and the longest wait for a batch."""
    seen, most = [], 0.0
    while True:
        timer = watchdog()
        begin = time.perf_counter()
        try:
            batch = next(iterator)
        except StopIteration:
            return seen, most
        finally:
            timer.cancel()
        most = max(most, time.perf_counter() - begin)
        seen += samples_of(batch)


def held() -> dict[str, int]:
    gc.collect()
    me = psutil.Process()
    names = [os.path.basename(m.path) for m in me.memory_maps(grouped=False)]
    return {
        "processes": len(me.children(recursive=True)),
        "descriptors": me.num_fds(),
        "shared mappings": sum("memfd" in name for name in names),
    }


def hunt(request: dict[str, Any]) -> dict[str, Any]:
    """Epochs with kills, each compared with the undisturbed one."""
    workload, method = request["workload"], request["method"]
    context = {"multiprocessing_context": method, "persistent_workers": True}
    total = {"kills": 0, "of helpers": 0, "lost": 0, "doubled": 0, "changed": 0, "out of order": 0, "epochs": 0}
    recovered: list[float] = []
    most = 0.0
    before: dict[str, int] = {}
    while total["kills"] < request["kills"]:
        calm = make(workload, minato.DataLoader, num_workers=1, persistent_workers=True)
        calm.dataset.sleeps = False
        loader = make(workload, minato.DataLoader, num_workers=WORKERS, max_retries=1000, **context)
        for epoch in range(3):
            iterator = iter(loader)
            killer = Killer(iterator, f"{workload}{method}{epoch}{total['kills']}",
                            request["kills"] - total["kills"])  # fmt: skip
            killer.start()
            try:
                got, waited = read(iterator)
            finally:
                killer.end.set()
                killer.join()
            expected = dict(read(iter(calm))[0])
            indices = [index for index, _ in got]
            total["kills"] += killer.kills
            total["of helpers"] += killer.helpers
            total["epochs"] += 1
            total["lost"] += len(set(expected) - set(indices))
            total["doubled"] += len(indices) - len(set(indices))
            total["changed"] += sum(expected.get(i) != noise for i, noise in got)
            total["out of order"] += (workload != "ready first") and indices != list(expected)
            recovered += killer.recovered
            most = max(most, waited)
        del iterator, killer, loader, calm
        before = before or held()  # leftovers of the first loader are normal for later ones
    after = held()
    left = {key: after[key] - before[key] for key in after}
    return {**total, "recovered": recovered, "most": most, "left": left}


# ---- others --------------------------------------------------------------------------------


class Pool:
    """SPDL with a pool of processes that fetch whole batches."""

    def __init__(self, dataset: Noise) -> None:
        self.dataset = dataset
        self.executor = ProcessPoolExecutor(WORKERS)

    def fetch(self, indices: list[int]) -> Any:
        return self.executor.submit(_fetch, self.dataset, indices).result()

    def __iter__(self) -> Iterator[Any]:
        batches = BatchSampler(SequentialSampler(self.dataset), 8, False)
        return common.spdl_batches(batches, self.fetch, WORKERS)


def _fetch(dataset: Noise, indices: list[int]) -> Any:
    return torch.utils.data.default_collate([dataset[i] for i in indices])


def one_kill(request: dict[str, Any]) -> dict[str, Any]:
    """A loader's behaviour when one of its workers is killed in the middle of an epoch."""
    logging.disable(logging.CRITICAL)
    rng = random.Random(request["seed"])
    own = make("rows", torch.utils.data.DataLoader, num_workers=WORKERS)
    loader = Pool(own.dataset) if request["loader"] == "spdl" else own
    begin, killed, seen = time.perf_counter(), 0.0, 0
    timer = watchdog()
    try:
        for number, batch in enumerate(loader):
            seen += sum(1 for _ in samples_of(batch))
            if number == 5:
                victims = psutil.Process().children(recursive=True)
                victim = rng.choice(victims)
                victim.kill()
                killed = time.perf_counter()
        outcome = "all delivered" if seen == len(own.dataset) else "ended early, silently"
    except Exception as error:
        outcome = f"raised {type(error).__name__}"
    timer.cancel()
    if killed:  # torch's shared memory of the killed worker has no owner, and stays
        for path in glob.glob(f"/dev/shm/torch_{victim.pid}_*"):
            os.unlink(path)
    return {"outcome": outcome, "seen": seen, "of": len(own.dataset),
            "after": time.perf_counter() - (killed or begin)}  # fmt: skip


def peers(names: list[str], runs: int) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        for seed in range(runs):
            try:
                result = common.run_child(__file__, {"do": "peer", "loader": name, "seed": seed})
            except RuntimeError:
                result = {"outcome": f"hung for {HUNG_SECONDS:.0f} s", "seen": 0, "after": 0.0}
            found.setdefault(name, []).append(result)
    return found


# ---- all together ----------------------------------------------------------------------------


def report(rows: dict[str, dict[str, Any]], others: dict[str, list[dict[str, Any]]]) -> str:
    lines = []
    for name, found in rows.items():
        p50, p99 = np.quantile(found["recovered"] or [0.0], [0.5, 0.99], method="higher")
        lines.append([
            name, str(found["kills"]), str(found["of helpers"]), str(found["epochs"]), str(found["lost"]),
            str(found["doubled"]), str(found["changed"]), str(found["out of order"]),
            f"{p50 * 1e3:.0f} ms", f"{p99 * 1e3:.0f} ms",
            f"{found['most'] * 1e3:.0f} ms", describe_left(found["left"]),
        ])  # fmt: skip
    head = ["minato", "kills", "of helpers", "epochs", "lost", "doubled", "changed", "misordered", "back, p50",
            "p99", "most waited", "left behind"]  # fmt: skip
    text = [common.table(head, lines)]
    for name, results in others.items():
        outcomes: dict[str, int] = {}
        for result in results:
            key = f"{result['outcome']} ({result['seen']} samples of {result.get('of', '?')})"
            outcomes[key] = outcomes.get(key, 0) + 1
        text.append(f"{name}, one kill: " + "; ".join(f"{n} x {k}" for k, n in outcomes.items()))
    return "\n\n".join(text)


def describe_left(left: dict[str, int]) -> str:
    return ", ".join(f"{n} {what}" for what, n in left.items() if n > 0) or "nothing"


def total_of(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    whole: dict[str, Any] = {"recovered": [], "most": 0.0, "left": {}}
    for found in rows.values():
        for key in ("kills", "of helpers", "epochs", "lost", "doubled", "changed", "out of order"):
            whole[key] = whole.get(key, 0) + found[key]
        whole["recovered"] += found["recovered"]
        whole["most"] = max(whole["most"], found["most"])
        for what, n in found["left"].items():
            whole["left"][what] = whole["left"].get(what, 0) + max(0, n)
    return whole


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    common.add_options(parser)
    parser.add_argument("--kills", type=int, default=2000)
    parser.add_argument("--peers", action="store_true", help="SPDL, too (spdl-core)")
    parser.add_argument("--peer-runs", type=int, default=10)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.kills, arguments.peer_runs = 6, 1
    jobs = [(w, m) for w in WORKLOADS for m in METHODS][: 1 if arguments.quick else None]
    rows: dict[str, dict[str, Any]] = {}
    for i, (workload, method) in enumerate(jobs):
        share = arguments.kills // len(jobs) + (i < arguments.kills % len(jobs))
        request = {"do": "hunt", "workload": workload, "method": method, "kills": share}
        rows[f"{workload}, {method}"] = common.run_child(__file__, request)
    rows["all"] = total_of(rows)
    names = ["torch", "spdl"] if arguments.peers else ["torch"]
    others = peers(names, arguments.peer_runs)
    print(common.describe(common.machine()))
    print(report(rows, others))
    common.save(arguments.json, {"machine": common.machine(), "rows": rows, "others": others})
    whole = rows["all"]
    return 1 if whole["lost"] + whole["doubled"] + whole["changed"] + whole["out of order"] else 0


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    asked = common.child_request()
    if asked is None:
        sys.exit(main())
    common.answer(hunt(asked) if asked["do"] == "hunt" else one_kill(asked))
