"""The machine of an experiment, in a process that leaves nothing on the GPU: its facts, its bus
speed, and what cannot be measured on it. Prints JSON.

    python -m unet3d.bench.gpu.probe --device cuda
"""
from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from unet3d.bench import bounds, machine, usage
from unet3d.bench.gpu import cgroup
from unet3d.ranks import add_device

BYTES, REPEATS = 1 << 28, 8
PMUS = Path("/sys/bus/event_source/devices")
# 14 workers prepare two batches of seven samples of 10 MB each.
SHARED, ENOUGH_SHARED = Path("/dev/shm"), 2 << 30
MEMINFO, ENOUGH_MEMORY = Path("/proc/meminfo"), 8 << 30


def copy_rate(device: torch.device, pinned: bool) -> float:
    """Bytes a second of large copies to a GPU, the best of several."""
    source = torch.zeros(BYTES, dtype=torch.uint8, pin_memory=pinned)
    target = torch.empty(BYTES, dtype=torch.uint8, device=device)
    best = float("inf")
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3)
    return BYTES / best


def measured(device: torch.device) -> dict[str, float | None]:
    """Memory (which grows on some virtual machines), and MB/s of one core's copying and of the bus
    from pinned and from pageable memory."""
    on_gpu = device.type == "cuda"
    return {"memory_gib": machine.memory_gib(),
            "core_copy_mb_s": bounds.copy_rate(BYTES) / 1e6,
            "pinned_mb_s": copy_rate(device, True) / 1e6 if on_gpu else None,
            "pageable_mb_s": copy_rate(device, False) / 1e6 if on_gpu else None}


def on_host(device: torch.device) -> str | None:
    """Why the operators of minato.ops do not run on a GPU; None if a trial succeeded."""
    try:
        from minato.device.provider import provider_for
    except ImportError as error:
        return str(error)
    provider = provider_for(device)
    return provider.operators() if provider is not None else "it is not an accelerator"


def memory_available() -> int | None:
    """Bytes that the system could give now; some virtual machines start with little, and grow."""
    try:
        lines = dict(line.split(":") for line in MEMINFO.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return None


def shared_memory() -> int | None:
    """Bytes that torch's workers can send batches through; None if unknown."""
    try:
        room = os.statvfs(SHARED)
    except OSError:
        return None
    return room.f_frsize * room.f_blocks


def missing(device: torch.device) -> list[str]:
    """Returns what cannot be measured on this machine, in sentences."""
    found = []
    if device.type != "cuda":
        found.append("without a GPU: its use, the bus and the overlap of copies are not "
                     "measured, and samples a second say nothing of an accelerator")
    else:
        if usage.gpu_percent() is None:
            found.append("GPU use is not measured: pip install nvidia-ml-py")
        if reason := on_host(device):
            found.append(f"minato's operators run on the host: {reason}")
    counters = sorted(path.name for pattern in ("uncore_imc*", "amd_umc*", "arm_cmn*")
                      for path in PMUS.glob(pattern))
    found.append("memory traffic of the host is not measured: " + (
        f"the counters {', '.join(counters[:2])}... are here, but this program does not read "
        "them (perf stat -a does, beside it)" if counters else
        "the system shows no counters of its memory controllers"))
    available = memory_available()
    if available is not None and available < ENOUGH_MEMORY:
        found.append(f"{available / 2**30:.1f} GiB of memory are available now: minato's loaders take "
                     "half of that at most, and their rows are the slower for it")
    room = shared_memory()
    if room is not None and room < ENOUGH_SHARED:
        found.append(f"{SHARED} has {room >> 20} MiB: torch's loaders may fail there, and their rows "
                     "with them (mount -o remount,size=16g /dev/shm)")
    try:
        with cgroup.limited(1 << 30):
            pass
    except cgroup.Unavailable as error:
        found.append(str(error))
    return found


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    parser = argparse.ArgumentParser(prog="unet3d.bench.gpu.probe", description=__doc__)
    add_device(parser)
    device = torch.device(parser.parse_args(argv).device)
    found: dict[str, Any] = {"machine": machine.facts(device), "measured": measured(device),
                             "missing": missing(device)}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
