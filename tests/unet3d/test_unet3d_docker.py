"""Files named by the Dockerfile exist; it cannot be built without an engine."""
from __future__ import annotations

import re
from pathlib import Path

import pytest

from unet3d import loaders

ROOT = Path(loaders.__file__).resolve().parents[1]
FILE = ROOT / "unet3d" / "Dockerfile"
TEXT = FILE.read_text()


def instructions() -> list[tuple[str, str]]:
    """The name and the argument of each instruction, its lines joined."""
    lines = [line for line in TEXT.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, rest) for name, _, rest in (
        line.partition(" ") for line in joined.splitlines() if line.strip())]


def test_image_is_based_on_one_with_nvcc():
    """Images named "devel" have the compiler and headers of CUDA; "base" and "runtime" have not."""
    (base,) = [rest for name, rest in instructions() if name == "FROM"]
    assert re.fullmatch(r"(nvidia/cuda|pytorch/pytorch):\d[\w.-]*-devel(-[\w.]+)?", base)


def test_image_without_device_operators_is_not_built():
    """The install is followed by a test of the file that setup.py makes by nvcc. No copied file
    can be taken for it."""
    setup = (ROOT / "setup.py").read_text()
    (kernels,) = re.findall(r'^    KERNELS = "(.*)"', setup, re.M)
    (install,) = [rest for name, rest in instructions() if name == "RUN" and " -e " in rest]
    steps = [step.strip() for step in install.split("&&")]
    assert "pip install" in steps[0] and f"test -s {kernels}" in steps[1:]
    assert "MINATO_CUDA" not in TEXT
    ignored = FILE.with_name("Dockerfile.dockerignore").read_text().split()
    assert f"**/*{Path(kernels).suffix}" in ignored and "**/*.so" in ignored


def test_image_installs_the_projects_extras():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.search(r'^ARG EXTRAS="([^"]*)"', TEXT, re.M).group(1).split(",")
    assert "dali" in extras and set(extras) <= set(project["optional-dependencies"])


def test_image_commands_are_accepted(tmp_path, capsys, monkeypatch):
    """The documented training command, up to the data that it does not find."""
    from unet3d import settings

    lines = [line.removeprefix("#").strip().rstrip("\\") for line in TEXT.splitlines()]
    words = " ".join(lines).split("unet3d.train", 1)[1].split("--ipc host:")[0].split()
    monkeypatch.setattr(settings, "check_amp", lambda *_given: None)  # this machine is no GPU's
    made = settings.parse("", words)
    assert made.args.loader in loaders.LOADERS and made.preset.target_dice == 0.908
