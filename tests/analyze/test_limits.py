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
          inside: tuple[str, ...] = ("",), reads: bool = False) -> StageTimes:  # fmt: skip
    return StageTimes(label, kind, reads, seconds, seconds if cpu is None else cpu, inside=list(inside))


def facts(**given: Any) -> Any:
    """A program of two workers on two cores that waits for half of its time."""
    watch = {"asked": 400.0, "delivered": 200.0, "wait": 0.5, "step": 0.02, "inside": 0.02,
             "batch": 8, "batches": 40, "steps": 30, "step_cores": 0.0, "by": "step", "start": 0.1,
             "starts": 1}  # fmt: skip
    watch.update(given.pop("watched", {}))
    loader = {"class": "DataLoader", "num_workers": given.pop("workers", 2), "batch_size": 8,
              "samples": 1000, "prefetch_factor": 2, "scheduling": None, "persistent_workers": True}  # fmt: skip
    costs = given.pop("costs", [(0.01, 0.01)] * 64)
    rates = given.pop("rates", {("torch", 1): 100.0, ("torch", 2): 200.0, ("minato", 2): 200.0})
    work = {"costs": costs, "stages": given.pop("stages", []), "cache": None, "collate": 0.0}
    work.update(given.pop("work", {}))
    usage = {"others": 0.0}
    return parse(Report, {
        "watched": watch, "loader": loader, "work": work, "machine": {"cores": 2, "memory_available": 10**9},
        "rates": [{"loader": k, "workers": n, "rate": r, "usage": usage, "samples": 10**6}
                  for (k, n), r in rates.items()],
        **given,
    })  # fmt: skip


def watched(told: dict[str, Any], others: float = 0.0) -> Any:
    return watch_facts(parse(Told, told), others)


def predicts(rate: float) -> Change:
    return Change("", rate, "")


def kind_of(**given: Any) -> tuple[str, str]:
    found = limit(Facts(facts(**given)))
    return found.kind, found.line


def contending(label: str, more: float, **kinds: Any) -> dict[str, Any]:
    one = {"samples": 50, "seconds": 0.01, "cpu": 0.0, "stages": [stage(label, 0.008, 0.0, **kinds)]}
    several = {"samples": 60, "seconds": 0.01 + more, "cpu": 0.0,
               "stages": [stage(label, 0.008 + more, 0.0, **kinds)]}  # fmt: skip
    return {"processes": 2, "one": one, "several": several, "locks": []}


@pytest.mark.parametrize("wait, kind", [(0.01, "step"), (0.05, "nothing")])
def test_little_waiting_does_not_blame_loading(wait: float, kind: str) -> None:
    assert kind_of(watched={"wait": wait})[0] == kind


def crowded(**more: Any) -> dict[str, Any]:
    """A step that takes 50 ms with both cores, and 100 ms next to workers, which keep them as busy."""
    watched = {"wait": 0.01, "step": 0.1, "step_alone": 0.05, "step_cores": 2.0, "asked": 80.0, "delivered": 79.0}
    return {"watched": {**watched, **more.pop("watched", {})}, "costs": [(0.0125, 0.0125)] * 64,
            "rates": {("torch", 1): 80.0, ("torch", 2): 160.0, ("minato", 2): 160.0}, **more}  # fmt: skip


def test_workers_that_slow_the_step_down_are_named() -> None:
    kind, line = kind_of(**crowded())
    assert kind == "cores" and "the step waits for a core 50% of its time, and samples take 50%" in line
    assert kind_of(**crowded(costs=[(0.0001, 0.0001)] * 64))[0] == "step"  # they use no cores to speak of
    assert kind_of(**crowded(watched={"step_alone": 0.095}))[0] == "step"  # it has its cores
    others = {"cores": 2, "memory_available": 10**9, "others": 0.5}
    assert kind_of(**crowded(machine=others))[0] == "step"  # another program may have had them


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


