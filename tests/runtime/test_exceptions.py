"""Errors raised anywhere in a pass: the next pass is right, and nothing of the failed one is held."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import deltune
from tables.families import FAMILIES
from tables.methods import product
from tables.specimens import batch, build, equal, facts, forward, loss, run, stir

ERRORS = (KeyboardInterrupt, RuntimeError, MemoryError, SystemExit)
"""torch runs the hooks that are "always called" after an Exception only; the first and the last are none."""

TEXTS = {
    "a": "layernorm + parallel_adapter(rank=2) + prefix(length=2)",
    "b": "apet(layernorm + lora(rank=2), parameters=40) + prompt(length=2)",
}


@contextmanager
def raising(module: torch.nn.Module, error: type[BaseException], seen: list[weakref.ref[Any]]) -> Iterator[None]:
    """The module raises when it is called, after it has looked at what it is given."""

    def stop(its: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        tensors = [value for value in (*args, *kwargs.values(), output) if isinstance(value, torch.Tensor)]
        seen.extend(weakref.ref(tensor) for tensor in tensors if tensor.grad_fn is not None)
        raise error("on purpose")

    hook = module.register_forward_hook(stop, with_kwargs=True, prepend=True)
    try:
        yield
    finally:
        hook.remove()


def scopes(tuned: deltune.Tuned) -> dict[str, Callable[[], list[AbstractContextManager[Any]]]]:
    rows: list[str | None] = ["a", "b", None]
    return {
        "plain": lambda: [],
        "rows": lambda: [tuned.rows(rows)],
        "disabled": lambda: [tuned.disable()],
        "rows in rows": lambda: [tuned.rows(["b", "b", "b"]), tuned.rows(rows)],
        "disabled in rows": lambda: [tuned.rows(rows), tuned.disable()],
    }


def tuned_model(family: str) -> deltune.Tuned:
    model = build(FAMILIES[family], "sequence")
    for name, text in TEXTS.items():
        tuned = stir(deltune.attach(model, text, name=name), seed=ord(name))
    return tuned.use("a")


def places(model: PreTrainedModel) -> list[str]:
    """A module of each kind that a pass meets: entries, layers, attentions, projections, norms, the head."""
    anatomy = deltune.inspect(model)
    layer = anatomy.layers[-1]
    paths = [stack.entry for stack in anatomy.stacks] + [layer.path, layer.attentions[0].path]
    paths += [part.path for part in (layer.attentions[0].query, layer.attentions[0].output) if part is not None]
    return list(dict.fromkeys([*paths, *(norm.path for norm in layer.norms), *anatomy.head]))


@pytest.mark.parametrize(
    ("family", "scope", "error"),
    product(["bert", "gpt2"], ["rows", "plain", "disabled", "rows in rows", "disabled in rows"], ERRORS),
)
@pytest.mark.sample
def test_raised_in_a_module(family: str, scope: str, error: type[BaseException]) -> None:
    tuned = tuned_model(family)
    model, inputs = tuned.model, batch(tuned.model, rows=3)
    entered = scopes(tuned)[scope]
    with ExitStack() as stack:
        for context in entered():
            stack.enter_context(context)
        expected = run(model, inputs)
    plain, known = run(model, inputs), facts(model)
    looked_at = 0
    for path in places(model):
        seen: list[weakref.ref[Any]] = []
        with raising(model.get_submodule(path), error, seen), pytest.raises(error), ExitStack() as stack:
            for context in entered():
                stack.enter_context(context)
            forward(model, inputs)
        gc.collect()
        looked_at += len(seen)
        assert not [one for one in seen if one() is not None], f"held after {path}"
        assert (tuned.active, tuned.mixed) == ("a", ()) and equal(run(model, inputs), plain), path
        with ExitStack() as stack:
            for context in entered():
                stack.enter_context(context)
            assert equal(run(model, inputs), expected), path
    after = facts(model)
    assert looked_at or "disabled" in scope  # the base alone is frozen, and its tensors are nobody's graph
    assert [key for key in known if key.startswith("hooks") and known[key] != after[key]] == []
    tuned.detach()


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("scope", ["plain", "rows"])
def test_raised_in_a_backward_pass(scope: str, error: type[BaseException]) -> None:
    """With gradient checkpointing, so that layers are being computed again when it happens."""
    tuned = tuned_model("bert")
    model, inputs = tuned.model.train(), batch(tuned.model, rows=3)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layer = deltune.inspect(model).layers[0]

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        with ExitStack() as stack:
            for context in scopes(tuned)[scope]():
                stack.enter_context(context)
            loss(forward(model, inputs)).backward()
            return [p.grad.clone() for p in tuned.trainable_parameters() if p.grad is not None]

    expected = gradients()
    module = model.get_submodule(layer.attentions[0].output.path)
    calls = 0

    def second(its: torch.nn.Module, args: Any, output: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise error("on purpose")

    hook = module.register_forward_hook(second)
    with pytest.raises(error):
        gradients()
    hook.remove()
    again = gradients()
    assert calls == 2 and len(again) == len(expected) > 0
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(again, expected, strict=True))


@pytest.mark.parametrize("error", ERRORS)
def test_raised_in_generate(error: type[BaseException]) -> None:
    model = build(FAMILIES["gpt2"], "causal")
    for name, text in (("a", "layernorm + prefix(length=2)"), ("b", "prompt(length=2)")):
        tuned = stir(deltune.attach(model, text, name=name), seed=ord(name))
    inputs = batch(model, rows=2, pad=0)
    ways = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}

    def answer() -> torch.Tensor:
        with tuned.rows(["a", "b"]):
            return model.generate(**inputs, **ways)

    expected, plain = answer(), model.generate(**inputs, **ways)
    steps = 0

    def third(module: torch.nn.Module, args: Any, output: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            raise error("on purpose")

    hook = model.transformer.h[1].register_forward_hook(third)
    with pytest.raises(error):
        answer()
    hook.remove()
    assert steps == 3 and tuned.mixed == () and torch.equal(model.generate(**inputs, **ways), plain)
    assert torch.equal(answer(), expected)
    tuned.use("a").detach()  # nobody waits for the pass that failed
