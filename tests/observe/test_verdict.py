"""The verdict: in each case it names the cause, and its advice helps when it is tried.

Samples sleep, and what is compared differs by several times, or is an order or a count.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import minato
from minato.cache.misses import Missed
from minato.observe.verdict import SMALL_CACHE, Alone, Cause, Facts, alone, causes
from minato.observe.verdict import verdict as verdict_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:DataLoader worker"),
]


class Sleeps(torch.utils.data.Dataset[Any]):
    """Samples of a given cost in seconds, some of which cost more."""

    def __init__(self, size: int, seconds: float, slow: Any = (), floats: int = 0) -> None:
        self.size, self.seconds, self.floats = size, seconds, floats
        self.slow: dict[int, float] = dict(slow)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.slow.get(index, self.seconds))
        return torch.zeros(self.floats) if self.floats else index


def run(loader: Any, step: float | Callable[[int], float], epochs: int = 1) -> dict[str, Any]:
    """The statistics after some epochs, in which a step takes some seconds."""
    for _ in range(epochs):
        for number, _batch in enumerate(loader):
            time.sleep(step(number) if callable(step) else step)
    stats: dict[str, Any] = loader.stats()
    return stats


def falls(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether the waits do, a start of new workers left out."""
    return bool(waits(after) < 0.6 * waits(before))


#: what a busy machine makes longer
BEGINNING = ("start of the workers", "first batch")


def waits(stats: dict[str, Any]) -> float:
    start = [c["seconds"] for c in stats["causes"] if c["name"] in BEGINNING]
    return float(stats["wait"]["total"]) - sum(start)


def cause(stats: dict[str, Any], passed: tuple[str, ...] = BEGINNING) -> tuple[str, str]:
    """(name, advice) of the costliest but those; the verdict has the words of the very first."""
    seconds = [c["seconds"] for c in stats["causes"]]
    assert seconds == sorted(seconds, reverse=True)
    assert stats["causes"][0]["advice"] in stats["verdict"]
    first = next(c for c in stats["causes"] if c["name"] not in passed)
    return first["name"], first["advice"]


def workers_in(advice: str) -> int:
    found = re.search(r"num_workers=(\d+)", advice)
    assert found is not None, advice
    return int(found[1])


# ---- each case, and its advice -----------------------------------------------------------------


def test_waits_at_epoch_starts_advise_prefetch_next_epoch() -> None:
    def loader(**options: Any) -> Any:
        data = Sleeps(24, 0.025)
        return minato.DataLoader(data, 8, num_workers=2, persistent_workers=True, **options)

    before = run(loader(), 0.15, epochs=5)
    name, advice = cause(before)
    assert name == "first batches of later epochs" and "prefetch_next_epoch=True" in advice
    assert "prefetch_factor" not in before["verdict"]
    assert falls(before, run(loader(prefetch_next_epoch=True), 0.15, epochs=5))


def test_slow_first_sample_advises_ready_batches() -> None:
    def loader(**options: Any) -> Any:
        return minato.DataLoader(Sleeps(32, 0.002, {0: 0.5}), 4, num_workers=2, **options)

    name, advice = cause(run(loader(), 0.001))
    assert name == "slow sample in the first batch"
    assert 'in_order=False with batching="ready"' in advice
    assert 0 not in next(iter(loader(in_order=False, batching="ready")))


class SetsUp(Sleeps):
    """The first sample of each worker loads something."""

    ready = False

    def __getitem__(self, index: int) -> Any:
        if not self.ready:
            time.sleep(0.5)
            self.ready = True
        return super().__getitem__(index)


def test_slow_first_use_is_not_blamed_on_a_sample() -> None:
    before = run(minato.DataLoader(SetsUp(48, 0.002), 4, num_workers=2), 0.001)
    name, advice = cause(before, BEGINNING[:1])
    assert name == "first batch" and "the first sample of each worker sets something up" in before["verdict"]
    assert "alone takes" not in before["verdict"] and "ready" not in advice
    assert advice == "persistent_workers=True sets it up once and not in each epoch."


