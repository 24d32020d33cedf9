"""What a worker's messages say, read where nothing is taken for granted.

That they lie where they may was found out in C; what they hold can be anything, where code in
the worker writes to memory where it must not. Then an error names the worker.
"""

from __future__ import annotations

import pickle
from typing import Any

from ..errors import Failure
from ..workers.process import (
    AMISS, ERROR, EXHAUSTED, FAILED, LEFT_OUT, OBJECTS, OK, REPLACED, SAMPLE,
)  # fmt: skip
from ..workers.tolerance import Amiss
from . import messages

_UNREADABLE = (
    "minato: while the result of DataLoader worker {} was unpickled. Where that is no class's "
    "own error, code in the worker writes to memory where it must not"
)


def nonsense(worker: int) -> RuntimeError:
    """To be raised where no damage was found in what a message is made of, but in what it says."""
    return RuntimeError(
        f"the result that DataLoader worker {worker} has sent makes no sense. Code in the worker "
        "writes to memory where it must not, most likely an extension in C that the dataset uses"
    )


def _loads(worker: int, data: bytes, buffers: list[Any] | None) -> Any:
    try:
        return messages.loads(data, buffers or [])
    except Exception as error:
        if hasattr(error, "add_note"):
            error.add_note(_UNREADABLE.format(worker))
        elif isinstance(error, (pickle.UnpicklingError, EOFError)):  # of no class, for sure
            raise RuntimeError(_UNREADABLE.format(worker)) from error
        raise


def _is_number(value: Any, most: float) -> bool:
    return type(value) is int and value < most


def answer(worker: int, data: bytes, buffers: list[Any] | None) -> tuple[Any, ...]:
    """Of a whole batch: (OK, data), (FAILED, failure) or (EXHAUSTED, None); a number may follow
    each of the first two. Or (AMISS, the first or None, what was wrong with samples)."""
    got: tuple[Any, ...] = _loads(worker, data, buffers)
    if isinstance(got, tuple) and len(got) == 3 and got[0] == AMISS:
        _, inner, amiss = got
        listed = isinstance(amiss, list) and all(isinstance(one, Amiss) for one in amiss)
        if not listed or not all(isinstance(one.failure, Failure) for one in amiss):
            raise nonsense(worker)
        if inner is not None and not (_is_answer(inner) and inner[0] == OK):
            raise nonsense(worker)
        return got
    if not _is_answer(got):
        raise nonsense(worker)
    return got


def _is_answer(got: Any) -> bool:
    sound = isinstance(got, tuple) and len(got) in (2, 3) and got[0] in (OK, FAILED, EXHAUSTED)
    if sound and got[0] == FAILED:
        sound = isinstance(got[1], Failure)
    return sound and all(_is_number(more, 2**63) for more in got[2:])


def rows(
    worker: int, row0: int, nrows: int, data: bytes, buffers: list[Any] | None
) -> list[tuple[int, int, Any]]:
    """Of these rows of a batch: (row, kind, object), kind one of SAMPLE, ERROR, OBJECTS, LEFT_OUT
    and REPLACED."""
    got = _loads(worker, data, buffers)
    if isinstance(got, list) and got and all(_is_entry(e, row0, row0 + nrows) for e in got):
        return got
    raise nonsense(worker)


def _is_entry(entry: Any, first: int, end: int) -> bool:
    if not isinstance(entry, tuple) or len(entry) != 3:
        return False
    row, what, obj = entry
    known = what in (SAMPLE, OBJECTS)
    if what in (ERROR, LEFT_OUT):
        known = isinstance(obj, Failure)
    elif what == REPLACED:
        known = isinstance(obj, tuple) and len(obj) == 3 and isinstance(obj[0], Failure)
    return _is_number(row, end) and row >= first and known
