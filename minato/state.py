"""Position of a loader as plain data: ``state_dict`` and ``load_state_dict``.

A state holds what the caller received, the base seed, the epoch, and what samples have cost. It
also holds the states of the generators that the sampler drew from when the epoch started. Resuming
runs the sampler again and leaves out delivered batches, so nothing depends on workers. Under
balanced scheduling, the seeds of the other samples depend only on their positions in
the sampler's order. ``scheduling="static"``, iterable datasets without a state of their own, and
loaders without workers keep their randomness and position elsewhere. There, delivered batches may
be made again and discarded.

A sampler repeats its order from its generators (seeding/order_generators.py) and from the epoch
that ``set_epoch`` gave it. A sampler whose order depends on anything else (a count of its own
epochs, say) needs its own ``state_dict()``, see iterators/position.py. Otherwise the program
must restore it before it iterates over the loader. For the state of an iterable dataset:
stateful.py.

Fields of a state:

version, epoch          of the format; of the seeds (persistent workers count epochs up)
base_seed               of the epoch; None: the next epoch draws one when it starts
seed                    the initial seed of the generator that base seeds are drawn from
begun                   whether the epoch has started; if not, it starts with the generators as they
                        are, and with what the program sets after load_state_dict()
generators              states by role. ``sampler``: its ``generator``. ``sampler.NAME`` and
                        ``batch_sampler.NAME``: others that a sampler holds as attributes
                        (``batch_sampler.NAME.NAME`` and so on for nested samplers). ``loader``: the
                        loader's own, if no sampler holds it. ``dataset.NAME``: those of an iterable
                        dataset, without workers. ``torch``, ``python``, ``numpy``: the global ones,
                        as the epoch found them, if the order may come from them
delivered               batches before this number were delivered,
delivered_beyond        and these after it
unit                    "batch"; "sample" for ``batching="ready"``
order                   with ``cache_reorder=True``: which of the sampler's positions were delivered, a
                        packed bit for each; None: those of the batches before
position                samples of the epoch's order that all ranks together received, if all
                        received as many batches as this one; None: unknown (see elastic.py)
origin                  where an ElasticSampler went on in the order; batches count from there
sampler_seed, sampler_shuffle  of the order, if these are attributes of the sampler; else None
failed                  samples of those that on_error skipped or replaced
delivered_by_worker     iterable datasets: batches of each worker instead; else None
sampler                 the sampler's own state, if it has one. ``drawn``: indices drawn before it;
                        ``position``: samples in them; ``begins``: an epoch starts. ``sampler`` and
                        ``iterator``: the results of their ``state_dict()``
worker_states           the own state of each worker's iterable dataset, if it has one; None: still
                        at its start. ``dataset`` and ``iterator``: the results of their
                        ``state_dict()``. ``ended``: its last batch was not full. ``begins``: an
                        epoch starts, and there is no iterator yet. ``generators``: the global ones
                        that it had drawn from. ``again``: batches delivered since. Without workers
                        there is one, also for a map-style dataset
user_epoch              the argument of ``set_epoch`` before the epoch started, or None
sampler_epoch           the argument of the sampler's own set_epoch before the epoch started, if the
                        sampler keeps it in its attribute ``epoch``; else None
dataset_length, batch_size  to recognise another loader
rank, world             of the process that took the state, and how many ranks loaded
block                   how many consecutive samples the sampler dealt to one rank at a time;
                        None: unknown (see seeding/ranks.py)
costs                   what samples have cost, by index: see pack_costs()
hint_ratios             cost over hint, for each index of ``costs``: see pack_ratios(); None: no
                        sample came with a hint
hint_errors             how far each predictor of hinted samples is off: ``errors`` of
                        CostModel.summary()
"""

from __future__ import annotations

import base64
import binascii
import copy
import math
import pickle
import warnings
import zlib
from typing import Any

import numpy as np
from torch.utils.data.dataloader import _DatasetKind

