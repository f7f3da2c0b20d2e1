"""The papers' training protocols, by name: values of a run's config where none are given."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import DeltuneError, unknown_name
from ..methods.registry import default_learning_rate, parse
from ..methods.spec import MaskedMethod, Method, NamedMethod
from .tasks.registry import TASKS

Values = Mapping[str, Any]

EXCLUDES = {
    "epochs": ("steps",), "steps": ("epochs",), "seed": ("seeds",), "seeds": ("seed",), "batch_size": ("batch_tokens",),
    "batch_tokens": ("batch_size", "device_batch_size"), "lr": ("lr_source",),
}  # fmt: skip
"""Flat name of a field -> the fields that it takes the place of."""


FLAT_NAMES = {
    "model.name": "model", "data.source": "data", "method.expression": "method", "objective.kind": "objective",
}  # fmt: skip
"""The fields whose flat name is not their own: the main field of a section is called like the section."""

DEFAULT = "default"
"""Where a learning rate comes from that is not given: the method and the number of steps, or a search."""

DECIDES_RATE = (
    "model", "data", "task", "max_train_rows", "method", "head", "pooling", "epochs", "steps", "batch_size",
    "batch_tokens", "schedule", "warmup",
)  # fmt: skip
"""Flat names of the fields with which a learning rate that was not given changes."""


@dataclass(frozen=True)
class Rule:
    """Values for some tasks, some methods or both; empty means all. A method is meant alone, or under a mask."""

    values: Values
    tasks: Collection[str] = ()
    methods: Collection[str] = ()

    def applies(self, task: str | None, method: str | None) -> bool:
        """Return whether the rule is for this task and this named method."""
        return (not self.tasks or task in self.tasks) and (not self.methods or method in self.methods)


@dataclass(frozen=True)
class Protocol:
    """The training settings of a paper.

    Attributes:
        source: Where the paper says it.
        values: The values of every run, by flat name.
        rules: The values of some runs; later rules win over earlier ones.
        ours: What the paper does not say: flat name of a field -> where its value is from. All others are the paper's.
    """

    source: str
    values: Values
    rules: Sequence[Rule] = ()
    ours: Mapping[str, str] = field(default_factory=dict)

    def values_for(self, task: str | None, method: str | None) -> dict[str, Any]:
        """Return the values for a task and a named method."""
        values = {"pooling": "model", **self.values}  # the papers tune the models' classes as they are
        for rule in self.rules:
            values = merge_values(values, rule.values) if rule.applies(task, method) else values
        return values


def _batch_size_rules(sizes: Mapping[str, tuple[int, int, int]]) -> list[Rule]:
    """Return the rules of batch sizes by task: of most methods, of full tuning, of the MAM adapter."""
    return [
        Rule({"batch_size": size}, (task,), methods)
        for task, columns in sizes.items()
        for size, methods in zip(columns, ((), ("full",), ("mam",)), strict=True)
    ]


SENTIMENT = ("sst2", "imdb", "rotten_tomatoes")
THREE = (0, 1, 2)
LN_NLU: Values = {
    "epochs": 30, "patience": 10, "metric": "loss", "search": {"lr": (1e-3, 2e-4)}, "seeds": THREE,
}  # fmt: skip
LN_RATES = Rule({"search": {"lr": (1e-2, 1e-3, 2e-4)}}, methods=("layernorm",))
SUMMARY = {"beams": 6, "min_tokens": 10, "max_tokens": 60, "no_repeat_ngram": 3}
PLAIN: Values = {"template": "{source}"}
UNIFIED: Values = {"lr": 5e-5, "adam_betas": (0.9, 0.98), "adam_epsilon": 1e-6, "schedule": "polynomial"}
FULL = ("full",)
CODE = "the released code"
DECODING = "6 for summaries and 5 for translation, as in the works that it cites; its sentence names translation first"
LN_OURS = {"seeds": "0, 1 and 2; the paper repeats three times without naming seeds"}

PROTOCOLS: Mapping[str, Protocol] = {
    "ln_nlu": Protocol(
        "LN-tuning, appendix A and table 3: BERT-base",
        LN_NLU,
        ours=LN_OURS,
        rules=(
            LN_RATES,
            *_batch_size_rules(
                {
                    "conll04": (128, 128, 128), "broad_twitter": (128, 128, 128), "sick": (512, 512, 512),
                    "snli": (512, 512, 512), "sst2": (392, 256, 392), "cb": (64, 48, 64),
                    "commonsense_qa": (64, 48, 64), "social_iqa": (64, 48, 48),
                }
            ),
        ),
    ),
    "ln_nlu_large": Protocol(
        "LN-tuning, appendix A and table 3: BERT-large",
        LN_NLU,
        ours=LN_OURS,
        rules=(
            LN_RATES,
            *_batch_size_rules(
                {
                    "conll04": (48, 32, 48), "broad_twitter": (48, 32, 48), "sick": (256, 256, 256),
                    "snli": (256, 256, 256), "sst2": (256, 128, 256), "cb": (32, 24, 32),
                    "commonsense_qa": (32, 16, 24), "social_iqa": (24, 12, 24),
                }
            ),
        ),
    ),
    "ln_nlg": Protocol(
        "LN-tuning, appendix A and table 4 (its column WebNLG taken for DART, which the text and table 2 have)",
        {"epochs": 20, "lr": 2e-4, "seeds": THREE, "metric": "loss", "max_length": 512, "target_length": 128},
        ours={
            **LN_OURS, "metric": "the validation loss, as for understanding", "max_length": "long enough for all tasks",
            "target_length": "long enough for all tasks",
            "metrics": "SAMSum by the package rouge, as printed, and by rouge-score beside it",
        },
        rules=(
            Rule({"max_tokens": 35}, ("e2e_nlg", "samsum")),
            Rule({"max_tokens": 45}, ("dart", "webnlg")),
            Rule({"metrics": ("rouge1_pltrdy", "rouge2_pltrdy", "rougeL_pltrdy", "rouge1", "rouge2", "rougeL")},
                 ("samsum",)),
            *_batch_size_rules(
                {
                    "samsum": (36, 32, 36), "e2e_nlg": (96, 48, 96), "dart": (84, 40, 84), "webnlg": (84, 40, 84),
                }
            ),
        ),
    ),
    "uv_xsum": Protocol(
        "Unified View, tables 7 and 8, appendix A",
        {
            **UNIFIED, **SUMMARY, "steps": 100_000, "batch_size": 64, "label_smoothing": 0.1, "clip": 0.1,
            "weight_decay": 0.01, "max_length": 512, "target_length": 128, "validation_rows": 1600,
            "metric": "rouge2",
        },
        (
            Rule(PLAIN, ("xsum",)),
            Rule(
                {
                    "lr": 3e-5, "steps": 15_000, "warmup": 500.0, "batch_tokens": 32_768, "adam_betas": (0.9, 0.999),
                    "adam_epsilon": 1e-8,
                },
                methods=FULL,
            ),
        ),
        {
            "adam_betas": CODE, "adam_epsilon": CODE, "no_repeat_ngram": CODE, "template": "the text alone",
            "beams": DECODING, "batch_tokens": "fairseq's recipe for XSum: 2,048 tokens × 2 × 8 devices",
        },
    ),
    "uv_enro": Protocol(
        "Unified View, table 8, appendix A",
        {
            **UNIFIED, "steps": 50_000, "batch_tokens": 16_384, "label_smoothing": 0.1, "clip": 1.0,
            "weight_decay": 0.01, "max_length": 150, "target_length": 150, "beams": 5, "min_tokens": 1,
            "max_tokens": 200, "metric": "loss",
        },
        (
            Rule(PLAIN, ("wmt16_en_ro",)),
            Rule(
                {"lr": 3e-5, "steps": 40_000, "warmup": 2500.0, "label_smoothing": 0.2, "weight_decay": 0.0},
                methods=FULL,
            ),
        ),
        {
            "adam_betas": CODE, "adam_epsilon": CODE, "template": "the text alone", "beams": DECODING,
            "batch_tokens": "for full tuning too: Liu et al. give no number of devices",
        },
    ),
    "uv_glue": Protocol(
        "Unified View, table 8, appendix A",
        {
            "lr": 1e-4, "epochs": 10, "batch_size": 32, "warmup": 0.06, "weight_decay": 0.1, "clip": 1.0,
            "max_length": 512, "seeds": (0, 1, 2, 3, 4), "aggregate": "median",
        },
        (
            Rule({"lr": 1e-5, "adam_betas": (0.9, 0.98), "adam_epsilon": 1e-6, "clip": 0.0}, methods=FULL),
        ),
        {"seeds": "0 to 4; the paper has five random runs"},
    ),
    "ap": Protocol(
        "APET, appendix B.3",
        {"batch_size": 32, "lr": 3e-4, "max_length": 256, "seeds": THREE},
        (
            Rule({"max_length": 128}, SENTIMENT),
            Rule({"max_tokens": 64, "target_length": 256}, ("multi_news",)),
            Rule({"max_tokens": 128, "target_length": 256}, ("samsum",)),
            Rule({"lr": 3e-2}, methods=("prompt",)),
            Rule({"lr": 5e-5}, methods=FULL),
            Rule({"lr": 5e-5}, ("rte",)),
        ),
        {
            "seeds": "0, 1 and 2; the paper has 3 different random seeds", "target_length": "long enough for summaries",
            "lr": "of full tuning 5e-5, since none is printed; all others are the paper's",
        },
    ),
}  # fmt: skip
"""Every known protocol."""


def merge_values(base: Values, values: Values) -> dict[str, Any]:
    """Lay the values that are given over others, both by flat name.

    A value that is given also replaces those that exclude it (`EXCLUDES`) and the values of its field to try. A
    learning rate that was the default of the base's method does not outlive a change of what it
    depends on, nor a search over that or over rates. Options of metrics are laid over each other metric by metric;
    options of the official script of the base's task do not outlive a change of the task.
    """
    searched = _searched_fields(values)
    changed = {field for field, value in values.items() if field != "method" or value is not None} | searched
    if "lr" in searched - values.keys() and base.get("lr_source") is not None:
        base = {field: value for field, value in base.items() if field not in ("lr", "lr_source")}
    if "lr" not in values and base.get("lr_source") is not None and not changed.isdisjoint(DECIDES_RATE):
        base = {**base, "lr": base["lr_source"], "lr_source": None}
    if "method" in changed and base.get("method") is not None and "lr" not in values:
        base = {field: value for field, value in base.items() if field != "lr" or value != default_rate(base["method"])}
    replaced = {other for field in values for other in EXCLUDES.get(field, ()) if other not in values}
    merged = {field: value for field, value in base.items() if field not in replaced} | dict(values)
    if isinstance(merged.get("search"), Mapping) and "search" not in values:
        merged["search"] = {field: choices for field, choices in merged["search"].items() if field not in values}
    options, chosen = base.get("metric_options"), values.get("metric_options", {})
    if isinstance(options, Mapping) and isinstance(chosen, Mapping):
        if any(values.get(name, base.get(name)) != base.get(name) for name in DATA_FIELDS):
            options = without_official_options(options, base)
        merged["metric_options"] = merge_metric_options(options, chosen)
    return merged


DATA_FIELDS = ("task", "data")
"""The fields that say which task it is."""


def official_options(values: Values) -> Mapping[str, Mapping[str, Any]]:
    """Return the options of metrics that the official script of a config's known task has; none for a user's data."""
    task = values.get("task")
    if values.get("data") is None and isinstance(task, str) and task in TASKS:
        return TASKS[task].metric_options
    return {}


def merge_metric_options(base: Values, values: Values) -> dict[str, Any]:
    """Lay options of metrics over others, metric by metric; what is no mapping is kept for `RunConfig` to report."""
    merged = {metric: dict(options) if isinstance(options, Mapping) else options for metric, options in base.items()}
    for metric, options in values.items():
        before = merged.get(metric)
        if isinstance(before, Mapping) and isinstance(options, Mapping):
            merged[metric] = {**before, **options}
        else:
            merged[metric] = options
    return merged


def without_official_options(options: Values, values: Values) -> dict[str, Any]:
    """Return the options of metrics without those that the official script of a config's known task has."""
    official, left = official_options(values), {}
    for metric, chosen in options.items():
        if metric in official and isinstance(chosen, Mapping):
            chosen = {
                name: value
                for name, value in chosen.items()
                if name not in official[metric] or official[metric][name] != value
            }
            if not chosen:
                continue
        left[metric] = chosen
    return left


