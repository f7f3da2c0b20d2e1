"""Metrics that ask a model, given as an option (a folder or a hub id): BERTScore, MoverScore, BLEURT."""

from __future__ import annotations

import math
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..errors import DeltuneError
from .base import Measured, Metric, Options, mean_of, reduce_references

Texts = Sequence[str]
References = Sequence[Sequence[str]]


def _needs_model(options: Options) -> str | None:
    return None if options["model"] else "needs a model: give the option model (a folder or a hub id)"


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _flat(references: References) -> list[str]:
    return [reference for several in references for reference in several]


def _repeated(predictions: Texts, references: References) -> list[str]:
    """Each prediction once for each of its references."""
    return [prediction for prediction, several in zip(predictions, references, strict=True) for _ in several]


# BERTScore ---------------------------------------------------------------------------------------------------------


def _bertscore(predictions: Texts, references: References, options: Options) -> Measured:
    """Mean F1 of greedily matched token embeddings, the largest over the references (Zhang 2020), by bert-score.

    layers: the layer read, counted from 1; needed for a model that bert-score has no best layer for. idf: weights
    from all references. Not rescaled. An empty text scores 0, as bert-score has it.
    """
    from bert_score import BERTScorer
    from bert_score.utils import model2layers

    model, layers = options["model"], options["layers"]
    if layers is None and model not in model2layers:
        raise DeltuneError(f"bert-score knows no best layer of {model}: give the option layers, counted from 1.")
    true = _flat(references)
    sentences = true if options["idf"] else None
    scorer = BERTScorer(model_type=model, num_layers=layers, idf=options["idf"], idf_sents=sentences, device=_device())
    pairs = list(zip(_repeated(predictions, references), true, strict=True))
    # bert-score 0.3.13 gives an empty text to a method that tokenizers of transformers 5 lack.
    full = [i for i, (prediction, reference) in enumerate(pairs) if prediction.strip() and reference.strip()]
    values = [0.0] * len(pairs)
    if full:
        _, _, f1 = scorer.score([pairs[i][0] for i in full], [pairs[i][1] for i in full])
        for i, value in zip(full, f1.tolist(), strict=True):
            values[i] = value
    said = {"hash": scorer.hash, "rescaled": False, "references": "max"}
    return mean_of(reduce_references(values, references, "max"), said)


# MoverScore --------------------------------------------------------------------------------------------------------

BATCH = 64


def _moverscore(predictions: Texts, references: References, options: Options) -> Measured:
    """1 / (1 + d) of the earth mover's distance d between the words of both texts, mean over references (Zhao 2019).

    form: "inverse", as above and in the authors' moverscore_v2 of today, or "difference", its earlier 1 - d. Unigrams:
    embeddings of the last layer, brought to length 1; Euclidean distances; word pieces that continue a word (##) and
    punctuation left out. idf: "corpus", weights log((N+1)/(n+1)) from all predictions for predictions and all
    references for references, or "none", all 1. A text in which nothing has weight scores 0 (the script's flow is
    empty then, and that is 1).
    """
    from transformers import AutoModel, AutoTokenizer

    for name, known in (("idf", ("corpus", "none")), ("form", ("inverse", "difference"))):
        if options[name] not in known:
            raise DeltuneError(f"{name} is {' or '.join(known)}, not {options[name]!r}.")
    tokenizer = AutoTokenizer.from_pretrained(options["model"])
    if not any(token.startswith("##") for token in tokenizer.get_vocab()):
        raise DeltuneError(
            f"moverscore tells words by ## (WordPiece), which the tokenizer of {options['model']} lacks."
        )
    model = AutoModel.from_pretrained(options["model"]).float().to(_device()).eval()
    true = _flat(references)
    ours = list(_embedded(list(predictions), model, tokenizer, options["idf"]))
    theirs = _embedded(true, model, tokenizer, options["idf"])
    index = (i for i, several in enumerate(references) for _ in several)
    moved = [_moved(ours[i], reference) for i, reference in zip(index, theirs, strict=True)]
    values = [0.0 if d is None else 1 / (1 + d) if options["form"] == "inverse" else 1 - d for d in moved]
    said = {**options, "layer": "last", "ngram": 1, "subwords": "first", "references": "mean"}
    return mean_of(reduce_references(values, references, "mean"), said)


