"""Batches: similar lengths, random order, decided by seed and epoch; cut for devices without changing a step."""

from __future__ import annotations

import hashlib
import itertools
import json
import random

import pytest
from accelerate.data_loader import BatchSamplerShard

from deltune.train.tasks.encoding import EncodedRows, LengthGroupedBatches

LENGTHS = random.Random(3).choices(range(1, 61), k=1003)


def padded(steps: list[list[int]]) -> int:
    return sum(len(step) * max(LENGTHS[i] for i in step) for step in steps)


def real(steps: list[list[int]]) -> int:
    return sum(LENGTHS[i] for step in steps for i in step)


@pytest.mark.parametrize(("size", "whole", "rest"), [(16, 62, 11), (4, 250, 3)])
def test_every_row_once_and_the_short_step_last(size: int, whole: int, rest: int) -> None:
    steps = list(LengthGroupedBatches(LENGTHS, size, seed=1))
    assert sorted(itertools.chain(*steps)) == list(range(1003))
    assert [len(step) for step in steps] == [size] * whole + [rest]
    assert len(LengthGroupedBatches(LENGTHS, size, seed=1)) == whole + 1


def test_the_order_is_the_one_of_earlier_runs() -> None:
    """A resumed run and a repeated one go on in it: if this fails, the numbers of old results cannot be had again."""
    steps = list(LengthGroupedBatches([5, 3, 9, 1, 7, 2, 8], 2, seed=4))
    assert steps == [[3, 5], [0, 4], [6, 2], [1]]
    pools = json.dumps(list(LengthGroupedBatches(LENGTHS, 4, seed=4)))  # more steps than are sorted together
    assert hashlib.sha256(pools.encode()).hexdigest()[:16] == "9c47291207a9b0f2"


def test_lengths_within_a_step_are_similar() -> None:
    whole = list(LengthGroupedBatches(LENGTHS, 16, seed=1))[:-1]
    assert padded(whole) < 1.1 * real(whole)


@pytest.mark.parametrize("tokens", [None, 600])
def test_the_order_of_steps_is_random(tokens: int | None) -> None:
    steps = list(LengthGroupedBatches(LENGTHS, 16, seed=1, max_tokens=tokens))[:-1]
    means = [sum(LENGTHS[i] for i in step) / len(step) for step in steps]
    rising = sum(a < b for a, b in itertools.pairwise(means))
    assert 12 < rising < len(means) - 12


@pytest.mark.parametrize("tokens", [None, 1, 300, 10**6])
@pytest.mark.parametrize("size", [1, 16, 1003, 5000])
def test_seed_and_epoch_decide(size: int, tokens: int | None) -> None:
    one, two = (LengthGroupedBatches(LENGTHS, size, seed=1, max_tokens=tokens) for _ in range(2))
    assert list(one) == list(two) == list(one), "not how often it was asked"
    two.set_epoch(1)
    assert list(one) != list(two) != list(LengthGroupedBatches(LENGTHS, size, seed=2, max_tokens=tokens))
    assert len(list(one)) == len(list(two)) == len(one), "every epoch has as many steps"


@pytest.mark.parametrize("tokens", [None, 300])
@pytest.mark.parametrize(("processes", "accumulated"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 4), (3, 1)])
def test_cutting_leaves_a_step_its_rows(processes: int, accumulated: int, tokens: int | None) -> None:
    """Dealt by accelerate, as many batches to each process, the processes' batches of a step are the step."""
    chunks = processes * accumulated
    whole = list(LengthGroupedBatches(LENGTHS, 16, seed=1, max_tokens=tokens))
    cut = LengthGroupedBatches(LENGTHS, 16, 1, chunks, tokens)
    shards = [BatchSamplerShard(cut, processes, p, even_batches=False) for p in range(processes)]  # type: ignore[arg-type]
    dealt = [list(shard) for shard in shards]
    assert {len(batches) for batches in dealt} == {len(shard) for shard in shards} == {len(whole) * accumulated}
    for i, step in enumerate(whole):
        parts = [batches[j] for j in range(i * accumulated, (i + 1) * accumulated) for batches in dealt]
        assert list(itertools.chain(*parts)) == step
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1


def test_as_many_rows_as_fit() -> None:
    steps = list(LengthGroupedBatches(LENGTHS, 0, seed=1, max_tokens=300))
    assert sorted(itertools.chain(*steps)) == list(range(1003))
    assert all(len(step) * max(LENGTHS[i] for i in step) <= 300 for step in steps)
    assert padded(steps) < 1.1 * real(steps) and len(steps) < 1.2 * real(steps) / 300
    one = list(LengthGroupedBatches([4, 50, 4, 60, 4], 0, seed=1, max_tokens=40))
    assert sorted(map(sorted, one)) == [[0, 2, 4], [1], [3]], "what is larger is a step by itself"


def test_what_a_row_takes_of_a_batch_by_tokens() -> None:
    rows = [
        {"input_ids": [1, 2, 3], "labels": 0},
        {"input_ids": [1, 2, 3], "labels": [1, 2, 3, 4, 5]},
        {"input_ids": [[1, 2], [1, 2, 3]], "labels": 1},
    ]
    assert EncodedRows(rows, 0).sizes == [3, 5, 6]
