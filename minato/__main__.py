"""``python -m minato`` and the command ``minato``. One module per subcommand."""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from ._not_linux import CORE, NEEDS_LINUX
from ._version import __version__

#: name -> (module with ``run(argv) -> exit status``, description)
COMMANDS: dict[str, tuple[str, str]] = {
    "info": ("minato.commands.info", "print versions, the build, and facts about this machine"),
    "doctor": ("minato.commands.doctor", "check this machine for problems, and name the fixes"),
    "analyze": ("minato.analyze.command", "find what limits a training program and what helps"),
    "cache": ("minato.commands.cache_files", "list, check and remove caches in this machine's memory"),
    "ranks": ("minato.commands.slow_ranks", "find the rank that holds up a step, from traces"),
    "top": ("minato.commands.top", "show the loaders of a running process, live"),
    "recode": ("minato.analyze.recode", "copy a folder of images, smaller and faster to read"),
}
#: commands that need the engine
NEED_ENGINE = ("analyze", "cache", "recode", "top")


def _parser() -> argparse.ArgumentParser:
    commands = "\n".join(f"  {name:10} {text}" for name, (_module, text) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="minato",
        description="minato, a drop-in replacement for torch.utils.data.DataLoader",
        epilog=f"commands:\n{commands}\n\n`minato COMMAND --help` shows the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"minato {__version__}")
    parser.add_argument("command", metavar="COMMAND", help="one of the commands below")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs a command line (default ``sys.argv``); returns the exit status."""
    parser = _parser()
    given = sys.argv[1:] if argv is None else argv
    if not given:
        parser.print_help(sys.stderr)
        return 2
    options = parser.parse_args(given)
    if options.command not in COMMANDS:
        known = ", ".join(COMMANDS)
        print(
            f"minato: there is no command {options.command!r}; there is: {known}",
            file=sys.stderr,
        )
        return 2
    if options.command in NEED_ENGINE and not CORE:
        print(f"minato {options.command}: {NEEDS_LINUX}", file=sys.stderr)
        return 1
    module = importlib.import_module(COMMANDS[options.command][0])
    try:
        # argparse would drop a "--" that comes first, and `minato analyze` needs it
        status: int = module.run(given[given.index(options.command) + 1 :])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of `minato ... | head` has exited
        # Python would try to write the rest when it ends, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