@pytest.mark.parametrize("starts, advised", [(0.5, "ready"), (4.0, "prefetch_next_epoch=True")])
def test_options_that_exclude_each_other_are_not_both_advised(starts: float, advised: str) -> None:
    """A sample of 2 s in a wait of 5 s, and waits for the first batches of later epochs."""
    stats = {"deaths": 0, "wait": waited(2.0, 0.8), "workers": [], "memory": {"used": 0, "limit": 1},
             "scheduler": None, "locality": None}  # fmt: skip
    facts = Facts(starts=starts, epochs=3, slowest=(7, 2.0), first=1.5, first_slowest=(3, 1.4))
    advice = " ".join(one.advice for one in causes(stats, facts))
    assert ('batching="ready"' in advice) == (advised == "ready")
    assert ("prefetch_next_epoch=True" in advice) == (advised != "ready")
    already = " ".join(one.advice for one in causes(stats, replace(facts, prefetches=True)))
    assert 'batching="ready"' not in already


def test_slow_sample_within_an_epoch_advises_ready_batches() -> None:
    def loader(**options: Any) -> Any:
        return minato.DataLoader(Sleeps(64, 0.002, {20: 0.6}), 4, num_workers=2, **options)

    before = run(loader(), 0.01)
    name, advice = cause(before)
    assert name == "slow sample" and "sample 20 alone takes 0.6 s" in before["verdict"]
    assert 'in_order=False with batching="ready"' in advice
    batches = [batch.tolist() for batch in loader(in_order=False, batching="ready")]
    assert 20 not in batches[5]


def test_start_of_workers_advises_persistent_workers() -> None:
    started = multiprocessing.get_context("fork").Value("i", 0)

    def slow_start(_worker: int) -> None:
        time.sleep(0.5)
        with started.get_lock():
            started.value += 1

    def loader(**options: Any) -> Any:
        started.value = 0
        return minato.DataLoader(
            Sleeps(16, 0.001), 4, num_workers=2, worker_init_fn=slow_start, **options
        )

    name, advice = cause(run(loader(), 0.001, epochs=3), ())
    assert name == "start of the workers" and "persistent_workers=True" in advice
    assert started.value == 6
    run(loader(persistent_workers=True), 0.001, epochs=3)
    assert started.value == 2


def test_loading_without_workers_advises_a_number() -> None:
    def loader(workers: int) -> Any:
        return minato.DataLoader(Sleeps(64, 0.02), 4, num_workers=workers)

    before = run(loader(0), 0.05)
    name, advice = cause(before)
    assert name == "no workers" and "of the program's time" in advice
    workers = workers_in(advice)
    assert 2 <= workers <= 4
    assert falls(before, run(loader(workers), 0.05))


@pytest.mark.parametrize("scheduling", ["balanced", "static"])
def test_too_few_workers_advise_a_number(scheduling: str) -> None:
    def loader(workers: int) -> Any:
        return minato.DataLoader(
            Sleeps(128, 0.02), 4, num_workers=workers, persistent_workers=True,
            scheduling=scheduling,
        )  # fmt: skip

    before = run(loader(2), 0.02)
    name, advice = cause(before)
    assert name == "too few workers" and ("autoscale" in advice) == (scheduling == "balanced")
    assert "iterable" not in advice
    workers = workers_in(advice)
    assert 3 <= workers <= 8
    assert falls(before, run(loader(workers), 0.02))


