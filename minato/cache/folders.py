"""torchvision's ImageFolder and DatasetFolder through a cache: what the loader makes of a file is kept,
and the transforms run every time."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..dataset_calls import attribute
from .depends import Depends, Found, Unknown, version
from .readers import NOTHING_ELSE, MadeOf, Reader, size_of

if TYPE_CHECKING:
    from .cache import Cache


def _module() -> Any:
    """torchvision's, if the program has imported it."""
    return sys.modules.get("torchvision.datasets.folder")


def is_folder(dataset: Any) -> bool:
    """Whether a dataset makes its samples as torchvision's DatasetFolder does, from more than paths."""
    kind = getattr(_module(), "DatasetFolder", None)
    if kind is None or not isinstance(dataset, kind) or dataset.loader is str:
        return False
    return type(dataset).__getitem__ is kind.__getitem__


def _bytes(dataset: Any, path: str) -> bytes:
    return Path(path).read_bytes()


def _loaded(dataset: Any, path: str) -> Any:
    return dataset.loader(path)


class Folder(Reader):
    """A DatasetFolder: ``loader(path)`` is the deterministic part."""

    def __init__(self, dataset: Any, cache: Cache, form: str | None, made_of: MadeOf) -> None:
        super().__init__(dataset, cache, form, made_of)
        path = lambda _dataset, path: path  # noqa: E731
        self._raw = self.memoized(_bytes, "loader", path, path, b"bytes")
        self._decoded = self.memoized(_loaded, "loader", path, path, made_of[1].digest)

    @classmethod
    def forms_of(cls, dataset: Any) -> tuple[str, ...]:
        # A loader of the program's takes a path; torchvision's own is a function of the bytes.
        by_pil = dataset.loader is _module().default_loader and _backend() == "PIL"
        return ("decoded", "encoded") if by_pil else ("decoded",)

    @classmethod
    def identity(cls, dataset: Any) -> MadeOf:
        depends = Depends(attribute(dataset, "cache_version") is not None)
        pil = getattr(sys.modules.get("PIL.ImageFile"), "LOAD_TRUNCATED_IMAGES", False)
        try:
            depends.add("loader", dataset.loader)
            depends.add("set up", (attribute(dataset, "cache_version"), _backend(), version("PIL"), pil))
            digest = depends.digest()
        except Unknown as unknown:
            raise TypeError(
                f"cache= cannot compare the loader of {type(dataset).__name__}: it uses {unknown}. Give the "
                "dataset an attribute cache_version, and change it whenever that object changes what "
                "the loader returns"
            ) from None
        return NOTHING_ELSE, Found(digest, "loader", depends.parts, depends.uncompared)

    def sizes_of(self, index: int) -> tuple[int | None, int | None]:
        path, _target = self.dataset.samples[index]
        return os.path.getsize(path), size_of(self.dataset.loader(path))

    def key_words(self) -> Iterator[int]:
        memoized = self._raw if self.form() == "encoded" else self._decoded
        return memoized.key_words((self.dataset, path) for path, _target in self.dataset.samples)

    def __getitem__(self, index: Any) -> Any:
        dataset = self.dataset
        path, target = dataset.samples[index]
        if self.form() == "encoded":
            from PIL import Image

            raw = self._raw.call((dataset, path), {}, None)
            sample = Image.open(io.BytesIO(raw)).convert("RGB")
        else:
            sample = self._decoded.call((dataset, path), {}, None)
        if dataset.transform is not None:
            sample = dataset.transform(sample)
        if dataset.target_transform is not None:
            target = dataset.target_transform(target)
        return sample, target


def _backend() -> str:
    torchvision = sys.modules.get("torchvision")
    return str(getattr(torchvision, "get_image_backend", lambda: "PIL")())
