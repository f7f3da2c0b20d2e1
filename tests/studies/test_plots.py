"""Figures: an artist for every series, no word over another, all inside the frame, equal bytes for equal numbers."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from itertools import combinations

import pytest
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from PIL import Image

import made
from deltune.studies.jobs.job import Outcome
from deltune.studies.report.figure_spec import Bars, Curves, FigureSpec, HeatMap, Scatter
from deltune.studies.report.figures import draw, render

FIGURES = [
    pytest.param(view, outcomes, id=f"{name}-{view.title}")
    for name, (outcomes, views) in made.STUDIES.items()
    for view in views
    if isinstance(view, FigureSpec)
]


def words(figure: Figure) -> list[tuple[Text, Bbox]]:
    """Every text that is seen, with its place on the canvas."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = []
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        box = Text.get_window_extent(text, renderer)
        if text.get_text().strip() and text.get_visible() and box.width > 0 and seen(text, figure):
            boxes.append((text, box))
    return boxes


def touch(one: tuple[Text, Bbox], other: tuple[Text, Bbox], height: float) -> bool:
    """Boxes that meet; of two labels aslant, lines of text nearer than their height."""
    slants = {text.get_rotation() % 90 for text, _ in (one, other)}
    if slants == {0} or len(slants) > 1:
        inside = -0.5 if slants == {0} else -4  # the box of a word aslant has empty corners
        return Bbox.intersection(one[1].padded(inside), other[1].padded(inside)) is not None
    apart = abs(one[1].x1 - other[1].x1)
    return apart * math.sin(math.radians(slants.pop())) < height


def seen(text: Text, figure: Figure) -> bool:
    """Ticks outside the limits of their axis exist but are not drawn."""
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            labels = [
                label
                for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
                for label in (tick.label1, tick.label2)
            ]
            if text in labels:
                low, high = sorted(axis.get_view_interval())
                shown = [
                    label
                    for tick in axis.get_major_ticks()
                    if low <= tick.get_loc() <= high
                    for label in (tick.label1, tick.label2)
                ]
                return text in shown
    return True


def artists(figure: Figure) -> set[str]:
    return {str(artist.get_label()) for artist in figure.findobj(Artist)}


def assert_legible(figure: Figure) -> None:
    boxes, frame = words(figure), figure.bbox
    height = min(box.height for text, box in boxes if not text.get_rotation())
    for one, other in combinations(boxes, 2):
        assert not touch(one, other, height), f"{one[0].get_text()!r} and {other[0].get_text()!r} overlap"
    for text, box in boxes:
        inside = box.x0 >= -0.5 and box.y0 >= -0.5 and box.x1 <= frame.x1 + 0.5 and box.y1 <= frame.y1 + 0.5
        assert inside, f"{text.get_text()!r} is cut off"


@pytest.mark.parametrize(("view", "outcomes"), FIGURES)
@pytest.mark.sample(5)
def test_words_are_legible(view: FigureSpec, outcomes: list[Outcome]) -> None:
    assert_legible(draw(view, outcomes).figure)


@pytest.mark.parametrize(("view", "outcomes"), FIGURES)
def test_every_series_and_level_has_an_artist(view: FigureSpec, outcomes: list[Outcome]) -> None:
    figure = draw(view, outcomes).figure
    levels = [where for where in view.reference_lines.values() if isinstance(where, dict)]
    rest = [o for o in outcomes if not any(o.cell.get(k) == v for where in levels for k, v in where.items())]
    axes: tuple[str, ...] = ()
    if isinstance(view, (Scatter, Curves)):
        axes = (view.series,) if isinstance(view.series, str) else view.series
    elif isinstance(view, Bars):
        axes = (view.bars,)
    elif view.panels:
        axes = (view.panels,)
    expected = {f"series {', '.join(view.display(o.cell[axis]) for axis in axes)}" for o in rest}
    expected |= {f"level {name}" for name in view.reference_lines}
    assert expected <= artists(figure)


@pytest.mark.parametrize(("view", "outcomes"), FIGURES)
def test_every_outcome_is_drawn_or_noted(view: FigureSpec, outcomes: list[Outcome]) -> None:
    picture = draw(view, outcomes)
    for outcome in outcomes:
        if outcome.error and all(outcome.cell.get(k) == v for k, v in view.where.items()):
            assert any(outcome.error in note for note in picture.notes)
    assert picture.text


@pytest.mark.parametrize(("view", "outcomes"), FIGURES)
@pytest.mark.sample(2)
def test_equal_numbers_give_equal_bytes(view: FigureSpec, outcomes: list[Outcome]) -> None:
    one, two = draw(view, outcomes).figure, draw(view, outcomes).figure
    for kind in ("svg", "png"):
        assert render(one, kind) == render(two, kind)
    assert render(one, "svg") == render(one, "svg"), "drawing changes nothing"


@pytest.mark.parametrize("many", [3, 30])
def test_many_series_are_named_in_a_legend(many: int) -> None:
    outcomes = [
        made.outcome({"method": f"a long name of method {i}", "seed": 0}, {"accuracy": 0.8 + i * 1e-5}, 1 + i / 1000)
        for i in range(many)
    ]
    figure = draw(Scatter(), outcomes).figure
    assert len(figure.legends[0].get_texts()) == many
    assert_legible(figure)


