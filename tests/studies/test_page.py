"""The page of a report: everything in it, nothing fetched, every word escaped; in a browser it fits and sorts."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import browser
import made
from deltune.studies.claims.claims import Beats, Claim
from deltune.studies.claims.comparisons import NOT_RUN
from deltune.studies.claims.decisions import ComparisonResult, Finding, PrintedFinding, SettingResult
from deltune.studies.jobs.job import Outcome
from deltune.studies.jobs.store import JobRecord
from deltune.studies.papers.registry import paper_statements
from deltune.studies.report.figure_spec import Bars, FigureSpec, HeatMap, TableSpec
from deltune.studies.report.figures import draw
from deltune.studies.report.findings import findings_csv
from deltune.studies.report.page import Section, render_page, runs_csv
from deltune.studies.report.provenance import provenance
from deltune.studies.report.tables import build_table

VOID = {"meta", "br", "img", "link", "hr", "input"}
EVIL = "<script>alert('x')</script> & \"quoted\" </title></svg>"


def finding(text: str, source: str, *values: Any, **more: Any) -> Finding:
    return Finding(Claim(text, source, Beats({"method": "a"}, {"method": "b"})), *values, **more)


def result(text: str, effect: float, interval: tuple[float, float] | None = None, **more: Any) -> ComparisonResult:
    return ComparisonResult(text, effect, interval, "points", (0.0, float("inf")), "accuracy", **more)


FIRST_RESULT = result("LN − BitFit", 0.021, (0.012, 0.03), by_setting=(
    SettingResult("on CB", 0.05, (0.01, 0.09), True), SettingResult("on SICK", -0.008, (-0.02, -0.004), False),
    SettingResult("on RTE", -0.001, (-0.02, 0.018), False),
))  # fmt: skip
SECOND_RESULT = result("MAM − LoRA", -0.011, (-0.02, -0.004))
FOUND = (
    finding("layernorm beats BitFit with half the parameters", "LN 3.2", "holds",
            p_adjusted=0.0004, note="paired", comparisons=(FIRST_RESULT,), deciding=FIRST_RESULT),
    finding("MAM beats every other method", "LN 3.2", "does not hold", p_adjusted=0.013,
            comparisons=(SECOND_RESULT,), deciding=SECOND_RESULT),
    finding("the gap between methods shrinks with scale", "AP 4.2", "undecided", note="one size only"),
)  # fmt: skip
PRINTED = (
    PrintedFinding(FOUND[0].claim, True, result("LN − BitFit", 1.7), "table 1"),
    PrintedFinding(FOUND[1].claim, False, result("MAM − Prefix+LN", -0.8), "table 1"),
    PrintedFinding(FOUND[2].claim, None),
)


def section(
    name: str, outcomes: list[Outcome], views: tuple[object, ...], findings: tuple[Finding, ...] = ()
) -> Section:
    return Section(
        name,
        "What does it cost to tune few parameters?\n\nAnd where are they best spent?",
        tuple(build_table(view, outcomes) for view in views if isinstance(view, TableSpec)),
        tuple(draw(view, outcomes) for view in views if isinstance(view, FigureSpec)),
        findings,
        tuple(outcomes),
        tuple(f"{outcome.cell['method']} on {outcome.cell['task']}" for outcome in outcomes if outcome.error),
    )


@pytest.fixture(scope="module")
def text() -> str:
    """A page of every kind of study."""
    return render_page(
        [section(name, *study, FOUND if name == "ln/nlu" else ()) for name, study in made.STUDIES.items()]
    )


class Reader(HTMLParser):
    """Elements with their attributes, words, and whether every element is closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def visible_text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.elements if name == tag]


def test_the_page_is_whole_and_asks_for_nothing(text: str) -> None:
    reader = Reader(text)
    for tag, attrs in reader.elements:
        for name in ("src", "href", "xlink:href", "action", "data", "poster", "srcset"):
            value = attrs.get(name) or ""
            assert not value or value.startswith(("#", "data:image/png;base64,")), f"<{tag} {name}={value[:60]}>"
    assert not re.search(r"https?:|url\((?!#)|@import", text)
    assert len(reader.all("script")) == 1 and len(reader.all("style")) == 1
    assert "default-src 'none'" in str(reader.all("meta"))


