"""Frames of videos: opening and seeking are expensive, the next frame is cheap.

    python examples/video.py           # makes four short videos in a temporary folder
    python examples/video.py FOLDER    # yours: .mp4 files

Needs PyAV (pip install av).
"""

import sys
import tempfile
from pathlib import Path

import av
import numpy as np
import torch

from minato import DataLoader, Dataset, Sampler


class Frames(Dataset):
    """Every frame of every video is a sample. The dataset keeps the last opened video."""

    def __init__(self, folder):
        self.files = sorted(Path(folder).glob("*.mp4"))
        self.places = []  # of each sample: the video, and the frame in it
        for number, path in enumerate(self.files):
            with av.open(str(path)) as video:
                self.places += [(number, i) for i, _ in enumerate(video.decode(video=0))]
        self.opened, self.frames, self.next = -1, None, 0

    def __len__(self):
        return len(self.places)

    def locality_key(self, index):
        """Samples with the same key share an opened file: one worker makes them, in succession.
        Without this method, minato learns the groups from the costs of samples."""
        return self.places[index][0]

    def __getitem__(self, index):
        number, wanted = self.places[index]
        if number != self.opened or wanted < self.next:
            self.frames = av.open(str(self.files[number])).decode(video=0)
            self.opened, self.next = number, 0
        while self.next <= wanted:
            frame = next(self.frames)
            self.next += 1
        return torch.from_numpy(frame.to_ndarray(format="rgb24")), number


class VideoByVideo(Sampler):
    """Videos in random order, with the frames of each in order."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __iter__(self):
        for number in torch.randperm(len(self.dataset.files)).tolist():
            yield from (i for i, place in enumerate(self.dataset.places) if place[0] == number)


def make(folder):
    for number in range(4):
        with av.open(str(Path(folder, f"{number}.mp4")), "w") as video:
            stream = video.add_stream("mpeg4", rate=24)
            stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
            for i in range(12):
                pixels = np.full((48, 64, 3), 20 * number + 10 * i, np.uint8)
                frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
                video.mux(stream.encode(frame))
            video.mux(stream.encode())


def load(folder):
    dataset = Frames(folder)
    loader = DataLoader(dataset, batch_size=8, sampler=VideoByVideo(dataset), num_workers=2)
    for frames, numbers in loader:
        print(tuple(frames.shape), "of videos", sorted(set(numbers.tolist())))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        load(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            make(folder)
            load(folder)
