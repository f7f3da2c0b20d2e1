"""Metrics of generated text: BLEU, TER, chrF, ROUGE, METEOR and CIDEr by packages or Java; NIST by our own code.

ROUGE is computed by three packages, each under a name of its own. NIST, METEOR, CIDEr and the tokenizer of COCO are
those of the script e2e-metrics. NIST is our own code, since no maintained package computes the numbers of
mteval-v13a. METEOR runs its authors' Java program: the ports to Python give other numbers.
"""

from __future__ import annotations

import math
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DeltuneError
from .base import NON_NEGATIVE, CorpusStatistics, Metric, Options, mean_statistics
from .words import (
    CannotScoreError,
    is_ascii_worded,
    is_latin,
    missing_mecab,
    refuse_downloads,
    refuse_rows,
    sacrebleu_tokenizer,
    separate_characters,
    unspaced_signature,
    words,
)

Texts = Sequence[str]
References = Sequence[Sequence[str]]

# tokenizers --------------------------------------------------------------------------------------------------------

TOKENIZERS = {
    "ptb": "Stanford's, in lower case and without punctuation, as COCO and E2E use it; needs Java",
    "13a": "mteval's, as in sacreBLEU, in lower case and with punctuation",
    "none": "the text as it is, with single blanks",
}
TOKENIZER_OPTION: Mapping[str, Any] = {"tokenizer": "ptb"}


def _all_texts(predictions: Texts, references: References) -> list[str]:
    return [*predictions, *(reference for accepted in references for reference in accepted)]


def _missing_java() -> str | None:
    return None if shutil.which("java") else "needs Java: there is no java on the PATH"


def missing_tokenizer(options: Options) -> str | None:
    """Return what the tokenizer of the options needs and is missing, or None; for `Metric.unmet_requirement`."""
    reason = _missing_java() if options["tokenizer"] == "ptb" else None
    return f"{reason} (the option tokenizer='13a' does without it, and gives another number)" if reason else None


def _pycocoevalcap_file(*parts: str) -> Path:
    """Return the path of a file of the package pycocoevalcap."""
    spec = find_spec("pycocoevalcap")
    assert spec and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]).joinpath(*parts)


@lru_cache(maxsize=2)  # so that METEOR, ROUGE-L and CIDEr of the same texts start Java once
def _ptb_tokenize(texts: tuple[str, ...]) -> list[str]:
    from pycocoevalcap.tokenizer.ptbtokenizer import PUNCTUATIONS, STANFORD_CORENLP_3_4_1_JAR

    # pycocoevalcap's own class writes its input beside its code, which may be read-only.
    jar = _pycocoevalcap_file("tokenizer", STANFORD_CORENLP_3_4_1_JAR)
    command = ["java", "-Dfile.encoding=UTF-8", "-Dstdout.encoding=UTF-8", "-cp", str(jar)]
    command += ["edu.stanford.nlp.process.PTBTokenizer", "-encoding", "UTF-8", "-preserveLines", "-lowerCase"]
    lines_in = "".join(f"{text}\n" for text in texts)
    process = subprocess.run(command, input=lines_in, capture_output=True, encoding="utf-8")
    lines = process.stdout.split("\n")[:-1]
    if process.returncode or len(lines) != len(texts):
        raise DeltuneError(f"Stanford's tokenizer gave {len(lines)} of {len(texts)} lines: {process.stderr[-300:]}")
    return [" ".join(word for word in line.split() if word not in PUNCTUATIONS) for line in lines]


def tokenize_13a(text: str) -> list[str]:
    """Return the words of a text by mteval-v13a's tokenizer, in lower case; characters of unspaced scripts are some."""
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    tokens: list[str] = Tokenizer13a()(separate_characters(text.lower())).split()
    return tokens


def tokenize_pairs(predictions: Texts, references: References, options: Options) -> tuple[list[str], list[list[str]]]:
    """Tokenize predictions and references."""
    name = options["tokenizer"]
    if name not in TOKENIZERS:
        raise DeltuneError(f"tokenizer must be one of {', '.join(TOKENIZERS)}, not {name!r}.")
    flat = [" ".join(text.split()) for text in _all_texts(predictions, references)]
    if name == "ptb":
        flat = _ptb_tokenize(tuple(" ".join(separate_characters(text).split()) for text in flat))
    elif name == "13a":
        flat = [" ".join(tokenize_13a(text)) for text in flat]
    tokens_of = dict(zip(_all_texts(predictions, references), flat, strict=True))
    refuse_rows(references, tokens_of.get)
    return flat[: len(predictions)], [[tokens_of[text] for text in accepted] for accepted in references]


