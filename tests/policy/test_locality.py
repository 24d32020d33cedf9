"""Whether samples are cheaper next to their neighbours: the policy alone (policy_locality.h)."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator

import policies
import pytest
from hypothesis import given
from hypothesis import strategies as st


MS, US = 1_000_000, 1_000
UNKNOWN, NO, YES = range(3)
FOLLOWED, OPENS = 1, 2


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    loaded = policies.library()
    loaded.locality_new.restype = ctypes.c_void_p
    for name in ("opening", "away", "beside", "at_home"):
        getattr(loaded, f"mn_locality_{name}").restype = ctypes.c_int64
    loaded.mn_locality_length.restype = ctypes.c_double
    loaded.mn_locality_observe_near.restype = ctypes.c_uint8
    loaded.mn_locality_joins.restype = ctypes.c_bool
    return loaded


class Locality:
    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.own = ctypes.c_void_p(library.locality_new())

    def near(self, follows: bool, cost: int, edge: bool = False, marks: int = 0) -> int:
        return self.library.mn_locality_observe_near(
            self.own, ctypes.c_bool(follows), ctypes.c_bool(edge), ctypes.c_uint8(marks),
            ctypes.c_int64(cost),
        )  # fmt: skip

    def home(self, home: bool, cost: int) -> None:
        self.library.mn_locality_observe_home(
            self.own, ctypes.c_bool(home), ctypes.c_int64(cost)
        )

    def breaks(self, *, batch: bool, length: int, rows: int, most: int, number: int = 0,
               marks: int = 0, begins: bool | None = None) -> bool:  # fmt: skip
        return bool(
            self.library.locality_place(
                self.own, begins is not None, bool(begins), batch, marks,
                ctypes.c_uint64(number), ctypes.c_int64(length), ctypes.c_int64(rows),
                ctypes.c_int64(most),
            )
        )  # fmt: skip

    @property
    def answer(self) -> int:
        return self.library.locality_near(self.own)

    @property
    def length(self) -> float:
        return self.library.mn_locality_length(self.own)

    @property
    def opening(self) -> int:
        return self.library.mn_locality_opening(self.own)

    def drawn(self, order: list[int], length: int) -> None:
        array = (ctypes.c_int64 * len(order))(*order)
        self.library.mn_locality_drawn(
            self.own, array, ctypes.c_int64(len(order)), ctypes.c_int64(length)
        )

    def beside(self, cost: int) -> int:
        return self.library.mn_locality_beside(self.own, ctypes.c_int64(cost))

    def at_home(self, cost: int) -> int:
        return self.library.mn_locality_at_home(self.own, ctypes.c_int64(cost))


@pytest.fixture(scope="module")
def make(library: ctypes.CDLL) -> Iterator[Callable[[], Locality]]:
    made = []

    def new() -> Locality:
        made.append(Locality(library))
        return made[-1]

    yield new
    for one in made:
        library.policy_free(one.own)


COSTS = {
    "constant": lambda dice: 5 * MS + dice.randrange(US),
    "one in a hundred": lambda dice: 500 * MS if dice.randrange(100) == 0 else 5 * MS,
    "two classes": lambda dice: 40 * MS if dice.randrange(10) < 4 else 4 * MS,
    "log-normal": lambda dice: int(5 * MS * dice.lognormvariate(0, 0.4)),
    "tiny": lambda dice: 500 + dice.randrange(200),
}


def firsts_until_known(one: Locality, cost: Callable[[int], int]) -> int:
    """For batches of 64 that are made whole: how many are made before there is an answer."""
    for batch in range(200):
        if one.answer != UNKNOWN:
            return batch
        for row in range(64):
            one.near(row != 0, cost(batch) if row == 0 else US)
    return 200


def test_negligible_opening_cost_ends_probing(make):
    """Even if the machine pauses during one of them."""
    one = make()
    assert firsts_until_known(one, lambda batch: US) < 12
    assert one.answer == NO
    assert firsts_until_known(make(), lambda batch: 30 * MS if batch == 3 else US) < 20


def test_single_worker_ends_in_no_locality(make):
    one = make()
    for _ in range(1024):
        assert one.answer == UNKNOWN
        one.near(True, US)
    assert one.answer == NO


def test_rare_opening_costs_are_still_found(make):
    """One in four opens a group: that the others do not is no coincidence."""
    one = make()
    firsts_until_known(one, lambda batch: 30 * MS if batch % 4 == 1 else US)
    assert one.answer == YES


@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("firsts", [0.1, 0.5, 0.9])
def test_no_locality_is_never_assumed(make, costs, firsts):
    """Nor long, where one in some thousand looks at chance does."""
    believed = looks = 0
    for seed in range(20):
        dice, locality = random.Random(seed), make()
        for _ in range(800):
            locality.near(dice.random() > firsts, costs(dice))
            looks += 1
            believed += locality.answer == YES
        assert locality.answer != UNKNOWN
    assert believed <= looks / 100


@pytest.mark.parametrize("group", [2, 4, 8, 32, 128])
def test_groups_are_found_and_measured(make, group):
    dice, locality = random.Random(group), make()
    when = None
    for n in range(6000):
        first = n % 16 == 0
        opens = first or dice.randrange(group) == 0
        locality.near(not first, (20 * MS if opens else 0) + 2 * MS + dice.randrange(50 * US))
        if when is None and locality.answer == YES:
            when = n
    assert when is not None and when < 1000
    assert locality.answer == YES
    assert 0.8 * 18 * MS < locality.opening < 1.2 * 20 * MS
    # a sixteenth is first in any case, and opens
    expected = 1 / (1 / 16 + 15 / 16 / group)
    assert expected / 1.5 < locality.length < expected * 1.5


def test_openings_amortised_by_chunk_gain_nothing(make):
    locality = make()
    for n in range(400):
        locality.near(n % 4 != 0, 100 * US if n % 4 == 0 else 10 * US)
    assert locality.answer == NO and locality.opening == 0 and locality.length == 1.0


def test_locality_is_learned_and_unlearned(make):
    locality = make()
    for n in range(400):
        locality.near(n % 8 != 0, 5 * MS)
    assert locality.answer == NO
    for n in range(400):
        locality.near(n % 8 != 0, 25 * MS if n % 8 == 0 else 5 * MS)
    assert locality.answer == YES
    for n in range(2000):
        locality.near(n % 8 != 0, 25 * MS)
    assert locality.answer == NO


@given(group=st.integers(2, 100), turns=st.integers(1, 3), seed=st.integers(0, 99))
def test_new_grouped_order_is_noticed(make, group, turns, seed):
    """After no locality; a random order shows none, whatever came before."""
    one, dice, n = make(), random.Random(seed), 1600
    groups = [list(range(at, min(at + group, n))) for at in range(0, n, group)]
    for _turn in range(turns):
        while one.answer != NO:
            one.near(dice.random() < 0.5, 5 * MS + dice.randrange(US))
        for _batch in range(20):
            one.drawn([dice.randrange(n) for _ in range(32)], n)
            assert one.answer == NO
        order = [index for at in dice.sample(groups, len(groups)) for index in at]
        for at in range(0, 320, 32):
            one.drawn(order[at : at + 32], n)
        assert one.answer == (UNKNOWN if group > 4 else one.answer)
        if one.answer == NO:
            return


def test_locality_survives_a_shuffled_order(make):
    one = make()
    for group in range(30):
        for row in range(32):
            one.near(row != 0, 101 * MS if row == 0 else MS)
        one.drawn(random.Random(group).sample(range(1000), 32), 1000)
    for at in range(0, 960, 32):
        one.drawn(list(range(at, at + 32)), 1000)
    assert one.answer == YES


@given(order=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40),
       length=st.integers(0, 2**63 - 1))
def test_any_index_may_be_drawn(make, order, length):
    make().drawn(order, length)


def test_slowing_machine_shows_no_locality(make):
    dice, locality = random.Random(0), make()
    for n in range(3000):
        slower = 1 + n / 300
        locality.near(dice.random() < 0.5, int(5 * MS * slower * dice.uniform(0.9, 1.1)))
        assert locality.answer != YES


@given(cost=st.integers(0, 1000 * MS))
def test_opening_cost_is_not_charged_to_sample(make, cost):
    """Also if opening its group took less or more than usual."""
    one = make()
    assert one.beside(cost) == cost, "nothing is known"
    for _group in range(30):
        for row in range(32):
            one.near(row != 0, 101 * MS if row == 0 else MS)
    assert one.opening == pytest.approx(100 * MS, rel=0.02)
    found = one.beside(cost)
    assert min(cost, MS) <= found <= cost
    if cost <= 40 * MS:
        assert found == cost, "that is no opening, but a slow sample"
    elif 60 * MS <= cost <= 101 * MS:
        assert found == pytest.approx(MS, rel=0.2)
    elif cost > 102 * MS:
        assert found == cost - one.opening


@given(cost=st.integers(0, 100 * MS))
def test_cost_away_from_home_spares_the_sample(make, cost):
    one = make()
    assert one.at_home(cost) == cost, "nothing is known"
    for _sample in range(100):
        one.home(True, MS)
        one.home(False, 11 * MS)
    assert min(cost, MS) <= one.at_home(cost) <= cost
    assert one.at_home(cost) == max(cost - 10 * MS, min(cost, MS))


def test_a_home_is_found(make, library):
    locality = make()
    for n in range(200):
        locality.home(n % 4 == 0, 20 * US if n % 4 == 0 else 10 * MS)
    assert library.locality_home(locality.own) == YES
    assert 9 * MS < library.mn_locality_away(locality.own) < 11 * MS


def chains(locality, batches, rows, most, marks=None, begins=None):
    """Lengths of the chains that an order is cut into."""
    out: list[int] = []
    for number in range(batches * rows):
        if locality.breaks(
            batch=number % rows == 0, length=out[-1] if out else 0, rows=rows, most=most,
            number=number, marks=marks(number) if marks else 0,
            begins=None if begins is None else begins(number),
        ):  # fmt: skip
            out.append(0)
        out[-1] += 1
    return out


@given(rows=st.integers(1, 40), most=st.integers(1, 200), batches=st.integers(1, 20))
def test_unknown_groups_keep_batches_whole(make, rows, most, batches):
    """torch's own cut."""
    assert chains(make(), batches, rows, most) == [rows] * batches


