"""``minato doctor``: each finding from made-up facts, and the facts of this machine."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minato import loader
from minato.__main__ import main
from minato.commands import doctor, doctor_facts
from minato.commands.doctor import NOTE, WRONG, GiB, MiB
from minato.commands.doctor_facts import Facts

ROOT = Path(__file__).resolve().parents[2]

#: nothing is to be said of it
GOOD = Facts(
    workers=4, torch="2.13.0+cpu", torch_extension="built for torch 2.13", cpus_online=8,
    cpus_affinity=8, cpus=8, memory_total=64 * GiB, memory_available=48 * GiB, open_limit=4096,
    open_most=4096, open_now=20, processes_left=1000, overcommit=0, commit_left=-GiB,
    shm_free=8 * GiB, locked=2 * GiB, threads={"OMP_NUM_THREADS": "1"},
    variables={"MINATO_SCHEDULING": "static"},
)  # fmt: skip

UNKNOWN = "MINATO_" + "SCHEDULNIG"  # not as one word, or the table of variables wants it

#: what is otherwise -> level, and words of what is said and of what helps
CASES: list[tuple[dict[str, Any], str, str, str]] = [
    ({"no_engine": "it needs Linux"}, WRONG, "torch's own loader", "on Linux"),
    ({"refused": "the system call pidfd_open is refused"}, WRONG, "pidfd_open", "seccomp"),
    ({"torch": "2.5.1+cu124"}, WRONG, "2.5.1.*2.6", "pip install --upgrade torch"),
    ({"torch_extension": "built, but does not load: made for 2.9"}, WRONG, "made for 2.9",
     "--force-reinstall"),
    ({"torch_extension": "not built; optional"}, NOTE, "works without", "--no-build-isolation"),
    ({"accelerator": True, "driver": "NVIDIA 570.1", "device_operators": "not built: no nvcc"}, NOTE,
     "run on the host", "nvcc"),
    ({"photos": "Pillow alone: there is no libjpeg-turbo"}, NOTE, "whole photos", "pillow"),
    ({"driver": "NVIDIA 570.1"}, WRONG, "570.1.*without support", "pytorch.org"),
    ({"driver": "NVIDIA", "torch_accelerator": "12.8"}, WRONG, "12.8, finds no device", "--gpus"),
    ({"driver": "NVIDIA", "torch_accelerator": "12.8", "hidden": "CUDA_VISIBLE_DEVICES="}, NOTE,
     "CUDA_VISIBLE_DEVICES= hides", "Unset"),
    ({"accelerator": True, "locked": 8 * MiB}, NOTE, "8.0 MiB", "ulimit -l"),
    ({"open_limit": 128}, WRONG, "108 more files", "ulimit -n 4096, or for Docker"),
    ({"open_limit": 40, "open_most": 40}, WRONG, "20 more files",
     "^Raise the hard limit of 40 as root: nofile in"),
    ({"open_limit": 40, "open_most": 1024}, WRONG, "20 more files",
     "^ulimit -n 1024, which is the hard limit. Raise"),
    ({"address_space": 2 * GiB, "address_space_used": GiB + 1}, WRONG, "2.0 GiB", "ulimit -v"),
    ({"address_space": 99 * GiB, "address_space_used": GiB}, NOTE, "98.0 GiB", "memory_limit="),
    ({"file_size": 10 * MiB}, WRONG, "10.0 MiB.*shared memory", "ulimit -f"),
    ({"file_size": 2 * GiB}, NOTE, "2.0 GiB", "ulimit -f"),
    ({"memory_available": 4 * GiB, "ranks": 16, "cpus": 64, "cpus_affinity": 64,
      "cpus_online": 64}, WRONG, "128.0 MiB for each of 16 training processes", "--memory"),
    ({"memory_available": 300 * MiB}, WRONG, "300.0 MiB of 64.0 GiB", "prefetch_factor"),
    ({"overcommit": 2, "commit_left": GiB - 1}, WRONG, "each worker counts", "overcommit_memory=0"),
    ({"overcommit": 2, "commit_left": 9 * GiB}, NOTE, "9.0 GiB are left", "overcommit_memory=0"),
    ({"processes_left": 9}, WRONG, "9 more processes.* 4 workers", "pids.max"),
    ({"cpus": 4}, NOTE, "time of 4 CPUs, but programs see 8", "--cpus"),
    ({"cpus": 4, "cpus_affinity": 4}, NOTE, "4 of 8 CPUs .CPU affinity", "taskset"),
    ({"workers": 12}, NOTE, "12 workers share 8 CPUs", r"num_workers=8, or autoscale=\(1, 12\)"),
    ({"workers": 9000, "open_limit": 1 << 20, "open_most": 1 << 20, "processes_left": 1 << 20}, NOTE, "9000 workers share 8 CPUs", r"num_workers=8, or autoscale=\(1, 32\)"),
    ({"workers": 3, "ranks": 4}, NOTE, "12 workers share 8 CPUs", "num_workers=2"),
    ({"threads": {"OMP_NUM_THREADS": "8"}}, NOTE, "4 workers have 32 threads for 8", "Unset OMP"),
    ({"start_method": "spawn"}, NOTE, "__main__", "persistent_workers"),
    ({"left_caches": 10 * MiB}, NOTE, "10.0 MiB of memory hold caches that no", "cache drop"),
    ({"shm_free": 10 * MiB}, NOTE, "10.0 MiB are free. minato's batches do not", "--shm-size"),
    ({"shm_free": 64 * MiB}, NOTE, "64.0 MiB are free. .*minato.Cache do", "--shm-size"),
    ({"variables": {UNKNOWN: "static"}}, WRONG, f"{UNKNOWN} is set", "Is it MINATO_SCHEDULING"),
    ({"variables": {"MINATO_SCHEDULING": "statik"}}, WRONG, "statik", "unset"),
    ({"trial": "RuntimeError: x"}, WRONG, "failed: RuntimeError: x", "--json"),
]  # fmt: skip


def test_good_machine_has_no_findings() -> None:
    assert doctor.examine(GOOD) == []
    lines = doctor.render(GOOD).splitlines()
    assert lines[-1] == "Nothing is wrong here."
    assert [line.split("  ")[0] for line in lines[:-2]] == [f"\u2713 {name}" for name in doctor.CHECKS]
    assert all(name in doctor.render(GOOD, doctor._PLAIN) for name in doctor.CHECKS)


def test_unknown_facts_give_no_findings() -> None:
    known = {"workers": 4, "torch": "2.13"}
    assert doctor.examine(Facts(**known)) == []


@pytest.mark.parametrize("otherwise, level, what, fix", CASES)
def test_each_fact_gives_its_finding(otherwise: dict[str, Any], level: str, what: str, fix: str) -> None:
    [finding] = doctor.examine(replace(GOOD, **otherwise))
    assert finding.level == level
    assert re.search(what, finding.what) and re.search(fix, finding.fix), finding


def test_every_check_has_a_case() -> None:
    for name, (check, _fine) in doctor.CHECKS.items():
        assert any(list(check(replace(GOOD, **case[0]))) for case in CASES), name


def test_problems_come_first_and_are_counted() -> None:
    found = doctor.examine(replace(GOOD, shm_free=0, file_size=1, open_limit=30))
    assert [finding.level for finding in found] == [WRONG, WRONG, NOTE]
    page = doctor.render(replace(GOOD, shm_free=0, file_size=1, open_limit=30))
    assert page.endswith("Problems (\u2717): 2. Notes (!), which may be as you want it: 1.")
    assert "Fix: ulimit -f unlimited" in page
    assert page.count("\u2717 ") == 2 and page.count("! ") == 1
    assert page.count("\u2713 ") == len(doctor.CHECKS) - 3


@pytest.mark.parametrize(
    "otherwise, status", [({}, 0), ({"shm_free": 0}, 0), ({"file_size": 1}, 1)]
)
def test_exit_status(
    otherwise: dict[str, Any], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = replace(GOOD, **otherwise)
    assert doctor.run(["--json"], gather=lambda workers, trial: facts) == status
    found = json.loads(capsys.readouterr().out)
    assert found["facts"]["cpus"] == 8
    assert [f["level"] for f in found["findings"]] == [f.level for f in doctor.examine(facts)]


def test_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--workers", "3"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    facts = Facts(**found["facts"])
    assert facts.workers == 3 and facts.trial is None and facts.torch == torch.__version__
    assert facts.open_now and facts.memory_available and facts.cpus
    assert {field.name for field in fields(Facts)} == found["facts"].keys()


def test_failing_loader_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(loader, "DataLoader", fails)
    assert doctor_facts.try_load() == "OSError: [Errno 24] Too many open files"


def test_limits_of_the_process_are_seen() -> None:
    """In a process of its own, under limits of a shell."""
    done = subprocess.run(
        ["sh", "-c", f"ulimit -n 60 && ulimit -f 2048 && exec {shlex.quote(sys.executable)} "
         "-m minato doctor --no-trial"],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
        env={**os.environ, UNKNOWN: "1", "LOCAL_WORLD_SIZE": "2"},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    for text in ("open files", "size of files", "environment"):
        assert re.search(rf"^(\u2717|X ) {text}$", done.stdout, re.M), done.stdout
    assert f"{UNKNOWN} is set" in done.stdout
    assert re.search(r"^(\u2713|ok) trial +not run \(--no-trial\)$", done.stdout, re.M)


def test_a_number_of_workers_below_one_is_refused() -> None:
    with pytest.raises(SystemExit):
        doctor.run(["--workers", "0"], gather=lambda workers, trial: GOOD)


@pytest.mark.parametrize("name", ["pids", ""])
def test_processes_left_in_a_control_group(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least of all groups above; a group below the mount may not be there."""
    root = "/sys/fs/cgroup" + (f"/{name}" if name else "")
    files = {
        "/proc/self/cgroup": f"4:memory:/other\n7:{name}:/a/b\n",
        f"{root}/a/b/pids.max": "max\n", f"{root}/a/b/pids.current": "3\n",
        f"{root}/a/pids.max": "50\n", f"{root}/a/pids.current": "20\n",
        f"{root}/pids.max": "40\n", f"{root}/pids.current": "30\n",
    }  # fmt: skip
    monkeypatch.setattr(doctor_facts, "_text", files.__getitem__)
    assert doctor_facts._group_processes() == 10


@pytest.mark.parametrize("text, name", [
    ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.10  Mon", "NVIDIA 570.86.10"),
    ("NVRM", "NVIDIA"),
])  # fmt: skip
def test_driver_version_is_parsed(text: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_facts, "_text", lambda path: text)
    assert doctor_facts._driver() == name


def test_hidden_accelerators() -> None:
    assert doctor_facts._hidden({}) is None and doctor_facts._hidden({"CUDA_VISIBLE_DEVICES": "0,1"}) is None
    assert doctor_facts._hidden({"CUDA_VISIBLE_DEVICES": ""}) == "CUDA_VISIBLE_DEVICES="
