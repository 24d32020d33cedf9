"""``minato.DataLoader``: torch's class on minato's engine."""

from __future__ import annotations

import copy
import logging
import operator
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, Literal, TypeVar, cast

import torch
from torch.utils.data import Dataset, Sampler, _utils
from torch.utils.data.dataloader import _DatasetKind

from ._dynamo import eager
from ._not_linux import CORE, NEEDS_LINUX, warn_of_torch
from ._system import refused
from .cache.cache import Cache
from .dataset_calls import attribute, is_stateful
from .device.provider import target
from .elastic import elastic_of
from .epoch_progress import title_of
from .errors import program_level
from .frameworks import begins_next_epoch, calling_framework
from .iterators.loader_memo import memo_of, set_pending
from .iterators.inline import InlineIterator
from .iterators.stats import collect
from .observe import loader_report as report
from .option_values import option, record
from .options import SCHEDULING_VARIABLE, Options, asks_for_torchs_workers, described, hinting
from .remote import Ray, check_type, cuts, threads
from .seeding.order_generators import Sources, set_sampler_epoch
from .state import in_mid_epoch, opened, state_of
from .typing import Batching, CacheForm, OnError, Scheduling, State, Stats, WorkerType

if CORE:
    from .iterators.iterator import BalancedIterator
    from .iterators.ready import ReadyIterator
    from .iterators.static_and_iterable import StaticIterator

log = logging.getLogger("minato")

_T_co = TypeVar("_T_co", covariant=True)

_SCHEDULING = cast(Scheduling, os.environ.get(SCHEDULING_VARIABLE, "balanced"))

#: as it is before ``patch_torch()``
torchs_iterator = torch.utils.data.DataLoader._get_iterator


def _whole_epoch(epoch: Any) -> int:
    """The argument of set_epoch() as an int that fits into 64 bits."""
    try:
        if isinstance(epoch, bool):
            raise TypeError
        number = operator.index(epoch)
    except TypeError:
        raise TypeError(f"epoch of set_epoch() must be an integer, got {epoch!r}") from None
    if not 0 <= number < 2**63:
        raise ValueError(f"epoch of set_epoch() must be from 0 to 2**63 - 1, got {number}")
    return number


