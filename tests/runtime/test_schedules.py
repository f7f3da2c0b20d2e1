"""Laws of threads whose steps come in a given order: events decide who is where, never the clock.

The laws of `test_threads` let threads run as they like; here each moment that once went wrong is brought about.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch

import deltune
from deltune.runtime import attached as attached_module
from deltune.train import frozen_layers
from tables.families import FAMILIES
from tables.specimens import Outputs, batch, build, differences, distance, equal, facts, run, stir
from tables.versions import is_older

PATIENCE = 60
"""Seconds after which what should have happened is taken for missing. No law that holds ever waits so long."""

TEXTS = {"a": "layernorm", "b": "bitfit(which='layers')"}
"""Two deltas that need other tensors in the model's slots."""

Way = Callable[[deltune.Tuned], AbstractContextManager[Any]]

WAYS: dict[str, Way] = {
    "the delta in use": lambda tuned: nullcontext(),
    "disable": lambda tuned: tuned.disable(),
    "rows of none": lambda tuned: tuned.rows([None, None]),
    "rows": lambda tuned: tuned.rows(["b", None]),
}
"""What a thread may run its passes in."""

SCOPES = [way for way in WAYS if way != "the delta in use"]


def tuned_model(**changes: Any) -> deltune.Tuned:
    model = build(FAMILIES["bert"], "sequence", **changes)
    for name, text in TEXTS.items():
        tuned = stir(deltune.attach(model, text, name=name), seed=ord(name))
    return tuned.use("a")


def answers(tuned: deltune.Tuned, inputs: dict[str, Any]) -> dict[str, Outputs]:
    """What the model gives in each of the ways, with nobody beside."""
    outputs = {}
    for name, way in WAYS.items():
        with way(tuned):
            outputs[name] = run(tuned.model, inputs)
    return outputs


def come(event: threading.Event) -> None:
    assert event.wait(PATIENCE), "what should have happened did not"


@contextmanager
def another_thread() -> Iterator[Callable[[Callable[[], Any]], Future[Any]]]:
    """Gives what runs a job in a thread of its own; all are waited for at the end."""
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


