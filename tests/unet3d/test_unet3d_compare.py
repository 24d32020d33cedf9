"""The comparison's tables: time to quality, scaling, busy machines, sweeps."""
from __future__ import annotations

import json
from pathlib import Path

import pytest

from unet3d import loaders, settings
from unet3d.bench import bounds, compare, plot, quality, tables
from unet3d.bench.workloads import base, run, speech

TINY = ["--patch", "16", "16", "16", "--filters", "2", "4", "--repeat", "2",
        "--workers", "1", "--threads", "1", "--device", "cpu"]


def cells(text, name):
    """The words of the line of a table that begins with `name`."""
    return next(line for line in text.splitlines() if line.split()[:1] == [name]).split()


def ended(seconds, dice, target=0.3, process_s=0.0, diverged=False):
    """A run's result with one evaluation of 1 s for each Dice."""
    rows = [{"epoch": number + 1, "mean_dice": value, "eval_s": 1.0}
            for number, value in enumerate(dice)]
    return {"epochs": rows, "seconds": seconds, "process_s": process_s or seconds + 5,
            "diverged": diverged, "reached_target": dice[-1] >= target}


def test_quality_table_counts_reached_runs_only():
    text = quality.quality_table(0.3, {
        "minato": [ended(20.0, [0.1, 0.3]), ended(30.0, [0.1, 0.2, 0.4])],
        "pytorch": [ended(40.0, [0.1, 0.3]), ended(90.0, [0.1, 0.2, 0.3])],
        "pytorch-ooo": [ended(70.0, [0.1, 0.2]), ended(50.0, [0.1, 0.31])],
        "dali": [ended(9.0, [0.0], diverged=True), ended(80.0, [0.1, 0.25])]})
    assert cells(text, "minato") == ["minato", "2", "of", "2", "2.5", "25.0", "20.0-30.0", "2.5",
                                     "30.0", "2.50", "2.00-3.00"]
    assert cells(text, "pytorch")[9:] == ["1.00", "1.00-1.00"]
    assert cells(text, "pytorch-ooo")[4:] == ["2", "50.0", "50.0-50.0", "2.0", "55.0", "1.80",
                                              "1.80-1.80"]
    assert cells(text, "dali") == ["dali", "0", "of", "2", "not", "reached", *["-"] * 6]
    assert ("pytorch-ooo: 1 of 2 runs did not reach the target in 2 epochs and 70.0 s; best mean "
            "Dice 0.2000") in text
    assert "dali: 2 of 2 runs did not reach the target in 2 epochs and 80.0 s" in text
    assert "best mean Dice 0.2500; 1 diverged" in text


def test_quality_table_without_torch_has_no_ratio():
    text = quality.quality_table(0.3, {"minato": [ended(20.0, [0.3])]})
    assert cells(text, "minato")[-2:] == ["-", "-"]


def test_evaluation_options_are_removed_in_any_spelling():
    kept = ["--epochs", "3", "--workers", "1", "--dali-batches=4"]
    assert quality.without_target([
        "--target-dice", "0.3", *kept[:2], "--eval-every=2", *kept[2:4], "--target", "0.4",
        "--eval-start", "1", kept[4]]) == kept


def test_target_evaluates_every_epoch_unless_told():
    common = ["--data", "d", "--out", "o", "--loader", "pytorch", "--target-dice", "0.3"]
    for more, every in (([], 1), (["--eval-every", "3"], 3), (["--eval-every", "0"], 0)):
        assert settings.parse("", [*common, *more]).evaluations(48)[1] == every
    assert settings.parse("", [*common, "--preset", "mlperf"]).evaluations(168)[1] == 20


def test_target_takes_the_presets_epochs(capsys):
    given = ["--data", "d", "--out", "o", "--loaders"]
    parsed = compare.parse([*given, "pytorch,synthetic", "--", "--target-dice", "0.3"])
    assert parsed.target == 0.3 and parsed.epochs == settings.PRESETS["quick"].epochs and parsed.loaders == ["pytorch"]
    assert "left out: synthetic" in capsys.readouterr().err
    assert compare.parse([*given, "pytorch", "--epochs", "3", "--", "--target-dice",
                          "0.3"]).epochs == 3
    plain = compare.parse([*given, "pytorch"])
    assert plain.target is None and plain.epochs == 2
    with pytest.raises(SystemExit):
        compare.parse([*given, "synthetic", "--", "--target-dice", "0.3"])


