"""Per-sample seeding: states, caches, fallbacks, threads, processes, memory."""

from __future__ import annotations

import gc
import multiprocessing
import random
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from contract.support import programs

import minato
from minato._core import Seeder
from minato.seeding import generator_states
from minato.seeding.generator_states import ways
from minato.workers.fetch_or_skip import BY_INDEX

from . import plans_of, seeder_of

MASK32, MASK64 = (1 << 32) - 1, (1 << 64) - 1
KEYS = [(0, 0, 0, 0), (1, 2, 3, 1), (MASK64, MASK64, MASK64, MASK32), (12345, 7, 1 << 40, 0)]
DEADLINE_S = 120

BIT_GENERATORS = ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"]
PRIVATE: dict[str, Callable[[], Any]] = {
    "random.Random": lambda: random.Random(5),
    "RandomState": lambda: np.random.RandomState(5),
    "RandomState(PCG64)": lambda: np.random.RandomState(np.random.PCG64(5)),
    "torch.Generator": lambda: torch.Generator().manual_seed(5),
    "bare PCG64": lambda: np.random.PCG64(5),
    **{n: lambda n=n: np.random.Generator(getattr(np.random, n)(5)) for n in BIT_GENERATORS},
}


@pytest.fixture(autouse=True)
def _globals_restored() -> Iterator[None]:
    bitgen = np.random.get_bit_generator()
    saved = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    np.random.set_bit_generator(bitgen)
    random.setstate(saved[0])
    np.random.set_state(saved[1])
    torch.set_rng_state(saved[2])


def plain(state: Any) -> Any:
    """A public state as something == compares."""
    if isinstance(state, dict):
        return {k: plain(v) for k, v in state.items()}
    return state.tolist() if isinstance(state, (np.ndarray, torch.Tensor)) else state


def public_state(obj: Any) -> Any:
    if isinstance(obj, random.Random):
        return obj.getstate()
    if isinstance(obj, torch.Generator):
        return plain(obj.get_state())
    if isinstance(obj, np.random.RandomState):
        return plain(obj.get_state(legacy=False))
    return plain(getattr(obj, "bit_generator", obj).state)


def global_states() -> list[Any]:
    return [public_state(g) for g in
            (random._inst, np.random.mtrand._rand, torch.default_generator)]


# ---- the arithmetic, against a twin ---------------------------------------------------


def mix64(x: int) -> int:
    x ^= x >> 27
    x = x * 0x3C79AC492BA7B653 & MASK64
    x ^= x >> 33
    x = x * 0x1C69B3F74AC4AE35 & MASK64
    return x ^ x >> 27


def twin(key: tuple[int, int, int, int], stream: int, n: int) -> tuple[list[int], int]:
    """Words and seed of a stream, written from csrc/py/seeding/mn_seed_mix.h."""
    a, b, golden = 0x243F6A8885A308D3, 0xB7E151628AED2A6B, 0x9E3779B97F4A7C15
    lo, hi = 0, 0
    for x in key:
        lo, hi = mix64((lo ^ x) + a & MASK64), mix64((hi + x & MASK64) ^ b)
    first = mix64(lo + (stream + 1) * golden & MASK64)
    second = mix64((hi ^ first) + golden & MASK64)
    words = []
    for i in range(n):
        x = i * (second >> 32 | 1) + first & MASK32
        x ^= x >> 16
        x = x * 0x21F0AAAD + (first >> 32) & MASK32
        x ^= x >> 15
        x = x * 0x735A2D97 & MASK32
        words.append(x ^ x >> 15 ^ second & MASK32)
    return words, mix64(first + second & MASK64 ^ golden) >> 1


def c_words(key: tuple[int, int, int, int], stream: int, n: int,
            vector: bool = True, wide: bool = False) -> tuple[list[int], int]:
    raw, seed = Seeder._words(*key, stream, n, vector, wide)
    return list(struct.unpack(f"={n}{'Q' if wide else 'I'}", raw)), seed


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_c_words_equal_python_reference(key: Any, vector: bool, wide: bool) -> None:
    for stream in (1, 2, 16, 4 + (1 << 32), MASK64):
        for n in (0, 1, 7, 8, 9, 16, 31, 624, 1000):
            assert c_words(key, stream, n, vector=vector, wide=wide) == twin(key, stream, n)