from .elastic import begun_anew, check_order, elastic_of, misfit, of_order, one_of, position
from .epoch_progress import Progress, length_of
from .errors import program_level
from .option_values import option
from .seeding.order_generators import SYSTEMS_SEEDS, Sources, batch_size_of, portable, seed_of
from .seeding.ranks import Ranks, ranks_of
from .stateful import MOST_BYTES, Snapshot, check_loads_state
from .typing import State

#: a worker's start: a pickled Snapshot, and how many batches after it to make again
Start = tuple["bytes | None", int]

VERSION = 2
#: version 1 had costs as three lists of 64-bit numbers: index, wall and CPU time
READS = (1, VERSION)

#: samples whose costs are stored one by one (12 bytes each); in a longer dataset, the other
#: samples only enter the mean
COSTS_MOST = 1 << 22


def pack(data: bytes) -> str:
    """Bytes as text for JSON."""
    return base64.b64encode(zlib.compress(data, 1)).decode("ascii")


def unpack(text: str, most: int) -> bytes:
    """Reverses pack(). Raises ValueError for anything else, and for more than ``most`` bytes,
    without making them: a few kilobytes of text may expand to gigabytes."""
    try:
        stream = zlib.decompressobj()
        data = stream.decompress(base64.b64decode(text, validate=True), most + 1)
        if len(data) <= most and not stream.eof:
            raise ValueError("truncated")
    except (TypeError, ValueError, binascii.Error, zlib.error) as error:
        raise ValueError(f"the state is damaged: {error}") from None
    if len(data) > most:
        raise ValueError(f"the state is damaged: the packed data has more than {most} bytes")
    return data


def _unpack_generators(texts: dict[str, str]) -> dict[str, bytes]:
    """Unpacks generators; together they may have as many bytes as a worker's snapshot."""
    found, left = {}, MOST_BYTES
    for role, text in texts.items():
        found[role] = unpack(text, left)
        left -= len(found[role])
    return found


def pack_costs(parts: tuple[bytes, ...]) -> list[str]:
    """Packs costs from CostModel.save() as two texts: the differences between consecutive indices,
    and wall times in nanoseconds with an eight-bit mantissa. That is precise enough for
    predictions, and packs millions of costs in a fraction of a second."""
    index, wall = (np.frombuffer(part, np.int64) for part in parts[:2])
    steps = np.diff(index, prepend=0).astype(np.uint32)
    return [pack(steps.tobytes()), pack(_halves(wall.astype(np.float32), 8).tobytes())]


def pack_ratios(ratios: bytes) -> str | None:
    """Packs ratios from CostModel.save() with a five-bit mantissa, which is 3 % off at most. A
    million of them take 1.2 to 1.5 MB, where a million costs take about 2 MB."""
    return pack(_halves(np.frombuffer(ratios, np.float32), 5).tobytes()) if ratios else None


def _halves(values: Any, mantissa: int) -> Any:
    """The upper halves of 32-bit floats of at least 0, rounded to a mantissa of up to 8 bits."""
    cut = np.uint32(24 - mantissa)
    bits = values.view(np.uint32) + (np.uint32(1) << (cut - np.uint32(1)))
    return ((bits >> cut << cut) >> np.uint32(16)).astype(np.uint16)


def _floats(halves: bytes) -> Any:
    """Reverses _halves()."""
    wide = np.frombuffer(halves, np.uint16).astype(np.uint32) << np.uint32(16)
    return wide.view(np.float32)


