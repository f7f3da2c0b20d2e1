"""A finished run in use: its model with the delta attached, its scores on any data, its predictions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import data as reading
from . import machine
from .assignments import assignment, by_name, check_fits, kind_of
from .attaching import load, tuned
from .classifying import logits
from .encoding import Encoded, check_length, encode
from .errors import DeltuneError, all_problems, unknown
from .kinds import Kind, Limits, Use
from .models import LABELLED, fit_padding, load_config, load_model, load_tokenizer
from .progress import Bar
from .runs import Run, room, write_lines
from .scoring import lines, measured, scored
from .specs import RunSpec
from .store import delta_folder, read_facts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SPLITS = ("validation", "test")
SAID = ("prediction", "reference")
Text = str | Sequence[str]
"""A text, or a text and its pair."""


@dataclass(frozen=True)
class Ready:
    """A base model with the deltas of one or several runs attached, by name, and what is needed to use them.

    run, spec and labels are those of the first, whose delta is in use.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    kind: Kind
    runs: Mapping[str, Run]
    labels_of: Mapping[str, tuple[str, ...]]

    @property
    def run(self) -> Run:
        return next(iter(self.runs.values()))

    @property
    def spec(self) -> RunSpec:
        return self.run.spec

    @property
    def precision(self) -> str:
        return machine.precision(self.spec.precision, self.model.device)

    @property
    def labels(self) -> tuple[str, ...]:
        return next(iter(self.labels_of.values()))


def ready(run: str | Path | Mapping[str, str | Path]) -> Ready:
    """Load the base model that a run's spec names, and its delta; or those of several runs on one base, by name.

    Errors: no run, no delta yet, another base model.
    """
    runs = {name: Run(at) for name, at in (run.items() if isinstance(run, Mapping) else [("default", run)])}
    if not runs:
        raise DeltuneError("no run is named")
    first = next(iter(runs.values()))
    spec = first.spec
    labels = {name: _labels(place) for name, place in runs.items()}
    kind = kind_of(first.environment.get("data", {}).get("kind", "classification"), load_config(spec.model))
    tokenizer = load_tokenizer(spec.model)
    own = labels[next(iter(runs))] if kind.loads in LABELLED else None
    model = load_model(spec.model, kind.loads, own, "float32", spec.seed)
    fit_padding(model, tokenizer)
    for name, place in runs.items():
        load(model, place.folder, name=name)
    tuned(model).use(next(iter(runs)))
    model.to(machine.device())  # type: ignore[arg-type]
    return Ready(model, tokenizer, kind, runs, labels)


def _labels(place: Run) -> tuple[str, ...]:
    """The labels of a run's head, in the order of their ids. Error: it has no delta yet."""
    if not place.delta.is_dir():
        raise DeltuneError(f"{place.folder} has no delta yet; run the same `deltune train` again, it resumes")
    named = read_facts(delta_folder(place.folder))["labels"]["id2label"]
    return tuple(str(named[key]) for key in sorted(named, key=int))


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
    if data is not None:  # it is laid out as the run's own, unless it says otherwise
        columns = known.columns or place.environment.get("data", {}).get("columns")
        known = known.model_copy(update={"data": data, "task": facts.kind.name, "columns": columns})
    asked = assignment(known, training=False, labels=facts.labels if facts.kind.loads in LABELLED else None)
    found = asked.data
    usual = {stem: split for split, stems in reading.SPLITS.items() for stem in stems}
    wanted = [s for s in SPLITS if s in found.splits] if splits is None else [usual.get(s, s) for s in splits]
    wrong = [unknown("split", s, found.splits) for s in wanted if s not in found.splits]
    if wrong or not wanted:
        raise DeltuneError(" ".join(wrong) or f"data {found.source} has neither a validation nor a test split")
    results = {}
    with Bar(progress) as bar, room(output or place.folder):
        for split in wanted:
            rows = {name: list(found.splits[split][name]) for name in found.splits[split].column_names}
            limits = known.limits(asked.template)
            encoded = facts.kind.encode(facts.tokenizer, facts.model, rows, limits, False)
            bar.start(split, len(encoded))
            use = Use(
                facts.model, facts.tokenizer, found.labels, limits, known.rows(), facts.precision, bar.advance
            )  # fmt: skip
            result = scored(facts.kind, use, encoded, rows, asked.metrics)
            results[split] = result.metrics
            if output is not None:
                Path(output).mkdir(parents=True, exist_ok=True)
                write_lines(Path(output) / f"{split}.jsonl", lines(facts.kind, rows, result, found.labels))
    return results


