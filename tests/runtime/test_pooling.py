"""Pooling: a head that reads a pooler may read the mean, the first or the last hidden state of the text instead."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import deltune
from deltune.models import POOLINGS
from deltune.runtime.pooling import head_reads_pooler
from tables.families import FAMILIES
from tables.methods import product
from tables.specimens import batch, build, differences, distance, equal, facts, roles, run, specimen, stir
from tables.versions import is_older

from .test_rows import check

READING = {
    ("bert", "sequence"), ("bert", "choice"), ("albert", "sequence"), ("albert", "choice"), ("roberta", "choice"),
    ("xlm-roberta", "choice"),
}  # fmt: skip
"""The classes whose source passes `outputs[1]` of the base model, the pooler's, to the head, and nothing else."""

OURS = ("mean", "first", "last")
CLASSES = (("bert", "sequence"), ("albert", "sequence"), ("bert", "choice"), ("roberta", "choice"))
METHODS = ("lora(rank=2) + layernorm", "prompt(length=3) + prefix(length=2)", "prompt(length=2, positions='none')",
           "loreft(rank=2)", "head", "full")  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_which_heads_read_a_pooler(name: str) -> None:
    for role in roles(FAMILIES[name]):
        model = specimen(name, role)
        assert head_reads_pooler(model, deltune.inspect(model)) == ((name, role) in READING), role


@pytest.mark.parametrize("name", ["distilbert", "bart", "llama"])
def test_other_heads_are_refused(name: str) -> None:
    model = specimen(name, "sequence")
    with pytest.raises(deltune.DeltuneError, match=r"pooling='mean' replaces the pooler.* has none: leave pooling out"):
        deltune.attach(model, "layernorm", pooling="mean")
    with pytest.raises(deltune.DeltuneError, match=r"unknown pooling 'max'.*Known: first, last, mean, model"):
        deltune.attach(model, "layernorm", pooling="max")  # type: ignore[arg-type]
    deltune.attach(model, "layernorm", pooling="model").detach()


def padded(model: PreTrainedModel, left: bool) -> dict[str, Any]:
    """Four rows, of which one is short."""
    inputs = batch(model, rows=4, pad=0)
    hidden = slice(0, 3) if left else slice(-3, None)
    inputs["input_ids"][1, ..., hidden] = model.config.pad_token_id
    inputs["attention_mask"][1, ..., hidden] = 0
    return inputs


def pooled(states: torch.Tensor, mask: torch.Tensor, pooling: str) -> torch.Tensor:
    """As the words say, row by row."""
    texts = [row[shown.bool()] for row, shown in zip(states, mask, strict=True)]
    return torch.stack([{"mean": text.mean(0), "first": text[0], "last": text[-1]}[pooling] for text in texts])


@pytest.mark.parametrize(("of", "text", "left"), product(CLASSES, METHODS, (False, True)))
@pytest.mark.sample
def test_what_the_head_reads(of: tuple[str, str], text: str, left: bool) -> None:
    """It is of the hidden states of the text, also where a method puts rows before it or changes the last states."""
    model = specimen(*of)
    inputs = padded(model, left)
    run(model, inputs, output_hidden_states=True)  # for which transformers installs hooks that stay
    before = facts(model)
    for pooling in OURS:
        tuned = stir(deltune.attach(model, text, pooling=pooling))
        output = model(**inputs, output_hidden_states=True)
        mask = inputs["attention_mask"].flatten(0, -2)
        read = []
        hook = model.classifier.register_forward_pre_hook(lambda module, args, read=read: read.append(args[0]))
        logits = model(**inputs).logits
        hook.remove()
        states = model.base_model(input_ids=inputs["input_ids"].flatten(0, -2), attention_mask=mask).last_hidden_state
        assert torch.allclose(read[0], pooled(states, mask, pooling), rtol=1e-9, atol=1e-12)
        assert torch.equal(logits, output.logits)
        given_tuples = model(**inputs, return_dict=False)[0]
        assert torch.equal(given_tuples, logits)
        assert not any("pooler" in parameter for parameter, _ in tuned.named_trainable_parameters())
        tuned.detach()
    assert not differences(before, facts(model))