def test_cores_bound_the_gain_of_a_cache() -> None:
    cache = {"whole": True, "bytes": 1000.0, "share": 1.0, "calls": 0, "after": ""}
    f = Facts(facts(**crowded(work={"cache": cache})))
    assert f.program_rate(160.0, 2) == pytest.approx(80)
    [change] = candidates(f)[0]
    assert change.what == "a cache of whole samples" and change.predicted == pytest.approx(160, rel=0.01)


def test_stage_that_grows_with_processes_is_shared() -> None:
    sleeps = [(0.01, 0.001)] * 40
    lock = contending("wait for a lock", 0.008, kind="lock", inside=("tokenize()",))
    assert kind_of(contend=lock, costs=sleeps)[0] == "lock"
    assert "tokenize()" in kind_of(contend=lock, costs=sleeps)[1]
    read = contending("read()", 0.008, reads=True)
    assert kind_of(contend=read, costs=sleeps)[0] == "storage"
    assert kind_of(contend=contending("render()", 0.008), costs=sleeps)[0] == "shared"
    assert kind_of(contend=contending("render()", 0.001), costs=sleeps)[0] == "work"
    computes = contending("render()", 0.008)
    computes["several"]["stages"][0].cpu = computes["several"]["cpu"] = 0.008  # slower, and no wait
    assert kind_of(contend=computes, costs=sleeps)[0] == "work"


def by_threads(seconds: float, locks: list[str], processes: float = 0.01) -> dict[str, Any]:
    """What each of two threads, and of two processes, takes for a sample that one makes in 10 ms."""
    both = contending("decode()", processes - 0.01)
    both["threads"] = {"alone": {"samples": 9, "seconds": 0.01},
                       "several": {"samples": 9, "seconds": seconds}, "locks": locks}  # fmt: skip
    return both


def of_threads(contend: dict[str, Any], gil: str, **given: Any) -> Facts:
    rates = {("minato", 1): 100.0, ("minato", 2): 100.0}
    found = facts(contend=contend, rates=rates, own="minato", work={"gil": gil}, **given)
    found.loader["worker_type"] = "thread"
    return Facts(found)


def test_threads_wait_for_the_interpreter_or_a_lock() -> None:
    turns = by_threads(0.02, ["dataset.tables"])
    found = limit(of_threads(turns, "holds it"))
    assert found.kind == "interpreter" and "2 processes 2 times" in found.line
    assert limit(of_threads(turns, "lets go")).kind == "lock"
    waits = limit(of_threads(turns, "holds it", costs=[(0.01, 0.001)] * 40))
    assert waits.kind == "lock" and "(dataset.tables)" in waits.line
    assert limit(of_threads(by_threads(0.02, []), "lets go")).kind == "shared"
    assert limit(of_threads(by_threads(0.011, []), "holds it")).kind != "interpreter"


def test_processes_are_advised_where_only_threads_wait() -> None:
    helps, _ = candidates(of_threads(by_threads(0.02, []), "holds it"))
    [change] = [one for one in helps if "threads" in one.what]
    assert change.paste == 'worker_type="process"' and change.predicted == pytest.approx(200)
    assert change.check == RateRequest("minato", 2, worker_type="process")
    both = by_threads(0.02, [], processes=0.02)  # processes wait as long
    both["several"]["stages"][0].kind = "lock"
    _, useless = candidates(of_threads(both, "lets go"))
    assert "processes in place of threads: measured 1.00 times as many samples at once" in useless


def test_threads_are_advised_where_only_processes_wait() -> None:
    both = contending("wait for a file's lock", 0.008, kind="lock", inside=("read()",))
    both["threads"] = by_threads(0.01, [])["threads"]
    helps, _ = candidates(Facts(facts(contend=both, costs=[(0.01, 0.0)] * 64)))
    [change] = [one for one in helps if "processes" in one.what]
    assert change.paste == 'from minato import DataLoader  # and worker_type="thread"'
    assert change.predicted == pytest.approx(360)


