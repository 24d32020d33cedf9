"""``minato doctor``: checks this machine for data-loading problems and suggests fixes.

Facts are gathered first (doctor_facts.py). The checks are functions of these facts alone, and skip
a fact that is None.
"""

from __future__ import annotations

import argparse
import difflib
import json
import platform
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from ..text import sized
from . import info
from .doctor_facts import ALL, Facts, gather

MiB, GiB = 1 << 20, 1 << 30

#: descriptors of a starting iterator; number of iterators that a program may have at once
DESCRIPTORS, ITERATORS = 9, 8
#: descriptors for the program's own files, sockets and pipes
OWN_DESCRIPTORS = 128
#: with less memory for batches loading is slow
LITTLE = 256 * MiB
#: memory that pinned batches may need
PINNED = GiB
#: workers that wait instead of computing, at most, that a search for the best number may try
WAITING = 16

WRONG, NOTE = "wrong", "note"


@dataclass(frozen=True)
class Finding:
    """One problem, or a fact that is good to know."""

    level: str
    about: str
    what: str
    fix: str


# ---- the checks ------------------------------------------------------------------------------


def _system(f: Facts) -> Iterator[Finding]:
    if f.no_engine is not None:
        yield Finding(
            WRONG, "system", f"{f.no_engine}: torch's own loader is used instead.",
            "Train on Linux. Programs need no change.",
        )  # fmt: skip
    if f.refused is not None:
        yield Finding(
            WRONG, "system", f"{f.refused}, so torch's own workers are used.",
            "minato needs Linux 5.3, and a sandbox or seccomp profile that allows memfd_create and "
            "pidfd_open (for Docker: --security-opt seccomp=PROFILE.json).",
        )  # fmt: skip


def _torch(f: Facts) -> Iterator[Finding]:
    number = re.match(r"(\d+)\.(\d+)", f.torch)
    if number is not None and (int(number[1]), int(number[2])) < (2, 6):
        yield Finding(
            WRONG, "torch", f"torch is {f.torch}, and minato needs 2.6 or later.",
            "pip install --upgrade torch",
        )  # fmt: skip
    if "does not load" in f.torch_extension:
        yield Finding(
            WRONG, "torch extension",
            f"It is {f.torch_extension}. Loading works without it, but small batches take longer.",
            "Build it for the installed torch, in minato's sources: pip install "
            "--no-build-isolation --force-reinstall --no-deps .",
        )  # fmt: skip
    elif not f.torch_extension.startswith("built"):
        yield Finding(
            NOTE, "torch extension",
            "It is missing. Loading works without it, but small batches take longer.",
            "With a C++ compiler, in minato's sources: pip install --no-build-isolation .",
        )  # fmt: skip


def _accelerator(f: Facts) -> Iterator[Finding]:
    if f.driver is None or f.accelerator:
        return
    if f.torch_accelerator is None:
        yield Finding(
            WRONG, "accelerator",
            f"There is a driver ({f.driver}), but torch is built without support for it: "
            "programs train on the CPU.",
            "Install torch's build for it: https://pytorch.org/get-started/locally/ names the "
            "command.",
        )  # fmt: skip
    elif f.hidden is not None:
        yield Finding(
            NOTE, "accelerator",
            f"There is a driver ({f.driver}), but the environment variable {f.hidden} hides the device.",
            "Unset that variable to train on the device.",
        )  # fmt: skip
    else:
        yield Finding(
            WRONG, "accelerator",
            f"There is a driver ({f.driver}), but torch, built for {f.torch_accelerator}, finds "
            "no device that it can use.",
            "The driver is too old for torch, or this container may not see the device: compare "
            "`nvidia-smi` (or `rocm-smi`) with torch's version, and run the container with "
            "--gpus all.",
        )  # fmt: skip


def _operators(f: Facts) -> Iterator[Finding]:
    nvidia = (f.driver or "").startswith("NVIDIA")
    if f.accelerator and nvidia and f.device_operators.startswith("not built"):
        yield Finding(
            NOTE, "device operators",
            "They are not built: pipelines of minato.ops run on the host, even with device=.",
            "With CUDA's compiler (nvcc) on the PATH, in minato's sources: pip install "
            "--force-reinstall --no-deps .",
        )  # fmt: skip


def _photos(f: Facts) -> Iterator[Finding]:
    if f.photos.startswith("Pillow alone"):
        yield Finding(
            NOTE, "photos",
            "There is no libjpeg-turbo: the JPEG transforms of minato.ops decode whole photos with "
            "Pillow.",
            "pip install --upgrade pillow (its wheel has one), or install the system's "
            "libjpeg-turbo.",
        )  # fmt: skip


