"""A linear probe: what a linear model makes of the frozen features of a model, the floor that tuning has to beat.

Features of a text are its pooled last hidden states, of a pair |u − v| and u · v of its two texts, of tagging the last
hidden state of each word's first sub-word. The probe is scikit-learn's logistic regression, or its ridge regression for
numbers; its penalty is chosen on the validation split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import DeltuneError
from ..models import HEADS_WITH_LABELS, Pooling, tag_all_words
from ..runtime.pooling import choose_pooling, pool
from .config import RunConfig
from .data.columns import TASK_COLUMNS
from .data.rows import columns_of
from .inference import MetricOptions, load_base, measure, with_tag_scheme
from .records import ProbeRecord
from .setup import fit_lengths, length_limits, load_task_tokenizer, resolve_device, set_up_task
from .tasks import token_cache
from .tasks.base import Columns, InferenceContext, TaskKind
from .tasks.encoding import IGNORE_INDEX, EncodedRows, encode_texts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Array = np.ndarray[Any, np.dtype[Any]]
INVERSE_STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Inverse penalties C that are tried, on standardised features."""

MOST_ROWS = 10_000
"""Of more training rows, or words, a sample runs through the model and is fitted."""


@dataclass(frozen=True)
class LinearProbe:
    """A fitted probe.

    Attributes:
        weight: Its weights for the features as they are, a row for each label, or one for a number.
        bias: Its biases.
        strength: The chosen inverse penalty C.
        predictions: Its answers by split: numbers of labels, or numbers.
    """

    weight: Array
    bias: Array
    strength: float
    predictions: Mapping[str, Array]


def fit_probe(features: Mapping[str, Array], answers: Mapping[str, Array], labels: int | None = None) -> LinearProbe:
    """Fit a linear probe on the train split; the penalty with the best validation wins, of equal ones the greatest.

    Features are (rows, width) by split, answers the numbers of so many labels, or without `labels` numbers, to which a
    ridge regression is fitted. Without a validation split C is 1.
    """
    from sklearn.linear_model import LogisticRegression, Ridge

    train, target = np.asarray(features["train"], np.float64), np.asarray(answers["train"])
    mean, scale = train.mean(0), train.std(0)
    scale[scale == 0] = 1.0
    standard = (train - mean) / scale
    classes = np.unique(target) if labels is not None else None
    tries = []
    for strength in INVERSE_STRENGTHS if "validation" in answers else (1.0,):
        if classes is not None and len(classes) == 1:
            weight, bias = np.zeros((1, train.shape[1])), np.zeros(1)
        elif classes is not None:
            logistic = LogisticRegression(C=strength, max_iter=1000).fit(standard, target)
            weight, bias = logistic.coef_, logistic.intercept_
            if len(classes) == 2:  # of which one row says both
                weight, bias = np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2
        else:
            ridge = Ridge(alpha=1 / strength).fit(standard, target)
            weight, bias = ridge.coef_[None], np.atleast_1d(ridge.intercept_)
        weight = weight / scale
        bias = bias - weight @ mean
        if classes is not None:
            assert labels is not None
            weight, bias = _for_all_labels(weight, bias, classes, labels)
        outputs = {split: np.asarray(values, np.float64) @ weight.T + bias for split, values in features.items()}
        predictions = {s: o.argmax(-1) if labels is not None else o[:, 0] for s, o in outputs.items()}
        quality = 0.0
        if "validation" in answers:
            right = predictions["validation"] == answers["validation"]
            error = -np.square(predictions["validation"] - answers["validation"]).mean()
            quality = float(right.mean() if labels is not None else error)
        tries.append((quality, -strength, LinearProbe(weight, bias, strength, predictions)))
    return max(tries, key=lambda one: one[:2])[2]


def _for_all_labels(weight: Array, bias: Array, classes: Array, labels: int) -> tuple[Array, Array]:
    """Return weights and biases with a row for every label; one that training rows lack is never predicted."""
    whole, biases = np.zeros((labels, weight.shape[1])), np.full(labels, -1e4)
    whole[classes], biases[classes] = weight, bias
    return whole, biases


