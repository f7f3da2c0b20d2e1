"""Races between threads, tasks and processes, provoked at the moment at which they would do harm."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import io
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

import deltune
from deltune.anatomy import inspection
from tables.families import FAMILIES
from tables.specimens import Outputs, batch, build, equal, forward, loss, run, stir

PATIENCE = 60
"""Seconds after which a thread counts as stuck for ever."""

SOON = 0.3
"""Seconds that a thread is given to do what it must not do."""


TEXTS = ("layernorm + parallel_adapter(rank=2)", "layernorm + lora(rank=2)")


def tuned_model(family: str = "bert", role: str = "sequence", **changes: Any) -> deltune.Tuned:
    """A model with two deltas that train its own tensors; the second is in use."""
    model = build(FAMILIES[family], role, **changes)
    for number, text in enumerate(TEXTS):
        tuned = stir(deltune.attach(model, text, name=f"d{number}"), seed=number)
    return tuned


def eventually(ready: Callable[[], object]) -> None:
    """Wait until something is the case."""
    for _ in range(PATIENCE * 100):
        if ready():
            return
        time.sleep(0.01)
    raise AssertionError("it never came about")


@contextmanager
def beside(job: Callable[[], Any]) -> Iterator[threading.Thread]:
    """A thread that works on something inside the block, and is done soon after it."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield thread
    thread.join(PATIENCE)
    assert not thread.is_alive(), "the thread is stuck"
    for error in errors:
        raise error


# -- reading the model's structure


def test_nothing_walks_through_a_model_to_which_others_may_attach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A walk of torch's own ends in an error when another thread adds or removes a module meanwhile. Only what no other
    thread can change the model beside of may take one."""
    model = build(FAMILIES["bert"], "sequence")
    tuned = deltune.attach(model, "layernorm", name="kept")
    tuned.save(tmp_path / "saved")
    walk = torch.nn.Module.named_modules

    def checked(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        assert module not in (model, tuned, tuned.deltas) or tuned.attached.passes.lock.held_by_change
        return walk(module, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "named_modules", checked)
    with pytest.raises(AssertionError):
        list(model.parameters())
    deltune.attach(model, "prefix(length=2) + three_vectors", name="other")
    run(model, batch(model))
    deltune.load(model, tmp_path / "saved", name="loaded")
    tuned.save(tmp_path / "again")
    monkeypatch.setattr(inspection, "_CACHE", {})
    deltune.inspect(model)
    deltune.count(model, "lora(rank=2)")
    tuned.count(name="kept")
    with tuned.rows(["kept", "other"]):
        run(model, batch(model))
    tuned.use("kept").detach("loaded")
    tuned.merge()


# -- copies, pickles and state dicts


class Part:
    """A part of a model at which something happens when it is copied, pickled or read."""

    def __init__(self, happens: Callable[[], None]) -> None:
        self.happens = happens

    def __deepcopy__(self, memo: dict[int, Any]) -> Part:
        self.happens()
        return self

    def __reduce__(self) -> Any:
        self.happens()
        return str, ()


def saved(model: PreTrainedModel) -> PreTrainedModel:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copied: PreTrainedModel = torch.load(file, weights_only=False)
    return copied


def loaded(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that is given the state dict."""
    state = model.state_dict()
    copied = copy.deepcopy(model)
    deltune.tuned(copied).use(None)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    copied.load_state_dict(state)
    deltune.tuned(copied).use("d1")
    return copied


WAYS: dict[str, Callable[[PreTrainedModel], PreTrainedModel]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "pickle of the handle": lambda model: pickle.loads(pickle.dumps(deltune.tuned(model))).model,
    "deepcopy of the handle": lambda model: copy.deepcopy(deltune.tuned(model)).model,
    "torch.save": saved,
    "state dict": loaded,
}


def answers(model: PreTrainedModel, inputs: dict[str, Any]) -> list[Outputs]:
    tuned = deltune.tuned(model)
    assert tuned.active == "d1"
    outputs = [run(model, inputs)]
    with tuned.disable():
        outputs.append(run(model, inputs))
    with tuned.rows(["d0", "d1"]):
        outputs.append(run(model, inputs))
    outputs += [run(tuned.use(name).model, inputs) for name in ("d0", None, "d1")]
    return outputs


