"""Workers and the zygote die, or stop, at each labelled fault point; run by tests/test_sanitized.py.

The extension is built with MINATO_FAULTS=1 for it. MINATO_TEST_FAULTS lists how often a point
is passed before the process dies there. If a process is killed at random, most
deaths happen in the dataset's own code; here each happens between two neighbouring steps.
"""

from __future__ import annotations

import multiprocessing.forkserver
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from housekeeping import ADDRESS_SANITIZER

from .datasets import Noisy
from .support import A_THREAD, PATIENCE, alive, copied, kill, same, wait_for, worker_entries, workers_of
from .test_kills import KINDS, make
from .test_trainer_faults import POINTS as TRAINER

ROOT = Path(__file__).resolve().parents[2]
#: label -> kind of data that passes it
WORKER = {
    "runqueue.claim.before": "rows",
    "runqueue.claim.after": "rows and envelopes",
    "worker.lease.want": "small memory",
    "worker.lease.granted": "small memory",
    "worker.collate.claimed": "batches in parts",
    "worker.done.before": "rows",
    "worker.done.after": "batches",
    "event.prepared": "rows",
    "event.claimed": "rows and envelopes",
}
#: label -> whether a worker's death leads there
ZYGOTE = {
    "zygote.starting": False,
    "zygote.claim": False,
    "zygote.stopped": False,
    "zygote.exited.before": True,
    "zygote.exited.silent": True,
    "zygote.exited.after": True,
    "zygote.reap": True,
}
TIMES = range(1, 1 + int(os.environ["MINATO_TEST_FAULTS"]))


def test_every_label_is_listed() -> None:
    """Those of the cache are in tests/c/mn_cache.c."""
    files = [path for path in (ROOT / "csrc").rglob("*.c") if path.parent.name != "cache"]
    text = "".join(path.read_text() for path in files)
    assert set(re.findall(r'\bMN_FAULT\("([^"]+)"\)', text)) == {*WORKER, *ZYGOTE, *TRAINER}


