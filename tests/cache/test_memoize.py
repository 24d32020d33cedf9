"""memoize: what is called how often, and that a hit is what a miss was."""

from __future__ import annotations

import contextlib
import gc
import random
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract.support import programs

import minato
from minato.cache import cache as cache_module

from .support import FOLDER, Calls, files, new_cache


@pytest.fixture
def calls(tmp_path: Path) -> Calls:
    return Calls(tmp_path / "calls")


def test_a_function_runs_once_for_each_value(calls: Calls) -> None:
    cache = new_cache()

    @cache.memoize(key=lambda n, scale=1: (n, scale))
    def make(n: int, scale: int = 1) -> np.ndarray[Any, Any]:
        calls.note()
        return np.full(n, scale)

    first = make(3)
    first += 7  # a private copy
    for again in (make(3), make(n=3), make(3, 1), make(3, scale=1)):
        assert again.tolist() == [1, 1, 1]
    assert len(calls.all()) == 1
    assert make(3, 2).tolist() == [2, 2, 2] and make(4).shape == (4,)
    assert len(calls.all()) == 3
    stats = cache.stats()
    assert (stats["misses"], stats["stored"], stats["off"]) == (3, 3, None)


def plain(n: int, scale: float = 2.0) -> float:
    return n * scale


def test_arguments_are_the_key_of_plain_functions() -> None:
    cache = new_cache()
    make = cache.memoize()(plain)
    assert [make(2), make(2, 2.0), make(n=2), make(2, scale=3.0)] == [4.0, 4.0, 4.0, 6.0]
    assert cache.stats()["stored"] == 2
    with pytest.raises(TypeError, match=r"arguments of plain\[0\] is of the type builtins.object"):
        make(object())
    with pytest.raises(TypeError, match="missing a required argument"):
        make()


def test_parentheses_may_be_left_out() -> None:
    cache = new_cache()
    double = cache.memoize(plain)
    assert [double(3), double(3), double(4)] == [6.0, 6.0, 8.0]
    assert cache.stats()["misses"] == 2


def test_key_must_be_a_function() -> None:
    with pytest.raises(TypeError, match="must be a function of the arguments, got 'i'"):
        new_cache().memoize(key="i")(abs)  # type: ignore[arg-type]


def test_missing_key_error_shows_the_line_to_write() -> None:
    cache = new_cache()
    number = 3
    with pytest.raises(TypeError, match=r"@cache.memoize\(key=lambda self, i: \(\.\.\.\)\)"):

        class Scans:
            @cache.memoize()
            def load(self, i: int) -> int:
                return i

    with pytest.raises(TypeError, match=r"key=lambda i: \(\.\.\.\)\).* number the value depends on"):

        @cache.memoize()
        def load(i: int) -> int:
            return i + number

    with pytest.raises(TypeError, match="parameter named part"):

        @cache.memoize()
        def cut(part: int) -> int:
            return part


def test_exception_is_raised_and_not_stored(calls: Calls) -> None:
    cache = new_cache()

    @cache.memoize(key=lambda n: n)
    def make(n: int) -> int:
        calls.note()
        if len(calls.all()) < 3:
            raise LookupError(n)
        return n

    for _ in range(2):
        with pytest.raises(LookupError):
            make(5)
    assert make(5) == make(5) == 5
    assert len(calls.all()) == 3


def test_value_that_cannot_be_stored_is_named() -> None:
    cache = new_cache()

    @cache.memoize(key=lambda: 0)
    def make() -> Any:
        return {"a": [object()]}

    with pytest.raises(TypeError, match=r"what .*make returned\['a'\]\[0\]: it is of the type"):
        make()


def test_makers_have_generators_of_their_own() -> None:
    cache = new_cache()

    @cache.memoize(key=lambda n: n)
    def make(n: int) -> list[float]:
        return [random.random(), float(np.random.rand()), torch.rand(()).item()]

    def drawn() -> list[float]:
        return [random.random(), float(np.random.rand()), torch.rand(()).item()]

    def seed() -> None:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)

    seed()
    expected = drawn(), drawn()
    seed()
    got = drawn(), make(1), make(1), make(2), drawn()
    assert (got[0], got[4]) == expected
    assert got[1] == got[2] != got[3]
    other = new_cache()
    again = other.memoize(key=lambda n: n)(make.__wrapped__)
    assert again(1) == got[1]  # whatever was drawn before


