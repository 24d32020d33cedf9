"""``minato top``: what it reads of another process, and what it says when it cannot."""

from __future__ import annotations

import contextlib
import os
import pty
import random
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from contract.support import programs

from minato._core import TASK_RUNNING, peek, worker_states
from minato.commands import top as _top

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
TOP = "import sys; from minato.__main__ import main; sys.exit(main(['top', *sys.argv[1:]]))"
DEADLINE_S = 60

#: a trainer whose samples block until told otherwise; it answers to lines of its input
TRAINER = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")
import torch, minato

gate = torch.multiprocessing.get_context("fork").Event()
signal.signal(signal.SIGUSR1, lambda *_: gate.set())

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        if index == 13:
            gate.wait(300)
        return index

loader = minato.DataLoader(Data(), 4, num_workers=2, **eval(sys.argv[1]))
it = None
print("up", flush=True)
for line in sys.stdin:
    if line == "begin\\n":
        it = iter(loader)
        next(it)
    elif line == "wait\\n":
        print("waiting", flush=True)
        for _ in range(10):
            next(it)
    elif line == "end\\n":
        gate.set()
        it = loader = None
    print("done", flush=True)
"""


class Trainer:
    def __init__(self, options: str = "{}") -> None:
        self.process = programs().open(TRAINER, options, environment=ENVIRONMENT, is_text=True)
        self.pid = self.process.pid
        self.hears("up")

    def hears(self, word: str) -> None:
        assert self.process.stdout.readline().strip() == word

    def tell(self, word: str, answer: str = "done") -> None:
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        self.hears(answer)


@contextlib.contextmanager
def trainer(options: str = "{}") -> Iterator[Trainer]:
    made = Trainer(options)
    watchdog = threading.Timer(DEADLINE_S, made.process.kill)
    watchdog.start()
    try:
        yield made
    finally:
        watchdog.cancel()
        made.process.kill()
        made.process.communicate()


def until(pid: int, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first snapshot of the process for which it is true."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        (seen,) = _top.snapshots(pid)
        if true(seen) or time.monotonic() > deadline:
            return seen
        time.sleep(0.01)


def top(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return programs().run(TOP, *map(str, arguments), timeout=DEADLINE_S)


def needs_tracing() -> bool:
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope", encoding="ascii") as file:
            return os.geteuid() != 0 and int(file.read()) > 1
    except FileNotFoundError:
        return False


pytestmark = pytest.mark.skipif(needs_tracing(), reason="this system allows no tracing")


def at(seen: dict[str, Any], index: int) -> list[tuple]:
    return [w["running"] for w in seen["workers"] if w["running"] and w["running"][4] == index]


@pytest.fixture(scope="module")
def stuck() -> Iterator[int]:
    """A trainer that waits in next() for sample 13; only to be looked at."""
    with trainer() as made:
        made.tell("begin")
        made.tell("wait", "waiting")
        until(made.pid, lambda s: bool(at(s, 13)) and s["waiting_since_ns"] and s["given"] == 3)
        yield made.pid


# ---- what is read ----------------------------------------------------------------------


def test_snapshot_of_stuck_loader_names_its_sample(stuck: int) -> None:
    seen = until(stuck, lambda s: all(_top.worker_state(w["state"]) == "ready" for w in s["workers"]))
    assert seen["trainer_pid"] == stuck and not seen["stopped"] and seen["given"] == 3
    ((batch, row, _row0, _nrows, index),) = at(seen, 13)
    assert (batch, row, index) == (3, 1, 13)
    assert len(seen["workers"]) == 2
    for worker in seen["workers"]:
        assert _top.worker_state(worker["state"]) == "ready" and worker["starts"] == 1
        os.kill(worker["pid"], 0)
    assert seen["opened_ns"] < seen["waiting_since_ns"] <= seen["now_ns"]
    assert any(status == TASK_RUNNING and block for status, block in seen["tasks"])
    assert seen["limit_bytes"] > 0


def test_top_once_prints_a_stuck_sample(stuck: int) -> None:
    done = top(stuck, "--once")
    assert done.returncode == 0 and done.stderr == ""
    assert "DataLoader of Data (1000 samples), batch_size=4, num_workers=2\n" in done.stdout
    assert f"  process  {stuck}, open for" in done.stdout
    assert "waits in next()" in done.stdout
    assert re.search(r"working .* 3 +\d.* 13 \(position 1\)$", done.stdout, re.M)
    assert re.search(r"longest  in flight, by index: 13 \(", done.stdout)
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("options", ["{'scheduling': 'static'}", "{'autoscale': (1, 4)}"])
def test_other_loaders(options: str) -> None:
    with trainer(options) as made:
        made.tell("begin")
        seen = until(made.pid, lambda s: s["given"] >= 1 and len(_top.render(s)) >= 7)
        assert len(_top.render(seen)) >= 7


def test_snapshot_works_with_pid_of_worker(stuck: int) -> None:
    """Workers and their parent have the memory, too."""
    (seen,) = _top.snapshots(stuck)
    (again,) = _top.snapshots(seen["workers"][0]["pid"])
    assert again["trainer_pid"] == stuck


# ---- what cannot be read ---------------------------------------------------------------


def test_no_such_process(capsys: pytest.CaptureFixture[str]) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    assert _top.run([str(dead.pid), "--once"]) == 1
    assert f"there is no process {dead.pid}" in capsys.readouterr().err


def test_process_that_has_a_loader_for_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    """It does not notice that it is looked at, also while it waits for a batch."""

    def looked_at(status: int) -> None:
        assert _top.run([str(made.pid), "--once"]) == status
        assert ("has no minato loader" in capsys.readouterr().err) == bool(status)

    with trainer() as made:
        looked_at(1)
        made.tell("begin")
        looked_at(0)
        made.tell("wait", "waiting")
        for _ in range(50):
            _top.snapshots(made.pid)
        made.process.send_signal(signal.SIGUSR1)
        made.hears("done")
        made.tell("end")
        looked_at(1)


def test_no_permission(stuck: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError

    for what in ("os.open", "builtins.open"):
        with monkeypatch.context() as patched:
            patched.setattr(what, refuse)
            with pytest.raises(_top.TopError, match="ptrace_scope"):
                _top.snapshots(stuck)


def _memory(pid: int) -> Callable[[int, int], bytes]:
    ((base, _size),) = _top.mappings(pid)

    def read(offset: int, count: int) -> bytes:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as file:
            return os.pread(file.fileno(), count, base + offset)

    return read


def test_another_version_and_other_memory(stuck: int) -> None:
    read = _memory(stuck)

    def changed(at: int, value: bytes) -> Callable[[int, int], bytes]:
        def changed_read(offset: int, count: int) -> bytes:
            data = bytearray(read(offset, count))
            if offset == 0:
                data[at : at + len(value)] = value
            return bytes(data)

        return changed_read

    assert peek(read)["trainer_pid"] == stuck
    with pytest.raises(ValueError, match="not a loader's memory"):
        peek(changed(0, bytes(8)))
    with pytest.raises(ValueError, match="another version"):
        peek(changed(8, b"\1" * 8))
    for place in (24, 32, 40, 48, 64):  # offsets of the sections: none is trusted
        for value in (b"\xff" * 8, b"\xff" * 7 + b"\x0f"):
            with pytest.raises(ValueError, match="damaged"):
                peek(changed(place, value))
    with pytest.raises(ValueError, match="damaged"):
        peek(changed(80, b"\xff" * 4))
    with pytest.raises(ValueError, match="too early"):
        peek(lambda offset, count: read(offset, count)[:-1])
    with pytest.raises(TypeError):
        peek(lambda offset, count: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):
        peek(lambda offset, count: 1 // 0)  # type: ignore[arg-type, return-value]


def test_damaged_records_are_not_followed(stuck: int) -> None:
    """Whatever is in the tables: an answer or a ValueError."""
    rng = random.Random(5)
    read = _memory(stuck)
    for _ in range(20):
        share = rng.choice([0.0001, 0.001, 0.01])

        def noisy(offset: int, count: int, share: float = share) -> bytes:
            data = bytearray(read(offset, count))
            if offset != 0:
                for _ in range(int(len(data) * share) + 1):
                    data[rng.randrange(len(data))] = rng.randrange(256)
            return bytes(data)

        with contextlib.suppress(ValueError, OSError):
            _top.render({**peek(noisy)})


# ---- the table -------------------------------------------------------------------------


def snapshot(now: float, wait: float, given: int, since: float = 0.0) -> dict[str, Any]:
    """Seconds after the start."""
    worker = {
        "state": 3, "pid": 77, "starts": 1, "running": (5, 2, 0, 4, 42),
        "since_ns": int((now - 0.25) * 1e9) + 1, "tasks": 3, "rows": 9,
        "busy_ns": int(now * 0.5e9), "cpu_ns": int(now * 0.25e9),
    }  # fmt: skip
    return {
        "title": "DataLoader of Files (60 samples), batch_size=4, num_workers=2",
        "trainer_pid": 7, "address": 1, "opened_ns": 1, "now_ns": int(now * 1e9) + 1,
        "waiting_since_ns": int(since * 1e9) + 1 if since else 0, "wait_ns": int(wait * 1e9),
        "given": given, "used_bytes": 1 << 21, "limit_bytes": 1 << 30, "stopped": False,
        "opening_ns": 0, "group_milli": 0,
        # 1 queued, 1 running, 4 done, 2 not begun; of 3 batches 1 is ready
        "tasks": [(1, 64), (2, 64), *[(3, 128)] * 4, (6, 192), (7, 192)],
        "workers": [worker, {**worker, "state": 0, "running": None},
                    {**worker, "state": 3, "running": None, "starts": 3}],
    }  # fmt: skip


def test_shares_of_time() -> None:
    text = "\n".join(_top.render(snapshot(10, 2.5, 20)))
    assert "waited 25% of its time since the start\n" in text
    assert "  batches  2.0 a second, 20 so far; 1 ready, 2 being made\n" in text
    text = "\n".join(_top.render(snapshot(12, 2.5, 30, since=11), snapshot(10, 2.5, 20)))
    assert "waited 50% of its time since the last look\n" in text
    assert "  batches  5.0 a second, 30 so far" in text
    assert "2.0 MiB of 1.0 GiB" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_workers_in_the_table() -> None:
    lines = _top.render(snapshot(12, 0, 0), snapshot(10, 0, 0))
    rows = [line for line in lines if re.match(r" +\d+ +77 ", line)]
    assert len(rows) == 2  # the empty entry is left out
    assert re.search(r"0 +77 working +25% +50% +9 +5 +0\.[23] s  42 \(position 2\)$", rows[0])
    assert "ready" in rows[1] and rows[1].endswith("  3 starts")
    assert any("longest  in flight, by index: 42 (" in line for line in lines)


def test_groups_that_are_kept_together() -> None:
    line = "groups   of about 32 samples stay together: the first takes 0.1 s longer"
    shared = {"opening_ns": 100_000_000, "group_milli": 32_100}
    assert f"  {line}" in _top.render(snapshot(12, 0, 0) | shared)
    assert not any("groups" in text for text in _top.render(snapshot(12, 0, 0)))


@pytest.mark.parametrize("width", [60, 70, 84, 120])
def test_narrow_terminal_cuts_no_line(width: int) -> None:
    groups = {"opening_ns": 100_000_000, "group_milli": 32_100, "failed": 3}
    lines = _top.render(snapshot(12, 9, 0, since=11) | groups, None, width)
    assert all(len(line) <= width for line in lines)
    said = " ".join(" ".join(lines).split())
    assert "batch_size=4, num_workers=2" in said and "the first takes 0.1 s longer" in said
    assert "3 samples could not be made, and were left out or replaced" in said
    assert "42 (position 2)" in said and " 77 working" in said


@pytest.mark.parametrize("state, name", list(enumerate(worker_states)))
def test_top_names_states_as_stats_does(state: int, name: str) -> None:
    """A record may say less than a worker has left to do: what it runs counts only while it is ready."""
    seen = snapshot(12, 0, 0)
    seen["workers"][0]["state"] = state
    rows = [line for line in _top.render(seen) if re.match(r" +0 +77 ", line)]
    shown = [re.split(" +", line)[3] for line in rows]
    assert shown == ([] if name == "none" else ["working" if name == "ready" else name])


def test_notice_of_a_pause_is_wrapped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A loader between two epochs: the terminal is narrower than the notice."""
    notice = "process 7 has no minato loader with workers now (its iterator may not have begun)"
    pages = iter([(["a table"], {1: snapshot(12, 0, 0)})])

    def page(*_: object) -> object:
        with contextlib.suppress(StopIteration):
            return next(pages)
        raise _top.TopError(notice)

    looks = iter(["", "q"])
    monkeypatch.setattr(_top, "_page", page)
    monkeypatch.setattr(_top, "_alive", lambda pid: True)
    monkeypatch.setattr(_top, "_pressed", lambda keys, seconds: next(looks))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(_top.shutil, "get_terminal_size", lambda: os.terminal_size((50, 24)))
    assert _top.watch(7, 1.0) == 0
    lines = re.sub(r"\x1b\[[\dHJm;]*", "", capsys.readouterr().out).splitlines()
    assert f"{notice}; waiting for the next one" in " ".join(" ".join(lines).split())
    assert all(len(line) <= 50 for line in lines)


