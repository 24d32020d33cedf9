"""Options of balanced scheduling: ready-first batches, epochs started early, more workers."""

import multiprocessing
import pickle
import threading
import time

import pytest
import torch
from contract.support import error_text
from workers.test_native import wait_for

import minato
from minato import _core
from minato._records import Epoch
from minato.iterators.loader_memo import memo_of


class Costly(torch.utils.data.Dataset):
    """Samples that sleep; some much longer."""

    def __init__(self, n=96, slow=7, fast_s=0.0005, slow_s=0.02):
        self.n, self.slow, self.fast_s, self.slow_s = n, slow, fast_s, slow_s

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        time.sleep(self.slow_s if index % self.slow == 0 else self.fast_s)
        return index, torch.rand(2), f"name{index}"


class Last(torch.utils.data.Dataset):
    """The last sample takes as long as a hundred others, which is known. ``at``: when each
    was started."""

    def __init__(self, n):
        self.n = n
        self.started = torch.zeros(1, dtype=torch.int64).share_memory_()
        self.at = torch.full((n,), -1, dtype=torch.int64).share_memory_()

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        self.at[index] = self.started[0]
        self.started += 1
        time.sleep(self.cost_hint(index))
        return index

    def cost_hint(self, index):
        return 0.2 if index == self.n - 1 else 0.002


class Counting(torch.utils.data.Dataset):
    """``rank``: at which start, counted over all epochs, each sample was last made."""

    def __init__(self, n, slow_s=()):
        self.n, self.slow_s = n, dict(slow_s)
        self.begun = multiprocessing.Value("q", 0)
        self.rank = torch.zeros(n, dtype=torch.int64).share_memory_()

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        with self.begun.get_lock():
            self.begun.value += 1
            self.rank[index] = self.begun.value
        time.sleep(self.slow_s.get(index, 0.001))
        return index


class Opens:
    """An object that cannot be unpickled at index 9."""

    def __init__(self, index, raises):
        self.index, self.raises = index, raises

    def __setstate__(self, state):
        self.__dict__ = state
        if self.index == 9:
            raise self.raises("cannot be opened here")


class TwoGates(torch.utils.data.Dataset):
    """Two samples of the first eight wait for the gate."""

    def __init__(self, sample=int):
        self.sample = sample
        self.gate = multiprocessing.get_context("fork").Event()

    def __len__(self):
        return 16

    def __getitem__(self, index):
        assert index not in (0, 5) or self.gate.wait(60)
        return self.sample(index)


def with_text(index):
    return index, f"name{index}"


def large(index):
    """Too large to be copied out of an envelope."""
    return index, torch.full((30_000,), float(index))


def large_and_odd(index):
    """No layout can hold both kinds of samples."""
    return index if index % 2 else float(index), large(index)[1]


class Failing(torch.utils.data.Dataset):
    """One sample raises. ``made``: how often each was started."""

    def __init__(self, n):
        self.n = n
        self.made = torch.zeros(n, dtype=torch.int64).share_memory_()

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        self.made[index] += 1
        if index == 5:
            raise ValueError("corrupt")
        return index


def with_worker(samples):
    return torch.utils.data.get_worker_info().id, [s[0] for s in samples]


def indices(batches):
    return [b[0].tolist() for b in batches]


def indices_of(batches):
    return [b.tolist() for b in batches]


def make(dataset, **options):
    generator = torch.Generator().manual_seed(options.pop("seed", 1))
    options = {"batch_size": 8, "num_workers": 3, "shuffle": True} | options
    return minato.DataLoader(dataset, generator=generator, **options)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
