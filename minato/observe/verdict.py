"""Does the program wait for data, for what, and what would help?

``causes()`` is a list of functions, one for each thing that a program can wait for. Each looks at
the facts and says how many seconds it cost, why, and which option helps. The verdict names the
costliest; ``loader.report()`` shows them all. Times are in seconds.

The waits of an iterator fall into four parts, and each cause explains seconds of one of them:

    the first batch         workers start, then make it
    later epochs' first     with persistent workers: all of an epoch's end is waited for, too
    one long wait           a slow sample, or a pause of the machine
    all other waits         workers cannot keep up: ``_steady()`` finds out why

Values that a cache did not have are a part of the last one: ``_misses()``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .._not_linux import CORE
from ..text import counted, seconds, sized
from ..typing import Cause as CauseFields
from ..typing import Device, Fields

if CORE:
    from .. import _core
if TYPE_CHECKING:
    from ..cache.misses import Missed

#: batches before anything is said about waiting: the first ones are always waited for
FEW = 3
#: share of the time from which on waiting is worth words
WORTH = 0.02
#: the second cause is named, too, if it costs this share of what the first costs
ALSO = 0.3
#: share of its time that a worker works from which on it counts as busy. The rest is start, the end
#: of epochs, and what a shared machine takes
BUSY = 0.6
#: seconds; cheaper samples cost less to make than to hand over
CHEAP = 20e-6
#: share of the waits in which memory_limit held tasks back; batches that are made already hide it
HELD = 0.25
#: times that making a sample has to take longer than receiving it from an actor
PAYS = 10
#: times the mean from which on a sample counts as slow
SLOW = 3
#: looks at workers before what they wait in counts as known
LOOKS = 5
#: workers that are advised at most, for each that there is, where they do not compute
GROWTH = 4
#: share of the work from which on values that a cache did not have are all of it: storing them and
#: seeding for them is the rest
ALL_MISSED = 0.75


@dataclass(frozen=True)
class Facts:
    """Holds what the causes need in addition to the statistics."""

    cores: int = 1
    #: that workers could have computed and had no core
    queued: float = 0.0
    #: wait for the first batch; the part of it before a worker had begun
    first: float = 0.0
    starting: float = 0.0
    #: the costliest sample of the first batch: (index, seconds)
    first_slowest: tuple[Any, float] | None = None
    #: whether each worker was slow in its first sample
    first_use: bool = False
    #: waits for the first batches of later epochs, and how many
    starts: float = 0.0
    epochs: int = 0
    #: the longest of the other waits; None: the longest of all
    longest: float | None = None
    #: share of the waits while memory_limit held tasks back
    held: float = 0.0
    #: of a batch: in collate_fn where workers run it, and in its samples
    collate: float = 0.0
    fetch: float = 0.0
    #: mean of a sample; 0: not known
    mean: float = 0.0
    slowest: tuple[int, float] | None = None
    #: looks at busy workers, by what they were in: "lock", "sleep", "storage", "other", "cpu"
    looks: dict[str, int] = field(default_factory=dict)
    #: of the worker scheduler's last decision; None: it has made none, or there is none
    reason: int | None = None
    balanced: bool = True
    ready: bool = False
    prefetch: int = 2  # prefetch_factor
    persistent: bool = False
    #: whether the next epoch begins early; None: it cannot
    prefetches: bool | None = False
    #: whether processes start by fork
    forks: bool = True
    iterable: bool = False  # an iterable dataset
    #: whether the program tells the loader or its sampler the number of each epoch
    sets_epoch: bool = False
    #: values that workers made because a cache did not have them
    missed: Missed | None = None
    #: with remote=: seconds of the actors, and those of the trainer's core that receiving took
    remote: tuple[float, float] | None = None


@dataclass(frozen=True)
class Cause:
    """Holds what the program waits for, and what would help."""

    name: str
    seconds: float
    why: str
    advice: str
    #: not part of the trainer's waits: a sentence of its own
    apart: bool = False


@dataclass(frozen=True)
class Case:
    """One loader's statistics and facts."""

    stats: Fields
    facts: Facts

    @property
    def waited(self) -> float:
        return float(self.stats["wait"]["total"])

    @property
    def elapsed(self) -> float:
        return self.waited + float(self.stats["wait"]["between"])

    @property
    def rest(self) -> float:
        """Waits that are not for the first batch of an epoch."""
        return max(0.0, self.waited - self.facts.first - self.facts.starts)

    @property
    def left(self) -> float:
        """The part of ``rest`` that neither one long wait nor copies explain."""
        return self.rest - _once(self) - _handing(self)

    @property
    def threads(self) -> bool:
        return self.stats.get("worker_type") == "thread"

    def busy(self) -> tuple[int, float, float]:
        """Workers, their seconds in tasks, and of those on a core."""
        ready = [w for w in self.stats["workers"] if w["state"] == "ready"]
        return len(ready), sum(w["busy"] for w in ready), sum(w["cpu"] for w in ready)

    @property
    def missed(self) -> float:
        """Seconds of the workers that went into values that a cache did not have."""
        busy = self.busy()[1]
        return _of_work(self.facts.missed, busy) * busy

    @property
    def missing(self) -> float:
        """The seconds of ``left`` in which the program waited for such values."""
        count, busy, _cpu = self.busy()
        keeps_up = busy - self.missed <= count * (self.elapsed - self.waited)
        return self.left * (keeps_up or self.missed / busy) if self.missed else 0.0

    @property
    def prefers_ready(self) -> bool:
        """Whether batching="ready" saves more than prefetch_next_epoch=True. They exclude each other."""
        facts = self.facts
        if not facts.balanced or facts.ready or facts.prefetches:
            return False
        most = _once(self)
        slow = most if _explains(facts.slowest, most, facts.mean) else 0.0
        return slow + (self.making if _is_slow_at_first(self) else 0.0) > facts.starts

    @property
    def making(self) -> float:
        """Seconds of the wait for the first batch in which workers make it."""
        return self.facts.first - self.facts.starting

    def idle(self) -> bool:
        """Whether workers had nothing to do for much of the time since they have started."""
        count, busy, _cpu = self.busy()
        return busy < BUSY * count * (self.elapsed - self.facts.starting)


