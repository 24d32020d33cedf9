"""The scores of an evaluation case by case: a table, a CSV file, a picture of slices."""
from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from unet3d import spec

CSV_NAME, PICTURE_NAME = "evaluation.csv", "evaluation.png"
CLASS_NAMES = ("kidney", "tumour")  # of the values 1 and 2
COLOURS = ("#2b8cbe", "#f16913")
PICTURED = 4  # the most cases in a picture
NO_MATPLOTLIB = ("no picture: matplotlib is not installed (pip install matplotlib, and run this "
                 "again)")


@dataclasses.dataclass(frozen=True)
class CaseScore:
    """A case's Dice and voxels by class, and one slice [y, x] of image, label and prediction."""

    name: str
    dice: tuple[float, ...]
    labelled: tuple[int, ...]  # voxels by class in the label
    predicted: tuple[int, ...]
    place: int  # of the slice
    image: np.ndarray
    label: np.ndarray
    prediction: np.ndarray

    @property
    def mean(self) -> float:
        return sum(self.dice) / len(self.dice)


def _slice_to_show(label: np.ndarray) -> int:
    """The slice with most tumour, else with most kidney, else the middle one."""
    for value in (2, 1):
        counts = (label == value).sum((1, 2))
        if counts.any():
            return int(counts.argmax())
    return len(label) // 2


def score_of(name: str, dice: Sequence[float], image: np.ndarray, label: np.ndarray,
             prediction: np.ndarray) -> CaseScore:
    """The score of a case from its volumes [z, y, x]; of these it keeps one slice."""
    counts = [tuple(int(n) for n in np.bincount(volume.ravel(), minlength=spec.CLASSES)[1:])
              for volume in (label, prediction)]
    place = _slice_to_show(label)
    return CaseScore(name, tuple(dice), *counts, place,
                     *(volume[place].copy() for volume in (image, label, prediction)))


def rows_of(scores: Iterable[CaseScore]) -> list[dict[str, object]]:
    """One row for each case: {"case", Dice by class, "mean_dice", voxels by class}."""
    return [{"case": score.name, **dict(zip(CLASS_NAMES, score.dice)), "mean_dice": score.mean,
             **{f"{name}_voxels": n for name, n in zip(CLASS_NAMES, score.labelled)},
             **{f"{name}_predicted": n for name, n in zip(CLASS_NAMES, score.predicted)}}
            for score in scores]


def write_csv(path: Path, scores: Sequence[CaseScore]) -> None:
    """Write one line for each case."""
    rows = rows_of(scores)
    with open(path, "w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def table(scores: Sequence[CaseScore]) -> str:
    """Dice for each case in lines, with the mean in the last one."""
    width = max(len("case"), *(len(score.name) for score in scores))
    lines = [f"{'Dice':{width}}  kidney  tumour    mean   voxels: label (prediction)"]
    for score in scores:
        voxels = ", ".join(f"{name} {n} ({m})" for name, n, m in zip(
            CLASS_NAMES, score.labelled, score.predicted))
        lines.append(f"{score.name:{width}}  {score.dice[0]:6.4f}  {score.dice[1]:6.4f}  "
                     f"{score.mean:6.4f}   {voxels}")
    kidney, tumour = (sum(values) / len(scores) for values in zip(*(s.dice for s in scores)))
    lines.append(f"{'mean':{width}}  {kidney:6.4f}  {tumour:6.4f}  {(kidney + tumour) / 2:6.4f}")
    return "\n".join(lines)


def pictured(scores: Sequence[CaseScore]) -> list[CaseScore]:
    """The cases of the picture: from the best to the worst, evenly chosen."""
    ordered = sorted(scores, key=lambda score: -score.mean)
    places = np.linspace(0, len(ordered) - 1, min(PICTURED, len(ordered))).round().astype(int)
    return [ordered[place] for place in places]


def draw(path: Path, scores: Sequence[CaseScore], title: str) -> None:
    """Draw the slice of some cases alone, with its label and with the prediction, to a PNG. Raises
    ImportError if matplotlib is not installed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Patch

    chosen = pictured(scores)
    figure, axes = pyplot.subplots(len(chosen), 3, squeeze=False, layout="constrained",
                                   figsize=(9, 0.9 + 3.1 * len(chosen)), facecolor="white")
    paint = np.array([(0, 0, 0, 0), *(to_rgba(colour, 0.7) for colour in COLOURS)])
    for number, (score, row) in enumerate(zip(chosen, axes)):
        parts = (("image", None), ("label", score.label), ("prediction", score.prediction))
        for axis, (what, over) in zip(row, parts):
            axis.imshow(score.image, cmap="gray", interpolation="nearest")
            if over is not None:
                axis.imshow(paint[over], interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
            if number == 0:
                axis.set_title(what, fontsize=11)
        row[0].set_ylabel(f"{score.name}, slice {score.place}", fontsize=9)
        row[1].set_xlabel(", ".join(f"{name} {n} voxels" for name, n in zip(
            CLASS_NAMES, score.labelled)), fontsize=8)
        row[2].set_xlabel(", ".join(f"{name} {dice:.2f}" for name, dice in zip(
            CLASS_NAMES, score.dice)) + " (Dice of the volume)", fontsize=8)
    figure.legend(handles=[Patch(color=colour, label=name)
                           for name, colour in zip(CLASS_NAMES, COLOURS)],
                  loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