def test_colours_leave_the_text_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = _top.render(snapshot(12, 9, 0) | {"failed": 3})
    coloured = [_top._coloured(line) for line in lines]
    assert [re.sub(r"\x1b\[\d*m", "", line) for line in coloured] == lines
    assert coloured[0].startswith("\x1b[1m") and any("\x1b[31m" in line for line in coloured)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not _top.has_colours()
    monkeypatch.delenv("NO_COLOR")
    assert _top.has_colours()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert not _top.has_colours()


def test_top_without_a_process_lists_loaders(stuck: int) -> None:
    done = top()
    assert done.returncode == 0 and "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    begin = next(n for n, line in enumerate(lines) if line.split()[:1] == [str(stuck)])
    words = Path(f"/proc/{stuck}/cmdline").read_text().replace("\0", " ").split()
    whole = f"{stuck:>8}  {' '.join(words)}"  # the rest is cut where the path is long
    assert whole.startswith(lines[begin]) and len(lines[begin]) >= min(80, len(whole))
    assert lines[begin + 1].strip().startswith("DataLoader of Data (1000 samples), batch_size=4")
    assert lines[-1].startswith("minato top PID")


def test_top_without_any_loader_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_top, "found", list)
    assert _top.run([]) == 1
    assert "has a minato loader with workers now" in capsys.readouterr().err


