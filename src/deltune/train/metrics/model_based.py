"""BERTScore, MoverScore and BLEURT: metrics by a model, which the option `model` names (a folder or a hub id)."""

from __future__ import annotations

import math
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...compat import LOADING, of_bert_score
from ...errors import DeltuneError
from .base import CorpusStatistics, Metric, Options, mean_statistics, reduce_references
from .words import CannotScoreError, refuse_rows

Texts = Sequence[str]
References = Sequence[Sequence[str]]


def _missing_model(options: Options) -> str | None:
    return None if options["model"] else "needs a model: give the option model (a folder or a hub id)"


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _flatten(references: References) -> list[str]:
    return [reference for accepted in references for reference in accepted]


def _repeat_predictions(predictions: Texts, references: References) -> list[str]:
    """Return each prediction once for each of its references."""
    return [prediction for prediction, accepted in zip(predictions, references, strict=True) for _ in accepted]


WEIGHTLESS = "no word has a weight, since every reference has it: give the option"


def _refuse_unreadable(tokenizer: Any, references: References, model: str) -> dict[str, int]:
    """Refuse references of which a model's vocabulary knows no token: all such texts look alike to the model."""

    def is_read(text: str) -> bool:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return any(token != tokenizer.unk_token_id for token in ids)

    problem = f"have a reference without a token that {model} knows, so that any answers would look alike"
    return refuse_rows(references, is_read, f"{problem} (give a model of their language)")


def _longest(tokenizer: Any, model: Any) -> int:
    """Return the length in tokens at which a text is cut: at the tokenizer's limit, and where positions end."""
    from ...runtime.prompts import position_count

    tables = [table for name, table in model.named_modules() if name.endswith("position_embeddings")]
    positions = [position_count(table) for table in tables if hasattr(table, "weight")]
    return int(min([tokenizer.model_max_length, 1 << 30, *positions]))


# BERTScore ---------------------------------------------------------------------------------------------------------


def _compute_bertscore(predictions: Texts, references: References, options: Options) -> CorpusStatistics:
    """Mean F1 of greedily matched token embeddings, the largest over the references (Zhang 2020), by bert-score.

    Options: layers, the layer that is read, counted from 1, for a model for which bert-score knows no best layer; idf,
    whether tokens are weighted by their frequencies in all references. Scores are not rescaled. An empty text scores 0,
    as in bert-score.
    """
    from bert_score import BERTScorer
    from bert_score.utils import model2layers
    from transformers import AutoTokenizer

    model, layers = options["model"], options["layers"]
    if layers is None and model not in model2layers:
        raise DeltuneError(f"bert-score knows no best layer of {model}: give the option layers, counted from 1.")
    unread = _refuse_unreadable(AutoTokenizer.from_pretrained(model), references, model)
    flat_references = _flatten(references)
    if options["idf"] and len(set(flat_references)) == 1:
        raise CannotScoreError(f"{WEIGHTLESS} idf=False")
    with LOADING:
        scorer = BERTScorer(model_type=model, num_layers=layers, idf=options["idf"], device=_device())
    # bert-score cuts texts at the tokenizer's limit; one that names none has 1e30, which the tokenizer itself refuses.
    tokenizer, encoder = of_bert_score(scorer)
    tokenizer.model_max_length = _longest(tokenizer, encoder)
    if options["idf"]:
        scorer.compute_idf(flat_references)
    pairs = list(zip(_repeat_predictions(predictions, references), flat_references, strict=True))
    # bert-score 0.3.13 passes an empty text to a method that tokenizers of transformers 5 lack.
    not_empty = [i for i, (prediction, reference) in enumerate(pairs) if prediction.strip() and reference.strip()]
    values = [0.0] * len(pairs)
    if not_empty:
        _, _, f1 = scorer.score([pairs[i][0] for i in not_empty], [pairs[i][1] for i in not_empty])
        for i, value in zip(not_empty, f1.tolist(), strict=True):
            values[i] = value
    signature = {"hash": scorer.hash, "rescaled": False, "references": "max", **unread}
    return mean_statistics(reduce_references(values, references, "max"), signature)


# MoverScore --------------------------------------------------------------------------------------------------------

BATCH_SIZE = 64


