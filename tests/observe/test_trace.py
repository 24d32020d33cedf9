"""MINATO_TRACE=file: what is in it, and that it can be read whatever happens."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from contract.support import programs

#: numbers of minato/iterators/trace.py
WAITS, CHOICES, FIRST_WORKER = 1, 2, 10

PROGRAM = """
import os, sys, time, warnings
warnings.simplefilter("ignore")
import torch, minato

class Data(torch.utils.data.Dataset):
    def __init__(self, n=24, slow=(), die=None, seconds=0.001):
        self.n, self.slow, self.die, self.seconds = n, slow, die, seconds
    def __len__(self):
        return self.n
    def __getitem__(self, index):
        if index == 9 and self.die is not None:
            with self.die.get_lock():
                self.die.value += 1
                die = self.die.value == 1
            if die:
                os.kill(os.getpid(), 9)
        time.sleep(0.02 if index in self.slow else self.seconds)
        return index

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(10))

def text(samples):
    return [str(s) for s in samples]
"""


def run(tmp_path: Path, body: str, name: str = "trace.json", rc: int = 0, **env: str) -> str:
    env = {"MINATO_TRACE": str(tmp_path / name), **env}
    done = programs().run(PROGRAM + body, cwd=tmp_path, timeout=120, **env)
    assert done.returncode == rc, done.stderr
    return done.stdout


def load(path: Path) -> list[dict[str, Any]]:
    """The events; every one has what the format asks for."""
    events = json.loads(path.read_text())
    for event in events:
        assert {"ph", "pid", "tid", "name"} <= set(event)
        assert event["ph"] in "MXibesf"
        if event["ph"] != "M":
            assert event["ts"] > 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
    return events


def of(events: list[dict], **what: Any) -> list[dict]:
    return [e for e in events if all(e.get(k) == v for k, v in what.items())]


def groups(events: list[dict]) -> list[list[dict]]:
    """The events of each iterator, one after the other."""
    found = defaultdict(list)
    for event in events:
        found[event["pid"]].append(event)
    return list(found.values())


def check_tracks(events: list[dict]) -> None:
    """Spans of one worker come one after another, and each track has a name."""
    tracks = defaultdict(list)
    for event in of(events, ph="X"):
        tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    named = {(e["pid"], e["tid"]) for e in of(events, ph="M", name="thread_name")}
    assert set(tracks) <= named
    for spans in tracks.values():
        spans.sort()
        for (_, end), (begin, _) in zip(spans, spans[1:]):
            assert begin >= end - 0.001  # microseconds, as decimal fractions


def check_batches(events: list[dict]) -> None:
    """A batch lasts from the begin of its first sample to the end of its last."""
    opened = of(events, ph="b")
    assert Counter((e["pid"], e["id"]) for e in opened) == Counter(
        (e["pid"], e["id"]) for e in of(events, ph="e")
    )
    closed = {(e["pid"], e["id"]): e["ts"] for e in of(events, ph="e")}
    for event in opened:
        assert closed[event["pid"], event["id"]] >= event["ts"]
    if len(closed) < len(opened):
        return  # numbers come again with each epoch
    begun = {(e["pid"], e["id"]): e["ts"] for e in opened}
    for event in of(events, cat="sample"):
        key = event["pid"], event["args"]["batch"]
        assert begun[key] <= event["ts"] and event["ts"] + event["dur"] <= closed[key] + 0.001


def check_arrows(events: list[dict]) -> None:
    """Each begins within a worker's span and ends, later, within a wait."""
    spans = defaultdict(list)
    for event in of(events, ph="X"):
        key = event["pid"], event["tid"]
        spans[key].append((event["ts"], event["ts"] + event["dur"]))
    begun = {e["id"]: e for e in of(events, ph="s")}
    ended = {e["id"]: e for e in of(events, ph="f")}
    assert begun.keys() == ended.keys() and len(begun) == len(of(events, ph="s"))
    for number, event in begun.items():
        end = ended[number]
        assert event["tid"] >= FIRST_WORKER and end["tid"] == WAITS and end["bp"] == "e"
        assert (event["cat"], event["name"]) == (end["cat"], end["name"])
        for e in (event, end):
            key = e["pid"], e["tid"]
            assert any(first <= e["ts"] <= last for first, last in spans[key]), e
        assert event["ts"] <= end["ts"] + 1


