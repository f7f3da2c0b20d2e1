"""A finished run in use: its model with the delta attached, its scores on any data, its predictions."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data import loading as reading
from ..errors import DeltuneError, error_from_problems, error_summary, excerpt, unknown_name
from ..filesystem import explain_write_errors, user_path, write_jsonl
from ..metrics.base import Scores
from ..metrics.registry import METRICS, compute_scores
from ..models import HEADS_WITH_LABELS, align_padding_token, load_config, load_model
from ..runtime.attaching import load, tuned
from ..runtime.serialization import read_metadata
from ..tasks import token_cache
from ..tasks.base import Columns, InferenceContext, TaskKind, TaskOptions
from ..tasks.classification import CLASSIFICATION, predict_logits
from ..tasks.encoding import EncodedRows, check_length
from ..tasks.languages import language_codes, tokenizer_languages
from . import hardware
from .config import RunSpec
from .prediction_inputs import Input, columns_of
from .progress import ProgressBar
from .run_dir import RunDir
from .task_setup import check_fits, length_limits, load_task_tokenizer, set_up_task, task_kind_by_name, task_kind_for

Given = Mapping[str, Mapping[str, Any]]
"""Options of metrics, by the metrics' names."""


@dataclass(frozen=True)
class ScoredSplit:
    """A split with the model's answers, row by row: metrics (loss included), and why others could not be had."""

    metrics: dict[str, float]
    signatures: dict[str, str]
    omitted: dict[str, str]
    predictions: list[Any]
    references: list[Any]
    scores: list[Any]


def score_split(
    kind: TaskKind,
    use: InferenceContext,
    encoded: EncodedRows,
    columns: Columns,
    names: Sequence[str],
    options: Given | None = None,
) -> ScoredSplit:
    """The answers to a split, measured by the named metrics; with use.loss_only its loss alone."""
    answers = kind.predict(use, encoded)
    if use.loss_only:
        return ScoredSplit({} if answers.loss is None else {"loss": answers.loss}, {}, {}, [], [], [])
    references = answers.references or kind.references(columns, use.labels)
    found = measured(kind, names, answers.predictions, references, len(use.labels), options)
    metrics = ({} if answers.loss is None else {"loss": answers.loss}) | {n: score.value for n, score in found.items()}
    signatures = {name: score.signature for name, score in found.items()}
    return ScoredSplit(metrics, signatures, found.omitted, answers.predictions, references, answers.scores)


def measured(
    kind: TaskKind,
    names: Sequence[str],
    predictions: Sequence[Any],
    references: Sequence[Any],
    labels: int,
    options: Given | None = None,
) -> Scores:
    """The named metrics of predictions; labels: how many there are; options: of metrics, by their names."""
    found = Scores({}, {})
    for compared in dict.fromkeys(METRICS[name].input_type for name in names):
        own = [name for name in names if METRICS[name].input_type == compared]
        given = {name: values for name, values in (options or {}).items() if name in own}
        some = compute_scores(
            own, predictions, references, list(range(labels)) if kind.predicts_label_ids else None, given
        )
        found.update(some)
        found.omitted |= some.omitted
    return found


def prediction_lines(
    kind: TaskKind, columns: Columns, result: ScoredSplit, labels: Sequence[str]
) -> list[dict[str, Any]]:
    """The predictions of a split as lines of JSON: id, input, prediction, reference, scores."""

    def said(value: Any) -> Any:
        return labels[value] if kind.predicts_label_ids else value

    return [
        {
            "id": columns["id"][i],
            "input": kind.row_input(columns, i),
            "prediction": said(prediction),
            "reference": said(result.references[i]),
            "scores": result.scores[i],
        }
        for i, prediction in enumerate(result.predictions)
    ]


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SPLITS = ("validation", "test")
SAID = ("prediction", "reference")


