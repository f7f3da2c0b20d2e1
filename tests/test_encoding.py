"""Batches: similar lengths, random order, decided by seed and epoch."""

from __future__ import annotations

import itertools
import random

import pytest

from deltune.encoding import ByLength

LENGTHS = random.Random(3).choices(range(1, 61), k=1003)


def batches(order: list[int], size: int) -> list[list[int]]:
    return [order[i : i + size] for i in range(0, len(order), size)]


def test_every_row_once_and_short_batches_last() -> None:
    order = list(ByLength(LENGTHS, 16, seed=1))
    assert sorted(order) == list(range(1003)) and len(ByLength(LENGTHS, 16, seed=1)) == 1003


def test_lengths_within_a_batch_are_similar() -> None:
    whole = batches(list(ByLength(LENGTHS, 16, seed=1)), 16)[:-1]
    padded = sum(16 * max(LENGTHS[i] for i in batch) for batch in whole)
    real = sum(LENGTHS[i] for batch in whole for i in batch)
    assert padded < 1.1 * real


def test_the_order_of_batches_is_random() -> None:
    means = [sum(LENGTHS[i] for i in b) / 16 for b in batches(list(ByLength(LENGTHS, 16, seed=1)), 16)[:-1]]
    rising = sum(a < b for a, b in itertools.pairwise(means))
    assert 15 < rising < len(means) - 15


@pytest.mark.parametrize("size", [1, 16, 1003, 5000])
def test_seed_and_epoch_decide(size: int) -> None:
    one, two = ByLength(LENGTHS, size, seed=1), ByLength(LENGTHS, size, seed=1)
    assert list(one) == list(two) == list(one), "not how often it was asked"
    two.set_epoch(1)
    assert list(one) != list(two) != list(ByLength(LENGTHS, size, seed=2))
