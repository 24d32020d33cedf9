"""What a worker's messages say, read where nothing is taken for granted.

That they lie where they may was found out in C; what they hold can be anything, where code in
the worker writes to memory where it must not. Then an error names the worker.
"""

from __future__ import annotations

import pickle
from typing import Any

from .._core import Envelope
from ..errors import Failure, add_note
from ..workers.answers import (
    AMISS,
    ERROR,
    EXHAUSTED,
    FAILED,
    LEFT_OUT,
    OBJECTS,
    OK,
    PLACED,
    REFUSED,
    REPLACED,
    SAMPLE,
    STATED,
)  # fmt: skip
from ..workers.on_error import Amiss
from . import messages
from .layouts import Layout

_UNREADABLE = (
    "minato: DataLoader worker {} has pickled this result, and it cannot be unpickled here. Let the "
    "classes of the objects in it be unpickled in this process, too, or return tensors, arrays and "
    "plain values"
)
#: for errors that no class raises
_DAMAGED = ". If they can be, code in the worker writes to memory where it must not"


def nonsense(worker: int) -> RuntimeError:
    """To be raised where no damage was found in what a message is made of, but in what it says."""
    return RuntimeError(
        f"the result that DataLoader worker {worker} has sent makes no sense. Code in the worker "
        "writes to memory where it must not, most likely an extension in C that the dataset uses"
    )


def _loads(sent: Envelope) -> Any:
    """What is in it; there must have been room for that."""
    try:
        return messages.loads(sent.pickle or b"", sent.buffers or [])
    except Exception as error:
        damaged = isinstance(error, (pickle.UnpicklingError, EOFError))
        add_note(error, _UNREADABLE.format(sent.worker) + (_DAMAGED if damaged else ""))
        raise


def _is_number(value: Any, most: float) -> bool:
    return type(value) is int and value < most


def answer(sent: Envelope) -> tuple[Any, ...]:
    """Of a whole batch: (OK, data), (FAILED, failure) or (EXHAUSTED, None); a number may follow
    each of the first two. Or (AMISS, the first or None, what was wrong with samples)."""
    got = _known_answer(sent.worker, _loads(sent))
    if got[0] == AMISS:
        return got
    if got[0] == PLACED or not all(_is_number(more, 2**63) for more in got[2:]):
        raise nonsense(sent.worker)
    return got


def placed(
    sent: Envelope, layout: Layout | None, most: int
) -> tuple[tuple[Any, ...], bytes | None]:
    """Of a whole batch that may be in rows of a layout, most of them: (OK, data), (FAILED,
    failure), (EXHAUSTED, None), (PLACED, rows, objects by row) or (AMISS, ...) as above. (OK, data,
    layout) tells a layout, pickled or empty. And what the dataset says of itself."""
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
    """Of a new epoch: what the dataset says of itself."""
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
    """What a worker has proven of its samples."""
    try:
        return Layout.sent(pickled)
    except Exception as error:
        raise nonsense(worker) from error


def _known_answer(worker: int, told: Any) -> tuple[Any, ...]:
    """It, if it is of one of the kinds that ``workers/answers.py`` names; raises nonsense()."""
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
    """Of a batch some of whose samples failed: what is left of it, and which these are."""
    if not isinstance(amiss, list) or not all(isinstance(one, Amiss) for one in amiss):
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
    """Of rows of a batch: (row, kind, object), kind one of SAMPLE, ERROR, OBJECTS, REFUSED,
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