def test_first_draws_are_pinned() -> None:
    """A change here changes every seeded run of every user."""
    seeder_of().seed(0, 0, 0)
    assert random.getrandbits(32) == 534625117
    assert np.random.randint(1 << 32) == 643135993
    assert torch.initial_seed() == 6285092871853433163
    assert int(torch.empty(1, dtype=torch.int64).random_(0, 1 << 24)) == 11424622


# ---- states ---------------------------------------------------------------------------


def mt_words(key: tuple[int, int, int, int], stream: int) -> list[int]:
    words, _ = twin(key, stream, 624)
    words[0] |= 0x80000000
    return words


@pytest.mark.parametrize("key", KEYS)
def test_globals_are_filled_with_the_streams_words(key: Any) -> None:
    seeder = seeder_of()
    assert ways(plans_of()) == {"random": "fill", "numpy": "fill", "torch": "torch"}
    seeder.seed(*key)
    assert random.getstate() == (3, (*mt_words(key, 1), 624), None)
    numpy = np.random.get_state()
    assert numpy[1].tolist() == mt_words(key, 2)
    assert (numpy[0], *numpy[2:]) == ("MT19937", 624, 0, 0.0)
    _, seed = twin(key, 3, 0)
    blob = struct.pack("=QiiQ624Q40x", seed, 1, 1, 0, *mt_words(key, 3))
    assert bytes(torch.get_rng_state().numpy()) == blob
    assert torch.initial_seed() == seed < 1 << 63


def test_domain_defaults_to_samples_and_batches_differ() -> None:
    seeder, states = seeder_of(), []
    for args in ((1, 2, 3), (1, 2, 3, 0), (1, 2, 3, 1)):
        seeder.seed(*args)
        states.append(global_states())
    assert states[0] == states[1] != states[2]


def test_seeds_by_index_are_alike_on_dealt_ranks() -> None:
    def states(ranks: tuple[int, int, int], place: int) -> Any:
        seeder = seeder_of()
        seeder.share(ranks)
        seeder.seed(1, 2, place)
        return global_states()

    alone = states((0, 1, 1), BY_INDEX + 5)
    assert states((1, 2, 1), BY_INDEX + 5) == states((3, 4, 2), BY_INDEX + 5) == alone
    assert states((1, 2, 1), 5) != states((0, 1, 1), 5) != alone  # the positions of ranks differ
    assert states((1, 0, 1), BY_INDEX + 5) != states((0, 0, 1), BY_INDEX + 5) == alone


@pytest.mark.parametrize("name", PRIVATE)
def test_private_fill_equals_public_api(name: str) -> None:
    filled, by_api = PRIVATE[name](), PRIVATE[name]()
    other = np.random.PCG64(1)  # so that the one tested is not the first
    fill, api = seeder_of([other, filled]), seeder_of([other, by_api], public=True)
    assert set(ways(plans_of([other, filled])).values()) <= {"fill", "torch"}
    assert list(ways(plans_of([other, by_api], public=True)).values()) == ["call"] * 5
    states = []
    for key in KEYS:
        fill.seed(*key)
        state = public_state(filled), global_states()
        api.seed(*key)
        assert (public_state(by_api), global_states()) == state
        states.append(state)
        use_up(filled)
        use_up(by_api)
        assert public_state(filled) == public_state(by_api) != state[0]
    assert all(a != b for i, a in enumerate(states) for b in states[:i])


def use_up(obj: Any) -> None:
    """Draws that move the position and leave every cache full."""
    if isinstance(obj, random.Random):
        obj.gauss(0, 1)
    elif isinstance(obj, torch.Generator):
        torch.empty(1).normal_(generator=obj)
    elif isinstance(obj, np.random.RandomState):
        obj.normal()
    elif isinstance(obj, np.random.Generator):
        obj.integers(1 << 32, size=3, dtype=np.uint32)
    else:
        obj.random_raw(3)


@pytest.mark.parametrize("name", PRIVATE)
def test_caches_do_not_leak_into_the_next_sample(name: str) -> None:
    used, fresh = PRIVATE[name](), PRIVATE[name]()
    use_up(used)
    seeder_of([used]).seed(1, 1, 1)
    seeder_of([fresh]).seed(1, 1, 1)
    assert public_state(used) == public_state(fresh)
    use_up(used)
    use_up(fresh)
    assert public_state(used) == public_state(fresh)


