"""``minato.DataLoader``: torch's class with another engine under it."""

from __future__ import annotations

import logging
import multiprocessing.context as mp_context
import operator
import os
import re
import warnings
from typing import Any, TypeVar

import torch
from torch.utils.data import Dataset, IterDataPipe, MapDataPipe, _utils
from torch.utils.data.dataloader import _DatasetKind

from ._limits import fair_memory, refused
from ._system import CORE, NEEDS_LINUX, tell_of_torch
from .errors import native_impossible
from .iterators.inline import InlineIterator
from .iterators.memo import memo_of
from .observe.stats import collect
from .state import Sources, opened, state_of

if CORE:
    from .iterators.balanced import BalancedIterator
    from .iterators.ready import ReadyIterator
    from .iterators.static import StaticIterator
    from .workers.native import why_not

log = logging.getLogger("minato")

_T_co = TypeVar("_T_co", covariant=True)

_STANDARD_CONTEXTS = tuple(
    getattr(mp_context, f"{name}Context")
    for name in ("Default", "Fork", "Spawn", "ForkServer")
    if hasattr(mp_context, f"{name}Context")  # not every system has all
)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def parse_bytes(text: int | str) -> int:
    """Bytes from an int or text such as ``"8GiB"``, ``"500 MB"``; raises ValueError."""
    if isinstance(text, int) and not isinstance(text, bool):
        size = text
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", str(text).lower())
        if match is None:
            raise ValueError(
                f"memory_limit should be bytes as int or text such as '8GiB', but got {text!r}"
            )
        number, unit, binary = match.groups()
        scale = 1024 ** " kmgt".index(unit or " ") if binary else _UNITS[unit]
        size = int(float(number) * scale)
    if size <= 0:
        raise ValueError(f"memory_limit should be positive, but got memory_limit={text!r}")
    return size


def _whole_epoch(epoch: Any) -> int:
    """What set_epoch was told as an int that fits into 64 bits."""
    try:
        if isinstance(epoch, bool):
            raise TypeError
        number = operator.index(epoch)
    except TypeError:
        raise TypeError(f"set_epoch() takes a whole number, but got {epoch!r}") from None
    if not 0 <= number < 2**63:
        raise ValueError(f"set_epoch() takes a number from 0 on below 2**63, but got {number}")
    return number


def _check_workers(num_workers: int, autoscale: Any, straggler_threshold: Any) -> None:
    if autoscale is not None:
        pair = isinstance(autoscale, (tuple, list)) and len(autoscale) == 2
        if not pair or any(type(n) is not int for n in autoscale) or autoscale[0] < 1:
            raise ValueError(
                "autoscale option should be None or a pair (low, high) of positive integers, "
                f"but got {autoscale!r}"
            )
        if num_workers == 0:
            raise ValueError("autoscale option needs num_workers > 0")
        if not autoscale[0] <= num_workers <= autoscale[1]:
            raise ValueError(
                f"autoscale={autoscale!r} does not hold num_workers={num_workers}, with which "
                "loading starts: low <= num_workers <= high"
            )
    threshold = straggler_threshold
    number = isinstance(threshold, (int, float)) and not isinstance(threshold, bool)
    if not (threshold is None or threshold == "auto" or (number and threshold > 0)):
        raise ValueError(
            "straggler_threshold option should be 'auto', None or a positive number of seconds, "
            f"but got {threshold!r}"
        )


def _check_batching(loader: Any) -> None:
    if loader.batching not in ("sampler", "ready"):
        raise ValueError(
            f"batching option should be 'sampler' or 'ready', but got {loader.batching!r}"
        )
    if loader.batching == "sampler":
        return
    wrong = None
    if loader._dataset_kind != 0:
        wrong = "a map-style dataset"
    elif loader.in_order:
        wrong = "in_order=False: samples come in the order in which they are ready"
    elif type(loader.batch_sampler) is not torch.utils.data.BatchSampler:
        wrong = "torch's plain BatchSampler: batches are formed anew from its sampler"
    elif loader.scheduling == "static":
        wrong = "scheduling='balanced'"
    elif loader.prefetch_next_epoch:
        wrong = "prefetch_next_epoch=False: batches do not cross the end of an epoch"
    if wrong is not None:
        raise ValueError(f"batching='ready' needs {wrong}")