def test_arguments_of_runs_without_dashes_are_refused(capsys):
    with pytest.raises(SystemExit):
        compare.parse(["--data", "d", "--out", "o", "--target-dice", "0.3"])
    assert "arguments: --target-dice (arguments of the runs come last, after --" in capsys.readouterr().err


def test_options_of_some_loaders_reach_those_only(capsys):
    given = ["--data", "d", "--out", "o", "--loaders", "pytorch,minato-shared,dali", "--",
             "--cache", "4GiB", "--dali-depth", "3", "--dali-no-mmap", "--workers", "1"]
    common = compare.parse(given).common
    for loader, own in (("pytorch", []), ("minato-shared", ["--cache=4GiB"]),
                        ("dali", ["--dali-depth=3", "--dali-no-mmap"])):
        found = compare.arguments_for(loader, common)
        assert [a for a in found if a.startswith(("--cache", "--dali"))] == own
        assert found[-2:] == ["--workers", "1"] and "4GiB" not in found and "3" not in found
    given[5] = "pytorch,dali"
    with pytest.raises(SystemExit):
        compare.parse(given)
    assert "--cache is the size of minato-shared's cache" in capsys.readouterr().err


def test_compare_reports_time_to_target(data_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compare, "check_bytes", lambda *rest: None)
    status = compare.main(["--data", str(data_folder), "--out", str(tmp_path), "--loaders",
                           "pytorch", "--repeats", "1", "--epochs", "2", "--", *TINY,
                           "--target-dice", "0"])
    found = capsys.readouterr()
    assert status == 0, found.err
    assert "warm cache, time to a mean Dice of 0," in found.out
    assert cells(found.out, "pytorch")[:5] == ["pytorch", "1", "of", "1", "1"]
    assert "time to a mean Dice" in (tmp_path / "compare.txt").read_text()
    facts = json.loads((tmp_path / plot.JSON_NAME).read_text())
    assert facts["target_dice"] == 0
    [one] = facts["runs"]["warm"]["pytorch"]
    [row] = one["epochs"]
    assert one["process_s"] > one["seconds"] >= row["seconds"] > row["eval_s"] > 0
    bounds = json.loads((tmp_path / "warm-pytorch-bounds/result.json").read_text())["epochs"]
    assert "mean_dice" not in bounds[0]


def row_of(loader="minato", **changes):
    """A row of the tables."""
    return {"cache": "warm", "loader": loader, "runs": 1, "samples": 4, "epoch_s": 2.0,
            "epoch_s_min": 1.5, "epoch_s_max": 3.0, "relative": None, "over_work": None,
            "samples_s": 2.0, "startup_s": 0.1, "wait_share": 0.1, "wait_share_min": 0.1,
            "wait_share_max": 0.2, **dict.fromkeys(tables.WAITS, 0.1), "cpu": 0.5, "gpu": None,
            "memory_mb": None, "others": None, "not_cold": False, "bound_s": None,
            "ratios": [], "times_torch": None} | changes


@pytest.mark.parametrize("changes, marks", [
    ({}, ""), ({"others": 0.05}, ""), ({"others": 0.37}, "others 37%"),
    ({"bound_s": 1.5}, ""), ({"bound_s": 1.8}, "fastest epoch under its bound"),
    ({"bound_s": 2.5, "not_cold": True}, "not cold; under its bound")])
def test_rows_are_marked(changes, marks):
    row = row_of(**changes)
    assert tables.remarks(row) == marks
    for text in (tables.short_table([row]), tables.table([row])):
        line = next(line for line in text.splitlines() if "minato" in line)
        assert line.endswith(marks or line[-1])
    said = "\n".join(tables.explained([row_of(), row]))
    assert ("up to 37% of the usable cores" in said) == ("others" in marks)
    assert ("under its bound: the bound was measured" in said) == ("bound" in marks)


def test_epoch_under_its_bound_says_so():
    assert bounds.remark(2.0, None) == bounds.remark(2.0, 2.0) == ""
    assert bounds.remark(1.9, 2.0).startswith("under its bound")


def test_processes_share_the_cores():
    costs = {"sample_s": 1.0, "step_s": 2.0, "copy_bytes_s": 1e9}
    one, two = (bounds.combine(4, 2, 100, costs, 2, 1, processes) for processes in (1, 2))
    assert two["core_bound_s"] == 2 * one["core_bound_s"] == 2 * 8 / bounds.available_cores()
    assert two["work_bound_s"] == one["work_bound_s"] == 2.0


