"""The checksum of weights, against plain integers of Python."""

from __future__ import annotations

import random

import pytest
import torch

from workers.weights import checksum as module
from workers.weights.checksum import checksum

MASK = (1 << 64) - 1
ROW = 1 << 14


def factors() -> list[int]:
    """Return the outputs of splitmix64's last step but one, made odd, from its published definition."""
    found = []
    for index in range(1, ROW + 1):
        z = index * 0x9E3779B97F4A7C15 & MASK
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
        found.append(z | 1)
    return found


def expected(data: bytes) -> int:
    numbers = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    own = factors()
    while True:
        rows = [numbers[at : at + ROW] for at in range(0, len(numbers), ROW)]
        numbers = [sum(x * f for x, f in zip(row, own, strict=False)) & MASK for row in rows]
        if len(numbers) == 1:
            return numbers[0] - (1 << 64 if numbers[0] >> 63 else 0)


@pytest.mark.parametrize("count", [1, 5, ROW - 1, ROW, ROW + 1, 3 * ROW, 20 * ROW + 7])
def test_it_is_the_sum_that_it_says_whatever_the_number_of_rows(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = random.Random(count).randbytes(8 * count)
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    assert checksum(tensor) == expected(data)
    monkeypatch.setitem(module._AT_ONCE, "cpu", 3 * ROW)
    assert checksum(tensor) == expected(data)


def test_every_flipped_bit_of_some_bytes_and_every_exchange_is_noticed() -> None:
    generator = random.Random(0)
    tensor = torch.frombuffer(bytearray(generator.randbytes(8 * (2 * ROW + 100))), dtype=torch.uint8)
    before = checksum(tensor)
    for place in [0, len(tensor) - 1, *generator.sample(range(len(tensor)), 60)]:
        for bit in (1, 128):
            tensor[place] ^= bit
            assert checksum(tensor) != before
            tensor[place] ^= bit
    numbers = tensor.view(torch.int64)
    for one, two in [(0, 1), (5, ROW + 5), (ROW, 2 * ROW)]:
        numbers[[one, two]] = numbers[[two, one]]
        assert checksum(tensor) != before
        numbers[[one, two]] = numbers[[two, one]]
    assert checksum(tensor) == before