def test_every_sample_once_an_epoch(tmp_path: Path) -> None:
    run(tmp_path, """
loader = minato.DataLoader(Data(), 4, num_workers=2, persistent_workers=True)
for epoch in range(2):
    for batch in loader:
        pass
""")  # fmt: skip
    events = load(tmp_path / "trace.json")
    check_tracks(events)
    check_batches(events)
    check_arrows(events)
    assert len(of(events, ph="s")) == 12
    waits = of(events, cat="wait")
    assert [e["args"]["batch"] for e in waits] == [*range(6), *range(6)]
    samples = of(events, cat="sample")
    seen = Counter((e["args"]["epoch"], e["args"]["index"]) for e in samples)
    assert seen == Counter((epoch, index) for epoch in range(2) for index in range(24))
    for event in samples:
        args = event["args"]
        assert event["dur"] >= 900 and event["tid"] - FIRST_WORKER in (0, 1)
        assert args["batch"] * 4 + args["row"] == args["index"]
        assert args["why"] in ("window", "early", "ahead", "finale", "order")
    assert len(of(events, ph="b")) == 12 and len(of(events, cat="wait")) == 12
    assert {e["tid"] for e in of(events, cat="wait")} == {WAITS}
    started = of(events, name="worker started")
    assert {e["tid"] for e in started} == {FIRST_WORKER, FIRST_WORKER + 1}


EPOCHS = """
for options in ({}, {"persistent_workers": True}, {"scheduling": "static"},
                {"persistent_workers": True, "prefetch_next_epoch": True},
                {"batching": "ready", "in_order": False}):
    loader = minato.DataLoader(Data(8), 4, num_workers=2, **options)
    epochs = []
    for _ in range(4):
        iterator = iter(loader)
        next(iterator)
        epochs += [loader.stats()["epoch"]] * 2
        list(iterator)
        if len(epochs) == 4 and options == {"persistent_workers": True}:
            loader.load_state_dict({**loader.state_dict(), "epoch": 6})  # a resumed program
        del iterator
        if len(epochs) == 4:
            loader._iterator = None  # as after an error: persistent workers start anew
    print(*epochs)
"""


def test_epochs_of_events_are_those_of_stats(tmp_path: Path) -> None:
    by_loader = run(tmp_path, EPOCHS).splitlines()
    assert by_loader[1] == "0 0 1 1 6 6 7 7"
    assert {*by_loader[:1], *by_loader[2:]} == {"0 0 1 1 2 2 3 3"}
    for epochs, events in zip(by_loader, groups(load(tmp_path / "trace.json")), strict=True):
        batches = of(events, ph="b") or of(events, name="batch formed")
        assert [e["args"]["epoch"] for e in batches] == [int(epoch) for epoch in epochs.split()]


def test_cheap_samples_of_one_task_follow_each_other(tmp_path: Path) -> None:
    run(tmp_path, """
loader = minato.DataLoader(Data(640, seconds=0), 64, num_workers=1)
for batch in loader:
    pass
print(loader.stats()["workers"])
""")  # fmt: skip
    events = load(tmp_path / "trace.json")
    check_tracks(events)
    check_batches(events)
    assert sorted(e["args"]["index"] for e in of(events, cat="sample")) == list(range(640))


#: category of the spans of samples, by options
WAYS = {
    "batch_size=4, scheduling='static'": "whole",
    "batch_size=4, collate_fn=text": "sample",
    "batch_size=4, in_order=False": "sample",
    "batch_size=4, in_order=False, batching='ready'": "sample",
    "batch_size=4, autoscale=(1, 3)": "sample",
    "batch_size=None": "sample",
}


def test_every_way_of_loading(tmp_path: Path) -> None:
    loaders = ", ".join(f"minato.DataLoader(Data(), num_workers=2, {options})" for options in WAYS)
    run(tmp_path, f"for loader in {loaders}:\n    list(loader)\n")
    by_loader = groups(load(tmp_path / "trace.json"))
    assert len(by_loader) == len(WAYS)
    for (options, kind), events in zip(WAYS.items(), by_loader):
        check_tracks(events)
        check_batches(events)
        check_arrows(events)
        found: list[int] = []
        for event in of(events, ph="X", cat=kind):
            args = event["args"]
            found += args["indices"] if kind == "whole" else [args["index"]]
        assert sorted(found) == list(range(24)), options
        if "ready" in options:
            formed = [e["args"]["indices"] for e in of(events, name="batch formed")]
            assert sorted(i for group in formed for i in group) == list(range(24))
        else:
            count = 24 if "None" in options else 6
            assert len(of(events, ph="b")) == len(of(events, cat="wait")) == count, options


