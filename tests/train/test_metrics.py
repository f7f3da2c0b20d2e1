"""Metrics against values computed by hand."""

from __future__ import annotations

import json
import math
import random
import shutil
import unicodedata
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModel, AutoTokenizer

from deltune.errors import DeltuneError
from deltune.train.data.tag_schemes import SCHEMES, recognise_scheme, to_iob2
from deltune.train.metrics.base import Score
from deltune.train.metrics.labels import entities
from deltune.train.metrics.registry import METRICS, compute_scores
from deltune.train.metrics.words import words

needs_java = pytest.mark.skipif(shutil.which("java") is None, reason="no java")

CLASSES = [name for name, metric in METRICS.items() if metric.input_type == "classes"]

REFERENCES = [0, 0, 0, 1, 1, 1]
PREDICTIONS = [0, 0, 1, 1, 1, 0]  # class 1: 2 hits, 1 false alarm, 1 miss; class 0 likewise
THREE = ([0, 1, 2, 2], [0, 1, 1, 2])  # predictions, references


def resampled(score: Score, chosen: Iterable[int]) -> float:
    """The score of a re-sample of the corpus, as in a bootstrap."""
    return score.compute_score(score.statistics[list(chosen)])


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
    again = resampled(got[name], chosen)
    if name in ("nist", "cider"):  # weights and frequencies stay those of the whole corpus
        assert again != pytest.approx(anew.value) and again > 0
    else:
        assert again == pytest.approx(anew.value)
    assert resampled(got[name], range(4)) == pytest.approx(got[name].value)


def test_entities_are_seqevals() -> None:
    from seqeval.metrics import f1_score
    from seqeval.scheme import IOB2

    true = [["B-A", "I-A", "O", "B-B"], ["O", "B-B", "I-B", "I-B"], ["B-A", "O", "O", "O"]]
    ours = [["B-A", "I-A", "O", "I-B"], ["O", "B-B", "I-A", "I-B"], ["B-A", "O", "B-B", "B-B"]]
    got = compute_scores(["entity_f1"], ours, true)["entity_f1"]
    assert got.value == pytest.approx(f1_score(true, ours, mode="strict", scheme=IOB2))
    assert resampled(got, [0, 0, 2]) == pytest.approx(
        f1_score([true[0], true[0], true[2]], [ours[0], ours[0], ours[2]], mode="strict", scheme=IOB2)
    )


SCHEME_CASES = {
    "IOB1 begins with I": ("I-P I-P O", "I-P I-P O", "IOB1", 1.0),
    "IOB1 neighbours": ("O O I-P B-P", "I-L O I-P B-P", "IOB1", 2 * 2 / (2 + 3)),
    "IOB1 types change without B": ("I-P I-L", "I-P I-L", "IOB1", 1.0),
    "IOB1 B begins none after O": ("B-P O O", "I-P O I-P", "IOB1", 0.0),
    "IOB2": ("B-P O B-P", "B-P I-P B-P", "IOB2", 2 * 1 / (2 + 2)),
    "without types": ("B I O B", "B I O B", "IOB2", 1.0),
    "BIOES alone": ("S-L", "S-L", "BIOES", 1.0),
    "BIOES without its end": ("B-P I-P S-L", "B-P E-P S-L", "BIOES", 2 * 1 / (1 + 2)),
    "BILOU": ("U-L O B-P L-P", "U-L O B-P L-P", "BILOU", 1.0),
    "BILOU ends": ("U-L U-P U-P", "U-L B-P L-P", "BILOU", 2 * 1 / (3 + 2)),
    "nothing": ("O B-P", "O O", "IOB2", 0.0),
}


@pytest.mark.parametrize("case", SCHEME_CASES)
def test_entities_are_read_by_the_scheme_of_the_references(case: str) -> None:
    prediction, reference, scheme, expected = SCHEME_CASES[case]
    score = compute_scores(["entity_f1"], [prediction.split()], [reference.split()])["entity_f1"]
    assert score.value == pytest.approx(expected) and f"|scheme:{scheme}|" in score.signature


NO_ENTITIES = {
    "plain": (["NOUN VERB"], "these are plain, such as 'NOUN': use accuracy and f1_macro"),
    "two schemes": (["B-P I-P", "B-P", "I-P O"], r"of 2 rows are IOB2, and of 1 they are not: example 2 \(I-P after O"),
    "another type": (["B-P I-L"], r"example 0 \(I-L after B-P\)"),
    "some plain": (["B-P", "NOUN", "O VERB"], "'NOUN', 'VERB' in example 1, example 2 are not"),
    "IOE": (["I-P E-P", "E-P"], "IOE"),
    "BMES": (["B-P M-P E-P"], "BMES"),
    "both endings": (["B-P E-P", "B-P L-P", "S-P"], r"BIOES.*example 1 \(L-P after B-P, as in BILOU\)"),
    "prefixes behind": (["P-B P-I"], "write them in front"),
}


