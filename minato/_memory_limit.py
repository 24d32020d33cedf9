"""The default memory_limit: a share of the machine's available memory."""

from __future__ import annotations

import os
from collections.abc import Mapping

#: number of processes that a launcher started on this machine: torchrun and compatible launchers,
#: Open MPI, MPIs with Hydra, Slurm
_RANKS = (
    "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
)  # fmt: skip
_MOST_RANKS = 1024
#: bytes of mapped memory per byte of page tables, in each process that maps it
_MAPPED = 512


def ranks_here(environ: Mapping[str, str] = os.environ) -> int:
    """How many processes, including this one, share this machine's memory; 1 if no launcher
    sets a plausible number."""
    for name in _RANKS:
        text = environ.get(name, "").strip()
        if text.isdecimal() and 1 <= int(text) <= _MOST_RANKS:
            return int(text)
    return 1


def fair_memory(workers: int) -> int:
    """Bytes for a loader without memory_limit; 0 if the available memory is unknown. It is this
    rank's share of half of the available memory, less the page tables of its processes."""
    from . import _core  # not at import: the engine does not exist on other systems

    share: int = _core.machine()["memory_available"] // 2 // ranks_here()
    return share * _MAPPED // (_MAPPED + workers + 1)