def _tokenizer_signature(predictions: Texts, references: References, options: Options) -> dict[str, Any]:
    """Return what a signature says of `tokenize_pairs`."""
    separated = options["tokenizer"] != "none"
    return {**options, **(unspaced_signature(_all_texts(predictions, references)) if separated else {})}


# NIST --------------------------------------------------------------------------------------------------------------

NIST_ORDER = 5
NIST_BETA = -math.log(0.5) / math.log(1.5) ** 2  # the brevity penalty is 1/2 at two thirds of the length


def _ngrams(words: Sequence[str]) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + n]) for n in range(1, NIST_ORDER + 1) for i in range(len(words) - n + 1))


def _compute_nist(predictions: Texts, references: References, options: Options) -> CorpusStatistics:
    """Σ_n Σ info(shared n-grams) / Σ n-grams of predictions · exp(-β ln² min(1, L/L̄)), n = 1…5 (Doddington 2002).

    info(w1…wn) = log2(count(w1…wn-1) / count(w1…wn)) over all references; L: words of predictions; L̄: words of the
    references divided by the mean number of references of an example, as in mteval-v13a of e2e-metrics (its version in
    Python averages within each example, which differs where examples have different numbers of references).

    Statistics of an example: information and n-grams for each n, words of its references, their number.
    """
    refuse_rows(references, str.strip)
    references_words = [
        [tokenize_13a(reference) for reference in accepted if reference.strip()] for accepted in references
    ]
    counts: Counter[tuple[str, ...]] = Counter()
    for accepted in references_words:
        for reference in accepted:
            counts.update(_ngrams(reference))
            counts[()] += len(reference)
    rows = []
    for prediction, accepted in zip(predictions, references_words, strict=True):
        predicted = tokenize_13a(prediction)
        reference_ngrams: Counter[tuple[str, ...]] = Counter()
        for reference in accepted:
            reference_ngrams |= _ngrams(reference)
        info = [0.0] * NIST_ORDER
        for gram, shared in (_ngrams(predicted) & reference_ngrams).items():
            info[len(gram) - 1] += shared * math.log2(counts[gram[:-1]] / counts[gram])
        sizes = [max(len(predicted) - n, 0) for n in range(NIST_ORDER)]
        rows.append((*info, *sizes, sum(map(len, accepted)), len(accepted)))

    def compute_score(rows: np.ndarray) -> float:
        total = rows.sum(axis=0)
        gain = (total[:NIST_ORDER] / np.maximum(total[NIST_ORDER:-2], 1)).sum()
        ratio = min(1.0, total[NIST_ORDER] / (total[-2] / (total[-1] / len(rows))))
        return float(gain * math.exp(-NIST_BETA * math.log(ratio) ** 2)) if ratio > 0 else 0.0

    signature = {"algorithm": "mteval-v13a of e2e-metrics", "order": NIST_ORDER, "case": "lower", "tokenizer": "13a"}
    signature |= unspaced_signature(_all_texts(predictions, references))
    return CorpusStatistics(np.array(rows), compute_score, {**signature, "info": "all references"})


# METEOR ------------------------------------------------------------------------------------------------------------

METEOR_ALPHA, METEOR_BETA, METEOR_GAMMA, METEOR_DELTA = 0.85, 0.2, 0.6, 0.75
METEOR_WEIGHTS = np.array([1.0, 0.6, 0.8, 0.6])
"""Weights of exact, stem, synonym and paraphrase matches; like the numbers above METEOR 1.5's for ranking English."""


def _meteor_score(rows: np.ndarray) -> float:
    """F (1 - γ (chunks / matches)^β), F = P R / (α P + (1-α) R), of statistics summed over examples (Denkowski 2014).

    P, R: matches divided by words, with stages weighted by METEOR_WEIGHTS, content words by δ and function words by
    1-δ. The 23 numbers of the jar are the words and function words of both sides, four numbers for each stage, the
    chunks, and the matched words of both sides. The single chunk of a text that matches as a whole counts as none, in
    sums too.
    """
    total = rows.sum(axis=0)
    lengths, functions, chunks, matched = total[0:2], total[2:4], total[20], total[21:23]
    stages = total[4:20].reshape(4, 2, 2)  # stage, content or function, prediction or reference
    hits = METEOR_WEIGHTS @ (METEOR_DELTA * stages[:, 0] + (1 - METEOR_DELTA) * stages[:, 1])
    if not hits.all():
        return 0.0
    precision, recall = hits / (METEOR_DELTA * (lengths - functions) + (1 - METEOR_DELTA) * functions)
    mean = precision * recall / (METEOR_ALPHA * precision + (1 - METEOR_ALPHA) * recall)
    return float(mean * (1 - METEOR_GAMMA * (chunks / matched.mean()) ** METEOR_BETA))


