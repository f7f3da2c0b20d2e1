"""What a run shows of itself: report.html, the comparison of runs, advice, intervals, progress, threads."""

from __future__ import annotations

import html
import io
import json
import logging
import math
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy.stats import binomtest
from transformers import BertConfig, BertModel

import deltune
import tiny
from browser import MISSING, Browser, executable
from deltune.cli.output import log_to_stderr
from deltune.cli.threads import free_threads
from deltune.errors import DeltuneError
from deltune.models import packaged_minilm, portable_name
from deltune.runtime.model_card import render_card
from deltune.runtime.serialization import delta_metadata
from deltune.train.metrics.intervals import difference_interval, interval, standard_error
from deltune.train.metrics.registry import compute_scores
from deltune.train.progress import ProgressDisplay
from deltune.train.records import command_line
from deltune.train.report import advice as advising
from deltune.train.report.error_analysis import MAX_MATRIX, Analysis, analyse
from deltune.train.report.page import compare, loading_recipe, read_all, render_report, run_facts
from deltune.train.run import train
from deltune.train.run_folder import RunFolder
from studies.test_page import EVIL, Reader

LABELS = {"fruit": EVIL, "tool": "<b>tool</b>", "beast": "beast"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run on texts and labels that are HTML."""
    root = tmp_path_factory.mktemp("reports")
    for path in sorted(tiny.data(root / "data").glob("*.jsonl")):
        rows = [{"text": f"{row['text']} {EVIL}", "label": LABELS[row["label"]]} for row in tiny.objects(path)]
        tiny.lines(path, rows)
    train(tiny.spec(root, max_length=32), root / "run", progress=False)
    return RunFolder(root / "run")


@pytest.fixture
def copy(whole: RunFolder, tmp_path: Path) -> Callable[..., RunFolder]:
    """Copies the run, with other results, log lines or predictions."""

    def make(
        name: str = "run",
        metrics: Callable[[dict[str, Any]], Any] | None = None,
        log: list[dict[str, Any]] | None = None,
        answer: Callable[[dict[str, Any]], str] | None = None,
    ) -> RunFolder:
        run = RunFolder(tmp_path / name)
        shutil.copytree(whole.folder, run.folder)
        if metrics is not None:
            values = json.loads(run.metrics_file.read_text())
            metrics(values)
            run.metrics_file.write_text(json.dumps(values))
        if log is not None:
            tiny.lines(run.log_file, log)
        if answer is not None:
            path = run.predictions / "test.jsonl"
            tiny.lines(path, [{**row, "prediction": answer(row)} for row in tiny.objects(path)])
        return run

    return make


# -- the page


def test_the_page_is_whole_escaped_and_asks_for_nothing(whole: RunFolder) -> None:
    text = whole.report_file.read_text()
    reader = Reader(text)
    assert len(reader.all("script")) == 1 and "<script>alert" not in text and "<b>tool</b>" not in text
    assert "alert(" in reader.visible_text()
    assert not re.search(r"https?:|url\((?!#)|@import", text)
    assert "default-src 'none'" in str(reader.all("meta"))
    ids = [attrs["id"] for _, attrs in reader.elements if "id" in attrs]
    assert len(ids) == len(set(ids))


def test_the_page_says_everything(whole: RunFolder) -> None:
    text = Reader(whole.report_file.read_text()).visible_text()
    for split, scores in whole.metrics.scores.items():
        assert split in text
        for name, value in scores.items():
            assert name in text and f"{value:.4f}" in text
    low, high = whole.metrics.intervals["test"]["accuracy"]
    assert f"{low:.4f} … {high:.4f}" in text
    for part in ("prefix(length=4) + layernorm", "Confusion matrix", "deltune.load(model", "max_length: 32", "torch"):
        assert part in text
    assert "data · model · prefix(length=4) + layernorm Kind of task: classification" in " ".join(text.split())
    assert whole.data.digests["test"] in text
    assert len(Reader(whole.report_file.read_text()).all("figure")) == 3, "loss, validation, rate"


def test_the_recipe_for_loading_works(
    whole: RunFolder, copy: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the folder of the run as it lies beside the reader, and of the packaged model no folder at all."""
    monkeypatch.chdir(whole.folder.parent)
    names: dict[str, Any] = {}
    exec(loading_recipe(advising.read_finished(whole)), names)
    assert repr(names["tuned"].method) == whole.config.method.expression
    run = copy()
    facts = json.loads((run.delta / "delta.json").read_text())
    facts["base"]["name"] = portable_name(str(packaged_minilm()))
    (run.delta / "delta.json").write_text(json.dumps(facts))
    recipe = loading_recipe(advising.read_finished(run))
    assert "from_pretrained(packaged_minilm(), num_labels=3)\n" in recipe and "/" not in recipe


def test_what_is_not_finished_has_no_page(copy: Callable[..., RunFolder]) -> None:
    one, two = copy("one"), copy("two")
    one.metrics_file.unlink()
    (two.predictions / "test.jsonl").write_text('{"prediction": 1}\n')
    with pytest.raises(DeltuneError, match=r"(?s)one is not finished.*test.jsonl line 1"):
        read_all([one, two])


def test_runs_side_by_side(whole: RunFolder, copy: Callable[..., RunFolder]) -> None:
    """A run that is always right beats the other, by as much as its accuracy says."""

    def perfect(values: dict[str, Any]) -> None:
        values["test"]["accuracy"] = 1.0

    better = copy("better", perfect, answer=lambda row: row["reference"])
    runs = read_all([whole, better])
    comparison = compare(runs)
    assert comparison.main == "accuracy" and [run.difference.text for run in comparison.runs][1] == "best"
    accuracy = whole.metrics.test["accuracy"]
    assert comparison.runs[0].difference.text == f"{accuracy - 1:+.4f}"
    low, high = map(float, re.findall(r"[+-][\d.]+", comparison.runs[0].difference.spread))
    assert low < accuracy - 1 < high < 0
    text = Reader(render_report(runs)).visible_text()
    assert "better" in text and "paired" in text
    assert run_facts(runs[0])["scores"] == whole.metrics.scores
    facts = json.loads(better.environment_file.read_text())
    facts["data"]["digests"]["test"] = "0" * 16
    better.environment_file.write_text(json.dumps(facts))
    other = compare(read_all([whole, better]))
    assert "differ" in other.notes[0] and not any(run.difference.text for run in other.runs)


def test_a_metric_without_differences_decides_nothing(whole: RunFolder, copy: Callable[..., RunFolder]) -> None:
    """Runs of the same accuracy are compared by what differs, and where nothing does none is called the best."""
    other = copy("other", lambda values: values["test"].update(f1_macro=0.0, loss=9.0))
    comparison = compare(read_all([whole, other]))
    assert comparison.main == "f1_macro" and comparison.runs[0].difference.text == "best"
    expected = "accuracy is the same for every run and decides nothing, so they are compared by f1_macro."
    assert comparison.notes == (expected,)
    same = compare(read_all([whole, copy("same")]))
    assert [run.difference.text for run in same.runs] == ["equal", "equal"]


# -- errors by kind of task

LINES: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "classification": (
        [
            {"id": "1", "input": "x", "prediction": "a", "reference": "a", "scores": {"a": 0.9, "b": 0.1}},
            {"id": "2", "input": {"text": "x", "pair": "y"}, "prediction": "a", "reference": "b", "scores": {"a": 0.7}},
            {"id": "3", "input": "z", "prediction": "b", "reference": "a", "scores": {"b": 0.8}},
        ],
        ["1 of 3 rows are right", "3", "2"],
    ),
    "choice": (
        [{"id": "1", "input": {"question": "q", "choices": ["l", "r"]}, "prediction": 1, "reference": 0,
          "scores": [0.2, 0.8]}],
        ["0 of 1 rows are right", "1"],
    ),
    "tagging": (
        [
            {"id": "1", "input": ["A", "B", "C"], "prediction": ["B-X", "O", "B-Y"],
             "reference": ["B-X", "I-X", "B-Z"]},
            {"id": "2", "input": ["D"], "prediction": ["B-X"], "reference": ["B-X"]},
        ],
        ["1 of 2 rows are right", "1"],
    ),
    "generation": (
        [
            {"id": "1", "input": "p", "prediction": "the cat sat on it", "reference": ["the cat sat on it", "x"]},
            {"id": "2", "input": "p", "prediction": "the cat sat on a mat", "reference": ["the dog sat on a mat"]},
        ],
        ["1 of 2 rows are exactly right", "2"],
    ),
    "language": (
        [
            {"id": "1", "input": "p", "prediction": -20.0, "reference": 10},
            {"id": "2", "input": "q", "prediction": -50.0, "reference": 10},
        ],
        ["2 texts of 20 predicted tokens", "2", "1"],
    ),
}  # fmt: skip
"""Kind -> lines, and of their analysis how the summary begins and the ids of the worst rows, in order."""