def unpack_costs(texts: list[str]) -> list[bytes]:
    """The arguments of CostModel.load(); ValueError if the texts do not hold them."""
    each = (4, 2) if len(texts) == 2 else (8, 8, 8)  # bytes; see pack_costs()
    parts = [unpack(text, COSTS_MOST * size) for text, size in zip(texts, each)]
    if len(parts) == 3:  # the third was CPU time, which was always 0
        return parts[:2]
    if len(parts[0]) != 2 * len(parts[1]) or len(parts[0]) % 4:
        raise ValueError("the state is damaged: the lengths of costs differ")
    index = np.cumsum(np.frombuffer(parts[0], np.uint32), dtype=np.int64)
    wall = _floats(parts[1])
    if not np.isfinite(wall).all() or (wall < 0).any() or (wall >= 2.0**62).any():
        raise ValueError("the state is damaged: a cost is not a valid time")
    return [index.tobytes(), wall.astype(np.int64).tobytes()]


def unpack_ratios(text: str | None, known: int) -> bytes:
    """The ratios for CostModel.load(), for as many indices; ValueError if the text does not
    hold it. The model leaves out ratios that make no sense."""
    if text is None:
        return b""
    halves = unpack(text, COSTS_MOST * 2)
    if len(halves) != 2 * known:
        raise ValueError("the state is damaged: the lengths of costs and hint_ratios differ")
    ratios: bytes = _floats(halves).tobytes()
    return ratios


def _hint_errors(state: State) -> list[tuple[float, ...]]:
    """The last argument of CostModel.load(), if the state holds it."""
    errors = state["hint_errors"]
    if errors is None:
        return []
    sound = isinstance(errors, list) and len(errors) == 3
    if not sound or not all(type(e) is float and 0 <= e < math.inf for e in errors):
        raise ValueError(f"the state is damaged: hint_errors is {errors!r}")
    return [tuple(errors)]


def state_of(loader: Any, memo: Any, counted: bool = True) -> State:
    """The state as plain data that survives torch.save and JSON. Not counted: the loader's
    iterators do not count their position."""
    progress = memo.progress if counted else None
    length = length_of(loader)
    progress = progress or Progress(user_epoch=memo.user_epoch, dataset_length=length)
    sources = Sources(loader)
    now = sources.capture(everything=False)
    state: State = {
        "version": VERSION,
        "epoch": progress.epoch,
        "base_seed": progress.base_seed,
        "seed": seed_of(loader),
        "begun": progress.base_seed is not None and not (progress.finished or progress.early),
        "delivered": progress.head,
        "delivered_beyond": sorted(progress.beyond),
        "unit": progress.unit,
        "delivered_by_worker": progress.by_worker and list(progress.by_worker),
        "dataset_length": progress.dataset_length,
        "batch_size": batch_size_of(loader),
        "failed": progress.failed,
        "sampler_epoch": progress.sampler_epoch,
        "origin": progress.origin,
        **of_order(loader),
        **(progress.ranks or ranks_of(loader))._asdict(),
    }
    chosen = progress.chosen.delivered(progress) if progress.chosen is not None else None
    state["order"] = None if chosen is None or not state["begun"] else pack(chosen)
    generators, user_epoch = now, progress.user_epoch
    if progress.early and progress.user_epoch != memo.user_epoch:
        # The epoch was started early in vain, and will be started again.
        generators = {r: (progress.generators or {}).get(r, now[r]) for r in now}
        user_epoch = memo.user_epoch
    elif progress.finished:
        # Between epochs: the next one starts with the generators as they are now.
        state.update(delivered=0, delivered_beyond=[], delivered_by_worker=None, failed=0, origin=0)
        state.update(epoch=progress.epoch + 1 if progress.persistent else 0, dataset_length=length)
        user_epoch = memo.user_epoch
        if not progress.persistent:
            state["base_seed"] = None
    elif progress.generators is not None:
        generators = {**now, **progress.generators}
        if "loader" in now:
            generators["loader"] = now["loader"]  # only base seeds are drawn from it
    if progress.draws_while_iterated and state["begun"]:
        warnings.warn(
            "the sampler draws from a global generator (torch's, NumPy's or Python's) while "
            "it is iterated, so its order depends on what the program draws in the meantime. If "
            "the epoch resumes from this state, samples may be delivered twice or not at all. Give "
            "the sampler its own generator",
            stacklevel=program_level(),
        )
    state["user_epoch"] = user_epoch - 1 if user_epoch else None
    state["sampler"] = None if progress.sampler is None else progress.sampler.state()
    state["worker_states"] = _worker_states(progress)
    state["position"] = position(loader, state)
    state["generators"] = {role: pack(portable(data)) for role, data in generators.items()}
    *state["costs"], state["hint_ratios"] = memo.packed_costs()
    errors = memo.costs.summary()["errors"]
    state["hint_errors"] = errors and list(errors)
    return state


