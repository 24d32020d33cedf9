"""Types of the optional extension module; see csrc/torch/mn_torch.cpp."""

from typing import Final

import torch

torch_version: Final[str]

def pinned_empty_like(tensor: torch.Tensor, /) -> torch.Tensor: ...
def pin(tensor: torch.Tensor, /) -> torch.Tensor: ...
def fill(to: torch.Tensor, source: torch.Tensor, /) -> None: ...

plain_tensor: object  # a capsule, for bind_torch of minato._core