# ---- the verdict -------------------------------------------------------------------------


def causes(stats: Fields, facts: Facts) -> list[Cause]:
    """Everything worth words, the costliest first."""
    case = Case(stats, facts)
    least = WORTH * case.elapsed
    if case.waited <= least:
        found = [*_copies(case)]
    else:
        found = [cause for look in _ALL for cause in look(case)]
    return sorted((c for c in found if c.seconds > least), key=lambda cause: -cause.seconds)


#: of the cause that is not a wait of the trainer
APART = "copies to the device"
#: of the cause that the sentence names however little it costs
SMALL_CACHE = "cache too small"


def told(found: list[Cause]) -> list[CauseFields]:
    """``stats()["causes"]``."""
    return [{"name": c.name, "seconds": c.seconds, "why": c.why, "advice": c.advice} for c in found]


def verdict(stats: Fields, batches: int, facts: Facts, found: list[Cause] | None = None) -> str:
    """The sentence, from the fields of ``stats()`` and the number of batches waited for."""
    if found is None:
        found = causes(stats, facts) if batches >= FEW else []
    return " ".join(filter(None, (_waits(stats, batches, found), trouble(stats))))


def _waits(stats: Fields, batches: int, found: list[Cause]) -> str:
    if batches < FEW:
        return f"Too early to say: {batches} batch(es) were asked for."
    waited: float = stats["wait"]["total"]
    elapsed: float = waited + stats["wait"]["between"]
    share = waited / max(elapsed, 1e-9)
    if not found:
        return f"The trainer hardly waits for data ({share:.0%} of its time)."
    first = found[0]
    if first.apart:
        text = f"{first.why}. {first.advice}"
    else:
        of = f"{seconds(waited)} of {seconds(elapsed)}"
        text = f"The trainer waits {share:.0%} of its time ({of}): {first.why}. {first.advice}"
    for n, other in enumerate(found[1:]):
        if other.name == SMALL_CACHE or (n == 0 and other.seconds > ALSO * first.seconds):
            why = other.why if other.apart else other.why[:1].upper() + other.why[1:]
            text = f"{text.strip()} {why}. {other.advice}"
    return text.strip()


