"""The benchmarks run, check what they compare, and count the resources of processes.

No number of a quick run is judged: machines that run tests are busy.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from contract.support import programs

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks"


def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    more = {**os.environ, "PYTHONPATH": path}
    return programs().open(str(FOLDER / script), *options, environment=more).to_end(280)


def quick(script: str, tmp_path: Path, *options: str) -> tuple[dict[str, Any], str]:
    """The JSON and the text of a quick run."""
    out = tmp_path / "result.json"
    done = run(script, "--quick", "--json", str(out), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text()), done.stdout


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a benchmark by name, and forgets it again."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)

    def load(name: str) -> ModuleType:
        return __import__(name)

    yield load
    own = {"common", "kills", "loader", "startup", "balance", "leaks", "resume", "operators",
           "volumes", "locality", "locality_data", "cache_table", "cache_jobs", "cache_order",
           "cache_ranks", "cache_scratch", "images"}  # fmt: skip
    for name in own - before:
        sys.modules.pop(name, None)


def test_loader(tmp_path: Path) -> None:
    result, text = quick("loader.py", tmp_path, "--cases", "tiny", "image", "volume", "turn")
    for case, found in result["check"].items():
        assert found["differ"] == [] and found["batches"] > 0, case
        rows = result["runs"][case][0]["loaders"]
        assert set(rows) == {"torch", "minato", "minato, worker streams", "inline"}
        assert f"\n{case}" in text
    assert set(result["memory"]["tiny"]) == {"torch", "minato"}
    for facts in result["memory"]["tiny"].values():
        assert facts["peak"] >= facts["before"] > 0


def test_loader_in_other_modes(tmp_path: Path) -> None:
    modes = ["static", "iterable", "out-of-order", "ready"]
    result, text = quick(
        "loader.py", tmp_path, "--cases", "augment", "--no-memory", "--modes", *modes
    )
    names = set(result["runs"]["augment"][0]["loaders"])
    assert {"minato, static", "minato, iterable", "torch, iterable", "torch, out of order",
            "minato, out of order", "minato, static, out of order", "minato, ready first"} < names
    assert result["check"]["augment"]["differ"] == []
    assert all(f"\n{name}  " in text for name in names)


def test_startup(tmp_path: Path) -> None:
    result, text = quick("startup.py", tmp_path)
    assert set(result["runs"]) == set(result["bounds"]) == {"spawn", "fork"}
    for runs in result["runs"].values():
        assert all(run["first"] > 0 and run["cpu"] > 0 for [run] in runs.values())
    assert "forkserver" not in text and "bound, spawn: " in text
    assert [cell["workers"] for cell in result["short"]] == 2 * [1, 2, 4]
    for cell in result["short"]:
        assert all(run["epoch"] > cell["seconds"] for [run] in cell["runs"].values())


def test_cache_hits(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    done = run("cache.py", "hit", "--quick", "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    for runs in json.loads(out.read_text())["hit"].values():
        assert {"memcpy, warm", "minato, store, warm", "minato, memoize, fresh"} <= set(runs)
        assert all(us > 0 for each in runs.values() for us in each)


def test_cache_of_slow_storage(tmp_path: Path) -> None:
    result, text = quick("cache.py", tmp_path, "storage", "--workers", "1", "--epochs", "2")
    reads = {side: [row["read"] for row in runs[0]] for side, runs in result["storage"]["runs"].items()}
    assert reads["torch"] == [1.0, 1.0]
    assert reads["cache of 110 %"][1] < 0.1  # parts of so small a cache have gaps at their ends
    assert 0.7 < reads["cache of 20 %"][1] < 0.95
    assert "(emulated)" in text


def test_cache_of_pictures(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    options = "images", "--jobs", "2", "--workers", "0", "--epochs", "2"
    result, text = quick("cache.py", tmp_path, *options)
    assert set(result["images"]["jobs"]["2"]) == {"torch", "memoize", "decoded beforehand"}
    assert "2 jobs at once" in text


def test_cache_directory(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    done = run("cache.py", "directory", "--quick", "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warm (later epochs of second)" in done.stdout
    runs = json.loads(out.read_text())["directory"]
    assert {kind: len(each) for kind, each in runs.items()} == dict.fromkeys(runs, 2)
    assert set(runs) == {"plain", "first", "second", "changed"}


def test_cache_memory_of_ranks(tmp_path: Path) -> None:
    result, text = quick("cache.py", tmp_path, "ranks", "--repeats", "1")
    runs = result["ranks"]["runs"]
    assert "memoize" in runs and len(runs) == 2 and "4 ranks" in text
    assert all(len(one["checks"]) == 4 for each in runs.values() for one in each)


def test_cache_table_shows_met_and_missed_limits(tmp_path: Path, benchmark: Any) -> None:
    result, text = quick("cache.py", tmp_path, "table", "--parts", "directory", "uneven")
    assert [len(part["rows"]) for part in result["table"].values()] == [2, 1]
    assert "at most 1.15" in text and "4 jobs, staggered" in text and " minutes" in text
    row = benchmark("cache_table").Row
    assert row("x", [3.0, 1.0, 2.0], most=2.0).cells() == [
        "x", "at most 2.00", "2.00", "1.00 .. 3.00", "3", "met",
    ]  # fmt: skip
    assert row("x", [1.0], least=2.0).cells()[-1] == "missed" and row("x", [1.0]).cells()[-1] == "-"


def test_cache_table_begins_no_part_late(tmp_path: Path) -> None:
    result, text = quick("cache.py", tmp_path, "table", "--parts", "kills", "--minutes", "-1")
    assert result["table"]["kills"]["rows"] == []
    assert "kills is left out: the time is used up" in text


def test_cache_benchmark_removes_leftovers_of_killed_ones(tmp_path: Path, benchmark: Any,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    scratch = benchmark("cache_scratch")
    monkeypatch.setattr(scratch, "places", lambda: {str(tmp_path)})
    monkeypatch.setattr(scratch, "folder", lambda: str(tmp_path / "none"))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = tmp_path / f"{scratch.PREFIX}{dead.pid}-abc"
    left.mkdir()
    (left / "file").touch()
    with scratch.scratch(str(tmp_path)) as own:
        scratch.remove_left()
        assert list(tmp_path.iterdir()) == [own]
    assert list(tmp_path.iterdir()) == []


def test_cache_benchmark_repeats_less_when_time_is_up(benchmark: Any) -> None:
    turns = benchmark("cache_scratch").turns
    assert list(turns(3, None)) == [0, 1, 2] and list(turns(3, time.monotonic() - 1)) == [0]


def test_preloading_is_the_forkservers(benchmark: Any) -> None:
    startup = benchmark("startup")
    assert startup.names_for("spawn") == startup.names_for("fork") == ["torch", "minato"]
    assert startup.names_for("forkserver") == ["torch", "minato", "torch, preloaded"]


def test_balance(tmp_path: Path) -> None:
    names = ["80/20, batch 4", "80/20 anew, batch 4"]
    result, text = quick("balance.py", tmp_path, "--only", *names)
    assert set(result["epochs"]) == set(result["waits"]) == set(names)
    for cells in result["epochs"].values():
        for [run] in cells.values():
            # no epoch beats the work that is in it
            assert all(w >= b for w, b in zip(run["walls"], run["bounds"], strict=True))
    assert [bool(result["waits"][name]["minato, next epoch early"]) for name in names] == [1, 0]
    assert "ready first" in text and text.count("..") > 10


def test_brief_balance_prints_a_line_a_loader(tmp_path: Path) -> None:
    result, text = quick("balance.py", tmp_path, "--only", "constant", "--brief")
    assert result["waits"] == {} and "constant: 200 samples, batches of 8, 8 workers" in text
    lines = [line for line in text.splitlines() if re.search(r"\d\.\d\d s +.*\d\.\d\d$", line)]
    names = [re.split("  +", line)[0] for line in lines]
    assert names == ["no loader can be faster", *result["epochs"]["constant"]]


def test_costs_stay_or_are_drawn_anew(benchmark: Any) -> None:
    balance = benchmark("balance")
    stay, anew = (balance.Job(name, 3, True).costs for name in (
        "80/20, batch 4", "80/20 anew, batch 4"))
    assert (stay == stay[0]).all() and (stay[0] == anew[0]).all()
    assert (anew[1] != anew[0]).any() and sorted(anew[1]) == sorted(anew[0])
    assert balance.in_turn("abc", 0) == ["a", "b", "c"]
    assert balance.in_turn("abc", 4) == ["b", "c", "a"]


def test_resume(tmp_path: Path) -> None:
    modes = ["ready", "stateful", "iterable"]
    result, text = quick("resume.py", tmp_path, "--modes", *modes)
    rows = {row["mode"]: row for row in result["rows"]}
    assert list(rows) == modes and "bit for bit" in text
    for row in rows.values():
        assert row["positions"] == row["union"] == row["exact"] == 2 and not row["failed"]
    assert rows["ready"]["kills"] > 0 and rows["iterable"]["again"] > 0


def test_resume_tells_a_wrong_state(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    resume = benchmark("resume")
    load = resume.Rows.load_state_dict

    def behind(rows: Any, state: Any) -> None:
        load(rows, {**state, "index": state["index"] - rows.step})

    def draws(rows: Any, state: Any) -> None:
        load(rows, {**state, "rng": rows.rng.bit_generator.state})

    for wrong, union in ((behind, 0), (draws, 2)):
        monkeypatch.setattr(resume.Rows, "load_state_dict", wrong)
        found = resume.measure(resume.MODES["stateful"], 1, 150, 1)
        assert (found["positions"], found["union"], found["exact"]) == (2, union, 0)


def test_leaks(tmp_path: Path) -> None:
    result, text = quick("leaks.py", tmp_path)
    assert set(result["dropped"]) == {"minato, fork", "minato, native"}
    for looks in result["dropped"].values():
        assert [look["count"] for look in looks] == [3, 6]
        assert looks[-1]["processes"] == looks[-1]["memfds"] == 0
    for looks in result["live"].values():
        assert looks["during"]["memfds"] + looks["during"]["processes"] > 0
    assert "GROWN" not in text and text.count("flat") == 2


def test_growing_resource_is_named(benchmark: Any) -> None:
    leaks = benchmark("leaks")
    first = dict.fromkeys(leaks.FACTS, 10)
    assert leaks.grown([first, first]) == {}
    assert leaks.grown([first, {**first, "fds": 11, "rss_mib": 40.0}, first]) == {}
    assert leaks.grown([first, {**first, "fds": 11, "rss_mib": 40.0}]) == {"fds": 1, "rss_mib": 30}


LOOKS = """
import os, subprocess, sys
sys.path.insert(0, sys.argv[1])
import leaks