def _compute_meteor(predictions: Texts, references: References, options: Options) -> CorpusStatistics:
    """METEOR 1.5 for English by its authors' jar (-l en -norm), which pycocoevalcap contains; see `_meteor_score`.

    References none of which has Latin letters are refused: stems, synonyms, function words and weights are those
    of English.
    """
    from pycocoevalcap.meteor.meteor import METEOR_JAR

    problem = "are not in Latin letters, and METEOR is English here (chrf reads every script)"
    unread = refuse_rows(references, is_latin, problem)
    rows = _jar_statistics(*tokenize_pairs(predictions, references, options))
    signature = _tokenizer_signature(predictions, references, options)
    signature |= {"jar": METEOR_JAR, "language": "en", "norm": True, **unread}
    return CorpusStatistics(np.array(rows), _meteor_score, signature)


def _jar_statistics(predictions: Texts, references: References) -> list[list[float]]:
    """Return the jar's statistics of examples, 23 numbers each."""
    from pycocoevalcap.meteor.meteor import METEOR_JAR

    command = ["java", "-Dfile.encoding=UTF-8", "-Dstdout.encoding=UTF-8", "-Xmx2G", "-jar", METEOR_JAR]
    command += ["-", "-", "-stdio", "-l", "en", "-norm"]
    pairs = zip(predictions, references, strict=True)
    texts = [[text.replace("|||", "").replace("  ", " ") for text in (*accepted, one)] for one, accepted in pairs]
    lines = "".join(" ||| ".join(["SCORE", *some]) + "\n" for some in texts)
    folder = _pycocoevalcap_file("meteor")
    answer = subprocess.run(command, input=lines, capture_output=True, encoding="utf-8", cwd=folder).stdout
    rows = [[float(number) for number in line.split()] for line in answer.splitlines()]
    if len(rows) != len(texts) or {*map(len, rows)} != {23}:
        raise DeltuneError(f"METEOR's jar answered {answer[:200]!r}, not with 23 statistics of {len(texts)} examples.")
    for row in rows:
        if row[20] == 1 and row[21:23] == row[0:2]:
            row[20] = 0.0
    return rows


# CIDEr -------------------------------------------------------------------------------------------------------------


def _compute_cider(predictions: Texts, references: References, options: Options) -> CorpusStatistics:
    """CIDEr-D, the mean over examples, from 0 to 10, with document frequencies of all references (Vedantam 2015)."""
    from pycocoevalcap.cider.cider import Cider

    tokenized, tokenized_references = tokenize_pairs(predictions, references, options)
    if len(references) < 2:
        raise CannotScoreError("it needs at least two examples: words that all examples have weigh nothing")
    scorer = Cider()
    _, values = scorer.compute_score(dict(enumerate(tokenized_references)), {i: [p] for i, p in enumerate(tokenized)})
    signature = _tokenizer_signature(predictions, references, options)
    return mean_statistics(list(values), {**signature, "order": 4, "sigma": 6.0, "frequencies": "all references"})


_COCO_METRIC: dict[str, Any] = {"input_type": "texts", "packages": ("pycocoevalcap", "sacrebleu"), "extra": "metrics"}

CAPTION_METRICS: dict[str, Metric] = {
    "nist": Metric("texts", _compute_nist, range=NON_NEGATIVE, packages=("sacrebleu",), extra="metrics"),
    "meteor": Metric(
        compute=_compute_meteor,
        options=TOKENIZER_OPTION,
        unmet_requirement=lambda options: _missing_java(),
        **_COCO_METRIC,
    ),
    "cider": Metric(
        compute=_compute_cider,
        options=TOKENIZER_OPTION,
        range=(0.0, 10.0),
        unmet_requirement=missing_tokenizer,
        **_COCO_METRIC,
    ),
}


