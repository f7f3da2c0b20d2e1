"""An interruption at any moment: the model is as it was before or as it would be after, and nothing is held."""

from __future__ import annotations

import copy
import dis
import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from transformers import PreTrainedModel

import deltune
from deltune.runtime.attached import Attached
from deltune.runtime.model_state import ModelState
from deltune.runtime.pass_manager import PassManager
from tables.families import FAMILIES
from tables.methods import product
from tables.specimens import Outputs, batch, build, differences, equal, facts, forward, loss, run, stir

from .test_threads import run_at_once

SOURCES = str(Path(deltune.__file__).parent) + os.sep

NAMES: list[str | None] = ["a", "b", None]


POINTS, POINTS_SLOW = 5, 10**6


@pytest.fixture
def points(pytestconfig: pytest.Config) -> int:
    """How many of the moments at which something can be interrupted are tried; with the slow tests, all."""
    return POINTS_SLOW if pytestconfig.getoption("-m") == "" else POINTS


@functools.cache
def ends_of_blocks(code: CodeType) -> set[int]:
    """Where `with` blocks end without an exception, at three constants and a call of __exit__.

    A line begins there, but no interruption arrives: Python looks for signals after calls and where loops go back.
    """
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("PRECALL", "CACHE", "NOP")]
    windows = zip(*(steps[i:] for i in range(4)), strict=False)
    return {
        first.offset
        for first, *constants, call in windows
        if call.opname == "CALL" and all(s.opname == "LOAD_CONST" and s.argval is None for s in (first, *constants))
    }


