"""Outcomes made up for every kind of study: no model, the same numbers every time, with failures and gaps."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from deltune.studies.jobs.job import Outcome
from deltune.studies.report.figure_spec import Bars, Curves, HeatMap, Scatter, TableSpec, ViewSpec

METHODS = {
    "full": 100.0, "scaled_parallel_adapter(at='ffn', rank=16)": 0.33, "prefix(length=16)": 0.33, "lora(rank=16)": 0.33,
    "mam(length=8, rank=16)": 0.66, "three_vectors": 0.0006, "bitfit": 0.07, "layernorm": 0.034,
    "prefix_layernorm(length=16)": 0.36,
}  # fmt: skip
NAMES = {
    "full": "FT", "scaled_parallel_adapter(at='ffn', rank=16)": "Adapter", "prefix(length=16)": "Prefix",
    "lora(rank=16)": "LoRA", "mam(length=8, rank=16)": "MAM", "three_vectors": "3V", "bitfit": "BitFit",
    "layernorm": "LN", "prefix_layernorm(length=16)": "Prefix+LN", "minilm": "MiniLM-L6", "bert": "BERT-base",
    "sick": "SICK", "sst2": "SST-2", "cb": "CB", "conll04": "CN04", "csqa": "CSQA", "entity_f1": "F1", "bleu": "BLEU",
    "rouge1": "R-1", "rouge2": "R-2", "rougeL": "R-L", "ter": "TER", "e2e": "E2E", "samsum": "SAMSum",
    "attention norm": "MHA", "ffn norm": "FFN",
}  # fmt: skip
TASKS = {"conll04": "entity_f1", "sick": "accuracy", "sst2": "accuracy", "cb": "accuracy", "csqa": "accuracy"}


def outcome(cell: Mapping[str, Any], scores: Mapping[str, float], percent: float = 0.1, **more: Any) -> Outcome:
    """A finished job with a count, a spec, and a curve that falls."""
    spec = {"model": cell.get("model", "minilm"), "task": cell.get("task", "sick"), "method": str(cell.get("method")),
            "seed": cell.get("seed", 0), "epochs": 3, "batch_size": 16, "lr": 0.001, "max_length": 128}  # fmt: skip
    rng = random.Random(str(sorted(cell.items(), key=str)))
    curve = [
        {"step": step, "loss": 0.2 + 2.0 / (1 + step / 60) + rng.uniform(-0.05, 0.05)} for step in range(10, 310, 10)
    ]
    base = {"curve": curve, "seconds": rng.uniform(20, 90)}
    count = {"method": round(percent * 227_000), "head": 1155, "percent": percent, "denominator_size": 22_713_216}
    return Outcome(cell, spec, scores, count, **{**base, **more})


def nlu(models: tuple[str, ...] = ("minilm", "bert"), seeds: int = 3) -> list[Outcome]:
    """LN table 1 in small: a method that failed on a task, a seed that failed, a method not run on a task."""
    rng, results = random.Random(1), []
    for model in models:
        for m, (method, percent) in enumerate(METHODS.items()):
            for t, (task, metric) in enumerate(TASKS.items()):
                for seed in range(seeds):
                    cell = {"model": model, "task": task, "method": method, "seed": seed}
                    if method == "three_vectors" and task == "csqa":
                        results.append(Outcome(cell, error="DeltuneError: three_vectors: no head for multiple choice"))
                    elif method == "bitfit" and task == "cb" and seed == 1 and model == "minilm":
                        results.append(Outcome(cell, error="Diverged: the loss is no number at step 40"))
                    elif not (method == "lora(rank=16)" and task == "conll04" and model == "bert"):
                        value = 0.9 - 0.05 * t - 0.015 * ((m * 5) % 9) + rng.uniform(-0.006, 0.006)
                        results.append(outcome(cell, {metric: value, "loss": 1 - value}, percent))
    return results


NLU = TableSpec(
    title="Results by task", groups="model", metric=("entity_f1", "accuracy"), rank=True, display_names=NAMES,
    order={"method": tuple(METHODS)},
    published={("BERT-base", "FT", "SICK"): 84.5, ("bert", "full", "sick"): 84.5, ("bert", "full", "sst2"): 90.9,
           ("bert", "full", "average"): 76.3, ("bert", "layernorm", "percent"): 0.04},
)  # fmt: skip


def nlg() -> list[Outcome]:
    rng, results = random.Random(2), []
    metrics = {"e2e": ("bleu", "meteor", "rougeL", "cider"), "samsum": ("rouge1", "rouge2", "rougeL"),
               "dart": ("bleu", "ter")}  # fmt: skip
    for m, (method, percent) in enumerate(METHODS.items()):
        for task, several in metrics.items():
            scores = {name: 60 - 4 * i - m + rng.uniform(-0.5, 0.5) for i, name in enumerate(several)}
            scores = {k: v / 100 if k == "meteor" else v / 30 if k == "cider" else v for k, v in scores.items()}
            results.append(outcome({"task": task, "method": method, "seed": 0}, scores, percent))
    return results


NLG = TableSpec(
    title="Generated text", columns=("task", "metric"), average=False, rank=True, display_names=NAMES,
    metric=("bleu", "meteor", "rouge1", "rouge2", "rougeL", "cider", "ter", "bleurt"),
)  # fmt: skip


def times() -> list[Outcome]:
    rng, results = random.Random(3), []
    for m, (method, percent) in enumerate(METHODS.items()):
        for task in ("sick", "sst2", "conll04"):
            cell = {"task": task, "method": method}
            step = 50 * (1 - 0.04 * m) + rng.uniform(-1, 1) if method != "full" else 60
            if (method, task) == ("bitfit", "sst2"):
                results.append(Outcome(cell, error="out of memory"))
            else:
                results.append(outcome(cell, {"train_step": step, "forward": 20 + m}, percent, curve=()))
    return results


TIMES = Bars(
    title="Time of a training step", groups="task", bars="method", y="train_step", lower=True, display_names=NAMES,
)  # fmt: skip


def terms(layers: int = 12) -> list[Outcome]:
    rng, results = random.Random(4), []
    for task in ("sick", "sst2", "cb", "csqa", "conll04"):
        for seed in range(2):
            changes = [
                {"layer": layer, "module": module, "term": term,
                 "value": 0.002 * layer * (2 if term == "gain" else 1) * rng.uniform(0.7, 1.3)}
                for layer in range(layers) for module in ("attention norm", "ffn norm") for term in ("gain", "bias")
            ]  # fmt: skip
            results.append(outcome({"task": task, "seed": seed}, {"accuracy": 0.8}, extra={"changes": changes}))
    return results


TERMS = HeatMap(
    title="Change of gain and bias",
    entries="changes",
    panels="task",
    display_names={**NAMES, "value": "mean absolute change"},
)


def budget() -> list[Outcome]:
    rng, results = random.Random(5), []
    sizes = {"full": {0: 100.0}, "bitfit": {0: 0.08}, "prefix": {30: 0.5, 200: 3.6, 512: 9.2},
             "adapter": {30: 0.6, 200: 3.4, 600: 7.2}, "lora": {30: 0.7, 200: 3.9, 600: 7.0}, "prompt": {100: 0.1},
             "parallel_adapter": {30: 0.62, 512: 6.1, 1024: 12.3}, "mam": {512: 6.7}}  # fmt: skip
    for task in ("xsum", "wmt16_enro"):
        for m, (method, percents) in enumerate(sizes.items()):
            for size, percent in percents.items():
                for seed in range(3):
                    score = 21.9 if method == "full" else 17 + m * 0.4 + percent * 0.2 + rng.uniform(-0.3, 0.3)
                    cell = {"task": task, "method": method, "size": size, "seed": seed}
                    if (method, size, seed) == ("lora", 600, 2):
                        results.append(Outcome(cell, error="out of memory"))
                    else:
                        results.append(outcome(cell, {"rouge2": score}, percent))
    return results


BUDGET = Scatter(
    title="Score against parameters", y="rouge2", panels="task", reference_lines={"full tuning": {"method": "full"}},
    display_names={"mam": "MAM", "lora": "LoRA", "xsum": "XSum", "wmt16_enro": "en-ro"},
)  # fmt: skip
POINTS = Scatter(
    title="One point a method", y="accuracy", where={"task": "sst2", "model": "minilm"}, display_names=NAMES,
    reference_lines={"full tuning": {"method": "full"}},
)  # fmt: skip


def representation() -> list[Outcome]:
    rng = random.Random(6)
    return [
        outcome({"method": method, "at": at, "rank": rank, "seed": seed},
                {"rouge2": 19 + (at == "ffn") * 1.2 + i * 0.3 + rank / 800 + rng.uniform(-0.1, 0.1)}, rank / 80)
        for i, method in enumerate(("prefix", "lora", "adapter", "parallel_adapter"))
        for at in ("attention", "ffn") for rank in (200, 512) for seed in range(3)
        if (method, at) != ("prefix", "ffn")
    ]  # fmt: skip


REPRESENTATION = Scatter(title="Attention or FFN", y="rouge2", series=("at", "method"))


def gap() -> list[Outcome]:
    rng, results = random.Random(7), []
    for model, size in {"tiny": 4_400_000, "mini": 11_200_000, "small": 28_800_000, "base": 110_000_000}.items():
        for m, method in enumerate(("full", "lora", "adapter", "bitfit", "prompt")):
            for seed in range(3):
                value = 0.92 - m * 0.25 / (size / 4e6) ** 0.7 + rng.uniform(-0.01, 0.01)
                cell = {"model": model, "size": size, "method": method, "seed": seed}
                results.append(outcome(cell, {"accuracy": value}))
    return results


GAP = Curves(
    title="The gap shrinks with scale", x="size", y="accuracy", log=True, gap=True, display_names={"lora": "LoRA"}
)


def structure() -> list[Outcome]:
    rng = random.Random(8)
    return [
        outcome({"model": model, "group": group, "twin": twin, "seed": seed},
                {"accuracy": 0.6 + 0.08 * (model == "base") - 0.04 * i + rng.uniform(-0.02, 0.02)})
        for model in ("small", "base") for group in ("prompt", "bitfit", "lora", "adapter")
        for i, twin in enumerate(("itself", "adjacent", "discrete")) for seed in range(3)
    ]  # fmt: skip


STRUCTURE = Bars(
    title="A method and its twins", groups="group", bars="twin", panels="model", reference_lines={"chance": 0.5}
)


def convergence() -> list[Outcome]:
    results = []
    for kind, speed in {"adjacent": 90, "discrete": 220}.items():
        for seed in range(3):
            rng = random.Random(f"{kind}{seed}")
            curve: list[dict[str, Any]] = []
            for step in range(20, 1020 - 100 * seed, 20):
                curve.append({"step": step, "loss": 2 / (1 + step / speed)})
                if step % 100 == 0:
                    score = 0.33 + 0.5 * (1 - 2.718 ** (-step / speed))
                    curve.append({"step": step, "eval_accuracy": score + rng.uniform(-0.02, 0.02), "eval_loss": 1.0})
            results.append(outcome({"kind": kind, "seed": seed}, {"accuracy": 0.8}, curve=curve))
    return results


CONVERGENCE = Curves(title="Convergence", series="kind", reference_lines={"chance": 1 / 3})


def thresholds() -> list[Outcome]:
    results = []
    for model, shift in {"small": 0, "base": -0.4}.items():
        for m, method in enumerate(("lora", "adapter", "bitfit")):
            for i, n in enumerate((10, 100, 1_000, 10_000, 100_000, 1_000_000)):
                for seed in range(3):
                    rng = random.Random(f"{model}{method}{n}{seed}")
                    score = (
                        0.5 + 0.42 / (1 + 2.718 ** (-(i + shift * -1 - 2.2 - 0.2 * m) * 2)) + rng.uniform(-0.01, 0.01)
                    )
                    cell = {"model": model, "method": method, "N": n, "seed": seed}
                    results.append(outcome(cell, {"accuracy": score}))
            marks = {"low": (60 * (m + 1), 150 * (m + 1)), "high": (20_000 * (m + 1), 45_000 * (m + 1))}
            results.append(outcome({"model": model, "method": method}, {}, extra=marks, curve=()))
    return results


THRESHOLDS = Curves(
    title="Two thresholds", x="N", y="accuracy", series=("method", "model"), log=True, marks=("low", "high"),
    reference_lines={"chance": 0.5, "full tuning": 0.925}, display_names={"lora": "LoRA"},
)  # fmt: skip


def transfer() -> list[Outcome]:
    rng, names = random.Random(9), ("sst2", "imdb", "rotten_tomatoes", "mnli", "qnli", "rte", "mrpc", "qqp")
    kind = {"sst2": 0, "imdb": 0, "rotten_tomatoes": 0, "mnli": 1, "qnli": 1, "rte": 1, "mrpc": 2, "qqp": 2}
    return [
        outcome({"source": a, "target": b, "seed": 0},
                {"accuracy": (0.9 if a == b else 0.8 if kind[a] == kind[b] else 0.5) + rng.uniform(-0.05, 0.05)})
        for a in names for b in names if (a, b) != ("rte", "imdb")
    ]  # fmt: skip


TRANSFER = HeatMap(title="Zero-shot transfer", rows="source", columns="target", value="accuracy", diagonal=True)

STUDIES: dict[str, tuple[list[Outcome], tuple[ViewSpec, ...]]] = {
    "ln/nlu": (nlu(), (NLU, POINTS)),
    "ln/nlg": (nlg(), (NLG,)),
    "ln/time": (times(), (TIMES,)),
    "ln/terms": (terms(), (TERMS,)),
    "uv/budget": (budget(), (BUDGET,)),
    "uv/representation": (representation(), (REPRESENTATION,)),
    "ap/gap": (gap(), (GAP,)),
    "ap/structure": (structure(), (STRUCTURE,)),
    "ap/convergence": (convergence(), (CONVERGENCE,)),
    "ap/thresholds": (thresholds(), (THRESHOLDS,)),
    "ap/transfer": (transfer(), (TRANSFER,)),
}
