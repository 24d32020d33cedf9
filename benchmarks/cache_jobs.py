"""Jobs that read through the cache, for `python benchmarks/cache.py storage` and `... images`.

storage: one job whose storage is slow. The slowness is emulated: all processes of a run share a
token bucket in a file, which lets 20 MiB a second through, and there is no page cache in front of it.
torch's loader reads every sample in every epoch; minato's reads through a cache of 20 % and of 110 % of
the data set. Where MONAI is installed, torch's loader also reads its CacheDataset of 20 % of the samples,
which it fills before the first epoch.

images: several jobs at once over a folder of JPEG files in the page cache, bound by decoding. torch's
loader with a plain dataset; the same with `memoize`; the same over arrays that were decoded beforehand
(the time for which is told apart). All three draw the same random crops.

Each run is made of fresh processes. Runs take turns, and each delivers a checksum of its samples, which
must be the same on all sides.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import io
import json
import mmap
import os
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cache_scratch import MEMORY, scratch, turns
from common import kept_by_monai

import minato

MiB = 1 << 20
#: bytes a second that the emulated storage gives
BANDWIDTH = 20 * MiB
MONAI = "MONAI CacheDataset of 20 %"
#: samples and bytes of each
STORED, STORED_QUICK = (1200, 64 << 10), (400, 14 << 10)
#: pictures and their edge
IMAGES, IMAGES_QUICK = (120, 640), (8, 64)
CROP = 224


class Bucket:
    """Storage that all processes of a run share: at most BANDWIDTH bytes a second."""

    def __init__(self, path: str) -> None:
        self.path = path
        if not os.path.exists(path):
            Path(path).write_bytes(bytes(16))

    def take(self, count: int) -> None:
        with open(self.path, "r+b") as file, mmap.mmap(file.fileno(), 16) as data:
            fcntl.flock(file, fcntl.LOCK_EX)
            free_ns, total = struct.unpack("=qq", data[:])
            ends_ns = max(free_ns, time.monotonic_ns()) + count * 1_000_000_000 // BANDWIDTH
            data[:] = struct.pack("=qq", ends_ns, total + count)
            fcntl.flock(file, fcntl.LOCK_UN)
        time.sleep(max(0, ends_ns - time.monotonic_ns()) / 1e9)

    def total(self) -> int:
        found: int = struct.unpack("=qq", Path(self.path).read_bytes())[1]
        return found


class Stored(torch.utils.data.Dataset[Any]):
    """Files on slow storage."""

    def __init__(self, folder: str) -> None:
        self.paths = sorted(str(path) for path in Path(folder).glob("*.bin"))
        self.bucket = f"{folder}/bucket"

    def __len__(self) -> int:
        return len(self.paths)

    def cache_key(self, i: int) -> str:
        return self.paths[i]

    def read(self, i: int) -> bytes:
        data = Path(self.paths[i]).read_bytes()
        Bucket(self.bucket).take(len(data))
        return data

    def decode(self, raw: bytes, i: int) -> Any:
        return np.frombuffer(raw, np.uint8).copy()

    def augment(self, value: Any, i: int) -> Any:
        return torch.from_numpy(value), i

    def __getitem__(self, i: int) -> Any:
        return self.augment(self.decode(self.read(i), i), i)


def decoded(data: bytes) -> Any:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB").resize((256, 256)))


class Pictures(torch.utils.data.Dataset[Any]):
    """A folder of JPEG files."""

    def __init__(self, folder: str) -> None:
        self.paths = sorted(str(path) for path in Path(folder).glob("*.jpg"))

    def __len__(self) -> int:
        return len(self.paths)

    def load(self, i: int) -> Any:
        return decoded(Path(self.paths[i]).read_bytes())

    def __getitem__(self, i: int) -> Any:
        y, x = torch.randint(0, 256 - CROP, (2,)).tolist()
        crop = self.load(i)[y : y + CROP, x : x + CROP]
        return torch.from_numpy(crop.transpose(2, 0, 1).copy()), i


class Beforehand(Pictures):
    """The same of arrays."""

    def load(self, i: int) -> Any:
        return np.load(self.paths[i].replace(".jpg", ".npy"), mmap_mode="r")


cache = minato.Cache(os.environ.get("BENCHMARK_CACHE", "1GiB"))


class Memoized(Pictures):
    """The same through a cache, under torch's loader."""

    @cache.memoize(key=lambda self, i: self.paths[i], files=lambda self, i: self.paths[i])
    def load(self, i: int) -> Any:
        return super().load(i)