def pooled_features(context: InferenceContext, encoded: EncodedRows, pooling: Pooling) -> Array:
    """Return the pooled last hidden states of rows, (rows, width); "model" stands for the mean."""
    parts: dict[int, Array] = {}

    def process(indices: list[int], batch: dict[str, torch.Tensor]) -> None:
        states = _last_states(context.model, batch)
        rows = pool(states, batch.get("attention_mask"), "mean" if pooling == "model" else pooling)
        parts.update(zip(indices, rows.float().cpu().numpy(), strict=True))

    context.for_each_batch(encoded, process)
    return np.stack([parts[i] for i in range(len(encoded))])


def word_features(context: InferenceContext, encoded: EncodedRows) -> tuple[Array, Array]:
    """Return the last hidden states of the words of all rows that the model sees, one after another, and their tags."""
    parts: dict[int, tuple[Array, Array]] = {}

    def process(indices: list[int], batch: dict[str, torch.Tensor]) -> None:
        labels, states = batch["labels"], _last_states(context.model, batch)
        for number, i in enumerate(indices):
            kept = labels[number] != IGNORE_INDEX
            parts[i] = states[number][kept].float().cpu().numpy(), labels[number][kept].cpu().numpy()

    context.for_each_batch(encoded, process)
    states, tags = zip(*(parts[i] for i in range(len(encoded))), strict=True)
    return np.concatenate(states), np.concatenate(tags)


