"""Files named by the Dockerfile exist; it cannot be built without an engine."""
from __future__ import annotations

import re
from pathlib import Path

import pytest

from unet3d import loaders

ROOT = Path(loaders.__file__).resolve().parents[1]
TEXT = (ROOT / "unet3d" / "Dockerfile").read_text()


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
