"""A worker's answers to tasks, the messages that carry them, and how the trainer reads those."""

from __future__ import annotations

import pickle
from typing import Any

from torch.utils.data import _utils

from .. import _core
from .._core import Envelope
from ..errors import Failure, add_note
from ..transport import messages
from ..transport.layouts import Layout, plain
from ..transport.uncollatable import why
from .on_error import FailedSample

#: kinds of tasks
ROWS, SAMPLES, BATCH = _core.KIND_ROWS, _core.KIND_SAMPLES, _core.KIND_BATCH
RESUME, PART, COLLATE = _core.KIND_RESUME, _core.KIND_PART, _core.KIND_COLLATE
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
# C code has checked that messages lie in the right memory. Their content can still be anything, if
# code in the worker writes to memory that is not its own. An error then names the worker.

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


def _is_number(value: Any, most: float) -> bool:
    return type(value) is int and value < most


def answer(sent: Envelope) -> tuple[Any, ...]:
    """The result of a whole batch: (OK, data), (FAILED, failure) or (EXHAUSTED, None); a number may
    follow the first two. Or (AMISS, the first or None, the failed samples)."""
    got = _known_answer(sent.worker, _loads(sent))
    if got[0] == AMISS:
        return got
    if got[0] == PLACED or not all(_is_number(more, 2**63) for more in got[2:]):
        raise nonsense(sent.worker)
    return got


def placed(
    sent: Envelope, layout: Layout | None, most: int
) -> tuple[tuple[Any, ...], bytes | None]:
    """The result of a whole batch that may be in rows of a layout, at most ``most``. It is (OK,
    data), (FAILED, failure), (EXHAUSTED, None), (PLACED, rows, objects by row) or (AMISS, ...) as
    above. (OK, data, layout) includes a pickled layout, or b"". Second, the state of the
    dataset."""
    told, state = _stated(sent.worker, _loads(sent))
    got = _known_answer(sent.worker, told)
    if got[0] == AMISS:
        return got, state
    if got[0] == PLACED:
        sound = layout is not None and len(got) == 3 and _are_rows(*got[1:], layout, most)
    else:
        sound = len(got) == 2 or (got[0] == OK and type(got[2]) is bytes)
        sound = sound or (got[0] == FAILED and _is_number(got[2], 2**63))
    if not sound:
        raise nonsense(sent.worker)
    return got, state


def begun(sent: Envelope) -> bytes | None:
    """The state of the dataset at the start of an epoch."""
    told, state = _stated(sent.worker, _loads(sent))
    if _known_answer(sent.worker, told)[0] != OK:
        raise nonsense(sent.worker)
    return state


def _stated(worker: int, got: Any) -> tuple[Any, bytes | None]:
    if not isinstance(got, tuple) or got[:1] != (STATED,):
        return got, None
    if len(got) != 3 or type(got[2]) is not bytes:
        raise nonsense(worker)
    return got[1], got[2]


def layout(worker: int, pickled: bytes) -> Layout:
    """Reads a layout that a worker has verified on its samples."""
    try:
        return Layout.sent(pickled)
    except Exception as error:
        raise nonsense(worker) from error


def _known_answer(worker: int, told: Any) -> tuple[Any, ...]:
    """Checks that the result is of a kind in ``workers/answers.py``; raises nonsense()."""
    got: tuple[Any, ...] = told
    if isinstance(got, tuple) and len(got) == 3 and got[0] == AMISS:
        if not _is_amiss(*got[1:]):
            raise nonsense(worker)
        return got
    known = isinstance(got, tuple) and len(got) in (2, 3)
    if not known or got[0] not in (OK, FAILED, EXHAUSTED, PLACED):
        raise nonsense(worker)
    if got[0] == FAILED and not isinstance(got[1], Failure):
        raise nonsense(worker)
    return got


def _is_amiss(inner: Any, amiss: Any) -> bool:
    """Checks a batch with failed samples: its remaining result, and its failures."""
    if not isinstance(amiss, list) or not all(isinstance(one, FailedSample) for one in amiss):
        return False
    if not all(isinstance(one.failure, Failure) for one in amiss):
        return False
    if inner is None:
        return True
    return isinstance(inner, tuple) and len(inner) in (2, 3) and inner[0] == OK


def _are_rows(rows: Any, objects: Any, layout: Layout, most: int) -> bool:
    leaves = layout.core.objects
    if not _is_number(rows, most + 1) or rows < 1 or type(objects) is not list:
        return False
    each = all(type(row) is list and len(row) == leaves for row in objects)
    return each and len(objects) == (rows if leaves else 0)


def rows(sent: Envelope) -> list[tuple[int, int, Any]]:
    """Results of single rows: (row, kind, object), kind one of SAMPLE, ERROR, OBJECTS, REFUSED,
    LEFT_OUT and REPLACED."""
    got = _loads(sent)
    end = sent.row0 + sent.nrows
    if isinstance(got, list) and got and all(_is_entry(e, sent.row0, end) for e in got):
        return got
    raise nonsense(sent.worker)


def _is_entry(entry: Any, first: int, end: int) -> bool:
    if not isinstance(entry, tuple) or len(entry) != 3:
        return False
    row, what, obj = entry
    known = what in (SAMPLE, OBJECTS)
    if what in (ERROR, REFUSED, LEFT_OUT):
        known = isinstance(obj, Failure)
    elif what == REPLACED:
        known = isinstance(obj, tuple) and len(obj) == 3 and isinstance(obj[0], Failure)
    return _is_number(row, end) and row >= first and known
