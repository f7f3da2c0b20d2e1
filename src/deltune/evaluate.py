"""A finished run in use: its model with the delta attached, its scores on any data, its predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import data as reading
from .attaching import load
from .encoding import check_length, encode
from .errors import DeltuneError, unknown
from .models import fit_padding, load_config, load_model, load_tokenizer
from .progress import Bar
from .runs import Run, room, write_lines
from .scoring import lines, logits, scored
from .specs import RunSpec
from .store import delta_folder, read_facts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SPLITS = ("validation", "test")
Text = str | Sequence[str]
"""A text, or a text and its pair."""


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
    found = reading.load(source, columns=columns, labels=facts.labels, training=False)
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
