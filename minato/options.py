"""minato's own options of a loader, as one validated record."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import math
import multiprocessing.context as mp_context
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch.utils.data import IterDataPipe, MapDataPipe, SequentialSampler
from torch.utils.data.dataloader import _DatasetKind, _InfiniteConstantSampler

from . import remote
from ._dynamo import eager
from ._not_linux import CORE, NEEDS_LINUX
from ._system import fair_memory
from .cache.cache import Cache
from .device.provider import target
from .errors import native_impossible_message, program_level
from .option_values import default, option
from .text import parse_bytes
from .typing import State

if CORE:
    from .workers import threads
    from .workers.native import why_not

if TYPE_CHECKING:
    from .remote import Ray

_STANDARD_CONTEXTS = tuple(
    getattr(mp_context, f"{name}Context")
    for name in ("Default", "Fork", "Spawn", "ForkServer")
    if hasattr(mp_context, f"{name}Context")  # not every system has all
)

#: of the environment: the default of ``scheduling``
SCHEDULING_VARIABLE = "MINATO_SCHEDULING"

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: options that are numbers, or hold them
_NUMBERS = ("seed_rank", "memory_limit", "cache", "max_retries", "straggler_threshold", "max_errors",
            "sample_timeout", "autoscale")  # fmt: skip

#: options that only balanced scheduling supports, with their values that ask for nothing
_BALANCED: dict[str, tuple[Any, ...]] = {
    "seed_per_sample": (None, False), "seed_rank": (None,), "max_retries": (0, 1), "autoscale": (None,),
    "straggler_threshold": (None, "auto"), "prefetch_next_epoch": (False,), "sample_timeout": (None,),
    "cache_reorder": (False,),
}  # fmt: skip
#: the same of options that all of minato's workers support
_ANY: dict[str, tuple[Any, ...]] = {
    "memory_limit": (None,), "device": (None,), "on_error": ("raise",), "batching": ("sampler",),
    "cache": (None,), "remote": (None,),
}  # fmt: skip


def _is_number(value: Any, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _is_positive(value: Any) -> bool:
    return _is_number(value, int, float) and value > 0


def _is_pair(value: Any) -> bool:
    pair = isinstance(value, (tuple, list)) and len(value) == 2
    return pair and all(type(n) is int for n in value) and value[0] >= 1


#: by option: whether a value can be right, and what it must be
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "scheduling": (lambda v: v in ("balanced", "static"), "'balanced' or 'static'"),
    "seed_rank": (
        lambda v: v is None or (_is_number(v, int) and 0 <= v < 2**31),
        "None or a rank (an int from 0 on)"),
    "max_retries": (lambda v: _is_number(v, int) and v >= 0, "a non-negative integer"),
    "autoscale": (
        lambda v: v is None or _is_pair(v), "None or a pair (low, high) of positive integers"),
    "straggler_threshold": (
        lambda v: v is None or v == "auto" or _is_positive(v),
        "'auto', None or a positive number of seconds"),
    "sample_timeout": (
        lambda v: v is None or (_is_positive(v) and v < math.inf),
        "None or a positive number of seconds"),
    "on_error": (lambda v: v in ("raise", "skip", "replace"), "'raise', 'skip' or 'replace'"),
    "max_errors": (
        lambda v: (type(v) is float and 0 <= v <= 1) or (type(v) is int and v >= 0),
        "a number of samples (a non-negative int) or a share of the epoch (a float from 0 to 1)"),
    "cache_format": (lambda v: v in (None, "decoded", "encoded"), "None, 'decoded' or 'encoded'"),
    "batching": (lambda v: v in ("sampler", "ready"), "'sampler' or 'ready'"),
    "worker_type": (
        lambda v: v in (None, "process", "native", "thread"), "None, 'process', 'native' or 'thread'"),
}  # fmt: skip


def hinting(init: _Function) -> _Function:
    """A constructor whose error for an unknown keyword argument names the most similar one, as
    Python's own error does from 3.13 on."""
    known = list(inspect.signature(init).parameters)

    @eager
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except TypeError as error:
            unknown = [name for name in kwargs if name not in known]
            similar = difflib.get_close_matches(unknown[0], known, 1) if unknown else []
            if similar and "Did you mean" not in str(error):
                error.args = (f"{error}. Did you mean {similar[0]!r}?",)
            raise

    hinted: Any = __init__
    return hinted  # type: ignore[no-any-return]


