"""The one limit of a program, what would make it faster, and what checks have found."""

from __future__ import annotations

import math
import re
import shlex
import statistics
from dataclasses import replace

from ..text import counted, format_bytes, format_rate, format_seconds
from .codecs import CHEAP, CLOSE, LOSS, QUALITY, codec_rows
from .facts import (
    BARELY, OTHERS, WORTH, Facts, fit_scaling, is_uneven, measured_gain, rate_with_step,
    reading_stages, scheduling_gain, slow_share, virtual_gain, virtual_rate,
)  # fmt: skip
from .recode import SUFFIXES, Settings
from .records import Change, Limit, Move, RateRequest, Report, StageTimes, format_place

#: share of its time that a program waits. Below the first the step is the limit; below the second a
#: loader that costs nothing would gain too little to matter
NO_WAIT, LITTLE_WAIT = 0.02, 0.10
#: samples that several processes make at once take longer by this where they share something
SHARED = 1.35
#: share of a sample from which opening files is the limit: it can be saved whole
OPENED = 0.4
#: share of its time that a sample computes, from which threads that hold the interpreter's lock wait
#: for each other because of that lock
COMPUTES = 0.5
#: The workers slow a step down if it waits for a core for more than the first share of its time, samples
#: take more than that share of the CPU time, and the cores are busy for more than the second share.
CROWDED, BUSY = 0.15, 0.8
KINDS = {
    "step": "the step", "nothing": "none in loading", "storage": "storage", "lock": "a lock",
    "interpreter": "the interpreter's lock", "stragglers": "stragglers", "workers": "too few workers",
    "work": "the work of a sample", "cores": "the cores", "hand-over": "handing samples over",
    "start": "starting workers", "collate": "collate_fn", "sampler": "the sampler",
    "open": "opening a file for each sample",
    "shared": "something that workers share", "unknown": "not known",
}  # fmt: skip
#: the least bound of a prediction's error
BOUND = 0.15
#: bytes a second at which a cached sample is copied out
COPIES = 4e9
#: share of the available memory that a cache may take
CACHED = 0.5
#: what opens objects that a check cannot keep open: they are of C, and may be closed
UNCHECKED = ("mmap.mmap", "lmdb.open")
#: transforms by their class, and the operator of minato.ops that does the same in C; MONAI's for
#: dictionaries have a "d" at the end of their names
TWINS = {
    "RandFlip": "RandFlip", "RandomFlip": "RandFlip", "RandBalancedCrop": "RandBalancedCrop",
    "RandCropByPosNegLabel": "RandBalancedCrop", "RandSpatialCrop": "RandCrop", "Cast": "Cast", "CastToType": "Cast",
    "RandBrightness": "RandScaleIntensity", "RandScaleIntensity": "RandScaleIntensity",
    "GaussianNoise": "RandGaussianNoise", "RandGaussianNoise": "RandGaussianNoise",
    "NormalizeIntensity": "Normalize", "SpatialPad": "Pad",
}  # fmt: skip


# ---- the limit -----------------------------------------------------------------------------


def limit(f: Facts) -> Limit:
    """The kind of the limit, and the sentence that is the first line of the answer."""
    wait, why = f.watched.wait, "too little of it was measured to say why"
    if found := _find_limit(f):
        return Limit(found[0], f"Limit: {KINDS[found[0]]}. {found[1]}")
    if wait is None:
        return Limit("unknown", f"Limit: {KINDS['unknown']}. Too little was measured to say.")
    if f.report.unstudied:
        why = f"its samples were not studied, because {f.report.unstudied}"
    elif f.work.failed and not f.costs:
        why = "no sample could be made in the study"
    return Limit("unknown", f"Limit: {KINDS['unknown']}. The program waits for data {wait:.0%} of its time, and {why}.")


