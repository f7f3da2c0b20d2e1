"""The table of the parts of the variance, held against the textbook's analysis of variance of a balanced grid."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from deltune.studies.jobs.job import Outcome
from deltune.studies.report.figure_spec import VarianceSpec
from deltune.studies.report.variance import REST, TUNED, variance_components_table

METHODS, RATES, SEEDS = 8, 4, 3
VIEW = VarianceSpec(title="variance", where={"rate": tuple(map(str, range(RATES)))})


def grid(task: str, scale: float = 1.0, draw: int = 0) -> tuple[np.ndarray, list[Outcome]]:
    """Return scores of methods × rates × seeds, and the same as outcomes whose validation scores equal them."""
    numbers = np.random.default_rng(draw)
    parts = [(METHODS, 1, 1), (1, RATES, 1), (1, 1, SEEDS), (METHODS, RATES, 1), (METHODS, RATES, SEEDS)]
    sizes = [0.05, 0.04, 0.03, 0.02, 0.01]
    scores = scale * sum(
        size * numbers.standard_normal(shape) for size, shape in zip(sizes, parts, strict=True)
    ) + numbers.random()  # fmt: skip
    outcomes = [
        Outcome(
            {"model": "a", "task": task, "method": f"m{m}", "rate": str(r), "seed": s}, {},
            scores={"accuracy": float(scores[m, r, s])},
            extra={"best": {"metric": "accuracy", "value": float(scores[m, r, s])}},
        )
        for m, r, s in itertools.product(range(METHODS), range(RATES), range(SEEDS))
    ]  # fmt: skip
    return scores, outcomes


def by_sums_of_squares(y: np.ndarray) -> dict[str, float]:
    """Estimate the parts from the expected mean squares of the crossed model, in which only m × r interact."""
    m, r, s = y.shape
    mean, of_m, of_r, of_s, of_mr = y.mean(), y.mean((1, 2)), y.mean((0, 2)), y.mean((0, 1)), y.mean(2)
    in_m, in_r, in_s = (of_m - mean).var() * m * r * s, (of_r - mean).var() * m * r * s, of_s.var() * m * r * s
    in_mr = s * ((of_mr - of_m[:, None] - of_r + mean) ** 2).sum()
    rest = ((y - mean) ** 2).sum() - in_m - in_r - in_s - in_mr
    rest /= m * r * s - 1 - (m - 1) - (r - 1) - (s - 1) - (m - 1) * (r - 1)
    in_m, in_r, in_s, in_mr = in_m / (m - 1), in_r / (r - 1), in_s / (s - 1), in_mr / ((m - 1) * (r - 1))
    return {
        "method": (in_m - in_mr) / (r * s), "rate": (in_r - in_mr) / (m * s), "method × rate": (in_mr - rest) / s,
        "seed": (in_s - rest) / (m * r), REST: rest,
    }  # fmt: skip


def numbers(outcomes: list[Outcome], group: str) -> dict[str, dict[str, float | None]]:
    table = variance_components_table(VIEW, outcomes)
    return {
        column.text: {row.label: row.cells[i].mean for row in table.rows if row.group.startswith(group)}
        for i, column in enumerate(table.columns)
    }


def test_a_balanced_grid_has_the_parts_of_the_analysis_of_variance() -> None:
    """REML equals the estimates from mean squares where none of these is negative (Searle, Casella and McCulloch)."""
    scores, outcomes = grid("one")
    expected = by_sums_of_squares(scores)
    assert min(expected.values()) > 0
    deviations = numbers(outcomes, "standard")["one"]
    assert {name: deviations[name] ** 2 for name in expected} == pytest.approx(expected, rel=0.02)
    shares = numbers(outcomes, "%")["one"]
    assert sum(shares.values()) == pytest.approx(1) and TUNED not in shares
    best = scores.max(1)
    means = best.mean(1)
    rest = ((best - means[:, None] - best.mean(0) + best.mean()) ** 2).sum() / ((METHODS - 1) * (SEEDS - 1))
    assert deviations[TUNED] ** 2 == pytest.approx(means.var(ddof=1) - rest / SEEDS, rel=0.02)


def test_tasks_that_are_not_done_wait_and_others_count_alike() -> None:
    """All tasks together have the mean of their variances; a run that diverged is left out and named."""
    (_, one), (_, other), (_, third) = grid("one"), grid("other", 2.0), grid("third", draw=1)
    third[5] = replace(third[5], error="not run", waiting=True, scores={})
    both = numbers([*one, *other, *third], "standard")
    assert list(both) == ["one", "other", "all tasks"]
    for name, value in both["one"].items():
        assert both["other"][name] == pytest.approx(2 * value, rel=0.02)
        assert both["all tasks"][name] ** 2 == pytest.approx((1 + 4) / 2 * value**2, rel=0.1)
    one[3] = replace(one[3], error="diverged", scores={})
    assert variance_components_table(VIEW, one).excluded == ("1 run without a score",)


def test_several_models_of_a_task_are_a_factor() -> None:
    _, outcomes = grid("one")
    wider = [replace(one, cell={**one.cell, "model": "b"}, scores={"accuracy": one.scores["accuracy"] + 0.2})
             for one in outcomes]  # fmt: skip
    assert numbers([*outcomes, *wider], "standard")["one"]["model"] == pytest.approx(0.2 / 2**0.5, rel=0.1)
