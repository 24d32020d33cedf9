"""Costs known from the draw: how well hints predict, and how much less a step waits.

    python benchmarks/draws.py [--data FOLDER] [--labels FOLDER] [--held-out 512] [--repeats 5]
        [--json FILE] [--quick] [--only draws|files]

"Prediction": the reference transforms of the 3D U-Net (unet3d/transforms.py, patches of 128) run
over volumes with real KiTS19 labels, in this process. The first 16 samples of each case teach the
cost model of the loader; the others are held out. Each predictor says what a held-out sample will
cost before it is made: what the same index has cost before ("history"), the bytes of its files,
the model without a hint, which weighs the two, and the model with the dataset's hint. The table shows
correlation and rank correlation with the CPU time that the sample took.

"Waiting": four workers replay these costs in samples that sleep. Each epoch draws them anew, as the
transforms do, or a sample costs the same in each epoch ("steady"). Steps keep the workers busy for
85 % of their time. The same dataset runs without a hint, with its hint, and with bad ones, in turns;
all must deliver the same samples. "Waited" is the sum of the time in next(), and "epochs" their
time, both without the first epoch. The ratio is to the run without a hint in the same repeat.

"Files": the same steps, with samples that sleep by the bytes of a file, or by something else. The
dataset lists its files, so that the loader knows their bytes, or hides the list. The first epoch
counts, too, because bytes are known before any sample was made.

Volumes come from --data (made by unet3d.preprocess), else they are painted over --labels
(MINATO_KITS19, else ../shared/data/kits19) and kept in --data.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from torch.utils.data import Dataset

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import minato  # noqa: E402
from minato._core import CostModel, Seeder  # noqa: E402
from minato.seeding.find_generators import Growing  # noqa: E402
from minato.seeding.generator_states import sample_seed  # noqa: E402
from unet3d import phantom, preprocess, transforms  # noqa: E402
from unet3d.data import VolumeDataset, list_cases  # noqa: E402

TAUGHT = 16  # samples of each case before those that are held out
WORKERS, BATCH, SAMPLES, EPOCHS = 4, 2, 240, 4
BUSY = 0.85  # share of their time that the workers need for the steps


# ---- prediction ------------------------------------------------------------------------


def prepare(folder: Path, labels: Path) -> Path:
    """A folder of preprocessed cases."""
    if not (folder / "checksums.json").exists():
        painted = folder / "painted"
        phantom.main(["--labels", str(labels), "--out", str(painted)])
        preprocess.main(["--source", str(painted), "--out", str(folder)])
    return folder


def measure(folder: Path, held_out: int) -> list[dict[str, Any]]:
    """Makes samples and predicts each beforehand: rows of what was said and what it took."""
    cases = list_cases(folder)
    dataset = VolumeDataset(cases, transforms.train_transforms((128,) * 3))
    model, unhinted, seeder = CostModel(len(cases)), CostModel(len(cases)), Growing([]).seeder
    unhinted.tell_bytes(array("q", range(len(cases))), array("q", [c.nbytes for c in cases]))
    keys = Seeder([])
    rows = []
    total = TAUGHT * len(cases) + held_out
    for place in range(total):
        index = place % len(cases)
        hint = dataset.cost_hint(index, seed=sample_seed(*keys.sample(1, 0, place, 0)))
        assert hint is not None
        row = {"index": index, "bytes": cases[index].nbytes, "hint": hint,
               "foreground": hint > cases[index].nbytes,
               "history": model.predict(index) / 1e9, "model": model.predict(index, hint) / 1e9,
               "weighed": unhinted.predict(index) / 1e9}
        seeder.seed(1, 0, place)
        wall, cpu = time.perf_counter(), time.thread_time()
        dataset[index]
        row["cpu"], row["wall"] = time.thread_time() - cpu, time.perf_counter() - wall
        model.observe(index, int(row["cpu"] * 1e9), hint)
        unhinted.observe(index, int(row["cpu"] * 1e9))
        rows.append(row)
        if sys.stderr.isatty():
            print(f"\r{place + 1} of {total} samples", end="", file=sys.stderr)
    return rows


def ranks(values: np.ndarray) -> np.ndarray:
    """Places in order, equal values at their mean place."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((ends - counts + ends - 1) / 2)[inverse]


def correlation(a: Any, b: Any) -> float:
    return float(np.corrcoef(np.asarray(a, float), np.asarray(b, float))[0, 1])


