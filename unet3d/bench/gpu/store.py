"""The measurements so far, in one JSON file from which a later call continues."""
from __future__ import annotations

import dataclasses
import json
import os
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from unet3d.bench import compare
from unet3d.bench.gpu.plan import Row
from unet3d.nifti import DataError

NAME, FORMAT = "gpu.json", 1
DONE, FAILED, SKIPPED = "done", "failed", "skipped"
#: stored values of an epoch
EPOCH = ("epoch", "samples", "steps", "epoch_s", "samples_s", "startup_s", "wait_share",
         "wait_mean_s", "wait_p50_s", "wait_p99_s", "wait_max_s", "cpu", "cpu_seconds", "gpu",
         "memory_mb", "mb_s", "copy_mb_s", "copy_overlap", "copy_notes", "gil_denied", "index_hash",
         "content_hash")
_NUMBER, _TEXT = (int, float), (str, type(None))
_SCHEMA: dict[str, Any] = {"format": int, "settings": dict, "machine": dict, "sessions": list,
                           "rows": list, "planned": int}
_SESSION: dict[str, Any] = {"began": _NUMBER, "seconds": _NUMBER, "measured": dict,
                            "missing": list}
_ROW: dict[str, Any] = {
    "key": str, "group": str, "label": str, "loader": str, "boxes": bool, "cores": int,
    "repeat": int, "amp": str, "batch": int, "status": str, "why": _TEXT, "seconds": _NUMBER,
    "session": int, "cached": (float, int, type(None)), "others": (float, int, type(None)),
    "facts": dict, "epochs": list}


def problems(document: Any) -> list[str]:
    """Why a document does not belong to this program; empty if it does."""
    def wrong(where: str, value: Any, schema: dict[str, Any]) -> list[str]:
        if not isinstance(value, dict):
            return [f"{where}: an object is expected"]
        found = [f"{where}.{name}: missing" for name in schema if name not in value]
        return found + [f"{where}.{name}: {value[name]!r} is of a wrong type"
                        for name, kind in schema.items()
                        if name in value and not isinstance(value[name], kind)]

    found = wrong("document", document, _SCHEMA)
    if found:
        return found
    if document["format"] != FORMAT:
        return [f"document.format: {document['format']}, this program reads {FORMAT}"]
    for number, session in enumerate(document["sessions"]):
        found += wrong(f"sessions[{number}]", session, _SESSION)
    for number, row in enumerate(document["rows"]):
        where = f"rows[{number}]"
        bad = wrong(where, row, _ROW)
        if not bad:
            if row["status"] not in (DONE, FAILED, SKIPPED):
                bad = [f"{where}.status: {row['status']!r}"]
            elif row["status"] != DONE and not row["why"]:
                bad = [f"{where}.why: missing of a row that is {row['status']}"]
            elif row["status"] == DONE and row["group"] != "benchmark":
                bad = [f"{where}.epochs[{n}]: without {name}"
                       for n, epoch in enumerate(row["epochs"])
                       for name in EPOCH if name not in epoch]
                bad += [] if row["epochs"] else [f"{where}.epochs: none"]
        found += bad
    keys = [row.get("key") for row in document["rows"] if isinstance(row, dict)]
    return found + [f"rows: {key!r} twice" for key in set(keys) if keys.count(key) > 1]


