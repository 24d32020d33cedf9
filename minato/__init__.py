"""minato: a drop-in replacement for PyTorch's DataLoader, for samples of uneven cost.

>>> from minato import DataLoader  # instead of torch.utils.data

Same arguments, same batches, same order. Workers take single samples instead of whole batches, so a
slow sample does not idle the other workers. They write samples into one recycled shared-memory
arena.
"""

import os as _os
import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

try:
    import torch as _torch_package  # noqa: F401
except ModuleNotFoundError as _error:
    if _error.name != "torch":
        raise
    raise ImportError(
        "minato needs PyTorch, which is not installed in this Python environment. "
        "Install it first, for example with: pip install torch",
        name=__name__,  # python -m minato then prints this sentence without a traceback
    ) from None

from ._not_linux import CORE as _CORE

if not _CORE and _sys.platform == "linux":
    from ._not_linux import not_built as _not_built

    raise ImportError(_not_built(_os.path.dirname(_os.path.abspath(__file__))), name=__name__)

from torch.utils.data import (
    BatchSampler, ChainDataset, ConcatDataset, Dataset, DistributedSampler, IterableDataset,
    IterDataPipe, MapDataPipe, RandomSampler, Sampler, SequentialSampler, StackDataset, Subset,
    SubsetRandomSampler, TensorDataset, WeightedRandomSampler, default_collate, default_convert,
    get_worker_info, random_split,
)  # fmt: skip

from ._version import __version__
from .cache.cache import Cache
from .elastic import ElasticSampler
from .errors import WorkerLost
from .loader import DataLoader
from .patch import patch_torch

if _CORE:
    from .determinism import check_determinism
    from .seeding.generator_states import draws
    from .transport import torch_bridge as _torch_bridge

    _torch_bridge.bind()
    _torch_bridge.watch_forks()
else:
    from ._not_linux import check_determinism, draws


if _TYPE_CHECKING:
    from . import integrations as integrations, metrics as metrics, ops as ops, remote as remote

#: modules that are imported when they are first asked for
_LATE = ("integrations", "metrics", "ops", "remote")


def __getattr__(name: str) -> _Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE})


def get_include() -> str:
    """Returns the folder with the headers for C code that includes ``minato/ops.h``.

    Use it to build your own operators and datasets, for example in setuptools:
    ``Extension(..., include_dirs=[minato.get_include()])``.
    """
    return _os.path.join(_os.path.dirname(_os.path.abspath(__file__)), "include")


__all__ = [
    "BatchSampler", "Cache", "ChainDataset", "ConcatDataset", "DataLoader", "Dataset",
    "DistributedSampler", "ElasticSampler", "IterDataPipe", "IterableDataset", "MapDataPipe",
    "RandomSampler", "Sampler", "SequentialSampler", "StackDataset", "Subset",
    "SubsetRandomSampler", "TensorDataset", "WeightedRandomSampler", "WorkerLost", "__version__",
    "check_determinism", "default_collate", "default_convert", "draws", "get_include",
    "get_worker_info", "patch_torch", "random_split",
]  # fmt: skip
