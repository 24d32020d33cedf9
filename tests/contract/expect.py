"""The one table of behaviours in which minato differs from torch on purpose.

Every other test in this folder expects the same of all loaders. Columns: torch's own
class, minato with ``scheduling="static"``, minato as it comes.
"""

from __future__ import annotations

from typing import Any

TABLE: dict[str, tuple[Any, Any, Any]] = {
    # A StopIteration that escapes __getitem__ silently ends torch's for loop, so the
    # rest of the epoch is lost.
    "stop_iteration_in_getitem": ("epoch ends", "RuntimeError", "RuntimeError"),
    # torch rebuilds the exception from its text; the object, its args and its cause
    # are lost.
    "error_keeps_cause": (False, True, True),
    "error_names_index": (False, True, True),
    # torch pickles in a feeder thread, which prints a traceback and drops the batch:
    # the consumer then waits forever.
    "unpicklable_batch": ("hangs", "error", "error"),
    # torch sends the exception's class, and a class that cannot be pickled is lost in
    # the same way.
    "exception_of_local_class": ("hangs", "error", "error"),
    # Streams belong to a worker in torch; a sample's draws then depend on which worker
    # ran it.
    "draws_depend_on_num_workers": (True, True, False),
    # A worker killed once: the balanced scheduler starts another and repeats its task.
    "worker_killed_once": ("error", "error", "recovers"),
    "death_error": ("RuntimeError", "RuntimeError", "WorkerLost"),
    # torch's workers check for their parent every 5 s between samples, and now and then
    # one stays for good.
    "workers_end_with_a_killed_parent": (False, True, True),
    # torch joins each stuck worker for 5 s before it is terminated.
    "stuck_workers_shutdown_bound_s": (None, 60.0, 60.0),
    # When a torch worker sends a tensor, it moves the tensor into shared memory in place, so
    # writing into an unbatched sample writes into the worker's dataset.
    "unbatched_tensors_alias_the_dataset": (True, False, False),
    # torch does not promise for every collate_fn that tensors of a batch own their storage
    # and that the storage is no larger than their contents.
    "every_tensor_owns_its_storage": (False, True, True),
}

COLUMNS = {"torch": 0, "minato-static": 1, "minato": 2}


def expected(loader: str, row: str) -> Any:
    """The entry of ``row`` for the loader called ``loader``."""
    return TABLE[row][COLUMNS[loader]]
