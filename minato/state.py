"""Position of a loader as plain data: ``state_dict`` and ``load_state_dict``.

What is kept: what the caller was handed, the base seed, the epoch, the states of the
generators that the sampler drew from when the epoch began, and what samples have cost.
The sampler is run again and what was delivered is left out, so nothing depends on workers;
under balanced scheduling the seeds of the rest depend on its place in the sampler's order
only.  ``scheduling="static"``, iterable datasets that say nothing of themselves and loaders
without workers keep their randomness and place elsewhere, so there delivered batches may be
made again and thrown away.

A sampler gives the same order again from its generators (seeding/order_generators.py) and from
what ``set_epoch`` tells it. One that goes by anything else (a count of its own epochs, say) has a state of its own,
see iterators/sampler_states.py, or has to be put there by the program, before the loader is
iterated. What an iterable dataset says of itself: stateful.py.

Fields of a state:

version, epoch          of the format; of the seeds (persistent workers count epochs on)
base_seed               of the epoch; None: the next epoch draws one as it begins
begun                   whether the epoch has; else it begins with the generators as they are, and
                        with what the program says of it after load_state_dict()
generators              states by role: ``sampler`` (its ``generator``), ``sampler.NAME`` and
                        ``batch_sampler.NAME`` (others that a sampler holds as attributes;
                        ``batch_sampler.NAME.NAME`` and so on, where samplers hold samplers),
                        ``loader`` (its own, where no sampler holds it), ``dataset.NAME`` (those
                        that an iterable dataset holds, without workers), ``torch``,
                        ``python``, ``numpy`` (the global ones, as the epoch found them, where
                        the order may come from them)
delivered               batches before this number were handed over,
delivered_beyond        and these after it
unit                    or samples, for ``batching="ready"``
failed                  samples of those that on_error has left out or replaced
delivered_by_worker     iterable datasets: batches of each worker instead; else None
sampler                 what a sampler says of itself, where it does: ``drawn`` of its indices
                        before, with so many samples (``position``), ``begins`` (an epoch), and
                        ``sampler`` and ``iterator`` as their own ``state_dict()`` gave it
worker_states           of each worker what an iterable dataset says of itself, where it does:
                        ``dataset`` and ``iterator`` as their own ``state_dict()`` gave it,
                        ``ended`` (its last batch was not full), ``begins`` (an epoch, and has
                        no iterator yet), ``generators`` (the global ones that it had drawn
                        from) and ``again`` (batches delivered since); None: still at its
                        beginning. Without workers there is one, of a map-style dataset, too
user_epoch              what ``set_epoch`` was told before the epoch began, or None
sampler_epoch           what the sampler's own set_epoch was told before the epoch began, where the
                        sampler keeps it as its attribute ``epoch``; else None
dataset_length, batch_size  to recognise another loader
rank, world             of the process that took it, and how many ranks loaded
block                   how many consecutive samples the sampler dealt to one rank at a time;
                        None: it did not say (see seeding/ranks.py)
costs                   what samples have cost, by index: see pack_costs()
"""

from __future__ import annotations

import base64
import binascii
import copy
import pickle
import warnings
import zlib
from typing import Any

import numpy as np
from torch.utils.data.dataloader import _DatasetKind

from .option_values import option
from .progress import Progress, length_of
from .seeding.order_generators import Sources, batch_size_of, portable
from .seeding.ranks import Ranks, ranks_of
from .stateful import MOST_BYTES, Snapshot, check_can_be_told, plain

#: of a loader: what state_dict() gives, or as opened() has made it ready for iterators
State = dict[str, Any]
#: of a worker: a pickled Snapshot, and batches to be made again after it
Start = tuple["bytes | None", int]

VERSION = 2
#: 1 had costs as three lists of 64-bit numbers: index, wall and CPU time
READS = (1, VERSION)

#: samples whose costs are remembered one by one (12 bytes each); of a longer dataset the
#: rest only enters the mean
COSTS_MOST = 1 << 22


def pack(data: bytes) -> str:
    """Bytes as text for JSON."""
    return base64.b64encode(zlib.compress(data, 1)).decode("ascii")


