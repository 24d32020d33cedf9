"""What copying batches to a device asks of it, in few verbs.

``copies.py`` decides what is copied when and what must wait for what; it does so by these
verbs alone, so that the tests can put in their place a device that finishes late, out of
order or never.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from .pagelocked_rows import Driver


class Job(NamedTuple):
    """What ``Finisher.run`` takes behind its stream."""

    which: int  # 0: images, 1: labels
    dtypes: tuple[int, int]
    shape: tuple[int, ...]  # samples, channels, depth, height, width
    source: int
    target: int
    recipes: int
    steps: int
    windows: int = 0  # with these no source, but cases
    cases: int = 0
    n_cases: int = 0


class Provider(Protocol):
    """One device. Streams and events are its own; nobody else looks into them."""

    device: torch.device
    #: what copy() raises where the device has no memory left
    no_room: tuple[type[BaseException], ...]

    def enter(self) -> None:
        """The calling thread works for this device from now on, and for no other."""

    def stream(self) -> Any:
        """A new stream: copies on it are made one after the other."""

    def current(self) -> Any:
        """The stream that the calling thread's work goes to."""

    def host(self, tensor: torch.Tensor, copies: bool) -> tuple[torch.Tensor, str]:
        """The tensor where copies can read it while the program goes on, and how that came
        about: a key of ``Copies.through``. Itself, unless copies, or a copy of it in page-locked
        memory."""

    def copy(self, tensor: torch.Tensor, stream: Any, cuts: list[int]) -> torch.Tensor:
        """Begins to copy it to the device; in parts, where no copy may reach across some of its
        bytes. It must stay as it is until an event that is recorded after this has passed."""

    def record(self, stream: Any) -> Any:
        """An event: passed once all that the stream has to do by now is done."""

    def wait(self, stream: Any, event: Any) -> None:
        """What the stream is given from now on begins after the event. The host goes on."""

    def passed(self, event: Any) -> bool:
        """Whether it has, without waiting."""

    def seconds(self, begin: Any, end: Any) -> float | None:
        """Between two that have passed; None where the device cannot tell."""

    def uses(self, tensor: torch.Tensor, stream: Any) -> None:
        """The tensor's memory on the device is not used again before what the stream has to
        do at the time when the tensor dies is done."""

    def driver(self) -> Driver | None:
        """What locks pages for the device; None: nothing does, or it is not known how. Asked
        in the thread that has entered."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether it is on the device."""

    def move(self, data: Any, waits: bool) -> Any:
        """Anything with torch's ``to()``, on the device, by the calling thread's own stream.
        waits: returns when it is there."""

    def free(self) -> int | None:
        """Bytes of the device that can be had; None where it does not say."""

    def operators(self) -> str | None:
        """Why no operators of minato.ops run on the device; None: they do. Asked before the
        next two are."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, stream: Any) -> torch.Tensor:
        """Memory of the device for what the stream will write. Raises as copy() does."""

    def finish(self, stream: Any, job: Job) -> None:
        """Begins to finish volumes, in the stream's order. Memory of the device that was made
        for this stream may be let go of at once."""
