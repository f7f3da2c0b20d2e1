"""The parts that all studies share: models and data, the meaning of "small" scale, products of choices as cells."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from ..errors import DeltuneError, check_booleans, error_from_problems, unknown_name
from ..methods.registry import parse
from ..methods.spec import MaskedMethod, Method, NamedMethod
from ..train import TASKS, Best
from .claims.selectors import EDGE, FLOOR, SEED
from .jobs.job import Cell, Job, JobMaker, Roots, run_job
from .study import SEED_PLACEHOLDER, CellPlan, PlannedCell, Records, plan_runs, planned_runs

Values = Mapping[str, Any]
"""Fields of a run's spec."""

SEEDS = (0, 1, 2)
SMALL_SEEDS = tuple(range(8))
"""Seeds of a small run, which takes about ten seconds. Over 3 seeds the interval of a difference, corrected for several
comparisons, is five times as wide as over 8, so that hardly any difference could be decided."""
BUNDLED_MODEL = "minilm"
"""The model that the extra `demo` brings, which needs no folder. Its weights have no pooler, so that a classification
head reads the mean of its hidden states, as in any run on it; the other encoders' poolers are in their weights."""

SMALL_OPTIONS: Values = {
    "max_train_rows": 1000, "validation_rows": 300, "test_rows": 500, "max_length": 48, "batch_size": 16, "epochs": 3,
}  # fmt: skip
"""Options of a run of a few seconds on one core: 189 steps."""

SMALL_TASK_OPTIONS: Mapping[str, Values] = {
    "cb": {"epochs": 12},
    "conll04": {"epochs": 4},
    "g2p_us_to_gb": {
        "max_train_rows": 1200,
        "validation_rows": 200,
        "max_length": 32,
        "target_length": 32,
        "batch_size": 32,
    },
}
"""Further options of some tasks: CB has 200 rows, for 156 steps; words of g2p have 32 characters at most."""

SLICES: Mapping[str, dict[str, Any]] = {
    "sentences": {"max_train_rows": 3400, "validation_rows": 800, "test_rows": 1500, "max_length": 64},
    "g2p_us_to_gb": {
        "max_train_rows": 3400, "validation_rows": 400, "test_rows": 1000, "max_length": 32, "target_length": 32,
    },
    "conll04": {"max_length": 64},
    "sick": {"max_train_rows": 1000, "validation_rows": 495, "test_rows": 1000, "max_length": 64},
    "tickets": {},
}  # fmt: skip
"""Task, or sentences for all others -> the rows that are read."""

LONG: dict[str, Any] = {"steps": 320, "validate_every": 40}
"""The runs on small models: the pilot's length, validated after each eighth."""

SMALL_TRAIN_ROWS: Mapping[str, int] = {"cb": 200, "conll04": 922}
"""Training rows of the tasks that have fewer than a run of small scale may read."""

LEARNING_RATES: Mapping[str, float] = {
    "full": 1e-3, "head": 1e-2, "layernorm": 3e-2, "bitfit": 3e-2, "three_vectors": 3e-2, "prompt": 3e-2,
    "prefix": 3e-2, "prefix_layernorm": 3e-2, "mam": 1e-2, "lora": 1e-2, "adapter": 1e-2, "parallel_adapter": 1e-2,
    "scaled_parallel_adapter": 1e-2, "multi_head_parallel_adapter": 1e-2,
}  # fmt: skip
"""Usual learning rates at small scale, by named method; studies try others beside them.

Chosen on validation rows of SICK and SST-2 with minilm-d128 and seed 99 (1,500 rows, 4 epochs of batches of 16) among
two or three rates a factor of 3 apart; on g2p the same are best or next to it. They are 3 to 10 times the papers': few
steps, and small models bear it. Accuracy in %, SICK / SST-2, at the rate taken and at the nearest other one:

    full 1e-3: 64.0 / 73.8; 3e-3: 56.4 / 68.6         layernorm 3e-2: 60.2 / 76.0; 1e-2: 56.6 / 75.8
    scaled parallel adapter 1e-2: 60.6 / 74.8; 3e-2: 60.6 / 74.2
    lora 1e-2: 61.0 / 75.8; 3e-2: 60.8 / 65.4         bitfit 3e-2: 60.2 / 73.2; 1e-2: 56.4 / 74.4
    prefix 3e-2: 56.6 / 74.4; 1e-1: 56.4 / 73.2       prefix_layernorm 3e-2: 60.6 / 73.8; 1e-2: 56.8 / 76.6
    mam 1e-2: 59.4 / 75.0; 3e-2: 56.4 / 70.8          three_vectors 3e-2: 56.6 / 70.2; 1e-2: 56.6 / 70.4
    prompt 3e-2: 60.2 / 75.2; 1e-1: 60.2 / 70.4

56.4 is SICK's largest class: there prefix and three_vectors learn nothing at any rate that was tried.
"""