def test_ids_are_unique_and_every_reference_has_its_target(text: str) -> None:
    ids = [attrs["id"] for _, attrs in Reader(text).elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"(?:href=\"#|url\(#)([^\")]+)", text)) <= set(ids)


def test_the_page_says_everything(text: str) -> None:
    reader = Reader(text)
    visible = reader.visible_text()
    for name, (outcomes, views) in made.STUDIES.items():
        assert name in visible
        for view in views:
            assert view.title in visible
        for outcome in outcomes:
            assert not outcome.error or outcome.error in visible
    for one in FOUND:
        assert one.claim.text in visible and one.verdict in visible
    assert "on SICK: −0.008 (−0.02 … −0.004)" in visible
    assert "The whole interval lies where the claim is true; 1 of 3 settings contradicts it: on SICK." in visible
    assert "+0.021 points" in visible and "−0.011 points" in visible and "+0.012 … +0.03" in visible
    rows = sum(len(outcomes) for outcomes, _ in made.STUDIES.values())
    assert f"{rows} runs" in visible


def test_what_is_seen_at_small_scale_does_not_read_like_the_paper() -> None:
    outcomes = [made.outcome({"method": "a", "model": "m", "task": "cb", "seed": 0}, {"accuracy": 0.5})]
    small = Section(
        "ln/nlu", findings=FOUND, printed=PRINTED, outcomes=tuple(outcomes), small=True, names={"m": "Mini"}
    )
    text = " ".join(Reader(render_page([small])).visible_text().split())
    assert "what is seen is no proof of a paper's sentence" in text and "on much smaller models" in text
    assert "3 claims: 1 seen here, 1 otherwise here, 1 undecided here, 0 not testable here." in text
    for words in (
        "half the parameters LN 3.2 +1.70 points LN − BitFit: accuracy; table 1 +0.021 points LN − BitFit: accuracy",
        "✓ seen here", "≠ otherwise here", "? undecided here", "not printed",
        "The paper's own numbers disagree with this sentence.",
    ):  # fmt: skip
        assert words in text
    checked = (
        "Of 3 claims, 2 can be checked against numbers that the papers print: 1 agrees with what follows from them, "
        "and 1 does not."
    )
    assert checked in text and "Those that do not: “MAM beats every other method”." in text
    assert not any(f"{mark} {one.verdict}" in text for one in FOUND if one.verdict != "undecided" for mark in "✓≠✗")
    whole = Section("ln/nlu", findings=FOUND, printed=PRINTED, outcomes=tuple(outcomes), names={"m": "Mini"})
    text = " ".join(Reader(render_page([whole])).visible_text().split())
    assert all(one.verdict in text for one in FOUND) and "seen here" not in text


def test_what_was_found_and_where_it_comes_from() -> None:
    """On top of the page: the decided claims, and below a job that two studies share counted once."""
    environment = {"commit": "abcdef0123", "processor": "EPYC", "threads": 1, "packages": {"torch": "2.13.0"}}
    records = tuple(
        JobRecord(f"job{i}", "run", {}, {"environment": environment}, None, 1800.0, date=f"2026-11-2{i}")
        for i in (1, 2, 3)
    )
    sections = [Section("ln/nlu", findings=FOUND, small=True, records=records), Section("b", records=records[:1])]
    page = render_page(sections)
    text = " ".join(Reader(page).visible_text().split())
    first = text[: text.index("How to read")]
    assert [one.claim.text in first for one in FOUND] == [True, True, False], "the first screen has what is decided"
    assert "The first table has the 2 decided claims with the strongest evidence" in first
    assert text.count("1 of 3 settings contradicts it: on SICK") == 2, "one measure, on top and in the table of all"
    whole = "3 runs from 2026-11-21 to 2026-11-23, 1.5 hours of computing in all. Machine: EPYC, 1 thread a run. "
    assert f"{whole}With torch 2.13.0, deltune at commit abcdef0." in text
    assert provenance(records[:1]).startswith("1 run on 2026-11-21, 0.5 hours")
    undated = replace(records[0], name="undated", date="")
    assert provenance([*records[:1], undated]).startswith(
        "2 runs on 2026-11-21 (the day of 1 is not recorded), 1.0 hours"
    )
    assert provenance([replace(records[0], result=None, error="lost")]) == ""
    dirty = replace(records[1], result={"environment": {**environment, "commit": "abcdef0123-dirty"}})
    assert provenance([records[0], dirty]).endswith("abcdef0-dirty (1 run with changes that no commit has, -dirty).")