def unpack(text: str, most: int) -> bytes:
    """What pack() was given; ValueError for anything else, and for more bytes than these, which
    are not made: a few kilobytes of text may stand for gigabytes."""
    try:
        stream = zlib.decompressobj()
        data = stream.decompress(base64.b64decode(text, validate=True), most + 1)
        if len(data) <= most and not stream.eof:
            raise ValueError("its end is missing")
    except (TypeError, ValueError, binascii.Error, zlib.error) as error:
        raise ValueError(f"the state is damaged: {error}") from None
    if len(data) > most:
        raise ValueError(f"the state is damaged: what is packed has more than {most} bytes")
    return data


def _unpack_generators(texts: dict[str, str]) -> dict[str, bytes]:
    """All of them together are no more than what a worker may say of itself, which has them."""
    found, left = {}, MOST_BYTES
    for role, text in texts.items():
        found[role] = unpack(text, left)
        left -= len(found[role])
    return found


def pack_costs(parts: tuple[bytes, bytes]) -> list[str]:
    """Costs as CostModel.save() gives them, as two texts: the steps from one index to the next,
    and wall times in nanoseconds with eight bits of mantissa. A prediction needs no more, and
    millions of them are packed in a fraction of a second."""
    index, wall = (np.frombuffer(part, np.int64) for part in parts)
    bits = wall.astype(np.float32).view(np.uint32)
    halves = ((bits + np.uint32(1 << 15)) >> np.uint32(16)).astype(np.uint16)
    steps = np.diff(index, prepend=0).astype(np.uint32)
    return [pack(steps.tobytes()), pack(halves.tobytes())]


