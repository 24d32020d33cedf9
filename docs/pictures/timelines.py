"""The picture at the head of the README: the workers of torch's loader and of minato's.

    python docs/pictures/timelines.py [FOLDER]

Each sample returns its index, its worker, and when that worker began and finished it. So both
loaders are drawn from what their workers did, in the third epoch of the same dataset.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.utils.data

import minato

HERE = Path(__file__).resolve().parent
WORKERS, BATCH, EPOCHS = 4, 4, 3
FAST_S, SLOW_S, STEP_S = 0.012, 0.16, 0.018
#: positions of slow samples in the order of the dataset
SLOW = (21, 46, 51, 75)
COUNT = 96

WIDTH, LEFT, RIGHT, ROW = 580, 76, 4, 20
FAST, SLOWER, WAIT, IDLE = "#3b8fc4", "#e3920f", "#d1495b", "#768390"
#: text and lines, on a light and on a dark page; either can be read on the other, too
INK = ("<style>svg { color: #656d76 } "
       "@media (prefers-color-scheme: dark) { svg { color: #9198a1 } }</style>")


class Uneven(torch.utils.data.Dataset[torch.Tensor]):
    """Four samples of 96 take 160 ms, the others 12 ms."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        begin = time.monotonic()
        time.sleep(SLOW_S if index in SLOW else FAST_S)
        info = torch.utils.data.get_worker_info()
        assert info is not None
        return torch.tensor([index, info.id, begin, time.monotonic()], dtype=torch.float64)


#: begin, end, and what a bar stands for
Bar = tuple[float, float, str]


def epoch(kind: type) -> tuple[float, list[list[Bar]]]:
    """How long the last epoch took, and the bars of each worker and of the training loop."""
    loader: Any = kind(Uneven(), batch_size=BATCH, num_workers=WORKERS, persistent_workers=True)
    rows: list[list[Bar]] = []
    for _ in range(EPOCHS):
        rows = [[] for _ in range(WORKERS + 1)]
        begin = asked = time.monotonic()
        for batch in loader:
            rows[WORKERS].append((asked - begin, time.monotonic() - begin, "wait"))
            for index, worker, first, last in batch.tolist():
                what = "slow" if index in SLOW else "fast"
                rows[int(worker)].append((first - begin, last - begin, what))
            time.sleep(STEP_S)
            asked = time.monotonic()
        asked -= begin
    return asked, rows


def words(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{text}</text>'


def panel(top: float, name: str, wall: float, rows: list[list[Bar]], scale: float) -> list[str]:
    waited = sum(last - first for first, last, what in rows[-1] if what == "wait")
    about = f"an epoch takes {wall:.2f} s, training waits {waited / wall:.0%}"
    parts = [words(0, top + 14, f'<tspan font-weight="bold">{name}</tspan>: {about}')]
    for number, bars in enumerate(rows):
        y = top + 24 + number * ROW
        parts.append(words(0, y + 12, f"worker {number}" if number < WORKERS else "waiting"))
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{wall * scale:.1f}" height="15" '
                     f'fill="{IDLE}" fill-opacity="0.2"/>')  # fmt: skip
        for first, last, what in bars:
            colour = {"fast": FAST, "slow": SLOWER, "wait": WAIT}[what]
            width = (last - first) * scale
            if width > 0.4:
                parts.append(f'<rect x="{LEFT + first * scale:.1f}" y="{y}" '
                             f'width="{max(0.6, width - 0.7):.1f}" height="15" '
                             f'fill="{colour}"/>')  # fmt: skip
    return parts


def picture(results: dict[str, tuple[float, list[list[Bar]]]]) -> str:
    longest = max(wall for wall, _ in results.values())
    scale = (WIDTH - LEFT - RIGHT) / longest
    height = (WORKERS + 1) * ROW + 42
    parts: list[str] = []
    for number, (name, (wall, rows)) in enumerate(results.items()):
        parts += panel(number * height, name, wall, rows, scale)
    y = len(results) * height + 4
    for x, colour, text in ((0, FAST, "sample of 12 ms"), (150, SLOWER, "of 160 ms"),
                            (260, WAIT, "training waits"), (400, IDLE, "worker idle")):
        faint = ' fill-opacity="0.35"' if colour is IDLE else ""
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"{faint}/>')
        parts.append(words(x + 18, y + 11, text))
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 20:.0f}" '
        f'font-family="system-ui, sans-serif" font-size="15" fill="currentColor">{INK}',
        "<title>What four workers do during one epoch: torch's loader, then minato's</title>",
        *parts, "</svg>\n",
    ])  # fmt: skip


def draw(to: Path) -> None:
    kinds = {"torch's DataLoader": torch.utils.data.DataLoader,
             "minato's DataLoader": minato.DataLoader}  # fmt: skip
    (to / "timelines.svg").write_text(picture({name: epoch(k) for name, k in kinds.items()}))


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
