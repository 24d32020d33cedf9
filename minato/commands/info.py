"""``minato info``: versions, the build, and facts about this machine.

Imports nothing of the package at module level, and gathers every fact by itself. The page must be
complete on a machine where something is missing, above all torch.
"""

from __future__ import annotations

import argparse
import glob
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import platform
import runpy
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

#: the folder of the package
HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
#: how a plan seeds its generator, for people
WAYS = {
    "fill": "in memory (fast)", "torch": "in memory (fast)", "call": "by setstate (slower)",
    "hook": "by a function", "none": "not installed",
}  # fmt: skip
NO_TORCH = "not installed; minato needs it: pip install torch"

#: of a section, by name
Texts = dict[str, str]


class NotImported(Exception):
    """The package did not import."""


def extension(name: str) -> ModuleType:
    """``minato.<name>``, of C or ``text``; loaded by path if the package cannot be imported.

    Raises ImportError if it was not built or does not load.
    """
    if "minato" in sys.modules:
        return importlib.import_module(f"minato.{name}")
    for suffix in (*importlib.machinery.EXTENSION_SUFFIXES, ".py"):
        for path in glob.glob(os.path.join(HERE, name + suffix)):
            spec = importlib.util.spec_from_file_location(f"minato.{name}", path)
            if spec is not None and spec.loader is not None:
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                return module
    raise ModuleNotFoundError(f"minato.{name} was not built", name=f"minato.{name}")


def has_colours() -> bool:
    """Whether the output is a terminal, and NO_COLOR (https://no-color.org/) is not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _part(name: str) -> Any:
    """``minato.<name>``, where the package has imported."""
    if "minato" not in sys.modules:
        raise NotImported
    return importlib.import_module(f"minato.{name}")


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError:
        return None


# ---- versions and build ----------------------------------------------------------------


def _torch_version() -> str:
    torch = _torch()
    return NO_TORCH if torch is None else str(torch.__version__)


def _numpy_version() -> str:
    try:
        return importlib.metadata.version("numpy")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def versions() -> Texts:
    """Versions of minato and of the software that it needs."""
    return {
        "minato": _asked(lambda: runpy.run_path(os.path.join(HERE, "_version.py"))["__version__"]),
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "torch": _asked(_torch_version),
        "NumPy": _asked(_numpy_version),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "C library": " ".join(platform.libc_ver()) or "unknown",
    }


def _built(name: str, why_not: str) -> str:
    try:
        extension(name)
    except ModuleNotFoundError as error:
        if error.name == f"minato.{name}":
            return why_not
        return f"built, but does not load: {error}"
    except ImportError as error:
        return f"built, but does not load: {error}"
    return "built"


def torch_extension() -> str:
    how = (
        "not built; optional. To get it, with torch and a C++ compiler installed, run in "
        "minato's sources: pip install --no-build-isolation ."
    )
    state = _built("_torch", how)
    if state == "built":
        state += f" for torch {extension('_torch').torch_version}"
    return state


def photos() -> str:
    """What minato.ops decodes JPEG files with."""
    found = _part("ops.jpeg").find_library()
    return "Pillow alone: there is no libjpeg-turbo" if found is None else str(found.path)


def build() -> Texts:
    """Which extension modules there are, and how they were compiled."""
    missing = "missing: this installation is broken, install minato again"
    if sys.platform != "linux":
        missing = "none: it needs Linux; torch's own loader is used instead"
    return {
        "engine": _built("_core", missing),
        "operators (minato.ops)": _built("_ops", "not built"),
        "torch extension": _asked(torch_extension),
        "device operators": _asked(lambda: _part("device.operators").describe()),
        "compiler": _asked(lambda: extension("_core").compiler),
    }


# ---- how data and seeds travel ---------------------------------------------------------


def _exchange() -> str:
    if _torch() is None:
        return "unknown without torch"
    if _part("transport.torch_bridge").bind():
        return "DLPack C exchange"
    return "torch.frombuffer (this torch offers no DLPack C exchange of a known version)"


def _seeding() -> str:
    """How each global generator gets a sample's state."""
    if "minato" not in sys.modules:
        return "unknown without torch"
    states = _part("seeding.generator_states")
    ways = states.ways([*states.plan_all(), *states.opencv_plans(True)])
    return ", ".join(f"{name} {WAYS[way]}" for name, way in ways.items())


def methods() -> Texts:
    """How minato works here, where there is more than one way."""
    return {"tensors are made by": _asked(_exchange), "generators are seeded": _asked(_seeding),
            "photos are decoded by": _asked(photos)}  # fmt: skip


# ---- the machine -----------------------------------------------------------------------


def _cpus() -> str:
    usable = extension("_core").machine()["cpus"]
    affinity = len(os.sched_getaffinity(0))
    text = f"{usable} usable of {os.cpu_count()}"
    if usable < affinity:
        return f"{text}: a control group allows the time of {usable}"
    return f"{text}: CPU affinity allows {affinity}" if affinity < (os.cpu_count() or 1) else text


def _memory() -> str:
    facts = extension("_core").machine()
    total, free = facts["memory_total"], facts["memory_available"]
    sized = extension("text").sized
    return f"{sized(free)} available of {sized(total)} (with the limits of control groups)"


def _start_methods() -> str:
    methods = multiprocessing.get_all_start_methods()
    default = multiprocessing.get_start_method(allow_none=True) or methods[0]
    return ", ".join(f"{m} (default)" if m == default else m for m in methods)


def _shm() -> str:
    facts = os.statvfs("/dev/shm")
    free, total = facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize
    sized = extension("text").sized
    return f"{sized(free)} free of {sized(total)} (minato's batches do not use it)"


def _accelerator() -> str:
    torch = _torch()
    if torch is None:
        return "unknown without torch"
    built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else ""
    found = getattr(torch, "accelerator", None)
    if found is not None and found.is_available():
        kind = found.current_accelerator()
        return f"{found.device_count()} x {kind}" + (f", {built}" if built else "")
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x cuda, {built}"
    return f"none found, {built}" if built else "none (torch is built without one)"


def machine() -> Texts:
    """Returns what this process may use."""
    return {
        "CPUs": _asked(_cpus),
        "memory": _asked(_memory),
        "start methods": _asked(_start_methods),
        "/dev/shm": _asked(_shm),
        "accelerator": _asked(_accelerator),
        "copies to CUDA": _asked(lambda: _part("device.provider").describe()),
    }


# ---- the page --------------------------------------------------------------------------


def _asked(fact: Callable[[], str]) -> str:
    """The fact, or the reason why it is unknown: one missing fact must not hide the others."""
    try:
        return fact()
    except NotImported:
        return "unknown: minato did not import"
    except Exception as error:
        return f"unknown ({type(error).__name__}: {error})"


def facts() -> dict[str, Texts]:
    """All facts by section; each value is text for people."""
    return {"versions": versions(), "build": build(), "methods": methods(), "machine": machine()}


def render(found: dict[str, Texts]) -> str:
    """The facts as text, one per line."""
    lines = []
    for section, entries in found.items():
        lines.append(section)
        lines += [f"  {name:24}{value}" for name, value in entries.items()]
    return "\n".join(lines)


def run(argv: list[str]) -> int:
    """``minato info [--json]``; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="minato info", description="Prints versions, the build, and facts about this machine."
    )
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")
    options = parser.parse_args(argv)
    found = facts()
    print(json.dumps(found, indent=2) if options.json else render(found))
    return 0