def _find_limit(f: Facts) -> tuple[str, str] | None:
    wait = f.watched.wait
    label, share = f.top
    if step_lacks_cores(f):
        cpu = f.sample_cpu(f.own, f.workers)
        return "cores", (
            f"The step and {counted(f.workers, 'worker')} share them: the step waits for a core "
            f"{f.queued_step:.0%} of its time, and samples take {cpu / (cpu + f.step_cpu):.0%} of the CPU time. "
            f"{share:.0%} of a sample is {label}."
        )
    if wait is not None and wait < NO_WAIT:
        return "step", f"The program waits for data {wait:.1%} of its time, so no loader would make it faster."
    if wait is not None and wait < LITTLE_WAIT:
        return "nothing", (
            f"Nothing to gain there: the program waits for data {wait:.0%} of its time, so with a loader "
            f"that costs nothing it would be {1 / (1 - wait):.2f} times as fast."
        )
    if not f.costs:
        return None
    if found := starting(f) or slow_sampler(f):
        return found
    count, slow, times = slow_share(f.costs)
    if is_uneven(f.costs) and f.workers > 1 and not f.balanced and scheduling_gain(f, f.workers) >= WORTH:
        return "stragglers", (
            f"{count:.1%} of the samples take {slow:.0%} of the time, up to {times:.0f} times the median, and whole "
            "batches wait for them while workers idle."
        )
    if found := shared_wait(f) or thread_wait(f):
        return found
    opens, rate = opening(f), f.own_rate
    if opens is not None and opens.whole >= OPENED * f.mean:
        return "open", (
            f"{opens.label} ({format_place(opens.place)}) takes {min(1.0, opens.whole / f.mean):.0%} of a sample, "
            "and opens what earlier samples have opened and closed."
        )
    labels = reading_stages(f.stages)
    reads = sorted((s for s in f.stages if s.label in labels), key=lambda s: -s.seconds)
    waits = sum(max(0.0, s.seconds - s.cpu) for s in reads)
    if waits >= 0.5 * f.mean:
        return "storage", f"A sample waits {waits / f.mean:.0%} of its time for reads ({reads[0].label})."
    # joining samples takes longer than making them, and is most of handing them over
    collate = f.collate
    if collate > f.mean and not (f.workers and 1 / f.hands_over > 2 * collate / min(f.workers, f.cores)):
        return "collate", (
            f"{f.loader.get('collate_fn') or 'collate_fn'} takes {format_seconds(collate)} for each sample of a batch, "
            f"{collate / f.mean:.1f} times as long as making the sample."
        )
    if found := hand_over(f):
        return found
    gain = (f.rate(f.own, f.cores) or 0.0) / rate if rate and f.workers < f.cores else 0.0
    one_stage = share >= 0.6 and label not in ("__getitem__ itself", "__iter__ itself")
    if gain >= (1.5 if one_stage else 1.2):
        return "workers", (
            f"With num_workers={f.cores} the loader makes {gain:.2g} times as many samples as with num_workers="
            f"{f.workers}. {share:.0%} of a sample is {label}."
        )
    if f.cpu_share > 0.6 and f.workers >= f.cores and not one_stage:
        return "cores", f"Workers keep {counted(f.cores, 'core')} busy; {share:.0%} of a sample is {label}."
    return "work", f"{share:.0%} of it is {label}, with num_workers={f.workers} on {counted(f.cores, 'core')}."


def step_lacks_cores(f: Facts) -> bool:
    """Whether the program waits little for data only because its workers slow its step down: they keep
    all cores busy together. Cheaper samples would help then."""
    wait = f.watched.wait
    if wait is None or wait >= LITTLE_WAIT or not f.workers or not f.costs or f.report.machine.others > OTHERS:
        return False
    together = f.sample_cpu(f.own, f.workers) + f.step_cpu
    busy = f.watched.delivered * together / f.cores
    share = f.sample_cpu(f.own, f.workers) / max(together, 1e-9)
    return f.queued_step > CROWDED and busy > BUSY and share > CROWDED


def starting(f: Facts) -> tuple[str, str] | None:
    """Workers that start anew in each epoch, where epochs are short or starts are slow."""
    rate = f.own_rate
    if not f.starts_again or not f.start or f.watched.starts < 2 or not rate:
        return None
    seconds = f.start_alone / max(1, f.epoch_samples)
    share = min(1.0, max(seconds, f.end_seconds(f.own, f.workers)) * f.program_rate(rate, f.workers))
    if share < 0.5:
        return None
    return "start", (
        f"Workers start anew in each epoch: {format_seconds(f.start)} until its first batch, and "
        f"{share:.0%} of the program's time. persistent_workers=True starts them once."
    )