def described(loader: Any) -> str:
    """One line about a loader, for its repr. Of the program's code, only ``len(dataset)`` runs."""
    has, kind = vars(loader), type(loader)
    name = "minato.DataLoader" if kind.__module__ == f"{__package__}.loader" else kind.__qualname__
    if "dataset" not in has:  # the constructor has not finished
        return f"<{name}>"
    size = ""
    with contextlib.suppress(Exception):  # some datasets have no length or ask a server for it
        size = f" ({len(has['dataset'])} samples)"
    size_of_batch, sampler = has.get("batch_size"), has.get("sampler")
    batches = has.get("batch_sampler")
    if size_of_batch is None and batches is not None:
        parts = [f"batch_sampler={type(batches).__name__}"]
    else:
        parts = [f"batch_size={size_of_batch}"]
        if type(sampler) is torch.utils.data.RandomSampler:
            parts.append("shuffle=True")
        elif not isinstance(sampler, (SequentialSampler, _InfiniteConstantSampler)):
            parts.append(f"sampler={type(sampler).__name__}")
    parts.append(f"num_workers={has.get('num_workers')}")
    for field in fields(Options):
        value = option(loader, field.name)
        if field.name != "pending_state" and value != default(kind, field.name):
            parts.append(f"{field.name}={value!r}")
    return f"<{name} of {type(has['dataset']).__name__}{size}: {', '.join(parts)}>"


def asks_for_torchs_workers(loader: Any) -> str | None:
    """The torch argument that only torch's own workers can serve, with the reason, or None."""
    if loader.num_workers == 0:
        return None
    if isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        return "DataPipes shard and shuffle through torch's workers"
    context = loader.multiprocessing_context
    if context is not None and type(context) not in _STANDARD_CONTEXTS:
        return f"{type(context).__name__} needs torch's workers (no standard context)"
    return None