def read(path: Path) -> dict[str, Any]:
    """A document. Raises DataError."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if found := problems(document):
        raise DataError(f"{path}: not a result of unet3d.bench.gpu: {found[0]}"
                        + (f" (and {len(found) - 1} more)" if found[1:] else ""))
    return document


class Store:
    """The document of one experiment; every change is on disk when its call returns."""

    def __init__(self, path: Path, settings: dict[str, Any], machine: dict[str, Any],
                 planned: int) -> None:
        """Continues the existing file. Raises DataError if that belongs to another
        experiment or another machine."""
        self.path = path
        self.document: dict[str, Any] = {
            "format": FORMAT, "settings": settings, "machine": machine, "sessions": [],
            "rows": [], "planned": planned}
        if path.exists():
            self.document = read(path)
            for name, now in (("settings", settings), ("machine", machine)):
                before = self.document[name]
                if different := [f"{field} was {before.get(field)!r}, is {now.get(field)!r}"
                                 for field in {**before, **now}
                                 if before.get(field) != now.get(field)]:
                    raise DataError(f"{path}: made otherwise: {'; '.join(different)}; use "
                                    "another --out")
        self.began = time.monotonic()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.document["rows"]

    def begin(self, measured: dict[str, Any], missing: Iterable[str]) -> None:
        """Records the start of a call: its measurements of the machine, and what is missing."""
        self.document["sessions"].append({"began": time.time(), "seconds": 0.0,
                                          "measured": measured, "missing": list(missing)})
        self.write()

    def spent(self) -> float:
        """Seconds of all calls."""
        self.document["sessions"][-1]["seconds"] = time.monotonic() - self.began
        return sum(session["seconds"] for session in self.document["sessions"])

    def has(self, row: Row) -> bool:
        """Whether the row has ended, successfully or not."""
        return any(one["key"] == row.key for one in self.rows)

    def add(self, row: Row, status: str, why: str | None = None, seconds: float = 0.0,
            result: dict[str, Any] | None = None, **rest: Any) -> None:
        """Records the end of a row."""
        epochs = [{name: epoch.get(name) for name in EPOCH}
                  for epoch in (result or {}).get("epochs", [])]
        fields = dataclasses.asdict(row)
        del fields["contender"]
        self.rows.append({
            "key": row.key, **fields, "label": row.contender.label,
            "loader": row.contender.loader, "boxes": row.contender.boxes, "status": status,
            "why": why, "seconds": seconds, "session": len(self.document["sessions"]) - 1,
            "cached": None, "others": (result or {}).get("others"), "facts": {},
            "epochs": epochs, **rest})
        self.spent()
        self.write()

    def leave(self, rows: Iterable[Row]) -> None:
        """Records the rows for which there was no time."""
        self.document["left"] = [
            {"group": row.group, "label": row.contender.label, "amp": row.amp,
             "batch": row.batch, "cores": row.cores, "repeat": row.repeat} for row in rows]
        self.write()

    def write(self) -> None:
        """Writes the document to its file, atomically."""
        fresh = self.path.with_name(f".tmp-{os.getpid()}-{self.path.name}")
        fresh.write_text(json.dumps(self.document, indent=1) + "\n")
        os.replace(fresh, self.path)

    def estimate(self, row: Row, otherwise: float) -> float:
        """Estimated time of a row: that of its kind, at the fewest cores if need be."""
        kind = [one for one in self.rows if one["group"] == row.group and one["status"] == DONE]
        same = [one for one in kind if one["label"] == row.contender.label
                and one["batch"] == row.batch and one["cores"] <= row.cores]
        return max((one["seconds"] for one in same or kind), default=otherwise)

    def median(self, group: str, label: str, cores: int, amp: str, batch: int,
               name: str) -> float | None:
        """Medians over the rows of a group: see median_of."""
        return median_of(chosen(self.rows, group=group, label=label, cores=cores, amp=amp,
                                batch=batch), name)


def chosen(rows: Iterable[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    """The rows that have ended successfully and have these values."""
    return [row for row in rows if row["status"] == DONE
            and all(row[name] == value for name, value in fields.items())]


def median_of(rows: list[dict[str, Any]], name: str) -> float | None:
    """The median of a figure over the counted epochs of rows; None if there are none."""
    epochs = compare.counted_epochs("warm", rows) if rows else []
    values = [epoch[name] for epoch in epochs if epoch[name] is not None]
    return statistics.median(values) if values else None