def test_told_epochs_are_not_advised_to_begin_early() -> None:
    data = Sleeps(16, 0.05)
    sampler = torch.utils.data.DistributedSampler(data, 1, 0)  # type: ignore[var-annotated, arg-type]
    loader = minato.DataLoader(data, 4, sampler=sampler, num_workers=2, persistent_workers=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert len(list(loader)) == 4
    [advice] = [one["advice"] for one in loader.stats()["causes"] if "later epochs" in one["name"]]
    assert "calls set_epoch()" in advice and "prefetch_next_epoch" not in advice


def test_bursts_advise_a_larger_prefetch_factor() -> None:
    def loader(factor: int) -> Any:
        data = Sleeps(160, 0.01)
        return minato.DataLoader(
            data, 1, num_workers=2, persistent_workers=True, prefetch_factor=factor
        )

    def bursts(number: int) -> float:
        return 0.25 if number % 16 == 15 else 0.0

    before = run(loader(1), bursts)
    name, advice = cause(before)
    found = re.search(r"prefetch_factor=(\d+)", advice)
    assert name == "short prefetch window" and found is not None
    assert falls(before, run(loader(2 * int(found[1])), bursts))


def test_shared_lock_is_told_from_too_few_workers() -> None:
    context = multiprocessing.get_context("fork")

    class Locked(Sleeps):
        def __init__(self, locks: int) -> None:
            super().__init__(120, 0.01)
            self.locks = [context.Lock() for _ in range(locks)]

        def __getitem__(self, index: int) -> Any:
            info = minato.get_worker_info()
            assert info is not None
            with self.locks[info.id % len(self.locks)]:
                return super().__getitem__(index)

    def loader(locks: int) -> Any:
        return minato.DataLoader(Locked(locks), 4, num_workers=4, persistent_workers=True)

    before = run(loader(1), 0.02)
    name, advice = cause(before)
    assert name == "shared lock" and "of its own" in advice and "num_workers" not in advice
    assert falls(before, run(loader(4), 0.02))


def test_memory_limit_is_named_and_raised() -> None:
    def loader(limit: str) -> Any:
        data = Sleeps(72, 0.1, floats=1 << 18)
        return minato.DataLoader(
            data, 4, num_workers=4, persistent_workers=True, memory_limit=limit
        )

    def bursts(number: int) -> float:
        return 0.8 if number % 6 == 5 else 0.0

    before = run(loader("6MiB"), bursts)
    name, advice = cause(before)
    assert name == "memory limit" and "Raise memory_limit" in advice
    assert falls(before, run(loader("512MiB"), bursts))


def test_deaths_and_skipped_samples_leave_the_rest() -> None:
    once = multiprocessing.get_context("fork").Value("i", 0)

    class Fragile(Sleeps):
        def __getitem__(self, index: int) -> Any:
            if index == 9:
                with once.get_lock():
                    once.value += 1
                    dies = once.value == 1
                if dies:
                    os.kill(os.getpid(), signal.SIGKILL)
            if index == 40:
                raise ValueError("40.jpg is corrupt")
            return super().__getitem__(index)

    loader: Any = minato.DataLoader(
        Fragile(96, 0.02), 4, num_workers=2, persistent_workers=True, on_error="skip"
    )
    with pytest.warns(UserWarning, match=r"1 sample of this epoch failed"):
        stats = run(loader, 0.02)
    said = stats["verdict"]
    assert said.startswith("The trainer waits") and "num_workers=" in said
    assert "1 worker(s) died; their samples were made again" in said
    assert "1 skipped; the latest is index 40 (ValueError: 40.jpg is corrupt)." in said


# ---- by numbers that are made up ---------------------------------------------------------------


def worker(busy: float, cpu: float) -> dict[str, Any]:
    return {"state": "ready", "running": None, "busy": busy, "cpu": cpu}


def waited(most: float = 0.2, share: float = 0.5) -> dict[str, Any]:
    total = 10 * share
    return {"total": total, "mean": total / 100, "max": most, "between": 10 - total, "share": share}


COMPUTES, WAITS, IDLES = ([worker(*w)] * 2 for w in ((9.0, 8.5), (9.0, 0.5), (1.0, 1.0)))
TURNS = [worker(9.0, 4.8)] * 2
THREADS = {"worker_type": "thread"}
GROUPS = {"group": 32.0, "opening": 0.1, "each": 0.001}
SCHEDULED = {"active": 2, "low": 1, "high": 8, "stragglers": 0, "decisions": []}
SLEEPS = {"workers": WAITS}
FILLED = Missed(values=100, refused=0, seconds=17.0)
SMALL = replace(FILLED, refused=40, used=990, size=1000, enough=1500.0, saves=6.8)
FAILED = {"left_out": 2, "replaced": 1, "latest": [(7, "OSError: no file", None)]}


@pytest.mark.parametrize(
    "change, facts, words",
    [
        ({}, {}, "50% of its time (5.0 s of 10.0 s): 5.0 s because all workers compute. There are 2 for 1"),
        ({}, {"cores": 4}, "there are 2 for 4 cores. num_workers=4 (or autoscale=(2, 4)) would save"),
        ({"workers": WAITS}, {}, "because samples in all workers wait for storage, network or locks"),
        ({"workers": WAITS}, {"looks": {"storage": 9, "cpu": 20}}, "samples in all workers wait for storage."),
        ({"workers": WAITS}, {}, "num_workers=4 (or autoscale=(2, 4)) would save up to about 5.0 s."),
        ({"workers": WAITS}, {"balanced": False}, "num_workers=4 would save"),
        ({"workers": WAITS, "scheduler": SCHEDULED}, {"reason": 8}, "upper bound of 4 workers in"),
        ({"workers": WAITS}, {"queued": 12.0}, "get 8% of the core time they could use. 2 worker(s)"),
        ({"workers": WAITS}, {"looks": {"lock": 6, "sleep": 5}}, "a lock that they share (55% of"),
        ({"workers": WAITS}, {"looks": {"lock": 1, "sleep": 9}}, "wait for a timer (sleep)."),
        ({"workers": IDLES}, {}, "the prefetch window is too small. prefetch_factor=8 or more"),
        ({"workers": IDLES, "memory": {"used": 99, "limit": 100}}, {}, "memory_limit holds them"),
        ({"workers": IDLES}, {"held": 0.9}, "memory_limit holds them back"),
        ({}, {"held": 0.9}, "all workers compute"),
        ({"workers": IDLES, "scheduler": SCHEDULED}, {"reason": 2},
         "adding workers. There are 2 now, and 8 at most."),
        ({"workers": WAITS, "scheduler": SCHEDULED}, {"reason": 14},
         "ready in time now, with 2 workers of 8 at most"),
        ({"workers": WAITS, "scheduler": SCHEDULED}, {"reason": 9}, "tried and did not help"),
        ({"workers": WAITS, "scheduler": SCHEDULED}, {"reason": 13}, "no room for more workers"),
        ({}, {"collate": 0.05, "fetch": 0.01, "mean": 0.001}, "collate_fn (50 ms a batch, its"),
        ({}, {"mean": 1e-6, "fetch": 64e-6}, "making a sample (1.0 us) takes less time than sending it to the program"),
        ({"locality": GROUPS}, {}, "because about one sample in 32 takes 101 ms and the others 1 ms"),
        ({"locality": GROUPS}, {}, "76% of the work is in these few"),
        ({"locality": GROUPS, "workers": WAITS}, {}, "If they are simply slow: num_workers=4"),
        ({"locality": GROUPS | {"each": 0.01}}, {}, "all workers compute"),
        ({"locality": GROUPS | {"opening": 0.0, "group": 1.0}}, {}, "all workers compute"),
        ({"wait": waited(4.0)}, {}, "4.0 s in one wait, for one slow batch"),
        ({"wait": waited(4.0)}, {"slowest": (7, 3.9)}, "sample 7 alone takes 3.9 s"),
        ({"wait": waited(4.0)}, {"slowest": (7, 0.1)}, "in one wait, for one slow batch or a pause"),
        ({"wait": waited(4.0)}, {"first": 4.0}, "4.0 s for the first batch, which"),
        ({"wait": waited(4.0)}, {"first": 4.0, "starting": 3.9}, "3.9 s until the first worker had"),
        ({"wait": waited(4.0)}, {"first": 4.0, "starting": 3.9}, "persistent_workers=True starts them"),
        ({"wait": waited(4.9)}, {"first": 4.9, "first_slowest": (3, 4.0)}, "sample 3 alone takes 4.0 s"),
        ({}, {"starts": 4.0, "epochs": 8}, "first batch of 8 later epochs. prefetch_next_epoch=True"),
        ({}, {"starts": 4.0, "epochs": 8, "prefetches": True}, "changes the sampler"),
        ({}, {"starts": 4.0, "epochs": 8, "prefetches": None, "iterable": True}, "needs a map-style"),
        ({}, {"starts": 4.0, "epochs": 8, "prefetches": None, "ready": True}, 'needs batching="sampler"'),
        ({}, {"starts": 4.0, "epochs": 8, "prefetches": None}, 'needs scheduling="balanced"'),
        ({}, {"starts": 3.0, "epochs": 8}, "1 later"[2:]),
        ({}, {"starts": 3.0, "epochs": 8}, "during the previous epoch. 2.0 s because all workers compute."),
        ({"wait": waited(0.01, 0.01)}, {}, "hardly waits for data (1% of its time)"),
        ({"deaths": 2, "retries": 3}, {}, "compute. There are 2 for 1 core(s), so no option would"),
        ({"deaths": 2, "retries": 3}, {}, "2 worker(s) died; their samples were made again"),
        ({"deaths": 1}, {}, "no sample was made again"),
        ({"failed": FAILED}, {}, "2 skipped and 1 replaced; the latest is index 7 (OSError: no file)"),
        ({**THREADS, "deaths": 1}, {}, "1 worker thread(s) ended by SystemExit; "),
        ({**THREADS, "workers": TURNS}, {"cores": 4}, "run Python code, one at a time"),
        ({**THREADS, "workers": TURNS}, {"cores": 1}, "all workers compute"),
        ({**THREADS, "workers": COMPUTES}, {"cores": 4}, "num_workers=4"),
        ({**THREADS, "workers": WAITS}, {"cores": 4}, "samples in all workers wait for"),
        ({"workers": TURNS}, {"cores": 4}, "all workers compute"),
        (SLEEPS, {"missed": FILLED}, "5.0 s to make 100 values that the cache did not have yet. An epoch "
         "that asks for them again finds them there. Read the verdict of a later epoch before"),
        (SLEEPS, {"missed": replace(FILLED, epochs=3)}, "the cache did not have yet (once)."),
        (SLEEPS, {"missed": replace(FILLED, seconds=9.0)}, "5.0 s to make 100 values"),
        (SLEEPS, {"missed": replace(FILLED, seconds=6.0)}, "3.3 s because samples in all workers wait"),
        (SLEEPS, {"missed": replace(FILLED, seconds=6.0)}, "num_workers=3 (or autoscale=(2, 3)) would save"),
        (SLEEPS, {"missed": replace(FILLED, seconds=6.0)}, " 1.7 s to make 100 values that the cache"),
        (SLEEPS, {"missed": replace(FILLED, again=True)}, "5.0 s because samples in all workers wait"),
        (SLEEPS, {"missed": SMALL}, "and it has no room for 40 of them. "
         'cache="1.5 KiB" would keep all, and save about 6.8 s of work an epoch.'),
        (SLEEPS, {"missed": replace(SMALL, option="minato.Cache")}, 'minato.Cache("1.5 KiB") would keep'),
        (SLEEPS, {"missed": replace(SMALL, enough=None)}, "It uses 990 B of its 1000 B: a larger cache"),
        (SLEEPS, {"missed": replace(SMALL, enough=None, size=0)}, "Larger caches would keep them."),
        ({"workers": IDLES}, {"missed": FILLED}, "the prefetch window is too small"),
        ({"wait": waited(0.01, 0.01)}, {"missed": FILLED}, "hardly waits for data"),
    ],
)  # fmt: skip
def test_verdict_names_the_cause(change: dict, facts: dict, words: str) -> None:
    """A trainer that waits half of ten seconds while two workers compute, changed."""
    stats = {
        "deaths": 0,
        "retries": 0,
        "worker_type": "process",
        "wait": waited(),
        "workers": COMPUTES,
        "memory": {"used": 10, "limit": 100},
        "scheduler": None,
        "locality": None,
        **change,
    }
    text = verdict_of(stats, 100, Facts(**facts))
    assert words in text and text.count("\n") == 0 and text.endswith(".")
    found = causes(stats, Facts(**facts))
    assert sum(c.seconds for c in found) <= stats["wait"]["total"] + 1e-9


def test_persistent_loader_is_not_advised_to_persist() -> None:
    stats = {"deaths": 0, "wait": waited(4.9), "workers": [], "memory": {"used": 0, "limit": 1}}
    stats |= {"scheduler": None, "locality": None}
    text = verdict_of(stats, 100, Facts(first=4.9, starting=4.0, persistent=True))
    assert "first worker had started (once)." in text
    assert "persistent_workers" not in text


def test_small_cache_is_named_though_others_cost_more() -> None:
    stats = {"deaths": 0, "wait": waited(4.9), "workers": []}
    found = [Cause(name, seconds, f"{name} does", "Help it.")
             for name, seconds in (("first", 3.0), ("second", 2.0), (SMALL_CACHE, 0.1), ("last", 0.1))]  # fmt: skip
    text = verdict_of(stats, 100, Facts(), found)
    assert text.endswith("first does. Help it. Second does. Help it. Cache too small does. Help it.")


def test_too_early_for_a_verdict() -> None:
    assert "Too early" in verdict_of({"deaths": 0}, 1, Facts())


@pytest.mark.parametrize(
    "case, words",
    [
        (Alone(2, 1.0, 1.0, 0.5, 0.5), "by itself. Too early to say more: 2 batch(es)"),
        (Alone(9, 0.1, 9.9, 0.1, 9.9, 4, 0.1), "loads by itself, which takes 1% of its time."),
        (Alone(9, 6.0, 4.0, 0.1, 0.0, 4, 0.1), "num_workers=2 would save about 6.0 s of that, 60%"),
        (Alone(9, 9.0, 1.0, 9.0, 0.0, 4, 0.1), "num_workers=4 would save about 7.8 s of that, 78%"),
        (Alone(9, 5.0, 5.0, 5.0, 15.0, 2, 0.1), "because the cores are busy already."),
        (Alone(9, 0.4, 9.6, 0.4, 0.0, 4, 0.1), "Workers would save little of that."),
        (Alone(9, 5.0, 5.0, 5.0, 0.0, 4, 5e-6), "so cheap that workers would not help"),
    ],
)  # fmt: skip
def test_verdict_without_workers(case: Alone, words: str) -> None:
    text, found = alone(case)
    assert words in text and [c.seconds for c in found] in ([], [case.loading])


@pytest.mark.parametrize(
    "made, words, seconds",
    [
        (FILLED, "(6.0 s of 10.0 s): 6.0 s to make 100 values that the cache did not have yet. An", [6.0]),
        (replace(FILLED, seconds=1.5), "num_workers=2 would save about 4.5 s of that", [4.5, 1.5]),
        (replace(FILLED, seconds=1.5), " 1.5 s to make 100 values that the cache did", [4.5, 1.5]),
        (replace(SMALL, seconds=4.0), 'would keep all, and save', [4.0, 2.0]),
        (replace(FILLED, again=True), "num_workers=2 would save about 6.0 s of that", [6.0]),
    ],
)  # fmt: skip
def test_misses_without_workers_are_told_apart(
    made: Missed, words: str, seconds: list[float]
) -> None:
    text, found = alone(Alone(9, 6.0, 4.0, 0.1, 0.0, 4, 0.1, made))
    assert words in text and [c.seconds for c in found] == pytest.approx(seconds)
