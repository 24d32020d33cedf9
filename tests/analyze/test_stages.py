"""Clocks at the boundaries inside a sample."""

from __future__ import annotations

import builtins
import io
import random
import sqlite3
import time
import zipfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

import minato
from minato.analyze import keeper, loaders, stages, work
from minato.analyze.records import RateRequest, Request
from minato.analyze.stages import Clocks
from minato.iterators import planner
from minato.iterators.loader_memo import memo_of

from .support import Compose, in_a_fork


class Slow:
    def __call__(self, value: Any) -> Any:
        time.sleep(0.01)
        return value


class Noise:
    def __call__(self, value: Any) -> Any:
        return value + random.random()


def helper(value: Any) -> Any:
    return value * 2


class Source:
    def fetch(self, path: Path) -> bytes:
        with open(path, "rb") as file:
            return file.read()


class Data:
    def __init__(self, path: Path) -> None:
        self.path, self.source = path, Source()
        self.transform = Compose(Slow(), lambda value: value, Compose(Noise()))

    def __len__(self) -> int:
        return 8

    def decoded(self, content: bytes) -> Any:
        time.sleep(0.005)
        return np.frombuffer(content, np.uint8).astype(np.float32)

    def __getitem__(self, index: int) -> Any:
        return self.transform(helper(self.decoded(self.source.fetch(self.path))))


def data(folder: Path) -> Data:
    (folder / "file").write_bytes(bytes(range(100)))
    return Data(folder / "file")


def test_each_stage_has_its_own_time(tmp_path: Path) -> None:
    clocks, dataset = Clocks(), Subset(data(tmp_path), [0, 1])  # type: ignore[arg-type]
    clocks.set(dataset, stages.FULL)
    made, wall, _cpu = clocks.sample(lambda: dataset[0])
    found = {label: stage for label, stage in clocks.stages.items()}
    clocks.remove()
    assert made.shape == (100,)
    transforms = {"transform 1 (Slow)", "transform 2 (<lambda>)", "transform 1 (Noise)"}
    assert {*transforms, "helper()", "decoded()", "fetch()", "file read"} <= found.keys()
    assert found["file read"].inside == ["fetch()"] and found["file read"].reads
    slow = found["transform 1 (Slow)"]
    assert 0.01 <= slow.seconds < wall and slow.cpu < 0.005
    assert sum(stage.seconds for stage in found.values()) <= wall


def test_clocks_leave_nothing_when_removed(tmp_path: Path) -> None:
    dataset = data(tmp_path)
    before = [vars(kind).copy() for kind in (Data, Slow, Noise, Source)]
    transforms = list(dataset.transform.transforms)
    opens, plain = (builtins.open, io.open), helper
    clocks = Clocks()
    clocks.set(dataset, stages.FULL)
    assert builtins.open is not opens[0] and vars(Slow) != before[1]
    clocks.remove()
    assert [vars(kind).copy() for kind in (Data, Slow, Noise, Source)] == before
    assert dataset.transform.transforms == transforms
    assert (builtins.open, io.open) == opens and helper is plain


def test_cache_ends_before_a_random_stage(tmp_path: Path) -> None:
    loader = DataLoader(data(tmp_path), 4)  # type: ignore[arg-type]
    found, why = work._cacheable_part(loader, work.clock() + 10)
    assert found is not None and not found.whole and not why
    assert found.after == "transform 2 (<lambda>)" and found.bytes == 400
    assert found.share > 0.8


def test_equal_results_have_equal_digests() -> None:
    one = {"a": [torch.arange(3), np.ones(2)], "b": "text", "c": (1, 2.5, None)}
    two = {"a": [torch.arange(3), np.ones(2)], "b": "text", "c": (1, 2.5, None)}
    assert stages.hash_value(one) == stages.hash_value(two) is not None
    two["a"][0][0] = 9  # type: ignore[index]
    assert stages.hash_value(one) != stages.hash_value(two)
    assert stages.hash_value(object()) is None
    assert stages.size_of(one) == 24 + 16 + 4 + 16


def test_clocks_ignore_other_threads(tmp_path: Path) -> None:
    dataset, clocks = data(tmp_path), Clocks()
    clocks.set(dataset, stages.FULL)
    clocks.on, clocks.thread = True, -1  # as if another thread had set them
    dataset[0]
    clocks.remove()
    assert clocks.stages == {}


