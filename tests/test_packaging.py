"""What ``pip install .`` builds and installs, from a copy of the tree into clean venvs."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from device.emulated import environment_without

ROOT = Path(__file__).resolve().parents[1]
SITE = Path(sysconfig.get_path("purelib"))
NOT_SOURCE = shutil.ignore_patterns(
    ".*", "build", "dist", "data", "runs", "site", "tests", "*.so", "*.fatbin", "*.egg-info",
    "__pycache__",
)

#: Data that a module may write to, by name; all else must be const. First the tables that
#: CPython's API requires to be writable and that are never written, then data written once, at
#: import (NumPy's table), then hooks that only tests set.
WRITABLE = re.compile(
    r"""(\w+_)?(methods|slots|spec|getset|members|functions)(\.\d+)? | names\.\d+
      | (mn_)?\w+_module(_def)?
      | \w*numpy_api\w* | \w*PyArray_\w+
      | mn_fault_hook
      | mn_guard_\w+ | mn_filters  # of signals' handlers, which are the process's
      | mn_proc_known  # and so is its own number,
      | mn_lifelines | mn_cache_clients  # and the files that its forks close
      | completed\.\d+ | __\w+ | _DYNAMIC | _GLOBAL_OFFSET_TABLE_ | _edata | _end
    """,
    re.VERBOSE,
)


def run(*command: object, **kwargs: object) -> subprocess.CompletedProcess[str]:
    """Runs a command; its output is part of the failure when it fails."""
    done = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, timeout=300, **kwargs
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done


def tree(to: Path) -> Path:
    shutil.copytree(ROOT, to, ignore=NOT_SOURCE)
    return to


def index_answers() -> bool:
    """Whether the package index can be reached: an isolated build fetches setuptools."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary"]
    command += [":none:", "--disable-pip-version-check", "setuptools>=77"]
    try:
        with tempfile.TemporaryDirectory() as to:
            done = subprocess.run([*command, "-d", to], capture_output=True, timeout=60)
            return done.returncode == 0
    except subprocess.TimeoutExpired:
        return False


#: appended to the copy's setup.py: lists the build environment
PROBE = """
import importlib.metadata as m
with open("build-environment.txt", "w") as file:
    found = [d for d in m.distributions() if "_vendor" not in str(d.locate_file(""))]
    file.write(" ".join(d.metadata["Name"] for d in found))
with open("target-torch.txt", "w") as file:
    print(*installed_torch() or (), sep="\\n", file=file)
"""


class Built(NamedTuple):
    """A wheel, whether it was made in an isolated environment, and what that contained."""

    wheel: Path
    isolated: bool
    environment: set[str]
    torch: list[str]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    pytest.importorskip("pip")
    isolated = index_answers()
    where = tmp_path_factory.mktemp("wheel")
    options = [] if isolated else ["--no-build-isolation"]
    source = tree(where / "tree")
    with (source / "setup.py").open("a") as setup:
        setup.write(PROBE)
    run(
        sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", *options, "-w", where / "out",
        "--disable-pip-version-check", source,
        env={**os.environ, "MINATO_WERROR": "1", "MINATO_TORCH": "0", "MINATO_OPTIMIZE": "-O1"},
    )  # fmt: skip
    (wheel,) = (where / "out").glob("*.whl")
    held = (source / "build-environment.txt").read_text().lower().split()
    target = (source / "target-torch.txt").read_text().splitlines()
    return Built(wheel, isolated, set(held), target)


def environment(where: Path, wheel: Path, *visible: Path) -> Path:
    """A venv with the wheel installed, nothing downloaded; its bin folder."""
    venv.create(where, symlinks=True)
    python = where / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig as s; print(s.get_path('purelib'))").stdout.strip())
    (site / "visible.pth").write_text("".join(f"{path}\n" for path in visible))
    run(
        sys.executable, "-m", "pip", "--python", python, "install", "--no-index",
        "--disable-pip-version-check", "-q", wheel,
    )  # fmt: skip
    return where / "bin"


def clean() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MINATO"))}


# ---- the wheel -------------------------------------------------------------------------