def _worker_states(progress: Progress) -> list[Any] | None:
    """The own states of the workers' datasets. Between epochs, only a map-style dataset without
    workers has one; for iterable datasets of persistent workers, the generators are kept."""
    kept = progress.kept
    if not any(one.known() for one in kept) or (progress.finished and not progress.lives_on):
        return None
    states: list[Any] = []
    for one in kept:
        snapshot, again = one.snapshot(), one.again
        if progress.finished:
            dataset = None if progress.by_worker else snapshot.dataset
            snapshot, again = Snapshot(dataset, None, False, True, snapshot.generators), 0
        state: State = {**snapshot._asdict(), "again": again}
        if snapshot.generators is not None:
            state["generators"] = {r: pack(portable(s)) for r, s in snapshot.generators.items()}
        states.append(state if one.known() or again else None)
    return states


_FIELDS: dict[str, Any] = {
    "epoch": int, "base_seed": int | None, "generators": dict, "delivered": int,
    "delivered_beyond": list, "delivered_by_worker": list | None, "unit": str,
    "user_epoch": int | None, "dataset_length": int | None, "batch_size": int | None, "costs": list,
}  # fmt: skip

#: fields that older states lack, with what they were then. A state without ``position`` does not say
#: that it is unknown, and one without ``sampler_seed`` or ``sampler_shuffle`` is of any
_LATER: State = {
    "begun": True, "sampler_epoch": None, "failed": 0, "origin": 0, "sampler": None,
    "worker_states": None, "order": None, "seed": None, "rank": None, "world": None, "block": None,
    "hint_ratios": None, "hint_errors": None,
}  # fmt: skip

#: fields of a worker's state, and of the sampler's
_OF_WORKERS: dict[str, Any] = {
    "dataset": object, "iterator": object, "ended": bool, "begins": bool, "generators": dict | None,
    "again": int,
}  # fmt: skip
_OF_SAMPLER = {"drawn": int, "position": int, "begins": bool, "sampler": object, "iterator": object}


def _whole_numbers(values: list[Any]) -> bool:
    return all(type(v) is int and v >= 0 for v in values)


def _checked(given: Any) -> State:
    """A state with all fields. Raises ValueError if it is none, or damaged."""
    if not isinstance(given, dict) or "version" not in given:
        raise ValueError(
            "this is not a state of minato.DataLoader (it has no 'version'); pass the return value "
            "of state_dict()"
        )
    if type(given["version"]) is not int or given["version"] not in READS:
        raise ValueError(
            f"the state was written by another version of minato (format {given['version']}, "
            f"this version reads {VERSION}); load it with that version"
        )
    missing = sorted(set(_FIELDS) - set(given))
    if missing:
        raise ValueError(f"the state is incomplete: {', '.join(missing)} missing")
    lacking = {name: was for name, was in _LATER.items() if name not in given}
    state: State = {**given, **lacking}
    for name, types in _FIELDS.items():
        if not isinstance(state[name], types) or isinstance(state[name], bool):
            raise ValueError(f"the state is damaged: {name} is {state[name]!r}")
    if not isinstance(state["begun"], bool):
        raise ValueError(f"the state is damaged: begun is {state['begun']!r}")
    lists = (state["delivered_beyond"], state["delivered_by_worker"] or [])
    numbers = [state[name] for name in ("epoch", "delivered", "failed", "origin")]
    numbers += [state[name] for name in ("user_epoch", "sampler_epoch") if state[name] is not None]
    if not all(_whole_numbers(v) for v in (*lists, numbers)) or max(numbers) >= 2**63:
        raise ValueError("the state is damaged: a count is not an integer from 0 to 2**63 - 1")
    _check_sampler(state["sampler"], state["delivered"])
    _check_worker_states(state["worker_states"])
    if state["rank"] is not None:
        _check_ranks(state)
    if len(state["costs"]) != (3 if state["version"] == 1 else 2):
        raise ValueError("the state is damaged: costs must be two lists")
    return state