def _locked(f: Facts) -> Iterator[Finding]:
    if (f.accelerator or f.driver) and f.locked is not None and f.locked < PINNED:
        yield Finding(
            NOTE, "locked memory",
            f"At most {sized(f.locked)} can be page-locked, and some drivers count the memory of "
            "pin_memory=True.",
            "ulimit -l unlimited (for Docker: --ulimit memlock=-1), if pinning fails.",
        )  # fmt: skip


def _descriptors(f: Facts) -> Iterator[Finding]:
    if f.open_limit is None:
        return
    free, wanted = f.open_limit - (f.open_now or 0), DESCRIPTORS * ITERATORS + OWN_DESCRIPTORS
    if free < wanted:
        asked, most = max(4096, f.open_limit + wanted), f.open_most
        fix = f"ulimit -n {asked}, or for Docker: --ulimit nofile=65536."
        if most is not None and most < asked:
            raised = f"ulimit -n {most}, which is the hard limit. " if most > f.open_limit else ""
            fix = (
                f"{raised}Raise the hard limit of {most} as root: nofile in "
                "/etc/security/limits.conf, LimitNOFILE= of a systemd unit, or Docker's "
                "--ulimit nofile=65536."
            )
        yield Finding(
            WRONG, "open files",
            f"This process may open {max(free, 0)} more files, sockets and pipes. An iterator "
            f"with workers needs {DESCRIPTORS} when it starts.",
            fix,
        )  # fmt: skip


def _address_space(f: Facts) -> Iterator[Finding]:
    if f.address_space is None:
        return
    free = f.address_space - (f.address_space_used or 0)
    yield Finding(
        WRONG if free < GiB else NOTE, "address space",
        f"It is limited to {sized(f.address_space)}, of which {sized(max(free, 0))} are left. "
        "minato maps up to a quarter of that, and batches must fit into what it gets.",
        "ulimit -v unlimited. Limit memory by a control group, or by memory_limit=, instead.",
    )  # fmt: skip


def _file_size(f: Facts) -> Iterator[Finding]:
    if f.file_size is not None:
        yield Finding(
            WRONG if f.file_size < GiB else NOTE, "size of files",
            f"It is limited to {sized(f.file_size)}, and shared memory counts as a file.",
            "ulimit -f unlimited",
        )  # fmt: skip


def _memory(f: Facts) -> Iterator[Finding]:
    if f.memory_available is None:
        return
    share = f.memory_available // 2 // f.ranks
    if share < LITTLE:
        of = "" if f.memory_total is None else f" of {sized(f.memory_total)}"
        each = "" if f.ranks == 1 else f" for each of {f.ranks} training processes"
        yield Finding(
            WRONG, "memory",
            f"{sized(f.memory_available)}{of} are available, with the limits of control groups. minato "
            f"uses half of that for batches: {sized(share)}{each}.",
            "Raise the container's limit (Docker: --memory), end other programs, or use fewer "
            "workers and a smaller prefetch_factor.",
        )  # fmt: skip


def _overcommit(f: Facts) -> Iterator[Finding]:
    if f.overcommit != 2 or f.commit_left is None:
        return
    yield Finding(
        WRONG if f.commit_left < GiB else NOTE, "overcommit",
        "The kernel does not overcommit memory (vm.overcommit_memory is 2): each worker counts as "
        f"much as the program it is forked from, and {sized(f.commit_left)} are left.",
        "sysctl vm.overcommit_memory=0, or add swap, or load large data after the workers have "
        "started.",
    )  # fmt: skip


def _processes(f: Facts) -> Iterator[Finding]:
    wanted = 3 * (f.workers + 2) * f.ranks  # each worker, and threads of packages in it
    if f.processes_left is not None and f.processes_left < wanted:
        yield Finding(
            WRONG, "processes",
            f"At most {max(f.processes_left, 0)} more processes and threads may start, but "
            f"{f.workers} workers may need {wanted}.",
            "ulimit -u unlimited, or the control group's pids.max (Docker: --pids-limit -1).",
        )  # fmt: skip


