"""The table of benchmarks/simulate.py, in which the policies schedule in virtual time."""

from __future__ import annotations

from pathlib import Path

import pytest
import simulate


def test_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "table.png"
    assert simulate.main(["--seeds", "1", "--only", "constant", "--detail", "--plot",
                          str(target)]) == 0  # fmt: skip
    out = capsys.readouterr().out
    assert "constant 5 ms (8, 8)" in out and "first batch, ms" in out
    assert target.stat().st_size > 1000
    with pytest.raises(SystemExit):
        simulate.main(["--only", "no such case"])