def trouble(stats: Fields) -> str:
    """Returns what went wrong, whether or not the trainer waits."""
    said = []
    deaths, failed = stats.get("deaths", 0), stats.get("failed") or {}
    if deaths and stats.get("worker_type") == "thread":
        said.append(
            f"{deaths} worker thread(s) ended by SystemExit; their current samples are lost. Raise "
            "an Exception instead."
        )
    elif deaths:
        again = "their samples were made again" if stats["retries"] else "no sample was made again"
        said.append(
            f"{deaths} worker(s) died; {again}. Memory (the system's log names processes that an "
            "out-of-memory killer ended) and native code in the dataset are the usual causes."
        )
    counts = [f"{failed[name]} {word}" for name, word in
              (("left_out", "skipped"), ("replaced", "replaced")) if failed.get(name)]  # fmt: skip
    if counts:
        index, error, _instead = failed["latest"][-1]
        said.append(
            f"Failed samples: {' and '.join(counts)}; the latest is index {index} "
            f"({error})."
        )
    return " ".join(said)


# ---- the first batch, and the first batches of later epochs ------------------------------------


def _start(case: Case) -> Iterator[Cause]:
    facts = case.facts
    advice, once = "", " (once)" if facts.persistent else ""
    if not facts.persistent:
        advice = "persistent_workers=True starts them once and not in each epoch."
    elif not facts.forks:
        advice = (
            'multiprocessing_context="fork" starts them in milliseconds, unless the dataset needs '
            "threads or an accelerator of the program."
        )
    yield Cause(
        "start of the workers", facts.starting,
        f"{seconds(facts.starting)} until the first worker had started{once}", advice,
    )  # fmt: skip


def _first(case: Case) -> Iterator[Cause]:
    facts, making, slow = case.facts, case.making, case.facts.first_slowest
    later, once, ready = "", " (once)" if facts.persistent else "", case.prefers_ready
    why = f"which workers begin only when the program asks for it{once}"
    if facts.prefetches is not None and not (facts.persistent or facts.sets_epoch or ready):
        later = (
            "persistent_workers=True with prefetch_next_epoch=True prepares later epochs' first batches "
            "during the previous epoch."
        )
    is_slow = _is_slow_at_first(case)
    if slow is not None and is_slow:
        why = f"in which sample {slow[0]} alone takes {seconds(slow[1])}"
        later = 'in_order=False with batching="ready" delivers what is ready first.' if ready else later
    elif slow is not None and facts.first_use and slow[1] > 0.5 * making:
        why = f"because the first sample of each worker sets something up: one takes {seconds(slow[1])}{once}"
        later = later if facts.persistent else "persistent_workers=True sets it up once and not in each epoch."
    yield Cause(
        "slow sample in the first batch" if is_slow else "first batch", making,
        f"{seconds(making)} for the first batch, {why}", later,
    )  # fmt: skip


def _is_slow_at_first(case: Case) -> bool:
    """Whether one sample explains the wait for the first batch."""
    return not case.facts.first_use and _explains(case.facts.first_slowest, case.making, case.facts.mean)


def _explains(slow: tuple[Any, float] | None, wait: float, mean: float) -> bool:
    """Whether a slow sample explains a wait. slow: its index, and seconds. mean: of a sample."""
    return slow is not None and slow[1] > 0.5 * wait and slow[1] > SLOW * mean


def _starts(case: Case) -> Iterator[Cause]:
    facts, advice = case.facts, "Longer epochs have fewer such waits."
    if facts.prefetches is False and not (facts.sets_epoch or case.prefers_ready):
        advice = "prefetch_next_epoch=True prepares this batch during the previous epoch."
    epochs = counted(facts.epochs, "later epoch")
    yield Cause(
        "first batches of later epochs", facts.starts,
        f"{seconds(facts.starts)} for the first batch of {epochs}", advice,
    )  # fmt: skip


# ---- one long wait -----------------------------------------------------------------------------