FINALISTS = 2
"""How many rates a study tries under a further seed. One seed's validation rows may prefer, by a hair, a rate that
diverges under others: of two rates within a point the mean over two seeds tells more."""
LADDER = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)
"""The learning rates that small scale chooses from, ascending."""
START = range(4, 8)
"""Where the studies of our own start on the ladder, for every method: 1e-3, 3e-3, 1e-2 and 3e-2."""
REACH = (-4, 3)
"""How far down and up the ladder the papers' studies may go from a method's usual rate."""
FIRST_RATES = tuple(step - REACH[0] for step in (0, -1, -2, 1))
"""Where they start among the rates within reach; of equally good ones the first is taken."""


def widened(tried: range, end: int, quality: Callable[[int], float | None]) -> range:
    """Return the places on a ladder to try: the first ones, and further ones while the best is at an edge."""
    while None not in (known := [quality(place) for place in tried]):
        middle = (tried.start + tried.stop - 1) / 2
        of_place = dict(zip(tried, (value for value in known if value is not None), strict=True))
        best = max(tried, key=lambda place: (of_place[place], -abs(place - middle)))
        wider = _beyond(tried, tried.start if of_place[best] == float("-inf") else best, end)
        if wider == tried:
            break
        tried = wider
    return tried


def _beyond(tried: range, best: int, end: int) -> range:
    """Return the places that were tried, and the next one if the best is at their edge and the ladder goes on."""
    if best == tried.start and best > 0:
        return range(tried.start - 1, tried.stop)
    return range(tried.start, tried.stop + (best == tried.stop - 1 and tried.stop < end))


@check_booleans
def choose_rates(
    plans: Sequence[CellPlan], start: Sequence[int] = (), judges: int = 2, *, waits: bool = True
) -> CellPlan:
    """Return the cells of one method on one model and task, a cell for each seed, with the best rate.

    There is a plan for each rate, ascending. The rates at the places in `start` (default: all) are tried under the
    first seed. The two that validate best are tried under further seeds, `judges` in all, and the best in the mean is
    taken. While the best under the first seed, or the one that is taken, is the lowest or the highest that was tried,
    the next one is tried too. A run that diverged is worse than any other; of equally good rates the first of `start`
    is taken.

    The cells have no job until all of these runs have ended. Unless it `waits`, a cell has the best rate of those that
    have ended, as long as they are at least those of `start`. The cell's extra says under `EDGE` whether the rate is at
    the edge of what was tried.
    """
    if len(plans) == 1:
        return plans[0]
    first = tuple(start) or tuple(range(len(plans)))
    order = (*first, *(place for place in range(len(plans)) if place not in first))

    def plan_cells(records: Records) -> list[PlannedCell]:
        at = cache(lambda place: plans[place](records))
        choices = [partial(lambda i, place: at(place)[i], i) for i in range(len(at(first[0])))]
        chosen = _choose(choices[:judges], records, order, range(min(first), max(first) + 1), waits)
        return [chosen.of(choice, first[0]) for choice in choices]

    return plan_cells


def grid_of_rates(plans: Sequence[CellPlan], start: range) -> CellPlan:
    """Return the cells at every rate that is tried; further ones where the best is at an edge, as in `choose_rates`."""

    def plan_cells(records: Records) -> list[PlannedCell]:
        at = cache(lambda place: plans[place](records))
        tried = widened(start, len(plans), partial(_quality, lambda place: at(place)[0], records))
        return [planned for place in tried for planned in at(place)]

    return plan_cells


Choice = Callable[[int], PlannedCell]
"""Place on the ladder -> the cell of one seed at this rate."""


