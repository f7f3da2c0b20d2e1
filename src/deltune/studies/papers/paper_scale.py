"""The needs of a study of the papers' scale, computed before anything is loaded: steps, time, memory, disk, hub.

The shapes of the models are written down here, so that neither the hub nor weights are needed. Every number is an upper
bound or an assumption that is said with it; nothing of it was measured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ...anatomy.tracing import meta_model
from ...methods.counting import count
from ...train import TASKS, RunConfig
from ..jobs.job import topological_order
from ..study import PlannedCell, Study, labels_without_seed

T5_SHAPE: Mapping[str, Any] = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
SHAPES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "google-bert/bert-base-uncased": ("bert", {}),
    "google-bert/bert-large-uncased": ("bert", {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
    }),
    "prajjwal1/bert-small": ("bert", {
        "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 2048,
    }),
    "FacebookAI/roberta-base": ("roberta", {
        "vocab_size": 50_265, "max_position_embeddings": 514, "type_vocab_size": 1,
    }),
    "openai-community/gpt2-medium": ("gpt2", {"n_embd": 1024, "n_layer": 24, "n_head": 16}),
    "facebook/bart-large": ("bart", {}),
    "facebook/mbart-large-cc25": ("mbart", {"vocab_size": 250_027}),
    "google/t5-v1_1-small": ("t5", {
        "d_model": 512, "d_ff": 1024, "num_layers": 8, "num_heads": 6, "d_kv": 64, **T5_SHAPE,
    }),
    "google/t5-v1_1-base": ("t5", {
        "d_model": 768, "d_ff": 2048, "num_layers": 12, "num_heads": 12, "d_kv": 64, **T5_SHAPE,
    }),
    "google/t5-v1_1-xxl": ("t5", {
        "d_model": 4096, "d_ff": 10_240, "num_layers": 24, "num_heads": 64, "d_kv": 64, **T5_SHAPE,
    }),
}  # fmt: skip
"""Hub id of every model that a study names -> its type and what differs from the type's default shape."""

TRAIN_ROWS: Mapping[str, int] = {
    "sst2": 67_349, "imdb": 25_000, "rotten_tomatoes": 8_530, "sick": 4_500, "snli": 549_367, "mnli": 392_702,
    "cb": 250, "rte": 2_490, "qnli": 104_743, "qqp": 363_846, "mrpc": 3_668, "conll04": 922, "broad_twitter": 6_338,
    "commonsense_qa": 9_741, "social_iqa": 33_410, "e2e_nlg": 42_061, "dart": 62_659, "samsum": 14_732,
    "xsum": 204_045, "wmt16_en_ro": 610_320, "nq_open": 87_925, "multi_news": 44_972,
}  # fmt: skip
"""Rows of the official training splits, references counted singly."""

DEVICES: Mapping[tuple[str, str], float] = {
    ("H100", "bf16"): 990e12, ("A100", "bf16"): 312e12, ("H100", "fp32"): 67e12, ("A100", "fp32"): 19.5e12,
    ("CPU core", "fp32"): 1e11,
}  # fmt: skip
"""Device and precision -> its operations a second: of the cards as their maker prints them, in float32 without tensor
cores; of a core about what the clock and the width of its vectors allow."""
SHARE = 0.5
"""The share of these operations that training reaches (ours)."""
MOMENTS = 12
"""Bytes of a trained scalar besides its own four: its gradient, and Adam's two moments."""
ACTIVATION_BYTES = 68
"""Bytes that one layer keeps of one token, for each scalar of its width, in float32 (Korthikanti et al. 2022: 34 in
half precision, without the scores of attention, which are not kept)."""


def backbone_config(hub_id: str) -> PreTrainedConfig:
    """Return the configuration of a model that a study names, from its shape and without the hub."""
    model_type, values = SHAPES[hub_id]
    config: PreTrainedConfig = AutoConfig.for_model(model_type, **values)
    return config


@cache
def _backbone(hub_id: str) -> PreTrainedModel:
    return meta_model(backbone_config(hub_id))


@cache
def _trained(hub_id: str, method: str) -> int:
    if drawn := re.search(r"parameters=(\d+)", method):
        return int(drawn[1])
    return count(_backbone(hub_id), method).trained


def parameters(hub_id: str) -> int:
    """Return how many parameters a model has."""
    return sum(parameter.numel() for parameter in _backbone(hub_id).parameters())


@dataclass(frozen=True)
class Training:
    """One training run at the papers' scale.

    Steps, and tokens of a batch, are the most there can be. `times` counts those runs too that only try a value.
    """

    model: str
    task: str
    steps: int
    tokens: int
    trained: int
    times: int = 1

    @property
    def operations(self) -> float:
        """Floating-point operations of all of these runs: 2 a token and parameter forward, as many for the gradients of
        activations, and as many for each trained scalar's. In an encoder with a decoder a token passes one half.
        """
        config = _backbone(self.model).config
        half = 0.5 if config.is_encoder_decoder else 1.0
        inner = parameters(self.model) - config.vocab_size * config.hidden_size
        return self.times * self.steps * self.tokens * (4 * half * inner + 2 * min(self.trained, half * inner))

    @property
    def fixed_memory(self) -> float:
        """Bytes on the device whatever the batch: weights, and the gradients and Adam's moments of what is trained."""
        return 4 * parameters(self.model) + MOMENTS * self.trained

    @property
    def memory(self) -> float:
        """Bytes on the device for one batch at once: `fixed_memory`, activations, and logits over words."""
        config = _backbone(self.model).config
        layers, width = config.num_hidden_layers, config.hidden_size
        logits = 8 * config.vocab_size if TASKS[self.task].kind == "generation" else 0
        return self.fixed_memory + self.tokens * (ACTIVATION_BYTES * width * layers + logits)