def test_batches_that_several_workers_fetch(tmp_path: Path) -> None:
    run(tmp_path, """
from minato.iterators.loader_memo import memo_of
loader = minato.DataLoader(Data(), 4, num_workers=2, collate_fn=text)
for k in range(64):
    memo_of(loader).costs.observe(-1, 10**9 if k % 4 == 0 else 10**6)
memo_of(loader).costs.sends(0)
list(loader)
""")  # fmt: skip
    events = load(tmp_path / "trace.json")
    check_tracks(events)
    check_batches(events)
    assert sorted(e["args"]["index"] for e in of(events, cat="sample")) == list(range(24))
    collated = of(events, ph="X", cat="collate")
    assert sorted(e["args"]["batch"] for e in collated) == list(range(6))
    assert not any("why" in e["args"] for e in collated)
    for event in collated:  # begins when its last sample has ended
        ends = [e["ts"] + e["dur"] for e in of(events, cat="sample")
                if e["args"]["batch"] == event["args"]["batch"]]  # fmt: skip
        assert event["ts"] >= max(ends) - 0.001


def test_an_iterable_dataset(tmp_path: Path) -> None:
    run(tmp_path, """
print(len(list(minato.DataLoader(Stream(), 4, num_workers=2))))
""")  # fmt: skip
    events = load(tmp_path / "trace.json")
    check_tracks(events)
    assert len(of(events, cat="wait")) == 6


def test_decisions_for_slow_samples(tmp_path: Path) -> None:
    run(tmp_path, """
from minato.iterators.loader_memo import memo_of
loader = minato.DataLoader(Data(200), 2, num_workers=2)
list(loader)
for index in [*range(200)] * 4:
    memo_of(loader).costs.observe(index, 10**9 if index == 150 else 10**6)
list(loader)
""")  # fmt: skip
    events = load(tmp_path / "trace.json")
    decided = [e for e in of(events, tid=CHOICES) if e["name"].startswith("started ")]
    reasons = {e["args"]["why"] for e in decided}
    assert reasons and reasons <= {"early", "ahead", "finale"}
    assert all(e["name"] == f"started {e['args']['why']}" for e in decided)


def test_deaths_retries_and_losses(tmp_path: Path) -> None:
    run(tmp_path, """
for options in {}, {"max_retries": 0}:
    die = torch.multiprocessing.get_context("fork").Value("i", 0)
    try:
        for batch in minato.DataLoader(Data(die=die), 4, num_workers=2, **options):
            pass
    except minato.WorkerLost:
        print("lost")
""")  # fmt: skip
    events, lost = groups(load(tmp_path / "trace.json"))
    check_tracks(events)
    died = of(events, name="worker died")
    assert len(died) == 1 and died[0]["args"]["status"] == -9
    assert of(events, name="tasks tried again")
    assert any(e["args"].get("attempt") for e in of(events, cat="sample"))
    pids = [e["args"]["pid"] for e in of(events, name="worker started")]
    assert len(set(pids)) == len(pids) >= 2
    assert sorted(e["args"]["index"] for e in of(events, cat="sample")) == list(range(24))
    given_up = of(lost, name="given up")
    assert len(given_up) == 1 and given_up[0]["args"]["status"] == -9


def test_loaders_have_their_own_groups(tmp_path: Path) -> None:
    run(tmp_path, """
one = minato.DataLoader(Data(), 4, num_workers=1)
two = minato.DataLoader(Data(), 4, num_workers=1)
for a, b in zip(one, two):
    pass
for a, b in zip(one, one):
    pass
""")  # fmt: skip
    events = load(tmp_path / "trace.json")
    check_tracks(events)
    # both iterators of `one` were alive at the same time
    assert len({e["pid"] for e in events}) == 3
    assert len({e["args"]["name"] for e in of(events, name="process_name")}) == 3


def test_a_name_that_is_taken(tmp_path: Path) -> None:
    body = "print(os.getpid(), len(list(minato.DataLoader(Data(), 4, num_workers=1))))"
    run(tmp_path, body)
    before = (tmp_path / "trace.json").read_text()
    pid = run(tmp_path, body, RANK="3").split()[0]
    assert (tmp_path / "trace.json").read_text() == before
    events = load(tmp_path / f"trace.json.{pid}")
    assert "(rank 3)" in of(events, name="process_name")[0]["args"]["name"]
    pid = run(tmp_path, body, "ranks-%p.json").split()[0]
    assert load(tmp_path / f"ranks-{pid}.json")


def test_forked_child_writes_its_own_file(tmp_path: Path) -> None:
    out = run(tmp_path, """
loader = minato.DataLoader(Data(), 4, num_workers=1)
it = iter(loader)
next(it)
sys.stdout.flush()
pid = os.fork()
if pid == 0:
    list(minato.DataLoader(Data(), 4, num_workers=1))
    import atexit
    atexit._run_exitfuncs()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
list(it)
print(pid)
""")  # fmt: skip
    mine = load(tmp_path / "trace.json")
    child = load(tmp_path / f"trace.json.{out.split()[-1]}")
    for events in (mine, child):
        assert sorted(e["args"]["index"] for e in of(events, cat="sample")) == list(range(24))


