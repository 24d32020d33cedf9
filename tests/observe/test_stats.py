"""DataLoader.stats(): every documented field, numbers that agree, and the verdict."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

import minato
import minato.typing
from minato import _core
from minato.cache.datasets import NOTHING
from minato.device.copies import Copies
from minato.iterators import stats as _stats

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

NUMBER = (int, float)
#: documented field -> what it is once it is known
FIELDS: dict[str, Any] = {
    "epoch": int,
    "delivered": int,
    "errors": int,
    "failed": dict,
    "wait": {"total": NUMBER, "mean": NUMBER, "max": NUMBER, "between": NUMBER, "share": NUMBER},
    "batch_queue": {"window": int, "ready": int, "planned": int},
    "started": {"window": int, "early": int, "ahead": int, "finale": int, "order": int},
    "locality": {
        "together": bool, "group": NUMBER, "opening": NUMBER, "each": NUMBER, "away": NUMBER,
        "helped": int,
    },
    "cost": {
        "mean": NUMBER, "p50": NUMBER, "p75": NUMBER, "p90": NUMBER, "p99": NUMBER,
        "slow": (float, int, type(None)), "samples": int, "known": int,
        "collate": NUMBER, "split": bool, "hinted": int, "predicted_by": str,
        "off_by": (dict, type(None)), "sized": int, "correlation": (dict, type(None)),
    },
    "slow": list,
    "displacement": {"max": NUMBER, "mean": NUMBER},
    "worker_type": str,
    "worker_start": str,
    "workers": list,
    "retries": int,
    "deaths": int,
    "device": dict,
    "cache": dict,
    "scheduler": {"active": int, "low": int, "high": int, "stragglers": int, "decisions": list},
    "memory": {"used": int, "kept": int, "limit": int, "in_flight": int},
    "verdict": str,
    "causes": list,
}  # fmt: skip
WORKER = {
    "state": str, "pid": int, "running": (tuple, type(None)), "tasks": int, "rows": int,
    "busy": NUMBER, "cpu": NUMBER,
}  # fmt: skip
CAUSE = {"name": str, "seconds": NUMBER, "why": str, "advice": str}


class Plain(torch.utils.data.Dataset):
    def __init__(self, n: int = 24, seconds: float = 0.0) -> None:
        self.n, self.seconds = n, seconds

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds)
        return index


def conforms(value: Any, shape: Any) -> bool:
    if isinstance(shape, dict):
        return set(value) == set(shape) and all(conforms(value[k], shape[k]) for k in shape)
    return isinstance(value, shape)


def check(stats: dict[str, Any], absent: set[str]) -> None:
    """All fields, as documented; those in absent are None."""
    assert set(stats) == set(FIELDS)
    for name, shape in FIELDS.items():
        if name in absent | {"device", "cache"}:  # with these options alone: tests/device, tests/cache
            assert stats[name] is None, name
        else:
            assert conforms(stats[name], shape), (name, stats[name])
    assert all(conforms(w, WORKER) for w in stats["workers"])
    assert all(conforms(c, CAUSE) for c in stats["causes"])
    json.dumps(stats)


def test_the_documentation_names_every_field() -> None:
    page = (Path(__file__).parents[2] / "docs/api.md").read_text()
    table = page.partition("## Statistics")[2].partition("\n## ")[0]
    cells = dict(re.findall(r"^\| (`.*?`) \| (.*) \|$", table, re.M))
    assert {name for names in cells for name in re.findall(r"`(\w+)`", names)} == set(FIELDS)
    for kind, cell in ((minato.typing.Device, "`device`"), (minato.typing.Decision, "`scheduler`")):
        assert all(f"`{name}`" in cells[cell] for name in kind.__annotations__)


def test_types_name_every_field() -> None:
    hints = get_type_hints(minato.typing.Stats)
    assert set(hints) == set(FIELDS)
    for name, shape in FIELDS.items():
        if isinstance(shape, dict):
            [inner] = [t for t in (get_args(hints[name]) or (hints[name],)) if t is not type(None)]
            assert set(get_type_hints(inner)) == set(shape), name
    assert set(get_type_hints(minato.typing.Worker)) == set(WORKER)
    assert set(get_type_hints(minato.typing.Cause)) == set(CAUSE)
    assert set(get_type_hints(minato.typing.CacheStats)) == set(NOTHING)
    assert set(get_type_hints(minato.typing.Device)) == set(Copies("cpu").summary())
    for name, kind in (("Scheduling", "scheduling"), ("Batching", "batching"),
                       ("WorkerType", "worker_type"), ("OnError", "on_error")):  # fmt: skip
        for value in get_args(getattr(minato.typing, name)):
            more = {"in_order": False} if value == "ready" else {}
            if value != "native":  # which needs a dataset that offers it
                minato.DataLoader(Plain(), 2, num_workers=1, **{kind: value}, **more)


ENGINE = {
    "worker_type", "worker_start", "wait", "batch_queue", "started", "displacement", "scheduler",
    "memory", "locality",
}  # fmt: skip


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    "kw, absent",
    [
        ({}, {"displacement", "scheduler"}),
        ({"in_order": False, "batching": "ready"}, {"scheduler"}),
        ({"autoscale": (1, 3)}, {"displacement"}),
        ({"scheduling": "static"}, {"batch_queue", "started", "locality", "displacement", "scheduler"}),
    ],
)
def test_fields_before_during_and_after(persistent: bool, kw: dict, absent: set[str]) -> None:
    loader = minato.DataLoader(
        Plain(), 4, num_workers=2, persistent_workers=persistent, **kw
    )
    check(loader.stats(), ENGINE)
    assert loader.stats()["verdict"] == "Nothing was loaded yet."
    it = iter(loader)
    check(loader.stats(), absent)
    next(it)
    during = loader.stats()
    check(during, absent)
    assert len(during["workers"]) == kw.get("autoscale", (0, 2))[1]
    assert len(list(it)) == 5
    after = loader.stats()
    check(after, absent)
    assert after["delivered"] == (24 if "batching" in kw else 6)
    del it
    assert loader.stats()["delivered"] == after["delivered"]
    check(loader.stats(), absent)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterable_dataset(workers: int) -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(range(5))

    loader = minato.DataLoader(Stream(), 2, num_workers=workers)
    absent = {"batch_queue", "started", "locality", "displacement", "scheduler"}
    check(loader.stats(), ENGINE)
    count = len(list(loader))
    check(loader.stats(), ENGINE - {"wait"} if workers == 0 else absent)
    assert loader.stats()["delivered"] == count


def test_without_workers() -> None:
    loader = minato.DataLoader(Plain(), 4)
    check(loader.stats(), ENGINE)
    it = iter(loader)
    next(it)
    check(loader.stats(), ENGINE - {"wait"})
    assert loader.stats()["delivered"] == 1
    assert "Too early to say" in loader.stats()["verdict"]
    list(it)
    del it
    assert loader.stats()["delivered"] == 6
    assert "The trainer loads by itself" in loader.stats()["verdict"]


# ---- numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kw", [{}, {"scheduling": "static"}, {"in_order": False, "batching": "ready"}]
)
def test_numbers_agree(kw: dict) -> None:
    loader = minato.DataLoader(Plain(30, 0.002), 4, num_workers=2, **kw)
    for _ in loader:
        pass
    stats = loader.stats()
    workers = stats["workers"]
    assert sum(w["rows"] for w in workers) == 30
    assert sum(w["busy"] for w in workers) >= 30 * 0.002
    assert all(0 <= w["cpu"] and w["tasks"] <= w["rows"] for w in workers)
    wait = stats["wait"]
    assert 0 <= wait["mean"] <= wait["max"] <= wait["total"] + 1e-9
    assert 0 < wait["share"] <= 1
    assert stats["retries"] == stats["deaths"] == stats["errors"] == 0
    assert 0 <= stats["memory"]["used"] <= stats["memory"]["limit"]
    assert stats["memory"]["in_flight"] == 0
    if not kw:
        assert sum(stats["started"].values()) == sum(w["tasks"] for w in workers)
        assert stats["batch_queue"] == {"window": 4, "ready": 0, "planned": 0}


def test_costs_equal_sample_durations() -> None:
    class Uneven(Plain):
        def __getitem__(self, index: int) -> int:
            time.sleep(0.06 if index == 7 else 0.004)
            return index

    loader = minato.DataLoader(Uneven(20), 4, num_workers=2)
    for _ in loader:
        pass
    stats = loader.stats()
    cost = stats["cost"]
    assert cost["samples"] == cost["known"] == 20
    assert cost["p50"] >= 0.0035 and cost["p50"] <= cost["p75"] <= cost["p90"] <= cost["p99"]
    assert cost["mean"] >= (19 * 0.004 + 0.06) / 20 * 0.9
    seconds = [s for _index, s in stats["slow"]]
    assert len(seconds) == 10 and seconds == sorted(seconds, reverse=True)
    assert dict(stats["slow"])[7] >= 0.06


def test_signal_checks_do_not_split_waits() -> None:
    """A wait of more than half a second is one wait."""
    it: Any = iter(minato.DataLoader(Plain(2, 1.2), 1, num_workers=1))
    next(it)
    assert it._engine.progress()["waits"] == 1
    del it


def test_epochs_and_errors_are_counted() -> None:
    class Failing(Plain):
        def __getitem__(self, index: int) -> int:
            if index == 5:
                raise LookupError("bad sample")
            return index

    for kw in ({}, {"scheduling": "static"}, {"in_order": False, "batching": "ready"}):
        loader = minato.DataLoader(
            Failing(12), 4, num_workers=1, persistent_workers=True, **kw
        )
        for epoch in range(2):
            it = iter(loader)
            failed = 0
            while True:
                try:
                    next(it)
                except StopIteration:
                    break
                except LookupError:
                    failed += 1
            stats = loader.stats()
            assert failed == 1 and stats["errors"] == epoch + 1 and stats["epoch"] == epoch
            assert stats["delivered"] == (12 if "batching" in kw else 3)


@pytest.mark.parametrize("options", [{}, {"scheduling": "static"}, {"num_workers": 0}])
def test_stats_after_workers_ended_hold_no_memory(options: dict[str, Any]) -> None:
    loader = minato.DataLoader(torch.zeros(12, 1000), 4, **{"num_workers": 1, **options})
    for epoch in range(3):
        kept = list(loader)
        stats = loader.stats()
        assert stats["epoch"] == epoch and stats["delivered"] == len(kept) == 3
        if loader.num_workers:
            memory = stats["memory"]
            assert memory["limit"] > 0 and memory["used"] == memory["kept"] == memory["in_flight"] == 0


def test_damaged_worker_entry_is_reported() -> None:
    """It is the worker's own, and may say anything until that is found out."""
    it: Any = iter(minato.DataLoader(range(8), num_workers=1))
    entry = it._engine.workers()[0]
    assert _stats._worker(entry | {"state": 77})["state"] == "damaged"
    assert _stats._worker(entry | {"state": 3})["state"] == "ready"