def test_every_commit_is_listed_by_its_number_of_runs() -> None:
    names = ["aaaaaaa1", "bbbbbbb2", "ccccccc3", "ddddddd4", "aaaaaaa1-dirty", "aaaaaaa1"]
    records = tuple(
        JobRecord(f"job{i}", "run", {}, {"environment": {"commit": name}}, None, 1.0) for i, name in enumerate(names)
    )
    text = Reader(render_page([Section("a", records=records)])).visible_text()
    assert "deltune at commits aaaaaaa, bbbbbbb, ccccccc, ddddddd, aaaaaaa-dirty" in text
    assert "with the commits listed above" in text


def run(cell: dict[str, Any], spec: dict[str, Any], values: list[float] | None = None, **more: Any) -> Outcome:
    """A run with validations every ten steps."""
    curve = [{"step": 10 * i, "eval_accuracy": value} for i, value in enumerate(values or [], 1)]
    return Outcome(cell, spec, {"accuracy": 0.5}, curve=curve, **more)


def test_what_an_interval_leaves_out_is_marked() -> None:
    def page(**more: Any) -> str:
        one = replace(SECOND_RESULT, **more)
        return render_page([Section("a", findings=(replace(FOUND[1], deciding=one),), small=True)])

    marks = ("test rows not covered</span>", "test rows covered in part</span>")
    assert marks[0] in page() and marks[1] in page(rows_covered="some")
    for more in ({"rows_covered": "all"}, {"unit": "ranks"}, {"interval": None}):
        assert not any(mark in page(**more) for mark in marks), "ranks have no test rows, and exact numbers no chance"
    for words in ("conditional on the one learning rate", "no better than chance", "not adjusted for"):
        assert words in page()
    again = Section("a", findings=FOUND, small=True, rerun="Some were run again.")
    assert "Runs that were repeated : Some were run again." in Reader(render_page([again, again])).visible_text()
    assert paper_statements("ln/nlu").rerun and not paper_statements("my own").rerun


def test_a_claim_that_waits_for_runs_is_not_called_undecided() -> None:
    waiting = finding("it waits", "LN 1", "undecided", note=f"{NOT_RUN}: a, on cb")
    text = Reader(render_page([Section("a", findings=(waiting, FOUND[2]), small=True)])).visible_text()
    assert "? no result yet" in text and text.count("? undecided here") == 1
    assert "1 undecided here, 0 not testable here; 1 no result yet." in text


def test_what_is_not_testable_has_a_count_and_a_reason() -> None:
    large = replace(FOUND[1], verdict="not testable", reason="it is of T5-xxl")
    again = replace(FOUND[0], claim=replace(FOUND[0].claim, repeats="ln/nlg"))
    text = Reader(render_page([Section("a", findings=(*FOUND, large, again), small=True)])).visible_text()
    counts = "2 seen here, 1 otherwise here, 1 undecided here, 1 not testable here; 1 test a sentence of another again."
    assert f"5 claims: {counts}" in text
    assert text.count("– not testable here") == 1 and "It is of T5-xxl." in text
    assert "This is the sentence of a claim of ln/nlg, tested on other runs." in text
    (row,) = csv.DictReader(io.StringIO(findings_csv([large])))
    assert row["verdict"] == "not testable" and row["effect"] == "-0.011" and row["why"] == "It is of T5-xxl."


def test_floor_and_full_tuning_stand_beside_a_score() -> None:
    one = replace(FOUND[0], floor=61.04, full=75.5)
    text = Reader(render_page([Section("a", findings=(one, FOUND[1]), small=True)])).visible_text()
    assert "accuracy 61.0 75.5 +0.012" in text and "accuracy not run not run −0.02" in text