def slow_sampler(f: Facts) -> tuple[str, str] | None:
    """A sampler that takes most of the time in which the program waits. It runs in the program's own
    process, in turns with the step, however many workers there are."""
    told, inside, rate = f.report.sampler, f.watched.inside, f.own_rate
    if not told or not inside or not rate or f.sampler < 0.5 * inside / f.batch:
        return None
    if f.without_sampler().program_rate(rate, f.workers) < WORTH * f.program_rate(rate, f.workers):
        return None
    return "sampler", (
        f"{told.name} ({format_place(told.place)}) takes {format_seconds(f.sampler)} to draw the index of "
        f"a sample, in the program's own process; making the sample takes {format_seconds(f.mean)}."
    )


def shared_wait(f: Facts) -> tuple[str, str] | None:
    """A stage for which processes wait for each other."""
    both = f.report.contend
    if not both or not both.one.samples or not both.several.samples:
        return None
    one, several = both.one, both.several
    least = SHARED
    if len(f.costs) > 1:  # twice the standard error of the ratio: samples that cost more come by chance
        least += 2 * statistics.stdev(f.costs) / f.mean * math.sqrt(1 / one.samples + 1 / several.samples)
    if several.seconds < least * one.seconds or both.processes > max(2, f.cores):
        return None
    alone = {stage.label: stage.seconds - stage.cpu for stage in one.stages}
    grown = [(stage.seconds - stage.cpu - alone.get(stage.label, 0.0), stage) for stage in several.stages]
    rest = several.seconds - several.cpu - one.seconds + one.cpu - sum(more for more, _stage in grown)
    grown.append((rest, StageTimes("__getitem__ itself", "other")))
    more, stage = max(grown, key=lambda pair: pair[0])
    if more < max(0.5 * (several.seconds - one.seconds), 0.2 * one.seconds, BARELY):
        return None
    where = (stage.kind == "lock" and stage.inside and stage.inside[0]) or stage.label
    count = both.processes
    once = (
        f"{count} processes at once make {format_rate(count / several.seconds)} samples/s, one makes "
        f"{format_rate(1 / one.seconds)}"
    )
    names = reading_stages(several.stages)
    if stage.label in names or set(stage.inside) & names:
        return "storage", f"Reads wait for each other in {where}: {once}, and more would not read faster."
    if (made := f.at_once()) is not None:
        once += f"; {count} threads make {made['threads']:.2g} times as many as one"
    if stage.kind == "lock" or both.locks:
        lock = f" ({', '.join(both.locks)})" if both.locks else ""
        where = "__getitem__" if where in ("__getitem__ itself", stage.label) else where
        return "lock", f"Workers wait for each other in {where}{lock}: {once}."
    return "shared", f"Workers wait for each other in {where}: {once}."


def thread_wait(f: Facts) -> tuple[str, str] | None:
    """What the threads of a program with ``worker_type="thread"`` wait for."""
    both = f.report.contend
    if not f.threads or (made := f.at_once()) is None or both is None or both.threads is None:
        return None
    told, count = both.threads, both.processes
    if made["threads"] > count / SHARED:
        return None
    rates = (
        f"{count} at once make {made['threads']:.2g} times as many samples as one, {count} processes "
        f"{made['processes']:.2g} times"
    )
    if f.cpu_share > COMPUTES and f.work.gil in ("holds it", "mixed"):
        return "interpreter", f"A sample holds it, so threads take turns: {rates}."
    if told.locks:
        return "lock", f"Threads wait for each other ({', '.join(told.locks)}): {rates}."
    return "shared", f"Threads wait for each other: {rates}."


def opening(f: Facts) -> StageTimes | None:
    """The stage that takes most of the time of those that open what an earlier sample has opened, with what
    else a sample takes less where files stay open, such as closing them."""
    opens = [stage for stage in f.stages if stage.kind == "open" and stage.again > 0.5]
    found = max(opens, key=lambda stage: stage.whole, default=None)
    if found is None or f.work.kept_open is None:
        return found
    return replace(found, whole=max(found.whole, f.mean - f.work.kept_open))


def hand_over(f: Facts) -> tuple[str, str] | None:
    """Samples that workers make in less time than it takes to hand them over."""
    at_once = min(f.workers, f.cores / max(f.cpu_share, 1e-9))
    if not f.workers or f.hands_over > 0.5 * at_once / f.mean:
        return None
    return "hand-over", (
        f"Workers make a sample in {format_seconds(f.mean / at_once)}, and the loader hands one over in "
        f"{format_seconds(1 / f.hands_over)}. Larger batches, or num_workers=0, may be faster."
    )


