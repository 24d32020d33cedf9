"""A step that the program hands to a device and does not wait for.

    python benchmarks/analyze/queued.py                # samples that take longer than the step
    python benchmarks/analyze/queued.py --ready        # prints the ceiling: samples that are there

A thread with a queue stands for a GPU: it works for STEP seconds on each batch, in order, and its
events tell the time on its own clock, as those of CUDA do. ``next()`` returns while steps before it
still run, so the time between two calls says nothing of the step.
"""

import argparse
import queue
import threading
import time

import torch
from torch.utils.data import DataLoader, Dataset

STEP, SAMPLE = 0.03, 0.01
SAMPLES, BATCH, WORKERS, EPOCHS = 320, 8, 2, 2


class Device:
    """What it does takes its place behind what was asked for before."""

    def __init__(self):
        self.free = 0.0
        self.work = queue.Queue(maxsize=1024)
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        while True:
            asked, seconds, event = self.work.get()
            self.free = max(self.free, asked) + seconds
            time.sleep(max(0.0, self.free - time.monotonic()))
            if event is not None:
                event.at = self.free
            self.work.task_done()

    def launch(self, seconds, event=None):
        self.work.put((time.monotonic(), seconds, event))


class Event:
    """As torch.cuda.Event."""

    def __init__(self, enable_timing=False):
        self.at = None

    def record(self, _stream=None):
        DEVICE.launch(0.0, self)

    def query(self):
        return self.at is not None

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3


class Samples(Dataset):
    def __len__(self):
        return SAMPLES

    def decode(self, index):
        time.sleep(SAMPLE)
        return torch.tensor(index)

    def __getitem__(self, index):
        return self.decode(index)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ready", action="store_true", help="no sample is waited for")
    options = parser.parse_args()
    began, samples = time.monotonic(), 0
    batches = [torch.arange(BATCH)] * (SAMPLES // BATCH)
    loader = DataLoader(Samples(), BATCH, num_workers=WORKERS, persistent_workers=True)
    for _ in range(EPOCHS):
        for batch in batches if options.ready else loader:
            DEVICE.launch(STEP)
            samples += len(batch)
    DEVICE.work.join()
    print(f"{samples / (time.monotonic() - began):.1f} samples/s")


if __name__ == "__main__":
    DEVICE = Device()
    torch.cuda.is_initialized = lambda: True
    torch.cuda.Event = Event
    main()
