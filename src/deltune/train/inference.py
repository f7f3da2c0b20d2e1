"""A finished run in use: its model with the delta attached, its scores on any data, its predictions, its export.

A run is written as a plain checkpoint or for another library, and other libraries' adapters are read.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import TextStreamer

from ..compat import silent_loading
from ..errors import (
    DeltuneError,
    check_booleans,
    counted,
    error_from_problems,
    error_summary,
    excerpt,
    unknown_name,
    word_list,
)
from ..files import explain_write_errors, user_path, write_json, write_jsonl
from ..interop.base import is_foreign, read_options
from ..models import (
    HEADS,
    HEADS_WITH_LABELS,
    LANGUAGE_MODEL_HEADS,
    align_padding_token,
    forced_bos_options,
    has_trained_head,
    is_delta,
    language_codes,
    load_config,
    load_model,
    load_tokenizer,
    read_trained_head,
    tokenizer_languages,
)
from ..runtime import attach
from ..runtime.attach import atomic_new_folder, load, tuned
from ..runtime.delta_schema import MERGED_FACTS, TrainedFacts, merged_facts
from ..runtime.handle import Tuned
from ..runtime.linear import optimize_linear
from ..runtime.pooling import gives_up_pooling, write_sentence_model
from ..runtime.serialization import open_delta
from ..templates import (
    chat_prompt,
    cut_at_end,
    end_tokens,
    question,
    split_words,
    tokenize_prompts,
    with_chat_template,
)
from . import setup as task_setup
from .config import RunConfig
from .data import loading
from .data.columns import LABELLED_TEXTS
from .data.rows import columns_of
from .data.tag_schemes import PLAIN
from .metrics.base import Score, Scores
from .metrics.intervals import score_intervals
from .metrics.labels import entities
from .metrics.registry import METRICS, compute_scores
from .overview import absent_labels, blank_notes, label_counts
from .prediction_inputs import Input, columns_from_inputs
from .presets import merge_values
from .progress import ProgressDisplay
from .run_folder import DeltaFolder, ModelFolder, RunFolder, open_run
from .setup import (
    TaskSetup,
    check_fits,
    fit_lengths,
    length_limits,
    load_task_tokenizer,
    set_up_task,
    task_kind_by_name,
    task_kind_for,
)
from .tasks import token_cache
from .tasks.base import Columns, InferenceContext, TaskKind, TaskOptions, check_tasks
from .tasks.chat import CHAT
from .tasks.classification import CLASSIFICATION, predict_logits
from .tasks.encoding import EncodedRows, check_causal, longest_length, tokenize
from .tasks.generation import CAUSAL_GENERATION, SEQ2SEQ_GENERATION, truncate_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


logger = logging.getLogger("deltune")

SPLITS = ("validation", "test")

MetricOptions = Mapping[str, Mapping[str, Any]]
"""Options of metrics, by the names of the metrics."""


@dataclass(frozen=True)
class EvalResult:
    """The model's answers to a split, row by row, and what they measure.

    Attributes:
        metrics: The scores by metric, the loss included.
        scores: What the model says of its prediction, by row: probabilities, a likelihood or nothing.
        statistics: The scores with the statistics of their examples; empty where only the loss was computed.
    """

    metrics: dict[str, float]
    signatures: dict[str, str]
    omitted: dict[str, str]
    predictions: list[Any]
    references: list[Any]
    scores: list[Any]
    statistics: Mapping[str, Score] = field(default_factory=dict)

    def intervals(self) -> dict[str, list[float]]:
        """Return the 95 % intervals of those scores that have one, by metric."""
        return score_intervals(self.statistics, {name: METRICS[name].range for name in self.statistics})


def score_split(
    kind: TaskKind,
    context: InferenceContext,
    encoded: EncodedRows,
    columns: Columns,
    metrics: Sequence[str],
    options: MetricOptions | None = None,
) -> EvalResult:
    """Answer a split and measure the answers."""
    answers = kind.predict(context, encoded)
    if context.loss_only:
        return EvalResult({} if answers.loss is None else {"loss": answers.loss}, {}, {}, [], [], [])
    references = answers.references or kind.references(columns, context.labels)
    scores = measure(kind, metrics, answers.predictions, references, len(context.labels), options)
    values = ({} if answers.loss is None else {"loss": answers.loss}) | {n: one.value for n, one in scores.items()}
    values |= answers.measures
    signatures = {name: one.signature for name, one in scores.items()}
    return EvalResult(values, signatures, scores.omitted, answers.predictions, references, answers.scores, scores)


def log_omitted(omitted: Mapping[str, str]) -> None:
    """Warn of metrics that were not computed, once for each reason."""
    for reason in dict.fromkeys(omitted.values()):
        names = ", ".join(name for name in omitted if omitted[name] == reason)
        logger.warning("%s not computed: %s", names, reason)


def measure(
    kind: TaskKind,
    metrics: Sequence[str],
    predictions: Sequence[Any],
    references: Sequence[Any],
    labels: int,
    options: MetricOptions | None = None,
) -> Scores:
    """Measure predictions against references."""
    scores = Scores({}, {})
    for compared in dict.fromkeys(METRICS[name].input_type for name in metrics):
        names = [name for name in metrics if METRICS[name].input_type == compared]
        chosen = {name: values for name, values in (options or {}).items() if name in names}
        some = compute_scores(
            names, predictions, references, list(range(labels)) if kind.predicts_label_ids else None, chosen
        )
        scores.update(some)
        scores.omitted |= some.omitted
    return scores


def with_tag_scheme(options: MetricOptions, scheme: str | None) -> MetricOptions:
    """Return options of metrics with the scheme of a run's tags, by which entities are read."""
    if scheme in (None, PLAIN):
        return options
    return {**options, "entity_f1": {"scheme": scheme, **options.get("entity_f1", {})}}


