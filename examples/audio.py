"""Audio files of very different lengths: a random window of each, as a log spectrogram.

    python examples/audio.py           # makes 40 WAV files in a temporary folder
    python examples/audio.py FOLDER    # yours: mono WAV files of 16 bits
"""

import random
import sys
import tempfile
import wave
from pathlib import Path

import numpy as np
import torch

from minato import DataLoader, Dataset

RATE, WINDOW = 8000, 4000  # half a second


class Spectrograms(Dataset):
    def __init__(self, folder):
        self.files = sorted(Path(folder).glob("*.wav"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        with wave.open(str(self.files[index]), "rb") as file:
            begin = random.randrange(max(1, file.getnframes() - WINDOW))
            file.setpos(begin)
            samples = np.frombuffer(file.readframes(WINDOW), np.int16)
        signal = torch.zeros(WINDOW)
        signal[: len(samples)] = torch.from_numpy(samples / 32768)
        # Each worker uses one thread for torch, so that workers do not compete for the cores.
        power = torch.stft(
            signal, n_fft=256, hop_length=128, window=torch.hann_window(256), return_complex=True
        ).abs()
        return torch.log1p(power), begin / RATE


def make(folder):
    for i in range(40):
        frames = RATE // 2 if i % 10 else 20 * RATE  # every tenth is forty times as long
        tone = np.sin(np.arange(frames) * (2 * np.pi * (200 + 50 * i) / RATE))
        with wave.open(str(Path(folder, f"{i:02}.wav")), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE)
            file.writeframes((tone * 20000).astype("<i2").tobytes())


def load(folder):
    loader = DataLoader(Spectrograms(folder), batch_size=8, shuffle=True, num_workers=2)
    for spectrograms, begins in loader:
        print(tuple(spectrograms.shape), f"windows begin at {begins.min():.1f} to "
              f"{begins.max():.1f} s")  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) > 1:
        load(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            make(folder)
            load(folder)