# ---- changes -------------------------------------------------------------------------------


def candidates(f: Facts) -> tuple[list[Change], list[str]]:
    """Changes with a predicted rate of the program, and what would not help and why."""
    rate = f.own_rate
    if f.watched.wait is not None and f.watched.wait < NO_WAIT and not step_lacks_cores(f):
        return [], [f"any change of the loader: the program waits for data {f.watched.wait:.1%} of its time"]
    if not rate or not f.costs:
        return [], []
    now = f.program_rate(rate, f.workers)
    makers = _sampler, _more_workers, _no_workers, _minato, _worker_type, _open, _photos, _cache, _codec
    found = [make(f, rate, now) for make in makers]
    helps = [one for one in found if isinstance(one, Change)]
    useless = [one for one in found if isinstance(one, str)]
    helps += _together(f, helps) + _twins(f) + _orders(f) + _kept_workers(f, now)
    for one in helps:
        one.paste = _paste_for(f, one.paste)
        one.gain = None if one.predicted is None else one.predicted / now
    good = [one for one in helps if one.gain is None or one.gain >= WORTH]
    useless += [f"{one.what}: predicted {one.gain:.2f} times" for one in helps if one not in good]
    return sorted(good, key=lambda one: -(one.gain or 0.0)), useless


def _paste_for(f: Facts, paste: str) -> str:
    """The line to paste. Where a library makes the loader, or calls the function that does, the page of
    recipes says where the library takes it."""
    maker, kind = f.loader.get("maker"), f.loader["class"]
    own = not maker and kind.startswith(("torch.", "torchdata.", "minato.", "DataLoader"))
    if own or not re.match("num_workers|persistent_workers|worker_type|cache|from minato import DataLoader", paste):
        return paste
    paste = paste.replace("from minato import DataLoader", "minato.patch_torch()")
    return f"{paste}{';' if '#' in paste else '  #'} docs/recipes.md says how with {maker or kind}"


def _sampler(f: Facts, rate: float, _now: float) -> Change | None:
    """Indices that are drawn all at once."""
    told = f.report.sampler
    if told is None or slow_sampler(f) is None:
        return None
    return Change(
        f"indices drawn once an epoch, in place of {told.name}", f.without_sampler().program_rate(rate, f.workers),
        "another sampler", None,
        "in __iter__: draw all indices of an epoch by one call, as torch.utils.data.WeightedRandomSampler does",
        "drawn as before, by other random numbers", place=told.place,
    )  # fmt: skip


def _more_workers(f: Facts, rate: float, now: float) -> Change | str | None:
    fit = fit_scaling(f.scaling())
    # a step that waits for most of the time leaves its cores to workers
    busy = f.step_cores * min(1.0, (f.rate(f.own, f.cores) or rate) / (f.asked_alone or math.inf))
    target, note = max(1, f.cores - round(busy)), ""
    if shared_wait(f) is not None or thread_wait(f) is not None:
        return "more workers: they wait for each other already"
    if fit is None:
        return None  # a note says so
    counts = f" from rates of {', '.join(map(str, sorted(f.scaling())))} workers"
    if f.cpu_share <= 0.5:  # workers that wait need no core each
        most = min(4 * f.cores, math.ceil(f.cores / max(f.cpu_share, 0.01)))
        enough = (n for n in range(f.workers + 1, most) if fit(n) >= (f.asked_alone or math.inf))
        target = max(f.workers + 1, next(enough, most))
        note = f"extrapolated{counts}" if target > max(f.scaling()) else ""
    elif f.workers >= target:
        return (
            f"more workers: there are {f.workers} for {f.cores} cores, of which the step uses {round(busy)}, and "
            f"samples compute for {f.cpu_share:.0%} of their time"
        )
    # the fit is of workers alone: from none to one is no step on its curve
    faster = fit(target)
    if is_uneven(f.costs) and f.workers:  # of which a short measurement has more or fewer slow samples
        faster = rate * virtual_rate(f, target, f.balanced) / virtual_rate(f, f.workers, f.balanced)
    predicted = f.program_rate(faster, target)
    if predicted < WORTH * now:
        return f"{target} workers: predicted {predicted / now:.2f} times{counts}"
    data = "unchanged"
    if f.loader.get("iterable"):  # else each worker gives all of them
        data = "unchanged only if the dataset splits its samples between its workers"
    what = f"num_workers={target}"
    return Change(what, predicted, "one argument", RateRequest("own", target), what, data, note)