def _check_ranks(state: State) -> None:
    numbers: list[Any] = [state[name] for name in Ranks._fields]
    if numbers[2] is None:
        numbers[2] = 1
    if not _whole_numbers(numbers) or numbers[0] >= numbers[1] or numbers[2] == 0:
        raise ValueError("the state is damaged: rank {!r} of {!r}, blocks of {!r}".format(*numbers))


def _check_position(state: State) -> None:
    reached, origin, length = state["position"], state["origin"], state["dataset_length"]
    delivered, world, size = state["delivered"], state["world"], state["batch_size"]
    sound = _whole_numbers([reached]) and origin <= reached < 2**63
    if sound and reached != length and size is not None:
        taken = delivered * size  # by one rank; split_batches: by all
        sound = reached - origin in (taken, taken * world) and reached <= (length or reached)
    if not sound:
        raise ValueError(
            f"the state is damaged: position is {reached!r}, after {delivered} batches with "
            f"batch_size={size} on {world} ranks from {origin} on"
        )


def _check_sampler(said: Any, delivered: int) -> None:
    if said is None:
        return
    sound = isinstance(said, dict) and set(said) == set(_OF_SAMPLER)
    if not sound or not all(isinstance(said[name], kind) for name, kind in _OF_SAMPLER.items()):
        raise ValueError(f"the state is damaged: sampler is {said!r}")
    if not _whole_numbers([said["drawn"], said["position"]]) or said["position"] >= 2**63:
        raise ValueError("the state is damaged: counts of its sampler are not valid")
    if said["drawn"] > delivered:
        raise ValueError(
            f"the state is damaged: its sampler's state was taken after {said['drawn']} batches, but "
            f"only {delivered} were delivered"
        )


def _check_worker_states(states: Any) -> None:
    if not isinstance(states, list | None):
        raise ValueError(f"the state is damaged: worker_states is {states!r}")
    for number, state in enumerate(states or []):
        where = f"worker_states[{number}]"
        if state is not None and (not isinstance(state, dict) or set(state) != set(_OF_WORKERS)):
            raise ValueError(f"the state is damaged: {where} has the wrong fields")
        for name, value in (state or {}).items():
            if not isinstance(value, _OF_WORKERS[name]) or (name == "again" and value < 0):
                raise ValueError(f"the state is damaged: {name} of {where} is {value!r}")


def in_mid_epoch(state: State) -> bool:
    """Whether some of the epoch's batches were delivered."""
    counts = state["delivered_by_worker"] or []
    return any((state["delivered"], state["delivered_beyond"], state["origin"], *counts))