class Interrupting:
    """Raises at the n-th line of deltune that is executed; counts all of them.

    Args:
        inside: Count only inside of calls of this function, and there the lines of others' code too.
    """

    def __init__(
        self, at: int, error: type[BaseException] = KeyboardInterrupt, inside: Callable[..., Any] | None = None
    ) -> None:
        self.at, self.error, self.lines = at, error, 0
        self.code = None if inside is None else inside.__code__
        self.depth = 0

    def __enter__(self) -> Interrupting:
        self.before = sys.gettrace()
        sys.settrace(self.enter)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(self.before)

    def enter(self, frame: FrameType, event: str, value: Any) -> Any:
        if self.code is None:
            return self.line if frame.f_code.co_filename.startswith(SOURCES) else None
        self.depth += frame.f_code is self.code
        return self.line if self.depth else None

    def line(self, frame: FrameType, event: str, value: Any) -> Any:
        if event == "return":
            self.depth -= frame.f_code is self.code
        if event == "line" and frame.f_lasti not in ends_of_blocks(frame.f_code):
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
                assert any(True for _ in tuned.trainable_parameters()) == (name is not None)
        with tuned.disable():
            assert equal(run(model, self.inputs), self.outputs[None])
        if {"a", "b"} <= names:
            with tuned.rows(NAMES):
                assert equal(run(model, self.inputs), self.outputs["rows"])
                loss(forward(model, self.inputs)).backward()
            model.zero_grad()
            assert {id(p) for p in tuned.use("b").trainable_parameters()} == {
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


@pytest.mark.parametrize(("change", "texts"), product(CHANGES, TEXTS))
@pytest.mark.sample(6)
def test_interrupted_at_any_line(change: str, texts: str, tmp_path: Path, points: int) -> None:
    stage = Stage(TEXTS[texts], tmp_path)
    work, changed, may_be_used = CHANGES[change]
    names = {"a", "b"}
    after = {n for n in names if f"-{n}" not in changed} | {n for n in changed if not n.startswith("-")}
    with Interrupting(0) as whole:
        work(stage, deltune.tuned(copy.deepcopy(stage.model)))
    every = max(1, whole.lines // points)
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
    assert tried >= min(whole.lines, POINTS) / 2


def at_every_line(
    stage: Stage, work: Callable[[deltune.Tuned], Any], inside: Callable[..., Any], points: int
) -> Iterator[tuple[deltune.Tuned, KeyboardInterrupt]]:
    """Copies of a tuned model, of which each was interrupted in some work at another moment inside of a function."""
    with Interrupting(0, inside=inside) as whole:
        work(deltune.tuned(copy.deepcopy(stage.model)))
    tried = 0
    for at in range(1, whole.lines + 1, max(1, whole.lines // points)):
        tuned = deltune.tuned(copy.deepcopy(stage.model))
        try:
            with Interrupting(at, inside=inside):
                work(tuned)
        except KeyboardInterrupt as interrupted:
            tried += 1
            yield tuned, interrupted
        # Otherwise Python ignored it, as it does in a callback of a weak reference.
    assert tried >= min(whole.lines, points) / 2


@pytest.mark.parametrize("name", ["b", None])
@pytest.mark.parametrize("texts", TEXTS)
def test_no_tensor_is_lost_while_tensors_move(texts: str, name: str | None, tmp_path: Path, points: int) -> None:
    """Also where the interruption comes inside of torch's own containers, whose steps are not ours."""
    stage = Stage(TEXTS[texts], tmp_path)
    numbers = {id(p) for p in stage.model.parameters()}
    for tuned, _ in at_every_line(
        stage, lambda tuned: tuned.attached.state.place_tensors(name), ModelState.place_tensors, points
    ):
        assert len(set(map(id, tuned.model.parameters()))) == len(numbers)
        stage.check(tuned, {"a", "b"}, {"a"})


def nested_pass(stage: Stage, tuned: deltune.Tuned) -> None:
    """A pass, and inside of it another one that needs other tensors in the model."""

    def inside(module: Any, args: Any) -> None:
        hook.remove()
        with tuned.disable():
            run(tuned.model, stage.inputs)

    hook = tuned.model.bert.encoder.layer[0].register_forward_pre_hook(inside)
    try:
        run(tuned.model, stage.inputs)
    finally:
        hook.remove()


PASSES: dict[str, tuple[Callable[[Stage, deltune.Tuned], Any], Callable[..., Any]]] = {
    "a pass": (lambda stage, tuned: run(tuned.model, stage.inputs), PassManager._end),
    "a pass in rows": (lambda stage, tuned: passing(stage.inputs, tuned), PassManager._end),
    "a pass in a pass": (nested_pass, PassManager._end),
    "a pass with other tensors in a pass": (nested_pass, PassManager._run_nested),
}


def taken_at_once(mutex: Any) -> bool:
    taken: bool = mutex.acquire(blocking=False)
    if taken:
        mutex.release()
    return taken


@pytest.mark.parametrize("kind", PASSES)
def test_interrupted_while_a_pass_ends(kind: str, tmp_path: Path, points: int) -> None:
    """Nobody waits for it, not even while its exception, and with it the pass, is kept."""
    stage = Stage(TEXTS["selected"], tmp_path)
    kept = []
    work, inside = PASSES[kind]
    for tuned, error in at_every_line(stage, lambda tuned: work(stage, tuned), inside, points):
        kept.append(error)
        lock = tuned.attached.passes.lock
        assert not lock.running, "a pass that has ended is waited for"
        assert run_at_once(partial(taken_at_once, lock.mutex)) == [True], "the lock is held"
        stage.check(tuned, {"a", "b"}, {"a", "b"})
    assert kept


@pytest.fixture
def without_collection() -> Iterator[None]:
    """Collect no garbage, whose finalizers are lines too, so that equal work takes equal numbers of lines."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("what", ["attach", "load"])
@pytest.mark.parametrize("first", [False, True])
def test_interrupted_at_the_end_of_attaching(what: str, first: bool, tmp_path: Path, without_collection: None) -> None:
    """Also in the exit of a context manager: the delta is attached in full, or there is no trace of it."""
    stage = Stage(TEXTS["selected"], tmp_path)
    work: Callable[[PreTrainedModel], Any] = {
        "attach": lambda model: deltune.attach(model, "layernorm + lora(rank=2)", name="c"),
        "load": lambda model: deltune.load(model, stage.folder / "saved", name="c"),
    }[what]
    inside = Attached.add

    def model() -> PreTrainedModel:
        return copy.deepcopy(stage.bare if first else stage.model)

    work(model())
    gc.collect()  # the models of other tests, which are looked through for each change
    with Interrupting(0, inside=inside) as whole:
        work(model())
    interrupted = 0
    for at in range(whole.lines - 42, whole.lines + 1, 6):  # later times take fewer lines
        one = model()
        try:
            with Interrupting(at, inside=inside):
                work(one)
        except KeyboardInterrupt:
            interrupted += 1
        if "deltune" not in dict(one.named_children()):
            assert first
            stage.check_bare(one)
            continue
        tuned = deltune.tuned(one)
        if first:
            assert (tuned.names, tuned.active) == (("c",), "c")
            assert any(True for _ in tuned.trainable_parameters())
            stage.check_bare(tuned.detach())
        else:
            assert ("c" in tuned.names) == (tuned.active == "c")
            stage.check(tuned, set(tuned.names), {"a", "c"})
    assert interrupted > 2
