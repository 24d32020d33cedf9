"""Choices out of bytes, for the targets in Python."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


class Draws:
    """Numbers and choices out of bytes; zeros behind their end."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def below(self, n: int) -> int:
        byte = self.data[self.at] if self.at < len(self.data) else 0
        self.at += 1
        return byte % n

    def one_of(self, choices: list[T]) -> T:
        return choices[self.below(len(choices))]