def test_cached_values_of_the_globals_are_dropped() -> None:
    seeder = seeder_of()

    def draw() -> list[float]:
        return [random.gauss(0, 1), np.random.normal(), float(torch.randn(()))]

    seeder.seed(1, 1, 1)
    first = draw()
    assert random.getstate()[2] is not None
    assert np.random.get_state()[3] == 1
    seeder.seed(1, 1, 1)
    assert draw() == first


@pytest.mark.parametrize("name", BIT_GENERATORS)
def test_swapped_global_bit_generator_is_followed(name: str) -> None:
    seeder = seeder_of()
    original = np.random.get_bit_generator()
    seeder.seed(1, 2, 3)
    before = global_states()
    np.random.normal()
    swapped = getattr(np.random, name)(9)
    np.random.set_bit_generator(swapped)
    untouched = public_state(original)
    seeder.seed(1, 2, 3)
    state = np.random.mtrand._rand.get_state(legacy=False)
    assert (state["has_gauss"], state["gauss"]) == (0, 0.0)
    assert public_state(original) == untouched
    by_fill = public_state(swapped)
    seeder_of(public=True).seed(1, 2, 3)
    assert public_state(swapped) == by_fill
    np.random.set_bit_generator(original)
    seeder.seed(1, 2, 3)
    assert global_states() == before


class Foreign(np.random.PCG64):
    """A bit generator that this project knows nothing about."""


class Hopeless(np.random.PCG64):
    @property
    def state(self) -> Any:
        raise NotImplementedError


def test_foreign_bit_generator_goes_through_its_own_class() -> None:
    rng = np.random.Generator(Foreign(1))
    seeder = seeder_of([rng])
    assert ways(plans_of([rng]))["private[0] Generator(Foreign)"] == "call"
    drawn = []
    for position in (5, 5, 6):
        seeder.seed(1, 1, position)
        drawn.append(rng.random())
    assert drawn[0] == drawn[1] != drawn[2]


def test_bit_generator_without_a_state_is_left_alone() -> None:
    rng = np.random.Generator(Hopeless(1))
    assert ways(plans_of([rng]))["private[0] Generator(Hopeless)"] == "none"
    seeder_of([rng]).seed(1, 1, 1)


class Counting(random.Random):
    """A different algorithm: it does not draw from the inherited state."""

    at = 0

    def seed(self, a: Any = None, version: int = 2) -> None:
        self.at = int(a or 0)

    def random(self) -> float:
        self.at += 1
        return self.at / 2.0


def test_random_subclass_uses_its_own_seed_method() -> None:
    rng = Counting()
    seeder = seeder_of([rng])
    assert ways(plans_of([rng]))["private[0] Counting"] == "hook"
    seeder.seed(1, 2, 3)
    assert rng.at == twin((1, 2, 3, 0), 16, 0)[1]


@pytest.mark.parametrize("obj", [None, 3, "x", np.random, random.random, object()])
def test_non_generators_are_refused(obj: Any) -> None:
    with pytest.raises(TypeError, match="cannot seed"):
        seeder_of([obj])


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError):
        seeder_of().seed(0, 0.5, 0)
    with pytest.raises(TypeError):
        seeder_of().seed(0, 0)
    with pytest.raises(TypeError, match="callable"):
        seeder_of(hooks=[3])


# ---- hooks ----------------------------------------------------------------------------


def test_hooks_get_their_own_seeds_after_all_generators() -> None:
    key, rng, seeds = (4, 5, 6, 1), random.Random(1), []

    def first(seed: int) -> None:
        assert rng.getstate()[1][:-1] == tuple(mt_words(key, 16))
        seeds.append(seed)

    seeder = seeder_of([rng], hooks=[first, seeds.append])
    seeder.seed(*key)
    assert seeds == [twin(key, 4, 0)[1], twin(key, 4 + (1 << 32), 0)[1]]
    assert all(type(s) is int and 0 <= s < 1 << 63 for s in seeds)


def test_hook_errors_pass_through() -> None:
    def hook(seed: int) -> None:
        raise KeyError("from the hook")

    with pytest.raises(KeyError, match="from the hook"):
        seeder_of(hooks=[hook]).seed(0, 0, 0)


