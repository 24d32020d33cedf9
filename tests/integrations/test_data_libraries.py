"""Datasets and loaders of other libraries: their data does not depend on the loader."""

from __future__ import annotations

import importlib.util
import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from .conftest import KINDS, Points, Watch, model, printed, same_when_patched, weights


def plain(value: Any) -> Any:
    """Batches as lists, for comparison."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def epochs(kind: str, dataset: Any, **options: Any) -> list[Any]:
    loader = KINDS[kind](dataset, num_workers=2, **options)
    return [[plain(batch) for batch in loader] for _ in range(2)]


@pytest.mark.parametrize("layout", [None, "torch", "numpy"])
@pytest.mark.parametrize("size", [None, 3])
def test_datasets_map_style(watch: Watch, layout: str | None, size: int | None) -> None:
    datasets = pytest.importorskip("datasets", exc_type=ImportError)
    table = datasets.Dataset.from_dict(
        {"x": [[i, i + 1] for i in range(8)], "s": [f"s{i}" for i in range(8)]}
    ).with_format(layout)
    want = epochs("torch", table, batch_size=size)
    watch.iterators.clear()
    assert epochs("minato", table, batch_size=size) == want
    assert watch.all_ours()


def test_datasets_streams(watch: Watch) -> None:
    datasets = pytest.importorskip("datasets", exc_type=ImportError)
    from datasets.distributed import split_dataset_by_node

    rows = datasets.Dataset.from_dict({"y": list(range(20))}).to_iterable_dataset(num_shards=4)
    for stream in (
        rows,
        rows.with_format("torch"),
        rows.shuffle(seed=3, buffer_size=5),
        rows.map(lambda row: {"z": 2 * row["y"]}).filter(lambda row: row["y"] % 3 == 0),
        split_dataset_by_node(rows, rank=1, world_size=2),
    ):
        want = epochs("torch", stream, batch_size=3, persistent_workers=True)
        watch.iterators.clear()
        assert epochs("minato", stream, batch_size=3, persistent_workers=True) == want
        assert watch.all_ours()


def shards(folder: Path) -> str:
    """Four, of five numbers each."""
    for shard in range(4):
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            for i in range(5):
                data = str(5 * shard + i).encode()
                entry = tarfile.TarInfo(f"{shard}-{i}.cls")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
    return str(folder / "{0..3}.tar")


def test_webdataset(watch: Watch, tmp_path: Path) -> None:
    wds = pytest.importorskip("webdataset", exc_type=ImportError)
    given = shards(tmp_path)

    def run(kind: str) -> list[Any]:
        stream = wds.WebDataset(given, shardshuffle=False).decode().to_tuple("cls").batched(2)
        return epochs(kind, stream, batch_size=None)

    want = run("torch")
    watch.iterators.clear()
    assert run("minato") == want
    assert watch.all_ours()


def test_webdatasets_own_loader(watch: Watch, tmp_path: Path) -> None:
    wds = pytest.importorskip("webdataset", exc_type=ImportError)
    given = shards(tmp_path)

    def run() -> list[Any]:
        stream = wds.WebDataset(given, shardshuffle=False).decode().to_tuple("cls").batched(2)
        loader = wds.WebLoader(stream, batch_size=None, num_workers=2)
        return [plain(batch) for _epoch in range(2) for batch in loader]

    same_when_patched(run, watch)


class Litdata:
    @staticmethod
    def write(folder: str) -> None:
        from litdata.streaming.writer import BinaryWriter

        writer = BinaryWriter(folder, chunk_size=4)
        for i in range(24):
            writer[i] = {"x": i}
        writer.done()
        writer.merge()

    @staticmethod
    def dataset(folder: str) -> Any:
        import litdata

        return litdata.StreamingDataset(folder, shuffle=True, seed=3, drop_last=False)


def stand_in_for_torchvision() -> None:
    """Streaming imports torchvision for datasets of images alone, which are not used here."""
    import importlib
    import sys
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    try:
        importlib.import_module("torchvision")
        return
    except (ImportError, RuntimeError):  # the latter: built for another torch
        pytest.importorskip("transformers", exc_type=ImportError)  # which must see that it is not
    names = ("", ".datasets", ".transforms", ".transforms.functional")
    for name in names:
        module = ModuleType(f"torchvision{name}")
        module.__spec__ = ModuleSpec(module.__name__, None)
        module.__dict__.update(VisionDataset=type("VisionDataset", (), {}), to_tensor=None)
        sys.modules[module.__name__] = module


class Streaming:
    @staticmethod
    def write(folder: str) -> None:
        stand_in_for_torchvision()
        from streaming import MDSWriter

        with MDSWriter(out=folder, columns={"x": "int"}, size_limit=200) as writer:
            for i in range(24):
                writer.write({"x": i})

    @staticmethod
    def dataset(folder: str) -> Any:
        stand_in_for_torchvision()
        from streaming import StreamingDataset

        return StreamingDataset(local=folder, shuffle=True, shuffle_seed=3, batch_size=4)

    @staticmethod
    def loader(folder: str) -> Any:
        stand_in_for_torchvision()
        from streaming import StreamingDataLoader

        return StreamingDataLoader(Streaming.dataset(folder), batch_size=4, num_workers=2)


def test_litdata(watch: Watch, tmp_path: Path) -> None:
    pytest.importorskip("litdata", exc_type=ImportError)
    Litdata.write(str(tmp_path))
    for persistent in (False, True):
        options: dict[str, Any] = dict(batch_size=4, persistent_workers=persistent)
        want = epochs("torch", Litdata.dataset(str(tmp_path)), **options)
        watch.iterators.clear()
        assert epochs("minato", Litdata.dataset(str(tmp_path)), **options) == want
        assert watch.all_ours()


#: Makes shards, then Streaming's own loader: two epochs, and one that is left in the middle and
#: resumed from the library's own state.
OWN_LOADER = """
import minato
from tests.integrations.test_data_libraries import Streaming
if PATCH:
    minato.patch_torch()

