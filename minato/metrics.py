"""Numbers that operators collect: for Prometheus, OpenTelemetry, or a program of your own.

``MINATO_METRICS=PATH`` writes them to a file every 15 seconds, for the textfile collector of
Prometheus's node_exporter. ``MINATO_METRICS=HOST:PORT`` serves them by HTTP. ``instrument(meter)``
hands them to the program's own OpenTelemetry. docs/monitoring.md lists them.
"""

from __future__ import annotations

import atexit
import bisect
import contextlib
import functools
import os
import re
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import get_worker_info

from .errors import program_level
from .observe import totals
from .seeding.ranks import of_process

__all__ = ["instrument", "read"]

#: (name, kind, unit, help, labels, value); a histogram's value is (counts by bucket, sum)
Number = tuple[str, str, str, str, dict[str, str], Any]

#: seconds between two files
EVERY = 15.0
#: upper bounds of the buckets of waits, in seconds
BOUNDS = tuple(round(n * 10.0**e, 3) for e in range(-3, 2) for n in (1, 2, 5)) + (100.0,)

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
WAIT = "minato.batch.wait.duration"
#: name -> (kind, unit, help)
NUMBERS = {
    "minato.batches": (COUNTER, "{batch}", "Batches that the program has received."),
    "minato.samples": (COUNTER, "{sample}", "Samples that were made."),
    "minato.bytes": (COUNTER, "By", "Bytes of the samples that were placed in rows of a batch."),
    "minato.wait.time": (COUNTER, "s", "Time in which the program waited for a batch."),
    "minato.program.time": (COUNTER, "s", "The program's own time between two batches."),
    "minato.retries": (COUNTER, "{task}", "Tasks given to another worker after a death."),
    "minato.worker.deaths": (COUNTER, "{worker}", "Workers that died."),
    "minato.samples.failed": (COUNTER, "{sample}", "Samples that on_error left out or replaced."),
    "minato.cache.hits": (COUNTER, "{sample}", "Samples that the cache had."),
    "minato.cache.misses": (COUNTER, "{sample}", "Samples that the cache did not have."),
    "minato.batches.ready": (GAUGE, "{batch}", "Batches that are complete and not received."),
    "minato.workers": (GAUGE, "{worker}", "Workers that can make samples."),
    "minato.memory.used": (GAUGE, "By", "Memory shared with workers that is in use."),
    "minato.memory.limit": (GAUGE, "By", "Limit on the memory shared with workers."),
    WAIT: (HISTOGRAM, "s", "Waits of the program for a batch."),
}

#: not counted for iterable datasets: only their workers know how many samples a batch has
_OF_SAMPLES = "minato.samples", "minato.bytes"
#: functions that get each wait: (seconds, labels)
_recorders: list[Callable[[float, dict[str, str]], object]] = []
_exporter: threading.Thread | None = None
_elsewhere = False  # this is a fork of a program that exports


def read() -> list[Number]:
    """All numbers of this process's loaders: (name, kind, unit, help, labels, value).

    kind: "counter", "gauge" or "histogram". A histogram's value is (counts, sum): how many waits
    were at most as long as each of ``BOUNDS`` and longer than the one before, and how many were
    longer than all. Labels: the loader and the rank. Counters never fall.
    """
    found, now = totals.totals()
    rank, numbers = str(of_process().rank), []
    for name, (kind, unit, text) in NUMBERS.items():
        for loader, counts in found.items():
            values: Any = now[loader] if kind == GAUGE else counts
            if name in _OF_SAMPLES and counts and "minato.samples" not in counts:
                continue
            value: Any = values[name]
            if kind == HISTOGRAM:
                slow = [int(counts[f"{WAIT} {at}"]) for at in range(len(BOUNDS) + 1)]
                at_once = int(counts["watched"]) - sum(slow)  # several were received together
                value = [slow[0] + max(0, at_once), *slow[1:]], counts["watched time"]
            labels = {"loader": loader, "rank": rank}
            numbers.append((name, kind, unit, text, labels, value))
    return numbers


def instrument(meter: Any) -> None:
    """Creates instruments on a program's OpenTelemetry meter, which read these numbers.

    Args:
        meter: an ``opentelemetry.metrics.Meter``.
    """
    from opentelemetry.metrics import Observation

    def observe(name: str, _options: Any) -> Iterator[Any]:
        for number in read():
            if number[0] == name:
                yield Observation(number[5], number[4])

    for name, (kind, unit, text) in NUMBERS.items():
        callback = [functools.partial(observe, name)]
        if kind == COUNTER:
            meter.create_observable_counter(name, callback, unit, text)
        elif kind == GAUGE:
            meter.create_observable_gauge(name, callback, unit, text)
        else:
            _recorders.append(meter.create_histogram(name, unit, text).record)