def _check_ignored(loader: Any) -> None:
    """Raises where an option would have no effect: who asks for something is to get it."""
    threshold, bounds = loader.straggler_threshold, loader.autoscale or (0, 0)
    asked = {
        "seed_per_sample": loader.seed_per_sample,
        "max_retries": loader.max_retries > 1,
        "autoscale": loader.autoscale,
        "straggler_threshold": threshold is not None and threshold != "auto",
        "prefetch_next_epoch": loader.prefetch_next_epoch,
    }
    ignored = [name for name in asked if asked[name]]
    if isinstance(loader.dataset, (IterDataPipe, MapDataPipe)) and loader.num_workers > 0:
        why = "for DataPipes, which torch's own workers serve"
        ignored += ["memory_limit"] if loader.memory_limit is not None else []
    elif loader._dataset_kind == _DatasetKind.Iterable:
        why = (
            "for an iterable dataset: each worker goes through it by itself, with a random "
            "stream of its own, and cannot be replaced"
        )
    elif loader.scheduling == "static":
        why = (
            "with scheduling='static': batches and random streams belong to workers, which "
            "cannot be replaced"
        )
    else:
        why = "without autoscale=(low, high), which says how many standby workers there may be"
        alone = asked["straggler_threshold"] and bounds[0] == bounds[1]
        ignored = ["straggler_threshold"] if alone else []
    if ignored:
        name = ignored[0]
        raise ValueError(f"{name}={getattr(loader, name)!r} has no effect {why}. Leave it out.")


def _check_worker_type(loader: Any) -> None:
    if loader.worker_type not in (None, "process", "native"):
        raise ValueError(
            "worker_type option should be None, 'process' or 'native', but got "
            f"{loader.worker_type!r}"
        )
    if loader.worker_type == "native":
        reason: str | None = "num_workers is 0"
        if loader.num_workers > 0:
            reason = why_not(loader) if CORE else NEEDS_LINUX
        if reason is not None:
            raise ValueError(native_impossible(reason))


def _is_torchs_own() -> bool:
    """Whether nobody has put code of his own in place of what torch's workers run."""
    worker, fetch = _utils.worker, _utils.fetch
    return all(
        getattr(getattr(function, "__code__", None), "co_filename", None) == module.__file__
        for function, module in (
            (worker._worker_loop, worker),
            (fetch._MapDatasetFetcher.fetch, fetch),
            (fetch._IterableDatasetFetcher.fetch, fetch),
        )
    )


