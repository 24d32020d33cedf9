"""Errors in datasets, functions and samplers: type, text, place in the order."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from typing import Any, Callable, Iterator

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import minato

from .datasets import GATE_S, Blocking, Failing, Gate, Numbers, Uneven
from .support import Failure, Kind, all_gone, drain, error_text, flat, patiently, worker_pids


class TwoArguments(Exception):
    """Cannot be made from one text."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__(first, second)


class WithMessage(Exception):
    """Has a truthy class attribute ``message``: made by keyword."""

    message = "preset"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class HoldsLambda(Exception):
    """Its instances cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.function = lambda: text


class Strict(ValueError):
    """Refuses every text but its own."""

    def __init__(self, text: str) -> None:
        if text != "own":
            raise TypeError("not my text")
        super().__init__(text)


def _raise_value(index: int) -> None:
    raise ValueError("bad value")


def _raise_key(index: int) -> None:
    raise KeyError("missing", "key")


def _raise_two(index: int) -> None:
    raise TwoArguments(1, 2)


def _raise_message(index: int) -> None:
    raise WithMessage("text")


def _raise_lambda(index: int) -> None:
    raise HoldsLambda("cannot be pickled")


def _raise_strict(index: int) -> None:
    raise Strict("own")


def _raise_os(index: int) -> None:
    raise FileNotFoundError(2, "No such file", "/nowhere")


def _raise_unicode(index: int) -> None:
    b"\xff".decode("utf-8")


def _raise_chained(index: int) -> None:
    try:
        raise LookupError("inner")
    except LookupError as error:
        raise ValueError("outer") from error


def _raise_assertion(index: int) -> None:
    assert index < 0


def _raise_index(index: int) -> None:
    [][index]


def _raise_stop(index: int) -> None:
    raise StopIteration("early")


RAISERS = {
    "value": _raise_value, "key": _raise_key, "two_arguments": _raise_two,
    "message": _raise_message, "lambda": _raise_lambda, "strict": _raise_strict,
    "os": _raise_os, "unicode": _raise_unicode, "chained": _raise_chained,
    "assertion": _raise_assertion, "index": _raise_index,
}


def _failure(make: Any, dataset: Any, **kwargs: Any) -> Failure:
    iterator = iter(make(dataset, **{"num_workers": 1, **kwargs}))
    try:
        list(iterator)
    except Exception as error:
        return Failure.of(error)
    finally:
        iterator._shutdown_workers()
    raise AssertionError("nothing was raised")


HEAD = re.compile(
    r"Caught (\w+) in DataLoader worker process (\d+)\.\n"
    r"Original Traceback \(most recent call last\):\n"
)


def _each_raiser(make: Any) -> list[Failure]:
    """What a loader raises for each of RAISERS, one after the other."""
    functions = [*RAISERS.values()]
    dataset = Failing(len(functions), {*range(len(functions))}, lambda index: functions[index](index))
    iterator, found = iter(make(dataset, num_workers=1)), []
    for _ in functions:
        try:
            next(iterator)
        except Exception as error:
            found.append(Failure.of(error))
    iterator._shutdown_workers()
    return found


def test_type_and_text(loader: Kind) -> None:
    both = zip(RAISERS, _each_raiser(loader), _each_raiser(DataLoader), strict=True)
    for name, got, want in both:
        assert got.kind is want.kind, name
        assert HEAD.match(got.text).groups() == HEAD.match(want.text).groups(), name
        assert RAISERS[name].__name__ in got.text
        assert want.last_line in got.text


def test_key_error_is_readable(loader: Kind) -> None:
    got = _failure(loader, Failing(2, {0}, _raise_key))
    assert got.kind is KeyError
    assert "\\n" not in got.text and "KeyError: ('missing', 'key')" in got.text


def test_error_raised_in_c_has_a_traceback(loader: Kind) -> None:
    got = _failure(loader, {0: 1, 2: 3})
    assert HEAD.match(got.text).groups() == ("KeyError", "0") and "KeyError: 1" in got.text


def test_error_without_workers_is_the_original(loader: Kind) -> None:
    with pytest.raises(TwoArguments) as caught:
        list(loader(Failing(2, {1}, _raise_two)))
    assert caught.value.args == (1, 2)


@pytest.mark.parametrize("workers", [1, 2])
def test_errors_keep_their_place_and_loading_continues(loader, workers) -> None:
    iterator = iter(loader(Failing(9, {2, 3, 8}, _raise_value), num_workers=workers))
    bad = ("error", ValueError)
    assert drain(iterator) == [0, 1, bad, bad, 4, 5, 6, 7, bad]
    assert drain(iterator) == []


def test_first_bad_sample_of_a_batch_is_reported(loader: Kind) -> None:
    class Named(Numbers):
        def __getitem__(self, index: int) -> int:
            raise ValueError(f"sample <{index}>")

    got = _failure(loader, Named(6), batch_size=3, num_workers=2)
    assert "sample <0>" in got.text


def test_errors_out_of_order_lose_nothing(loader: Kind) -> None:
    iterator = iter(loader(Failing(8, {3}, _raise_value), num_workers=2,
                           in_order=False))
    found = drain(iterator)
    assert found.count(("error", ValueError)) == 1
    assert sorted(b.item() for b in found if not isinstance(b, tuple)) == [
        0, 1, 2, 4, 5, 6, 7]


def _fail_collate(samples: list[int]) -> Any:
    if 2 in samples:
        raise ValueError("bad batch")
    return samples


def test_error_in_collate(loader: Kind) -> None:
    made = loader(Numbers(6), batch_size=2, num_workers=2, collate_fn=_fail_collate)
    assert drain(iter(made)) == [[0, 1], ("error", ValueError), [4, 5]]
    got = _failure(loader, Numbers(6), batch_size=2, collate_fn=_fail_collate)
    assert got.text.startswith("Caught ValueError in DataLoader worker process 0.")
    assert "_fail_collate" in got.text and "ValueError: bad batch" in got.text


class FailingBulk(Numbers):
    def __getitems__(self, indices: list[int]) -> list[int]:
        raise ValueError("bad bulk")


def test_error_in_getitems(loader: Kind) -> None:
    got = _failure(loader, FailingBulk(4), batch_size=2)
    assert got.kind is ValueError and "ValueError: bad bulk" in got.text


class Unhurried(Numbers):
    """Worker 0 is slow enough that the other one's message is received."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.started = Gate()

    def __getitem__(self, index: int) -> int:
        assert self.started.wait(GATE_S)
        time.sleep(0.01)
        return index