def test_findings_as_csv_have_a_row_for_each_setting() -> None:
    rows = list(csv.DictReader(io.StringIO(findings_csv(FOUND))))
    assert [(row["comparison"], row["setting"], row["effect"], row["low"], row["verdict"]) for row in rows] == [
        ("LN − BitFit: accuracy", "all", "0.021", "0.012", "holds"),
        ("LN − BitFit: accuracy", "on CB", "0.05", "0.01", ""),
        ("LN − BitFit: accuracy", "on SICK", "-0.008", "-0.02", ""),
        ("LN − BitFit: accuracy", "on RTE", "-0.001", "-0.02", ""),
        ("MAM − LoRA: accuracy", "all", "-0.011", "-0.02", "does not hold"),
        ("", "", "", "", "undecided"),
    ]
    assert rows[0]["unit"] == "points" and rows[0]["true above"] == "0.0" and rows[0]["adjusted p"] == "0.0004"
    assert "all claims together" in rows[0]["interval"] and "this setting alone" in rows[1]["interval"]


def test_ten_studies_fit_into_half_a_megabyte(text: str) -> None:
    assert len(text.encode()) < 500_000


def test_figures_have_words_for_those_who_do_not_see_them(text: str) -> None:
    reader = Reader(text)
    assert all(attrs.get("aria-label") or attrs.get("role") == "img" for attrs in reader.all("svg"))
    assert text.count("<title>") == 1 + len(reader.all("svg"))
    assert all(attrs.get("alt") for attrs in reader.all("img"))


def test_equal_outcomes_give_an_equal_page() -> None:
    outcomes, views = made.STUDIES["ap/gap"]
    assert render_page([section("a", outcomes, views)]) == render_page([section("a", outcomes, views)])


def test_every_word_is_escaped() -> None:
    outcomes = [
        made.outcome({"method": EVIL, "task": EVIL, "seed": 0}, {"accuracy": 0.5}),
        Outcome({"method": "b", "task": EVIL, "seed": 0}, error=EVIL),
    ]
    views = (
        TableSpec(title=EVIL),
        Bars(title=EVIL),
        HeatMap(title=EVIL, rows="method", columns="task", value="accuracy"),
    )
    one = section(EVIL, outcomes, views, (finding(EVIL, EVIL, "holds", note=EVIL),))
    made_page = render_page([one, one], title=EVIL)
    reader = Reader(made_page)
    assert len(reader.all("script")) == 1
    assert "alert(" in reader.visible_text() and "<script>alert" not in made_page


@pytest.mark.parametrize("sections", [[], [Section("empty")], [section("none", [], (TableSpec(), Bars()))]])
def test_a_study_without_a_run_has_its_page(sections: list[Section]) -> None:
    assert "0 runs" in Reader(render_page(sections)).visible_text()


def test_every_run_is_a_line_of_a_file() -> None:
    outcomes = [made.outcome({"method": "=a", "seed": s}, {"accuracy": 0.5 + s / 10}) for s in range(2)]
    lines = list(csv.DictReader(io.StringIO(runs_csv([*outcomes, Outcome({"method": "b"}, error="no")]))))
    assert [(one["method"], one["accuracy"], one["error"]) for one in lines] == [
        ("'=a", "0.5", ""), ("'=a", "0.6", ""), ("b", "", "no")
    ]  # fmt: skip
    assert '"batch_size": 16' in lines[0]["spec"]


# In a browser


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    if browser.executable() is None:
        pytest.skip(browser.MISSING)
    with browser.Browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture(scope="module")