def test_others_in_epochs_are_weighted_by_time():
    rows = [{"others": 0.5, "epoch_s": 1.0}, {"others": 0.1, "epoch_s": 3.0},
            {"others": None, "epoch_s": 9.0}, {"epoch_s": 9.0}]
    assert compare.others_in(rows) == pytest.approx(0.2)
    assert compare.others_in(rows[2:]) is None


# -- pictures --------------------------------------------------------------------------


def test_each_loader_has_its_own_colour():
    names = [name for name in {*loaders.LOADERS, *run.LOADERS} if name in plot.COLOURS]
    assert len({plot.colour(name) for name in names}) == len(names) > 15
    assert plot.colour("dali-cached, 4 at once") == plot.colour("dali-cached")
    assert plot.colour("a new one") == plot.colour("a new one") in plot.OTHERS
    assert [plot.line_style(name) for name in ("dali", "dali, a", "dali, a, b", "d, a, b, c")] == [
        "-", "--", ":", ":"]


def facts_of(rows, **changes):
    """A comparison's file; every loader of the rows has one run."""
    config = {"workers": 2, "batch_size": 4, "data": "data/kits19", "step_ms": None}
    runs = {row["loader"]: [{"config": config, "reached_target": False, "epochs": [
        {"seconds": 3.0, "mean_dice": 0.1}, {"seconds": 6.0}]}] for row in rows}
    return {"workload": "unet3d", "repeats": 3, "machine": {"cores": 2}, "rows": rows,
            "runs": {"warm": runs}, "target_dice": None} | changes


def painted(facts, folder, monkeypatch):
    """The axes of the picture, by title, and the picture's own title."""
    figures = []
    monkeypatch.setattr(plot, "themed", lambda target, paint: figures.append(paint()))
    (folder / plot.JSON_NAME).write_text(json.dumps(facts))
    plot.draw(folder, folder / "compare.png")
    [figure] = figures
    plot._pyplot().close(figure)
    return {axis.get_title(): axis for axis in figure.axes}, figure.get_suptitle()


def test_bounds_are_dashed_at_their_loader(tmp_path, monkeypatch):
    """Also where an earlier loader has none, and one is beyond the longest epoch."""
    rows = [row_of("pytorch"), row_of("minato", bound_s=1.0), row_of("synthetic", bound_s=9.0)]
    monkeypatch.setattr(plot, "read_usage", lambda *rest: [(0.5, 0.5)])
    axes, title = painted(facts_of(rows), tmp_path, monkeypatch)
    axis = axes["epoch time, warm cache"]
    found = {tuple(line[:, 0]): line[:, 1].mean() for collection in axis.collections
             for line in collection.get_segments() if line[0, 0] == line[1, 0]}
    assert found == {(1.0, 1.0): pytest.approx(1.0), (9.0, 9.0): pytest.approx(2.0)}
    assert [text.get_text() for text in axis.get_yticklabels()] == [
        "pytorch", "minato", "synthetic"]
    assert axis.get_xlim()[1] > 9 and "slower: synthetic" in axis.get_xlabel()
    bars = [patch.get_facecolor() for patch in axis.patches]
    assert bars == [plot_rgba(name) for name in ("pytorch", "minato", "synthetic")]
    assert title.splitlines() == [
        "unet3d, 1 process, 2 workers, batch 4, data data/kits19",
        "medians of 3 interleaved runs, 2 cores, steps train"]


def plot_rgba(name):
    from matplotlib import colors
    return colors.to_rgba(plot.colour(name))


def test_panels_appear_for_known_values(tmp_path, monkeypatch):
    monkeypatch.setattr(plot, "read_usage", lambda *rest: [])
    rows = [row_of("minato"), row_of("minato-ready", others=0.5)]
    axes, title = painted(facts_of(rows), tmp_path, monkeypatch)
    assert set(axes) == {"epoch time, warm cache", "waiting for data", "CPU use, % of all cores"}
    assert "BUSY machine: other programs had up to 50% of it" in title
    more = {"memory_mb": 2500.0, "gpu": 50.0, "times_torch": 1.5, "ratios": [1.2, 1.8],
            "slow_shares": [0.0, 0.5] * 40, "slow_share": 0.25}
    axes, _ = painted(facts_of([row_of("pytorch", **more)], target_dice=0.3), tmp_path,
                      monkeypatch)
    assert {"quality over time", "times torch", "peak memory", "GPU use, %",
            "where the slow samples come (25 % of all)"} <= set(axes)
    assert axes["times torch"].patches[0].get_width() == 1.5
    assert axes["peak memory"].patches[0].get_width() == 2.5
    strip = axes["where the slow samples come (25 % of all)"].images[0]
    assert strip.get_array().shape == (1, plot.STRIPS)