def _fail_second_init(worker: int) -> None:
    if worker == 1:
        get_worker_info().dataset.started.set()
        raise ValueError("init of 1")


def test_error_in_one_worker_init_is_not_lost(loader: Kind) -> None:
    dataset = Unhurried(400)
    got = _failure(loader, dataset, worker_init_fn=_fail_second_init, num_workers=2)
    assert got.kind is ValueError and "init of 1" in got.text


class FailingIter(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        raise ValueError("bad iter")


def test_error_in_iter_of_dataset(loader: Kind) -> None:
    for workers in (1, 2):
        got = _failure(loader, FailingIter(), num_workers=workers)
        assert got.kind is ValueError and "ValueError: bad iter" in got.text
    with pytest.raises(ValueError, match="^bad iter$"):
        iter(loader(FailingIter()))


def test_error_in_len_of_sampler_does_not_matter(loader: Kind) -> None:
    class NoLength:
        def __len__(self) -> int:
            raise ValueError("no length")

        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    assert flat(loader(Numbers(3), sampler=NoLength(), num_workers=1)) == [0, 1, 2]


@pytest.mark.parametrize("size", [1, 2, None])
def test_stop_iteration_in_getitem(loader: Kind, size: int | None) -> None:
    made = loader(Failing(8, {4}, _raise_stop), batch_size=size, num_workers=2)
    iterator = iter(made)
    found = []
    if loader.expects("stop_iteration_in_getitem") == "epoch ends":
        found += list(iterator)
    else:
        with pytest.raises(RuntimeError, match="StopIteration"):
            for batch in iterator:
                found.append(batch)
    assert len(found) == (2 if size == 2 else 4)
    iterator._shutdown_workers()


# ------------------------------------------------- what minato adds


def _stop(*_what: Any) -> None:
    next(iter(()))


@pytest.mark.parametrize("where, dataset", [
    ("collate_fn", Numbers(6)), ("worker_init_fn", Numbers(6)), ("worker_init_fn", Uneven([6])),
])
def test_stop_iteration_of_other_functions(own: Kind, where: str, dataset: Any) -> None:
    got = _failure(own, dataset, batch_size=2, **{where: _stop})
    assert got.kind is RuntimeError and "in _stop" in got.text
    assert "StopIteration" in got.text and "__getitem__" not in got.text


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("mode", ["skip", "replace"])
def test_stop_iteration_past_max_errors(own: Kind, workers: int, mode: str) -> None:
    made = own(Failing(4, {0, 1, 2, 3}, _raise_stop), batch_size=2, num_workers=workers,
               on_error=mode, max_errors=1)
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(made)


def test_error_keeps_its_cause(loader: Kind) -> None:
    causes = {}
    for function in (_raise_value, _raise_two, _raise_chained, _raise_os):
        iterator = iter(loader(Failing(2, {0}, function), num_workers=1))
        with pytest.raises(Exception) as caught:
            next(iterator)
        causes[function] = caught.value.__cause__
        iterator._shutdown_workers()
        del caught
    if not loader.expects("error_keeps_cause"):
        assert set(causes.values()) == {None}
        return
    assert type(causes[_raise_value]) is ValueError
    assert causes[_raise_value].args == ("bad value",)
    assert type(causes[_raise_two]) is TwoArguments
    assert causes[_raise_two].args == (1, 2)
    assert causes[_raise_chained].args == ("outer",)
    assert causes[_raise_os].filename == "/nowhere"


@pytest.mark.parametrize("size", [2, None])
def test_error_names_the_index(loader: Kind, size: int | None) -> None:
    # A number that cannot occur as a line or process number by chance.
    bad = 918_273_645
    dataset = Failing(8, {bad}, _raise_value)
    got = _failure(loader, dataset, sampler=[0, 1, bad, 2], batch_size=size)
    assert (str(bad) in got.text) is loader.expects("error_names_index")


def _local_error(index: int) -> None:
    class LocalError(Exception):
        pass

    raise LocalError("of a local class")


def test_exception_of_a_local_class(loader: Kind) -> None:
    if loader.expects("exception_of_local_class") == "hangs":
        pytest.skip("torch waits for ever: the error is lost while it is pickled")
    got = _failure(loader, Failing(2, {0}, _local_error))
    assert "LocalError: of a local class" in got.text
    assert got.text.startswith("Caught LocalError in DataLoader worker process 0.")


def _unpicklable(samples: list[int]) -> Any:
    return (lambda: samples) if samples == [1] else samples


def test_batch_that_cannot_be_pickled(loader: Kind) -> None:
    if loader.expects("unpicklable_batch") == "hangs":
        pytest.skip("torch waits for ever: the error is lost in a feeder thread")
    iterator = iter(loader(Numbers(4), num_workers=2, collate_fn=_unpicklable))
    found = []
    for _ in range(4):
        try:
            found.append(next(iterator))
        except Exception as error:
            found.append("error")
            assert re.search("pickle|serializ", error_text(error), re.IGNORECASE)
    assert found == [[0], "error", [2], [3]]


class Unloadable:
    """Can be pickled, but not unpickled in another process."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise LookupError("cannot be loaded")


def _unloadable(samples: list[int]) -> Any:
    return Unloadable() if samples == [1] else samples


def test_batch_that_cannot_be_unpickled(loader: Kind) -> None:
    iterator = iter(loader(Numbers(3), num_workers=1, collate_fn=_unloadable))
    assert next(iterator) == [0]
    with pytest.raises(LookupError, match="cannot be loaded"):
        next(iterator)
    iterator._shutdown_workers()


# ----------------------------------------------------- waiting and signals


@pytest.mark.parametrize("limit", [1, 0.25])
def test_late_batch_raises_timeout_error(loader: Kind, limit: float) -> None:
    entered, gate = Gate(), Gate()
    dataset = Blocking(4, {1}, entered, gate)
    iterator = iter(loader(dataset, num_workers=1, timeout=limit))
    with pytest.raises(RuntimeError) as caught:
        for _ in range(4):
            next(iterator)
    assert str(caught.value).startswith(f"DataLoader timed out after {limit} seconds")
    gate.set()
    iterator._shutdown_workers()


@pytest.mark.parametrize("options", [{}, {"worker_type": "thread", "seed_per_sample": False}],
                         ids=["process", "thread"])  # fmt: skip
def test_timeout_names_the_sample_and_shows_its_stack(own: Kind, options: dict[str, Any]) -> None:
    if not own.balanced and options:
        pytest.skip("static workers are processes")
    entered, gate = Gate(), Gate()
    dataset = Blocking(6, {3}, entered, gate)
    iterator = iter(own(dataset, batch_size=2, num_workers=1, timeout=2, **options))
    next(patiently(iterator))
    assert entered.wait(GATE_S)
    with pytest.raises(RuntimeError) as caught:
        next(iterator)
    text = str(caught.value)
    named = "sample index 3, position 1 of batch 1" if own.balanced else "batch 1, sample indices [2, 3]"
    assert named in text and f"in worker 0 (pid {iterator._workers[0].pid})" in text
    assert "in __getitem__" in text and "/minato/workers/" not in text
    gate.set()
    assert flat(patiently(iterator)) == [2, 3, 4, 5]  # the worker continues
    iterator._shutdown_workers()


class Sentence(Exception):
    """Has a ``message`` that is no argument of its constructor."""

    @property
    def message(self) -> str:
        return "read only"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="there are no exception groups")
@pytest.mark.parametrize("workers", [0, 1])
def test_exception_group_stays_a_group(own: Kind, workers: int) -> None:
    def fail(_index: int) -> None:
        raise ExceptionGroup("two things", [ValueError("one"), OSError(2, "other")])

    with pytest.raises(ExceptionGroup, match="two things") as caught:
        list(own(Failing(2, {1}, fail), num_workers=workers))
    assert [type(each) for each in caught.value.exceptions] == [ValueError, FileNotFoundError]
    assert len(caught.value.split(ValueError)[0].exceptions) == 1


def test_exception_with_another_message_keeps_its_name(own: Kind) -> None:
    def fail(_index: int) -> None:
        raise Sentence("it is so")

    with pytest.raises(RuntimeError, match="Caught Sentence in (?s:.*)Sentence: it is so") as caught:
        list(own(Failing(2, {1}, fail), num_workers=1))
    assert type(caught.value).__name__ == "Sentence"


class Fatal(BaseException):
    def __init__(self, **fields: int) -> None:  # cannot be rebuilt from its text
        super().__init__(f"the license server says {fields}")


class Ending(Dataset):
    def __init__(self, end: Callable[[], None]) -> None:
        self.end = end

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 2:
            self.end()
        return index


def end_fatally() -> None:
    raise Fatal(code=7)


def end_by_text() -> None:
    sys.exit("a config is missing")


def end_by_number() -> None:
    sys.exit(3)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.parametrize(("end", "status", "told"), [
    (end_fatally, 1, r"Fatal: the license server says {'code': 7} \(.*test_errors.py:\d+\)"),
    (end_by_text, 1, "SystemExit: a config is missing"), (end_by_number, 3, "SystemExit: 3"),
])  # fmt: skip
def test_exception_that_ends_worker_is_reported(
    own: Kind, method: str, end: Any, status: int, told: str
) -> None:
    with pytest.raises(minato.WorkerLost, match=f"exit code {status}. Cause: .*{told}"):
        list(own(Ending(end), num_workers=1, multiprocessing_context=method))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_exception_that_ends_worker_thread_is_reported(own: Kind) -> None:
    if not own.balanced:
        pytest.skip("static workers are processes")
    made = own(Ending(end_by_text), num_workers=1, worker_type="thread", seed_per_sample=False)
    with pytest.raises(minato.WorkerLost, match="Cause: SystemExit: a config is missing"):
        list(made)


def test_timeout_under_a_timer_of_signals(loader: Kind) -> None:
    # A profiler's: none of the sleeps of this wait ends by its own time.
    entered, gate = Gate(), Gate()
    iterator = iter(loader(Blocking(1, {0}, entered, gate), num_workers=1, timeout=0.5))
    assert entered.wait(GATE_S)
    ticks = 0

    def tick(*_: object) -> None:
        nonlocal ticks
        ticks += 1
        assert ticks < 100 * GATE_S, "the time is long over"

    before = signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    try:
        with pytest.raises(RuntimeError, match="timed out after 0.5 seconds"):
            next(iterator)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gate.set()
    iterator._shutdown_workers()


def test_timeout_never_repeats_work(loader: Kind) -> None:
    # After the timeout the sample is still under way; it is delivered when it is done.
    entered, gate = Gate(), Gate()
    dataset = Blocking(3, {0}, entered, gate)
    iterator = iter(loader(dataset, num_workers=1, timeout=2))
    assert entered.wait(GATE_S)
    with pytest.raises(RuntimeError, match="timed out after 2 seconds"):
        next(iterator)
    gate.set()
    assert flat(patiently(iterator)) == [0, 1, 2]


def test_keyboard_interrupt_while_waiting(loader: Kind) -> None:
    entered, gate = Gate(), Gate()
    iterator = iter(loader(Blocking(4, {1}, entered, gate), num_workers=1))
    assert next(iterator).item() == 0

    def interrupt() -> None:
        entered.wait(GATE_S)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            thread.start()
            next(iterator)
    finally:
        signal.signal(signal.SIGINT, before)
        thread.join()
    # Nothing is lost: the batch that was waited for still comes.
    gate.set()
    assert flat(iterator) == [1, 2, 3]


def test_signal_handlers_run_while_waiting(loader: Kind) -> None:
    entered, gate = Gate(), Gate()
    iterator = iter(loader(Blocking(3, {0}, entered, gate), num_workers=1))
    before = signal.signal(signal.SIGUSR1, lambda *_: gate.set())
    try:
        thread = threading.Thread(
            target=lambda: (entered.wait(GATE_S), os.kill(os.getpid(), signal.SIGUSR1)))
        thread.start()
        assert flat(iterator) == [0, 1, 2]
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_other_threads_run_while_waiting(loader: Kind) -> None:
    entered, gate = Gate(), Gate()
    iterator = iter(loader(Blocking(2, {0}, entered, gate), num_workers=1))
    ran = []

    def other() -> None:
        entered.wait(GATE_S)
        ran.append(sum(range(1000)))
        gate.set()

    thread = threading.Thread(target=other)
    thread.start()
    assert flat(iterator) == [0, 1]
    thread.join()
    assert ran


def test_error_leaves_no_workers(loader: Kind) -> None:
    iterator = iter(loader(Failing(50, {1}, _raise_value), num_workers=2))
    pids = worker_pids(iterator)
    with pytest.raises(ValueError):
        list(iterator)
    del iterator
    assert all_gone(pids)


def test_worker_reports_its_own_number(loader: Kind) -> None:
    class Mine(Numbers):
        def __getitem__(self, index: int) -> int:
            raise ValueError(f"I am <{get_worker_info().id}>")

    iterator = iter(loader(Mine(6), num_workers=2))
    seen = set()
    for _ in range(6):
        try:
            next(iterator)
        except ValueError as error:
            text = str(error)
            seen.add(HEAD.match(text)[2])
            assert f"I am <{HEAD.match(text)[2]}>" in text
    assert seen <= {"0", "1"}


def test_error_text_holds_notes_before_python_311(own: Kind) -> None:
    """Python 3.10 would not show notes."""
    from minato.errors import add_note

    class Old(Exception):
        @property
        def add_note(self) -> None:
            raise AttributeError

    for given, want in ((("bad\n", 2), "('bad\\nindex 7', 2)"), ((), "index 7"), ((5,), "5")):
        error = Old(*given)
        add_note(error, "index 7")
        assert str(error) == want
    error = ValueError("bad")
    add_note(error, "index 7")
    assert error_text(error) == "bad\nindex 7"