def _is_torchs_own() -> bool:
    """Whether the functions that torch's workers run are torch's own and not replaced."""
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

    All arguments of torch's class, with its defaults, checks and error texts, and these. The page
    docs/options.md has more about them, and lists what a dataset may offer.

    Args:
        scheduling: ``"balanced"`` gives each sample to the next free worker. ``"static"`` is torch
            bit for bit: batch i on worker i mod n with torch's random streams, as always for
            iterable datasets. The environment variable ``MINATO_SCHEDULING`` sets the default.
        seed_per_sample: ``None``: on with balanced scheduling, off with static scheduling and
            without workers. Each sample is seeded by (seed, epoch, position), so batches do not
            depend on the number of workers. ``False``: each worker has its own random stream, as in
            torch. ``True`` with ``num_workers=0``: the same samples as with any number of workers.
        seed_rank: the rank whose random numbers this process draws when several ranks load.
            ``None``: the rank of the sampler (or batch sampler), if it says how it deals samples
            to ranks, as ``DistributedSampler`` does; else that of the process, from
            ``torch.distributed`` or the launcher's environment variables. An int from 0 on: that
            rank. Ranks that must load identical batches need the same number.
        memory_limit: ceiling, in bytes (int, or text such as ``"8GiB"``), of the memory shared
            with workers, including batches that the program retains. ``None``: half of the
            available memory, divided by the number of processes that a launcher started here.
        batching: ``"sampler"`` delivers the sampler's batches. ``"ready"`` fills batches with
            the samples that are ready first. No sample moves further than
            ``minato.iterators.ready.DISPLACEMENT`` batches from its position in the sampler's order.
            It needs ``in_order=False``, a map-style dataset and torch's plain ``BatchSampler``. With
            your own collate_fn, the sampler's batches stay whole and arrive as they are ready.
        worker_type: ``"process"``: worker processes, for any dataset. ``"thread"``: Python threads
            of this process, which share the dataset, for map-style datasets whose samples release
            the GIL. ``"native"``: threads of this process that make samples in C without the GIL,
            for datasets with a ``native_pipeline()`` (``minato.ops.VolumeDataset``). ``None``:
            native if the dataset offers it and nothing needs Python in a worker; else processes.
        autoscale: ``None``: exactly ``num_workers``. ``(low, high)``: the number of workers
            starts at ``num_workers`` and moves between the two by measurement; ``high`` is
            also the ceiling for standby workers.
        straggler_threshold: seconds after which a running sample counts as a straggler, for
            which a standby worker may start. ``"auto"`` learns the threshold, ``None`` turns
            this off. A number needs ``autoscale``.
        prefetch_next_epoch: start the next epoch's first batches while this epoch ends
            (persistent workers only). The sampler's next epoch is then drawn early, and its
            exceptions are raised when that epoch is asked for. The early batches are discarded if
            the program calls ``set_epoch`` or changes the sampler.
        cache: ``"16GiB"`` or a ``minato.Cache``: the deterministic part of each sample is made once
            per machine and shared by workers, ranks and jobs. For datasets with ``read(i)``,
            ``decode(raw, i)`` and ``augment(value, i)``, for ``minato.ops.VolumeDataset``, and for
            torchvision's ``ImageFolder`` and ``DatasetFolder``. The samples are the same as without.
        cache_format: with ``cache``: ``"decoded"`` keeps what ``decode`` returns, ``"encoded"`` what
            ``read`` returns. ``None``: decoded if all samples are estimated to fit, else encoded.
        cache_reorder: with ``cache``, for several jobs on one data set: samples that another job has
            cached come earlier in the epoch. Each still comes exactly once. Which samples share a
            batch then depends on timing; what a sample draws does not, as it is seeded by its index.
            Only the orders of torch's ``RandomSampler`` without replacement, ``SubsetRandomSampler``
            and a ``DistributedSampler`` that shuffles are changed.
        device: deliver batches on this device (``"cuda"``, ``"cuda:1"``, a ``torch.device``).
            They are copied ahead of ``next()`` on minato's own stream, for which the program's
            current stream waits. ``"cuda"`` is the current device when the iterator is made.
            Containers are searched as for ``pin_memory``, and so are dataclasses. Other objects stay
            as they are unless they have a ``to(device)`` method. ``"cpu"`` and ``None``: no copy.
        remote: ``minato.remote.Ray(actors=16, cpus=1)``: actors on a Ray cluster make the samples, with
            the same batches as local workers. Threads of this process wait for them;
            ``num_workers=0`` chooses how many.
        max_retries: how often a sample is given to another worker after its worker died, before
            ``minato.WorkerLost`` is raised. Always 0 for ``scheduling="static"``, iterable datasets
            and threads; they refuse more than the default.
        on_error: ``"raise"``: a sample that raises ends its batch with that error, as in torch's
            loader. ``"skip"``: the sample is left out and counted, and the batch is smaller.
            ``"replace"``: another sample of the same epoch takes its place, the same one for any
            number of workers. For map-style datasets. A sample also fails if it calls
            ``sys.exit()``, cannot be pickled, or kills ``max_retries`` + 1 workers. Errors of a
            collate_fn always raise. docs/options.md has a few exceptions.
        max_errors: with ``on_error`` other than ``"raise"``: how many samples of an epoch may fail.
            An int is a number, a float a share of the epoch (one sample always may). One more
            failure raises the first error.
        sample_timeout: seconds. A sample that takes longer has failed: its worker is killed and
            replaced, and ``on_error`` applies. It is not tried again. For a dataset with
            ``__getitems__`` it limits each call. For worker processes that make samples of a
            map-style dataset with balanced scheduling; refused elsewhere.
        pending_state: the state from which the next iterator resumes. ``load_state_dict()`` sets
            this attribute and the iterator clears it. Copies, pickles and libraries that rebuild a
            loader from its attributes carry it over, so the new loader resumes there too.
    Raises:
        ValueError: for arguments that make no sense, with torch's texts for torch's arguments. Also
            for most of minato's options that would have no effect for the dataset or scheduling.
    """

    scheduling: Scheduling = "balanced"
    seed_per_sample: bool | None = None
    seed_rank: int | None = None
    memory_limit: int | str | None = None
    max_retries: int = 1
    batching: Batching = "sampler"
    worker_type: WorkerType | None = None
    autoscale: tuple[int, int] | None = None
    straggler_threshold: float | Literal["auto"] | None = "auto"
    prefetch_next_epoch: bool = False
    on_error: OnError = "raise"
    max_errors: int | float = 0.01
    sample_timeout: float | None = None
    cache: Cache | int | str | None = None
    cache_format: CacheForm | None = None
    cache_reorder: bool = False
    device: str | int | torch.device | None = None
    remote: Ray | None = None
    pending_state: State | None = None

    @hinting
    @eager
    def __init__(
        self,
        dataset: Dataset[_T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        scheduling: Scheduling = _SCHEDULING,
        seed_per_sample: bool | None = None,
        seed_rank: int | None = None,
        memory_limit: int | str | None = None,
        max_retries: int = 1,
        batching: Batching = "sampler",
        worker_type: WorkerType | None = None,
        autoscale: tuple[int, int] | None = None,
        straggler_threshold: float | Literal["auto"] | None = "auto",
        prefetch_next_epoch: bool = False,
        on_error: OnError = "raise",
        max_errors: int | float = 0.01,
        sample_timeout: float | None = None,
        cache: Cache | int | str | None = None,
        cache_format: CacheForm | None = None,
        cache_reorder: bool = False,
        device: str | int | torch.device | None = None,
        remote: Ray | None = None,
        pending_state: State | None = None,
    ) -> None:
        given = dict(locals())
        del given["self"], given["__class__"]
        if remote is not None:
            check_type(remote)
            size = batch_size if batch_sampler is None else getattr(batch_sampler, "batch_size", None)
            splits = cuts(dataset, collate_fn, batch_size is not None)
            given["num_workers"] = num_workers or threads(remote, size or 1, splits)
            given["worker_type"] = worker_type or "thread"
        options = Options(**{field.name: given.pop(field.name) for field in fields(Options)})
        options.check(given["num_workers"], persistent_workers)
        record(self, vars(options))
        super().__init__(**given)  # torch's arguments are left
        options.check_effect(self)
        elastic_of(self)  # raises ValueError if samples would be dealt to ranks twice

    def check_worker_number_rationality(self) -> None:
        """torch's warning of more workers than cores, which is not for threads that wait for actors."""
        if option(self, "remote") is None:
            super().check_worker_number_rationality()

    @eager
    def __repr__(self) -> str:
        """The loader in one line: dataset and length, batches, workers, and options of minato's
        that differ from the default. Works for a loader in any state."""
        return described(self)

    @eager
    def set_epoch(self, epoch: int) -> None:
        """Passes the epoch to sampler, batch sampler and dataset, where they have
        ``set_epoch``, and to the copies of the dataset in persistent workers.

        Raises:
            TypeError: if epoch is not a whole number.
            ValueError: if it is below 0, or 2**63 or more.
        """
        epoch, memo = _whole_epoch(epoch), memo_of(self)
        batches = self.batch_sampler
        told: list[Any] = []
        for part in (self.sampler, attribute(batches, "sampler"), batches, self.dataset):
            tell = attribute(part, "set_epoch")
            if callable(tell) and not any(part is t for t in told):
                tell(epoch)
                told.append(part)
        memo.user_epoch = epoch + 1

    @eager
    def state_dict(self) -> State:
        """Position of the latest iterator, counted by the batches that the caller received.

        Plain data that survives ``torch.save`` and JSON. Starts no worker and draws no random
        number. Holds the epoch, the base seed, the position, the states of the generators that
        determine the order, and learned costs; see ``minato.state`` for the fields.

        An iterable dataset or its iterator is asked for its own state if it has ``state_dict()``
        and ``load_state_dict()`` (torchdata's ``Stateful`` convention). Workers ask it behind
        the last batch that each has delivered; if that raised, so does this method. A sampler is
        asked as of the last batch delivered. Four cases differ: ``scheduling="static"``,
        ``batching="ready"``, ``on_error="replace"``, and your own batch sampler that draws from the
        sampler. Then the sampler is asked as of the end of the previous epoch, and resuming draws
        the epoch's indices again.

        If torch's own workers serve the loader (DataPipes, custom multiprocessing contexts), the
        state holds the epoch but no position in it. The first call then warns.
        """
        memo = memo_of(self)
        if memo.resume is not None:
            as_given: State = copy.deepcopy(memo.resume["as_given"])
            return as_given
        reason = self._why_torch()
        if reason is not None and memo.warns_of("no position"):
            warnings.warn(
                f"this loader uses torch's own workers ({reason}), which do not count batches: "
                "its state holds the epoch but no position in it. To resume in the middle of an "
                "epoch, count the batches you take and skip that number.",
                stacklevel=program_level(),
            )
        balanced = self.num_workers > 0 and option(self, "scheduling") != "static"
        shared = balanced and self._dataset_kind == _DatasetKind.Map and is_stateful(self.dataset)
        if reason is None and shared and memo.warns_of("no state"):
            warnings.warn(
                f"the state_dict() of the dataset, a {type(self.dataset).__name__}, is not part of "
                "the loader's state: any free worker makes any sample, so no worker's copy of the "
                "dataset has a position. Save that state in the program, or use "
                "scheduling='static'. This warning is shown once.",
                stacklevel=program_level(),
            )
        return state_of(self, memo, counted=reason is None)

    @eager
    def load_state_dict(self, state: State | list[State], strict: bool | None = None) -> None:
        """Makes the next iterator resume where ``state`` was taken, in any process.

        In order, the rest of the epoch is the same bit for bit with any number of workers. Out of
        order, exactly the samples that were not delivered arrive. Iterable datasets with their own
        state resume from it, with each worker's random streams. Other iterable datasets and
        ``scheduling="static"`` make the delivered batches again and discard them; random
        streams of persistent workers are only restored in their first epoch. Both need the same
        number of workers. Without workers, the program restores the randomness of samples.

        The epoch that was given to ``set_epoch`` is passed on again. A state taken between two
        epochs sets the samplers' generators at once, and without workers those of an iterable
        dataset. So later changes to the sampler or dataset take effect. An empty dict starts a new
        epoch with the generators as they are. If torch's own workers serve the loader, an epoch
        that was left in the middle restarts, with a warning.

        Args:
            state: a return value of ``state_dict()``, or a list of those of all ranks. Another
                number of ranks or another batch size goes on where all ranks together were, if
                that is known and fits: see docs/distributed.md.
            strict: what happens if the state does not fit this loader. ``True``: ValueError.
                ``False``: one warning, and the epoch starts as the program has set it up, as with
                torch's loader. ``None``: like ``False`` if a framework such as Lightning
                calls (one of ``minato.frameworks.FRAMEWORKS``), else like ``True``.

        Raises:
            ValueError: if this is not a state of this class, or the state of another loader.
        """
        memo = memo_of(self)
        if state == {}:
            memo.resume = memo.progress = memo.sampler_end = None
            set_pending(self, None)
            return
        strict = calling_framework(self) is None if strict is None else strict
        try:
            resume = opened(state, self, strict)
        except ValueError as error:
            if strict:
                raise
            warnings.warn(
                f"the loader cannot resume from the state that it was given: {error}. Its position in "
                "the epoch is lost. The epoch starts as the program has set it up, as with torch's "
                "loader, so samples may be delivered twice. To resume, make the loader as it was when "
                "the state was saved; to get an error instead, call "
                "load_state_dict(state, strict=True)",
                stacklevel=program_level(),
            )
            return
        memo.load_costs(*resume["costs"])
        if resume["user_epoch"] is not None:
            self.set_epoch(resume["user_epoch"])
        if resume["begun"] and resume["sampler_epoch"] is not None:
            set_sampler_epoch(self, resume["sampler_epoch"])
        reason = self._why_torch()
        if reason is not None or not resume["begun"]:
            sources = Sources(self)
            sources.set_own(resume["generators"])
            sources.set_dataset(resume["generators"])
        if reason is None:
            resume["over"] = resume["begun"] and in_mid_epoch(resume) and begins_next_epoch(self)
            if resume["over"]:
                self._iterator = None  # of persistent workers: _get_iterator() makes the next
            memo.resume = resume
            set_pending(self, resume["as_given"])
            return
        again = resume["delivered"] + len(resume["delivered_beyond"])
        again += sum(resume["delivered_by_worker"] or [])
        units = "batches" if resume["unit"] == "batch" else "samples"
        if resume["origin"]:
            again, units = resume["position"], "samples"
        if again:
            warnings.warn(
                f"this loader uses torch's own workers ({reason}), which cannot resume in the "
                f"middle of an epoch: the epoch restarts and delivers {again} {units} again. To "
                "avoid that, skip them (itertools.islice).",
                stacklevel=program_level(),
            )

    @eager
    def stats(self) -> Stats:
        """Returns what the loader has done and waits for; docs/api.md lists the fields."""
        return cast(Stats, collect(self))

    @eager
    def report(self) -> report.Report:
        """Returns ``stats()`` as a page of text: the verdict, where the time went and what would help.
        Print it; a prompt or a notebook shows it by itself, as it shows a loader in a notebook."""
        return report.Report(title_of(self), self.stats())

    @eager
    def _repr_html_(self) -> str:
        return report.table(title_of(self), self.stats())

    @eager
    def _get_iterator(self) -> Any:
        memo = memo_of(self)
        resume = memo.resume or {}
        with memo.until_begun(self):
            iterator = self._new_iterator()
        return self._next_epoch(iterator, resume) if resume.get("over") else iterator

    def _next_epoch(self, iterator: Any, resume: State) -> Any:
        """The iterator of the epoch after a resumed one, whose rest is not asked for. The sampler has
        then drawn as without the stop."""
        if isinstance(iterator, InlineIterator):  # others draw when they are made
            iterator.draw_delivered()
        elif option(self, "scheduling") == "static" and self._dataset_kind == _DatasetKind.Map:
            next(iterator, None)  # it makes delivered batches again before it draws others
        if resume["user_epoch"] is not None:
            self.set_epoch(resume["user_epoch"] + 1)
        if resume["sampler_epoch"] is not None:
            set_sampler_epoch(self, resume["sampler_epoch"] + 1)
        if self.persistent_workers:
            iterator._reset(self)
            return iterator
        del iterator  # its workers end before others start
        return self._new_iterator()

    def _new_iterator(self) -> Any:
        if not CORE:
            warn_of_torch(self)
        for name in ("num_workers", "prefetch_factor"):  # torch accepts integers of any type
            number = vars(self).get(name)
            if number is not None and type(number) is not int:
                vars(self)[name] = operator.index(number)
        options = Options.of(self)  # attributes may have changed since the constructor
        options.check(self.num_workers, self.persistent_workers)
        options.check_effect(self)
        if self.num_workers == 0:
            return InlineIterator(self, options)
        reason = self._why_torch()
        if reason is not None:
            if options.device is not None and target(options.device).type != "cpu":
                raise ValueError(
                    f"device={options.device!r} needs minato's own workers, but torch's serve this "
                    f"loader: {reason}. Leave out device and copy batches in your program, or "
                    "use num_workers=0"
                )
            if asks_for_torchs_workers(self) is None and CORE:
                options.refuse_with_torchs_workers(reason)
            log.info("minato.DataLoader uses torch's own workers: %s", reason)
            return torchs_iterator(self)
        if self._dataset_kind == _DatasetKind.Iterable or options.static:
            return StaticIterator(self)
        if options.batching == "ready":
            return ReadyIterator(self)
        return BalancedIterator(self)

    def _why_torch(self) -> str | None:
        """Why torch's own workers serve this loader, or None."""
        if self.num_workers == 0:
            return None
        if not CORE:
            return NEEDS_LINUX
        reason = asks_for_torchs_workers(self)
        if reason is None and not _is_torchs_own():
            reason = "code that torch's workers run was replaced"
        return reason or refused()