def _check_fit(state: State, loader: Any) -> None:
    """Checks that the state fits the loader. Between epochs, any loader fits."""
    by_worker = state["delivered_by_worker"]
    if not in_mid_epoch(state):
        return
    ready = option(loader, "batching") == "ready" and loader.num_workers > 0
    unit = "sample" if ready else "batch"
    if state["order"] is not None and not option(loader, "cache_reorder"):
        raise ValueError(
            "the state was taken in mid-epoch with cache_reorder=True, where samples do not come in the "
            "sampler's order. Load it into a loader with cache_reorder=True"
        )
    if state["unit"] != unit:
        plural = {"batch": "batches", "sample": "samples"}
        counted = plural.get(state["unit"], state["unit"])
        raise ValueError(
            f"the state counts {counted}, but this loader counts {plural[unit]}. To "
            "resume in the middle of an epoch, use the batching option that the state was taken with"
        )
    iterable = loader._dataset_kind == _DatasetKind.Iterable
    if iterable != (by_worker is not None):
        kinds = ("a map-style", "an iterable")
        raise ValueError(
            f"the state belongs to {kinds[not iterable]} dataset, but this loader has "
            f"{kinds[iterable]} one: load it into a loader of the same kind"
        )
    if iterable and (state["delivered"] or state["delivered_beyond"]):
        raise ValueError("the state is damaged: batches of an iterable dataset count by worker")
    length = state["dataset_length"]
    if None not in (length, mine := length_of(loader)) and mine != length:
        raise ValueError(
            f"the state was taken in mid-epoch with dataset_length={length}, but this loader "
            f"has {mine}, so its position does not apply here: use the same value"
        )
    known = state["rank"] is not None and state.get("position") is not None  # not if it is old
    if known and not state["delivered_beyond"]:
        _check_position(state)
    if iterable and len(by_worker) != max(1, loader.num_workers):
        raise ValueError(
            f"the state was taken with {len(by_worker)} workers, but this loader has "
            f"{loader.num_workers}: each worker iterates over its own copy of an iterable dataset, "
            "so use the same number of workers to resume in the middle of an epoch"
        )


def _of_this_rank(state: State, loader: Any, strict: bool) -> State:
    """The state for the rank that loads it. Not strict: assumes, with a warning, that this rank
    delivered as many batches as the rank that took the state, even if the sampler does not say how
    it deals them."""
    mine, mid_epoch = ranks_of(loader), in_mid_epoch(state)
    if state["rank"] is None:  # an older state
        state = {**state, **mine._asdict()}
    theirs = Ranks(state["rank"], state["world"], state["block"])
    differs = misfit(loader, state, theirs, mine) if mid_epoch else None
    if mid_epoch:
        check_order(loader, state, wholly=bool(differs) or elastic_of(loader) is not None)
    if differs is not None:
        at = begun_anew(loader, state, differs, mine)
        state = {**state, **at, "batch_size": batch_size_of(loader)}
    elif theirs.rank == mine.rank:
        return state
    if mid_epoch and state["order"] is not None:
        raise ValueError(
            f"the state was taken in mid-epoch with cache_reorder=True by rank {theirs.rank}, but this is "
            f"rank {mine.rank}, which has had other samples. Save the state of each rank, and load each "
            "rank's own"
        )
    dealt = theirs.dealt and mine.dealt and (differs or theirs.block == mine.block)
    follows = dealt and not state["delivered_beyond"]  # out of order, ranks differ
    if mid_epoch and not follows:
        told = (
            f"the state was taken in mid-epoch by rank {theirs.rank}, but this is rank {mine.rank}. "
            "Its position only follows from that if the sampler says how it deals samples to ranks "
            "(as DistributedSampler does) and batches come in order. Save the state of each rank, "
            "and load each rank's own"
        )
        if strict:
            raise ValueError(told)
        warnings.warn(  # Lightning, for example, saves only the state of rank 0
            f"{told}. This rank now skips the same number of its own batches. These are the batches "
            "it has delivered, unless its order comes from its own random numbers",
            stacklevel=program_level(),
        )
    # The own states of the other rank's loader and dataset do not apply to this rank. Ranks that
    # share one order shuffle with the same generators, so the samplers' generators do apply.
    common = ("sampler", "batch_sampler", "torch", "python", "numpy")
    generators = {
        role: packed
        for role, packed in state["generators"].items()
        if dealt and role.partition(".")[0] in common
    }
    delivered = state["delivered"] + len(state["delivered_beyond"])
    state = {**state, **mine._asdict(), "generators": generators, "sampler": None,
             "worker_states": None, "delivered": delivered, "delivered_beyond": []}  # fmt: skip
    if not mid_epoch and not dealt:
        return {**state, "base_seed": None}
    seed, own = state["seed"], seed_of(loader)
    shared = state["base_seed"] in (None, state.get("sampler_seed"))  # as of an ElasticSampler
    own_state = (theirs.rank, theirs.world) == (mine.rank, mine.world)  # of another batch size
    if not (shared or own_state) and seed not in (None, own) and own < SYSTEMS_SEEDS:
        told = (
            f"rank {mine.rank} loads the state of rank {theirs.rank}, but has another seed "
            f"({own}, not {seed}). Its samples are those that are left, but they draw random numbers of "
            f"rank {theirs.rank}'s seed, other ones than before. Save the state of each rank, and load "
            "each rank's own; or give all ranks the same seed, with which they draw different numbers, too"
        )
        if theirs.world != mine.world:  # no rank has a state of its own
            told = (
                f"rank {mine.rank} of {mine.world} loads the state of rank {theirs.rank} of "
                f"{theirs.world}, which was saved with the seed {seed}, but its own seed is {own}. Its "
                f"samples are those that are left. They draw random numbers of the seed {seed}: the same "
                f"as before only if all {theirs.world} ranks had that seed. Give all ranks one seed, with "
                "which they draw different numbers, too; or use minato.ElasticSampler"
            )
        warnings.warn(told, stacklevel=program_level())
    return state