def _quality(choice: Choice, records: Records, place: int) -> float | None:
    """Return how well a rate validated; −∞ if its run failed, None if it has not ended."""
    record = choice(place).record(records)
    if record is None:
        return None
    return float("-inf") if record.result is None else Best(**record.result["best"]).quality


@dataclass(frozen=True)
class ChosenRate:
    """The rate that the cells of a method on a model and task have, as far as it is known.

    `tries` are the cells whose jobs determine it; it is `lost` if it will never be known; `at_edge` says whether no
    lower or no higher rate was tried.
    """

    tries: tuple[PlannedCell, ...]
    place: int | None = None
    why: str = PlannedCell.why
    lost: bool = field(default=False, kw_only=True)
    at_edge: bool = field(default=False, kw_only=True)

    def of(self, choice: Choice, first: int) -> PlannedCell:
        """Return the cell of a seed; without a job, by the `first` place, as long as no rate is chosen."""
        if self.place is None:
            return replace(choice(first), job=None, tries=self.tries, why=self.why, lost=self.lost)
        planned = choice(self.place)
        return replace(planned, tries=self.tries, extra={**planned.extra, EDGE: self.at_edge})


def _choose(
    of_seeds: Sequence[Choice], records: Records, order: Sequence[int], first: range, waits: bool
) -> ChosenRate:
    """Return the rate that is best inside what was tried, or which tries have not ended, or why there is none."""
    tried, end, settled = first, len(order), None
    while True:
        tried = widened(tried, end, partial(_quality, of_seeds[0], records))
        chosen = _best_of(of_seeds, records, order, tried)
        if chosen.place is None and not waits and not chosen.lost:
            ended = [place for place in tried if _quality(of_seeds[0], records, place) is not None]
            if set(first) <= set(ended) < set(tried):
                settled = _best_of(of_seeds, records, order, range(min(ended), max(ended) + 1))
            if settled is not None and settled.place is not None:
                return replace(settled, tries=(*settled.tries, *chosen.tries), at_edge=True)
        if chosen.place is None:
            return chosen
        wider = _beyond(tried, chosen.place, end)
        if wider == tried:
            return replace(chosen, at_edge=chosen.place in (tried.start, tried.stop - 1))
        tried, settled = wider, chosen


def _best_of(of_seeds: Sequence[Choice], records: Records, order: Sequence[int], tried: range) -> ChosenRate:
    """Return the rate that validated best in the mean over seeds, of those that are tried."""
    left = [place for place in order if place in tried]
    tries: list[PlannedCell] = []
    totals = [0.0] * len(order)
    for choice in of_seeds:
        runs = [choice(place) for place in left]
        tries += [replace(run, cell={**run.cell, "try": order.index(i) + 1}) for i, run in zip(left, runs, strict=True)]
        ended = [record for run in runs if (record := run.record(records)) is not None]
        if len(ended) < len(left):
            return ChosenRate(tuple(tries))
        failed = [record for record in ended if record.result is None]
        if broken := [record.error for record in failed if record.error_kind != "diverged"]:
            return ChosenRate(tuple(tries), why=f"a run that tries a learning rate failed: {broken[0]}", lost=True)
        for place in left:
            totals[place] += _quality(choice, records, place) or 0.0
        if max(totals[place] for place in left) == float("-inf"):
            why = f"training diverged at every learning rate: {failed[0].error}"
            return ChosenRate(tuple(tries), why=why, lost=True)
        left = sorted(left, key=lambda place: -totals[place])[:FINALISTS]
    return ChosenRate(tuple(tries), left[0])


