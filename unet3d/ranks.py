"""The processes of a distributed run (torchrun), or the single one."""
from __future__ import annotations

import os
from typing import Any

import torch
from torch import distributed


class Ranks:
    """Joins the process group that torchrun's environment describes, if it does."""

    def __init__(self, device: str) -> None:
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0")) if self.world > 1 else 0
        if device == "cuda" and self.world > 1:
            device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        self.device = torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.world > 1:
            distributed.init_process_group("nccl" if self.device.type == "cuda" else "gloo")

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, in rank order, on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        distributed.all_gather_object(values, value)
        return values

    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""
        if self.world == 1:
            return flag
        votes = torch.tensor([int(flag)], device=self.device)
        distributed.all_reduce(votes)
        return bool(votes.item())

    def close(self) -> None:
        """Leave the process group."""
        if self.world > 1:
            distributed.destroy_process_group()
