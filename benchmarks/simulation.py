"""The simulated world of ``simulate.py``: workers, a consumer, and the loaders.

:class:`Minato` and :class:`MinatoReady` use the engine's own policy code;
:class:`Torch` and :class:`Published` are for comparison. Time is virtual
and in nanoseconds; a run is a function of its arguments.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import policies

#: The steps of one sample in nanoseconds; only the published rules look inside.
Steps = tuple[int, ...]
#: A worker's task: (batch, first position, samples).
Work = tuple[int, int, int]
#: (worker, duration, task).
Start = tuple[int, int, Work]


@dataclass(frozen=True)
class Case:
    """One workload: workers, consumer, and costs of samples."""

    name: str
    batch: int
    workers: int
    batches: int
    #: (generator) -> steps of one sample, in ns; drawn once per index
    draw: Callable[[random.Random], Steps]
    ranks: int = 1
    #: consumer time per batch as a share of the workers' time per batch; 0: it takes none
    consumer: float = 0.0
    #: relative standard deviation of one index's cost between epochs
    noise: float = 0.01
    group: str = ""

    @property
    def samples(self) -> int:
        """Samples of one rank."""
        return self.batch * self.batches


@dataclass
class Epoch:
    """One rank's epoch: indices in order, and their costs."""

    indices: list[int]
    steps: list[Steps]
    cost: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.cost = [sum(s) for s in self.steps]


@dataclass
class Outcome:
    """Result of one simulated epoch."""

    wall: int
    bound: int
    first: int
    peak_batches: float
    displaced: int

    @property
    def ratio(self) -> float:
        """Wall time over the work bound."""
        return self.wall / self.bound


class Loader:
    """One rank's loader: gives tasks to idle workers and delivers complete batches."""

    def __init__(self, case: Case, epoch: Epoch, overhead: int) -> None:
        self.case = case
        self.epoch = epoch
        self.overhead = overhead
        self.idle = list(range(case.workers))[::-1]
        self.displaced = 0
        self.peak = 0.0
        self.delivered = 0

    def start(self, now: int) -> list[Start]:
        """All tasks that start now."""
        raise NotImplementedError

    def finish(self, worker: int, work: Work, now: int) -> None:
        """The worker has finished its task."""
        raise NotImplementedError

    def fetch(self, now: int) -> bool:
        """Delivers a batch if one is complete; returns whether it did."""
        raise NotImplementedError

    def took(self, consumer_ns: int) -> None:
        """Records the consumer's time between two batches."""

    def _batch(self, number: int) -> range:
        size = self.case.batch
        return range(number * size, min((number + 1) * size, len(self.epoch.cost)))


class Torch(Loader):
    """torch's loader: a batch is one task of one worker, two batches per worker."""

    def __init__(self, case: Case, epoch: Epoch, overhead: int, in_order: bool) -> None:
        super().__init__(case, epoch, overhead)
        self.in_order = in_order
        self.queues: list[deque[int]] = [deque() for _ in range(case.workers)]
        self.held = [0] * case.workers
        self.cycle = itertools.cycle(range(case.workers))
        self.owner: dict[int, int] = {}
        self.sent = 0
        self.complete: deque[int] = deque()
        for _ in range(2 * case.workers):
            self._send()

    def _send(self) -> None:
        if self.sent == self.case.batches:
            return
        worker = next(self.cycle)
        while not self.in_order and self.held[worker] >= 2:
            worker = next(self.cycle)
        self.queues[worker].append(self.sent)
        self.held[worker] += 1
        self.owner[self.sent] = worker
        self.sent += 1

    def start(self, now: int) -> list[Start]:
        started: list[Start] = []
        for worker in list(self.idle):
            if self.queues[worker]:
                self.idle.remove(worker)
                number = self.queues[worker].popleft()
                cost = sum(self.epoch.cost[p] for p in self._batch(number))
                started.append((worker, cost + self.overhead, (number, 0, 0)))
        return started

    def finish(self, worker: int, work: Work, now: int) -> None:
        self.idle.append(worker)
        self.complete.append(work[0])
        self.peak = max(self.peak, len(self.complete))

    def fetch(self, now: int) -> bool:
        if not self.complete:
            return False
        number = self.complete[0]
        if self.in_order:
            number = self.delivered
            if number not in self.complete:
                return False
        self.complete.remove(number)
        self.displaced = max(self.displaced, abs(number - self.delivered))
        self.delivered += 1
        self.held[self.owner[number]] -= 1
        self._send()
        return True


