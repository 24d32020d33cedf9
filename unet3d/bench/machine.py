"""The environment of a measurement: the machine, its GPU, the versions, the commit."""
from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from unet3d.parallel import available_cores

ROOT = Path(__file__).resolve().parents[2]
SIBLINGS = Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")
PACKAGES = ("numpy", "minato", "nvidia-dali-cuda120", "nvidia-dali-cuda130", "nvidia-ml-py")


def processor() -> str:
    """The name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines
                 if line.startswith("model name")), platform.processor())


def memory_gib() -> float | None:
    """The machine's memory."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2 ** 30, 1)
    except (AttributeError, ValueError, OSError):
        return None


def commit() -> str | None:
    """The commit of this source tree, with a plus sign if it was changed; None if unknown."""
    def git(*command: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *command], check=True,
                              capture_output=True, text=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def version(package: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpu(device: torch.device) -> dict[str, Any] | None:
    """Name, memory and software of a GPU; None for the CPU."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    return {"name": found.name, "capability": f"{found.major}.{found.minor}",
            "memory_gib": round(found.total_memory / 2 ** 30, 1), "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version()}


def facts(device: torch.device = torch.device("cpu")) -> dict[str, Any]:
    """Everything about this machine that affects speed."""
    threads = SIBLINGS.read_text().strip() if SIBLINGS.exists() else None
    return {"cpu": processor(), "cores": available_cores(), "first_core": threads,
            "kernel": platform.release(),
            "python": platform.python_version(), "torch": torch.__version__,
            "packages": {name: found for name in PACKAGES if (found := version(name))},
            "gpu": gpu(device), "commit": commit()}