def _once(case: Case) -> float:
    """The longest wait, if it makes up much of those within epochs."""
    longest = case.facts.longest
    most: float = case.stats["wait"]["max"] if longest is None else longest
    most = min(most, case.rest)
    known = _explains(case.facts.slowest, most, case.facts.mean)
    return most if most > (0.3 if known else 0.5) * case.rest else 0.0


def _long(case: Case) -> Iterator[Cause]:
    most, slow = _once(case), case.facts.slowest
    if slow is not None and _explains(slow, most, case.facts.mean):
        advice = "From the second epoch on such a sample is started earlier."
        if case.prefers_ready:
            advice += ' in_order=False with batching="ready" does not wait for it.'
        yield Cause(
            "slow sample", most,
            f"{seconds(most)} in one wait, because sample {slow[0]} alone takes {seconds(slow[1])}",
            advice,
        )  # fmt: skip
    else:
        yield Cause("one long wait", most,
                    f"{seconds(most)} in one wait, for one slow batch or a pause of the machine", "")  # fmt: skip


# ---- copies to a device ------------------------------------------------------------------------


def _handing(case: Case) -> float:
    """The trainer's waits for the thread that copies, if they are most of its waits."""
    device: Device | None = case.stats.get("device")
    waited = device["waited"] if device is not None and device["batches"] else 0.0
    return waited if waited > 0.5 * case.waited else 0.0


def _copies(case: Case) -> Iterator[Cause]:
    device: Device | None = case.stats.get("device")
    if device is None or not device["batches"]:
        return
    name, elapsed = device["device"], max(case.elapsed, 1e-9)
    what = f"batches of {device['bytes'] / device['batches'] / 1e6:.3g} MB are copied there"
    smaller = (
        "Fewer bytes would help: a smaller dtype in the dataset, cast on the device, or a crop "
        "before the copy."
    )
    speed = device["bandwidth"]
    at = f" at {speed / 1e9:.3g} GB/s" if speed else ""
    yield Cause(
        APART, device["stalled"],
        f"{name} waits {device['stalled'] / elapsed:.0%} of the time for copies: {what}{at}",
        smaller, apart=True,
    )  # fmt: skip
    yield Cause(
        "handing over to the device", _handing(case),
        f"{seconds(_handing(case))} for the thread that hands batches to {name}: {what}, by way of "
        "page-locked memory", smaller,
    )  # fmt: skip


# ---- workers that cannot keep up ---------------------------------------------------------------


def _steady(case: Case) -> Iterator[Cause]:
    """All other waits have one cause: the first of these that applies."""
    left = case.left
    for look in (_held, _remote, _scheduler, _cheap, _idle, _crowded, _opens, _turns, _locked, _computing,
                 _waiting):  # fmt: skip
        found = look(case)
        if found is not None:
            name, why, advice = found
            if name in _FEWER_MISSES:
                yield from _misses(case.facts.missed, case.missing)
                left -= case.missing
            if case.facts.collate > case.facts.fetch and name in _WORKING:
                why += (
                    f"; most of the work is collate_fn ({case.facts.collate * 1e3:.3g} ms a batch, "
                    f"its samples {case.facts.fetch * 1e3:.3g} ms)"
                )
            yield Cause(name, left, f"{seconds(left)} {why}", advice)
            return


#: causes of workers that are busy with their tasks
_WORKING = ("too few workers", "computing workers", "slow storage")
#: and those that less work does away with
_FEWER_MISSES = (*_WORKING, "opening files or slow samples", "GIL", "shared lock")
Found = tuple[str, str, str]


def _held(case: Case) -> Found | None:
    memory = case.stats["memory"]
    full = memory["used"] > 0.9 * memory["limit"]
    if case.idle() and (case.facts.held > HELD or full):
        return ("memory limit", "while workers idle because memory_limit holds them back",
                "Raise memory_limit, or keep fewer batches.")  # fmt: skip
    return None


