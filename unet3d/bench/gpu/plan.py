"""The rows of the experiment, in the order in which they are run: the most important first."""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from unet3d import loaders
from unet3d.bench.workloads import base


@dataclasses.dataclass(frozen=True)
class Contender:
    """A loader with its arguments, and its name in tables."""

    label: str
    loader: str
    arguments: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()  # NAME=value
    boxes: bool = False  # remembers the boxes of labels that it has read


@dataclasses.dataclass(frozen=True)
class Row:
    """One run."""

    group: str  # the question that it answers: see GROUPS
    contender: Contender
    cores: int
    repeat: int
    amp: str
    batch: int

    @property
    def key(self) -> str:
        """The key that distinguishes it from all others."""
        return (f"{self.group}: {self.contender.label}, {self.amp}, batch {self.batch}, "
                f"{self.cores} cores, repeat {self.repeat}")


@dataclasses.dataclass(frozen=True)
class Size:
    """How large an experiment is."""

    cases: int
    scale: float  # of the phantoms: 1 is a patient's
    min_shape: int
    copies: int  # of all cases, so that they do not fit `memory_gib`
    memory_gib: float
    train: tuple[str, ...]  # arguments of unet3d.train
    repeat: int  # times that a case occurs in an epoch
    epochs: int
    cores: tuple[int, ...]  # all contenders are compared with the first number
    amps: tuple[str, ...]
    batches: tuple[int, ...]
    repeats: int
    workers: int  # of the workloads
    speech: tuple[str, ...]
    detection: tuple[str, ...]
    utterances: int
    images: int
    benchmark_workers: tuple[int, ...]
    benchmark: tuple[str, ...]  # arguments of benchmarks/loader.py
    few: tuple[str, ...]  # the contenders of smaller questions; none: KEY
    row_s: float  # estimated time of a row, until one of its kind has ended
    limit_s: float  # time limit of a row


SIZES = {
    # 42 cases of real size: 34 to train with, 5 GB; three more copies make 20 GB of them.
    "full": Size(
        cases=42, scale=1.0, min_shape=128, copies=4, memory_gib=16,
        train=("--preset", "mlperf"), repeat=4, epochs=2, cores=(4, 2, 8, 1, 14),
        amps=("bf16", "fp16"), batches=(2, 7), repeats=3, workers=12,
        speech=("--batch-size", "24"), detection=("--batch-size", "48"),
        utterances=144, images=480, benchmark_workers=(2, 4, 8, 14),
        benchmark=("--cases", "image", "volume", "augment", "--repeats", "3", "--no-memory"),
        few=(), row_s=45, limit_s=240),
    "tiny": Size(
        cases=5, scale=0.125, min_shape=16, copies=2, memory_gib=4,
        train=("--preset", "quick", "--patch", "16", "16", "16", "--filters", "2", "4",
               "--threads", "1"), repeat=2, epochs=2, cores=(2,), amps=("bf16",),
        batches=(2,), repeats=1, workers=2,
        speech=("--batch-size", "4", "--time-scale", "0.01"), detection=("--batch-size", "4"),
        utterances=12, images=8, benchmark_workers=(2,),
        benchmark=("--cases", "image", "--quick", "--no-memory"),
        few=("synthetic", "pytorch", "minato", "minato-native-device-cached"), row_s=5,
        limit_s=120),
}

SYNTHETIC = Contender("synthetic", "synthetic")
#: contenders of every question
KEY = (
    SYNTHETIC, Contender("pytorch", "pytorch"),
    Contender("pytorch-expert", "pytorch-expert", boxes=True),
    Contender("minato", "minato"), Contender("minato-native", "minato-native"),
    Contender("minato-native-device-cached", "minato-native-device-cached", boxes=True),
    Contender("dali-cached, 4 at once", "dali-cached", ("--dali-batches=4",), boxes=True),
)
#: all volumes stay on the device: the upper bound of minato, and that of DALI
RESIDENT = (
    Contender("minato-native-device-resident", "minato-native-device-resident", boxes=True),
    Contender("dali-resident, 4 at once", "dali-resident", ("--dali-batches=4",), boxes=True),
)
OTHERS = (
    *RESIDENT,
    Contender("pytorch-ooo", "pytorch-ooo"), Contender("pytorch-native", "pytorch-native"),
    Contender("minato-ready", "minato-ready"), Contender("minato-device", "minato-device"),
    Contender("minato-native-device", "minato-native-device"),
    Contender("minato-native-device, host operators", "minato-native-device",
              environment=("MINATO_DEVICE_OPERATORS=0",)),
    Contender("minato-native-cached", "minato-native-cached", boxes=True),
    Contender("dali", "dali"), Contender("dali-cached", "dali-cached", boxes=True),
    Contender("dali-resident", "dali-resident", boxes=True),
    Contender("dali-cached, 4 at once, depth 4", "dali-cached",
              ("--dali-batches=4", "--dali-depth=4"), boxes=True),
)
WORKLOADS = tuple(Contender(name, name) for name in (
    "pytorch", "minato", "pytorch-ooo", "minato-ready"))
