"""First on PYTHONPATH of a program that ``minato analyze`` watches. Runs the sitecustomize that it
hides, and loads ``watch.py`` by its path: neither torch nor minato is imported here.
"""

from __future__ import annotations

import os
import sys


def _run_the_hidden_one(here: str) -> None:
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != here]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _watch(here: str) -> None:
    from importlib.util import module_from_spec, spec_from_file_location

    name = "_minato_analyze_watch"
    file = os.path.join(os.path.dirname(here), "watch.py")
    spec = spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


_here = os.path.dirname(os.path.abspath(__file__))
try:
    _watch(_here)
except Exception as error:  # the program runs all the same
    print(f"minato analyze: this program cannot be watched: {error!r}", file=sys.stderr)
_run_the_hidden_one(_here)
