"""Labels that a format would take for something of its own: every report shows them as they are."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.text import Text

from deltune.studies.jobs.job import Outcome
from deltune.studies.report.figure_spec import Bars, Curves, FigureSpec, HeatMap, Scatter, TableSpec
from deltune.studies.report.figures import FORMATS, draw, render
from deltune.studies.report.page import Section, render_page, section_markdown, write_section
from deltune.studies.report.tables import Table, build_table, to_csv, to_latex, to_markdown

LABELS = (
    r"$\foo$", "$", "$a$ and $b_{$", r"\input{/etc/passwd}", "=1+1", "+1-1", "-1-1", "@SUM(1)", " =1", "＝1",
    "_hidden", "{}", "%s", "<script>alert(1)</script>", "\"><img src=x onerror='alert(1)'>", "]]><!--", "&lt;", "a|b",
    "[a](javascript:alert(1))", "{{ 7 * 7 }}", "{% include 'page.js' %}", "\x1b[2J", "x" * 400, "日本語",
)  # fmt: skip

DRAWN = (r"$\foo$", "_hidden", "{}")
"""Those that something of matplotlib's has a meaning for."""

FIGURES: dict[str, FigureSpec] = {
    "scatter": Scatter(title="T", y="accuracy"),
    "bars": Bars(title="T", y="accuracy", groups="task"),
    "panels": Bars(title="T", y="accuracy", groups="method", bars="seed", panels="task"),
    "curves": Curves(title="T", x="step", y="loss", series="method", panels="task"),
    "heat": HeatMap(title="T", rows="method", columns="task", value="accuracy"),
}

labels = pytest.mark.parametrize("label", LABELS, ids=lambda label: ascii(label)[:24])


def outcomes(label: str) -> list[Outcome]:
    """Of a model, a task and a method of one name beside plain ones, and one that failed with it."""
    done = [
        Outcome(
            {"method": method, "task": task}, {"method": method}, {"accuracy": 0.5 + 0.1 * i}, {"percent": 1.0 + i},
            curve=[{"step": step, "loss": 1 / step} for step in (1, 2, 3)],
        )
        for i, (method, task) in enumerate((m, t) for m in (label, "lora") for t in (label, "sick"))
    ]  # fmt: skip
    return [*done, Outcome({"method": "head", "task": label}, error=label)]


def table(label: str) -> Table:
    return build_table(TableSpec(title=label, display_names={"accuracy": label}), outcomes(label))


@pytest.mark.filterwarnings("ignore:Glyph .* missing from font")
@pytest.mark.parametrize("kind", FIGURES)
@pytest.mark.parametrize("label", [pytest.param(one, marks=() if one in DRAWN else pytest.mark.slow) for one in LABELS])
@pytest.mark.sample(8)
def test_a_figure_shows_a_label_as_it_is(label: str, kind: str) -> None:
    picture = draw(FIGURES[kind], outcomes(label))
    assert all(render(picture.figure, form) for form in (FORMATS if label not in DRAWN else ["svg"]))
    texts = [text.get_text().replace("\n", " ") for text in picture.figure.findobj(Text)]  # type: ignore[attr-defined]
    assert any(label[:12].strip() in text or label[-12:].strip() in text for text in texts)


@labels
def test_no_cell_of_a_csv_file_is_a_formula(label: str) -> None:
    lines = list(csv.reader(io.StringIO(to_csv(table(label)))))
    assert {len(line) for line in lines} == {len(lines[0])}
    for cell in (cell for line in lines for cell in line):
        assert not re.match(r"\s*[=+@＝-]", cell) or re.fullmatch(r"-?[\d.]+", cell)
    assert label in (lines[1][0], lines[1][0].removeprefix("'"))


@pytest.mark.parametrize("value", [-0.5, 1e-07, -1e22, 0.25])
def test_numbers_stay_numbers(value: float) -> None:
    done = [Outcome({"method": str(-value), "task": "sick"}, {}, {"accuracy": value}, {"percent": 1.0})]
    line = list(csv.reader(io.StringIO(to_csv(build_table(TableSpec(), done)))))[1]
    assert line[0] == str(-value) and repr(value) in line


@labels
def test_a_table_is_no_more_than_text(label: str) -> None:
    text = to_markdown(table(label))
    assert "\x1b" not in text and not re.search(r"(?<!\\)<(?!/?(u|sup)>)", text)
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("|")}) == 1
    text = to_latex(table(label))
    body = text[text.index(r"\toprule") :]
    assert "\\input{" not in body and "\x1b" not in body
    assert len(re.findall(r"(?<!\\)\{", body)) == len(re.findall(r"(?<!\\)\}", body))
    assert len(re.findall(r"(?<!\\)\$", body)) % 2 == 0


class Elements(HTMLParser):
    """The elements and attributes of a page, and its words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, ...]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, *(name for name, _ in attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def section(label: str) -> Section:
    return Section(
        label, label, (table(label),), (draw(FIGURES["bars"], outcomes(label)),), (), tuple(outcomes(label)), (label,)
    )


@pytest.mark.filterwarnings("ignore:Glyph .* missing from font")
@pytest.mark.parametrize("label", [one for one in LABELS if set(one) & {*'<"{&$='}], ids=lambda one: ascii(one)[:24])
def test_a_page_gets_no_element_from_a_label(label: str, tmp_path: Path) -> None:
    """The page of a study whose every word is this one; as Markdown and as files too."""
    part = section(label)
    made = Elements(render_page([part], label))
    beyond = {element for element in made.elements if element[0] in ("script", "img", "a", "iframe", "link")}
    assert beyond <= {("script",), ("img", "src", "alt", "style", "width", "height"), ("a", "href")}
    assert sum(element[0] == "script" for element in made.elements) == 1
    assert not any(name.startswith("on") for _, *names in made.elements for name in names)
    assert any(label in words for words in made.words)
    assert not re.search(r"(?<!\\)<(?!/?(u|sup)>)", section_markdown(part))
    written = write_section(replace(part, figures=()), tmp_path / "out")
    assert all(path.parent == tmp_path / "out" and path.is_file() for path in written)