def opened(state: Any, loader: Any, strict: bool) -> State:
    """The state, or the list of those of all ranks, as iterators use it; raises ValueError that says
    what is wrong. strict: see ``elastic.one_of`` and ``_of_this_rank``."""
    if isinstance(state, (list, tuple)) and state:
        state = one_of([_checked(one) for one in state], loader, strict)
    state = copy.deepcopy(_checked(state))  # the program may change its own later
    _check_fit(state, loader)
    state = _of_this_rank(state, loader, strict)
    generators = _unpack_generators(state["generators"])
    Sources(loader).check(generators)
    costs, starts = unpack_costs(state["costs"]), _starts(state, loader)
    ratios = unpack_ratios(state["hint_ratios"], len(costs[0]) // 8)
    more: State = {"starts": starts, "as_given": dict(state), "order": None}
    more["costs"] = [*costs, ratios, *_hint_errors(state)]
    if state["order"] is not None:
        more["order"] = unpack(state["order"], MOST_BYTES)
    begun = state["base_seed"] is not None and state["begun"]
    return {**state, "generators": generators, "begun": begun, **more}


def _starts(state: State, loader: Any) -> list[Start] | None:
    """Where each worker resumes, from its dataset's own state."""
    states, workers = state["worker_states"], loader.num_workers
    if states is None:
        return None
    iterable = loader._dataset_kind == _DatasetKind.Iterable
    fits = len(states) == max(1, workers) and (iterable or workers == 0)
    said = [one for one in states if one is not None and one["dataset"] is not None]
    if fits and said:
        check_loads_state(loader.dataset, "dataset")
    if fits:
        return [(None, 0) if one is None else _start(one) for one in states]
    if not said:
        return None
    what = (
        f"the state holds the state_dict() of {len(states)} "
        f"{'copy' if len(states) == 1 else 'copies'} of the dataset, but this loader has {workers} "
        "workers: "
    )
    if iterable or not all(one["begins"] for one in said):
        raise ValueError(what + "use the number of workers that the state was taken with")
    what += "an epoch starts, and the dataset does not get its state"
    warnings.warn(what, stacklevel=program_level())
    return None


def _start(state: State) -> Start:
    generators, again = state["generators"], state["again"]
    if generators is not None:
        generators = _unpack_generators(generators)
    said = {name: state[name] for name in ("dataset", "iterator", "ended", "begins")}
    return pickle.dumps(Snapshot(**said, generators=generators)), again