def file(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(text)
    return path


FIRST = "document.querySelector('section table.sortable:not(.fit)')"
COLUMN = f"[...{FIRST}.tBodies[0].rows].slice(1).map(row => row.cells[%d].querySelector('span').textContent.trim())"


@pytest.mark.parametrize("width", [1280, 400])
def test_it_fits_opened_from_disk(tab: browser.Browser, file: Path, tmp_path: Path, width: int) -> None:
    tab.open(file, width)
    tab.ask("document.querySelectorAll('details').forEach(one => { one.open = true })")
    assert tab.ask("document.documentElement.scrollWidth") <= width
    assert tab.ask("[...document.querySelectorAll('.claims')].every(e => e.scrollWidth <= e.parentNode.clientWidth)")
    over = tab.ask(
        "[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll') && !e.closest('pre')"
        f" && e.getBoundingClientRect().right > {width}).map(e => e.outerHTML.slice(0, 80))"
    )
    assert over == []
    small = tab.ask(  # letters of the smallest words, and of the figures at the size they are shown at
        "Math.min(...[...document.querySelectorAll('td, th, p, li, figcaption, .paper')]"
        ".map(e => parseFloat(getComputedStyle(e).fontSize)))"
    )
    assert small >= 10
    shrunk = tab.ask("Math.min(...[...document.querySelectorAll('figure svg')].map(e => "
                     "e.getBoundingClientRect().width / (e.viewBox.baseVal.width * 96 / 72)))")  # fmt: skip
    assert shrunk >= 0.74, "letters of 8.5 points are no smaller than 6.3"
    tab.shoot(tmp_path / "page.png", whole=False)
    assert (tmp_path / "page.png").stat().st_size > 10_000


def test_it_fetches_nothing(tab: browser.Browser, file: Path) -> None:
    tab.open(file, 1280)
    urls = [e["params"]["request"]["url"] for e in tab.events if e.get("method") == "Network.requestWillBeSent"]
    assert [url for url in urls if not url.startswith("data:")] == [file.as_uri()]
    errors = [e for e in tab.events if e.get("method") == "Runtime.exceptionThrown"]
    assert errors == []


def test_no_words_overlap(tab: browser.Browser, file: Path) -> None:
    """Cells, links and headings, at both widths."""
    overlapping = """(() => {
      const boxes = [...document.querySelectorAll('nav a, nav .small, h1, h2, h3, figcaption, p, summary')]
        .filter(e => e.checkVisibility({ contentVisibilityAuto: true }))
        .map(e => [e.textContent.slice(0, 30), e.getBoundingClientRect()]);
      const found = [];
      boxes.forEach(([a, x], i) => boxes.slice(i + 1, i + 40).forEach(([b, y]) => {
        if (x.left < y.right - 1 && y.left < x.right - 1 && x.top < y.bottom - 1 && y.top < x.bottom - 1)
          found.push([a, b]);
      }));
      return found;
    })()"""
    for width in (1280, 400):
        tab.open(file, width)
        assert tab.ask(overlapping) == []


def test_headings_sort_their_column_by_number_and_by_key(tab: browser.Browser, file: Path) -> None:
    tab.open(file, 1280)
    head = f"{FIRST}.tHead.rows[0].cells[2]"
    before = tab.ask(COLUMN % 2)
    numbers = [float(one) for one in before]
    tab.ask(f"{head}.querySelector('button').click()")
    assert tab.ask(f"{head}.getAttribute('aria-sort')") == "ascending"
    assert [float(one) for one in tab.ask(COLUMN % 2)] == sorted(numbers)
    tab.ask(f"{head}.querySelector('button').focus()")
    tab.press("Enter")
    assert tab.ask(f"{head}.getAttribute('aria-sort')") == "descending"
    assert [float(one) for one in tab.ask(COLUMN % 2)] == sorted(numbers, reverse=True)
    tab.press(" ")
    assert tab.ask(f"{head}.getAttribute('aria-sort')") == "none"
    assert tab.ask(COLUMN % 2) == before
    tab.ask(f"{FIRST}.tHead.rows[0].cells[1].querySelector('button').click()")
    shares = [float(one.rstrip(" %")) for one in tab.ask(COLUMN % 1)]
    assert shares == sorted(shares), "0.0006 before 0.03 before 100"
    groups = tab.ask(f"[...{FIRST}.tBodies].map(body => body.rows[0].textContent.trim())")
    assert groups == ["MiniLM-L6", "BERT-base"], "a group's name stays above its rows"
