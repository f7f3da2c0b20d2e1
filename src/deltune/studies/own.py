"""Studies of our own: default rates, whether choosing a method pays, structure and sites at equal size, PEFT beside us.

docs/studies/plan.md registers them: what is run, in which order, and what is left out first. They read the same runs
where their cells are the same, since a job is found by what it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from ..methods.registry import default_learning_rate, parse
from ..train import RunConfig
from .claims.claims import AllOf, Beats, Claim, Rises, Within
from .claims.comparisons import Measurement, Number
from .claims.selectors import EVERY
from .jobs.job import Job, Outcome, Roots, trainer_job
from .policies import CHOOSE, DEFAULT_RATE, FIRST, FOUR_RATES, GRID_BEST, SEARCHES, replayed
from .report.figure_spec import Scatter, TableSpec, VarianceSpec, ViewSpec
from .scales import (
    BUNDLED_MODEL,
    LONG,
    SEEDS,
    SLICES,
    StudySetup,
    Variant,
    cross_product,
    join_plans,
    method_variants,
    small_scale_rate,
)
from .study import SEED_PLACEHOLDER, CellPlan, Study

ENCODER, BART = "minilm-d128", "g2p-en-us-bart"

SIZES: Mapping[str, tuple[str, str]] = {
    "lora": ("lora(rank=8)", "lora(rank=8)"),
    "lora, all linears": 2 * ("lora(rank=2, at=('query', 'key', 'value', 'output', 'ffn'))",),
    "dora": ("dora(rank=7)", "dora(rank=7)"),
    "hra": ("hra(rank=16)", "hra(rank=16)"),
    "oft": ("oft(block_size=32)", "oft(block_size=32)"),
    "loha": ("loha(rank=4)", "loha(rank=4)"),
    "vera": ("vera", "vera"),
    "adapter": ("adapter(style='pfeiffer', rank=16)", "adapter(style='pfeiffer', rank=19)"),
    "scaled_parallel_adapter": ("scaled_parallel_adapter(rank=16)", "scaled_parallel_adapter(rank=24)"),
    "prefix": ("prefix(length=16)", "prefix(length=16)"),
    "layernorm": ("layernorm", "layernorm"),
    "bitfit": ("bitfit", "bitfit"),
    "ia3": ("ia3", "ia3"),
}
"""Label -> expression on the encoders and on BART. They train as many scalars as LoRA of rank 8 within an eighth, or as
many as they have: the sizes scale with the width, so that one expression serves all encoders."""

DEFAULTS = (
    "full", "head", "lora", "adapter", "prefix", "layernorm", "bitfit", "ia3", "mam", "prefix_layernorm",
    "scaled_parallel_adapter", "parallel_adapter", "multi_head_parallel_adapter", "p_tuning_v2", "prompt", "unipelt",
    "three_vectors", "diff_pruning", "apet(lora, parameters='0.05%')", "dora", "vera", "oft", "hra", "loha", "pissa",
    "delora", "miss", "fourierft", "shira", "compacter", "loreft",
)  # fmt: skip
"""The methods whose default rates are measured: the papers' methods, and some of each kind from the field."""


def _plan(
    setup: StudySetup, name: str, model: str, task: str, variants: Sequence[Variant], options: Mapping[str, Any],
    ladder: Literal["steps", "choose", "grid"],
) -> CellPlan:  # fmt: skip
    rows = {**SLICES.get(task, SLICES["sentences"]), **options}
    return cross_product(setup, name, {model: model}, (task,), variants, rows, SEEDS, ladder=ladder, floors=False)


def defaults(setup: StudySetup) -> Study:
    """Return the study of the default learning rates: each method's default beside its best rate, on five tasks."""
    plans = []

    def add(model: str, task: str, methods: Mapping[str, str], options: Mapping[str, Any], steps: int) -> None:
        best = method_variants(methods, rate="best")
        default = [
            Variant({**one.labels, "rate": "default"}, {**one.values, "lr": default_learning_rate(method, steps)})
            for one, method in zip(best, methods.values(), strict=True)
        ]
        plans.append(_plan(setup, "own/defaults", model, task, best, options, "choose"))
        plans.append(_plan(setup, "own/defaults", model, task, default, options, "steps"))

    for task, model in (("sst2", ENCODER), ("conll04", ENCODER), ("g2p_us_to_gb", BART)):
        sized = {label: sizes[model == BART] for label, sizes in SIZES.items()}
        without = ("head", "prompt", "three_vectors") if model == BART else ()  # it writes, and has 32 positions
        labels = [label for label in (*DEFAULTS, "lora, all linears") if label not in without]
        add(model, task, {label: sized.get(label, label) for label in labels}, LONG, LONG["steps"])
    for task, steps in (("tickets", 39), ("sick", 96)):  # as `deltune train` runs them
        options = {"epochs": 3, "batch_size": 32, "max_length": 64}
        add(BUNDLED_MODEL, task, {label: label for label in DEFAULTS}, options, steps)
    table = TableSpec(title="Scores at the default rate and at the best", rows="method", columns=("task", "rate"),
                      metric=METRIC)  # fmt: skip
    return Study(
        "own/defaults",
        OWN_QUESTIONS["own/defaults"],
        join_plans(*plans),
        (table,),
        METRIC,
        "Every method starts from the rates 1e-3, 3e-3, 1e-2 and 3e-2 under the first seed. While its best rate is the "
        "lowest or the highest that was tried, the next one is tried too; the best two go on to the other seeds.",
    )