def _cpus(f: Facts) -> Iterator[Finding]:
    if f.cpus is None:
        return
    if f.cpus_affinity is not None and f.cpus < f.cpus_affinity:
        yield Finding(
            NOTE, "CPUs",
            f"A control group allows the time of {f.cpus} CPUs, but programs see "
            f"{f.cpus_affinity}.",
            f"Choose num_workers for {f.cpus} CPUs, or raise the quota (Docker: --cpus).",
        )  # fmt: skip
    elif f.cpus_online is not None and f.cpus < f.cpus_online:
        yield Finding(
            NOTE, "CPUs",
            f"This process and its workers may use {f.cpus} of {f.cpus_online} CPUs (CPU affinity).",
            "This is right for one of several ranks. Otherwise see taskset, numactl or the "
            "launcher's binding option.",
        )  # fmt: skip
    everywhere = f.workers * f.ranks
    if everywhere > f.cpus:
        share = max(1, f.cpus // f.ranks)
        most = min(f.workers, max(WAITING, 4 * share))
        yield Finding(
            NOTE, "workers",
            f"{everywhere} workers share {f.cpus} CPUs. That helps only if samples wait (for a "
            "disk or the network) instead of computing.",
            f"num_workers={share}, or autoscale=(1, {most}), which "
            "measures how many workers help.",
        )  # fmt: skip


def _threads(f: Facts) -> Iterator[Finding]:
    for name, value in sorted(f.threads.items()):
        if value.isdecimal() and int(value) > 1 and f.workers * int(value) > (f.cpus or 1):
            yield Finding(
                NOTE, "threads",
                f"{name}={value} applies to workers, too: {f.workers} workers have "
                f"{f.workers * int(value)} threads for {f.cpus or 1} CPUs.",
                f"Unset {name}; minato then gives each worker one thread.",
            )  # fmt: skip


def _start_method(f: Facts) -> Iterator[Finding]:
    if f.start_method != "fork":
        yield Finding(
            NOTE, "start method",
            f"Processes start by {f.start_method}: the dataset must pickle, the program's main "
            'part must be under `if __name__ == "__main__":`, and workers start in seconds.',
            'multiprocessing_context="fork" starts them in milliseconds, if the dataset uses no '
            "thread or accelerator of the program. persistent_workers=True starts them only once.",
        )  # fmt: skip


def _shm(f: Facts) -> Iterator[Finding]:
    if f.shm_free is not None and f.shm_free <= 64 * MiB:
        yield Finding(
            NOTE, "/dev/shm",
            f"{sized(f.shm_free)} are free. minato's batches do not use it. torch's own workers, "
            "tensors sent through queues, and minato.Cache do.",
            "For Docker: --shm-size 8g, or --ipc host.",
        )  # fmt: skip
    if f.left_caches:
        yield Finding(
            NOTE, "cache",
            f"{sized(f.left_caches)} of memory hold caches that no process uses. Either a program "
            "asked to keep them (keep=True), or all processes of a job were killed.",
            "The next job on the same data uses them. `minato cache drop` removes them.",
        )  # fmt: skip


def _variables(f: Facts) -> Iterator[Finding]:
    for name, value in sorted(f.variables.items()):
        if name not in ALL:
            near = difflib.get_close_matches(name, ALL, 1)
            yield Finding(
                WRONG, "environment", f"{name} is set, but minato has no such variable.",
                f"Is it {near[0]}?" if near else f"Known variables: {', '.join(sorted(ALL))}.",
            )  # fmt: skip
        elif name == "MINATO_SCHEDULING" and value not in ("balanced", "static"):
            yield Finding(
                WRONG, "environment", f"{name}={value} is not a known scheduling.",
                'Set it to "balanced" or "static", or unset it.',
            )  # fmt: skip


def _trial(f: Facts) -> Iterator[Finding]:
    if f.trial is not None:
        yield Finding(
            WRONG, "trial", f"A trial of a loader with two workers failed: {f.trial}",
            "See the other findings. If there is none, report it with the output of "
            "`minato doctor --json`.",
        )  # fmt: skip


UNKNOWN = "unknown on this system"
NOT_NEEDED = "not needed without an accelerator"


def _size(number: int | None, none: str, what: str = "") -> str:
    return none if number is None else f"{sized(number)}{what}"


def _files(f: Facts) -> str:
    if f.open_limit is None:
        return "no limit"
    now = "" if f.open_now is None else f" ({f.open_now} now)"
    return f"this process may open {f.open_limit}{now}"


def _one_thread(f: Facts) -> str:
    named = ", ".join(f"{name}={value}" for name, value in sorted(f.threads.items()))
    return f"{named} fits {f.workers} workers" if named else "each worker computes with one thread"


#: by subject: the check, and its text where it finds nothing
CHECKS: dict[str, tuple[Callable[[Facts], Iterator[Finding]], Callable[[Facts], str]]] = {
    "system": (_system, lambda f: "minato's own workers can run here"),
    "torch": (_torch, lambda f: f"{f.torch}; minato's extension is {f.torch_extension}"),
    "accelerator": (_accelerator, lambda f: (f.driver or "usable") if f.accelerator else "none found: programs train on the CPU"),
    "device operators": (_operators, lambda f: f.device_operators if f.accelerator else NOT_NEEDED),
    "photos": (_photos, lambda f: f"JPEG files are decoded by {f.photos}"),
    "locked memory": (_locked, lambda f: _size(f.locked, "no limit") if f.accelerator else NOT_NEEDED),
    "open files": (_descriptors, _files),
    "address space": (_address_space, lambda f: "no limit"),
    "size of files": (_file_size, lambda f: "no limit"),
    "memory": (_memory, lambda f: _size(f.memory_available, UNKNOWN, " available")),
    "overcommit": (_overcommit, lambda f: "not allowed" if f.overcommit == 2 else "allowed: forked workers share memory"),
    "processes": (_processes, lambda f: "no limit" if f.processes_left is None else f"{f.processes_left} more may start"),
    "CPUs": (_cpus, lambda f: UNKNOWN if f.cpus is None else f"{f.cpus} usable"),
    "threads": (_threads, _one_thread),
    "start method": (_start_method, lambda f: f"{f.start_method}: workers start in milliseconds"),
    "/dev/shm": (_shm, lambda f: _size(f.shm_free, UNKNOWN, " free")),
    "environment": (_variables, lambda f: ", ".join(sorted(f.variables)) or "no MINATO_ variables are set"),
    "trial": (_trial, lambda f: "two workers loaded all samples" if f.tried else "not run (--no-trial)"),
}


def examine(facts: Facts) -> list[Finding]:
    """All findings: problems first, then notes."""
    found = [finding for check, _fine in CHECKS.values() for finding in check(facts)]
    return sorted(found, key=lambda finding: finding.level != WRONG)


# ---- the page --------------------------------------------------------------------------------

#: marks of a check without a finding, with a problem, with a note; and those without UTF-8
_MARKS = {"": "\u2713", WRONG: "\u2717", NOTE: "!"}
_PLAIN = {"": "ok", WRONG: "X ", NOTE: "! "}
_COLOURS = {"": "32", WRONG: "31", NOTE: "33"}


def _shown(level: str, name: str, text: str, marks: dict[str, str], colours: bool) -> str:
    mark = f"\x1b[{_COLOURS[level]}m{marks[level]}\x1b[0m" if colours else marks[level]
    return f"{mark} {name:16}  {text}"


def render(facts: Facts, marks: dict[str, str] = _MARKS, colours: bool = False) -> str:
    """All checks as text for people: the findings of each, and the fixes."""
    lines, found = [], []
    for name, (check, fine) in CHECKS.items():
        here = list(check(facts))
        found += here
        if not here:
            lines.append(_shown("", name, fine(facts), marks, colours))
        for finding in here:
            lines.append(_shown(finding.level, finding.about, "", marks, colours).rstrip())
            for text in (finding.what, f"Fix: {finding.fix}"):
                lines += textwrap.wrap(
                    text, 96, initial_indent="    ", subsequent_indent="    ",
                    break_on_hyphens=False, break_long_words=False,
                )  # fmt: skip
    wrong = sum(finding.level == WRONG for finding in found)
    summary = (
        f"Problems ({marks[WRONG].strip()}): {wrong}. Notes ({marks[NOTE].strip()}), which may be as you "
        f"want it: {len(found) - wrong}."
    )
    return "\n".join([*lines, "", summary if found else "Nothing is wrong here."])


def _marks() -> dict[str, str]:
    encoding = sys.stdout.encoding or "ascii"
    try:
        "".join(_MARKS.values()).encode(encoding)
    except (LookupError, UnicodeEncodeError):
        return _PLAIN
    return _MARKS


def run(argv: list[str], gather: Callable[..., Facts] = gather) -> int:
    """``minato doctor``; returns the exit status: 1 if there is a problem."""
    parser = argparse.ArgumentParser(
        prog="minato doctor",
        description="Checks this machine for data-loading problems and suggests fixes.",
        epilog="Run it where training runs: in the same container, from the same launcher.",
    )
    parser.add_argument(
        "--workers", type=int, metavar="N",
        help="check for a loader with N workers (default: one for each CPU)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print findings and facts as JSON")
    parser.add_argument("--no-trial", action="store_true", help="do not try a loader with workers")
    options = parser.parse_args(argv)
    if options.workers is not None and options.workers < 1:
        parser.error("--workers must be 1 or more")
    facts = gather(options.workers, trial=not options.no_trial)
    findings = examine(facts)
    if options.json:
        found = {"findings": [asdict(finding) for finding in findings], "facts": asdict(facts)}
        print(json.dumps({"machine": platform.node(), **found}, indent=2))
    else:
        print(render(facts, _marks(), info.has_colours()))
    return int(any(finding.level == WRONG for finding in findings))
