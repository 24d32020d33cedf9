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
    "mn_free_extents": Program(("malloc", "calloc", "free"), without="mn_arena"),
    "mn_runqueue": Program(without="mn_tasks_and_retries"),
    "mn_engine": Program(("mn_cputime_process", "mn_engine_poll")),
    "mn_worker": Program(),
    "mn_native_worker": Program(),
    "mn_checked_results": Program(),
    "mn_arena": Program(),
    "mn_pagelocks": Program(),
    "mn_crew": Program(("mn_proc_ended", "mn_proc_kill_pidfd"), "mn_tasks_and_retries"),
    "mn_waits": Program(),
    "mn_plan": Program(),
    "mn_cache": Program(("fstatfs", "fcntl", "pread", "pwrite", "fallocate")),
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

    ``fault`` is a macro that turns on a planted fault (tests/test_mutants.py); ``made`` then has
    the objects of all sources that do not mention it.
    """

    def __init__(
        self, folder: Path, build: str, made: Builder | None = None, fault: str = ""
    ) -> None:
        name, self.sanitizers = BUILDS[build]
        compiler = COMPILERS[name]
        if compiler is None:
            pytest.skip(f"{name} is not installed")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.tests = folder, ROOT / "tests" / "c"
        self.command = [compiler, *COMMON, *compile_flags(self.sanitizers),
                        f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'minato' / 'include'}"]  # fmt: skip
        self.warnings = ["-w", f"-D{fault}"] if fault else WARNINGS
        emulated = name == "aarch64"  # without libraries of that machine's
        self.links = ["-static"] if emulated else []
        if emulated:
            self.command += ["-include", str(ROOT / "tests" / "c" / "mn_emulator.h")]
        self.prefix = [str(EMULATOR)] if emulated else self.find_prefix()
        sources = [path for f in FOLDERS for path in sorted((ROOT / "csrc" / f).glob("*.c"))]
        if fault:
            sources = [source for source in sources if fault in source.read_text()]
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
            # no-builtin: clang assumes that a malloc succeeds if it can see the free. O1: the test's
            # own code need not be fast.
            check_call([*self.command, *self.warnings, "-O1", "-fno-builtin", f"-I{self.tests}",
                        source, *objects, *wraps, *self.links, "-lm", "-o", str(out)])  # fmt: skip
        return out

    def run(self, name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        """Processes that a program has left when it ends are ended, too: they may hold its output
        open, and its end would not be seen. The caches of a program that fails are deleted."""
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
                if process.wait() != 0:  # else it has to leave none
                    for folder in ("/dev/shm", "/var/tmp"):
                        shutil.rmtree(f"{folder}/minato-test-{process.pid}", ignore_errors=True)
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
            assert source.stem == "mn_base" or "mn_fault_hook" not in names.stdout


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
