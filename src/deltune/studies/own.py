"""Studies of our own: default learning rates, whether choosing a method pays, structure and sites at equal size.

docs/studies/plan.md registers them: what is run, in which order, and what is left out first. Both read the same runs
where their cells are the same, since a job is found by what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from .report.figure_spec import TableSpec
from .scales import BUNDLED_MODEL, SEEDS, StudySetup, Variant, cross_product, join_plans, method_variants
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


def _plan(
    setup: StudySetup, name: str, model: str, task: str, methods: Mapping[str, str], options: Mapping[str, Any]
) -> CellPlan:
    rows = SLICES.get(task, SLICES["sentences"])
    variants = method_variants(methods)
    ladder: Literal["choose", "grid"] = "grid" if name == "own/choose" else "choose"
    return cross_product(setup, name, {model: model}, (task,), variants, {**rows, **options}, SEEDS, ladder=ladder)


def defaults(setup: StudySetup) -> Study:
    """Return the study of the default learning rates: each method's best rate on five tasks."""
    plans = []
    for task, model in (("sst2", ENCODER), ("conll04", ENCODER), ("g2p_us_to_gb", BART)):
        sized = {label: sizes[model == BART] for label, sizes in SIZES.items()}
        labels = [label for label in (*DEFAULTS, "lora, all linears") if model != BART or label != "head"]
        methods = {label: sized.get(label, label) for label in labels}
        plans.append(_plan(setup, "own/defaults", model, task, methods, LONG))
    for task in ("tickets", "sick"):
        methods = {label: label for label in DEFAULTS}
        plans.append(_plan(setup, "own/defaults", BUNDLED_MODEL, task, methods, {"epochs": 3, "pooling": "mean"}))
    return Study(
        "own/defaults",
        OWN_QUESTIONS["own/defaults"],
        join_plans(*plans),
        (TableSpec(title="Scores at the best rate", rows="method", columns=("task",), metric=METRIC),),
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
        _plan(setup, "own/choose", model, task, {label: sizes[model == BART] for label, sizes in SIZES.items()}, LONG)
        for model, of_model in tasks.items()
        for task in of_model
    ]
    return Study(
        "own/choose",
        OWN_QUESTIONS["own/choose"],
        join_plans(*plans),
        (TableSpec(title="Scores", groups="model", rows="method", columns=("task", "rate"), metric=METRIC),),
        METRIC,
        "Every rate is run under every seed. Rates beyond the four first ones are tried where the best is at an edge.",
    )


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
    return _registered("own/structure", join_plans(*plans), "method")


def sites(setup: StudySetup) -> Study:
    """Return the factorial of depth and site: LoRA with 15,360 to 16,384 scalars in one half of the layers."""
    variants = [
        Variant({"depth": half, "site": site}, {"method": f"lora(rank={rank}, at={at!r}, layers={half!r})"})
        for half in ("lower half", "upper half")
        for site, rank, at in (("attention", 8, ("query", "value")), ("ffn", 3, "ffn"))
    ]
    plans = [
        cross_product(setup, "own/sites", {"minilm-d256": "minilm-d256"}, (task,), variants,
                      {**SLICES.get(task, SLICES["sentences"]), **LONG})
        for task in ("sst2", "conll04")
    ]  # fmt: skip
    return _registered("own/sites", join_plans(*plans), "site")


def _registered(name: str, plan_cells: CellPlan, rows: str) -> Study:
    """Return a study that docs/studies/plan.md registers, with its table of scores."""
    columns = ("task", "depth") if rows == "site" else ("task",)
    view = TableSpec(title="Scores", groups="model", rows=rows, columns=columns, metric=METRIC)
    note = "docs/studies/plan.md says what is compared, and which differences its seeds decide."
    return Study(name, OWN_QUESTIONS[name], plan_cells, (view,), METRIC, note)


METRIC = ("exact", "entity_f1", "accuracy")
OWN_QUESTIONS: Mapping[str, str] = {
    "own/defaults": "At which learning rate does each method do best, and how far below it is its default?",
    "own/choose": "Does choosing a method pay once the learning rate is chosen?",
    "own/structure": "Does structure matter once the number of parameters is equal?",
    "own/sites": "At one number of parameters, do depth and site matter, and does one depend on the other?",
}
OWN_STUDIES: Mapping[str, Callable[[StudySetup], Study]] = {
    "own/defaults": defaults, "own/choose": choose, "own/structure": structure, "own/sites": sites,
}  # fmt: skip
"""Name -> the function that builds the study; these are run by name and are no part of `all`."""
