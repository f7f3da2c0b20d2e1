"""The table of known tasks: their data sets, columns, prompts and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...errors import DeltuneError, unknown_name
from ...files import user_path
from ..data.loading import PARQUET_REVISION, HubLayout, bio_tags, format_triples, nested_field, parquet_files

PACKAGED = Path(__file__).parents[1] / "demo"


@dataclass(frozen=True)
class Task:
    """A known task.

    Attributes:
        kind: The kind of task, a key of `data.columns.TASK_COLUMNS`.
        folder: The folder of its data below a data root.
        columns: Role -> column.
        metrics: Its metrics; the first one chooses the best epoch.
        hub: Where the hub has its data, and what differs there; None if it does not.
        template: The prompt of a language model, with roles in braces.
        words: Label -> the word by which a language model answers.
        version: Raised with every change to what a score means.
        metric_options: Options of its metrics that are not their defaults, as its official script has them.
        languages: The source and target language of a translation (ISO 639-1).
    """

    kind: str
    folder: str
    columns: Mapping[str, str]
    metrics: tuple[str, ...]
    hub: HubLayout | None = None
    template: str = ""
    words: Mapping[str, str] = field(default_factory=dict)
    version: int = 1
    metric_options: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    languages: tuple[str, str] | tuple[None, None] = (None, None)

    @property
    def packaged(self) -> Path | None:
        """The folder of its data where it comes with deltune and needs no data root."""
        folder = PACKAGED / self.folder
        return folder if folder.is_dir() else None


CLASSIFICATION_METRICS = ("accuracy", "f1", "f1_macro", "matthews")
TAGGING_METRICS = ("entity_f1",)
TABLE_TO_TEXT_METRICS = ("bleu", "meteor", "ter", "chrf", "moverscore", "bertscore", "bleurt")
SUMMARY_METRICS = ("rouge1", "rouge2", "rougeL", "rougeLsum")
YES_NO_WORDS = {"entailment": "yes", "not_entailment": "no"}
NLI_WORDS = {"entailment": "yes", "neutral": "maybe", "contradiction": "no"}
SENTIMENT_WORDS = {"negative": "terrible", "positive": "great"}
NLI_TEMPLATE = "{text} Does it follow that: {pair} yes, maybe or no?"
TABLE_TO_TEXT_TEMPLATE = "{source} In words:"
SUMMARY_TEMPLATE = "{source}\nSummary:"
SOURCE_TARGETS = {"source": "source", "targets": "targets"}
CONLL04_TYPES = {"Loc": "LOC", "Org": "ORG", "Peop": "PER", "Other": "OTHER"}
VALIDATION_AS_TEST = {"train": "train", "test": "validation"}
"""Splits where the hub hides the labels of the test split: the official validation split is the test split."""


def _sentence_task(folder: str, hub: HubLayout, text: str = "sentence") -> Task:
    return Task(
        "classification",
        folder,
        {"text": text, "label": "label"},
        CLASSIFICATION_METRICS,
        hub,
        "{text} It was",
        SENTIMENT_WORDS,
    )


def _pair_task(folder: str, hub: HubLayout, first: str, second: str, template: str, words: Mapping[str, str]) -> Task:
    columns = {"text": first, "pair": second, "label": "label"}
    return Task("classification", folder, columns, CLASSIFICATION_METRICS, hub, template, words)


def _glue_layout(name: str, held_out: int, **columns: str) -> HubLayout:
    return HubLayout(f"nyu-mll/glue:{name}", splits=VALIDATION_AS_TEST, held_out=held_out, columns=columns)


TASKS: Mapping[str, Task] = {
    "sst2": _sentence_task("sst2", _glue_layout("sst2", 1000)),
    "imdb": _sentence_task(
        "imdb",
        HubLayout(
            "stanfordnlp/imdb", splits={"train": "train", "test": "test"}, labels=tuple(SENTIMENT_WORDS), held_out=1000
        ),
        "text",
    ),
    "rotten_tomatoes": _sentence_task(
        "rotten_tomatoes", HubLayout("cornell-movie-review-data/rotten_tomatoes", labels=tuple(SENTIMENT_WORDS)), "text"
    ),
    "sick": _pair_task(
        "sick",
        HubLayout(
            f"RobZamp/sick@{PARQUET_REVISION}", parquet_files("train", "validation", "test"),
            columns={"text": "sentence_A", "pair": "sentence_B"},
        ),
        "premise", "hypothesis", NLI_TEMPLATE, NLI_WORDS,
    ),
    "snli": _pair_task("snli", HubLayout("stanfordnlp/snli"), "premise", "hypothesis", NLI_TEMPLATE, NLI_WORDS),
    "mnli": _pair_task(
        "mnli",
        HubLayout("nyu-mll/glue:mnli", splits={"train": "train", "test": "validation_matched"}, held_out=1000),
        "premise", "hypothesis", NLI_TEMPLATE, NLI_WORDS,
    ),
    "cb": _pair_task(
        "cb", HubLayout("aps/super_glue:cb", splits=VALIDATION_AS_TEST, held_out=50), "premise", "hypothesis",
        NLI_TEMPLATE, NLI_WORDS,
    ),
    "rte": _pair_task(
        "rte", _glue_layout("rte", 250, text="sentence1", pair="sentence2"), "premise", "hypothesis",
        "{text} Does it follow that: {pair} yes or no?", YES_NO_WORDS,
    ),
    "qnli": _pair_task(
        "qnli", _glue_layout("qnli", 1000), "question", "sentence", "{text} Does this answer it: {pair} yes or no?",
        YES_NO_WORDS,
    ),
    "qqp": _pair_task(
        "qqp", _glue_layout("qqp", 1000), "question1", "question2", "{text} Is it the same to ask: {pair} yes or no?",
        {"duplicate": "yes", "not_duplicate": "no"},
    ),
    "mrpc": _pair_task(
        "mrpc", HubLayout("nyu-mll/glue:mrpc"), "sentence1", "sentence2",
        "{text} Does this say the same: {pair} yes or no?", {"equivalent": "yes", "not_equivalent": "no"},
    ),
    "conll04": Task(
        "tagging", "conll04", {"tokens": "tokens", "tags": "tags"}, TAGGING_METRICS,
        HubLayout(
            "DFKI-SLT/conll04",
            columns={"tags": lambda row: bio_tags(row["tokens"], row["entities"], CONLL04_TYPES)},
        ),
    ),
    "broad_twitter": Task(
        "tagging", "broad_twitter", {"tokens": "tokens", "tags": "tags"}, TAGGING_METRICS,
        HubLayout(
            "tner/btc",
            {"train": "dataset/train.json", "validation": "dataset/valid.json", "test": "dataset/test.json"},
            labels=("B-LOC", "B-ORG", "B-PER", "I-LOC", "I-ORG", "I-PER", "O"),
        ),
    ),
    "commonsense_qa": Task(
        "choice", "commonsense_qa", {"question": "question", "choices": "choices", "answer": "answer"}, ("accuracy",),
        HubLayout(
            "tau/commonsense_qa", splits=VALIDATION_AS_TEST, held_out=1000,
            columns={
                "choices": lambda row: nested_field(row["choices"], "text"),
                "answer": lambda row: list("ABCDE").index(str(row["answerKey"])),
            },
        ),
    ),
    "social_iqa": Task(
        "choice", "social_iqa",
        {"context": "context", "question": "question", "choices": "choices", "answer": "answer"}, ("accuracy",),
        HubLayout(
            "lighteval/siqa", splits=VALIDATION_AS_TEST, held_out=1000,
            columns={
                "choices": lambda row: [row["answerA"], row["answerB"], row["answerC"]],
                "answer": lambda row: list("123").index(str(row["label"])),
            },
        ),
    ),
    "e2e_nlg": Task(
        "generation", "e2e_nlg", SOURCE_TARGETS, ("bleu", "nist", "meteor", "rougeL_coco", "cider"),
        HubLayout(
            f"tuetschek/e2e_nlg@{PARQUET_REVISION}", parquet_files("train", "validation", "test"),
            columns={"source": "meaning_representation", "targets": "human_reference"},
            grouped_splits=("validation", "test"),
        ),
        TABLE_TO_TEXT_TEMPLATE,
        metric_options={"bleu": {"lowercase": True}},
    ),
    "dart": Task(
        "generation", "dart", SOURCE_TARGETS, TABLE_TO_TEXT_METRICS,
        HubLayout(
            f"Yale-LILY/dart@{PARQUET_REVISION}", parquet_files("train", "validation", "test"),
            columns={
                "source": lambda row: format_triples(row["tripleset"]),
                "targets": lambda row: nested_field(row["annotations"], "text"),
            },
        ),
        TABLE_TO_TEXT_TEMPLATE,
    ),
    "webnlg": Task(
        "generation", "webnlg", SOURCE_TARGETS, TABLE_TO_TEXT_METRICS,
        HubLayout(
            "GEM/web_nlg@5df27588a0b8eb8af35396d865ff297b85bd81e3",
            {split: f"en/web_nlg-{split}.parquet" for split in ("train", "validation", "test")},
            columns={
                "source": lambda row: format_triples(row["input"]),
                "targets": lambda row: row["references"] or row["target"],
            },
        ),
        TABLE_TO_TEXT_TEMPLATE,
    ),
    "samsum": Task(
        "generation", "samsum", {"source": "dialogue", "targets": "summary"}, SUMMARY_METRICS,
        HubLayout("knkarthick/samsum"), SUMMARY_TEMPLATE,
    ),
    "xsum": Task(
        "generation", "xsum", {"source": "document", "targets": "summary"}, SUMMARY_METRICS,
        HubLayout(f"EdinburghNLP/xsum@{PARQUET_REVISION}", parquet_files("train", "validation", "test")),
        SUMMARY_TEMPLATE,
    ),
    "multi_news": Task(
        "generation", "multi_news", {"source": "document", "targets": "summary"}, SUMMARY_METRICS,
        HubLayout(f"alexfabbri/multi_news@{PARQUET_REVISION}", parquet_files("train", "validation", "test")),
        SUMMARY_TEMPLATE,
    ),
    "wmt16_en_ro": Task(
        "generation", "wmt16_en_ro", SOURCE_TARGETS, ("bleu", "chrf", "ter"),
        HubLayout(
            "wmt/wmt16:ro-en",
            columns={
                "source": lambda row: row["translation"]["en"], "targets": lambda row: row["translation"]["ro"],
            },
        ),
        "{source}\nIn Romanian:", languages=("en", "ro"),
    ),
    "g2p_us_to_gb": Task("generation", "g2p_us_to_gb", SOURCE_TARGETS, ("exact", "per"), template="{source}\n"),
    "nq_open": Task(
        "generation", "nq_open", {"source": "question", "targets": "answers"}, ("exact_match", "answer_f1"),
        HubLayout(
            "google-research-datasets/nq_open", splits=VALIDATION_AS_TEST, held_out=1000, columns={"targets": "answer"}
        ),
        "{source}?",
    ),
    "english_novels": Task("language", "english_novels", {"text": "text"}, ("perplexity",)),
    "imdb_text": Task(
        "language", "imdb_text", {"text": "text"}, ("perplexity",),
        HubLayout("stanfordnlp/imdb", splits={"train": "unsupervised", "test": "test"}, held_out=1000),
    ),
    "wikitext2": Task(
        "language", "wikitext2_eval", {"text": "text"}, ("perplexity",), HubLayout("Salesforce/wikitext:wikitext-2-v1")
    ),
    "tickets": Task("classification", "tickets", {"text": "text", "label": "label"}, CLASSIFICATION_METRICS),
}  # fmt: skip
"""Name -> task."""


def find_task(name: str, data_root: str | None) -> tuple[Task, str | HubLayout]:
    """Return a known task, and the folder of its data or its layout on the hub."""
    if name not in TASKS:
        raise DeltuneError(unknown_name("task", name, TASKS))
    task = TASKS[name]
    if task.packaged is not None:
        return task, str(task.packaged)
    if data_root is None:
        if not task.hub:
            raise DeltuneError(f"task {name} has no hub id; give data_root, the folder that holds {task.folder}/")
        return task, replace(task.hub, columns={**task.columns, **task.hub.columns})
    folder = user_path(data_root, "data_root") / task.folder
    if not folder.is_dir():
        if not folder.parent.is_dir():
            raise DeltuneError(f"there is no folder {folder.parent}, where task {name} is looked for")
        available = [n for n, t in TASKS.items() if (folder.parent / t.folder).is_dir()]
        is_task_folder = Path(data_root).name == task.folder
        raise DeltuneError(
            f"{folder.parent} has no folder {task.folder} for task {name}; "
            + (
                f"as data_root give its parent, {folder.parent.parent}"
                if is_task_folder
                else f"of the tasks it has {', '.join(available) or 'none'}"
            )
        )
    return task, str(folder)
