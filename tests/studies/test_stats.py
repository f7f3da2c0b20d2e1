"""Tests and intervals: against scipy and published values, and by simulation with a tolerance from binomial error."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as scipy_stats

from deltune.studies.claims.statistics import (
    Estimate,
    average_ranks,
    holm,
    holm_levels,
    paired_estimate,
    slope_weights,
)

TIMES = 1500
"""Simulated studies of one setting."""


def at_most(rate: float) -> float:
    """What a rate of errors may show in TIMES studies: four standard errors above it (1 in 30,000 by chance)."""
    return rate + 4 * float(np.sqrt(rate * (1 - rate) / TIMES))


def study(
    generator: np.random.Generator, strata: int, seeds: int, examples: int, spread: tuple[float, float, float]
) -> list[np.ndarray]:
    """Differences of mean 0: spread of seeds, of examples (the same for every seed), of both together."""
    s, e, r = spread
    return [
        s * generator.standard_normal((seeds, 1))
        + e * generator.standard_normal((1, examples))
        + r * generator.standard_normal((seeds, examples))
        for _ in range(strata)
    ]


SETTINGS = (  # strata, seeds, examples, (spread of seeds, of examples, of both)
    (1, 3, 100, (0.05, 0.3, 0.3)), (1, 3, 100, (0.0, 0.3, 0.3)), (1, 3, 100, (0.1, 0.0, 0.3)),
    (1, 2, 200, (0.1, 0.3, 0.3)), (1, 5, 100, (0.05, 0.3, 0.3)), (8, 3, 60, (0.05, 0.3, 0.3)),
    (8, 2, 60, (0.1, 0.0, 0.1)),
)  # fmt: skip


@pytest.mark.parametrize(("strata", "seeds", "examples", "spread"), SETTINGS)
@pytest.mark.sample(3)
def test_a_true_mean_is_missed_no_oftener_than_said(
    strata: int, seeds: int, examples: int, spread: tuple[float, float, float]
) -> None:
    generator = np.random.default_rng(0)
    missed = 0
    for _ in range(TIMES):
        low, high = paired_estimate(study(generator, strata, seeds, examples, spread)).interval(0.05)
        missed += not low <= 0 <= high
    assert missed / TIMES <= at_most(0.05)
    assert missed / TIMES >= 0.005, "so wide that it could never find anything"


def test_means_of_the_seeds_alone_would_be_wrong() -> None:
    """The reason for the examples: the seeds share a test split, so their agreement is no evidence."""
    generator = np.random.default_rng(0)
    studies = [study(generator, 1, 3, 100, (0.0, 0.3, 0.3)) for _ in range(TIMES)]
    alone = sum(paired_estimate([d.mean(axis=1) for d in one]).p_value(0.0) < 0.05 for one in studies)
    assert alone / TIMES > at_most(0.10)


@pytest.mark.slow
def test_models_on_one_test_split_share_its_examples() -> None:
    generator = np.random.default_rng(0)
    shared = wrong = 0
    for _ in range(TIMES):
        hard = 0.3 * generator.standard_normal(100)
        strata = [d + hard for d in study(generator, 4, 3, 100, (0.02, 0.0, 0.1))]
        shared += paired_estimate(strata, ["one"] * 4).p_value(0.0) < 0.05
        wrong += paired_estimate(strata).p_value(0.0) < 0.05
    assert shared / TIMES <= at_most(0.05)
    assert wrong / TIMES > at_most(0.15)


@pytest.mark.parametrize("spread", [(0.05, 0.3, 0.3), (0.02, 0.1, 0.6)])
def test_the_parts_add_up_to_the_variance_of_the_mean(spread: tuple[float, float, float]) -> None:
    """σ_S²/n_s + σ_E²/n_i + σ_R²/(n_s n_i), on average: the residual is in it once."""
    generator = np.random.default_rng(0)
    variances = [sum(v for v, _ in paired_estimate(study(generator, 1, 4, 60, spread)).parts) for _ in range(TIMES)]
    s, e, r = spread
    expected = s**2 / 4 + e**2 / 60 + r**2 / 240
    assert np.mean(variances) == pytest.approx(expected, abs=4 * np.std(variances) / np.sqrt(TIMES) + 0.05 * expected)


def test_a_difference_is_found() -> None:
    generator = np.random.default_rng(0)
    detected = sum(
        paired_estimate([d + 0.1 for d in study(generator, 8, 3, 100, (0.05, 0.3, 0.3))]).p_value(0.0) < 0.05
        for _ in range(300)
    )
    assert detected / 300 > 0.9


def test_seeds_alone_are_the_one_sample_t_test() -> None:
    d = np.array([0.3, 0.1, 0.4, 0.2])
    expected = scipy_stats.ttest_1samp(d, 0.05)
    estimate = paired_estimate([d])
    assert estimate.p_value(0.05) == pytest.approx(expected.pvalue)
    assert estimate.interval(0.1) == pytest.approx(tuple(expected.confidence_interval(0.9)))


def test_strata_of_seeds_have_satterthwaites_degrees_of_freedom() -> None:
    """The mean of two strata is half of Welch's difference between a and −b."""
    a, b = np.array([1.0, 2.0, 4.0]), np.array([0.5, 0.7, 0.1, 0.4])
    expected = scipy_stats.ttest_ind(a, -b, equal_var=False)
    assert paired_estimate([a, b]).p_value(0.0) == pytest.approx(expected.pvalue)