def test_displacement_of_ready_batches() -> None:
    second_batch = torch.multiprocessing.get_context("fork").Event()

    class FirstIsSlow(Plain):
        def __getitem__(self, index: int) -> int:
            assert index > 0 or second_batch.wait(60)
            return index

    loader = minato.DataLoader(
        FirstIsSlow(40), 4, num_workers=2, in_order=False, batching="ready"
    )
    it = iter(loader)
    first, second = next(it).tolist(), next(it).tolist()
    second_batch.set()
    rest = [index for batch in it for index in batch.tolist()]
    assert 0 not in first + second and sorted(first + second + rest) == list(range(40))
    found = loader.stats()["displacement"]
    # in batches: sample 0 came after two
    assert 0 < found["mean"] < found["max"] and 2 <= found["max"] < 10


ENDS = """
import sys
import minato

loader = minato.DataLoader(range(4), num_workers=1)
iterator = iter(loader)
next(iterator)
before = set(sys.modules)
del iterator
print(*(name for name in sorted(set(sys.modules) - before) if name.startswith("encodings.")))
"""


def test_an_iterator_that_ends_imports_no_codec() -> None:
    """It may be garbage, collected while that codec is being imported, and then there is none."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ENDS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == done.stderr.strip() == ""


def test_epoch_end_judges_nothing_until_stats_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = []
    monkeypatch.setattr(_stats, "verdict", lambda *given: judged.append(given) or "judged")
    loader = minato.DataLoader(Plain(8), num_workers=1)
    list(loader)
    assert judged == []
    assert [loader.stats()["verdict"] for _ in range(2)] == ["judged"] * 2


@pytest.mark.parametrize("options, expected", [
    ({}, {"balanced": True, "ready": False, "persistent": False, "prefetch": 2, "prefetches": False}),
    ({"scheduling": "static"}, {"balanced": False, "prefetches": None, "fetch": 0.0}),
    ({"batching": "ready", "in_order": False}, {"ready": True, "prefetches": None}),
    ({"persistent_workers": True}, {"persistent": True, "epochs": 1, "sets_epoch": False}),
    ({"persistent_workers": True, "prefetch_next_epoch": True, "prefetch_factor": 5},
     {"prefetches": True, "prefetch": 5}),
])  # fmt: skip
def test_verdict_is_given_facts_of_the_run(
    options: dict[str, Any], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(_stats, "verdict", lambda *told: given.append(told) or "judged")
    loader = minato.DataLoader(Plain(8), 2, num_workers=1, **options)
    for _ in range(2):
        list(loader)
    loader.stats()
    [(_, batches, facts, _)] = given
    assert {name: getattr(facts, name) for name in expected} == expected
    assert facts.cores == _core.machine()["cpus"] and not facts.iterable and batches >= 4
    if facts.balanced:
        assert facts.first > 0 and facts.mean > 0 and facts.fetch == pytest.approx(2 * facts.mean)
        assert facts.slowest[0] in range(8)


class Burns(Plain):
    """Samples of 10 ms of CPU time."""

    def __getitem__(self, index: int) -> int:
        end = time.thread_time() + 0.01
        while time.thread_time() < end:
            pass
        return index


@pytest.mark.parametrize("scheduling", ["balanced", "static"])
def test_cpu_time_of_tasks_after_wait_counts(scheduling: str) -> None:
    """One batch at a time is asked for, so the worker waits before each, the first included."""
    loader = minato.DataLoader(Burns(12, 0.0), 1, sampler=list(range(12)), num_workers=1,
                               prefetch_factor=1, scheduling=scheduling)
    assert len(list(loader)) == 12
    [worker] = loader.stats()["workers"]
    assert 0.12 <= worker["cpu"] <= worker["busy"] + 0.01


def test_the_slowest_are_found_without_sorting_all():
    rng, model = random.Random(2), _core.CostModel(500)
    walls = {i: rng.choice((100, 200, rng.randrange(1000))) for i in rng.sample(range(500), 400)}
    for index, wall in walls.items():
        model.observe(index, wall)
    order = sorted(walls.items(), key=lambda pair: (-pair[1], pair[0]))
    for most in (0, 1, 7, 100):
        assert model.slowest(most) == order[:most]
    assert len(model.slowest(10**9)) == 100 and model.slowest(-1) == []
    assert _core.CostModel(0).slowest(3) == _core.CostModel(9).slowest(3) == []