@pytest.mark.parametrize("kind", LINES)
def test_the_errors_of_each_kind_of_task(kind: str) -> None:
    lines, (summary, *wrong) = LINES[kind]
    analysis = analyse(kind, lines)
    assert analysis.summary.startswith(summary)
    assert [example.id for example in analysis.wrong] == wrong


@pytest.mark.parametrize("kind", ["tagging", "language"])
def test_predictions_of_another_kind_are_refused(kind: str) -> None:
    with pytest.raises(DeltuneError, match=f"not those of {kind}"):
        analyse(kind, [{"id": "1", "prediction": {}, "reference": None, "input": 3}])


def test_what_is_counted() -> None:
    labels = analyse("classification", LINES["classification"][0], ("a", "b"))
    assert labels.confusion is not None and labels.confusion.counts == ((1, 1), (1, 0))
    assert labels.majority == "a" and labels.baseline == pytest.approx(2 / 3)
    by_type, by_error = analyse("tagging", LINES["tagging"][0]).tables
    assert by_type.rows[0] == ("X", "2", "2", "0.500", "0.500", "0.500")
    assert dict(by_error.rows) == {"X with wrong ends": "1", "Z taken for Y": "1"}
    many = [{"id": i, "prediction": str(i + 1), "reference": str(i), "input": ""} for i in range(MAX_MATRIX + 1)]
    analysis = analyse("classification", many)
    assert analysis.confusion is None and analysis.tables[0].title == "Most frequent confusions"


