"""``minato.metrics``: totals, and how they are exported."""

from __future__ import annotations

import os
import re
import sys
import types
import urllib.request
import weakref
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.support import programs
from torch.utils.data import Dataset, IterableDataset

import minato
from minato import metrics
from minato.observe import totals

ROOT = Path(__file__).parents[2]


class Counted(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 42

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5 and isinstance(self, Failing):
            raise OSError("broken")
        return torch.zeros(100)


class Failing(Counted):
    pass


class Numbers(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(range(40))


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(totals, "_ended", defaultdict(Counter))
    monkeypatch.setattr(totals, "_living", weakref.WeakSet())


def numbers(loader: str = "Counted") -> dict[str, Any]:
    return {one[0]: one[5] for one in metrics.read() if one[4]["loader"] == loader}


def made(**options: Any) -> Any:
    return minato.DataLoader(options.pop("dataset", Counted()), 4, **options)


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_of_an_iterable_dataset_are_not_counted(workers: int) -> None:
    list(minato.DataLoader(Numbers(), batch_size=8, num_workers=workers))
    found = numbers("Numbers")
    assert found["minato.batches"] == 5 and "minato.samples" not in found


@pytest.mark.parametrize("options", [
    {"num_workers": 2}, {"num_workers": 0}, {"num_workers": 2, "persistent_workers": True},
    {"num_workers": 1, "scheduling": "static"}, {"num_workers": 1, "worker_type": "thread",
     "seed_per_sample": False},
])  # fmt: skip
def test_totals_over_epochs_never_fall(options: dict[str, Any]) -> None:
    loader, last = made(**options), 0.0
    for epoch in range(1, 6):
        for _ in loader:
            pass
        found = numbers()
        assert (found["minato.batches"], found["minato.samples"]) == (11 * epoch, 42 * epoch)
        assert found["minato.wait.time"] > last
        last = found["minato.wait.time"]
    del loader
    assert numbers()["minato.batches"] == 55
    counts, seconds = numbers()[metrics.WAIT]
    assert sum(counts) == 55 and seconds == pytest.approx(last)


def test_loaders_of_one_name_are_added() -> None:
    first, second = made(num_workers=1, persistent_workers=True), made(num_workers=0)
    second.name = "validation"
    both = iter(first), iter(made(num_workers=1))
    for batches in both:
        next(batches)
    list(second)
    assert numbers()["minato.batches"] == 2
    assert numbers("validation")["minato.batches"] == 11
    assert numbers()["minato.workers"] >= 1 and numbers()["minato.memory.limit"] > 0


@pytest.mark.filterwarnings("ignore:1 samples of this epoch failed")
def test_failed_samples_are_counted() -> None:
    for _ in made(dataset=Failing(), num_workers=1, on_error="skip", max_errors=1):
        pass
    assert numbers("Failing")["minato.samples.failed"] == 1


def test_names_past_the_limit_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(totals, "NAMES_MOST", 2)
    for name in ("a", "b", "c", "d", "a"):
        loader = made()
        loader.name = name
        list(loader)
    assert numbers("a")["minato.batches"] == 22 and numbers("other")["minato.batches"] == 22


def test_text_is_read_by_a_prometheus_parser() -> None:
    parser = pytest.importorskip("prometheus_client.parser", exc_type=ImportError)
    loader = made(num_workers=1)
    loader.name = 'a "name"\\\n'
    list(loader)
    families = {f.name: f for f in parser.text_string_to_metric_families(metrics.text())}
    assert len(families) == len(metrics.NUMBERS)
    (sample,) = families["minato_batches"].samples
    assert sample.value == 11 and sample.labels == {"loader": loader.name, "rank": "0"}
    waits = families["minato_batch_wait_duration_seconds"].samples
    assert [s.value for s in waits if s.labels.get("le") == "+Inf"] == [11]


def test_text_has_the_names_of_prometheus() -> None:
    list(made())
    text = metrics.text()
    for line in ('minato_wait_seconds_total{loader="Counted",rank="0"} ', "minato_bytes_total{",
                 "minato_memory_used_bytes{", 'minato_batch_wait_duration_seconds_bucket{loader="Counted",'
                 'rank="0",le="0.001"}', "minato_program_seconds_total{", "minato_workers{"):  # fmt: skip
        assert line in text
    assert len(re.findall(r"^# TYPE", text, re.M)) == len(metrics.NUMBERS)


def test_dashboard_asks_for_numbers_that_exist() -> None:
    list(made())
    asked = set(re.findall(r"\bminato_\w+", (ROOT / "docs/grafana.json").read_text()))
    assert len(asked) > 10
    assert asked <= set(re.findall(r"^minato_\w+", metrics.text(), re.M))


def test_instruments_read_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    observations: dict[str, Any] = {}
    recorded: list[Any] = []

    class Meter:
        def create_observable_counter(self, name: str, callbacks: Any, unit: str, told: str) -> None:
            observations[name] = callbacks[0]

        create_observable_gauge = create_observable_counter

        def create_histogram(self, name: str, unit: str, told: str) -> Any:
            return types.SimpleNamespace(record=lambda *args: recorded.append(args))

    api = types.SimpleNamespace(Observation=lambda value, labels: (value, labels))
    monkeypatch.setitem(sys.modules, "opentelemetry", types.SimpleNamespace(metrics=api))
    monkeypatch.setitem(sys.modules, "opentelemetry.metrics", api)
    monkeypatch.setattr(metrics, "_recorders", [])
    metrics.instrument(Meter())
    list(made())
    labels = {"loader": "Counted", "rank": "0"}
    assert list(observations["minato.batches"](None)) == [(11, labels)]
    assert len(recorded) == 11 and all(told == labels for _, told in recorded)


# ---- exports ------------------------------------------------------------------------------------

PROGRAM = """
import sys, time, torch, minato

class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return i

for _ in range(2):
    list(minato.DataLoader(Numbers(), 4, num_workers=1))
print("trained", flush=True)
if len(sys.argv) > 1:
    sys.stdin.read()
"""


def test_file_has_the_totals_at_the_end(tmp_path: Path) -> None:
    name = str(tmp_path / "minato-%r-%p.prom")
    code = PROGRAM + "\nimport os; print(os.getpid())"
    done = programs().run(code, MINATO_METRICS=name, RANK="3", WORLD_SIZE="4")
    assert done.returncode == 0, done.stderr
    trained, pid = done.stdout.split()
    (file,) = tmp_path.iterdir()
    assert trained == "trained" and file.name == f"minato-3-{pid}.prom"
    assert 'minato_batches_total{loader="Numbers",rank="3"} 4' in file.read_text()


def free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def test_http_serves_at_the_port_of_the_local_rank() -> None:
    port = free_port()
    more = {**os.environ, "MINATO_METRICS": f":{port - 1}", "LOCAL_RANK": "1"}
    running = programs().open(PROGRAM, "wait", environment=more, is_text=True)
    try:
        assert running.stdout.readline() == "trained\n"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
    finally:
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 0 and not errors
    assert 'minato_batches_total{loader="Numbers",rank="0"} 4' in text


@pytest.mark.parametrize("what", ["port", "path"])
def test_impossible_export_warns_once_and_training_goes_on(what: str) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}" if what == "port" else "/nowhere/minato.prom"
        done = programs().run(PROGRAM, MINATO_METRICS=where)
    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert done.stderr.count("Training goes on without these numbers") == 1


def test_without_the_variable_nothing_is_imported() -> None:
    code = PROGRAM + "\nimport threading\nassert 'minato.metrics' not in sys.modules\n" \
        "assert not [t for t in threading.enumerate() if t.name == 'minato-metrics']\n"  # fmt: skip
    done = programs().run(code, MINATO_METRICS="")
    assert done.returncode == 0, done.stderr
