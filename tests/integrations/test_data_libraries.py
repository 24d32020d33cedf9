"""Datasets and loaders of other libraries: what they give does not depend on the loader."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from .conftest import KINDS, Points, Watch, model, weights


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


def test_webdataset(watch: Watch, tmp_path: Path) -> None:
    wds = pytest.importorskip("webdataset", exc_type=ImportError)
    for shard in range(4):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as archive:
            for i in range(5):
                data = str(5 * shard + i).encode()
                entry = tarfile.TarInfo(f"{shard}-{i}.cls")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
    shards = str(tmp_path / "{0..3}.tar")

    def run(kind: str) -> list[Any]:
        stream = wds.WebDataset(shards, shardshuffle=False).decode().to_tuple("cls").batched(2)
        return epochs(kind, stream, batch_size=None)

    want = run("torch")
    watch.iterators.clear()
    assert run("minato") == want
    assert watch.all_ours()


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
