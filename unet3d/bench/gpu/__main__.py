"""Starts the command, or reports missing packages: on a machine that is rented by the minute, a
traceback is a poor answer."""
from __future__ import annotations

import importlib.util
import sys

#: without these nothing can be measured; the report lists other missing packages
NEEDED = ("torch", "numpy", "scipy", "tqdm")


def lacking() -> list[str]:
    """The packages that are not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def main() -> int:
    """Command line entry; returns the exit status."""
    if lacked := lacking():
        print(f"error: {sys.executable} has no {', '.join(lacked)}: install with pip, or name "
              "another Python", file=sys.stderr)
        return 1
    from unet3d.bench.gpu import command

    return command.main()


if __name__ == "__main__":
    sys.exit(main())