def _remote(case: Case) -> Found | None:
    if case.facts.remote is None:
        return None
    made, received = case.facts.remote
    if made < PAYS * received:
        return ("cheap samples",
                f"because actors take {seconds(made)} to make samples, and the trainer {seconds(received)} of a "
                "core to receive them (Ray's daemons take more)",
                f"remote= pays where making takes {PAYS} times as long: local workers may be faster.")  # fmt: skip
    return ("too few workers", "because the actors on Ray cannot keep up",
            "More of them would help: actors= of minato.remote.Ray.")  # fmt: skip


def _scheduler(case: Case) -> Found | None:
    """Returns what the worker scheduler has found out."""
    reason, scheduler = case.facts.reason, case.stats["scheduler"]
    if reason is None:
        return None
    if reason in (_core.SCALER_UNDO_GROWTH, _core.SCALER_STARVED_AT_CEILING):
        return ("shared limit", "because more workers were tried and did not help",
                "What they share (a disk, a lock, the network) is at its limit.")  # fmt: skip
    if reason in (_core.SCALER_GROW_IDLE_CORES, _core.SCALER_GROW_WAITING):
        return ("too few workers", "while the worker scheduler is adding workers",
                f"There are {scheduler['active']} now, and {scheduler['high']} at most.")  # fmt: skip
    if reason in (_core.SCALER_SHRINK_FULL, _core.SCALER_FULL_AT_MIN, _core.SCALER_FULL_AT_FLOOR,
                  _core.SCALER_FULL_BUSY):  # fmt: skip
        return ("too few workers", "before the worker scheduler had added workers",
                f"Batches are ready in time now, with {scheduler['active']} workers of "
                f"{scheduler['high']} at most.")  # fmt: skip
    if reason == _core.SCALER_STARVED_NO_MEMORY:
        return ("memory limit", "because memory has no room for more workers",
                "Raise memory_limit, or let samples take less memory.")  # fmt: skip
    return None


def _cheap(case: Case) -> Found | None:
    facts = case.facts
    if not facts.mean or facts.mean >= CHEAP or facts.collate >= facts.fetch:
        return None
    return ("cheap samples",
            f"because making a sample ({facts.mean * 1e6:.1f} us) takes less time than sending it to the program",
            "Larger batches, or num_workers=0, may be faster.")  # fmt: skip


def _idle(case: Case) -> Found | None:
    # with these reasons the workers have work, even if some have begun only now
    if not case.idle() or case.facts.reason in (_core.SCALER_STARVED_CPU_BUSY, _core.SCALER_STARVED_AT_MAX):
        return None
    return ("short prefetch window", "while workers idle because the prefetch window is too small",
            f"prefetch_factor={4 * case.facts.prefetch} or more would help.")  # fmt: skip


def _crowded(case: Case) -> Found | None:
    count, busy, cpu = case.busy()
    queued = case.facts.queued
    if queued <= 0.5 * (busy - cpu) or queued <= 0.25 * busy:
        return None
    return ("busy machine",
            f"because the workers get {cpu / (cpu + queued):.0%} of the core time they could use",
            f"{count} worker(s), the trainer and other programs share {case.facts.cores} core(s): more "
            "workers would not help.")  # fmt: skip


def _opens(case: Case) -> Found | None:
    """Where most of the work is in few samples that come one to a group. Costs alone do not show
    whether such a sample opens what its neighbours then use, or is slow for another reason."""
    place = case.stats["locality"]
    if place is None or not place["opening"]:
        return None
    share = place["opening"] / (place["opening"] + place["group"] * place["each"])
    if share < 0.5:
        return None
    others = (look(case) for look in (_turns, _locked, _computing, _waiting))
    advice = next(found[2] for found in others if found is not None)
    return (
        "opening files or slow samples",
        f"because about one sample in {place['group']:.0f} takes "
        f"{(place['opening'] + place['each']) * 1e3:.3g} ms and the others "
        f"{place['each'] * 1e3:.3g} ms: {share:.0%} of the work is in these few",
        "If they open what their neighbours then use, a locality_key() or a sampler that keeps more "
        f"of a group together helps. If they are simply slow: {advice}",
    )


