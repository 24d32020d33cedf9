"""Which ranks share an epoch, and which of its samples this process makes.

Ranks that draw the same random numbers would repeat each other's augmentations. If the sampler says
how it deals samples to ranks, a sample's seed therefore uses its position in the whole epoch.
Otherwise it uses the rank of the process. Nothing here communicates: a loader that only one rank
iterates over, for validation say, does not wait for the others.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data.dataloader import _DatasetKind

from ..dataset_calls import attribute
from ..option_values import option
from .order_generators import PLAIN_SAMPLERS, batch_size_of

#: attributes of Megatron's and NeMo's samplers for (number of ranks, own rank, samples in a batch of
#: one rank). Tensor-parallel ranks have the same number there.
_OF_MEGATRON = ("data_parallel_size", "data_parallel_rank", "micro_batch_size")
#: the same of torch's samplers and derived classes, and of MMEngine's
_OF_SAMPLERS = (
    ("num_replicas", "rank", "batch_size"), ("world_size", "rank", "batch_size"), _OF_MEGATRON,
)  # fmt: skip
#: of Accelerate's and Transformers' shards, which deal whole batches
_OF_SHARDS = ("num_processes", "process_index", "batch_size")
#: environment variables of launchers for the same: torchrun, Open MPI, the MPIs with Hydra, Slurm
_OF_LAUNCHERS = (
    ("WORLD_SIZE", "RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("SLURM_NTASKS", "SLURM_PROCID"),
)
#: limit on nested samplers that are searched
_DEPTH = 8


class Ranks(NamedTuple):
    """The share of an epoch that one process makes.

    Attributes:
        rank: this process's number, from 0 on.
        world: the number of ranks.
        block: how many consecutive samples of the epoch one rank gets at a time, if the sampler
            says how it deals them; None otherwise.
    """

    rank: int
    world: int
    block: int | None

    @property
    def dealt(self) -> bool:
        """Whether each sample's position in the whole epoch is known."""
        return self.block is not None

    def for_seeds(self) -> tuple[int, int, int]:
        """The arguments of ``Seeder.share()``."""
        return (self.rank, 0, 1) if self.block is None else (self.rank, self.world, self.block)


#: of a process that loads the whole epoch
ALONE = Ranks(0, 1, 1)


def ranks_of(loader: Any, launched: Ranks | None = None) -> Ranks:
    """The share of an epoch that this process makes, from the loader's sampler, or else from
    ``torch.distributed`` or the launcher. ``loader.seed_rank`` replaces the rank.
    launched: the result of ``by_launcher()``, if that is to be used.

    Raises:
        ValueError: seed_rank is not among the ranks that the sampler deals to.
    """
    ranks = _of_sampler(loader) or of_process(launched)
    chosen = option(loader, "seed_rank")
    if chosen is None:
        return ranks
    if ranks.world > 1 and ranks.dealt and chosen >= ranks.world:
        raise ValueError(
            f"seed_rank={chosen}, but the loader's sampler deals samples to {ranks.world} ranks: "
            f"give a number below {ranks.world}"
        )
    if ranks.world > 1 and ranks.dealt:
        return ranks._replace(rank=chosen)
    return Ranks(chosen, max(ranks.world, chosen + 1), None)


def _of_sampler(loader: Any) -> Ranks | None:
    if loader._dataset_kind == _DatasetKind.Iterable:
        return _of_part(loader.dataset, False)
    of_parts = (_of_part(*part) for part in samplers_of(loader) if type(part[0]) not in PLAIN_SAMPLERS)
    return next((ranks for ranks in of_parts if ranks is not None), None)


def samplers_of(loader: Any) -> Iterator[tuple[Any, bool]]:
    """The loader's batch sampler and those inside it, then its sampler and those inside that. Each
    with whether it gives batches."""
    part, gives_batches = loader.batch_sampler, True
    if part is None:
        part, gives_batches = loader.sampler, False
    for _ in range(_DEPTH):
        if part is None:
            return
        yield part, gives_batches
        inner = attribute(part, "batch_sampler") if gives_batches else None
        if inner is None:
            inner, gives_batches = attribute(part, "sampler"), False
        part = inner


def deals_batches(part: Any) -> bool:
    """Whether a sampler deals whole batches of another to ranks, as Accelerate's does."""
    return _of_part(part, True) is not None and _number(part, _OF_SHARDS[0]) is not None


def is_megatrons(part: Any) -> bool:
    """Whether it is a sampler of Megatron's or NeMo's."""
    return _number(part, _OF_MEGATRON[1]) is not None


def batch_of_rank(loader: Any, ranks: Ranks) -> int | None:
    """How many samples one rank gets in a batch; None if the batch sampler does not say."""
    if attribute(loader.batch_sampler, "split_batches"):
        return ranks.block
    size = batch_size_of(loader)
    if size is None and loader.batch_sampler is None:
        return 1
    return size if size is not None or ranks.block == 1 else ranks.block


def _of_part(part: Any, gives_batches: bool) -> Ranks | None:
    for names in (*_OF_SAMPLERS, _OF_SHARDS):
        world_name, rank_name, batch_name = names
        world = _number(part, world_name)
        if world is None and names is _OF_MEGATRON:
            world = _megatrons_world(part)
        rank = None if world is None else _number(part, rank_name)
        if world is None or rank is None or not 0 <= rank < world:
            continue
        block = None
        if gives_batches or names is _OF_SHARDS:
            block = _number(part, batch_name)
            if block is not None and attribute(part, "split_batches"):
                block //= world  # each batch is cut into one piece per rank
        # Without a size, positions are not the real ones, but no two ranks have the same.
        return Ranks(rank, world, block if block is not None and block > 0 else 1)
    return None


def _megatrons_world(part: Any) -> int | None:
    """The number of ranks that a sampler of Megatron's gives as a product with its batch size."""
    product = _number(part, "micro_batch_times_data_parallel_size")
    size = _number(part, "micro_batch_size")
    return product // size if product is not None and size is not None and size > 0 else None


def _number(part: Any, name: str) -> int | None:
    value = attribute(part, name)
    if value is None or isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def of_process(launched: Ranks | None = None) -> Ranks:
    """The ranks by ``torch.distributed``, or else by the launcher."""
    return _of_group() or launched or by_launcher()


def _of_group() -> Ranks | None:
    """The ranks of the default process group, if there is one."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    rank, world = distributed.get_rank(), distributed.get_world_size()
    return Ranks(rank, world, None) if world > 1 and rank >= 0 else ALONE


def by_launcher() -> Ranks:
    """The ranks by the launcher's current environment variables. Persistent workers keep those of
    their start."""
    for world_name, rank_name in _OF_LAUNCHERS:
        try:  # faster than get() if it is missing, as in most programs
            world_text, rank_text = os.environ[world_name].strip(), os.environ[rank_name].strip()
        except KeyError:
            continue
        if world_text.isdecimal() and rank_text.isdecimal():
            rank, world = int(rank_text), int(world_text)
            if world > 1 and rank < world:
                return Ranks(rank, world, None)
            if world == 1:
                return ALONE  # the first launcher takes precedence
    return ALONE
