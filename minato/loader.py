"""``minato.DataLoader``: torch's class with another engine under it."""

from __future__ import annotations

import copy
import logging
import operator
import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar, cast

import torch
from torch.utils.data import Dataset, Sampler, _utils
from torch.utils.data.dataloader import _DatasetKind

from ._dynamo import eager
from ._not_linux import CORE, NEEDS_LINUX, tell_of_torch
from ._system_refusals import refused
from .dataset_calls import attribute
from .device.provider import target
from .frameworks import begins_instead, goes_on_in_step, is_strict
from .iterators.across_iterators import memo_of, set_pending
from .iterators.inline import InlineIterator
from .observe import report
from .observe.stats import collect
from .option_values import option
from .options import Options, asks_for_torchs_workers, described
from .progress import title_of
from .seeding.order_generators import Sources, set_sampler_epoch
from .state import OfAnotherRank, opened, state_of
from .stateful import is_stateful
from .typing import Batching, OnError, Scheduling, Stats, WorkerType

if CORE:
    from .iterators.balanced import BalancedIterator
    from .iterators.ready import ReadyIterator
    from .iterators.static_and_iterable import StaticIterator

log = logging.getLogger("minato")

_T_co = TypeVar("_T_co", covariant=True)

_SCHEDULING = cast(Scheduling, os.environ.get("MINATO_SCHEDULING", "balanced"))