# ---- probing --------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["_random_layout", "_random_state_layout", "_bitgen_layout"])
def test_unknown_layout_falls_back_to_the_same_bytes(
        layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    private = [PRIVATE[n]() for n in PRIVATE]
    seeder_of(private).seed(1, 2, 3)
    filled = [public_state(g) for g in private], global_states()
    monkeypatch.setattr(generator_states, layout, lambda *args: None)
    seeder = seeder_of(private)
    assert "call" in ways(plans_of(private)).values()
    seeder.seed(7, 7, 7)
    assert ([public_state(g) for g in private], global_states()) != filled
    seeder.seed(1, 2, 3)
    assert ([public_state(g) for g in private], global_states()) == filled


def test_unknown_torch_blob_falls_back_to_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator_states, "_torch_layout", lambda: None)
    seeder = seeder_of()
    assert ways(plans_of())["torch"] == "hook"
    seeder.seed(1, 2, 3)
    assert torch.initial_seed() == twin((1, 2, 3, 0), 3, 0)[1]


@pytest.mark.parametrize("probe,args", [
    (generator_states._random_layout, ()), (generator_states._torch_layout, ()),
    (generator_states._random_state_layout, (np.random.RandomState,)),
    *((generator_states._bitgen_layout, (getattr(np.random, n),)) for n in BIT_GENERATORS)])
def test_probe_notices_unexpected_state(
        probe: Any, args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe.__wrapped__(*args)  # past the cache
    seeded_by = generator_states._seeded_by

    def other_words(plan: Any) -> tuple[bytes, int]:
        raw, seed = seeded_by(plan)
        return bytes([raw[0] ^ 2]) + raw[1:], seed

    def other_blob(raw: bytes, seed: int) -> bytes:
        return bytes(5056)

    monkeypatch.setattr(generator_states, "_seeded_by", other_words)
    monkeypatch.setattr(generator_states, "_torch_blob", other_blob)
    assert probe.__wrapped__(*args) is None


def test_torch_is_probed_on_cpu() -> None:
    with torch.device("meta"):
        assert generator_states._torch_layout.__wrapped__()  # type: ignore[attr-defined]


class Inherited(torch.utils.data.Dataset):
    """Sample i: how many probes of the global generators its worker began life with."""

    probes = (
        generator_states._random_layout,
        generator_states._random_state_layout,
        generator_states._torch_layout,
    )

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return self.found

    def note(self, _worker: int) -> None:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        found = sum(probe.cache_info().currsize for probe in self.probes)  # type: ignore
        info.dataset.found = found


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_inherit_probes(method: str) -> None:
    for probe in Inherited.probes:
        probe.cache_clear()  # type: ignore[attr-defined]
    dataset = Inherited()
    loader = minato.DataLoader(dataset, num_workers=2, worker_init_fn=dataset.note,
                               multiprocessing_context=method)
    assert [int(found) for found in loader] == [3] * 4
    # under fork, the trainer probes once for all workers that it will ever have
    probed = any(probe.cache_info().currsize for probe in Inherited.probes)  # type: ignore
    assert probed == (method == "fork")


@pytest.mark.parametrize("runs,fixed", [
    (((0, 0, 8),), ()), (((20, 0, 625),), ()), (((22, 0, 4),), ()), (((2520, 0, 8),), ()),
    (((20, 620, 8),), ()), (((20, 0, 8),), ((1 << 20, 1),)), ((), ())])
def test_offsets_outside_the_object_are_refused(runs: Any, fixed: Any) -> None:
    plan = ("fill", random.Random(), None, None, 624, 0, 0, runs, fixed)
    with pytest.raises(ValueError):
        Seeder([("x", 1, plan)])


def test_import_and_probes_leave_the_globals_alone() -> None:
    code = """
import random, numpy as np, torch
random.gauss(0, 1); np.random.normal(); torch.randn(1)
def now():
    return (random.getstate(), str(np.random.get_state(legacy=False)),
            np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
before = now()
import minato._core, minato.seeding.find_generators
class Dataset:
    rng = np.random.default_rng(1)
minato.seeding.find_generators.Growing(Dataset())
assert now() == before
"""
    done = programs().run(code)
    assert done.returncode == 0, done.stderr


# ---- threads and processes ------------------------------------------------------------


class FakeLock:
    def __init__(self, free: bool = True) -> None:
        self.free, self.log = free, []

    def acquire(self, blocking: bool, timeout: float) -> bool:
        self.log.append(("acquire", bool(blocking), timeout > 0))
        return self.free

    def release(self) -> None:
        self.log.append("release")


def locked_seeder(lock: FakeLock) -> Seeder:
    plan = list(generator_states.plan_bitgen(np.random.PCG64(1)))
    assert plan[0] == "fill"
    plan[2] = lock
    return Seeder([("locked", 16, tuple(plan))])


def test_lock_is_taken_only_with_other_threads() -> None:
    lock, leave = FakeLock(), threading.Event()
    seeder = locked_seeder(lock)
    thread = threading.Thread(target=leave.wait, args=(DEADLINE_S,))
    thread.start()
    try:
        seeder.seed(0, 0, 0)
        assert lock.log == [("acquire", True, True), "release"]
        held = FakeLock(free=False)
        with pytest.raises(RuntimeError, match="lock has been held"):
            locked_seeder(held).seed(0, 0, 0)
        assert "release" not in held.log
    finally:
        leave.set()
        thread.join()


def draw_all(seeder: Seeder, private: list[Any]) -> list[Any]:
    out = []
    for position in (0, 1, 1 << 33):
        seeder.seed(77, 3, position)
        out.append((random.random(), np.random.normal(), float(torch.randn(())),
                    [public_state(g) for g in private]))
    return out


def child_draws(connection: Any) -> None:
    private = [PRIVATE[n]() for n in PRIVATE]
    connection.send(draw_all(seeder_of(private), private))
    connection.close()


def from_child(method: str, target: Callable[..., None], *args: Any) -> Any:
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(theirs, *args))
    process.start()
    theirs.close()
    try:
        assert ours.poll(DEADLINE_S), "no answer from the child"
        return ours.recv()
    finally:
        process.join(1)
        process.kill()
        process.join()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_equal_keys_draw_equally_in_every_process(method: str) -> None:
    private = [PRIVATE[n]() for n in PRIVATE]
    assert from_child(method, child_draws) == draw_all(seeder_of(private), private)