def choose(setup: StudySetup) -> Study:
    """Return the experiment behind `deltune choose`: methods of one size × rates × seeds, with their whole curves."""
    tasks = {
        ENCODER: ("sst2", "conll04", "snli", "qnli", "rte"), BART: ("g2p_us_to_gb",),
        "minilm-d192": ("sst2", "conll04"), "minilm-d256": ("sst2", "conll04"),
    }  # fmt: skip
    plans = [
        _plan(
            setup,
            "own/choose",
            model,
            task,
            method_variants({label: sizes[model == BART] for label, sizes in SIZES.items()}),
            LONG,
            "grid",
        )
        for model, of_model in tasks.items()
        for task in of_model
    ]
    return Study(
        "own/choose",
        OWN_QUESTIONS["own/choose"],
        join_plans(*plans),
        (
            TableSpec(title="Scores", groups="model", rows="method", columns=("task", "rate"), metric=METRIC),
            VarianceSpec(
                title="Where the variance comes from, at the four first rates", where={"rate": FIRST}, metric=METRIC
            ),
        ),
        METRIC,
        "Every rate is run under every seed. Rates beyond the four first ones are tried where the best is at an edge. "
        "A mixed model with the task as group divides the variance; models differ in width and depth at once.",
    )


def policies(setup: StudySetup) -> Study:
    """Return what ways of choosing would have picked from the runs of own/choose."""
    plan_cells = replayed(choose(setup).plan_cells, small_scale_rate("lora(rank=8)"), list(SIZES), waits=setup.runs)
    table = TableSpec(title="Scores of the runs that were picked", groups="model", rows="policy", columns=("task",),
                      metric=METRIC, average=False)  # fmt: skip
    note = (
        "Of the grid's steps the searches take a quarter, LoRA at four rates 7 %, and the search of `deltune choose` "
        "5 % in its default space (LoRA at queries and values or at all linears, four rates) and 21 % over all "
        "methods; its finals, six whole runs, are not replayed. The "
        "default space was registered after the first three tasks. Of the tasks that are done."
    )
    return Study("own/policies", OWN_QUESTIONS["own/policies"], plan_cells, (table,), METRIC, note)


def structure(setup: StudySetup) -> Study:
    """Return the study of structure at equal numbers of parameters: random masks over a sum, and its terms."""
    pool = "lora(rank=8) + layernorm + bitfit(which='attention')"
    counts = {"minilm-d128": 1280, "minilm-d192": 2688, "minilm-d256": 4608, BUNDLED_MODEL: 9984}  # of tuned norms
    plans = []
    for model, n in counts.items():
        drawn = f"apet({pool}, parameters={n}, pattern='uniform', seed={SEED_PLACEHOLDER})"
        methods = {"lora": "lora(rank=1)", "layernorm": "layernorm", "bitfit": "bitfit(which='attention')"}
        plans += [
            cross_product(
                setup, "own/structure", {model: model}, (task,), method_variants({**methods, "mask": drawn}),
                {**SLICES.get(task, SLICES["sentences"]), **LONG},
            )
            for task in ("sst2", "conll04")
        ]  # fmt: skip
    return _registered("own/structure", join_plans(*plans), _scores("method", "task"))


def sites(setup: StudySetup) -> Study:
    """Return the factorial of depth and site: LoRA with 15,360 to 16,384 scalars in one half of the layers."""
    variants = [
        Variant({"depth": depth, "site": site}, {"method": f"lora(rank={rank}, at={at!r}, layers={half!r})"})
        for depth, half in HALVES.items()
        for site, rank, at in (("attention", 8, ("query", "value")), ("ffn", 3, "ffn"))
    ]
    plans = [
        cross_product(setup, "own/sites", {"minilm-d256": "minilm-d256"}, (task,), variants,
                      {**SLICES.get(task, SLICES["sentences"]), **LONG})
        for task in ("sst2", "conll04")
    ]  # fmt: skip
    return _registered("own/sites", join_plans(*plans), _scores("site", "task", "depth"))


