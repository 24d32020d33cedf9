"""From numbers to one limit and to predictions: no program is run."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minato.analyze import report
from minato.analyze.advice import (
    _paste_for,
    add_base_rate,
    candidates,
    drop_small_gains,
    enter_check,
    limit,
)
from minato.analyze.facts import (
    Facts,
    fit_scaling,
    reading_stages,
    simulate_rate,
    virtual_rate,
    watch_facts,
)
from minato.analyze.measure import finish_report, name_loaders
from minato.analyze.records import (
    Change,
    Rate,
    RateRequest,
    Report,
    StageTimes,
    Told,
    Used,
    parse,
)


def stage(label: str, seconds: float, cpu: float | None = None, kind: str = "call",
          inside: tuple[str, ...] = ("",), reads: bool = False, **more: Any) -> StageTimes:  # fmt: skip
    cpu = seconds if cpu is None else cpu
    return StageTimes(label, kind, reads, seconds, cpu, inside=list(inside), **more)


def facts(**given: Any) -> Any:
    """A program of two workers on two cores that waits for half of its time. ends, again: of each loader of two
    workers, what the end of an epoch costs, and seconds until the next one's first batch."""
    watch = {"asked": 400.0, "delivered": 200.0, "wait": 0.5, "step": 0.02, "inside": 0.02,
             "batch": 8, "batches": 40, "steps": 30, "step_cores": 0.0, "by": "step", "start": 0.1,
             "starts": 1}  # fmt: skip
    watch.update(given.pop("watched", {}))
    loader = {"class": "DataLoader", "num_workers": given.pop("workers", 2), "batch_size": 8,
              "samples": 1000, "prefetch_factor": 2, "scheduling": None, "persistent_workers": True}  # fmt: skip
    loader.update(given.pop("loader", {}))
    costs = given.pop("costs", [(0.01, 0.01)] * 64)
    rates = given.pop("rates", {("torch", 1): 100.0, ("torch", 2): 200.0, ("minato", 2): 200.0})
    ends, usage = given.pop("ends", {}), {"others": 0.0}
    again = given.pop("again", ends)
    work = {"costs": costs, "stages": given.pop("stages", []), "cache": None, "collate": 0.0}
    work.update(given.pop("work", {}))
    rows = [{"loader": k, "workers": n, "rate": r, "usage": usage, "samples": 10**6} for (k, n), r in rates.items()]
    for row in rows:
        if row["workers"] == 2:
            row["end"], row["again"] = ends.get(row["loader"]), again.get(row["loader"])
    return parse(Report, {
        "watched": watch, "loader": loader, "work": work, "machine": {"cores": 2, "memory_available": 10**9},
        "rates": rows, **given,
    })  # fmt: skip


def watched(told: dict[str, Any], others: float = 0.0) -> Any:
    return watch_facts(parse(Told, told), others)


def predicts(rate: float) -> Change:
    return Change("", rate, "")


def contending(label: str, more: float, samples: int = 50, cpu: float = 0.0, **kinds: Any) -> dict[str, Any]:
    one = {"samples": samples, "seconds": 0.01, "cpu": 0.0, "stages": [stage(label, 0.008, 0.0, **kinds)]}
    several = {"samples": samples, "seconds": 0.01 + more, "cpu": cpu,
               "stages": [stage(label, 0.008 + more, cpu, **kinds)]}  # fmt: skip
    return {"processes": 2, "one": one, "several": several, "locks": []}


def crowded(**more: Any) -> dict[str, Any]:
    """A step that takes 50 ms with both cores, and 100 ms next to workers, which keep them as busy."""
    watched = {"wait": 0.01, "step": 0.1, "step_alone": 0.05, "step_cores": 2.0, "asked": 80.0, "delivered": 79.0}
    return {"watched": {**watched, **more.pop("watched", {})}, "costs": [(0.0125, 0.0125)] * 64,
            "rates": {("torch", 1): 80.0, ("torch", 2): 160.0, ("minato", 2): 160.0}, **more}  # fmt: skip


def of_threads(
    seconds: float, gil: str = "lets go", locks: tuple[str, ...] = (), processes: float = 0.01, kind: str = "call",
    **given: Any,
) -> dict[str, Any]:  # fmt: skip
    """A program with two threads: what each of two threads, and of two processes, takes for a sample that one
    makes in 10 ms."""
    both = contending("decode()", processes - 0.01, kind=kind)
    both["threads"] = threads(seconds, *locks)
    return {"contend": both, "rates": {("minato", 1): 100.0, ("minato", 2): 100.0}, "own": "minato",
            "work": {"gil": gil}, "loader": {"worker_type": "thread"}, **given}  # fmt: skip


