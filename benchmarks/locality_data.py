"""Datasets that keep the last opened file, for ``locality.py``.

Samples are (index, whether a file had to be opened for it, data). Files are made on the spot,
once per folder, from a fixed seed. ``of`` has the group of each index.
"""

from __future__ import annotations

import gzip
import io
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

Sample = tuple[int, bool, torch.Tensor]


class Kept:
    """The groups that were opened last; ``opened``: whether the current one had to be opened."""

    def __init__(self, read: Callable[[int], Any], most: int = 1) -> None:
        self.read, self.most, self.opened = read, most, False
        self.groups: OrderedDict[int, Any] = OrderedDict()

    def __call__(self, number: int) -> Any:
        self.opened = number not in self.groups
        if self.opened:
            if len(self.groups) == self.most:
                self.groups.popitem(last=False)
            self.groups[number] = self.read(number)
        self.groups.move_to_end(number)
        return self.groups[number]


class Grouped(Dataset):
    """Base class; ``begin[g]`` is the first index of group g."""

    def __init__(self, sizes: Any, keeps: int = 1) -> None:
        self.of = np.repeat(np.arange(len(sizes)), sizes)
        self.begin = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        self.groups = len(sizes)
        self.kept = Kept(self.open, keeps)

    def __len__(self) -> int:
        return len(self.of)

    def group_of(self, index: int) -> int:
        return int(self.of[index])

    def open(self, group: int) -> Any:
        raise NotImplementedError

    def make(self, opened: Any, index: int) -> torch.Tensor:
        """A sample from its group, which is open."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> Sample:
        data = self.make(self.kept(self.group_of(index)), index)
        return index, self.kept.opened, data


def once(path: Path, write: Callable[[Path], Any]) -> Path:
    """Makes a file if it does not exist yet."""
    if not path.exists():
        write(path)
    return path


# ---- sleeping ----------------------------------------------------------------------------


class Sleeping(Grouped):
    """Opening and making take a fixed time, whatever else runs."""

    def __init__(self, sizes: list[int], open_s: float, each_s: float, varied: bool = False,
                 keeps: int = 1) -> None:
        super().__init__(sizes, keeps)
        rng = np.random.default_rng(0)
        scale = rng.lognormal(0.0, 0.8, len(sizes)) if varied else np.ones(len(sizes))
        self.open_s, self.each_s = open_s * scale, each_s

    def seconds(self) -> float:
        """For all samples, each group opened once."""
        return float(self.open_s.sum() + len(self.of) * self.each_s)

    def open(self, group: int) -> None:
        time.sleep(self.open_s[group])

    def make(self, opened: None, index: int) -> torch.Tensor:
        time.sleep(self.each_s)
        return torch.tensor([index])


# ---- files -------------------------------------------------------------------------------


class Parquet(Grouped):
    """Rows of 48 numbers; the last row group that was read is kept as an array."""

    def __init__(self, folder: Path, sizes: list[int], keeps: int = 1) -> None:
        super().__init__(sizes, keeps)
        name = f"rows-{len(sizes)}-{sizes[0]}-{sizes[-1]}.parquet"
        self.path = once(folder / name, self.write)
        self.file: Any = None

    def write(self, path: Path) -> None:
        import pyarrow
        import pyarrow.parquet as parquet

        rng = np.random.default_rng(0)
        columns = {f"c{k}": rng.normal(size=len(self.of)) for k in range(48)}
        table = pyarrow.table(columns)
        with parquet.ParquetWriter(path, table.schema, compression="zstd") as writer:
            for begin, rows in zip(self.begin, np.bincount(self.of), strict=True):
                writer.write_table(table.slice(begin, rows), row_group_size=int(rows))

    def open(self, group: int) -> np.ndarray:
        if self.file is None:
            import pyarrow.parquet

            self.file = pyarrow.parquet.ParquetFile(self.path)
        table = self.file.read_row_group(group, use_threads=False)
        return np.stack([column.to_numpy() for column in table.columns], axis=1)

    def make(self, opened: np.ndarray, index: int) -> torch.Tensor:
        return torch.from_numpy(opened[index - self.begin[self.of[index]]].copy())


class HuggingFace(Grouped):
    """The same numbers through `datasets`, which maps an uncompressed file: there is nothing to
    open, so locality makes no difference."""

    def __init__(self, folder: Path, sizes: list[int]) -> None:
        super().__init__(sizes)
        import datasets

        datasets.disable_progress_bars()
        path = Parquet(folder, sizes).path
        rows = datasets.Dataset.from_parquet(str(path), cache_dir=str(folder / "cache"))
        self.rows = rows.with_format("torch")

    def __getitem__(self, index: int) -> Sample:
        return index, False, torch.stack(list(self.rows[index].values()))


class Hdf5(Grouped):
    """Images in compressed chunks, of which the library caches the last one."""

    SIZE = 32

    def __init__(self, folder: Path, chunks: int) -> None:
        super().__init__([self.SIZE] * chunks)
        self.path = once(folder / f"images-{chunks}.h5", self.write)
        self.file: Any = None

    def write(self, path: Path) -> None:
        import h5py

        rng = np.random.default_rng(0)
        images = rng.integers(0, 64, (len(self.of), 64, 64, 3), dtype=np.uint8)
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=images, chunks=(self.SIZE, 64, 64, 3),
                                compression="gzip")  # fmt: skip

    def open(self, group: int) -> Any:
        """The library reads the chunk when it is asked for the sample."""
        if self.file is None:
            import h5py

            self.file = h5py.File(self.path, "r", rdcc_nbytes=self.SIZE * 64 * 64 * 3)
        return self.file["x"]

    def make(self, opened: Any, index: int) -> torch.Tensor:
        return torch.from_numpy(opened[index]).permute(2, 0, 1).float() / 255


class Reader:
    """One video, read forwards; other frames are sought from their key frame."""

    def __init__(self, path: Path) -> None:
        import av

        self.container = av.open(str(path))
        self.stream = self.container.streams.video[0]
        self.stream.thread_type = "NONE"
        self.frames = self.container.decode(self.stream)
        self.next = 0

    def frame(self, number: int) -> tuple[bool, Any]:
        seeks = number != self.next
        each = int(1 / (self.stream.average_rate * self.stream.time_base))
        if seeks:
            self.container.seek(number * each, stream=self.stream)
            self.frames = self.container.decode(self.stream)
        frame = next(f for f in self.frames if f.pts >= number * each)
        self.next = number + 1
        return seeks, frame


class Videos(Grouped):
    """Frames of short videos; the last one stays open, with its decoder's position."""

    def __init__(self, folder: Path, sizes: list[int]) -> None:
        super().__init__(sizes)
        self.paths = [once(folder / f"video-{group}-{frames}.mp4", self.write)
                      for group, frames in enumerate(sizes)]  # fmt: skip

    def write(self, path: Path) -> None:
        import av

        group, frames = map(int, path.stem.split("-")[1:])
        scene = np.random.default_rng(group).integers(0, 256, (30, 40, 3), dtype=np.uint8)
        scene = scene.repeat(12, 0).repeat(12, 1)
        with av.open(str(path), "w") as container:
            stream = container.add_stream("mpeg4", rate=24)
            stream.width, stream.height, stream.pix_fmt = 320, 240, "yuv420p"
            stream.gop_size = 16
            for n in range(frames):
                picture = np.ascontiguousarray(scene[n : n + 240, 2 * n : 2 * n + 320])
                frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
                container.mux(stream.encode(frame))
            container.mux(stream.encode())

    def open(self, group: int) -> Reader:
        return Reader(self.paths[group])

    def __getitem__(self, index: int) -> Sample:
        reader = self.kept(self.group_of(index))
        opened = self.kept.opened
        seeks, frame = reader.frame(index - int(self.begin[self.of[index]]))
        picture = torch.from_numpy(frame.to_ndarray(format="rgb24")[::2, ::2].copy())
        return index, opened or seeks, picture.permute(2, 0, 1).float() / 255