@pytest.mark.parametrize("case", NO_ENTITIES)
def test_references_of_no_scheme_are_named(case: str) -> None:
    rows, expected = NO_ENTITIES[case]
    references = [row.split() for row in rows]
    with pytest.raises(DeltuneError, match=expected) as caught:
        compute_scores(["entity_f1"], references, references)
    assert len(str(caught.value)) < 600
    with pytest.raises(DeltuneError, match="'S-P' is no tag of IOB2"):
        compute_scores(["entity_f1"], [["S-P"]], [["B-P"]])


def test_plain_tags_are_classes_of_words() -> None:
    """As scikit-learn has them over all words; a text is drawn with its words."""
    from sklearn.metrics import accuracy_score, f1_score

    true, ours = [["N", "V", "N"], ["D"], ["V", "D"]], [["N", "N", "N"], ["D"], ["V", "V"]]
    scores = compute_scores(["accuracy", "f1_macro"], ours, true)
    flat = [[tag for tags in side for tag in tags] for side in (true, ours)]
    assert scores["accuracy"].value == accuracy_score(*flat)
    assert scores["f1_macro"].value == pytest.approx(f1_score(*flat, average="macro"))
    assert resampled(scores["accuracy"], [1, 1, 2]) == 3 / 4 and "|tags:6|n:3|" in scores["accuracy"].signature
    with pytest.raises(DeltuneError, match="equal length: example 0"):
        compute_scores(["accuracy"], [["N"]], [["N", "V"]])


def written(spans: list[tuple[int, int, str]], length: int, scheme: str) -> list[str]:
    """Tags of a row with these entities, written independently of how they are read."""
    tags, before = ["O"] * length, (0, "")
    for start, stop, kind in spans:
        end = {"BIOES": "E", "BILOU": "L"}.get(scheme)
        marks = ["B"] + ["I"] * (stop - start - 1)
        if end:
            marks = [*marks[:-1], end] if len(marks) > 1 else [{"E": "S", "L": "U"}[end]]
        if scheme == "IOB1" and before != (start, kind):
            marks[0] = "I"
        tags[start:stop] = [f"{mark}-{kind}" for mark in marks]
        before = (stop, kind)
    return tags


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_is_recognised_and_converted(scheme: str) -> None:
    """200 random rows: seqeval finds in each the entities that were written, and in their conversion the same."""
    chance, rows = random.Random(scheme), []
    for _ in range(200):
        spans, at = [], 0
        while at < 12:
            stop = min(12, at + chance.randint(1, 3))
            spans += [(at, stop, chance.choice("AB"))] if chance.random() < 0.6 else []
            at = stop
        rows.append((spans, written(spans, 12, scheme)))
    assert recognise_scheme([("", tags) for _, tags in rows]) == scheme
    for spans, tags in rows:
        expected = {(kind, start, stop) for start, stop, kind in spans}
        assert entities(tags, scheme) == expected == entities(to_iob2(tags), "IOB2")
        assert to_iob2(tags) == written(spans, 12, "IOB2")


def test_a_constant_has_no_correlation() -> None:
    assert math.isnan(compute_scores(["pearson"], [1, 1, 1], [1, 2, 3])["pearson"].value)


def test_missing_parts_are_left_out_by_name_and_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["bertscore", "moverscore", "bleurt", "bleu", "meteor", "cider", "rougeL_coco"]
    monkeypatch.setattr("deltune.train.metrics.text.shutil.which", lambda program: None)
    bleu_packages = METRICS["bleu"].packages
    monkeypatch.setattr("deltune.train.metrics.base.is_installed", lambda name: name not in bleu_packages)
    got = compute_scores([*names, "exact_match"], ["a"], ["a"])
    assert list(got) == ["exact_match"] and list(got.omitted) == names
    assert got.omitted["bertscore"] == "needs a model: give the option model (a folder or a hub id)"
    assert got.omitted["bleu"] == "needs sacrebleu: pip install 'deltune[metrics]'"


