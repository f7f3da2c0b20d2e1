"""How requests are split into passes: every request once, within bounds, at the least cost; and passes in parallel."""

from __future__ import annotations

import threading
from functools import partial
from itertools import pairwise

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from deltune.errors import DeltuneError
from deltune.serve.engine.encoding import split_by_length
from deltune.serve.engine.requests import Request
from deltune.serve.engine.server import Server
from deltune.serve.errors import InvalidRequest

from .served import wait_until
from .specimens import Deltas, answers_of, ask, deltas

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


def test_rows_beyond_the_length_that_scales_all_positions_are_refused() -> None:
    """One row of such a length would change the answers of all rows of its batch (Phi-3, longrope)."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 16,
        "factor": 4.0,
        **factors,
    }
    config = transformers.Phi3Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_labels=3,
        num_key_value_heads=4, max_position_embeddings=64, original_max_position_embeddings=16, pad_token_id=0,
        eos_token_id=1, bos_token_id=1, rope_parameters=rope,
    )  # fmt: skip
    model = transformers.Phi3ForSequenceClassification(config).eval()
    with Server(model, max_wait=0.2) as server:
        requests = [Request("classify", tokens=tuple(range(2, 2 + length))) for length in (5, 9, 16, 12)]
        answers = answers_of(server, requests)
        with pytest.raises(InvalidRequest, match="16"):
            server.submit(Request("classify", tokens=tuple(range(2, 19)))).result(60)
    for request, answer in zip(requests, answers, strict=True):
        alone = model(input_ids=torch.tensor([request.tokens])).logits.softmax(-1)[0].tolist()
        assert list(answer.scores.values()) == pytest.approx(alone, abs=1e-5)


@pytest.fixture(scope="module")
def of() -> Deltas:
    return deltas("bert", "sequence")


def test_what_waits_for_the_servers_thread_is_refused_in_it(of: Deltas) -> None:
    with Server(of.model(), deltas=of.folder, max_wait=0.0) as server:
        errors: list[Exception] = []

        def call_all(_: object) -> None:
            for call in (server.close, server.refresh, partial(server.load, "d3")):
                try:
                    call()
                except DeltuneError as error:
                    errors.append(error)

        gate = threading.Event()
        server._submit(ask("classify", 4, 1, "d2"), None).future.add_done_callback(lambda _: gate.wait(60))
        future = server.submit(ask("classify", 4, 1, "d2"))
        future.add_done_callback(call_all)
        gate.set()
        future.result(60)
        wait_until(lambda: len(errors) == 3)
        assert all("call it from another thread" in str(error) for error in errors)
        assert server.submit(ask("classify", 4, 1, "d3")).result(60).delta == "d3"
