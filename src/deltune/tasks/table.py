"""Tasks as values: what is read, what is said to a model, what is measured; one entry of the table for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import DeltuneError, unknown


@dataclass(frozen=True)
class Task:
    """A data set with its kind, its columns and its metrics, the first of which chooses the best epoch.

    folder: below a data root. hub: its id there, OWNER/NAME or OWNER/NAME:CONFIGURATION. columns: role -> column.
    template: what a model that answers in words is given, with the roles in braces. words: the text of each label.
    version: raised when anything changes what a score means.
    """

    kind: str
    folder: str
    columns: Mapping[str, str]
    metrics: tuple[str, ...]
    hub: str = ""
    template: str = ""
    words: Mapping[str, str] = field(default_factory=dict)
    version: int = 1


ACCURACY = ("accuracy", "f1", "f1_macro", "matthews")
ENTITIES = ("entity_f1",)
TABLE_TO_TEXT = ("bleu", "meteor", "ter", "chrf", "moverscore", "bertscore", "bleurt")
SUMMARY = ("rouge1", "rouge2", "rougeL", "rougeLsum")
YES_NO = {"entailment": "yes", "not_entailment": "no"}
INFERENCE = {"entailment": "yes", "neutral": "maybe", "contradiction": "no"}


def _single(folder: str, hub: str, text: str = "sentence") -> Task:
    words = {"negative": "terrible", "positive": "great"}
    return Task("classification", folder, {"text": text, "label": "label"}, ACCURACY, hub, "{text} It was", words)


def _pair(folder: str, hub: str, first: str, second: str, template: str, words: Mapping[str, str]) -> Task:
    columns = {"text": first, "pair": second, "label": "label"}
    return Task("classification", folder, columns, ACCURACY, hub, template, words)


NLI = "{text} Does it follow that: {pair} yes, maybe or no?"

TASKS: Mapping[str, Task] = {
    "sst2": _single("sst2", "nyu-mll/glue:sst2"),
    "imdb": _single("imdb", "stanfordnlp/imdb", "text"),
    "rotten_tomatoes": _single("rotten_tomatoes", "cornell-movie-review-data/rotten_tomatoes", "text"),
    "sick": _pair("sick", "RobZamp/sick", "premise", "hypothesis", NLI, INFERENCE),
    "snli": _pair("snli", "stanfordnlp/snli", "premise", "hypothesis", NLI, INFERENCE),
    "mnli": _pair("mnli", "nyu-mll/glue:mnli", "premise", "hypothesis", NLI, INFERENCE),
    "cb": _pair("cb", "aps/super_glue:cb", "premise", "hypothesis", NLI, INFERENCE),
    "rte": _pair(
        "rte", "nyu-mll/glue:rte", "premise", "hypothesis", "{text} Does it follow that: {pair} yes or no?", YES_NO
    ),
    "qnli": _pair(
        "qnli", "nyu-mll/glue:qnli", "question", "sentence", "{text} Does this answer it: {pair} yes or no?", YES_NO
    ),
    "qqp": _pair(
        "qqp", "nyu-mll/glue:qqp", "question1", "question2", "{text} Is it the same to ask: {pair} yes or no?",
        {"duplicate": "yes", "not_duplicate": "no"},
    ),
    "mrpc": _pair(
        "mrpc", "nyu-mll/glue:mrpc", "sentence1", "sentence2", "{text} Does this say the same: {pair} yes or no?",
        {"equivalent": "yes", "not_equivalent": "no"},
    ),
    "conll04": Task("tagging", "conll04", {"tokens": "tokens", "tags": "tags"}, ENTITIES),
    "broad_twitter": Task(
        "tagging", "broad_twitter", {"tokens": "tokens", "tags": "tags"}, ENTITIES, "GateNLP/broad_twitter_corpus"
    ),
    "commonsense_qa": Task(
        "choice", "commonsense_qa", {"question": "question", "choices": "choices", "answer": "answer"}, ("accuracy",)
    ),
    "social_iqa": Task(
        "choice", "social_iqa",
        {"context": "context", "question": "question", "choices": "choices", "answer": "answer"}, ("accuracy",),
    ),
    "e2e_nlg": Task(
        "generation", "e2e_nlg", {"source": "source", "targets": "targets"},
        ("bleu", "nist", "meteor", "rougeL", "cider"), template="{source} In words:",
    ),
    "dart": Task(
        "generation", "dart", {"source": "source", "targets": "targets"}, TABLE_TO_TEXT,
        template="{source} In words:",
    ),
    "webnlg": Task(
        "generation", "webnlg", {"source": "source", "targets": "targets"}, TABLE_TO_TEXT,
        template="{source} In words:",
    ),
    "samsum": Task(
        "generation", "samsum", {"source": "dialogue", "targets": "summary"}, SUMMARY, "knkarthick/samsum",
        "{source}\nSummary:",
    ),
    "xsum": Task(
        "generation", "xsum", {"source": "document", "targets": "summary"}, SUMMARY, "EdinburghNLP/xsum",
        "{source}\nSummary:",
    ),
    "multi_news": Task(
        "generation", "multi_news", {"source": "document", "targets": "summary"}, SUMMARY,
        template="{source}\nSummary:",
    ),
    "wmt16_en_ro": Task(
        "generation", "wmt16_en_ro", {"source": "source", "targets": "targets"}, ("bleu", "chrf", "ter"),
        template="{source}\nIn Romanian:",
    ),
    "g2p_us_to_gb": Task(
        "generation", "g2p_us_to_gb", {"source": "source", "targets": "targets"}, ("exact", "per"),
        template="{source}\n",
    ),
    "nq_open": Task(
        "generation", "nq_open", {"source": "question", "targets": "answers"}, ("exact_match", "answer_f1"),
        "google-research-datasets/nq_open", "{source}?",
    ),
    "english_novels": Task("language", "english_novels", {"text": "text"}, ("perplexity",)),
    "imdb_text": Task("language", "imdb_text", {"text": "text"}, ("perplexity",)),
    "wikitext2": Task(
        "language", "wikitext2_eval", {"text": "text"}, ("perplexity",), "Salesforce/wikitext:wikitext-2-v1"
    ),
}  # fmt: skip
"""Every known task."""


def find(name: str, data_root: str | None) -> tuple[Task, str]:
    """A task of the table and where its data is: a folder below `data_root`, else its hub id.

    Errors: an unknown task, a root without that folder, a task that no hub has.
    """
    if name not in TASKS:
        raise DeltuneError(unknown("task", name, TASKS))
    task = TASKS[name]
    if data_root is None:
        if not task.hub:
            raise DeltuneError(f"task {name} has no hub id; give data_root, the folder that holds {task.folder}/")
        return task, task.hub
    folder = Path(data_root).expanduser() / task.folder
    if not folder.is_dir():
        here = [n for n, t in TASKS.items() if (folder.parent / t.folder).is_dir()]
        raise DeltuneError(
            f"{folder.parent} has no folder {task.folder} for task {name}; it has {', '.join(here) or 'none'}"
        )
    return task, str(folder)
