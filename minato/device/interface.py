"""The interface of a device that batches are copied to.

``copies.py`` decides what is copied when, and what must wait for what, using only this
interface. Tests can therefore substitute a device that finishes late, out of
order or never.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch


class Driver(NamedTuple):
    """Functions of a driver that lock pages, as arguments of ``Engine.set_page_driver``."""

    enter: int
    leave: int
    lock: int
    unlock: int
    context: int
    flags: int


class Job(NamedTuple):
    """What ``Finisher.run`` finishes: the images or labels of a batch. Places are addresses on the
    device."""

    which: int  # 0: images, 1: labels
    dtypes: tuple[int, int]  # codes of those before and after
    shape: tuple[int, ...]  # samples, channels, depth, height, width
    source: int
    target: int
    recipes: int
    steps: int  # of each recipe
    windows: int = 0  # if set, samples are windows of the cases, and there is no source
    cases: int = 0
    n_cases: int = 0


class Provider(Protocol):
    """One device. No other code looks into its streams and events."""

    device: torch.device
    #: exceptions of copy() when the device has no memory left
    no_room: tuple[type[BaseException], ...]

    def enter(self) -> None:
        """Declares that the calling thread works for this device only from now on."""

    def stream(self) -> Any:
        """A new stream; copies on it run one after the other."""

    def current(self) -> Any:
        """The calling thread's current stream."""

    def host(self, tensor: torch.Tensor, copies: bool) -> tuple[torch.Tensor, str]:
        """The tensor in memory that copies can read in the background, and how: a key of
        ``Copies.through``. The tensor itself, or with ``copies``, or if necessary, a copy in
        page-locked memory."""

    def copy(self, tensor: torch.Tensor, stream: Any, cuts: list[int]) -> torch.Tensor:
        """Starts copying a tensor to the device, in parts if no copy may cross the offsets in cuts.
        The tensor must not change until an event recorded after this call has passed."""

    def record(self, stream: Any) -> Any:
        """An event that passes when all current work of the stream is done."""

    def wait(self, stream: Any, event: Any) -> None:
        """Later work of the stream starts after the event. The host does not wait."""

    def passed(self, event: Any) -> bool:
        """Whether an event has passed; does not wait."""

    def seconds(self, begin: Any, end: Any) -> float | None:
        """Time between two passed events; None if the device cannot tell."""

    def uses(self, tensor: torch.Tensor, stream: Any) -> None:
        """The tensor's device memory is not reused before the work that the stream has when
        the tensor dies is done."""

    def driver(self) -> Driver | None:
        """Functions that lock pages for the device; None if there are none. Called in the
        thread that has called enter()."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is on the device."""

    def move(self, data: Any, waits: bool) -> Any:
        """Moves an object with torch's ``to()`` to the device on the calling thread's own stream.
        waits: return when the move is done."""

    def free(self) -> int | None:
        """Free bytes of the device; None if it does not say."""

    def operators(self) -> str | None:
        """Why operators of minato.ops do not run on the device; None if they do. Called before
        empty() and finish()."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, stream: Any) -> torch.Tensor:
        """Device memory for the stream's output. Raises like copy()."""

    def finish(self, stream: Any, job: Job) -> None:
        """Starts finishing volumes, in the stream's order. Device memory that was made for this
        stream may be released at once."""