@contextmanager
def held_elsewhere(enter: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Inside, another thread is inside of a block."""
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with enter():
            entered.set()
            come(leave)

    with another_thread() as start:
        other = start(hold)
        try:
            come(entered)
            yield
        finally:
            leave.set()
        other.result()


@contextmanager
def called(module: torch.nn.Module, step: Callable[[], None]) -> Iterator[None]:
    """Whoever calls the module takes a step before."""

    def before(*_: object) -> None:  # a hook that returned something would change the module's input
        step()

    hook = module.register_forward_pre_hook(before)
    try:
        yield
    finally:
        hook.remove()


class Watched:
    """A lock that tells when somebody has to wait for it."""

    def __init__(self, event: threading.Event, lock: Any = None) -> None:
        self.lock, self.wanted = lock or threading.Lock(), event

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            self.wanted.set()
            self.lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self.lock.release()


def outcome(job: Callable[[], Any]) -> Any:
    """What a job gives, or the error that it raises."""
    try:
        return job()
    except deltune.DeltuneError as error:
        return error


# -- passes inside of passes


@pytest.mark.parametrize("interrupted", [False, True], ids=["whole", "interrupted"])
@pytest.mark.parametrize("other", WAYS)
@pytest.mark.parametrize("nested", SCOPES)
@pytest.mark.sample(12)
def test_a_nested_pass_with_other_tensors(
    nested: str, other: str, interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook runs the model in rows() or disable(): the pass of another thread waits until the hook's pass has put back
    the tensors that it moved. Otherwise it would begin with tensors that are taken away from it in the middle."""
    tuned = tuned_model()
    model, inputs = tuned.model, batch(tuned.model)
    expected = answers(tuned, inputs)
    here, order, outputs = threading.get_ident(), [], {}
    arrived = threading.Event()
    lock, context = tuned.attached.passes.lock, contextvars.copy_context()

    def of_other() -> Outputs:
        with WAYS[other](tuned):
            return run(model, inputs)

    def step() -> None:
        if threading.get_ident() != here:
            order.append("the other runs")
            arrived.set()
        elif order == []:
            order.append("the outer runs")
            with pytest.raises(KeyboardInterrupt) if interrupted else nullcontext(), WAYS[nested](tuned):
                outputs["nested"] = run(model, inputs)
        elif order == ["the outer runs"]:
            outputs["other"] = start(lambda: context.run(of_other))
            come(arrived)
            order.append("the nested goes on")
            if interrupted:
                raise KeyboardInterrupt

    monkeypatch.setattr(lock, "mutex", Watched(arrived, lock.mutex))
    with another_thread() as start, called(model.bert.encoder.layer[0], step):
        outputs["outer"] = run(model, inputs)
        outputs["other"] = outputs["other"].result(PATIENCE)
    assert order == ["the outer runs", "the nested goes on", "the other runs"]
    assert interrupted or equal(outputs["nested"], expected[nested])
    assert equal(outputs["outer"], expected["the delta in use"]) and equal(outputs["other"], expected[other])
    tuned.detach()


@pytest.mark.parametrize("nested", SCOPES)
def test_a_nested_pass_does_not_take_tensors_from_others(nested: str) -> None:
    """It cannot wait for another thread, which may wait for the outer pass: an error, and both passes are right."""
    tuned = tuned_model()
    model, inputs = tuned.model, batch(tuned.model)
    expected = answers(tuned, inputs)
    here, refused, inside, leave = threading.get_ident(), [], threading.Event(), threading.Event()

    def step() -> None:
        if threading.get_ident() != here:
            inside.set()
            come(leave)
        elif not refused:
            refused.append(None)
            with WAYS[nested](tuned), pytest.raises(deltune.DeltuneError, match="inside another one needs"):
                run(model, inputs)

    with another_thread() as start, called(model.bert.encoder.layer[0], step):
        other = start(lambda: run(model, inputs))
        come(inside)
        mine = run(model, inputs)
        leave.set()
        assert equal(other.result(PATIENCE), expected["the delta in use"])
    assert refused and equal(mine, expected["the delta in use"])
    tuned.detach()


# -- attaching and taking off


@pytest.mark.parametrize("names", [("one", "one"), ("one", "two")], ids=" ".join)
@pytest.mark.parametrize("first", [True, False], ids=["nothing attached", "one attached"])
def test_two_attaches_at_once(first: bool, names: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have checked everything that can be checked before the model is theirs: one wins, or both stand. Whoever
    loses changed nothing, and can try again."""
    model = build(FAMILIES["bert"], "sequence")
    known, inputs, texts = facts(model), batch(model), tuple(TEXTS.values())
    expected = []
    for text in texts:
        alone = stir(deltune.attach(copy.deepcopy(model), text))
        expected.append(run(alone.model, inputs))
    if not first:
        deltune.attach(model, "lora(rank=2)", name="old")
    meeting = threading.Barrier(2, timeout=PATIENCE)
    rehearse = attached_module.Attached._check_reached

    def meet(one: Any, *call: Any) -> None:
        rehearse(one, *call)
        meeting.wait()

    with monkeypatch.context() as patch, another_thread() as start:
        patch.setattr(attached_module.Attached, "_check_reached", meet)
        jobs = [
            start(lambda n=n, t=t: outcome(lambda: deltune.attach(model, t, name=n)))
            for n, t in zip(names, texts, strict=True)
        ]
        outcomes = [job.result(PATIENCE) for job in jobs]
    tuned = deltune.tuned(model)
    winners = [number for number in range(2) if outcomes[number] is tuned]
    assert len(winners) == (1 if first or names[0] == names[1] else 2)
    for number in {0, 1} - set(winners):
        message = "another thread has attached" if first else "is already attached"
        assert isinstance(outcomes[number], deltune.DeltuneError) and message in str(outcomes[number])
        tuned = deltune.attach(model, texts[number], name="again")
    attached = {names[number] if number in winners else "again": number for number in range(2)}
    assert set(tuned.names) == {*attached, *(() if first else ("old",))}
    for name, number in attached.items():
        assert equal(run(stir(tuned.use(name)).model, inputs), expected[number])
    tuned.detach()
    assert differences(known, facts(model)) == []


@pytest.mark.parametrize("where", ["thread", "task"])
@pytest.mark.parametrize("way", SCOPES)
def test_merging_beside_scopes_is_refused(way: str, where: str) -> None:
    """There would be no base any more for who is inside of disable() or of rows(), whatever rows() names."""
    tuned = tuned_model()
    model, inputs = tuned.model, batch(tuned.model)
    expected, known = answers(tuned, inputs), facts(model)

    def refused() -> None:
        with pytest.raises(deltune.DeltuneError, match=r"merge: .* by another thread or task|merge: another thread"):
            tuned.merge()

    if where == "thread":
        with held_elsewhere(lambda: WAYS[way](tuned)):
            refused()
    else:
        asyncio.run(beside_a_task(lambda: WAYS[way](tuned), refused))
    assert differences(known, facts(model)) == [] and all(
        equal(output, expected[way]) for way, output in answers(tuned, inputs).items()
    )
    assert equal(run(tuned.merge(), inputs), expected["the delta in use"])


async def beside_a_task(enter: Callable[[], AbstractContextManager[Any]], change: Callable[[], None]) -> None:
    entered, leave = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        with enter():
            entered.set()
            await leave.wait()

    other = asyncio.create_task(hold())
    await entered.wait()
    try:
        change()
    finally:
        leave.set()
        await other


# -- frozen layers


def frozen_model() -> tuple[deltune.Tuned, frozen_layers.FrozenLayers]:
    model = build(FAMILIES["bert"], "sequence")
    tuned = stir(deltune.attach(model, "layernorm(layers='upper half')"))
    return tuned, frozen_layers.FrozenLayers(tuned)


@contextmanager
def inside_frozen_layers(training: bool) -> Iterator[tuple[frozen_layers.FrozenLayers, Callable[[], Outputs], Outputs]]:
    """Inside, another thread's pass is in the frozen layers; gives them, a pass of one's own, and its output."""
    tuned, frozen = frozen_model()
    model, inputs = tuned.model.train(training), batch(tuned.model)
    expected = run(model, inputs)
    inside, leave = threading.Event(), threading.Event()

    def step() -> None:
        if not inside.is_set():
            inside.set()
            come(leave)

    with another_thread() as start, called(model.bert.encoder.layer[0], step):
        other = start(lambda: run(model, inputs))
        try:
            come(inside)
            yield frozen, lambda: run(model, inputs), expected
        finally:
            leave.set()
        assert equal(other.result(PATIENCE), expected)
    assert equal(run(model, inputs), expected)
    frozen.remove()
    tuned.detach()


def test_frozen_layers_are_one_threads_at_a_time() -> None:
    with (
        inside_frozen_layers(training=False) as (_, one_pass, _),
        pytest.raises(deltune.DeltuneError, match="in one thread at a time"),
    ):
        one_pass()


# -- torch.compile


@pytest.mark.parametrize("whole", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["one graph", "graphs"])
def test_a_compiled_pass_beside_a_scope(whole: bool) -> None:
    """While other tensors stand in the model for another thread, a graph cannot wait for them: it is refused. Where
    torch then runs the model without a graph, the pass takes its turn."""
    torch._dynamo.reset()
    tuned = tuned_model(num_hidden_layers=1)
    inputs = batch(tuned.model)
    expected = run(tuned.model, inputs)
    compiled = torch.compile(tuned.model, backend="eager", fullgraph=whole)
    for way in SCOPES:
        with held_elsewhere(lambda way=way: WAYS[way](tuned)):
            if whole:
                reason = "a compiled forward pass cannot wait"
                reason = "exception DeltuneError" if is_older("torch", "2.13") else reason  # it names the class alone
                with pytest.raises(RuntimeError, match=reason):
                    run(compiled, inputs)
            else:
                assert equal(run(compiled, inputs), expected)
        assert distance(run(compiled, inputs), expected) < 1e-9
    tuned.detach()


# -- processes


def in_a_pass(tuned: deltune.Tuned, pause: Callable[[], None]) -> None:
    with called(tuned.model.bert.encoder.layer[0], pause):
        run(tuned.model, batch(tuned.model))


def inside(way: Way) -> Callable[[deltune.Tuned, Callable[[], None]], None]:
    def hold(tuned: deltune.Tuned, pause: Callable[[], None]) -> None:
        with way(tuned):
            pause()

    return hold


HELD: dict[str, Callable[[deltune.Tuned, Callable[[], None]], None]] = {
    "a pass": in_a_pass,
    "disable": inside(WAYS["disable"]),
    "rows": inside(WAYS["rows"]),
    "the lock of passes": inside(lambda tuned: tuned.attached.passes.lock.mutex),
    "the model, for a change": inside(lambda tuned: tuned.attached.passes.exclusive("use")),
    "the lock of installing": inside(lambda tuned: attached_module._INSTALL_LOCK),
}
"""What another thread may be in the middle of when a process is forked."""


@pytest.mark.parametrize("held", HELD)
def test_a_fork_while_another_thread_holds_something(held: str) -> None:
    """The child has none of the other threads, and does not wait for any: it runs, attaches, merges and takes off."""
    tuned = tuned_model()
    model, inputs = tuned.model, batch(tuned.model)
    expected = answers(tuned, inputs)
    entered, leave = threading.Event(), threading.Event()

    def pause() -> None:
        entered.set()
        come(leave)

    def of_child() -> None:
        leave.set()
        assert all(equal(output, expected[way]) for way, output in answers(tuned, inputs).items())
        deltune.attach(model, "ia3", name="new")
        deltune.attach(build(FAMILIES["bert"], "base"), "ia3").detach()
        assert equal(run(tuned.use("a").model, inputs), expected["the delta in use"])
        tuned.detach("b")
        assert equal(run(tuned.merge(), inputs), expected["the delta in use"])

    with another_thread() as start:
        other = start(lambda: HELD[held](tuned, pause))
        come(entered)
        child = os.fork()
        if child == 0:
            signal.alarm(PATIENCE)
            torch.set_num_threads(1)
            try:
                of_child()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        leave.set()
        other.result(PATIENCE)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    tuned.detach()
