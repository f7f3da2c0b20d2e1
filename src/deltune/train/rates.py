"""The learning rate of a run that gives none, and every rule by which one of several rates or values is chosen.

A run has its method's rate for the number of steps, or with `lr: auto` a searched one: the search trains a few rates
for a few steps on a slice of the training rows and compares their losses on other training rows, so that validation and
test stay unseen. A series (`search`) chooses by validation, and so does a study, under two seeds.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import DeltuneError, DivergedError
from ..methods.registry import default_learning_rate
from ..runtime import sharding
from .config import RunConfig
from .data.loading import TaskData
from .presets import AUTO, DEFAULT
from .records import Number, RateSearch, RateTrial
from .run_folder import RunFolder

FACTORS = (0.1, 0.3, 1.0, 3.0)
"""The rates that are tried, as multiples of the method's default."""
MAX_SHARE = 0.25
"""The work of a search is less than that share of the run's."""
CLEARLY_BETTER = 0.99
"""A loss below that share of the default's is clearly better; otherwise the default stays."""
MIN_STEPS = 6
"""The least steps from which a rate can be judged."""
MAX_WARMUP = 0.5
"""A run that warms up for that share of its steps, or more, cannot be judged by short tries."""
MAX_HELD_OUT = 200
"""The most training rows on which the rates are compared."""
MAX_HELD_OUT_SHARE = 0.2
"""The greatest share of the training rows that is held out for that."""
PASSES_OF_A_STEP = 3
"""A row of a training step takes as long as that many rows that are only scored: forward, and twice that backward."""

FINALISTS = 2
"""The number of rates that a study tries under a second seed. One seed's validation rows may prefer, by a hair, a rate
that diverges under others: of two rates within a point the mean over two seeds tells more."""

logger = logging.getLogger("deltune")


def first_peak(rank_of: Callable[[int], tuple[float, ...]], count: int) -> int:
    """Try values in order until one ranks no higher than the one before, which is chosen; -inf is passed over."""
    chosen, best = 0, rank_of(0)
    for i in range(1, count):
        rank = rank_of(i)
        if math.isfinite(best[0]) and rank <= best:
            break
        chosen, best = i, rank
    return chosen


def clearly_best(losses: Mapping[Number, Number], default: Number) -> Number:
    """Return the rate of the lowest loss, or the default unless the lowest loss is clearly below the default's."""
    best = min(losses, key=lambda rate: losses[rate])
    return default if losses.get(default, math.inf) * CLEARLY_BETTER < losses[best] else best


def finalists(totals: Sequence[float], places: Sequence[int]) -> list[int]:
    """Return the places that go on to the next seed, the highest total first; of equal ones the first."""
    return sorted(places, key=lambda i: -totals[i])[:FINALISTS]


Loss = Callable[[RunConfig, "Slice"], float]
"""Trains a config on a slice, and returns the loss on the rows that are held out."""


@dataclass(frozen=True)
class Slice:
    """The training rows that a search uses.

    Attributes:
        rows: How many rows the tries train on.
        held_out: How many other rows the tries are compared on.
        seed: Draws both.
    """

    rows: int
    held_out: int
    seed: int

    def __call__(self, data: TaskData) -> TaskData:
        """Return the data set of the tries: the held-out rows take the place of validation."""
        train = data.splits["train"]
        order = random.Random(self.seed).sample(range(len(train)), self.held_out + self.rows)
        parts = {"train": order[self.held_out :], "validation": order[: self.held_out]}
        splits = {split: train.select(sorted(indices)) for split, indices in parts.items()}
        return replace(data, splits=splits, fingerprint=f"{data.fingerprint} {self}")


@dataclass(frozen=True)
class SearchPlan:
    """The rates that a search tries, and on how many steps and rows.

    Attributes:
        boost: By how much the rate of a try is higher, as the method's default is for so few steps.
        share: The work of the search, as a share of the run's.
        warmup: The share of its steps in which a try warms up, as in the run.
    """

    rates: tuple[float, ...]
    boost: float
    steps: int
    part: Slice
    share: float
    warmup: float


def with_default_rate(config: RunConfig, steps: int) -> RunConfig:
    """Return a config with its method's learning rate for that many steps, where it has none and asks for no search."""
    if config.optim.lr is not None:
        return config
    return config.replace(lr=usual_rate(config, steps), lr_source=DEFAULT)


def usual_rate(config: RunConfig, steps: int | None) -> float:
    """Return the learning rate of a config's method for that many steps; a policy takes a twentieth of it.

    TRL's own defaults are 2e-5 for SFT and 1e-6 for DPO, KTO, ORPO and GRPO.
    """
    share = 1.0 if config.objective.kind in ("sft", "reward") else 0.05
    return share * default_learning_rate(config.method.expression, steps)


