"""Scores and predictions of a tuned classifier, and of a finished run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from . import data as reading
from .attaching import load
from .encoding import Encoded, check_length, collate, encode
from .errors import DeltuneError, unknown
from .metrics import METRICS, score
from .models import fit_padding, load_config, load_model, load_tokenizer
from .progress import Bar
from .runs import Run, room, write_lines
from .specs import RunSpec
from .store import delta_folder, read_facts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SPLITS = ("validation", "test")
Text = str | Sequence[str]
"""A text, or a text and its pair."""


@dataclass(frozen=True)
class Scored:
    """A split with the model's answers: metrics (loss included), class ids and probabilities, row by row."""

    metrics: dict[str, float]
    signatures: dict[str, str]
    predictions: list[int]
    scores: list[list[float]]


@dataclass(frozen=True)
class Ready:
    """A base model with a run's delta attached, and what is needed to use it."""

    run: Run
    spec: RunSpec
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    labels: tuple[str, ...]


def ready(run: str | Path) -> Ready:
    """Load the base model that a run's spec names, and its delta. Errors: no run, no delta yet, another base model."""
    place = Run(run)
    spec = place.spec
    if not place.delta.is_dir():
        raise DeltuneError(f"{place.folder} has no delta yet; run the same `deltune train` again, it resumes")
    named = read_facts(delta_folder(place.folder))["labels"]["id2label"]
    labels = tuple(str(named[key]) for key in sorted(named, key=int))
    load_config(spec.model)
    tokenizer = load_tokenizer(spec.model)
    model = load_model(spec.model, "classification", labels, "float32", spec.seed)
    fit_padding(model, tokenizer)
    load(model, place.folder)
    device = torch.accelerator.current_accelerator()
    if device is not None and torch.accelerator.is_available():
        model.to(device)  # type: ignore[arg-type]
    return Ready(place, spec, model, tokenizer, labels)


@torch.no_grad()
def logits(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    encoded: Encoded,
    batch_size: int,
    precision: str = "fp32",
    advance: Callable[[int], None] | None = None,
) -> torch.Tensor:
    """(rows, labels) in float32, in the order of the rows; computed in batches of similar length."""
    device = next(model.parameters()).device
    order = sorted(range(len(encoded)), key=lambda i: -len(encoded[i]["input_ids"]))
    parts = []
    cast = torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
    training = model.training
    model.eval()
    try:
        with cast:
            for start in range(0, len(order), batch_size):
                rows = [encoded[i] for i in order[start : start + batch_size]]
                batch = {n: t.to(device) for n, t in collate(tokenizer, rows).items() if n != "labels"}
                parts.append(model(**batch).logits.float().cpu())
                if advance is not None:
                    advance(len(rows))
    finally:
        model.train(training)
    found = torch.cat(parts)
    result = torch.empty_like(found)
    result[torch.tensor(order)] = found
    return result


def scored(found: torch.Tensor, encoded: Encoded) -> Scored:
    """Metrics of logits against the labels of the rows; f1 where there are two labels."""
    references = [int(row["labels"]) for row in encoded.rows]
    predictions = found.argmax(-1).tolist()
    loss = functional.cross_entropy(found, torch.tensor(references)).item()
    count = found.shape[-1]
    names = [name for name in METRICS if name != "f1" or count == 2]
    results = score(names, predictions, references, list(range(count)))
    return Scored(
        {"loss": loss} | {name: result.value for name, result in results.items()},
        {name: result.signature for name, result in results.items()},
        predictions,
        found.softmax(-1).tolist(),
    )


def lines(columns: Mapping[str, Sequence[Any]], result: Scored, labels: Sequence[str]) -> list[dict[str, Any]]:
    """The predictions of a split as lines of JSON: id, input, prediction, reference, scores."""
    inputs = columns["text"] if "pair" not in columns else list(zip(columns["text"], columns["pair"], strict=True))
    return [
        {
            "id": columns["id"][i],
            "input": inputs[i],
            "prediction": labels[result.predictions[i]],
            "reference": labels[columns["label"][i]],
            "scores": dict(zip(labels, scores, strict=True)),
        }
        for i, scores in enumerate(result.scores)
    ]


def evaluate(
    run: str | Path,
    data: str | None = None,
    splits: Sequence[str] | None = None,
    output: str | Path | None = None,
    progress: bool = False,
) -> dict[str, dict[str, float]]:
    """Metrics of a run's delta on its own data, or on other data with the same labels, split by split.

    splits: default validation and test, those that exist. output: a folder for predictions, SPLIT.jsonl each.
    progress: a bar, on a terminal. Errors: no run, a split that the data lacks, labels that the run does not know.
    """
    place = Run(run)
    known = place.spec
    facts = ready(run)
    columns = known.columns if data is None else known.columns or place.environment.get("data", {}).get("columns")
    source = known.data if data is None else data
    found = reading.load(source, columns=columns, labels=facts.labels, max_train_rows=None, seed=known.seed)
    wanted = [s for s in SPLITS if s in found.splits] if splits is None else list(splits)
    wrong = [unknown("split", s, found.splits) for s in wanted if s not in found.splits]
    if wrong or not wanted:
        raise DeltuneError(" ".join(wrong) or f"data {source} has neither a validation nor a test split")
    results = {}
    with Bar(progress) as bar, room(output or place.folder):
        for split in wanted:
            rows = {name: list(found.splits[split][name]) for name in found.splits[split].column_names}
            encoded = encode(facts.tokenizer, facts.model, rows, known.max_length)
            bar.start(split, len(encoded))
            answers = logits(facts.model, facts.tokenizer, encoded, known.batch_size, known.precision, bar.advance)
            result = scored(answers, encoded)
            results[split] = result.metrics
            if output is not None:
                Path(output).mkdir(parents=True, exist_ok=True)
                write_lines(Path(output) / f"{split}.jsonl", lines(rows, result, facts.labels))
    return results


def predict(run: str | Path | Ready, texts: Sequence[Text]) -> list[dict[str, Any]]:
    """For each text (or text and pair) its label, and the probability of every label, as {"label", "scores"}.

    Longer texts than the run's max_length are cut, as in training. Errors: no texts, a pair where the run has none.
    """
    facts = run if isinstance(run, Ready) else ready(run)
    if not texts:
        raise DeltuneError("no texts to predict")
    pairs = [(text,) if isinstance(text, str) else tuple(text) for text in texts]
    wanted = 2 if "pair" in facts.run.environment.get("data", {}).get("columns", {}) else 1
    wrong = [i for i, pair in enumerate(pairs, 1) if len(pair) != wanted]
    if wrong:
        asks = "a text and its pair" if wanted == 2 else "one text, no pair"
        raise DeltuneError(f"this run wants {asks} a row; so is not row {', '.join(map(str, wrong[:10]))}")
    columns = dict(zip(("text", "pair"), zip(*pairs, strict=True), strict=False))
    check_length(facts.model, facts.spec.max_length)
    encoded = encode(facts.tokenizer, facts.model, columns, facts.spec.max_length)
    answers = logits(facts.model, facts.tokenizer, encoded, facts.spec.batch_size, facts.spec.precision)
    return [
        {"label": facts.labels[int(row.argmax())], "scores": dict(zip(facts.labels, row.tolist(), strict=True))}
        for row in answers.softmax(-1)
    ]
