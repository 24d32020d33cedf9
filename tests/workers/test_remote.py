"""``remote=``: actors on Ray make the batches of local workers, also when they are killed."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray_cluster
import torch

import minato
import minato.metrics
from minato.workers import remote_pool

ray = pytest.importorskip("ray", exc_type=ImportError)
pytestmark = pytest.mark.limit(300)

LENGTH = 48


class Drawing(torch.utils.data.Dataset):
    """Samples that draw from each library, and from a generator of the dataset's own."""

    def __init__(self, fails: tuple[int, ...] = (), sleeps: float = 0.0) -> None:
        self.fails, self.sleeps = fails, sleeps
        self.generator = np.random.default_rng()
        self.table = np.zeros(4)
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(self.sleeps)
        self.table[:] = index  # an actor's copy may be written to
        if index in self.fails:
            raise KeyError(f"sample {index} is broken")
        return {
            "image": torch.rand(3, 5) + index,
            "array": np.random.rand(4).astype(np.float32) + self.table,
            "numbers": (random.random(), index, self.epoch),
            "text": str(self.generator.random()),
        }


class Together(Drawing):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        shift = random.random()
        return [(shift, self[i]["image"]) for i in indices]


class Deadly(Drawing):
    """A sample kills its process."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 17:
            os._exit(3)
        return super().__getitem__(index)


class Fragile(Drawing):
    """Samples that kill their process while a file with their index is there, which they remove."""

    def __init__(self, folder: Path) -> None:
        super().__init__(sleeps=0.02)
        self.folder = folder

    def __getitem__(self, index: int) -> dict[str, Any]:
        with contextlib.suppress(FileNotFoundError):
            (self.folder / str(index)).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def noisy(samples: list[Any]) -> Any:
    return torch.stack([s["image"] for s in samples]) + torch.rand(1), [s["text"] for s in samples]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="mr-", dir="/tmp"))  # sockets' names have to be short
    ray_cluster.started(folder)
    yield folder
    ray_cluster.stopped(folder)


@pytest.fixture(scope="module", autouse=True)
def _joined(cluster: Path) -> Iterator[None]:
    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    ray.init(address=(cluster / "address").read_text(), log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def actors_of(number: int = 2, **options: Any) -> minato.remote.Ray:
    return minato.remote.Ray(actors=number, **options)


def loader(dataset: Any = None, **options: Any) -> Any:
    torch.manual_seed(5)
    given = {"batch_size": 8, "shuffle": True, **options}
    return minato.DataLoader(Drawing() if dataset is None else dataset, **given)


def plain(value: Any) -> Any:
    """A value that == compares bit by bit."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, (np.ndarray, np.generic)):
        return type(value).__name__, str(value.dtype), value.shape, value.tobytes(), value.flags.writeable
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value


def alike(remote: minato.remote.Ray, dataset: Any = None, **options: Any) -> bool:
    """Whether actors make what local processes make."""
    got = plain(list(loader(dataset, remote=remote, **options)))
    return bool(got) and got == plain(list(loader(dataset, num_workers=2, **options)))


@pytest.mark.parametrize(
    "dataset, options",
    [
        (Drawing(), {}),
        (Drawing(), {"batch_size": 7, "drop_last": True}),
        (Drawing(), {"collate_fn": noisy}),
        (Drawing(), {"collate_fn": list}),
        (Drawing(), {"batch_size": None}),
        (Drawing(), {"in_order": True, "prefetch_factor": 4, "seed_per_sample": True}),
        (Together(), {}),
        (Drawing(fails=(3, 11, 12)), {"on_error": "skip", "max_errors": 9}),
        (Drawing(fails=(3, 11, 12)), {"on_error": "replace", "max_errors": 9}),
        (Drawing(fails=(3, 11, 12)), {"on_error": "replace", "batch_size": 2, "max_errors": 9}),
        (Together(fails=(3,)), {"on_error": "replace"}),
        (Drawing(), {"batch_size": 3}),
        (Drawing(fails=(3, 11, 12)), {"on_error": "skip", "batch_size": 3, "max_errors": 9}),
    ],
)
def test_batches_equal_those_of_local_workers(dataset: Any, options: dict[str, Any]) -> None:
    assert alike(actors_of(chunk=3), dataset, **options)