@pytest.mark.parametrize("left", [False, True], ids=["padded right", "padded left"])
@pytest.mark.parametrize(("name", "role"), CLASSES[:3])
def test_by_row(name: str, role: str, left: bool) -> None:
    """A mixed batch gives what its rows give alone, and their gradients."""
    model = specimen(name, role)
    for pooling, text in zip(POOLINGS, (*METHODS[:2], "loreft(rank=2)", "head"), strict=True):
        tuned = stir(deltune.attach(model, text, name=pooling, pooling=pooling))
    inputs = padded(model, left)
    for names in (["mean", "first", None, "mean"], ["last", "mean", "model", "first"]):
        check(FAMILIES[name], tuned, names, inputs)
    tuned.detach()


def reloaded(tuned: deltune.Tuned, folder: Path) -> PreTrainedModel:
    tuned.save(folder / "delta", model_card=True)
    assert json.loads((folder / "delta" / "delta.json").read_text())["pooling"] == tuned.delta().pooling
    assert "of the last hidden states" in (folder / "delta" / "README.md").read_text()
    fresh = build(FAMILIES["bert"], "sequence")
    assert deltune.load(fresh, folder / "delta").delta().pooling == tuned.delta().pooling
    return fresh


def in_a_thread(tuned: deltune.Tuned, folder: Path) -> PreTrainedModel:
    with ThreadPoolExecutor(1) as pool:
        inputs = batch(tuned.model)
        assert equal(pool.submit(run, tuned.model, inputs).result(), run(tuned.model, inputs))
    return tuned.model


def compiled(tuned: deltune.Tuned, folder: Path) -> Any:
    torch.compiler.reset()
    return torch.compile(tuned.model, backend="eager")


def exported(tuned: deltune.Tuned, folder: Path) -> Any:
    inputs = batch(tuned.model)
    return torch.export.export(tuned.model, (), dict(inputs), strict=False).module()


def copied(tuned: deltune.Tuned, folder: Path) -> PreTrainedModel:
    return copy.deepcopy(tuned.model)


def pickled(tuned: deltune.Tuned, folder: Path) -> Any:
    return pickle.loads(pickle.dumps(tuned.model))


WAYS: tuple[Callable[[deltune.Tuned, Path], Any], ...] = (reloaded, copied, pickled, in_a_thread, compiled, exported)


@pytest.mark.parametrize(("text", "way"), product(METHODS[:2], WAYS))
@pytest.mark.sample
def test_it_is_a_part_of_the_delta(text: str, way: Callable[[deltune.Tuned, Path], Any], tmp_path: Path) -> None:
    if way is compiled and "prompt" in text and is_older("torch", "2.13"):
        pytest.skip("needs torch 2.13, whose compiler sees hooks in the order in which they run")
    model = build(FAMILIES["bert"], "sequence")
    tuned = stir(deltune.attach(model, text, pooling="mean"))
    inputs = batch(model)
    expected = run(model, inputs)
    made = way(tuned, tmp_path)
    with torch.no_grad():
        assert distance({"logits": made(**inputs).logits}, expected) < 1e-12
    with tuned.disable():
        assert distance(run(model, inputs), expected) > 1e-6


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_with_checkpoints(reentrant: bool) -> None:
    gradients = []
    for checkpointed in (False, True):
        model = build(FAMILIES["bert"], "sequence").train()
        tuned = stir(deltune.attach(model, METHODS[1], name="a", pooling="mean"))
        stir(deltune.attach(model, METHODS[0], name="b", pooling="last"))
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        with tuned.rows(["a", "b"]):
            model(**batch(model)).logits.square().sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.allclose(gradients[1][n], grad, rtol=1e-9, atol=1e-12) for n, grad in gradients[0].items())


def test_what_cannot_say_it_refuses(tmp_path: Path) -> None:
    model = specimen("bert", "sequence")
    tuned = deltune.attach(model, "lora(rank=2)", pooling="mean")
    before = facts(model)
    with pytest.raises(
        deltune.DeltuneError, match=r"deltune merge RUN --output DIR.*sentence-transformers.*--pooling model"
    ):
        tuned.merge()
    with pytest.raises(deltune.DeltuneError, match=r"peft.*--pooling model"):
        deltune.export(model, tmp_path / "peft")
    assert not differences(before, facts(model)) and not (tmp_path / "peft").exists()
    with pytest.raises(deltune.DeltuneError, match="attention_mask"):
        model(batch(model)["input_ids"], attention_mask=torch.ones(2, 1, 7, 7, dtype=torch.float64))
    tuned.detach()
    with pytest.raises(deltune.DeltuneError, match="has no pooler"):
        deltune.attach(model, "lora(rank=2, at='pooler')", pooling="mean")
