"""How requests are split into passes: every request once, within bounds, at the least cost; and passes in parallel."""

from __future__ import annotations

import threading
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltune.serving.concurrency import ConcurrentPasses
from deltune.serving.encoding import PASS_OVERHEAD, split_by_length, split_evenly
from deltune.serving.engine import Server

from .specimens import Deltas, ask, check, deltas

Lengths = tuple[int, int]
LENGTHS = st.tuples(st.sampled_from([0, 0, 3, 20]), st.integers(1, 40))


def cost(parts: list[list[Lengths]], overhead: int) -> int:
    """What passes cost, in tokens."""
    return sum(overhead + size(part) for part in parts)


def size(part: list[Lengths]) -> int:
    """The tokens of a pass."""
    return len(part) * (max(prompt for prompt, _ in part) + max(text for _, text in part))


def all_splits(ordered: list[Lengths]) -> list[list[list[Lengths]]]:
    """All ways of cutting a list into consecutive parts."""
    ways = []
    for bits in range(1 << (len(ordered) - 1)):
        cuts = [0, *(i + 1 for i in range(len(ordered) - 1) if bits >> i & 1), len(ordered)]
        ways.append([ordered[begin:end] for begin, end in pairwise(cuts)])
    return ways


@given(st.lists(LENGTHS, min_size=1, max_size=7), st.integers(0, 100), st.integers(1, 300))
def test_requests_are_split_at_the_least_cost(requests: list[Lengths], overhead: int, tokens: int) -> None:
    parts = split_by_length(requests, lambda one: one, overhead, tokens)
    assert sorted(one for part in parts for one in part) == sorted(requests)
    assert all(len(part) == 1 or size(part) <= tokens for part in parts)
    allowed = [
        split for split in all_splits(sorted(requests)) if all(len(part) == 1 or size(part) <= tokens for part in split)
    ]
    assert cost(parts, overhead) == min(cost(split, overhead) for split in allowed)


def test_a_prompt_does_not_make_the_texts_of_others_longer() -> None:
    texts, prompted = [(0, 30)] * 8, [(20, 30)] * 2
    assert split_by_length(texts + prompted, lambda one: one, overhead=64) == [texts, prompted]


@given(st.lists(LENGTHS, min_size=1, max_size=8), st.integers(1, 4))
def test_passes_at_the_same_time_are_as_equal_as_possible(requests: list[Lengths], most: int) -> None:
    parts = split_evenly(requests, lambda one: one, most)
    assert [one for part in parts for one in part] == sorted(requests)
    assert len(parts) <= most
    allowed = [split for split in all_splits(sorted(requests)) if len(split) <= most]
    assert max(map(size, parts)) == min(max(map(size, split)) for split in allowed)


def test_passes_run_at_the_same_time_and_leave_the_number_of_threads_as_it_was() -> None:
    before = torch.get_num_threads()
    barrier = threading.Barrier(3, timeout=60)

    def run(number: int) -> tuple[int, int]:
        barrier.wait()
        return number, torch.get_num_threads()

    passes = ConcurrentPasses(3)
    try:
        torch.set_num_threads(6)
        assert passes.run([partial(run, number) for number in range(3)]) == [(0, 2), (1, 2), (2, 2)]
        assert torch.get_num_threads() == 6

        def fail() -> tuple[int, int]:
            raise RuntimeError("a fault")

        with pytest.raises(RuntimeError, match="a fault"):
            passes.run([fail, partial(tuple, (1, 2))])
        assert torch.get_num_threads() == 6
    finally:
        torch.set_num_threads(before)
        passes.close()


@pytest.fixture(scope="module")
def of() -> Deltas:
    return deltas("bert", "sequence")


@pytest.mark.parametrize("names", [["d0", "d4"], [None, "d6"], ["d0", "d0"]])
def test_a_batch_is_answered_in_passes_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch, of: Deltas, names: list[str | None]
) -> None:
    """Also where all rows of a pass use the same delta, whose tensors another pass must not see."""
    monkeypatch.setitem(PASS_OVERHEAD, "cpu", 4)
    barrier = threading.Barrier(2, timeout=60)
    requests = [ask("classify", 10, number, name) for name in names for number in range(2)]
    bounds = {"max_batch_size": 4, "max_wait": 60.0, "max_pass_seconds": 60.0}
    with Server(of.model(), deltas=of.folder, max_concurrent_passes=2, **bounds) as server:
        backbone: Any = server._backbones.first
        hook = backbone.model.base_model.register_forward_pre_hook(lambda *_: (barrier.wait(), None)[1])
        answers = [future.result(60) for future in [server.submit(request) for request in requests]]
        hook.remove()
    check(of, requests, answers)