@pytest.mark.parametrize("maker, kind, workers, minato, threads", [
    (None, "torch.utils.data.dataloader.DataLoader", "num_workers=2", "from minato import DataLoader",
     'from minato import DataLoader  # and worker_type="thread"'),
    ("transformers", "accelerate.data_loader.DataLoaderShard", "TrainingArguments(dataloader_num_workers=2)",
     "minato.patch_torch()  # before the Trainer is made",
     "return minato.DataLoader(self.train_dataset, 8, shuffle=True, num_workers=2, collate_fn=self.data_collator, "
     'worker_type="thread")  # in get_train_dataloader() of a subclass of Trainer'),
    ("accelerate", "accelerate.data_loader.DataLoaderShard", "num_workers=2",
     "minato.integrations.accelerate.install()  # before accelerator.prepare(), and from minato import DataLoader",
     "minato.integrations.accelerate.install()  # before accelerator.prepare(), and from minato import DataLoader; "
     'worker_type="thread"'),
    ("lightning", "torch.utils.data.dataloader.DataLoader", "num_workers=2  # of the loader in train_dataloader()",
     "from minato import DataLoader  # of the loader in train_dataloader()",
     'from minato import DataLoader  # and worker_type="thread"; of the loader in train_dataloader()'),
    ("timm", "timm.data.loader.Loader", "num_workers=2", "minato.patch_torch()  # before timm makes the loader",
     'minato.patch_torch()  # before timm makes the loader; and worker_type="thread"'),
    (None, "monai.data.DataLoader", "num_workers=2", "minato.patch_torch()  # before monai.data.DataLoader makes the loader",
     'minato.patch_torch()  # before monai.data.DataLoader makes the loader; and worker_type="thread"'),
])  # fmt: skip
def test_advice_can_be_followed_where_a_library_loads(
    maker: str | None, kind: str, workers: str, minato: str, threads: str
) -> None:
    found = facts(place=["train.py", 3, "train_dataloader"])
    found.loader.update({"class": kind, "maker": maker})
    f = Facts(found)
    assert _paste_for(f, "num_workers=2") == workers
    assert _paste_for(f, "from minato import DataLoader") == minato
    assert _paste_for(f, 'from minato import DataLoader  # and worker_type="thread"') == threads
    assert _paste_for(f, "open_once = cached(h5py.File)") == "open_once = cached(h5py.File)"


def test_uneven_samples_are_stragglers_where_scheduling_gains() -> None:
    """By simulation: minato's loader does not know costs while it is measured."""
    costs = ([(0.003, 0.0)] * 99 + [(0.3, 0.0)]) * 2
    rates = {("torch", 1): 160.0, ("torch", 4): 380.0, ("minato", 4): 390.0}
    assert kind_of(costs=costs, rates=rates, workers=4)[0] == "stragglers"
    assert kind_of(costs=[(0.006, 0.0)] * 200, rates=rates, workers=4)[0] != "stragglers"


def test_few_uneven_samples_show_no_waiting() -> None:
    """A slow sample more or less decides what 100 samples take, by one process or by several."""
    costs = ([(0.003, 0.0)] * 99 + [(0.3, 0.0)]) * 2
    both = contending("render()", 0.008)
    for part in ("one", "several"):
        both[part]["samples"] = 100
    assert kind_of(contend=both, costs=costs, workers=1)[0] != "shared"
    assert kind_of(contend=both, costs=[(0.006, 0.0)] * 200, workers=1)[0] == "shared"


def test_no_workers_is_the_limit_where_cores_idle() -> None:
    rates = {("torch", 0): 100.0, ("torch", 1): 95.0, ("torch", 2): 190.0}
    kind, line = kind_of(workers=0, rates=rates, stages=[stage("decode()", 0.009)])
    assert kind == "workers" and "num_workers=0" in line and "decode()" in line


def test_one_stage_is_work_and_many_are_cores() -> None:
    kind, line = kind_of(stages=[stage("transform 2 (Blur)", 0.008, kind="transform")])
    assert kind == "work" and "80% of it is transform 2 (Blur)" in line
    assert kind_of(stages=[stage("a()", 0.004), stage("b()", 0.004)])[0] == "cores"