def predictions(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    held = [row for row in rows[TAUGHT * len({r["index"] for r in rows}):]]
    actual = np.array([row["cpu"] for row in held])
    found = []
    for name, said in (("history", "history"), ("bytes of its files", "bytes"),
                       ("bytes and history, weighed", "weighed"), ("hint of the draw", "model")):
        values = np.array([row[said] for row in held], float)
        found.append({"predictor": name, "correlation": correlation(values, actual),
                      "rank": correlation(ranks(values), ranks(actual)), "samples": len(held)})
    return found


# ---- waiting ---------------------------------------------------------------------------


class Replay(Dataset[Any]):
    """Sleeps for what a sample of the same case and draw has cost. costs[case][foreground]."""

    def __init__(self, costs: list[tuple[list[float], list[float]]], sizes: list[int],
                 scale: float, steady: bool) -> None:
        self.costs, self.sizes, self.scale, self.steady = costs, sizes, scale, steady

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, float]:
        case = index % len(self.costs)
        drawn = random.random()
        foreground = index % 3 == 0 if self.steady else drawn < 0.4
        known = self.costs[case][foreground]
        cost = statistics.median(known) if self.steady else random.choice(known)
        time.sleep(cost * self.scale)
        return index, drawn


#: what a dataset says that knows the cost of a sample, in a unit of its own
HINTS: dict[str, Callable[[float, int], float]] = {
    "its hint": lambda cost, index: cost,
    "constant hint": lambda cost, index: 1.0,
    "opposite hint": lambda cost, index: 1 / cost,
    "1,000 x off for half": lambda cost, index: cost * (1000 if index % 2 else 1),
}


class Hinted(Replay):
    def __init__(self, says: Callable[[float, int], float], *rest: Any) -> None:
        super().__init__(*rest)
        self.says = says

    def cost_hint(self, index: int, *, seed: int | None = None, epoch: int | None = None) -> float:
        foreground = index % 3 == 0 if self.steady else minato.draws(seed).random.random() < 0.4
        size = self.sizes[index % len(self.sizes)]
        return self.says(size * (transforms.FOREGROUND_COST if foreground else 1.0), index)


def epochs_of(dataset: Dataset[Any], step: float) -> dict[str, Any]:
    """Trains for some epochs with steps that sleep."""
    torch.manual_seed(3)
    loader: Any = minato.DataLoader(dataset, BATCH, shuffle=True, num_workers=WORKERS,
                                    persistent_workers=True)
    digest, waited, took, first = hashlib.sha256(), 0.0, 0.0, 0.0
    for epoch in range(EPOCHS):
        begins = time.perf_counter()
        batches = iter(loader)
        while True:
            asks = time.perf_counter()
            batch = next(batches, None)
            if epoch:
                waited += time.perf_counter() - asks
            if batch is None:
                break
            digest.update(repr([part.tolist() for part in batch]).encode())
            time.sleep(step)
        took += (time.perf_counter() - begins) if epoch else 0.0
        first = first if epoch else time.perf_counter() - begins
    cost = loader.stats()["cost"]
    return {"waited": waited, "took": took, "first": first, "digest": digest.hexdigest(),
            "by": cost["predicted_by"], "correlation": cost["correlation"]}


