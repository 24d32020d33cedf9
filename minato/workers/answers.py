"""What a worker answers to a task, and how that becomes a message.

Read where it arrives by ``transport/read_results.py``.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import _utils

from ..errors import Failure
from ..transport import messages
from ..transport.layouts import plain
from ..transport.uncollatable import why
from .on_error import Amiss

#: kinds of tasks, numbers of csrc/workers/mn_records.h
ROWS, SAMPLES, BATCH, RESUME, PART, COLLATE = range(6)
#: entries of a row's envelope, numbers of csrc/py/transport/mn_envelope.h; REFUSED: a sample that
#: cannot be sent, with a failure that says so, or None of a PART, whose samples have to come out
#: of a message as they went in; LEFT_OUT: a failure that ends nothing; REPLACED: (failure, index,
#: sample) of one made in its place; FATAL: an error of no one sample
SAMPLE, ERROR, OBJECTS, REFUSED, LEFT_OUT, REPLACED, FATAL = range(7)
#: what a BATCH task answers; PLACED: its samples are in rows, but there is more to say; AMISS: some
#: could not be made, and what is left is (OK, ...) or None; STATED: the answer, and what its
#: dataset says of itself after it, pickled
OK, FAILED, EXHAUSTED, PLACED, AMISS, STATED = range(6)

#: (row, one of SAMPLE to REFUSED, sample or failure)
Entry = tuple[int, int, Any]
#: (OK, data, what sending costs or a layout), (FAILED, failure, the row it failed at), (EXHAUSTED,
#: whether the dataset asked which worker it is in), (PLACED, rows, objects), (AMISS, ...) or (STATED, answer, snapshot)
Answer = tuple[Any, ...]


def parted(entries: list[Entry]) -> tuple[list[Any], list[Amiss]]:
    """Samples of a batch in the order of rows, and what was wrong with others."""
    samples, amiss = [], []
    for row, what, obj in entries:
        if what == LEFT_OUT:
            amiss.append(Amiss(row, obj))
        elif what == REPLACED:
            failure, index, sample = obj
            amiss.append(Amiss(row, failure, replaced=True, instead=index))
            samples.append(sample)
        else:
            samples.append(obj)
    return samples, amiss


def encode(answer: Any, where: str, kind: int) -> tuple[bytes | None, list[Any]]:
    """The message of an answer to a task of this kind, and the buffers beside it."""
    if answer is None:
        return None, []
    samples = isinstance(answer, list)
    try:
        return messages.dumps(answer, samples)
    except Exception as error:
        if kind == PART:
            return messages.dumps([(row, REFUSED, None) for row, _, _ in answer])
        # torch prints this from a thread of the worker and then waits for ever
        failure = Failure.of(error, where)
    if not samples:
        return messages.dumps((FAILED, failure))
    try:
        return messages.dumps([(row, what, _plain(what, obj)) for row, what, obj in answer])
    except Exception:
        return messages.dumps([_refused(answer, failure, where)])


def _plain(what: int, sample: Any) -> Any:
    if what == REPLACED:
        return *sample[:2], plain(sample[2])
    return plain(sample) if what == SAMPLE else sample


def _refused(entries: list[Entry], failure: Failure, where: str) -> Entry:
    """Samples only travel to be collated by default: what that says of them comes first. Where it
    would make a batch of them, which torch's worker sends, a worker has to (``Planner.plan_whole``),
    and where none may the way out is told."""
    for row, what, sample in entries:
        if what == SAMPLE:
            try:
                _utils.collate.default_collate([sample])
            except Exception as error:
                reason = why([sample], lambda _: "this sample")
                return row, ERROR, Failure.of(error, f"{where}. minato: {reason}" if reason else where)
    failure.note = (
        "minato: samples of a batch may be made by several workers, which send them to be "
        "collated, and one cannot be pickled. Return plain values, arrays or tensors, or give the "
        "loader batching='sampler', with which one worker makes and collates such a batch"
    )
    return entries[0][0], REFUSED, failure
