"""The papers' printed tables as outcomes of their studies, on which claims can be checked as on our runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from ..claims.comparisons import points
from ..claims.decisions import PrintedTable
from ..jobs.job import Outcome
from .published import (
    AP_LOW_THRESHOLDS,
    AP_TABLE2,
    LN_TABLE1,
    LN_TABLE2,
    LN_TABLE5,
    PROTOTYPES_IN,
    SHARES_OF_BOTH_SITES,
    UV_TABLE2,
    UV_TABLE3,
    UV_TABLE4,
    UV_TABLE4_BY_BUDGET,
    UV_TABLE5,
    UV_TABLE6,
    UV_TABLE12,
    UV_TABLE12_BY_BUDGET,
    Published,
)

SIZES = {
    "bert-base": 1.1e8, "bert-large": 3.4e8, "bert-small": 2.9e7, "t5-small": 7.7e7, "t5-base": 2.5e8, "t5-xxl": 1.1e10,
}  # fmt: skip
"""Model -> about how many parameters it has."""

AVERAGES = ("average", "rank")
XSUM_ENRO = {"xsum": "rouge2", "wmt16_en_ro": "bleu"}
ENTITIES = {"conll04": "entity_f1", "broad_twitter": "entity_f1"}
AP_METRICS = {"nq_open": "answer_f1", "samsum": "rougeL", "multi_news": "rougeL"}
BY_METHOD, BY_BUDGET = ("method", "task", "metric"), ("method", "site", "task", "budget")


def _outcomes(table: Published, axes: tuple[str, ...], metrics: Mapping[str, str] | None = None) -> tuple[Outcome, ...]:
    """Return an outcome for each row and task of a table, whose keys are labels on the axes.

    Where no axis has the metric it is that of the task, accuracy if `metrics` does not say so.
    """
    rows: dict[tuple[tuple[str, str], ...], dict[str, dict[str, float]]] = {}
    for key, number in table.items():
        labels = dict(zip(axes, key, strict=False))
        task = labels.pop("task")
        metric = labels.pop("metric", (metrics or {}).get(task, "accuracy"))
        if task not in AVERAGES:
            rows.setdefault(tuple(labels.items()), {}).setdefault(task, {})[metric] = number
    return tuple(
        Outcome(
            {"task": task, **dict(labels), "seed": 0},
            scores={metric: number / points(metric) for metric, number in scores.items()},
            count={"method": next(iter(tasks["percent"].values()))} if "percent" in tasks else {},
            extra={"parameters": SIZES.get(dict(labels).get("model", ""))},
        )
        for labels, tasks in rows.items()
        for task, scores in tasks.items()
        if task != "percent"
    )


def _legible(outcomes: tuple[Outcome, ...]) -> tuple[Outcome, ...]:
    """Leave out the tasks of a family of which a number is missing, so that a trend is over the same models for all."""
    rows = Counter((outcome.cell["family"], outcome.cell["task"]) for outcome in outcomes)
    return tuple(o for o in outcomes if rows[o.cell["family"], o.cell["task"]] == max(rows.values()))


TASKS1 = {task: ENTITIES.get(task, "accuracy") for *_, task in LN_TABLE1}
LARGE_LORA: Published = {
    ("lora", "attention", task, SHARES_OF_BOTH_SITES["512"]): UV_TABLE12["attention", "lora", "200", task, metric]
    for task, metric in XSUM_ENRO.items()
}
TABLES4_AND_12 = _outcomes({**UV_TABLE4_BY_BUDGET, **LARGE_LORA}, BY_BUDGET, XSUM_ENRO)
LORA_BLEU: Published = {("lora_ffn", "wmt16_en_ro", "bleu"): UV_TABLE12["ffn", "lora", "102", "wmt16_en_ro", "bleu"]}
ALONE: Published = {
    ("pa_attention", "wmt16_en_ro", "bleu"): UV_TABLE4["attention", "parallel_adapter", "30"],
    ("pa_ffn", "wmt16_en_ro", "bleu"): UV_TABLE12["ffn", "parallel_adapter", "512", "wmt16_en_ro", "bleu"],
}
SHARES = {"full": "100", "bitfit": "0.1", "prompt": "0.1", "mam": "6.7"}
BUDGETS: Published = {
    **{
        (SHARES[method], method, *column): number for (method, *column), number in UV_TABLE6.items() if method in SHARES
    },
    **{
        (size, method, *column): number
        for (site, method, size, *column), number in UV_TABLE12.items()
        if column != ["percent"]
        and (site, method) in (("attention", "prefix"), ("attention", "lora"), ("ffn", "adapter"))
    },
}
"""UV tables 6 and 12 as the study uv/budget has them: (budget, method, task, metric)."""

AP2 = tuple(
    replace(one, cell={
        "family": one.cell["model"].partition("-")[0].upper(),
        "structure": "full" if one.cell["group"] == "full" else "adjacent", **one.cell,
    })
    for one in _outcomes(AP_TABLE2, ("model", "group", "task"), AP_METRICS)
)  # fmt: skip
AP2_METRICS = {**{task: "accuracy" for *_, task in AP_TABLE2}, **AP_METRICS}


def _on_en_ro(outcomes: tuple[Outcome, ...]) -> tuple[Outcome, ...]:
    return tuple(outcome for outcome in outcomes if outcome.cell["task"] == "wmt16_en_ro")


PRINTED: Mapping[str, tuple[PrintedTable, ...]] = {
    "ln/nlu": (PrintedTable("table 1", _outcomes(LN_TABLE1, ("model", "method", "task"), ENTITIES), TASKS1),),
    "ln/nlg": (PrintedTable("table 2", _outcomes(LN_TABLE2, BY_METHOD), "bleu"),),
    "ln/ablation": (PrintedTable("table 5", _outcomes(LN_TABLE5, ("model", "method", "task"), ENTITIES), TASKS1),),
    "uv/budget": (
        PrintedTable("tables 6 and 12", _outcomes(BUDGETS, ("budget", "method", "task", "metric")), XSUM_ENRO),
    ),
    "uv/insertion": (
        PrintedTable("table 3", _outcomes(UV_TABLE3, ("site", "insertion", "task", "metric")), XSUM_ENRO),
    ),
    "uv/representation": (
        PrintedTable("tables 4 and 12", TABLES4_AND_12, XSUM_ENRO),
        PrintedTable("table 4", _on_en_ro(TABLES4_AND_12), XSUM_ENRO),
    ),
    "uv/composition": (PrintedTable("table 5", _outcomes(UV_TABLE5, BY_METHOD), XSUM_ENRO),),
    "uv/integration": (
        PrintedTable("table 6", _outcomes(UV_TABLE6, BY_METHOD), XSUM_ENRO),
        PrintedTable("table 6, LoRA's BLEU from table 12", _outcomes({**UV_TABLE6, **LORA_BLEU}, BY_METHOD), XSUM_ENRO),
        PrintedTable(PROTOTYPES_IN, _on_en_ro(_outcomes({**UV_TABLE6, **ALONE}, BY_METHOD)), XSUM_ENRO),
    ),
    "uv/full": (PrintedTable("table 12", _outcomes(UV_TABLE12_BY_BUDGET, BY_BUDGET, XSUM_ENRO), XSUM_ENRO),),
    "uv/glue": (PrintedTable("table 2", _outcomes(UV_TABLE2, ("method", "task")), "accuracy"),),
    "ap/all": (
        PrintedTable("table 2", AP2, AP2_METRICS),
        PrintedTable("table 2, without tasks of which a number is illegible", _legible(AP2), AP2_METRICS),
    ),
    "ap/thresholds": (
        PrintedTable(
            "§5.3",
            tuple(
                Outcome({"family": model.partition("-")[0].upper(), "model": model, "seed": 0},
                        extra={"low": list(bounds), "parameters": SIZES[model]})
                for model, bounds in AP_LOW_THRESHOLDS.items()
            ),
            "accuracy",
        ),
    ),
}  # fmt: skip
"""Study -> the tables on which its claims are checked, in order; a study that is absent has figures alone."""
