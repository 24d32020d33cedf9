"""All pictures of these pages: the README's timelines, diagrams, `minato top` and a trace.

    python docs/pictures/make.py [FOLDER]
"""

from __future__ import annotations

import html
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import diagrams
import timelines

HERE = Path(__file__).resolve().parent
#: times that the workers are looked at; the one with most of them at work is drawn
LOOKS = 20
#: that is drawn
EPOCH = 4
PROGRAM = """
import itertools
import select
import sys
import time

import torch
from minato import DataLoader, Dataset


class Files(Dataset):
    def __len__(self):
        return 200

    def __getitem__(self, index):
        time.sleep(0.4 if index % 50 == 49 else 0.012)
        return torch.zeros(3, 64, 64)


order = torch.Generator().manual_seed(3)  # in the fifth epoch no slow sample is among the first
loader = DataLoader(Files(), 4, shuffle=True, generator=order, num_workers=4,
                    persistent_workers=True)
for epoch in itertools.count():
    for number, images in enumerate(loader):
        time.sleep(0.025)  # the training step
        if (epoch, number) == (0, 1):
            print("now", flush=True)
    if epoch >= 4 and select.select([sys.stdin], [], [], 0)[0]:
        sys.exit()
"""


def run(folder: str) -> tuple[str, list[dict]]:
    """What `minato top` shows, and the trace."""
    trace = os.path.join(folder, "trace.json")
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, env={**os.environ, "MINATO_TRACE": trace},
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    process.stdout.readline()
    command = [sys.executable, "-m", "minato", "top", str(process.pid), "--interval", "0.25"]
    top = subprocess.Popen(command, text=True, stdout=subprocess.PIPE)
    assert top.stdout is not None
    pages: list[str] = []
    for line in top.stdout:
        if line.startswith("DataLoader of") and len(pages) == LOOKS:
            break
        pages += [""] * line.startswith("DataLoader of")
        pages[-1] += line
    top.terminate()
    top.communicate()
    process.communicate("\n")  # which ends it
    seen = max(pages, key=lambda page: page.count(" working "))
    return seen.rstrip("\n"), json.loads(Path(trace).read_text())


def drawing(
    width: float, height: float, parts: list[str], font: str = "system-ui, sans-serif", size: int = 15
) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}"'
    return "\n".join([
        f'{head} font-family="{font}" font-size="{size}">{timelines.INK}', *parts, "</svg>\n",
    ])  # fmt: skip


def text(x: float, y: float, words: str, colour: str = "#333", more: str = "") -> str:
    return (f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" xml:space="preserve"{more}>'
            f"{html.escape(words)}</text>")  # fmt: skip


def terminal(top: str) -> str:
    pid = top.partition("\n  process ")[2].split()[0].rstrip(",")
    lines = [f"$ minato top {pid}", *top.split("\n")]
    width, height = 8.0 * max(map(len, lines)) + 30, 18.0 * len(lines) + 24
    back = f'<rect width="{width:.0f}" height="{height:.0f}" rx="8" fill="#1e1e2e"/>'
    rows = [text(15, 26 + 18 * n, line, "#ddd") for n, line in enumerate(lines)]
    return drawing(width, height, [back, *rows], "monospace", 13)


def timeline(events: list[dict]) -> str:
    """The samples of each worker and the trainer's waits, from an epoch's begin on."""
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [e for e in events if e["ph"] == "X" and e["cat"] in ("sample", "wait")]
    begin = min(e["ts"] for e in spans if e["args"].get("epoch") == EPOCH)
    ink, length, left, row = "currentColor", 1.2e6, 90, 26
    scale = 620 / length
    tracks = [tid for tid in sorted(names) if names[tid] != "decisions"]
    bottom = len(tracks) * row + 30
    parts = []
    for ms in range(0, 1200, 200):
        x = left + ms * 1000 * scale
        parts.append(f'<path d="M{x:.1f} 8V{bottom - 12}" stroke="{ink}" stroke-width="0.5"/>')
        parts.append(text(x, bottom + 4, f"{ms} ms", ink, ' text-anchor="middle" font-size="12"'))
    for place, tid in enumerate(tracks):
        parts.append(text(0, 26 + place * row, names[tid].split(":")[0], ink))
        for e in (e for e in spans if e["tid"] == tid):
            first, last = (min(max(t - begin, 0), length) for t in (e["ts"], e["ts"] + e["dur"]))
            if (last - first) * scale < 0.3:
                continue
            wait, slow = e["cat"] == "wait", e["dur"] > 1e5
            colour = timelines.WAIT if wait else timelines.SLOWER if slow else timelines.FAST
            parts.append(
                f'<rect x="{left + first * scale:.1f}" y="{12 + place * row}" '
                f'width="{max(0.8, (last - first) * scale - 0.6):.1f}" height="19" fill="{colour}">'
                f"<title>{html.escape(e['name'])}, {e['dur'] / 1000:.1f} ms</title></rect>"
            )
            if slow and not wait and (last - first) * scale > 90:
                at = left + first * scale + 5
                parts.append(text(at, 26 + place * row, e["name"], "#fff", ' font-size="12"'))
    parts.append(text(left, bottom + 26, "blue: samples of 12 ms   orange: of 400 ms   "
                      "red: the trainer waits", ink))  # fmt: skip
    return drawing(720, len(tracks) * row + 64, parts)


def main(to: Path) -> None:
    diagrams.draw(to)
    timelines.draw(to)
    with tempfile.TemporaryDirectory() as folder:
        top, events = run(folder)
    (to / "top.svg").write_text(terminal(top))
    (to / "trace.svg").write_text(timeline(events))
    print(top)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