def test_a_program_that_is_killed(tmp_path: Path) -> None:
    """The array is left open, everything before is there."""
    run(tmp_path, """
for number, batch in enumerate(minato.DataLoader(Data(), 4, num_workers=2)):
    if number == 3:
        os.kill(os.getpid(), 9)
""", rc=-9)  # fmt: skip
    text = (tmp_path / "trace.json").read_text()
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)
    events = json.loads(text + "]")
    check_tracks(events)
    batches = {e["args"]["batch"] for e in of(events, cat="sample")}
    assert {0, 1, 2, 3} <= batches


def test_a_program_that_fails(tmp_path: Path) -> None:
    run(tmp_path, """
for batch in minato.DataLoader(Data(), 4, num_workers=2):
    raise KeyError("of the training")
""", rc=1)  # fmt: skip
    assert len(of(load(tmp_path / "trace.json"), ph="b")) == 1


def test_odd_indices_are_written_as_text(tmp_path: Path) -> None:
    run(tmp_path, """
class Named(torch.utils.data.Dataset):
    def __getitem__(self, index):
        return len(repr(index))
keys = ['a"b', (1, "x"), 2**70, None, float("nan"), frozenset([1])]
for batch in minato.DataLoader(Named(), 2, sampler=keys, num_workers=1):
    pass
""")  # fmt: skip
    events = load(tmp_path / "trace.json")
    assert len(of(events, cat="sample")) == 6
    assert 'a"b' in [e["args"]["index"] for e in of(events, cat="sample")]
    assert "NaN" not in (tmp_path / "trace.json").read_text()


def test_full_disk_ends_only_the_trace(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    (tmp_path / "full").symlink_to("/dev/full")
    # the name is taken, so the file gets the process id: another link waits there
    out = run(tmp_path, """
os.symlink("/dev/full", f"full.{os.getpid()}")
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "This DataLoader will create")
try:
    list(minato.DataLoader(Data(), 4, num_workers=1))
except UserWarning as warning:
    print(warning)
warnings.simplefilter("ignore")
print(len(list(minato.DataLoader(Data(), 4, num_workers=1))))
""", "full")  # fmt: skip
    assert "the trace ends here" in out and out.split()[-1] == "6"


def test_a_file_that_cannot_be_made(tmp_path: Path) -> None:
    out = run(tmp_path, """
try:
    iter(minato.DataLoader(Data(), 4, num_workers=1))
except FileNotFoundError as error:
    print(error)
print(open(f"/proc/self/task/{os.getpid()}/children").read())  # no process was started
""", "nowhere/trace.json")  # fmt: skip
    assert "nowhere/trace.json" in out and len(out.strip().splitlines()) == 1


def test_no_variable_means_no_tracer(tmp_path: Path) -> None:
    out = run(tmp_path, """
it = iter(minato.DataLoader(Data(), 4, num_workers=1))
print(it._supervisor.trace)
""", MINATO_TRACE="")  # fmt: skip
    assert out.strip() == "None"
    assert list(tmp_path.iterdir()) == []



FAILS = """
from minato.iterators.trace import Trace

class Odd:
    def __init__(self, index):
        self.index = index
    def __repr__(self):
        raise LookupError("it has no text")

class Known(Data):
    def __getitem__(self, index):
        if type(index) is Odd:
            raise ValueError("not this one")
        return super().__getitem__(index)

def block(self, epoch, indices, block, traced=Trace.block):
    traced(self, epoch, indices, block)
    if 13 in indices:
        raise OverflowError("not traced")

Trace.block = block
order = [Odd(i) if i == 5 else i for i in range(24)]
for mode in ({}, {"scheduling": "static"}, {"batching": "ready", "in_order": False}):
    loader = minato.DataLoader(Known(slow=(2,), seconds=0), 4, sampler=order, num_workers=2, **mode)
    it, got, errors, ended = iter(loader), [], set(), False
    for _ in range(9):  # more than there are
        try:
            got += next(it).tolist()
        except (ValueError, OverflowError) as error:
            errors.add(type(error).__name__)
        except StopIteration:
            ended = True
            break
    assert ended and "OverflowError" in errors, (mode, errors)
    assert len(got) + 4 * len(errors) == 24, (mode, got, errors)
"""


def test_a_tracer_that_fails_costs_one_batch(tmp_path: Path) -> None:
    """The error comes in that batch's place, and the epoch goes on behind it. An index that has
    no text is no error, neither in the trace nor in what is said of its sample."""
    run(tmp_path, FAILS)
