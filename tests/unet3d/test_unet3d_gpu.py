"""The experiment of one command: its rows, its file, a cut run, loaders that fail, the tables."""
from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import io
import json
import subprocess
import sys
import time

import pytest
import torch

from unet3d import loaders, nifti, phantom, preprocess, ranks, train
from unet3d.bench import compare, machine, meters, plot
from unet3d.bench.gpu import __main__ as launcher
from unet3d.bench.gpu import cgroup, data, plan, probe, report, store
from unet3d.bench.gpu import command as program
from unet3d.nifti import DataError
from unet3d.parallel import available_cores

TINY, FULL = plan.SIZES["tiny"], plan.SIZES["full"]
BROKEN = plan.Contender("broken", "pytorch", ("--patch", "15", "16", "16"))
MEASURED = {"memory_gib": 1.0, "core_copy_mb_s": 1e4, "pinned_mb_s": 5e4, "pageable_mb_s": None}


def row(group="sweep", contender=plan.SYNTHETIC, cores=1, repeat=1):
    return plan.Row(group, contender, cores, repeat, "bf16", 2)


def epoch(number=1, **values):
    return dict.fromkeys(store.EPOCH) | {"epoch": number} | values


def opened(path, planned=4, settings=None, facts=None):
    kept = store.Store(path, settings or {"preset": "tiny"}, facts or machine.facts(), planned)
    kept.begin(MEASURED, ["nothing"])
    return kept


# -- the plan ---------------------------------------------------------------------------


@pytest.mark.parametrize("size, cores", [(TINY, 2), (TINY, 1), (FULL, 16), (FULL, 3)])
def test_rows_are_all_different_and_fit_the_machine(size, cores):
    rows = plan.rows(size, cores)
    assert len({one.key for one in rows}) == len(rows)
    assert max(one.cores for one in rows) <= cores
    assert {one.group for one in rows} == set(plan.GROUPS) - (
        {"benchmark"} if cores < 2 else set())
    assert {one.contender.loader for one in rows} - {"loader.py"} <= set(loaders.LOADERS)


def test_matrix_is_complete_and_most_important_first():
    rows = plan.rows(FULL, 16)
    place = {one.key: number for number, one in enumerate(rows)}

    def first(**fields):
        return min(place[one.key] for one in rows
                   if all(getattr(one, name) == value for name, value in fields.items()))

    assert first(group="sweep") < first(group="python") < first(group="memory") \
        < first(group="speech-3") < first(group="benchmark") < first(amp="fp16")
    assert first(group="sweep", cores=4) < first(group="sweep", cores=14)
    residents = [place[f"sweep: {one.label}, bf16, batch 2, 4 cores, repeat 1"]
                 for one in plan.RESIDENT]
    assert max(residents) < first(group="sweep", cores=2) and max(residents) < 20
    assert first(group="benchmark") < first(group="sweep", repeat=2) < first(batch=7)
    sweep = {(one.contender.label, one.amp, one.batch, one.cores, one.repeat)
             for one in rows if one.group == "sweep"}
    assert sweep == {(one.label, amp, batch, cores, repeat) for one in (*plan.KEY, *plan.OTHERS)
                     for amp in FULL.amps for batch in FULL.batches for cores in FULL.cores
                     for repeat in (1, 2, 3)}
    begins = [next(one for one in rows if one.group == "sweep" and one.repeat == repeat)
              for repeat in (1, 2, 3)]
    assert len({one.contender for one in begins}) == 3


# -- the file ---------------------------------------------------------------------------


def test_file_continues_and_refuses_other_experiment(tmp_path):
    path = tmp_path / store.NAME
    first = opened(path)
    first.add(row(), store.DONE, None, 7.0, {"epochs": [epoch(samples_s=1.0)], "others": 0.1})
    again = opened(path)
    assert again.has(row()) and not again.has(row(cores=2))
    assert len(again.document["sessions"]) == 2 and store.problems(again.document) == []
    assert again.estimate(row(cores=2), 99.0) == 7.0 and again.estimate(row("two"), 99.0) == 99.0
    for wrong, words in (({"settings": {"preset": "full"}}, "preset was 'tiny', is 'full'"),
                         ({"facts": machine.facts() | {"commit": "other"}}, "is 'other'")):
        with pytest.raises(DataError, match=words):
            opened(path, **wrong)


