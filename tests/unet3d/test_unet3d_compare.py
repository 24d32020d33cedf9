"""The comparison's tables: time to quality, scaling, busy machines, sweeps."""
from __future__ import annotations

import json

import pytest

from unet3d import loaders, settings
from unet3d.bench import bounds, compare, plot, quality, tables
from unet3d.bench.workloads import run

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
    assert parsed.target == 0.3 and parsed.epochs == 8 and parsed.loaders == ["pytorch"]
    assert "left out: synthetic" in capsys.readouterr().err
    assert compare.parse([*given, "pytorch", "--epochs", "3", "--", "--target-dice",
                          "0.3"]).epochs == 3
    plain = compare.parse([*given, "pytorch"])
    assert plain.target is None and plain.epochs == 2
    with pytest.raises(SystemExit):
        compare.parse([*given, "synthetic", "--", "--target-dice", "0.3"])


def test_compare_reports_time_to_target(data_folder, tmp_path, capsys):
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