@dataclass(frozen=True)
class Options:
    """The options' values. ``minato.DataLoader`` documents them; they are its attributes.

    They are checked in two steps, because torch's constructor checks its own arguments in
    between: ``check`` runs before it, ``check_effect`` after it.
    """

    scheduling: str
    seed_per_sample: bool | None
    seed_rank: int | None
    memory_limit: int | str | None
    max_retries: int
    batching: str
    worker_type: str | None
    autoscale: tuple[int, int] | None
    straggler_threshold: float | str | None
    prefetch_next_epoch: bool
    on_error: str
    max_errors: int | float
    sample_timeout: float | None
    cache: Cache | int | str | None
    cache_format: str | None
    cache_reorder: bool
    device: str | int | torch.device | None
    remote: Ray | None
    pending_state: State | None = None

    def __post_init__(self) -> None:
        """Converts NumPy's number types to Python's."""
        def plain(value: Any) -> Any:
            if isinstance(value, (tuple, list)):
                return (tuple if isinstance(value, tuple) else list)(map(plain, value))
            return value.item() if isinstance(value, np.generic) else value

        vars(self).update({name: plain(getattr(self, name)) for name in _NUMBERS})

    @classmethod
    def of(cls, loader: Any) -> Options:
        """The options of a loader, from its current attributes."""
        return cls(**{name: option(loader, name) for name in cls.__dataclass_fields__})

    @property
    def static(self) -> bool:
        """Whether scheduling follows torch: batch i on worker i mod n."""
        return self.scheduling == "static"

    @property
    def seeds(self) -> bool:
        """Whether workers seed each sample under balanced scheduling."""
        return self.seed_per_sample is not False

    def bounds(self, num_workers: int) -> tuple[int, int, int]:
        """The lowest number of workers, the number at the start, and the highest."""
        low, high = self.autoscale or (num_workers, num_workers)
        return low, num_workers, high

    def memory_bytes(self, num_workers: int) -> int:
        """Ceiling in bytes of the memory shared with workers; 0 if it cannot be determined."""
        if self.memory_limit is None:
            return fair_memory(max(self.bounds(num_workers)))
        return parse_bytes(self.memory_limit)

    def straggler_seconds(self) -> float:
        """The threshold in the engine's encoding: 0 learns it, -1 is never."""
        if self.straggler_threshold is None:
            return -1.0
        return 0.0 if self.straggler_threshold == "auto" else float(self.straggler_threshold)

    # ---- checks ------------------------------------------------------------------------------

    def check(self, num_workers: int, persistent_workers: bool) -> None:
        """Raises ValueError for values that are wrong for every dataset."""
        for name, (sound, must) in _VALUES.items():
            value: Any = getattr(self, name)
            if not sound(value):
                there = name == "scheduling" and os.environ.get(SCHEDULING_VARIABLE) == value
                where = f" (from the environment variable {SCHEDULING_VARIABLE})" if there else ""
                raise ValueError(f"{name} must be {must}, got {value!r}{where}")
        if self.memory_limit is not None:
            parse_bytes(self.memory_limit)
        if self.device is not None:
            target(self.device)
        if isinstance(self.cache, (int, str)) and not isinstance(self.cache, bool):
            Cache(self.cache)  # it checks the size and opens nothing
        elif self.cache is not None and not isinstance(self.cache, Cache):
            raise TypeError(
                f"cache must be None, a size such as '16GiB' or a minato.Cache, got {self.cache!r}"
            )
        bounds = self.autoscale
        wrong = {
            "seed_per_sample=True needs scheduling='balanced': static scheduling keeps torch's random "
            "stream of each worker": self.seed_per_sample and self.static,
            f"seed_rank={self.seed_rank} has no effect with seed_per_sample=False, which turns off the "
            "seeding of samples. Leave out one of the two.":
                self.seed_rank is not None and self.seed_per_sample is False,
            f"autoscale must be (low, high) with low <= high, got {bounds!r}":
                bounds and bounds[0] > bounds[1],
            "autoscale needs num_workers > 0": bounds and num_workers == 0,
            f"autoscale must be (low, high) with low <= num_workers <= high, got {bounds!r} and "
            f"num_workers={num_workers}, the number of workers at the start":
                bounds and not bounds[0] <= num_workers <= bounds[1],
            f"sample_timeout={self.sample_timeout!r} has no effect with num_workers=0: there is no "
            "worker to kill. Leave it out, or set num_workers":
                self.sample_timeout is not None and num_workers == 0,
            f"cache_format={self.cache_format!r} has no effect without cache=. Leave it out.":
                self.cache_format and self.cache is None,
            f"cache_reorder={self.cache_reorder!r} has no effect without cache=. Leave it out.":
                self.cache_reorder and self.cache is None,
            "autoscale needs scheduling='balanced': static scheduling ties batches and random streams "
            "to a fixed number of workers": bounds and self.static,
            "prefetch_next_epoch needs persistent_workers=True":
                self.prefetch_next_epoch and not persistent_workers,
        }  # fmt: skip
        for text in (text for text, applies in wrong.items() if applies):
            raise ValueError(text)

    def _check_reorder(self, loader: Any) -> None:
        if not self.cache_reorder:
            return
        if self.batching == "ready":
            wrong = "batching='ready'", "which takes samples as they are ready"
        elif self.on_error == "replace":
            wrong = "on_error='replace'", "which takes the samples that follow in the sampler's order"
        elif self.seed_per_sample is False:
            wrong = "seed_per_sample=False", "where what a sample draws depends on when it comes"
        elif loader.num_workers == 0 and not self.seed_per_sample:
            wrong = "num_workers=0", (
                "where what a sample draws depends on when it comes. seed_per_sample=True seeds each "
                "sample there, too"
            )
        else:
            return
        raise ValueError(f"cache_reorder=True cannot be combined with {wrong[0]}, {wrong[1]}.")

    def _check_cached(self, loader: Any) -> None:
        if self.cache is None:
            return
        if loader._dataset_kind == _DatasetKind.Iterable:
            raise ValueError(
                f"cache={self.cache!r} has no effect for an iterable dataset: its samples have no "
                "index by which to find them. Put @cache.memoize(key=...), of a minato.Cache, on "
                "the function that makes the deterministic part of a sample."
            )
        from .cache import datasets

        datasets.check(loader.dataset, self.cache_format)

    def check_effect(self, loader: Any) -> None:
        """Raises ValueError for options that would have no effect with this loader's dataset and
        torch's arguments: an option that is given must take effect."""
        self._check_ignored(loader)
        self._check_tolerance(loader)
        self._check_batching(loader)
        if self.remote is not None:
            remote.check(loader, self)
        self._check_worker_type(loader)
        self._check_cached(loader)
        self._check_reorder(loader)

    def refuse_with_torchs_workers(self, reason: str) -> None:
        """Complains about options when torch's workers serve for another reason than the loader's
        arguments: ValueError if its batches would differ, a warning if an option has no effect."""
        why = f"because torch's own workers serve this loader: {reason}"
        ignored = self._asked(_ANY) + self._asked(_BALANCED)
        if "on_error" in ignored:
            raise ValueError(f"on_error={self.on_error!r} has no effect {why}. Leave it out.")
        if ignored := [name for name in ignored if name != "device"]:  # here it copies nothing
            warnings.warn(f"{', '.join(ignored)}: no effect {why}", stacklevel=program_level())

    def _asked(self, unused: dict[str, tuple[Any, ...]]) -> list[str]:
        """Options in use, of those of _BALANCED or _ANY."""
        return [name for name, values in unused.items() if getattr(self, name) not in values]

    def _check_ignored(self, loader: Any) -> None:
        ignored, bounds = self._asked(_BALANCED), self.autoscale or (0, 0)
        if (reason := asks_for_torchs_workers(loader)) is not None:
            why = f"because torch's own workers serve this loader: {reason}"
            ignored += self._asked(_ANY)
        elif loader._dataset_kind == _DatasetKind.Iterable:
            why = (
                "for an iterable dataset: each worker iterates over its own copy, with its own "
                "random stream, and cannot be replaced"
            )
        elif self.static:
            why = (
                "with scheduling='static': batches and random streams belong to workers, which "
                "cannot be replaced"
            )
        else:
            why = "without autoscale=(low, high), which allows standby workers"
            alone = "straggler_threshold" in ignored and bounds[0] == bounds[1]
            ignored = ["straggler_threshold"] if alone else []
        if ignored:
            name = ignored[0]
            raise ValueError(f"{name}={getattr(self, name)!r} has no effect {why}. Leave it out.")

    def _check_tolerance(self, loader: Any) -> None:
        if self.on_error == "raise":
            return
        if not CORE:
            raise ValueError(f"on_error={self.on_error!r} has no effect: {NEEDS_LINUX}")
        if loader._dataset_kind == _DatasetKind.Iterable:
            raise ValueError(
                f"on_error={self.on_error!r} has no effect for an iterable dataset: an iterator "
                "that has raised has ended, and the samples after it are lost. Catch the "
                "error in the dataset's __iter__."
            )

    def _check_batching(self, loader: Any) -> None:
        if self.batching == "sampler":
            return
        wrong = None
        if loader._dataset_kind != _DatasetKind.Map:
            wrong = "a map-style dataset"
        elif loader.in_order:
            wrong = "in_order=False: samples arrive in the order in which they are ready"
        elif type(loader.batch_sampler) is not torch.utils.data.BatchSampler:
            wrong = "torch's plain BatchSampler: minato forms new batches from its sampler"
        elif self.static:
            wrong = "scheduling='balanced'"
        elif self.prefetch_next_epoch:
            wrong = "prefetch_next_epoch=False: batches do not cross the end of an epoch"
        if wrong is not None:
            raise ValueError(f"batching='ready' needs {wrong}")

    def _check_worker_type(self, loader: Any) -> None:
        if self.worker_type == "native":
            reason: str | None = "num_workers is 0"
            if loader.num_workers > 0:
                reason = why_not(loader) if CORE else NEEDS_LINUX
            if reason is not None:
                raise ValueError(native_impossible_message(reason))
            if self.max_retries > 1:
                raise ValueError(
                    f"max_retries={self.max_retries} has no effect with worker_type='native': a "
                    "thread cannot be killed, so no sample is retried. Leave it out."
                )
        if self.worker_type == "thread":
            reason = threads.why_not(loader) if CORE else NEEDS_LINUX
            if reason is not None:
                raise ValueError(f"worker_type='thread' cannot serve this loader: {reason}.")