BOTH_LIBRARIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "lora": ("lora(rank=8)", {"kind": "LoraConfig", "r": 8, "lora_alpha": 8, "target_modules": ["query", "value"]}),
    "dora": ("dora(rank=8)", {
        "kind": "LoraConfig", "r": 8, "lora_alpha": 8, "use_dora": True, "target_modules": ["query", "value"],
    }),
    "prefix": ("prefix(length=16)", {"kind": "PrefixTuningConfig", "num_virtual_tokens": 16}),
    "ia3": ("ia3", {
        "kind": "IA3Config", "target_modules": r".*layer\.\d+\.output\.dense|.*\.(key|value)",
        "feedforward_modules": r".*layer\.\d+\.output\.dense",
    }),
    "layernorm": ("layernorm", {"kind": "LNTuningConfig", "target_modules": ["LayerNorm"]}),
}  # fmt: skip
"""Label -> the expression, and PEFT's config with as many parameters at the same places of a BERT."""
PEFT_TASKS = {"sst2": "SEQ_CLS", "broad_twitter": "TOKEN_CLS", "conll04": "TOKEN_CLS"}
PEFT_SEEDS = tuple(range(5))


def _with_library(library: str, spec: RunConfig, roots: Roots) -> Job:
    """Return the job that trains a run by transformers' Trainer with a library; it does not validate on the way."""
    spec = spec.replace(validate_every=None)
    if library == "deltune":
        return trainer_job(spec, roots)
    configs = {repr(parse(method)): config for method, config in BOTH_LIBRARIES.values()}
    return trainer_job(spec, roots, {**configs[spec.method.expression], "task_type": PEFT_TASKS[str(spec.data.task)]})


def peft(setup: StudySetup) -> Study:
    """Return the comparison of libraries: the same methods, rates, steps and Trainer, by deltune and by PEFT."""
    methods = {label: method for label, (method, _) in BOTH_LIBRARIES.items()}
    plans = [
        cross_product(
            setup, "own/peft", {ENCODER: ENCODER}, (task,), method_variants(methods, library=library),
            {**SLICES.get(task, SLICES["sentences"]), **LONG}, PEFT_SEEDS, floors=library == "deltune",
            make_job=partial(_with_library, library),
        )
        for task in PEFT_TASKS
        for library in ("deltune", "PEFT")
    ]  # fmt: skip
    costs = {"seconds": "Seconds of training", "peak_bytes": "Bytes in use at once in a step of the longest rows"}
    views: list[ViewSpec] = [_scores("method", "task", "library")]
    for name, title in costs.items():
        views += [
            Scatter(title=f"Score against {title.lower()}", x=name, y=METRIC, panels="task", log=True,
                    series=("method", "library")),
            TableSpec(title=title, columns=("task", "library"), metric=name, lower=True, average=False, percent=False),
        ]  # fmt: skip
    return _registered("own/peft", join_plans(*plans), *views)


POOLINGS = {"first token": "model", "mean": "mean"}
"""What the head of minilm-d128 reads -> the option `pooling`. The pooler of this model changes nothing."""


def pooling(setup: StudySetup) -> Study:
    """Return the comparison of what the head reads: the first token, in the runs of own/defaults, and the mean."""
    labels = ("full", "head", "lora", "adapter", "prefix", "layernorm", "bitfit", "mam")
    plans = []
    for label, value in POOLINGS.items():
        variants = method_variants({one: SIZES.get(one, (one,))[0] for one in labels}, pooling=label)
        variants = [Variant(one.labels, {**one.values, "pooling": value}) for one in variants]
        plans.append(_plan(setup, "own/pooling", ENCODER, "sst2", variants, LONG, "choose"))
    return _registered("own/pooling", join_plans(*plans), _scores("method", "task", "pooling"))


def _scores(rows: str, *columns: str) -> TableSpec:
    return TableSpec(
        title="Scores", groups="model", rows=rows, columns=columns, metric=METRIC, display_names=HALVES, average=False
    )


def _registered(name: str, plan_cells: CellPlan, *views: ViewSpec) -> Study:
    """Return a study that docs/studies/plan.md registers, with its table of scores."""
    note = "docs/studies/plan.md says what is compared, and which differences its seeds decide."
    return Study(name, OWN_QUESTIONS[name], plan_cells, views, METRIC, note)


