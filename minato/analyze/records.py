"""What the processes of an analysis tell each other, and ``report.json``: each of these is a record.

Records travel as JSON. Times are seconds, rates are samples a second. A field is None, or empty, where
nothing was measured.
"""

from __future__ import annotations

import os
import types
import typing
from dataclasses import dataclass, field, is_dataclass
from typing import Any, TypeVar

from .recode import Settings
from .watch import LoaderFacts, Told as Told

T = TypeVar("T")
#: file and line of the program, and the function in it
Place = typing.Sequence[Any]


def format_place(place: Place | None) -> str:
    """File and line, from the current folder where the file lies in it."""
    if not place:
        return "an unknown place"
    file = str(place[0])
    if file == os.path.join(os.path.dirname(os.path.abspath(__file__)), "stand_in.py"):
        return "your loader"  # of a folder, or of a dataset that a factory gave
    return f"{file.removeprefix(os.getcwd() + os.sep)}:{place[1]}"


def parse(kind: type[T], told: typing.Mapping[str, Any]) -> T:
    """A record from what JSON has made of it. Keys that it has no field for are left out."""
    hints = typing.get_type_hints(kind)
    return kind(**{name: _parse_value(hints[name], value) for name, value in told.items() if name in hints})


def _parse_value(hint: Any, value: Any) -> Any:
    parts = typing.get_args(hint)
    if value is None or is_dataclass(value):
        return value
    if is_dataclass(hint):
        return parse(typing.cast("type[Any]", hint), value)
    if typing.get_origin(hint) is types.UnionType:
        return _parse_value(parts[0], value)
    if typing.get_origin(hint) is list:
        return [_parse_value(parts[0], each) for each in value]
    return value


@dataclass
class Used:
    """Of the cores, while something was measured: how many the study used, and the share others used."""

    cores: float = 0.0
    others: float = 0.0
    cpu_per_sample: float = 0.0


@dataclass
class StageTimes:
    """A stage of a sample, in the mean of samples. ``seconds`` and ``cpu`` are its own, ``whole`` is with
    the stages in it."""

    label: str = ""
    kind: str = ""
    reads: bool = False
    seconds: float = 0.0
    cpu: float = 0.0
    calls: float = 1.0
    inside: list[str] = field(default_factory=list)
    place: Place | None = None
    whole: float = 0.0
    again: float = 0.0  # share of the calls that open what an earlier one has opened
    order: int = 0


@dataclass
class Cacheable:
    """What of a sample is always the same: all of it, or the value after the first ``calls`` stages."""

    whole: bool
    bytes: float
    share: float  # of the time of a sample, which is saved
    calls: int = 0
    after: str = ""


@dataclass
class Work:
    """The time of samples: (wall, CPU) of each."""

    costs: list[tuple[float, float]] = field(default_factory=list)
    indices: list[str] = field(default_factory=list)
    merged: bool = False  # clocks cost too much, so some stages are one
    stages: list[StageTimes] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    failures: int = 0
    usage: Used | None = None
    #: files that samples read, and those of them that the program wrote while it was watched
    files: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    kept_open: float | None = None  # seconds of a sample where files stay open that each sample opens again
    cache: Cacheable | None = None
    no_cache: str = ""
    photos: float | None = None  # seconds of a sample whose photos minato.ops decodes
    collate: float | None = None  # seconds of collate_fn for each sample
    gil: str | None = None


@dataclass
class Together:
    """Samples that one process or thread makes, or several at once."""

    samples: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    stages: list[StageTimes] = field(default_factory=list)


@dataclass
class Threads:
    alone: Together
    several: Together
    locks: list[str] = field(default_factory=list)


@dataclass
class Contention:
    """The same samples by one process, by several at once, and by as many threads."""

    processes: int
    one: Together
    several: Together
    threads: Threads | None = None
    locks: list[str] = field(default_factory=list)  # paths of locks that processes share
    usage: Used | None = None


@dataclass
class Reads:
    in_flight: int
    files_per_s: float
    bytes_per_s: float
    files: int = 0


@dataclass
class Storage:
    """Reads alone. cold: from the disk, not from memory."""

    files: int = 0
    bytes: int = 0
    median: float = 0.0
    cold: bool = False
    rates: list[Reads] = field(default_factory=list)


@dataclass
class Sampler:
    """The program's own sampler."""

    name: str
    seconds: float
    place: Place | None = None


@dataclass
class RateRequest:
    """Which loader is run, over which samples, with which change and step."""

    loader: str  # "torch", "minato", or "own": that of the program
    workers: int
    seconds: float = 0.0
    step: float = 0.0
    step_cores: float = 0.0
    #: samples of a batch (None: as many as the program's), and batches of an epoch (0: it has no end)
    batch: int | None = None
    length: int = 0
    skip: int = 0  # batches that are passed over first
    #: whole epochs of at most this many batches, of samples with these costs, after this share of the others
    most: int = 0
    costs: dict[str, float] = field(default_factory=dict)
    part: float = 0.0
    learnt: bool = True  # whether minato's loader knows the costs
    same: bool = False  # one sample is handed out again and again
    cached: int = 0  # calls of stages whose results are kept; -1: whole samples
    codec: Settings | None = None
    open: bool = False  # what was opened stays open
    photos: bool = False  # minato.ops decodes the photos
    order: tuple[int, list[int]] | None = None  # the chain of transforms, and the order of its elements
    persistent: bool | None = None
    worker_type: str | None = None