@pytest.fixture
def fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Arms a point. Returns the file that a process creates when it dies at the point. Before its
    folder exists, no process dies."""

    def arm(label: str, n: int, how: int = signal.SIGKILL, folder: str = "") -> Path:
        file = tmp_path / folder / "dead"
        monkeypatch.setenv("MINATO_FAULT", f"{label} {n} {file} {int(how)}")
        monkeypatch.setenv("MINATO_FAULT_SPARES", str(os.getpid()))
        return file

    return arm


#: ways to end a process other than a kill; 0: os._exit
WAYS = [signal.SIGSEGV, signal.SIGBUS, 0]
METHODS = ["fork", "spawn", "forkserver"]


def ways_of(labels: list[str]) -> list[tuple[str, int, str]]:
    """(label, how, start method): each label occurs with each way and with each method, but not
    with each pair of them; in short runs with one way, and fork only."""
    methods = METHODS if len(TIMES) > 1 else METHODS[:1]
    return [
        (label, WAYS[(at + shift) % len(WAYS)], method)
        for at, label in enumerate(labels)
        for shift, method in enumerate(methods)
    ]


@pytest.fixture
def fresh_server() -> None:
    """A new fork server, whose children have the current environment."""
    vars(multiprocessing.forkserver)["_forkserver"]._stop()


@pytest.mark.parametrize("n", TIMES)
@pytest.mark.parametrize("label", WORKER)
def test_worker_killed_at_fault_point_loses_nothing(label: str, n: int, fault) -> None:
    dataset, options = KINDS[WORKER[label]]
    loader = make(dataset(), persistent_workers=True, **options)
    expected = [copied(batch) for batch in loader]
    del loader
    file = fault(label, n)
    loader = make(dataset(), persistent_workers=True, **options)
    assert same([copied(batch) for batch in loader], expected)
    wait_for(file.exists, f"a death at {label}")
    wait_for(lambda: loader.stats()["deaths"] == 1, "the loader to see it")
    torch.manual_seed(1234)
    assert len(list(loader)) == len(expected)  # and another epoch


@pytest.mark.parametrize("label, how, method", ways_of([*WORKER]))
def test_worker_exit_at_fault_point_loses_nothing(
    label: str, how: int, method: str, fault: Callable[..., Path], fresh_server: None
) -> None:
    dataset, options = KINDS[WORKER[label]]
    expected = [copied(batch) for batch in make(dataset(), **options)]
    file = fault(label, 1, how)
    loader = make(dataset(), multiprocessing_context=method, persistent_workers=True, **options)
    assert same([copied(batch) for batch in loader], expected)
    wait_for(file.exists, f"a death at {label}")
    wait_for(lambda: loader.stats()["deaths"] == 1, "the loader to see it")


@pytest.mark.parametrize("at, label", [*enumerate(WORKER)])
def test_replacement_death_between_epochs_loses_nothing(
    at: int, label: str, fault: Callable[..., Path], fresh_server: None
) -> None:
    """All workers are replacements, and idle: one ends at once, or in the next epoch."""
    dataset, options = KINDS[WORKER[label]]
    options = {"num_workers": 2, "persistent_workers": True, **options}
    calm = make(dataset(), **options)
    expected = [copied(batch) for batch in calm]
    torch.manual_seed(5)
    expected += [copied(batch) for batch in calm]
    how = [signal.SIGKILL, *WAYS][at % 4]
    for method in METHODS if len(TIMES) > 1 else METHODS[:1]:
        file = fault(label, 1, how, folder=method)
        loader = make(dataset(), multiprocessing_context=method, **options)
        iterator = iter(loader)
        got = [copied(batch) for batch in iterator]
        before = workers_of(iterator)
        for pid in before:
            kill(pid)
        wait_for(lambda: all_ready(iterator, before), "replacements")
        file.parent.mkdir()
        torch.manual_seed(5)
        got += [copied(batch) for batch in loader]
        wait_for(file.exists, f"a death at {label}")
        wait_for(lambda: loader.stats()["deaths"] == 3, "the loader to see it")
        assert same(got, expected)


@pytest.mark.parametrize("at, label", [*enumerate(WORKER)])
def test_replacement_death_in_mid_epoch_loses_nothing(
    at: int,
    label: str,
    fault: Callable[..., Path],
    fresh_server: None,
    started_with: Callable[[str], None],
) -> None:
    """All workers are killed, and one of their replacements ends at the point."""
    dataset, options = KINDS[WORKER[label]]
    options = {"num_workers": 2, "persistent_workers": True, **options}
    expected = [copied(batch) for batch in make(dataset(), **options)]
    how = [signal.SIGKILL, *WAYS][at % 4]
    methods = [*METHODS, "spawn each"] if at % 3 == 0 else METHODS
    for method in methods if len(TIMES) > 1 else METHODS[:1]:
        file = fault(label, 1, how, folder=method.replace(" ", "_"))
        each = method == "spawn each"
        if each:
            started_with(A_THREAD)
        loader = make(dataset(), multiprocessing_context=method.split()[0], **options)
        iterator = iter(loader)
        got = [copied(next(iterator))]
        assert loader.stats()["worker_start"].startswith("each" if each else "forked")
        before = workers_of(iterator)
        for pid in before:
            kill(pid)
        wait_for(lambda: not any(map(alive, before)), "their end")
        file.parent.mkdir()
        got += [copied(batch) for batch in iterator]
        wait_for(file.exists, f"a death at {label}")
        wait_for(lambda: loader.stats()["deaths"] == 3, "the loader to see it")
        assert same(got, expected)


def all_ready(iterator: object, but: list[int]) -> bool:
    entries = worker_entries(iterator)
    return all(entry["state"] == 3 and entry["pid"] not in but for entry in entries)


HANGS = -1


@pytest.mark.parametrize("label, n, how", [
    ("zygote.starting", 2, signal.SIGSTOP), ("zygote.reap", 1, signal.SIGSTOP),
    ("zygote.starting", 2, HANGS), ("zygote.starting", 1, HANGS),
])  # fmt: skip
def test_zygote_stuck_in_fork_is_an_error(
    label: str, n: int, how: int, fault: Callable[..., Path]
) -> None:
    """The only worker, or one in its place. The zygote is ended, and another makes it."""
    file = fault(label, n, how)
    iterator = iter(make(Noisy(40), num_workers=1, timeout=3 * PATIENCE))
    got: list[Any] = []
    for batch in iterator:
        got.append(batch)
        if len(got) == 1:
            kill(workers_of(iterator)[0])
    assert file.exists()
    assert sorted(int(i) for batch in got for i in batch["index"]) == list(range(40))


@pytest.mark.parametrize("label", WORKER)
def test_worker_stopped_at_fault_point_loses_nothing(
    label: str, fault: Callable[..., Path]
) -> None:
    """Its tasks wait for it, and no wake-up of other workers is lost."""
    dataset, options = KINDS[WORKER[label]]
    expected = [copied(batch) for batch in make(dataset(), **options)]
    file, ended = fault(label, 1, signal.SIGSTOP), threading.Event()

    def go_on() -> None:
        while not ended.wait(0.01):
            pid = int((file.exists() and file.read_text()) or 0)
            if pid and alive(pid) and psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                kill(pid, signal.SIGCONT)

    later = threading.Thread(target=go_on)
    later.start()
    try:
        assert same([copied(batch) for batch in make(dataset(), **options)], expected)
    finally:
        ended.set()
        later.join()
    assert file.exists(), f"nobody has come by {label}"


@pytest.mark.parametrize("how", WAYS)
def test_zygote_death_during_replacement(
    how: int, fault: Callable[..., Path]
) -> None:
    dataset, options = KINDS["rows"]
    expected = [copied(batch) for batch in make(dataset(), **options)]
    file = fault("zygote.starting", 4, how)  # three workers were made before
    iterator = iter(make(dataset(), **options))
    wait_for(lambda: all(worker["pid"] for worker in worker_entries(iterator)), "workers")
    kill(workers_of(iterator)[0])
    wait_for(file.exists, "its end")
    got: list[object] = []
    try:
        got += [copied(batch) for batch in iterator]
    except RuntimeError as error:
        assert "died unexpectedly" in str(error)
    assert same(got, expected[: len(got)])


@pytest.mark.parametrize(
    "label, n", [(label, n) for label in ZYGOTE for n in TIMES if n == 1 or label != "zygote.stopped"]
)
def test_zygote_killed_at_fault_point_is_an_error(label: str, n: int, fault) -> None:
    """Delivered data is right, the rest is an explained error, and no process stays."""
    dataset, options = KINDS["rows"]
    expected = [copied(batch) for batch in make(dataset(), **options)]
    file = fault(label, n)
    got, errors = [], []
    iterator = iter(make(dataset(), **options))
    if ZYGOTE[label]:
        wait_for(lambda: all(worker["pid"] for worker in worker_entries(iterator)), "workers")
        for pid in workers_of(iterator)[:n]:
            kill(pid, signal.SIGKILL)
    if label != "zygote.stopped":  # which comes at the end
        wait_for(file.exists, f"a death at {label}")
    while not errors:
        try:
            got.append(copied(next(iterator)))
        except StopIteration:
            break
        except RuntimeError as error:
            errors.append(str(error))
    assert same(got, expected[: len(got)])
    assert errors or len(got) == len(expected)
    assert all("died unexpectedly" in text for text in errors), errors
    wait_for(file.exists, f"a death at {label}")


@pytest.mark.skipif(not ADDRESS_SANITIZER, reason="else one watches for tests that hang")
def test_forking_process_has_one_thread() -> None:
    """Otherwise a sanitizer's locks may be held in the forks: see tests/test_sanitized.py."""
    threads = torch.multiprocessing.get_context("fork").Array("i", 8)

    def note() -> None:
        threads[min(len(os.listdir("/proc/self/task")), 8) - 1] += 1

    os.register_at_fork(before=note)
    dataset, options = KINDS["rows"]
    list(make(dataset(), **options))
    assert threads[0] >= 4 and sum(threads) == threads[0], list(threads)