def test_without_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltune.train.metrics.text.shutil.which", lambda program: None)
    got = compute_scores(["meteor", "cider"], ["a b"], ["a b"])
    assert got.omitted["meteor"] == "needs Java: there is no java on the PATH"
    assert "tokenizer='13a'" in got.omitted["cider"]
    assert "cider" in compute_scores(["cider"], ["a", "b"], ["a", "b"], options={"cider": {"tokenizer": "13a"}})


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
    assert lower == {"ter", "cer", "per", "perplexity", "mae"}
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
        (["perplexity"], [-1.0], [0], "the number of tokens of each example"),
    ],
)
def test_error(names: list, predictions: list, references: list, expected: str) -> None:
    with pytest.raises(DeltuneError) as caught:
        compute_scores(names, predictions, references)
    assert expected in str(caught.value)


TEXTS = {
    "English": "the cat sat on the mat",
    "German": "die süße Katze saß auf dem Sofa",
    "Polish": "łódź płynęła wzdłuż brzegu",
    "Vietnamese": "con mèo ngồi trên tấm thảm",
    "Russian": "мир и труд для всех",
    "Greek": "η γάτα κάθισε στο χαλί",
    "Hebrew": "החתול ישב על השטיח",
    "Arabic": "جلس القط على السجادة",
    "Persian": "گربه می\u200cخواهد روی فرش بنشیند",
    "Hindi": "बिल्ली चटाई पर बैठी थी।",
    "Tamil": "பூனை பாயில் அமர்ந்தது இன்று",
    "Georgian": "კატა იჯდა ხალიჩაზე დღეს",
    "Korean": "고양이가 매트 위에 앉았다",
    "Chinese": "今天天气很好。",
    "Japanese": "猫はマットの上に座った。",
    "Thai": "แมวนั่งอยู่บนเสื่อ",
    "Lao": "ແມວນັ່ງຢູ່ເທິງເສື່ອ",
    "Khmer": "ឆ្មាអង្គុយលើកន្ទេល",
    "Burmese": "ကြောင်သည်ဖျာပေါ်တွင်ထိုင်သည်",
    "full width": "１２３ ＡＢＣ ｄｅｆ ４５",
    "mixed": "iPhone 手机 вышел ในวันนี้",
}
TEXT_SCORES = [n for n, m in METRICS.items() if m.input_type in ("texts", "answers") and "model" not in m.options]


@pytest.mark.parametrize("language", TEXTS)
def test_identical_texts_are_perfect_in_every_script(language: str) -> None:
    names = [name for name in TEXT_SCORES if name not in ("meteor", "cider", "nist")]
    text = TEXTS[language]
    got = compute_scores(names, [text], [text], options={"rougeL_coco": {"tokenizer": "13a"}})
    assert not got.omitted
    for name, score in got.items():
        best = 0.0 if METRICS[name].better == "lower" else METRICS[name].range[1]
        assert score.value == pytest.approx(best), name


@pytest.mark.parametrize("language", [name for name in TEXTS if name != "full width"])
@pytest.mark.parametrize("name", ["rouge1", "rougeL", "rouge1_pltrdy", "bleu", "ter", "answer_f1"])
def test_one_wrong_word_makes_a_text_neither_right_nor_wrong(name: str, language: str) -> None:
    """Scores by words lie between their ends in every script, also where no blanks are written."""
    text = TEXTS[language]
    nearly = f"{text.rpartition(' ')[0]} x" if len(text.split()) > 2 else f"{text[:-3]}x"
    value = compute_scores([name], [nearly], [text])[name].value
    assert 0 < value < (1 if name == "answer_f1" else 100)


@pytest.mark.parametrize(
    ("one", "other"),
    [("má", "mà"), ("łoś", "los"), ("schön", "schon"), ("がく", "かく"), ("कि", "की"), ("กา", "กิ"), ("ကာ", "ကီ")],
)
def test_marks_and_letters_that_only_other_scripts_have_count(one: str, other: str) -> None:
    assert compute_scores(["rouge1"], [one], [other])["rouge1"].value < 100
    composed = unicodedata.normalize("NFD", one), unicodedata.normalize("NFC", one)
    assert compute_scores(["rouge1"], [composed[0]], [composed[1]])["rouge1"].value == 100


