"""Tables of outcomes: nothing is left out in silence, best and second are right, and every format says the same."""

from __future__ import annotations

import csv
import io
import re
import statistics
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import made
from deltune.errors import DeltuneError
from deltune.studies.jobs.job import Outcome
from deltune.studies.report.aggregate import NumberFormat, aggregate
from deltune.studies.report.figure_spec import TableSpec
from deltune.studies.report.tables import (
    Table,
    TableCell,
    build_table,
    format_percent,
    mark_best,
    table_legend,
    to_csv,
    to_latex,
    to_markdown,
)

FORMATS = {"markdown": to_markdown, "latex": to_latex, "csv": to_csv}

LABELS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=12)
JOBS = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.sampled_from("xyz"),
        st.integers(0, 2),
        st.one_of(st.floats(0, 1), st.just(float("nan")), st.none()),
    ),
    unique_by=lambda job: job[:3],
    max_size=20,
)


def cell(row: str, column: str, value: float | None = None, seed: int = 0, percent: float = 1.0) -> Outcome:
    where = {"method": row, "task": column, "seed": seed}
    if value is None:
        return Outcome(where, error=f"why {row}{column}{seed}")
    return Outcome(where, scores={"accuracy": value}, count={"percent": percent})


def test_a_view_may_show_the_median() -> None:
    outcomes = [cell("a", "x", value, seed) for seed, value in enumerate((0.1, 0.2, 0.9))]
    shown = {median: aggregate(TableSpec(median=median), outcomes, "accuracy", ("method",)) for median in (False, True)}
    assert shown[True]["a",].mean == 0.2 and shown[False]["a",].mean == pytest.approx(0.4)
    assert shown[True]["a",].std == shown[False]["a",].std == statistics.stdev((0.1, 0.2, 0.9))
    for median, word in ((True, "Median"), (False, "Mean")):
        (line,) = table_legend(build_table(TableSpec(median=median), outcomes))
        assert f"{word} ± standard deviation over 3 seeds." in line


def test_runs_that_are_no_better_than_chance_are_marked() -> None:
    """By an exact 0 of a score that only such a run has; a lower loss is better, and such a run is no missing one."""
    scores = {"a": (0.0, 0.4, 0.0), "b": (0.3, 0.2, 0.1)}
    outcomes = [
        Outcome({"method": row, "task": "x", "seed": seed}, scores={"accuracy": 0.5, "matthews": value, "loss": value})
        for row, values in scores.items()
        for seed, value in enumerate(values)
    ]
    table = build_table(TableSpec(metric="accuracy", percent=False, average=False, rank=False), outcomes)
    assert table.notes == ("seeds 0, 2: no better than chance",)
    assert [(row.cells[0].mean, row.cells[0].n, bool(row.cells[0].notes)) for row in table.rows] == [
        (0.5, 3, True), (0.5, 3, False)
    ]  # fmt: skip
    losses = build_table(TableSpec(metric="loss", percent=False, average=False, rank=False), outcomes)
    assert [row.cells[0].best for row in losses.rows] == [True, False] and "↓" in losses.columns[0].labels[-1]


def entries(made_grid: Table) -> dict[tuple[str, str], TableCell]:
    return {
        (row.label, column.text): entry
        for row in made_grid.rows
        for entry, column in zip(row.cells, made_grid.columns, strict=True)
    }


@settings(deadline=None, max_examples=100)
@given(JOBS)
def test_every_outcome_is_in_its_cell_or_said_to_be_missing(jobs: list[tuple[str, str, int, float | None]]) -> None:
    table = build_table(TableSpec(), [cell(row, column, value, seed) for row, column, seed, value in jobs])
    at = entries(table)
    values: dict[tuple[str, str], list[float]] = {}
    for row, column, seed, value in jobs:
        if value is None:
            assert all(f"why {row}{column}{seed}" in text(table) for text in FORMATS.values())
        elif value != value:
            assert any("accuracy is nan" in table.notes[i] for i in at[row, column].notes)
        else:
            values.setdefault((row, column), []).append(value)
    for row in {job[0] for job in jobs}:
        for column in {job[1] for job in jobs}:
            entry, scores = at[row, column], values.get((row, column), [])
            assert entry.n == len(scores)
            assert entry.mean == (pytest.approx(statistics.fmean(scores)) if scores else None)
            assert entry.std == (pytest.approx(statistics.stdev(scores)) if len(scores) > 1 else None)
            assert scores or entry.notes, "an empty cell without a word"