def pace_of(epochs: int, length: int, over: int) -> Any:
    """Two workers make two batches in 0.2 s. An epoch begins with a second more; its sampler has no
    more batches for the last ``over``, which come as fast."""
    pace = loaders._Pace(2, length, ahead=4)
    for epoch in range(epochs):
        if epoch:
            pace.begin()
        for number in range(length):
            took = (0.2 if number % 2 == 0 else 0.0) + (1.0 if epoch and number == 0 else 0.0)
            pace.add(took, 8, took, over=number >= length - over)
    return pace


def test_end_of_an_epoch_is_apart_from_batches() -> None:
    pace = pace_of(epochs=3, length=20, over=4)
    assert pace.batch() == pytest.approx(0.1) and pace.end() == pytest.approx(1.0)
    assert pace.ends == 2 and pace.again / pace.ends == pytest.approx(1.2)


def test_epochs_without_a_middle_count_as_a_whole() -> None:
    pace = pace_of(epochs=3, length=4, over=4)
    assert pace.batch() == pytest.approx(3.2 / 12) and pace.end() == 0
    assert pace_of(epochs=1, length=20, over=4).end() is None


def test_batches_of_a_check_have_the_mean_cost() -> None:
    costs = {str(n): 1.0 for n in range(40)} | {"3": 9.0, "4": 9.0, "5": 9.0, "30": 9.0}
    batches = [[n, n + 1] for n in range(0, 60, 2)]  # those from 40 on are not known
    chosen = loaders.choose_batches(batches, costs, 5, 0.3)
    assert chosen == batches[11:16]  # the others have no slow sample, or three
    assert loaders.choose_batches(batches, costs, 99, 0.3) == batches[:20]


def test_check_of_uneven_samples_has_whole_epochs() -> None:
    """And minato's loader looks ahead and knows costs, as it does in the program's second epoch."""
    def measured() -> Any:
        costs = {str(n): 0.5 if n == 8 else 0.001 for n in range(64)}
        request = RateRequest("minato", 1, 0.1, most=5, costs=costs)
        loader = DataLoader(list(range(64)), 4)
        made = loaders.rebuild(loader, request)
        found = asdict(loaders.rate(Request("rate", rate=request), loader))
        return found, memo_of(made).costs.predict(8), planner.may_look_ahead(made)

    found, learnt, ahead = in_a_fork(measured)
    assert found["batches"] % 5 == 0 and found["epoch"] == 5
    assert found["samples"] == 4 * found["batches"]
    assert learnt == 5e8 and ahead


def test_batches_of_a_study_come_in_epochs() -> None:
    batches = loaders._Batches([[0], [1], [2]], length=2)
    assert [list(batches), list(batches)] == [[[0], [1]], [[2], [0]]] and batches.over
    source = iter(loaders._Batches([[0]]))
    assert [next(source) for _ in range(9)] == [[0]] * 9  # without end
    batches.length = 0
    source = iter(batches)
    next(source)
    batches.cut = True
    assert list(source) == []


def test_storage_counts_each_byte_of_parallel_reads(tmp_path: Path) -> None:
    """Also where some of the files have gone."""
    paths = [str(tmp_path / str(number)) for number in range(200)]
    for path in paths:
        Path(path).write_bytes(bytes(1 << 16))
    found = work.storage(Request("storage", 2.0, files=[str(tmp_path / "gone"), *paths]), None)
    assert found.files == 200 and [each.in_flight for each in found.rates] == [1, 4, 16, 32]
    for each in found.rates:
        assert each.files and each.bytes_per_s == pytest.approx(each.files_per_s * (1 << 16))


def test_worker_init_fn_runs_before_samples() -> None:
    """A dataset whose samples are made in workers alone, and fail in the program's process."""
    class Vocabulary:
        words: dict[int, str] = {}

        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> str:
            info = torch.utils.data.get_worker_info()
            assert info is not None and info.num_workers == 1
            return self.words[index]

    def load(_number: int) -> None:
        Vocabulary.words = {index: "word" for index in range(40)}

    def measured(workers: int) -> dict[str, Any]:
        loader = DataLoader(Vocabulary(), 4, num_workers=workers, worker_init_fn=load)  # type: ignore[arg-type]
        told: list[dict[str, Any]] = []
        keeper.run(Request("work", 0.5), loader, lambda found: told.append(asdict(found)))
        assert torch.utils.data.get_worker_info() is None
        return told[-1]

    found = in_a_fork(lambda: measured(2))
    assert found["costs"] and not found["failures"]
    found = in_a_fork(lambda: measured(0))
    assert found["failures"] and not found["costs"]


