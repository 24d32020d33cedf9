"""What stats() and its verdict say of copies to a device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from minato.device.copies import Copies
from minato.observe.verdict import Facts, verdict


def test_device_counters_are_documented() -> None:
    text = (Path(__file__).parents[2] / "docs/api.md").read_text("utf-8")
    text = next(line for line in text.splitlines() if line.startswith("| `device` |"))
    for name in Copies("cuda:0").summary():
        assert re.search(rf"\b{name}\b", text), name


def _device(**changes: Any) -> dict[str, Any]:
    found = {**Copies("cuda:0").summary(), "batches": 10, "bytes": 10**9, "bandwidth": 5e9}
    return {**found, **changes}


def _stats(device: dict[str, Any], total: float = 0.5) -> dict[str, Any]:
    wait = {"total": total, "max": 0.1, "between": 10.0 - total, "share": total / 10}
    memory = {"used": 0, "limit": 1}
    return {"deaths": 0, "wait": wait, "device": device, "workers": [], "memory": memory,
            "scheduler": None, "locality": None}  # fmt: skip


def test_the_verdict_on_copies() -> None:
    said = verdict(_stats(_device(stalled=4.0), total=0.0), 10, Facts())
    assert said.startswith("cuda:0 waits 40% of the time for copies: batches of 100 MB")
    assert "at 5 GB/s" in said
    said = verdict(_stats(_device(waited=0.4)), 10, Facts())
    assert "0.4 s for the thread that hands batches to cuda:0" in said
    said = verdict(_stats(_device(stalled=0.1, waited=0.1), total=0.1), 10, Facts())
    assert said.startswith("The trainer hardly waits")