#: as it is before ``patch_torch()``
torchs_iterator = torch.utils.data.DataLoader._get_iterator


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
            ``cost_hint(index, *, seed=None, epoch=None) -> float | None``, what a sample will
            cost, in seconds or any other unit; see ``minato.draws``; and
            ``locality_key(index)``, any hashable: samples of the same key that follow each
            other share what is opened for them, and are made by one worker).
        seed_rank: whose random numbers this process draws when several ranks load. ``None``: those
            of the sampler's rank, where the sampler (or batch sampler) says how it deals samples
            to ranks, as ``DistributedSampler`` does: a sample is then seeded by its position in
            the whole epoch. Elsewhere the rank of this process counts, by ``torch.distributed``
            or the launcher's environment variables. An int from 0 on: that rank. Ranks that must
            load identical batches (one tensor-parallel group) and have samplers that name no
            rank give the same number.
        memory_limit: ceiling in bytes (int, or text such as ``"8GiB"``) of the memory shared
            with workers, batches that the program keeps included; past half of it batches
            are copied to ordinary memory. ``None``: half of what is available,
            shared between the processes that a launcher such as torchrun has started here.
        batching: ``"sampler"`` keeps the sampler's batches. ``"ready"`` fills batches with
            whichever samples are ready first, slow ones with their natural share and none
            further than ``minato.iterators.ready.DISPLACEMENT`` batches from its place; needs
            ``in_order=False``, a map-style dataset and torch's plain ``BatchSampler``. With a
            collate_fn of your own, which workers run as ever, whole batches of the sampler
            come as they are ready.
        worker_type: ``"process"``: worker processes, for any dataset. ``"thread"``: Python threads
            of this process, for map-style datasets whose samples let go of the GIL; the dataset
            is shared and not copied. Generators that threads share are not seeded: what
            ``seed_sample`` seeds is, and what lies in a ``threading.local``. ``"native"``: threads
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
            ``set_epoch`` in between, the loader's or its sampler's own, discards what was begun, as
            giving the sampler another generator or other weights does, and any change of its
            attributes: of plain values, and of what lists, tensors and arrays hold. (Not seen: a
            change of what lies deeper, and of more than 4,096 elements or 256 KiB that a sampler
            other than torch's own holds and that are changed in place without torch.) What the sampler raises then is raised in its turn.
        device: batches arrive there (``"cuda"``, ``"cuda:1"``, a ``torch.device``): copied ahead of
            ``next()`` on a stream of minato's own, after which what the program does on its
            current stream waits, and the program itself does not. ``"cuda"`` is the device
            that is current when the iterator is made. Containers are gone into as
            ``pin_memory`` does, and dataclasses, too; what is no tensor stays as it is, but
            for objects with a ``to(device)`` of their own. Pipelines of ``minato.ops`` end on
            a CUDA device where they can. ``pin_memory`` is not needed beside it. ``"cpu"`` and ``None``: nothing is copied.
        max_retries: times a sample is given to another worker after its worker died, before
            ``minato.WorkerLost`` is raised. Always 0 for ``scheduling="static"`` and iterable
            datasets, whose workers cannot be replaced, and for threads, which cannot be killed:
            more than the default is refused.
        on_error: ``"raise"``: a sample that raises ends its batch with that error, as in torch's
            loader. ``"skip"``: it is left out and counted, and the batch is smaller (one that
            has no sample left is not delivered). ``"replace"``: another sample of the same epoch
            is made in its place, the same one however many workers there are, so batches keep
            their size. A sample that calls ``sys.exit()`` in a worker, that cannot be pickled, or that
            kills ``max_retries`` + 1 workers (not with ``scheduling="static"`` or
            ``batching="ready"``) counts, too. For map-style datasets; errors of a collate_fn, and of a ``__getitems__``
            that returns no list of samples, always raise.
        max_errors: with ``on_error`` other than ``"raise"``: samples of an epoch that may fail,
            as a number (int), or as a share of the epoch (float; one is always allowed). One
            more raises the first of their errors.
        pending_state: the state that the next iterator goes on from: ``load_state_dict()`` sets this
            attribute and the iterator clears it. Copies, pickles and libraries that rebuild a loader
            from its attributes hand it on, so the loader that they make goes on from there.

    Raises:
        ValueError: for arguments that make no sense, with torch's texts for torch's, and for
            most options of minato's that would have no effect for the dataset or the scheduling.
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
    device: str | int | torch.device | None = None
    pending_state: dict[str, Any] | None = None

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
        device: str | int | torch.device | None = None,
        pending_state: dict[str, Any] | None = None,
    ) -> None:
        options = Options(
            scheduling=scheduling,
            seed_per_sample=seed_per_sample,
            seed_rank=seed_rank,
            memory_limit=memory_limit,
            max_retries=max_retries,
            batching=batching,
            worker_type=worker_type,
            autoscale=autoscale,
            straggler_threshold=straggler_threshold,
            prefetch_next_epoch=prefetch_next_epoch,
            on_error=on_error,
            max_errors=max_errors,
            device=device,
            pending_state=pending_state,
        )
        options.check(num_workers, persistent_workers)
        options.put(self)
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
        options.check_effect(self)

    @eager
    def __repr__(self) -> str:
        """The dataset and its length, how it is cut into batches, the workers, and what is not
        the default of minato's own options. Whatever state the loader is in."""
        return described(self)

    @eager
    def set_epoch(self, epoch: int) -> None:
        """Tells sampler, batch sampler and dataset of a new epoch, where they have
        ``set_epoch``; copies of the dataset in persistent workers hear of it, too.

        Raises:
            TypeError: for what is no whole number.
            ValueError: for one below 0 or from 2**63 on.
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
    def state_dict(self) -> dict[str, Any]:
        """Where the latest iterator stands, counted by what was handed to the caller.

        Plain data that survives ``torch.save`` and JSON; starts no worker and draws nothing.
        Holds the epoch, the base seed, the position, the states of the generators that the
        order comes from, and learned costs; see ``minato.state`` for the fields. An iterable
        dataset, or its iterator, that has ``state_dict()`` and ``load_state_dict()`` (as
        torchdata's ``Stateful`` has) is asked for its own state, in the workers, as of the last
        batch that each has delivered; where that raises, so does this. So is a sampler,
        as of the last batch delivered; with ``scheduling="static"``, ``batching="ready"`` and
        ``on_error="replace"``, and where a batch sampler of the program's draws from it, as of the
        end of the epoch before, and the epoch's indices are drawn again. Where torch's own workers
        serve the loader (DataPipes, custom multiprocessing contexts), which count nothing, it knows
        the epoch and no position in it, and warns once.
        """
        memo = memo_of(self)
        if memo.resume is not None:
            as_given: dict[str, Any] = copy.deepcopy(memo.resume["as_given"])
            return as_given
        reason = self._why_torch()
        if reason is not None and not memo.told_uncounted:
            memo.told_uncounted = True
            warnings.warn(
                f"this loader uses torch's own workers ({reason}), and those count nothing: "
                "its state holds the epoch it is in and no position within that. To go on in the "
                "middle of one, count the batches that you take, and skip as many.",
                stacklevel=2,
            )
        elif reason is None and not memo.told_unasked and self._shares_a_stateful_dataset():
            memo.told_unasked = True
            warnings.warn(
                f"the dataset, a {type(self.dataset).__name__}, has a state_dict() that is not asked: "
                "each of its samples is made by whichever worker is free, so no copy of it is in a "
                "place of its own. What its samples need to know, keep in the program, or use "
                "scheduling='static'. This is told once.",
                stacklevel=2,
            )
        return state_of(self, memo, counted=reason is None)

    def _shares_a_stateful_dataset(self) -> bool:
        balanced = self.num_workers > 0 and option(self, "scheduling") != "static"
        return balanced and self._dataset_kind == _DatasetKind.Map and is_stateful(self.dataset)

    @eager
    def load_state_dict(self, state: dict[str, Any], strict: bool | None = None) -> None:
        """The next iterator goes on where ``state`` was taken, in any process.

        In order, the rest of the epoch is the same bit for bit with any number of workers;
        out of order, exactly the samples not delivered yet come. Iterable datasets with a state
        of their own go on from it, with each worker's streams of random numbers. Others, and
        ``scheduling="static"``, make what was delivered again and throw it away, and random
        streams of persistent workers only come back in their first epoch. Both need the same
        number of workers. Without workers a sample's randomness is the program's own to restore.
        The epoch that ``set_epoch`` was told is told again. Of a state between two epochs the
        samplers' generators are set at once (without workers, those of an iterable dataset, too), so
        what a sampler or dataset is told after that counts. An empty dict begins anew, with
        generators as they are. Where torch's own workers serve the loader, an epoch that was left in
        the middle begins anew, with a warning.

        Args:
            state: what ``state_dict()`` has returned.
            strict: what happens when the state does not fit this loader. ``True``: ValueError.
                ``False``: one warning, and the epoch begins as the program has set it up, as with
                torch's loader. ``None``: as ``False`` if a framework such as Lightning
                calls (one of ``minato.frameworks.FRAMEWORKS``), and as ``True`` if other code does.

        Raises:
            ValueError: for what is no state of this class, or of another loader.
        """
        memo = memo_of(self)
        if state == {}:
            memo.resume = memo.progress = memo.sampler_end = None
            set_pending(self, None)
            return
        try:
            resume = opened(state, self)
        except ValueError as error:
            if is_strict(strict, self):
                raise
            if not isinstance(error, OfAnotherRank):
                warnings.warn(begins_instead(error), stacklevel=2)
                return
            resume = opened(state, self, in_step=True)
            warnings.warn(goes_on_in_step(error), stacklevel=2)
        memo.load_costs(*resume["costs"])
        if resume["user_epoch"] is not None:
            self.set_epoch(resume["user_epoch"])
        if resume["begun"] and resume.get("sampler_epoch") is not None:
            set_sampler_epoch(self, resume["sampler_epoch"])
        reason = self._why_torch()
        if reason is not None or not resume["begun"]:
            sources = Sources(self)
            sources.set_own(resume["generators"])
            sources.set_dataset(resume["generators"])
        if reason is None:
            memo.resume = resume
            set_pending(self, resume["as_given"])
            return
        again = resume["delivered"] + len(resume["delivered_beyond"])
        again += sum(resume["delivered_by_worker"] or [])
        if again:
            units = "batches" if resume["unit"] == "batch" else "samples"
            warnings.warn(
                f"this loader uses torch's own workers ({reason}), which cannot go on in the "
                f"middle of an epoch: it begins anew, and {again} {units} come again. Skip them "
                "(itertools.islice) where they should not.",
                stacklevel=2,
            )

    @eager
    def stats(self) -> Stats:
        """What the loader has done and waits for; see ``minato.observe.stats`` for the fields."""
        return cast(Stats, collect(self))

    @eager
    def report(self) -> None:
        """Prints ``stats()`` as a page: the verdict, where the time went and what would help. A
        notebook shows the same for a loader that is the last expression of a cell."""
        print(report.page(title_of(self), collect(self)))

    @eager
    def _repr_html_(self) -> str:
        return report.table(title_of(self), collect(self))

    @eager
    def _get_iterator(self) -> Any:
        with memo_of(self).until_begun(self):
            return self._new_iterator()

    def _new_iterator(self) -> Any:
        if not CORE:
            tell_of_torch(self)
        for name in ("num_workers", "prefetch_factor"):  # torch takes integers of any type
            number = vars(self).get(name)
            if number is not None and type(number) is not int:
                vars(self)[name] = operator.index(number)
        options = Options.of(self)  # the constructor has not seen what was set since
        options.check(self.num_workers, self.persistent_workers)
        options.check_effect(self)
        if self.num_workers == 0:
            return InlineIterator(self, options)
        reason = self._why_torch()
        if reason is not None:
            if options.device is not None and target(options.device).type != "cpu":
                raise ValueError(
                    f"device={options.device!r} needs minato's own workers, but torch's serve this "
                    f"loader: {reason}. Leave device out and copy batches in your program, or "
                    "use num_workers=0"
                )
            if asks_for_torchs_workers(self) is None and CORE:
                options.told_of_torchs_workers(reason)
            log.info("minato.DataLoader uses torch's own workers: %s", reason)
            return torchs_iterator(self)
        self.check_worker_number_rationality()
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