@given(rows=st.integers(1, 40), group=st.integers(1, 60), batches=st.integers(1, 12))
def test_declared_groups_are_chains(make, rows, group, batches):
    cut = chains(make(), batches, rows, 10**9, begins=lambda n: n % group == 0)
    total = rows * batches
    assert cut == [group] * (total // group) + [total % group] * (total % group > 0)


@given(
    rows=st.integers(1, 40), group=st.integers(1, 60), most=st.integers(1, 200),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_chain_length_is_bounded(make, rows, group, most, seed):
    dice, locality = random.Random(seed), make()
    for n in range(dice.randrange(400)):
        first = n % 16 == 0
        opens = first or dice.randrange(group) == 0
        locality.near(not first, 22 * MS if opens else 2 * MS, edge=n % rows == 0)
    known = [dice.choice((0, FOLLOWED, FOLLOWED | OPENS)) for _ in range(12 * rows)]
    for length in chains(locality, 12, rows, most, marks=known.__getitem__):
        assert length <= max(most, rows)


def test_remembered_groups_are_chains_over_batches(make):
    locality = make()
    marks = {}
    for epoch in range(3):
        for n in range(1024):
            opens = n % 48 == 0
            first = n % 64 == 0 and epoch == 0
            cost = 22 * MS if opens or first else 2 * MS
            marks[n] = locality.near(not first, cost, edge=n % 32 == 0, marks=marks.get(n, 0))
    cut = chains(locality, 30, 32, 10**9, marks=marks.__getitem__)
    assert sum(length % 48 == 0 for length in cut) >= len(cut) - 2


@given(group=st.sampled_from([16, 32, 64]), seed=st.integers(0, 99))
def test_correct_marks_of_shuffled_order_are_trusted(make, group, seed):
    """As when it shuffles in the same way each time."""
    dice, locality = random.Random(seed), make()
    for n in range(64):
        locality.near(n % 8 != 0, 22 * MS if n % 8 == 0 else 2 * MS)
    order = [n for at in range(0, 640, group) for n in dice.sample(range(at, at + group), group)]
    for at in range(0, len(order), 32):
        locality.drawn(order[at : at + 32], 10_000)
    marks = {n: FOLLOWED | OPENS if n % 16 == 4 else FOLLOWED for n in range(64)}
    assert chains(locality, 1, 64, 10**9, marks=marks.__getitem__) == [64]
    for _ in range(8):
        locality.near(True, 22 * MS, marks=FOLLOWED | OPENS)
    assert len(chains(locality, 1, 64, 10**9, marks=marks.__getitem__)) > 2


def test_wrong_marks_are_not_trusted(make):
    """A sampler that shuffles inside groups: an opening sample is no sign for the next epoch."""
    locality = make()
    for n in range(64):
        locality.near(n % 8 != 0, 22 * MS if n % 8 == 0 else 2 * MS)
    cut = chains(locality, 1, 64, 10**9, marks=lambda n: FOLLOWED | OPENS if n % 16 == 4 else 1)
    assert len(cut) > 1
    for _ in range(200):
        locality.near(True, 2 * MS, marks=FOLLOWED | OPENS)
    cut = chains(locality, 1, 64, 10**9, marks=lambda n: FOLLOWED | OPENS if n % 16 == 4 else 1)
    assert cut == [64]
