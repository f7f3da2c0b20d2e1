"""The other metrics of e2e-metrics, the script of the E2E challenge: NIST, METEOR, CIDEr, and the tokenizer of COCO."""

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
from typing import IO, Any

import numpy as np

from ..errors import DeltuneError
from .base import Measured, Metric, Options, mean_of

Texts = Sequence[str]
References = Sequence[Sequence[str]]

# tokenizers --------------------------------------------------------------------------------------------------------

TOKENIZERS = {
    "ptb": "Stanford's, lower case, punctuation left out, as COCO and E2E do; needs Java",
    "13a": "mteval's as in sacreBLEU, lower case, punctuation kept",
    "none": "the text as it is, blanks to one",
}
TOKENIZER: Mapping[str, Any] = {"tokenizer": "ptb"}


def _java() -> str | None:
    return None if shutil.which("java") else "needs Java: there is no java on the PATH"


def needs_tokenizer(options: Options) -> str | None:
    reason = _java() if options["tokenizer"] == "ptb" else None
    return f"{reason} (the option tokenizer='13a' does without, and gives another number)" if reason else None


def _inside(*parts: str) -> Path:
    """A file of pycocoevalcap."""
    spec = find_spec("pycocoevalcap")
    assert spec and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]).joinpath(*parts)


@lru_cache(maxsize=2)  # METEOR, ROUGE-L and CIDEr of the same texts start Java once
def _ptb(texts: tuple[str, ...]) -> list[str]:
    from pycocoevalcap.tokenizer.ptbtokenizer import PUNCTUATIONS, STANFORD_CORENLP_3_4_1_JAR

    # pycocoevalcap's own class writes its input beside its code, which may be read-only.
    jar = _inside("tokenizer", STANFORD_CORENLP_3_4_1_JAR)
    command = ["java", "-Dfile.encoding=UTF-8", "-Dstdout.encoding=UTF-8", "-cp", str(jar)]
    command += ["edu.stanford.nlp.process.PTBTokenizer", "-encoding", "UTF-8", "-preserveLines", "-lowerCase"]
    done = subprocess.run(command, input="".join(f"{text}\n" for text in texts), capture_output=True, encoding="utf-8")
    lines = done.stdout.split("\n")[:-1]
    if done.returncode or len(lines) != len(texts):
        raise DeltuneError(f"Stanford's tokenizer gave {len(lines)} of {len(texts)} lines: {done.stderr[-300:]}")
    return [" ".join(word for word in line.split() if word not in PUNCTUATIONS) for line in lines]


def words13a(text: str) -> list[str]:
    """Lower-case words of mteval-v13a's tokenizer."""
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    words: list[str] = Tokenizer13a()(text.lower()).split()
    return words


def tokenized(predictions: Texts, references: References, options: Options) -> tuple[list[str], list[list[str]]]:
    """Both with a blank between tokens, by the tokenizer of the options."""
    name = options["tokenizer"]
    if name not in TOKENIZERS:
        raise DeltuneError(f"tokenizer is {', '.join(TOKENIZERS)}, not {name!r}.")
    flat = [" ".join(text.split()) for text in (*predictions, *(r for several in references for r in several))]
    if name == "ptb":
        flat = _ptb(tuple(flat))
    elif name == "13a":
        flat = [" ".join(words13a(text)) for text in flat]
    rest = iter(flat[len(predictions) :])
    return flat[: len(predictions)], [[next(rest) for _ in several] for several in references]


# NIST --------------------------------------------------------------------------------------------------------------

ORDER = 5
BETA = -math.log(0.5) / math.log(1.5) ** 2  # the penalty is 1/2 at two thirds of the length


def _ngrams(words: Sequence[str]) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + n]) for n in range(1, ORDER + 1) for i in range(len(words) - n + 1))


def _nist(predictions: Texts, references: References, options: Options) -> Measured:
    """Σ_n Σ info(shared n-grams) / Σ n-grams of predictions · exp(-β ln² min(1, L/L̄)), n = 1…5 (Doddington 2002).

    info(w1…wn) = log2(count(w1…wn-1) / count(w1…wn)) over all references; L: words of predictions; L̄: words of the
    references over their mean number for an example, as mteval-v13a of e2e-metrics has it (its Python twin averages
    within each example, which differs where their numbers do). Statistics of an example: information and n-grams for
    each n, words of its references, their number.
    """
    true = [[words13a(reference) for reference in several if reference.strip()] for several in references]
    counts: Counter[tuple[str, ...]] = Counter()
    for several in true:
        for words in several:
            counts.update(_ngrams(words))
            counts[()] += len(words)
    rows = []
    for prediction, several in zip(predictions, true, strict=True):
        words = words13a(prediction)
        most: Counter[tuple[str, ...]] = Counter()
        for reference in several:
            most |= _ngrams(reference)
        info = [0.0] * ORDER
        for gram, shared in (_ngrams(words) & most).items():
            info[len(gram) - 1] += shared * math.log2(counts[gram[:-1]] / counts[gram])
        sizes = [max(len(words) - n, 0) for n in range(ORDER)]
        rows.append((*info, *sizes, sum(map(len, several)), len(several)))

    def reduce(chosen: np.ndarray) -> float:
        total = chosen.sum(axis=0)
        gain = (total[:ORDER] / np.maximum(total[ORDER:-2], 1)).sum()
        ratio = min(1.0, total[ORDER] / (total[-2] / (total[-1] / len(chosen))))
        return float(gain * math.exp(-BETA * math.log(ratio) ** 2)) if ratio > 0 else 0.0

    said = {"algorithm": "mteval-v13a of e2e-metrics", "order": ORDER, "case": "lower", "tokenizer": "13a"}
    return Measured(np.array(rows), reduce, {**said, "info": "all references"})