def test_a_file_that_makes_no_sense_is_refused(tmp_path):
    kept = opened(tmp_path / store.NAME)
    kept.add(row(), store.DONE, None, 1.0, {"epochs": [epoch()]})
    kept.add(row(cores=2), store.FAILED, "why")
    good = kept.document
    assert store.problems(good) == []

    def damaged(change):
        document = copy.deepcopy(good)
        change(document)
        return store.problems(document)

    for change, words in (
            (lambda d: d.pop("rows"), "document.rows: missing"),
            (lambda d: d.update(format=0), "this program reads"),
            (lambda d: d["rows"][0].pop("cores"), r"rows[0].cores: missing"),
            (lambda d: d["rows"][0].update(seconds="1"), "of a wrong type"),
            (lambda d: d["rows"][0].update(epochs=[]), "rows[0].epochs: none"),
            (lambda d: d["rows"][0]["epochs"][0].pop("gpu"), "without gpu"),
            (lambda d: d["rows"][1].update(status="well"), "rows[1].status"),
            (lambda d: d["rows"][1].update(why=None), "rows[1].why: missing"),
            (lambda d: d["rows"].append(d["rows"][0]), "twice"),
            (lambda d: d["sessions"][0].pop("missing"), "sessions[0].missing")):
        assert any(words in problem for problem in damaged(change)), words
    kept.path.write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        store.read(kept.path)


# -- parts ------------------------------------------------------------------------------


def test_durations():
    assert [program.duration(text) for text in ("90", "90s", "40m", "1.5h")] \
        == [90, 90, 2400, 5400]
    for text in ("", "m", "0", "-3", "3 days"):
        with pytest.raises(argparse.ArgumentTypeError):
            program.duration(text)


def test_cores_that_are_needed():
    assert report.cores_needed({1: 0.5, 2: 0.9, 4: 1.0}) == "3.6"
    assert report.cores_needed({2: 0.99, 4: 1.0}) == "<= 2"
    assert report.cores_needed({1: 0.2, 4: 0.97}) == "not reached"
    assert report.cores_needed({}) == "-"


@pytest.mark.parametrize("line, below, name", [
    ("0::/own", "own", "memory.max"), ("4:cpu,memory:/own", "memory/own", "memory.limit_in_bytes"),
    ("0::/not/here", ".", "memory.max")])
def test_control_group_is_made_if_possible(tmp_path, monkeypatch, line, below, name):
    """On a made-up system, in whose groups the file of the limit exists at once."""
    (tmp_path / "cgroup").write_text(line + "\n")
    place = tmp_path / "fs" / below
    place.mkdir(parents=True)
    monkeypatch.setattr(cgroup, "ROOT", tmp_path / "fs")
    monkeypatch.setattr(cgroup, "OWN", tmp_path / "cgroup")
    monkeypatch.setattr(cgroup, "LEAVE_S", 0.0)
    make = type(place).mkdir

    def mkdir(self, *args, **options):
        make(self, *args, **options)
        (self / name).touch()

    monkeypatch.setattr(type(place), "mkdir", mkdir)
    with cgroup.limited(12345) as prefix:
        group, = place.glob("minato-bench-*")
        assert prefix == (*cgroup.JOIN, str(group)) and (group / name).read_text() == "12345"
        done = subprocess.run([*prefix, "sh", "-c", "echo $$"], capture_output=True, text=True,
                              check=True)
        assert (group / "cgroup.procs").read_text() == done.stdout


def test_missing_control_group_is_explained(tmp_path, monkeypatch):
    (tmp_path / "cgroup").write_text("0::/own\n3:cpu:/\n")
    monkeypatch.setattr(cgroup, "OWN", tmp_path / "cgroup")
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    with pytest.raises(cgroup.Unavailable, match="has no memory.max"), cgroup.limited(1):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["cgroup"]


def test_data_copies_are_separate_files(data_folder, tmp_path):
    copies = data.copies(data_folder, tmp_path, 3)
    files, originals = data.files(copies), data.files(data_folder)
    assert len(files) == 3 * len(originals) == len({path.stat().st_ino for path in files})
    assert sorted(path.stat().st_size for path in files) == sorted(
        3 * [path.stat().st_size for path in originals])
    assert data.copies(data_folder, tmp_path, 3) == copies