def child_seeds(connection: Any, seeder: Seeder) -> None:
    seeder.seed(1, 2, 3)
    connection.send((random.getstate(), torch.initial_seed()))  # NumPy's are out of reach
    connection.close()


def test_lock_held_at_fork_does_not_hang_child() -> None:
    held, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with np.random.get_bit_generator().lock:
            held.set()
            leave.wait(DEADLINE_S)

    thread = threading.Thread(target=hold)
    thread.start()
    seeder = seeder_of()
    try:
        assert held.wait(DEADLINE_S)
        answer = from_child("fork", child_seeds, seeder)
    finally:
        leave.set()
        thread.join()
    seeder.seed(1, 2, 3)
    assert answer == (random.getstate(), torch.initial_seed())


# ---- memory ---------------------------------------------------------------------------


@pytest.mark.parametrize("public", [False, True])
def test_nothing_leaks(public: bool) -> None:
    private = [PRIVATE[n]() for n in PRIVATE]
    seeder = seeder_of(private, hooks=[abs], public=public)
    times = 100 if public else 8_000
    watched = [*private, torch.default_generator, np.random.mtrand._rand, abs]

    def rounds() -> tuple[int, list[int]]:
        for position in range(times):
            seeder.seed(1 << 60, 1 << 61, position + (1 << 62))
        gc.collect()
        return sys.getallocatedblocks(), [sys.getrefcount(o) for o in watched]

    rounds()
    seen = [rounds() for _ in range(6)]
    # Leaks grow in each round; allocations of other threads only in some.
    assert min(b[0] - a[0] for a, b in zip(seen, seen[1:])) < max(50, times // 100)
    assert all(counts == seen[0][1] for _, counts in seen)


def test_seeder_is_collected_with_its_cycle() -> None:
    class Hook:
        def __call__(self, seed: int) -> None: ...

    hook = Hook()
    hook.seeder = seeder_of(hooks=[hook])
    gone = weakref.ref(hook)
    del hook
    gc.collect()
    assert gone() is None


def test_swapping_does_not_leak_bit_generators() -> None:
    seeder = seeder_of()
    for _ in range(3):
        bitgen = np.random.MT19937(1)
        before = sys.getrefcount(bitgen)
        np.random.set_bit_generator(bitgen)
        seeder.seed(1, 2, 3)
        assert sys.getrefcount(bitgen) > before
        np.random.set_bit_generator(np.random.PCG64(2))
        seeder.seed(1, 2, 3)
        assert sys.getrefcount(bitgen) == before