def test_words_of_english_are_rouge_scores_own() -> None:
    from rouge_score.rouge_scorer import RougeScorer

    texts = ["It’s the “best” cat’s £5 day — really…", "Runners' running_shoes cost 3.50, don't they?", "A 😀 cat’s 3"]
    theirs = RougeScorer(["rouge1"], use_stemmer=True)
    for text, other in zip(texts, [*texts[1:], texts[0]], strict=True):
        got = compute_scores(["rouge1"], [text], [other])["rouge1"]
        assert got.value == 100 * theirs.score(other, text)["rouge1"].fmeasure
        assert "tokenizer:rouge-score" in got.signature and "unspaced" not in got.signature


@settings(max_examples=100)
@given(st.text(st.characters(max_codepoint=127)))
def test_words_of_ascii_are_rouge_scores_own(text: str) -> None:
    from rouge_score.tokenize import tokenize

    assert words(text) == tokenize(text, None)


def test_rows_of_several_scripts_score_as_alone() -> None:
    """How a row is read depends on its own texts, and the signature says what was read in all."""
    rows = [(text[:-3] or text, text) for text in TEXTS.values()]
    for name in ("rougeL", "rouge1", "answer_f1", "rougeL_pltrdy"):
        alone = [compute_scores([name], [p], [r])[name].value for p, r in rows]
        of_all = compute_scores([name], [p for p, _ in rows], [r for _, r in rows])[name]
        assert of_all.per_example == pytest.approx(alone), name
        assert "unspaced:characters" in of_all.signature
    assert "tokenizer:words|unspaced:characters" in compute_scores(["rougeL"], ["a 猫"], ["a 猫"])["rougeL"].signature
    assert "tok:13a|smooth:exp|version:" in compute_scores(["bleu"], ["a b c d"], ["a b c d"])["bleu"].signature


def test_chinese_bleu_is_that_of_sacrebleus_zh() -> None:
    ours, true = (
        ["今天 天气很好，我们去ABC公园１号。", "猫坐在垫子上"],
        ["今天天气不错，我们去ABC公园２号。", "猫坐在垫子上面"],
    )
    zh = compute_scores(["bleu"], ours, true, options={"bleu": {"tokenize": "zh"}})["bleu"]
    got = compute_scores(["bleu"], ours, true)["bleu"]
    assert got.value == pytest.approx(zh.value) and 0 < got.value < 100
    assert "unspaced:characters" in got.signature and "unspaced" not in zh.signature


@pytest.mark.parametrize(
    ("name", "options", "prediction", "reference", "expected"),
    [
        ("rouge1", {"tokenizer": "rouge-score"}, "мир abc", "труд abc", 100.0),  # what rouge-score does not read
        ("rouge1", {"tokenizer": "char"}, "ab", "ac", 50.0),
        ("rouge1", {"tokenizer": "intl"}, "да!", "да", 2 * 100 / 3),
        ("rouge1", {"tokenizer": "13a"}, "cats", "cat", 0.0),  # without stems
        ("answer_f1", {}, "北京市", "北京", 0.8),
        ("exact_match", {}, "北京。", "北京", 1.0),
        ("exact_match", {}, "यह सच है।", "यह सच है", 1.0),
        ("answer_f1", {}, "", "", 1.0),
        ("answer_f1", {}, "", "the", 1.0),
        ("rougeL", {}, "", "мир", 0.0),
        ("bleu", {}, "", "今天天气很好", 0.0),
        ("ter", {}, "今天天气很坏", "今天天气很好", 100 / 6),
    ],
)
def test_scripts_and_tokenizers(name: str, options: dict, prediction: str, reference: str, expected: float) -> None:
    got = compute_scores([name], [prediction], [reference], options={name: options})[name]
    assert got.value == pytest.approx(expected)
    assert all(f"{key}:{value}" in got.signature for key, value in options.items())


@pytest.mark.parametrize(
    ("name", "options", "references", "expected"),
    [
        ("rouge1", {}, ["❤️", "…"], "2 of 2 rows have no word in their references"),
        ("rouge1_pltrdy", {}, ["!?"], "have no word"),
        ("rouge2", {}, ["cat", "猫"], "have a single word as reference"),
        ("rouge2_pltrdy", {}, ["cat"], "have a single word as reference"),
        ("rougeL_coco", {"tokenizer": "13a"}, [" "], "have no word"),
        ("rougeL", {"tokenizer": "ja-mecab"}, ["猫"], "pip install 'sacrebleu[ja]'"),
        ("bleu", {"tokenize": "ko-mecab"}, ["가 나 다 라"], "pip install 'sacrebleu[ko]'"),
        ("bleu", {}, ["three words only", "мир"], "no reference has 4 words"),
        ("cider", {"tokenizer": "13a"}, ["a cat"], "at least two examples"),
        ("chrf", {}, ["", " "], "2 of 2 rows have no word"),
        ("nist", {}, [""], "have no word"),
        ("ter", {}, [""], "have no word"),
        ("cer", {}, [""], "needs a reference that is not empty"),
        pytest.param("meteor", {"tokenizer": "13a"}, ["мир и труд"], "METEOR is English", marks=needs_java),
    ],
)
def test_what_cannot_be_scored_is_refused(name: str, options: dict, references: list, expected: str) -> None:
    got = compute_scores([name, "exact"], references, references, options={name: options})
    assert list(got) == ["exact"] and expected in got.omitted[name]
    with pytest.raises(DeltuneError, match=f"{name} was not computed: "):
        got[name]