before = leaks.look()
held = os.memfd_create("held")
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
during = leaks.facts(1)
child.communicate(b"\\n")
print(*(during[fact] - before[fact] for fact in ("fds", "memfds", "processes")))
"""


def test_leaks_are_seen() -> None:
    """A descriptor of a nameless file, one of a pipe, a process; in a separate process, where no
    leftovers of other tests disappear meanwhile."""
    done = subprocess.run(
        [sys.executable, "-c", LOOKS, str(FOLDER)], cwd=ROOT,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.split() == ["2", "1", "1"], done.stderr


def test_workers(tmp_path: Path) -> None:
    result, text = quick("workers.py", tmp_path, "--only", "waiting")
    assert result["jobs"]["waiting"]["workers"] >= 2  # how many is a matter of time
    assert text.count("samples/s") == 2


def test_locality(tmp_path: Path) -> None:
    name = "sleeping, row groups of 32, declared"
    result, text = quick("locality.py", tmp_path, "--only", name)
    assert set(result["runs"]) == set(result["bounds"]) == {name}
    cells = {loader: run for loader, [run] in result["runs"][name].items()}
    assert len({run["digests"][0] for run in cells.values()}) == 1
    assert all(run["opened"][0] >= run["groups"] for run in cells.values())
    assert cells["torch"]["opened"][0] == cells["torch"]["groups"]  # a group is a batch
    assert "opened, times a group" in text


def test_groups_that_were_opened_are_counted(benchmark: Any, tmp_path: Path) -> None:
    data = benchmark("locality_data")
    some = data.Sleeping([2, 3, 1], 0.0, 0.0, keeps=2)
    assert [some[i][1] for i in (0, 1, 2, 0, 5, 3, 0)] == [1, 0, 1, 0, 1, 1, 1]
    pairs = list(data.GroupsShuffled(some, mixed=2))
    assert sorted(pairs) == list(range(6)) and pairs != list(data.GroupsShuffled(some))
    kept = data.Decoded(tmp_path, 3)
    assert [kept[i][1] for i in (2, 1, 2, 1)] == [1, 1, 0, 0]
    patches = data.Patches(tmp_path, 2, 3)
    assert [patches[i][1] for i in (0, 1, 3, 2)] == [1, 0, 1, 1]
    assert (patches[1][2] == data.Patches(tmp_path, 2, 3)[1][2]).all()


def test_other_data_is_noticed(benchmark: Any) -> None:
    locality, data = benchmark("locality"), benchmark("locality_data")
    case = locality.Case(None, sampler=data.InOrder)
    some = data.Sleeping([2, 1], 0.0, 0.0)

    def digest(rows: list[int], order: tuple[int, ...] = (0, 1, 2)) -> str:
        found = locality.Delivered()
        found.add([torch.tensor(order), torch.ones(3), torch.tensor(rows)[:, None]])
        return found.check(case, some, 0, order == (0, 1, 2))

    assert digest([5, 6, 7]) == digest([7, 5, 6], (2, 0, 1)) != digest([5, 6, 8])
    with pytest.raises(AssertionError, match="lost, repeated or out of order"):
        digest([5, 6, 7], (0, 0, 1))


def test_volumes(tmp_path: Path) -> None:
    names = ["torch, NumPy and SciPy", "torch, native dataset, boxes kept",
             "minato native, boxes kept", "minato processes, boxes sought"]
    result, text = quick("volumes.py", tmp_path, "--only", *names)
    [turn] = result["runs"]
    assert set(turn["loaders"]) == set(names)
    found = {name: turn["loaders"][name] for name in names}
    assert found[names[1]]["check"] == found[names[2]]["check"] == found[names[3]]["check"]
    needed = 32**3 * 5
    for name in names:
        [epoch] = found[name]["epochs"]
        assert epoch["ms"] > 0 and epoch["read" if "NumPy" not in name else "calls"] >= needed, name
        assert found[name]["memory"]["else"] > 0 and found[name]["memory"]["files"] > 0, name
        assert f"\n{name}  " in text
    # two volumes of 40 x 44 x 48 voxels: between a patch and the whole of them
    kept = [found[name]["epochs"][0] for name in names if "kept" in name]
    assert all(needed <= epoch["read"] <= 84480 * 6 for epoch in kept)
    assert all(epoch["read"] < epoch["touched"] <= 2 * 84480 * 6 for epoch in kept)


def test_volumes_of_other_bytes_or_shapes_are_noticed(benchmark: Any) -> None:
    volumes = benchmark("volumes")

    def made(content: str, shape: str = "[1, 2, 2, 2]") -> dict[str, Any]:
        return {"check": {"fields": [shape], "content": content}}

    torchs, minatos = "torch, native dataset, boxes kept", "minato native, boxes sought"
    volumes.check({torchs: made("a"), minatos: made("a"), "dali": made("b")})
    with pytest.raises(AssertionError, match="bytes of the native samples differ"):
        volumes.check({torchs: made("a"), minatos: made("b")})
    with pytest.raises(AssertionError, match="shapes or dtypes differ"):
        volumes.check({torchs: made("a"), "dali": made("b", "[1, 2, 2, 3]")})


def test_different_samples_are_noticed(benchmark: Any) -> None:
    loader = benchmark("loader")
    data = loader.Tiny(8)
    batch = torch.utils.data.default_collate([data[i] for i in range(8)])
    same = loader.checksum([batch[0].clone(), batch[1].clone()])
    assert loader.checksum(batch) == same
    batch[0][3, 5] += 1
    assert loader.checksum(batch) != same
    assert loader.checksum([batch[0].reshape(-1), batch[1]]) != loader.checksum(batch)


def test_sizes_are_weighed_where_files_are_listed(tmp_path: Path) -> None:
    result, text = quick("draws.py", tmp_path, "--only", "files")
    for each in result["files"]:
        (run,) = each["runs"]
        assert (run["correlation"] is not None) == each["name"].endswith("listed")
        assert each["name"] in text


def test_other_orders_and_draws_are_noticed(benchmark: Any) -> None:
    loader = benchmark("loader")

    def made(*epoch: int) -> Any:
        found = loader.Delivered.__new__(loader.Delivered)
        found.whole = found.batches = found.samples = [list(epoch)]
        return found

    for what, swapped_is_same in (("exactly", False), ("batches", False), ("any order", True),
                                  ("samples", True)):
        assert made(1, 2, 3).same(made(1, 2, 3), what)
        assert made(1, 2, 3).same(made(2, 1, 3), what) is swapped_is_same
        assert not made(1, 2, 3).same(made(1, 2, 2), what)
    data = loader.Augment(4)
    batch = torch.utils.data.default_collate([data[i] for i in range(4)])
    assert loader.told_apart(data, batch).tolist() == [0, 1, 2, 3]
    same = torch.utils.data.default_collate([data.made(i, batch[1][0].numpy()) for i in range(4)])
    with pytest.raises(AssertionError, match="drew the same"):
        loader.told_apart(data, [same, batch[1][:1].expand(4, 4).contiguous(), batch[2]])
    batch[1][2, 0] += 1
    with pytest.raises(AssertionError, match="sample 2 is not what its draws make of it"):
        loader.told_apart(data, batch)


def test_lost_and_swapped_samples_are_noticed(benchmark: Any) -> None:
    balance = benchmark("balance")
    job = balance.Job("constant", 3, quick=True)
    order = list(
        torch.utils.data.RandomSampler(
            range(job.count), generator=torch.Generator().manual_seed(3)
        )
    )
    swapped = [order[1], order[0], *order[2:]]
    balance.check(job, [{"indices": list(order)}], in_order=True)
    balance.check(job, [{"indices": swapped}], in_order=False)
    for bad, in_order in ((swapped, True), (order[:-1], False), ([*order, 0], False)):
        with pytest.raises(AssertionError, match="lost, repeated or out of order"):
            balance.check(job, [{"indices": list(bad)}], in_order)


def test_cpu_of_living_and_dead_children_counts(benchmark: Any) -> None:
    common = benchmark("common")
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    before = common.cpu_seconds()
    child = subprocess.Popen(
        [sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    alive = common.cpu_seconds() - before
    child.communicate(b"\n")
    dead = common.cpu_seconds() - before
    assert alive >= 0.3
    assert dead >= 0.29  # waited-for children are counted in ticks of 10 ms


HOLDERS = {
    "private": "data = b'x' * (64 << 20)",
    "shared": "import mmap, os\nfd = os.memfd_create('x')\nos.truncate(fd, 64 << 20)\n"
    "for i in range(64): os.pwrite(fd, b'x' * (1 << 20), i << 20)\n",
}


@pytest.mark.parametrize("kind, mapped", [("private", 0), ("shared", 0), ("shared", 1)])
def test_memory_of_a_tree_counts_its_children(benchmark: Any, kind: str, mapped: int) -> None:
    common = benchmark("common")
    code = HOLDERS[kind]
    if mapped:
        code += "view = mmap.mmap(fd, 64 << 20)\nos.close(fd)"
    before = common.memory_bytes(os.getpid())
    child = subprocess.Popen(
        [sys.executable, "-c", code + "\nprint(flush=True)\ninput()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    child.stdout.readline()
    during = common.memory_bytes(os.getpid())
    child.communicate(b"\n")
    grown = {key: during[key] - before[key] for key in during}
    assert 60 << 20 < grown[kind] < 100 << 20
    assert grown["total"] == grown["private"] + grown["shared"]


def test_a_failing_child_is_an_error(benchmark: Any, tmp_path: Path) -> None:
    common = benchmark("common")
    script = tmp_path / "fails.py"
    script.write_text("import sys; print('why'); sys.exit(3)")
    with pytest.raises(RuntimeError, match="exit status 3(.|\n)*why"):
        common.run_child(str(script), {})


def test_disturbed_measurements_are_repeated(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = benchmark("common")
    spent = iter([0.0, 1e6, 1e6, 1e6])  # the machine's seconds: a busy run, then a calm one
    monkeypatch.setattr(common, "machine_seconds", lambda: next(spent))
    monkeypatch.setattr(common.psutil, "cpu_percent", lambda interval: 0.0)
    results = iter([{"run": "disturbed"}, {"run": "calm"}])
    quiet = common.Quiet(share=0.05, minutes=60.0)
    assert quiet.run(lambda: next(results)) == {"run": "calm", "others": 0.0}
    assert quiet.report() == {"others_median": 0.0, "others_most": 0.0, "repeated": 1}


def test_waiting_for_quiet_ends(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    common = benchmark("common")
    spent = iter(range(0, 10**9, 10**6))
    monkeypatch.setattr(common, "machine_seconds", lambda: float(next(spent)))
    quiet = common.Quiet(share=0.05, minutes=0.0)
    assert quiet.run(lambda: {"run": "only"})["run"] == "only"
    assert quiet.report()["others_most"] > 0.05


def test_threads(tmp_path: Path) -> None:
    result, text = quick("threads.py", tmp_path, "--only", "decode")
    found = result["workloads"]["decode"]
    assert {"minato, threads", "minato, processes", "torch, processes"} <= set(found["runs"])
    assert found["same"] and all(bound > 0 for bound in found["bounds"].values())
    assert "\ndecode: " in text and "have delivered the same bytes" in text
    for peer in ("torchdata.nodes, threads", "spdl, threads"):
        assert (peer in found["runs"]) != (f"left out, is not installed: {peer}" in text)


def test_prefetch_memory(tmp_path: Path) -> None:
    result, text = quick("prefetch_memory.py", tmp_path)
    assert set(result["runs"]) == {"10 MB, slow, 1", "10 MB, fast, 1"}
    cells = [cell for run in result["runs"].values() for cell in run.values()]
    assert all(0 < shared < total and s > 0 for shared, total, s in cells)
    assert "prefetch_factor" in text


def test_many_workers(tmp_path: Path) -> None:
    result, text = quick("many_workers.py", tmp_path)
    assert set(result["runs"]["4"]) == {"torch", "minato"}
    assert "all samples delivered, in order" in text


def test_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A process killed while it starts may leave a file there, of whatever it imports.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    result, text = quick("kills.py", tmp_path)
    whole = result["rows"]["all"]
    assert whole["kills"] == 6 and whole["epochs"] >= 3
    assert whole["lost"] == whole["doubled"] == whole["changed"] == whole["out of order"] == 0
    assert not any(whole["left"].values())
    assert "torch, one kill: " in text


def test_images(tmp_path: Path) -> None:
    result, text = quick("images.py", tmp_path)
    found = result["sets"]["D"]
    assert found["differ"] == 0 and result["photos"] > 0
    assert found["ms"]["pillow"] > 0 and found["ms"]["minato"] > 0
    assert "\nD " in text
