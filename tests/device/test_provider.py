"""torch's accelerators through the provider's interface, with a module in place of torch.cuda."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minato.device import provider as providers
from minato.device.operators import differs
from minato.device.provider import Provider, provider_for, target, torchs

from .emulated import Emulated


class Cuda:
    """Records the calls of torch.cuda, in order."""

    def __init__(self, devices: int = 2) -> None:
        self.calls: list[Any] = []
        self.devices = devices
        self.on: Any = None

    def is_available(self) -> bool:
        return self.devices > 0

    def device_count(self) -> int:
        return self.devices

    def current_device(self) -> int:
        return 1

    def set_device(self, device: Any) -> None:
        self.calls.append(("set_device", device))

    def Stream(self, device: Any) -> Any:
        return SimpleNamespace(device=device, wait_event=self._waits, cuda_stream=4711)

    def _waits(self, event: Any) -> None:
        self.calls.append(("wait", event))

    def Event(self, enable_timing: bool = False) -> Any:
        event = SimpleNamespace(timed=enable_timing, query=lambda: True)
        event.record = lambda stream: self.calls.append(("record", stream))
        event.elapsed_time = lambda end: 1500.0
        return event

    def current_stream(self, device: Any) -> Any:
        return ("current", device)

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.on = stream
        yield
        self.on = None

    def memory_reserved(self, device: Any) -> int:
        return 30

    def memory_allocated(self, device: Any) -> int:
        return 10

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        return 100, 1000


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    monkeypatch.setattr(torch, "cuda", made)
    return made


def test_provider_methods_call_torch(cuda: Cuda) -> None:
    device = torch.device("cuda:1")
    provider = Provider(device, cuda)
    provider.enter()
    stream = provider.stream()
    assert stream.device == device and provider.current() == ("current", device)
    event = provider.record(stream)
    provider.wait(stream, event)
    assert cuda.calls == [("set_device", device), ("record", stream), ("wait", event)]
    assert event.timed and provider.passed(event) and provider.seconds(event, event) == 1.5
    assert provider.free() == 120
    assert not provider.holds(torch.ones(1))


def test_copies_are_made_on_the_stream_without_waiting(cuda: Cuda) -> None:
    seen: list[Any] = []

    class Source:
        def to(self, device: Any, **options: Any) -> str:
            seen.append((cuda.on, device, options))
            return "there"

    provider = Provider(torch.device("cuda:0"), cuda)
    source: Any = Source()
    assert provider.copy(source, "copies", []) == "there"
    assert seen == [("copies", torch.device("cuda:0"), {"non_blocking": True})]
    assert provider.move(source, waits=False) == "there" and seen[1][0] is None
    provider.move(source, waits=True)  # of memory without another reference
    assert [options["non_blocking"] for _on, _device, options in seen] == [True, True, False]


def test_object_whose_to_takes_only_device(cuda: Cuda) -> None:
    class Simple:
        def to(self, device: Any) -> Any:
            return device

    assert Provider(torch.device("cuda:0"), cuda).move(Simple(), waits=True) == torch.device("cuda:0")


def test_unlockable_memory_is_copied_pageable(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: Any, **_options: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    provider = Provider(torch.device("cuda:0"), cuda)
    tensor = torch.ones(3)
    monkeypatch.setattr(torch, "empty_like", refuse)
    assert provider.host(tensor, False) == (tensor, "pageable")
    monkeypatch.setattr(torch, "empty_like", lambda like, pin_memory: torch.zeros(3))
    made, way = provider.host(tensor, False)
    assert way == "pinned" and made is not tensor and torch.equal(made, tensor)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    assert provider.host(tensor, False) == (tensor, "direct")
    assert provider.host(tensor, True)[1] == "pinned"  # it may lie in a chunk and beyond it


def test_operators_run_on_the_stream(cuda: Cuda, emulated: Emulated) -> None:
    """Everything but torch.cuda itself, on a device whose memory is the CPU's."""
    started: list[int] = []

    class Finisher:
        def run(self, stream: int, job: Any) -> None:
            started.append(stream)
            emulated.finisher.run(stream, job)

    provider = Provider(torch.device("cpu"), cuda)
    provider._finisher = Finisher()  # type: ignore[assignment]
    assert differs(provider) is None and started == [4711] * 4
    made = provider.empty((2, 3), torch.int16, provider.stream())
    assert made.shape == (2, 3) and made.dtype == torch.int16


def test_device_without_index_is_the_current_one(cuda: Cuda) -> None:
    assert torchs(torch.device("cuda")).device == torch.device("cuda:1")
    assert torchs(torch.device("cuda:0")).device == torch.device("cuda:0")


def test_an_index_past_the_last_is_refused(cuda: Cuda) -> None:
    with pytest.raises(ValueError, match=r"sees 2 cuda device\(s\).*local rank"):
        torchs(torch.device("cuda:2"))


def test_missing_device_is_refused(cuda: Cuda) -> None:
    cuda.devices = 0
    with pytest.raises(ValueError, match="finds no cuda device"):
        torchs(torch.device("cuda:0"))


def test_device_without_streams_is_refused() -> None:
    with pytest.raises(ValueError, match="has no streams for it.*Leave out device"):
        torchs(torch.device("mps"))


def test_device_is_initialised_only_when_used(cuda: Cuda) -> None:
    assert target("cuda:7") == torch.device("cuda:7")
    assert provider_for(None) is None and provider_for("cpu") is None
    assert not cuda.calls and "cuda" not in providers._makers