def test_waiting_for_reads_is_storage() -> None:
    load = [stage("load()", 0.008, 0.0), stage("file read", 0.0001, kind="read", reads=True,
                                               inside=("load()",))]  # fmt: skip
    assert reading_stages(load) == {"load()", "file read"}
    assert kind_of(stages=load, costs=[(0.01, 0.002)] * 40)[0] == "storage"
    computes = [stage("load()", 0.008), load[1]]  # it decodes what it reads
    assert kind_of(stages=computes)[0] == "work"


def test_no_workers_are_advised_where_handing_over_costs_most() -> None:
    rates = {("torch", 1): 3000.0, ("torch", 2): 3000.0, ("minato", 2): 3000.0, ("hand-over", 2): 3000.0}
    given = {"costs": [(1e-5, 1e-5)] * 64, "rates": rates, "watched": {"asked": 1e5, "step": 8e-5}}
    kind, line = kind_of(**given)
    assert kind == "hand-over" and "num_workers=0" in line
    [change] = [c for c in candidates(Facts(facts(**given)))[0] if c.what == "num_workers=0"]
    assert change.predicted == pytest.approx(50_000) and change.check == RateRequest("own", 0)


# ---- models --------------------------------------------------------------------------------


def test_even_samples_flow_at_the_bound_of_work() -> None:
    for balanced in (False, True):
        rate = simulate_rate([0.01], 8, 4, 2, balanced=balanced)
        assert rate == pytest.approx(400, rel=0.02)
    assert simulate_rate([0.01], 8, 4, 2, step=0.1) == pytest.approx(80, rel=0.02)


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


def test_watched_first_steps_and_queueing_are_apart() -> None:
    steps = [[1.0, 1.0, 0.0, 0.0]] * 11 + [[0.02, 0.08, 0.0, 0.01]] * 20
    told = {"steps": steps, "noted": 31, "batches": 31, "sizes": [(4, 64)], "starts": [2.0],
            "loader": {}, "shapes": "", "device": None}  # fmt: skip
    found = watched(told)
    assert found.wait == pytest.approx(0.2) and found.asked == pytest.approx(50)
    assert found.step_alone == found.step
    told["steps"] = [[0.02, 0.08, 0.06, 0.0, 0, 0.05]] * 30
    found = watched(told)
    assert found.step_alone == pytest.approx(0.03) and found.step_cores == pytest.approx(2)
    told["steps"] = steps
    found = watched(told, others=0.5)
    assert found.inside == pytest.approx(0.01) and found.queued == pytest.approx(0.1)
    assert found.wait == pytest.approx(0.01 / 0.09) and found.delivered == pytest.approx(40)


def epochs_of(count: int, start: float, usual: float, **more: Any) -> dict[str, Any]:
    """A record of epochs of 20 batches of 8, with a step of 10 ms."""
    steps = [[start if n == 0 else usual, 0.01, 0.0, 0.0, epoch] for epoch in range(count) for n in range(20)]
    steps[0][0] = 5.0  # the first batch of the run
    loader = {"num_workers": 2, "persistent_workers": True, "length": 20, **more.pop("loader", {})}
    return {"steps": steps, "noted": len(steps), "batches": len(steps), "sizes": [(8, 64)],
            "starts": [5.0, *[start] * (count - 1)], "loader": loader, "shapes": "", "device": None,
            "whole": list(range(count)), **more}  # fmt: skip


def test_watched_waits_at_epoch_starts_count() -> None:
    found = watched(epochs_of(3, start=1.0, usual=0.03))
    epoch = 1.0 + 19 * 0.03 + 20 * 0.01
    assert found.delivered == pytest.approx(160 / epoch)
    assert found.wait == pytest.approx(1 - 0.2 / epoch)
    assert found.delivered == pytest.approx(found.asked * (1 - found.wait))
    assert found.inside == pytest.approx(epoch / 20 - 0.01) and found.steps == 40


def test_watched_single_epoch_omits_start() -> None:
    kept = watched(epochs_of(1, start=1.0, usual=0.03))
    assert kept.delivered == pytest.approx(8 / 0.04)
    anew = watched(epochs_of(1, start=1.0, usual=0.03, loader={"persistent_workers": False}))
    assert anew.delivered == pytest.approx(8 / (0.04 + (5.0 - 0.03) / 20))


