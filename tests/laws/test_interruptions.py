"""An interruption at any moment: the model is as it was before or as it would be after, and nothing is held."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from transformers import PreTrainedModel

import deltune

from .families import FAMILIES
from .specimens import Outputs, batch, build, differences, equal, facts, forward, loss, run, stir

SOURCES = str(Path(deltune.__file__).parent) + os.sep

NAMES: list[str | None] = ["a", "b", None]


class Interrupting:
    """Raises at the n-th line of deltune that is executed; counts all of them."""

    def __init__(self, at: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.at, self.error, self.lines = at, error, 0

    def __enter__(self) -> Interrupting:
        self.before = sys.gettrace()
        sys.settrace(self.enter)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(self.before)

    def enter(self, frame: FrameType, event: str, value: Any) -> Any:
        return self.line if frame.f_code.co_filename.startswith(SOURCES) else None

    def line(self, frame: FrameType, event: str, value: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                raise self.error(f"at {frame.f_code.co_filename}:{frame.f_lineno}")
        return self.line


class Stage:
    """A tuned model that is copied for every moment of interruption, and what it gives in each state."""

    def __init__(self, texts: dict[str, str], folder: Path) -> None:
        self.model = build(FAMILIES["bert"], "sequence")
        self.inputs = batch(self.model, rows=3)
        self.known = facts(self.model)
        self.bare = copy.deepcopy(self.model)
        self.outputs: dict[Any, Outputs] = {None: run(self.model, self.inputs)}
        for name, text in texts.items():
            tuned = stir(deltune.attach(self.model, text, name=name), seed=ord(name))
            self.outputs[name] = run(self.model, self.inputs)
        tuned.save(folder / "saved", name="a")
        self.folder = folder
        with tuned.rows(NAMES):
            self.outputs["rows"] = run(self.model, self.inputs)
        tuned.use("a")
        run(self.model, self.inputs)

    def check(self, tuned: deltune.Tuned, names: set[str], may_be_used: set[str | None]) -> None:
        """Whatever was interrupted, everything goes on as if it had happened, or had not."""
        model = tuned.model
        assert set(tuned.names) == names and tuned.mixed == () and tuned.active in may_be_used
        if tuned.active in self.outputs:
            assert equal(run(model, self.inputs), self.outputs[tuned.active])
        for name in ("a", "b", None):
            if name is None or name in names:
                assert equal(run(tuned.use(name).model, self.inputs), self.outputs[name]), name
                assert any(True for _ in tuned.parameters()) == (name is not None)
        with tuned.disable():
            assert equal(run(model, self.inputs), self.outputs[None])
        if {"a", "b"} <= names:
            with tuned.rows(NAMES):
                assert equal(run(model, self.inputs), self.outputs["rows"])
                loss(forward(model, self.inputs)).backward()
            model.zero_grad()
            assert {id(p) for p in tuned.use("b").parameters()} == {
                id(p) for n, p in model.named_parameters() if p.requires_grad
            }
        tuned.detach()
        self.check_bare(model)

    def check_bare(self, model: PreTrainedModel) -> None:
        changed = differences(facts(self.bare), facts(model))
        assert {fact.split(" ")[0] for fact in changed} <= {"identity", "configuration", "attention"}, changed
        assert equal(run(model, self.inputs), self.outputs[None])


def in_rows(tuned: deltune.Tuned) -> None:
    with tuned.rows(NAMES):
        pass


def disabled(tuned: deltune.Tuned) -> None:
    with tuned.disable():
        pass


def passing(inputs: dict[str, Any], tuned: deltune.Tuned) -> None:
    with tuned.rows(NAMES):
        forward(tuned.model, inputs)
    forward(tuned.use("b").model, inputs)


CHANGES: dict[str, tuple[Callable[[Stage, deltune.Tuned], Any], set[str], set[str | None]]] = {
    "use": (lambda stage, tuned: tuned.use("b"), set(), {"a", "b"}),
    "use none": (lambda stage, tuned: tuned.use(None), set(), {"a", None}),
    "disable": (lambda stage, tuned: disabled(tuned), set(), {"a"}),
    "rows": (lambda stage, tuned: in_rows(tuned), set(), {"a"}),
    "pass": (lambda stage, tuned: passing(stage.inputs, tuned), set(), {"a", "b"}),
    "attach": (lambda stage, tuned: deltune.attach(tuned.model, "bitfit + prefix", name="c"), {"c"}, {"a", "c"}),
    "load": (lambda stage, tuned: deltune.load(tuned.model, stage.folder / "saved", name="c"), {"c"}, {"a", "c"}),
    "detach a": (lambda stage, tuned: tuned.detach("a"), {"-a"}, {"a", None}),
    "detach b": (lambda stage, tuned: tuned.detach("b"), {"-b"}, {"a"}),
    "save": (lambda stage, tuned: tuned.save(stage.folder / "again"), set(), {"a"}),
    "count": (lambda stage, tuned: tuned.count(denominator=1000), set(), {"a"}),
}  # fmt: skip
"""What is interrupted, which names it adds or takes away, and what may be in use afterwards."""

TEXTS = {
    "selected": {"a": "layernorm + lora(rank=2)", "b": "bitfit + prefix(length=2)"},
    "in part": {"a": "apet(layernorm + lora(rank=2), parameters=40)", "b": "parallel_adapter(rank=2) + three_vectors"},
}


@pytest.mark.parametrize("texts", TEXTS)
@pytest.mark.parametrize("change", CHANGES)
def test_interrupted_at_any_line(change: str, texts: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    stage = Stage(TEXTS[texts], tmp_path)
    work, changed, may_be_used = CHANGES[change]
    names = {"a", "b"}
    after = {n for n in names if f"-{n}" not in changed} | {n for n in changed if not n.startswith("-")}
    with Interrupting(0) as whole:
        work(stage, deltune.tuned(copy.deepcopy(stage.model)))
    every = max(1, whole.lines // (POINTS_SLOW if pytestconfig.getoption("-m") == "" else POINTS))
    tried = 0
    for at in range(1, whole.lines + 1, every):
        tuned = deltune.tuned(copy.deepcopy(stage.model))
        where = ""
        try:
            with Interrupting(at):
                work(stage, tuned)
        except KeyboardInterrupt as error:
            where = str(error)
        else:
            continue  # the interruption hit a place that catches it on purpose, or nothing was left to do
        tried += 1
        try:
            stage.check(tuned, set(tuned.names), may_be_used)
        except BaseException as error:
            raise AssertionError(f"interrupted {where}") from error
        assert set(tuned.names) in (names, after) or not tuned.names
    assert tried > min(whole.lines, POINTS) // 2


POINTS, POINTS_SLOW = 8, 10**6