def prediction_lines(
    kind: TaskKind, columns: Columns, result: EvalResult, labels: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the predictions of a split as lines of JSON: id, input, prediction, reference and scores."""

    def label_name(value: Any) -> Any:
        return labels[value] if kind.predicts_label_ids else value

    return [
        {
            "id": columns["id"][i],
            "input": kind.row_input(columns, i),
            "prediction": label_name(prediction),
            "reference": label_name(result.references[i]),
            "scores": result.scores[i],
        }
        for i, prediction in enumerate(result.predictions)
    ]


@dataclass(frozen=True)
class LoadedRun:
    """A base model with the deltas of one or several runs attached, by name, and what is needed to use them.

    Attributes:
        model: The model; the delta of the first run is in use.
        tokenizer: Its tokenizer.
        kind: The kind of task.
        runs: The folders of the runs, by name.
        labels_of: The label names of every run, in the order of their ids.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    kind: TaskKind
    runs: Mapping[str, RunFolder]
    labels_of: Mapping[str, tuple[str, ...]]

    @property
    def run(self) -> RunFolder:
        """The folder of the first run."""
        return next(iter(self.runs.values()))

    @property
    def config(self) -> RunConfig:
        """The config of the first run."""
        return self.run.config

    @property
    def is_conversational(self) -> bool:
        """True if the first run was trained on conversations by a chat template."""
        trained = self.run.trained
        return trained is not None and trained.chat_template is not None

    @property
    def precision(self) -> str:
        """The precision of the first run on this device."""
        return task_setup.resolve_precision(self.config.runtime.precision, self.model.device)

    @property
    def labels(self) -> tuple[str, ...]:
        """The label names of the first run."""
        return next(iter(self.labels_of.values()))


@check_booleans
def load_run(
    run: str | Path | Mapping[str, str | Path],
    base: str | None = None,
    *,
    pairs: bool = False,
    labels: Sequence[str] | None = None,
) -> LoadedRun:
    """Load the base model of a run and its delta, or the deltas of several runs on one base.

    Args:
        run: The folder of a run, of a delta without a run or of an adapter of PEFT; or folders by name.
        base: The base model, where it is not at the place that the folder names.
        pairs: Whether the inputs are pairs of texts, where a delta without a run does not say it.
        labels: The names of the labels in the order of their ids, where a delta without a run has none.

    Raises:
        DeltuneError: A folder is no run, has no delta yet, or is of another base model or other languages.
    """
    folders = run.items() if isinstance(run, Mapping) else [("default", run)]
    runs = {name: open_run(folder, base, pairs=pairs, labels=labels, models=True) for name, folder in folders}
    if not runs:
        raise DeltuneError("no run is named")
    name, first = next(iter(runs.items()))
    if len({folder.data.kind for folder in runs.values()}) > 1:
        kinds = word_list([f"{name} for {folder.data.kind}" for name, folder in runs.items()])
        raise DeltuneError(
            f"one call answers one kind of task, and here is {kinds}: make a call for each kind, or serve classifiers "
            "and taggers together (deltune serve BASE --deltas DIR), where each request names its delta"
        )
    config = first.config
    labels_of = {name: folder.labels for name, folder in runs.items()}
    objective = config.objective.kind
    if objective == "reward":
        raise DeltuneError(f"{first.folder} is a reward model, which rates answers in Python; report.html says how")
    kind = task_kind_for(first.data.kind, load_config(config.model.name), config.generation.answer, objective)
    kind = kind if objective == "sft" else CHAT  # a policy answers
    tokenizer = load_task_tokenizer(config.model.name, config.data)
    trained = first.trained
    if trained is not None and trained.chat_template is not None:
        tokenizer = with_chat_template(tokenizer, trained.chat_template)
    if len(runs) > 1 and language_codes(tokenizer):
        _check_same_languages(runs)
    head_labels = labels_of[name] if _has_labels(kind) else None
    model = load_base(config, kind.head, head_labels, tokenizer)
    for delta, folder in runs.items():
        if not folder.finished:
            warnings.warn(f"{folder.folder} is not finished: this is its best delta so far", stacklevel=2)
        _attach_delta(model, folder, delta)
    tuned(model).use(name)
    model.to(task_setup.resolve_device())  # type: ignore[arg-type]
    loaded = LoadedRun(model, tokenizer, kind, runs, labels_of)
    optimize_linear(model, enabled=config.runtime.linear_backend == "onednn")
    return loaded


def load_base(
    config: RunConfig, head: str, labels: Sequence[str] | None, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """Load the model of a config in float32, with a head and the padding token of a tokenizer."""
    name, quantize = config.model.name, config.model.quantize
    model = load_model(name, head, labels, "float32", config.runtime.seed, quantize=quantize)
    align_padding_token(model, tokenizer)
    return model


def _attach_delta(model: PreTrainedModel, opened: RunFolder, name: str = "default") -> Tuned:
    """Attach the delta of a folder, with the names for its labels that were given with it; of a model its head."""
    if isinstance(opened, ModelFolder):
        return attach.attach_trained_head(model, str(opened.folder), opened.pooling)
    handle = load(model, opened.folder, name=name)
    if isinstance(opened, DeltaFolder) and opened.names_labels:
        delta = handle.attached.delta(name)
        assert delta.labels is not None
        delta.labels = replace(delta.labels, id2label=tuple(enumerate(opened.labels)))
        handle.use(name)
    return handle


def model_and_method(run: str | Path, base: str | None = None) -> tuple[str, str]:
    """Return the model and the method of a run or delta as its training left it, for another to begin with it."""
    folder = open_run(run, base)
    name = folder.config.model.name
    if folder.is_foreign:
        return name, repr(tuned(load_run(run, base).model).delta().method)
    return name, open_delta(folder.delta).facts.method


def _has_labels(kind: TaskKind) -> bool:
    """Return whether the data of a kind has labels, whether a head or words answer it."""
    return kind.name in (*LABELLED_TEXTS, "tagging")


def _check_same_languages(runs: Mapping[str, RunFolder]) -> None:
    configs = {name: folder.config for name, folder in runs.items()}
    languages = {name: tokenizer_languages(load_task_tokenizer(c.model.name, c.data)) for name, c in configs.items()}
    if len(set(languages.values())) > 1:
        listed = "; ".join(f"{name}: {' to '.join(map(str, pair))}" for name, pair in languages.items())
        raise DeltuneError(f"one tokenizer serves all runs, and these have other languages ({listed}); use them apart")


def is_run(folder: str | Path) -> bool:
    """Return whether a folder is meant as a run; it is not if it holds a model."""
    return RunFolder(folder).exists or (not (Path(folder) / "config.json").is_file() and Path(folder).is_dir())


@check_booleans
def evaluate(
    run: str | Path,
    data: str | None = None,
    splits: Sequence[str] | None = None,
    output: str | Path | None = None,
    *,
    progress: bool = False,
    other: Mapping[str, Any] | None = None,
    columns: str | None = None,
    data_root: str | None = None,
    base: str | None = None,
    labels: Sequence[str] | None = None,
) -> dict[str, dict[str, float]]:
    """Score the delta of a run on its own data, or on other data with the same labels.

    Args:
        run: The folder of the run, or of a delta without a run, which has no data of its own.
        data: Another folder or hub id, laid out as the run's own data; all of its rows are scored.
        splits: The splits to score; by default validation and test, as far as they exist.
        output: A folder for the predictions, SPLIT.jsonl each.
        progress: Show a progress bar on a terminal.
        other: A known task in place of the run's, as flat values of a config: {"task": …, "data_root": …,
            "relabel": …}; as many of its rows are scored as of the run's own.
        columns: The columns of the other data, such as "text=a,label=b"; by default the run's.
        data_root: The folder that now holds the folder of the run's known task.
        base: The base model, where it is not at the place that the folder names.
        labels: The names of the labels in the order of their ids, where a delta without a run has none.

    Returns:
        The metrics of every split.

    Raises:
        DeltuneError: The folder is no run, the data lacks a split, or the run does not know the labels.
    """
    folder = open_run(run, base, labels=labels)
    config, is_delta = folder.config, isinstance(folder, DeltaFolder)
    if is_delta and data is None:
        raise DeltuneError(f"{run} is a delta without a run, so it has no data of its own: give --data")
    if data_root is not None:
        if config.data.source is not None:
            raise DeltuneError(f"{run} was trained on {config.data.source}, which is no known task; give --data")
        config = config.replace(data_root=data_root)
    source = config.data.source or ""
    is_file = any(Path(name).is_file() for name in loading.mixture_weights(source) or (source,))
    own_file = data is None and other is None and is_file  # it is split by the seed
    loaded = load_run(run, base, labels=labels)
    if data is None and other is None and folder.data.kind == "preference":
        raise DeltuneError(
            f"{run} was scored by its objective when it ended (deltune report {run}); for the perplexity of answers "
            "give conversations: --data"
        )
    if data is not None and is_file and Path(data).resolve() == Path(source).resolve():
        logger.warning(
            "all rows of %s are scored, also those that the run was trained on; leave --data out for the held-out rows",
            data,
        )
    if data is not None:  # it is laid out as the run's own, unless it says otherwise
        trained = (folder.trained.columns if folder.trained else None) if is_delta else folder.data.columns
        chosen = columns or config.data.columns or trained or None
        config = config.replace(data=data, task=loaded.kind.name, columns=chosen, validation_rows=None, test_rows=None)
    if other is not None:
        values = {n: v for n, v in config.flat().items() if n not in ("data", "columns", "labels", "metric")}
        config = RunConfig.from_flat(**merge_values(values, other))
    setup = set_up_task(
        config.model.name, config.data, config.generation.answer, config.evaluation, config.runtime.seed,
        training=own_file, labels=loaded.labels if _has_labels(loaded.kind) else None,
    )  # fmt: skip
    rows = setup.data
    if own_file:
        folder.check_data(rows.summary, "or give --data, all rows of which are scored, trained or not")
    if rows.labels != loaded.labels and _has_labels(loaded.kind):
        raise DeltuneError(f"the run's labels are {', '.join(loaded.labels)}, here are {', '.join(rows.labels)}")
    lengths_of = folder.config if other is None else config
    limits = length_limits(lengths_of.data, lengths_of.generation, loaded.kind, rows.labels)
    context = InferenceContext(
        loaded.model, loaded.tokenizer, rows.labels, fit_lengths(loaded.model, loaded.kind, limits),
        config.optim.rows_per_device(), loaded.precision,
    )  # fmt: skip
    check_tasks(tuned(loaded.model).delta(), rows.tasks, rows.source)
    trained_scheme = folder.data.tag_scheme
    if None not in (rows.tag_scheme, trained_scheme) and rows.tag_scheme != trained_scheme:
        raise DeltuneError(
            f"the run's tags are {trained_scheme}, those of {rows.source} are {rows.tag_scheme}; a run whose tags were "
            "converted (--tag-scheme iob2) reads all schemes"
        )
    setup = replace(setup, kind=loaded.kind, data=replace(rows, tag_scheme=trained_scheme or rows.tag_scheme))
    return _score_splits(context, setup, config.evaluation.metric_options, splits, output, progress)


@check_booleans
def evaluate_model(
    model: str,
    data: str | None = None,
    task: str | None = None,
    columns: str | None = None,
    answer: str = "head",
    splits: Sequence[str] | None = None,
    output: str | Path | None = None,
    *,
    progress: bool = False,
    max_length: int | None = None,
    data_root: str | None = None,
) -> dict[str, dict[str, float]]:
    """Score a model as it is, before any tuning; a merged one reads rows as its run did, unless told otherwise."""
    trained = merged_facts(Path(model))
    options, chosen = dict(trained.options), columns or trained.columns
    if task is not None:  # a named task has columns, a prompt and answers of its own
        options, chosen = {name: value for name, value in options.items() if name == "max_length"}, columns
    elif answer == "words" and trained.words:
        options["words"] = trained.words
    if max_length is not None:
        options["max_length"] = max_length
    config = RunConfig.from_flat(
        model=model, data=data, task=task, columns=chosen, answer=answer, method="head", data_root=data_root, **options
    )
    return evaluate_untuned(config, splits, output, progress=progress)


def evaluate_untuned(
    config: RunConfig, splits: Sequence[str] | None = None, output: str | Path | None = None, *, progress: bool = False
) -> dict[str, dict[str, float]]:
    """Score the model of a config as it is, on the rows that a run of the config would have."""
    name = config.model.name
    arguments = (name, config.data, config.generation.answer, config.evaluation, config.runtime.seed, False)
    saved = read_trained_head(name)
    has_labels = saved.kind in HEADS_WITH_LABELS and config.generation.answer == "head"
    labels = saved.labels if has_labels else None  # a file alone does not say which there are
    setup = set_up_task(*arguments, labels)
    head = setup.kind.head
    if head not in LANGUAGE_MODEL_HEADS and head != saved.kind and not has_trained_head(load_config(name), head):
        raise DeltuneError(
            f"{name} has no trained head for {setup.kind.name}, so it has no score before it is tuned: give --answer "
            "words for a language model, or train the head alone (deltune train --method head)"
        )
    if head == saved.kind and Path(config.data.source or "").is_file():
        logger.warning("all rows of %s are scored; %s does not say which it was trained on", setup.data.source, name)
    tokenizer = load_task_tokenizer(name, config.data)
    backbone = load_base(config, head, labels, tokenizer)
    if head == saved.kind and saved.pooling != "model":
        attach.attach_trained_head(backbone, name, saved.pooling)
    if head == "causal-lm":
        check_causal(backbone)
    backbone.to(task_setup.resolve_device())  # type: ignore[arg-type]
    optimize_linear(backbone, enabled=config.runtime.linear_backend == "onednn")
    limits = length_limits(config.data, config.generation, setup.kind, setup.data.labels)
    context = InferenceContext(
        backbone, tokenizer, setup.data.labels, fit_lengths(backbone, setup.kind, limits),
        config.optim.rows_per_device(),
    )  # fmt: skip
    return _score_splits(context, setup, config.evaluation.metric_options, splits, output, progress)


def _score_splits(
    context: InferenceContext,
    setup: TaskSetup,
    options: MetricOptions,
    splits: Sequence[str] | None,
    output: str | Path | None,
    progress: bool,
) -> dict[str, dict[str, float]]:
    """Score splits of a task, and write the predictions where a folder is given."""
    rows, kind, results = setup.data, setup.kind, {}
    options = with_tag_scheme(options, rows.tag_scheme)
    requested = _requested_splits(rows, splits)
    target = None if output is None else user_path(output, "output")
    by_split: dict[str, Columns] = {split: columns_of(rows.splits[split]) for split in requested}
    counts_of = label_counts(rows)
    for split in requested:
        if absent := absent_labels(counts_of.get(split, {}), split, setup.metrics):
            logger.warning("%s: %s", split, absent)
        for line in blank_notes(rows.kind, by_split[split], split):
            logger.warning("%s", line)
    with ProgressDisplay(progress) as bar, explain_write_errors(target or rows.source):
        encoded_splits = token_cache.encode_splits(
            kind, context.tokenizer, context.model, by_split, context.options, (), rows.fingerprint, bar.start_rows
        )
        for split, encoded in encoded_splits.items():
            columns = by_split[split]
            bar.start(split, len(encoded))
            result = score_split(
                kind, replace(context, on_progress=bar.advance), encoded, columns, setup.metrics, options
            )
            results[split] = result.metrics
            if not results.keys() - {split}:
                log_omitted(result.omitted)
            if target is not None:
                target.mkdir(parents=True, exist_ok=True)
                write_jsonl(target / f"{split}.jsonl", prediction_lines(kind, columns, result, rows.labels))
    return results


@check_booleans
def generate(
    source: str | Path,
    prompts: Sequence[str],
    max_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    *,
    stream: bool = False,
    base: str | None = None,
    inputs: Sequence[str] = (),
) -> list[str]:
    """Generate a text for each prompt.

    A run that was trained to answer, and a model merged from it, answers the prompt, which its template surrounds; any
    other language model goes on with it. Of instructions with an input, as Alpaca has them, `inputs` has one for each
    prompt, "" for none.
    """
    if not prompts:
        raise DeltuneError("no prompts are given")
    if inputs and len(inputs) != len(prompts):
        raise DeltuneError(
            f"{counted(len(inputs), 'input')} for {counted(len(prompts), 'prompt')}: give one for each, in order, "
            '"" for none (--input "")'
        )
    loaded, model, tokenizer = open_language_model(source, base)
    if loaded is not None and loaded.kind.head not in LANGUAGE_MODEL_HEADS:
        raise DeltuneError(f"{source} answers {loaded.kind.name} by a head and generates no text: deltune predict")
    is_encoder_decoder = model.config.is_encoder_decoder
    facts = (merged_facts(Path(source)) if loaded is None else loaded.run.trained) or TrainedFacts()
    pairs = zip(prompts, inputs or [""] * len(prompts), strict=True)
    encoded = [_prompt_ids(loaded, model, tokenizer, prompt, more, facts) for prompt, more in pairs]
    if not is_encoder_decoder:
        _check_room(model, [len(ids) for ids in encoded], max_tokens)
    texts: list[str] = []
    model.eval()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for prompt, ids in zip(prompts, encoded, strict=True):
            if stream and len(prompts) > 1:
                print(f"> {prompt}", flush=True)
            streamer = TextStreamer(tokenizer, not is_encoder_decoder, skip_special_tokens=True) if stream else None
            answer = continue_prompt(model, tokenizer, ids, max_tokens, temperature, top_p, streamer)
            texts.append(_continuation(tokenizer, [] if is_encoder_decoder else ids, answer))
    return texts


@torch.no_grad()
def continue_prompt(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int],
    max_tokens: int,
    temperature: float = 0.0,
    top_p: float | None = None,
    streamer: TextStreamer | None = None,
) -> list[int]:
    """Return the tokens with which a model answers a prompt, up to the end of the answer."""
    inputs, ends = torch.tensor([list(prompt)], device=model.device), end_tokens(tokenizer, model)
    options: dict[str, Any] = {"do_sample": False}
    if temperature:
        options = {"do_sample": True, "temperature": temperature, **({} if top_p is None else {"top_p": top_p})}
    if model.config.is_encoder_decoder:
        options |= forced_bos_options(tokenizer, model)
    generated = model.generate(  # type: ignore[operator]
        input_ids=inputs, attention_mask=torch.ones_like(inputs), streamer=streamer, max_length=None, num_beams=1,
        max_new_tokens=max_tokens, eos_token_id=list(ends) or None, **options,
    )[0]  # fmt: skip
    return cut_at_end(generated[1 if model.config.is_encoder_decoder else len(prompt) :].tolist(), ends)


def _continuation(tokenizer: Any, prompt: list[int], answer: list[int]) -> str:
    """Return the text of an answer behind its prompt, with the blank that some tokenizers drop at the beginning."""
    before, text, alone = (
        str(tokenizer.decode(tokens, skip_special_tokens=True)) for tokens in (prompt, prompt + answer, answer)
    )
    return text[len(before) :] if text.startswith(before) else alone


def _check_room(model: PreTrainedModel, prompt_tokens: Sequence[int], max_tokens: int) -> None:
    """Check that a decoder has positions for each prompt and what it generates; the error names all long ones."""
    longest = max(prompt_tokens, default=0)
    available = longest_length(model, longest + max_tokens)
    too_long = [(n, tokens) for n, tokens in enumerate(prompt_tokens, 1) if tokens + max_tokens > available]
    if too_long:
        room = max(0, available - longest)
        problems = [
            f"prompt {n} of {len(prompt_tokens)}: its {tokens} tokens and max_tokens={max_tokens} take "
            f"{tokens + max_tokens} positions, and {type(model).__name__} has {available}"
            for n, tokens in too_long
        ]
        if room:
            advice = f"give max_tokens={room} or less"
        elif available > max_tokens:
            advice = f"give prompts of at most {available - max_tokens} tokens"
        else:
            advice = "give shorter prompts and a smaller max_tokens"
        raise error_from_problems(f"nothing was generated ({advice})", problems)


def open_language_model(
    source: str | Path, base: str | None = None
) -> tuple[LoadedRun | None, PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a run with its model, or a language model as it is, without a run."""
    if is_run(source):
        loaded = load_run(source, base)
        return loaded, loaded.model, loaded.tokenizer
    name = str(source)
    head = "seq2seq-lm" if load_config(name).is_encoder_decoder else "causal-lm"
    tokenizer = load_tokenizer(name)
    model = load_model(name, head, dtype="float32")
    align_padding_token(model, tokenizer)
    if head == "causal-lm":
        check_causal(model)
    return None, model.to(task_setup.resolve_device()), tokenizer  # type: ignore[arg-type]


def _prompt_ids(
    loaded: LoadedRun | None, model: PreTrainedModel, tokenizer: Any, prompt: str, more: str, facts: TrainedFacts
) -> list[int]:
    """Return the token ids of a prompt, as the run was trained to read it, or the run that the model is merged from."""
    is_encoder_decoder = model.config.is_encoder_decoder
    if facts.chat_template is not None and not is_encoder_decoder and (loaded is None or loaded.kind is CHAT):
        return chat_prompt(tokenizer, [question(prompt, more)])
    if more:
        raise DeltuneError("an input beside the prompt is for what was trained on conversations, such as Alpaca's rows")
    if loaded is not None and loaded.kind.name == "generation":
        row = _encode(loaded, next(iter(loaded.runs)), {0: prompt})[0].rows[0]
        return list(row["input_ids"])
    if loaded is None and facts.generates:
        kind = SEQ2SEQ_GENERATION if is_encoder_decoder else CAUSAL_GENERATION
        limits = TaskOptions(facts.max_length or TaskOptions.max_length, template=facts.template or "")
        row = kind.encode(tokenizer, model, {"source": [prompt]}, limits, False).rows[0]
        return list(row["input_ids"])
    if is_encoder_decoder:
        return list(tokenize(tokenizer, [prompt], names=[repr(prompt)])["input_ids"][0])
    ids = tokenize_prompts(tokenizer, [prompt])[0]
    return list(truncate_prompt(tokenizer, ids, len(ids), repr(prompt)))


def _requested_splits(data: loading.TaskData, splits: Sequence[str] | None) -> list[str]:
    """Return the splits to score; other usual names of a split, such as dev, stand for it."""
    usual = {stem: split for split, stems in loading.SPLITS.items() for stem in stems}
    requested = [s for s in SPLITS if s in data.splits] if splits is None else [usual.get(s, s) for s in splits]
    problems = [unknown_name("split", s, data.splits) for s in requested if s not in data.splits]
    if problems or not requested:
        raise DeltuneError(" ".join(problems) or f"data {data.source} has neither a validation nor a test split")
    return requested


def rescore(run: str | Path, metrics: Sequence[str] = ()) -> dict[str, dict[str, float]]:
    """Compute metrics of a finished run from its prediction files, without any model."""
    results = rescore_with_statistics(run, metrics)
    log_omitted({name: reason for scores in results.values() for name, reason in scores.omitted.items()})
    return {split: {name: one.value for name, one in scores.items()} for split, scores in results.items()}


def rescore_with_statistics(run: str | Path, metrics: Sequence[str] = ()) -> dict[str, Scores]:
    """Do as `rescore` does, and return the scores with the statistics of every example."""
    folder = open_run(run)
    stored = folder.metrics.scores
    files = {split: folder.predictions / f"{split}.jsonl" for split in SPLITS}
    if not any(file.is_file() for file in files.values()):
        raise DeltuneError(f"{folder.folder} has no predictions; a finished run has them")
    kind = task_kind_by_name(folder.data.kind)
    labels = {name: i for i, name in enumerate(folder.labels)} if kind.predicts_label_ids else {}
    results: dict[str, Scores] = {}
    for split, file in files.items():
        if file.is_file():
            lines = folder.read_predictions(split)
            predictions, references = (
                [_answer(line[key], labels, f"{file} line {i}") for i, line in lines]
                for key in ("prediction", "reference")
            )
            # loss and token accuracy are of a pass, and no file has what they need
            names = tuple(metrics) or tuple(name for name in stored.get(split, {}) if name in METRICS)
            check_fits(kind, names)
            options = with_tag_scheme(folder.config.evaluation.metric_options, folder.data.tag_scheme)
            try:
                results[split] = measure(kind, names, predictions, references, len(labels), options)
            except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
                raise DeltuneError(
                    f"{file} holds what {kind.name} is not measured by ({error_summary(error)})"
                ) from error
    return results


def _answer(value: Any, labels: Mapping[str, int], where: str) -> Any:
    """Return a prediction or reference as metrics compare it: the id of a label, where there are labels."""
    if not labels:
        return value
    if not isinstance(value, str) or value not in labels:
        raise DeltuneError(f"{where}: {excerpt(value)} is no label of this run")
    return labels[value]


def predict(
    run: str | Path | Mapping[str, str | Path] | LoadedRun, texts: Sequence[Input], rows: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Answer inputs with a run.

    Args:
        run: The folder of a run, folders by name, or runs that are loaded.
        texts: The inputs: a text; of pairs (text, pair); of tagging a text, split at blanks, or its tokens; of
            multiple choice {"question", "choices"}; or any of them by role. Texts longer than the run's max_length are
            cut, as in training.
        rows: Of classification by heads: for each text the name of the run whose delta it uses, where `run` names
            several. They are computed in the same batches.

    Returns:
        For each input {"prediction", "scores"} as in prediction files, of a classification {"label", "scores"}. Of
        running text the prediction is its log-likelihood and the score its perplexity. A text for a run that was
        trained on spans also has its "entities": start and end in characters, label and text.

    Raises:
        DeltuneError: There are no texts, an input is of another kind, or a name is no run's.
    """
    return _predict(run if isinstance(run, LoadedRun) else load_run(run), texts, rows)


def _predict(
    loaded: LoadedRun, texts: Sequence[Input], rows: Sequence[str] | None = None, ids: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Answer inputs; warnings name them by their ids, or else by their places."""
    if isinstance(texts, str):
        raise DeltuneError(f"texts is a list, and here it is one text: predict(run, [{excerpt(texts, 40)}])")
    if not texts:
        raise DeltuneError("no texts to predict")
    if isinstance(rows, str):
        raise DeltuneError(f"rows is a list with the name of a run for each text: rows=[{excerpt(rows, 40)}, …]")
    if rows is not None:
        return _predict_mixed(loaded, texts, list(rows))
    if len(loaded.runs) > 1:
        raise DeltuneError(
            f"several runs are given ({', '.join(loaded.runs)}): say with rows=[…] which of them answers each text"
        )
    encoded, limits = _encode(loaded, next(iter(loaded.runs)), dict(enumerate(texts)), ids)
    if encoded.truncated:
        unseen = "; no entity is found beyond them" if loaded.kind.name == "tagging" else ""
        cut = f"{encoded.truncated} of {len(texts)} inputs are cut to the {limits.max_length} tokens of the run{unseen}"
        warnings.warn(cut, stacklevel=3)
    answers = loaded.kind.predict(_inference_context(loaded, limits), encoded)
    labelled = loaded.kind.predicts_label_ids
    predictions = [loaded.labels[p] for p in answers.predictions] if labelled else answers.predictions
    return [
        {"label" if labelled else "prediction": prediction, "scores": scores, **_spans(loaded, value, prediction)}
        for value, prediction, scores in zip(texts, predictions, answers.scores, strict=True)
    ]


def _spans(loaded: LoadedRun, value: Input, tags: Any) -> dict[str, Any]:
    """Return the entities of a text by their characters, where the run was trained on spans; else nothing."""
    text = value.get("tokens") if isinstance(value, Mapping) else value
    if "spans" not in loaded.run.data.columns or not isinstance(text, str):
        return {}
    words = split_words(text)
    scheme = loaded.run.data.tag_scheme or "IOB2"
    spans = [(words[i][0], words[j - 1][1], label) for label, i, j in entities(tags, scheme)]
    return {"entities": [{"start": i, "end": j, "label": label, "text": text[i:j]} for i, j, label in sorted(spans)]}


def predict_rows(
    run: str | Path,
    inputs: Sequence[Mapping[str, Any]],
    base: str | None = None,
    labels: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Answer inputs that have ids; what else stands beside them stays in their rows."""
    first = inputs[0]["input"] if inputs else ""
    pairs = not isinstance(first, str) and (isinstance(first, list) or "pair" in first)
    loaded = load_run(run, base, pairs=pairs, labels=labels)
    texts, ids = [row["input"] for row in inputs], [row["id"] for row in inputs]
    columns = columns_from_inputs(loaded.kind.name, loaded.run, texts)
    return [
        {
            **row,
            "input": loaded.kind.row_input(columns, i),
            "prediction": answer[next(iter(answer))],
            **{name: value for name, value in answer.items() if name not in ("label", "prediction")},
        }
        for i, (row, answer) in enumerate(zip(inputs, _predict(loaded, texts, ids=ids), strict=True))
    ]


def _predict_mixed(loaded: LoadedRun, texts: Sequence[Input], names: Sequence[str]) -> list[dict[str, Any]]:
    """Classify each text by the delta of its own run, with that run's labels."""
    if loaded.kind is not CLASSIFICATION:
        raise DeltuneError(
            f"rows= is for classification by heads, and {loaded.run.folder} is not for that; "
            "predict with one run a call"
        )
    if len(names) != len(texts):
        raise DeltuneError(f"rows names the run of {len(names)} texts, and there are {len(texts)}")
    problems = [unknown_name("run", name, loaded.runs) for name in dict.fromkeys(names) if name not in loaded.runs]
    if problems:
        raise error_from_problems("these rows cannot be predicted", problems)
    encoded: list[Any] = [None] * len(texts)
    for name in dict.fromkeys(names):
        places = [i for i, other in enumerate(names) if other == name]
        rows = _encode(loaded, name, {i: texts[i] for i in places})[0].rows
        for i, row in zip(places, rows, strict=True):
            encoded[i] = row
    probabilities = predict_logits(_inference_context(loaded, TaskOptions(), names), EncodedRows(encoded, 0)).softmax(
        -1
    )
    predictions = []
    for name, row in zip(names, probabilities, strict=True):
        labels = loaded.labels_of[name]
        scores = dict(zip(labels, row.tolist(), strict=False))  # a wider head of another run has more columns
        predictions.append({"label": labels[int(row.argmax())], "scores": scores})
    return predictions


def _inference_context(loaded: LoadedRun, limits: TaskOptions, deltas: Sequence[str] | None = None) -> InferenceContext:
    rows = loaded.config.optim.rows_per_device()
    return InferenceContext(loaded.model, loaded.tokenizer, loaded.labels, limits, rows, loaded.precision, None, deltas)


def _encode(
    loaded: LoadedRun, name: str, texts: Mapping[int, Input], ids: Sequence[str] = ()
) -> tuple[EncodedRows, TaskOptions]:
    """Encode one run's inputs, by their place in all, cut as the run cuts them; return them and the run's limits."""
    run, numbers = loaded.runs[name], [i + 1 for i in texts]
    columns = columns_from_inputs(loaded.kind.name, run, list(texts.values()), numbers)
    for line in blank_notes(loaded.kind.name, {"id": ids or numbers, **columns}, "the input"):
        warnings.warn(line, stacklevel=4)
    limits = length_limits(run.config.data, run.config.generation, loaded.kind, loaded.labels_of[name])
    handle = tuned(loaded.model)
    before = handle.active
    try:
        limits = fit_lengths(handle.use(name).model, loaded.kind, limits)
    finally:
        handle.use(before)
    check_tasks(handle.delta(name), columns.get("task"), "the input")
    return loaded.kind.encode(loaded.tokenizer, loaded.model, columns, limits, False), limits


@check_booleans
def merge_run(
    run: str | Path,
    output: str | Path,
    *,
    dequantize: bool = False,
    base: str | None = None,
    labels: Sequence[str] | None = None,
    pooling: Literal["model"] | None = None,
) -> Path:
    """Write the model with the run's delta merged into its weights, and its tokenizer; all or nothing.

    A head that reads another pooling than its class is written for sentence-transformers, unless `pooling` gives it up.
    """
    to = user_path(output, "output")
    with atomic_new_folder(to) as fresh, silent_loading():
        opened = open_run(run, base, labels=labels)
        handle, tokenizer = _load_to_write(opened, pooling)
        trained = handle.delta().pooling
        merged = handle.merge(dequantize=dequantize, pooling="model")
        if trained != "model" and pooling is None:
            length = opened.trained.max_length if opened.trained else None
            write_sentence_model(merged, tokenizer, trained, fresh, length)
        else:
            if merged.can_generate():  # whoever loads it is to stop where training has written an end
                merged.generation_config.eos_token_id = list(end_tokens(tokenizer, merged)) or None
            merged.save_pretrained(fresh)
            tokenizer.save_pretrained(fresh)
        if opened.trained is not None:
            write_json(fresh / MERGED_FACTS, opened.trained.model_dump(exclude_none=True))
    return to


def _load_to_write(opened: RunFolder, pooling: str | None) -> tuple[Tuned, PreTrainedTokenizerBase]:
    """Load a run or a delta, whatever its head is for, with the tokenizer that it was trained with.

    Where a pooling is asked for and the head was trained on another, it says so.
    """
    if isinstance(opened, DeltaFolder):
        tokenizer = load_tokenizer(str(opened.base))
        if opened.trained is not None and opened.trained.chat_template is not None:
            tokenizer = with_chat_template(tokenizer, opened.trained.chat_template)
        labels = list(opened.labels) if opened.head in HEADS_WITH_LABELS else None
        model = load_model(str(opened.base), opened.head, labels or None)
        align_padding_token(model, tokenizer)
        handle = _attach_delta(model, opened)
    else:
        loaded = load_run(opened.folder, opened.base)
        handle, tokenizer = tuned(loaded.model), loaded.tokenizer
    if gives_up_pooling(pooling) and (trained := handle.delta().pooling) != "model":
        logger.warning(
            "its head was trained on the %s of the hidden states and reads the class's pooler now, for which it may be "
            "no better than chance; train with --pooling model for a head of its own",
            trained,
        )
    return handle, tokenizer


def export_run(
    run: str | Path,
    output: str | Path,
    format: str = "peft",
    base: str | None = None,
    pooling: Literal["model"] | None = None,
) -> Path:
    """Write a run's delta for another library; all or nothing."""
    opened = open_run(run, base)
    handle, tokenizer = _load_to_write(opened, pooling)
    target = attach.export(handle.model, user_path(output, "output"), format, pooling=pooling)
    named = str(read_options(target).get("base_model_name_or_path") or "")
    if named and Path(named).is_dir():
        logger.info(
            "the adapter names its base model as %s, a folder of this machine: others put their own path or a hub id "
            "there (base_model_name_or_path in adapter_config.json)",
            named,
        )
    if opened.trained is not None and opened.trained.chat_template is not None:
        tokenizer.save_pretrained(target)  # whoever loads the adapter finds the template of its training beside it
    return target


def import_adapter(
    folder: str | Path,
    output: str | Path,
    base: str | None = None,
    kind: str | None = None,
    labels: Sequence[str] | None = None,
) -> Tuned:
    """Turn a folder of PEFT or AdapterHub into a delta folder for a base model, by default the one that it names."""
    folder, to = user_path(folder, "folder"), user_path(output, "output")
    if not is_foreign(folder):
        raise DeltuneError(
            f"{str(folder)!r} is a delta already: every command takes it as it is"
            if is_delta(str(folder))
            else f"{str(folder)!r} holds no adapter_config.json, which PEFT and AdapterHub both write"
        )
    if kind is not None and kind not in HEADS:
        raise DeltuneError(unknown_name("kind of model", kind, HEADS))
    opened = DeltaFolder(folder, base, labels=labels)
    names = list(opened.labels) if kind in (None, opened.head) else []
    handle = attach.load(load_model(str(opened.base), kind or opened.head, names or None), folder)
    handle.save(to)
    return handle
