"""Builds and runs the C test programs of ``tests/c`` on the lowest layers of the engine.

One program per primitive. Each is built with gcc and with clang and run in full, then built
with sanitizers and run again: all of it with AddressSanitizer, and suitable parts with
ThreadSanitizer; `make sanitize` also runs them in valgrind. A program that hangs ends by its own
deadline and fails, and so does a program that is asked for unknown cases. `make aarch64`
also builds them for AArch64 and runs them in an emulator.

Environment:
    MINATO_STRESS_SECONDS: length of each stress body (0.3 when unset).
    MINATO_TEST_SEED: seed of the random parts; printed by the programs.
    MINATO_TEST_AARCH64: set it for the programs in the emulator (some minutes).
    MINATO_TEST_MUTANTS: set it to break the sources in known ways, one at a time, and
        see that the tests notice (some minutes).
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import signal
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("base", "os", "sync", "memory", "schedule", "workers", "engine", "cache")
STRESS = float(os.environ.get("MINATO_STRESS_SECONDS") or 0.3)
#: time limit of a program; its own deadline, which names the hanging case, comes first
LIMIT_S = 300 + 80 * STRESS
WARNINGS = [
    "-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes", "-Wmissing-prototypes", "-Werror",
]  # fmt: skip
COMMON = ["-std=c11", "-O2", "-g", "-fvisibility=hidden", "-pthread", "-DMN_FAULTS"]


class Program(NamedTuple):
    """How a test program is linked."""

    wraps: tuple[str, ...] = ()
    without: str = ""  # a source that the program includes itself


PROGRAMS = {
    "mn_base": Program(),
    "mn_futex": Program(),
    "mn_memfd": Program(("memfd_create", "ftruncate", "mmap", "madvise")),
    "mn_thread": Program(("pthread_create",)),
    "mn_proc": Program(),
    "mn_forks": Program(),
    "mn_lifeline": Program(),
    "mn_limits": Program(),
    "mn_event": Program(("mn_futex_wait", "mn_now_ns")),
    "mn_free_extents": Program(("malloc", "calloc", "free"), without="mn_free_extents"),
    "mn_runqueue": Program(),
    "mn_engine": Program(("mn_cputime_process", "mn_engine_poll")),
    "mn_worker": Program(),
    "mn_native_worker": Program(),
    "mn_checked_results": Program(),
    "mn_arena": Program(),
    "mn_pagelocks": Program(),
    "mn_crew": Program(),
    "mn_waits": Program(),
    "mn_plan": Program(),
    "mn_cache": Program(("fstatfs", "mn_cache_lock_try", "pread", "pwrite", "fallocate")),
    "mn_cache_cursor": Program(),
}
RUN = sorted(set(PROGRAMS) - {"mn_limits"})


def kinds_under(sanitizer: str, program: str) -> tuple[str, ...]:
    """The kinds of cases that a sanitizer supports; none named: all."""
    if program == "mn_worker":
        return ("fork",)  # it has no others, and the trainer's threads can be watched in them
    # ThreadSanitizer sees one process's mapping only. AddressSanitizer takes the SIGSEGV that a
    # child of mn_memfd is to die by, and does not end processes without a first thread.
    if sanitizer == "tsan" or program in ("mn_memfd", "mn_proc"):
        return ("plain", "thread")
    return ()


def find_compiler(*names: str) -> str | None:
    return next((found for found in map(shutil.which, names) if found), None)


COMPILERS = {
    "gcc": find_compiler("gcc"),
    "clang": find_compiler("clang", "clang-19", "clang-18", "clang-16", "clang-15", "clang-14"),
    "aarch64": find_compiler("aarch64-linux-gnu-gcc"),
}
EMULATOR = find_compiler("qemu-aarch64-static", "qemu-aarch64")
#: name -> (compiler, sanitizers)
BUILDS = {
    "gcc": ("gcc", ""),
    "clang": ("clang", ""),
    "tsan": ("gcc", "thread"),
    "asan": ("gcc", "address,undefined"),
    "aarch64": ("aarch64", ""),
}


def compile_flags(sanitizers: str) -> list[str]:
    if not sanitizers:
        return []
    return [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]


def check_call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, " ".join(command) + "\n" + done.stderr


class Builder:
    """Builds the layers once and programs on demand, in one folder.

    ``csrc`` and ``tests`` are the folders of the sources, so that a changed copy can be
    built as well: ``made`` has the objects of all sources but those that ``changed`` includes.
    """

    def __init__(
        self, folder: Path, build: str, csrc: Path = ROOT / "csrc",
        tests: Path = ROOT / "tests" / "c", warnings: bool = True,
        made: Builder | None = None, changed: str = "",
    ) -> None:  # fmt: skip
        name, self.sanitizers = BUILDS[build]
        compiler = COMPILERS[name]
        if compiler is None:
            pytest.skip(f"{name} is not installed")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.tests = folder, tests
        self.command = [compiler, *COMMON, *compile_flags(self.sanitizers), f"-I{csrc}",
                        f"-I{ROOT / 'minato' / 'include'}"]  # fmt: skip
        self.warnings = WARNINGS if warnings else ["-w"]
        emulated = name == "aarch64"  # without libraries of that machine's
        self.links = ["-static"] if emulated else []
        if emulated:
            self.command += ["-include", str(ROOT / "tests" / "c" / "mn_emulator.h")]
        self.prefix = [str(EMULATOR)] if emulated else self.find_prefix()
        sources = [path for f in FOLDERS for path in sorted((csrc / f).glob("*.c"))]
        if made is not None and not changed.endswith(".h"):
            sources = [source for source in sources if source.name == changed]
        with ThreadPoolExecutor(max_workers=2) as pool:
            self.objects = list(pool.map(self.build_object, sources))
        if made is not None:
            own = {o.stem for o in self.objects}
            self.objects += [o for o in made.objects if o.stem not in own]

    def find_prefix(self) -> list[str]:
        """Skips where a sanitizer is missing; finds out whether it needs a plain layout."""
        if not self.sanitizers:
            return []
        probe, out = self.folder / "probe.c", self.folder / "probe"
        probe.write_text("int main(void) { return 0; }\n")
        built = subprocess.run(
            [*self.command, str(probe), "-o", str(out)], capture_output=True, check=False
        )
        if built.returncode != 0:
            pytest.skip(f"no runtime for -fsanitize={self.sanitizers}")
        # Old runtimes cannot live with the address randomisation of new kernels.
        for prefix in ([], ["setarch", platform.machine(), "-R"]):
            try:
                ran = subprocess.run([*prefix, str(out)], capture_output=True, check=False)
            except OSError:
                continue
            if ran.returncode == 0:
                return prefix
        pytest.skip(f"programs with -fsanitize={self.sanitizers} do not start here")

    def build_object(self, source: Path) -> Path:
        out = self.folder / (source.stem + ".o")
        strict = ["-Wconversion"] if self.warnings is WARNINGS else []
        check_call([*self.command, *self.warnings, *strict, "-c", str(source), "-o", str(out)])
        return out

    def build(self, name: str) -> Path:
        """The path of the test program, built if need be."""
        out, program = self.folder / name, PROGRAMS[name]
        if not out.exists():
            objects = [str(o) for o in self.objects if o.stem != program.without]
            wraps = [f"-Wl,--wrap={symbol}" for symbol in program.wraps]
            source = str(self.tests / f"{name}.c")
            # no-builtin: clang assumes that a malloc succeeds if it can see the free
            check_call([*self.command, *self.warnings, "-fno-builtin", f"-I{self.tests}",
                        source, *objects, *wraps, *self.links, "-lm", "-o", str(out)])  # fmt: skip
        return out

    def run(self, name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        """Processes that a program has left when it ends are ended, too: they may hold its output
        open, and its end would not be seen."""
        command = [*self.prefix, str(self.build(name)), *arguments]
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                command, stdout=out, stderr=errors, cwd=self.folder, start_new_session=True,
                env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1", **environment},
            )  # fmt: skip
            try:
                status = process.wait(LIMIT_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            out.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(command, status, out.read(), errors.read())


def must_pass(done: subprocess.CompletedProcess) -> None:
    told = f"exit {done.returncode}\n{done.stdout}\n{done.stderr[-6000:]}"
    assert done.returncode == 0, told


@pytest.fixture(scope="module")
def builders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Builder]:
    """Builds made so far, by name."""
    made: dict[str, Builder] = {}
    yield made
    for builder in made.values():
        shutil.rmtree(builder.folder, ignore_errors=True)


def builder_for(
    name: str, builders: dict[str, Builder], factory: pytest.TempPathFactory
) -> Builder:
    if name not in builders:
        builders[name] = Builder(factory.mktemp(name), name)
    return builders[name]


@pytest.mark.limit(LIMIT_S + 300)  # the first of each build builds all layers
@pytest.mark.parametrize("program", RUN)
@pytest.mark.parametrize("build", ["gcc", "clang"])
def test_program(
    build: str, program: str, builders: dict[str, Builder],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    must_pass(builder_for(build, builders, tmp_path_factory).run(program))


@pytest.mark.limit(LIMIT_S + 300)  # the first of each build builds all layers
@pytest.mark.parametrize("program", RUN)
@pytest.mark.parametrize("build", ["tsan", "asan"])
def test_program_under_sanitizer(
    build: str, program: str, builders: dict[str, Builder],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    builder = builder_for(build, builders, tmp_path_factory)
    must_pass(builder.run(program, *kinds_under(build, program)))


#: detects reads of uninitialised memory, which no sanitizer of gcc's sees
VALGRIND = ["valgrind", "-q", "--error-exitcode=99", "--fair-sched=try"]
#: programs that need what valgrind lacks: sparse mappings of a terabyte, pidfds, threads that run
#: at the same time, processes that answer within seconds
NOT_UNDER_VALGRIND = {"mn_memfd", "mn_proc", "mn_native_worker", "mn_worker"}


@pytest.mark.limit(LIMIT_S + 600)
@pytest.mark.parametrize("program", [p for p in RUN if p not in NOT_UNDER_VALGRIND])
def test_program_under_valgrind(
    program: str, builders: dict[str, Builder], tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if STRESS < 5:
        pytest.skip("takes minutes: make sanitize-programs runs it")
    if shutil.which("valgrind") is None:
        pytest.skip("valgrind is not installed")
    builder = builder_for("gcc", builders, tmp_path_factory)
    monkeypatch.setattr(builder, "prefix", VALGRIND)
    must_pass(builder.run(program, "plain", "thread", MINATO_STRESS_SECONDS="0.3",
                          MINATO_TEST_DEADLINE=str(LIMIT_S)))  # fmt: skip


def test_valgrind_sees_uninitialised_memory(tmp_path: Path) -> None:
    gcc = COMPILERS["gcc"]
    if gcc is None or shutil.which("valgrind") is None:
        pytest.skip("valgrind is not installed")
    source, program = tmp_path / "planted.c", tmp_path / "planted"
    source.write_text(
        "#include <stdlib.h>\nint main(void)\n{\n    int *p = malloc(sizeof *p);\n"
        "    return *p == 7 ? 1 : 0;\n}\n"
    )
    check_call([gcc, "-g", "-O0", str(source), "-o", str(program)])
    done = subprocess.run([*VALGRIND, str(program)], capture_output=True, check=False)
    assert done.returncode == 99


@pytest.mark.limit(LIMIT_S + 1200)  # the first builds all layers
@pytest.mark.parametrize("program", RUN)
def test_program_in_emulator(
    program: str, builders: dict[str, Builder], tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    """The same for another CPU architecture. Cases that check the effect of madvise are left out:
    the emulator does not pass it on, and says so."""
    if not os.environ.get("MINATO_TEST_AARCH64"):
        pytest.skip("takes minutes: set MINATO_TEST_AARCH64")
    if EMULATOR is None:
        pytest.skip("qemu-aarch64 is not installed")
    builder = builder_for("aarch64", builders, tmp_path_factory)
    must_pass(builder.run(program, MINATO_TEST_DEADLINE=str(LIMIT_S)))


@pytest.mark.parametrize("program", RUN)
def test_a_program_that_ran_no_case_fails(
    program: str, builders: dict[str, Builder], tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    done = builder_for("gcc", builders, tmp_path_factory).run(program, "none")
    assert done.returncode == 2 and "no case is of the kinds" in done.stderr


def test_every_program_is_built() -> None:
    """Every program of a primitive, or listed here, is used."""
    there = {path.stem for path in (ROOT / "tests" / "c").glob("mn_*.c")}
    primitives = {header.stem for header in HEADERS}
    assert set(PROGRAMS) <= there
    assert there & primitives <= set(PROGRAMS)


HEADERS = sorted(p for f in FOLDERS for p in (ROOT / "csrc" / f).glob("mn_*.h"))


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_headers_stand_alone(compiler: str, tmp_path: Path) -> None:
    """Each header compiles alone and when included twice, and so do asserts without NDEBUG."""
    found = COMPILERS[compiler]
    if found is None:
        pytest.skip(f"{compiler} is not installed")
    for header in HEADERS:
        name = header.relative_to(ROOT / "csrc").as_posix()
        source = tmp_path / "alone.c"
        source.write_text(f'#include "{name}"\n#include "{name}"\ntypedef int mn_nothing;\n')
        check_call([found, "-std=c11", *WARNINGS, "-Wconversion", f"-I{ROOT / 'csrc'}",
                    "-fsyntax-only", str(source)])  # fmt: skip


def test_release_build_has_no_test_hooks(tmp_path: Path) -> None:
    """Builds without assertions and fault points, and without a warning for it."""
    gcc = COMPILERS["gcc"]
    if gcc is None:
        pytest.skip("gcc is not installed")
    for folder in FOLDERS:
        for source in sorted((ROOT / "csrc" / folder).glob("*.c")):
            out = tmp_path / (source.stem + ".o")
            check_call([gcc, "-std=c11", "-O3", "-DNDEBUG", *WARNINGS, "-Wconversion",
                        f"-I{ROOT / 'csrc'}", "-c", str(source), "-o", str(out)])  # fmt: skip
            names = subprocess.run(["nm", str(out)], capture_output=True, text=True, check=True)
            assert source.stem == "mn_fault" or "mn_fault_hook" not in names.stdout


# ---- CPU and memory limits, from made-up /proc and /sys trees ----

GIB = 1 << 30


def make_tree(root: Path, files: dict[str, str]) -> None:
    base = {"proc/meminfo": "MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 4194304 kB\n"}
    for name, text in {**base, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def v1_and_v2(own: str, usage: int, limit: int) -> dict[str, str]:
    """The same memory limit as either version writes it."""
    stat = "cache 5\ninactive_file 1\ntotal_inactive_file 1073741824\n"
    return {
        f"sys/fs/cgroup/memory{own}/memory.limit_in_bytes": f"{limit}\n",
        f"sys/fs/cgroup/memory{own}/memory.usage_in_bytes": f"{usage}\n",
        f"sys/fs/cgroup/memory{own}/memory.stat": stat,
    }


V2 = "0::/a/b\n"
V1 = "5:memory:/a/b\n3:cpuset:/\n2:cpu,cpuacct:/a/b\n"
UNLIMITED = 9223372036854771712
S = "sys/fs/cgroup"

#: name -> (files, CPUs wanted of 4, total, available)
LIMITS = {
    "no groups": ({}, 4, 8 * GIB, 4 * GIB),
    "v2, nothing set": (
        {"proc/self/cgroup": V2, f"{S}/a/b/cpu.max": "max 100000\n",
         f"{S}/a/b/memory.max": "max\n", f"{S}/a/b/memory.current": "5\n"},
        4, 8 * GIB, 4 * GIB),
    "v2, own group": (
        {"proc/self/cgroup": V2, f"{S}/a/b/cpu.max": "200000 100000\n",
         f"{S}/a/b/memory.max": f"{3 * GIB}\n", f"{S}/a/b/memory.current": f"{GIB}\n"},
        2, 3 * GIB, 2 * GIB),
    "v2, a parent is tighter, file cache is free": (
        {"proc/self/cgroup": V2, f"{S}/a/b/cpu.max": "300000 100000\n",
         f"{S}/a/cpu.max": "110000 100000\n", f"{S}/a/b/memory.max": f"{6 * GIB}\n",
         f"{S}/a/b/memory.current": "0\n", f"{S}/a/memory.max": f"{5 * GIB}\n",
         f"{S}/a/memory.current": f"{4 * GIB}\n",
         f"{S}/a/memory.stat": f"anon 7\ninactive_file {2 * GIB}\n"},
        2, 5 * GIB, 3 * GIB),
    "v2, in a container the path is the host's": (
        {"proc/self/cgroup": "0::/host/docker/1234\n", f"{S}/cpu.max": "50000 100000\n",
         f"{S}/memory.max": f"{2 * GIB}\n", f"{S}/memory.current": f"{3 * GIB}\n"},
        1, 2 * GIB, 0),
    "v2 beside v1": (
        {"proc/self/cgroup": V2, f"{S}/unified/a/b/cpu.max": "100000 100000\n"},
        1, 8 * GIB, 4 * GIB),
    "v1, nothing set": (
        {"proc/self/cgroup": V1, f"{S}/cpu/a/b/cpu.cfs_quota_us": "-1\n",
         f"{S}/cpu/a/b/cpu.cfs_period_us": "100000\n", **v1_and_v2("/a/b", 0, UNLIMITED)},
        4, 8 * GIB, 4 * GIB),
    "v1, own group": (
        {"proc/self/cgroup": V1, f"{S}/cpu,cpuacct/a/b/cpu.cfs_quota_us": "250000\n",
         f"{S}/cpu,cpuacct/a/b/cpu.cfs_period_us": "100000\n",
         **v1_and_v2("/a/b", 3 * GIB, 4 * GIB)},
        3, 4 * GIB, 2 * GIB),
    "v1, in a container": (
        {"proc/self/cgroup": "2:cpu:/docker/77\n4:memory:/docker/77\n",
         f"{S}/cpu/cpu.cfs_quota_us": "20000\n", f"{S}/cpu/cpu.cfs_period_us": "10000\n",
         **v1_and_v2("", 0, GIB)},
        2, GIB, GIB),
    "nonsense is passed over": (
        {"proc/self/cgroup": "x\n\n0:\n1:cpu\n0::/a/b\n", f"{S}/a/b/cpu.max": "a b\n",
         f"{S}/a/cpu.max": "0 0\n", f"{S}/a/b/memory.max": "\n"},
        4, 8 * GIB, 4 * GIB),
    "a path too long to have files": (
        {"proc/self/cgroup": "0::/" + "a/" * 3000 + "\n", f"{S}/cpu.max": "100000 100000\n"},
        4, 8 * GIB, 4 * GIB),
}  # fmt: skip


@pytest.mark.parametrize("case", LIMITS)
def test_limits(
    case: str, tmp_path: Path, builders: dict[str, Builder],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    files, cpus, total, available = LIMITS[case]
    builder = builder_for("gcc", builders, tmp_path_factory)
    make_tree(tmp_path, files)
    done = builder.run("mn_limits", str(tmp_path))
    must_pass(done)
    here = len(os.sched_getaffinity(0))
    assert list(map(int, done.stdout.split()[:3])) == [min(here, cpus, 4), total, available]


@pytest.mark.parametrize("files, ns", [
    ({}, -1),
    ({"proc/self/cgroup": "0::/a/b\n", f"{S}/a/b/cpu.stat": "usage_usec 9\nthrottled_usec 3\n",
      f"{S}/a/cpu.stat": "throttled_usec 4\n", f"{S}/cpu.stat": "usage_usec 9\n"}, 7000),
    ({"proc/self/cgroup": "4:cpu,cpuacct:/a\n", f"{S}/cpu,cpuacct/a/cpu.stat": "throttled_time 5\n"}, 5),
    ({"proc/self/cgroup": "4:cpu,cpuacct:/a\n", f"{S}/cpu,cpuacct/a/cpu.stat": "throttled_time 5\n",
      f"{S}/cpu/a/cpu.stat": "throttled_time 5\n"}, 5),  # one folder by two names
])  # fmt: skip
def test_throttled_time_of_all_groups_is_added(
    files: dict[str, str], ns: int, tmp_path: Path, builders: dict[str, Builder],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    make_tree(tmp_path, files)
    done = builder_for("gcc", builders, tmp_path_factory).run("mn_limits", str(tmp_path))
    assert int(done.stdout.split()[3]) == ns


def test_limits_of_this_machine(
    builders: dict[str, Builder], tmp_path_factory: pytest.TempPathFactory
) -> None:
    done = builder_for("gcc", builders, tmp_path_factory).run("mn_limits")
    must_pass(done)
    cpus, total, available, private, nobody = map(int, done.stdout.split())
    ram = int(re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024
    assert 1 <= cpus <= len(os.sched_getaffinity(0))
    assert 0 < available < total <= ram
    assert 1 << 12 <= private < 1 << 30 and nobody == 0


def test_affinity_limits_cpus(
    builders: dict[str, Builder], tmp_path_factory: pytest.TempPathFactory
) -> None:
    builder = builder_for("gcc", builders, tmp_path_factory)
    cpu = min(os.sched_getaffinity(0))
    taskset = shutil.which("taskset")
    if taskset is None:
        pytest.skip("taskset is not installed")
    command = [taskset, "-c", str(cpu), str(builder.build("mn_limits"))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == "1"


# ---- do the tests notice? ----


class Mutant(NamedTuple):
    """One change that must make a program fail."""

    path: str
    old: str
    new: str
    program: str
    build: str = "gcc"
    kinds: tuple[str, ...] = ()
    seconds: float = 0.3  # of stress: more where two processors have to meet within nanoseconds


EVENT_H, EVENT_C = "csrc/sync/mn_event.h", "csrc/sync/mn_event.c"
EXTENT_C = "csrc/memory/mn_free_extents.c"
MEMORY, WORKERS, ENGINE = "csrc/memory/", "csrc/workers/", "csrc/engine/"
SCHEDULE = "csrc/schedule/"

MUTANTS = {
    "prepare_wait may pass the look": Mutant(
        EVENT_H, "(void)mn_a32_xchg_seqcst(&event->word, MN_EVENT_ASLEEP)",
        "mn_a32_store_release(&event->word, MN_EVENT_ASLEEP)", "mn_event", kinds=("thread",),
        seconds=8),
    "notify may pass the publish": Mutant(
        "tests/c/mn_event.c", "mn_a32_store_seqcst(&mine->said",
        "mn_a32_store_release(&mine->said", "mn_event", kinds=("thread",), seconds=8),
    "notify_released is a load": Mutant(
        EVENT_H, "mn_a32_add_acqrel(&event->word, 0)",
        "mn_a32_load_acquire(&event->word)", "mn_event", kinds=("thread",), seconds=8),
    "notify without wake": Mutant(
        EVENT_C, "    (void)mn_futex_wake(&event->word, 1);\n    return true;",
        "    return true;", "mn_event", kinds=("thread",)),
    "sleep returns without acquire": Mutant(
        EVENT_C, "mn_a32_load_acquire(&event->word); /* [B8] */",
        "mn_a32_load_relaxed(&event->word);", "mn_event", "tsan", ("thread",)),
    "timeout swallows a notification": Mutant(
        EVENT_C, "was == MN_EVENT_AWAKE ? 0 : reason", "(void)was, reason", "mn_event"),
    "sleep believes every wake-up": Mutant(
        EVENT_C, "if (rc != 0 && rc != -EAGAIN) {", "if (1) {", "mn_event"),
    "timeout starts again at each wake-up": Mutant(
        EVENT_C, "timeout_ns - (int64_t)passed", "timeout_ns", "mn_event"),
    "notify_always looks first": Mutant(
        EVENT_C, "    (void)mn_a32_xchg_acqrel(&event->word, MN_EVENT_AWAKE); /* [B7] */\n"
        "    (void)mn_futex_wake(&event->word, 1);", "    (void)mn_event_notify(event);", "mn_event"),
    "extent: largest length goes stale": Mutant(
        EXTENT_C, "    (void)mn_extent_pull(root);\n}", "}", "mn_free_extents"),
    "extent: no joining below": Mutant(
        EXTENT_C, "before != NULL && before->off + before->len == off", "0", "mn_free_extents"),
    "extent: double free": Mutant(
        EXTENT_C, "(after != NULL && after->off < off + len)", "0", "mn_free_extents"),
    "extent: not the lowest": Mutant(
        EXTENT_C, "if (mn_extent_max(node->left) >= len) {",
        "if (node->len < len && mn_extent_max(node->left) >= len) {", "mn_free_extents"),
    "extent: no promise": Mutant(
        EXTENT_C, "    e->promised++;\n    e->allocs++;", "    e->allocs++;", "mn_free_extents"),
    "extent: promises stay": Mutant(
        EXTENT_C, "e->promised < most ? e->promised : most", "e->promised", "mn_free_extents"),
    "touch writes back what it read": Mutant(
        "csrc/os/mn_memfd.c", "(void)mn_a32_add_relaxed((mn_a32 *)at, 0);",
        "mn_a32_store_relaxed((mn_a32 *)at, mn_a32_load_relaxed((mn_a32 *)at));", "mn_memfd"),
    "mapped punch widens": Mutant(
        "csrc/os/mn_memfd.c", "((uintptr_t)addr + mask) & ~mask;\n    uintptr_t end",
        "(uintptr_t)addr & ~mask;\n    uintptr_t end", "mn_memfd"),
    "create leaks on failure": Mutant(
        "csrc/os/mn_memfd.c", "            (void)close(fd);\n", "", "mn_memfd"),
    "proc: a child takes itself for its parent": Mutant(
        "csrc/os/mn_proc.c", "pthread_atfork(NULL, NULL, mn_proc_note_self)", "0", "mn_proc"),
    "zombie counts as alive": Mutant(
        "csrc/os/mn_proc.c", "int rc = mn_proc_wait_pidfd(fd, 0) == -ETIMEDOUT;", "int rc = 1;",
        "mn_proc"),
    "kill reaches a zombie": Mutant(
        "csrc/os/mn_proc.c", "bool lives = mn_proc_wait_pidfd(fd, 0) == -ETIMEDOUT;",
        "bool lives = true;", "mn_proc"),
    "forks: a child keeps what others fork with": Mutant(
        "csrc/os/mn_forks.c", "if (f->mapping != NULL && f != own)", "if (0)", "mn_forks"),
    "forks: a thread ends another's": Mutant(
        "csrc/os/mn_forks.c", " && pthread_equal(f->thread, pthread_self())", "", "mn_forks"),
    "forks: those that share a file begin with the last": Mutant(
        "csrc/os/mn_forks.c", "    f->thread = pthread_self();\n",
        "    f->first = forks->count;\n    f->thread = pthread_self();\n", "mn_forks"),
    "forks: what comes while one is made is after it": Mutant(
        "csrc/os/mn_forks.c", "f->last = ++forks->count;", "f->last = forks->count;", "mn_forks"),
    "forks: another's descriptor is taken for its own": Mutant(
        "csrc/os/mn_forks.c", "else if (!ours(&f))", "else if (0)", "mn_forks"),
    "forks: a child closes another's descriptor": Mutant(
        "csrc/os/mn_forks.c", "if (ours(f))", "if (1)", "mn_forks"),
    "thread takes signals": Mutant(
        "csrc/os/mn_thread.c", "pthread_sigmask(SIG_SETMASK, &all, &before)",
        "pthread_sigmask(SIG_BLOCK, NULL, &before)", "mn_thread"),
    "runqueue: claim without compare-and-swap": Mutant(
        WORKERS + "mn_runqueue.c", "if (mn_a64_cas_acqrel(&mn_task_at(shm, (uint32_t)entry)->word, "
        "&word, mine)) { /* [T2] */",
        "mn_a64_store_release(&mn_task_at(shm, (uint32_t)entry)->word, mine); if (1) {",
        "mn_runqueue", kinds=("thread",), seconds=8),
    "runqueue: claim forgets the generation": Mutant(
        WORKERS + "mn_runqueue.c", "\n           && mn_word_gen(*word) == (uint32_t)(entry >> 32)", "",
        "mn_runqueue", kinds=("plain",)),
    "runqueue: late hints stay late": Mutant(
        WORKERS + "mn_runqueue.c", "        from = tail - q->mask - 1;",
        "        hint = from = tail - q->mask - 1;", "mn_runqueue", kinds=("plain",)),
    "runqueue: full is not noticed": Mutant(
        WORKERS + "mn_runqueue.c", "if (tail - head->head > q->mask) {", "if (0) {", "mn_runqueue"),
    "engine: own queue too short": Mutant(
        ENGINE + "mn_engine_sizes.c", "cfg->window == 0    ? tasks_for(cfg)",
        "cfg->window == 0    ? 1", "mn_engine", kinds=("plain",)),
    "engine: close keeps the pages": Mutant(
        MEMORY + "mn_arena.c", "a->guard);\n    mn_arena_discard(a, off, len);", "a->guard);",
        "mn_engine", kinds=("plain",)),
    "engine: what is needed again goes back": Mutant(
        MEMORY + "policy_trim.h", "#define MN_TRIM_COLD 4u", "#define MN_TRIM_COLD 2u",
        "mn_engine", kinds=("plain",)),
    "engine: nothing is spared": Mutant(
        MEMORY + "policy_trim.c", "return keep;", "return 0;", "mn_engine", kinds=("plain",)),
    "engine: what is warm does not count": Mutant(
        MEMORY + "policy_trim.c", "if (v->used > v->limit || v->warm > v->limit - v->used) {",
        "if (v->used > v->limit) {", "mn_engine", kinds=("plain",)),
    "extent: what is used again stays warm": Mutant(
        EXTENT_C, "    mn_extent_unwarm(e, *off, len);\n", "", "mn_free_extents"),
    "extent: no promise for what is lent": Mutant(
        EXTENT_C, "while (e->spares < wanted + e->lends) {", "while (e->spares < wanted) {",
        "mn_free_extents"),
    "extent: the rest above what is lent is lost": Mutant(
        EXTENT_C, "        if (above != 0) {\n            e->root = mn_extent_insert(",
        "        if (0) {\n            e->root = mn_extent_insert(", "mn_free_extents"),
    "engine: the head waits for the limit": Mutant(
        ENGINE + "mn_blocks.c", "if (e->plan == NULL && mn_arena_exceeds",
        "if (mn_arena_exceeds", "mn_engine", kinds=("plain",)),
    "engine: large batches are refused": Mutant(
        SCHEDULE + "mn_plan_chunks.c",
        "    most = most < MN_PLAN_BATCH_TASKS ? most : MN_PLAN_BATCH_TASKS;\n", "",
        "mn_engine", kinds=("plain",)),
    "plan: what idles does not wait": Mutant(
        SCHEDULE + "mn_plan_starved.c", ">= mn_plan_patience_ns(p->pace.batch_bytes);", ">= 0;",
        "mn_plan"),
    "plan: the gone keep their shares": Mutant(
        SCHEDULE + "mn_plan_shares.c", "            mn_share_disown(p, w);\n", "", "mn_plan"),
    "plan: nothing moves from behind a slow one": Mutant(
        SCHEDULE + "mn_plan_shares.c", "r->idle ? mn_plan_find_stuck(p, r, w) : p->cfg.max_workers",
        "p->cfg.max_workers", "mn_plan"),
    "plan: the first batch waits for two samples": Mutant(
        SCHEDULE + "mn_plan_cut.c", "#define PROBE_FIRST 1u", "#define PROBE_FIRST 0u", "mn_plan"),
    "plan: bytes come too late": Mutant(
        SCHEDULE + "mn_plan_learn.c", "known.revision != p->pace.revision", "false", "mn_plan"),
    "plan: a task starts twice": Mutant(
        SCHEDULE + "mn_plan_next.c", "        mn_dispatch_take(&p->dispatch, s->node);\n", "",
        "mn_plan"),
    "plan: memory allows everything": Mutant(
        SCHEDULE + "mn_plan_next.c", "|| !mn_memory_may(&m, (int64_t)bytes, head);",
        "|| (!mn_memory_may(&m, (int64_t)bytes, head) && false);", "mn_plan"),
    "plan: finished batches fill the memory": Mutant(
        SCHEDULE + "mn_plan_next.c", ": lying(p, f) < most;", ": true;", "mn_plan"),
    "plan: what was early and is done fills the memory": Mutant(
        SCHEDULE + "mn_plan_next.c", "slow ? resting(p, f, end) < (most + 1) / 2", "slow ? true",
        "mn_plan"),
    "plan: what is cleared keeps its place": Mutant(
        SCHEDULE + "mn_plan_life.c", "for (uint64_t n = p->order.head; n < p->order.next; n++) { /* no",
        "for (uint64_t n = p->order.head + 1; n < p->order.next; n++) { /* no", "mn_engine",
        kinds=("plain",)),
    "plan: the refused stay in the way": Mutant(
        SCHEDULE + "mn_plan_life.c", "    mn_dispatch_drop(&p->dispatch, is_of, &sequence);\n", "",
        "mn_plan"),
    "engine: a kept range goes back with its block": Mutant(
        MEMORY + "mn_ranges_to_free.c", "            r->at[i] = r->at[--r->n];",
        "            r->at[i] = x;", "mn_engine"),
    "engine: abandoned while somebody works": Mutant(
        ENGINE + "mn_batch.c", "if (st == MN_TASK_QUEUED || st == MN_TASK_RUNNING) {",
        "if (st == MN_TASK_QUEUED) {", "mn_engine"),
    "engine: abandoned damage is free": Mutant(
        ENGINE + "mn_batch.c", "return w == e->shm.ctl->nworkers;", "return true;",
        "mn_checked_results", kinds=("plain",)),
    "engine: the abandoned are tried again": Mutant(
        WORKERS + "mn_tasks.c", "    t->results[task].retries_left = 0;\n", "", "mn_engine",
        kinds=("plain",)),
    "engine: leases overlap": Mutant(
        WORKERS + "mn_arena_leases.c", "    x->off = off;\n",
        "    x->off = off; mn_arena_free(l->arena, off, len);\n", "mn_engine", kinds=("thread",)),
    "page locks: what is read goes back": Mutant(
        MEMORY + "mn_pagelocks.c", "        if (unlock_chunk(l, c)) {",
        "        (void)unlock_chunk(l, c);\n        {", "mn_pagelocks"),
    "page locks: a lock may come between": Mutant(
        MEMORY + "mn_pagelocks.c", "    if (l->locked_bytes == 0) {\n",
        "    if (l->locked_bytes == 0) {\n        mn_mutex_unlock(&l->mutex);\n", "mn_pagelocks"),
    "page locks: half a lock stays": Mutant(
        MEMORY + "mn_pagelocks.c", "            drop_span(l, (struct span){s.first, c});\n", "",
        "mn_pagelocks"),
    "worker: done without order": Mutant(
        WORKERS + "mn_worker.c",
        "bool was_mine = mn_a64_cas_seqcst(&t->word, &word, done); /* [T3] */",
        "bool was_mine = true; mn_a64_store_relaxed(&t->word, done);", "mn_engine", "tsan",
        ("thread",)),
    "worker: the trainer is not told": Mutant(
        WORKERS + "mn_worker.c", "        mn_event_notify(&c->trainer);\n", "", "mn_engine",
        kinds=("thread",)),
    "worker: a task is as old as the one before": Mutant(
        WORKERS + "mn_worker.c", "mn_a64_store_relaxed(&w->me->since_ns, 0);", "", "mn_engine",
        kinds=("plain",)),
    "sweep: tasks stay with the dead": Mutant(
        WORKERS + "mn_tasks.c", "if (st == MN_TASK_RUNNING && mn_word_worker(word) == worker) {",
        "if (0) {", "mn_worker"),
    "sweep: everybody's tasks": Mutant(
        WORKERS + "mn_tasks.c", "if (st == MN_TASK_RUNNING && mn_word_worker(word) == worker) {",
        "if (st == MN_TASK_RUNNING) {", "mn_worker"),
    "sweep: envelopes are inherited": Mutant(
        WORKERS + "mn_tasks.c", "    d->flags = 0;\n", "", "mn_worker"),
    "sweep: the lease stays": Mutant(
        ENGINE + "mn_engine_step.c", "    mn_arena_leases_forget(&e->leases, w);\n", "",
        "mn_worker"),
    "sweep: done envelopes go with the lease": Mutant(
        ENGINE + "mn_engine_step.c", "            mn_batch_accept_some(e, b);\n", "",
        "mn_worker"),
    "results: envelopes may lie anywhere": Mutant(
        ENGINE + "mn_checked_results.c",
        "    if (rc == -EINVAL) {\n        return MN_DAMAGE_ENVELOPE;\n    }\n",
        "", "mn_checked_results", kinds=("plain",)),
    "results: parts may end anywhere": Mutant(
        ENGINE + "mn_checked_results.c", " && out->bytes <= len - out->at", "",
        "mn_checked_results", kinds=("plain",)),
    "results: reports may say anything": Mutant(
        ENGINE + "mn_checked_results.c", "sound = sound && known && there;",
        "sound = sound && there;", "mn_checked_results", kinds=("plain",)),
    "results: done while somebody runs it": Mutant(
        ENGINE + "mn_checked_results.c",
        "\n        || mn_worker_says(mn_worker_at(&e->shm, r->worker), task)", "",
        "mn_checked_results", kinds=("plain",)),
    "watch: one that has worked may start once more": Mutant(
        WORKERS + "mn_process_watch.c", "(state == MN_WORKER_STARTING && !worked)",
        "(state == MN_WORKER_STARTING && (worked || !worked))", "mn_checked_results",
        kinds=("fork",)),
    "autoscale: the last worker may be asked to leave": Mutant(
        ENGINE + "mn_autoscale.c", " && left > e->cfg.min_workers",
        " && left < UINT32_MAX", "mn_engine", kinds=("plain",)),
    "crew: a worker that has worked and left ends no row": Mutant(
        WORKERS + "mn_crew.c", "    else if (tasks != m->tasks) {", "    else if (0) {", "mn_crew",
        kinds=("plain",)),
    "watch: one that has just started is a liar": Mutant(
        WORKERS + "mn_process_watch.c", "    if (!may_be(w, state, worked)) {",
        "    if (!may_be(w, state, mn_a32_load_acquire(&m->worked) != 0)) {",
        "mn_checked_results", kinds=("fork",)),
    "reserve: a worker that goes on has stopped": Mutant(
        ENGINE + "mn_engine_step.c",
        "                e->idle_ns = 0;\n                return false;", "                return false;",
        "mn_engine", kinds=("plain",)),
    "reserve: none is kept for the head": Mutant(
        ENGINE + "mn_engine_step.c", "reserve = head || e->plan == NULL ? 0 :",
        "reserve = head || e->plan != NULL ? 0 :", "mn_engine", kinds=("plain",)),
    "reserve: kept for a head that has it": Mutant(
        ENGINE + "mn_engine_step.c", "->nfields != 0) {", "->nfields != 0 && 0) {", "mn_engine",
        kinds=("plain",)),
    "reserve: a first batch is taken for one result": Mutant(
        ENGINE + "mn_engine_step.c", "known : tasks * want;", "known : want;", "mn_engine",
        kinds=("plain",)),
    "watch: who says that he is not there is not looked for": Mutant(
        WORKERS + "mn_process_watch.c", "(there || due) && !note_who(w, worker) && there",
        "there && !note_who(w, worker)", "mn_checked_results", kinds=("fork",)),
    "quarantine: taken back at once": Mutant(
        ENGINE + "mn_quarantine.c", "if (!is_let_go(e, task)) {",
        "if (!is_let_go(e, task) && false) {", "mn_checked_results", kinds=("plain",)),
    "quarantine: whoever is ended is not waited for": Mutant(
        ENGINE + "mn_quarantine.c", "gone && !mn_crew_is_damaged(&e->crew, w)", "gone",
        "mn_checked_results", kinds=("plain",)),
    "quarantine: tried for ever": Mutant(
        WORKERS + "mn_tasks.c", "    r->retries_left--;\n", "", "mn_checked_results",
        kinds=("plain",)),
    "quarantine: collated without its parts": Mutant(
        WORKERS + "mn_tasks.c", "    if (waits) {", "    if (0 && waits) {", "mn_checked_results",
        kinds=("plain",)),
    "claims: what no queue has is believed": Mutant(
        ENGINE + "mn_claims.c", "!mn_tasks_is_queued(&e->tasks, task, word) || ", "",
        "mn_checked_results", kinds=("plain",)),
    "claims: a collate task waits for ever": Mutant(
        ENGINE + "mn_claims.c",
        " || mn_tasks_parts_done(&e->tasks, block_of(e, task))", "",
        "mn_checked_results", kinds=("plain",)),
    "tasks: what was read is offered again": Mutant(
        WORKERS + "mn_tasks.c", "        pass_what_has_ended(t, q);\n", "",
        "mn_checked_results", kinds=("plain",)),
    "claims: entries are believed": Mutant(
        ENGINE + "mn_claims.c", "        mn_crew_damaged(&e->crew, entry.at, MN_DAMAGE_WORD);\n",
        "", "mn_checked_results", kinds=("plain",)),
    "sweep: a word that names the dead is believed": Mutant(
        ENGINE + "mn_engine_step.c", "    doubt_words_of(e, w, &death);\n",
        "    (void)doubt_words_of;\n", "mn_checked_results", kinds=("plain",)),
    "sweep: whoever is about to claim is ended": Mutant(
        ENGINE + "mn_quarantine.c", "            if (damaged) {\n",
        "            if (damaged || !damaged) {\n", "mn_checked_results", kinds=("plain",)),
    "crew: places of nobody are believed": Mutant(
        ENGINE + "mn_engine_step.c", "    mn_crew_clear_empty(&e->crew);\n", "",
        "mn_checked_results", kinds=("plain",)),
    "runqueue: a claim is not said before": Mutant(
        WORKERS + "mn_runqueue.c",
        "mn_a64_store_relaxed(running, (uint64_t)(uint32_t)entry + 1);", "", "mn_runqueue",
        kinds=("fork",)),
    "runqueue: what somebody runs is offered again": Mutant(
        WORKERS + "mn_runqueue.c", "\n           && !mn_entry_names_task(shm, (uint32_t)first)", "",
        "mn_runqueue", kinds=("plain",)),
    "sweep: a claimed event stays silent": Mutant(
        WORKERS + "mn_crew.c", "mn_event_notify_always(&c->shm.ctl->trainer)",
        "mn_event_notify(&c->shm.ctl->trainer)", "mn_crew", kinds=("fork",)),
    "sweep: a worker's claimed event stays silent": Mutant(
        WORKERS + "mn_crew.c", "mn_event_notify_always(&k->event)",
        "mn_event_notify(&k->event)", "mn_crew", kinds=("fork",)),
    "sweep: a wait for a lease goes on": Mutant(
        WORKERS + "mn_crew.c", "mn_event_notify_always(&k->lease_event)",
        "mn_event_notify(&k->lease_event)", "mn_crew", kinds=("fork",)),
    "futex is private": Mutant(
        "csrc/os/mn_futex.c", "SYS_futex, word, op,", "SYS_futex, word, op | 128,", "mn_futex",
        kinds=("fork",)),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_of_the_sources_as_they_are(name: str) -> None:
    mutant = MUTANTS[name]
    text = (ROOT / mutant.path).read_text()
    assert text.count(mutant.old) == 1, f"{mutant.path} has changed: update the mutant"


def run_mutant(builder: Builder, mutant: Mutant) -> subprocess.CompletedProcess:
    return builder.run(
        mutant.program, *mutant.kinds, MINATO_STRESS_SECONDS=str(mutant.seconds),
        MINATO_TEST_DEADLINE=str(60 + 5 * mutant.seconds),
    )  # fmt: skip


#: one mutant for each way in which mutants are run
WAYS = {(m.program, m.build, m.kinds, m.seconds): name for name, m in MUTANTS.items()}

if os.environ.get("MINATO_TEST_MUTANTS"):

    @pytest.mark.limit(600)
    @pytest.mark.parametrize("name", WAYS.values())
    def test_the_source_that_is_not_broken_passes(
        name: str, builders: dict[str, Builder], tmp_path_factory: pytest.TempPathFactory,
    ) -> None:  # fmt: skip
        """Otherwise every mutant would seem to be noticed, for example by a short deadline."""
        mutant = MUTANTS[name]
        must_pass(run_mutant(builder_for(mutant.build, builders, tmp_path_factory), mutant))

    @pytest.mark.limit(600)
    @pytest.mark.parametrize("name", MUTANTS)
    def test_a_broken_source_is_noticed(
        name: str, tmp_path: Path, builders: dict[str, Builder],
        tmp_path_factory: pytest.TempPathFactory,
    ) -> None:  # fmt: skip
        mutant = MUTANTS[name]
        for folder in ("csrc", "tests/c"):
            shutil.copytree(ROOT / folder, tmp_path / folder)
        path = tmp_path / mutant.path
        text = path.read_text()
        assert text.count(mutant.old) == 1
        path.write_text(text.replace(mutant.old, mutant.new))
        builder = Builder(
            tmp_path / "out", mutant.build, tmp_path / "csrc", tmp_path / "tests" / "c", False,
            builder_for(mutant.build, builders, tmp_path_factory), path.name,
        )  # fmt: skip
        done = run_mutant(builder, mutant)
        assert done.returncode != 0, done.stdout
