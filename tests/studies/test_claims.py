"""Claims on outcomes whose truth is known: every form holds, does not hold, is undecided; what is missing is told."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deltune.errors import DeltuneError
from deltune.studies.claims.claims import (
    AllOf,
    AllWithin,
    Beats,
    Best,
    Between,
    Claim,
    DropsLess,
    Falls,
    FewerParameters,
    Form,
    GapShrinks,
    InEach,
    Rises,
    Within,
)
from deltune.studies.claims.comparisons import (
    RANK,
    STEPS,
    TIME,
    ZERO_SHOT,
    MetricChoice,
    can_be_at_chance,
    is_at_chance,
    score,
    threshold,
    with_derived_axes,
)
from deltune.studies.claims.decisions import Finding, PrintedTable, check_printed, decide_claims
from deltune.studies.claims.floors import check_floors
from deltune.studies.claims.selectors import EVERY, LARGEST, SECOND_SMALLEST, SMALLEST
from deltune.studies.claims.statistics import paired_estimate
from deltune.studies.jobs.job import Outcome
from deltune.studies.papers.registry import CLAIMS
from deltune.studies.report.findings import claim_rows

SIZES = {"small": 1e7, "middle": 1e8, "large": 1e9}
COUNTS = {"a": 100, "b": 200, "c": 400, "full": 10_000}
A, B, C = {"method": "a"}, {"method": "b"}, {"method": "c"}


def grid(
    truth: Callable[[Mapping[str, Any]], float],
    seeds: int = 3,
    examples: int = 400,
    noise: float = 0.005,
    draw: int = 0,
    **axes: tuple[Any, ...],
) -> list[Outcome]:
    """Outcomes of a full grid: accuracy `truth(cell)` with noise of seeds, on examples as hard for all of them."""
    axes = {"task": ("cb", "sick"), **axes}
    results = []
    for labels in itertools.product(*axes.values()):
        for seed in range(seeds):
            cell = {**dict(zip(axes, labels, strict=True)), "seed": seed}
            generator = np.random.default_rng([draw, *str(cell).encode()])
            hard = np.random.default_rng([draw, *str(cell["task"]).encode()]).uniform(size=examples)
            right = (hard < truth(cell) + noise * generator.standard_normal()).astype(float)
            results.append(
                Outcome(
                    cell=cell,
                    scores={"accuracy": float(right.mean())},
                    count={"method": COUNTS.get(str(cell.get("method")), 1)},
                    examples={"accuracy": right.tolist()},
                    curve=[{"step": 10, "eval_accuracy": 0.5}, {"step": 20, "eval_accuracy": 0.7}],
                    seconds=float(generator.uniform(9, 10)),
                    extra={"parameters": SIZES.get(str(cell.get("model")), 1e7)},
                )
            )
    return results


def decided(form: Form, outcomes: list[Outcome], **options: Any) -> Finding:
    (decision,) = decide_claims(
        [Claim("it is so", "here", form)], outcomes, options.pop("metric", "accuracy"), **options
    )
    return decision


def by_method(cell: Mapping[str, Any]) -> float:
    return {"a": 0.8, "b": 0.7, "c": 0.795, "full": 0.8}[cell["method"]]


def shrinking(cell: Mapping[str, Any]) -> float:
    """Methods 10 points apart on the smallest model, 5 on the next, not at all on the largest; better with size."""
    step = list(SIZES).index(cell["model"])
    return 0.6 + 0.1 * step - {"a": 0.0, "b": 0.05}[cell["method"]] * (2 - step)


METHODS = grid(by_method, method=("a", "b", "c", "full"))
MODELS = grid(shrinking, method=("a", "b"), model=tuple(SIZES))
DROPS = grid(
    lambda cell: 0.9 - {"a": 0.02, "b": 0.25}[cell["method"]] * (cell["model"] == "small"),
    method=("a", "b"),
    model=tuple(SIZES),
)
LARGE = {"model": LARGEST}
ACCURACY = score("accuracy", "")

FORMS: tuple[tuple[Form, list[Outcome], str], ...] = (
    (Beats(A, B), METHODS, "holds"),
    (Beats(B, A), METHODS, "does not hold"),
    (Beats(A, {"method": "full"}), METHODS, "undecided"),
    (Beats(A, B, margin=5.0), METHODS, "holds"),
    (Beats(A, B, margin=20.0), METHODS, "does not hold"),
    (Beats({"method": ("a", "c")}, B), METHODS, "holds"),
    (Within(B, A, 20.0), METHODS, "holds"),
    (Within(B, A, 5.0), METHODS, "does not hold"),
    (Within(B, A, 10.0), METHODS, "undecided"),
    (Within(A, B, 5.0), METHODS, "holds"),
    (Within(A, B, 5.0, both=True), METHODS, "does not hold"),
    (Within(A, C, 3.0, both=True), METHODS, "holds"),
    (FewerParameters(A, B, ratio=0.5), METHODS, "holds"),
    (FewerParameters(A, B, ratio=0.4), METHODS, "does not hold"),
    (AllOf((Beats(A, B), FewerParameters(A, B, ratio=0.5))), METHODS, "holds"),
    (AllOf((Beats(A, B), FewerParameters(B, A))), METHODS, "does not hold"),
    (AllOf((Beats(A, B), Beats(B, C))), METHODS, "does not hold"),
    (AllOf((Beats(A, B), Beats(A, {"method": "full"}))), METHODS, "undecided"),
    (Best(A, "method", exclude=("full", "c")), METHODS, "holds"),
    (Best(B, "method"), METHODS, "does not hold"),
    (AllWithin("method", 3.0, {"method": ("a", "c", "full")}), METHODS, "holds"),
    (AllWithin("method", 3.0), METHODS, "does not hold"),
    (Rises("model"), MODELS, "holds"),
    (Rises("model", A, margin=30.0), MODELS, "does not hold"),
    (Falls("model"), MODELS, "does not hold"),
    (Rises("model", B, minus=A), MODELS, "holds"),
    (Falls("model", A, minus=B), MODELS, "holds"),
    (GapShrinks("method", "model"), MODELS, "holds"),
    (Beats({**A, "model": SMALLEST}, {**B, "model": SMALLEST}), MODELS, "holds"),
    (Within({**B, **LARGE}, {**A, **LARGE}, 3.0, both=True), MODELS, "holds"),
    (Beats({**A, **LARGE}, {**A, "model": SMALLEST}), MODELS, "holds"),
    (InEach(Beats(A, B)), METHODS, "holds"),
    (InEach(AllOf((Beats(A, B), Beats(B, C)))), METHODS, "does not hold"),
    (InEach(Beats(A, B), axes=("model",)), MODELS, "undecided"),
    (Between(A, ACCURACY, low=0.75, high=0.9), METHODS, "holds"),
    (Between(A, ACCURACY, high=0.75), METHODS, "does not hold"),
    (DropsLess(A, B, "model", SECOND_SMALLEST, SMALLEST), DROPS, "holds"),
    (DropsLess(B, A, "model", SECOND_SMALLEST, SMALLEST), DROPS, "does not hold"),
)


@pytest.mark.parametrize(("form", "outcomes", "verdict"), FORMS)
def test_a_form_is_decided_as_the_truth_is(form: Form, outcomes: list[Outcome], verdict: str) -> None:
    decision = decided(form, outcomes)
    assert decision.verdict == verdict, decision
    if decision.interval and not decision.comparisons:
        low, high = decision.interval
        assert low < decision.effect < high


@pytest.mark.parametrize(("form", "outcomes", "verdict"), FORMS)
def test_small_runs_do_not_test_what_is_said_of_far_larger_models(
    form: Form, outcomes: list[Outcome], verdict: str
) -> None:
    """Number and interval are those of a claim that is decided, and so are the verdicts of the other claims."""
    claims = [Claim("", "", form, untestable="It is about T5-xxl."), Claim("", "", Beats(A, B))]
    large, other = decide_claims(claims, outcomes, "accuracy")
    small, beside = decide_claims(claims, outcomes, "accuracy", small=True)
    assert small.verdict == "not testable" and decided(form, outcomes, small=True).verdict == verdict
    assert (small.effect, small.interval, small.p) == (large.effect, large.interval, large.p)
    assert (beside.verdict, beside.interval) == (other.verdict, other.interval)
    assert not small.resolution
    (row, _) = claim_rows([small, beside], [], small=True)
    assert (row.verdict, row.kind) == ("not testable here", "untestable") and row.why == "It is about T5-xxl."
    assert "It is about T5-xxl." not in claim_rows([large], [], small=False)[0].why


@pytest.mark.parametrize(("ratio", "whole", "part"), [(0.5, "holds", "holds"), (0.4, "does not hold", "does not hold")])
def test_a_count_that_the_depth_decides_does_not_count_in_a_small_model(ratio: float, whole: str, part: str) -> None:
    form = AllOf((Beats(A, B), FewerParameters(A, B, ratio, depends_on_depth=True)))
    finding = decided(form, METHODS)
    assert (finding.verdict, finding.parts[1].verdict) == (whole, part)
    small = decided(form, METHODS, small=True)
    assert (small.verdict, small.parts[1].verdict, small.parts[1].result.effect) == ("holds", "not testable", 0.5)
    assert decided(form.parts[1], METHODS, small=True).verdict == "not testable"
    another = AllOf((*form.parts, FewerParameters(B, A)))
    assert decided(another, METHODS, small=True).verdict == "does not hold"


def test_of_several_numbers_the_nearest_to_its_bound_is_shown() -> None:
    """Not the one that is measured least exactly, which decides whether all of them are inside."""
    outcomes = [
        replace(o, scores={"accuracy": value + noise * (o.cell["seed"] - 1)}, examples={})
        for o in METHODS
        for value, noise in [
            {"a": (0.5, 0.01), "b": (0.6, 1e-4), "c": (0.4, 1e-4), "full": (0.4, 1e-4)}[o.cell["method"]]
        ]
    ]
    form = AllOf(tuple(Between(method, ACCURACY, high=0.9) for method in (A, B, C)))
    finding = decided(form, outcomes)
    alone = {m["method"]: decided(Between(m, ACCURACY, high=0.9), outcomes) for m in (A, B, C)}
    assert finding.verdict == "holds" and finding.p == pytest.approx(max(one.p for one in alone.values()))
    assert finding.p == pytest.approx(alone["a"].p) and finding.effect == pytest.approx(0.6)
    assert decided(InEach(form), outcomes).effect == pytest.approx(0.6)
    outside = decided(AllOf(tuple(Between(method, ACCURACY, high=0.55) for method in (A, B, C))), outcomes)
    assert outside.verdict == "does not hold" and outside.effect == pytest.approx(0.6)


def test_a_change_along_an_axis_is_over_the_range_that_was_run() -> None:
    """Of two labels it is their difference, whatever their distance; of more it is that of the fitted line."""
    ends = [o for o in MODELS if o.cell["model"] != "middle"]
    difference = decided(Beats({**A, **LARGE}, {**A, "model": SMALLEST}), ends)
    change = decided(Rises("model", A), ends)
    assert (change.effect, change.unit) == (pytest.approx(difference.effect), "points")
    closer = [replace(o, extra={"parameters": {"small": 9e8, "large": 1e9}[o.cell["model"]]}) for o in ends]
    assert decided(Rises("model", A), closer).effect == pytest.approx(change.effect)
    assert decided(Rises("model", A), MODELS).effect == pytest.approx(difference.effect), "the middle one has no weight"
    uneven = [
        replace(o, extra={"parameters": {"small": 1e6, "middle": 1e8, "large": 1e9}[o.cell["model"]]}) for o in MODELS
    ]
    means = [100 * np.mean([o.scores["accuracy"] for o in uneven if o.cell["model"] == m and o.cell["method"] == "a"])
             for m in SIZES]  # fmt: skip
    assert decided(Rises("model", A), uneven).effect == pytest.approx(3 * np.polyfit([6, 8, 9], means, 1)[0])
    shares = grid(lambda cell: 0.5 + 0.1 * (cell["budget"] == "6.1 to 9.2"), budget=("2.4 to 3.6", "6.1 to 9.2"))
    assert decided(Rises("budget"), shares).effect == pytest.approx(10, abs=1.5)
    assert "not in an order" in decided(Rises("budget"), [
        replace(o, cell={**o.cell, "budget": o.cell["budget"].replace("to", "or")}) for o in shares
    ]).note  # fmt: skip


@pytest.mark.parametrize(("form", "outcomes"), [(form, outcomes) for form, outcomes, _ in FORMS])
def test_one_seed_decides_nothing_but_counts(form: Form, outcomes: list[Outcome]) -> None:
    decision = decided(form, [o for o in outcomes if o.cell["seed"] == 0])
    counts = [result for result in decision.comparisons if result.interval is None]
    if isinstance(form, FewerParameters):
        assert decision.verdict != "undecided"
    else:
        assert decision.verdict == ("does not hold" if any(not one.agrees for one in counts) else "undecided")
        assert "no claim from one seed" in decision.note


def test_one_seed_in_one_setting_is_enough_to_say_nothing() -> None:
    kept = [o for o in METHODS if o.cell["task"] == "sick" or o.cell["seed"] == 0]
    assert decided(Beats(A, B), kept).note == "one seed on cb: no claim from one seed"


def failing(outcomes: list[Outcome], **cell: Any) -> list[Outcome]:
    return [
        Outcome(o.cell, error="DeltuneError: diverged at step 3\nmore") if cell.items() <= o.cell.items() else o
        for o in outcomes
    ]


@pytest.mark.parametrize(("form", "outcomes"), [(form, outcomes) for form, outcomes, _ in FORMS])
def test_a_failed_cell_is_told_and_nothing_is_decided(form: Form, outcomes: list[Outcome]) -> None:
    decision = decided(form, failing(outcomes, method="a", seed=0))
    assert decision.verdict == "undecided" and decision.effect is None
    assert "failed: a, on cb" in decision.note
    assert "diverged at step 3" in decision.note and "more\n" not in decision.note


def test_a_cell_that_waits_is_told_apart() -> None:
    waiting = [replace(o, error="not run yet", waiting=True) if o.cell["seed"] == 0 else o for o in METHODS]
    decision = decided(FORMS[0][0], waiting)
    assert (
        decision.verdict == "undecided" and "not run yet: a, on cb" in decision.note and "failed" not in decision.note
    )


def test_a_missing_cell_is_told() -> None:
    kept = [o for o in METHODS if o.cell != {"task": "cb", "method": "b", "seed": 2}]
    decision = decided(Beats(A, B), kept)
    assert (decision.verdict, decision.note) == ("undecided", "missing: b, on cb, seed 2")
    lacking = [o for o in METHODS if not (o.cell["method"] == "b" and o.cell["task"] == "cb")]
    assert "no result of b, on cb" in decided(Beats(A, B), lacking).note
    assert decided(Beats({"method": "x"}, {"method": "y"}), METHODS).note == ("no result of x; no result of y")
    assert decided(Beats({"site": "ffn"}, {"site": "attention"}), METHODS).note == "the outcomes have no axis 'site'"
    assert decided(Beats(A, B), METHODS, metric="bleu").note.startswith("no bleu: a, on cb, seed 0; ")


def test_off_leaves_out_what_a_claim_is_not_about() -> None:
    lacking = [o for o in METHODS if not (o.cell["method"] == "b" and o.cell["task"] == "cb")]
    (decision,) = decide_claims([Claim("", "", Beats(A, B), exclude={"task": ("cb",)})], lacking, "accuracy")
    assert (decision.verdict, decision.settings) == ("holds", "1 setting × 3 seeds")


def test_what_was_said_of_smallest_and_largest_needs_two() -> None:
    single = [o for o in MODELS if o.cell["model"] == "small"]
    form = Beats({**A, **LARGE}, {**B, **LARGE})
    assert decided(form, single).note == "only one model in the study: no largest"
    assert "two sizes" in decided(Rises("model"), single).note
    unknown = [replace(o, extra={}) for o in MODELS]
    assert "size of the model" in decided(Rises("model"), unknown).note


def test_holm_is_over_the_claims_of_a_study() -> None:
    """A claim that is decided alone need not be among many, and its interval is as wide as its test is strict."""
    outcomes = grid(by_method, noise=0.02, examples=200, method=("a", "b", "c", "full"))
    claims = [Claim("", "", Beats(A, B))] + [
        Claim("", "", Beats(A, C)),
        Claim("", "", Beats(C, {"method": "full"})),
    ] * 5
    decisions = decide_claims(claims, outcomes, "accuracy")
    alone = decided(Beats(A, B), outcomes)
    assert alone.p == pytest.approx(decisions[0].p) == pytest.approx(alone.p_adjusted)
    assert decisions[0].p_adjusted == pytest.approx(min(1.0, 11 * alone.p))
    assert decisions[0].interval[0] < alone.interval[0] and decisions[0].interval[1] > alone.interval[1]
    for decision in decisions:
        excluded = decision.interval[0] > 0 or decision.interval[1] < 0
        assert (decision.p_adjusted <= 0.05) == excluded == (decision.verdict != "undecided")


def test_claims_that_could_not_be_tested_cost_nothing() -> None:
    untested = Claim("", "", Beats({"method": "x"}, {"method": "y"}))
    (first, second, third) = decide_claims(
        [untested, Claim("", "", Beats(A, B)), Claim("", "", FewerParameters(A, B))], METHODS, "accuracy"
    )
    assert first.p is None and third.p is None and second.p_adjusted == second.p


@pytest.mark.slow
def test_a_study_without_differences_is_seldom_wrong() -> None:
    """Of 200 studies of four claims without any true difference 5 % may have a verdict, and 4 standard errors more."""
    forms = [Beats(A, B), Beats(B, C), GapShrinks("method", "model"), Rises("model", A, minus=B)]
    wrong = 0
    for draw in range(200):
        outcomes = grid(
            lambda cell: 0.7, draw=draw, examples=60, noise=0.03, method=("a", "b", "c"), model=("small", "large")
        )
        wrong += any(
            f.verdict != "undecided" for f in decide_claims([Claim("", "", f) for f in forms], outcomes, "accuracy")
        )
    assert wrong / 200 <= 0.05 + 4 * np.sqrt(0.05 * 0.95 / 200)


def test_without_examples_seeds_alone_decide() -> None:
    bare = [replace(o, examples={}) for o in METHODS]
    decision = decided(Beats(A, B), bare)
    assert decision.verdict == "holds" and "seeds alone" in decision.note
    assert "seeds and examples" in decided(Beats(A, B), METHODS).note
    wrong = [replace(o, examples={"accuracy": [0.0, 1.0]}) for o in METHODS]  # not what the score is the mean of
    assert "seeds alone" in decided(Beats(A, B), wrong).note


def test_examples_of_two_tasks_are_no_pairs() -> None:
    assert "seeds alone" in decided(Beats({"task": "cb"}, {"task": "sick"}), METHODS).note


def test_the_same_of_every_seed_is_no_evidence() -> None:
    same = [replace(o, scores={"accuracy": by_method(o.cell)}, examples={}) for o in METHODS]
    decision = decided(Beats(A, B), same)
    assert decision.verdict == "undecided" and decision.note == "every seed gave the same (10): no spread to judge by"


def test_lower_scores_are_better_where_it_is_said() -> None:
    assert decided(Beats(B, A), METHODS, lower=True).verdict == "holds"
    errors = [replace(o, scores={"ter": 1 - by_method(o.cell) + o.cell["seed"] / 1e4}, examples={}) for o in METHODS]
    errors = [
        replace(o, scores={"ter": o.scores["ter"] + 1e-3 * (o.cell["method"] == "a") * o.cell["seed"]}) for o in errors
    ]
    assert decided(Beats(A, B), errors, metric="ter").verdict == "holds"
    times = [
        replace(o, scores={"train": 80 + (1 + 10 * (o.cell["method"] == "b")) * (1 + o.cell["seed"] / 9)})
        for o in METHODS
    ]
    assert decided(Beats(A, B, measurement=score("train", lower=True)), times).verdict == "holds"


def test_each_task_may_have_its_metric_and_a_claim_is_true_by_each() -> None:
    mixed = [
        replace(o, scores={"entity_f1": o.scores["accuracy"]}, examples={}) if o.cell["task"] == "cb" else o
        for o in METHODS
    ]
    metric = {"cb": "entity_f1", "sick": "accuracy"}
    decision = decided(Beats(A, B), mixed, metric=metric)
    assert decision.verdict == "holds" and decision.effect == pytest.approx(10, abs=3)
    assert [one.subject for one in decision.comparisons] == ["entity_f1", "accuracy"]
    reversed_on_cb = [
        replace(o, scores={"entity_f1": 3 * (1 - o.scores["entity_f1"])}) if "entity_f1" in o.scores else o
        for o in mixed
    ]
    assert decided(Beats(B, A), reversed_on_cb, metric=metric).verdict != "holds", "however large it is on the other"


def test_two_outcomes_of_one_cell_are_refused() -> None:
    with pytest.raises(DeltuneError, match="two outcomes of one cell"):
        decided(Beats(A, B), [*METHODS, METHODS[0]])
    with pytest.raises(DeltuneError, match="same axes"):
        Beats(A, {"site": "ffn"})


def test_the_gap_of_noise_alone_does_not_shrink_with_the_noise() -> None:
    """Small models with noisier seeds: the largest less the smallest shrinks, chosen by other seeds it does not."""
    wrong = 0
    for draw in range(100):
        generator = np.random.default_rng(draw)
        outcomes = [
            Outcome(
                {"task": task, "method": m, "model": model, "seed": seed},
                scores={"accuracy": 0.7 + noise * generator.standard_normal()},
                extra={"parameters": SIZES[model]},
            )
            for task in range(8)
            for m in ("a", "b", "c", "d")
            for model, noise in (("small", 0.05), ("large", 0.005))
            for seed in range(3)
        ]
        wrong += decided(GapShrinks("method", "model"), outcomes).verdict == "holds"
    assert wrong <= 100 * (0.05 + 4 * np.sqrt(0.05 * 0.95 / 100))


def test_of_several_comparisons_the_weakest_holds_and_the_strongest_refutes() -> None:
    noisy = grid(by_method, noise=0.02, examples=200, method=("a", "b", "c", "full"))
    true = [Beats(A, B), Beats(C, B)]
    alone = [decided(form, noisy).p for form in true]
    assert decided(AllOf(tuple(true)), noisy).p == pytest.approx(max(alone))
    assert decided(AllOf((Beats(B, A), Beats(B, C))), noisy).p == pytest.approx(2 * min(alone))
    assert decided(AllOf((Beats(A, B), Beats(B, C))), noisy).p == pytest.approx(2 * alone[1])


def test_models_of_one_task_share_its_test_split(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def spy(strata: Any, tests: Any) -> Any:
        seen.extend(zip(strata, tests, strict=True))
        return paired_estimate(strata, tests)

    monkeypatch.setattr("deltune.studies.claims.decisions.paired_estimate", spy)
    decided(Beats(A, B), MODELS)
    pooled = seen[: 2 * len(SIZES)]
    assert {d.shape for d, _ in pooled} == {(3, 400)} and len({test for _, test in pooled}) == 2


def seeds_alone(truth: Mapping[str, float], draw: int, seeds: int = 5, noise: float = 1.0) -> list[Outcome]:
    """Two methods on several tasks, of which `a` is better by the truth of the task, in points; no examples."""
    generator = np.random.default_rng(draw)
    return [
        Outcome({"task": task, "method": m, "seed": seed},
                scores={"accuracy": 0.5 + ((m == "a") * better + noise * generator.standard_normal()) / 100})
        for task, better in truth.items() for m in ("a", "b") for seed in range(seeds)
    ]  # fmt: skip


def test_a_claim_about_each_setting_is_not_decided_by_the_mean() -> None:
    outcomes = seeds_alone({"cb": 20.0, "sick": 20.0, "sst2": -4.0}, draw=0)
    assert decided(Beats(A, B), outcomes).verdict == "holds"
    finding = decided(InEach(Beats(A, B)), outcomes)
    assert finding.verdict == "does not hold" and finding.deciding.text == "a − b, on sst2"
    even = decided(InEach(Beats(A, B)), seeds_alone({"cb": 20.0, "sick": 20.0, "sst2": 0.0}, draw=0))
    assert even.verdict == "undecided" and even.deciding.text == "a − b, on sst2"


def test_a_claim_about_each_setting_that_one_belies_is_seldom_said_to_hold() -> None:
    """Intersection-union: with one setting at the border and the others far inside, at most 5 % hold; so with two."""
    for borders in (1, 2):
        truth = {f"task{i}": 0.0 if i < borders else 20.0 for i in range(4)}
        held = sum(decided(InEach(Beats(A, B)), seeds_alone(truth, draw)).verdict == "holds" for draw in range(100))
        assert held / 100 <= 0.05 + 4 * np.sqrt(0.05 * 0.95 / 100)


def test_a_claim_about_each_setting_that_is_true_in_each_holds() -> None:
    truth = {f"task{i}": 20.0 for i in range(4)}
    assert all(decided(InEach(Beats(A, B)), seeds_alone(truth, draw)).verdict == "holds" for draw in range(20))


def test_a_count_refutes_and_the_score_is_said_all_the_same() -> None:
    finding = decided(AllOf((Beats(A, B), FewerParameters(B, A))), METHODS)
    score_part, count_part = finding.parts
    assert (finding.verdict, score_part.verdict, count_part.verdict) == ("does not hold", "holds", "does not hold")
    assert finding.effect == score_part.result.effect == pytest.approx(10, abs=3) and finding.p is not None
    assert (count_part.result.effect, count_part.result.unit) == (2.0, "times as many")
    reverse = decided(AllOf((Beats(B, A), FewerParameters(A, B))), METHODS)
    assert [reverse.verdict, *(part.verdict for part in reverse.parts)] == ["does not hold", "does not hold", "holds"]
    lone = decided(AllOf((Beats(A, B), FewerParameters(A, B))), [o for o in METHODS if o.cell["seed"] == 0])
    assert [lone.verdict, *(part.verdict for part in lone.parts)] == ["undecided", "undecided", "holds"]
    assert not decided(Beats(A, B), METHODS).parts and not decided(FewerParameters(A, B), METHODS).parts


def test_the_printed_number_is_of_the_score_where_ours_is() -> None:
    """A claim about a score and a number of parameters: 0.5 times as many are no 0.5 points."""
    claim = Claim("", "", AllOf((Beats(A, B), FewerParameters(A, B))))
    printed = check_printed(claim, [PrintedTable("table 1", tuple(METHODS), "accuracy")])
    (finding,) = decide_claims([claim], METHODS, "accuracy")
    assert printed.agrees and finding.deciding is not None
    assert printed.deciding.unit == finding.deciding.unit == "points"
    fewer = Claim("", "", AllOf((Beats(A, B), FewerParameters(A, B, ratio=0.01))))
    printed = check_printed(fewer, [PrintedTable("table 1", tuple(METHODS), "accuracy")])
    assert printed.agrees is False and printed.deciding.unit == "times as many"


@pytest.mark.parametrize("form", [Falls("model"), Rises("model"), GapShrinks("method", "model")])
def test_a_printed_effect_of_zero_agrees_with_no_direction(form: Any) -> None:
    """Only an exact number of parameters may lie on the border of what a claim says."""
    same = tuple(replace(o, scores={"accuracy": 50.0}, examples={}) for o in MODELS)
    printed = check_printed(Claim("", "", form), [PrintedTable("table 1", same, "accuracy")])
    assert printed.deciding is not None and printed.deciding.effect == 0 and printed.agrees is False


def test_settings_are_told_apart() -> None:
    finding = decided(Beats(A, B), seeds_alone({"cb": 20.0, "sick": -10.0}, draw=0))
    good, bad = finding.deciding.by_setting
    assert (good.setting, good.agrees) == ("on cb", True) and (bad.setting, bad.agrees) == ("on sick", False)
    assert good.effect == pytest.approx(20, abs=3) and bad.interval[1] < 0
    assert finding.effect == pytest.approx((good.effect + bad.effect) / 2)
    assert not decided(InEach(Beats(A, B)), METHODS).deciding.by_setting


def test_what_an_undecided_claim_would_have_taken() -> None:
    claim = Claim("", "", Within(B, A, 10.0))
    (finding,) = decide_claims([claim], METHODS, "accuracy")
    assert finding.verdict == "undecided"
    before, beyond = "With these seeds and test rows an effect of ", " points beyond −10 is decided in 80% of cases."
    assert finding.resolution.startswith(before) and finding.resolution.endswith(beyond)
    assert abs(finding.effect + 10) < float(finding.resolution.removeprefix(before).removesuffix(beyond))
    table = PrintedTable("table 1", tuple(seeds_alone({"cb": 5.0}, draw=0, seeds=1, noise=0.0)), "accuracy")
    printed = check_printed(claim, [table])
    assert printed.agrees and printed.deciding.effect == pytest.approx(-5.0)
    (against_paper,) = decide_claims([claim], METHODS, "accuracy", printed=[printed])
    excluded = " The interval excludes an effect as large as the paper's."
    assert against_paper.resolution == finding.resolution + excluded, "the paper has −5, the interval is about −10"
    other_unit = replace(printed, deciding=replace(printed.deciding, unit="ranks"))
    (of_other_unit,) = decide_claims([claim], METHODS, "accuracy", printed=[other_unit])
    assert of_other_unit.resolution == finding.resolution
    bare, equal = [replace(o, examples={}) for o in METHODS], Claim("", "", Beats(A, {"method": "full"}))
    (blocks,) = decide_claims([equal], bare, "accuracy", repetition="block")
    assert blocks.settings == "2 settings × 3 blocks"
    assert blocks.resolution.startswith("With these blocks an effect of")
    assert not decided(Beats(A, B), METHODS).resolution
    same = [replace(o, scores={"accuracy": by_method(o.cell)}, examples={}) for o in METHODS]
    assert not decided(Beats(A, B), same).resolution, "nothing is known about the spread"


def test_runs_at_chance_are_counted_beside_the_claim_that_they_are_compared_for() -> None:
    """400 rows: a guess has a Matthews correlation below 1.645 / 20 = 0.082 in 95 % of cases."""
    scores = {("a", 0): 0.5, ("a", 1): 0.081, ("b", 0): 0.083, ("b", 1): 0.0, ("c", 0): 0.0, ("c", 1): 0.0}
    outcomes = [
        Outcome({"method": method, "task": "x", "seed": seed}, scores={"accuracy": 0.6, "matthews": value},
                examples={"accuracy": [float(i < 240) for i in range(400)]})
        for (method, seed), value in scores.items()
    ]  # fmt: skip
    findings = decide_claims([Claim("", "", Beats(A, B)), Claim("", "", Beats(A, C))], outcomes, "accuracy")
    assert [(one.at_chance, one.n_runs) for one in findings] == [(2, 4), (3, 4)]
    for row, number in zip(claim_rows(findings, [], small=True), (2, 3), strict=True):
        assert f"{number} of 4 runs are no better than chance" in row.why
    tagger = Outcome({"task": "x"}, scores={"entity_f1": 0.0})
    assert is_at_chance(tagger) and not is_at_chance(replace(tagger, scores={"entity_f1": 0.01}))
    zero = replace(outcomes[-1], examples={})
    assert [can_be_at_chance(replace(zero, cell=cell)) for cell in (
        {"task": "x"}, {"task": "x", "target": "x"}, {"task": "x", "target": "y"},
        {"task": "x", "method": "adjacent", "N": 2}, {"task": "x", "method": "full", "N": 2},
    )] == [True, True, False, False, True]  # fmt: skip
    assert is_at_chance(zero) and not is_at_chance(replace(outcomes[1], examples={})), "rows that are not stored"
    assert not is_at_chance(replace(zero, cell={"task": "x", "target": "y"})), "zero-shot on another task"
    assert not is_at_chance(replace(zero, cell={"task": "x", "method": "adjacent", "N": 2}))
    assert is_at_chance(replace(zero, cell={"task": "x", "method": "full", "N": 2}))


def test_training_time_is_until_the_curve_has_come() -> None:
    def run(method: str, seed: int, seconds: float, last: float) -> Outcome:
        curve = [{"step": s, "eval_accuracy": 0.5 + 0.3 * min(1.0, s / last)} for s in range(0, 110, 10)]
        return Outcome({"task": "cb", "method": method, "seed": seed}, curve=curve, seconds=seconds)

    outcomes = [run("full", s, 100 + s, last=50) for s in range(3)] + [
        run("a", s, 80 + s / 9, last=80) for s in range(3)
    ]
    finding = decided(InEach(Between(A, TIME, low=100.0, high=150.0)), outcomes)
    assert finding.effect == pytest.approx(80 * 0.8 / 0.5, rel=0.03) and finding.verdict == "holds"
    assert "no time of full tuning" in decided(Between(A, TIME), [o for o in outcomes if o.cell["method"] == "a"]).note


def curves(fast: str, seeds: int = 4) -> list[Outcome]:
    """The fast structure rises twice as quickly to the same value; both from 0.5."""
    results = []
    for structure, seed in itertools.product(("adjacent", "discrete"), range(seeds)):
        pace = (100 if structure == fast else 200) * (1 + 0.05 * seed * (structure == fast))
        curve = [{"step": s, "eval_accuracy": 0.5 + 0.4 * (1 - 2 ** (-s / pace))} for s in range(10, 2010, 10)]
        results.append(Outcome({"structure": structure, "seed": seed}, curve=[*curve, {"step": 5, "loss": 1.0}]))
    return results


def test_fewer_steps_to_converge() -> None:
    form = Beats({"structure": "adjacent"}, {"structure": "discrete"}, measurement=STEPS)
    assert decided(form, curves("adjacent")).verdict == "holds"
    assert decided(form, curves("adjacent")).effect == pytest.approx(0.9, abs=0.15)  # log2 of nearly half the steps
    assert decided(form, curves("discrete")).verdict == "does not hold"
    assert "no curve" in decided(form, [replace(o, curve=()) for o in curves("adjacent")]).note


def thresholds(slope: float, width: float = 1.05) -> list[Outcome]:
    return [
        Outcome(
            {"method": m, "model": model, "seed": seed},
            extra={"parameters": size, "low": [n := 10 ** (3 + slope * i + 0.02 * ((seed * 7 + i) % 3)), n * width]},
        )
        for m in ("a", "b")
        for i, (model, size) in enumerate(SIZES.items())
        for seed in range(3)
    ]


def test_thresholds_with_the_step_of_their_grid() -> None:
    measurement = threshold("low")
    assert decided(Rises("model", measurement=measurement), thresholds(0.5)).verdict == "holds"
    assert decided(Falls("model", measurement=measurement), thresholds(-0.5)).verdict == "holds"
    assert decided(Rises("model", measurement=measurement), thresholds(0.5, width=10.0)).verdict == "undecided"
    jittered = [
        replace(
            o,
            extra={
                **o.extra,
                "low": [x * (1 + 0.05 * o.cell["seed"] * (o.cell["method"] == "a")) for x in o.extra["low"]],
            },
        )
        for o in thresholds(0.5)
    ]
    assert decided(AllWithin("method", 1.0, measurement=measurement), jittered).verdict == "holds"
    never = [replace(o, extra={"parameters": o.extra["parameters"], "low": [1, None]}) for o in thresholds(0.5)]
    assert "the low threshold was not reached" in decided(Rises("model", measurement=measurement), never).note


def test_ranks_are_among_all_methods_over_all_metrics() -> None:
    def ranked(cell: Mapping[str, Any], seed: int) -> dict[str, float]:
        place = "abc".index(cell["method"])
        return {"bleu": 60 - place + (0.1 * seed), "ter": 0.5 + 0.01 * place * (1 if seed else -1), "loss": 9.0}

    outcomes = [
        replace(o, scores=ranked(o.cell, o.cell["seed"]), examples={}) for o in METHODS if o.cell["method"] != "full"
    ]
    decision = decided(Beats(A, C, measurement=RANK), outcomes)
    assert decision.unit == "ranks" and decision.effect == pytest.approx((2 + 2 + 0) / 3)
    broken = failing(outcomes, task="cb", method="b", seed=1)
    assert "no rank: metrics are missing of b" in decided(Beats(A, C, measurement=RANK), broken).note


def test_a_rank_of_one_task_is_no_larger_than_there_are_methods() -> None:
    """Four metrics on one task and one on the other: the mean is that over all five, but each rank is what it is."""

    def ranked(cell: Mapping[str, Any]) -> dict[str, float]:
        place = "abc".index(cell["method"])
        many = ("bleu", "chrf", "rougeL", "rouge1") if cell["task"] == "cb" else ("bleu",)
        return {name: 60.0 - place * (1 if cell["task"] == "cb" else -1) for name in many}

    outcomes = [replace(o, scores=ranked(o.cell), examples={}) for o in METHODS if o.cell["method"] != "full"]
    decision = decided(Beats(A, C, measurement=RANK), outcomes)
    by_setting = {one.setting: one.effect for one in decision.deciding.by_setting}
    assert by_setting == {"on cb": 2.0, "on sick": -2.0} and decision.effect == pytest.approx((4 * 2 - 2) / 5)
    assert decision.deciding.rows_covered == "none"


def test_changes_of_terms_are_cells() -> None:
    def change(layer: int, term: str, seed: int) -> float:
        return 0.01 * (1 + (layer >= 4) * (1 + (term == "gain"))) * (1 + 0.02 * seed * (layer % 2))

    outcomes = [
        Outcome({"task": "cb", "seed": seed}, extra={"changes": [
            {"layer": layer, "module": module, "term": term, "value": change(layer, term, seed)}
            for layer in range(6) for module in ("attention norm", "ffn norm") for term in ("gain", "bias")
        ] + [{"layer": None, "module": "embedding norm", "term": "gain", "value": 9.0}]})
        for seed in range(3)
    ]  # fmt: skip
    claims = CLAIMS["ln/terms"][:2]
    assert [f.verdict for f in decide_claims(claims, outcomes, "accuracy")] == ["holds", "holds"]
    decisions = decide_claims(claims, failing(outcomes, seed=1), "accuracy")
    assert {f.verdict for f in decisions} == {"undecided"} and all(
        "failed: " in f.note and "on cb, seed 1" in f.note for f in decisions
    )


def test_transfer_is_by_correlation_where_the_original_is_better_than_chance() -> None:
    tasks = {"sst2": "s", "imdb": "s", "rte": "i", "qnli": "i"}
    outcomes = [
        Outcome({"task": task, "target": target, "seed": seed}, scores={
            "accuracy": 0.9, "matthews": 0.8 if task == target else
            (0.5 if tasks[task] == tasks[target] else 0.1) + 0.001 * (sum(map(ord, task + target)) * (seed + 1) % 7)
        })
        for task, target in itertools.product(tasks, tasks) for seed in range(3)
    ]  # fmt: skip
    assert {o.cell["pair"] for o in with_derived_axes(outcomes)} == {"itself", "same type", "other type"}
    same, other = ({"pair": pair, "task": EVERY} for pair in ("same type", "other type"))
    form = Beats(same, other, measurement=ZERO_SHOT)
    decision = decided(form, outcomes)
    assert decision.verdict == "holds" and decision.effect == pytest.approx(40, abs=1)

    def guessed(*targets: str, seeds: int) -> list[Outcome]:
        return [
            replace(o, scores={**o.scores, "matthews": 0.0})
            if o.cell["target"] in targets and o.cell["task"] == o.cell["target"] and o.cell["seed"] < seeds else o
            for o in outcomes
        ]  # fmt: skip

    less = decided(form, guessed("rte", seeds=2))
    assert less.verdict == "holds" and less.settings == "3 settings × 3 seeds", "one target is left out"
    none = decided(form, guessed(*tasks, seeds=3))
    assert none.verdict == "not testable" and none.reason == "what was trained on the target is no better than chance"


def with_floor(floor: float, **more: Any) -> list[Outcome]:
    """METHODS with the head alone on SICK at a score, where full tuning has 0.8."""
    heads = [
        Outcome({"task": "sick", "floor": "head", "seed": seed, "model": "m"}, scores={"accuracy": floor}, **more)
        for seed in range(3)
    ]
    return [*(replace(o, cell={**o.cell, "model": "m"}) for o in METHODS), *heads]


@pytest.mark.parametrize(("floor", "settings"), [(0.5, "2 settings × 3 seeds"), (0.81, "1 setting × 3 seeds")])
def test_a_task_on_which_full_tuning_does_not_beat_the_floor_decides_nothing(floor: float, settings: str) -> None:
    finding = decided(Beats(A, B), with_floor(floor))
    assert (finding.verdict, finding.settings) == ("holds", settings)
    assert finding.full == pytest.approx(80, abs=2) and finding.floor is None, "the floor on CB was not run"
    of_sick = decided(InEach(Beats({**A, "task": "sick"}, {**B, "task": "sick"})), with_floor(floor))
    if floor > 0.8:
        assert of_sick.verdict == "not testable" and "does not beat the head alone (81.0)" in of_sick.reason
    else:
        assert of_sick.floor == pytest.approx(50)


@pytest.mark.parametrize("floor", [0.5, 0.81])
def test_parameters_are_counted_on_a_task_that_decides_nothing_of_scores(floor: float) -> None:
    on_sick = {"task": "sick"}
    fewer = FewerParameters({**A, **on_sick}, {**B, **on_sick})
    finding = decided(fewer, with_floor(floor))
    assert finding.verdict == "holds" and finding.deciding is not None and finding.deciding.effect == 0.5
    assert decided(FewerParameters(fewer.more, fewer.fewer), with_floor(floor)).verdict == "does not hold"
    both = AllOf((fewer, Beats({**A, **on_sick}, {**B, **on_sick})))
    assert decided(both, with_floor(floor)).verdict == ("holds" if floor == 0.5 else "not testable")


@pytest.mark.parametrize(
    ("metric", "floor", "full", "shown", "problem"),
    [
        ("matthews", {"untuned": [-0.03]}, [0.45, 0.47, 0.46], (-3, 46), ""),
        ("loss", {"head": [2.0, 2.1], "untuned": [3.0]}, [1.0, 1.1], (2.05, 1.05), ""),
        ("loss", {"head": [2.0, 2.1]}, [3.0, 3.1], (2.05, 3.05), "(3.0) does not beat the head alone (2.0)"),
        ("accuracy", {"head": [0.66, 0.67]}, [0.5], (66.5, 50), "(50.0) does not beat the head alone (66.5)"),
        ("accuracy", {"head": [0.5]}, [0.66], (50, 66), ""),
        ("accuracy", {"head": [0.5]}, [0.4, 0.62, 0.7], (50, 172 / 3), "alone (50.0) by its interval"),
        ("accuracy", {}, [0.5, 0.51], (None, 50.5), ""),
    ],
)  # fmt: skip
def test_full_tuning_is_compared_with_the_best_floor(
    metric: str, floor: dict[str, list[float]], full: list[float], shown: tuple[float | None, float], problem: str
) -> None:
    outcomes = [
        Outcome({"model": "m", "task": "t", "floor": name, "seed": seed}, scores={metric: score})
        for name, scores in {**floor, "full": full}.items()
        for seed, score in enumerate(scores)
    ]
    (check,) = check_floors(outcomes, MetricChoice(metric, lower=metric == "loss")).values()
    assert (check.floor, check.full) == (shown[0] and pytest.approx(shown[0]), pytest.approx(shown[1]))
    assert check.problem.endswith(problem) and bool(check.problem) == bool(problem)


def test_runs_that_end_at_their_best_do_not_speak_against_a_claim() -> None:
    def ending(step: int) -> list[Outcome]:
        return [replace(o, extra={**o.extra, "best": {"step": step}}) for o in METHODS]

    for form, early, late in (
        (Beats(A, B), "holds", "holds"), (Beats(B, A), "does not hold", "not testable"),
    ):  # fmt: skip
        assert decided(form, ending(10)).verdict == early
        assert (finding := decided(form, ending(20))).verdict == late and finding.capped == 1.0
    assert "too short" in finding.reason


def test_numbers_that_the_steps_decide_say_nothing() -> None:
    """Every curve comes to its best at its last validation."""
    outcomes = [
        replace(o, curve=[{"step": s, "eval_accuracy": s / 100 + o.cell["seed"] / 1e3} for s in (10, 20, 30)])
        for o in METHODS
    ]
    finding = decided(Between({"method": "a"}, TIME, low=10.0, high=990.0), outcomes)
    assert finding.verdict == "not testable" and "number of training steps" in finding.reason


def test_every_study_has_claims() -> None:
    assert len(CLAIMS) == 19 and all(CLAIMS.values())
    texts = [claim.text for claims in CLAIMS.values() for claim in claims]
    assert len(texts) > 60