def _searched_fields(values: Values) -> set[str]:
    """Return the flat names of the fields for which values to try are given; a wrong search is reported elsewhere."""
    search = values.get("search")
    names = [name for name in search if isinstance(name, str)] if isinstance(search, Mapping) else []
    return {FLAT_NAMES.get(name, name.rpartition(".")[2]) for name in names}


def apply_preset(values: Values) -> dict[str, Any]:
    """Return the flat values of a config, those that are not given from its protocol."""
    name = values.get("protocol")
    if name is None:
        return dict(values)
    if name not in PROTOCOLS:
        raise DeltuneError(f"runtime.protocol: {unknown_name('protocol', str(name), PROTOCOLS)}")
    return merge_values(PROTOCOLS[name].values_for(values.get("task"), _method_name(values.get("method"))), values)


def default_rate(method: Any) -> float | None:
    """Return the default learning rate of a method, or None for what is no method."""
    try:
        return default_learning_rate(method)
    except (DeltuneError, TypeError):
        return None


def _method_name(expression: Any) -> str | None:
    """Return the name of a named method that stands alone, under a mask or not; None for sums and invalid values."""
    try:
        method: Method = parse(expression)
    except (DeltuneError, TypeError):
        return None  # RunConfig reports it with the other problems
    while isinstance(method, MaskedMethod):
        method = method.method
    return method.name if isinstance(method, NamedMethod) else None
