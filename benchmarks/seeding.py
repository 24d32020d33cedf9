"""The cost of seeding one sample, part by part, compared with the libraries' seed functions.

    python benchmarks/seeding.py [--rounds 60] [--calls 500]

All parts take turns within a round, so that other load on the machine affects them equally.
The table shows the median and the fastest tenth over rounds, in nanoseconds per call, less an
empty loop.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import types
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch

from minato._core import Seeder
from minato.seeding import find_generators, generator_states

Step = Callable[[int], Any]


def only(label: str) -> Step:
    """Seeding of one global generator."""
    entries = [e for e in generator_states.plan_all() if e[0] == label]
    seed = Seeder(entries).seed
    return lambda position: seed(1, 2, position)


def private(*generators: Any) -> Step:
    """Seeding of private generators alone."""
    entries = generator_states.plan_private(generators, ())
    seed = Seeder(entries).seed
    return lambda position: seed(1, 2, position)


def looked_at(objects: int) -> Step:
    """The check after a sample for new generators, for objects of eight attributes."""
    dataset = [types.SimpleNamespace(**dict.fromkeys("abcdefgh", (1,))) for _ in range(objects)]
    dicts = [vars(one) for one in dataset]
    near = find_generators.WATCHED // 8
    seeder = Seeder([])
    seeder.watch(dicts[:near], dicts[near:], lambda of_epoch: None, 0, ())
    return lambda position: seeder.renew()


def seed_functions(position: int) -> None:
    torch.manual_seed(position)
    random.seed(position)
    np.random.seed(position & 0xFFFFFFFF)


def parts() -> dict[str, Step]:
    seed_all = Seeder(generator_states.plan_all()).seed
    with mock.patch.multiple(
        generator_states, _random_layout=lambda: None, _random_state_layout=lambda kind: None,
        _torch_plan=lambda g, seed: ("call", partial(generator_states._set_torch, g), 624),
    ):  # fmt: skip
        seed_api = Seeder(generator_states.plan_all()).seed
    nothing = Seeder([]).seed
    return {
        "call without generators": lambda p: nothing(1, 2, p),
        "all three globals": lambda p: seed_all(1, 2, p),
        "  random": only("random"),
        "  numpy": only("numpy"),
        "  torch": only("torch"),
        "all three, public setstate": lambda p: seed_api(1, 2, p),
        "private Generator(PCG64)": private(np.random.default_rng(1)),
        "private Generator(Philox)": private(np.random.Generator(np.random.Philox(1))),
        "private RandomState": private(np.random.RandomState(1)),
        "private random.Random": private(random.Random(1)),
        "private torch.Generator": private(torch.Generator()),
        "look at 64 attributes": looked_at(8),
        "look at as many as are watched": looked_at(find_generators.WATCHED // 8),
        "and as many objects as are counted": looked_at(
            find_generators.WATCHED // 8 + find_generators.COUNTED
        ),
        "seed functions, all three": seed_functions,
        "  random.seed": random.seed,
        "  np.random.seed": np.random.seed,
        "  torch.manual_seed": torch.manual_seed,
        "  default_generator.manual_seed": torch.default_generator.manual_seed,
    }


def time_once(step: Step, calls: int) -> float:
    start = time.perf_counter_ns()
    for position in range(calls):
        step(position)
    return (time.perf_counter_ns() - start) / calls


def measure(steps: dict[str, Step], rounds: int, calls: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        empty = time_once(lambda position: None, calls)
        for name, step in steps.items():
            times[name].append(time_once(step, calls) - empty)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--calls", type=int, default=500)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':34}{'median':>9}{'fastest tenth':>15}   ns a call")
    for name, values in measure(parts(), args.rounds, args.calls).items():
        tenth = statistics.quantiles(values, n=10)[0]
        print(f"{name:34}{statistics.median(values):9.0f}{tenth:15.0f}")


if __name__ == "__main__":
    main()
