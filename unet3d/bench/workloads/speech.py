"""Speech: waveforms of uneven length, to be turned into spliced log-mel features.

    python -m unet3d.bench.workloads.speech --out data/speech --utterances 200

A folder of LibriSpeech, or any part of it, is taken as it is: SPEAKER/CHAPTER/*.flac with
*.trans.txt (needs soundfile). Without it, this program makes data of the kind.

An utterance is a row of tokens, each a sound with two formants, at 16 kHz in a .wav file.
A sample is pre-emphasised, padded to whole frames, put through an 80 band mel filter bank
(20 ms windows every 10 ms, logarithm, each band normalised), masked as in SpecAugment and
spliced (3 frames become 1); a batch is padded to its longest utterance.

`--light S` and `--heavy S` add simulated steps that sleep: the light one in every sample, the
heavy one in every fifth (indices with remainder 4 modulo 5, so they cost the same in
every epoch; with `--heavy-drawn`, a fifth that is drawn again each epoch; `--heavy-share` makes
another share heavy). The published setting is
`--light 0.5 --heavy 3` (or 10); `--time-scale 0.01` shortens both.
"""
from __future__ import annotations

import argparse
import functools
import sys
import time
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from unet3d.bench.workloads import base
from unet3d.data import mix
from unet3d.nifti import DataError
from unet3d.parallel import each

KIND = "speech"
RATE = 16000  # Hz
TOKENS = 28  # and 0, the blank
WINDOW, HOP, FFT = 320, 160, 512  # samples
BANDS = 80
SPLICE = 3  # frames
BAND_MASKS, BAND_WIDTH = 2, 20  # at most this many bands each
TIME_MASKS, TIME_SHARE = 2, 0.05  # at most this share of the utterance each
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ' "  # of LibriSpeech: token 1 is A
HEAVY_SHARE = 0.2
DRAWN_OF = 1 << 32  # a draw of heavy samples is one of this many


# -- data ------------------------------------------------------------------------------


def read_librispeech(folder: Path) -> list[dict[str, Any]]:
    """The items of all transcripts below a folder: letters are the tokens 1 to 26, the apostrophe
    27, the space 28. Raises DataError."""
    items = []
    for listed in sorted(folder.rglob("*.trans.txt")):
        for line in listed.read_text().splitlines():
            name, _, text = line.partition(" ")
            if name:
                path = listed.parent / f"{name}.flac"
                items.append({"name": str(path.relative_to(folder)), "tokens": [
                    ALPHABET.index(letter) + 1 for letter in text.upper() if letter in ALPHABET]})
    if items and not (folder / items[0]["name"]).is_file():
        raise DataError(f"{folder / items[0]['name']}: missing, and a transcript lists it")
    return items


def read_sound(path: Path) -> np.ndarray:
    """int16 samples of a .wav or .flac file, one channel at RATE. Raises DataError."""
    try:
        if path.suffix == ".wav":
            with wave.open(str(path)) as stream:
                return np.frombuffer(stream.readframes(stream.getnframes()), np.int16)
        import soundfile
        sound, rate = soundfile.read(path, dtype="int16")
    except ImportError as error:
        raise DataError(f"{path}: reading .flac files needs {error.name}: pip install "
                        "'minato-loader[unet3d,speech]'") from error
    except (OSError, EOFError, RuntimeError, wave.Error) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if rate != RATE or sound.ndim != 1:
        raise DataError(f"{path}: has {rate} Hz and {sound.ndim} channel dimensions; one channel "
                        f"of {RATE} Hz is expected")
    return sound


