"""Whether ``minato analyze`` names the limit of programs whose limit is known.

    python benchmarks/analyze/run.py                 # all of them, about nine minutes
    python benchmarks/analyze/run.py lock step       # some of them

Each program is run under ``minato analyze``; the first line of the answer must name its limit, and
where the step's own speed is known, it must be found within 10 %. The exit status is the number of
programs of which either is wrong.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent

#: program -> (kinds of report.json that are right, words of the first line)
KNOWN = {
    "disk": ("storage", "read()"),
    "slow_transform": ("work", "Denoise"),
    "stragglers": ("stragglers", "times the median"),
    "step": ("step", "the step"),
    "lock": ("lock", "tokenize()"),
    "nothing": ("nothing", "Nothing to gain"),
    "interpreter": ("interpreter", "processes"),
    "queued": ("work", "decode()"),
}
#: program -> least seconds of its study: a check of stragglers has whole epochs
LEAST_S = {"stragglers": 120}
#: program -> samples a second that its step could take, were there no loading
CEILINGS = {"queued": 8 / 0.03}


def analyzed(name: str, budget: int, folder: Path) -> dict:
    """The report of one program."""
    data = [str(folder / "files")] if name == "disk" else []
    out = folder / name
    subprocess.run(
        [sys.executable, "-m", "minato", "analyze", "--anyway", "--budget", f"{budget}s", "--out", str(out),
         "--", sys.executable, str(HERE / f"{name}.py"), *data],
        check=True, stdout=subprocess.PIPE, cwd=HERE.parents[1],
    )  # fmt: skip
    return json.loads((out / "report.json").read_text())


def main() -> int:
    parser = argparse.ArgumentParser(prog="run.py", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=list(KNOWN), help=", ".join(KNOWN))
    parser.add_argument("--budget", type=int, default=30, help="seconds of each study")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the reports there")
    options = parser.parse_args()
    wrong = checks = within = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.keep or temporary)
        for name in options.names:
            began = time.monotonic()
            budget = max(options.budget, LEAST_S.get(name, 0))
            found = analyzed(name, budget, folder)
            kind, word = KNOWN[name]
            line = found["limit"]["line"]
            right = found["limit"]["kind"] == kind and word in line
            if name in CEILINGS:
                asked, ceiling = found["watched"]["asked"], CEILINGS[name]
                right = right and abs(asked / ceiling - 1) < 0.1
                line += f"\n       the step takes {asked:.4g} samples/s, truly {ceiling:.4g}"
            wrong += not right
            took = time.monotonic() - began
            print(f"{'right' if right else 'WRONG'}  {name} ({took:.0f} s)\n       {line}", flush=True)
            for change in found["helps"] + found["dropped"]:
                if change["checked"] is not None:
                    checks, within = checks + 1, within + change["settled"]
                    print(
                        f"       {change['what']}: predicted {change['predicted']:.4g}, checked "
                        f"{change['checked']:.4g} of {change['base']:.4g} samples/s, "
                        f"{'within' if change['settled'] else 'OUTSIDE'} {change['bound']:.0%}",
                        flush=True,
                    )
    print(f"{len(options.names) - wrong} of {len(options.names)} named")
    print(f"{within} of {checks} checked predictions within their bound")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
