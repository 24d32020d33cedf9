"""A run's output: CSV, JSON lines, MLPerf log lines, TensorBoard if installed."""
from __future__ import annotations

import csv
import json
import time
from pathlib import Path
from typing import Any

EPOCH_COLUMNS = (
    "epoch", "loader", "samples", "steps", "epoch_s", "startup_s", "samples_s", "mb_s",
    "read_mb_s", "wait_s", "wait_share", "wait_mean_s", "wait_p50_s", "wait_p99_s",
    "wait_max_s", "cpu", "cpu_seconds", "others", "gpu", "memory_mb", "loss", "learning_rate",
    "index_hash", "content_hash", "resumed_at", "work_bound_s", "synthetic_bound_s",
    "copy_bound_s", "core_bound_s", "bound_s", "kidney", "tumour", "mean_dice", "eval_s",
    "seconds", "step_ms",
    "still_cached", "gil_denied", "copy_mb_s", "copy_overlap", "copy_notes",
)
CSV_NAME, LINES_NAME, MLPERF_NAME = "epochs.csv", "log.jsonl", "mlperf.log"
USAGE_NAME, USAGE_COLUMNS = "usage.csv", ("epoch", "t", "cpu", "others", "memory_mb", "gpu")
RESULT_NAME, CHECKPOINT_NAME = "result.json", "checkpoint.pt"


class Records:
    """The files of one run; every method does nothing on ranks other than 0."""

    def __init__(self, folder: Path, active: bool, append: bool) -> None:
        self.folder, self.active = folder, active
        self.fresh = not append or not (folder / MLPERF_NAME).exists()
        if not active:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if not append:
            for name in (CSV_NAME, LINES_NAME, MLPERF_NAME, USAGE_NAME, RESULT_NAME,
                         CHECKPOINT_NAME):
                (folder / name).unlink(missing_ok=True)
        fresh = not (folder / CSV_NAME).exists()
        self._csv_file = open(folder / CSV_NAME, "a", newline="")
        self._csv = csv.DictWriter(self._csv_file, EPOCH_COLUMNS, restval="",
                                   extrasaction="ignore")
        if fresh:
            self._csv.writeheader()
        # Line-buffered: a long epoch can be followed, and a killed run has written its steps.
        self._lines = open(folder / LINES_NAME, "a", buffering=1)
        self._mlperf = open(folder / MLPERF_NAME, "a", buffering=1)
        try:
            from torch.utils.tensorboard import SummaryWriter
            self._board = SummaryWriter(str(folder / "tensorboard"))
        except ImportError:
            self._board = None

    def line(self, event: str, **fields: Any) -> None:
        """One JSON line {"event", "time", ...}."""
        if self.active:
            row = {"event": event, "time": time.time(), **fields}
            self._lines.write(json.dumps(row) + "\n")

    def mlperf(self, kind: str, key: str, value: Any = None, *, at_ms: int | None = None,
               **metadata: Any) -> None:
        """One line in the manner of MLPerf logging; `kind` is start, end or event. `at_ms`:
        when it happened, if not now."""
        if self.active:
            kinds = {"start": "INTERVAL_START", "end": "INTERVAL_END",
                     "event": "POINT_IN_TIME"}
            row = {"namespace": "", "time_ms": at_ms or int(time.time() * 1000),
                   "event_type": kinds[kind], "key": key, "value": value,
                   "metadata": metadata}
            self._mlperf.write(f":::MLLOG {json.dumps(row)}\n")

    def usage(self, epoch: int, samples: list[dict[str, Any]]) -> None:
        """An epoch's resource use over time (see bench.usage), to the JSON lines and usage.csv."""
        if not self.active:
            return
        fresh = not (self.folder / USAGE_NAME).exists()
        with open(self.folder / USAGE_NAME, "a", newline="") as stream:
            table = csv.DictWriter(stream, USAGE_COLUMNS)
            if fresh:
                table.writeheader()
            for sample in samples:
                table.writerow({"epoch": epoch, **sample})
                self.line("usage", epoch=epoch, **sample)

    def epoch(self, row: dict[str, Any]) -> None:
        """Writes one epoch to the CSV, the JSON lines and TensorBoard; flushes the files."""
        if not self.active:
            return
        self._csv.writerow(row)
        self.line("epoch", **row)
        if self._board is not None:
            for name, value in row.items():
                if isinstance(value, (int, float)) and name != "epoch":
                    self._board.add_scalar(name, value, row["epoch"])
        self.flush()

    def result(self, result: dict[str, Any]) -> None:
        """The summary of the whole run."""
        if self.active:
            path = self.folder / RESULT_NAME
            path.write_text(json.dumps(result, indent=1) + "\n")

    def flush(self) -> None:
        """Flush the files."""
        if self.active:
            for stream in (self._csv_file, self._lines, self._mlperf):
                stream.flush()
            if self._board is not None:
                self._board.flush()

    def close(self) -> None:
        """Flush and close."""
        if self.active:
            for stream in (self._csv_file, self._lines, self._mlperf):
                stream.close()
            if self._board is not None:
                self._board.close()