def speak(rng: np.random.Generator, scale: float) -> tuple[np.ndarray, list[int]]:
    """int16 waveform of about 10 s x `scale` (1 to 35 s) and its tokens, 1 to TOKENS."""
    length = float(np.clip(10 * np.exp(rng.normal(0, 0.6)), 1, 35)) * scale
    sounds, tokens, spoken = [], [], 0
    pitch = rng.uniform(90, 220)
    while not tokens or spoken < length * RATE:
        token = int(rng.integers(1, TOKENS + 1))
        count = int(rng.uniform(0.08, 0.18) * RATE)
        t = np.arange(count) / RATE
        formants = 300 + 90 * (token % 7), 900 + 350 * (token // 7)
        tone = sum(np.sin(2 * np.pi * f * t) for f in (pitch, *formants))
        sounds.append(tone * np.hanning(count))
        tokens.append(token)
        spoken += count
    sound = np.concatenate(sounds)
    sound += rng.normal(0, rng.uniform(0.01, 0.3), sound.size)
    return (sound / np.abs(sound).max() * 20000).astype(np.int16), tokens


def make_utterance(number: int, out: Path, seed: int, scale: float) -> dict[str, Any]:
    """Write utterance `number`; returns its item of the index."""
    sound, tokens = speak(np.random.default_rng(mix(seed, number)), scale)
    name = f"utterance_{number:06d}.wav"
    with wave.open(str(out / name), "wb") as stream:
        stream.setparams((1, 2, RATE, sound.size, "NONE", ""))
        stream.writeframes(sound.tobytes())
    return {"name": name, "tokens": tokens}


def generate(out: Path, utterances: int, seed: int = 0, scale: float = 1.0,
             workers: int = 1) -> None:
    """Make the folder, unless it exists. Raises DataError if it was made differently."""
    settings = {"kind": KIND, "utterances": utterances, "seed": seed, "scale": scale}
    if base.made_already(out, settings):
        return
    out.mkdir(parents=True, exist_ok=True)
    work = functools.partial(make_utterance, out=out, seed=seed, scale=scale)
    items = each(work, range(utterances), workers, "utterances")
    base.write_index(out, settings, sorted(items, key=lambda item: item["name"]))


# -- samples and batches ---------------------------------------------------------------


@functools.cache
def mel_bank() -> np.ndarray:
    """Triangular filters, float32 [FFT / 2 + 1, BANDS], evenly spaced on the mel scale."""
    def mel(hertz: Any) -> Any:
        return 2595 * np.log10(1 + hertz / 700)

    edges = np.linspace(0, mel(RATE / 2), BANDS + 2)
    places = mel(np.fft.rfftfreq(FFT, 1 / RATE))[:, None]
    rise = (places - edges[:-2]) / (edges[1:-1] - edges[:-2])
    fall = (edges[2:] - places) / (edges[2:] - edges[1:-1])
    bank = np.maximum(0, np.minimum(rise, fall))
    return (bank / np.maximum(bank.sum(0), 1e-3)).astype(np.float32)


def log_mel(sound: np.ndarray) -> np.ndarray:
    """Normalised log-mel features float32 [frames, BANDS] of a float32 waveform, one frame for
    each started HOP."""
    emphasised = np.append(sound[:1], sound[1:] - np.float32(0.97) * sound[:-1])
    frames = -(-emphasised.size // HOP)
    padded = np.pad(emphasised, (0, (frames - 1) * HOP + WINDOW - emphasised.size))
    windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP]
    spectrum = np.fft.rfft(windows * np.hanning(WINDOW).astype(np.float32), FFT)
    power = (spectrum.real ** 2 + spectrum.imag ** 2).astype(np.float32)
    # torch's product: NumPy's would start a thread for each core in every worker
    bands = (torch.from_numpy(power) @ torch.from_numpy(mel_bank())).numpy()
    features = np.log(bands + np.float32(1e-6))
    features -= features.mean(0)
    return features / (features.std(0) + np.float32(1e-5))


def mask(features: np.ndarray, rng: np.random.Generator) -> None:
    """SpecAugment in place: bands and stretches of time set to 0, the mean."""
    frames = len(features)
    for _ in range(BAND_MASKS):
        width = int(rng.integers(0, BAND_WIDTH + 1))
        start = int(rng.integers(0, BANDS - width + 1))
        features[:, start:start + width] = 0
    for _ in range(TIME_MASKS):
        width = int(rng.integers(0, int(frames * TIME_SHARE) + 1))
        start = int(rng.integers(0, frames - width + 1))
        features[start:start + width] = 0


def splice(features: np.ndarray) -> np.ndarray:
    """[frames, BANDS] to [ceil(frames / SPLICE), SPLICE * BANDS]; zeros fill the last row."""
    missing = -len(features) % SPLICE
    return np.pad(features, ((0, missing), (0, 0))).reshape(-1, SPLICE * BANDS)


class SpeechDataset(base.SeededDataset):
    """Sample i: features float32 [t, 240], tokens int64 [k], index."""

    def __init__(self, folder: Path, seed: int, light_s: float = 0.0, heavy_s: float = 0.0,
                 drawn: bool = False, heavy_share: float = HEAVY_SHARE,
                 samples: int | None = None) -> None:
        super().__init__(seed)
        self.folder = folder
        items = [] if (folder / base.INDEX_NAME).exists() else read_librispeech(folder)
        if items:
            read_sound(folder / items[0]["name"])  # here, an error is seen before workers start
        else:
            items = base.read_index(folder, KIND, "LibriSpeech (*/*/*.flac with *.trans.txt)")
        self.items = base.choose(items, samples, seed)
        self.light_s, self.heavy_s, self.drawn = light_s, heavy_s, drawn
        self.heavy_share = heavy_share

    def __len__(self) -> int:
        return len(self.items)

    def file(self, index: int) -> Path:
        return self.folder / self.items[index]["name"]

    def simulated_s(self, index: int) -> float:
        """Seconds that sample `index` sleeps in this epoch."""
        return self.light_s + (self.heavy_s if self.is_heavy(index) else 0.0)

    def is_heavy(self, index: int) -> bool:
        """Whether sample `index` sleeps longer in this epoch: at even distances (with a share of
        0.2 the indices 4, 9, ...), or drawn."""
        if self.drawn:
            draw = mix(self.seed, int(self._epoch[0]), index, 5) % DRAWN_OF
            return draw < self.heavy_share * DRAWN_OF
        before, after = (int(n * self.heavy_share + 1e-9) for n in (index, index + 1))
        return after > before

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        rng = self.generator(index)
        features = log_mel(read_sound(self.file(index)) * np.float32(1 / 32768))
        mask(features, rng)
        if seconds := self.simulated_s(index):
            time.sleep(seconds)
        return (torch.from_numpy(splice(features)),
                torch.tensor(self.items[index]["tokens"], dtype=torch.int64), index)


def collate(samples: list) -> base.Batch:
    """features float32 [n, T, 240] and tokens int64 [n, K] padded with zeros, lengths and
    counts int64 [n], index int64 [n]."""
    features, tokens, index = zip(*samples)
    return {"features": nn.utils.rnn.pad_sequence(features, batch_first=True),
            "lengths": torch.tensor([len(f) for f in features]),
            "tokens": nn.utils.rnn.pad_sequence(tokens, batch_first=True),
            "counts": torch.tensor([len(t) for t in tokens]), "index": torch.tensor(index)}


def parts(batch: base.Batch, row: int) -> list[torch.Tensor]:
    """Features and tokens of one row without padding."""
    return [batch["features"][row, :batch["lengths"][row]],
            batch["tokens"][row, :batch["counts"][row]]]


# -- a small network -------------------------------------------------------------------


class Recogniser(nn.Module):
    """Two convolutions over time and a score for each token: [n, T, 240] to [n, T, 29]."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(SPLICE * BANDS, width, 3, padding=1), nn.ReLU(),
            nn.Conv1d(width, width, 3, padding=1), nn.ReLU(), nn.Conv1d(width, TOKENS + 1, 1))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.body(features.transpose(1, 2)).transpose(1, 2)


def make_step(device: torch.device) -> Callable[[base.Batch], float]:
    """A training step of the small network, with the CTC loss."""
    torch.manual_seed(0)
    net = Recogniser().to(device).train()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def step(batch: base.Batch) -> float:
        scores = net(batch["features"].to(device, non_blocking=True))
        loss = functional.ctc_loss(
            scores.log_softmax(2).transpose(0, 1), batch["tokens"].to(device),
            batch["lengths"], batch["counts"], zero_infinity=True)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def share(text: str) -> float:
    """An argument that is a share."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError("must lie between 0 and 1")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The workload's options of a run."""
    parser.add_argument("--light", type=base.seconds, default=0.0, metavar="S",
                        help="every sample sleeps so long (default 0)")
    parser.add_argument("--heavy", type=base.seconds, default=0.0, metavar="S",
                        help="a share of the samples sleeps longer, by this time (default 0)")
    parser.add_argument("--heavy-share", type=share, default=HEAVY_SHARE, metavar="F",
                        help=f"that share, 0 to 1 (default {HEAVY_SHARE:g}: every fifth)")
    parser.add_argument("--heavy-drawn", action="store_true",
                        help="draw the heavy samples anew each epoch")
    parser.add_argument("--time-scale", type=base.seconds, default=1.0, metavar="F",
                        help="factor of both (default 1)")


def open_job(args: argparse.Namespace) -> base.Job:
    """The job of parsed arguments. Raises DataError."""
    dataset = SpeechDataset(args.data, args.seed, args.light * args.time_scale,
                            args.heavy * args.time_scale, args.heavy_drawn,
                            args.heavy_share, args.samples)
    return base.Job(dataset, 8, collate, parts, make_step)


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit status."""
    what = base.Files("speech", "utterances", "of the utterances' lengths", 0.02)
    return base.write_files(argv, __doc__, what, generate)


if __name__ == "__main__":
    sys.exit(main())
