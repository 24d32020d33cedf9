"""Messages of workers about whole batches, which are checked completely."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from minato._core import Envelope
from minato.errors import Failure
from minato.transport import messages
from minato.transport.layouts import Layout, proven
from minato.workers import answers
from minato.workers.answers import EXHAUSTED, FAILED, OK, PLACED, STATED

WORDS = [("a", torch.tensor(1)), ("b", torch.tensor(2))]
FOUND = proven(WORDS, [("a", "b"), torch.tensor([1, 2])])
assert FOUND
WORDED = Layout.sent(FOUND)
PLAIN = Layout((6,))
FAILURE = Failure.of(KeyError("wrong"), "in DataLoader worker process 3")


def sent(data: bytes, *buffers: Any) -> Envelope:
    """A message of worker 3."""
    return Envelope((3, 0, 2, data, [bytearray(buffer) for buffer in buffers]))


def told(answer: Any, layout: Layout | None, most: int = 2) -> Any:
    data, buffers = messages.dumps(answer)
    return answers.placed(sent(data, *buffers), layout, most)[0]


@pytest.mark.parametrize("answer", [
    (OK, "data"), (OK, "data", b"layout"), (EXHAUSTED, None), (PLACED, 1, []), (PLACED, 2, []),
], ids=str)  # fmt: skip
def test_valid_messages_are_read(answer: Any) -> None:
    assert told(answer, PLAIN) == answer
    if answer[0] != PLACED:
        assert told(answer, None) == answer


def test_objects_by_row() -> None:
    assert told((PLACED, 2, [["a"], ["b"]]), WORDED) == (PLACED, 2, [["a"], ["b"]])
    assert told((FAILED, FAILURE), WORDED)[1].original == FAILURE.original


@pytest.mark.parametrize("answer, layout", [
    ((PLACED, 1, []), None),
    ((PLACED, 0, []), PLAIN), ((PLACED, 3, []), PLAIN), ((PLACED, -1, []), PLAIN),
    ((PLACED, True, []), PLAIN), ((PLACED, 1.0, []), PLAIN), ((PLACED, 1), PLAIN),
    ((PLACED, 1, None), PLAIN), ((PLACED, 1, [[]]), PLAIN), ((PLACED, 1, [["a"]]), PLAIN),
    ((PLACED, 1, []), WORDED), ((PLACED, 2, [["a"]]), WORDED), ((PLACED, 1, ["a"]), WORDED),
    ((PLACED, 1, [["a", "b"]]), WORDED), ((PLACED, 1, [[]]), WORDED),
    ((OK, "data", 7), PLAIN), ((OK, "data", None), PLAIN), ((FAILED, FAILURE, b""), PLAIN),
    ((FAILED, "no failure"), PLAIN), ((77, None), PLAIN), ((), PLAIN), (7, PLAIN),
    ((OK, 1, b"", 4), PLAIN), ((STATED, (OK, 1), "text"), PLAIN), ((STATED, (OK, 1)), PLAIN),
    ((STATED, (STATED, (OK, 1), b""), b""), PLAIN), ((STATED, 7, b""), PLAIN),
], ids=itertools.count())  # fmt: skip
def test_invalid_message_names_its_worker(answer: Any, layout: Layout | None) -> None:
    with pytest.raises(RuntimeError, match="DataLoader worker 3 has sent is invalid"):
        told(answer, layout)


def test_dataset_state_is_read() -> None:
    for answer in ((OK, "data"), (EXHAUSTED, None), (PLACED, 2, [])):
        data, _buffers = messages.dumps((STATED, answer, b"words"))
        assert answers.placed(sent(data), PLAIN, 2) == (answer, b"words")
    assert answers.begun(sent(messages.dumps((STATED, (OK, None), b"words"))[0])) == b"words"
    assert answers.begun(sent(messages.dumps((OK, None))[0])) is None
    with pytest.raises(RuntimeError, match="worker 3 has sent is invalid"):
        answers.begun(sent(messages.dumps((EXHAUSTED, None))[0]))


def test_placed_result_without_permission_is_invalid() -> None:
    data, buffers = messages.dumps((PLACED, 1, []))
    with pytest.raises(RuntimeError, match="DataLoader worker 3 has sent is invalid"):
        answers.answer(sent(data, *buffers))


@pytest.mark.parametrize("garbage", [b"", b"noise", messages.dumps((4, 7))[0]])
def test_invalid_layout_names_its_worker(garbage: bytes) -> None:
    with pytest.raises(RuntimeError, match="DataLoader worker 3 has sent is invalid"):
        answers.layout(3, garbage)


def test_samples_prove_their_layout() -> None:
    assert proven([1, 2], torch.tensor([1, 2])) == Layout((6,)).pickled
    assert proven([torch.zeros(2), torch.zeros(2, dtype=torch.int64)], torch.zeros(2, 2)) is None
    assert proven((1, 2), torch.tensor([1, 2])) == b""
    assert proven([1, 2], torch.tensor([1.0, 2.0])) == b""
    assert proven([object()], None) == b""
