"""Tasks as values: what is read, what is said to a model, what is measured; one entry of the table for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..data.hub_layouts import (
    EXPORTED,
    Layout,
    first_non_empty,
    format_triples,
    index_in,
    list_of_columns,
    nested_field,
    parquet_files,
    spans_to_bio_tags,
)
from ..errors import DeltuneError, unknown_name
from ..filesystem import user_path


@dataclass(frozen=True)
class Task:
    """A data set with its kind, its columns and its metrics, the first of which chooses the best epoch.

    folder: below a data root. hub: where the hub has it, and what is called otherwise there. columns: role -> column.
    template: what a model that answers in words is given, with the roles in braces. words: the text of each label.
    version: raised when anything changes what a score means. languages: of a translation, from and to (ISO 639-1).
    """

    kind: str
    folder: str
    columns: Mapping[str, str]
    metrics: tuple[str, ...]
    hub: Layout | None = None
    template: str = ""
    words: Mapping[str, str] = field(default_factory=dict)
    version: int = 1
    languages: tuple[str, str] | tuple[None, None] = (None, None)


ACCURACY = ("accuracy", "f1", "f1_macro", "matthews")
ENTITIES = ("entity_f1",)
TABLE_TO_TEXT = ("bleu", "meteor", "ter", "chrf", "moverscore", "bertscore", "bleurt")
SUMMARY = ("rouge1", "rouge2", "rougeL", "rougeLsum")
YES_NO = {"entailment": "yes", "not_entailment": "no"}
INFERENCE = {"entailment": "yes", "neutral": "maybe", "contradiction": "no"}
POLARITY = {"negative": "terrible", "positive": "great"}
NLI = "{text} Does it follow that: {pair} yes, maybe or no?"
WORDED = "{source} In words:"
SHORT = "{source}\nSummary:"
SOURCE = {"source": "source", "targets": "targets"}
CONLL04 = {"Loc": "LOC", "Org": "ORG", "Peop": "PER", "Other": "OTHER"}
TESTED = {"train": "train", "test": "validation"}
"""Splits of the hub, where it hides the labels of the test: the official validation is the test."""


def _single(folder: str, hub: Layout, text: str = "sentence") -> Task:
    return Task("classification", folder, {"text": text, "label": "label"}, ACCURACY, hub, "{text} It was", POLARITY)


def _pair(folder: str, hub: Layout, first: str, second: str, template: str, words: Mapping[str, str]) -> Task:
    columns = {"text": first, "pair": second, "label": "label"}
    return Task("classification", folder, columns, ACCURACY, hub, template, words)


def _glue(name: str, held_out: int, **columns: str) -> Layout:
    return Layout(f"nyu-mll/glue:{name}", splits=TESTED, held_out=held_out, columns=columns)


TASKS: Mapping[str, Task] = {
    "sst2": _single("sst2", _glue("sst2", 1000)),
    "imdb": _single(
        "imdb",
        Layout("stanfordnlp/imdb", splits={"train": "train", "test": "test"}, labels=tuple(POLARITY), held_out=1000),
        "text",
    ),
    "rotten_tomatoes": _single(
        "rotten_tomatoes", Layout("cornell-movie-review-data/rotten_tomatoes", labels=tuple(POLARITY)), "text"
    ),
    "sick": _pair(
        "sick",
        Layout(
            f"RobZamp/sick@{EXPORTED}", parquet_files("train", "validation", "test"),
            columns={"text": "sentence_A", "pair": "sentence_B"},
        ),
        "premise", "hypothesis", NLI, INFERENCE,
    ),
    "snli": _pair("snli", Layout("stanfordnlp/snli"), "premise", "hypothesis", NLI, INFERENCE),
    "mnli": _pair(
        "mnli",
        Layout("nyu-mll/glue:mnli", splits={"train": "train", "test": "validation_matched"}, held_out=1000),
        "premise", "hypothesis", NLI, INFERENCE,
    ),
    "cb": _pair(
        "cb", Layout("aps/super_glue:cb", splits=TESTED, held_out=50), "premise", "hypothesis", NLI, INFERENCE
    ),
    "rte": _pair(
        "rte", _glue("rte", 250, text="sentence1", pair="sentence2"), "premise", "hypothesis",
        "{text} Does it follow that: {pair} yes or no?", YES_NO,
    ),
    "qnli": _pair(
        "qnli", _glue("qnli", 1000), "question", "sentence", "{text} Does this answer it: {pair} yes or no?", YES_NO
    ),
    "qqp": _pair(
        "qqp", _glue("qqp", 1000), "question1", "question2", "{text} Is it the same to ask: {pair} yes or no?",
        {"duplicate": "yes", "not_duplicate": "no"},
    ),
    "mrpc": _pair(
        "mrpc", Layout("nyu-mll/glue:mrpc"), "sentence1", "sentence2",
        "{text} Does this say the same: {pair} yes or no?", {"equivalent": "yes", "not_equivalent": "no"},
    ),
    "conll04": Task(
        "tagging", "conll04", {"tokens": "tokens", "tags": "tags"}, ENTITIES,
        Layout(
            "DFKI-SLT/conll04",
            columns={"tags": spans_to_bio_tags("tokens", "entities", CONLL04)},
        ),
    ),
    "broad_twitter": Task(
        "tagging", "broad_twitter", {"tokens": "tokens", "tags": "tags"}, ENTITIES,
        Layout(
            "tner/btc",
            {"train": "dataset/train.json", "validation": "dataset/valid.json", "test": "dataset/test.json"},
            labels=("B-LOC", "B-ORG", "B-PER", "I-LOC", "I-ORG", "I-PER", "O"),
        ),
    ),
    "commonsense_qa": Task(
        "choice", "commonsense_qa", {"question": "question", "choices": "choices", "answer": "answer"}, ("accuracy",),
        Layout(
            "tau/commonsense_qa", splits=TESTED, held_out=1000,
            columns={"choices": nested_field("choices", "text"), "answer": index_in("answerKey", "ABCDE")},
        ),
    ),
    "social_iqa": Task(
        "choice", "social_iqa",
        {"context": "context", "question": "question", "choices": "choices", "answer": "answer"}, ("accuracy",),
        Layout(
            "lighteval/siqa", splits=TESTED, held_out=1000,
            columns={"choices": list_of_columns("answerA", "answerB", "answerC"), "answer": index_in("label", "123")},
        ),
    ),
    "e2e_nlg": Task(
        "generation", "e2e_nlg", SOURCE, ("bleu", "nist", "meteor", "rougeL", "cider"),
        Layout(
            f"tuetschek/e2e_nlg@{EXPORTED}", parquet_files("train", "validation", "test"),
            columns={"source": "meaning_representation", "targets": "human_reference"},
            gathered=("validation", "test"),
        ),
        WORDED,
    ),
    "dart": Task(
        "generation", "dart", SOURCE, TABLE_TO_TEXT,
        Layout(
            f"Yale-LILY/dart@{EXPORTED}", parquet_files("train", "validation", "test"),
            columns={"source": format_triples("tripleset"), "targets": nested_field("annotations", "text")},
        ),
        WORDED,
    ),
    "webnlg": Task(
        "generation", "webnlg", SOURCE, TABLE_TO_TEXT,
        Layout(
            "GEM/web_nlg@5df27588a0b8eb8af35396d865ff297b85bd81e3",
            {split: f"en/web_nlg-{split}.parquet" for split in ("train", "validation", "test")},
            columns={"source": format_triples("input"), "targets": first_non_empty("references", "target")},
        ),
        WORDED,
    ),
    "samsum": Task(
        "generation", "samsum", {"source": "dialogue", "targets": "summary"}, SUMMARY, Layout("knkarthick/samsum"),
        SHORT,
    ),
    "xsum": Task(
        "generation", "xsum", {"source": "document", "targets": "summary"}, SUMMARY,
        Layout(f"EdinburghNLP/xsum@{EXPORTED}", parquet_files("train", "validation", "test")), SHORT,
    ),
    "multi_news": Task(
        "generation", "multi_news", {"source": "document", "targets": "summary"}, SUMMARY,
        Layout(f"alexfabbri/multi_news@{EXPORTED}", parquet_files("train", "validation", "test")), SHORT,
    ),
    "wmt16_en_ro": Task(
        "generation", "wmt16_en_ro", SOURCE, ("bleu", "chrf", "ter"),
        Layout(
            "wmt/wmt16:ro-en",
            columns={"source": nested_field("translation", "en"), "targets": nested_field("translation", "ro")},
        ),
        "{source}\nIn Romanian:", languages=("en", "ro"),
    ),
    "g2p_us_to_gb": Task("generation", "g2p_us_to_gb", SOURCE, ("exact", "per"), template="{source}\n"),
    "nq_open": Task(
        "generation", "nq_open", {"source": "question", "targets": "answers"}, ("exact_match", "answer_f1"),
        Layout(
            "google-research-datasets/nq_open", splits=TESTED, held_out=1000, columns={"targets": "answer"}
        ),
        "{source}?",
    ),
    "english_novels": Task("language", "english_novels", {"text": "text"}, ("perplexity",)),
    "imdb_text": Task(
        "language", "imdb_text", {"text": "text"}, ("perplexity",),
        Layout("stanfordnlp/imdb", splits={"train": "unsupervised", "test": "test"}, held_out=1000),
    ),
    "wikitext2": Task(
        "language", "wikitext2_eval", {"text": "text"}, ("perplexity",), Layout("Salesforce/wikitext:wikitext-2-v1")
    ),
}  # fmt: skip
"""Every known task."""


def find_task(name: str, data_root: str | None) -> tuple[Task, str | Layout]:
    """A task of the table and where its data is: a folder below `data_root`, else on the hub, its columns by role.

    Errors: an unknown task, a root without that folder, a task that no hub has.
    """
    if name not in TASKS:
        raise DeltuneError(unknown_name("task", name, TASKS))
    task = TASKS[name]
    if data_root is None:
        if not task.hub:
            raise DeltuneError(f"task {name} has no hub id; give data_root, the folder that holds {task.folder}/")
        return task, replace(task.hub, columns={**task.columns, **task.hub.columns})
    folder = user_path(data_root, "data_root") / task.folder
    if not folder.is_dir():
        if not folder.parent.is_dir():
            raise DeltuneError(f"there is no folder {folder.parent}, where task {name} is looked for")
        here = [n for n, t in TASKS.items() if (folder.parent / t.folder).is_dir()]
        itself = Path(data_root).name == task.folder
        raise DeltuneError(
            f"{folder.parent} has no folder {task.folder} for task {name}; "
            + (
                f"as data_root give its parent, {folder.parent.parent}"
                if itself
                else f"of the tasks it has {', '.join(here) or 'none'}"
            )
        )
    return task, str(folder)