@pytest.mark.parametrize("alpha", [0.05, 0.005])
def test_p_is_the_level_at_which_the_interval_meets_the_boundary(alpha: float) -> None:
    estimate = paired_estimate([d + 0.1 for d in study(np.random.default_rng(3), 2, 3, 50, (0.05, 0.3, 0.1))])
    assert len(estimate.parts) == 2
    low, high = estimate.interval(alpha)
    assert estimate.p_value(low) == pytest.approx(alpha, rel=1e-5)
    assert estimate.p_value(high) == pytest.approx(alpha, rel=1e-5)
    assert estimate.p_value(low, -100.0) == pytest.approx(alpha, rel=1e-5)


def test_slack_widens_the_interval_and_weakens_the_test() -> None:
    tight, loose = Estimate(1.0, ((0.04, 4.0),)), Estimate(1.0, ((0.04, 4.0),), slack=0.3)
    assert loose.interval()[0] == pytest.approx(tight.interval()[0] - 0.3)
    assert loose.p_value(0.0) == pytest.approx(tight.p_value(0.3))
    assert loose.p_value(0.8) == 1.0


@pytest.mark.parametrize("d", [np.array([0.3, 0.1 + 0.2, 0.3]), np.tile([0.0, 1.0, 1.0], (3, 1)), np.zeros(3)])
def test_seeds_without_any_spread_say_nothing(d: np.ndarray) -> None:
    assert paired_estimate([d]).interval() == (-np.inf, np.inf)
    assert paired_estimate([d]).p_value(0.0) == 1.0


@pytest.mark.parametrize("strata", [[], [np.array([1.0])], [np.ones((3, 1))], [np.ones((2, 2, 2))]])
def test_one_seed_or_one_example_is_refused(strata: list[np.ndarray]) -> None:
    with pytest.raises(ValueError, match="2 seeds"):
        paired_estimate(strata)


def test_seeds_right_equally_often_on_other_examples_do_differ() -> None:
    """Three seeds of 3 right of 6: no spread of their means, but of what they are right on."""
    d = np.array([[1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0], [1, 0, 1, 0, 1, 0]], dtype=float)
    low, high = paired_estimate([d]).interval()
    assert 0 < high - low < np.inf


def test_strata_on_one_test_split_have_its_examples() -> None:
    with pytest.raises(ValueError, match="number of examples"):
        paired_estimate([np.ones((2, 3)), np.ones((2, 4))], ["one", "one"])


def test_holm_is_the_step_down() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert len(holm([])) == 0 == len(holm_levels([]))


def test_holm_is_that_of_statsmodels() -> None:
    from statsmodels.stats.multitest import multipletests

    generator = np.random.default_rng(0)
    for _ in range(50):
        p = generator.uniform(0, 0.4, size=generator.integers(1, 9)).round(2).tolist()
        assert np.array_equal(holm(p), multipletests(p, method="holm")[1]), p


def test_an_interval_at_holms_level_decides_as_holm_does() -> None:
    generator = np.random.default_rng(0)
    for _ in range(300):
        p = generator.uniform(0, 0.1, size=generator.integers(1, 7)).tolist()
        assert ((np.asarray(p) <= holm_levels(p)) == (holm(p) <= 0.05)).all(), p