@dataclass(frozen=True)
class Ready:
    """A base model with the deltas of one or several runs attached, by name, and what is needed to use them.

    run, spec and labels are those of the first, whose delta is in use.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    kind: TaskKind
    runs: Mapping[str, RunDir]
    labels_of: Mapping[str, tuple[str, ...]]

    @property
    def run(self) -> RunDir:
        return next(iter(self.runs.values()))

    @property
    def spec(self) -> RunSpec:
        return self.run.spec

    @property
    def precision(self) -> str:
        return hardware.resolve_precision(self.spec.precision, self.model.device)

    @property
    def labels(self) -> tuple[str, ...]:
        return next(iter(self.labels_of.values()))


def load_run(run: str | Path | Mapping[str, str | Path]) -> Ready:
    """Load the base model that a run's spec names, and its delta; or those of several runs on one base, by name.

    Errors: no run, no delta yet, another base model.
    """
    runs = {name: RunDir(at).kept for name, at in (run.items() if isinstance(run, Mapping) else [("default", run)])}
    if not runs:
        raise DeltuneError("no run is named")
    first = next(iter(runs.values()))
    spec = first.spec
    labels = {name: _labels(place) for name, place in runs.items()}
    name = first.data.kind
    kind = task_kind_for(name, load_config(spec.model), spec.answer)
    tokenizer = load_task_tokenizer(spec)
    several = len(runs) > 1 and language_codes(tokenizer)
    spoken = (
        {name: tokenizer_languages(load_task_tokenizer(place.spec)) for name, place in runs.items()} if several else {}
    )
    if len(set(spoken.values())) > 1:
        told = "; ".join(f"{name}: {' to '.join(map(str, pair))}" for name, pair in spoken.items())
        raise DeltuneError(f"one tokenizer serves all runs, and these have other languages ({told}); use them apart")
    own = labels[next(iter(runs))] if kind.name in HEADS_WITH_LABELS else None
    model = load_model(spec.model, kind.head, own, "float32", spec.seed)
    align_padding_token(model, tokenizer)
    for name, place in runs.items():
        if not place.finished:
            warnings.warn(f"{place.folder} is not finished: this is its best delta so far", stacklevel=2)
        load(model, place.folder, name=name)
    tuned(model).use(next(iter(runs)))
    model.to(hardware.resolve_device())  # type: ignore[arg-type]
    return Ready(model, tokenizer, kind, runs, labels)


def _labels(place: RunDir) -> tuple[str, ...]:
    """The labels of a run's head, in the order of their ids. Error: it has no delta yet."""
    if not place.delta.is_dir():
        raise DeltuneError(f"{place.folder} has no delta yet; run the same `deltune train` again, it resumes")
    labels = read_metadata(place.folder).labels
    return tuple(name for _, name in labels.pairs) if labels else ()