class Published(Loader):
    """The published rules: a P75 timeout, slow-task workers, fast before slow.

    interrupt: as in the paper's text, a step is cut off at the timeout and
    repeated. Otherwise the time is checked between steps, as in its pseudo-code, and
    the next step follows (the pseudo-code repeats one).
    """

    QUEUE = 100

    def __init__(self, case: Case, epoch: Epoch, overhead: int, interrupt: bool) -> None:
        super().__init__(case, epoch, overhead)
        self.interrupt = interrupt
        self.timeout = sorted(epoch.cost)[(len(epoch.cost) * 3) // 4]
        self.parts = [self._parts(s) for s in epoch.steps]
        late = sum(rest for _, rest in self.parts)
        early = sum(first for first, _ in self.parts)
        share = round(case.workers * late / (late + early))
        self.slow_workers = min(max(share, 1), case.workers - 1) if late else 0
        self.next = 0
        self.temp: deque[int] = deque()
        self.ready: tuple[deque[int], deque[int]] = (deque(), deque())
        self.building: list[int] = []
        self.queue: deque[list[int]] = deque()

    def _parts(self, steps: Steps) -> tuple[int, int]:
        """Time with a loading worker, and with a slow-task worker after that."""
        done = 0
        for number, step in enumerate(steps):
            if self.case.workers > 1 and done + step > self.timeout:
                if self.interrupt:
                    return self.timeout, sum(steps[number:])
                return done + step, sum(steps[number + 1:])
            done += step
        return done, 0

    def start(self, now: int) -> list[Start]:
        started: list[Start] = []
        for worker in list(self.idle):
            if worker < self.slow_workers:
                if not self.temp or len(self.ready[1]) >= self.QUEUE * self.slow_workers:
                    continue
                position = self.temp.popleft()
                duration = self.parts[position][1]
            else:
                loaders = self.case.workers - self.slow_workers
                room = self.QUEUE * loaders
                if (self.next == len(self.epoch.cost) or len(self.temp) >= room
                        or len(self.ready[0]) >= room):
                    continue
                position = self.next
                self.next += 1
                duration = self.parts[position][0]
            self.idle.remove(worker)
            started.append((worker, duration + self.overhead, (0, position, 1)))
        return started

    def finish(self, worker: int, work: Work, now: int) -> None:
        position = work[1]
        self.idle.append(worker)
        if worker >= self.slow_workers and self.parts[position][1]:
            self.temp.append(position)
        else:
            self.ready[self.epoch.cost[position] > self.timeout].append(position)
        self._build()

    def _build(self) -> None:
        while len(self.queue) < self.QUEUE and (self.ready[0] or self.ready[1]):
            self.building.append((self.ready[0] or self.ready[1]).popleft())
            formed = self.delivered + len(self.queue)
            if len(self.building) == len(self._batch(formed)):
                for position in self.building:
                    away = abs(position // self.case.batch - formed)
                    self.displaced = max(self.displaced, away)
                self.queue.append(self.building)
                self.building = []
        held = sum(map(len, self.ready)) + len(self.building)
        self.peak = max(self.peak, len(self.queue) + held / self.case.batch)

    def fetch(self, now: int) -> bool:
        if not self.queue:
            return False
        self.queue.popleft()
        self.delivered += 1
        self._build()
        return True


class Minato(Loader):
    """minato's policies: the sampler's batches, in order or as they complete."""

    CAPACITY = 1 << 17
    #: tasks published before a worker asks for them, as a share of the workers: this
    #: hides the engine's latency, and fixes the order early
    AHEAD = 0.5

    def __init__(self, case: Case, epoch: Epoch, overhead: int, cost: policies.Cost,
                 in_order: bool, memory: float) -> None:
        super().__init__(case, epoch, overhead)
        self.cost = cost
        self.in_order = in_order
        self.window = 2 * case.workers
        self.consumer = 0
        self.left = [len(self._batch(b)) for b in range(case.batches)]
        self.open = [False] * case.batches
        self.gone = [False] * case.batches
        self.head = 0
        self.prefix = 0
        self.complete: deque[int] = deque()
        self.ahead: dict[int, int] = {}
        # In batches: each is charged as a whole.
        self.memory_limit = max(1, int(memory * self.window))
        self.memory_used = 0
        capacity = min(self.CAPACITY, case.samples)
        self.dispatch = policies.Dispatch(capacity, *self._rates())
        self.board: deque[Work] = deque()
        self.inserted = 0
        self._insert()

    def _rates(self) -> tuple[int, int, int, int, int, int]:
        case = self.case
        period = policies.period(self.consumer, int(self.cost.mean), case.batch,
                                     case.workers)
        typical = self.cost.quantile(500)
        starved_below = max(1, self.window // 2)
        return period, self.consumer, typical, self.window, starved_below, case.workers

    def _predict(self, position: int) -> int:
        return self.cost.wall(self.epoch.indices[position])

    def _insert(self) -> None:
        """Cuts the coming batches into tasks, while memory allows."""
        while self.inserted < self.case.batches:
            if len(self.dispatch) + self.case.batch > self.CAPACITY:
                return
            batch = self._batch(self.inserted)
            costs = [self._predict(p) for p in batch]
            mean = sum(costs) // len(costs)
            limit = policies.chunk(mean, self.overhead, len(costs), 0)
            at = 0
            while at < len(costs):
                n = policies.chunk_next(costs[at:], self.overhead, limit)
                cost = sum(costs[at:at + n])
                self.dispatch.insert(batch[at], self.inserted, cost, n)
                at += n
            self.inserted += 1
        self.dispatch.close()

    def _memory_may(self, is_head: bool) -> bool:
        return is_head or self.memory_used + 2 <= self.memory_limit  # one is for the head

    def _may(self, batch: int) -> bool:
        return self.open[batch] or self._memory_may(batch == self.head)

    def _admit(self, batch: int) -> None:
        if not self.open[batch]:
            self.open[batch] = True
            self.memory_used += 1
            self.peak = max(self.peak, self.memory_used)

    def _view(self) -> tuple[int, int, int]:
        ready = self.prefix - self.head if self.in_order else len(self.complete)
        return self.head, ready, self.case.batches

    def _choose(self) -> tuple[int, int, int, int, int, int, int] | None:
        choice = self.dispatch.peek(*self._view())
        if choice is not None and not self._may(choice[1]):
            choice = self.dispatch.first()
            if choice is None or not self._may(choice[1]):
                return None
        return choice

    def _publish(self) -> None:
        """Decides tasks for the idle workers, and AHEAD of them for those still busy."""
        want = len(self.idle) + int(self.AHEAD * self.case.workers)
        while len(self.board) < want:
            choice = self._choose()
            if choice is None:
                return
            self.dispatch.take(choice[6])
            self._admit(choice[1])
            self.board.append((choice[1], choice[0], choice[3]))

    def start(self, now: int) -> list[Start]:
        started: list[Start] = []
        self._publish()
        while self.idle and self.board:
            batch, first, n = self.board.popleft()
            cost = sum(self.epoch.cost[first:first + n]) + self.overhead
            started.append((self.idle.pop(), cost, (batch, first, n)))
        return started

    def _report(self, first: int, n: int) -> None:
        for p in range(first, first + n):
            cost = self.epoch.cost[p]
            self.cost.observe(self.epoch.indices[p], cost)

    def finish(self, worker: int, work: Work, now: int) -> None:
        batch, first, n = work
        self.idle.append(worker)
        self._report(first, n)
        self.left[batch] -= n
        if self.left[batch] == 0:
            self.complete.append(batch)
            while self.prefix < self.case.batches and self.left[self.prefix] == 0:
                self.prefix += 1

    def fetch(self, now: int) -> bool:
        if self.in_order:
            if self.prefix == self.head:
                return False
            number = self.head
            self.complete.remove(number)
        elif self.complete:
            number = self.complete.popleft()
        else:
            return False
        self.displaced = max(self.displaced, abs(number - self.delivered))
        self.delivered += 1
        self.gone[number] = True
        self.memory_used -= 1
        while self.head < self.case.batches and self.gone[self.head]:
            self.head += 1
        self.prefix = max(self.prefix, self.head)
        self.head = min(self.head, self.case.batches - 1)
        self.dispatch.retime(*self._rates())
        self._insert()
        return True

    def took(self, consumer_ns: int) -> None:
        self.consumer += (consumer_ns - self.consumer) // 4


class MinatoReady(Minato):
    """minato's ready-first batches with bounded displacement."""

    DISPLACEMENT = 16

    def __init__(self, case: Case, epoch: Epoch, overhead: int, cost: policies.Cost,
                 memory: float) -> None:
        super().__init__(case, epoch, overhead, cost, False, memory)
        self.form = policies.Ready(case.batch, self.DISPLACEMENT)
        self.form.end(case.samples)
        self.waiting = list(self.left)  # samples of each of the sampler's batches
        self.ready = 0
        self.before: list[tuple[int, bool]] = []  # done too early to be marked: a heap

    def _view(self) -> tuple[int, int, int]:
        last = -(-self.form.horizon // self.case.batch) - 1
        return self.delivered, self.ready // self.case.batch, last

    def finish(self, worker: int, work: Work, now: int) -> None:
        super().finish(worker, work, now)
        _, first, n = work
        self.cost.learn_timeout()
        for p in range(first, first + n):
            heapq.heappush(self.before, (p, self.cost.is_slow(self.epoch.cost[p])))

    def _advance(self, of: list[int]) -> None:
        while self.head < self.case.batches - 1 and of[self.head] == 0:
            self.head += 1

    def fetch(self, now: int) -> bool:
        while self.before and self.before[0][0] < self.form.horizon:
            self.form.mark(*heapq.heappop(self.before))
            self.ready += 1
        chosen = self.form.form(self._memory_may(False))
        if not chosen:
            self._advance(self.left)  # finished samples wait for others; there is no head
            return False
        self.ready -= len(chosen)
        self.delivered += 1
        for p in chosen:
            number = p // self.case.batch
            self.waiting[number] -= 1
            if self.waiting[number] == 0:  # its samples stay in memory until the last is used
                self.memory_used -= 1
        self._advance(self.waiting)
        self.displaced = self.form.displaced_max
        self.dispatch.retime(*self._rates())
        self._insert()
        return True


def run(loaders: Sequence[Loader], consumer_ns: int) -> Outcome:
    """One epoch of all ranks in lock-step; the consumer takes consumer_ns per batch."""
    case = loaders[0].case
    events: list[tuple[int, int, int, int, Work]] = []
    order = itertools.count()
    now = first = 0
    step, got_at = 0, [0] * len(loaders)
    have: set[int] = set()
    busy = False

    def start(rank: int) -> None:
        for worker, ns, work in loaders[rank].start(now):
            heapq.heappush(events, (now + ns, next(order), rank, worker, work))

    def settle(ranks: Sequence[int]) -> None:
        nonlocal first, busy
        for rank in ranks:
            while True:
                start(rank)
                if rank in have or busy or step == case.batches:
                    break
                if not loaders[rank].fetch(now):
                    start(rank)  # the head may have changed, and passes the memory limit
                    break
                have.add(rank)
                got_at[rank] = now
                first = first or now
        if len(have) == len(loaders) and not busy:
            busy = True
            heapq.heappush(events, (now + consumer_ns, next(order), -1, 0, (0, 0, 0)))

    everyone = range(len(loaders))
    settle(everyone)
    while step < case.batches:
        now, _, rank, worker, work = heapq.heappop(events)
        if rank >= 0:
            loaders[rank].finish(worker, work, now)
            settle((rank,))
            continue
        step, busy = step + 1, False
        have.clear()
        for r in everyone:
            loaders[r].took(now - got_at[r])
        settle(everyone)
    total = max(sum(x.epoch.cost) for x in loaders)
    return Outcome(wall=now, bound=max(total // case.workers, consumer_ns * case.batches),
                   first=first, peak_batches=max(x.peak for x in loaders),
                   displaced=max(x.displaced for x in loaders))