def _bleu(options: Options) -> Any:
    from sacrebleu.metrics.bleu import BLEU

    name = "13a" if options["tokenize"] == "auto" else options["tokenize"]
    sacrebleu_tokenizer(name)
    return BLEU(lowercase=options["lowercase"], tokenize=name, smooth_method=options["smooth"])


def _refuse_short_references(metric: Any, references: References) -> None:
    """Refuse BLEU where no reference has as many words as its longest n-grams: identical texts would score 0."""
    order = metric.max_ngram_order
    if not any(len(metric.tokenizer(text).split()) >= order for accepted in references for text in accepted):
        raise CannotScoreError(
            f"it counts runs of up to {order} words, and no reference has {order} words; chrf, exact and rougeL "
            "measure short texts"
        )


def _sacrebleu_metric(name: str) -> Callable[..., CorpusStatistics]:
    """A corpus score of sacreBLEU, from its own statistics of each example and with its own signature.

    Word by word, characters of scripts without blanks are words: in TER, and in BLEU unless a tokenizer is given.
    """

    def measure(predictions: Texts, references: References, options: Options) -> CorpusStatistics:
        from sacrebleu.metrics import METRICS

        from ...compat import sacrebleu_score, sacrebleu_statistics

        separated: dict[str, str] = {}
        with refuse_downloads(options.get("tokenize")):
            metric = _bleu(options) if name == "BLEU" else METRICS[name](**options)
        refuse_rows(references, str.strip)
        if options.get("tokenize", "auto") == "auto" and not isinstance(options.get("char_order"), int):
            separated = unspaced_signature(_all_texts(predictions, references))
            predictions = [separate_characters(text) for text in predictions]
            references = [[separate_characters(text) for text in accepted] for accepted in references]
        if "tokenize" in options:
            _refuse_short_references(metric, references)
        streams = list(zip_longest(*references))  # None where an example has fewer references than another
        rows = np.array(sacrebleu_statistics(metric, list(predictions), streams), dtype=float)
        signature = dict(part.split(":", 1) for part in str(metric.get_signature()).split("|")) | separated

        def compute_score(rows: np.ndarray) -> float:
            return sacrebleu_score(metric, rows.sum(axis=0))

        return CorpusStatistics(rows, compute_score, signature)

    return measure


def _rouge_score_metric(name: str) -> Callable[..., CorpusStatistics]:
    """100 · mean over examples of the largest F1 over the references, by rouge-score (ROUGE-1.5.5 in Python).

    rougeL takes the whole text as one sentence; rougeLsum takes each line as a sentence. Words are split by
    `words.words`, in ASCII text as rouge-score splits them. The option tokenizer names another: "rouge-score", which
    reads [a-z0-9] alone, or one of sacreBLEU's, in lower case and without stems.
    """

    def measure(predictions: Texts, references: References, options: Options) -> CorpusStatistics:
        from rouge_score.rouge_scorer import RougeScorer

        tokenizer = _RougeTokenizer(options["tokenizer"], options["stemmer"])
        unread = refuse_rows(references, tokenizer.tokenize)
        if name == "rouge2":
            _refuse_single_words(references, tokenizer.tokenize)
        scorer = RougeScorer([name], tokenizer=tokenizer)
        pairs = zip(predictions, references, strict=True)
        values = [100 * scorer.score_multi(accepted, prediction)[name].fmeasure for prediction, accepted in pairs]
        signature = {**options, **tokenizer.signature(_all_texts(predictions, references))}
        signature |= {"references": "max", "aggregate": "mean", **unread}
        return mean_statistics(values, signature | ({"sentences": "lines"} if name == "rougeLsum" else {}))

    return measure


def _refuse_single_words(references: References, tokenize: Callable[[str], list[str]]) -> None:
    """Refuse ROUGE-2 where no reference has two words."""
    refuse_rows(
        references,
        lambda text: len(tokenize(text)) > 1,
        "have a single word as reference, and ROUGE-2 counts pairs (rouge1 counts words)",
    )


