"""A worker's answers to tasks, the messages that carry them, and how the trainer reads those."""

from __future__ import annotations

import pickle
from typing import Any

from torch.utils.data import _utils

from .. import _core
from .._records import Envelope
from ..errors import Failure, add_note
from ..transport import messages
from ..transport.layouts import plain, why
from .fetch_or_skip import FailedSample

#: kinds of tasks
BATCH, RESUME, PART, COLLATE = _core.KIND_BATCH, _core.KIND_RESUME, _core.KIND_PART, _core.KIND_COLLATE
#: Kinds of entries in a row's envelope of samples.
#: REFUSED: the sample cannot be sent. It comes with a failure that says so. In a PART task it comes
#:     with None: those samples must be the same after a message as before it.
#: LEFT_OUT: a failure that ends nothing. The batch shrinks.
#: REPLACED: (failure, index, sample) of a sample made in another's place.
#: FATAL: an error that belongs to no single sample.
SAMPLE, ERROR, OBJECTS = _core.EXTRA_SAMPLE, _core.EXTRA_ERROR, _core.EXTRA_OBJECTS
REFUSED, FATAL = _core.EXTRA_REFUSED, _core.EXTRA_FATAL
LEFT_OUT, REPLACED = _core.EXTRA_LEFT_OUT, _core.EXTRA_REPLACED
#: Answers to a BATCH task.
#: PLACED: the samples are in rows, and the message adds to that.
#: AMISS: some samples could not be made. The rest is (OK, ...) or None.
#: STATED: an answer, with the pickled state of the dataset after it.
OK, FAILED, EXHAUSTED, PLACED, AMISS, STATED = range(6)

#: (row, one of SAMPLE to REFUSED, sample or failure)
Entry = tuple[int, int, Any]
#: (OK, data, cost of sending or a layout), (FAILED, failure, row that failed),
#: (EXHAUSTED, whether the dataset asked which worker it is in), (PLACED, rows, objects),
#: (AMISS, ...) or (STATED, answer, snapshot)
Answer = tuple[Any, ...]


def parted(entries: list[Entry]) -> tuple[list[Any], list[FailedSample]]:
    """The samples of a batch in the order of rows, and the failures of the others."""
    samples, amiss = [], []
    for row, what, obj in entries:
        if what == LEFT_OUT:
            amiss.append(FailedSample(row, obj))
        elif what == REPLACED:
            failure, index, sample = obj
            amiss.append(FailedSample(row, failure, replaced=True, instead=index))
            samples.append(sample)
        else:
            samples.append(obj)
    return samples, amiss


def encode(answer: Any, where: str, kind: int) -> tuple[bytes | None, list[Any]]:
    """The message of an answer to a task of this kind, with its buffers."""
    if answer is None:
        return None, []
    samples = isinstance(answer, list)
    try:
        return messages.dumps(answer, samples)
    except Exception as error:
        if kind == PART:
            return messages.dumps([(row, REFUSED, None) for row, _, _ in answer])
        # torch prints this from a thread of the worker, and then waits forever
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
    """The entry for samples that cannot be sent.

    Samples travel only to be collated by default, so an error of default_collate comes first. If
    default_collate would work, a worker has to make the whole batch (``Planner.plan_whole``). If no
    worker may, the note says what to do.
    """
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


# ---- in the trainer ---------------------------------------------------------------------------
#
# C code has checked that messages lie in the right memory. If code in the worker has written to
# memory that is not its own, a message may be of another kind, or none. An error then names the worker.

_UNREADABLE = (
    "minato: DataLoader worker {} has pickled this result, but it cannot be unpickled here. Make "
    "the classes of its objects importable in this process too, or return tensors, arrays and "
    "plain values"
)
#: appended if the error does not come from a class
_DAMAGED = ". If they are importable, code in the worker writes to memory that is not its own"


def nonsense(worker: int) -> RuntimeError:
    """The error for a message whose parts are intact but whose content is invalid."""
    return RuntimeError(
        f"the result that DataLoader worker {worker} has sent is invalid. Code in the worker "
        "writes to memory that is not its own, most likely a C extension that the dataset uses"
    )


def _loads(sent: Envelope) -> Any:
    """Unpickles a message, which must not be empty."""
    try:
        return messages.loads(sent.pickle or b"", sent.buffers or [])
    except Exception as error:
        damaged = isinstance(error, (pickle.UnpicklingError, EOFError))
        add_note(error, _UNREADABLE.format(sent.worker) + (_DAMAGED if damaged else ""))
        raise


def read(sent: Envelope) -> tuple[Answer, bytes | None]:
    """A worker's answer to a BATCH or RESUME task, which is not STATED, and the state of its
    dataset."""
    got, state = _loads(sent), None
    if isinstance(got, tuple) and len(got) == 3 and got[0] == STATED:
        _, got, state = got
    if not isinstance(got, tuple) or len(got) < 2 or got[0] not in (OK, FAILED, EXHAUSTED, PLACED, AMISS):
        raise nonsense(sent.worker)
    if got[0] == FAILED and not isinstance(got[1], Failure):
        raise nonsense(sent.worker)
    return got, state


def rows(sent: Envelope) -> list[Entry]:
    """Results of single rows: (row, kind, object), kind one of SAMPLE, ERROR, OBJECTS, REFUSED,
    LEFT_OUT and REPLACED."""
    got: list[Entry] = _loads(sent)
    first, end = sent.row0, sent.row0 + sent.nrows
    if not isinstance(got, list) or not got or not all(first <= row < end for row, _, _ in got):
        raise nonsense(sent.worker)
    return got
