"""Finding a dataset's private generators: which are reached, in which order, at what cost."""

from __future__ import annotations

import functools
import os
import random
import subprocess
import sys
import types
from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from minato._core import Seeder
from minato.seeding import find_generators
from minato.seeding.find_generators import (
    CONTAINER_LIMIT,
    GENERATORS_LIMIT,
    NODE_LIMIT,
    Growing,
    find_all,
)

DEADLINE_S = 120


def generators_of(root: Any) -> list[Any]:
    return find_all([root]).generators


class Box:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Slots:
    __slots__ = ("a", "b", "never")

    def __init__(self, a: Any, b: Any) -> None:
        self.a, self.b = a, b


class SlotsAndDict(Slots):
    def __init__(self, a: Any, b: Any, c: Any) -> None:
        super().__init__(a, b)
        self.c = c


Pair = namedtuple("Pair", "a b")


def closure_over(rng: Any) -> Callable[[], float]:
    return lambda: rng.random()


def decorated(rng: Any) -> Callable[[], float]:
    @functools.wraps(closure_over)
    def inner(default: Any = rng) -> float:
        return default.random()

    return inner


def keyword_default(rng: Any) -> Callable[..., float]:
    def inner(*, default: Any = rng) -> float:
        return default.random()

    return inner


def with_attribute(rng: Any) -> Callable[[], None]:
    def inner() -> None: ...

    inner.rng = rng
    return inner


class Method:
    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def draw(self) -> float:
        return self.rng.random()


class ModuleHolding(torch.nn.Module):
    def __init__(self, rng: Any) -> None:
        super().__init__()
        self.rng = rng


WAYS: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda g: Box(rng=g),
    "slot": lambda g: Slots(None, g),
    "inherited slot": lambda g: SlotsAndDict(g, 1, 2),
    "dict beside slots": lambda g: SlotsAndDict(1, 2, g),
    "list": lambda g: [1, "x", g],
    "tuple": lambda g: (g,),
    "named tuple": lambda g: Pair(1, g),
    "dict value": lambda g: {"k": g},
    "ordered dict": lambda g: OrderedDict(k=g),
    "user dict": lambda g: UserDict(k=g),
    "set": lambda g: {g, 1},
    "frozenset": lambda g: frozenset([g]),
    "deque": lambda g: deque([g]),
    "partial": lambda g: functools.partial(print, 1, g),
    "partial keyword": lambda g: functools.partial(print, k=g),
    "partial of a method": lambda g: functools.partial(Method(g).draw),
    "bound method": lambda g: Method(g).draw,
    "bound C method": lambda g: g.random,
    "closure": closure_over,
    "default": decorated,
    "keyword default": keyword_default,
    "function attribute": with_attribute,
    "torch module": lambda g: torch.nn.Sequential(ModuleHolding(g)),
    "nested": lambda g: Box(a=[{"k": (Box(b=Slots(functools.partial(max, [g]), 1)),)}]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [np.random.default_rng, random.Random])
def test_reached(way: str, make: Callable[[int], Any]) -> None:
    rng = make(1)
    found = generators_of(Box(x=WAYS[way](rng)))
    assert len(found) == 1
    assert found[0] is rng


def test_generators_are_found_by_depth_then_place() -> None:
    kinds = [np.random.default_rng(1), np.random.RandomState(1), random.Random(1),
             torch.Generator(), np.random.PCG64(1), np.random.Generator(np.random.SFC64(1))]
    root = Box(deep=[[kinds[4]]], a=kinds[0], b=kinds[1], later=[kinds[3], kinds[5]],
               c=kinds[2])
    found = generators_of(root)
    expected = [kinds[i] for i in (0, 1, 2, 3, 5, 4)]
    assert [id(g) for g in found] == [id(g) for g in expected]


def test_root_may_be_a_generator() -> None:
    rng = random.Random(1)
    assert generators_of(rng) == [rng]


def test_shared_generator_is_found_once() -> None:
    rng = np.random.default_rng(1)
    root = Box(a=rng, b=[rng], c=rng.bit_generator, d=np.random.Generator(rng.bit_generator))
    assert generators_of(root) == [rng]


def test_global_generators_are_not_private() -> None:
    root = Box(a=random._inst, b=np.random.mtrand._rand, c=torch.default_generator,
               d=np.random.get_bit_generator(), e=random.random, f=np.random.rand,
               g=np.random.Generator(np.random.get_bit_generator()), h=[random, np, torch])
    assert generators_of(root) == []


def test_system_random_cannot_be_seeded() -> None:
    assert generators_of(Box(a=random.SystemRandom())) == []


def test_closed_things_are_not_looked_into() -> None:
    class Class:
        rng = random.Random(1)

    tensor = torch.zeros(2)
    tensor.rng = random.Random(1)
    array = np.array([random.Random(1)], dtype=object)
    assert generators_of(Box(a=Class, b=tensor, c=array)) == []


