"""The scores of an evaluation by case: table, CSV file, picture."""
from __future__ import annotations

import csv
import sys

import numpy as np
import pytest

from unet3d import evaluate, scores


def volumes(kidney=3, tumour=2):
    """Image, label and prediction [4, 6, 6]; most tumour lies in slice 2, which is one off."""
    label = np.zeros((4, 6, 6), np.uint8)
    label[1, :kidney], label[1, 5, 0] = 1, 2
    label[2, :tumour] = 2
    prediction = np.roll(label, 1, axis=1)
    return np.arange(label.size, dtype=np.float32).reshape(label.shape), label, prediction


def score(name="case_00007", dice=(0.75, 0.25)):
    return scores.score_of(name, dice, *volumes())


def test_score_keeps_the_slice_with_most_tumour():
    image, label, prediction = volumes()
    one = scores.score_of("case_00007", (0.75, 0.25), image, label, prediction)
    assert one.place == 2 and one.mean == 0.5
    assert one.labelled == one.predicted == (18, 13)
    for kept, volume in ((one.image, image), (one.label, label), (one.prediction, prediction)):
        np.testing.assert_array_equal(kept, volume[2])
    assert scores.score_of("none", (1, 1), image, label * 0, label).place == 2
    assert scores.score_of("kidney", (1, 1), image, label * (label == 1), label).place == 1


def test_table_and_csv_have_each_case(tmp_path):
    found = [score(), score("case_00010", (0.25, 0.0))]
    text = scores.table(found).splitlines()
    assert text[1].startswith("case_00007  0.7500  0.2500  0.5000   kidney 18 (18), tumour 13 (13)")
    assert text[-1].split() == ["mean", "0.5000", "0.1250", "0.3125"]
    scores.write_csv(tmp_path / "some.csv", found)
    with open(tmp_path / "some.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["case"] for row in rows] == ["case_00007", "case_00010"]
    assert float(rows[1]["mean_dice"]) == 0.125 and rows[0]["tumour_predicted"] == "13"


def test_picture_spans_best_to_worst_case():
    found = [score(str(n), (n / 10, n / 10)) for n in (3, 9, 1, 5, 7, 0)]
    assert [one.name for one in scores.pictured(found)] == ["9", "5", "3", "0"]
    assert [one.name for one in scores.pictured(found[:1])] == ["3"]


def test_picture_shows_label_and_prediction_in_colour(tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    scores.draw(tmp_path / "some.png", [score(), score("case_00010", (0.1, 0.2))], "a run")
    pixels = pyplot.imread(tmp_path / "some.png")[..., :3]
    assert pixels.shape[0] > pixels.shape[1] / 2 and (pixels[0, 0] == 1).all()
    height, width = pixels.shape[:2]
    coloured = (pixels.max(-1) - pixels.min(-1) > 0.2)[: height * 8 // 10]
    plain, label, prediction = (coloured[:, width * n // 3: width * (n + 1) // 3].sum()
                                for n in range(3))
    assert plain == 0 and label > 500 and prediction > 500


def test_missing_matplotlib_leaves_out_the_picture(data_folder, tmp_path, monkeypatch, capsys):
    from unet3d import train
    assert train.main(["--data", str(data_folder), "--out", str(tmp_path), "--loader", "pytorch",
                       "--epochs", "1", "--patch", "16", "16", "16", "--filters", "2", "4",
                       "--repeat", "1", "--workers", "0", "--no-bounds", "--device", "cpu",
                       "--step-ms", "0"]) == 0
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    command = ["--data", str(data_folder), "--checkpoint", str(tmp_path / "checkpoint.pt"),
               "--device", "cpu", "--out", str(tmp_path / "new")]
    assert evaluate.main(command) == 0
    said = capsys.readouterr()
    assert "no picture: matplotlib is not installed (pip install matplotlib" in said.err
    assert f"in {tmp_path / 'new'}: evaluation.csv\n" in said.out
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"evaluation.csv"}
