"""What a dataset predicts that its samples will cost: ``cost_hint(index, *, seed, epoch)``."""

from __future__ import annotations

import inspect
import math
import warnings
from array import array
from collections.abc import Callable
from typing import Any

from .._core import Seeder
from ..dataset_calls import attribute, by_part, offered
from ..sampler_indices import each_index, whole_number
from ..seeding.draws import sample_seed
from ..seeding.find_generators import find_all
from ..time_share import TimeShare
from ..workers.fetching import seed_place
from .across_iterators import Memo
from .file_sizes import FileSizes

#: Hints take at most this share of the trainer's time, beyond what the first ones may take.
SHARE, FIRST_NS = 0.01, 50_000_000

#: (index, position of the sample, the epoch that set_epoch() named) -> hint
Ask = Callable[[int, int, "int | None"], Any]


def hint_method(dataset: Any) -> Callable[..., Any] | None:
    """The ``cost_hint`` of a dataset, or of the one to which its ``__getattr__`` delegates."""
    own = offered(dataset, "cost_hint")
    if own is not None:
        return own
    method = attribute(dataset, "cost_hint")
    inner = getattr(method, "__self__", None)
    return None if inner is None else offered(inner, "cost_hint")


def takes(method: Callable[..., Any]) -> tuple[bool, bool]:
    """Whether it takes ``seed=`` and ``epoch=``."""
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError):
        return False, False
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return True, True
    by_name = {n for n, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    return "seed" in by_name, "epoch" in by_name


class CostHints:
    """Asks the dataset for hints, a batch at a time, while that takes little time.

    A hint that fails, or is not a finite number of at least 0, is reported once. The loader's
    iterators do not ask again then, and costs are predicted from history. So they are for a dataset
    that gives no hints, and from the bytes of its files, if it lists any.
    """

    def __init__(
        self, dataset: Any, collate_fn: Any, memo: Memo, *, ranks: Any, seeds: bool
    ) -> None:
        self._memo = memo
        self._seeder: Seeder | None = None
        self._dataset, self._collate_fn, self._ranks, self._seeds = dataset, collate_fn, ranks, seeds
        self._hooks: dict[int, int] | None = None
        self._place = 0, 0  # base seed and epoch of the batch that is asked for
        self._ask = None if memo.hints_refused else by_part(dataset, self._of, None)
        self._sizes = None if self.given else FileSizes(dataset, memo)
        self._time = TimeShare(SHARE, first_ns=FIRST_NS)

    @property
    def given(self) -> bool:
        """Whether the dataset gives hints."""
        return self._ask is not None

    @property
    def predicts(self) -> bool:
        """Whether there is anything to ask for a batch: hints, or bytes of files."""
        return self.given or (self._sizes is not None and self._sizes.known)

    def _of(self, dataset: Any) -> Ask | None:
        """How to ask a dataset."""
        method = hint_method(dataset)
        if method is None:
            return None
        seeded, knows_epoch = takes(method)
        seeded = seeded and self._seeds
        hook = self._hook_of(getattr(method, "__self__", dataset)) if seeded else 0

        def ask(index: int, place: int, epoch: int | None) -> Any:
            more: dict[str, Any] = {}
            if seeded:
                more["seed"] = self._seed(place, hook)
            if knows_epoch:
                more["epoch"] = epoch
            return method(index, **more)

        return ask

    def _hook_of(self, dataset: Any) -> int:
        """Which of the ``seed_sample`` methods that workers call is this dataset's."""
        if self._hooks is None:
            hooks = find_all([self._dataset, self._collate_fn]).hooks
            self._hooks = {id(getattr(h, "__self__", None)): k for k, h in enumerate(hooks)}
        return self._hooks.get(id(dataset), 0)

    def _seed(self, place: int, hook: int) -> int:
        if self._seeder is None:
            self._seeder = Seeder._from_plans([])
            self._seeder.share(self._ranks)
        return sample_seed(*self._seeder.sample(*self._place, place, hook))

    # ---- a batch -------------------------------------------------------------------------

    def of(
        self, index: Any, base_seed: int, epoch: int, first: int, user_epoch: int | None
    ) -> bytes | None:
        """The hints of a batch, or of one sample, as float32; None where none are to be had now.

        epoch: as samples are seeded by. first: position of the batch's first sample in the epoch.
        user_epoch: what set_epoch() has told the dataset; None: nothing.
        """
        if self._ask is None or not self._time.allows():
            return None
        self._place = base_seed, epoch
        with self._time:
            return self._asked(self._ask, index, first, user_epoch)

    def without(self, index: Any) -> None:
        """Prepares a batch, or a sample, of a dataset that gives no hints: looks up its bytes."""
        if self._sizes is not None:
            self._sizes.look_up(index)

    def _asked(self, ask: Ask, index: Any, first: int, user_epoch: int | None) -> bytes | None:
        hints = array("f")
        for k, one in enumerate(each_index(index)):
            number = whole_number(one)
            if not 0 <= number < self._memo.size:
                return None
            try:
                hint = ask(number, seed_place(first, k, one), user_epoch)
                if hint is None:  # of this sample, or part of the dataset, nothing is known
                    return None
                hints.append(self._checked(float(hint)))
            except Exception as error:
                self._refuse(one, error)
                return None
        return hints.tobytes()

    @staticmethod
    def _checked(hint: float) -> float:
        if not (math.isfinite(hint) and hint >= 0):
            raise ValueError(f"it returned {hint!r}, which is not a finite number of at least 0")
        return min(hint, 3e38)

    def _refuse(self, index: Any, error: Exception) -> None:
        self._ask, self._memo.hints_refused = None, True
        warnings.warn(
            f"cost_hint({index!r}) of {type(self._dataset).__name__} failed: "
            f"{type(error).__name__}: {error}. The loader stops calling cost_hint() and "
            "predicts from measured costs.",
            stacklevel=2,
        )