# METEOR ------------------------------------------------------------------------------------------------------------

ALPHA, METEOR_BETA, GAMMA, DELTA = 0.85, 0.2, 0.6, 0.75
WEIGHTS = np.array([1.0, 0.6, 0.8, 0.6])  # exact, stem, synonym, paraphrase; all: METEOR 1.5's for English ranking


def _meteor_of(rows: np.ndarray) -> float:
    """F (1 - γ (chunks / matches)^β), F = P R / (α P + (1-α) R), of statistics summed over examples (Denkowski 2014).

    P, R: matches over words, stages weighed by WEIGHTS, content words by δ, function words by 1-δ. The jar's 23
    numbers: words and function words of both sides, four numbers for each stage, chunks, matched words of both sides.
    The one chunk of a text that is matched whole counts as none, in sums too.
    """
    total = rows.sum(axis=0)
    lengths, functions, chunks, matched = total[0:2], total[2:4], total[20], total[21:23]
    stages = total[4:20].reshape(4, 2, 2)  # stage, content or function, prediction or reference
    hits = WEIGHTS @ (DELTA * stages[:, 0] + (1 - DELTA) * stages[:, 1])
    if not hits.all():
        return 0.0
    precision, recall = hits / (DELTA * (lengths - functions) + (1 - DELTA) * functions)
    mean = precision * recall / (ALPHA * precision + (1 - ALPHA) * recall)
    return float(mean * (1 - GAMMA * (chunks / matched.mean()) ** METEOR_BETA))


def _meteor(predictions: Texts, references: References, options: Options) -> Measured:
    """METEOR 1.5 for English by its authors' jar (-l en -norm), which pycocoevalcap brings; see `_meteor_of`."""
    from pycocoevalcap.meteor.meteor import METEOR_JAR

    predicted, true = tokenized(predictions, references, options)
    jar = _jar()
    try:
        rows = [_asked(jar.stdin, jar.stdout, [*several, p]) for p, several in zip(predicted, true, strict=True)]
    except (OSError, DeltuneError):
        _ended(jar)
        _jar.cache_clear()  # the next scoring begins with a new one
        raise
    return Measured(np.array(rows), _meteor_of, {**options, "jar": METEOR_JAR, "language": "en", "norm": True})


@cache
def _jar() -> subprocess.Popen[str]:
    """The jar at work, once in a process: it needs seconds to start, and a run scores after every epoch."""
    from pycocoevalcap.meteor.meteor import METEOR_JAR

    command = ["java", "-Dfile.encoding=UTF-8", "-Dstdout.encoding=UTF-8", "-Xmx2G", "-jar", METEOR_JAR]
    command += ["-", "-", "-stdio", "-l", "en", "-norm"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    jar = subprocess.Popen(command, cwd=_inside("meteor"), encoding="utf-8", bufsize=1, **pipes)
    atexit.register(_ended, jar)
    return jar


def _ended(jar: subprocess.Popen[str]) -> None:
    """It has no work of its own to finish."""
    jar.kill()
    jar.communicate()


def _asked(stdin: IO[str] | None, stdout: IO[str] | None, texts: Texts) -> list[float]:
    """The jar's statistics of an example: its references, then its prediction."""
    assert stdin and stdout
    stdin.write(" ||| ".join(["SCORE", *(text.replace("|||", "").replace("  ", " ") for text in texts)]) + "\n")
    stdin.flush()
    answer = stdout.readline().split()
    if len(answer) != 23:
        raise DeltuneError(f"METEOR's jar answered {' '.join(answer)!r}, not with 23 statistics.")
    row = [float(number) for number in answer]
    if row[20] == 1 and row[21:23] == row[0:2]:
        row[20] = 0.0
    return row


# CIDEr -------------------------------------------------------------------------------------------------------------


def _cider(predictions: Texts, references: References, options: Options) -> Measured:
    """CIDEr-D, the mean over examples, 0…10; document frequencies are of all references (Vedantam 2015)."""
    from pycocoevalcap.cider.cider import Cider

    predicted, true = tokenized(predictions, references, options)
    scorer = Cider()
    _, found = scorer.compute_score(dict(enumerate(true)), {i: [p] for i, p in enumerate(predicted)})
    return mean_of(list(found), {**options, "order": 4, "sigma": 6.0, "frequencies": "all references"})


ENDLESS = (0.0, float("inf"))
_COCO: dict[str, Any] = {"kind": "texts", "packages": ("pycocoevalcap", "sacrebleu"), "extra": "metrics"}

CAPTIONS: dict[str, Metric] = {
    "nist": Metric("texts", _nist, range=ENDLESS, packages=("sacrebleu",), extra="metrics"),
    "meteor": Metric(
        measure=_meteor,
        options=TOKENIZER,
        lacks=lambda options: _java(),
        **_COCO,
    ),
    "cider": Metric(measure=_cider, options=TOKENIZER, range=(0.0, 10.0), lacks=needs_tokenizer, **_COCO),
}
