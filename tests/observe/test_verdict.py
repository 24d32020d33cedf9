"""The verdict: for each case, with statistics made up, it names the cause and advises.

tests/observe/test_advice.py runs programs and tries the advice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from minato.cache.misses import Missed
from minato.observe.verdict import SMALL_CACHE, Alone, Cause, Facts, alone, causes
from minato.observe.verdict import verdict as verdict_of


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
        ({}, {"starts": 4.0, "epochs": 8, "prefetches": True}, "of 8 later epochs. Longer epochs have fewer"),
        ({}, {"starts": 4.0, "epochs": 8, "prefetches": None}, "of 8 later epochs. Longer epochs have fewer"),
        ({}, {"starts": 4.0, "epochs": 8, "sets_epoch": True}, "of 8 later epochs. Longer epochs have fewer"),
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