class Patches(Grouped):
    """Random crops of compressed volumes; the last one stays in memory."""

    def __init__(self, folder: Path, volumes: int, crops: int) -> None:
        from minato import ops

        super().__init__([crops] * volumes)
        self.paths = [once(folder / f"volume-{v}.npy.gz", self.write) for v in range(volumes)]
        self.pipeline = ops.Pipeline([ops.RandCrop((32, 32, 32)), ops.RandFlip(),
                                      ops.RandScaleIntensity(), ops.RandGaussianNoise()])  # fmt: skip

    def write(self, path: Path) -> None:
        rng = np.random.default_rng(int(path.name.split("-")[1].split(".")[0]))
        coarse = rng.normal(size=(16, 24, 24)).astype(np.float32)
        volume = np.round(coarse.repeat(4, 0).repeat(4, 1).repeat(4, 2), 2)
        with gzip.open(path, "wb", compresslevel=4) as file:
            np.save(file, volume[None])

    def open(self, group: int) -> np.ndarray:
        return np.load(io.BytesIO(gzip.decompress(self.paths[group].read_bytes())))

    def make(self, opened: np.ndarray, index: int) -> torch.Tensor:
        return torch.from_numpy(self.pipeline(opened, key=index)[0])


class Decoded(Grouped):
    """JPEG pictures; decoded ones are kept in a dict for good."""

    def __init__(self, folder: Path, count: int) -> None:
        super().__init__([1] * count, keeps=count)
        self.folder = folder / f"jpegs-{count}"
        once(self.folder, self.write)

    def write(self, path: Path) -> None:
        from PIL import Image

        path.mkdir()
        for n in range(len(self.of)):
            small = np.random.default_rng(n).integers(0, 256, (40, 40, 3), dtype=np.uint8)
            picture = small.repeat(12, 0).repeat(12, 1)
            Image.fromarray(picture).save(path / f"{n}.jpg", quality=90)

    def open(self, group: int) -> torch.Tensor:
        from PIL import Image

        with Image.open(self.folder / f"{group}.jpg") as file:
            picture = file.convert("RGB").resize((96, 96), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1)

    def make(self, opened: torch.Tensor, index: int) -> torch.Tensor:
        return opened.float() / 255


# ---- orders ------------------------------------------------------------------------------


class GroupsShuffled(Sampler):
    """Groups in another order each epoch, their samples in order; or the samples of ``mixed``
    groups at a time shuffled, as a buffer does."""

    def __init__(self, dataset: Grouped, mixed: int = 1) -> None:
        self.of, self.begin, self.mixed, self.epoch = dataset.of, dataset.begin, mixed, 0

    def __len__(self) -> int:
        return len(self.of)

    def __iter__(self) -> Iterator[int]:
        rng = np.random.default_rng(self.epoch)
        self.epoch += 1
        ends = [*self.begin[1:], len(self.of)]
        order = rng.permutation(len(self.begin))
        for at in range(0, len(order), self.mixed):
            runs = [np.arange(self.begin[g], ends[g]) for g in order[at : at + self.mixed]]
            indices = np.concatenate(runs)
            yield from (rng.permutation(indices) if self.mixed > 1 else indices).tolist()


class AllShuffled(GroupsShuffled):
    def __init__(self, dataset: Grouped) -> None:
        super().__init__(dataset, mixed=len(dataset.begin))


class InOrder(GroupsShuffled):
    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.of)))