@pytest.mark.parametrize("name", [name for name, (_, views) in made.STUDIES.items() if isinstance(views[0], TableSpec)])
def test_every_error_of_a_study_stands_below_its_table(name: str) -> None:
    outcomes, views = made.STUDIES[name]
    assert isinstance(views[0], TableSpec)
    table = build_table(views[0], outcomes)
    for outcome in outcomes:
        if outcome.error:
            assert outcome.error in " ".join(table.notes)


LN = {  # table 1, BERT-large
    "FT": (85.2, 75.8, 86.2, 85.4, 92.8, 80.4, 69.8, 63.4), "Adapter": (82.8, 76.3, 86.4, 85.0, 93.0, 74.1, 62.6, 65.3),
    "Prefix": (81.4, 76.2, 86.3, 85.3, 93.4, 75.0, 63.2, 65.4),
    "LoRA": (82.3, 77.1, 86.4, 85.2, 93.4, 74.6, 62.7, 65.1),
    "MAM": (83.0, 78.1, 86.6, 85.2, 93.1, 77.6, 63.2, 65.5), "3V": (68.1, 73.6, 81.3, 82.8, 89.1, 70.2, None, None),
    "BitFit": (79.2, 74.2, 77.8, 81.6, 92.6, 70.5, 59.7, 62.8), "LN": (78.9, 76.9, 85.8, 83.8, 89.8, 70.5, 59.6, 63.3),
    "Prefix+LN": (84.2, 77.2, 86.6, 85.4, 93.8, 81.2, 64.0, 65.5),
}  # fmt: skip
PRINTED = {"FT": 79.9, "Adapter": 78.2, "Prefix": 78.3, "LoRA": 78.4, "MAM": 79.0, "BitFit": 74.8, "LN": 76.1,
           "Prefix+LN": 79.8}  # fmt: skip
BEST = {"0": ["FT"], "1": ["MAM"], "2": ["MAM", "Prefix+LN"], "3": ["FT", "Prefix+LN"], "4": ["Prefix+LN"],
        "5": ["Prefix+LN"], "6": ["FT"], "7": ["MAM", "Prefix+LN"], "Avg.": ["FT"]}  # fmt: skip
SECOND = {"0": ["Prefix+LN"], "1": ["Prefix+LN"], "2": [], "3": [], "4": ["Prefix", "LoRA"], "5": ["FT"],
          "6": ["Prefix+LN"], "7": [], "Avg.": ["Prefix+LN"]}  # fmt: skip


def test_a_papers_table_comes_out_as_printed() -> None:
    """Averages, bold and underlined of LN table 1, from its own numbers; 3V takes no part in the average."""
    outcomes = [
        cell(method, str(i), value / 100 if value else None)
        for method, row in LN.items()
        for i, value in enumerate(row)
    ]
    table = build_table(TableSpec(percent=False), outcomes)
    at = entries(table)
    for method, printed in PRINTED.items():  # made there of numbers with more digits than are printed
        assert 100 * (at[method, "Avg."].mean or 0) == pytest.approx(printed, abs=0.07)
    for column, best in BEST.items():
        assert [method for method in LN if at[method, column].best] == best
        assert [method for method in LN if at[method, column].second] == SECOND[column]
    partial = at["3V", "Avg."]
    assert partial.state == "partial" and not partial.best
    assert "over 6 of 8 columns" in table.notes[partial.notes[0]]


