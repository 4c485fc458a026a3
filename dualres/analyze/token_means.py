"""Means over tokens that come in pieces."""
# N tokens

import torch
from torch import Tensor


class Means:
    """Under each number, a layer's or a branch's say, the mean over all tokens that were added."""

    def __init__(self) -> None:
        self.totals: dict[int, Tensor] = {}
        self.tokens: dict[int, int] = {}

    def add(self, number: int, values: Tensor) -> None:
        """A value for every token. (…,N)"""
        seen = values.detach().double()
        self.totals[number] = self.totals.get(number, seen.new_zeros(())) + seen.sum(-1)
        self.tokens[number] = self.tokens.get(number, 0) + seen.shape[-1]

    def __bool__(self) -> bool:
        return bool(self.totals)

    def __getitem__(self, number: int) -> Tensor:
        return self.totals[number] / self.tokens[number]

    def numbers(self) -> list[int]:
        """Those that have a mean, from the lowest."""
        return sorted(self.totals)

    def stacked(self) -> Tensor:
        """All, one below the other. (numbers,…)"""
        return torch.stack([self[number] for number in self.numbers()])