def threads(seconds: float, *locks: str) -> dict[str, Any]:
    alone, several = ({"samples": 9, "seconds": each} for each in (0.01, seconds))
    return {"alone": alone, "several": several, "locks": list(locks)}


SLEEPS = {"costs": [(0.01, 0.001)] * 40}
UNEVEN = {"costs": ([(0.003, 0.0)] * 99 + [(0.3, 0.0)]) * 2}
EVEN = {"costs": [(0.006, 0.0)] * 200}
FOUR = {"rates": {("torch", 1): 160.0, ("torch", 4): 380.0, ("minato", 4): 390.0}, "workers": 4}
ALONE: dict[str, Any] = {"rates": {("torch", 0): 100.0, ("torch", 1): 95.0, ("torch", 2): 190.0}, "workers": 0}
CHEAP: dict[str, Any] = {
    "costs": [(1e-5, 1e-5)] * 64, "watched": {"asked": 1e5, "step": 8e-5},
    "rates": {("torch", 1): 3000.0, ("torch", 2): 3000.0, ("minato", 2): 3000.0, ("hand-over", 2): 3000.0},
}  # fmt: skip
WAITS_FOR_READS = [stage("load()", 0.008, 0.0), stage("file read", 0.0001, kind="read", reads=True, inside=("load()",))]
#: 1,000 samples at 200/s take 5 s, and spawned workers take 10 more. The study forks its own
ANEW: dict[str, Any] = {"watched": {"start": 10.0, "starts": 4}, "stages": [stage("transform 0 (Slow)", 0.009)]}
SPAWNED = {**ANEW, "loader": {"persistent_workers": False, "start_method": "spawn"}}


def short_epochs(length: int) -> dict[str, Any]:
    """Epochs of 8 batches have no middle, so what their end costs was not measured apart."""
    return {"watched": {"start": 0.6, "starts": 9}, "rates": {("torch", 1): 90.0, ("torch", 2): 90.0},
            "costs": [(1e-5, 1e-5)] * 64, "again": {"torch": 0.6},
            "loader": {"persistent_workers": False, "start_method": "fork", "length": length}}  # fmt: skip


def collates(free: float) -> dict[str, Any]:
    """Joining takes 30 ms for each sample, and two workers hand over one each 1 / free seconds."""
    rates = {("torch", 1): 50.0, ("torch", 2): 60.0, ("hand-over", 2): free}
    return {"work": {"collate": 0.03}, "rates": rates}


def sampled(seconds: float, **given: Any) -> dict[str, Any]:
    return {"sampler": {"name": "Weighted", "place": ["draw.py", 9], "seconds": seconds}, **given}


def drawn(workers: int) -> dict[str, Any]:
    """A batch of 8 is drawn in 160 ms, and the step takes 20."""
    rates = {("torch", 0): 1000.0, ("torch", 1): 900.0, ("torch", 2): 1800.0, ("minato", 2): 1800.0}
    return sampled(0.02, workers=workers, rates=rates, costs=[(0.001, 0.001)] * 64, watched={"inside": 0.16})


def opens(again: float) -> dict[str, Any]:
    """It waits for reads, which keeping the file open saves. Files of which each sample has its own stay."""
    found = stage("zipfile.ZipFile", 0.001, kind="open", whole=0.008, again=again, place=["a.py", 3])
    inner = stage("file read", 0.007, 0.0, kind="read", reads=True, inside=("zipfile.ZipFile",))
    return {"stages": [found, inner], "costs": [(0.01, 0.003)] * 64}


def reads_again(kept_open: float | None) -> dict[str, Any]:
    """The first read of a file takes longer, and each is a first one: only keeping it open shows that."""
    found = stage("h5py.File", 0.003, kind="open", whole=0.003, again=0.99, place=["a.py", 3])
    return {"stages": [found, stage("read()", 0.0065)], "work": {"kept_open": kept_open}}