def test_batches_of_one_chunk_are_collated_by_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_pool._Runner, "collate", None)
    assert alike(actors_of(chunk=8))


def test_actors_send_arrays_and_never_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, make = [], remote_pool.Fleet.make

    def noted(self: Any, *args: Any) -> Any:
        sent.extend(found := make(self, *args))
        return found

    monkeypatch.setattr(remote_pool.Fleet, "make", noted)
    list(loader(remote=actors_of(chunk=3)))
    assert len(sent) == 18
    for data, buffers in sent:
        assert type(data) is bytes and b"torch.storage" not in data and b"_rebuild_tensor_v2" not in data
        assert len(buffers) >= 4 and all(type(b) is np.ndarray and b.flags.contiguous for b in buffers)


def test_persistent_actors_are_told_each_epoch() -> None:
    def epochs(**options: Any) -> list[Any]:
        data = loader(persistent_workers=True, **options)
        found = []
        for epoch in (3, 4, 7):
            data.set_epoch(epoch)
            found.append(plain(list(data)))
        data._iterator = None
        return found

    assert epochs(remote=actors_of()) == epochs(num_workers=2)


class Telling(torch.utils.data.Sampler):
    """Sets the dataset's epoch when it is iterated."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.begun = dataset, 0

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        self.dataset.set_epoch(self.begun)
        return iter(range(LENGTH))


@pytest.mark.parametrize("told_by, early", [("method", False), ("attribute", False), ("sampler", True)])
def test_persistent_actors_get_the_datasets_epoch(told_by: str, early: bool) -> None:
    dataset = Drawing()
    options = {"persistent_workers": True, "prefetch_next_epoch": early, "remote": actors_of()}
    if told_by == "sampler":
        options.update(sampler=Telling(dataset), shuffle=None)
    data = loader(dataset, **options)
    for epoch in (1, 2, 3):
        if told_by == "method":
            dataset.set_epoch(epoch)
        elif told_by == "attribute":
            dataset.epoch = epoch
        found = {number for batch in data for number in batch["numbers"][2].tolist()}
        assert found == {epoch}
    data._iterator = None


@pytest.mark.parametrize("saves, resumes", [("remote", "local"), ("local", "remote")])
def test_state_resumes_on_the_other_kind_of_workers(saves: str, resumes: str) -> None:
    kinds: dict[str, Any] = {"remote": {"remote": actors_of()}, "local": {"num_workers": 2}}
    whole = plain(list(loader(**kinds["local"])))
    first = loader(**kinds[saves])
    iterator = iter(first)
    begun = [plain(next(iterator)) for _ in range(2)]
    state = first.state_dict()
    del iterator
    second = loader(**kinds[resumes])
    torch.manual_seed(99)
    second.load_state_dict(state)
    assert begun + plain(list(second)) == whole


def test_lightning_trains_on_the_batches_of_local_workers(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch", exc_type=ImportError)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.seen = torch.nn.Parameter(torch.zeros(1)), list[Any]()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            self.seen.append(plain(batch))
            return self.weight.sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    def seen(**options: Any) -> list[Any]:
        module = Module()
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module, loader(persistent_workers=True, **options))
        return module.seen

    got = seen(remote=actors_of())
    assert len(got) == 12 and got == seen(num_workers=2)


def in_ray_train(folder: dict[str, str]) -> None:
    from ray import train

    minato.integrations.ray.install()

    def batches(**options: Any) -> list[Any]:
        data = train.torch.prepare_data_loader(loader(**options), move_to_device=False)
        data.sampler.set_epoch(1)
        found: list[Any] = plain(list(data))
        return found

    got = batches(remote=actors_of(1, cpus=0.4))
    said = f"{len(got)} batches, equal: {got == batches(num_workers=1)}"
    Path(folder["folder"], str(train.get_context().get_world_rank())).write_text(said)


def test_ray_train_trains_on_the_batches_of_local_workers(tmp_path: Path) -> None:
    train = pytest.importorskip("ray.train.torch", exc_type=ImportError)
    from ray.train import RunConfig, ScalingConfig

    (tmp_path / "found").mkdir()
    train.TorchTrainer(
        in_ray_train,
        train_loop_config={"folder": str(tmp_path / "found")},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.1}),
        torch_config=train.TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=str(tmp_path)),
    ).fit()
    found = [(tmp_path / "found" / rank).read_text() for rank in "01"]
    assert found == ["3 batches, equal: True"] * 2


def test_error_of_a_sample_names_sample_and_node() -> None:
    with pytest.raises(KeyError, match="sample 11 is broken") as caught:
        list(loader(Drawing(fails=(11,)), shuffle=False, remote=actors_of()))
    assert "Ray actor" in str(caught.value) and "on node" in str(caught.value)
    assert "sample index 11, position 3 of batch 1" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("kills", [20, pytest.param(300, marks=pytest.mark.limit(3600))])
def test_batches_are_equal_when_actors_are_killed(kills: int, cluster: Path) -> None:
    chosen, killed = random.Random(1), 0
    data = loader(Drawing(sleeps=0.01), remote=actors_of(), max_retries=100, persistent_workers=True)
    epochs = []
    while killed < kills:
        epochs.append([])
        for batch in data:
            epochs[-1].append(plain(batch))
            if known := ray_cluster.actors(cluster):
                with contextlib.suppress(ProcessLookupError):  # it has ended in the meantime
                    os.kill(chosen.choice(known), signal.SIGKILL)
                    killed += 1
    data._iterator = None
    local = loader(Drawing(), num_workers=1, persistent_workers=True)
    assert epochs == [plain(list(local)) for _ in epochs]


def test_deaths_of_actors_count_and_warn_once_an_epoch(tmp_path: Path) -> None:
    data = loader(Fragile(tmp_path), remote=actors_of(), persistent_workers=True, max_retries=9)

    def warned(run: Any, *deadly: int) -> list[str]:
        for index in deadly:
            (tmp_path / str(index)).touch()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            run()
        return [text for w in told if "DataLoader worker" in (text := str(w.message))]

    def metrics() -> list[float]:
        return [sum(number[5] for number in minato.metrics.read() if number[0] == name)
                for name in ("minato.worker.deaths", "minato.retries")]  # fmt: skip

    before = metrics()
    for epoch in (1, 2):
        (text,) = warned(lambda: list(data), 5, 29)
        assert re.match(r"DataLoader worker \(pid \d+, Ray actor \d on node .*\) exited unexpectedly", text)
        assert "Its samples are retried. Further deaths in this epoch are only counted" in text
        stats = data.stats()
        assert stats["deaths"] == 2 * epoch and stats["retries"] >= 2 * epoch
        assert metrics() == [before[0] + stats["deaths"], before[1] + stats["retries"]]
    assert not warned(data._iterator._shutdown_workers)
    assert data.stats()["deaths"] == 4


@pytest.mark.parametrize("chunk", [4, 8])
def test_sample_that_kills_its_actor_is_named(chunk: int) -> None:
    with pytest.raises(minato.WorkerLost, match="Ray actor .* died while it made sample index 17") as caught:
        list(loader(Deadly(), remote=actors_of(chunk=chunk)))
    assert caught.value.index == 17


@pytest.mark.parametrize("chunk, on_error", [(4, "skip"), (4, "replace"), (8, "skip")])
def test_on_error_leaves_out_a_sample_that_kills_actors(chunk: int, on_error: str) -> None:
    got = plain(list(loader(Deadly(), on_error=on_error, remote=actors_of(chunk=chunk))))
    assert got == plain(list(loader(Drawing(fails=(17,)), on_error=on_error, num_workers=1)))


def test_node_that_dies_loses_no_sample(cluster: Path) -> None:
    (cluster / "add").touch()
    ray_cluster.await_file(cluster / "add", gone=True)
    spread = actors_of(3, options={"scheduling_strategy": "SPREAD"})
    expected = plain(list(loader(num_workers=1, batch_size=4)))
    data = loader(Drawing(sleeps=0.05), remote=spread, max_retries=9, batch_size=4)
    iterator = iter(data)
    got = [next(iterator)]
    ray_cluster.await_actors(cluster, 3)
    (cluster / "kill").touch()
    got += iterator
    ray_cluster.await_file(cluster / "kill", gone=True)
    assert plain(got) == expected


def test_node_that_all_actors_are_bound_to_dies(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {node["NodeID"] for node in ray.nodes()}
    (cluster / "add").touch()
    ray_cluster.await_file(cluster / "add", gone=True)
    (there,) = {node["NodeID"] for node in ray.nodes()} - before
    bound = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(there, soft=False)
    remote = actors_of(1, options={"scheduling_strategy": bound})
    expected = plain(list(loader(num_workers=1, batch_size=4)))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        iterator = iter(loader(Drawing(sleeps=0.05), remote=remote, max_retries=9, batch_size=4))
        got = [next(iterator)]
        monkeypatch.setattr(actors, "ALONE", 0.5)
        (cluster / "kill").touch()
        got += iterator
    ray_cluster.await_file(cluster / "kill", gone=True)
    assert plain(got) == expected
    assert sum("Ray has placed no actor" in str(w.message) for w in told) == 1


def test_no_room_has_samples_made_on_the_trainers_node(
    cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors, "ALONE", 0.5)
    expected = plain(list(loader(num_workers=1)))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        iterator = iter(loader(Drawing(sleeps=0.05), remote=actors_of(cpus=50), max_retries=9))
        got = [next(iterator)]
        (helper,) = ray_cluster.actors(cluster)
        os.kill(helper, signal.SIGKILL)  # its successor needs no room either
        got += iterator
    assert plain(got) == expected
    assert sum("Ray has placed no actor" in str(w.message) for w in told) == 1


def test_other_version_on_a_node_raises_value_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "versions", lambda: {**actors_versions, "torch": "1.0"})
    with pytest.raises(ValueError, match=r"on node .* has torch .* but the trainer has torch 1\.0"):
        list(loader(remote=actors_of()))


actors_versions = remote_pool.versions()


def test_other_processor_on_a_node_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "features", lambda: {"avx1024"})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        list(loader(remote=actors_of()))
    assert sum("the processor of Ray actor" in str(w.message) for w in told) == 1


def test_missing_module_on_a_node_names_node_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("class Data(list):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_here  # type: ignore[import-not-found]

    with pytest.raises(ValueError, match="on node .* cannot load the dataset.*only_here.*working_dir"):
        list(minato.DataLoader(only_here.Data([1, 2]), remote=actors_of()))


def test_dataset_that_cannot_be_pickled_raises_with_advice() -> None:
    dataset = Drawing()
    dataset.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(TypeError) as caught:
        list(loader(dataset, remote=actors_of()))
    [note] = caught.value.__notes__
    assert "remote= sends dataset" in note and "the dataset (Drawing) cannot be pickled" in note
    with pytest.raises(TypeError) as caught:
        list(loader(collate_fn=partial(len, threading.Lock()), remote=actors_of()))
    [note] = caught.value.__notes__
    assert "collate_fn (partial) cannot be pickled" in note and "Drawing" not in note


class SlowAtLast(Drawing):
    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(90 if index == LENGTH - 1 else 0)
        return super().__getitem__(index)


def test_timeout_names_the_node_that_is_late(cluster: Path) -> None:
    batches = iter(loader(SlowAtLast(), remote=actors_of(), timeout=20, shuffle=False))
    next(batches)  # the actors are there
    with pytest.raises(RuntimeError, match=r"(?s)timed out after 20 seconds.*Ray actor \d on node"):
        list(batches)
    del batches
    ray_cluster.await_actors(cluster, 0)


def test_timeout_before_any_actor_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)timed out after 1 seconds.*no Ray actor is ready"):
        list(loader(remote=actors_of(cpus=50), timeout=1))


def init(number: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None and info.id == number and info.num_workers == 2
    info.dataset.epoch = 1000


def test_worker_init_fn_runs_in_each_actor() -> None:
    for batch in loader(worker_init_fn=init, remote=actors_of()):
        assert set(batch["numbers"][2].tolist()) == {1000}


def test_abandoned_iterator_ends_its_actors(cluster: Path) -> None:
    iterator = iter(loader(remote=actors_of()))
    next(iterator)
    del iterator
    ray_cluster.await_actors(cluster, 0)


PROGRAM = """
import sys, time, torch, minato, ray
sys.path.insert(0, {tests!r})
from workers.test_remote import Drawing
ray.init(address={address!r}, log_to_driver=False, logging_level="error")
data = minato.DataLoader(Drawing(sleeps=0.02), batch_size=4, remote=minato.remote.Ray(actors=2))
iterator = iter(data)
next(iterator)
print("begun", flush=True)
if sys.argv[1] == "waits":
    while True:
        list(data)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, None])