def rescore(run: str | Path, metrics: Sequence[str] = ()) -> dict[str, dict[str, float]]:
    """Metrics of a finished run from its prediction files, without any model; default: those of the run.

    Errors: no run, no predictions, a metric that does not fit the kind of task.
    """
    place = Run(run)
    files = {split: place.predictions / f"{split}.jsonl" for split in SPLITS}
    if not any(file.is_file() for file in files.values()):
        raise DeltuneError(f"{place.folder} has no predictions; a finished run has them")
    kind = by_name(place.environment.get("data", {}).get("kind", "classification"))
    labels = {name: i for i, name in enumerate(_labels(place))} if kind.labelled else {}
    results = {}
    for split, file in files.items():
        if file.is_file():
            rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            said = [[labels.get(row[key], row[key]) if labels else row[key] for row in rows] for key in SAID]
            wanted = tuple(metrics) or tuple(n for n in place.metrics[split] if n != "loss")
            check_fits(kind, wanted)
            results[split] = {n: s.value for n, s in measured(kind, wanted, said[0], said[1], len(labels)).items()}
    return results


def predict(
    run: str | Path | Mapping[str, str | Path] | Ready, texts: Sequence[Text], rows: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """For each text (or text and pair) its label, and the probability of every label, as {"label", "scores"}.

    rows: for each text the name of the run whose delta it uses, where `run` names several: they are computed in the
    same batches. Longer texts than a run's max_length are cut, as in training. Errors: no texts, a pair where a run has
    none, a name that is no run's.
    """
    facts = run if isinstance(run, Ready) else ready(run)
    if facts.kind.name != "classification":
        raise DeltuneError(f"this run is for {facts.kind.name}; predict is for classification yet, evaluate for all")
    if not texts:
        raise DeltuneError("no texts to predict")
    names = [next(iter(facts.runs))] * len(texts) if rows is None else list(rows)
    if len(names) != len(texts):
        raise DeltuneError(f"rows names the run of {len(names)} texts, and there are {len(texts)}")
    wrong = [unknown("run", name, facts.runs) for name in dict.fromkeys(names) if name not in facts.runs]
    if wrong:
        raise all_problems("these rows cannot be predicted", wrong)
    encoded: list[Any] = [None] * len(texts)
    pairs = [(text,) if isinstance(text, str) else tuple(text) for text in texts]
    for name in dict.fromkeys(names):
        own = [i for i, other in enumerate(names) if other == name]
        for i, row in zip(own, _encoded(facts, name, {i: pairs[i] for i in own}).rows, strict=True):
            encoded[i] = row
    deltas = None if rows is None else names
    use = Use(
        facts.model, facts.tokenizer, (), Limits(), facts.spec.rows(), facts.precision, None, deltas
    )  # fmt: skip
    answers = logits(use, Encoded(encoded, 0)).softmax(-1)
    found = []
    for name, row in zip(names, answers, strict=True):
        labels = facts.labels_of[name]
        scores = dict(zip(labels, row.tolist(), strict=False))  # beyond them stands what wider heads have
        found.append({"label": labels[int(row.argmax())], "scores": scores})
    return found


def _encoded(facts: Ready, name: str, pairs: Mapping[int, Sequence[str]]) -> Encoded:
    """The rows of one run's texts, cut as the run cuts them. Error: a text and its pair where it wants one, or not."""
    place = facts.runs[name]
    wanted = 2 if "pair" in place.environment.get("data", {}).get("columns", {}) else 1
    wrong = [i + 1 for i, pair in pairs.items() if len(pair) != wanted]
    if wrong:
        asks = "a text and its pair" if wanted == 2 else "one text, no pair,"
        raise DeltuneError(f"this run wants {asks} in every row; row {', '.join(map(str, wrong[:10]))} is not so")
    columns = dict(zip(("text", "pair"), zip(*pairs.values(), strict=True), strict=False))
    handle = tuned(facts.model)
    before = handle.active
    try:
        check_length(handle.use(name).model, place.spec.max_length)
    finally:
        handle.use(before)
    return encode(facts.tokenizer, facts.model, columns, place.spec.max_length)