@pytest.mark.parametrize("way", WAYS)
def test_copied_while_another_thread_needs_other_tensors(way: str) -> None:
    """A thread enters rows() and runs a pass while the model's second norm of many is read."""
    tuned = tuned_model()
    model, inputs = tuned.model, batch(tuned.model)
    expected, keys = answers(model, inputs), list(model.state_dict())
    ran, copied = threading.Event(), threading.Event()
    begin = threading.Event()

    def other() -> None:
        begin.wait(PATIENCE)
        with tuned.rows(["d0", None]):
            run(model, inputs)
            ran.set()
            copied.wait(PATIENCE)

    def happens(*_: Any) -> None:
        begin.set()
        ran.wait(SOON)

    norm = model.bert.encoder.layer[0].output.LayerNorm
    if way == "state dict":
        hook = norm.register_state_dict_pre_hook(happens)
    else:
        norm.part = Part(happens)
    with beside(other):
        try:
            twin = WAYS[way](model)
        finally:
            copied.set()
    if way == "state dict":
        hook.remove()
    assert begin.is_set()
    for each in (twin, model):
        outputs = answers(each, inputs)
        assert all(equal(one, two) for one, two in zip(outputs, expected, strict=True))
        assert list(each.state_dict()) == keys


def test_the_state_dict_names_what_is_in_use_here() -> None:
    """Also while another thread is inside of rows(), for which the base's own tensors stand in the model."""
    tuned = tuned_model()
    model = tuned.model
    expected = model.state_dict()
    with tuned.disable():
        base = model.state_dict()
    assert list(base) != list(expected)
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with tuned.rows(["d0"]):
            run(model, batch(model, rows=1))
            entered.set()
            leave.wait(PATIENCE)

    with beside(other):
        entered.wait(PATIENCE)
        enabled = model.state_dict()
        with tuned.disable():
            disabled = model.state_dict()
        leave.set()
    for state, reference in ((enabled, expected), (disabled, base)):
        assert list(state) == list(reference) and all(torch.equal(state[name], reference[name]) for name in reference)


def test_copied_together_with_the_handle() -> None:
    """The copies belong together as the originals do, in either order; parameters are shared within a pickle."""
    tuned = tuned_model()
    for both in ((tuned.model, tuned), (tuned, tuned.model)):
        for copied in (copy.deepcopy(both), pickle.loads(pickle.dumps(both))):
            model, handle = sorted(copied, key=lambda one: isinstance(one, deltune.Tuned))
            assert deltune.tuned(model) is handle and handle.model is model is not tuned.model
    model, parameters = pickle.loads(pickle.dumps((tuned.model, list(tuned.trainable_parameters()))))
    mine = {id(parameter) for parameter in deltune.tuned(model).trainable_parameters()}
    assert mine == {id(parameter) for parameter in parameters}
    again = pickle.loads(pickle.dumps(model))  # one that was pickled before is as good as the first
    assert all(equal(*pair) for pair in zip(answers(again, batch(again)), answers(model, batch(again)), strict=True))


def test_copied_inside_of_a_pass_and_of_a_change() -> None:
    """Where waiting for passes would be waiting for oneself."""
    tuned = tuned_model()
    model, inputs = tuned.model, batch(tuned.model)
    expected, keys = answers(model, inputs), list(model.state_dict())
    copies: list[PreTrainedModel] = []

    def inside() -> None:
        copies.extend((copy.deepcopy(model), pickle.loads(pickle.dumps(model))))
        assert list(model.state_dict()) == keys

    hook = model.bert.encoder.layer[1].register_forward_pre_hook(_Inside(inside))
    with beside(lambda: run(model, inputs)):
        pass
    hook.remove()
    assert len(copies) == 2
    for copied in copies:
        assert all(equal(*pair) for pair in zip(answers(copied, inputs), expected, strict=True))