@dataclass(frozen=True)
class StudySetup:
    """Where a study is run.

    Attributes:
        scale: "paper" (models and data by their hub ids, the paper's protocol) or "small" (what two cores can do, from
            folders).
        data_root: The folder with the folders of tasks. At paper scale, tasks that it lacks come from the hub.
        model_root: The folder with the models; at small scale `models` beside data_root if None. At paper scale, models
            that it lacks come from the hub.
        runs: Whether something is run, so that models and data must be there; what is stored can be shown without.
        precision: The precision of every run, "fp32" or "bf16"; a run's default if None.
        device_batch_size: The rows of a batch that a device computes at once; all if None.
        launch: The processes of a run.
        sharding: "none", or "fsdp" by which each of them has a share of the model.
    """

    scale: str = "paper"
    data_root: str | None = None
    model_root: str | None = None
    runs: bool = True
    precision: str | None = None
    device_batch_size: int | None = None
    launch: int = 1
    sharding: str = "none"

    def __post_init__(self) -> None:
        if self.scale not in ("paper", "small"):
            raise DeltuneError(unknown_name("scale", self.scale, ("paper", "small")))

    @property
    def small(self) -> bool:
        """True if the scale is "small"."""
        return self.scale == "small"

    @property
    def models(self) -> Path | None:
        """The folder with the small models; None if neither folder is given."""
        if self.model_root is not None:
            return Path(self.model_root).expanduser().resolve()
        return None if self.data_root is None else Path(self.data_root).expanduser().absolute().parent / "models"

    @property
    def roots(self) -> Roots:
        """Where jobs find the models and data that their specs name."""
        root = None if self.data_root is None else str(Path(self.data_root).expanduser().resolve())
        has_models = self.models is not None and (self.small or self.model_root is not None)
        models = str(self.models.resolve()) if has_models and self.models else None
        return Roots(models, root, self.device_batch_size, self.launch, self.sharding)

    def task(self, name: str) -> dict[str, Any]:
        """Return the fields of a spec that name a task; the folder of its data is among the roots."""
        precision = {} if self.precision is None else {"precision": self.precision}
        return {"task": name, **precision, **(SMALL_TASK_OPTIONS.get(name, {}) if self.small else {})}

    def rates(self, method: str | Method) -> list[Values]:
        """Return the learning rates that a method's runs may try, ascending, as fields of a spec.

        At paper scale that is no field, since the protocol has the rate.
        """
        if not self.small:
            return [{}]
        place, (down, up) = LADDER.index(small_scale_rate(method)), REACH
        return [{"lr": rate} for rate in LADDER[place + down : place + up + 1]]

    def check(self, models: Iterable[str], tasks: Iterable[str]) -> None:
        """Check that models and tasks are present at small scale."""
        if not (self.small and self.runs):
            return
        problems = []
        if self.data_root is None:
            problems.append("no data: give --data-root, the folder with the folders of tasks")
        else:
            root = Path(self.data_root).expanduser()
            folders = [TASKS[task].folder for task in dict.fromkeys(tasks) if not TASKS[task].packaged]
            lacking = [folder for folder in folders if not (root / folder).is_dir()]
            if lacking:
                problems.append(f"{root} has no folder {', '.join(lacking)}: give another --data-root")
        needed = [model for model in dict.fromkeys(models) if model != BUNDLED_MODEL]
        if self.models is None and needed:
            problems.append(f"no models {', '.join(needed)}: give --model-root, the folder with theirs")
        elif self.models is not None:
            absent = [model for model in needed if not (self.models / model / "config.json").is_file()]
            if absent:
                problems.append(f"{self.models} has no model {', '.join(absent)}: give --model-root")
        if problems:
            raise error_from_problems("the study cannot be run at small scale", problems)


def small_scale_rate(method: str | Method) -> float:
    """Return a method's learning rate at small scale: the smallest of its terms, so that none of them diverges."""
    method = method.replace(SEED_PLACEHOLDER, "0") if isinstance(method, str) else method
    return min(_term_rate(term) for term in parse(method).terms)


def _term_rate(term: Method) -> float:
    if isinstance(term, MaskedMethod):
        return small_scale_rate(term.method)
    return LEARNING_RATES.get(term.name, 1e-2) if isinstance(term, NamedMethod) else 1e-2


@dataclass(frozen=True)
class Variant:
    """One value of what a study varies.

    `values` are its fields of a run's spec.
    """

    labels: Cell
    values: Values


def method_variants(methods: Mapping[str, str], **labels: Any) -> list[Variant]:
    """Return a variant for each method."""
    return [Variant({"method": label, **labels}, {"method": method}) for label, method in methods.items()]


def _without_training(floor: str, plan: CellPlan, roots: Roots) -> CellPlan:
    """Return the cell of a floor that trains nothing and so has no seed, on the rows of a plan's first run."""

    def plan_cells(records: Records) -> list[PlannedCell]:
        first = plan(records)[0]
        job = (*first.tries, first)[0].job
        assert job is not None
        spec = {name: value for name, value in job.spec.items() if name != "lr"}
        cell = {axis: label for axis, label in first.cell.items() if axis != SEED}
        return [PlannedCell({**cell, FLOOR: floor}, Job(floor, {"run": spec}, roots=roots))]

    return plan_cells