def test_times_torch_leaves_out_synthetic_loader(tmp_path, monkeypatch):
    rows = [row_of("pytorch", times_torch=1.0, ratios=[1.0]),
            row_of("synthetic", times_torch=15.0, ratios=[14.0, 16.0])]
    monkeypatch.setattr(plot, "read_usage", lambda *rest: [])
    axes, _ = painted(facts_of(rows), tmp_path, monkeypatch)
    axis = axes["times torch"]
    assert [text.get_text() for text in axis.get_yticklabels()] == ["pytorch"]
    assert axis.get_xlim()[1] < 2 and axis.get_xlabel().endswith("which loads nothing: 15")
    points = [row | {"processes": n} for row in rows for n in (1, 2)]
    axes, _ = painted(facts_of(points), tmp_path, monkeypatch)
    found = {title.split(",")[0]: len(axis.lines) for title, axis in axes.items()}
    assert found["samples/s"] == 2 and found["times torch"] == 2  # pytorch's, and the line at 1


def test_lines_of_a_run_share_its_loaders_colour():
    points = [(float(n), 0.5) for n in range(3)]
    figure = plot._run(dict.fromkeys(("mean_dice", "kidney", "tumour", "cpu", "others"), points),
                       {"loader": "pytorch"}, Path("run"))
    axes = {axis.get_title(): axis for axis in figure.axes}
    plot._pyplot().close(figure)
    for name, count in (("Dice", 3), ("CPU and GPU, %", 2)):
        lines = axes[name].lines
        assert {line.get_color() for line in lines} == {plot.colour("pytorch")}
        assert [line.get_linestyle() for line in lines] == [*plot.LINE_STYLES[:count]]


def test_dice_of_nothing_found_is_drawn_as_nothing():
    figure = plot._run({"mean_dice": [(1.0, 1e-7), (2.0, 3e-7)]}, {}, Path("run"))
    [axis] = [axis for axis in figure.axes if axis.get_title() == "Dice"]
    plot._pyplot().close(figure)
    assert axis.get_ylim() == (0, 0.1)


def test_course_of_a_run_skips_stops(tmp_path):
    """Two epochs, an evaluation, a stop of an hour before the second."""
    steps = [{"event": "step", "epoch": 1, "time": 101.0 + n, "loss": 1.0, "wait_s": 0.25,
              "samples": [1, 2]} for n in range(3)]
    usage = [{"event": "usage", "epoch": 1, "time": 105.0, "t": t, "cpu": 0.5,
              "others": None, "gpu": None, "memory_mb": 7.0} for t in (0.5, 2.5)]
    epoch = {"event": "epoch", "epoch": 1, "time": 110.0, "kidney": 0.5, "tumour": 0.25,
             "mean_dice": 0.375}
    again = [row | {"epoch": 2, "time": row["time"] + 3609} for row in steps]
    rows = [{"event": "start", "time": 100.0, "config": {}}, *steps, *usage, epoch,
            {"event": "start", "time": 3709.0, "config": {}}, *again, *usage]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = plot.course(tmp_path)
    times = [at for at, loss in found["loss"] if loss == loss]
    assert times == [1.0, 2.0, 3.0, 11.0, 12.0, 13.0] and len(found["loss"]) == 7
    assert found["mean_dice"] == [(10.0, 0.375)]
    places = [at for at, memory in found["memory_mb"] if memory == memory]
    assert places == [1.0, 3.0, 11.0, 13.0] and "others" not in found
    rates = [rate for _, rate in found["samples_s"] if rate == rate]
    assert rates == pytest.approx([2.0] * 4)


