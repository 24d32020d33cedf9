"""The diagrams of docs/how-it-works.md.

    python docs/pictures/diagrams.py [FOLDER]
"""

from __future__ import annotations

import html
import sys
from pathlib import Path

import timelines

HERE = Path(__file__).resolve().parent
INK, BLUE, ORANGE, GREEN = "currentColor", timelines.FAST, timelines.SLOWER, "#3f9b5f"

Part = str


def label(x: float, y: float, words: str, more: str = "") -> Part:
    return f'<text x="{x}" y="{y}"{more}>{html.escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, lines: list[str], colour: str) -> Part:
    """A frame with a bold first line and the others below it."""
    parts = [f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{colour}" '
             f'fill-opacity="0.1" stroke="{colour}"/>']  # fmt: skip
    for number, words in enumerate(lines):
        bold = ' font-weight="bold"' if number == 0 else ""
        parts.append(label(x + 10, y + 21 + 19 * number, words, bold))
    return "\n".join(parts)


def arrow(path: str) -> Part:
    return f'<path d="{path}" fill="none" stroke="{INK}" stroke-width="1.5" marker-end="url(#head)"/>'


def drawing(width: int, height: int, title: str, parts: list[Part]) -> str:
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="system-ui, sans-serif" font-size="15" fill="{INK}">{timelines.INK}',
        f"<title>{html.escape(title)}</title>",
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{INK}"/></marker>',
        *parts, "</svg>\n",
    ])  # fmt: skip


def processes() -> str:
    parts = [
        box(5, 10, 205, 95, ["your program", "the loop calls next()", "the sampler, the engine",
                             "one thread without GIL"], BLUE),
        box(265, 10, 150, 95, ["zygote", "forks workers,", "notices deaths"], GREEN),
        box(470, 10, 165, 95, ["workers", "run dataset[i],", "one thread each"], ORANGE),
        arrow("M210 50H263"), label(222, 42, "forks", ' font-size="12"'),
        arrow("M415 50H468"), label(427, 42, "forks", ' font-size="12"'),
        box(5, 165, 630, 52, ["one block of shared memory",
                              "which worker makes which sample   |   the batches, sample by sample"],
            INK),
        arrow("M40 105V163"), label(47, 140, "queues samples", ' font-size="12"'),
        arrow("M170 165V107"), label(178, 140, "gets batches", ' font-size="12"'),
        arrow("M510 165V107"), label(410, 140, "claims a sample", ' font-size="12"'),
        arrow("M560 105V163"), label(567, 140, "writes it", ' font-size="12"'),
    ]  # fmt: skip
    return drawing(640, 225, "Your program, the zygote, the workers, and the memory they share", parts)


def life() -> str:
    names = ["planned", "queued", "running", "done", "delivered", "released"]
    notes = [["the sampler", "gave it"], ["waits for a", "free worker"],
             ["a worker", "makes it"], ["its memory", "holds it"], ["next() gave", "the batch"],
             ["the batch", "is gone"]]  # fmt: skip
    parts: list[Part] = []
    for number, (name, note) in enumerate(zip(names, notes)):
        x = 4 + 107 * number
        colour = ORANGE if name == "running" else BLUE
        parts.append(box(x, 10, 94, 66, [name], colour))
        parts += [label(x + 10, 50 + 17 * k, words, ' font-size="12"') for k, words in enumerate(note)]
        if number:
            parts.append(arrow(f"M{x - 13} 43H{x - 2}"))
    parts += [arrow("M265 76V108H158V79"),
              label(120, 127, "the worker died: another one makes it", ' font-size="13"')]  # fmt: skip
    return drawing(640, 135, "The states of a sample", parts)


def draw(to: Path) -> None:
    (to / "processes.svg").write_text(processes())
    (to / "life.svg").write_text(life())


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
