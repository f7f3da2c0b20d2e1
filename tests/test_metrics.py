"""Metrics against values computed by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from deltune.errors import DeltuneError
from deltune.metrics.registry import METRICS, compute_scores

CLASSES = [name for name, metric in METRICS.items() if metric.input_type == "classes"]

REFERENCES = [0, 0, 0, 1, 1, 1]
PREDICTIONS = [0, 0, 1, 1, 1, 0]  # class 1: 2 hits, 1 false alarm, 1 miss; class 0 likewise
THREE = ([0, 1, 2, 2], [0, 1, 1, 2])  # predictions, references


@pytest.mark.parametrize(
    ("name", "predictions", "references", "labels", "expected"),
    [
        ("accuracy", PREDICTIONS, REFERENCES, None, 4 / 6),
        ("f1", PREDICTIONS, REFERENCES, None, 2 * 2 / (2 * 2 + 1 + 1)),
        ("f1", [0, 0], [0, 0], [0, 1], 0.0),  # nothing positive anywhere
        ("f1", ["a", "a", "b"], ["a", "b", "b"], ["a", "b"], 2 / 3),  # b: 1 hit, 1 miss
        ("f1", ["a", "a", "b"], ["a", "b", "b"], ["b", "a"], 2 / 3),  # a: 1 hit, 1 false alarm
        ("f1_macro", *THREE, None, (1 + 2 / 3 + 2 / 3) / 3),
        ("f1_macro", *THREE, [0, 1, 2, 3], (1 + 2 / 3 + 2 / 3 + 0) / 4),  # a class that never occurs counts as 0
        ("matthews", PREDICTIONS, REFERENCES, None, (2 * 2 - 1 * 1) / math.sqrt(3 * 3 * 3 * 3)),
        ("matthews", [1, 0], [0, 1], None, -1.0),
        ("matthews", [0, 0], [0, 1], None, 0.0),
        ("f1", ["a", "b", "?"], ["a", "b", "b"], ["a", "b"], 2 / 3),  # an answer that is no label is a miss
        ("accuracy", ["a", "?"], ["a", "b"], ["a", "b"], 1 / 2),
        ("pearson", [1.0, 2.0, 3.0], [1.0, 3.0, 2.0], None, 0.5),
        ("spearman", [1, 2, 30], [10, 20, 30], None, 1.0),
        ("spearman", [1, 2, 3, 4], [2, 1, 4, 3], None, 1 - 6 * 4 / (4 * 15)),  # 1 - 6 Σd² / n(n² - 1)
        ("entity_f1", [["B-A", "I-A", "O"]], [["B-A", "I-A", "O"]], None, 1.0),
        ("entity_f1", [["I-A", "O", "B-A"]], [["B-A", "O", "B-A"]], None, 2 * 1 / (1 + 2)),  # I- opens nothing
        ("entity_f1", [["O"]], [["O"]], None, 0.0),
        ("exact_match", ["The  Cat!", "a dog"], ["cat", ["dogs", "cat"]], None, 1 / 2),
        ("answer_f1", ["the black cat"], [["cat", "dog"]], None, 2 / 3),
        ("cer", ["kitten", "abc"], ["sitting", ["abd", "abc"]], None, 3 / 10),
        ("cer", ["abcd"], [["ab", "abcdefgh"]], None, 4 / 8),  # more edits than 2, and the lower rate
        ("perplexity", [-2 * math.log(4), -math.log(4)], [2, 1], None, 4.0),
        ("perplexity", [-3 * math.log(2), 0.0], [3, 1], None, 2 ** (3 / 4)),
    ],
)
def test_value(name: str, predictions: list, references: list, labels: list | None, expected: float) -> None:
    got = compute_scores([name], predictions, references, labels)[name]
    assert got.value == pytest.approx(expected)
    assert METRICS[name].range[0] <= got.value <= METRICS[name].range[1]


@pytest.mark.parametrize(
    ("name", "options", "predictions", "references", "expected"),
    [
        ("per", {"separator": " "}, ["DH AH K AE T"], ["DH AH B AE T"], 1 / 5),
        ("per", {}, ["kæt"], ["bæt"], 1 / 3),
        ("exact_match", {}, ["S\u00e3o Paulo"], ["Sa\u0303o Paulo"], 0.0),  # composed and decomposed ã
        ("exact_match", {"normalisation": "nq_open"}, ["S\u00e3o Paulo"], ["Sa\u0303o Paulo"], 1.0),
        ("rouge1", {"stemmer": False}, ["cats"], ["cat"], 0.0),
        ("rouge1", {}, ["cats"], ["cat"], 100.0),
        ("rouge1_pltrdy", {}, ["...", "a b"], ["a b", "a b"], 50.0),
        ("cider", {"tokenizer": "13a"}, ["a b c d e", "f g h i j"], ["a b c d e", "f g h i j"], 10.0),
        ("rougeL_coco", {"tokenizer": "none"}, ["a b c d"], ["a b c d"], 100.0),
    ],
)
def test_option(name: str, options: dict, predictions: list, references: list, expected: float) -> None:
    got = compute_scores([name], predictions, references, options={name: options})[name]
    assert got.value == pytest.approx(expected)
    assert all(f"{key}:{value}" in got.signature for key, value in options.items())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name == "meteor" else [])
        for name, metric in METRICS.items()
        if metric.input_type != "tags" and "model" not in metric.options
    ],
)
def test_resampled_is_the_score_of_the_re_sample(name: str) -> None:
    """Where the statistics stand for the examples, not for the corpus, scoring the re-sample anew gives the same."""
    metric = METRICS[name]
    texts = (["the cat sat on the mat .", "a dog", "it rains", "we go home now"],
             ["the cat sat on a mat .", ["the dog", "a dog barks"], "it is raining", "we go home"])  # fmt: skip
    predictions, references = {
        "classes": ([0, 1, 1, 0], [0, 1, 0, 0]),
        "numbers": ([1.0, 2.5, 2.0, 0.0], [1.5, 2.0, 3.0, 0.5]),
        "log-likelihoods": ([-3.0, -1.5, -7.0, -0.5], [2, 1, 4, 3]),
    }.get(metric.input_type, texts)
    options = {name: {"tokenizer": "13a"}} if "tokenizer" in metric.options else {}
    got = compute_scores([name], predictions, references, options=options)
    if name in got.omitted:
        pytest.skip(f"no {name}: {got.omitted[name]}")
    chosen = [3, 0, 0, 1]
    anew = compute_scores([name], [predictions[i] for i in chosen], [references[i] for i in chosen], options=options)[
        name
    ]
    again = got[name].resampled(chosen)
    if name in ("nist", "cider"):  # weights and frequencies stay those of the whole corpus
        assert again != pytest.approx(anew.value) and again > 0
    else:
        assert again == pytest.approx(anew.value)
    assert got[name].resampled(range(4)) == pytest.approx(got[name].value)
    with pytest.raises(DeltuneError, match="no examples"):
        got[name].resampled([])


def test_entities_are_seqevals() -> None:
    from seqeval.metrics import f1_score
    from seqeval.scheme import IOB2

    true = [["B-A", "I-A", "O", "B-B"], ["O", "B-B", "I-B", "I-B"], ["B-A", "O", "O", "O"]]
    ours = [["B-A", "I-A", "O", "I-B"], ["O", "B-B", "I-A", "I-B"], ["B-A", "O", "B-B", "B-B"]]
    got = compute_scores(["entity_f1"], ours, true)["entity_f1"]
    assert got.value == pytest.approx(f1_score(true, ours, mode="strict", scheme=IOB2))
    assert got.resampled([0, 0, 2]) == pytest.approx(
        f1_score([true[0], true[0], true[2]], [ours[0], ours[0], ours[2]], mode="strict", scheme=IOB2)
    )


def test_a_constant_has_no_correlation() -> None:
    assert math.isnan(compute_scores(["pearson"], [1, 1, 1], [1, 2, 3])["pearson"].value)


def test_missing_parts_are_left_out_by_name_and_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["bertscore", "moverscore", "bleurt", "bleu", "meteor", "cider", "rougeL_coco"]
    monkeypatch.setattr("deltune.metrics.text.shutil.which", lambda program: None)
    bleu_packages = METRICS["bleu"].packages
    monkeypatch.setattr("deltune.metrics.base.is_installed", lambda name: name not in bleu_packages)
    got = compute_scores([*names, "exact_match"], ["a"], ["a"])
    assert list(got) == ["exact_match"] and list(got.omitted) == names
    assert got.omitted["bertscore"] == "needs a model: give the option model (a folder or a hub id)"
    assert got.omitted["bleu"] == "needs sacrebleu: pip install 'deltune[metrics]'"


def test_without_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltune.metrics.text.shutil.which", lambda program: None)
    got = compute_scores(["meteor", "cider"], ["a b"], ["a b"])
    assert got.omitted["meteor"] == "needs Java: there is no java on the PATH"
    assert "tokenizer='13a'" in got.omitted["cider"]
    assert "cider" in compute_scores(["cider"], ["a b"], ["a b"], options={"cider": {"tokenizer": "13a"}})


def test_bleurt_is_the_one_label_of_a_pair(tmp_path: Path) -> None:
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "a", "b", "c"])}
    backend = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")
    torch.manual_seed(0)
    small = BertConfig(vocab_size=5, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    small.num_labels = 1
    model = BertForSequenceClassification(small).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    got = compute_scores(["bleurt"], ["a b", "c"], [["a", "b"], "c a"], options={"bleurt": {"model": str(tmp_path)}})[
        "bleurt"
    ]

    def rating(reference: str, prediction: str) -> float:
        with torch.no_grad():
            return model(**tokenizer(reference, prediction, return_tensors="pt")).logits.item()

    expected = [max(rating("a", "a b"), rating("b", "a b")), rating("c a", "c")]
    assert got.per_example == pytest.approx(expected, abs=1e-5)
    assert got.value == pytest.approx(sum(expected) / 2, abs=1e-5)


def test_the_table_is_whole() -> None:
    lower = {name for name, metric in METRICS.items() if metric.better == "lower"}
    assert lower == {"ter", "cer", "per", "perplexity"}
    for name, metric in METRICS.items():
        assert (metric.extra == "metrics") == (metric.input_type == "texts"), name
        assert metric.range[0] < metric.range[1]


def test_per_example_is_what_the_value_is_the_mean_of() -> None:
    for name, got in compute_scores(CLASSES, PREDICTIONS, REFERENCES).items():
        if got.per_example is not None:
            assert sum(got.per_example) / len(got.per_example) == pytest.approx(got.value), name
    assert compute_scores([], PREDICTIONS, REFERENCES)["accuracy"].per_example == [1, 1, 0, 1, 1, 0]


def test_signature_names_version_and_options() -> None:
    import sklearn

    got = compute_scores(["f1_macro"], *THREE)["f1_macro"].signature
    assert got == f"f1_macro|average:macro|zero_division:0|labels:3|n:4|scikit-learn:{sklearn.__version__}"


@pytest.mark.parametrize(
    ("names", "predictions", "references", "expected"),
    [
        (
            ["acuracy", "f2"],
            [0],
            [0],
            "unknown metric 'acuracy'. Did you mean 'accuracy'? Known: accuracy, answer_f1,",
        ),
        (["accuracy"], [0, 1], [0], "2 predictions against 1 references"),
        (["accuracy"], [], [], "0 predictions against 0 references"),
        (["f1"], *THREE, "f1 is for two labels, and there are 3. Use f1_macro"),
        (["bleu"], ["a", 1], ["a", "b"], "texts are a string against one string or several: example 1: 1 against 'b'"),
        (["exact_match"], ["a"], [[]], "answers are a string against one string or several: example 0"),
        (["entity_f1"], [["O"]], [["O", "O"]], "tags are lists of equal length: example 0"),
        (["pearson"], ["a", "b"], [1, 2], "numbers are numbers on both sides: 2 problems"),
        (["cer"], ["a"], [""], "needs a reference that is not empty"),
        (["perplexity"], [-1.0], [0], "the number of tokens of each example"),
    ],
)
def test_error(names: list, predictions: list, references: list, expected: str) -> None:
    with pytest.raises(DeltuneError) as caught:
        compute_scores(names, predictions, references)
    assert expected in str(caught.value)


def test_options_are_checked() -> None:
    with pytest.raises(DeltuneError, match="unknown option 'lowercases' in bleu"):
        compute_scores(["bleu"], ["a"], ["a"], options={"bleu": {"lowercases": True}})
    with pytest.raises(DeltuneError, match="unknown metric 'blue'"):
        compute_scores(["bleu"], ["a"], ["a"], options={"blue": {}})
    with pytest.raises(DeltuneError, match="tokenizer must be one of ptb, 13a, none, not 'intl'"):
        compute_scores(["cider"], ["a"], ["a"], options={"cider": {"tokenizer": "intl"}})