def _turns(case: Case) -> Found | None:
    """Whether threads keep one core busy, all of them together, and wait for it."""
    with_gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    count, busy, cpu = case.busy()
    one = 0.6 * case.elapsed < cpu < 1.2 * case.elapsed and busy > 1.5 * cpu
    if not (one and case.threads and with_gil and count > 1 and case.facts.cores > 1):
        return None
    return ("GIL", "because the worker threads run Python code, one at a time, which needs the GIL",
            "worker_type='process' would help.")  # fmt: skip


def _locked(case: Case) -> Found | None:
    """Whether about one worker at a time does something else than wait for a lock."""
    count, looks = case.busy()[0], case.facts.looks
    share = looks.get("lock", 0) / max(1, sum(looks.values()))
    if sum(looks.values()) < LOOKS or count < 2 or share < 0.4 or (1 - share) * count > 1.5:
        return None
    return (
        "shared lock",
        f"because the workers wait for a lock that they share ({share:.0%} of their busy time)",
        "More workers would not help. Hold the lock for a shorter time, or give each worker a file "
        "or connection of its own.",
    )


def _computing(case: Case) -> Found | None:
    count, busy, cpu = case.busy()
    if cpu <= 0.5 * busy:
        return None
    if count >= case.facts.cores:
        return ("computing workers", "because all workers compute",
                f"There are {count} for {case.facts.cores} core(s), so no option would help: cheaper "
                "transforms or more cores would.")  # fmt: skip
    return ("too few workers",
            f"because all workers compute, and there are {count} for {case.facts.cores} cores",
            _more(case, case.facts.cores))  # fmt: skip


def _waiting(case: Case) -> Found | None:
    count = case.busy()[0]
    looks = dict(case.facts.looks)
    looks.pop("cpu", None)
    known = sum(looks.values()) >= LOOKS
    most = max(looks, key=lambda name: looks[name]) if known else ""
    what = {"storage": "storage", "sleep": "a timer (sleep)", "lock": "locks"}.get(most, "")
    what = what or "storage, network or locks"
    return ("slow storage" if most == "storage" else "too few workers",
            f"because samples in all workers wait for {what}",
            _more(case, GROWTH * max(1, count)))  # fmt: skip


def _more(case: Case, most: int) -> str:
    """How many workers would do, and what that would save."""
    count, busy, _cpu = case.busy()
    count, between = max(1, count), case.elapsed - case.waited
    busy -= case.missed
    enough = math.ceil(1.1 * busy / between) if between > busy / most else most
    workers = min(most, max(enough, count + 1))
    running = case.elapsed - case.facts.starting - case.missing
    saved = min(case.left - case.missing, running - max(between, busy / workers))
    about = f" would save up to about {seconds(saved)}" if saved > 0 else " would help"
    if case.stats["scheduler"] is not None:
        return f"An upper bound of {workers} workers in autoscale{about}."
    if case.facts.balanced:
        return f"num_workers={workers} (or autoscale=({count}, {workers})){about}."
    if not case.facts.iterable:
        return f"num_workers={workers}{about}."
    return (
        f"num_workers={workers}{about}. For an iterable dataset that changes the batches, and each "
        "worker needs a shard of its own."
    )


# ---- a cache that did not have values ----------------------------------------------------------


def _of_work(missed: Missed | None, work: float) -> float:
    """The share of some seconds of work that went into values that a cache will have, or would have
    if it were larger."""
    if missed is None or work <= 0 or (missed.again and not missed.too_small):
        return 0.0
    share = missed.seconds / work
    return share if share < ALL_MISSED else 1.0


def _misses(missed: Missed | None, spent: float) -> Iterator[Cause]:
    """The cause of seconds that were spent in such values."""
    if missed is None:
        return
    if missed.too_small:
        yield Cause(SMALL_CACHE, spent,
                    f"{seconds(spent)} to make {missed.values} values that the cache did not have, "
                    f"and it has no room for {missed.refused} of them", larger(missed))  # fmt: skip
    else:
        once, advice = " (once)", ""
        if missed.epochs == 1:
            once, advice = "", (
                "An epoch that asks for them again finds them there. Read the verdict of a later epoch "
                "before you add workers."
            )
        yield Cause(
            "filling the cache", spent,
            f"{seconds(spent)} to make {missed.values} values that the cache did not have yet{once}",
            advice,
        )  # fmt: skip