class _Inside(Part):
    """A hook, of which a copy does nothing."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Part:
        return _Inside(str)

    def __reduce__(self) -> Any:
        return _Inside, (str,)

    def __call__(self, module: Any, args: Any) -> None:
        self.happens()


# -- a process that was forked


def test_scopes_of_other_threads_are_not_in_a_fork() -> None:
    tuned = tuned_model()
    model, inputs = tuned.model, batch(tuned.model, rows=1)
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with tuned.rows(["d0"]):
            entered.set()
            leave.wait(PATIENCE)

    with beside(other):
        entered.wait(PATIENCE)
        with tuned.rows(["d1"]):
            expected = run(model, inputs)
            child = os.fork()
            if child == 0:
                torch.set_num_threads(1)
                right = equal(run(model, inputs), expected) and tuned.mixed == ("d1",)
                os._exit(0 if right and _detaches(tuned) else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with pytest.raises(deltune.DeltuneError, match="d0 is used inside rows"):
            tuned.detach("d0")
        leave.set()


def _detaches(tuned: deltune.Tuned) -> bool:
    """Whether d0 can be taken off in a thread that is inside of no scope, while d1 cannot."""
    refused: list[str] = []

    def detach() -> None:
        for name in ("d0", "d1"):
            try:
                tuned.detach(name)
            except deltune.DeltuneError:
                refused.append(name)

    thread = threading.Thread(target=detach)
    thread.start()
    thread.join()
    return refused == ["d1"]


# -- a pass that waits for passes of other threads


def waiting(tuned: deltune.Tuned) -> int:
    """How many wait for their turn."""
    return len(tuned.attached.passes.lock._waiting)


def test_generate_batch_with_a_change_that_waits() -> None:
    tuned = tuned_model("gpt2", "causal")
    model = tuned.model
    steps, changes = [0], []

    def step(module: Any, args: Any) -> None:
        steps[0] += 1
        if steps[0] == 2:
            thread = threading.Thread(target=lambda: changes.append(tuned.use("d0").active), daemon=True)
            thread.start()
            eventually(lambda: waiting(tuned))

    hook = model.transformer.h[0].register_forward_pre_hook(step)
    answered: list[Any] = []
    ways = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=98, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=16)
    with beside(lambda: answered.append(model.generate_batch([[5, 6, 7], [8, 9]], ways, small))):
        pass
    hook.remove()
    eventually(lambda: changes)
    assert steps[0] > 2 and len(answered[0]) == 2 and changes == ["d0"]


# -- blocks that are left elsewhere


def test_a_thread_that_outlives_its_block() -> None:
    tuned = tuned_model()
    model, inputs = tuned.model, batch(tuned.model)
    expected = answers(model, inputs)
    entered, left = threading.Event(), threading.Event()
    seen: list[Any] = []

    def outliving() -> None:
        with tuned.rows(["d1", "d0"]):
            run(model, inputs)
        entered.set()
        left.wait(PATIENCE)
        for _ in range(2):
            with pytest.raises(deltune.DeltuneError, match="has been left in the meantime"):
                run(model, inputs)
        with tuned.rows(["d0", "d1"]):
            seen.append(run(model, inputs))
        with pytest.raises(deltune.DeltuneError, match="has been left in the meantime"):
            model(**inputs)
        with tuned.disable():
            seen.append(run(model, inputs))
        seen.append(run(tuned.use("d1").model, inputs))

    async def main() -> None:
        with tuned.rows(["d0", "d0"]):
            task = asyncio.get_running_loop().run_in_executor(None, contextvars.copy_context().run, outliving)
            await asyncio.to_thread(entered.wait, PATIENCE)
        seen.append(run(model, inputs))  # nothing is left where the block was
        left.set()
        await task

    asyncio.run(main())
    assert all(equal(one, two) for one, two in zip(seen, [expected[i] for i in (0, 2, 1, 0)], strict=True))


def test_a_task_that_outlives_its_block() -> None:
    """Also a callback, and a context that is kept, in the same thread."""
    tuned = tuned_model()
    model, inputs = tuned.model, batch(tuned.model)

    async def main() -> list[Any]:
        async def child() -> Any:
            await left.wait()
            return run(model, inputs)

        left, later = asyncio.Event(), asyncio.get_running_loop().create_future()

        def callback() -> None:
            try:
                later.set_result(run(model, inputs))
            except deltune.DeltuneError as error:
                later.set_exception(error)

        with tuned.rows(["d0", "d0"]):
            task = asyncio.create_task(child())
            kept = contextvars.copy_context()
            await asyncio.sleep(0)
            asyncio.get_running_loop().call_soon(callback)
        left.set()
        results = await asyncio.gather(task, later, return_exceptions=True)
        with pytest.raises(deltune.DeltuneError, match="has been left in the meantime"):
            kept.run(run, model, inputs)
        run(model, inputs)
        return results

    results = asyncio.run(main())
    assert all(isinstance(one, deltune.DeltuneError) for one in results)
    assert all("has been left in the meantime" in str(one) for one in results)


def test_a_pass_goes_on_with_what_it_began_with() -> None:
    """`generate` in a thread that is given the block, which is left while it runs."""
    tuned = tuned_model("gpt2", "causal")
    model, inputs = tuned.model, batch(tuned.model, pad=0)
    ways = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    with tuned.rows(["d0", "d1"]):
        expected = model.generate(**inputs, **ways)
    assert not torch.equal(expected, model.generate(**inputs, **ways))
    begun, left = threading.Event(), threading.Event()

    def wait(module: Any, args: Any) -> None:
        begun.set()
        left.wait(PATIENCE)

    hook = model.transformer.h[1].register_forward_pre_hook(wait)
    generated: list[torch.Tensor] = []
    with tuned.rows(["d0", "d1"]):
        context = contextvars.copy_context()
        thread = threading.Thread(
            target=context.run, args=(lambda: generated.append(model.generate(**inputs, **ways)),), daemon=True
        )
        thread.start()
        begun.wait(PATIENCE)
    left.set()
    thread.join(PATIENCE)
    hook.remove()
    assert torch.equal(generated[0], expected)


def test_a_block_that_was_dropped_leaves_nothing() -> None:
    """Whoever is interrupted before a block's exit begins drops it without leaving it."""
    tuned = tuned_model()
    inputs = batch(tuned.model)
    expected = run(tuned.model, inputs)
    scope = tuned.rows(["d0", "d0"])
    scope.__enter__()
    assert not equal(run(tuned.model, inputs), expected)
    del scope
    assert equal(run(tuned.model, inputs), expected) and tuned.active == "d1"