def test_small_terminal_shows_first_lines() -> None:
    lines = [f"line {n}" for n in range(10)]
    assert _top._fitted(lines, 80, 13) == lines
    shown = _top._fitted(lines, 50, 8)
    assert shown[:4] == lines[:4] and len(shown) == 5
    assert "and 6 more lines" in shown[4] and "--once" in shown[4]
    assert _top._fitted(lines, 3, 24) == ["lin"] * 10
    assert _top._fitted([], 80, 24) == [""] and len(_top._fitted(lines, 80, 1)) == 1


# ---- live, in a terminal ---------------------------------------------------------------


@contextlib.contextmanager
def in_a_terminal(pid: int) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """`minato top` for the process, when it has drawn its page three times; and the terminal."""
    master, slave = pty.openpty()
    shown = subprocess.Popen(
        [sys.executable, "-m", "minato", "top", str(pid), "--interval", "0.05"], stdin=slave, stdout=slave, stderr=slave,
        start_new_session=True, preexec_fn=_controlling, env=ENVIRONMENT,
    )  # fmt: skip
    os.close(slave)
    try:
        text = _read_until(master, lambda t: t.count(b"\x1b[H\x1b[2J") >= 3)
        assert b"DataLoader of Data" in text and b"q ends" in text
        yield shown, master
    finally:
        shown.kill()
        shown.wait()
        os.close(master)