BENCHMARK = Contender("loader.py", "loader.py")
#: seconds that every sample and every fifth sample sleep, as published
STEPS = {"speech-3": ("0.5", "3"), "speech-10": ("0.5", "10")}
GROUPS = {
    "check": "the bytes of all samples, compared in runs that train nothing",
    "sweep": "cores x loaders",
    "python": "a trainer that computes in Python half of its time, and so keeps the GIL",
    "memory": "data that does not fit the memory of a control group, cold at first",
    "two": "two processes on one device, by torchrun",
    "speech-3": "speech, every sample sleeping 0.5 s and every fifth 3 s more",
    "speech-10": "speech, every sample sleeping 0.5 s and every fifth 10 s more",
    "detection": "detection",
    "benchmark": "benchmarks/loader.py with more workers",
}


def workload(group: str) -> str | None:
    """The workload that a group runs; None: the 3D U-Net, or none."""
    return next((name for name in base.NAMES if group.startswith(name)), None)


def rows(size: Size, available: int) -> list[Row]:
    """All rows of an experiment on this number of cores, in order."""
    return list(dict.fromkeys(_rows(size, available)))


def _rows(size: Size, available: int) -> Iterator[Row]:
    cores = [n for n in size.cores if n <= available] or [available]
    focus, amp, batch = cores[0], size.amps[0], size.batches[0]
    repeats = range(1, size.repeats + 1)
    few = [one for one in KEY if not size.few or one.label in size.few]
    served = [one for one in WORKLOADS if not size.few or one.label in size.few]

    def turn(group: str, contenders: Sequence[Contender], count: int, repeat: int,
             how: str = amp, of: int = batch) -> Iterator[Row]:
        """One row per contender, every repeat starting with another."""
        first = (repeat - 1) % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            yield Row(group, contender, count, repeat, how, of)

    def check(contenders: Sequence[Contender]) -> Iterator[Row]:
        """Contenders that make the same samples, once each."""
        kinds = [one for one in contenders if loaders.samples_of(one.loader) is not None]
        yield from turn("check", kinds, available, 1)

    def sweep(repeat: int, how: str = amp, of: int = batch) -> Iterator[Row]:
        for count in cores:
            yield from turn("sweep", KEY, count, repeat, how, of)

    for contenders in (KEY, RESIDENT):  # with one number of cores: 12 minutes are meant for these
        yield from check(contenders)
        yield from turn("sweep", contenders, focus, 1)
    yield from sweep(1)
    yield from check(OTHERS)
    yield from turn("sweep", OTHERS, focus, 1)
    yield from turn("python", few, focus, 1)
    for group in ("memory", "two"):
        yield from turn(group, few, focus, 1)
    for group in ("speech-3", "detection"):
        yield from turn(group, served, available, 1)
    for count in size.benchmark_workers:
        if count <= available:
            yield Row("benchmark", BENCHMARK, count, 1, amp, batch)
    if size.repeats > 1:
        yield from sweep(2)
    yield from turn("speech-10", served, available, 1)
    for of in size.batches[1:]:
        yield from sweep(1, amp, of)
    # The rest of the whole matrix.
    for repeat in repeats:
        yield from sweep(repeat)
    for repeat in repeats:
        yield from turn("sweep", OTHERS, focus, repeat)
        for group in ("python", "memory", "two"):
            yield from turn(group, few, focus, repeat)
    for how in size.amps:
        for of in size.batches:
            for repeat in repeats:
                yield from sweep(repeat, how, of)
    for repeat in repeats:
        for group in ("speech-3", "detection", "speech-10"):
            yield from turn(group, served, available, repeat)
        for how in size.amps:
            for of in size.batches:
                for count in cores:
                    yield from turn("sweep", OTHERS, count, repeat, how, of)