class OfClass:
    rng = random.Random(1)

    def draw(self, rng: Any = np.random.default_rng(1), *, more: Any = random.Random(2)) -> None:
        pass

    @staticmethod
    def static(rng: Any = np.random.default_rng(2)) -> None:
        pass


class Derived(OfClass):
    own = random.Random(3)


def test_generators_of_classes_and_defaults_are_found() -> None:
    """Those of the objects' classes, MONAI's Randomizable for example."""
    found = generators_of(Box(a=[Derived(), Derived()]))
    defaults = (*OfClass.draw.__defaults__, OfClass.draw.__kwdefaults__["more"])
    expected = [OfClass.rng, Derived.own, *defaults, *OfClass.static.__defaults__]
    assert {id(g) for g in found} == {id(g) for g in expected} and len(found) == 5


GLOBAL = random.Random(1)
IN_DICT = {"rng": random.Random(2)}


def augment() -> float:
    return [IN_DICT["rng"].random() for _ in range(1)][0]


class NamingGlobals:
    def sample(self) -> float:
        return GLOBAL.random() + augment()


def test_generators_of_named_globals_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """In functions that the named ones call, and in nested code, too."""
    assert generators_of(NamingGlobals()) == [GLOBAL, IN_DICT["rng"]]
    assert generators_of(Box(transform=lambda: augment())) == [IN_DICT["rng"]]
    module = types.ModuleType("of_the_program")
    module.rng = GLOBAL
    monkeypatch.setitem(globals(), "module", module)
    transform = eval("lambda: module.rng.random()", globals())
    assert generators_of(transform) == [GLOBAL]
    module.__file__ = "/usr/lib/python3/site-packages/module.py"
    find_generators._is_program.cache_clear()
    assert generators_of(transform) == []


@pytest.mark.parametrize("kind", [list, dict, tuple])
def test_crowd_of_generators_is_not_seeded(kind: Any) -> None:
    def crowd(size: int) -> Any:
        each = [random.Random(n) for n in range(size)]
        return dict(enumerate(each)) if kind is dict else kind(each)

    assert len(generators_of(Box(few=crowd(GENERATORS_LIMIT)))) == GENERATORS_LIMIT
    found = find_all([Box(many=crowd(GENERATORS_LIMIT + 1), rng=random.Random(1))])
    sequences = crowd(GENERATORS_LIMIT + 1), np.random.SeedSequence(1).spawn(GENERATORS_LIMIT + 1)
    assert len(find_all([sequences]).sequences) == 0
    assert len(found.generators) == 1 and [len(c) for c in found.crowds] == [GENERATORS_LIMIT + 1]


def test_cycles_end() -> None:
    root = Box(rng=random.Random(1))
    root.me, root.list = root, []
    root.list.append(root.list)
    root.method = Method(root).draw
    assert generators_of(root) == [root.rng]


class Explosive:
    """Everything that the walk could trigger raises an error."""

    went_off: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.went_off.append(name)
        raise RuntimeError(name)

    def __getattribute__(self, name: str) -> Any:
        Explosive.went_off.append(name)
        raise RuntimeError(name)

    def _raise(self, *args: Any) -> Any:
        Explosive.went_off.append("special")
        raise RuntimeError("special")

    __iter__ = __len__ = __eq__ = __bool__ = __repr__ = __getitem__ = __contains__ = _raise
    __hash__ = _raise
    prop = property(_raise)


class ExplosiveDict(dict):
    def _raise(self, *args: Any) -> Any:
        Explosive.went_off.append("dict")
        raise RuntimeError("dict")

    __iter__ = values = items = keys = __len__ = __getattribute__ = _raise


class FakeClass:
    """Claims to be something else, as mocks and proxies do."""

    @property
    def __class__(self) -> Any:
        Explosive.went_off.append("__class__")
        raise RuntimeError("__class__")


class FakeDict:
    __slots__ = ("rng",)

    @property
    def __dict__(self) -> Any:
        Explosive.went_off.append("__dict__")
        raise RuntimeError("__dict__")


def test_walk_runs_no_user_code_and_raises_nothing() -> None:
    explosive, fake = Explosive(), FakeDict()
    rngs = [random.Random(i) for i in range(3)]
    object.__getattribute__(explosive, "__dict__")["rng"] = rngs[0]
    fake.rng = rngs[1]
    root = Box(a=explosive, b=ExplosiveDict(k=rngs[2]), c=FakeClass(), d=fake)
    Explosive.went_off.clear()
    found = generators_of(root)
    assert Explosive.went_off == []
    assert {id(g) for g in found} == {id(g) for g in rngs}
    for lonely in (Explosive(), FakeClass(), ExplosiveDict(), None, 3, iter(()), Box):
        assert generators_of(lonely) == []


# ---- bounds ---------------------------------------------------------------------------


@pytest.mark.parametrize("element", [str, lambda i: (str(i), i), lambda i: [i] * 50,
                                     lambda i: {"a": [i], "b": {"c": (i,)}}])
