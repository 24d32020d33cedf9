"""The command ``minato``.

It is a module outside the package, because ``import minato`` fails without torch, and that is when
``minato info`` is needed.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def _alone(path: Path) -> ModuleType:
    """Imports a module of the package that needs no other part, without importing the package."""
    spec = importlib.util.spec_from_file_location(f"minato_command{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main(argv: list[str] | None = None) -> int:
    """Runs the command; without torch, only ``info`` works. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        from minato.__main__ import main as whole
    except ImportError as error:
        if error.name != "minato":  # another problem: the traceback helps
            raise
        spec = importlib.util.find_spec("minato")
        if spec is None or spec.origin is None:
            raise
        if argv[:1] == ["info"]:
            info = _alone(Path(spec.origin).parent / "commands" / "info.py")
            return info.run(argv[1:])
        print(f"minato: {error}", file=sys.stderr)
        return 1
    return whole(argv)


if __name__ == "__main__":
    sys.exit(main())