@pytest.mark.parametrize(
    ("values", "lower", "best", "second"),
    [
        ([0.9, 0.8, 0.7], False, [0], [1]),
        ([0.9, 0.8, 0.7], True, [2], [1]),
        ([0.9, 0.9, 0.7], False, [0, 1], []),
        ([0.9, 0.8, 0.8], False, [0], [1, 2]),
        ([0.90001, 0.90002, 0.8], False, [0, 1], []),  # equal as they are shown
        ([0.9, 0.9], False, [], []),  # no comparison
        ([0.9], False, [], []),
        ([0.9, None, 0.7], False, [0], [2]),
        ([], False, [], []),
    ],
)
def test_best_and_second(values: list[float | None], lower: bool, best: list[int], second: list[int]) -> None:
    marked = mark_best(
        [TableCell(value, None, 1, "missing" if value is None else "shown") for value in values],
        NumberFormat(100, 1, lower),
    )
    assert [i for i, entry in enumerate(marked) if entry.best] == best
    assert [i for i, entry in enumerate(marked) if entry.second] == second


def test_lower_is_better_where_the_metric_says_so() -> None:
    outcomes, (view, *_) = made.STUDIES["ln/nlg"]
    assert isinstance(view, TableSpec)
    table = build_table(view, outcomes)
    (ter,) = [i for i, column in enumerate(table.columns) if "TER" in column.text]
    values = [row.cells[ter].mean or 0.0 for row in table.rows]
    assert table.rows[values.index(min(values))].cells[ter].best
    assert "↓" in table.columns[ter].text
    ranks = [row.cells[-1].mean or 0.0 for row in table.rows]
    assert table.rows[ranks.index(min(ranks))].cells[-1].best
    assert sum(ranks) == pytest.approx(len(ranks) * (len(ranks) + 1) / 2), "ranks with ties shared add up"


def test_a_loss_is_shown_and_not_ranked() -> None:
    outcomes, (view, *_) = made.STUDIES["ln/nlg"]
    assert isinstance(view, TableSpec)
    with_loss = [replace(one, scores={**one.scores, "loss": float(i % 5)}) for i, one in enumerate(outcomes)]
    table, other = build_table(replace(view, metric=()), with_loss), build_table(replace(view, metric=()), outcomes)
    assert any("loss" in column.text for column in table.columns)
    assert [row.cells[-1].mean for row in table.rows] == [row.cells[-1].mean for row in other.rows]


def test_a_metric_that_was_asked_for_and_is_nowhere_is_said() -> None:
    outcomes, (view, *_) = made.STUDIES["ln/nlg"]
    assert isinstance(view, TableSpec)
    table = build_table(view, outcomes)
    columns = ("E2E, BLEURT", "dart, METEOR", "dart, BLEURT")
    assert table.excluded == tuple(f"{column}: no outcome has this number" for column in columns)
    assert not any("BLEURT" in column.text for column in table.columns)


def test_budgets_stand_in_the_order_of_their_numbers() -> None:
    outcomes = [cell("a", budget, 0.5) for budget in ("10", "0.4", "0.05", "1.5")]
    assert [column.text for column in build_table(TableSpec(average=False, percent=False), outcomes).columns] == [
        "0.05", "0.4", "1.5", "10",
    ]  # fmt: skip


def test_a_seed_that_was_not_run_is_said() -> None:
    table = build_table(TableSpec(), [cell("a", "x", 0.5, 0), cell("a", "x", 0.6, 1), cell("b", "x", 0.5, 0)])
    entry = entries(table)["b", "x"]
    assert entry.n == 1 and table.notes[entry.notes[0]] == "1 of 2: seed 1 not run"
    waiting = [
        Outcome({"method": "a", "task": "x", "seed": seed}, error="not run yet", waiting=True) for seed in (1, 2, 3)
    ]
    table = build_table(TableSpec(), [cell("a", "x", 0.5, 0), *waiting])
    assert table.notes == ("1 of 4: seeds 1, 2, 3: not run yet",), "each seed counts, and they share a reason"


def test_a_forgotten_axis_is_an_error_and_no_average() -> None:
    one, two = cell("a", "x", 0.5), cell("a", "x", 0.7)
    two = Outcome({**two.cell, "lr": 0.1}, scores=two.scores)
    with pytest.raises(DeltuneError, match="differ in lr: name the axis in the view"):
        build_table(TableSpec(), [one, two])