# -- torch.compile in an event loop


@pytest.mark.slow
def test_compiled_in_an_event_loop() -> None:
    """The results are right, during it and afterwards; it is refused where a whole graph is demanded."""
    tuned = tuned_model(num_hidden_layers=1)
    model, inputs = tuned.model, batch(tuned.model)
    expected = answers(model, inputs)
    torch.compiler.reset()

    async def request(compiled: Any) -> Outputs:
        with tuned.rows(["d0", "d1"]):
            await asyncio.sleep(0)
            return run(compiled, inputs)

    compiled = torch.compile(model, backend="eager")
    assert equal(run(compiled, inputs), expected[0])
    assert equal(asyncio.run(request(compiled)), expected[2])
    assert equal(run(compiled, inputs), expected[0])
    torch.compiler.reset()
    with pytest.raises(Exception, match="cannot see which asyncio task runs it"):
        asyncio.run(request(torch.compile(model, backend="eager", fullgraph=True)))
    torch.compiler.reset()
    assert equal(run(model, inputs), expected[0])


# -- computed again in the backward pass


def gradients(tuned: deltune.Tuned) -> list[torch.Tensor]:
    grads = [p.grad.clone() for p in tuned.trainable_parameters() if p.grad is not None]
    tuned.model.zero_grad()
    return grads


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_inside_of_another_one(reentrant: bool) -> None:
    """The backward passes of the two take turns: the outer one's layers are computed again after the inner one's."""
    outer, inner = tuned_model(), tuned_model("gpt2", "sequence")
    inputs, extra = batch(outer.model), batch(inner.model)

    def add(module: Any, args: Any) -> Any:
        return (args[0] + forward(inner.model, extra)["logits"].mean(), *args[1:])

    outer.model.bert.encoder.layer[1].register_forward_pre_hook(add)
    outer.model.train()
    loss(forward(outer.model, inputs)).backward()
    expected = [gradients(outer), gradients(inner)]
    outer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    outer.model.enable_input_require_grads()
    late = loss(forward(outer.model, inputs))
    with outer.disable():
        late.backward()
    for tuned, reference in zip((outer, inner), expected, strict=True):
        grads = gradients(tuned)
        assert len(grads) == len(reference) > 0
        assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(grads, reference, strict=True))