def test_a_band_is_one_standard_deviation() -> None:
    outcomes = [
        made.outcome({"method": "a", "seed": s, "N": n}, {"accuracy": 0.5 + s / 10}) for s in (0, 1) for n in (1, 10)
    ]
    axes = draw(Curves(x="N", y="accuracy", log=True), outcomes).figure.axes[0]
    assert list(axes.lines[0].get_ydata()) == pytest.approx([55, 55])
    heights = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (min(heights), max(heights)) == pytest.approx((55 - 7.0711, 55 + 7.0711), abs=1e-3)


def test_a_curve_ends_where_a_seed_ends() -> None:
    picture = draw(made.CONVERGENCE, made.convergence())
    (line,) = [line for line in picture.figure.axes[0].lines if line.get_label() == "series adjacent"]
    assert max(line.get_xdata()) == 800
    assert "adjacent: drawn to step 800, which all 3 seeds reached; the longest has 1,000" in picture.notes


def test_the_gap_is_best_minus_worst() -> None:
    outcomes = [
        made.outcome({"method": m, "size": size, "seed": 0}, {"accuracy": score})
        for m, size, score in (("a", 10, 0.9), ("b", 10, 0.5), ("a", 100, 0.9), ("b", 100, 0.8), ("a", 1000, 0.9))
    ]
    picture = draw(Curves(x="size", y="accuracy", log=True, gap=True), outcomes)
    (line,) = [line for line in picture.figure.axes[1].lines if line.get_label() == "gap"]
    assert list(line.get_ydata()) == pytest.approx([40, 10])
    assert_legible(picture.figure)


def test_a_caption_says_what_shows_the_deviation() -> None:
    outcomes = [made.outcome({"method": m, "task": "x", "seed": s}, {"accuracy": 0.5}) for m in "ab" for s in range(3)]
    spread = "± 1 standard deviation, which is no confidence interval."
    assert draw(Bars(), outcomes).caption == f"Bars: means over 3 seeds; whiskers: {spread}"
    assert draw(Scatter(median=True), outcomes).caption == f"Points: medians over 3 seeds; whiskers: {spread}"
    assert draw(made.GAP, made.gap()).caption == f"Lines: means over 3 seeds; bands: {spread}"
    assert draw(HeatMap(rows="method", columns="task", value="accuracy"), outcomes[:-1]).caption == (
        "Cells: means over 2 to 3 seeds."
    )
    assert draw(Bars(repetition="block"), outcomes).caption.startswith("Bars: means over 3 blocks;")
    assert draw(Bars(), outcomes[:1]).caption == "", "one seed has no deviation"


def test_cells_that_cannot_be_are_no_gaps() -> None:
    """Embeddings have no first layer, and layers have no embeddings: nothing of them was left out."""
    changes = [
        {"layer": layer, "module": module, "term": "gain", "value": 0.1}
        for module, layers in (("embedding", ("None",)), ("ffn", (1, 2))) for layer in layers
    ]  # fmt: skip
    outcomes = [made.outcome({"task": task, "seed": 0}, {}, extra={"changes": changes}) for task in ("x", "y")]
    picture = draw(made.TERMS, outcomes)
    assert picture.notes == () and picture.figure.axes[0].get_ylabel() == "module, term"
    assert len(picture.figure.axes[0].patches) == 0
    less = replace(outcomes[1], extra={"changes": changes[:-1]})
    assert draw(made.TERMS, [outcomes[0], less]).notes == ("y, ffn, gain, 2: not run",), "but what one task lacks is"


def test_transfer_is_relative_to_the_diagonal() -> None:
    outcomes = [
        made.outcome({"source": a, "target": b}, {"accuracy": score})
        for a, b, score in (("x", "x", 0.8), ("x", "y", 0.3), ("y", "x", 0.4), ("y", "y", 0.6))
    ]
    axes = draw(made.TRANSFER, outcomes).figure.axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("target", "source")
    image = axes.images[0]
    assert image.get_array().tolist() == [pytest.approx([100, 50]), pytest.approx([50, 100])]


def test_thresholds_are_marked() -> None:
    picture = draw(made.THRESHOLDS, made.thresholds())
    assert {"mark low LoRA, base", "mark high adapter, small"} <= artists(picture.figure)
    assert "LoRA, small: low between 60 and 150" in picture.text


@pytest.mark.parametrize(
    "view", [Scatter(), Curves(), Bars(), HeatMap(rows="a", columns="b"), Curves(gap=True, log=True)]
)
@pytest.mark.parametrize("outcomes", [[], [Outcome({"method": "a", "task": "x", "seed": 0}, error="no")]])
def test_nothing_to_draw_is_a_figure_that_says_so(view: FigureSpec, outcomes: list[Outcome]) -> None:
    picture = draw(view, outcomes)
    assert render(picture.figure, "svg")
    assert not outcomes or any("no" in note for note in picture.notes)


def test_a_notebook_shows_a_figure_as_a_picture() -> None:
    """By IPython's own formatter, without pyplot; sharp, with two pixels for one."""
    display = pytest.importorskip(
        "IPython.core.formatters", reason="no IPython: the extra dev has it"
    ).DisplayFormatter()
    view, outcomes = FIGURES[0].values
    assert isinstance(view, FigureSpec)
    picture = draw(view, outcomes)  # type: ignore[arg-type]
    data, metadata = display.format(picture)
    with Image.open(io.BytesIO(data["image/png"])) as image:
        assert image.size == tuple(2 * metadata["image/png"][side] for side in ("width", "height"))
    assert "image/png" not in display.format(picture.figure)[0]  # why the picture itself is not enough
