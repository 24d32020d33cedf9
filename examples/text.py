"""Texts of uneven length: batches of similar lengths, padded, and long texts that start early.

    python examples/text.py
"""

import random

import torch

from minato import DataLoader, Dataset, Sampler

WORDS = "the quick brown fox jumps over the lazy dog".split()


class Texts(Dataset):
    """Most have a few words, some have hundreds."""

    def __init__(self, count=96):
        draw = random.Random(0)
        self.lengths = [draw.randint(200, 400) if i % 16 == 0 else draw.randint(3, 30)
                        for i in range(count)]

    def __len__(self):
        return len(self.lengths)

    def cost_hint(self, index):
        """Estimated seconds for a sample. Optional: minato knows the costs from the second epoch
        on, and this is for the first."""
        return 2e-6 * self.lengths[index]

    def __getitem__(self, index):
        words = [WORDS[(index + i) % len(WORDS)] for i in range(self.lengths[index])]
        return torch.tensor([sum(map(ord, word)) % 1000 for word in words])  # a tokenizer


class SimilarLengths(Sampler):
    """Batches of neighbours in length, in a random order; a custom batch sampler, as for torch."""

    def __init__(self, lengths, size):
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.batches = [order[i : i + size] for i in range(0, len(order), size)]

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return (self.batches[i] for i in torch.randperm(len(self.batches)).tolist())


def padded(texts):
    """A custom collate_fn. Its samples may come from several workers."""
    lengths = torch.tensor([len(text) for text in texts])
    return torch.nn.utils.rnn.pad_sequence(texts, batch_first=True), lengths


if __name__ == "__main__":
    torch.manual_seed(0)
    dataset = Texts()
    loader = DataLoader(
        dataset, batch_sampler=SimilarLengths(dataset.lengths, 8), num_workers=2,
        collate_fn=padded, persistent_workers=True,
    )  # fmt: skip
    for epoch in range(2):
        tokens = places = 0
        for texts, lengths in loader:
            tokens, places = tokens + int(lengths.sum()), places + texts.numel()
        print(f"epoch {epoch}: {tokens} tokens, {places / tokens - 1:.0%} of padding")