def larger(missed: Missed) -> str:
    """Returns what helps where a cache has no room."""
    if missed.enough is None:
        if not missed.size:
            return "Larger caches would keep them."
        return (
            f"It uses {sized(missed.used)} of its {sized(missed.size)}: a larger cache would keep values "
            "of more than a 16th of that. Otherwise memory, or the disk, has no room for more."
        )
    whole = f'"{sized(missed.enough)}"'
    size = f"cache={whole}" if missed.option == "cache=" else f"{missed.option}({whole})"
    about = f", and save about {seconds(missed.saves)} of work an epoch" if missed.saves else ""
    return f"{size} would keep all{about}."


#: in the order in which waits fall into parts
_ALL = (_start, _first, _starts, _long, _copies, _steady)


# ---- without workers ---------------------------------------------------------------------------

#: numbers of workers that are thought of where samples wait and do not compute
MOST_ALONE = 32


@dataclass(frozen=True)
class Alone:
    """Holds what a loader without workers has measured."""

    batches: int
    loading: float
    between: float
    #: of the loading, on a core
    cpu: float
    #: core time of the program between two calls, its other threads included
    own_cpu: float
    cores: int = 1
    #: mean of a sample
    mean: float = 0.0
    #: values that were made because a cache did not have them
    missed: Missed | None = None


def alone(case: Alone) -> tuple[str, list[Cause]]:
    """The verdict, and its cause, of ``num_workers=0``."""
    if case.batches < FEW:
        asked = f"{case.batches} batch(es) were asked for"
        return f"The trainer loads by itself. Too early to say more: {asked}.", []
    elapsed = case.loading + case.between
    share = case.loading / max(elapsed, 1e-9)
    if share < WORTH:
        return f"The trainer loads by itself, which takes {share:.0%} of its time.", []
    text = (
        f"The trainer loads by itself, which takes {share:.0%} of its time ({seconds(case.loading)} "
        f"of {seconds(elapsed)})"
    )
    left = 1 - _of_work(case.missed, case.loading)  # if a cache had had these values
    rest = replace(case, loading=left * case.loading, cpu=left * case.cpu)
    found = list(_misses(case.missed, case.loading - rest.loading))
    if rest.loading >= WORTH * elapsed:
        why = f"{seconds(rest.loading)} in which it loads by itself (num_workers=0)"
        found.append(Cause("no workers", rest.loading, why, _workers(rest)))
    found = sorted((one for one in found if one.seconds > 0), key=lambda cause: -cause.seconds)
    text += ". " if found[0].name == "no workers" else f": {found[0].why}. "
    others = (f"{other.why}. {other.advice}" for other in found[1:])
    return " ".join([f"{text}{found[0].advice}", *others]), found


def _workers(case: Alone) -> str:
    """Whether workers would help, and how many."""
    elapsed = case.loading + case.between
    workers, saved = _best(case)
    if case.mean < CHEAP:
        return "Samples are so cheap that workers would not help. Larger batches may."
    if saved > 0.05 * elapsed:
        return (
            f"num_workers={workers} would save about {seconds(saved)} of that, "
            f"{saved / elapsed:.0%} of the program's time."
        )
    if _least(case) > 0.9 * elapsed:
        return "Workers would save little of that, because the cores are busy already."
    return "Workers would save little of that."


def _best(case: Alone) -> tuple[int, float]:
    """The least number of workers that is about as good as any, and what it saves."""
    def lasts(workers: int) -> float:
        return max(case.between, case.loading / workers, _least(case))

    fill = math.ceil(case.cores * case.loading / max(case.cpu, 1e-9))  # workers that fill the cores
    most = min(MOST_ALONE, max(1, fill))
    best = lasts(most)
    workers = next(n for n in range(1, most + 1) if lasts(n) <= 1.05 * best)
    return workers, max(0.0, case.loading + case.between - lasts(workers))


def _least(case: Alone) -> float:
    """Returns what the cores need for all of it, however it is spread over them."""
    return (case.cpu + case.own_cpu) / case.cores