@pytest.mark.parametrize("kind", ["torch", "minato"])
@pytest.mark.parametrize("made, rows", [
    ({"batch_size": 4}, 4), ({"batch_size": None}, 1),
    ({"batch_sampler": [np.arange(3), np.arange(3, 6)]}, 3),
    ({"batch_sampler": [torch.arange(3), torch.arange(3, 6)]}, 3),
])  # fmt: skip
def test_a_rate_counts_the_samples_of_batches(kind: str, made: dict[str, Any], rows: int) -> None:
    loader = DataLoader([torch.zeros(7, 2)] * 24, **made)  # type: ignore[arg-type]

    def measured(**more: Any) -> dict[str, Any]:
        request = RateRequest(kind, 1, 0.3, length=6, **more)
        return asdict(loaders.rate(Request("rate", rate=request), loader))

    for more in ({}, {"cached": -1}, {"same": True}):
        found = in_a_fork(lambda: measured(**more))
        assert found["samples"] == rows * found["batches"] > 0


class InParts:
    """A dataset that minato's loader can cache."""

    def __len__(self) -> int:
        return 24

    def read(self, index: int) -> bytes:
        return bytes([index])

    def decode(self, content: bytes, index: int) -> Any:
        return np.frombuffer(content, np.uint8)

    def augment(self, sample: Any, index: int) -> torch.Tensor:
        return torch.from_numpy(sample.copy())

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.augment(self.decode(self.read(index), index), index)


@pytest.mark.parametrize("more", [{"same": True}, {"cached": -1}])
def test_programs_with_a_cache_are_measured(more: dict[str, Any]) -> None:
    """The study's own datasets have no parts that could be cached."""
    def measured() -> dict[str, Any]:
        loader = minato.DataLoader(InParts(), 4, num_workers=1, cache="1MiB")  # type: ignore[arg-type]
        request = RateRequest("own", 1, 0.3, length=6, **more)
        return asdict(loaders.rate(Request("rate", rate=request), loader))

    assert in_a_fork(measured)["samples"] > 0


class Drawn(torch.utils.data.Sampler[int]):
    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        for index in range(12):
            time.sleep(0.002)
            yield index


@pytest.mark.parametrize("seconds", [5.0, 0.005])
def test_sampler_is_timed_and_named_with_its_place(seconds: float) -> None:
    """An epoch that is cut off is taken to go on as it began."""
    found = loaders.sampler(Request("sampler", seconds), DataLoader(list(range(12)), 4, sampler=Drawn()))
    assert found is not None and found.name == "Drawn" and 0.002 < found.seconds < 1
    code = Drawn.__iter__.__code__
    assert found.place == (code.co_filename, code.co_firstlineno)
    found = loaders.sampler(Request("sampler", seconds), DataLoader(list(range(12)), 4))
    assert found is not None and found.name == "SequentialSampler"


class Reader:
    """A class of the program that opens what it is given."""

    opens: list[str] = []

    def __init__(self, path: str) -> None:
        self.opens.append(path)

    def close(self) -> None:
        self.opens.append("closed")


class Rows:
    def __init__(self, folder: Path) -> None:
        self.names = [str(folder / name) for name in ("a.zip", "b.npy", "c.db")]
        with zipfile.ZipFile(self.names[0], "w") as file:
            file.writestr("x", b"five5")
        np.save(self.names[1], np.arange(7))
        with sqlite3.connect(self.names[2]) as database:
            database.execute("create table t as select 3 as x")
        database.close()

    def __getitem__(self, _index: int) -> tuple[bytes, int, int]:
        with zipfile.ZipFile(self.names[0]) as file:
            read = file.read("x")
        database = sqlite3.connect(self.names[2])
        [(value,)] = database.execute("select x from t").fetchall()
        database.close()
        reader = Reader("reader")
        reader.close()
        return read, int(np.load(self.names[1], "r")[3]), value