@dataclass
class Request:
    """What a keeper is asked to measure. way: where what that writes goes, see own_files."""

    do: str
    seconds: float = 0.0
    cores: int | None = None
    way: str = ""
    writes: bool = False  # whether files that are open for writing are accepted
    files: list[str] = field(default_factory=list)
    processes: int = 1
    rate: RateRequest | None = None


@dataclass
class At:
    """The sample that begins."""

    index: str


@dataclass
class Failed:
    error: str


@dataclass
class Rate:
    """What a loader delivered."""

    loader: str = ""
    workers: int = 0
    rate: float = 0.0
    #: seconds that an epoch's end costs, and until the next one's first batch
    end: float | None = None
    again: float | None = None
    batches: int = 0
    samples: int = 0
    epoch: int = 0  # batches of an epoch, where whole epochs were run
    usage: Used | None = None
    program: float = 0.0  # of a check: the rate of the program
    change: str | None = None


@dataclass
class CodecRow:
    """Images in one codec, in the mean; psnr and worst in decibels, None without a loss."""

    name: str
    bytes: float
    decode: float
    format: str = ""
    quality: int | None = None
    psnr: float | None = None
    worst: float | None = None
    error: str = ""
    wall: float | None = None  # of a sample; None where none was timed
    cpu: float = 0.0
    rate: float = 0.0  # of the program's loader on this storage; 0 where it cannot be known


@dataclass
class Codecs:
    """The images that samples read, as they are and in other codecs."""

    rows: list[CodecRow] = field(default_factory=list)
    images: int = 0
    files: int = 0
    containers: int = 0
    #: pixels of the shorter side that the pipeline needs, where that is less than there are
    size: int | None = None
    skipped: int = 0
    folder: str = ""
    lossless: bool = False
    per_sample: float = 1.0


@dataclass
class Move:
    """Another place for one transform of a chain, and what becomes of the data."""

    exact: bool = False
    equal: bool = False
    alike: bool = False
    tried: int = 0
    error: str = ""
    draws: bool = False
    samples: int = 0
    chain: int = 0
    order: list[int] = field(default_factory=list)
    name: str = ""
    names: list[str] = field(default_factory=list)
    over: list[str] = field(default_factory=list)
    earlier: bool = False
    before: float | None = None  # seconds of a sample
    after: float | None = None


@dataclass
class Orders:
    moves: list[Move] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


@dataclass
class Watched:
    """The loader that was watched. asked and wait are None where too little was seen."""

    batches: int = 0
    steps: int = 0
    batch: int = 1
    asked: float | None = None
    delivered: float = 0.0
    range: list[float] | None = None  # between which the delivered rate lies
    wait: float | None = None
    step: float = 0.0  # seconds
    step_alone: float = 0.0  # of a step that no worker and no other program slows down
    step_cores: float = 0.0
    inside: float = 0.0
    #: share of the time in which the program could have run inside its loader, and had no core
    queued: float = 0.0
    by: str = "step while loading"
    shapes: str = ""
    bytes: float = 0
    start: float | None = None
    starts: int = 0


@dataclass
class Machine:
    cores: int = 1
    usable: int = 1
    memory_available: int = 0
    model: str = ""
    siblings: str = ""
    throttled: float | None = None  # seconds in which a quota stopped the study
    command: list[str] = field(default_factory=list)
    argv: list[str] = field(default_factory=list)
    others: float = 0.0  # share of the cores that other programs used while the program was watched


@dataclass
class Limit:
    kind: str
    line: str
    seen: str | None = None  # what it looked like, where there is no conclusion


@dataclass
class Change:
    """What would make the program faster, with the rates that are predicted and checked."""

    what: str
    predicted: float | None
    effort: str
    check: RateRequest | None = None
    paste: str = ""
    data: str = "unchanged"
    note: str = ""
    place: Place | None = None
    gain: float | None = None
    base: float | None = None  # in the check: the rate without the change; with it below
    checked: float | None = None
    checked_gain: float = 0.0
    bound: float = 0.0  # of the prediction's error, as a share
    settled: bool | None = None
    samples: int = 0


@dataclass
class Report:
    """All of ``report.json``."""

    machine: Machine
    loader: LoaderFacts
    watched: Watched
    own: str = "torch"
    schema: str = ""
    generator: str = "minato analyze"
    version: str = ""
    place: Place | None = None
    validates: bool = False
    #: of the program's time, which the loop over this loader took; None where it has no other
    share: float | None = None
    steps: list[Any] = field(default_factory=list)
    work: Work | None = None
    storage: Storage | None = None
    sampler: Sampler | None = None
    contend: Contention | None = None
    rates: list[Rate] = field(default_factory=list)
    codecs: Codecs | None = None
    orders: Orders | None = None
    paced: Rate | None = None  # the program's own loader with its step
    free: Rate | None = None  # one of samples that cost nothing
    checks: list[Rate] = field(default_factory=list)
    base: float | None = None
    relative_to: float | None = None
    limit: Limit = field(default_factory=lambda: Limit("unknown", ""))
    helps: list[Change] = field(default_factory=list)
    dropped: list[Change] = field(default_factory=list)
    useless: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: str | None = None  # where what the study wrote went: see own_files
    unstudied: str | None = None