def watch(iterator: Any, source: totals.Source) -> None:
    """Measures the waits of an iterator's next()."""
    source.watched, name = True, source.name
    me = weakref.ref(iterator)
    next_data = type(iterator)._next_data

    def timed() -> Any:
        begin = time.monotonic()
        data = next_data(me())
        seconds = time.monotonic() - begin
        totals.add(name, f"{WAIT} {bisect.bisect_left(BOUNDS, seconds)}", 1)
        for record in _recorders:
            record(seconds, {"loader": name, "rank": str(of_process().rank)})
        return data

    iterator._next_data = timed


# ---- Prometheus --------------------------------------------------------------------------


def _name(name: str, kind: str, unit: str) -> str:
    """The name for Prometheus: minato.wait.time in s is minato_wait_seconds_total."""
    unit = {"s": "seconds", "By": "bytes"}.get(unit, "")
    parts = name.removesuffix(".time").split(".")
    parts += [unit] if unit and unit != parts[-1] else []
    return "_".join([*parts, "total"] if kind == COUNTER else parts)


def text() -> str:
    """The numbers in Prometheus's text format."""
    lines: list[str] = []
    for number, (name, kind, unit, told, labels, value) in enumerate(numbers := read()):
        own = _name(name, kind, unit)
        if not number or numbers[number - 1][0] != name:
            lines += [f"# HELP {own} {told}", f"# TYPE {own} {kind}"]
        marks = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
        if kind != HISTOGRAM:
            lines.append(f"{own}{{{marks}}} {value}")
            continue
        counts, total = value
        for at, bound in enumerate([*BOUNDS, "+Inf"]):
            lines.append(f'{own}_bucket{{{marks},le="{bound}"}} {sum(counts[: at + 1])}')
        lines += [f"{own}_sum{{{marks}}} {total}", f"{own}_count{{{marks}}} {sum(counts)}"]
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def start() -> None:
    """Starts to export as ``MINATO_METRICS`` says, once in a program. A worker, and a fork of a
    program that exports, does not."""
    global _exporter
    where = os.environ.get("MINATO_METRICS")
    if _exporter is not None or _elsewhere or not where or get_worker_info() is not None:
        return
    address = re.fullmatch(r"(?:([^/]*):)?(\d+)", where)
    serve: Callable[[], None] | None = None
    try:
        serve = _server(address[1] or "127.0.0.1", int(address[2])) if address else _Files(where)
    except OSError as error:
        warnings.warn(
            f"MINATO_METRICS={where}: {error}. Training goes on without these numbers. Name a free "
            "port, or a path in a folder that can be written to.",
            stacklevel=program_level(),
        )
    _exporter = threading.Thread(target=serve, name="minato-metrics", daemon=True)
    _exporter.start()


def _server(host: str, port: int) -> Callable[[], None]:
    """Serves the numbers by HTTP, each rank of this machine at a port of its own. Raises OSError if
    that is taken."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    names = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
    told = (os.environ.get(name, "") for name in names)
    local_rank = next((int(value) for value in told if value.isdecimal()), 0)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = text().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_args: Any) -> None:
            """Prints nothing."""

    class Server(ThreadingHTTPServer):
        allow_reuse_address = False
        daemon_threads = True

    try:
        server = Server((host.strip("[]"), port + local_rank), Handler)
    except OverflowError as error:
        raise OSError(str(error)) from None
    os.set_inheritable(server.fileno(), False)
    return server.serve_forever


class _Files:
    """Writes the numbers to a file, now and then and at the end."""

    def __init__(self, name: str) -> None:
        self._name = name.replace("%r", str(of_process().rank)).replace("%p", str(os.getpid()))
        self._pid = os.getpid()
        self._write()
        atexit.register(self._last)

    def __call__(self) -> None:
        while True:
            time.sleep(EVERY)
            with contextlib.suppress(OSError):  # a full disk may have room again
                self._write()

    def _write(self) -> None:
        part = f"{self._name}.{self._pid}.tmp"
        with open(part, "w", encoding="utf-8") as file:
            file.write(text())
        os.replace(part, self._name)

    def _last(self) -> None:
        if self._pid == os.getpid():
            with contextlib.suppress(OSError):
                self._write()


def _in_child() -> None:
    global _elsewhere, _exporter
    _elsewhere, _exporter = _elsewhere or _exporter is not None, None


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_in_child)