def test_rows_that_cannot_be_read_beside_others_are_counted() -> None:
    texts = ["a cat", "😀", "a dog"]
    got = compute_scores(["rougeL", "rouge1_pltrdy", "exact"], texts, texts)
    assert got["rougeL"].value == pytest.approx(200 / 3) and "unread:1" in got["rougeL"].signature
    assert "unread:1" in got["rouge1_pltrdy"].signature and "unread" not in got["exact"].signature


def test_a_model_that_knows_no_token_is_refused(shared: Path) -> None:
    options = {"model": str(shared / "models" / "minilm-d128"), "layers": 2}
    got = compute_scores(["bertscore"], ["ภาษา"], ["ไทย"], options={"bertscore": options})
    assert "without a token that" in got.omitted["bertscore"]


LIMITLESS = [("bertscore", {"layers": 2}), ("bertscore", {"layers": 2, "idf": True}), ("moverscore", {"idf": "none"})]


@pytest.mark.parametrize(("name", "more"), LIMITLESS)
def test_texts_are_cut_at_the_positions_of_a_model_whose_tokenizer_names_no_limit(
    name: str, more: dict, shared: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(shared / "models" / "minilm-d128", tmp_path / "model")
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "model_max_length": int(1e30)}))
    options = {name: {"model": str(model), **more}}
    long = "a cat " * 300
    cut, whole = (
        compute_scores([name], [text, "a dog"], [long, "a cat"], options=options) for text in (long + "and a dog", long)
    )
    assert cut.omitted == {} and cut[name].value == pytest.approx(whole[name].value, abs=1e-5)


@pytest.mark.parametrize("kind", ["roberta", "mpnet", "xlnet"])
def test_bertscore_cuts_where_positions_end(kind: str, shared: Path, tmp_path: Path) -> None:
    """Tables of RoBERTa's kind have two rows more than positions; XLNet has no table."""
    tokenizer = AutoTokenizer.from_pretrained(shared / "models" / "minilm-d128", model_max_length=int(1e30))
    sizes = {"vocab_size": len(tokenizer), "pad_token_id": 1, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"n_layer": 2, "n_head": 2, "d_model": 32, "d_inner": 16} if kind == "xlnet" else {
        "hidden_size": 32, "intermediate_size": 16, "max_position_embeddings": 66,
    }  # fmt: skip
    config = AutoConfig.for_model(kind, **sizes)
    model = AutoModel.from_config(config)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    options = {"bertscore": {"model": str(tmp_path), "layers": 1}}
    got = compute_scores(["bertscore"], ["a cat " * 100], ["a dog " * 100], options=options)
    assert got.omitted == {} and 0 < got["bertscore"].value <= 1


def test_options_are_checked() -> None:
    with pytest.raises(DeltuneError, match="unknown option 'lowercases' in bleu"):
        compute_scores(["bleu"], ["a"], ["a"], options={"bleu": {"lowercases": True}})
    with pytest.raises(DeltuneError, match="unknown metric 'blue'"):
        compute_scores(["bleu"], ["a"], ["a"], options={"blue": {}})
    with pytest.raises(DeltuneError, match=r"unknown tokenizer 'zhh'\. Did you mean 'zh'"):
        compute_scores(["rougeL"], ["a"], ["a"], options={"rougeL": {"tokenizer": "zhh"}})
    with pytest.raises(DeltuneError, match=r"unknown tokenizer 'zhh'\. Did you mean 'zh'"):
        compute_scores(["bleu"], ["a"], ["a"], options={"bleu": {"tokenize": "zhh"}})
    with pytest.raises(DeltuneError, match="tokenizer must be one of ptb, 13a, none, not 'intl'"):
        compute_scores(["cider"], ["a"], ["a"], options={"cider": {"tokenizer": "intl"}})