HALVES = {"25 %": "lower half", "75 %": "upper half"}
"""Where a half of the layers has its middle, as a share of the depth -> the layers."""
METRIC = ("exact", "entity_f1", "accuracy")
OWN_QUESTIONS: Mapping[str, str] = {
    "own/defaults": "At which learning rate does each method do best, and how far below it is its default?",
    "own/choose": "Does choosing a method pay once the learning rate is chosen?",
    "own/policies": "What does each way of choosing lose against the best of all methods and rates?",
    "own/structure": "Does structure matter once the number of parameters is equal?",
    "own/sites": "At one number of parameters, do depth and site matter, and does one depend on the other?",
    "own/pooling": "Do methods rank as they do by the first token when the head reads the mean of the hidden states?",
    "own/peft": "Are scores equal to PEFT's by the same Trainer, and what do they cost in seconds and bytes?",
}
OWN_STUDIES: Mapping[str, Callable[[StudySetup], Study]] = {
    "own/defaults": defaults, "own/choose": choose, "own/policies": policies, "own/structure": structure,
    "own/sites": sites, "own/pooling": pooling, "own/peft": peft,
}  # fmt: skip
"""Name -> the function that builds the study; these are run by name and are no part of `all`."""


def _cost(read: Callable[[Outcome], float], name: str) -> Measurement:
    """Return the measurement of what a run took, of which one doubling counts like any other."""
    return Measurement(lambda group, _: [Number(math.log2(read(one))) for one in group], "doublings", True, name=name)


SECONDS = _cost(lambda outcome: outcome.seconds, "seconds of training")
PEAK = _cost(lambda outcome: outcome.scores["peak_bytes"], "bytes in use at once")
HERE, BY_PEFT, PLAN = {"library": "deltune"}, {"library": "PEFT"}, "docs/studies/plan.md"
OWN_CLAIMS: Mapping[str, tuple[Claim, ...]] = {
    "own/policies": (
        Claim("a tuned rate loses less than 1 point when the method is LoRA whatever the task", PLAN,
              Within({"policy": FOUR_RATES}, {"policy": GRID_BEST}, 1.0)),
        Claim("LoRA at its default rate loses less than 1 point", PLAN,
              Within({"policy": DEFAULT_RATE}, {"policy": GRID_BEST}, 1.0)),
        Claim("deltune choose in its default space loses less than 1 point", PLAN,
              Within({"policy": CHOOSE}, {"policy": GRID_BEST}, 1.0)),
        *(
            Claim(f"{policy} over methods and rates picks better runs than LoRA at four rates", PLAN,
                  Beats({"policy": policy}, {"policy": FOUR_RATES}))
            for policy in SEARCHES
        ),
    ),
    "own/structure": tuple(
        Claim(f"{words} beat a random mask with as many parameters", PLAN, Beats({"method": one}, {"method": "mask"}))
        for one, words in (("lora", "LoRA’s factors"), ("layernorm", "tuned norms"), ("bitfit", "biases of attention"))
    ),
    "own/sites": (
        Claim("the upper half of the layers is the better place for a number of parameters", PLAN,
              Rises("depth", {"site": EVERY})),
        Claim("the FFN is the better place for a number of parameters", PLAN,
              Beats({"site": "ffn"}, {"site": "attention"})),
        Claim("the lead of the FFN over attention is greater in the upper half", PLAN,
              Rises("depth", {"site": "ffn"}, minus={"site": "attention"})),
    ),
    "own/pooling": (
        Claim("a method scores with the mean as with the first token: within 1 point", PLAN,
              Within({"pooling": "mean"}, {"pooling": "first token"}, 1.0, both=True)),
        *(
            Claim(f"tuned norms are below LoRA when the head reads the {words}", PLAN,
                  Beats({"pooling": label, "method": "lora"}, {"pooling": label, "method": "layernorm"}))
            for label, words in (("first token", "first token"), ("mean", "mean"))
        ),
    ),
    "own/peft": (
        Claim("a method scores by deltune as by PEFT: within 1 point", PLAN, Within(HERE, BY_PEFT, 1.0, both=True)),
        Claim("a method by deltune takes fewer seconds of training", PLAN, Beats(HERE, BY_PEFT, measurement=SECONDS)),
        Claim("a method by deltune has fewer bytes in use at once", PLAN, Beats(HERE, BY_PEFT, measurement=PEAK)),
        Claim("equal scores cost half by deltune: half the seconds and half the bytes", PLAN,
              AllOf(tuple(Beats(HERE, BY_PEFT, 1.0, measurement=cost) for cost in (SECONDS, PEAK)))),
    ),
}  # fmt: skip
"""Study -> its claims. They were registered before any run of the study; the claims of own/policies after one task was
done, and the claim about `deltune choose` after three tasks."""
