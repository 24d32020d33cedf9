"""minato without its engine: systems that are not Linux, and the names imported from minato."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import setuptools
import torch.utils.data

import minato

ROOT = Path(__file__).resolve().parents[1]


# ---- names that are imported together with DataLoader --------------------------------------


def is_machinery(name: str) -> bool:
    """Of DataPipes, but for the two classes that datasets are derived from."""
    module = getattr(getattr(torch.utils.data, name), "__module__", "")
    return ".datapipes." in module and name not in ("IterDataPipe", "MapDataPipe")


def test_names_of_torch_are_here_too() -> None:
    names = {n for n in torch.utils.data.__all__ if not n.startswith("_") and not is_machinery(n)}
    assert {"Subset", "random_split", "WeightedRandomSampler"} < names
    assert names <= set(minato.__all__)
    for name in names - {"DataLoader"}:
        assert getattr(minato, name) is getattr(torch.utils.data, name), name


def test_all_is_sorted_and_there() -> None:
    assert minato.__all__ == sorted(minato.__all__)
    assert all(hasattr(minato, name) for name in minato.__all__)


# ---- other systems -------------------------------------------------------------------------

#: what each process lacks
BEGIN = {
    "darwin": "",
    "win32": """
import multiprocessing.context, multiprocessing.sharedctypes, os, select, signal
for name in ("fcntl", "resource", "pwd", "grp"):
    sys.modules[name] = None
for owner, names in (
    (multiprocessing.context, ("ForkContext", "ForkServerContext")),
    (os, ("fork", "register_at_fork", "getuid")),
    (select, ("poll", "epoll")),
    (signal, ("SIGKILL", "SIGBUS", "SIGCHLD", "strsignal")),
):
    for name in names:
        delattr(owner, name)
""",
}
#: hides an editable installation
HEAD = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "frozen" in getattr(f, "__module__", "")]
"""
SCRIPT = """
import json, warnings
import torch, torch.utils.data
import numpy as np
LOAD = {load!r}
{begin}
sys.platform = {platform!r}
with warnings.catch_warnings():
    warnings.simplefilter("error")
    import minato, minato.ops
    from minato import DataLoader, Dataset, RandomSampler

class Squares(Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return index * index

def refuses(call):
    try:
        call()
    except Exception as error:
        return f"{{type(error).__name__}}: {{error}}"
    return "nothing"

if __name__ == "__main__":
    out = {{"warned": []}}
    warnings.showwarning = lambda message, *_: out["warned"].append(str(message))
    warnings.simplefilter("always")
    make = lambda **kw: DataLoader(Squares(), batch_size=4, **kw)
    for workers in LOAD:
        options = dict(num_workers=workers, memory_limit="1GiB")
        if workers:
            options.update(autoscale=(1, 4))
        out[f"batches {{workers}}"] = [b.tolist() for b in make(**options)]
    loader = make(shuffle=True, generator=torch.Generator().manual_seed(5), num_workers=LOAD[-1])
    loader.set_epoch(4)
    warned = list(out["warned"])
    state = json.loads(json.dumps(loader.state_dict()))
    out["epoch"] = state["user_epoch"]
    again = make(shuffle=True, generator=torch.Generator(), num_workers=LOAD[-1])
    again.load_state_dict(state)
    out["same order"] = [b.tolist() for b in again] == [b.tolist() for b in loader]
    plain = make()
    next(iter(plain))
    out["counted"] = plain.state_dict()["delivered"]
    out["verdict"] = plain.stats()["verdict"], loader.stats()["verdict"]
    cache = minato.Cache("1MiB")

    @cache.memoize
    def count(n):
        return np.arange(n)

    out["part"] = count(9, part=slice(2, 4)).tolist()
    out["warned"] = warned
    out["refused"] = [
        refuses(lambda: make(autoscale=(1, 0), num_workers=1)),
        refuses(lambda: make(num_workers=1, worker_type="native")),
        refuses(lambda: make(scheduling="fast")),
        refuses(lambda: minato.check_determinism(Squares())),
        refuses(lambda: minato.ops.Pipeline([minato.ops.RandFlip()])(np.zeros((1, 2, 2, 2)))),
    ]
    from minato.__main__ import main
    out["top"] = main(["top", "1"])
    with minato.patch_torch():
        theirs = torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=LOAD[-1])
        out["patched"] = [b.tolist() for b in theirs] == [b.tolist() for b in make()]
        out["patched"] = out["patched"] and "verdict" in theirs.stats()
    print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as it is installed where no extension is built."""
    folder = tmp_path_factory.mktemp("bare")
    shutil.copytree(ROOT / "minato", folder / "minato",
                    ignore=shutil.ignore_patterns("*.so", "__pycache__"))  # fmt: skip
    return folder


def python(folder: Path, script: str) -> subprocess.CompletedProcess:
    path = folder / "script.py"
    path.write_text(HEAD + script)
    return subprocess.run(
        [sys.executable, str(path)], env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True, text=True, timeout=120, cwd=folder,
    )  # fmt: skip


@pytest.mark.parametrize("platform, load", [("darwin", [0, 2]), ("win32", [0])])
def test_another_system(bare: Path, platform: str, load: list[int]) -> None:
    done = python(bare, SCRIPT.format(begin=BEGIN[platform], platform=platform, load=load))
    assert done.returncode == 0, done.stderr
    out: dict[str, Any] = json.loads(done.stdout)
    squares = [[n * n for n in range(k, k + 4)] for k in (0, 4, 8)]
    assert all(out[f"batches {workers}"] == squares for workers in load)
    [warning] = out["warned"]
    assert platform in warning and "torch's own loader is used" in warning
    assert "memory_limit" in warning
    assert out["epoch"] == 4 and out["same order"] and out["patched"]
    assert out["counted"] == 1 and out["part"] == [2, 3]
    assert out["verdict"][0].startswith("The trainer loads by itself.")
    assert out["top"] == 1 and platform in done.stderr
    if load[-1]:
        assert platform in out["verdict"][1]
    expected = ["ValueError: autoscale", f"ValueError: worker_type='native'.*{platform}",
                "ValueError: scheduling", f"RuntimeError: minato.check_determinism.*{platform}",
                f"RuntimeError: minato.ops.*{platform}"]  # fmt: skip
    for text, refused in zip(expected, out["refused"], strict=True):
        assert re.match(text, refused), refused


def test_linux_without_engine_names_the_build_command(bare: Path) -> None:
    done = python(bare, "import minato")
    assert done.returncode == 1
    assert "ImportError: " in done.stderr and "not built" in done.stderr
    assert "pip install -e ." in done.stderr


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_extensions_are_built_on_linux_alone(platform: str, monkeypatch: Any) -> None:
    given: list[dict] = []
    monkeypatch.setattr(setuptools, "setup", lambda **kw: given.append(kw))
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(ROOT / "setup.py"))
    names = {e.name for e in given[0]["ext_modules"]}
    assert ({"minato._core", "minato._ops", "minato._cache"} <= names) == (platform == "linux")
    assert bool(names) == (platform == "linux")