def in_turns(
    contenders: dict[str, Dataset[Any]], repeats: int, step: float
) -> dict[str, list[dict[str, Any]]]:
    """Runs of each contender. Those of the same costs, the name's first part, must deliver the same
    samples."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    names = list(contenders)
    for repeat in range(repeats):
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            found[name].append(epochs_of(contenders[name], step))
    digests: dict[str, str] = {}
    for name, runs in found.items():
        costs = name.partition(",")[0]
        if {digests.setdefault(costs, runs[0]["digest"])} != {run["digest"] for run in runs}:
            raise SystemExit(f"{name!r} delivered other samples than another loader of {costs!r}")
    return found


def waiting(rows: list[dict[str, Any]], repeats: int, mean_s: float) -> list[dict[str, Any]]:
    cases = sorted({row["index"] for row in rows})
    costs = [tuple([row["cpu"] for row in rows if row["index"] == c and row["foreground"] == f]
                   for f in (False, True)) for c in cases]
    sizes = [next(row["bytes"] for row in rows if row["index"] == c) for c in cases]
    mean = statistics.mean(row["cpu"] for row in rows)
    scale = mean_s / mean
    step = mean_s * BATCH / WORKERS / BUSY
    contenders: dict[str, Dataset[Any]] = {}
    for kind, steady in (("drawn anew", False), ("steady", True)):
        given = costs, sizes, scale, steady
        contenders[f"{kind}, no hint"] = Replay(*given)
        contenders |= {f"{kind}, {name}": Hinted(says, *given) for name, says in HINTS.items()}
    found = in_turns(contenders, repeats, step)
    steps = step * (EPOCHS - 1) * SAMPLES / BATCH
    told = []
    for name, runs in found.items():
        plain = found[f"{name.partition(',')[0]}, no hint"]
        told.append({"name": name, "steps": steps, "by": runs[-1]["by"], "ratios": [
            own["took"] / other["took"] for own, other in zip(runs, plain, strict=True)],
            **{part: [run[part] for run in runs] for part in ("waited", "took", "first")}})
    return told


# ---- files -----------------------------------------------------------------------------


class Files(Dataset[Any]):
    """Sample i sleeps for seconds[i], times a factor that each epoch draws (noise > 0)."""

    def __init__(self, paths: list[str], seconds: list[float], noise: float, listed: bool) -> None:
        #: a list that the loader finds, or one that it does not look into
        self.paths: Any = paths if listed else {"hidden": paths}
        self.seconds, self.noise = seconds, noise

    def __len__(self) -> int:
        return len(self.seconds)

    def __getitem__(self, index: int) -> tuple[int, float]:
        drawn = random.random()
        factor = random.lognormvariate(0, self.noise) if self.noise else 1.0
        time.sleep(self.seconds[index] * factor)
        return index, drawn


def files(repeats: int, mean_s: float) -> list[dict[str, Any]]:
    """Lengths spread as those of recordings do: a few are many times as long as most."""
    draw = random.Random(5)
    sizes = [round((1 << 20) * draw.lognormvariate(0, 1.2)) for _ in range(SAMPLES)]
    mean = statistics.mean(sizes)
    by_size = [mean_s * (0.1 + 0.9 * size / mean) for size in sizes]
    others = draw.sample(by_size, len(by_size))
    step = mean_s * BATCH / WORKERS / BUSY
    with tempfile.TemporaryDirectory() as folder:
        paths = [os.path.join(folder, f"{i}.bin") for i in range(SAMPLES)]
        for path, size in zip(paths, sizes, strict=True):
            with open(path, "wb") as file:
                file.truncate(size)
        found = in_turns({
            "by bytes, hidden": Files(paths, by_size, 0.3, listed=False),
            "by bytes, listed": Files(paths, by_size, 0.3, listed=True),
            "of other things, hidden": Files(paths, others, 0.0, listed=False),
            "of other things, listed": Files(paths, others, 0.0, listed=True),
        }, repeats, step)
    return [{"name": name, "runs": runs} for name, runs in found.items()]


# ---- the table -------------------------------------------------------------------------


def show_files(found: list[dict[str, Any]], repeats: int) -> None:
    print(f"\nFiles, {repeats} repeats in turns, {WORKERS} workers:")
    rows = []
    for each in found:
        runs = each["runs"]
        first, took = ([run[name] for run in runs] for name in ("first", "took"))
        known = runs[-1]["correlation"] or {}
        told = ", ".join(f"{name} {r:.2f}" for name, r in known.items() if r is not None)
        rows.append([each["name"], f"{common.median(first):.2f}", common.between(first, 1.0, ".2f"),
                     f"{common.median(took):.2f}", common.between(took, 1.0, ".2f"),
                     runs[-1]["by"], told or "-"])
    print(common.table(["costs", "first epoch, s", "(least to greatest)", "later epochs, s",
                        "(least to greatest)", "predicted by", "correlation"], rows))


def show_draws(rows: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    said = predictions(rows)
    print(f"\nPrediction, {said[0]['samples']} held-out samples:")
    print(common.table(["predictor", "correlation", "rank correlation"], [
        [s["predictor"], f"{s['correlation']:.2f}", f"{s['rank']:.2f}"] for s in said]))
    waits = waiting(rows, options.repeats, 0.005 if options.quick else 0.02)
    print(f"\nWaiting, {options.repeats} repeats in turns, {WORKERS} workers; bound: the steps "
          f"alone take {waits[0]['steps']:.2f} s:")
    print(common.table(["costs", "waited, s", "(least to greatest)", "epochs, s", "of no hint's",
                        "(least to greatest)", "first epoch, s", "predicted by"], [
        [w["name"], f"{common.median(w['waited']):.2f}", common.between(w["waited"], 1.0, ".2f"),
         f"{common.median(w['took']):.2f}", f"{common.median(w['ratios']):.3f}",
         common.between(w["ratios"], 1.0, ".3f"), f"{common.median(w['first']):.2f}", w["by"]]
        for w in waits]))
    return {"samples": rows, "predictions": said, "waiting": waits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=ROOT / "data/draws")
    parser.add_argument("--labels", type=Path, default=Path(
        os.environ.get("MINATO_KITS19") or ROOT / "../shared/data/kits19"))
    parser.add_argument("--held-out", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=("draws", "files"))
    options = parser.parse_args()
    if options.quick:
        options.held_out, options.repeats = 16, 1
    print(common.describe(common.machine()))
    result: dict[str, Any] = {"machine": common.machine()}
    if options.only != "files":
        rows = measure(prepare(options.data, options.labels), options.held_out)
        result.update(show_draws(rows, options))
    if options.only != "draws":
        result["files"] = files(options.repeats, 0.005 if options.quick else 0.02)
        show_files(result["files"], options.repeats)
    common.save(options.json, result)


if __name__ == "__main__":
    main()