def evaluate(
    run: str | Path,
    data: str | None = None,
    splits: Sequence[str] | None = None,
    output: str | Path | None = None,
    progress: bool = False,
    other: Mapping[str, Any] | None = None,
) -> dict[str, dict[str, float]]:
    """Metrics of a run's delta on its own data, or on other data with the same labels, split by split.

    other: a known task in place of the run's, as fields of a spec: {"task": …, "data_root": …, "relabel": …}; as many
    rows of it as of the run's own.

    splits: default validation and test, those that exist. output: a folder for predictions, SPLIT.jsonl each.
    progress: a bar, on a terminal. Errors: no run, a split that the data lacks, labels that the run does not know.
    """
    place = RunDir(run).kept
    known = place.spec
    folder = None if output is None else user_path(output, "output")
    facts = load_run(run)
    if data is not None:  # it is laid out as the run's own, unless it says otherwise
        columns = known.columns or place.data.columns or None
        whole = {"validation_rows": None, "test_rows": None}
        known = known.model_copy(update={"data": data, "task": facts.kind.name, "columns": columns, **whole})
    if other is not None:
        known = RunSpec(**{**known.model_dump(exclude={"data", "columns", "labels", "metric"}), **other})
    asked = set_up_task(known, training=False, labels=facts.labels if facts.kind.name in HEADS_WITH_LABELS else None)
    found = asked.data
    usual = {stem: split for split, stems in reading.SPLITS.items() for stem in stems}
    wanted = [s for s in SPLITS if s in found.splits] if splits is None else [usual.get(s, s) for s in splits]
    wrong = [unknown_name("split", s, found.splits) for s in wanted if s not in found.splits]
    if wrong or not wanted:
        raise DeltuneError(" ".join(wrong) or f"data {found.source} has neither a validation nor a test split")
    if found.labels != facts.labels and facts.kind.name in HEADS_WITH_LABELS:
        raise DeltuneError(f"the run's labels are {', '.join(facts.labels)}, here are {', '.join(found.labels)}")
    limits = length_limits(place.spec if other is None else known, facts.kind, found.labels)
    results = {}
    with ProgressBar(progress) as bar, explain_write_errors(folder or place.folder):
        for split in wanted:
            rows = {name: list(found.splits[split][name]) for name in found.splits[split].column_names}
            content = f"{found.fingerprint} {split}"
            encoded = token_cache.encode_cached(facts.kind, facts.tokenizer, facts.model, rows, limits, False, content)
            bar.start(split, len(encoded))
            use = InferenceContext(
                facts.model, facts.tokenizer, found.labels, limits, known.rows(), facts.precision, bar.advance
            )  # fmt: skip
            result = score_split(facts.kind, use, encoded, rows, asked.metrics, known.metric_options)
            results[split] = result.metrics
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                write_jsonl(folder / f"{split}.jsonl", prediction_lines(facts.kind, rows, result, found.labels))
    return results


def rescore(run: str | Path, metrics: Sequence[str] = ()) -> dict[str, dict[str, float]]:
    """Metrics of a finished run from its prediction files, without any model; default: those of the run.

    Errors: no run, not finished, no predictions, a metric that does not fit the kind of task.
    """
    scored = rescore_with_statistics(run, metrics)
    return {split: {name: score.value for name, score in scores.items()} for split, scores in scored.items()}


def rescore_with_statistics(run: str | Path, metrics: Sequence[str] = ()) -> dict[str, Scores]:
    """As rescore, with the statistics of every example."""
    place = RunDir(run).kept
    own = place.metrics
    files = {split: place.predictions / f"{split}.jsonl" for split in SPLITS}
    if not any(file.is_file() for file in files.values()):
        raise DeltuneError(f"{place.folder} has no predictions; a finished run has them")
    kind = task_kind_by_name(place.data.kind)
    labels = {name: i for i, name in enumerate(_labels(place))} if kind.predicts_label_ids else {}
    results: dict[str, Scores] = {}
    for split, file in files.items():
        if file.is_file():
            rows = place.answers(split)
            answers, references = ([_answer(row[key], labels, f"{file} line {i}") for i, row in rows] for key in SAID)
            wanted = tuple(metrics) or tuple(n for n in own.get(split, {}) if n != "loss")
            check_fits(kind, wanted)
            options = place.spec.metric_options
            try:
                results[split] = measured(kind, wanted, answers, references, len(labels), options)
            except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
                raise DeltuneError(
                    f"{file} holds what {kind.name} is not measured by ({error_summary(error)})"
                ) from error
    return results


def _answer(value: Any, labels: Mapping[str, int], where: str) -> Any:
    """A prediction or reference as metrics compare it: the id of a label, where there are labels."""
    if not labels:
        return value
    if not isinstance(value, str) or value not in labels:
        raise DeltuneError(f"{where}: {excerpt(value)} is no label of this run")
    return labels[value]


