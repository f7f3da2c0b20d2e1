"""NIST, METEOR and CIDEr, as the script of the E2E challenge (e2e-metrics) computes them, and the tokenizer of COCO.

NIST is our own code, since no maintained package computes the numbers of mteval-v13a. METEOR runs its authors' Java
program: the ports to Python give other numbers.
"""

from __future__ import annotations

import atexit
import math
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DeltuneError
from .base import NON_NEGATIVE, CorpusStatistics, Metric, Options, mean_statistics

Texts = Sequence[str]
References = Sequence[Sequence[str]]

# tokenizers --------------------------------------------------------------------------------------------------------

TOKENIZERS = {
    "ptb": "Stanford's, in lower case and without punctuation, as COCO and E2E use it; needs Java",
    "13a": "mteval's, as in sacreBLEU, in lower case and with punctuation",
    "none": "the text as it is, with single blanks",
}
TOKENIZER_OPTION: Mapping[str, Any] = {"tokenizer": "ptb"}


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
    """Return the words of a text by mteval-v13a's tokenizer, in lower case."""
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    words: list[str] = Tokenizer13a()(text.lower()).split()
    return words


def tokenize_pairs(predictions: Texts, references: References, options: Options) -> tuple[list[str], list[list[str]]]:
    """Tokenize predictions and references.

    Args:
        predictions: One for each example.
        references: One or more for each example.
        options: The option `tokenizer` is a key of `TOKENIZERS`.

    Returns:
        Both, with a blank between tokens.

    Raises:
        DeltuneError: The tokenizer is unknown, or Stanford's fails.
    """
    name = options["tokenizer"]
    if name not in TOKENIZERS:
        raise DeltuneError(f"tokenizer must be one of {', '.join(TOKENIZERS)}, not {name!r}.")
    flat = [" ".join(text.split()) for text in (*predictions, *(r for accepted in references for r in accepted))]
    if name == "ptb":
        flat = _ptb_tokenize(tuple(flat))
    elif name == "13a":
        flat = [" ".join(tokenize_13a(text)) for text in flat]
    rest = iter(flat[len(predictions) :])
    return flat[: len(predictions)], [[next(rest) for _ in accepted] for accepted in references]


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
    references_words = [
        [tokenize_13a(reference) for reference in accepted if reference.strip()] for accepted in references
    ]
    counts: Counter[tuple[str, ...]] = Counter()
    for accepted in references_words:
        for words in accepted:
            counts.update(_ngrams(words))
            counts[()] += len(words)
    rows = []
    for prediction, accepted in zip(predictions, references_words, strict=True):
        words = tokenize_13a(prediction)
        reference_ngrams: Counter[tuple[str, ...]] = Counter()
        for reference in accepted:
            reference_ngrams |= _ngrams(reference)
        info = [0.0] * NIST_ORDER
        for gram, shared in (_ngrams(words) & reference_ngrams).items():
            info[len(gram) - 1] += shared * math.log2(counts[gram[:-1]] / counts[gram])
        sizes = [max(len(words) - n, 0) for n in range(NIST_ORDER)]
        rows.append((*info, *sizes, sum(map(len, accepted)), len(accepted)))

    def compute_score(rows: np.ndarray) -> float:
        total = rows.sum(axis=0)
        gain = (total[:NIST_ORDER] / np.maximum(total[NIST_ORDER:-2], 1)).sum()
        ratio = min(1.0, total[NIST_ORDER] / (total[-2] / (total[-1] / len(rows))))
        return float(gain * math.exp(-NIST_BETA * math.log(ratio) ** 2)) if ratio > 0 else 0.0

    signature = {"algorithm": "mteval-v13a of e2e-metrics", "order": NIST_ORDER, "case": "lower", "tokenizer": "13a"}
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
    """METEOR 1.5 for English by its authors' jar (-l en -norm), which pycocoevalcap contains; see `_meteor_score`."""
    from pycocoevalcap.meteor.meteor import METEOR_JAR

    pairs = zip(*tokenize_pairs(predictions, references, options), strict=True)
    jar = _meteor_jar()
    try:
        rows = [_jar_statistics(jar, prediction, accepted) for prediction, accepted in pairs]
    except (OSError, DeltuneError):
        _stop_jar(jar)
        _meteor_jar.cache_clear()  # so that the next scoring starts a new process
        raise
    signature = {**options, "jar": METEOR_JAR, "language": "en", "norm": True}
    return CorpusStatistics(np.array(rows), _meteor_score, signature)


@cache
def _meteor_jar() -> subprocess.Popen[str]:
    """Start the jar once for this process: it takes seconds to start, and a run scores after every epoch."""
    from pycocoevalcap.meteor.meteor import METEOR_JAR

    command = ["java", "-Dfile.encoding=UTF-8", "-Dstdout.encoding=UTF-8", "-Xmx2G", "-jar", METEOR_JAR]
    command += ["-", "-", "-stdio", "-l", "en", "-norm"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    jar = subprocess.Popen(command, cwd=_pycocoevalcap_file("meteor"), encoding="utf-8", bufsize=1, **pipes)
    atexit.register(_stop_jar, jar)
    return jar


def _stop_jar(jar: subprocess.Popen[str]) -> None:
    """Kill the jar, which has nothing to finish."""
    jar.kill()
    jar.communicate()


def _jar_statistics(jar: subprocess.Popen[str], prediction: str, references: Texts) -> list[float]:
    """Return the jar's statistics of an example."""
    assert jar.stdin and jar.stdout
    texts = (text.replace("|||", "").replace("  ", " ") for text in (*references, prediction))
    jar.stdin.write(" ||| ".join(["SCORE", *texts]) + "\n")
    jar.stdin.flush()
    answer = jar.stdout.readline().split()
    if len(answer) != 23:
        raise DeltuneError(f"METEOR's jar answered {' '.join(answer)!r}, not with 23 statistics.")
    row = [float(number) for number in answer]
    if row[20] == 1 and row[21:23] == row[0:2]:
        row[20] = 0.0
    return row


# CIDEr -------------------------------------------------------------------------------------------------------------


def _compute_cider(predictions: Texts, references: References, options: Options) -> CorpusStatistics:
    """CIDEr-D, the mean over examples, from 0 to 10, with document frequencies of all references (Vedantam 2015)."""
    from pycocoevalcap.cider.cider import Cider

    tokenized, tokenized_references = tokenize_pairs(predictions, references, options)
    scorer = Cider()
    _, values = scorer.compute_score(dict(enumerate(tokenized_references)), {i: [p] for i, p in enumerate(tokenized)})
    return mean_statistics(list(values), {**options, "order": 4, "sigma": 6.0, "frequencies": "all references"})


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