class DataLoader(torch.utils.data.DataLoader[_T_co]):
    """Loads batches of a dataset; a drop-in for ``torch.utils.data.DataLoader``.

    All arguments of torch's class, with its defaults, checks and error texts, and:

    Args:
        scheduling: ``"balanced"`` gives samples to whichever worker is free and seeds each
            sample by (seed, epoch, position), so batches do not depend on the number of
            workers. ``"static"`` is torch bit for bit: batch i on worker i mod n with
            torch's random streams. The environment variable ``MINATO_SCHEDULING`` sets the
            default. Iterable datasets always keep torch's streams.
        seed_per_sample: ``None``: on when balanced, off when static and without workers.
            ``False`` leaves each worker its own stream, as torch does; ``True`` with
            ``num_workers=0`` gives the samples of any other number of workers. A dataset may offer
            ``seed_sample(seed: int)`` for generators that minato cannot find (and
            ``cost_hint(index) -> seconds``, a first guess of what a sample costs, and
            ``locality_key(index)``, any hashable: samples of the same key that follow each
            other share what is opened for them, and are made by one worker).
        memory_limit: ceiling in bytes (int, or text such as ``"8GiB"``) of the memory shared
            with workers, batches that the program keeps included; past half of it batches
            are copied to ordinary memory. ``None``: half of what is available,
            shared between the processes that a launcher such as torchrun has started here.
        batching: ``"sampler"`` keeps the sampler's batches. ``"ready"`` fills batches with
            whichever samples are ready first, slow ones with their natural share and none
            further than ``minato.iterators.ready.DISPLACEMENT`` batches from its place; needs
            ``in_order=False``, a map-style dataset and torch's plain ``BatchSampler``. A
            collate_fn of your own then runs in the training process.
        worker_type: ``"process"``: worker processes, for any dataset. ``"native"``: threads
            of this process that make samples in C without the GIL, for datasets that offer a
            ``native_pipeline()`` (``minato.ops.VolumeDataset``); same batches, nothing is
            forked or pickled, a sample in hand is always waited for. ``None``: native
            where the dataset offers it and nothing asks for Python in a worker (a
            collate_fn or worker_init_fn, ``scheduling="static"``, a
            ``multiprocessing_context``, ``batch_size=None``), else processes.
        autoscale: ``None``: exactly ``num_workers``. ``(low, high)``: the number of workers
            moves between the two by what is measured, starting at ``num_workers``; ``high`` is
            also the ceiling for standby workers.
        straggler_threshold: seconds in flight from which a sample counts as a straggler, for
            which a standby worker may be admitted; ``"auto"`` learns it, ``None`` switches
            that off. A number needs ``autoscale``.
        prefetch_next_epoch: begin the next epoch's first batches while this one ends
            (persistent workers only). The sampler's next epoch is then drawn early; calling
            ``set_epoch`` in between discards what was begun.
        max_retries: times a sample is given to another worker after its worker died, before
            ``minato.WorkerLost`` is raised. Always 0 for ``scheduling="static"`` and iterable
            datasets, whose workers cannot be replaced: more than the default is refused.

    Raises:
        ValueError: for arguments that make no sense, with torch's texts for torch's, and for
            options of minato's that would have no effect for the dataset or the scheduling.
    """

    scheduling: str = "balanced"
    seed_per_sample: bool | None = None
    memory_limit: int | str | None = None
    max_retries: int = 1
    batching: str = "sampler"
    worker_type: str | None = None
    autoscale: tuple[int, int] | None = None
    straggler_threshold: float | str | None = "auto"
    prefetch_next_epoch: bool = False

    def __init__(
        self,
        dataset: Dataset[_T_co],
        batch_size=1,
        shuffle=None,
        sampler=None,
        batch_sampler=None,
        num_workers=0,
        collate_fn=None,
        pin_memory=False,
        drop_last=False,
        timeout=0,
        worker_init_fn=None,
        multiprocessing_context=None,
        generator=None,
        *,
        prefetch_factor=None,
        persistent_workers=False,
        pin_memory_device="",
        in_order=True,
        scheduling: str = os.environ.get("MINATO_SCHEDULING", "balanced"),
        seed_per_sample: bool | None = None,
        memory_limit: int | str | None = None,
        max_retries: int = 1,
        batching: str = "sampler",
        worker_type: str | None = None,
        autoscale: tuple[int, int] | None = None,
        straggler_threshold: float | str | None = "auto",
        prefetch_next_epoch: bool = False,
    ) -> None:
        if scheduling not in ("balanced", "static"):
            raise ValueError(
                f"scheduling option should be 'balanced' or 'static', but got {scheduling!r}"
            )
        if seed_per_sample and scheduling == "static":
            raise ValueError(
                "seed_per_sample=True needs scheduling='balanced': static scheduling keeps "
                "torch's random stream of each worker"
            )
        if not isinstance(max_retries, int) or isinstance(max_retries, bool) or max_retries < 0:
            raise ValueError(
                f"max_retries option should be a non-negative integer, but got {max_retries!r}"
            )
        if memory_limit is not None:
            parse_bytes(memory_limit)
        _check_workers(num_workers, autoscale, straggler_threshold)
        if autoscale is not None and scheduling == "static":
            raise ValueError("autoscale needs scheduling='balanced': static scheduling ties "
                             "batches and random streams to a fixed number of workers")
        if prefetch_next_epoch and not persistent_workers:
            raise ValueError("prefetch_next_epoch needs persistent_workers=True")
        self.batching = batching
        self.worker_type = worker_type
        self.autoscale = autoscale
        self.straggler_threshold = straggler_threshold
        self.prefetch_next_epoch = prefetch_next_epoch
        self.scheduling = scheduling
        self.seed_per_sample = seed_per_sample
        self.memory_limit = memory_limit
        self.max_retries = max_retries
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        _check_ignored(self)
        _check_batching(self)
        _check_worker_type(self)

    def _memory_limit_bytes(self) -> int:
        if self.memory_limit is None:
            return fair_memory(max(self.num_workers, self.autoscale[1] if self.autoscale else 0))
        return parse_bytes(self.memory_limit)

    def set_epoch(self, epoch: int) -> None:
        """Tells sampler, batch sampler and dataset of a new epoch, where they have
        ``set_epoch``; copies of the dataset in persistent workers hear of it, too.

        Raises:
            TypeError: for what is no whole number.
            ValueError: for one below 0 or from 2**63 on.
        """
        epoch = _whole_epoch(epoch)
        batches = self.batch_sampler
        told: list[Any] = []
        for part in (self.sampler, getattr(batches, "sampler", None), batches, self.dataset):
            tell = getattr(part, "set_epoch", None)
            if callable(tell) and not any(part is t for t in told):
                tell(epoch)
                told.append(part)
        memo_of(self).user_epoch = epoch + 1

    def state_dict(self) -> dict:
        """Where the latest iterator stands, counted by what was handed to the caller.

        Plain data that survives ``torch.save`` and JSON; starts no worker and draws nothing.
        Holds the epoch, the base seed, the position, the states of the generators that the
        order comes from, and learned costs; see ``minato.state`` for the fields. Where
        torch's own workers serve the loader (DataPipes, custom multiprocessing contexts),
        which count nothing, it knows the epoch and no position in it, and warns once.
        """
        memo = memo_of(self)
        if memo.resume is not None:
            return memo.resume["as_given"]
        reason = self._why_torch()
        if reason is not None and not memo.told_uncounted:
            memo.told_uncounted = True
            warnings.warn(
                f"this loader uses torch's own workers ({reason}), and those count nothing: "
                "its state holds the epoch it is in and no position within that.",
                stacklevel=2,
            )
        return state_of(self, memo, counted=reason is None)

    def load_state_dict(self, state: dict) -> None:
        """The next iterator goes on where ``state`` was taken, in any process.

        In order, the rest of the epoch is the same bit for bit with any number of workers;
        out of order, exactly the samples not delivered yet come. ``scheduling="static"`` and
        iterable datasets make what was delivered again and throw it away: they need the same
        number of workers, and random streams of persistent workers only come back in their
        first epoch. Without workers a sample's randomness is the program's own to restore.
        The epoch that ``set_epoch`` was told is told again. An empty dict begins anew. Where
        torch's own workers serve the loader, an epoch that was left in the middle begins
        anew, with a warning.

        Raises:
            ValueError: for what is no state of this class, or of another loader.
        """
        memo = memo_of(self)
        if state == {}:
            memo.resume, memo.progress = None, None
            return
        resume = opened(state, self)
        memo.costs.load(*resume["costs"])
        if resume["user_epoch"] is not None:
            self.set_epoch(resume["user_epoch"])
        reason = self._why_torch()
        if reason is None:
            memo.resume = resume
            return
        Sources(self).set_own(resume["generators"])
        again = resume["delivered"] + len(resume["delivered_beyond"])
        again += sum(resume["delivered_by_worker"] or [])
        if again:
            units = "batches" if resume["unit"] == "batch" else "samples"
            warnings.warn(
                f"this loader uses torch's own workers ({reason}), which cannot go on in the "
                f"middle of an epoch: it begins anew, and {again} {units} come again.",
                stacklevel=2,
            )

    def stats(self) -> dict:
        """What the loader has done and waits for; see ``minato.observe.stats`` for the fields."""
        return collect(self)

    def _get_iterator(self):
        if not CORE:
            tell_of_torch(self)
        if self.num_workers == 0:
            return InlineIterator(self)
        reason = self._why_torch()
        if reason is not None:
            log.info("minato.DataLoader uses torch's own workers: %s", reason)
            return super()._get_iterator()
        self.check_worker_number_rationality()
        if self._dataset_kind == _DatasetKind.Iterable or self.scheduling == "static":
            return StaticIterator(self)
        if self.batching == "ready":
            return ReadyIterator(self)
        return BalancedIterator(self)

    def _why_torch(self) -> str | None:
        """Why torch's own workers serve this loader, or None."""
        if self.num_workers == 0:
            return None
        if not CORE:
            return NEEDS_LINUX
        if isinstance(self.dataset, (IterDataPipe, MapDataPipe)):
            return "DataPipes shard and shuffle through torch's workers"
        if not _is_torchs_own():
            return "code that torch's workers run was replaced"
        context = self.multiprocessing_context
        if context is not None and type(context) not in _STANDARD_CONTEXTS:
            return f"{type(context).__name__} needs torch's workers (no standard context)"
        return refused()
