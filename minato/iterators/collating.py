"""Samples that did not travel as rows become a batch in the training process."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from .._core import Engine
from ..errors import Failure
from ..transport.layouts import Layout, NoLayout, alike, is_default_collate
from ..transport.rows_or_whole import Shape
from ..transport.uncollatable import by_index, why
from ..workers.worker_info import as_in_worker
from .failures import note
from .position import Position


def _on_cpu() -> contextlib.AbstractContextManager[Any]:
    """Where workers collate, whatever device the program's own tensors are made on."""
    elsewhere = torch.get_default_device().type != "cpu"
    return torch.device("cpu") if elsewhere else contextlib.nullcontext()


class CollatesHere:
    """The loader's collate_fn where workers have left that to the trainer."""

    engine: Engine

    def __init__(self, loader: Any, position: Position, shape: Shape) -> None:
        self.shape = shape
        self.position = position
        self.dataset = loader.dataset
        self.collate_fn = loader.collate_fn
        self._num_workers: int = loader.num_workers

    def batch(
        self, place: tuple[int, Any], samples: list[Any], worker: int, layout: Layout | None
    ) -> Any:
        """The batch of samples that did not travel as rows, or a Failure in torch's words.
        place: its number and indices; layout: by which they should have travelled."""
        try:
            with _on_cpu():
                data = self.collated(samples, worker)
        except Exception as error:
            where = f"in DataLoader worker process {worker}"
            reason = why(samples, by_index(place[1])) if is_default_collate(self.collate_fn) else ""
            failure = Failure.of(error, f"{where}. minato: {reason}" if reason else where)
            failure.note = note(*place)
            return failure
        if layout is not None:
            self.shape.misfit()
        return data

    def collated(self, samples: list[Any], worker: int) -> object:
        """Samples that are alike prove a layout, and are placed as rows by it; what torch
        makes of any others depends on its being in a worker."""
        shape = self.shape
        if not shape.whole and alike(samples):
            if shape.layout is None:
                try:
                    proof = self.collate_fn(samples)
                    shape.learn(Layout.prove(samples[0], proof, len(samples)))
                except NoLayout:
                    shape.whole = True
            if shape.layout is not None:
                data = self._placed(samples, shape.layout)
                if data is not None:
                    return data
        try:
            with self.as_worker(worker):
                return self.collate_fn(samples)
        except RuntimeError as error:
            if "</torch_" not in str(error):
                raise
        # In a worker torch collates into files of /dev/shm, one a tensor. Where there is no room or
        # no descriptor for these, it need not be there: nothing of this has to travel any more.
        return self.collate_fn(samples)

    def _placed(self, samples: list[Any], layout: Layout) -> object:
        """The batch in memory of minato's own, or None when a sample does not fit."""
        objects: list[list[Any]] = [[] for _ in samples]
        block = self.engine.place(samples, layout.core, objects)
        if block is None:
            return None
        try:
            return self.engine.decode(block, layout.core, objects)
        finally:
            self.engine.retire(block)

    def as_worker(self, number: int) -> contextlib.AbstractContextManager[None]:
        """torch's collate goes another way where get_worker_info() says it is in a worker."""
        return as_in_worker(
            id=number,
            num_workers=self._num_workers,
            seed=self.position.base_seed + number,
            dataset=self.dataset,
        )