def text_lines(*answers: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"id": str(i), "input": "p", "prediction": p, "reference": [r]} for i, (p, r) in enumerate(answers)]


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("language", [{"id": "1", "input": "p", "prediction": -20.0, "reference": 10}]),
        ("language", [{"id": str(i), "input": "p", "prediction": -20.0 - i, "reference": 10} for i in range(4)]),
        ("language", [{"id": str(i), "input": "p", "prediction": -20.0 - i, "reference": 10} for i in range(9)]),
        ("generation", text_lines(("a b", "c d"))),
        ("generation", text_lines(*[("the cat sat", f"the dog {i} sat") for i in range(8)])),
        ("generation", text_lines(("x", "x"), ("y", "z"))),
    ],
)
def test_no_row_is_among_the_best_and_the_worst(kind: str, lines: list[dict[str, Any]]) -> None:
    analysis = analyse(kind, lines)
    wrong, right = ({one.id for one in rows} for rows in (analysis.wrong, analysis.right))
    assert wrong and not wrong & right
    assert analysis.right_title != "Right" or all(one.prediction == one.reference for one in analysis.right)
    assert analysis.wrong_title != "Worst" or right
    assert "1 texts" not in analysis.summary


# -- commands and model cards


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["deltune", "train", "--method", "lora(rank=8)"], 'deltune train --method "lora(rank=8)"'),
        (["--method", "lora(at='query')"], """--method "lora(at='query')\""""),
        (["--template", 'say "{text}"'], """--template 'say "{text}"'"""),
        (["--template", "costs $5 it's"], """--template 'costs $5 it'"'"'s'"""),
        (["runs/a b", ""], '"runs/a b" ""'),
    ],
)
def test_a_command_is_quoted_for_the_reader(words: list[str], shown: str) -> None:
    line = command_line(words)
    assert shlex.split(line) == words and line == shown