class TestReady:
    options = dict(batching="ready", in_order=False)


    def test_known_slow_sample_starts_before_prefetch_window(self):
        from minato.iterators.ready import DISPLACEMENT

        dataset = Last(120)
        loader = minato.DataLoader(dataset, batch_size=2, num_workers=2, **self.options)
        got = indices_of(loader)
        assert sorted(sum(got, [])) == list(range(120))
        assert all(abs(i // 2 - k) <= DISPLACEMENT for k, b in enumerate(got) for i in b)
        # Positions within reach of the delivered batches start with 120 - 2 * (16 + 1).
        assert dataset.at[119] < 60


    def test_a_worker_collates(self):
        options = dict(shuffle=False, collate_fn=with_worker, persistent_workers=True)
        loader = make(Costly(n=99), **options, **self.options)
        for _ in range(2):
            got = list(loader)
            assert {worker for worker, _ in got} <= {0, 1, 2}
            assert sorted(batch for _, batch in got) == [
                list(range(k, min(k + 8, 99))) for k in range(0, 99, 8)
            ]

    def test_rest_of_delayed_batches_is_mixed(self):
        """Two of four batches wait for one each, and three are full without those."""
        loader = make(data := TwoGates(), **(self.options | self.small))
        it = iter(loader)
        first = indices_of(next(it) for _ in range(3))
        assert all(len(batch) == 4 and {0, 5}.isdisjoint(batch) for batch in first)
        state = loader.state_dict()
        data.gate.set()
        assert sorted(sum(first + indices_of(it), [])) == list(range(16))
        for collate_fn in (None, torch.as_tensor):  # a worker can collate no half batches
            other = make(data, **(self.options | self.small), collate_fn=collate_fn)
            other.load_state_dict(state)
            again = indices_of(other)
            assert sorted(sum(first + again, [])) == list(range(16))
            assert [len(batch) for batch in again] == [4]

    small = dict(batch_size=4, shuffle=False)

    def test_objects_and_odd_samples_in_a_mixed_batch(self):
        """Text travels next to its row, and a sample without a row alone."""
        loader = make(data := TwoGates(with_text), **(self.options | self.small))
        it = iter(loader)
        got = [next(it) for _ in range(3)]
        data.gate.set()
        got += it
        found = [pair for batch in got for pair in zip(batch[0].tolist(), batch[1], strict=True)]
        assert sorted(found) == [(i, f"name{i}") for i in range(16)]

    @pytest.mark.parametrize("sample", [large, large_and_odd])
    def test_envelopes_of_split_batch_are_read_once(self, sample):
        """The program keeps what lies in it, and cannot be given that again."""
        loader = make(data := TwoGates(sample), **(self.options | self.small))
        it = iter(loader)
        got = [next(it) for _ in range(3)]
        data.gate.set()
        got += it
        found = [pair for batch in got for pair in zip(*batch, strict=True)]
        assert sorted(int(index) for index, _ in found) == list(range(16))
        assert all(bool((field == int(index)).all()) for index, field in found)

    def test_a_sample_that_fails_fails_alone(self):
        """The others of its task are made: they may go into another batch."""
        loader = make(
            data := Failing(64), persistent_workers=True, batch_size=32, **self.options
        )
        for _ in range(3):  # a task has many samples once they are known to be cheap
            data.made.zero_()
            it, got, failed = iter(loader), [], 0
            while True:
                try:
                    got += next(it, [None])
                except ValueError as error:
                    failed += 1
                    assert "index 5" in error_text(error)
                if got and got[-1] is None:
                    break
            assert failed == 1 and len(got) == 33
            assert data.made.tolist() == [1] * 64


    def test_early_break_then_a_whole_epoch(self):
        loader = make(Costly(), persistent_workers=True, **self.options)
        next(iter(loader))
        assert sorted(sum(indices(loader), [])) == list(range(96))

    @pytest.mark.parametrize("left", [[0], [2, 9], [1, 2, 5]])
    def test_resume_with_partial_batches_fills_the_window(self, left):
        """The rest of some batches fills none: more is drawn, however short the window."""

        def sampler():
            generator = torch.Generator().manual_seed(3)
            return torch.utils.data.RandomSampler(range(18), generator=generator)

        def loader():
            options = dict(batch_size=4, num_workers=1, prefetch_factor=1, timeout=30)
            return minato.DataLoader(range(18), sampler=sampler(), **options, **self.options)

        order = list(sampler())
        next(iter(plain := loader()))
        state = plain.state_dict()
        state["delivered"] = left[0]
        state["delivered_beyond"] = [k for k in range(left[0], 12) if k not in left]
        other = loader()
        other.load_state_dict(state)
        got = indices_of(other)
        rest = [order[k] for k in left + list(range(12, 18))]
        assert sorted(sum(got, [])) == sorted(rest)
        assert [len(batch) for batch in got[:-1]] == [4] * (len(got) - 1)

    @pytest.mark.parametrize(
        "wrong",
        [
            dict(in_order=True),
            dict(batch_size=None, shuffle=None),
            dict(scheduling="static"),
            dict(persistent_workers=True, prefetch_next_epoch=True),
        ],
    )
    def test_senseless_combinations(self, wrong):
        with pytest.raises(ValueError, match="batching='ready' needs"):
            make(Costly(), **{**self.options, **wrong})

    def test_unknown_value(self):
        with pytest.raises(ValueError, match="batching must be"):
            make(Costly(), batching="fastest")


class Breaks(torch.utils.data.Sampler):
    """Draws its order from its own generator, and raises while it is broken."""

    broken, begun = False, 0

    def __init__(self, n, where, raises):
        self.n, self.where, self.raises = n, where, raises
        self.rng = torch.Generator().manual_seed(3)

    def __len__(self):
        return self.n

    def __iter__(self):
        self.begun += 1
        order = torch.randperm(self.n, generator=self.rng).tolist()
        if self.broken and self.where == "when it begins":
            self.fail()
        return self.walk(order, self.broken)

    def walk(self, order, broken):
        for place, index in enumerate(order):
            if broken and place == 3 and self.where == "at an index":
                self.fail()
            yield Unsent(self) if broken and place == 3 and "planned" in self.where else index

    def fail(self):
        raise self.raises("not now")


class Unsent:
    """An index that cannot be pickled."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __reduce__(self):
        self.sampler.fail()


class TestNextEpochEarly:
    def options(self, **more):
        return dict(persistent_workers=True, num_workers=2, **more)

    @pytest.mark.parametrize("in_order", [True, False])
    def test_epochs_equal_those_without_prefetch_next_epoch(self, in_order):
        early = make(Costly(), prefetch_next_epoch=True, **self.options(in_order=in_order))
        plain = make(Costly(), **self.options())
        for _ in range(4):
            a, b = list(early), list(plain)
            if not in_order:
                a.sort(key=lambda batch: batch[0].tolist())
                b.sort(key=lambda batch: batch[0].tolist())
            for x, y in zip(a, b, strict=True):
                assert torch.equal(x[0], y[0]) and torch.equal(x[1], y[1])


    def test_batches_done_before_their_epoch_are_its_own(self):
        """Out of order; the epoch after theirs is planned before they are delivered."""

        class Gate(Counting):
            def __init__(self, n):
                super().__init__(n)
                self.gates = multiprocessing.Value("q", 0)

            def __getitem__(self, index):
                index = super().__getitem__(index)
                if index == self.n - 1:
                    with self.gates.get_lock():
                        self.gates.value += 1
                        gate = self.gates.value
                    until, end = self.begun.value + 12, time.monotonic() + 60
                    # The next epoch's gate opens early, once it is known to be slow.
                    while self.begun.value < until and self.gates.value == gate:
                        assert time.monotonic() < end, "the next epoch was not begun"
                        time.sleep(0.001)
                return index

        loader = make(
            Gate(48), prefetch_next_epoch=True, in_order=False, batch_size=4,
            **self.options(shuffle=False),
        )
        for _ in range(4):
            assert sorted(sum(indices_of(loader), [])) == list(range(48))

    @pytest.mark.parametrize("raises", [OSError, KeyboardInterrupt])
    def test_error_while_receiving_costs_one_batch(self, raises):
        """The error takes the place of its batch; the epoch ends normally."""

        class Opening(Counting):
            def __getitem__(self, index):
                return Opens(index, raises)

        loader = make(Opening(40), collate_fn=list, batch_size=4, prefetch_next_epoch=True,
                      **self.options(shuffle=False, timeout=60))  # fmt: skip
        for _ in range(2):
            iterator, whole, failed = iter(loader), 0, 0
            for _ in range(10):
                try:
                    whole += len(next(iterator)) == 4
                except raises:
                    failed += 1
            assert (whole, failed) == (9, 1)
            assert next(iterator, None) is None

    def test_early_epoch_is_planned_past_the_window(self):
        loader = make(Counting(600), prefetch_next_epoch=True, **self.options())
        assert sorted(sum(indices_of(loader), [])) == list(range(600))
        plan = loader._iterator._planner
        assert len(plan.planned) > plan.window.size() and plan.next_epoch.left(plan.next_epoch.early) == 0

    def test_slow_sample_in_early_epoch_starts_early(self):
        """The sample was planned before its cost was known."""
        slow, place = 280, 180
        data = Counting(300, {slow: 0.05})

        class Sampler(torch.utils.data.SequentialSampler):
            epoch = -1

            def __iter__(self):
                self.epoch += 1
                order = list(range(300))
                if self.epoch == 1:
                    order.insert(place, order.pop(slow))
                return iter(order)

        loader = make(
            data, prefetch_next_epoch=True, batch_size=2, sampler=Sampler(data),
            **self.options(shuffle=None),
        )
        it = iter(loader)
        it._planner.window.far = True  # as with torch's samplers, which cannot give this order
        list(it)
        assert sum(indices_of(loader), [])[place] == slow
        assert data.rank[slow] - 300 < place - 20

    @pytest.mark.parametrize("taken", [5, 149])
    def test_break_keeps_order_of_later_epochs(self, taken):
        """Also if the sampler's end was reached far ahead of torch's loader."""
        orders = []
        for cls in (make, torch.utils.data.DataLoader):
            early = {"prefetch_next_epoch": True} if cls is make else {}
            data, generator = Counting(600), torch.Generator().manual_seed(7)
            order = torch.utils.data.RandomSampler(data, generator=generator)
            loader = cls(data, batch_size=4, sampler=order, **early,
                         **self.options(**({"shuffle": None} if cls is make else {})))
            list(loader)
            it = iter(loader)
            for _ in range(taken):
                next(it)
            orders.append([sum(indices_of(loader), []), sum(indices_of(loader), [])])
        assert orders[0] == orders[1]


    @pytest.mark.parametrize("raises", [OSError, KeyboardInterrupt])
    @pytest.mark.parametrize("where", ["when it begins", "at an index", "as it is planned"])
    def test_next_epochs_sampler_error_is_raised_in_turn(self, where, raises):
        """The previous epoch is not affected, and the generators are as if it had not started."""
        found = []
        for early in (False, True):
            sampler = Breaks(24, where, raises)
            loader = make(Counting(24), prefetch_next_epoch=early, sampler=sampler, batch_size=2,
                          **self.options(shuffle=None))  # fmt: skip
            it = iter(loader)
            sampler.broken = True
            first, interrupts = [], 0
            while len(first) < 12:
                try:
                    first.append(next(it).tolist())
                except KeyboardInterrupt:
                    interrupts += 1
            assert interrupts == (early and raises is KeyboardInterrupt)
            assert next(it, None) is None
            state = loader.state_dict()
            with pytest.raises(raises, match="not now"):
                iter(loader)
            sampler.broken = False
            other = make(Counting(24), sampler=Breaks(24, where, raises), batch_size=2,
                         **self.options(shuffle=None))  # fmt: skip
            other.load_state_dict(state)
            found.append([first, indices_of(loader), indices_of(loader), indices_of(other)])
        assert found[0] == found[1]

    def test_error_after_short_epoch_is_raised_in_turn(self):
        class Short(Breaks):
            """Breaks through its class: changing its own attributes would discard the epoch."""

        sampler = Short(4, "when it begins", OSError)
        loader = make(Counting(4), prefetch_next_epoch=True, sampler=sampler, batch_size=2,
                      **self.options(shuffle=None))  # fmt: skip
        it = iter(loader)
        assert loader._iterator._planner.next_epoch.early.progress.generators is not None
        Short.broken = True
        for _ in range(2):
            assert sorted(sum((batch.tolist() for batch in it), [])) == list(range(4))
            if sampler.begun == 2:
                it = iter(loader)
        assert sampler.begun == 3
        with pytest.raises(OSError, match="not now"):
            iter(loader)

    @pytest.mark.parametrize("taken", [3, 12])
    def test_generator_set_by_program_is_kept(self, taken):
        """Also if an epoch that was started early is undone."""
        found = []
        for early in (False, True):
            sampler = torch.utils.data.RandomSampler(range(24), generator=torch.Generator())
            loader = make(Counting(24), prefetch_next_epoch=early, sampler=sampler, batch_size=2,
                          **self.options(shuffle=None))  # fmt: skip
            it = iter(loader)
            for _ in range(taken):
                next(it)
            if taken == 12:
                assert next(it, None) is None
                loader.set_epoch(1)
            sampler.generator.manual_seed(5)
            found.append(sum(indices_of(loader), []))
        assert found[0] == found[1]


    def test_prefetch_next_epoch_needs_persistent_workers(self):
        with pytest.raises(ValueError, match="persistent_workers=True"):
            make(Costly(), prefetch_next_epoch=True)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
class TestMoreWorkers:
    @pytest.mark.parametrize(
        "wrong, text",
        [
            (dict(autoscale=4), "a pair"),
            (dict(autoscale=(1, 2, 3)), "a pair"),
            (dict(autoscale=(0, 2)), "positive integers"),
            (dict(autoscale=(1.0, 2)), "positive integers"),
            (dict(autoscale=(True, 2)), "positive integers"),
            (dict(autoscale=(1, 1)), "low <= num_workers <= high"),
            (dict(autoscale=(4, 8)), "low <= num_workers <= high"),
            (dict(autoscale=(1, 4), num_workers=0), "num_workers > 0"),
            (dict(autoscale=(1, 4), scheduling="static"), "scheduling='balanced'"),
            (dict(straggler_threshold="soon"), "straggler_threshold must be"),
            (dict(straggler_threshold=-1.0), "straggler_threshold must be"),
            (dict(straggler_threshold=float("nan")), "straggler_threshold must be"),
        ],
    )
    def test_bad_values(self, wrong, text):
        with pytest.raises(ValueError, match=text):
            make(Costly(), **wrong)

    @pytest.mark.parametrize("gone", ["max_workers", "slow_timeout"])
    def test_old_names_are_unknown(self, gone):
        with pytest.raises(TypeError, match=gone):
            make(Costly(), **{gone: 4})

    @pytest.mark.parametrize("seconds", [float("inf"), 1e300, 1e-300])
    def test_a_threshold_that_no_clock_can_count(self, seconds):
        loader = make(Costly(), num_workers=1, autoscale=(1, 2), straggler_threshold=seconds)
        assert len(list(loader)) == len(loader)
        stragglers = loader.stats()["scheduler"]["stragglers"]
        assert seconds < 1 or stragglers == 0

    def test_less_than_a_nanosecond_is_not_learned(self):
        # 0 would be: and nothing is slow before something was learned
        engine = _core.Engine(
            1, 0, False, window=1, max_workers=2, straggler_seconds=1e-12, costs=_core.CostModel(8)
        )

        class Watched:
            def __getitem__(self, index):
                wait_for(lambda: engine.scheduler()["stragglers"] > 0)

        try:
            engine.start(-1, -1)
            worker = _core.Worker(engine.segment, 0, Watched(), None, None, pickle.loads)
            worker.ready()
            engine.set_form(None)
            assert engine.plan(Epoch(0, 0, pickle.dumps), [0], 0, 0, False, None, 0, None) == 0
            assert worker.next().kind == 1
        finally:
            engine.stop()
            engine.close()

    def test_batches_do_not_depend_on_straggler_threshold(self):
        few = make(Costly(), num_workers=1)
        many = make(Costly(), num_workers=1, autoscale=(1, 6), straggler_threshold=0.01)
        for a, b in zip(few, many, strict=True):
            assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])

    def test_standby_worker_starts_for_straggler_and_exits(self):
        """One worker, one sample that blocks: only a standby worker can do the rest."""
        context = torch.multiprocessing.get_context("fork")
        gate, passed = context.Event(), context.Semaphore(0)

        class Gate(torch.utils.data.Dataset):
            def __len__(self):
                return 8

            def __getitem__(self, index):
                if index == 0:
                    assert gate.wait(60)
                else:
                    passed.release()
                return index

        loader = make(
            Gate(), batch_size=1, shuffle=False, num_workers=1, autoscale=(1, 2),
            straggler_threshold=0.05, prefetch_factor=8, multiprocessing_context=context,
        )
        it = iter(loader)
        release = threading.Thread(
            target=lambda: (all([passed.acquire(timeout=60) for _ in range(7)]), gate.set())
        )
        release.start()
        assert [int(next(it)) for _ in range(8)] == list(range(8))
        release.join()
        decisions = loader.stats()["scheduler"]["decisions"]
        assert any("standby worker is admitted" in d["why"] for d in decisions)


class TestCosts:
    def test_threshold_is_learned_from_rows_and_batches(self):
        for collate in (None, list):
            loader = make(Costly(n=42), collate_fn=collate, num_workers=2)
            list(loader)
            cost = loader.stats()["cost"]
            assert cost["known"] == 42 and cost["samples"] == 42
            slow = dict(loader.stats()["slow"])
            assert len(slow) == 10 and all(slow.get(i, 0.02) >= 0.02 for i in range(0, 42, 7))

    def test_a_known_slow_sample_starts_early(self):
        """The last sample in order is the slowest: with known costs, it starts early. One worker
        alone keeps the sampler's order."""

        dataset = Last(40)
        loader = minato.DataLoader(dataset, batch_size=1, num_workers=2)
        assert [int(b) for b in loader] == list(range(40))
        assert dataset.at[39] < 30  # in the sampler's order it would be the 40th


class TestWindow:
    def test_small_batches_last_while_the_slowest_are_made(self):
        """Two workers, torch's window of four batches, and a consumer that takes one: the engine
        makes as many as pass during a slow one, about sixty by the given costs."""
        loader = make(Costly(n=400, slow_s=0, fast_s=0), batch_size=2, num_workers=2)
        assert len(list(loader)) == 200
        for index in [*range(400)] * 4:
            memo_of(loader).costs.observe(index, 200_000_000 if index % 100 == 50 else 1_000_000)
        iterator = iter(loader)
        next(iterator)
        wait_for(lambda: iterator._finished() >= 40)
        assert len(list(iterator)) == 199


class TestUnknownCosts:
    """The first epoch: a sample turns out to be slow while it runs."""

    @pytest.mark.parametrize("place", [0, 60])
    @pytest.mark.parametrize("more", [dict(), dict(in_order=False), dict(collate_fn=list)])
    def test_other_workers_continue_past_prefetch_window(self, place, more):
        """A loader that stops at the window, or at the drawn indices, never opens the gate."""
        context = torch.multiprocessing.get_context("fork")
        gate, passed = context.Event(), context.Semaphore(0)

        class Gate(torch.utils.data.Dataset):
            def __len__(self):
                return 400

            def __getitem__(self, index):
                if index == place:
                    assert gate.wait(60)
                else:
                    passed.release()
                return index

        loader = make(Gate(), batch_size=2, shuffle=False, num_workers=2,
                      multiprocessing_context=context, **more)  # fmt: skip
        release = threading.Thread(
            target=lambda: (all([passed.acquire(timeout=60) for _ in range(398)]), gate.set())
        )
        release.start()
        got = [[int(i) for i in batch] for batch in loader]
        release.join()
        assert sorted(sum(got, [])) == list(range(400))
        assert not more.get("in_order", True) or sum(got, []) == list(range(400))


@pytest.mark.parametrize(
    "options",
    [{}, {"in_order": False}, {"in_order": False, "batching": "ready"}],
    ids=["in order", "out of order", "ready"],
)
def test_waiting_takes_no_cpu_time(options):
    """Not even if other samples of the batch are done."""
    loader = minato.DataLoader(
        Costly(4, slow=4, slow_s=1.0), batch_size=4, num_workers=2, persistent_workers=True,
        **options,
    )  # fmt: skip
    for _ in range(2):  # then rows are written in place
        begin = time.thread_time()
        assert sorted(next(iter(loader))[0].tolist()) == [0, 1, 2, 3]
        assert time.thread_time() - begin < 0.3
