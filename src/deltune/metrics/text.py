"""Metrics of generated texts against references: BLEU, TER, chrF, and ROUGE by three packages, each under its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from .base import Measured, Metric, Options, mean_of
from .captions import ENDLESS, TOKENIZER, needs_tokenizer, tokenized

Texts = Sequence[str]
References = Sequence[Sequence[str]]


def _bleu(options: Options) -> Any:
    from sacrebleu.metrics.bleu import BLEU

    return BLEU(lowercase=options["lowercase"], tokenize=options["tokenize"], smooth_method=options["smooth"])


def _ter(options: Options) -> Any:
    from sacrebleu.metrics.ter import TER

    return TER(
        normalized=options["normalized"],
        no_punct=options["no_punct"],
        asian_support=options["asian_support"],
        case_sensitive=options["case_sensitive"],
    )


def _chrf(options: Options) -> Any:
    from sacrebleu.metrics.chrf import CHRF

    return CHRF(
        char_order=options["char_order"],
        word_order=options["word_order"],
        beta=options["beta"],
        lowercase=options["lowercase"],
        whitespace=options["whitespace"],
    )


def _sacrebleu(made: Callable[[Options], Any]) -> Callable[..., Measured]:
    """sacreBLEU's corpus score, from its own statistics of each example and with its own signature."""

    def measure(predictions: Texts, references: References, options: Options) -> Measured:
        metric = made(options)
        streams = list(zip_longest(*references))  # None where an example has fewer references than another
        # Two private methods of sacreBLEU: in public it gives sums alone, for chrF not even those.
        rows = np.array(metric._extract_corpus_statistics(list(predictions), streams), dtype=float)
        said = dict(part.split(":", 1) for part in str(metric.get_signature()).split("|"))
        return Measured(rows, lambda chosen: float(metric._compute_score_from_stats(chosen.sum(axis=0)).score), said)

    return measure


def _rouge(name: str) -> Callable[..., Measured]:
    """100 · mean over examples of the largest F1 over its references, by rouge-score (a ROUGE-1.5.5 in Python).

    rougeL: the whole text as one sentence. rougeLsum: sentences are the lines of a text.
    """

    def measure(predictions: Texts, references: References, options: Options) -> Measured:
        from rouge_score.rouge_scorer import RougeScorer

        scorer = RougeScorer([name], use_stemmer=options["stemmer"])
        pairs = zip(predictions, references, strict=True)
        found = [100 * scorer.score_multi(several, prediction)[name].fmeasure for prediction, several in pairs]
        said = {**options, "references": "max", "aggregate": "mean"}
        return mean_of(found, said | ({"sentences": "lines"} if name == "rougeLsum" else {}))

    return measure


def _rouge_pltrdy(name: str) -> Callable[..., Measured]:
    """100 · mean over examples of the largest F1 over its references, by the package rouge (P. Tardy's).

    It counts every n-gram once (exclusive) and cuts sentences at full stops; its ROUGE-L is that of a summary, summed
    over the reference's sentences. A text with nothing but full stops, which the package refuses, scores 0.
    """

    def measure(predictions: Texts, references: References, options: Options) -> Measured:
        from rouge import Rouge

        scorer = Rouge([name], exclusive=options["exclusive"])

        def one(prediction: str, reference: str) -> float:
            if not (prediction.replace(".", "") and reference.replace(".", "")):
                return 0.0
            return 100 * float(scorer.get_scores(prediction, reference)[0][name]["f"])

        pairs = zip(predictions, references, strict=True)
        found = [max(one(prediction, reference) for reference in several) for prediction, several in pairs]
        return mean_of(found, {**options, "references": "max", "empty": 0})

    return measure


def _rouge_coco(predictions: Texts, references: References, options: Options) -> Measured:
    """100 · mean of F (β = 1.2) of the largest precision and recall over the references: ROUGE-L of COCO and E2E."""
    from pycocoevalcap.rouge.rouge import Rouge

    predicted, true = tokenized(predictions, references, options)
    scorer = Rouge()
    found = [100 * float(scorer.calc_score([p], several)) for p, several in zip(predicted, true, strict=True)]
    return mean_of(found, {**options, "beta": scorer.beta})


PERCENT = (0.0, 100.0)
_SACREBLEU: dict[str, Any] = {"kind": "texts", "packages": ("sacrebleu",), "extra": "metrics"}
_ROUGE: dict[str, Any] = {"kind": "texts", "range": PERCENT, "extra": "metrics"}
_GOOGLE: dict[str, Any] = {**_ROUGE, "options": {"stemmer": True}, "packages": ("rouge-score",)}
_PLTRDY: dict[str, Any] = {**_ROUGE, "options": {"exclusive": True}, "packages": ("rouge",)}

TEXTS: dict[str, Metric] = {
    "bleu": Metric(
        measure=_sacrebleu(_bleu),
        options={"lowercase": False, "tokenize": "13a", "smooth": "exp"},
        range=PERCENT,
        **_SACREBLEU,
    ),
    "ter": Metric(
        measure=_sacrebleu(_ter),
        options={"normalized": False, "no_punct": False, "asian_support": False, "case_sensitive": False},
        better="lower",
        range=ENDLESS,
        **_SACREBLEU,
    ),
    "chrf": Metric(
        measure=_sacrebleu(_chrf),
        options={"char_order": 6, "word_order": 0, "beta": 2, "lowercase": False, "whitespace": False},
        range=PERCENT,
        **_SACREBLEU,
    ),
    "rouge1": Metric(measure=_rouge("rouge1"), **_GOOGLE),
    "rouge2": Metric(measure=_rouge("rouge2"), **_GOOGLE),
    "rougeL": Metric(measure=_rouge("rougeL"), **_GOOGLE),
    "rougeLsum": Metric(measure=_rouge("rougeLsum"), **_GOOGLE),
    "rouge1_pltrdy": Metric(measure=_rouge_pltrdy("rouge-1"), **_PLTRDY),
    "rouge2_pltrdy": Metric(measure=_rouge_pltrdy("rouge-2"), **_PLTRDY),
    "rougeL_pltrdy": Metric(measure=_rouge_pltrdy("rouge-l"), **_PLTRDY),
    "rougeL_coco": Metric(
        measure=_rouge_coco,
        options=TOKENIZER,
        packages=("pycocoevalcap", "sacrebleu"),
        lacks=needs_tokenizer,
        **_ROUGE,
    ),
}