def test_holm_keeps_the_rate_of_any_error_in_a_family() -> None:
    generator = np.random.default_rng(0)
    errors = sum((holm(generator.uniform(size=6)) < 0.05).any() for _ in range(TIMES))
    assert errors / TIMES <= at_most(0.05)


def test_a_slope_is_that_of_least_squares() -> None:
    x, y = np.array([7.3, 7.9, 8.5, 10.0]), np.array([1.0, 0.2, 0.4, -0.9])
    assert slope_weights(x) @ y == pytest.approx(scipy_stats.linregress(x, y).slope)
    for wrong in ([1.0], [2.0, 2.0]):
        with pytest.raises(ValueError, match="two different"):
            slope_weights(wrong)


def test_a_trend_over_seeds_keeps_its_rate() -> None:
    generator = np.random.default_rng(0)
    weights = slope_weights([7.0, 8.0, 9.0])
    wrong = sum(
        paired_estimate([generator.standard_normal((3, 3)) @ weights]).p_value(0.0) < 0.05 for _ in range(TIMES)
    )
    assert wrong / TIMES <= at_most(0.05)


def test_average_ranks_share_ties_and_know_the_direction() -> None:
    values = np.array([[65.0, 64.0, 65.0], [0.5, 0.6, 0.4]])  # BLEU, TER
    assert average_ranks(values, [False, True]) == pytest.approx([(1.5 + 2) / 2, 3.0, (1.5 + 1) / 2])


def exact(spread: tuple[float, float, float], seeds: int, examples: int) -> Estimate:
    """The estimate that a study of one setting would have if it knew its variances."""
    s, e, r = spread
    parts = ((s**2 / seeds + r**2 / (seeds * examples), seeds - 1.0), (e**2 / examples, examples - 1.0))
    return Estimate(0.0, tuple(part for part in parts if part[0]))


@pytest.mark.parametrize(("seeds", "examples", "spread"), [
    (3, 100, (0.05, 0.3, 0.3)), (3, 400, (0.01, 0.3, 0.1)), (2, 200, (0.1, 0.3, 0.3)), (5, 100, (0.05, 0.3, 0.3)),
    (10, 100, (0.1, 0.0, 0.1)),
])  # fmt: skip
def test_the_smallest_decidable_effect_is_decided_as_often_as_said(
    seeds: int, examples: int, spread: tuple[float, float, float]
) -> None:
    effect = exact(spread, seeds, examples).smallest_decidable(alpha=0.05, power=0.8)
    generator = np.random.default_rng(0)
    estimates = [
        paired_estimate([d + effect for d in study(generator, 1, seeds, examples, spread)]) for _ in range(TIMES)
    ]
    decided = sum(estimate.interval(0.05)[0] > 0 for estimate in estimates) / TIMES
    assert abs(decided - 0.8) <= 4 * np.sqrt(0.8 * 0.2 / TIMES)


@pytest.mark.parametrize("n", [2, 3, 5, 20])
def test_the_power_of_one_part_is_that_of_students_test(n: int) -> None:
    """Against statsmodels, which counts decisions in the wrong direction too: with 2 seeds 1 in 100."""
    from statsmodels.stats.power import TTestPower

    estimate = Estimate(0.0, ((1.0 / n, n - 1.0),))
    for effect in (1.0, 1.5):
        theirs = TTestPower().power(effect, nobs=n, alpha=0.05, alternative="two-sided")
        assert theirs - 0.01 < estimate.power(effect, 0.05) <= theirs + 1e-9
    smallest = estimate.smallest_decidable(0.05, 0.8)
    assert estimate.power(smallest, 0.05) == pytest.approx(0.8, abs=1e-4)


@pytest.mark.parametrize("spread", [(0.05, 0.3, 0.3), (0.3, 0.05, 0.3), (0.1, 0.0, 0.0)])
def test_more_seeds_decide_smaller_effects(spread: tuple[float, float, float]) -> None:
    few, many = exact(spread, 3, 100), exact(spread, 12, 100)
    distance = many.smallest_decidable()
    assert few.enlarged((3, 12)).power(distance) >= 0.79 > few.power(distance)


def test_what_is_not_known_decides_nothing() -> None:
    assert Estimate(0.5, ()).smallest_decidable() == np.inf
    assert Estimate(0.0, ((0.01, 2.0),), slack=0.5).smallest_decidable() > 0.5
