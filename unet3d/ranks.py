"""The processes of a distributed run (torchrun), or the single one."""
from __future__ import annotations

import argparse
import atexit
import os
import sys
from typing import Any, NoReturn

import torch
from torch import distributed


def _device(text: str) -> str:
    """An argument that names a device of this machine."""
    try:
        kind = torch.device(text).type
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a device of torch") from error
    if kind not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{text!r}: cpu, cuda or cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError(f"{text!r}: torch {torch.__version__} finds no GPU here")
    return text


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the option --device."""
    parser.add_argument("--device", type=_device, help="cpu, cuda or cuda:N (default: cuda where "
                        "there is one)", default="cuda" if torch.cuda.is_available() else "cpu")


class Ranks:
    """Joins the process group that torchrun's environment describes, if it does."""

    def __init__(self, device: str) -> None:
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0")) if self.world > 1 else 0
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if self.world > 1 else 1
        backend = "nccl" if device.startswith("cuda") else "gloo"
        if device == "cuda":  # set_device needs a device with a number
            device = f"cuda:{os.environ.get('LOCAL_RANK', '0') if self.world > 1 else 0}"
        elif here > 1:  # all ranks share a named GPU, which NCCL refuses
            backend = "gloo"
        self.device = torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.world > 1:
            distributed.init_process_group(backend)

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, in rank order, on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        distributed.all_gather_object(values, value)
        return values

    def any(self, flag: bool) -> bool:
        """Whether the argument is true on any rank."""
        if self.world == 1:
            return flag
        votes = torch.tensor([int(flag)], device=self.device)
        distributed.all_reduce(votes)
        return bool(votes.item())

    def close(self) -> None:
        """Leave the process group."""
        if self.world > 1:
            distributed.destroy_process_group()


def leave(status: int) -> NoReturn:
    """End the process, including everything registered for its exit.

    The interpreter of a rank must not be finalised. gloo's threads outlive the process group once
    a module was distributed over it, and release tensors later. Python ends a thread
    that asks for a finalised interpreter by unwinding it, through functions of torch that
    abort then.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        sys.exit(status)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
