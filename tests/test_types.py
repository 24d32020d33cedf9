"""Types: the stub of the extension against the extension, and what users' checkers see."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import minato

ROOT = Path(__file__).resolve().parents[1]

mypy = pytest.mark.skipif(
    importlib.util.find_spec("mypy") is None, reason="mypy is not installed"
)

#: strict, but for what torch leaves untyped. What needs an ignore changes with the versions
#: of torch, NumPy and mypy, so one too many is no error.
CONFIG = """
[mypy]
strict = True
warn_unused_ignores = False
untyped_calls_exclude = torch
ignore_missing_imports = True
[mypy-torch.*,numpy.*]
follow_imports = skip
follow_imports_for_stubs = True
[mypy-minato.*,{followed}]
follow_imports = silent
"""
#: where the names of torch that minato uses are defined; mypy takes more than twice as long for the rest
FOLLOWED = (
    "numpy.*,torch,torch._C.*,torch._ops,torch._tensor,torch._utils,torch.accelerator.*,torch.autograd,"
    "torch.autograd.grad_mode,torch.compiler,torch.cpu.*,torch.cuda.*,torch.distributed,"
    "torch.distributed.distributed_c10d,torch.jit,torch.jit._script,torch.multiprocessing.*,torch.nn,"
    "torch.nn.modules,torch.nn.modules.container,torch.nn.modules.module,torch.nn.parameter,torch.random,"
    "torch.serialization,torch.storage,torch.torch_version,torch.types,torch.utils,torch.utils._contextlib,"
    "torch.utils._pytree,torch.utils.data.*,torch.version,torch.xpu.*"
)


def check(
    *command: str, cwd: Path, path: Path, followed: str = "minato"
) -> subprocess.CompletedProcess[str]:
    """Runs mypy, which reads torch and NumPy only where they are followed."""
    (cwd / "mypy.ini").write_text(CONFIG.format(followed=followed))
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MYPYPATH": str(path)},
        capture_output=True,
        text=True,
        timeout=240,
    )


def stubtest(where: Path, **stubs: str) -> subprocess.CompletedProcess[str]:
    """The stubs alone, so that the rest of the package is not read."""
    (where / "minato").mkdir()
    (where / "minato" / "__init__.pyi").touch()
    shutil.copy(ROOT / "minato" / "_records.py", where / "minato")
    for name, stub in stubs.items():
        (where / "minato" / f"{name}.pyi").write_text(stub)
    modules = [f"minato.{name}" for name in stubs]
    return check(
        "mypy.stubtest", *modules, "--mypy-config-file", "mypy.ini", cwd=where, path=where
    )


STUB = (ROOT / "minato" / "_core.pyi").read_text()
CACHE_STUB = (ROOT / "minato" / "_cache.pyi").read_text()


@mypy
def test_stub_agrees_with_the_extension(tmp_path: Path) -> None:
    done = stubtest(tmp_path, _core=STUB, _cache=CACHE_STUB)
    assert done.returncode == 0, done.stdout + done.stderr


@mypy
def test_a_stub_that_disagrees_is_noticed(tmp_path: Path) -> None:
    line = "    def trainer_lives(self) -> bool: ...\n"
    assert line in STUB
    done = stubtest(tmp_path, _core=STUB.replace(line, "    def trainer_dies(self) -> bool: ...\n"))
    assert done.returncode == 1
    assert "trainer_dies" in done.stdout and "trainer_lives" in done.stdout


def test_keywords_are_those_of_the_sources() -> None:
    """C functions do not expose their arguments, but their tables of keywords do."""
    sources = (ROOT / "csrc" / "py").glob("*/*.c")
    text = "".join(p.read_text() for p in sources if p.parent.name != "ops")
    tables = re.findall(r"static char \*names\[\] = \{([^}]*)NULL\}", text)
    assert len(tables) > 4
    known = set()
    for node in ast.walk(ast.parse(STUB)):
        if isinstance(node, ast.FunctionDef):
            names = [a.arg for a in [*node.args.args, *node.args.kwonlyargs]]
            known.add(tuple(n for n in names if n not in ("self", "cls")))
    unknown = [t for t in tables if tuple(re.findall(r'"(\w+)"', t)) not in known]
    assert not unknown


def test_loader_is_generic_like_torchs() -> None:
    assert minato.DataLoader[int].__origin__ is minato.DataLoader
    assert minato.DataLoader[torch.Tensor].__args__ == (torch.Tensor,)


USE = """
from typing import Any
from minato import DataLoader
from torch.utils.data import DataLoader as TorchLoader, Dataset


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


loader = DataLoader(Numbers(), batch_size=2, scheduling="balanced")
reveal_type(loader)
reveal_type(loader.dataset)
same: TorchLoader[int] = loader


def train(batches: DataLoader[int]) -> None:
    for batch in batches:
        print(batch)


train(loader)
DataLoader(Numbers(), max_retries="many")
DataLoader(Numbers(), scheduling="statik")
waited = loader.stats()["wait"]
reveal_type(waited["share"] if waited is not None else None)
"""


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> str:
    """mypy's output for the package, a program that uses it, and a mistake in a copy of
    one of its files: one run, because reading torch takes longest."""
    where = tmp_path_factory.mktemp("typed")
    (where / "use.py").write_text(textwrap.dedent(USE))
    package = where / "src" / "minato"
    shutil.copytree(ROOT / "minato", package, ignore=shutil.ignore_patterns("*.so"))
    text = (package / "iterators" / "inline.py").read_text()
    (package / "iterators" / "_mistaken.py").write_text(text + "\nInlineIterator(None, Options.of(None))._number.upper()\n")
    done = check(
        "mypy", "use.py", "src/minato", "--config-file", "mypy.ini",
        cwd=where, path=where / "src", followed=FOLLOWED,
    )  # fmt: skip
    assert "Found" in done.stdout, done.stdout + done.stderr
    return done.stdout


def errors(text: str, file: str) -> list[str]:
    return [line for line in text.splitlines() if ": error:" in line and file in line]


@mypy
def test_type_checker_sees_public_types(checked: str) -> None:
    assert 'Revealed type is "minato.loader.DataLoader[int]"' in checked
    assert 'Revealed type is "torch.utils.data.dataset.Dataset[int]"' in checked
    assert 'Revealed type is "float | None"' in checked or "Union[builtins.float, None]" in checked
    retries, scheduling = errors(checked, "use.py")
    assert '"max_retries"' in retries and "Literal['balanced', 'static']" in scheduling


@mypy
def test_the_package_itself_has_no_type_errors(checked: str) -> None:
    [mistake] = errors(checked, "_mistaken.py")
    assert '"int" has no attribute "upper"' in mistake
    assert [e for e in errors(checked, "src/minato") if "_mistaken.py" not in e] == []


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(minato.__file__).parent / "py.typed").exists()