def _compute_moverscore(predictions: Texts, references: References, options: Options) -> CorpusStatistics:
    """1 / (1 + d) of the earth mover's distance d between the words of both texts, mean over references (Zhao 2019).

    Unigrams: embeddings of the last layer, normalized to length 1, at Euclidean distances, without word pieces that
    continue a word (##) and without punctuation. Options: form, "inverse" as above and in the authors' moverscore_v2 of
    today, or "difference", its earlier 1 - d; idf, "corpus" for weights log((N+1)/(n+1)) that come from all predictions
    for predictions and from all references for references, or "none" for equal weights. A text in which nothing has
    weight scores 0 (in the script the flow is empty then, and the score is 1).
    """
    from transformers import AutoModel, AutoTokenizer

    for name, values in (("idf", ("corpus", "none")), ("form", ("inverse", "difference"))):
        if options[name] not in values:
            raise DeltuneError(f"{name} must be {' or '.join(values)}, not {options[name]!r}.")
    tokenizer = AutoTokenizer.from_pretrained(options["model"])
    if not any(token.startswith("##") for token in tokenizer.get_vocab()):
        raise DeltuneError(
            f"moverscore recognises words by ## (WordPiece), which the tokenizer of {options['model']} lacks."
        )
    unread = _refuse_unreadable(tokenizer, references, options["model"])
    with LOADING:
        model = AutoModel.from_pretrained(options["model"]).float().to(_device()).eval()
    embedded_predictions = list(_embed_words(list(predictions), model, tokenizer, options["idf"]))
    embedded_references = list(_embed_words(_flatten(references), model, tokenizer, options["idf"]))
    if not any(weights.any() for _, weights in embedded_references):
        raise CannotScoreError(f"{WEIGHTLESS} idf='none'")
    examples = (i for i, accepted in enumerate(references) for _ in accepted)
    distances = [
        _earth_movers_distance(embedded_predictions[i], reference)
        for i, reference in zip(examples, embedded_references, strict=True)
    ]
    scores = [0.0 if d is None else 1 / (1 + d) if options["form"] == "inverse" else 1 - d for d in distances]
    signature = {**options, "layer": "last", "ngram": 1, "subwords": "first", "references": "mean", **unread}
    return mean_statistics(reduce_references(scores, references, "mean"), signature)


def _embed_words(texts: list[str], model: Any, tokenizer: Any, idf: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield for each text embeddings (words, width) of length 1 and weights (words,) of sum 1, or 0 if all are 0."""
    import torch

    encoded = tokenizer(texts, truncation=True, max_length=_longest(tokenizer, model))["input_ids"]
    frequencies = Counter(token for ids in encoded for token in set(ids))
    for start in range(0, len(texts), BATCH_SIZE):
        batch_ids = encoded[start : start + BATCH_SIZE]
        batch = tokenizer.pad({"input_ids": batch_ids}, padding_side="right", return_tensors="pt").to(model.device)
        with torch.no_grad():
            hidden = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
        for ids, states in zip(batch_ids, hidden.double().cpu().numpy(), strict=True):
            tokens = tokenizer.convert_ids_to_tokens(ids)
            words = [i for i, token in enumerate(tokens) if "##" not in token and token not in set(string.punctuation)]
            weights = [
                math.log((len(texts) + 1) / (frequencies[ids[i]] + 1)) if idf == "corpus" else 1.0 for i in words
            ]
            vectors = states[words] / np.linalg.norm(states[words], axis=1, keepdims=True)
            yield vectors, np.array(weights) / (sum(weights) or 1.0)


def _earth_movers_distance(
    prediction: tuple[np.ndarray, np.ndarray], reference: tuple[np.ndarray, np.ndarray]
) -> float | None:
    """Return the distance of two texts, each given as embeddings and weights; None if a text has no weight."""
    import ot

    if not prediction[1].any() or not reference[1].any():
        return None
    distances = ot.dist(prediction[0], reference[0], metric="euclidean")
    return float(ot.emd2(prediction[1], reference[1], distances))


# BLEURT ------------------------------------------------------------------------------------------------------------


def _compute_bleurt(predictions: Texts, references: References, options: Options) -> CorpusStatistics:
    """Mean of the model's rating of (reference, prediction), the largest over the references (Sellam 2020).

    The option model is a BLEURT checkpoint in transformers' format for sequence classification with one label, such as
    Elron/bleurt-base-512. BLEURT-20 is refused: transformers does not have its architecture.
    """
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options["model"])
    with LOADING:
        model = AutoModelForSequenceClassification.from_pretrained(options["model"]).float().to(_device()).eval()
    if model.config.num_labels != 1:
        raise DeltuneError(f"{options['model']} has {model.config.num_labels} labels: a BLEURT checkpoint has one.")
    unread = _refuse_unreadable(tokenizer, references, options["model"])
    repeated, flat_references = _repeat_predictions(predictions, references), _flatten(references)
    limit = _longest(tokenizer, model)
    values: list[float] = []
    for start in range(0, len(flat_references), BATCH_SIZE):
        pair = (flat_references[start : start + BATCH_SIZE], repeated[start : start + BATCH_SIZE])
        batch = tokenizer(
            *pair, padding=True, padding_side="right", truncation=True, max_length=limit, return_tensors="pt"
        )
        with torch.no_grad():
            values += model(**batch.to(model.device)).logits[:, 0].tolist()
    return mean_statistics(reduce_references(values, references, "max"), {**options, "references": "max", **unread})


_MODEL_METRIC: dict[str, Any] = {"input_type": "texts", "extra": "metrics", "unmet_requirement": _missing_model}

MODEL_METRICS: dict[str, Metric] = {
    "bertscore": Metric(
        compute=_compute_bertscore,
        options={"model": None, "layers": None, "idf": False},
        range=(-1.0, 1.0),
        packages=("bert-score", "transformers"),
        **_MODEL_METRIC,
    ),
    "moverscore": Metric(
        compute=_compute_moverscore,
        options={"model": None, "idf": "corpus", "form": "inverse"},
        range=(-1.0, 1.0),
        packages=("POT", "transformers"),
        **_MODEL_METRIC,
    ),
    "bleurt": Metric(
        compute=_compute_bleurt,
        options={"model": None},
        range=(float("-inf"), float("inf")),
        packages=("transformers",),
        **_MODEL_METRIC,
    ),
}
