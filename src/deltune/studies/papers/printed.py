"""The papers' printed tables as outcomes of their studies, on which claims can be checked as on our runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

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
    "bert-base": 1.1e8,
    "bert-large": 3.4e8,
    "bert-small": 2.9e7,
    "t5-small": 7.7e7,
    "t5-base": 2.5e8,
    "t5-xxl": 1.1e10,
}
"""Model -> about how many parameters it has."""

AVERAGES = ("average", "rank")
XSUM_ENRO = {"xsum": "rouge2", "wmt16_en_ro": "bleu"}
ENTITIES = {"conll04": "entity_f1", "broad_twitter": "entity_f1"}
AP_METRICS = {"nq_open": "answer_f1", "samsum": "rougeL", "multi_news": "rougeL"}

Place = tuple[dict[str, str], str, str]
"""Labels of a cell besides its task; the task; the metric."""


def _outcomes(table: Published, place: Callable[..., Place]) -> tuple[Outcome, ...]:
    """Return an outcome for each row and task of a table."""
    cells: dict[tuple[tuple[str, str], ...], dict[str, dict[str, float]]] = {}
    for key, number in table.items():
        labels, task, metric = place(*key)
        if task not in AVERAGES:
            cells.setdefault(tuple(labels.items()), {}).setdefault(task, {})[metric] = number
    return tuple(
        Outcome(
            {"task": task, **dict(labels), "seed": 0},
            scores={metric: number / points(metric) for metric, number in scores.items()},
            count={"method": tasks["percent"]["percent"]} if "percent" in tasks else {},
            extra={"parameters": SIZES.get(dict(labels).get("model", ""))},
        )
        for labels, tasks in cells.items()
        for task, scores in tasks.items()
        if task != "percent"
    )


def _metric(metrics: Mapping[str, str], task: str) -> str:
    return task if task == "percent" else metrics.get(task, "accuracy")


def _by_model(axis: str, metrics: Mapping[str, str]) -> Callable[..., Place]:
    return lambda model, label, task: ({"model": model, axis: label}, task, _metric(metrics, task))


def _by_method(method: str, task: str, metric: str = "percent") -> Place:
    return {"method": method}, task, metric


def _by_accuracy(method: str, task: str) -> Place:
    return {"method": method}, task, _metric({}, task)


def _by_insertion(site: str, insertion: str, task: str, metric: str = "percent") -> Place:
    return {"site": site, "insertion": insertion}, task, metric


def _by_budget(method: str, site: str, task: str, budget: str) -> Place:
    return {"site": site, "method": method, "budget": budget}, task, XSUM_ENRO[task]


def _by_group(model: str, group: str, task: str) -> Place:
    labels = {"family": model.partition("-")[0].upper(), "model": model, "group": group}
    return {**labels, "structure": "full" if group == "full" else "adjacent"}, task, _metric(AP_METRICS, task)


def _of_budget_study(method: str, task: str, metric: str = "percent") -> Place:
    budgets = {"full": "100", "bitfit": "0.1", "prompt": "0.1", "mam": "6.7"}
    return {"method": method, "budget": budgets[method]}, task, metric


def _legible(outcomes: tuple[Outcome, ...]) -> tuple[Outcome, ...]:
    """Leave out the tasks of a family of which a number is missing, so that a trend is over the same models for all."""
    rows: dict[tuple[str, str], int] = {}
    for outcome in outcomes:
        rows[outcome.cell["family"], outcome.cell["task"]] = (
            rows.get((outcome.cell["family"], outcome.cell["task"]), 0) + 1
        )
    most = max(rows.values())
    return tuple(o for o in outcomes if rows[o.cell["family"], o.cell["task"]] == most)


def _existing(size: str, method: str, task: str, metric: str) -> Place:
    return {"method": method, "budget": size}, task, metric


TASKS1 = {task: ENTITIES.get(task, "accuracy") for *_, task in LN_TABLE1}
LN1 = PrintedTable("table 1", _outcomes(LN_TABLE1, _by_model("method", ENTITIES)), TASKS1)
LARGE_LORA: Published = {
    ("lora", "attention", task, SHARES_OF_BOTH_SITES["512"]): UV_TABLE12["attention", "lora", "200", task, metric]
    for task, metric in XSUM_ENRO.items()
}
TABLES4_AND_12 = _outcomes({**UV_TABLE4_BY_BUDGET, **LARGE_LORA}, _by_budget)
TABLE6 = _outcomes(UV_TABLE6, _by_method)
LORA_BLEU: Published = {("lora_ffn", "wmt16_en_ro", "bleu"): UV_TABLE12["ffn", "lora", "102", "wmt16_en_ro", "bleu"]}
ALONE: Published = {
    ("pa_attention", "wmt16_en_ro", "bleu"): UV_TABLE4["attention", "parallel_adapter", "30"],
    ("pa_ffn", "wmt16_en_ro", "bleu"): UV_TABLE12["ffn", "parallel_adapter", "512", "wmt16_en_ro", "bleu"],
}
WITH_PROTOTYPES = tuple(
    outcome for outcome in _outcomes({**UV_TABLE6, **ALONE}, _by_method) if outcome.cell["task"] == "wmt16_en_ro"
)
EXISTING: Published = {
    (size, {"prefix": "prefix", "lora": "lora", "adapter": "adapter"}[method], *column): number
    for (site, method, size, *column), number in UV_TABLE12.items()
    if column != ["percent"] and (site, method) in (("attention", "prefix"), ("attention", "lora"), ("ffn", "adapter"))
}
TABLE6_ENDS = {key: number for key, number in UV_TABLE6.items() if key[0] in ("full", "bitfit", "prompt", "mam")}

AP2 = _outcomes(AP_TABLE2, _by_group)
AP2_METRICS = {**{task: "accuracy" for *_, task in AP_TABLE2}, **AP_METRICS}

PRINTED: Mapping[str, tuple[PrintedTable, ...]] = {
    "ln/nlu": (LN1,),
    "ln/nlg": (PrintedTable("table 2", _outcomes(LN_TABLE2, _by_method), "bleu"),),
    "ln/ablation": (PrintedTable("table 5", _outcomes(LN_TABLE5, _by_model("method", ENTITIES)), TASKS1),),
    "uv/budget": (
        PrintedTable(
            "tables 6 and 12",
            (*_outcomes(TABLE6_ENDS, _of_budget_study), *_outcomes(EXISTING, _existing)),
            XSUM_ENRO,
        ),
    ),
    "uv/insertion": (PrintedTable("table 3", _outcomes(UV_TABLE3, _by_insertion), XSUM_ENRO),),
    "uv/representation": (
        PrintedTable("tables 4 and 12", TABLES4_AND_12, XSUM_ENRO),
        PrintedTable("table 4", tuple(o for o in TABLES4_AND_12 if o.cell["task"] == "wmt16_en_ro"), XSUM_ENRO),
    ),
    "uv/composition": (PrintedTable("table 5", _outcomes(UV_TABLE5, _by_method), XSUM_ENRO),),
    "uv/integration": (
        PrintedTable("table 6", TABLE6, XSUM_ENRO),
        PrintedTable(
            "table 6, LoRA's BLEU from table 12", _outcomes({**UV_TABLE6, **LORA_BLEU}, _by_method), XSUM_ENRO
        ),
        PrintedTable(PROTOTYPES_IN, WITH_PROTOTYPES, XSUM_ENRO),
    ),
    "uv/full": (PrintedTable("table 12", _outcomes(UV_TABLE12_BY_BUDGET, _by_budget), XSUM_ENRO),),
    "uv/glue": (PrintedTable("table 2", _outcomes(UV_TABLE2, _by_accuracy), "accuracy"),),
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
