"""How the trainer reads messages of workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minato._records import Envelope
from minato.transport import messages
from minato.transport.layouts import Layout, proven
from minato.workers import answers
from minato.workers.answers import AMISS, EXHAUSTED, FAILED, OK, PLACED, SAMPLE, STATED


def sent(answer: Any) -> Envelope:
    """A message of worker 3."""
    data, buffers = messages.dumps(answer)
    return Envelope(3, 0, 2, data, [bytearray(buffer) for buffer in buffers])


@pytest.mark.parametrize("answer", [
    (OK, "data"), (OK, "data", b"layout"), (EXHAUSTED, None), (PLACED, 1, []), (AMISS, None, []),
], ids=str)  # fmt: skip
def test_valid_messages_are_read(answer: Any) -> None:
    assert answers.read(sent(answer)) == (answer, None)
    assert answers.read(sent((STATED, answer, b"words"))) == (answer, b"words")


@pytest.mark.parametrize("answer", [(FAILED, "no failure"), (77, None), (), 7, (STATED, 7, b"")])
def test_invalid_message_names_its_worker(answer: Any) -> None:
    with pytest.raises(RuntimeError, match="DataLoader worker 3 has sent is invalid"):
        answers.read(sent(answer))


@pytest.mark.parametrize("entries", [[], 7, [(2, SAMPLE, "sample")], [(-1, SAMPLE, "sample")]])
def test_rows_of_other_tasks_are_invalid(entries: Any) -> None:
    with pytest.raises(RuntimeError, match="DataLoader worker 3 has sent is invalid"):
        answers.rows(sent(entries))


def test_samples_prove_their_layout() -> None:
    assert proven([1, 2], torch.tensor([1, 2])) == Layout((6,)).pickled
    assert proven([torch.zeros(2), torch.zeros(2, dtype=torch.int64)], torch.zeros(2, 2)) is None
    assert proven((1, 2), torch.tensor([1, 2])) == b""
    assert proven([1, 2], torch.tensor([1.0, 2.0])) == b""
    assert proven([object()], None) == b""
