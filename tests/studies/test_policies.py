"""Ways of choosing a method and a rate, replayed on curves whose best run is known."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence

import pytest

from deltune.studies.choosing import SPACES
from deltune.studies.own import SIZES
from deltune.studies.policies import (
    FIRST,
    PLACES,
    SEARCHES,
    Grid,
    RunKey,
    chosen_from,
    lora_at,
    successive_halving,
    tuned,
)

METHODS = ("lora", *(f"method {i}" for i in range(12)))
RUNS = [(method, rate) for method in METHODS for rate in FIRST]
STEPS = [40 * k for k in range(1, 9)]


def grid(seed: int, scores: Callable[[RunKey], Sequence[float]]) -> Grid:
    return Grid({run: list(zip(STEPS, scores(run), strict=True)) for run in RUNS}, f"a task {seed}", "0.01")


def rising(numbers: random.Random) -> list[float]:
    return sorted(numbers.random() for _ in STEPS)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("label", SEARCHES)
def test_a_search_takes_a_quarter_of_the_steps(label: str, seed: int) -> None:
    """The last run may go beyond where a search goes by one run at a time; what is drawn depends on the name alone."""
    numbers = random.Random(seed)
    one = grid(seed, lambda run: rising(numbers))
    run, steps = SEARCHES[label](one)
    assert run in RUNS and 0.2 * len(RUNS) < steps / STEPS[-1] <= 0.25 * len(RUNS) + label.startswith("TPE")
    assert SEARCHES[label](one) == (run, steps)


@pytest.mark.parametrize("eta", [2, 4])
def test_halving_goes_on_with_what_leads(eta: int) -> None:
    """It finds what leads from an eighth on, and cannot know what comes from behind."""
    order = {run: i / len(RUNS) for i, run in enumerate(RUNS)}
    leads = grid(0, lambda run: [order[run] + 0.01 * k for k in range(8)])
    behind = grid(0, lambda run: [order[run], *[2.0 - order[run]] * 7])
    drawn = leads.random().sample(RUNS, len(RUNS))
    (best, _), (overtaken, _) = successive_halving(eta)(leads), successive_halving(eta)(behind)
    begun = next(n for n in range(len(RUNS), 0, -1) if best in drawn[:n] and best == max(drawn[:n], key=order.get))
    assert begun >= len(RUNS) // 2 and order[overtaken] >= sorted(order[run] for run in drawn[:begun])[-begun // eta]


def test_lora_alone_and_a_method_that_is_taken_for_granted() -> None:
    order = {run: i / len(RUNS) for i, run in enumerate(RUNS)}
    one = grid(0, lambda run: [order[run]] * 8)
    assert lora_at()(one) == (("lora", "0.01"), 320) and lora_at(*FIRST)(one) == (("lora", "0.03"), 1280)
    assert tuned("method 3")(one) == (("method 3", "0.03"), 1280)


def test_the_policy_of_choose_has_the_default_space_of_the_command() -> None:
    """Each of its expressions is a method of the experiment with its size left open, at as many rates."""
    expressions, factors = SPACES["lora"]
    assert [re.sub(r"rank=\d+", "rank=?", SIZES[label][0]) for label in PLACES] == list(expressions)
    assert len(factors) == len(FIRST)


def test_choose_stops_what_falls_behind() -> None:
    """By Optuna's rule, run by run: of those before it that came as far, a run must be in the better half.

    At constant scores that fall in the order of trying, all but the first stop at an eighth.
    """
    methods = METHODS[:4]
    rates = ["0.01", *(rate for rate in FIRST if rate != "0.01")]
    tried = [*((method, rates[0]) for method in methods), *((method, r) for method in methods for r in rates[1:])]
    falling = grid(0, lambda run: [1.0 - (tried.index(run) if run in tried else 0) / 100] * 8)
    best, steps = chosen_from(methods)(falling)
    assert best == tried[0] and steps == 320 + 40 * (len(tried) - 1)
    rising = grid(0, lambda run: [tried.index(run) / 100 if run in tried else 1.0] * 8)
    assert chosen_from(methods)(rising) == (tried[-1], 320 * len(tried))


@pytest.mark.parametrize("label", SEARCHES)
def test_what_diverged_is_not_picked(label: str) -> None:
    numbers = random.Random(0)
    one = grid(0, lambda run: rising(numbers))
    diverged = {run: [(1, -math.inf)] for run in RUNS if run[1] in FIRST[2:]}
    run, _ = SEARCHES[label](Grid({**one.curves, **diverged}, one.name, "0.001"))
    assert run not in diverged