def made(folder):
    return Streaming.loader(folder)

if __name__ == "__main__":
    Streaming.write(FOLDER)
    whole = made(FOLDER)
    makes, iterators = type(whole)._get_iterator, []
    type(whole)._get_iterator = lambda self: iterators.append(makes(self)) or iterators[-1]
    epochs = [[batch["x"].tolist() for batch in whole] for _ in range(2)]
    assert all(type(it).__module__.startswith("minato") == PATCH for it in iterators)
    iterators.clear()
    del whole
    first, part = made(FOLDER), []
    for batch in first:
        part.append(batch["x"].tolist())
        if len(part) == 3:
            state = first.state_dict()
            break
    del first
    second = made(FOLDER)
    second.load_state_dict(state)
    part += [batch["x"].tolist() for batch in second]
    assert part == epochs[0], (part, epochs)
    print(epochs)
"""


def test_streamings_own_loader(tmp_path: Path) -> None:
    """It derives from torch's class and resumes from its own state."""
    if importlib.util.find_spec("streaming") is None:
        pytest.importorskip("streaming", exc_type=ImportError)
    torchs, ours = (
        printed(
            f"FOLDER, PATCH = {str(tmp_path / str(patch))!r}, {patch}\n{OWN_LOADER}",
            TMPDIR=str(tmp_path),  # Streaming leaves files for locks there
        )
        for patch in (False, True)
    )
    assert ours == torchs


def test_skorch(watch: Watch) -> None:
    skorch = pytest.importorskip("skorch", exc_type=ImportError)
    points = np.stack([Points()[i][0].numpy() for i in range(24)])
    labels = np.stack([Points()[i][1].numpy() for i in range(24)])

    def fit(kind: str) -> torch.Tensor:
        torch.manual_seed(0)
        net = skorch.NeuralNetRegressor(
            model(), max_epochs=2, batch_size=4, lr=0.1, verbose=0,
            iterator_train=KINDS[kind], iterator_train__num_workers=2,
            iterator_train__shuffle=True, iterator_valid=KINDS[kind],
        )  # fmt: skip
        net.fit(points, labels)
        return weights(net.module_)

    want = fit("torch")
    watch.iterators.clear()
    assert torch.equal(fit("minato"), want)
    assert watch.all_ours()