def test_watched_validation_inside_a_step_is_apart() -> None:
    told = epochs_of(3, start=0.03, usual=0.03)
    told["steps"][30][1] = 30.0
    assert watched(told).delivered == pytest.approx(8 / 0.04)


def test_asked_delivered_and_waits_add_up_for_uneven_steps() -> None:
    """Each fourth step logs, and takes ten times as long."""
    told = epochs_of(3, start=0.03, usual=0.03)
    for step in told["steps"][::4]:
        step[1] = 0.1
    found = watched(told)
    assert found.delivered == pytest.approx(found.asked * (1 - found.wait))
    assert found.delivered == pytest.approx(8 / (0.03 + 0.0325))
    told["steps"] = [[*step, 0.0] for step in told["steps"]]
    for step in told["steps"]:
        step[3] = 0.02
    found = watched(told, others=0.9)
    queued, wait = found.queued, found.wait
    assert found.delivered == pytest.approx(found.asked * (1 - queued) * (1 - wait))
    line = report.answer(facts(watched=vars(found)))
    assert f"had no core for {queued:.0%} of its time" in line and f"of the rest the program waits for data {wait:.0%} of it" in line


def test_uneven_steps_are_told_with_a_range() -> None:
    even = watched(epochs_of(3, start=0.03, usual=0.03))
    assert even.range == pytest.approx([200, 200])
    told = epochs_of(2, start=0.3, usual=0.03)
    for number in (25, 26, 33):
        told["steps"][number][0] = 0.4
    found = watched(told)
    assert found.range[0] < found.delivered < found.range[1]
    assert " (uncertain, by 20 steps: " in report.answer(facts(watched=vars(found)))


# ---- changes -------------------------------------------------------------------------------


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


def ending(found: Any, **ends: float) -> Facts:
    """The facts with what ends of epochs cost each loader of two workers."""
    for rate in found.rates:
        if rate.workers == 2:
            rate.end = ends[rate.loader.replace("-", "_")]
            rate.again = rate.end
    return Facts(found)


def test_ends_of_epochs_count_in_predictions() -> None:
    """1,000 samples at 200/s take 5 s, and the end of an epoch takes one more."""
    f = ending(facts(rates={("torch", 1): 100.0, ("torch", 2): 200.0, ("minato", 2): 200.0}),
               torch=1.0, minato=0.0)  # fmt: skip
    assert f.program_rate(200.0, 2) == pytest.approx(1000 / 6) and f.program_rate(200.0, 2, "minato") == 200
    [change] = [c for c in candidates(f)[0] if c.what.startswith("minato.DataLoader")]
    assert change.gain == pytest.approx(1.2)
    found = facts(rates={("torch", 1): 100.0, ("torch", 2): 200.0, ("hand-over", 2): 1e6})
    f = ending(found, torch=1.0, hand_over=0.4)
    # the step takes 400: ten times as cheap a sample waits 0.4 s and a tenth of the rest
    assert f.cheaper_rate(10.0) == pytest.approx(1000 / (1000 / 400 + 0.46), rel=1e-3)
    free = Facts(replace(found, free=Rate(rate=300.0)))  # what was measured with the step counts
    assert free.cheaper_rate(10.0) == pytest.approx(1000 / (1000 / 300 + 0.4))


@pytest.mark.parametrize("asked, target", [(90.0, 4), (150.0, 6), (1000.0, 8)])
def test_workers_that_wait_are_as_many_as_needed(asked: float, target: int) -> None:
    """A worker that waits makes 25 samples a second, and needs no core."""
    found = facts(workers=1, costs=[(0.04, 0.0004)] * 64, watched={"asked": asked, "step": 8 / asked},
                  rates={("torch", 1): 25.0, ("torch", 2): 50.0, ("torch", 4): 100.0})  # fmt: skip
    [change] = candidates(Facts(found))[0]
    assert change.what == f"num_workers={target}"
    assert change.predicted == pytest.approx(min(asked, 25 * target))
    assert change.note.startswith("extrapolated") == (target > 4)