def by_monai(data: Stored) -> Any:
    """A fifth of the samples in memory."""
    from monai.data import CacheDataset

    return CacheDataset(list(range(len(data))), kept_by_monai(data.__getitem__),
                        cache_num=len(data) // 5, num_workers=1, progress=False)  # fmt: skip


SIDES = {"torch": Pictures, "memoize": Memoized, "decoded beforehand": Beforehand}


def job(options: argparse.Namespace) -> None:
    """One job: epochs when a line comes, then what it measured."""
    torch.set_num_threads(1)
    settings: dict[str, Any] = {"batch_size": options.batch, "shuffle": True,
                                "num_workers": options.workers, "persistent_workers": options.workers > 0}  # fmt: skip
    loader: Any
    bucket = None
    if options.what == "storage":
        bucket = Bucket(f"{options.folder}/bucket")
        if options.side in ("torch", MONAI):
            data: Any = Stored(options.folder)
            data = by_monai(data) if options.side == MONAI else data
            loader = torch.utils.data.DataLoader(data, **settings)
        else:
            loader = minato.DataLoader(Stored(options.folder), cache=options.bytes, cache_format="decoded",
                                       **settings)  # fmt: skip
    else:
        loader = torch.utils.data.DataLoader(SIDES[options.side](options.folder), **settings)
    torch.manual_seed(options.seed)
    print("ready", flush=True)
    sys.stdin.readline()
    rows = []
    for _ in range(options.epochs):
        start, before, check = time.perf_counter(), bucket.total() if bucket else 0, 0
        for values, indices in loader:
            for value, index in zip(values.numpy(), indices.tolist()):
                check = (check + zlib.crc32(value, index)) & 0xFFFFFFFF
        read = bucket.total() - before if bucket else 0
        rows.append({"s": time.perf_counter() - start, "read": read, "check": check})
    print(json.dumps(rows), flush=True)


# ---- runs ----------------------------------------------------------------------------------


def run(what: str, side: str, folder: str, jobs: int, options: argparse.Namespace,
        size: int = MiB) -> tuple[float, list[list[dict[str, Any]]]]:  # fmt: skip
    """Makespan of jobs that begin together, and what each has measured."""
    if what == "storage":
        Path(f"{folder}/bucket").unlink(missing_ok=True)
    command = [sys.executable, __file__, "--what", what, "--side", side, "--folder", folder,
               "--epochs", str(options.epochs), "--workers", str(options.workers), "--batch",
               str(options.batch), "--bytes", str(size)]  # fmt: skip
    running = [
        subprocess.Popen([*command, "--seed", str(number)], stdin=subprocess.PIPE,
                         stdout=subprocess.PIPE, text=True)
        for number in range(jobs)
    ]  # fmt: skip
    try:
        for one in running:
            assert one.stdout is not None and one.stdout.readline() == "ready\n", side
        start = time.perf_counter()
        for one in running:
            assert one.stdin is not None
            one.stdin.write("\n")
            one.stdin.flush()
        told = [json.loads(one.stdout.readline()) for one in running if one.stdout is not None]
        makespan = time.perf_counter() - start
        for one in running:
            one.communicate(timeout=100)
        return makespan, told
    finally:
        for one in running:
            one.kill()
            one.wait()


def checks(told: list[list[dict[str, Any]]]) -> list[list[int]]:
    return [[row["check"] for row in rows] for rows in told]


def storage(options: argparse.Namespace) -> dict[str, Any]:
    count, size = STORED_QUICK if options.quick else STORED
    with scratch(MEMORY) as path:  # values of a file on a disk that changes meanwhile are not kept
        folder = str(path)
        rng = np.random.default_rng(0)
        for n in range(count):
            Path(f"{folder}/{n:05}.bin").write_bytes(rng.bytes(size))
        sizes = {"torch": 0, "cache of 20 %": count * size // 5, "cache of 110 %": count * size * 11 // 10}
        sizes = {side: max(bytes_, MiB) for side, bytes_ in sizes.items()}
        if importlib.util.find_spec("monai"):
            sizes[MONAI] = 0
        runs: dict[str, list[Any]] = {side: [] for side in sizes}
        expected = None
        for turn in turns(options.repeats, options.until):
            for side in rotated(list(sizes), turn):
                _, told = run("storage", side, folder, 1, options, sizes[side])
                expected = expected or checks(told)
                if checks(told) != expected:
                    raise SystemExit(f"{side} delivered other samples")
                runs[side].append([{**row, "read": row["read"] / (count * size)} for row in told[0]])
        return {"bytes": count * size, "samples": count, "runs": runs}


def images(options: argparse.Namespace) -> dict[str, Any]:
    from PIL import Image

    count, edge = IMAGES_QUICK if options.quick else IMAGES
    with scratch() as path:
        folder = str(path)
        rng = np.random.default_rng(0)
        for n in range(count):
            small = rng.integers(0, 256, (edge // 8, edge // 8, 3), np.uint8)
            picture = Image.fromarray(small).resize((edge, edge))
            picture.save(f"{folder}/{n:05}.jpg", quality=90)
        start = time.perf_counter()
        for path in sorted(Path(folder).glob("*.jpg")):
            np.save(path.with_suffix(".npy"), decoded(path.read_bytes()))
        prepared = time.perf_counter() - start
        time.sleep(0.1)  # memoize() does not trust a file that was written just now
        result: dict[str, Any] = {"samples": count, "prepared_s": prepared, "jobs": {}}
        for jobs in options.jobs:
            runs: dict[str, list[float]] = {side: [] for side in SIDES}
            expected = None
            for turn in turns(options.repeats, options.until):
                for side in rotated(list(SIDES), turn):
                    makespan, told = run("images", side, folder, jobs, options)
                    expected = expected or checks(told)
                    if checks(told) != expected:
                        raise SystemExit(f"{side} delivered other samples")
                    runs[side].append(makespan)
                    print(f"{jobs} jobs, {side}: {makespan:.2f} s", file=sys.stderr)
            result["jobs"][str(jobs)] = runs
        return result


def rotated(names: list[str], turn: int) -> list[str]:
    return names[turn % len(names) :] + names[: turn % len(names)]


# ---- what is shown ---------------------------------------------------------------------------


def show_storage(result: dict[str, Any]) -> None:
    from common import median, table

    torchs = result["runs"]["torch"]
    rows = []
    for side, runs in result["runs"].items():
        first, later = [], []
        for turn, run_ in enumerate(runs):
            first.append(run_[0]["s"])
            seconds = median([row["s"] for row in run_[1:]])
            later.append((seconds, seconds / median([row["s"] for row in torchs[turn][1:]])))
        read = [row["read"] for run_ in runs for row in run_[1:]]
        rows.append([side, f"{median(first):.2f}", f"{median([s for s, _ in later]):.2f}",
                     f"{min(s for s, _ in later):.2f} .. {max(s for s, _ in later):.2f}",
                     f"{median([r for _, r in later]):.2f}", f"{median(read):.2f}"])  # fmt: skip
    print(f"\n{result['samples']} samples, {result['bytes'] / MiB:.0f} MiB, storage of "
          f"{BANDWIDTH // MiB} MiB/s (emulated)")  # fmt: skip
    head = ["", "first epoch, s", "later epochs, s", "least .. greatest", "of torch's", "data sets read"]
    print(table(head, rows))


def show_images(result: dict[str, Any]) -> None:
    from common import median, table

    for jobs, runs in result["jobs"].items():
        rows = []
        for side, seconds in runs.items():
            ratio = median([s / t for s, t in zip(seconds, runs["torch"])])
            rows.append([side, f"{median(seconds):.2f}", f"{min(seconds):.2f} .. {max(seconds):.2f}",
                         f"{ratio:.2f}"])  # fmt: skip
        print(f"\n{jobs} jobs at once, {result['samples']} JPEG files; decoding them beforehand took "
              f"{result['prepared_s']:.1f} s")  # fmt: skip
        print(table(["", "makespan, s", "least .. greatest", "of torch's"], rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("what", "side", "folder"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("epochs", "workers", "batch", "bytes", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    with contextlib.suppress(KeyboardInterrupt):
        job(parser.parse_args())