def test_a_model_card_escapes_once() -> None:
    method = "lora(rank=2, at='query') + layernorm(terms='gain')"
    tuned = deltune.attach(BertModel(BertConfig(**tiny.SIZES, vocab_size=9)), method)
    metadata = delta_metadata(tuned.delta(), tuned.attached.metadata_of_base(tuned.delta()))
    card = render_card('It\'s <b> & "so" | #1', metadata, tuned.count(), "it's")
    assert html.unescape(card).count(method) == 1 and "#x27" not in card
    assert '# It\'s &lt;b&gt; &amp; "so" &#124; &#35;1' in card


# -- advice


def losses(*values: float) -> list[dict[str, Any]]:
    return [{"step": i + 1, "loss": value} for i, value in enumerate(values)]


def validations(*values: tuple[float, float]) -> list[dict[str, Any]]:
    return [{"step": 6 * (i + 1), "eval_loss": loss, "eval_accuracy": a} for i, (loss, a) in enumerate(values)]


FALLING = losses(1.1, 0.9, 0.5)
ADVICE: dict[str, tuple[dict[str, Any], str]] = {
    "all alike": ({"log": FALLING, "answer": lambda row: "beast"},
                  r"every row of test .*'beast', which 33.3%.*--lr 0\.05"),
    "no better": ({"log": FALLING, "answer": lambda row: "beast" if row["reference"] == "beast" else "<b>tool</b>"
                   if row["reference"] != "<b>tool</b>" else EVIL}, r"no better than always answering.*--epochs 6"),
    "rose": ({"log": losses(1, 2, 3), "answer": lambda row: row["reference"]}, r"rose from 1 to 3.*--lr 0\.002"),
    "stayed, and all is right": ({"log": losses(1, 1, 0.99), "answer": lambda row: row["reference"]}, "^$"),
    "improving": ({"log": [*FALLING, *validations((1.0, 0.3), (0.9, 0.4), (0.8, 0.5))],
                   "answer": lambda row: row["reference"],
                   "metrics": lambda values: values["best"].update(step=18, value=0.5)},
                  r"still improving.*0\.4000 → 0\.5000.*--epochs 6"),
    "undecided": ({"log": [*FALLING, *validations((1.0, 0.0), (0.9, 0.0), (1.1, 0.0))],
                   "answer": lambda row: row["reference"]},
                  r"accuracy was 0\.0000 at every validation, so the epoch with the lowest validation loss.*--metric"),
    "settled": ({"log": [*FALLING, *validations((1.0, 0.3), (0.9, 0.5), (0.899, 0.5))],
                 "answer": lambda row: row["reference"]}, r"^$"),
}  # fmt: skip


@pytest.mark.parametrize("case", ADVICE)
def test_advice(case: str, copy: Callable[..., RunFolder]) -> None:
    changes, expected = ADVICE[case]
    notes = advising.advice(advising.read_finished(copy(**changes)))
    assert len(notes) <= 1 and re.search(expected, "".join(notes)), notes