def test_more_workers_for_uneven_samples_are_simulated() -> None:
    """Measured rates say by chance that further workers gain little."""
    costs = ([(0.003, 0.0)] * 99 + [(0.3, 0.0)]) * 4
    found = facts(workers=4, costs=costs, watched={"asked": 9000.0, "step": 8 / 9000},
                  rates={("torch", 1): 180.0, ("torch", 2): 300.0, ("torch", 4): 320.0})  # fmt: skip
    f = Facts(found)
    [change] = [c for c in candidates(f)[0] if c.what == "num_workers=8"]
    gain = virtual_rate(f, 8, False) / virtual_rate(f, 4, False)
    assert gain > 1.4 and change.predicted == pytest.approx(320 * gain)


def test_workers_that_stay_are_predicted_and_checked() -> None:
    found = facts(watched={"starts": 4})
    found.loader["persistent_workers"] = False
    f = ending(found, torch=2.08, minato=0.0)
    [change] = [c for c in candidates(f)[0] if c.what == "persistent_workers=True"]
    assert change.check == RateRequest("own", 2, persistent=True)
    assert change.predicted == pytest.approx(1000 / (5 + 0.08))


def test_predictions_are_of_the_loader_with_its_step() -> None:
    rates = {("torch", 0): 100.0, ("torch", 1): 95.0, ("torch", 2): 190.0}
    found = facts(workers=0, rates=rates, paced={"rate": 1 / (1 / 50 + 1 / 400)})
    f = Facts(found)
    assert f.speed_with_step() == pytest.approx(0.5)
    [change] = candidates(f)[0]
    assert change.what == "num_workers=2" and change.predicted == pytest.approx(95)
    found.paced = Rate(rate=399.0)  # it waits for the step: nothing is known of the loader
    assert Facts(found).speed_with_step() == 1


def test_change_with_small_checked_gain_is_useless() -> None:
    found = facts(workers=0, rates={("torch", 0): 100.0, ("torch", 1): 95.0, ("torch", 2): 190.0})
    found.helps, found.useless = candidates(Facts(found))
    [change] = found.helps
    enter_check(change, 80.0, [(80.0, 84.0)])
    change.samples, found.base = 100, 80.0
    add_base_rate(found)
    drop_small_gains(found)
    assert found.helps == [] and found.dropped == [change]
    assert found.useless[0].startswith("num_workers=2: 1.05 times when checked on 100 samples (predicted ")


def test_changes_are_ranked_and_useless_ones_explained() -> None:
    rates = {("torch", 0): 100.0, ("torch", 1): 95.0, ("torch", 2): 190.0}
    cache = {"whole": False, "bytes": 1000.0, "share": 0.9, "calls": 1, "after": "decode()"}
    f = Facts(facts(workers=0, rates=rates, work={"cache": cache}))
    helps, useless = candidates(f)
    assert [change.what.partition(" ")[0] for change in helps] == ["a", "num_workers=2"]
    assert helps[1].paste == "num_workers=2" and helps[1].predicted == pytest.approx(190)
    f = Facts(facts(work={"cache": {**cache, "bytes": 1e9}}))
    helps, useless = candidates(f)
    assert helps == [] and len(useless) == 3
    assert "more workers: there are 2 for 2 cores" in useless[0]
    assert "minato's loader: measured 1.00 times with 2 workers" in useless[1] and "it needs 1 TB" in useless[2]


def test_cores_of_the_step_are_among_the_reasons() -> None:
    found = facts(watched={"step_cores": 1.0, "step": 0.02}, rates={("torch", 1): 190.0, ("torch", 2): 380.0})
    useless = candidates(Facts(found))[1]
    assert useless[0].startswith("more workers: there are 2 for 2 cores, of which the step uses 1, and samples compute")


def test_answers_have_few_lines_and_the_limit_first() -> None:
    found = facts(rates={("torch", 0): 100.0, ("torch", 2): 190.0, ("torch", 1): 95.0}, workers=0)
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
    found = facts(workers=0, rates={("torch", 0): 100.0, ("torch", 1): 95.0, ("torch", 2): 190.0})
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
    found = facts(workers=0, rates={("torch", 0): 100.0, ("torch", 1): 95.0, ("torch", 2): 190.0}, validates=True)
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