def test_large_data_is_skipped_near_root_is_searched(element: Any) -> None:
    rng, deeper = random.Random(1), np.random.default_rng(1)
    data = [element(i) for i in range(20_000)]
    found = find_all([Box(samples=data, other=list(data), rng=rng, t=Box(t=[Box(r=deeper)]))])
    assert found.generators == [rng, deeper]
    assert found.nodes <= NODE_LIMIT


def test_limits_hold() -> None:
    chain: Any = random.Random(1)
    for _ in range(50):
        chain = [chain]
    assert find_all([chain], limit=50).generators != []
    cut = find_all([chain], limit=49)
    assert (cut.generators, cut.nodes, cut.truncated) == ([], 49, True)
    rng = random.Random(1)
    assert generators_of([0] * (CONTAINER_LIMIT - 1) + [rng]) == [rng]
    assert generators_of([0] * CONTAINER_LIMIT + [rng]) == []
    wide = find_all([[[0] * 1000 for _ in range(1000)]], limit=100)
    assert wide.truncated
    assert wide.nodes <= 100


def test_many_small_datasets_are_all_reached() -> None:
    parts = [Subset(Box(rng=random.Random(i)), [0]) for i in range(500)]
    assert len(generators_of(ConcatDataset(parts))) == 500


# ---- order ----------------------------------------------------------------------------


ORDER = """
import random, numpy as np, torch
from minato.seeding.find_generators import find_all
class Box: pass
box = Box()
box.names = {str(i): i for i in range(100)}
box.set = {np.random.default_rng(1), random.Random(2), torch.Generator(), "text", 3}
box.map = {k: [random.Random(ord(k))] for k in "zyx"}
print([(type(g).__module__, type(g).__name__) if not isinstance(g, random.Random)
       else g.getstate()[1][1] for g in find_all([box]).generators])
"""


def test_order_does_not_depend_on_the_process() -> None:
    outputs = {subprocess.run([sys.executable, "-c", ORDER], check=True, text=True,
                              env={**os.environ, "PYTHONHASHSEED": seed},
                              capture_output=True, timeout=DEADLINE_S).stdout
               for seed in ("1", "2")}
    assert len(outputs) == 1
    assert outputs.pop().count(",") >= 5


# ---- seed_sample ----------------------------------------------------------------------


class Offering(Dataset):
    def __init__(self) -> None:
        self.seeds: list[int] = []
        self.rng = random.Random(1)

    def __len__(self) -> int:
        return 1

    def seed_sample(self, seed: int) -> None:
        self.seeds.append(seed)


class DuckOffering:
    def __init__(self) -> None:
        self.seeds: list[int] = []
        self.seed_sample = self.seeds.append


@pytest.mark.parametrize("make", [Offering, DuckOffering])
def test_root_offers_seed_sample(make: Callable[[], Any]) -> None:
    dataset = make()
    seeder = Growing(dataset).seeder
    seeder.seed(1, 2, 3)
    seeder.seed(1, 2, 4)
    seeder.seed(1, 2, 3)
    a, b, again = dataset.seeds
    assert a == again != b
    assert a == Seeder._words(1, 2, 3, 0, 4, 0)[1]


def test_seed_sample_is_used_with_private_generators() -> None:
    dataset = Offering()
    assert [label for label, *_ in Growing(dataset)._plans()] == ["private[0] Random", "seed_sample[0]"]


def test_wrapped_datasets_offer_theirs_once() -> None:
    inner, other = Offering(), Offering()
    root = ConcatDataset([Subset(inner, [0]), Subset(inner, [1]), other])
    Growing(root).seeder.seed(1, 2, 3)
    assert len(inner.seeds) == len(other.seeds) == 1
    assert inner.seeds != other.seeds


def test_only_datasets_inside_are_asked() -> None:
    class Helper:
        seeds: list[int] = []

        def seed_sample(self, seed: int) -> None:
            self.seeds.append(seed)

    Growing(Box(helper=Helper(), duck=DuckOffering())).seeder.seed(1, 2, 3)
    assert Helper.seeds == []
    Growing(Helper()).seeder.seed(1, 2, 3)
    assert len(Helper.seeds) == 1


def test_properties_and_noncallables_are_not_offers() -> None:
    evaluated = []

    class Odd(Dataset):
        @property
        def seed_sample(self) -> Any:
            evaluated.append(self)
            return print

    class Data(Dataset):
        seed_sample = 3

    for dataset in (Odd(), Data(), Box(inner=Odd())):
        assert Growing(dataset)._plans() == []
    assert evaluated == []


def test_collate_fn_joins_the_walk() -> None:
    rngs = [random.Random(1), np.random.default_rng(2)]
    plans = Growing(Box(a=rngs[0]), functools.partial(max, rngs[1]))._plans()
    assert [label for label, *_ in plans] == [
        "private[0] Random", "private[1] Generator(PCG64)", "private[2] SeedSequence"]
