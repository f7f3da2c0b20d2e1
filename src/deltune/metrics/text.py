"""BLEU, TER and chrF by sacreBLEU, and ROUGE by three packages, each under a name of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from .base import NON_NEGATIVE, CorpusStatistics, Metric, Options, mean_statistics
from .captions import TOKENIZER_OPTION, missing_tokenizer, tokenize_pairs

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


def _sacrebleu_metric(make_metric: Callable[[Options], Any]) -> Callable[..., CorpusStatistics]:
    """A corpus score of sacreBLEU, from its own statistics of each example and with its own signature."""

    def measure(predictions: Texts, references: References, options: Options) -> CorpusStatistics:
        metric = make_metric(options)
        streams = list(zip_longest(*references))  # None where an example has fewer references than another
        # Two private methods of sacreBLEU: its public ones return only sums, and for chrF not even those.
        rows = np.array(metric._extract_corpus_statistics(list(predictions), streams), dtype=float)
        signature = dict(part.split(":", 1) for part in str(metric.get_signature()).split("|"))

        def compute_score(rows: np.ndarray) -> float:
            return float(metric._compute_score_from_stats(rows.sum(axis=0)).score)

        return CorpusStatistics(rows, compute_score, signature)

    return measure


def _rouge_score_metric(name: str) -> Callable[..., CorpusStatistics]:
    """100 · mean over examples of the largest F1 over the references, by rouge-score (ROUGE-1.5.5 in Python).

    rougeL takes the whole text as one sentence; rougeLsum takes each line as a sentence.
    """

    def measure(predictions: Texts, references: References, options: Options) -> CorpusStatistics:
        from rouge_score.rouge_scorer import RougeScorer

        scorer = RougeScorer([name], use_stemmer=options["stemmer"])
        pairs = zip(predictions, references, strict=True)
        values = [100 * scorer.score_multi(accepted, prediction)[name].fmeasure for prediction, accepted in pairs]
        signature = {**options, "references": "max", "aggregate": "mean"}
        return mean_statistics(values, signature | ({"sentences": "lines"} if name == "rougeLsum" else {}))

    return measure


def _rouge_package_metric(name: str) -> Callable[..., CorpusStatistics]:
    """100 · mean over examples of the largest F1 over the references, by P. Tardy's package rouge.

    It counts every n-gram once (exclusive) and splits sentences at full stops; its ROUGE-L is that of summaries, summed
    over the reference's sentences. A text of nothing but full stops, which the package refuses, scores 0.
    """

    def measure(predictions: Texts, references: References, options: Options) -> CorpusStatistics:
        from rouge import Rouge

        scorer = Rouge([name], exclusive=options["exclusive"])

        def f1(prediction: str, reference: str) -> float:
            if not (prediction.replace(".", "") and reference.replace(".", "")):
                return 0.0
            return 100 * float(scorer.get_scores(prediction, reference)[0][name]["f"])

        pairs = zip(predictions, references, strict=True)
        values = [max(f1(prediction, reference) for reference in accepted) for prediction, accepted in pairs]
        return mean_statistics(values, {**options, "references": "max", "empty": 0})

    return measure


def _compute_rouge_coco(predictions: Texts, references: References, options: Options) -> CorpusStatistics:
    """100 · mean of F (β = 1.2) of the largest precision and recall over the references: ROUGE-L of COCO and E2E."""
    from pycocoevalcap.rouge.rouge import Rouge

    pairs = zip(*tokenize_pairs(predictions, references, options), strict=True)
    scorer = Rouge()
    values = [100 * float(scorer.calc_score([prediction], accepted)) for prediction, accepted in pairs]
    return mean_statistics(values, {**options, "beta": scorer.beta})


PERCENT = (0.0, 100.0)
_SACREBLEU_METRIC: dict[str, Any] = {"input_type": "texts", "packages": ("sacrebleu",), "extra": "metrics"}
_ROUGE_METRIC: dict[str, Any] = {"input_type": "texts", "range": PERCENT, "extra": "metrics"}
_ROUGE_SCORE_METRIC: dict[str, Any] = {**_ROUGE_METRIC, "options": {"stemmer": True}, "packages": ("rouge-score",)}
_ROUGE_PACKAGE_METRIC: dict[str, Any] = {**_ROUGE_METRIC, "options": {"exclusive": True}, "packages": ("rouge",)}

TEXT_METRICS: dict[str, Metric] = {
    "bleu": Metric(
        compute=_sacrebleu_metric(_bleu),
        options={"lowercase": False, "tokenize": "13a", "smooth": "exp"},
        range=PERCENT,
        **_SACREBLEU_METRIC,
    ),
    "ter": Metric(
        compute=_sacrebleu_metric(_ter),
        options={"normalized": False, "no_punct": False, "asian_support": False, "case_sensitive": False},
        better="lower",
        range=NON_NEGATIVE,
        **_SACREBLEU_METRIC,
    ),
    "chrf": Metric(
        compute=_sacrebleu_metric(_chrf),
        options={"char_order": 6, "word_order": 0, "beta": 2, "lowercase": False, "whitespace": False},
        range=PERCENT,
        **_SACREBLEU_METRIC,
    ),
    "rouge1": Metric(compute=_rouge_score_metric("rouge1"), **_ROUGE_SCORE_METRIC),
    "rouge2": Metric(compute=_rouge_score_metric("rouge2"), **_ROUGE_SCORE_METRIC),
    "rougeL": Metric(compute=_rouge_score_metric("rougeL"), **_ROUGE_SCORE_METRIC),
    "rougeLsum": Metric(compute=_rouge_score_metric("rougeLsum"), **_ROUGE_SCORE_METRIC),
    "rouge1_pltrdy": Metric(compute=_rouge_package_metric("rouge-1"), **_ROUGE_PACKAGE_METRIC),
    "rouge2_pltrdy": Metric(compute=_rouge_package_metric("rouge-2"), **_ROUGE_PACKAGE_METRIC),
    "rougeL_pltrdy": Metric(compute=_rouge_package_metric("rouge-l"), **_ROUGE_PACKAGE_METRIC),
    "rougeL_coco": Metric(
        compute=_compute_rouge_coco,
        options=TOKENIZER_OPTION,
        packages=("pycocoevalcap", "sacrebleu"),
        unmet_requirement=missing_tokenizer,
        **_ROUGE_METRIC,
    ),
}
