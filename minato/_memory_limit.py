"""What a loader that names no memory_limit may take of the machine's memory."""

from __future__ import annotations

import os
from collections.abc import Mapping

#: how many processes like this one a launcher has started on this machine: torchrun and what
#: does as it does, Open MPI, the MPIs with Hydra, and Slurm
_RANKS = (
    "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
)  # fmt: skip
_MOST_RANKS = 1024
#: bytes of memory for each byte of page tables that a process needs to see them
_MAPPED = 512


def ranks_here(environ: Mapping[str, str] = os.environ) -> int:
    """How many processes share this machine's memory with this one, it included; 1 where no
    launcher says so in numbers that make sense."""
    for name in _RANKS:
        text = environ.get(name, "").strip()
        if text.isdecimal() and 1 <= int(text) <= _MOST_RANKS:
            return int(text)
    return 1


def fair_memory(workers: int) -> int:
    """Bytes for a loader that names no memory_limit: this rank's share of half of what is
    available, less the page tables of its processes. 0 where nothing is known of it."""
    from . import _core  # not at import: there is none where the engine cannot be

    share: int = _core.machine()["memory_available"] // 2 // ranks_here()
    return share * _MAPPED // (_MAPPED + workers + 1)