def training(spec: Mapping[str, Any]) -> Training:
    """Return the training that a run's spec asks for; each searched value is taken to cost as much as the first."""
    configs = RunConfig.from_canonical(spec).search_configs()
    values = configs[0].flat()
    model, task = str(spec["model"]), str(spec["task"])
    written = TASKS[task].kind == "generation" or values["answer"] == "words"
    length = int(values["max_length"] or 128) + (int(values["target_length"] or values["max_length"]) if written else 0)
    in_tokens = values["batch_tokens"]
    rows = int(values["batch_size"]) if in_tokens is None else max(1, int(in_tokens) // length)
    steps = int(values["steps"] or math.ceil(TRAIN_ROWS[task] / rows) * int(values["epochs"]))
    return Training(model, task, steps, rows * length, _trained(model, values["method"]), len(configs))


def trainings(study: Study) -> tuple[list[Training], int]:
    """Return the training runs of a study of the papers' scale, and how many of its cells are not among them.

    A cell whose job follows from a search under the first seed is counted as one run of the searching spec. Of the
    cells of searches for a threshold only the first runs are known.
    """
    planned = study.plan_cells({})
    jobs = [job for job in topological_order(study.jobs({})) if job.kind == "run"]
    runs = [training(job.spec) for job in jobs]
    first: dict[Any, PlannedCell] = {}
    for one in planned:
        if one.job is not None:
            first.setdefault(labels_without_seed(one.cell), one)
    unknown = 0
    for one in planned:
        if one.job is None:
            same = first.get(labels_without_seed(one.cell))
            if same is None or same.job is None:
                unknown += 1
            else:
                runs.append(replace(training(same.job.spec.get("run", same.job.spec)), times=1))
    return runs, unknown


def describe_needs(study: Study) -> list[str]:
    """Describe in lines what a study of the papers' scale asks for."""
    runs, unknown = trainings(study)
    timed = [job for job in study.jobs({}) if job.kind == "time"]
    models = list(dict.fromkeys([one.model for one in runs] + [str(job.spec["model"]) for job in timed]))
    lines = ["  models from the hub: " + ", ".join(f"{m} ({_bytes(4 * parameters(m))} in float32)" for m in models)]
    if sources := _data_sources(study):
        lines.append("  data from the hub: " + ", ".join(sources))
    if not runs:
        largest = max(4 * parameters(str(job.spec["model"])) * (len(job.spec["methods"]) + 1) for job in timed)
        return [*lines, f"  no training; memory: {_bytes(largest)} for weights, of which each timed method has its own"]
    number = sum(one.times for one in runs)
    more = f", and those that follow from them: {unknown} cells of searches for a threshold" if unknown else ""
    operations = sum(one.operations for one in runs)
    hours = ", ".join(
        f"{_hours(operations / (SHARE * rate) / 3600)} on one {name} in {precision}"
        for (name, precision), rate in DEVICES.items()
    )
    needy = max(runs, key=lambda one: one.memory)
    deltas = sum(4 * one.trained * one.times for one in runs)
    lines += [
        f"  {number:,} training runs, those that try a learning rate or a scale included{more}",
        f"  training takes {operations:.1e} operations at most: {hours} (at {SHARE:.0%} of its rate; all "
        "texts as long as they may be and no run stopped early; validation and generation come on top)",
        f"  memory: up to {_bytes(needy.memory)} for a whole batch at once ({needy.model}, {needy.task}), and "
        f"{_bytes(max(one.fixed_memory for one in runs))} however small the part of it that is computed at once",
        f"  disk: {_bytes(sum(4 * parameters(m) for m in models))} for the weights, up to {_bytes(deltas)} for the "
        "trained scalars of all runs, and the data",
    ]
    return lines


def _data_sources(study: Study) -> list[str]:
    """Return the hub's names of the data that no folder has."""
    sources: dict[str, None] = {}
    for job in topological_order(study.jobs({})):
        for spec in (job.spec.get("run", job.spec), job.spec.get("other", {})):
            task = TASKS.get(str(spec.get("task")))
            if task is not None and task.hub is not None and "data_root" not in job.roots.locate(spec):
                sources[task.hub.source] = None
    return list(sources)


def _bytes(number: float) -> str:
    return f"{number / 1e12:.3g} TB" if number >= 1e12 else f"{number / 1e9:.3g} GB"


def _hours(hours: float) -> str:
    rounded = float(f"{hours:.2g}")
    if hours < 1:
        return f"{60 * hours:.0f} minutes"
    return f"{rounded:,.0f} hours" if hours >= 10 else f"{rounded:g} hours"