def test_kept_workers_ask_for_one_loader() -> None:
    """Where the program makes a loader in each epoch, workers that stay are not enough."""
    slow = {"start": 2.0, "starts": 4, "batches": 100}
    for objects, what in ((1, "persistent_workers=True"),
                          (4, "one loader for all epochs, persistent_workers=True")):  # fmt: skip
        found = facts(watched={**slow, "objects": objects})
        found.loader["persistent_workers"] = False
        named = [one.what for one in candidates(Facts(found))[0]]
        assert what in named


@pytest.mark.parametrize("method, kind", [("spawn", "start"), ("fork", "work")])
def test_slow_starts_of_workers_are_the_limit(method: str, kind: str) -> None:
    """1,000 samples at 200/s take 5 s, and spawned workers take 10 more. The study forks its own."""
    stages = [stage("transform 0 (Slow)", 0.009)]
    found = facts(watched={"start": 10.0, "starts": 4}, stages=stages)
    found.loader.update(persistent_workers=False, start_method=method)
    for one in found.rates if method == "fork" else ():
        one.again = 0.1
    f = Facts(found)
    assert limit(f).kind == kind
    if method == "spawn":
        assert f.program_rate(200.0, 2) == pytest.approx(1000 / 15)
        [change] = [c for c in candidates(f)[0] if c.what == "persistent_workers=True"]
        assert change.predicted == pytest.approx(1000 / 5.08) and change.check is None


def test_starts_limit_epochs_that_are_short() -> None:
    """Epochs of 8 batches have no middle, so what their end costs was not measured apart."""
    found = facts(watched={"start": 0.6, "starts": 9}, rates={("torch", 1): 90.0, ("torch", 2): 90.0},
                  costs=[(1e-5, 1e-5)] * 64)  # fmt: skip
    found.loader.update(persistent_workers=False, start_method="fork", length=8)
    found.rates[1].again = 0.6
    assert limit(Facts(found)).kind == "start"
    found.loader["length"] = 800
    assert limit(Facts(found)).kind != "start"


@pytest.mark.parametrize("free, kind", [(60.0, "collate"), (10.0, "hand-over")])
def test_slow_collate_fn_is_the_limit(free: float, kind: str) -> None:
    """Joining takes 30 ms for each sample, and two workers hand over one each 1 / free seconds."""
    rates = {("torch", 1): 50.0, ("torch", 2): 60.0, ("hand-over", 2): free}
    found, line = kind_of(work={"collate": 0.03}, rates=rates)
    assert found == kind and ("3.0 times as long as making" in line) == (kind == "collate")


def sampled(seconds: float, **given: Any) -> Any:
    drawn = {"name": "Weighted", "place": ["draw.py", 9], "seconds": seconds, "draws": True}
    return facts(sampler=drawn, **given)


@pytest.mark.parametrize("workers", [0, 2])
def test_slow_sampler_is_the_limit_and_workers_are_not_advised(workers: int) -> None:
    """A batch of 8 is drawn in 160 ms, and the step takes 20."""
    rates = {("torch", 0): 1000.0, ("torch", 1): 900.0, ("torch", 2): 1800.0, ("minato", 2): 1800.0}
    found = sampled(0.02, workers=workers, rates=rates, costs=[(0.001, 0.001)] * 64,
                    watched={"inside": 0.16})  # fmt: skip
    f = Facts(found)
    if workers:
        assert f.program_rate(1800.0, 2) == pytest.approx(8 / 0.18)
        assert f.asked_alone == pytest.approx(8 / f.step_alone)
    told = limit(f)
    assert told.kind == "sampler" and "Weighted (draw.py:9) takes 20 ms" in told.line
    helps, useless = candidates(f)
    assert helps[0].place == ["draw.py", 9] and "WeightedRandomSampler" in helps[0].paste
    assert helps[0].predicted == pytest.approx(400 if workers else 1 / (1 / 400 + 1 / 1000))
    assert helps[0].check == RateRequest("own", workers, drawn=True)
    assert not any(one.what.startswith("num_workers") for one in helps)
    if not workers:
        assert "more workers: the sampler runs in the program's own process" in useless[0]