def _embedded(texts: list[str], model: Any, tokenizer: Any, idf: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each text (words, width) embeddings of length 1 and (words) weights of sum 1, or of sum 0 if all are 0."""
    import torch

    limit = min(tokenizer.model_max_length, model.config.max_position_embeddings)
    encoded = tokenizer(texts, truncation=True, max_length=limit)["input_ids"]
    seen = Counter(token for ids in encoded for token in set(ids))
    for start in range(0, len(texts), BATCH):
        these = encoded[start : start + BATCH]
        batch = tokenizer.pad({"input_ids": these}, return_tensors="pt").to(model.device)
        with torch.no_grad():
            hidden = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
        for ids, states in zip(these, hidden.double().cpu().numpy(), strict=True):
            tokens = tokenizer.convert_ids_to_tokens(ids)
            kept = [i for i, token in enumerate(tokens) if "##" not in token and token not in set(string.punctuation)]
            weights = [math.log((len(texts) + 1) / (seen[ids[i]] + 1)) if idf == "corpus" else 1.0 for i in kept]
            vectors = states[kept] / np.linalg.norm(states[kept], axis=1, keepdims=True)
            yield vectors, np.array(weights) / (sum(weights) or 1.0)


def _moved(ours: tuple[np.ndarray, np.ndarray], theirs: tuple[np.ndarray, np.ndarray]) -> float | None:
    """The distance, or None where a side has no weight."""
    import ot

    if not ours[1].any() or not theirs[1].any():
        return None
    return float(ot.emd2(ours[1], theirs[1], ot.dist(ours[0], theirs[0], metric="euclidean")))


# BLEURT ------------------------------------------------------------------------------------------------------------


def _bleurt(predictions: Texts, references: References, options: Options) -> Measured:
    """Mean of the model's rating of (reference, prediction), the largest over the references (Sellam 2020).

    model: a BLEURT checkpoint in transformers' format for sequence classification with one label (Elron/bleurt-base-512
    and its sisters); BLEURT-20 has an architecture of its own that transformers lacks, and is refused.
    """
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options["model"])
    model = AutoModelForSequenceClassification.from_pretrained(options["model"]).float().to(_device()).eval()
    if model.config.num_labels != 1:
        raise DeltuneError(f"{options['model']} has {model.config.num_labels} labels: a BLEURT checkpoint has one.")
    ours, true = _repeated(predictions, references), _flat(references)
    limit = min(tokenizer.model_max_length, model.config.max_position_embeddings)
    values: list[float] = []
    for start in range(0, len(true), BATCH):
        pair = (true[start : start + BATCH], ours[start : start + BATCH])
        batch = tokenizer(*pair, padding=True, truncation="longest_first", max_length=limit, return_tensors="pt")
        with torch.no_grad():
            values += model(**batch.to(model.device)).logits[:, 0].tolist()
    return mean_of(reduce_references(values, references, "max"), {**options, "references": "max"})


_MODEL: dict[str, Any] = {"kind": "texts", "extra": "metrics", "lacks": _needs_model}

MODELS: dict[str, Metric] = {
    "bertscore": Metric(
        measure=_bertscore,
        options={"model": None, "layers": None, "idf": False},
        range=(-1.0, 1.0),
        packages=("bert-score", "transformers"),
        **_MODEL,
    ),
    "moverscore": Metric(
        measure=_moverscore,
        options={"model": None, "idf": "corpus", "form": "inverse"},
        range=(-1.0, 1.0),
        packages=("POT", "transformers"),
        **_MODEL,
    ),
    "bleurt": Metric(
        measure=_bleurt,
        options={"model": None},
        range=(float("-inf"), float("inf")),
        packages=("transformers",),
        **_MODEL,
    ),
}