def test_program_ends_at_once_and_its_actors_too(number: int | None, cluster: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    tests = str(Path(__file__).parents[1])
    program.write_text(PROGRAM.format(address=(cluster / "address").read_text(), tests=tests))
    command = [sys.executable, str(program), "ends" if number is None else "waits"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        assert any(line == "begun\n" for line in process.stdout)  # Ray may tell of dead nodes before
        began = time.monotonic()
        if number is not None:
            process.send_signal(number)
        rest = process.stdout.read()
    assert time.monotonic() - began < 20
    assert (process.returncode == 0) == (number is None), rest
    assert "Fatal Python error" not in rest
    ray_cluster.await_actors(cluster, 0)


def test_check_determinism_compares_nodes() -> None:
    report = minato.check_determinism(Drawing(), samples=4, remote=actors_of())
    assert report and report.nodes == ()

    class Local(Drawing):
        def __getitem__(self, index: int) -> Any:
            return Path("/proc/self/cmdline").read_bytes().startswith(b"ray::Actor")

    report = minato.check_determinism(Local(), samples=4, remote=actors_of())
    assert not report and len(report.nodes) == 2 and "Other samples" in str(report)


def test_ray_data_shard_feeds_a_loader() -> None:
    data = pytest.importorskip("ray.data", exc_type=ImportError)

    class Rows(torch.utils.data.IterableDataset):
        def __init__(self, shard: Any) -> None:
            self.shard = shard

        def __iter__(self) -> Iterator[Any]:
            return iter(self.shard.iter_rows())

    (shard,) = data.range(20, override_num_blocks=2).streaming_split(1, equal=True)
    batches = list(minato.DataLoader(Rows(shard), batch_size=6))
    found = torch.cat([batch["id"] for batch in batches]).tolist()
    assert sorted(found) == list(range(20))


@pytest.mark.parametrize(
    "options, text",
    [
        ({"worker_type": "process"}, "worker_type='process'"),
        ({"scheduling": "static"}, "scheduling='static'"),
        ({"cache": "1MiB"}, "cache="),
        ({"autoscale": (1, 4), "num_workers": 2}, "autoscale="),
        ({"sample_timeout": 3.0}, "sample_timeout"),
        ({"batching": "ready", "in_order": False}, "batching='ready'"),
        ({"multiprocessing_context": "spawn"}, "remote= .* multiprocessing_context="),
    ],
)
def test_combinations_without_effect_raise_value_error(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        loader(remote=actors_of(), **options)


def test_datasets_that_actors_cannot_serve_raise_value_error() -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    class Stateful(Drawing):
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            pass

    with pytest.raises(ValueError, match="iterable"):
        loader(Stream(), shuffle=None, remote=actors_of())
    with pytest.raises(ValueError, match="state_dict"):
        loader(Stateful(), remote=actors_of())
