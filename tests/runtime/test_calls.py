"""Fuzzing of calls: public functions with arguments of every kind give a result or a DeltuneError, and what is refused
leaves the model as it was. Python's own TypeError for a wrong number of arguments is fine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import deltune
from deltune.errors import MAX_MESSAGE_LENGTH
from deltune.methods.registry import FORMS, REGISTRY
from tables.specimens import differences, facts, specimen

MODELS = ("bert", "llama", "gpt2", "t5")

VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "zero": lambda: 0,
    "three": lambda: 3,
    "minus one": lambda: -1,
    "huge": lambda: 10**30,
    "enormous": lambda: 10**5000,
    "float": lambda: 2.5,
    "nan": lambda: math.nan,
    "infinity": lambda: math.inf,
    "complex": lambda: 1j,
    "empty text": lambda: "",
    "text": lambda: "x",
    "long text": lambda: "x" * 20_000,
    "surrogate": lambda: "\ud800",
    "null": lambda: "a\0b",
    "path out": lambda: "../x",
    "digits": lambda: "²",
    "method": lambda: "lora(rank=2)",
    "method object": lambda: deltune.lora(2),
    "form": lambda: deltune.LowRank(2),
    "bytes": lambda: b"x",
    "empty list": lambda: [],
    "list": lambda: ["x"],
    "nested list": lambda: [[1], None],
    "tuple of numbers": lambda: (1, 2),
    "dict": lambda: {"a": 1},
    "set": lambda: {1},
    "object": object,
    "class": lambda: int,
    "function": lambda: len,
    "tensor": lambda: torch.zeros(2),
    "module": lambda: torch.nn.Linear(2, 2),
    "missing path": lambda: Path("/nonexistent/folder"),
    "generator": lambda: iter([1]),
}
"""Values of every kind, made anew for each call."""

Call = Callable[[Any, Any], Any]

CALLS: dict[str, Call] = {
    "parse": lambda model, x: deltune.parse(x),
    "inspect": lambda model, x: deltune.inspect(x),
    "count of": lambda model, x: deltune.count(x, "lora"),
    "count method": lambda model, x: deltune.count(model, x),
    "count denominator": lambda model, x: deltune.count(model, "lora", x),
    "count head": lambda model, x: deltune.count(model, "lora", "model", x),
    "fit of": lambda model, x: deltune.fit(x, "lora(rank=?)", 1000),
    "fit method": lambda model, x: deltune.fit(model, x, 1000),
    "fit budget": lambda model, x: deltune.fit(model, "lora(rank=?)", x),
    "fit denominator": lambda model, x: deltune.fit(model, "lora(rank=?)", "50%", x),
    "fit weights": lambda model, x: deltune.fit(model, "lora(rank=?) + prefix(length=?)", 100_000, weights=x),
    "fit weights of two": lambda model, x: deltune.fit(
        model, "lora(rank=?) + prefix(length=?)", 100_000, weights=[1, x]
    ),
    "attach to": lambda model, x: deltune.attach(x, "lora"),
    "attach method": lambda model, x: deltune.attach(model, x),
    "attach name": lambda model, x: deltune.attach(model, "lora", x),
    "attach head": lambda model, x: deltune.attach(model, "lora", head=x),
    "load into": lambda model, x: deltune.load(x, "/nonexistent"),
    "sum": lambda model, x: deltune.Modification("ffn", deltune.LowRank(2), layers=x),
    "apet method": lambda model, x: deltune.apet(x, 5),
    **{
        f"{name} {argument}": lambda model, x, make=REGISTRY[name].make, argument=argument: make(
            **({"method": "plugin", "parameters": 5} if make is deltune.apet else {}) | {argument: x}
        )
        for name, arguments in {
            "lora": ("rank", "scale", "at", "alpha", "dropout", "layers", "stack", "attention"),
            "adapter": ("style", "rank", "bias", "activation", "init"),
            "parallel_adapter": ("at", "scale"),
            "prefix": ("length", "reparameterise", "gate"),
            "prompt": ("length", "init_from", "positions"),
            "layernorm": ("terms", "of", "embedding"),
            "bitfit": ("which",),
            "diff_pruning": ("sparsity", "over"),
            "apet": ("parameters", "pattern", "along", "seed"),
        }.items()
        for argument in arguments
    },
    **{f"form {kind.__name__}": lambda model, x, kind=kind: kind(x) for kind in FORMS if fields(kind)},
    "Scale": lambda model, x: deltune.Scale(x),
    "SigmoidGate": lambda model, x: deltune.SigmoidGate(x),
    "PrefixGate": lambda model, x: deltune.PrefixGate(x),
    "Modification site": lambda model, x: deltune.Modification(x, deltune.LowRank(2)),
    "Modification form": lambda model, x: deltune.Modification("ffn", x),
    "Modification compose": lambda model, x: deltune.Modification("ffn", deltune.LowRank(2), compose=x),
    "Selection roles": lambda model, x: deltune.Selection(x),
    "Selection areas": lambda model, x: deltune.Selection(("bias",), x),
    "Selection sparsity": lambda model, x: deltune.Selection(("bias",), sparsity=x),
}
"""A call of a public function or constructor in which one argument is any value."""

HANDLE: dict[str, Call] = {
    "load folder": lambda model, x: deltune.load(model, x),
    "tuned": lambda model, x: deltune.tuned(x),
    "use": lambda model, x: deltune.tuned(model).use(x),
    "detach": lambda model, x: deltune.tuned(model).detach(x),
    "count denominator": lambda model, x: deltune.tuned(model).count(x),
    "count name": lambda model, x: deltune.tuned(model).count(name=x),
    "save name": lambda model, x: deltune.tuned(model).save("/nonexistent/x", x),
    "save folder": lambda model, x: deltune.tuned(model).save(x),
    "rows": lambda model, x: deltune.tuned(model).rows(x).__enter__(),
    "rows of one": lambda model, x: deltune.tuned(model).rows([x]).__enter__(),
    "rows of two": lambda model, x: deltune.tuned(model).rows(["default", x]).__enter__(),
    "load name": lambda model, x: deltune.load(model, "/nonexistent", x),
    "export name": lambda model, x: deltune.export(model, "/nonexistent/x", name=x),
    "export folder": lambda model, x: deltune.export(model, x),
    "export format": lambda model, x: deltune.export(model, "/nonexistent/x", x),
    "advance": lambda model, x: deltune.tuned(model).advance(x),
}
"""The same on a tuned model."""


def check(name: str, call: Call, kind: str) -> None:
    """The law of one call."""
    model = specimen(name)
    before = facts(model)
    try:
        result = call(model, VALUES[kind]())
    except deltune.DeltuneError as error:
        assert 0 < len(str(error)) < MAX_MESSAGE_LENGTH + 300
    else:
        if isinstance(result, deltune.Tuned):
            result.detach()
    assert differences(before, facts(model)) == []


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.sample(20)
def test_every_value(name: str) -> None:
    for kind in VALUES:
        try:
            check("bert", CALLS[name], kind)
        except Exception as error:
            raise AssertionError(f"{name} with {kind}") from error


@given(name=st.sampled_from(MODELS), call=st.sampled_from(list(CALLS)), kind=st.sampled_from(list(VALUES)))
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
def test_calls(name: str, call: str, kind: str) -> None:
    check(name, CALLS[call], kind)


@pytest.mark.parametrize("name", HANDLE)
@pytest.mark.sample(8)
def test_every_value_for_a_handle(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused leaves the delta in use, and detaching restores the model."""
    monkeypatch.chdir(tmp_path)  # where "x" is saved
    model = specimen("bert")
    before = facts(model)
    deltune.attach(model, "lora(rank=2)")
    attached = facts(model)
    for kind, make in VALUES.items():
        try:
            HANDLE[name](model, make())
        except deltune.DeltuneError as error:
            assert 0 < len(str(error)) < MAX_MESSAGE_LENGTH + 300
            assert differences(attached, facts(model)) == [], kind
        except Exception as error:
            raise AssertionError(f"{name} with {kind}") from error
        else:  # it may have changed what is attached
            if "deltune" in model._modules:
                deltune.tuned(model).detach()
            assert differences(before, facts(model)) == [], kind
            deltune.attach(model, "lora(rank=2)")
            attached = facts(model)
    deltune.tuned(model).detach()
    assert differences(before, facts(model)) == []