def test_machine_is_described(monkeypatch, capsys):
    monkeypatch.setattr(probe, "BYTES", 1 << 12)
    assert probe.main(["--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["gpu"] is None and found["measured"]["pinned_mb_s"] is None
    assert found["measured"]["core_copy_mb_s"] > 0 and probe.memory_available() > 0
    assert any("without a GPU" in line for line in found["missing"])
    assert any("memory traffic" in line for line in found["missing"])


# -- tables -----------------------------------------------------------------------------


def test_tables_show_measurements(tmp_path):
    kept = opened(tmp_path / store.NAME)
    minato, dali = plan.Contender("minato", "minato"), plan.Contender("dali", "dali")
    for contender, rates in ((plan.SYNTHETIC, {1: 90.0, 4: 100.0}),
                             (minato, {1: 50.0, 4: 99.0})):
        for cores, rate in rates.items():
            for repeat in (1, 2, 3):  # the first epoch and the best repeat do not count
                slow = [epoch(1, samples_s=1.0), epoch(2, samples_s=rate + 5 * (repeat == 3),
                                                       wait_share=0.25, copy_mb_s=2.5e4)]
                kept.add(row("sweep", contender, cores, repeat), store.DONE, None, 1.0,
                         {"epochs": slow})
    kept.add(row("sweep", dali), store.SKIPPED, "not installed")
    for contender, denied in ((plan.SYNTHETIC, 0.02), (minato, 0.10)):
        kept.add(row("python", contender, 4), store.DONE, None, 1.0,
                 {"epochs": [epoch(samples_s=10.0, gil_denied=denied)]},
                 facts={"python_ms": 12.5})
    for contender, digits in ((minato, "a"), (plan.Contender("pytorch", "pytorch"), "b")):
        kept.add(row("check", contender), store.DONE, None, 1.0,
                 {"epochs": [epoch(index_hash="1", content_hash=digits)]})
    kept.add(row("benchmark", plan.BENCHMARK, 2), store.DONE, None, 1.0,
             facts={"image": {"torch": [3.0, 4.0, 9.0]}})
    document = store.read(kept.path)
    words = {tuple(line.split()) for line in report.text(document).splitlines()}
    assert ("minato", "50.0", "99.0", "3.9", "6") in words
    assert ("synthetic", "90.0", "100.0", "3.4", "6") in words
    detail = next(line for line in words if line[:2] == ("minato", "50.00"))
    assert detail[2:8] == ("50.00-55.00", "55.6", "25.0", "-", "25.0", "50")
    assert next(line for line in words if line[:2] == ("minato", "10.00"))[-2:] == ("10.0", "8.0")
    assert ("image:", "torch", "4.0") in words
    assert "skipped: dali (1 rows): not installed" in report.text(document)
    assert "NOT THE SAME WORK: epoch 1: the reference content_hashes" in report.text(document)
    assert "nothing" in report.text(document)
    assert report.draw(document, tmp_path / "gpu.png").stat().st_size > 10_000
    assert (tmp_path / "gpu-dark.png").stat().st_size > 10_000


def test_plot_shows_whole_cores_and_missing_figures(tmp_path):
    kept = opened(tmp_path / store.NAME)
    varied = plan.Contender("minato, otherwise", "minato")
    for contender in (plan.SYNTHETIC, plan.Contender("minato", "minato"), varied):
        kept.add(row("sweep", contender, 4), store.DONE, None, 1.0, {"epochs": [
            epoch(1), epoch(2, samples_s=10.0, wait_share=0.5)]})
    figure = report._figure(kept.document, list(report._sweeps(kept.document)))
    plot._pyplot().close(figure)
    rate, waiting, gpu = figure.axes
    assert [list(axis.get_xticks()) for axis in figure.axes] == [[4]] * 3
    assert [text.get_text() for text in gpu.texts] == ["not measured"] and not waiting.texts
    assert [line.get_marker() for line in waiting.lines] == ["o", "o", "s"]


def run_here(command, _timeout_s=None):
    """compare.run_program, of train.py in this process."""
    _, _, module, *arguments = command
    assert module == "unet3d.train"
    said, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
        try:
            status = train.main(arguments)
        except SystemExit as end:
            status = end.code
    return status, said.getvalue(), errors.getvalue()


# -- the command ------------------------------------------------------------------------


def test_cut_run_continues_despite_failing_loader(data_folder, tmp_path, monkeypatch,
                                                             capsys):
    """Cut after its first row, by an estimate that leaves no time for the second. A separate
    process examines the machine, once; the runs are in this process, which saves their imports.
    """
    cores = available_cores()
    rows = [row(cores=cores), row(contender=BROKEN, cores=cores), row("python", plan.Contender(
        "minato-device", "minato-device"), cores)]
    found = program.probe("cpu")
    monkeypatch.setattr(plan, "rows", lambda *_: rows)
    monkeypatch.setattr(program, "probe", lambda _: found)
    monkeypatch.setattr(compare, "run_program", run_here)
    monkeypatch.setattr(store.Store, "estimate", lambda self, *_: len(self.rows) * 1e6)
    arguments = ["--preset", "tiny", "--device", "cpu", "--data", str(data_folder),
                 "--out", str(tmp_path), "--budget", "2h"]
    assert program.main([*arguments, "--for", "1h"]) == program.CUT
    assert "2 rows of 3 are left: the same call goes on" in capsys.readouterr().out
    before = store.read(tmp_path / store.NAME)["rows"]
    assert [one["key"] for one in before] == [rows[0].key]
    monkeypatch.setattr(store.Store, "estimate", lambda *_: 0.0)
    assert program.main(arguments) == 0
    capsys.readouterr()
    document = store.read(tmp_path / store.NAME)
    first, broken, last = document["rows"]
    assert first == before[0] and len(document["sessions"]) == 2
    assert broken["status"] == store.FAILED and "multiples of" in broken["why"]
    assert last["status"] == store.DONE and last["session"] == 1
    step_ms = 1e3 * first["epochs"][1]["epoch_s"] / first["epochs"][1]["steps"]
    assert last["facts"]["python_ms"] == pytest.approx(step_ms)
    assert len(last["epochs"]) == TINY.epochs and last["epochs"][0]["gil_denied"] is not None
    assert last["epochs"][0]["index_hash"] == first["epochs"][0]["index_hash"]
    assert first["cached"] > 0.5
    assert program.main(["--report", str(tmp_path / store.NAME)]) == 0
    said = capsys.readouterr().out
    assert "failed: broken (1 rows)" in said and "without a GPU" in said and "minato-device" in said
    assert (tmp_path / "gpu.png").exists() and not list(tmp_path.glob("*/run-*"))
    # Only rows that failed on purpose are run again; another experiment is refused.
    monkeypatch.setattr(program.Experiment, "run_training", None)
    assert program.main(arguments) == 0
    changed = dataclasses.replace(TINY, epochs=7)
    monkeypatch.setitem(plan.SIZES, "tiny", changed)
    assert program.main(arguments) == 1
    assert "made otherwise: epochs was 2, is 7" in capsys.readouterr().err


class Clock:
    """A clock that only rows move on."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    time = monotonic


@pytest.mark.parametrize("slow", [(), ("pytorch",)])
def test_no_row_starts_that_would_pass_the_budget(tmp_path, monkeypatch, capsys, slow):
    """Rows take 40 s, or those of one loader 100 s; the budget is 12 minutes, in two calls."""
    clock, spans = Clock(), []

    def runner(self, row):
        began = clock.now
        clock.now += 100 if row.contender.label in slow else 40
        spans.append((row, began, clock.now))
        return made_up(row)

    monkeypatch.setattr(program, "time", clock)
    monkeypatch.setattr(store, "time", clock)
    monkeypatch.setattr(program, "available_cores", lambda: 16)
    monkeypatch.setattr(program, "check", lambda args: None)
    monkeypatch.setattr(program, "probe", lambda device: {
        "machine": machine.facts(), "measured": MEASURED, "missing": []})
    monkeypatch.setattr(report, "draw", lambda *_: None)
    for name in ("run_training", "run_workload", "run_benchmark"):
        monkeypatch.setattr(program.Experiment, name, runner)
    arguments = ["--out", str(tmp_path), "--device", "cpu", "--budget", "12m"]
    assert program.main([*arguments, "--for", "5m"]) == program.CUT
    assert "the same call goes on" in capsys.readouterr().out and clock.now <= 1300
    clock.now += 5000  # no call runs: this is not counted
    restarted = clock.now
    assert program.main(arguments) == 0
    said = capsys.readouterr().out
    end = restarted + 720 - (max(last for _, _, last in spans if last < restarted) - 1000)
    rows, count = plan.rows(FULL, 16), len(spans)
    assert [row for row, _, _ in spans] == rows[:count] and len(spans) >= 720 // 100
    assert spans[-1][2] <= end and end - spans[-1][2] <= 100  # little time is unused
    assert f"the budget is used up: {len(rows) - count} rows of {len(rows)} are left out" in said
    lines = [line for line in said.splitlines() if line.startswith("left out, no time: ")]
    assert "sweep, bf16, batch 2, " in lines[0] and "14 cores: all" in lines[0]
    assert any("speech-10, bf16, batch 2, 16 cores: all" in line for line in lines)
    assert lines[-1].endswith(" further repeats")
    left = store.read(tmp_path / store.NAME)["left"]
    assert len(left) == len(rows) - count and left[0]["label"] == rows[count].contender.label
    capsys.readouterr()
    assert program.main(["--report", str(tmp_path / store.NAME)]) == 0
    assert lines[0] in capsys.readouterr().out


def test_left_out_rows_are_named_once():
    def one(label, cores, repeat=1, group="sweep"):
        return {"group": group, "amp": "bf16", "batch": 2, "cores": cores, "label": label,
                "repeat": repeat}

    ended = [one("minato", 4), one("dali, 4 at once", 4), one("minato", 2)]
    left = [one("dali, 4 at once", 2), one("minato", 2, 2), one("minato", 8),
            one("dali, 4 at once", 8), one("dali, 4 at once", 8, 2), one("minato", 4, 1, "two")]
    assert report.left_out(left, ended) == [
        "left out, no time: sweep, bf16, batch 2, 2 cores: dali, 4 at once | 8 cores: all",
        "left out, no time: two, bf16, batch 2, 4 cores: all",
        "left out, no time: 2 further repeats"]
    assert report.left_out([], ended) == []


def test_slow_rows_fail_and_cut_rows_do_not(tmp_path, monkeypatch):
    def hang(*_args, **_options):
        raise subprocess.TimeoutExpired("x", 5.0)

    monkeypatch.setattr(compare, "run_program", hang)
    kept = opened(tmp_path / store.NAME)
    args = argparse.Namespace(out=tmp_path, data=None, device="cpu", work=None)
    benchmark = row("benchmark", plan.BENCHMARK)
    cut = program.Experiment(args, TINY, kept, time.monotonic() - 1)
    with pytest.raises(program.NoTime):
        cut.run(benchmark)
    assert not kept.has(benchmark)
    program.Experiment(args, TINY, kept, time.monotonic() + 1000).run(benchmark)
    assert kept.rows[0]["status"] == store.FAILED and "no end after 5 s" in kept.rows[0]["why"]


def test_python_in_steps_needs_synthetic_row(tmp_path):
    kept = opened(tmp_path / store.NAME)
    args = argparse.Namespace(out=tmp_path, data=tmp_path, device="cpu", work=None)
    program.Experiment(args, TINY, kept, time.monotonic() + 1000).run(row("python"))
    assert kept.rows[0]["status"] == store.SKIPPED
    assert "synthetic loader has no row" in kept.rows[0]["why"]


def test_the_data_need_no_nifti(tmp_path, monkeypatch):
    """They are those of the documented path, and made where nibabel is not installed."""
    phantom.generate(tmp_path / "nifti", 2, data.SEED, TINY.scale)
    preprocess.preprocess(tmp_path / "nifti", tmp_path / "npy",
                          preprocess.Settings(min_shape=(16, 16, 16)))
    monkeypatch.setitem(sys.modules, "nibabel", None)
    (tmp_path / "making").mkdir()
    (tmp_path / "making" / "leftover").touch()
    made = data.volumes(tmp_path, dataclasses.replace(TINY, cases=2))
    names = sorted(path.name for path in made.glob("*.npy"))
    assert names == sorted(path.name for path in (tmp_path / "npy").glob("*.npy"))
    for name in names:
        assert (made / name).read_bytes() == (tmp_path / "npy" / name).read_bytes()
    assert preprocess.verify(made) == [] and len(data.files(made)) == 4
    with pytest.raises(DataError, match="pip install nibabel"):
        nifti.read_image(tmp_path / "nifti/case_00000/imaging.nii.gz")


# -- without a GPU ----------------------------------------------------------------------


def test_missing_gpu_is_reported_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(program, "probe", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for version, words in ((None, "is built without CUDA"), ("13.0", "(CUDA 13.0) finds none")):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert program.main(["--out", str(tmp_path / "out"), "--budget", "40m"]) == 1
        said = capsys.readouterr()
        assert words in said.err and "--dry-run" in said.err and not said.out
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(loaders, "unavailable", lambda name: f"{name} is not built here")
    assert program.main(["--out", str(tmp_path / "out"), "--dry-run"]) == 1
    assert "minato is not built here" in capsys.readouterr().err


def test_missing_packages_are_named(monkeypatch, capsys):
    monkeypatch.setattr(launcher.importlib.util, "find_spec", lambda name: name != "torch" or None)
    assert launcher.main() == 1
    assert "has no torch: install" in capsys.readouterr().err


def test_gpu_probe_measures_bandwidth_and_memory(monkeypatch):
    """All that only a GPU's branch does, with memory of the processor's."""
    clock = iter(range(100))

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = next(clock)

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return 1000.0 * (end.at - self.at)

    cpu, gpu = torch.device("cpu"), torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(probe, "BYTES", 1 << 12)
    assert probe.copy_rate(cpu, False) == 1 << 12
    copies = meters.DeviceCopies(torch.device("meta"))
    for _ in range(2):
        assert [part.device.type for part in copies.move(torch.ones(4), torch.ones(4))] == ["meta"] * 2
    assert copies.summary(None) == {"copy_mb_s": 32e-6, "copy_overlap": 0.0, "copy_notes": None}
    monkeypatch.setattr(probe, "copy_rate", lambda device, pinned: 2e9 if pinned else 1e9)
    found = probe.measured(gpu)
    assert (found["pinned_mb_s"], found["pageable_mb_s"]) == (2000.0, 1000.0)
    monkeypatch.setattr(probe.usage, "gpu_percent", lambda: None)
    monkeypatch.setattr(probe, "on_host", lambda device: "there was no nvcc")
    monkeypatch.setattr(probe, "shared_memory", lambda: 64 << 20)
    monkeypatch.setattr(probe, "memory_available", lambda: 3 << 30)
    told = "; ".join(probe.missing(gpu))
    for words in ("GPU use is not measured", "3.0 GiB of memory are available", "there was no nvcc", "/dev/shm has 64 MiB"):
        assert words in told
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: argparse.Namespace(
        name="X", major=9, minor=0, total_memory=141 << 30))
    assert machine.gpu(gpu)["capability"] == "9.0" and machine.gpu(gpu)["memory_gib"] == 141.0


def made_up(row):
    """The result of a run of this row."""
    if row.contender.loader.startswith("dali"):
        raise program.LeftOut("DALI is not installed")
    if row.group == "benchmark":
        return {"facts": {"image": {"torch": [1.0], "minato": [0.5]}}}
    if row.contender.label == "pytorch-ooo":
        raise ZeroDivisionError("never mind")
    values = {name: 1.0 for name in store.EPOCH} | {
        "samples_s": 10.0 * row.cores / (row.cores + len(row.contender.label)),
        "index_hash": "1", "content_hash": str(loaders.samples_of(row.contender.loader)),
        "copy_notes": None}
    facts = {"python_ms": 5.0} if row.group == "python" else {"data_gib": 20.0}
    return {"result": {"epochs": [{**values, "epoch": n} for n in (1, 2)], "others": 0.0},
            "cached": 1.0, "facts": facts}


def test_full_matrix_finishes_and_is_reported(tmp_path, monkeypatch, capsys):
    """All rows of the full experiment on 16 cores, with results that are made up."""
    write, written = store.Store.write, []
    monkeypatch.setattr(store.Store, "write", lambda self: written.append(self))
    monkeypatch.setattr(program, "available_cores", lambda: 16)
    monkeypatch.setattr(program, "check", lambda args: None)
    monkeypatch.setattr(program, "probe", lambda device: {
        "machine": machine.facts(), "measured": MEASURED, "missing": ["nothing"]})
    for runner in ("run_training", "run_workload", "run_benchmark"):
        monkeypatch.setattr(program.Experiment, runner, lambda self, row: made_up(row))
    arguments = ["--out", str(tmp_path), "--device", "cuda", "--budget", "400h"]
    monkeypatch.setattr(ranks, "_device", str)
    figure = pytest.importorskip("matplotlib.figure").Figure
    monkeypatch.setattr(figure, "savefig", lambda self, path, **_: path.touch())  # seconds
    assert program.main(arguments) == 0
    rows = plan.rows(FULL, 16)
    assert len(written) > len(rows)
    write(written[-1])
    document = store.read(tmp_path / store.NAME)
    assert [one["key"] for one in document["rows"]] == [one.key for one in rows]
    said = capsys.readouterr()
    for group in set(plan.GROUPS) - {"check", "sweep", "benchmark"}:
        assert f"{group}, " in said.out
    assert "fp16, batch 7" in said.out and "skipped: dali-cached" in said.out
    assert "failed: pytorch-ooo" in said.out and "ZeroDivisionError: never mind" in said.out
    assert "the same samples, and where they are of one kind the same bytes" in said.out
    assert (tmp_path / "gpu.png").exists() and "nothing" in said.err
