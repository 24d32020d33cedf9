"""Datasets of the attacks; at module level, so that spawned processes find them."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import sqlite3
import tempfile
import threading
import time
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset


class Noisy(Dataset):
    """Samples that draw from all three global generators; about a millisecond each."""

    def __init__(self, length: int = 120, floats: int = 300, delay: float = 0.001) -> None:
        self.length, self.floats, self.delay = length, floats, delay

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = torch.rand(self.floats)
        time.sleep(self.delay * random.random())
        return {
            "x": noise + index,
            "y": np.random.rand(7),
            "z": random.random(),
            "index": index,
        }


class Wordy(Noisy):
    """The same with text, which travels in envelopes."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "text": f"{index}-{random.random()}"}


class Ragged(Noisy):
    """Samples of many shapes, for a custom collate function."""

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        sample["x"] = torch.rand(1 + random.randrange(self.floats))
        return sample


def keep_list(samples: list) -> list:
    return samples


class Images(Dataset):
    """Large samples in which every element equals the index."""

    def __init__(self, length: int = 40, shape: tuple[int, ...] = (64, 1024), delay=0.0):
        self.length, self.shape, self.delay = length, shape, delay

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.delay)
        return torch.full(self.shape, float(index)), index


class Slow(Dataset):
    """Samples that take some time."""

    def __init__(self, length: int = 64, seconds: float = 0.3) -> None:
        self.length, self.seconds = length, seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds)
        return index


class Does(Dataset):
    """Integers; one index calls a function first."""

    def __init__(self, what: str, at: int = 5, length: int = 24, flag: Any = None) -> None:
        self.what, self.at, self.length, self.flag = what, at, length, flag

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index == self.at:
            getattr(self, self.what)()
        return index

    def _first_time(self) -> bool:
        if self.flag is None:
            return True
        with self.flag.get_lock():
            self.flag.value += 1
            return self.flag.value == 1

    def leave(self) -> None:
        if self._first_time():
            os._exit(7)

    def end_by_signal(self) -> None:
        if self._first_time():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(20)

    def take_all_memory(self) -> None:
        import resource

        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), hard))
        try:
            self.hoard = [bytearray(16 << 20) for _ in range(64)]
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

    def fork_children(self) -> None:
        for code in (0, 3):
            pid = os.fork()
            if pid == 0:
                os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
        pid = os.fork()
        if pid == 0:
            raise SystemExit(4)  # unwinds through the loader's own frames
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4

    def start_threads(self) -> None:
        threads = [threading.Thread(target=time.sleep, args=(0.01,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


class Decodes(Dataset):
    """Decodes each sample into the same file of a folder that it makes when it is unpickled. A
    process that has not made the folder reads wrong data, because others write to the file, too."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.folder, self.made_by = tempfile.TemporaryDirectory(), os.getpid()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        path = os.path.join(self.folder.name, "decoded")
        with open(path, "w") as file:
            file.write(str(index))
        with open(path) as file:
            return index, int(file.read()) if self.made_by == os.getpid() else -1


class Plain(Dataset):
    """Writes to its own data. Reports how often others have written to data that should be private,
    and whether all workers share its tensor."""

    def __init__(self, length: int) -> None:
        self.mine: set[int] = set()
        self.paths = [str(i) for i in range(2_000)]
        self.named = {name: i for i, name in enumerate(self.paths)}
        self.array = np.zeros(20_000)
        self.tensor = torch.zeros(20_000)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        pid, seen = str(os.getpid()), int(self.tensor.sum())
        others = int(self.paths[5] not in ("5", pid)) + int(self.named["5"] not in (5, pid))
        others += int(self.array[:].sum()) - len(self.mine)
        self.paths[5] = self.named["5"] = pid
        self.array[index] = 1
        self.mine.add(index)
        self.tensor[index] = 1
        return others, seen


class StartsThread(Noisy):
    """Leaves a thread behind wherever it is unpickled."""

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        threading.Thread(target=threading.Event().wait, daemon=True).start()


class WithTools(Noisy):
    """Holds a queue, a lock and a value of a multiprocessing context."""

    def __init__(self, context: Any) -> None:
        super().__init__(48)
        self.queue, self.lock = context.Queue(), context.Lock()
        self.value = context.Value("i", 0)

    def __getitem__(self, index: int) -> dict[str, Any]:
        with self.lock, self.value.get_lock():
            self.value.value += 1
        self.queue.put(index)
        return super().__getitem__(index)


class Unpicklable(Noisy):
    def __init__(self) -> None:
        super().__init__(8)
        self.function = lambda: None


class Counting(IterableDataset):
    """Each worker counts its own part."""

    def __init__(self, length: int = 60, delay: float = 0.0) -> None:
        self.length, self.delay = length, delay

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(first, self.length, step):
            time.sleep(self.delay)
            yield i


class SharesHandle(Dataset):
    """Its pickle holds the only reference to a storage handle, as pickles of an accelerator's
    tensors do. Records in a file who unpickled it, and in its samples who made them."""

    def __init__(self, log: str) -> None:
        self.log = log

    def __getstate__(self) -> dict:
        torch.zeros(3).untyped_storage()._share_cuda_()
        return vars(self)

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        with open(self.log, "a") as log:
            print(os.getpid(), file=log)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        return os.getpid()


class Opens(Dataset):
    """Opens a file or connection when it is unpickled, as many datasets do, and cannot be pickled
    after that."""

    def __init__(self, path: str, what: str, length: int = 1024) -> None:
        self.path, self.what, self.length = path, what, length

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        getattr(self, "open_" + self.what)()

    def open_file(self) -> None:
        self.file = open(self.path, "rb", buffering=0)

    def open_sqlite(self) -> None:
        self.database = sqlite3.connect(self.path, check_same_thread=False)

    def open_socket(self) -> None:
        host, port = self.path.split(":")
        self.socket = socket.create_connection((host, int(port)))

    def open_nothing(self) -> None:
        open(self.path, "rb").close()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, getattr(self, "read_" + self.what)(index)

    def read_file(self, index: int) -> int:
        self.file.seek(8 * index)
        time.sleep(0)  # lets other workers run
        return int.from_bytes(self.file.read(8), "little")

    def read_sqlite(self, index: int) -> int:
        return self.database.execute("SELECT v FROM t WHERE i = ?", (index,)).fetchone()[0]

    def read_socket(self, index: int) -> int:
        self.socket.sendall(index.to_bytes(8, "little"))
        got = b""
        while len(got) < 8:
            got += self.socket.recv(8 - len(got))
        return int.from_bytes(got, "little")

    def read_nothing(self, index: int) -> int:
        return index * index


class SharesTensors(Dataset):
    """Tensors that travel in shared memory, one directly and one inside an object."""

    def __init__(self, length: int = 64) -> None:
        self.squares = torch.arange(length) ** 2
        self.parts = {"first": self.squares[:2], "other": torch.arange(length)}

    def __len__(self) -> int:
        return len(self.squares)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, self.squares[index]


class DefaultMethod(Dataset):
    """How a process that a sample starts would start."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return multiprocessing.get_start_method(allow_none=True)
