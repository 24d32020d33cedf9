"""Collates samples that did not travel as rows, in the trainer process."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from .._core import Engine
from ..errors import Failure
from ..transport.layouts import Layout, NoLayout, alike, is_default_collate
from ..transport.rows_or_whole import SampleTransport
from ..transport.uncollatable import by_index, why
from ..worker_info import as_in_worker
from .batch_errors import note
from .position import Position


def _on_cpu() -> contextlib.AbstractContextManager[Any]:
    """Makes new tensors on the CPU, as in workers, whatever the program's default device."""
    elsewhere = torch.get_default_device().type != "cpu"
    return torch.device("cpu") if elsewhere else contextlib.nullcontext()


class CollatesHere:
    """Runs the loader's collate_fn where workers have left that to the trainer."""

    engine: Engine

    def __init__(self, loader: Any, position: Position, shape: SampleTransport) -> None:
        self.shape = shape
        self.position = position
        self.dataset = loader.dataset
        self.collate_fn = loader.collate_fn
        self._num_workers: int = loader.num_workers

    def batch(
        self, place: tuple[int, Any], samples: list[Any], worker: int, layout: Layout | None
    ) -> Any:
        """The batch of samples that did not travel as rows, or a Failure with torch's text.
        place: batch number and indices; layout: the layout that they should have had."""
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
        """Collates samples. Samples of equal structure prove a layout and are placed in rows.
        For others, torch's collate depends on running in a worker, so that is simulated."""
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
        # In a worker, torch collates into files of /dev/shm, one per tensor. If there is no space
        # or no descriptor for them, collate without: this batch does not travel any more.
        return self.collate_fn(samples)

    def _placed(self, samples: list[Any], layout: Layout) -> object:
        """The batch in minato's own memory, or None if a sample does not fit."""
        objects: list[list[Any]] = [[] for _ in samples]
        block = self.engine.place(samples, layout.core, objects)
        if block is None:
            return None
        try:
            return self.engine.decode(block, layout.core, objects)
        finally:
            self.engine.retire(block)

    def as_worker(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Makes get_worker_info() report a worker; torch's collate then uses shared memory."""
        return as_in_worker(
            id=number,
            num_workers=self._num_workers,
            seed=self.position.base_seed + number,
            dataset=self.dataset,
        )