def _no_workers(f: Facts, _rate: float, _now: float) -> Change | None:
    """No workers, where handing samples over takes longer than making them."""
    if hand_over(f) is None or starting(f) is not None or f.loader.get("worker_init_fn"):
        return None
    predicted = rate_with_step(1 / (f.mean + f.collate), f.asked_alone, 0)
    return Change("num_workers=0", predicted, "one argument", RateRequest("own", 0), "num_workers=0")


def _minato(f: Facts, rate: float, _now: float) -> Change | str | None:
    if f.own == "minato" or f.workers == 0:
        return None
    measured = measured_gain(f, f.workers)
    gain = measured or (virtual_gain(f, f.workers) if f.workers > 1 else 1.0)  # one worker has nothing to share
    if gain < WORTH:
        how = "measured" if measured else "in a simulation with the measured costs"
        return f"minato's loader: {how} {gain:.2f} times with {counted(f.workers, 'worker')}"
    return Change(
        "minato.DataLoader in place of torch's", _minato_rate(f, rate, gain, f.workers), "one import",
        RateRequest("minato", f.workers), "from minato import DataLoader",
    )  # fmt: skip


def _minato_rate(f: Facts, rate: float, gain: float, workers: int) -> float:
    """The program's rate with minato's loader: as that was measured, or else with the gain of the
    simulation. rate: of the program's own loader."""
    measured = f.rate("minato", workers) if measured_gain(f, workers) is not None else None
    return f.program_rate(measured or rate * gain, workers, "minato")


def _worker_type(f: Facts, rate: float, _now: float) -> Change | str | None:
    """Processes in place of a program's threads, or threads in place of its processes: where one of
    the two waits for what the other does not."""
    made = f.at_once()
    if made is None or not f.workers or f.loader.get("worker_type") == "native":
        return None
    has, other = ("threads", "processes") if f.threads else ("processes", "threads")
    gain = made[other] / made[has]
    if (thread_wait(f) if f.threads else shared_wait(f)) is None:
        return None
    if gain < WORTH:
        return f"{other} in place of {has}: measured {gain:.2f} times as many samples at once"
    kind = "process" if f.threads else "thread"
    own = "" if f.own == "minato" else "from minato import DataLoader  # and "
    predicted = f.program_rate(rate * gain, f.workers, "torch" if f.threads else f.own)  # processes start anew
    return Change(
        f"{other} in place of {has}", predicted, "one import, one argument" if own else "one argument",
        RateRequest("minato", f.workers, worker_type=kind), f'{own}worker_type="{kind}"',
    )  # fmt: skip


def _open(f: Facts, _rate: float, _now: float) -> Change | None:
    """Files that stay open in each worker."""
    stage = opening(f)
    if stage is None:
        return None
    name = stage.label.removesuffix("()")
    check = None if name in UNCHECKED or f.threads else RateRequest("own", f.workers, open=True)
    return Change(
        f"{name} kept open in each worker", f.cheaper_rate(f.mean / max(f.mean - stage.whole, 0.02 * f.mean)), "two lines",
        check, f"open_once = functools.lru_cache(None)({name})  # call it in place of {name}, and close nothing",
        place=stage.place,
    )  # fmt: skip


def _photos(f: Facts, _rate: float, _now: float) -> Change | None:
    """JPEG files of which only the crop is decoded."""
    if f.work.photos is None:
        return None
    return Change(
        "photos decoded by minato.ops, where a crop needs them", f.cheaper_rate(f.mean / f.work.photos),
        "one import, one call", RateRequest("own", f.workers, photos=True),
        "from minato import ops  # and make the loader with ops.native_images(DATASET) in place of its DATASET",
        "other random numbers" if f.own == "minato" else "unchanged",
    )  # fmt: skip


