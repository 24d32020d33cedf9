"""The comparison of accuracies: its statistics on made-up runs, and itself on tiny ones."""
from __future__ import annotations

import csv
import json

import pytest

from unet3d.bench import accuracy

TINY = ["--", "--patch", "16", "16", "16", "--filters", "2", "4", "--repeat", "2", "--workers",
        "0", "--threads", "1", "--epochs", "1", "--device", "cpu"]


def ends(*dice):
    return [{"mean_dice": d, "kidney": d + 0.1, "tumour": d - 0.1, "loss": 0.5} for d in dice]


def test_probability_is_welchs():
    from scipy import stats

    first, second = [0.50, 0.52, 0.51], [0.61, 0.66, 0.60]
    assert accuracy.probability(first, second) == pytest.approx(
        stats.ttest_ind(first, second, equal_var=False).pvalue)
    assert accuracy.probability([0.5, 0.5], [0.5, 0.5]) == 1.0
    assert accuracy.probability([0.5], [0.6, 0.7]) is None


def test_rows_compare_with_the_first_loader():
    rows = accuracy.summarise({"pytorch": ends(0.5, 0.6), "minato": ends(0.7, 0.8)})
    assert [row["difference"] for row in rows] == [None, pytest.approx(0.2)]
    assert rows[0]["deviation"] == pytest.approx(0.0707, abs=1e-4)
    assert (rows[1]["lowest"], rows[1]["highest"], rows[1]["seeds"]) == (0.7, 0.8, 2)
    text = accuracy.table(rows)
    assert "against pytorch" in text and "+0.2000" in text
    assert "-" in accuracy.table(accuracy.summarise({"pytorch": ends(0.5)}))


def test_runs_are_saved_and_continued(data_folder, tmp_path, capfd):
    arguments = ["--data", str(data_folder), "--out", str(tmp_path), "--seeds", "3",
                 "--loaders", "synthetic"]
    assert accuracy.main([*arguments, *TINY]) == 0
    with open(tmp_path / "accuracy.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["loader"] for row in rows] == ["synthetic"]
    result = tmp_path / "synthetic-3" / "result.json"
    made = json.loads(result.read_text())
    assert made["config"]["seed"] == 3 and made["config"]["split_seed"] == 0
    before = result.stat().st_mtime_ns
    assert accuracy.main([*arguments, *TINY]) == 0
    assert result.stat().st_mtime_ns == before
    capfd.readouterr()
    assert accuracy.main([*arguments, *TINY, "--amp", "bf16"]) == 1
    assert "holds a run with other arguments" in capfd.readouterr().err


def test_a_loader_with_another_dice_fails(tmp_path, monkeypatch, capsys):
    dice = {"pytorch": 0.5, "minato": 0.5, "minato-native": 0.7}
    monkeypatch.setattr(accuracy, "run_once", lambda loader, seed, *_: ends(
        dice[loader] + seed / 1000)[0])
    arguments = ["--data", "x", "--out", str(tmp_path), "--seeds", "1", "2", "3", "--loaders"]
    assert accuracy.main([*arguments, "pytorch,minato"]) == 0
    assert accuracy.main([*arguments, "pytorch,minato,minato-native"]) == 1
    assert "another mean Dice than pytorch: minato-native" in capsys.readouterr().err


def test_a_failing_run_is_reported(tmp_path, capsys):
    assert accuracy.main(["--data", str(tmp_path), "--out", str(tmp_path / "out"),
                          "--loaders", "pytorch"]) == 1
    assert "holds no preprocessed cases" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        accuracy.main(["--data", "x", "--out", "y", "--loaders", "fast"])