def test_means_of_a_run_are_of_parts_of_epochs():
    gap = (4.0, float("nan"))
    points = [(1.0, 0.0), (2.0, 1.0), (3.0, 4.0), (4.0, 5.0), gap, (5.0, 2.0), gap]
    assert plot.means(points, 4) == [(1.5, 0.5), (3.5, 4.5), (5.0, 2.0)]
    assert plot.means(points, 1) == [(2.5, 2.5), (5.0, 2.0)]
    assert plot.means([gap]) == []


def test_noisy_loss_is_drawn_with_its_means():
    for steps, lines in ((plot.MEANS, 1), (4 * plot.MEANS, 2)):
        points = [(float(n), float(n % 2)) for n in range(steps)]
        figure = plot._run({"loss": points, "wait_ms": points}, {}, Path("run"))
        axes = {axis.get_title(): axis for axis in figure.axes}
        plot._pyplot().close(figure)
        assert len(axes["loss"].lines) == lines
        assert len(axes["waiting for data, ms a step"].lines) == 1
    assert set(axes["loss"].lines[1].get_ydata()) == {0.5}
    assert len(axes["loss"].lines[0].get_xdata()) == steps


def test_plot_draws_one_run_twice(tmp_path, capsys):
    """For light and for dark pages; a folder of something else is refused."""
    assert plot.main([str(tmp_path)]) == 1
    assert "holds neither compare.json" in capsys.readouterr().err
    rows = [{"event": "start", "time": 0.0, "config": {"loader": "minato", "step_ms": 4.0}},
            {"event": "step", "epoch": 1, "time": 1.0, "loss": 0.0, "wait_s": 0.5, "samples": [1]}]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert plot.main([str(tmp_path)]) == 0
    light, dark = ((tmp_path / name).read_bytes() for name in ("run.png", "run-dark.png"))
    assert light.startswith(b"\x89PNG") and dark.startswith(b"\x89PNG") and light != dark


# -- sweeps ----------------------------------------------------------------------------


def scaled(loader, processes, samples_s, **changes):
    return row_of(loader, processes=processes, heavy_share=None, samples_s=samples_s,
                  samples_s_min=samples_s, samples_s_max=samples_s, folder="none", **changes)


def test_efficiency_is_relative_to_fewest_processes():
    rows = [scaled("minato", 1, 10.0), scaled("pytorch", 1, 8.0), scaled("minato", 2, 18.0),
            scaled("pytorch", 2, 8.0), scaled("minato", 4, 40.0)]
    compare.add_efficiency(rows)
    assert [row["efficiency"] for row in rows] == [1.0, 1.0, 0.9, 0.5, 1.0]
    text = tables.sweep_table(rows)
    assert text.splitlines()[3].split()[:5] == ["minato", "2", "18.0", "18.0-18.0", "90"]
    assert "warm, 4 processes" in tables.table(rows)


def test_scaling_on_too_few_cores_is_noted():
    rows = [scaled("minato", 1, 10.0), scaled("minato", 4, 10.0)]
    config = {"workers": 2, "threads": 1, "device": "cpu", "step_ms": None}
    every = {"warm-p1": {"minato": [{"config": config}]}}
    [note] = tables.shared_cores(rows, every, 8)
    assert note.startswith("4 processes have 12 workers and threads of models for 8 cores")
    assert tables.shared_cores(rows, every, 12) == tables.shared_cores(rows[:1], every, 2) == []
    config |= {"step_ms": 5.0}
    assert tables.shared_cores(rows, every, 8) == []


def test_compare_scales_over_processes(data_folder, tmp_path, capsys, monkeypatch):
    """Runs are made up here; those of a single number of processes are real in another test."""
    made = []

    def run_once(module, loader, cache, folder, common, processes=1):
        made.append((folder.name, processes))
        rate = 10.0 * processes ** 0.5
        epoch = row_of() | {"epoch": 1, "loader": loader, "index_hash": "a", "content_hash": None,
                            "wait_s": 0.1, "mb_s": 1.0, "cpu_seconds": 1.0, "samples_s": rate,
                            "epoch_s": 16 / rate, "work_bound_s": 0.1, "core_bound_s": 0.1}
        config = {"seeding": "loader", "workers": 1, "threads": 1, "step_ms": 5.0, "data": "d",
                  "device": "cpu", "batch_size": 2}
        folder.mkdir()
        (folder / "log.jsonl").touch()
        return {"config": config, "epochs": [epoch]}

    monkeypatch.setattr(compare, "run_once", run_once)
    status = compare.main(["--data", str(data_folder), "--out", str(tmp_path), "--loaders",
                           "pytorch", "--repeats", "2", "--epochs", "1", "--processes", "4", "1",
                           "--", *TINY, "--seeding", "loader"])
    found = capsys.readouterr()
    assert status == 0, found.err
    assert made == [("check-pytorch", 1), ("warm-pytorch-p1-bounds", 1),
                    ("warm-pytorch-p4-bounds", 4), ("warm-pytorch-p1-1", 1),
                    ("warm-pytorch-p4-1", 4), ("warm-pytorch-p1-2", 1), ("warm-pytorch-p4-2", 4)]
    facts = json.loads((tmp_path / plot.JSON_NAME).read_text())
    assert facts["processes"] == [row["processes"] for row in facts["rows"]] == [1, 4]
    assert [row["efficiency"] for row in facts["rows"]] == [1.0, 0.5]
    assert set(facts["runs"]) == {"warm-p1", "warm-p4"}
    assert "efficiency, %" in found.out and (tmp_path / "compare-dark.png").exists()