def plan_search(config: RunConfig, rows: int, steps: int, steps_per_epoch: int) -> SearchPlan:
    """Return what a search tries for a run, in less than a quarter of its work."""
    warmup = config.optim.warmup if config.optim.warmup < 1 else config.optim.warmup / steps
    if warmup >= MAX_WARMUP:
        raise DeltuneError(
            f"lr auto: a run of {steps} steps that warms up for {warmup:.0%} of them (warmup {config.optim.warmup:g}) "
            f"has its rate too late for short tries to judge it: give less than {MAX_WARMUP:.0%}, such as --warmup "
            "0.1, train longer, or give a rate (--lr)"
        )
    rows_of_step = rows / steps_per_epoch
    held_out = min(MAX_HELD_OUT, int(MAX_HELD_OUT_SHARE * rows))
    scoring = held_out / PASSES_OF_A_STEP / rows_of_step  # in steps of training
    tried = math.ceil(MAX_SHARE * steps / len(FACTORS) - scoring) - 1
    if tried < MIN_STEPS or not held_out:
        least = math.floor(len(FACTORS) * (MIN_STEPS + scoring) / MAX_SHARE) + 1
        optim = config.optim
        longer = f"--epochs {math.ceil(least / steps_per_epoch)}" if optim.steps is None else f"--steps {least}"
        raise DeltuneError(
            f"lr auto: a run of {steps} steps is too short for a search that takes less than a quarter of it, with "
            f"{len(FACTORS)} rates of at least {MIN_STEPS} steps each: {least} steps are needed here. Train longer "
            f"({longer}), with smaller steps (--batch-size), at the default (leave --lr out), or try whole runs: "
            "--search lr=1e-3 --search lr=1e-2"
        )
    method = config.method.expression
    default = default_learning_rate(method, steps)
    rates = tuple(float(f"{default * factor:.2g}") for factor in FACTORS)
    boost = default_learning_rate(method, tried) / default
    part = Slice(min(rows - held_out, math.ceil(tried * rows_of_step)), held_out, config.runtime.seed)
    return SearchPlan(rates, boost, tried, part, len(rates) * (tried + scoring) / steps, warmup)


def search_rate(config: RunConfig, plan: SearchPlan, data: str, run: RunFolder, loss_of: Loss) -> RunConfig:
    """Try the rates of a plan and return the config with the one of the lowest loss, or the default.

    A try that was finished before an interruption is not repeated.
    """
    record = RateSearch(
        config=config.name, data=data, steps=plan.steps, rows=plan.part.rows, held_out=plan.part.held_out
    )
    before = sharding.broadcast_from_main(lambda: run.rate_search)
    if before is not None and before.model_copy(update={"tries": [], "lr": None}) == record:
        record = before
    logger.info(
        "lr auto: %d rates, each trained for %d steps on %d training rows%s and judged by the loss on %d others, in "
        "%.0f %% of the time of the run",
        len(plan.rates), plan.steps, plan.part.rows,
        f", {plan.boost:.2g} times as high for so few steps," if plan.boost > 1 else "", plan.part.held_out,
        100 * plan.share,
    )  # fmt: skip
    for rate in plan.rates:
        tried = next((one for one in record.tries if one.lr == rate), None)
        if tried is None:
            tried = RateTrial(lr=rate, loss=_loss_or_none(config, plan, rate, loss_of))
            record = record.model_copy(update={"tries": [*record.tries, tried]})
            run.write_rate_search(record)
        logger.info("lr %g: %s", rate, "diverged" if tried.loss is None else f"loss {tried.loss:.4f}")
    losses = {one.lr: one.loss for one in record.tries if one.loss is not None}
    if not losses:
        raise DivergedError(
            f"lr auto: the loss diverged at every rate from {plan.rates[0]:g} to {plan.rates[-1]:g}. Try a lower one, "
            f"such as --lr {plan.rates[0] / 10:.2g}, or --warmup 0.1"
        )
    default = plan.rates[FACTORS.index(1.0)]
    best = clearly_best(losses, default)
    if best == default:
        logger.info("lr %g: the default, as no other rate did clearly better", default)
    else:
        logger.info("lr %g did best%s", best, "".join(f"; {text}" for text in edge_of_rates(record, best)))
    run.write_rate_search(record.model_copy(update={"lr": best}))
    return config.replace(lr=best, lr_source=AUTO)


def _loss_or_none(config: RunConfig, plan: SearchPlan, rate: float, loss_of: Loss) -> float | None:
    """Train one try and return its loss on the held-out rows; None if it diverged."""
    one = config.replace(
        lr=float(f"{rate * plan.boost:.2g}"), steps=plan.steps, warmup=plan.warmup, metric="loss", patience=None,
        report_to=(),
    )  # fmt: skip
    try:
        return loss_of(one, plan.part)
    except DivergedError:
        return None


def edge_of_rates(search: RateSearch, best: Number | None) -> list[str]:
    """Say what to try if a rate is the lowest or the highest of those that a search tried."""
    rates = sorted(one.lr for one in search.tries)
    if best is None or len(rates) < 2 or rates[0] < best < rates[-1]:
        return []
    name, next_one = ("lowest", rates[1]) if best == rates[0] else ("highest", rates[-2])
    return [
        f"lr {best:g} is the {name} rate that lr auto tried; a better one may lie beyond: --lr {best**2 / next_one:.2g}"
    ]
