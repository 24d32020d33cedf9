"""Stop with Ctrl-C in the middle of an epoch, start again, and training resumes there.

    python examples/resume.py checkpoint.pt    # press Ctrl-C, and run the same line again
"""

import os
import signal
import sys
import time

import torch

from minato import DataLoader, Dataset

EPOCHS = 2


class Samples(Dataset):
    def __len__(self):
        return 80

    def __getitem__(self, index):
        time.sleep(0.002)
        return index, torch.rand(())  # after a resume, random numbers repeat too


if __name__ == "__main__":
    path = sys.argv[1] if len(sys.argv) > 1 else "checkpoint.pt"
    # The loader's own generator is part of the loader's state. torch's global generator is
    # for the program to save (torch.get_rng_state()), as with any loader.
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(Samples(), batch_size=4, shuffle=True, num_workers=2, generator=generator)
    epoch, total = 0, torch.zeros((), dtype=torch.float64)
    if os.path.exists(path):
        saved = torch.load(path)
        epoch, total = saved["epoch"], saved["total"]
        loader.load_state_dict(saved["loader"])  # with another number of workers, if you like

    # Ctrl-C lets the current step end; the state includes the batches that were trained on.
    stop = []
    signal.signal(signal.SIGINT, lambda *_: stop.append(True))
    for epoch in range(epoch, EPOCHS):
        for indices, values in loader:
            total += values.sum()
            print(f"epoch {epoch}: samples {indices.tolist()}", flush=True)
            time.sleep(0.01)  # your training step
            if stop:
                state = {"epoch": epoch, "total": total, "loader": loader.state_dict()}
                torch.save(state, path + ".new")
                os.replace(path + ".new", path)  # never leaves half a checkpoint
                sys.exit(f"stopped; run it again to go on from {path}")
    print(f"the sum of all random numbers: {total:.9f}")
    if os.path.exists(path):
        os.unlink(path)
