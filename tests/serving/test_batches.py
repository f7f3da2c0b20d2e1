"""How requests are split into passes: every request once, within bounds, at the least cost."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from deltune.serving.encoding import split_by_length

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