@pytest.mark.parametrize("share", [0.0, 0.05, 0.2, 0.5, 1.0])
def test_share_of_slow_samples_is_kept(share):
    """Evenly placed over any stretch, and drawn about as often."""
    dataset = object.__new__(speech.SpeechDataset)
    base.SeededDataset.__init__(dataset, 3)
    dataset.heavy_share, dataset.drawn = share, False
    heavy = [dataset.is_heavy(index) for index in range(1000)]
    assert all(sum(heavy[start:start + 100]) == round(100 * share) for start in range(0, 901, 20))
    dataset.drawn = True
    assert abs(sum(dataset.is_heavy(index) for index in range(1000)) - 1000 * share) < 60


def test_slow_shares_make_a_table(tmp_path, capsys, monkeypatch):
    speech.generate(tmp_path / "data", 6, seed=1, scale=0.05)
    monkeypatch.setattr(compare, "check_bytes", lambda *rest: None)
    given = ["--workload", "speech", "--data", str(tmp_path / "data"), "--out",
             str(tmp_path / "out"), "--loaders", "pytorch", "--repeats", "1", "--epochs", "1",
             "--slow-share", "1", "0"]
    options = ["--", "--heavy", "0.02", "--workers", "0", "--step-ms", "0", "--threads", "1",
               "--device", "cpu"]
    assert compare.main([*given, *options]) == 0
    facts = json.loads((tmp_path / "out" / plot.JSON_NAME).read_text())
    assert [row["heavy_share"] for row in facts["rows"]] == [0.0, 1.0]
    assert facts["rows"][1]["epoch_s"] >= 6 * 0.02 and facts["profile"] is None
    assert facts["rows"][1]["work_bound_s"] >= 6 * 0.02
    found = capsys.readouterr().out
    assert "slow samples, %" in found and "warm run, 100% slow" in found


def test_slow_shares_need_slow_samples(capsys):
    given = ["--data", "d", "--out", "o", "--loaders", "pytorch", "--slow-share"]
    for more, words in (
            (["0.5"], "--slow-share is of speech"),
            (["2", "--workload", "speech", "--", "--heavy", "1"], "lies between 0 and 1"),
            (["0.5", "--workload", "speech"], "needs slow samples that take time")):
        with pytest.raises(SystemExit):
            compare.parse([*given, *more])
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("name, values, titles", [
    ("processes", [1, 2, 4], {"samples/s", "efficiency, %", "times torch", "peak memory, GB"}),
    ("heavy_share", [0.0, 0.2, 1.0], {"samples/s", "times torch", "peak memory, GB"})])
def test_sweeps_are_drawn_as_lines(tmp_path, monkeypatch, name, values, titles):
    rows = [scaled(loader, 1, 5.0 + n, times_torch=1.0, efficiency=1.0) | {name: value}
            for n, value in enumerate(values) for loader in ("pytorch", "minato")]
    axes, _ = painted(facts_of(rows), tmp_path, monkeypatch)
    found = {title.split(", warm")[0] for title in axes if title}
    assert found == titles | {"waiting for data, % of the epoch"}
    lines = axes["samples/s, warm cache"].lines
    assert [list(line.get_ydata()) for line in lines] == [[5.0, 6.0, 7.0]] * 2
    assert [line.get_color() for line in lines] == [plot.colour(n) for n in ("pytorch", "minato")]