def _cache(f: Facts, _rate: float, now: float) -> Change | str | None:
    cache = f.work.cache
    count = f.loader.get("samples")
    if not count or f.loader.get("cache"):
        return None
    if not cache:
        return f"a cache: {f.work.no_cache or 'its gain was not measured'}"
    need, free = cache.bytes * count, f.report.machine.memory_available
    what = f"a cache of {'whole samples' if cache.whole else f'the value after {cache.after}'}"
    left = f.mean * (1 - cache.share) + cache.bytes / COPIES + 20e-6
    predicted = f.cheaper_rate(f.mean / left)
    if need > CACHED * free:
        return f"{what}: it needs {format_bytes(need)}, and {format_bytes(free)} are available"
    if predicted < WORTH * now:
        return f"{what}: predicted {predicted / now:.2f} times"
    check = None
    if cache.whole or not f.threads:  # stages are replayed in one thread
        check = RateRequest("own", f.workers, cached=-1 if cache.whole else cache.calls)
    effort = f"{format_bytes(need)} of memory; {cache.share:.0%} of a sample's time is saved"
    if f.own != "minato":
        effort = f"minato's loader, and a dataset in parts; {effort}"
    size = max(1, math.ceil(1.1 * need / (1 << 30)))
    paste = f'cache="{size}GiB"  # of minato.DataLoader, with read, decode and augment in the dataset: docs/cache.md'
    return Change(what, predicted, effort, check, paste, note="from the second epoch on")


def _codec(f: Facts, rate: float, now: float) -> Change | str | None:
    rows, told = codec_rows(f), f.codecs
    if not f.report.codecs:
        return None
    if not told.images:
        where = "; images come out of containers, which minato recode does not read" * bool(told.containers)
        return f"another codec: samples read no photo from a file of its own{where}"
    if not rows:
        return None  # a note says so
    good = [
        row for row in rows[1:]
        if row.format and row.rate and (row.quality or QUALITY) >= QUALITY
        and (row.worst is None or row.worst >= LOSS)
    ]  # fmt: skip
    if not good:
        return f"another codec: each loses more than {LOSS:.0f} dB on some image, or cannot be read"
    best = max(row.rate for row in good)
    close = [row for row in good if row.rate * CLOSE >= best]
    least = min(row.cpu or row.decode for row in close)  # else cores that are busy would undo the gain
    cheap = [row for row in close if (row.cpu or row.decode) <= CHEAP * least]
    row = max(cheap, key=lambda row: row.psnr or math.inf)
    predicted = f.cheaper_rate(row.rate / rate)
    what = f"images as {row.name}" + (f", shorter side {told.size}" if told.size else "")
    if predicted < WORTH * now:
        return f"{what}: predicted {predicted / now:.2f} times"
    name = f"{row.format}{row.quality or ''}" + (f"-{told.size}" if told.size else "")
    given = [told.folder, f"{told.folder}-{name}", "--format", row.format]
    given += ["--quality", str(row.quality)] if row.quality else []
    given += ["--size", str(told.size)] if told.size else []
    given += ["--lossy"] if told.lossless and (row.format != "png" or told.size) else []
    codec = Settings(row.format, row.quality, told.size)
    smaller = f"{told.rows[0].bytes / row.bytes:.1f} times smaller"
    return Change(
        what, predicted, f"a copy of the folder, {smaller}, whose files end in {SUFFIXES[row.format][0]}",
        None if f.loader.get("iterable") else RateRequest("own", f.workers, codec=codec),
        f"minato recode {shlex.join(given)}", "shrunk, nothing else" if row.psnr is None else
        f"changed, {row.psnr:.1f} dB, worst image {row.worst:.1f} dB",
    )  # fmt: skip


def _together(f: Facts, helps: list[Change]) -> list[Change]:
    """Workers and scheduling at once, predicted as one change."""
    target = next((h.check.workers for h in helps if h.check and h.what.startswith("num_workers")), None)
    fit = fit_scaling(f.scaling())
    if target is None or fit is None or f.own == "minato" or target < 2:
        return []
    gain = scheduling_gain(f, target)
    predicted = _minato_rate(f, fit(target), gain, target)
    if gain < WORTH or predicted < WORTH * max(h.predicted or 0.0 for h in helps):
        return []
    return [Change(
        f"minato.DataLoader with num_workers={target}", predicted, "one import, one argument",
        RateRequest("minato", target), f"from minato import DataLoader  # and num_workers={target}",
    )]  # fmt: skip


def _orders(f: Facts) -> list[Change]:
    """Transforms in another order; those whose results have other shapes are left out."""
    return [
        Change(
            # in the clocks of the study; other parts of a sample stay what they are
            describe_move(move), f.cheaper_rate(f.mean / max(f.mean - (move.before - move.after), 0.05 * f.mean)),
            "the order of the transforms", RateRequest("own", f.workers, order=(move.chain, move.order)),
            f"order: {', '.join(move.names)}", describe_data(move),
        )
        for move in f.orders.moves if (move.exact or move.equal or move.alike) and move.before and move.after
    ]  # fmt: skip