def _controlling() -> None:
    """The terminal becomes the child's, so that ^C is its signal."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _read_until(fd: int, true: Callable[[bytes], bool]) -> bytes:
    text, deadline = b"", time.monotonic() + DEADLINE_S
    while not true(text) and time.monotonic() < deadline:
        if select.select([fd], [], [], 0.1)[0]:
            try:
                text += os.read(fd, 65536)
            except OSError:  # the other end is closed
                break
    return text


@pytest.mark.parametrize("key", ["q", "\x03"], ids=["q", "ctrl-c"])
def test_key_ends_top_in_a_terminal(key: str, stuck: int) -> None:
    with in_a_terminal(stuck) as (shown, terminal):
        if key == "q":
            until(stuck, lambda seen: bool(_top._slow(seen)))
            os.write(terminal, b"s")
            text = _read_until(terminal, lambda t: b"in __getitem__" in t)
            assert b"sample 13 is here, latest call first:" in text and b"in __getitem__" in text
        os.write(terminal, key.encode())
        rest = _read_until(terminal, lambda _: shown.poll() is not None)
        assert shown.wait(DEADLINE_S) == 0 and b"Traceback" not in rest


def test_top_ends_with_its_process() -> None:
    """In a terminal, and where there is none, which gets plain text."""
    with trainer() as made:
        made.tell("begin")
        plain = programs().open(
            TOP, str(made.pid), "--interval", "0.05", environment=ENVIRONMENT, is_text=True
        )
        text = _read_until(plain.stdout.fileno(), lambda t: t.count(b"DataLoader of Data") >= 3)
        assert b"\x1b" not in text and text.count(b"DataLoader of Data") >= 3
        with in_a_terminal(made.pid) as (shown, terminal):
            made.process.kill()
            made.process.wait()
            rest = _read_until(terminal, lambda _: shown.poll() is not None)
            assert shown.wait(DEADLINE_S) == 1 and b"Traceback" not in rest
        _out, errors = plain.communicate(timeout=DEADLINE_S)
        assert plain.returncode == 1
        for said in (rest, errors.encode()):
            assert b"there is no process" in said or b"gone" in said


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "inf", "1e12"])
def test_senseless_intervals(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        _top.run([str(os.getpid()), f"--interval={interval}"])
    assert "at most a day" in capsys.readouterr().err