def test_columns_in_different_units_have_no_average() -> None:
    outcomes, (view, *_) = made.STUDIES["ln/nlg"]
    assert isinstance(view, TableSpec)
    table = build_table(TableSpec(columns=view.columns, metric=view.metric, average=True), outcomes)
    assert "no average: the columns are in different units" in table.excluded
    assert all(column.kind != "average" for column in table.columns)


@pytest.mark.parametrize(
    ("percent", "shown"),
    [(100.0, "100"), (12.29, "12.3"), (6.7, "6.7"), (0.334, "0.33"), (0.034, "0.03"), (0.0014, "0.0014"),
     (0.0006, "0.0006"), (0.0002, "0.0002"), (0.0, "0")],
)  # fmt: skip
def test_shares_of_parameters_as_the_papers_print_them(percent: float, shown: str) -> None:
    assert format_percent(percent) == shown


@pytest.mark.parametrize(
    ("number_format", "value", "shown"),
    [(NumberFormat(100, 1), 0.8625, "86.2"), (NumberFormat(1, 2), 43.404, "43.40"), (NumberFormat(), 1234.5, "1,234"),
     (NumberFormat(), 0.01234, "0.0123"),
     (NumberFormat(1, 1), -0.04, "0.0"), (NumberFormat(), None, "–")],
)  # fmt: skip
def test_numbers_as_they_are_shown(number_format: NumberFormat, value: float | None, shown: str) -> None:
    assert number_format.show(value) == shown


@settings(deadline=None, max_examples=100)
@given(JOBS)
def test_csv_reads_back_to_the_same_numbers(jobs: list[tuple[str, str, int, float | None]]) -> None:
    table = build_table(TableSpec(rank=True), [cell(row, column, value, seed) for row, column, seed, value in jobs])
    lines = list(csv.DictReader(io.StringIO(to_csv(table))))
    for row, line in zip(table.rows, lines, strict=False):
        assert line["method"] == row.label
        for entry, column in zip(row.cells, table.columns, strict=True):
            assert (float(line[column.text]) if line[column.text] else None) == entry.mean
            if line.get(f"{column.text} std"):
                assert float(line[f"{column.text} std"]) == entry.std


@settings(deadline=None, max_examples=100)
@given(LABELS, LABELS, LABELS)
def test_any_label_survives_every_format(row: str, column: str, reason: str) -> None:
    outcomes = [
        cell("plain", column, 0.5),
        cell(row, column, 0.6),
        Outcome({"method": "failed", "task": column}, error=reason),
    ]
    built = build_table(TableSpec(title=row, groups=""), outcomes)
    lines = to_markdown(built).splitlines()
    table = [line for line in lines if line.startswith("| ")]
    bars = {len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in table}
    assert len(table) == 2 + len(built.rows) and len(bars) == 1, "every line has as many cells"
    body = to_latex(built)
    for one, other in {
        r"\&": "",
        r"\%": "",
        r"\$": "",
        r"\#": "",
        r"\_": "",
        r"\{": "",
        r"\}": "",
        r"\\": "\n",
    }.items():
        body = body.replace(one, other)
    rows = body[body.index(r"\toprule") : body.index(r"\bottomrule")]
    assert not re.search(r"[#_~^<>|\"]", re.sub(r"\$_{\\pm [\d.]+}\$", "", rows))
    assert {line.count("&") for line in rows.splitlines() if "&" in line} == {len(built.columns)}
    assert rows.count("{") == rows.count("}") and rows.count("$") % 2 == 0
    readers = list(csv.reader(io.StringIO(to_csv(built))))
    assert {len(line) for line in readers} == {len(readers[0])}
    assert all(line[0] in (r.label, f"'{r.label}") for line, r in zip(readers[1:], built.rows, strict=True))


@pytest.mark.parametrize("outcomes", [[], [cell("a", "x", None)]])
def test_nothing_to_show_is_no_error(outcomes: list[Any]) -> None:
    table = build_table(TableSpec(title="T", rank=True), outcomes)
    assert all(text(table) for text in FORMATS.values())
