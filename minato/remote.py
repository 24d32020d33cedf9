"""``DataLoader(remote=minato.remote.Ray(...))``: samples are made by CPUs of other machines.

docs/remote.md says when that pays. ``workers/remote_pool.py`` does it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data.dataloader import _DatasetKind

from ._not_linux import CORE
from .dataset_calls import fetches_batches, is_stateful

if CORE:
    from .transport.layouts import is_default_collate

__all__ = ["Ray"]

#: the oldest Ray that works
OLDEST = (2, 52)
#: options of Ray's actors that minato sets itself, with what to use in their place
_OURS = {
    "num_cpus": "cpus=",
    "max_concurrency": "actors=",
    "max_restarts": "max_retries= of the loader",
    "max_task_retries": "max_retries= of the loader",
    "name": "no name: there are several actors",
    "lifetime": "no lifetime: actors end with the iterator",
}


@dataclass(frozen=True)
class Ray:
    """Actors of a Ray cluster that make samples.

    Attributes:
        actors: how many, at most; the loader goes on with those that Ray has room for.
        cpus: CPUs that Ray reserves for each.
        chunk: samples of a batch that an actor makes at a time. Batches of at most as many, those with
            a collate_fn of your own, and those of a dataset with ``__getitems__``, are made whole by
            one actor.
        options: further options of Ray's actors: ``resources``, ``runtime_env``, ``memory``,
            ``scheduling_strategy``, ...

    Raises:
        ValueError: for values that are out of range, and options that minato sets itself.
    """

    actors: int
    cpus: float = 1
    chunk: int = 4
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("actors", "chunk"):
            number = getattr(self, name)
            if type(number) is not int or number < 1:
                raise ValueError(f"{name} of remote.Ray must be an int from 1 on, got {number!r}")
        if type(self.cpus) not in (int, float) or not 0 <= self.cpus < float("inf"):
            raise ValueError(f"cpus of remote.Ray must be a number from 0 on, got {self.cpus!r}")
        if not isinstance(self.options, Mapping):
            raise ValueError(f"options of remote.Ray must be a dict, got {self.options!r}")
        for name in _OURS.keys() & self.options.keys():
            raise ValueError(
                f"options of remote.Ray must not contain {name!r}, which minato sets. Use {_OURS[name]}"
            )


def cuts(dataset: Any, collate_fn: Any, batched: bool) -> bool:
    """Whether several actors may make samples of one batch."""
    by_default = collate_fn is None or is_default_collate(collate_fn)
    return batched and by_default and not fetches_batches(dataset)


def threads(remote: Ray, batch_size: int, cuts: bool) -> int:
    """Threads of the trainer that wait for actors: with as many batches under way, each actor has
    a second chunk when it ends one."""
    calls = -(-batch_size // remote.chunk) if cuts else 1  # of a batch
    return max(2, -(-2 * remote.actors // calls))


def check_type(remote: Any) -> None:
    """Raises ValueError if it is not a Ray of this module."""
    if not isinstance(remote, Ray):
        raise ValueError(f"remote must be None or a minato.remote.Ray, got {remote!r}")


def connected() -> Any:
    """The module ``ray``, if this process is part of a cluster.

    Raises:
        ImportError: if Ray is missing or too old.
        ValueError: if it is not initialised. minato never starts a cluster.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            "remote= needs Ray, which is not installed: pip install 'minato-loader[ray]'"
        ) from error
    found = tuple(int(n) for n in re.findall(r"\d+", ray.__version__)[:2])
    if found < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ImportError(f"remote= needs Ray {oldest} or later, found {ray.__version__}")
    if not ray.is_initialized():
        raise ValueError(
            "remote= needs a cluster, but Ray is not initialised in this process. Call ray.init() "
            "before the loader is made; ray.init(address='auto') joins the cluster of this machine"
        )
    return ray


def each_node(remote: Ray) -> dict[str, Ray]:
    """One actor on each node that has its CPUs, by the node's name."""
    ray, found = connected(), {}
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    for node in ray.nodes():
        if node["Alive"] and node["Resources"].get("CPU", 0) >= remote.cpus:
            there = affinity(node["NodeID"], soft=False)
            options = {**remote.options, "scheduling_strategy": there}
            name = f"node {node['NodeManagerAddress']} ({node['NodeID'][:8]})"
            found[name] = replace(remote, actors=1, options=options)
    return found


def check(loader: Any, options: Any) -> None:
    """Raises an error if a loader cannot be served by actors. options: its ``Options``."""
    check_type(options.remote)
    refused = {
        "an iterable dataset: its position would be lost with an actor":
            loader._dataset_kind == _DatasetKind.Iterable,
        "a dataset with state_dict(): each actor has its own copy, without a position":
            is_stateful(loader.dataset),
        "scheduling='static', which needs processes of this machine": options.static,
        f"worker_type={options.worker_type!r}: its workers are threads": options.worker_type != "thread",
        "multiprocessing_context=: actors are no processes of this machine":
            loader.multiprocessing_context is not None,
        "cache=, which belongs to one machine": options.cache is not None,
        "autoscale=: the number of actors is fixed": options.autoscale is not None,
        "batching='ready': actors return whole batches": options.batching == "ready",
        "sample_timeout=: an actor is not killed for one sample": options.sample_timeout is not None,
    }  # fmt: skip
    for reason in (reason for reason, applies in refused.items() if applies):
        raise ValueError(f"remote= cannot be combined with {reason}. Leave one of the two out.")
    connected()