def _last_states(model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the last hidden states of a batch, of an encoder-decoder those of its encoder."""
    body: Any = model.get_encoder() if model.config.is_encoder_decoder else model.base_model
    states: torch.Tensor = body(**{name: tensor for name, tensor in batch.items() if name != "labels"})[0]
    return states


def score_probe(
    kind: TaskKind,
    context: InferenceContext,
    encoded: Mapping[str, EncodedRows],
    columns: Mapping[str, Columns],
    metrics: Sequence[str],
    options: MetricOptions,
    pooling: Pooling,
    seed: int = 0,
) -> tuple[LinearProbe, ProbeRecord]:
    """Fit a probe on the frozen features of a task's rows, and measure it as a run is measured."""
    labels = len(context.labels) if kind.predicts_label_ids or kind.name == "tagging" else None
    sample = _sample(encoded["train"], seed)
    columns = {**columns, "train": {role: [values[i] for i in sample] for role, values in columns["train"].items()}}
    encoded = {split: EncodedRows(rows.rows, rows.truncated) for split, rows in encoded.items()}  # no cached states
    encoded["train"] = EncodedRows(encoded["train"].__getitems__(sample), 0)
    if kind.name == "tagging":
        by_split = {split: word_features(context, rows) for split, rows in encoded.items()}
        features = {split: states for split, (states, _) in by_split.items()}
        answers = {split: tags for split, (_, tags) in by_split.items()}
        name = "words"
    else:
        features = {split: _text_features(context, encoded[split], columns[split], pooling) for split in encoded}
        role = TASK_COLUMNS[kind.name][-1].role
        answers = {split: _answers(columns[split][role], len(context.labels)) for split in encoded}
        name = "mean" if pooling == "model" else pooling
    fit = _fit_several if kind.name == "multilabel" else fit_probe
    probe = fit(features, answers, labels)
    scores: dict[str, Any] = {}
    for split in (split for split in ("validation", "test") if split in encoded):
        predictions: list[Any] = probe.predictions[split].tolist()
        if kind.name == "tagging":
            predictions = _tags_of_rows(predictions, encoded[split], context.labels)
        elif kind.name == "multilabel":
            predictions = [[context.labels[i] for i, one in enumerate(row) if one] for row in predictions]
        references = kind.references(columns[split], context.labels)
        measured = measure(kind, metrics, predictions, references, len(context.labels), options)
        scores[split] = {metric: score.value for metric, score in measured.items()}
    return probe, ProbeRecord(features=name, C=probe.strength, **scores)


def probe_model(config: RunConfig) -> ProbeRecord:
    """Probe the model of a config on its data, with the pooling that a run on it would have."""
    name, seed = config.model.name, config.runtime.seed
    setup = set_up_task(name, config.data, "head", config.evaluation, seed)
    kind, data = setup.kind, setup.data
    if kind.head not in HEADS_WITH_LABELS:
        raise DeltuneError(f"a probe is of labels of texts or of words, and this is {kind.name}")
    if list(data.splits) == ["train"]:
        raise DeltuneError(f"data {data.source} has no validation or test split, so the probe would have no score")
    tokenizer = load_task_tokenizer(name, config.data)
    model = load_base(config, kind.head, data.labels, tokenizer)
    pooling, _ = choose_pooling(model, name, config.method.pooling)
    model.to(resolve_device())  # type: ignore[arg-type]
    limits = fit_lengths(model, kind, length_limits(config.data, config.generation, kind, data.labels))
    columns: dict[str, Columns] = {split: columns_of(rows) for split, rows in data.splits.items()}
    encoded = token_cache.encode_splits(kind, tokenizer, model, columns, limits, ("train",), data.fingerprint)
    context = InferenceContext(model, tokenizer, data.labels, limits, config.optim.rows_per_device())
    options = with_tag_scheme(config.evaluation.metric_options, data.tag_scheme)
    return score_probe(kind, context, encoded, columns, setup.metrics, options, pooling, seed)[1]


def _sample(encoded: EncodedRows, seed: int) -> list[int]:
    """Return the rows of a sample of `MOST_ROWS` rows, or of as many words, in any order; of fewer all in theirs."""
    count, rng = len(encoded), np.random.default_rng(seed)
    if not count or "words" not in encoded[0]:
        return rng.choice(count, MOST_ROWS, replace=False).tolist() if count > MOST_ROWS else list(range(count))
    words = [len(row["words"]) for row in encoded.rows]
    if sum(words) <= MOST_ROWS:
        return list(range(count))
    order = rng.permutation(count)
    return order[: np.searchsorted(np.cumsum(np.array(words)[order]), MOST_ROWS) + 1].tolist()


def _text_features(context: InferenceContext, encoded: EncodedRows, columns: Columns, pooling: Pooling) -> Array:
    if "pair" not in columns:
        return pooled_features(context, encoded, pooling)
    places = {text: i for i, text in enumerate(dict.fromkeys([*columns["text"], *columns["pair"]]))}  # each text once
    texts = encode_texts(context.tokenizer, context.model, {"text": list(places)}, context.options.max_length)
    features = pooled_features(context, texts, pooling)
    u, v = (features[[places[text] for text in columns[role]]] for role in ("text", "pair"))
    return np.concatenate([np.abs(u - v), u * v], axis=-1)


def _answers(values: Sequence[Any], labels: int) -> Array:
    """Return the answers of rows as numbers; of several labels as a column of 0 and 1 for each."""
    if not isinstance(values[0], list):
        return np.asarray(values)
    return np.array([[i in row for i in range(labels)] for row in values], dtype=int)


def _fit_several(features: Mapping[str, Array], answers: Mapping[str, Array], labels: int | None = None) -> LinearProbe:
    """Fit a probe for each of several labels by itself; its strength is the median of theirs."""
    probes = [
        fit_probe(features, {s: a[:, i] for s, a in answers.items()}, 2) for i in range(answers["train"].shape[1])
    ]
    return LinearProbe(
        np.stack([one.weight[1] - one.weight[0] for one in probes]),
        np.array([one.bias[1] - one.bias[0] for one in probes]),
        float(np.median([one.strength for one in probes])),
        {split: np.stack([one.predictions[split] for one in probes], axis=1) for split in features},
    )


def _tags_of_rows(numbers: Sequence[int], encoded: EncodedRows, labels: Sequence[str]) -> list[list[str]]:
    remaining = iter(numbers)
    rows = []
    for row in encoded.rows:
        tags = {word: labels[next(remaining)] for word in row["words"]}
        rows.append(tag_all_words(tags, row["num_words"], labels))
    return rows