#: what was found -> the limit, and words of the first line
LIMITS: dict[str, tuple[dict[str, Any], str, str]] = {
    "hardly waits": ({"watched": {"wait": 0.01}}, "step", ""),
    "waits little": ({"watched": {"wait": 0.05}}, "nothing", ""),
    "workers slow the step down": (crowded(), "cores", "the step waits for a core 50% of its time, and samples take 50%"),
    "they use no cores to speak of": (crowded(costs=[(0.0001, 0.0001)] * 64), "step", ""),
    "the step has its cores": (crowded(watched={"step_alone": 0.095}), "step", ""),
    "others may have them": (crowded(machine={"cores": 2, "memory_available": 10**9, "others": 0.5}), "step", ""),
    "wait for a lock": (
        {"contend": contending("wait for a lock", 0.008, kind="lock", inside=("tokenize()",)), **SLEEPS},
        "lock", "tokenize()"),
    "reads wait": ({"contend": contending("read()", 0.008, reads=True), **SLEEPS}, "storage", ""),
    "something waits": ({"contend": contending("render()", 0.008), **SLEEPS}, "shared", ""),
    "it hardly waits": ({"contend": contending("render()", 0.001), **SLEEPS}, "work", ""),
    "slower, and no wait": ({"contend": contending("render()", 0.008, cpu=0.008), **SLEEPS}, "work", ""),
    "threads take turns": (of_threads(0.02, "holds it", ("dataset.tables",)), "interpreter", "2 processes 2 times"),
    "threads share a lock": (of_threads(0.02, locks=("dataset.tables",)), "lock", ""),
    "waiting threads share a lock": (
        of_threads(0.02, "holds it", ("dataset.tables",), **SLEEPS), "lock", "(dataset.tables)"),
    "threads wait": (of_threads(0.02), "shared", ""),
    "threads do not wait": (of_threads(0.011, "holds it"), "cores", ""),
    # by simulation: minato's loader does not know costs while it is measured
    "uneven samples": ({**UNEVEN, **FOUR}, "stragglers", ""),
    "even samples": ({**EVEN, **FOUR}, "work", ""),
    # a slow sample more or less decides what 100 samples take, by one process or by several
    "few uneven samples": ({"contend": contending("render()", 0.008, 100), **UNEVEN, "workers": 1}, "workers", ""),
    "as many even ones": ({"contend": contending("render()", 0.008, 100), **EVEN, "workers": 1}, "shared", ""),
    "cores idle": ({**ALONE, "stages": [stage("decode()", 0.009)]}, "workers", "num_workers=0. 90% of a sample is decode()"),
    "one stage": ({"stages": [stage("transform 2 (Blur)", 0.008)]}, "work", "80% of it is transform 2 (Blur)"),
    "many stages": ({"stages": [stage("a()", 0.004), stage("b()", 0.004)]}, "cores", ""),
    "waits for reads": ({"stages": WAITS_FOR_READS, "costs": [(0.01, 0.002)] * 40}, "storage", "load()"),
    "decodes what it reads": ({"stages": [stage("load()", 0.008), WAITS_FOR_READS[1]]}, "work", ""),
    "handing over costs most": (CHEAP, "hand-over", "num_workers=0"),
    "workers are spawned": (SPAWNED, "start", ""),
    "workers are forked": (
        {**ANEW, "loader": {"persistent_workers": False, "start_method": "fork"}, "ends": {"torch": 0.1}}, "work", ""),
    "workers start in short epochs": (short_epochs(8), "start", ""),
    "workers start in long epochs": (short_epochs(800), "cores", ""),
    "joining takes longest": (collates(60.0), "collate", "3.0 times as long as making"),
    "handing over takes longer": (collates(10.0), "hand-over", ""),
    "slow sampler": (drawn(2), "sampler", "Weighted (draw.py:9) takes 20 ms"),
    "slow sampler without workers": (drawn(0), "sampler", "Weighted (draw.py:9) takes 20 ms"),
    # two workers make 8 samples in 40 ms, in which they are drawn, too
    "sampler that workers outlast": (
        sampled(0.002, watched={"inside": 0.02, "step": 0.02}, costs=[(0.01, 0.001)] * 64), "work", ""),
    "file opened again": (opens(0.99), "open", "zipfile.ZipFile (a.py:3) takes 80% of a sample"),
    "files of their own": (opens(0.0), "storage", ""),
    "slow first reads": (reads_again(0.004), "open", ""),
    "slow reads": (reads_again(None), "work", ""),
    "nothing measured": ({"costs": [], "rates": {}}, "unknown", "waits for data 50% of its time"),
    "no sample": ({"costs": [], "rates": {}, "work": {"failed": ["x"]}}, "unknown", "no sample could be made"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_limit_follows_from_the_facts(name: str) -> None:
    given, kind, words = LIMITS[name]
    found = limit(Facts(facts(**given)))
    assert (found.kind, words in found.line) == (kind, True), found.line


def test_stage_that_waits_and_has_reads_in_it_reads() -> None:
    assert reading_stages(WAITS_FOR_READS) == {"load()", "file read"}


def test_uneven_samples_count_with_their_mean_cost() -> None:
    """A loader may have been measured with the cheap ones."""
    costs = [(0.002, 0.002)] * 60 + [(0.2, 0.2)] * 4
    found = facts(costs=costs, rates={("torch", 2): 90.0, ("hand-over", 2): 140.0})
    for one in found.rates:
        one.usage = Used(cpu_per_sample={"torch": 0.0022, "hand-over": 0.0002}[one.loader])
    mean = (60 * 0.002 + 4 * 0.2) / 64
    assert Facts(found).sample_cpu("torch", 2) == pytest.approx(2 / 140)  # not dearer than a rate allows
    found.rates[1].rate = 120.0
    assert Facts(found).sample_cpu("torch", 2) == pytest.approx(mean + 0.0002)
    found.work.costs = [(0.002, 0.002)] * 64
    assert Facts(found).sample_cpu("torch", 2) == pytest.approx(0.0022)


# ---- models --------------------------------------------------------------------------------


def test_even_samples_flow_at_the_bound_of_work() -> None:
    for balanced in (False, True):
        rate = simulate_rate([0.01], 8, 4, 2, balanced=balanced)
        assert rate == pytest.approx(400, rel=0.02)


def test_virtual_window_drains_at_an_epochs_end() -> None:
    """Of two workers one makes a slow sample last: the other one has no next batch to begin."""
    costs = [0.01] * 11 + [0.31]
    endless = simulate_rate(costs, 4, 2, 2)
    ends = simulate_rate(costs, 4, 2, 2, epoch=3)
    assert ends == pytest.approx(12 / 0.38) and ends < 0.8 * endless
    assert simulate_rate([0.01], 4, 2, 2, epoch=4) == pytest.approx(200)
    assert simulate_rate(costs, 4, 2, 2, epoch=10_000) == endless
    # sample by sample, the slow one still ends the epoch
    assert simulate_rate(costs, 4, 2, 2, balanced=True, epoch=3) == pytest.approx(12 / 0.37, rel=0.05)


def test_virtual_time_agrees_with_the_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As benchmarks/simulate.py has them, which runs the engine's own."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    from simulate import MS, simulate, two
    from simulation import Case

    case = Case("1% of 300 ms in 3 ms", 8, 4, 300, two(0.01, 300 * MS, 3 * MS))
    found = simulate(case, 1, columns=("torch", "in order 1", "in order 2"))
    rng = random.Random(5)
    costs = [0.3 if rng.random() < 0.01 else 0.003 for _ in range(2400)]
    bound = 4 / (sum(costs) / len(costs))
    torchs = simulate_rate(costs, 8, 4, 2) / bound
    minatos = simulate_rate(costs, 8, 4, 2, balanced=True) / bound
    assert torchs == pytest.approx(1 / found["torch"].ratio, rel=0.2)
    assert minatos == pytest.approx(1 / found["in order 1"].ratio, rel=0.2)
    for name in ("simulate", "simulation"):
        sys.modules.pop(name)


def test_scaling_is_fitted_from_two_numbers_at_least() -> None:
    assert fit_scaling({2: 200.0}) is None
    fit = fit_scaling({1: 100.0, 4: 300.0})
    assert fit is not None and fit(1) == pytest.approx(100) and fit(4) == pytest.approx(300)
    assert fit(8) < 600


def steps_of(steps: list[list[float]]) -> dict[str, Any]:
    return {"steps": steps, "noted": len(steps), "batches": len(steps), "sizes": [(4, 64)], "starts": [2.0],
            "loader": {}, "shapes": "", "device": None}  # fmt: skip


def epochs_of(count: int, start: float, usual: float, changed: dict[int, tuple[int, float]] | None = None,
              **loader: Any) -> dict[str, Any]:  # fmt: skip
    """A record of epochs of 20 batches of 8, with a step of 10 ms. changed: by number, which part of a step is
    another one."""
    steps = [[start if n == 0 else usual, 0.01, 0.0, 0.0, epoch] for epoch in range(count) for n in range(20)]
    steps[0][0] = 5.0  # the first batch of the run
    for number, (part, value) in (changed or {}).items():
        steps[number][part] = value
    loader = {"num_workers": 2, "persistent_workers": True, "length": 20, **loader}
    return {**steps_of(steps), "sizes": [(8, 64)], "starts": [5.0, *[start] * (count - 1)], "loader": loader,
            "whole": list(range(count))}  # fmt: skip


FIRST_APART = steps_of([[1.0, 1.0, 0.0, 0.0]] * 11 + [[0.02, 0.08, 0.0, 0.01]] * 20)
EPOCH = 1.0 + 19 * 0.03 + 20 * 0.01
#: each fourth step logs, and takes ten times as long
LOGS = epochs_of(3, 0.03, 0.03, {number: (1, 0.1) for number in range(0, 60, 4)})
WITHOUT_CORE = {**LOGS, "steps": [[*step[:3], 0.02, step[4], 0.0] for step in LOGS["steps"]]}
RANGE = epochs_of(2, 0.3, 0.03, {number: (0, 0.4) for number in (25, 26, 33)})
#: what was told, and the share of the cores that others used -> the facts
TOLD: dict[str, tuple[dict[str, Any], float, dict[str, Any]]] = {
    "first steps are apart": (FIRST_APART, 0.0, {"wait": 0.2, "asked": 50, "step_alone": 0.08}),
    "others have the cores": (
        FIRST_APART, 0.5, {"inside": 0.01, "queued": 0.1, "wait": 0.01 / 0.09, "delivered": 40}),
    "workers have the cores": (
        steps_of([[0.02, 0.08, 0.06, 0.0, 0, 0.05]] * 30), 0.0, {"step_alone": 0.03, "step_cores": 2}),
    "starts of epochs count": (
        epochs_of(3, 1.0, 0.03), 0.0,
        {"delivered": 160 / EPOCH, "wait": 1 - 0.2 / EPOCH, "inside": EPOCH / 20 - 0.01, "steps": 40}),
    "one epoch of workers that stay": (epochs_of(1, 1.0, 0.03), 0.0, {"delivered": 8 / 0.04}),
    "one epoch of workers that start anew": (
        epochs_of(1, 1.0, 0.03, persistent_workers=False), 0.0, {"delivered": 8 / (0.04 + (5.0 - 0.03) / 20)}),
    "validation in a step is apart": (epochs_of(3, 0.03, 0.03, {30: (1, 30.0)}), 0.0, {"delivered": 8 / 0.04}),
    "steps that log count": (LOGS, 0.0, {"delivered": 8 / (0.03 + 0.0325)}),
    "steps that log, and others": (WITHOUT_CORE, 0.9, {}),
    "uneven steps": (RANGE, 0.0, {"steps": 20}),
}  # fmt: skip


@pytest.mark.parametrize("name", TOLD)
def test_rates_and_waits_follow_from_the_watch(name: str) -> None:
    told, others, expected = TOLD[name]
    found = watched(told, others)
    assert {field: getattr(found, field) for field in expected} == pytest.approx(expected)
    assert found.delivered == pytest.approx(found.asked * (1 - found.queued) * (1 - found.wait))


def test_answer_tells_of_missing_cores_and_of_a_range() -> None:
    found = watched(WITHOUT_CORE, 0.9)
    line = report.answer(facts(watched=vars(found)))
    assert f"had no core for {found.queued:.0%} of its time inside its loader, and waits for data {found.wait:.0%} of" in line
    assert watched(epochs_of(3, 0.03, 0.03)).range == pytest.approx([200, 200])
    found = watched(RANGE)
    assert found.range[0] < found.delivered < found.range[1]
    assert " (uncertain, by 20 steps: " in report.answer(facts(watched=vars(found)))


# ---- changes -------------------------------------------------------------------------------

WHOLE = {"whole": True, "bytes": 1000.0, "share": 1.0, "calls": 0, "after": ""}
LOCKED = contending("wait for a file's lock", 0.008, kind="lock", inside=("read()",))


def waiting(asked: float) -> dict[str, Any]:
    """A worker that waits makes 25 samples a second, and needs no core."""
    return {"workers": 1, "costs": [(0.04, 0.0004)] * 64, "watched": {"asked": asked, "step": 8 / asked},
            "rates": {("torch", 1): 25.0, ("torch", 2): 50.0, ("torch", 4): 100.0}}  # fmt: skip


#: what was found -> a change, its predicted rate, and other facts of it
CHANGES: dict[str, tuple[dict[str, Any], str, float, dict[str, Any]]] = {
    "the cores bound it": (crowded(work={"cache": WHOLE}), "a cache of whole samples", 160, {}),
    "only threads wait": (
        of_threads(0.02, "holds it"), "processes in place of threads", 200,
        {"paste": 'worker_type="process"', "check": RateRequest("minato", 2, worker_type="process")}),
    "only processes wait": (
        {"contend": {**LOCKED, "threads": threads(0.01)}, "costs": [(0.01, 0.0)] * 64},
        "threads in place of processes", 360, {"paste": 'from minato import DataLoader  # and worker_type="thread"'}),
    "handing over costs most": (CHEAP, "num_workers=0", 50_000, {"check": RateRequest("own", 0)}),
    "workers that wait, of a slow step": (waiting(90.0), "num_workers=4", 90, {"note": ""}),
    "workers that wait": (
        waiting(150.0), "num_workers=6", 150, {"note": "extrapolated from rates of 1, 2, 4 workers"}),
    "workers that wait, of a fast step": (
        waiting(1000.0), "num_workers=8", 200, {"note": "extrapolated from rates of 1, 2, 4 workers"}),
    "an epoch's end takes two seconds": (
        {"watched": {"starts": 4}, "loader": {"persistent_workers": False}, "ends": {"torch": 2.08, "minato": 0.0}},
        "persistent_workers=True", 1000 / 5.08, {"check": RateRequest("own", 2, persistent=True)}),
    "workers are spawned": (SPAWNED, "persistent_workers=True", 1000 / 5.08, {"check": None}),
    # 1,000 samples at 200/s take 5 s, and the end of an epoch takes one more
    "an epoch's end takes one second": (
        {"ends": {"torch": 1.0, "minato": 0.0}}, "minato.DataLoader in place of torch's", 200, {"gain": pytest.approx(1.2)}),
    "the step slows the loader down": ({**ALONE, "paced": {"rate": 1 / (1 / 50 + 1 / 400)}}, "num_workers=2", 95, {}),
    "slow sampler": (
        drawn(2), "indices drawn once an epoch, in place of Weighted", 400,
        {"place": ["draw.py", 9], "check": None}),  # a study's loaders have their indices already
    "slow sampler without workers": (
        drawn(0), "indices drawn once an epoch, in place of Weighted", 1 / (1 / 400 + 1 / 1000), {}),
    "file opened again": (
        opens(0.99), "zipfile.ZipFile kept open in each worker", Facts(facts(**opens(0.99))).cheaper_rate(5),
        {"place": ["a.py", 3], "check": RateRequest("own", 2, open=True)}),
    "slow first reads": (
        reads_again(0.004), "h5py.File kept open in each worker", Facts(facts(**reads_again(0.004))).cheaper_rate(2.5), {}),
    "photos": (
        {"work": {"photos": 0.004}}, "photos decoded by minato.ops, where a crop needs them",
        Facts(facts()).cheaper_rate(2.5), {"check": RateRequest("own", 2, photos=True), "data": "unchanged"}),
    "iterable dataset": (
        {"workers": 1, "rates": {("torch", 1): 100.0, ("torch", 2): 190.0}, "loader": {"iterable": True, "samples": None}},
        "num_workers=2", 190, {"data": "unchanged only if the dataset splits its samples between its workers"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_change_is_predicted(name: str) -> None:
    given, what, predicted, others = CHANGES[name]
    [change] = [one for one in candidates(Facts(facts(**given)))[0] if one.what == what]
    assert change.predicted == pytest.approx(predicted, rel=0.01)
    assert {field: getattr(change, field) for field in others} == others


#: what was found -> a change that would not help, and why
USELESS: dict[str, tuple[dict[str, Any], str]] = {
    "processes wait as long": (
        of_threads(0.02, processes=0.02, kind="lock"),
        "processes in place of threads: measured 1.00 times as many samples at once"),
    "the step has a core": (
        {"watched": {"step_cores": 1.0}, "rates": {("torch", 1): 190.0, ("torch", 2): 380.0}},
        "more workers: there are 2 for 2 cores, of which the step uses 1, and samples compute for 100% of their time"),
    "little memory": (
        {"work": {"cache": {**WHOLE, "bytes": 1e9}}}, "a cache of whole samples: it needs 1 TB, and 1 GB are available"),
    "even samples": ({}, "minato's loader: measured 1.00 times with 2 workers"),
}  # fmt: skip


@pytest.mark.parametrize("name", USELESS)
def test_change_that_would_not_help_is_explained(name: str) -> None:
    given, words = USELESS[name]
    assert words in candidates(Facts(facts(**given)))[1]


def test_changes_are_ranked_by_their_gain() -> None:
    f = Facts(facts(**ALONE, work={"cache": {**WHOLE, "whole": False, "share": 0.9, "calls": 1, "after": "decode()"}}))
    assert [change.what.partition(" ")[0] for change in candidates(f)[0]] == ["a", "num_workers=2"]
    assert candidates(Facts(facts()))[0] == []


def test_slow_sampler_takes_turns_with_the_step() -> None:
    f = Facts(facts(**drawn(2)))
    assert f.program_rate(1800.0, 2) == pytest.approx(8 / 0.18) and f.asked_alone == pytest.approx(8 / f.step_alone)
    assert not any(one.what.startswith("num_workers") for one in candidates(f)[0])


def test_ends_of_epochs_count_in_predictions() -> None:
    """1,000 samples at 200/s take 5 s, and the end of an epoch takes one more."""
    f = Facts(facts(ends={"torch": 1.0, "minato": 0.0}))
    assert f.program_rate(200.0, 2) == pytest.approx(1000 / 6) and f.program_rate(200.0, 2, "minato") == 200
    assert Facts(facts(**SPAWNED)).program_rate(200.0, 2) == pytest.approx(1000 / 15)
    found = facts(rates={("torch", 1): 100.0, ("torch", 2): 200.0, ("hand-over", 2): 1e6},
                  ends={"torch": 1.0, "hand-over": 0.4})  # fmt: skip
    # the step takes 400: ten times as cheap a sample waits 0.4 s and a tenth of the rest
    assert Facts(found).cheaper_rate(10.0) == pytest.approx(1000 / (1000 / 400 + 0.46), rel=1e-3)
    free = Facts(replace(found, free=Rate(rate=300.0)))  # what was measured with the step counts
    assert free.cheaper_rate(10.0) == pytest.approx(1000 / (1000 / 300 + 0.4))


def test_more_workers_for_uneven_samples_are_simulated() -> None:
    """Measured rates say by chance that further workers gain little."""
    costs = ([(0.003, 0.0)] * 99 + [(0.3, 0.0)]) * 4
    f = Facts(facts(workers=4, costs=costs, watched={"asked": 9000.0, "step": 8 / 9000},
                    rates={("torch", 1): 180.0, ("torch", 2): 300.0, ("torch", 4): 320.0}))  # fmt: skip
    [change] = [c for c in candidates(f)[0] if c.what == "num_workers=8"]
    gain = virtual_rate(f, 8, False) / virtual_rate(f, 4, False)
    assert gain > 1.4 and change.predicted == pytest.approx(320 * gain)


def test_loader_that_waits_for_the_step_has_no_speed() -> None:
    assert Facts(facts(**ALONE, paced={"rate": 1 / (1 / 50 + 1 / 400)})).speed_with_step() == pytest.approx(0.5)
    assert Facts(facts(**ALONE, paced={"rate": 399.0})).speed_with_step() == 1


def test_a_change_is_settled_within_the_bound() -> None:
    change = predicts(110.0)
    enter_check(change, 50.0, [(50.0, 100.0), (52.0, 104.0), (51.0, 98.0)])
    assert change.settled and change.bound == 0.15 and change.checked_gain == 2
    assert change.gain == 2.2 and change.base == 51 and change.checked == 102
    enter_check(change, 50.0, [])
    change.predicted = 110.0
    enter_check(change, 50.0, [(50.0, 80.0)])
    assert not change.settled
    for predicted, settled in ((100.0, True), (117.0, True), (118.0, False), (86.0, False)):
        change.predicted = predicted  # a check of 100 is within 15 % of 117, and not of 118 or 86
        enter_check(change, 50.0, [(50.0, 100.0)])
        assert change.settled == settled, predicted
    change.predicted = 110.0
    enter_check(change, 50.0, [(50.0, 60.0), (50.0, 80.0), (50.0, 140.0)])  # as uncertain as that
    assert change.settled


def test_checks_are_judged_by_pairs() -> None:
    """Other programs slow both runs of a repeat, and the samples of a repeat are those of both."""
    change = predicts(200.0)
    enter_check(change, 100.0, [(100.0, 190.0), (20.0, 39.0), (60.0, 120.0)])
    assert change.settled and change.bound == 0.15 and change.predicted == 120


def test_change_with_small_checked_gain_is_useless() -> None:
    found = facts(**ALONE)
    found.helps, found.useless = candidates(Facts(found))
    [change] = found.helps
    enter_check(change, 80.0, [(80.0, 84.0)])
    change.samples, found.base = 100, 80.0
    add_base_rate(found)
    drop_small_gains(found)
    assert found.helps == [] and found.dropped == [change]
    assert found.useless[0].startswith("num_workers=2: 1.05 times when checked on 100 samples (predicted ")


def test_answers_have_few_lines_and_the_limit_first() -> None:
    found = facts(**ALONE)
    found.limit = limit(Facts(found))
    found.helps, found.useless = candidates(Facts(found))
    found.notes = [f"note {n}" for n in range(40)]
    found.place = ["train.py", 12]
    lines = report.answer(found, "report: here").splitlines()
    assert lines[0].startswith("Limit: too few workers.") and len(lines) == 25
    shown = sum(line.startswith("note: ") for line in lines)
    assert 0 < shown < 40 and lines[-1] == f"report: here ({40 - shown} more notes there)"
    assert any("train.py:12  num_workers=2" in line for line in lines)


@pytest.mark.parametrize("others, helps", [(0.0, True), (0.5, False)])
def test_measured_rates_win_on_a_quiet_machine(others: float, helps: bool) -> None:
    """Even samples gain nothing in a simulation."""
    given = facts(rates={("torch", 1): 100.0, ("torch", 2): 110.0, ("minato", 2): 140.0})
    for rate in given.rates:
        rate.usage = Used(others=others)
    found, useless = candidates(Facts(given))
    named = [change for change in found if change.what.startswith("minato.DataLoader")]
    assert bool(named) == helps
    assert any("in a simulation" in text for text in useless) != helps
    if helps:
        assert named[0].predicted == pytest.approx(140)


def test_factors_have_one_base_that_is_told() -> None:
    found = facts(**ALONE)
    found.helps, found.useless = candidates(Facts(found))
    change = found.helps[0]
    enter_check(change, 80.0, [(50.0, 150.0)])
    change.samples, found.base = 10, 50.0
    add_base_rate(found)
    assert found.relative_to == 50 and change.checked_gain == 3
    assert change.gain == change.predicted / 50
    line = (
        '  "times" below compare with 50 samples/s, which the study measured for the program\'s own loader and '
        "step (the program itself got 200)"
    )
    assert line in report.answer(found).splitlines()[:4]


def test_factors_with_several_loaders_name_the_program_too() -> None:
    """Its loop takes half of the time: three times as fast there is 1.5 times as fast for the program."""
    found = facts(**ALONE, validates=True)
    found.helps, found.useless = candidates(Facts(found))
    enter_check(found.helps[0], 80.0, [(50.0, 150.0)])
    found.helps[0].samples = 10
    add_base_rate(found)
    told = Told({}, [], [], 9, begun=10.0, left=20.0, spent=5.0, place=["train.py", 3], key="one")
    name_loaders(found, [told, replace(told, key="two", begun=12.0, spent=2.0, place=["train.py", 9])], "one")
    assert found.notes == ["the program waited less for other loaders: loader at train.py:9 (20% of the time)"]
    answer = report.answer(found)
    assert "they are of the loop over this validation loader, which took 50% of the program's time" in answer
    assert "checked 240 (3.00 times, the program 1.50)" in answer and "  validation loader: DataLoader at" in answer


@pytest.mark.parametrize("anyway", [False, True])
@pytest.mark.parametrize("others, reason", [(0.0, "so the study has not seen"), (0.6, "used 60% of the cores")])
def test_study_that_is_much_faster_than_the_program_concludes_nothing(
    others: float, reason: str, anyway: bool
) -> None:
    """--anyway is for what other programs do."""
    found = facts(watched={"delivered": 40.0, "range": [36.0, 44.0]})
    found.machine.others = others
    told = finish_report(found, None, anyway).limit
    if anyway and others:
        assert told.kind == "cores"
        return
    start = "No conclusion: the program's loader and step were 5.0 times as fast in the study as in the program, "
    assert told.line.startswith(start) and reason in told.line and told.kind == "unknown"
    assert ("--anyway" in told.line) == (others > 0)


def test_files_that_the_program_has_written_leave_a_doubt() -> None:
    """--anyway names the limit of a run that finds them, and notes the doubt."""
    work = {"files": ["a.npy", "b.npy"], "new": ["a.npy"]}
    told = finish_report(facts(work=work), None, anyway=False)
    assert told.limit.line.startswith("No conclusion: samples read files that the program wrote")
    told = finish_report(facts(work=work), None, anyway=True)
    assert told.limit.kind == "cores" and "such as a.npy" in told.notes[0]


@pytest.mark.parametrize("maker, kind, name", [
    (None, "torch.utils.data.dataloader.DataLoader", ""), ("transformers", "accelerate.data_loader.DataLoaderShard",
    "transformers"), (None, "monai.data.DataLoader", "monai.data.DataLoader"),
])  # fmt: skip
def test_advice_can_be_followed_where_a_library_loads(maker: str | None, kind: str, name: str) -> None:
    found = facts(place=["train.py", 3, "train_dataloader"])
    found.loader.update({"class": kind, "maker": maker})
    for paste, patched in (
        ("num_workers=2", "num_workers=2  # "), ("from minato import DataLoader", "minato.patch_torch()  # "),
        ('from minato import DataLoader  # and cache="1GiB"', 'minato.patch_torch()  # and cache="1GiB"; '),
    ):  # fmt: skip
        expected = f"{patched}docs/recipes.md says how with {name}" if name else paste
        assert _paste_for(Facts(found), paste) == expected
    assert _paste_for(Facts(found), "open_once = cached(h5py.File)") == "open_once = cached(h5py.File)"