def describe_move(move: Move) -> str:
    return f"{move.name} {'before' if move.earlier else 'after'} {', '.join(move.over)}"


def describe_data(move: Move) -> str:
    """What a move of a transform does to the data."""
    tried = f"{move.tried} tries on {move.samples} samples and edge cases"
    if move.exact:
        order = "; both draw random numbers, which come in another order" if move.draws else ""
        return f"exact: known to commute, and equal in {tried}{order}"
    if move.equal:
        return f"equal in {tried}, which proves nothing for others"
    return f"changed: verified to run, with the same types and shapes, in {tried}"


def _twins(f: Facts) -> list[Change]:
    found = {}
    for stage in f.stages:
        name = stage.label.partition("(")[2].rstrip(")")
        twin = TWINS.get(name) or TWINS.get(name.removesuffix("d"))
        if stage.kind == "transform" and twin and f.share(stage) > 0.05:
            found[f"{name} -> minato.ops.{twin}"] = f.share(stage)
    names = ", ".join(found)
    return [Change(
        f"native operators ({names})", None, f"rewrite {sum(found.values()):.0%} of a sample's time",
        data="other random numbers", note="not predicted: their speed depends on sizes",
    )] if found else []  # fmt: skip


def _kept_workers(f: Facts, now: float) -> list[Change]:
    """Workers that stay, where they start anew in each epoch of the program."""
    known = bool(f.unforked) or (f.own, f.workers) in f.again
    rate = now if known else f.watched.delivered
    if not f.starts_again or not f.start or f.watched.starts < 2 or not rate:
        return []
    epoch = f.epoch_samples / rate
    gain = epoch / max(epoch - f.start_alone, 0.1 * epoch)  # workers that stay make a first batch, too
    return [Change(
        "persistent_workers=True", now * gain, "one argument, of one loader for all epochs",
        RateRequest("own", f.workers, persistent=True) if known and not f.unforked else None,
        "persistent_workers=True", note=f"workers start anew in each epoch: {f.start:.2g} s",
    )] if gain >= WORTH else []  # fmt: skip


def add_base_rate(found: Report) -> None:
    """Enters what all factors are relative to, and gives predicted rates with these: the rate of the
    program as it is, from its checks if it has some, or else as its loader was measured."""
    f = Facts(found)
    rate = f.own_rate
    base = found.base or (f.program_rate(rate, f.workers) if rate else None)
    found.relative_to = base
    if base is None:
        return
    for change in found.helps:
        if change.gain is not None:
            change.predicted = base * change.gain
        if change.checked is not None:
            change.checked = base * change.checked_gain


def drop_small_gains(found: Report) -> None:
    """Moves the changes that gain too little, by their check or else as predicted, to what would not
    help. The report keeps their numbers."""
    little = [c for c in found.helps if (c.checked_gain or c.gain or WORTH) < WORTH]
    found.helps = [change for change in found.helps if change not in little]
    found.dropped = found.dropped + little
    found.useless = [
        f"{change.what}: predicted {change.gain:.2f} times" if change.checked is None
        else f"{change.what}: {change.checked_gain:.2f} times when checked on {change.samples} samples "
        f"(predicted {change.gain:.2f} times)" for change in little
    ] + found.useless  # fmt: skip


def enter_check(change: Change, now: float, pairs: list[tuple[float, float]]) -> None:
    """Enters what a check has found. now: the program's rate as predicted without the change. pairs:
    its rates as it is and with the change, of each repeat. Both make the same samples one after the
    other, so their ratio does not change with the samples, nor with what other programs do meanwhile."""
    if not pairs or change.predicted is None:
        return
    gains = [with_it / as_it_is for as_it_is, with_it in pairs]
    gain, base = statistics.median(gains), statistics.median(as_it_is for as_it_is, _ in pairs)
    predicted = change.predicted / now
    change.base, change.checked, change.checked_gain = base, base * gain, gain
    change.predicted, change.gain = base * predicted, predicted
    change.bound = max(BOUND, (max(gains) - min(gains)) / 2 / predicted)
    change.settled = abs(predicted - gain) <= change.bound * predicted