class _RougeTokenizer:
    """Tokenizes for rouge-score by its own rules, by `words.words`, or by a tokenizer of sacreBLEU."""

    def __init__(self, name: str, stemmer: bool) -> None:
        from rouge_score.tokenizers import DefaultTokenizer

        self.name, self.own = name, DefaultTokenizer(stemmer)
        self.split = None if name in ("auto", "rouge-score") else sacrebleu_tokenizer(name)
        self.stemmer = stemmer and self.split is None

    def tokenize(self, text: str) -> list[str]:
        if self.split is not None:
            return self.split(text.lower()).split()
        if self.name == "rouge-score" or text.isascii():
            return list(self.own.tokenize(text))
        return [part for word in words(text) for part in (self.own.tokenize(word) if word.isascii() else [word])]

    def signature(self, texts: Texts) -> dict[str, Any]:
        """Return what the signature says of these texts: which words were read, and whether they were stemmed."""
        if self.name != "auto":
            return {"tokenizer": self.name, "stemmer": self.stemmer}
        read = "rouge-score" if all(map(is_ascii_worded, texts)) else "words"
        return {"tokenizer": read, **unspaced_signature(texts)}


def _missing_rouge_tokenizer(options: Options) -> str | None:
    return None if options["tokenizer"] in ("auto", "rouge-score") else missing_mecab(options["tokenizer"])


def _rouge_package_metric(name: str) -> Callable[..., CorpusStatistics]:
    """100 · mean over examples of the largest F1 over the references, by P. Tardy's package rouge.

    It counts every n-gram once (exclusive) and splits sentences at full stops; its ROUGE-L is meant for summaries,
    summed over the reference's sentences. A text of nothing but full stops, which the package refuses, scores 0.
    """

    def measure(predictions: Texts, references: References, options: Options) -> CorpusStatistics:
        from rouge import Rouge

        scorer = Rouge([name], exclusive=options["exclusive"])
        unread = refuse_rows(references, words)
        if name == "rouge-2":
            _refuse_single_words(references, lambda text: separate_characters(text).split())

        def f1(prediction: str, reference: str) -> float:
            if not (prediction.replace(".", "") and reference.replace(".", "")):
                return 0.0
            pair = separate_characters(prediction), separate_characters(reference)
            return 100 * float(scorer.get_scores(*pair)[0][name]["f"])

        pairs = zip(predictions, references, strict=True)
        values = [max(f1(prediction, reference) for reference in accepted) for prediction, accepted in pairs]
        signature = {**options, **unspaced_signature(_all_texts(predictions, references))}
        return mean_statistics(values, {**signature, "references": "max", "empty": 0, **unread})

    return measure


def _compute_rouge_coco(predictions: Texts, references: References, options: Options) -> CorpusStatistics:
    """100 · mean of F (β = 1.2) of the largest precision and recall over the references: ROUGE-L of COCO and E2E."""
    from pycocoevalcap.rouge.rouge import Rouge

    pairs = zip(*tokenize_pairs(predictions, references, options), strict=True)
    scorer = Rouge()
    values = [100 * float(scorer.calc_score([prediction], accepted)) for prediction, accepted in pairs]
    return mean_statistics(values, {**_tokenizer_signature(predictions, references, options), "beta": scorer.beta})


PERCENT = (0.0, 100.0)
_SACREBLEU_METRIC: dict[str, Any] = {"input_type": "texts", "packages": ("sacrebleu",), "extra": "metrics"}
_ROUGE_METRIC: dict[str, Any] = {"input_type": "texts", "range": PERCENT, "extra": "metrics"}
_ROUGE_SCORE_METRIC: dict[str, Any] = {
    **_ROUGE_METRIC,
    "options": {"stemmer": True, "tokenizer": "auto"},
    "packages": ("rouge-score",),
    "unmet_requirement": _missing_rouge_tokenizer,
}
_ROUGE_PACKAGE_METRIC: dict[str, Any] = {**_ROUGE_METRIC, "options": {"exclusive": True}, "packages": ("rouge",)}

TEXT_METRICS: dict[str, Metric] = {
    "bleu": Metric(
        compute=_sacrebleu_metric("BLEU"),
        options={"lowercase": False, "tokenize": "auto", "smooth": "exp"},
        range=PERCENT,
        unmet_requirement=lambda options: missing_mecab(options["tokenize"]),
        **_SACREBLEU_METRIC,
    ),
    "ter": Metric(
        compute=_sacrebleu_metric("TER"),
        options={"normalized": False, "no_punct": False, "asian_support": False, "case_sensitive": False},
        better="lower",
        range=NON_NEGATIVE,
        **_SACREBLEU_METRIC,
    ),
    "chrf": Metric(
        compute=_sacrebleu_metric("CHRF"),
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
