"""Types of the optional extension module; see csrc/torch/mn_torch.cpp."""

from typing import Final

torch_version: Final[str]

plain_tensor: object  # a capsule, for bind_torch of minato._core