def predict(
    run: str | Path | Mapping[str, str | Path] | Ready, texts: Sequence[Input], rows: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """What a run answers to each input, with its scores, as in its prediction files: {"prediction", "scores"}, of a
    classification {"label", "scores"}.

    texts: a text; of pairs (text, pair); of tagging a text, split at blanks, or its tokens; of choice {"question",
    "choices"}; or any by role. Of running text the prediction is its log-likelihood, the score its perplexity.
    rows: of classification by heads, for each text the name of the run whose delta it uses, where `run` names several:
    they are computed in the same batches. Longer texts than a run's max_length are cut, as in training. Errors: no
    texts, inputs of another kind, a name that is no run's.
    """
    facts = run if isinstance(run, Ready) else load_run(run)
    if not texts:
        raise DeltuneError("no texts to predict")
    if rows is not None:
        return _mixed(facts, texts, list(rows))
    encoded, limits = _encoded(facts, next(iter(facts.runs)), dict(enumerate(texts)))
    found = facts.kind.predict(_use(facts, limits), encoded)
    key = "label" if facts.kind.predicts_label_ids else "prediction"
    said = [facts.labels[p] for p in found.predictions] if facts.kind.predicts_label_ids else found.predictions
    return [{key: answer, "scores": scores} for answer, scores in zip(said, found.scores, strict=True)]


def predict_rows(run: str | Path, inputs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Inputs, each an id and an input, with what a run answers: id, input, prediction, scores."""
    facts = load_run(run)
    columns = columns_of(facts.kind.name, facts.run, [row["input"] for row in inputs])
    return [
        {
            "id": row["id"], "input": facts.kind.row_input(columns, i),
            "prediction": answer[next(iter(answer))], "scores": answer["scores"],
        }
        for i, (row, answer) in enumerate(zip(inputs, predict(facts, [row["input"] for row in inputs]), strict=True))
    ]  # fmt: skip


def _mixed(facts: Ready, texts: Sequence[Input], names: Sequence[str]) -> list[dict[str, Any]]:
    """Each text by the delta of its own run, with that run's labels."""
    if facts.kind is not CLASSIFICATION:
        raise DeltuneError(
            f"rows= is for classification by heads, and {facts.run.folder} is not for that; predict with one run a call"
        )
    if len(names) != len(texts):
        raise DeltuneError(f"rows names the run of {len(names)} texts, and there are {len(texts)}")
    wrong = [unknown_name("run", name, facts.runs) for name in dict.fromkeys(names) if name not in facts.runs]
    if wrong:
        raise error_from_problems("these rows cannot be predicted", wrong)
    encoded: list[Any] = [None] * len(texts)
    for name in dict.fromkeys(names):
        own = [i for i, other in enumerate(names) if other == name]
        for i, row in zip(own, _encoded(facts, name, {i: texts[i] for i in own})[0].rows, strict=True):
            encoded[i] = row
    found = []
    for name, row in zip(
        names, predict_logits(_use(facts, TaskOptions(), names), EncodedRows(encoded, 0)).softmax(-1), strict=True
    ):
        labels = facts.labels_of[name]
        scores = dict(zip(labels, row.tolist(), strict=False))  # beyond them stands what wider heads have
        found.append({"label": labels[int(row.argmax())], "scores": scores})
    return found


def _use(facts: Ready, limits: TaskOptions, deltas: Sequence[str] | None = None) -> InferenceContext:
    rows = facts.spec.rows()
    return InferenceContext(facts.model, facts.tokenizer, facts.labels, limits, rows, facts.precision, None, deltas)


def _encoded(facts: Ready, name: str, texts: Mapping[int, Input]) -> tuple[EncodedRows, TaskOptions]:
    """One run's inputs, by their place in all, as rows that are cut as the run cuts them; and its limits."""
    place = facts.runs[name]
    columns = columns_of(facts.kind.name, place, list(texts.values()), [i + 1 for i in texts])
    limits = length_limits(place.spec, facts.kind, facts.labels_of[name])
    handle = tuned(facts.model)
    before = handle.active
    try:
        check_length(handle.use(name).model, facts.kind.max_positions(limits))
    finally:
        handle.use(before)
    return facts.kind.encode(facts.tokenizer, facts.model, columns, limits, False), limits