@pytest.mark.parametrize(
    ("analysis", "expected"),
    [
        (Analysis(24, "", baseline=1 / 3, accuracy=11 / 24, majority="beast"),
         r"accuracy of 0\.458 on test is not clearly better than always answering 'beast' \(0\.333\): with 24 rows "
         r"its 95 % interval begins at 0\.279.*a longer run, such as --epochs 6, or .*--lr 0\.05"),
        (Analysis(24, "", baseline=1 / 3, accuracy=14 / 24, majority="beast"), "^$"),
        (Analysis(24, "", baseline=1 / 3, accuracy=1.0, majority="beast"), "^$"),
        (Analysis(24, "", nothing_right=True), "nothing on test is answered right"),
    ],
)  # fmt: skip
def test_what_is_not_clearly_better(analysis: Analysis, expected: str, whole: RunFolder) -> None:
    notes = advising.nothing_learned(whole.config, analysis, "test", FALLING)
    assert re.search(expected, "".join(notes)), notes
    longer = advising.nothing_learned(whole.config, analysis, "test", [*FALLING, {"step": 200, "loss": 0.4}])
    assert len(longer) == len(notes) and all("deltune choose" in note for note in longer)
    last = max(line["step"] for line in FALLING)
    early = advising.nothing_learned(whole.config, analysis, "test", FALLING, best_step=last // 2)
    assert len(early) == len(notes) and all(
        f"lower learning rate, such as --lr 0.002, since validation was best at step {last // 2} of" in note
        for note in early
    )


@pytest.mark.parametrize(("third", "todo"), [(1, ""), (2, ", or --epochs 6"), (3, ", or --epochs 6")])
def test_a_run_that_was_best_early_need_not_be_longer(third: int, todo: str, whole: RunFolder) -> None:
    """Where hardly any entity is found, and where the loss stayed, by the third of the run with its best validation."""
    log, metrics = losses(1.0, 0.99, 0.98), whole.metrics
    step = third * max(line["step"] for line in log) // 3
    best = metrics.best.model_copy(update={"step": step})
    poor = metrics.model_copy(update={"test": {"entity_f1": 0.01}, "best": best})
    for note in (
        *advising.loss_stayed(whole.config, log, step),
        *advising.few_entities(whole.config, poor, "test", log),
    ):
        assert re.search(rf"another learning rate, such as --lr (0\.\d+){todo}$", note), note
    assert advising.few_entities(whole.config, poor, "test", log)


# -- intervals


def test_intervals_are_those_of_the_books() -> None:
    """Wilson's for shares; the jackknife of a mean is its standard error, of distinct rows and in groups."""
    hits = [1] * 17 + [0] * 7
    score = compute_scores(["accuracy"], hits, [1] * 24, [0, 1])["accuracy"]
    ends = binomtest(17, 24).proportion_ci(method="wilson")
    assert interval(score, (0.0, 1.0)) == pytest.approx((ends.low, ends.high))
    for rows in (np.array(hits, float).reshape(-1, 1), np.arange(90.0).reshape(-1, 1)):
        error = rows.std(ddof=1) / math.sqrt(len(rows))
        assert standard_error(rows, lambda chosen: float(chosen.mean())) == pytest.approx(error)
    many = np.random.default_rng(0).standard_normal((5000, 1))
    assert standard_error(many, lambda chosen: float(chosen.mean())) == pytest.approx(1 / math.sqrt(5000), rel=0.3)


def test_what_has_no_interval() -> None:
    equal = compute_scores(["perplexity"], [-2.0, -2.0, -2.0], [1, 1, 1], None)
    assert interval(equal["perplexity"], (1.0, float("inf"))) is None, "no spread"
    one = compute_scores(["accuracy"], [1], [1], [0, 1])["accuracy"]
    assert interval(one, (0.0, 1.0)) is None


def test_a_paired_difference_is_narrower() -> None:
    """What is hard for both cancels: 10 of 100 rows differ, though both are right on half of them."""
    references = [1] * 100
    first, second = [1] * 60 + [0] * 40, [1] * 50 + [0] * 50
    one, two = (compute_scores(["accuracy"], p, references, [0, 1])["accuracy"] for p in (first, second))
    low, high = difference_interval(one, two) or (0.0, 0.0)
    assert 0 < low < 0.1 < high < 0.2
    assert (low + high) / 2 == pytest.approx(0.1)


# -- charts


# -- progress


class Clock:
    """Seconds that a test decides."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_lines_come_now_and_then_with_the_time_left(caplog: pytest.LogCaptureFixture) -> None:
    """After 5 seconds, then every 10 and after 100 seconds every tenth of the time; the time left is exact."""
    caplog.set_level(logging.INFO, "deltune")
    clock = Clock()
    with ProgressDisplay(console=Console(file=io.StringIO()), clock=clock) as display:
        display.start("training", 3600, done=0, columns=("step",))
        moments = []
        for second in range(1, 3601):
            clock.now = second
            before = len(caplog.records)
            display.show({"step": f"{second}/3600"})
            display.advance()
            moments += [second] * (len(caplog.records) - before)
    assert moments[:4] == [5, 15, 25, 35] and 20 < len(moments) < 60
    assert caplog.records[1].message == "step 15/3600, 0:15 elapsed, 59:45 left"


def test_a_validation_is_a_line_and_a_row(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "deltune")
    clock, written = Clock(), io.StringIO()
    facts = {"step": "6/12", "validation": "accuracy 0.5"}
    for terminal in (False, True):
        console = Console(file=written, force_terminal=terminal, width=100, height=40)
        with ProgressDisplay(console=console, clock=clock) as display:
            display.start("training", 12, columns=("step", "validation"), seconds=60)
            clock.now += 30
            display.advance(6)
            display.keep(facts)
            display.keep({"step": "7/12"})
    lines = [record.message for record in caplog.records]
    assert lines[-1] == "step 6/12, validation accuracy 0.5, 1:30 elapsed, 0:30 left"
    assert len(lines) == 2, "the line that was due, and the row; a second row at once is none, and a table is no log"
    assert "accuracy 0.5" in written.getvalue() and "validation" in written.getvalue()


def test_a_line_is_printed_once_though_a_library_listens_to_all(capsys: pytest.CaptureFixture[str]) -> None:
    """absl, which rouge-score imports, gives the root logger a handler."""
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(handler)
    try:
        with log_to_stderr(quiet=False):
            logging.getLogger("deltune").info("step 1/2")
    finally:
        logging.getLogger().removeHandler(handler)
    assert capsys.readouterr().err == "step 1/2\n"
    assert logging.getLogger("deltune").propagate


def test_a_step_is_shown_once(caplog: pytest.LogCaptureFixture) -> None:
    """What a kept row says is not said again below it, and a step that is validated has no line of its own before."""
    caplog.set_level(logging.INFO, "deltune")
    clock, written = Clock(), io.StringIO()
    for terminal in (False, True):
        console = Console(file=written, force_terminal=terminal, width=100, height=40)
        display = ProgressDisplay(console=console, clock=clock)
        display.start("training", 12, columns=("step", "validation"))
        clock.now += 60
        display.show({"step": "12/12", "validation": ""})
        display.count(12)
        display.keep({"validation": "accuracy 0.5"})
        console.print(display._render())
        clock.now += 60
    assert [record.message for record in caplog.records] == [
        "step 12/12, validation accuracy 0.5, 1:00 elapsed, 0:00 left"
    ]
    assert all(table.count("12/12") == 1 for table in written.getvalue().split("validation")[1:])


def test_units_that_are_done_in_part_count() -> None:
    """A quarter of a job in a minute, after a job and a quarter that were done before: 18 minutes for the other 4.5."""
    clock = Clock()
    with ProgressDisplay(False, clock=clock) as display:
        display.start("study", 6, done=1, unit="jobs")
        assert display.seconds_left is None
        clock.now = 60
        display.reach(1.5, 6, done_before=1.25)
        assert display.seconds_left == pytest.approx(18 * 60)
        assert display._amount() == "1/6 jobs"


# -- threads


@pytest.mark.parametrize(
    ("cores", "busy", "threads"), [(2, 0.0, 2), (2, 0.4, 2), (2, 1.2, 1), (2, 9.0, 1), (16, 3.6, 12), (1, 0.0, 1)]
)
def test_threads_leave_room_for_other_work(cores: int, busy: float, threads: int) -> None:
    assert free_threads(cores, busy) == threads


def test_entities_are_marked_in_the_text() -> None:
    line = {
        "id": "1", "input": ["Ada", "sings", "in", "Rome"], "scores": None, "reference": ["B-PER", "O", "O", "B-LOC"],
        "prediction": ["B-PER", "O", "O", "O"],
    }  # fmt: skip
    (example,) = analyse("tagging", [line]).wrong
    assert example.marked == (("Ada", "PER", "found"), ("sings in", "", ""), ("Rome", "LOC", "missed"))


@pytest.mark.skipif(executable() is None, reason=MISSING)
@pytest.mark.parametrize("width", [400, 1280])
def test_the_first_table_needs_no_scrollbar(whole: RunFolder, tmp_path: Path, width: int) -> None:
    with Browser(tmp_path) as browser:
        browser.open(whole.report_file.resolve(), width)
        wide = "[document.documentElement, document.querySelector('.scroll')].map((e) => e.scrollWidth - e.clientWidth)"
        assert browser.ask(wide) == [0, 0] and "accuracy" in browser.ask("document.querySelector('table').innerText")