def test_makers_leave_numpys_state_alone() -> None:
    cache = new_cache()

    @cache.memoize(key=lambda n, draws: (n, draws))
    def make(n: int, draws: int) -> list[float]:
        return [float(np.random.normal()) for _ in range(draws)] + [float(np.random.binomial(9, 0.5))]

    made = []
    for n in range(12):  # with and without a second Gaussian, which NumPy keeps of a pair
        np.random.seed(n)
        np.random.normal(size=n % 3)
        before: Any = np.random.get_state()
        made.append(make(n // 6, n % 2 + n // 6))
        after: Any = np.random.get_state()
        assert before[1].tolist() == after[1].tolist() and before[2:] == after[2:]
    assert made[0] == made[2] and made[1] == made[3]


def test_numpys_other_generators_are_put_back() -> None:
    cache = new_cache()
    make = cache.memoize(key=lambda n: n)(lambda n: float(np.random.rand()))
    replaced = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        expected = [make(n) for n in range(3)], np.random.get_bit_generator().state
        assert len(set(expected[0])) == 3 and expected[1] == np.random.PCG64(3).state
    finally:
        np.random.set_bit_generator(replaced)
    assert len({make(n) for n in range(3, 6)}) == 3


def test_recursion_and_other_keys_do_not_wait(calls: Calls) -> None:
    cache = new_cache()

    @cache.memoize(key=lambda n: n)
    def fib(n: int) -> int:
        calls.note()
        return n if n < 2 else fib(n - 1) + fib(n - 2)

    @cache.memoize(key=lambda n: n)
    def circle(n: int) -> int:
        calls.note()
        return n if len(calls.all()) > 100 else circle(n)

    assert fib(20) == 6765 and len(calls.all()) == 21
    assert circle(3) == 3


THREADS = """
import threading
import minato
cache, together, made, results = minato.Cache("1MiB"), threading.Barrier(6), threading.Semaphore(0), []
going = threading.Event()
@cache.memoize(key=lambda n: n, version=1)
def make(n):
    made.release()  # what the cache does not compare: a list would be another for a thread that is late
    going.wait(0.3)  # the others have come by then, or make it again, which the count shows
    return n
def run():
    together.wait()
    results.append(make(8))
threads = [threading.Thread(target=run) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(results, made._value, cache.stats()["stored"])
"""


def test_threads_make_a_value_once() -> None:
    """In a program of its own: files that other threads open meanwhile count for a value."""
    done = programs().run(THREADS)
    assert done.stdout == f"{[8] * 6} 1 1\n", done.stdout + done.stderr


def test_parts_are_copied_alone() -> None:
    cache = new_cache()

    @cache.memoize(key=lambda kind: kind)
    def make(kind: str) -> Any:
        array = np.arange(2 * 5 * 7).reshape(2, 5, 7)
        return {"a": array, "f": np.asfortranarray(array), "t": torch.from_numpy(array),
                "p": torch.from_numpy(array).permute(2, 0, 1), "list": [1]}[kind]  # fmt: skip

    boxes: list[Any] = [
        np.s_[1:2, 2:4, 3:5], np.s_[0], np.s_[..., 2], np.s_[:, 1], np.s_[-1, -2, -3], np.s_[:, ::2],
        np.s_[:, 4:0:-1], np.s_[:], np.s_[1:1], np.s_[..., 3:1], 1,
    ]  # fmt: skip
    for _ in range(2):  # a miss, and hits
        for kind in "aftp":
            for box in boxes:
                whole = make.__wrapped__(kind)
                if isinstance(whole, torch.Tensor) and "-1" in repr(box) and "step" not in repr(box):
                    if any(isinstance(s, slice) and (s.step or 1) < 0 for s in np.atleast_1d(box)
                           if not isinstance(box, int)):  # fmt: skip
                        continue  # torch has no negative steps
                found = make(kind, part=box)
                assert type(found) is type(whole) and found.dtype == whole.dtype
                assert np.array_equal(np.asarray(found), np.asarray(whole)[box])
    with pytest.raises(IndexError, match="index 9 for a dimension of 5"):
        make("a", part=np.s_[0, 9])
    with pytest.raises(IndexError, match="has 4 indices"):
        make("a", part=np.s_[0, 0, 0, 0])
    with pytest.raises(TypeError, match="one array or tensor"):
        make("list", part=1)
    with pytest.raises(TypeError, match="slices, integers"):
        make("a", part=[0, 1])


def test_values_larger_than_a_segment_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    cache = new_cache("4MiB")

    @cache.memoize(key=lambda n: n)
    def make(n: int) -> bytes:
        return bytes(n)

    for _ in range(3):
        assert make(300_000) == bytes(300_000)
    [record] = [r for r in caplog.records if "does not store" in r.message]
    assert "300000 bytes" in record.message and "a 16th" in record.message
    assert cache.stats()["refused"] == 3


def test_full_cache_finds_its_small_values() -> None:
    cache = new_cache("5MiB")

    @cache.memoize(key=lambda n: n)
    def make(n: int) -> bytes:
        return bytes(4096)

    many = 0
    while cache.stats()["refused"] == 0:
        make(many)
        many += 1
    stored, before = cache.stats()["stored"], cache.stats()["hits"]
    for n in range(many):
        make(n)
    assert stored > 1000 and cache.stats()["hits"] - before > 0.98 * stored


@pytest.mark.parametrize("size, told", [
    ("many", "size must be a number of bytes"), (0, "size must be positive"), (1000, "at least '1MiB'"),
])  # fmt: skip
def test_a_wrong_size_is_refused(size: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        minato.Cache(size)


def test_a_wrong_check_is_refused() -> None:
    with pytest.raises(ValueError, match="check must be one of"):
        new_cache().memoize(key=lambda: 0, check="daily")(lambda: 0)


def test_without_a_place_the_functions_run_each_time(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cache_module, "MEMORY", str(tmp_path))  # on no file system in memory
    cache = new_cache()

    def make(n: int) -> int:
        calls.note()
        return n

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kept = cache.memoize(key=lambda n: n)(make)
        assert [kept(2), kept(2)] == [2, 2]
    [warning] = caught
    assert "minato.Cache is off" in str(warning.message) and "tmpfs" in str(warning.message)
    assert len(calls.all()) == 2 and "tmpfs" in cache.stats()["off"]
    assert list(tmp_path.iterdir()) == [calls.path]


def test_the_file_goes_with_its_last_cache() -> None:
    cache = new_cache()
    make = cache.memoize()(plain)
    assert make(3) == 6.0
    name = next(name for name in files() if cache._name in name)
    del make, cache
    gc.collect()
    assert name not in files()


def test_a_kept_cache_serves_the_next_one(calls: Calls) -> None:
    name = None
    for _ in range(2):
        cache = new_cache(keep=True)
        cache._name = name = name or cache._name

        @cache.memoize(key=lambda n: n)
        def make(n: int) -> int:
            calls.note()
            return n

        assert make(4) == 4
        client = cache._client
        assert client is not None
        client.store.detach()
    assert len(calls.all()) == 1
    [file] = [file for file in files() if str(name) in file]
    FOLDER.joinpath(file).unlink()
    with contextlib.suppress(OSError):  # other tests have files there
        FOLDER.rmdir()


def test_a_cache_leaves_a_loaders_memory_limit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_promised", 0)
    cache = new_cache("1MiB")
    make = cache.memoize()(plain)
    for limit in ("1GiB", "2GiB", "1GiB", None):
        loader = minato.DataLoader(range(4), num_workers=1, memory_limit=limit)
        assert sum(int(batch) for batch in loader) == 6
    assert cache_module._promised == 2 << 30
    client = cache._client
    assert client is not None
    client.store.promise(1 << 62)  # more than there is
    assert make(3) == 6.0 and cache.stats()["refused"] == 1
    client.store.promise(0)


def test_size_that_another_process_chose_is_logged(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    for directory, why in ((None, "another process made the file"), (tmp_path, f"drop {tmp_path}/minato-")):
        first, second = new_cache("2MiB", directory=directory), minato.Cache("8MiB", directory=directory)
        second._name = first._name
        for cache in (first, second):
            assert cache.memoize(version=1)(_double)(3) == 6
        [line] = caplog.messages
        assert "minato.Cache has 2.0 MiB, not the 8.0 MiB" in line and why in line
        caplog.clear()
    assert new_cache(1_200_000).memoize(_double)(3) == 6  # its parts are of whole pages
    assert caplog.messages == []


def _double(n: int) -> int:
    return n * 2


class Drawn(torch.utils.data.Dataset[Any]):
    """Samples of a cache, whose values change with each call if `counted`."""

    def __init__(self, counted: bool) -> None:
        def make(n: int) -> tuple[float, int]:
            return random.random(), time.perf_counter_ns() if counted else n

        self.make = new_cache().memoize(key=lambda n: n)(make)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, n: int) -> Any:
        return self.make(n)


def test_values_changing_for_one_key_fail_the_check() -> None:
    same = minato.check_determinism(Drawn(counted=False))
    assert not same.fields and same.kept == ("random in " + Drawn(True).make.__module__ + "."
                                             "Drawn.__init__.<locals>.make, which a cache keeps",)  # fmt: skip
    data = Drawn(counted=True)
    assert data[3] == data[3]
    report = minato.check_determinism(data)
    assert report.fields.keys() == {"[1]"} and len(report.indices) > 4
    assert data[3] == data[3]  # this process uses the cache as before
