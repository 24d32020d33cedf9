"""What tests of resuming share: orders, loaders, states as a program saves them, and the rest."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, RandomSampler, Sampler

import minato

N, SIZE = 40, 4


def seed(value: int) -> None:
    """Seeds every generator of the program."""
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    """Index, epoch, and draws from every global generator and its own. Some samples are unreadable."""

    def __init__(self, n: int, bad: frozenset[int] = frozenset()) -> None:
        self.n, self.bad, self.epoch, self.rng = n, bad, -1, np.random.default_rng(7)

    def __len__(self) -> int:
        return self.n

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.bad:
            raise LookupError(f"sample {index}")
        draws = [random.random(), np.random.rand(), float(torch.rand(())), self.rng.random()]
        return torch.tensor([index, self.epoch, *draws], dtype=torch.float64)


class Stream(IterableDataset):
    """Numbers of this worker's share, with a draw, and the epoch that was set."""

    def __init__(self, n: int = N) -> None:
        self.n = n
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        first, step = (info.id, info.num_workers) if info is not None else (0, 1)
        for i in range(first, self.n, step):
            yield torch.tensor([i, self.epoch, float(torch.rand(()))], dtype=torch.float64)


PRIVATE: dict[str, Any] = {
    "random.Random": lambda: random.Random(4),
    "RandomState": lambda: np.random.RandomState(4),
    "PCG64": lambda: np.random.default_rng(4),
    "MT19937": lambda: np.random.Generator(np.random.MT19937(4)),
    "Philox": lambda: np.random.Generator(np.random.Philox(4)),
    "SFC64": lambda: np.random.Generator(np.random.SFC64(4)),
    "torch.Generator": lambda: torch.Generator().manual_seed(4),
    "random": lambda: random,
    "numpy.random": lambda: np.random,
    "torch": lambda: None,
}


def shuffled(items: list[Any], rng: Any) -> list[Any]:
    if rng is None or isinstance(rng, torch.Generator):
        return [items[i] for i in torch.randperm(len(items), generator=rng).tolist()]
    order = list(range(len(items)))
    rng.shuffle(order)
    return [items[i] for i in order]


class Shuffles(Sampler):
    """Of indices, or of batches of them; draws at the first next(), or at once in iter()."""

    def __init__(self, rng: Any, batches: bool, at_once: bool) -> None:
        self.dice, self.at_once = rng, at_once
        self.items: list[Any] = list(range(N))
        if batches:
            self.items = [list(range(i, min(N, i + SIZE))) for i in range(0, N, SIZE)]

    def __len__(self) -> int:
        return len(self.items)

    def lazily(self) -> Iterator[Any]:
        yield from shuffled(self.items, self.dice)

    def __iter__(self) -> Iterator[Any]:
        return iter(shuffled(self.items, self.dice)) if self.at_once else self.lazily()


class Within:
    """Gives what samplers give that it holds, as accelerate's BatchSamplerShard does."""

    def __init__(self, base: Any, many: bool) -> None:
        self.me = self
        self.base = [[], base] if many else base

    def bases(self) -> list[Any]:
        return self.base if isinstance(self.base, list) else [self.base]

    def __len__(self) -> int:
        return sum(map(len, self.bases()))

    def __iter__(self) -> Iterator[Any]:
        for base in self.bases():
            yield from base


def with_draws(samples: list[torch.Tensor]) -> torch.Tensor:
    """A collate_fn that is random, too."""
    batch = torch.stack(samples)
    return batch + random.random() * torch.tensor([0, 0, 1, 1, 1, 1]) + torch.rand(1) * (
        torch.arange(6) > 1
    )


def make(order: str, *, bad: tuple[int, ...] = (), data: Any = None, **kw: Any) -> Any:
    """A loader by the name of its order, of noisy samples if there is no other data; none of its
    generators has been used, so that a state must restore them."""
    kw = {"batch_size": SIZE, "num_workers": 2, **kw}
    if order == "stream":
        return minato.DataLoader(Stream(), **kw)
    data = Noisy(N, frozenset(bad)) if data is None else data
    what, _, rng = order.partition(" of ")
    if what in ("shuffle", "two generators"):
        kw["generator"] = torch.Generator() if rng or what != "shuffle" else None
    if what == "shuffle":
        kw["shuffle"] = True
    elif what == "two generators":
        kw["sampler"] = RandomSampler(data, replacement=True, generator=torch.Generator())
    elif what == "replacement":
        kw["sampler"] = RandomSampler(data, replacement=True, num_samples=N + 3)
    elif what == "distributed":
        kw["sampler"] = DistributedSampler(data, 2, 1, seed=3)
    elif what == "plain batches":
        del kw["batch_size"]
        kw["batch_sampler"] = BatchSampler(RandomSampler(data), SIZE, True)
    elif what != "sequence":
        batches = "batches" in what
        generator = PRIVATE[rng]()
        if "with the loader" in what:
            kw["generator"] = generator
        sampler: Any = Shuffles(generator, batches, "at once" in what)
        if "within" in what:
            sampler = Within(Within(sampler, "many" in what), False)
        if batches:
            del kw["batch_size"]
        elif "alone" in what:
            kw["batch_size"] = None
        kw["batch_sampler" if batches else "sampler"] = sampler
    return minato.DataLoader(data, **kw)


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


def lists(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


def take(iterator: Any, count: int) -> list[Any]:
    return [next(iterator).tolist() for _ in range(count)]


def check_rest(first: Any, again: Any, taken: int, epochs: int = 0, later: int = 0) -> list[Any]:
    """A loader gives the rest of an epoch of another one, and the same epochs after it.

    The first loader is interrupted after some epochs and batches. Returns all batches of that
    epoch: those before the interruption, and the rest.
    """
    for _ in range(epochs):
        lists(first)
    iterator = iter(first)
    begun = take(iterator, taken)
    state = through_json(first.state_dict())
    rest = lists(iterator)
    after = [lists(first) for _ in range(later)]
    again.load_state_dict(state)
    assert lists(again) == rest
    assert [lists(again) for _ in range(later)] == after
    return begun + rest


def pull(it: Any, count: int | None = None) -> list[Any]:
    """This many batches, or all; failed ones as the name of their error's type."""
    out: list[Any] = []
    while count is None or len(out) < count:
        try:
            out.append(next(it).tolist())
        except StopIteration:
            break
        except LookupError:
            out.append("LookupError")
    return out


def indices(batches: list[Any]) -> list[int]:
    made = [b for b in batches if isinstance(b, list)]
    return [int(row[0]) for b in made for row in (b if isinstance(b[0], list) else [b])]