def test_files_opened_for_each_sample_are_stages(tmp_path: Path) -> None:
    dataset, clocks = Rows(tmp_path), Clocks()
    plain = dataset[0], zipfile.ZipFile.__init__, Reader.__init__, np.load, np.memmap.__new__, sqlite3.connect
    clocks.set(dataset, stages.FULL)
    for _ in range(4):
        assert clocks.sample(lambda: dataset[0])[0] == plain[0]
    found = {stage.label: stage for stage in clocks.stages.values() if stage.kind == stages.OPEN}
    assert set(found) == {"zipfile.ZipFile", "sqlite3.connect", "numpy.load", "Reader()"}
    for stage in found.values():
        assert stage.calls == 4 and len(clocks.opened[stage.label]) == 1 and stage.whole >= stage.seconds > 0
        assert stage.place is not None and stage.place[0] == __file__
    line = Rows.__getitem__.__code__.co_firstlineno + 1
    assert found["zipfile.ZipFile"].place == (__file__, line, "__getitem__")
    clocks.remove()
    assert plain[1:] == (
        zipfile.ZipFile.__init__, Reader.__init__, np.load, np.memmap.__new__, sqlite3.connect
    )  # fmt: skip


class Cropped:
    """Opens a file, decodes what it reads, and cuts at random."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> np.ndarray:
        with zipfile.ZipFile(self.path) as file:
            values = self.decode(file.read("x"))
        return np.roll(values, random.randrange(1, 100))

    def decode(self, read: bytes) -> np.ndarray:
        time.sleep(0.01)
        return np.arange(100) + len(read)


def test_stage_after_an_opened_file_can_be_cached(tmp_path: Path) -> None:
    """The file is opened while the result of the stage is there: an object must be set up."""
    loader: Any = DataLoader(Cropped(str(Rows(tmp_path).names[0])), 2)  # type: ignore[arg-type]
    found: Any = in_a_fork(lambda: asdict(work._cacheable_part(loader, work.clock() + 10)[0]))  # type: ignore[arg-type]
    assert found["after"] == "decode()" and found["share"] > 0.5


def test_clocks_of_openers_stay_where_others_cost_too_much(tmp_path: Path) -> None:
    dataset, clocks = data(tmp_path), Clocks()
    clocks.set(dataset, stages.OPENS)
    clocks.sample(lambda: dataset[0])
    assert clocks.stages == {}
    rows = Rows(tmp_path)
    clocks.set(rows, stages.OPENS)
    clocks.sample(lambda: rows[0])
    opens = {stage.label for stage in clocks.stages.values() if stage.kind == stages.OPEN}
    assert opens == {"zipfile.ZipFile", "sqlite3.connect", "numpy.load"}
    clocks.remove()


class Buffers:
    """An object that opens nothing, and can be closed."""

    def __getitem__(self, _index: int) -> str:
        return type(Nothing()).__name__


class Nothing:
    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def test_object_made_without_arguments_opens_nothing_again() -> None:
    timed = work.SampleTimer(DataLoader(Buffers()), print, stages.FULL)  # type: ignore[arg-type]
    timed.clocks.set(timed.loader.dataset, stages.FULL)
    for _ in range(3):
        timed.clocks.sample(lambda: timed.loader.dataset[0])
    [again] = [stage.again for stage in timed.stages() if stage.label == "Nothing()"]
    assert again == 0


def test_sample_whose_files_stay_open_is_timed(tmp_path: Path) -> None:
    loader: Any = DataLoader(Cropped(str(Rows(tmp_path).names[0])), 2)  # type: ignore[arg-type]
    assert work._kept_open_seconds(loader, work.clock() + 0.1) > 0.009  # type: ignore[operator]


def test_files_kept_open_are_opened_once(tmp_path: Path) -> None:
    """What a check of this change runs; the samples are the same."""
    dataset, clocks, Reader.opens = Rows(tmp_path), Clocks(), []
    plain = dataset[0]
    assert Reader.opens == ["reader", "closed"]
    clocks.set(dataset, stages.FULL)
    clocks.kept = {}
    assert [dataset[0], dataset[0], dataset[0]] == [plain] * 3
    assert Reader.opens == ["reader", "closed", "reader"] and len(clocks.kept) == 4
    clocks.remove()


def test_samples_send_tensors_where_the_program_has() -> None:
    """Its threads that do so are not in the copy."""

    def program() -> Any:
        queue = torch.multiprocessing.get_context("fork").Queue()

        class Sends(Dataset[Any]):
            def __len__(self) -> int:
                return 2

            def __getitem__(self, index: int) -> Any:
                queue.put(torch.zeros(2))
                return queue.get(timeout=10)

        def measured() -> list[Any]:
            told: list[Any] = []
            keeper.run(Request("work", 0.2), DataLoader(Sends(), 2), lambda found: told.append(asdict(found)))
            return [told[-1]["failed"], len(told[-1]["costs"]) > 0]

        Sends()[0]
        return in_a_fork(measured)

    assert in_a_fork(program) == [[], True]