def unpack_costs(texts: list[str]) -> list[bytes]:
    """What CostModel.load() takes; ValueError where that is not to be had from the texts."""
    each = (4, 2) if len(texts) == 2 else (8, 8, 8)  # bytes; see pack_costs()
    parts = [unpack(text, COSTS_MOST * size) for text, size in zip(texts, each)]
    if len(parts) == 3:  # CPU times were the third, and always 0
        return parts[:2]
    if len(parts[0]) != 2 * len(parts[1]) or len(parts[0]) % 4:
        raise ValueError("the state is damaged: the lengths of costs differ")
    steps, halves = np.frombuffer(parts[0], np.uint32), np.frombuffer(parts[1], np.uint16)
    index = np.cumsum(steps, dtype=np.int64)
    wall = (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if not np.isfinite(wall).all() or (wall < 0).any() or (wall >= 2.0**62).any():
        raise ValueError("the state is damaged: a cost is no time")
    return [index.tobytes(), wall.astype(np.int64).tobytes()]




def state_of(loader: Any, memo: Any, counted: bool = True) -> State:
    """The state as plain data that survives torch.save and JSON. Not counted: of a loader
    whose iterators say nothing of their position."""
    progress = memo.progress if counted else None
    length = length_of(loader)
    progress = progress or Progress(user_epoch=memo.user_epoch, dataset_length=length)
    sources = Sources(loader)
    now = sources.capture(everything=False)
    state: dict[str, Any] = {
        "version": VERSION,
        "epoch": progress.epoch,
        "base_seed": progress.base_seed,
        "begun": progress.base_seed is not None and not (progress.finished or progress.early),
        "delivered": progress.head,
        "delivered_beyond": sorted(progress.beyond),
        "unit": progress.unit,
        "delivered_by_worker": progress.by_worker and list(progress.by_worker),
        "user_epoch": progress.user_epoch - 1 if progress.user_epoch else None,
        "dataset_length": progress.dataset_length,
        "batch_size": batch_size_of(loader),
        "failed": progress.failed,
    }
    state["sampler_epoch"] = progress.sampler_epoch
    state.update((progress.ranks or ranks_of(loader))._asdict())
    generators = now
    stale = progress.early and progress.user_epoch != memo.user_epoch
    if stale:
        # It was begun for nothing, and will be begun again.
        generators = {r: (progress.generators or {}).get(r, now[r]) for r in now}
        state["user_epoch"] = memo.user_epoch - 1 if memo.user_epoch else None
    elif progress.finished:
        # Between epochs: the next one begins with the generators as they are now.
        state.update(delivered=0, delivered_beyond=[], delivered_by_worker=None, failed=0)
        state.update(epoch=progress.epoch + 1 if progress.persistent else 0)
        state["dataset_length"] = length
        if not progress.persistent:
            state["base_seed"] = None
        state["user_epoch"] = memo.user_epoch - 1 if memo.user_epoch else None
    elif progress.generators is not None:
        generators = {**now, **progress.generators}
        if "loader" in now:
            generators["loader"] = now["loader"]  # base seeds alone come from it
    if progress.draws_late and state["begun"]:
        warnings.warn(
            "the sampler draws from a global generator (torch's, NumPy's or that of random) while "
            "it is iterated, so what it gives depends on what the program draws meanwhile: when "
            "the epoch goes on from this state, samples may come twice or not at all. Give the "
            "sampler a generator of its own",
            stacklevel=3,
        )
    state["sampler"] = None if progress.sampler is None else progress.sampler.state()
    state["worker_states"] = _worker_states(progress)
    state["generators"] = {role: pack(portable(data)) for role, data in generators.items()}
    state["costs"] = memo.packed_costs()
    return state


def _worker_states(progress: Progress) -> list[Any] | None:
    """What datasets say of themselves. Between epochs that is what a map-style one says without
    workers; of persistent workers' iterables their generators go on."""
    kept = progress.kept
    if not any(one.known() for one in kept) or (progress.finished and not progress.lives_on):
        return None
    states: list[Any] = []
    for one in kept:
        snapshot, again = one.snapshot(), one.again
        if progress.finished:
            dataset = None if progress.by_worker else snapshot.dataset
            snapshot, again = Snapshot(dataset, None, False, True, snapshot.generators), 0
        state: dict[str, Any] = {**snapshot._asdict(), "again": again}
        if snapshot.generators is not None:
            state["generators"] = {r: pack(s) for r, s in plain(snapshot.generators).items()}
        states.append(state if one.known() or again else None)
    return states


_FIELDS: dict[str, tuple[type, ...]] = {
    "epoch": (int,),
    "base_seed": (int, type(None)),
    "generators": (dict,),
    "delivered": (int,),
    "delivered_beyond": (list,),
    "delivered_by_worker": (list, type(None)),
    "unit": (str,),
    "user_epoch": (int, type(None)),
    "dataset_length": (int, type(None)),
    "batch_size": (int, type(None)),
    "costs": (list,),
}


#: of a worker's state
_OF_WORKERS: dict[str, tuple[type, ...]] = {
    "ended": (bool,),
    "begins": (bool,),
    "generators": (dict, type(None)),
    "again": (int,),
}


def _whole_numbers(values: list[Any]) -> bool:
    return all(type(v) is int and v >= 0 for v in values)


def _check_form(state: Any) -> None:
    if not isinstance(state, dict) or "version" not in state:
        raise ValueError(
            "this is not a state of minato.DataLoader (no 'version'); pass what "
            "state_dict() returned"
        )
    if type(state["version"]) is not int or state["version"] not in READS:
        raise ValueError(
            f"the state was written by another version of minato (format {state['version']}, "
            f"this one reads {VERSION})"
        )
    missing = sorted(set(_FIELDS) - set(state))
    if missing:
        raise ValueError(f"the state is incomplete: {', '.join(missing)} missing")
    for name, types in _FIELDS.items():
        if not isinstance(state[name], types) or isinstance(state[name], bool):
            raise ValueError(f"the state is damaged: {name} is {state[name]!r}")
    if not isinstance(state.get("begun", True), bool):  # older ones have none
        raise ValueError(f"the state is damaged: begun is {state['begun']!r}")
    lists = (state["delivered_beyond"], state["delivered_by_worker"] or [])
    numbers = [state["epoch"], state["delivered"], state["user_epoch"] or 0]
    if state.get("sampler_epoch") is not None:  # older states have none
        numbers.append(state["sampler_epoch"])
    numbers.append(state.get("failed", 0))  # states of before on_error have none
    if not all(_whole_numbers(v) for v in (*lists, numbers)) or max(numbers) >= 2**63:
        raise ValueError("the state is damaged: a count is no whole number of 63 bits")
    _check_sampler(state.get("sampler"), state["delivered"])
    _check_worker_states(state.get("worker_states"))  # states of before it have none
    if state.get("rank") is not None:  # states of before there were ranks have none
        _check_ranks(state)
    if len(state["costs"]) != (3 if state["version"] == 1 else 2):
        raise ValueError("the state is damaged: costs are two lists")


def _check_ranks(state: State) -> None:
    numbers: list[Any] = [state.get(name) for name in Ranks._fields]
    if numbers[2] is None:
        numbers[2] = 1
    if not _whole_numbers(numbers) or numbers[0] >= numbers[1] or numbers[2] == 0:
        raise ValueError("the state is damaged: rank {!r} of {!r}, blocks of {!r}".format(*numbers))


def _check_sampler(said: Any, delivered: int) -> None:
    if said is None:
        return
    fields = {"drawn": int, "position": int, "begins": bool, "sampler": object, "iterator": object}
    sound = isinstance(said, dict) and set(said) == set(fields)
    if not sound or not all(isinstance(said[name], kind) for name, kind in fields.items()):
        raise ValueError(f"the state is damaged: sampler is {said!r}")
    if not _whole_numbers([said["drawn"], said["position"]]) or said["position"] >= 2**63:
        raise ValueError("the state is damaged: counts of its sampler are no whole numbers")
    if said["drawn"] > delivered:
        raise ValueError(
            f"the state is damaged: its sampler goes on behind {said['drawn']} batches, and "
            f"{delivered} were delivered"
        )


def _check_worker_states(states: Any) -> None:
    if states is None:
        return
    if not isinstance(states, list):
        raise ValueError(f"the state is damaged: worker_states is {states!r}")
    for number, state in enumerate(states):
        if state is None:
            continue
        fields = {"dataset", "iterator", *_OF_WORKERS}
        if not isinstance(state, dict) or set(state) != fields:
            raise ValueError(f"the state is damaged: worker_states[{number}] has not its fields")
        for name, types in _OF_WORKERS.items():
            if not isinstance(state[name], types) or (name == "again" and state[name] < 0):
                raise ValueError(
                    f"the state is damaged: {name} of worker_states[{number}] is {state[name]!r}"
                )


def _in_mid_epoch(state: State) -> bool:
    counts = state["delivered_by_worker"] or []
    return bool(state["delivered"] or state["delivered_beyond"] or any(counts))


def _check_fit(state: State, loader: Any) -> None:
    """Only in mid-epoch: a new epoch may begin with whatever there is."""
    by_worker = state["delivered_by_worker"]
    if not _in_mid_epoch(state):
        return
    ready = option(loader, "batching") == "ready" and loader.num_workers > 0
    unit = "sample" if ready else "batch"
    if state["unit"] != unit:
        raise ValueError(
            f"the state counts by {state['unit']}, this loader by {unit}: in mid-epoch "
            "batching must be what it was"
        )
    iterable = loader._dataset_kind == _DatasetKind.Iterable
    if iterable != (by_worker is not None):
        kinds = ("a map-style", "an iterable")
        raise ValueError(
            f"the state is of {kinds[not iterable]} dataset, this loader has "
            f"{kinds[iterable]} one"
        )
    if iterable and (state["delivered"] or state["delivered_beyond"]):
        raise ValueError("the state is damaged: batches of an iterable dataset count by worker")
    for name, mine in (
        ("dataset_length", length_of(loader)),
        ("batch_size", batch_size_of(loader)),
    ):
        if None not in (mine, state[name]) and mine != state[name]:
            raise ValueError(
                f"the state was taken in mid-epoch with {name}={state[name]}, this loader "
                f"has {mine}: its place means nothing here"
            )
    if iterable and len(by_worker) != max(1, loader.num_workers):
        raise ValueError(
            f"the state was taken with {len(by_worker)} workers, this loader has "
            f"{loader.num_workers}: each worker goes through an iterable dataset by itself, "
            "so the number must be the same to go on in mid-epoch"
        )


class OfAnotherRank(ValueError):
    """The state says where another rank stood, and not where this one did."""


def _of_this_rank(state: State, loader: Any, in_step: bool) -> State:
    """The state for the rank that loads it. in_step: this rank has had as many batches as the one
    that took the state, even where the sampler does not say how it deals samples to ranks."""
    if state.get("rank") is None:  # an older one does not say
        return state
    theirs = Ranks(state["rank"], state["world"], state.get("block"))
    mine, mid_epoch = ranks_of(loader), _in_mid_epoch(state)
    if mid_epoch and theirs.world != mine.world:
        raise ValueError(
            f"the state was taken in mid-epoch on {theirs.world} ranks, and {mine.world} load now: "
            "each rank has other samples, so the place of this one is not known. Resume on "
            f"{theirs.world} ranks"
        )
    if theirs.rank == mine.rank:
        return state
    dealt = theirs.dealt and mine.dealt and theirs.block == mine.block
    follows = dealt and not state["delivered_beyond"]  # which each rank has in an order of its own
    if mid_epoch and not follows and not in_step:
        raise OfAnotherRank(
            f"the state was taken in mid-epoch by rank {theirs.rank}, and this is rank {mine.rank}, "
            "whose place follows from it only where the sampler says how it deals samples to ranks "
            "(as DistributedSampler does) and batches come in order. Save the state of each rank, "
            "and load its own"
        )
    # What the other rank's loader and dataset said of themselves is not this rank's. Ranks that
    # share one order shuffle with the same generators.
    common = ("sampler", "batch_sampler", "torch", "python", "numpy")
    generators = {
        role: packed
        for role, packed in state["generators"].items()
        if dealt and role.partition(".")[0] in common
    }
    delivered = state["delivered"] + len(state["delivered_beyond"])
    state = {**state, **mine._asdict(), "generators": generators, "sampler": None,
             "worker_states": None, "delivered": delivered, "delivered_beyond": []}  # fmt: skip
    return state if mid_epoch or dealt else {**state, "base_seed": None}


def opened(state: Any, loader: Any, *, in_step: bool = False) -> State:
    """The state as iterators use it; ValueError says what is wrong with it. in_step: see
    ``_of_this_rank``."""
    _check_form(state)
    state = copy.deepcopy(state)  # which the program may go on to change
    _check_fit(state, loader)
    state = _of_this_rank(state, loader, in_step)
    generators = _unpack_generators(state["generators"])
    Sources(loader).check(generators)
    costs, starts = unpack_costs(state["costs"]), _starts(state, loader)
    more = {"starts": starts, "as_given": dict(state)}
    begun = state["base_seed"] is not None and state.get("begun", True)  # older ones do not say
    return {**state, "generators": generators, "costs": costs, "begun": begun, **more}


def _starts(state: State, loader: Any) -> list[Start] | None:
    """Where each worker goes on by what its dataset has said of itself."""
    states, workers = state.get("worker_states"), loader.num_workers
    if states is None:
        return None
    iterable = loader._dataset_kind == _DatasetKind.Iterable
    fits = len(states) == max(1, workers) and (iterable or workers == 0)
    said = [one for one in states if one is not None and one["dataset"] is not None]
    if fits and said:
        check_can_be_told(loader.dataset, "dataset")
    if fits:
        return [(None, 0) if one is None else _start(one) for one in states]
    if not said:
        return None
    what = (
        f"the state holds what {len(states)} {'copy' if len(states) == 1 else 'copies'} of the "
        f"dataset said in state_dict(), and this loader has {workers} workers: "
    )
    if iterable or not all(one["begins"] for one in said):
        raise ValueError(what + "give it the number that the state was taken with")
    warnings.warn(what + "an epoch begins, and it is not told that", stacklevel=4)
    return None


def _start(state: dict[str, Any]) -> Start:
    generators, again = state["generators"], state["again"]
    if generators is not None:
        generators = _unpack_generators(generators)
    said = {name: state[name] for name in ("dataset", "iterator", "ended", "begins")}
    return pickle.dumps(Snapshot(**said, generators=generators)), again