def test_wheel_holds_required_files(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        names = wheel.namelist()
        (metadata,) = [n for n in names if n.endswith(".dist-info/METADATA")]
        head = email.message_from_bytes(wheel.read(metadata))
    assert any(re.fullmatch(r"minato/_core\.\S+\.so", n) for n in names)
    for name in ("minato/py.typed", "minato/_core.pyi", "minato/__main__.py",
                 "minato/include/minato/ops.h"):
        assert name in names
    assert "minato_command.py" in names
    assert any(n.endswith("LICENSE") for n in names)
    assert head["License-Expression"] == "Apache-2.0"
    needed = [n for n in head.get_all("Requires-Dist") or [] if "extra ==" not in n]
    assert [re.split(r"\W", n)[0] for n in needed] == ["numpy"]


def test_wheel_holds_nothing_else(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        tops = {n.split("/")[0] for n in wheel.namelist()}
    (info,) = [t for t in tops if t.endswith(".dist-info")]
    assert tops == {"minato", "minato_command.py", info}


def test_wheel_holds_every_module(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        names = set(wheel.namelist())
    here = {str(p.relative_to(ROOT)) for p in (ROOT / "minato").rglob("*.py*")}
    here = {n for n in here if n.endswith((".py", ".pyi"))}
    assert here <= names


def test_build_needs_numpy_and_setuptools_only(built: Built) -> None:
    if not built.isolated:
        pytest.skip("the package index cannot be reached")
    assert {"setuptools", "numpy"} <= built.environment
    assert built.environment - {"minato-loader"} <= {"setuptools", "numpy", "wheel"}


def test_isolated_build_finds_target_torch(built: Built) -> None:
    """Its headers, by the target's folders: nothing is imported or fetched for that."""
    torch = pytest.importorskip("torch")
    folder, version = built.torch
    assert Path(folder) == Path(torch.__file__).parent
    assert torch.__version__.startswith(version + ".")


def test_torch_extension_can_be_left_out(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        assert not [n for n in wheel.namelist() if n.startswith("minato/_torch.c")]


# ---- code for CUDA devices ---------------------------------------------------------------

#: runs what setup.py does besides the extensions
KERNELS = """
import setuptools
given = {}
setuptools.setup = lambda **arguments: given.update(arguments)
exec(open("setup.py").read())
command = given["cmdclass"]["build_ext"](setuptools.Distribution({"name": "minato"}))
command.build_lib, command.extensions = "lib", []
command.ensure_finalized()
command.run()
print(command.get_outputs())
"""
FATBIN = "minato/device/kernels.fatbin"


def test_wheel_holds_device_code_if_nvcc_exists(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        assert (FATBIN in wheel.namelist()) == (shutil.which("nvcc") is not None)


def test_the_extensions_link_nothing_of_cuda(libraries: list[Path]) -> None:
    for library in libraries:
        needed = run("readelf", "-d", library).stdout
        assert "cuda" not in needed and "(NEEDED)" in needed


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_code_for_devices_is_optional(tmp_path: Path) -> None:
    source = tree(tmp_path / "tree")
    built, without = source / "lib" / FATBIN, environment_without("nvcc", tmp_path / "bin")
    strict = {**os.environ, "MINATO_WERROR": "1"}
    assert FATBIN in run(sys.executable, "-c", KERNELS, cwd=source, env=strict).stdout
    made = built.stat()
    assert made.st_size > 10_000
    run(sys.executable, "-c", KERNELS, cwd=source, env=strict)
    assert built.stat().st_mtime_ns == made.st_mtime_ns  # nothing was changed
    for env in (without, {**strict, "MINATO_CUDA": "0"}):
        built.touch()  # of an earlier build
        said = run(sys.executable, "-c", KERNELS, cwd=source, env=env).stdout
        assert "no kernels for CUDA devices" in said and FATBIN not in said
        assert not built.exists()
    failing = tmp_path / "nvcc"
    failing.write_text(
        '#!/bin/sh\n[ "$1" != --list-gpu-arch ] || exec echo compute_90\n'
        'for last; do :; done\necho half >"$last"\necho broken >&2\nexit 1\n'
    )
    failing.chmod(0o755)
    env = {**clean(), "NVCC": str(failing)}
    said = run(sys.executable, "-c", KERNELS, cwd=source, env=env).stdout
    assert "left out" in said and not any(built.parent.iterdir())


# ---- the extensions --------------------------------------------------------------------


@pytest.fixture(scope="module")
def libraries() -> list[Path]:
    """Those that `make build` made, without the one that is compiled against torch."""
    if shutil.which("nm") is None:
        pytest.skip("no nm")
    return sorted(set(Path(ROOT, "minato").glob("*.so")) - set(Path(ROOT, "minato").glob("_torch.*")))


def writable(library: Path) -> list[str]:
    """Names of writable data, relocated constants left out."""
    relro = {".data.rel.ro", ".init_array", ".fini_array", ".dynamic", ".got", ".tm_clone_table"}
    found = []
    for line in run("nm", "-f", "sysv", library).stdout.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 7 and cells[2] in "DdBbC" and cells[6] not in relro:
            found.append(cells[0])
    return found


def test_extensions_export_their_init_only(libraries: list[Path]) -> None:
    assert libraries
    for library in libraries:
        lines = run("nm", "-D", "--defined-only", library).stdout.splitlines()
        names = [line.split()[-1].split("@")[0] for line in lines]
        assert names == [f"PyInit_{library.name.split('.')[0]}"]


def test_extensions_have_no_mutable_globals(libraries: list[Path]) -> None:
    for library in libraries:
        bad = [n for n in writable(library) if not WRITABLE.fullmatch(n)]
        assert not bad, f"{library.name} has mutable globals: {bad}"


def test_assertions_are_compiled_in(libraries: list[Path]) -> None:
    """Python's own compiler flags would leave them out. Each holds the name of its file."""
    (core,) = (library for library in libraries if library.name.startswith("_core"))
    assert b"csrc/engine/mn_engine_next.c" in core.read_bytes()


def test_costs_are_fetched_ahead(libraries: list[Path]) -> None:
    """Compilers leave out what only asks for memory to be in cache. It is 100 ns a sample."""
    (core,) = (library for library in libraries if library.name.startswith("_core"))
    code = run("objdump", "-d", "--no-show-raw-insn", core).stdout
    assert re.search(r":\s+(prefetch\w+|prfm)\s", code)


def test_planted_mutable_global_is_seen(tmp_path: Path) -> None:
    source = tmp_path / "bad.c"
    source.write_text("static int counter = 1;\nint f(void) { return counter++; }\n")
    run("gcc", "-shared", "-fPIC", "-o", tmp_path / "bad.so", source)
    assert [n for n in writable(tmp_path / "bad.so") if not WRITABLE.fullmatch(n)] == ["counter"]


@pytest.mark.skipif(
    not (shutil.which("clang") or shutil.which("clang-14")), reason="there is no clang"
)
def test_clang_builds_without_warnings(tmp_path: Path) -> None:
    """-O1 is enough for the front end's warnings and halves the time."""
    clang = shutil.which("clang") or shutil.which("clang-14")
    run(
        sys.executable, "setup.py", "-q", "build_ext", "--build-lib", tmp_path / "lib",
        "--build-temp", tmp_path / "temp",
        cwd=tree(tmp_path / "tree"),
        env={**os.environ, "CC": f"{clang} -pthread", "LDSHARED": f"{clang} -pthread -shared",
             "MINATO_WERROR": "1", "MINATO_TORCH": "0", "MINATO_OPTIMIZE": "-O1"},
    )  # fmt: skip
    assert list((tmp_path / "lib").glob("minato/_core*.so"))


# ---- installed -------------------------------------------------------------------------


def test_installed_beside_torch(built: Built, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    bin_ = environment(tmp_path / "venv", built.wheel, SITE)
    code = (
        "import minato, torch\n"
        "data = torch.utils.data.TensorDataset(torch.arange(12))\n"
        "loader = minato.DataLoader(data, batch_size=4, num_workers=2)\n"
        "print([b[0].tolist() for b in loader], minato.__file__)\n"
        "print(open(minato.get_include() + '/minato/ops.h').readline())\n"
    )
    script = tmp_path / "try.py"
    script.write_text(code)
    out = run(bin_ / "python", script, cwd=tmp_path, env=clean()).stdout
    assert "[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]" in out
    assert str(tmp_path) in out and "the public C interface" in out
    page = run(bin_ / "minato", "info", cwd=tmp_path, env=clean()).stdout
    assert "DLPack C exchange" in page


def test_installed_without_torch(built: Built, tmp_path: Path) -> None:
    """Only NumPy is visible: its folders are linked into a separate one."""
    numpy = tmp_path / "numpy-alone"
    numpy.mkdir()
    for folder in SITE.glob("numpy*"):
        (numpy / folder.name).symlink_to(folder)
    bin_ = environment(tmp_path / "venv", built.wheel, numpy)
    done = subprocess.run(
        [bin_ / "python", "-c", "import minato"],
        cwd=tmp_path, env=clean(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "ImportError: minato needs PyTorch" in done.stderr
    assert "During handling" not in done.stderr
    page = run(bin_ / "minato", "info", cwd=tmp_path, env=clean()).stdout
    assert "pip install torch" in page and re.search(r"engine +built", page)
    done = subprocess.run(
        [bin_ / "minato", "nonsense"],
        cwd=tmp_path, env=clean(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("minato: minato needs PyTorch")
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders with the archive of the sources and a wheel of Python alone, of two copies of the tree
    that differ in the times of their files."""
    folders = []
    for time in 10**9, 10**9 + 86_400:
        source = tree(tmp_path_factory.mktemp("packed") / "tree")
        for path in source.rglob("*"):
            os.utime(path, (time, time))
        run(
            sys.executable, "-c",
            "from setuptools import build_meta as b; b.build_sdist('out'); b.build_wheel('out')",
            cwd=source,
            env={**os.environ, "MINATO_PURE": "1", "SOURCE_DATE_EPOCH": "1700000000"},
        )  # fmt: skip
        folders.append(source / "out")
    return folders


def test_a_wheel_of_python_alone_is_torchs_loader(packed: list[Path], tmp_path: Path) -> None:
    """On the systems that it is for; on Linux it says how to come by the engine."""
    pytest.importorskip("torch")
    (wheel,) = packed[0].glob("*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {str(p.relative_to(ROOT)) for p in (ROOT / "minato").rglob("*.py")} <= names
    bin_ = environment(tmp_path / "venv", wheel, SITE)
    script = tmp_path / "try.py"
    script.write_text(
        "import sys, torch\n"
        "sys.platform = sys.argv[1]\n"
        "import minato\n"
        "data = torch.utils.data.TensorDataset(torch.arange(12))\n"
        "print([b[0].tolist() for b in minato.DataLoader(data, batch_size=4, num_workers=2)])\n"
    )
    done = run(bin_ / "python", script, "darwin", cwd=tmp_path, env=clean())
    assert "[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]" in done.stdout
    assert "torch's own loader is used instead" in done.stderr
    done = subprocess.run(
        [bin_ / "python", script, "linux"], cwd=tmp_path, env=clean(), capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1 and "--force-reinstall --no-deps ." in done.stderr


# ---- the source archive ----------------------------------------------------------------


def test_sdist_holds_the_sources(packed: list[Path]) -> None:
    (archive,) = packed[0].glob("minato_loader-*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {n.split("/", 1)[1] for n in tar.getnames() if "/" in n}
    wanted = {str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.[chm]*")}
    wanted |= {str(p.relative_to(ROOT)) for p in (ROOT / "minato").rglob("*.py*")}
    wanted = {n for n in wanted if "__pycache__" not in n}
    wanted |= {"minato/include/minato/ops.h", "mkdocs.yml", "docs/pictures/top.svg"}
    wanted |= {str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")}
    wanted |= {str(p.relative_to(ROOT)) for p in (ROOT / "examples").rglob("*.[cp]*") if p.is_file()}
    wanted = {n for n in wanted if not n.endswith((".pyc", ".so", ".o"))}
    assert wanted | {"LICENSE", "README.md", "setup.py", "pyproject.toml"} <= names
    assert not [n for n in names if n.endswith((".so", ".o"))]


def test_the_same_sources_make_the_same_bytes(packed: list[Path]) -> None:
    """`make reproduced` compares wheels with extensions, too."""
    found = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in packed]
    assert len(found[0]) == 2 and found[0].keys() == found[1].keys()
    assert [name for name, packed in found[0].items() if packed != found[1][name]] == []


# ---- packages installed for tests and builds ---------------------------------------------


@pytest.mark.parametrize("name", ["test", "wheels"])
def test_installed_packages_are_pinned(name: str) -> None:
    """By versions and hashes, and nothing is asked for that is not."""
    pinned = re.split(r"\n(?=\S)", (ROOT / "requirements" / f"{name}.txt").read_text().strip())
    assert len(pinned) > 10
    for one in pinned:
        assert re.match(r"[\w-]+==[\w.]+( ; .*)? \\\n", one) and "--hash=sha256:" in one, one[:99]
    versions = {one.split("==")[0] for one in pinned}
    text = re.sub(r"#.*", "", (ROOT / "requirements" / f"{name}.in").read_text())
    asked = {re.split(r"[>=]", word)[0] for word in text.split()}
    assert asked - versions == set()
    if name == "test":
        extra = re.search(r"^test = \[(.*)\]", (ROOT / "pyproject.toml").read_text(), re.M)
        assert extra is not None and set(re.findall(r"[\w-]+", extra[1])) <= asked


# ---- the map of csrc -------------------------------------------------------------------


def test_files_that_the_map_names_exist() -> None:
    text = (ROOT / "csrc" / "README.md").read_text()
    names = set(re.findall(r"`((?:\.\./)?\w+/[\w/.]+\.(?:h|c|py))`", text))
    assert len(names) > 30
    root = {n for n in names if n.startswith("tests/")}
    missing = [n for n in names - root if not (ROOT / "csrc" / n).exists()]
    missing += [n for n in root if not (ROOT / n).exists()]
    assert not missing