def _pooling(model: str, task: str) -> Values:
    """Return the pooling of runs on a model as a field of a spec; none where it is the class's own."""
    has_own = model != BUNDLED_MODEL or TASKS[task].kind != "classification"
    return {} if has_own else {"pooling": "mean"}


@check_booleans
def cross_product(
    setup: StudySetup,
    name: str,
    models: Mapping[str, str],
    tasks: Sequence[str],
    variants: Sequence[Variant],
    options: Values | None = None,
    seeds: tuple[int, ...] | None = None,
    exclude: Callable[[Cell], bool] = lambda cell: False,
    labels: Cell | None = None,
    by_task: Mapping[str, Values] | None = None,
    *,
    ladder: Literal["steps", "choose", "grid"] = "steps",
    floors: bool = True,
    make_job: JobMaker = run_job,
) -> CellPlan:
    """Return the cells of models × tasks × variants × seeds, and beside them `floors` and full tuning of each task.

    Small scale tries several learning rates for each model, task and variant, unless `options` have one. `options` win
    over the scale's, and `by_task` over both; `labels` are labels of every cell on further axes. A search begins at
    FIRST_RATES around each method's usual rate, or at START to "choose" a rate by all seeds or for a "grid" with each
    rate as a label; whatever the method, it goes on while the best rate is at an edge. The floors are runs whatever job
    `make_job` makes of the cells.
    """
    setup.check(models.values(), tasks)
    seeds = seeds or (SMALL_SEEDS if setup.small else SEEDS)
    options = {**(SMALL_OPTIONS if setup.small else {}), **(options or {})}

    def of_rate(label: str, task: str, variant: Variant, rate: Values, make: JobMaker) -> CellPlan:
        """Return the cells of all seeds, made when first asked for: most rates are never tried."""
        shown = {"rate": f"{rate['lr']:g}"} if ladder == "grid" else {}
        cell = {**(labels or {}), "model": label, "task": task, **shown, **variant.labels}
        layers = [
            options, {"model": models[label], **_pooling(models[label], task)}, setup.task(task),
            (by_task or {}).get(task, {}), rate, variant.values,
        ]  # fmt: skip

        @cache
        def plan() -> CellPlan:
            rows = [({**cell, "seed": seed}, layers) for seed in seeds]
            return plan_runs(planned_runs(name, rows, setup.roots, make))

        return lambda records: plan()(records)

    def of_variant(label: str, task: str, variant: Variant, make: JobMaker = run_job) -> CellPlan:
        if ladder == "steps":
            has_rate = "lr" in {**options, **variant.values}
            rates = [{}] if has_rate else setup.rates(variant.values["method"])
        else:
            rates = [{"lr": rate} for rate in LADDER]
        plans = [of_rate(label, task, variant, rate, make) for rate in rates]
        if ladder == "grid":
            return grid_of_rates(plans, START)
        if ladder == "choose":
            return choose_rates(plans, START, len(seeds), waits=setup.runs)
        return choose_rates(plans, FIRST_RATES, waits=setup.runs)

    plans = [
        of_variant(label, task, variant, make_job)
        for label, task, variant in itertools.product(models, tasks, variants)
        if not exclude({"model": label, "task": task, **variant.labels})
    ]
    if not floors or ladder != "steps" or "lr" in options:
        return join_plans(*plans)
    methods = [variant.values["method"] for variant in variants]
    full, head = (Variant({FLOOR: name}, {"method": name}) for name in ("full", "head"))
    for label, task in itertools.product(models, tasks):
        kind, of_head = TASKS[task].kind, of_variant(label, task, head)
        if "full" not in methods:
            plans.append(of_variant(label, task, full))
        if kind == "generation" or (by_task or {}).get(task, {}).get("answer") == "words":
            plans.append(_without_training("untuned", of_head, setup.roots))
        elif "head" not in methods:
            plans.append(of_head)
            if kind in ("classification", "tagging"):
                plans.append(_without_training("probe", of_head, setup.roots))
    return join_plans(*plans)


def join_plans(*plans: CellPlan) -> CellPlan:
    """Return the cells of several plans, one after the other."""
    return lambda records: [planned for plan in plans for planned in plan(records)]