def test_sampler_that_workers_outlast_is_not_the_limit() -> None:
    """Two workers make 8 samples in 40 ms, in which they are drawn, too."""
    found = sampled(0.002, watched={"inside": 0.02, "step": 0.02}, costs=[(0.01, 0.001)] * 64)
    assert limit(Facts(found)).kind != "sampler"


@pytest.mark.parametrize("again, kind", [(0.99, "open"), (0.0, "storage")])
def test_file_opened_again_for_each_sample_is_the_limit(again: float, kind: str) -> None:
    """It waits for reads, which keeping it open saves. Files of which each sample has its own stay."""
    opens = replace(stage("zipfile.ZipFile", 0.001, kind="open"), whole=0.008, again=again, place=["a.py", 3])
    inner = stage("file read", 0.007, 0.0, kind="read", reads=True, inside=("zipfile.ZipFile",))
    f = Facts(facts(stages=[opens, inner], costs=[(0.01, 0.003)] * 64))
    found, helps = limit(f), candidates(f)[0]
    assert found.kind == kind
    named = [change for change in helps if "kept open" in change.what]
    assert bool(named) == (kind == "open")
    if named:
        assert "zipfile.ZipFile (a.py:3) takes 80% of a sample" in found.line
        assert named[0].place == ["a.py", 3] and named[0].paste.startswith("open_once = functools.lru_cache")
        assert named[0].check == RateRequest("own", 2, open=True)
        assert named[0].predicted == pytest.approx(f.cheaper_rate(5))


@pytest.mark.parametrize("kept_open, kind", [(None, "work"), (0.004, "open")])
def test_slow_first_reads_count_as_opening(kept_open: float | None, kind: str) -> None:
    """The first read of a file takes longer, and each is a first one: only keeping it open shows that."""
    opens = replace(stage("h5py.File", 0.003, kind="open"), whole=0.003, again=0.99, place=["a.py", 3])
    f = Facts(facts(stages=[opens, stage("read()", 0.0065)], work={"kept_open": kept_open}))
    assert limit(f).kind == kind
    [change] = [one for one in candidates(f)[0] if "kept open" in one.what]
    assert change.predicted == pytest.approx(f.cheaper_rate(2.5 if kept_open else 1 / 0.7))


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


def test_more_workers_of_an_iterable_dataset_may_repeat_samples() -> None:
    found = facts(workers=1, rates={("torch", 1): 100.0, ("torch", 2): 190.0})
    found.loader.update(iterable=True, samples=None)
    [change] = [one for one in candidates(Facts(found))[0] if one.what == "num_workers=2"]
    assert change.data.startswith("unchanged only if the dataset splits")


def test_unknown_limit_names_known_facts() -> None:
    kind, line = kind_of(costs=[], rates={})
    assert kind == "unknown" and "waits for data 50% of its time" in line
    work: dict[str, Any] = {"failures": 0, "failed": ["sample 1: FileNotFoundError: [Errno 2] No such file: '/tmp/1.jpg'"]}
    assert "Run it again with --pause" in kind_of(costs=[], rates={}, work=work)[1]
    paused = {"cores": 2, "memory_available": 10**9, "argv": ["--pause"]}
    assert "no sample could be made" in kind_of(costs=[], rates={}, work=work, machine=paused)[1]


def test_photos_that_minato_decodes_are_a_change() -> None:
    f = Facts(facts(work={"photos": 0.004}))
    [change] = [one for one in candidates(f)[0] if "native_images" in one.paste]
    assert change.predicted == pytest.approx(f.cheaper_rate(2.5)) and change.data == "unchanged"
    assert change.check is not None and change.check.photos
    assert change.paste.startswith("from minato import ops  # and make the loader with ops.native_images(DATASET)")
    assert not [one for one in candidates(Facts(facts()))[0] if "native_images" in one.paste]
