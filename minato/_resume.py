"""Position of a loader as plain data: ``state_dict`` and ``load_state_dict``.

What is kept: how many batches the caller was handed, the base seed, the epoch, the state
of the generator that the sampler drew from when the epoch began, and what samples have
cost.  The sampler is run again and what was delivered is left out, so nothing depends on
workers; under balanced scheduling the seeds of the rest depend on its place in the
sampler's order only.  ``scheduling="static"`` and iterable datasets keep their randomness
and place in the workers, so there delivered batches are made again and thrown away.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch

VERSION = 1


def pack(data: bytes) -> str:
    """Bytes as text for JSON."""
    return base64.b64encode(zlib.compress(data, 1)).decode("ascii")


def unpack(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def pack_state(state: torch.Tensor) -> str:
    """A generator's state (uint8) as text."""
    return pack(state.numpy().tobytes())


def unpack_generator(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(unpack(text)), dtype=torch.uint8)


@dataclass
class Progress:
    """What one epoch has handed to the caller so far."""

    epoch: int = 0
    base_seed: int | None = None
    generator: torch.Tensor | None = None  # its state as the epoch found it
    head: int = 0  # all batches before this number were delivered
    beyond: set[int] = field(default_factory=set)  # and these after it
    finished: bool = False

    def delivered(self, number: int) -> None:
        self.beyond.add(number)
        while self.head in self.beyond:
            self.beyond.remove(self.head)
            self.head += 1

    def has(self, number: int) -> bool:
        return number < self.head or number in self.beyond

    @property
    def count(self) -> int:
        return self.head + len(self.beyond)


def state_of(progress: Progress, costs: Any, generator: torch.Generator | None) -> dict:
    """The state as plain data that survives torch.save and JSON."""
    state: dict[str, Any] = {"version": VERSION, "epoch": progress.epoch}
    if progress.finished or progress.base_seed is None:
        # Between epochs: the next one begins with the generator as it is now.
        state.update(
            epoch=progress.epoch + bool(progress.finished),
            base_seed=None,
            generator=None if generator is None else pack_state(generator.get_state()),
            delivered=0,
            delivered_beyond=[],
        )
        if progress.base_seed is not None:
            state["last_base_seed"] = progress.base_seed
    else:
        state.update(
            base_seed=progress.base_seed,
            generator=pack_state(progress.generator),
            delivered=progress.head,
            delivered_beyond=sorted(progress.beyond),
        )
    if costs is not None:
        state["costs"] = [pack(part) for part in costs.save()]
    return state


def check_state(state: Any) -> dict:
    """The state, or ValueError that says what is wrong with it."""
    if not isinstance(state, dict) or "version" not in state:
        raise ValueError(
            "this is not a state of minato.DataLoader (no 'version'); pass what "
            "state_dict() returned"
        )
    if state["version"] != VERSION:
        raise ValueError(
            f"the state was written by another version of minato (format {state['version']}, "
            f"this one reads {VERSION})"
        )
    missing = {"epoch", "base_seed", "generator", "delivered", "delivered_beyond"} - set(state)
    if missing:
        raise ValueError(f"the state is incomplete: {', '.join(sorted(missing))} missing")
    return state
