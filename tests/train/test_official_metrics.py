"""Metrics against what the official programs printed for the same outputs (metrics/README.md) and published values."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from deltune.train.metrics.registry import compute_scores

HERE = Path(__file__).parent / "metrics"
OURS = json.loads((HERE / "outputs.json").read_text())
OFFICIAL = json.loads((HERE / "official.json").read_text())
LOWER = {"bleu": {"lowercase": True}}  # e2e-metrics counts without case

needs_java = pytest.mark.skipif(shutil.which("java") is None, reason="no Java")

ALL = [(row["prediction"], row["references"]) for row in OURS["texts"]]
TWO = [(p, accepted[:2]) for p, accepted in ALL if len(accepted) > 1]
ONE = [(p, accepted[0]) for p, accepted in ALL]
FLAT = [(p.replace("\n", " "), r.replace("\n", " ")) for p, r in ONE]
ANSWERS = [(row["prediction"], row["references"]) for row in OURS["answers"]]
TAGS = [(row["prediction"], row["reference"]) for row in OURS["tags"]]


def check(rows: list[tuple[Any, Any]], expected: dict[str, float], digits: int, options: dict | None = None) -> None:
    """Values equal to the printed ones, and the statistics of all examples give them too."""
    got = compute_scores(list(expected), [p for p, _ in rows], [r for _, r in rows], options=options)
    assert not got.omitted
    for name, value in expected.items():
        assert got[name].value == pytest.approx(value, abs=0.5001 * 10**-digits), name
        assert got[name].compute_score(got[name].statistics) == pytest.approx(got[name].value), name


@pytest.mark.slow
@needs_java
@pytest.mark.parametrize(("rows", "key"), [(ALL, "e2e_all"), (TWO, "e2e_two")])
def test_e2e_metrics(rows: list, key: str) -> None:
    expected = dict(OFFICIAL[key])
    check(rows, {name: expected.pop(name) for name in ("bleu", "rougeL_coco")}, 2, LOWER)
    check(rows, expected, 4)


@pytest.mark.slow
@needs_java
@pytest.mark.skipif("E2E_METRICS" not in os.environ, reason="no folder E2E_METRICS with tuetschek/e2e-metrics")
def test_e2e_metrics_on_its_own_example() -> None:
    folder = Path(os.environ["E2E_METRICS"]) / "example-inputs"
    references = [block.split("\n") for block in (folder / "devel-conc.txt").read_text().strip().split("\n\n")]
    rows = list(zip((folder / "baseline-output.txt").read_text().strip().split("\n"), references, strict=True))
    expected = dict(OFFICIAL["e2e_example"])
    check(rows, {name: expected.pop(name) for name in ("bleu", "rougeL_coco")}, 2, LOWER)
    check(rows, expected, 4)


def test_e2e_metrics_without_java() -> None:
    for rows, key in ((ALL, "e2e_all"), (TWO, "e2e_two")):
        check(rows, {"bleu": OFFICIAL[key]["bleu"]}, 2, LOWER)
        check(rows, {"nist": OFFICIAL[key]["nist"]}, 4)


@pytest.mark.slow
@needs_java
def test_meteor_jar() -> None:
    check(TWO, OFFICIAL["meteor_jar"], 12, {"meteor": {"tokenizer": "none"}})


def test_sacrebleu() -> None:
    one = OFFICIAL["sacrebleu_one"]
    check(TWO, OFFICIAL["sacrebleu_two"], 6)
    check(ONE, {name: one[name] for name in ("bleu", "ter", "chrf")}, 6)
    check(ONE, {"ter": one["ter_cased"]}, 6, {"ter": {"case_sensitive": True}})
    check(ONE, {"chrf": one["chrf++"]}, 6, {"chrf": {"word_order": 2}})


def test_sacrebleu_signature_is_its_own() -> None:
    import sacrebleu

    got = compute_scores(["bleu"], [p for p, _ in TWO], [r for _, r in TWO])["bleu"].signature
    version = sacrebleu.__version__
    expected = f"nrefs:2|case:mixed|eff:no|tok:13a|smooth:exp|version:{version}"
    assert got == f"bleu|{expected}|n:{len(TWO)}|sacrebleu:{version}"


def test_rouge() -> None:
    check(ONE, OFFICIAL["rouge_score"], 4)  # means of values printed with six digits, times 100
    check(ONE, OFFICIAL["rouge_pltrdy"], 10)


def test_answers_and_tags() -> None:
    check(ANSWERS, OFFICIAL["squad"], 12)
    check(TAGS, OFFICIAL["conlleval"], 4)


def test_bertscore(shared: Path) -> None:
    options = {"model": str(shared / "models" / "minilm-d128"), "layers": 2}
    check(FLAT, {"bertscore": OFFICIAL["bertscore"]["bertscore"]}, 5, {"bertscore": options})
    idf = {"bertscore": {**options, "idf": True}}
    check(FLAT, {"bertscore": OFFICIAL["bertscore"]["bertscore_idf"]}, 5, idf)


def test_moverscore(shared: Path) -> None:
    expected, model = OFFICIAL["moverscore"], str(shared / "models" / "minilm-d128")
    check(ONE, {"moverscore": expected["moverscore"]}, 5, {"moverscore": {"model": model}})
    uniform = {"moverscore": {"model": model, "idf": "none"}}
    check(ONE, {"moverscore": expected["moverscore_none"]}, 5, uniform)


def test_published() -> None:
    # README of sacreBLEU, "Using SacreBLEU from Python"
    dog = [
        ("The dog bit the man.", ["The dog bit the man.", "The dog had bit the man."]),
        ("It wasn't surprising.", ["It was not unexpected.", "No one was surprised."]),
        ("The man had just bitten him.", ["The man bit him first.", "The man had bitten the dog."]),
    ]
    check(dog, {"bleu": 48.530827}, 6)
    # Lin 2004, section 3: S1 "police killed the gunman" against S2 and S3, β = 1: ROUGE-L 3/4 and 1/2
    police = "police killed the gunman"
    check([("police kill the gunman", police)], {"rougeL": 75.0}, 6, {"rougeL": {"stemmer": False}})
    check([("the gunman kill police", police)], {"rougeL": 50.0}, 6, {"rougeL": {"stemmer": False}})
    # Papineni 2002, section 2.1.1: seven times "the" has two matches, so every higher order has none
    the = [("the the the the the the the", ["the cat is on the mat", "there is a cat on the mat"])]
    got = compute_scores(["bleu"], [p for p, _ in the], [r for _, r in the])["bleu"]
    assert got.statistics[0].tolist() == [7, 7, 2, 0, 0, 0, 7, 6, 5, 4]
