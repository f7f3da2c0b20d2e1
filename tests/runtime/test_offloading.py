"""Laws of models whose weights accelerate offloads: a delta is, trains, saves and detaches as on the plain model.

The weights are really away: between calls they are on the meta device, and only accelerate's hooks have their values.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import remove_hook_from_submodules
from torch import nn
from transformers import PreTrainedModel

import deltune
from tables.families import FAMILIES
from tables.specimens import Outputs, batch, build, differences, distance, facts, forward, loss, main_role, run, stir

TOLERANCE = 1e-12  # in float64: what the disk gives is aligned otherwise, which changes the order of sums


def _by_device_map(model: PreTrainedModel, folder: Path) -> None:
    """Every other module of the base model stays in memory, the rest is on the disk, with all that is tied."""
    names = [name for name, _ in model.named_children()]
    base = dict(model.named_children())[names[0]]
    inside = {f"{names[0]}.{name}": ("disk", "cpu")[i % 2] for i, (name, _) in enumerate(base.named_children())}
    places = {**(inside or {names[0]: "disk"}), **dict.fromkeys(names[1:], "disk")}
    accelerate.dispatch_model(model, places, offload_dir=folder)


OFFLOADS: dict[str, Callable[[PreTrainedModel, Path], Any]] = {
    "cpu": lambda model, folder: accelerate.cpu_offload(model, torch.device("cpu")),
    "cpu with buffers": lambda model, folder: accelerate.cpu_offload(model, "cpu", offload_buffers=True),
    "cpu in blocks": lambda model, folder: accelerate.cpu_offload(
        model, "cpu", preload_module_classes=["BertLayer", "GPT2Block", "T5Block", "LlamaDecoderLayer"]
    ),
    "disk": lambda model, folder: accelerate.disk_offload(model, folder, "cpu"),
    "device_map": _by_device_map,
}

AFTER = [kind for kind in OFFLOADS if kind != "device_map"]

TEXTS = (
    "lora(rank=2)", "layernorm", "prefix(length=2)", "adapter(rank=4)", "ia3", "bitfit", "full", "prompt(length=2)",
    "prefix(length=2) + layernorm + parallel_adapter(rank=2)", "apet(layernorm + lora(rank=2), parameters=40)", "head",
)  # fmt: skip

CELLS = [
    (family, text) for family in ("bert", "gpt2", "llama", "t5") for text in TEXTS
    if (text != "bitfit" or FAMILIES[family].biases) and (text != "head" or family == "bert")
]  # fmt: skip


def offloaded(model: PreTrainedModel, kind: str, folder: Path) -> PreTrainedModel:
    OFFLOADS[kind](model, folder)
    return model


def attached(model: PreTrainedModel, text: str, name: str = "default") -> deltune.Tuned:
    torch.manual_seed(0)
    return deltune.attach(model, text, name=name)


def train(
    model: PreTrainedModel, inputs: dict[str, Any], optimizer: torch.optim.Optimizer, steps: int = 3
) -> list[Outputs]:
    """Three steps; the outputs of each, as with gradients."""
    made = []
    for _ in range(steps):
        outputs = forward(model, inputs)
        optimizer.zero_grad()
        loss(outputs).backward()
        optimizer.step()
        made.append({name: value.detach() for name, value in outputs.items()})
    return made


def adam(tuned: deltune.Tuned) -> torch.optim.Optimizer:
    return torch.optim.Adam(tuned.trainable_parameters(), lr=0.01)


def gradients(tuned: deltune.Tuned) -> Outputs:
    return {n: p.grad for n, p in tuned.named_trainable_parameters() if p.grad is not None}


def values(tuned: deltune.Tuned) -> Outputs:
    return {name: p.detach() for name, p in tuned.named_trainable_parameters()}


def close(one: Outputs, two: Outputs) -> bool:
    return distance(one, two) < TOLERANCE


def resident(model: PreTrainedModel) -> set[str]:
    """The names of the parameters of the model that are in memory between calls, those of deltas left out."""
    names = {name for name, p in model.named_parameters(remove_duplicate=False) if p.device.type != "meta"}
    return {name for name in names if not name.startswith("deltune.")}


def structure(model: PreTrainedModel) -> dict[str, Any]:
    """What detaching restores; accelerate itself makes its meta tensors anew in each call."""
    known = {n: v for n, v in facts(model).items() if not n.startswith(("identity", "value"))}
    for name, module in model.named_modules():
        hook = getattr(module, "_hf_hook", None)
        for part in (hook, *getattr(hook, "hooks", ())):
            known[f"hook {type(part)} of {name}"] = None if part is None else (id(part), sorted(vars(part)))
        if isinstance(module, nn.Linear | nn.LayerNorm | nn.Embedding):
            known[f"forward of {name}"] = getattr(getattr(module, "_old_forward", None), "__func__", None)
    return known


def base_facts(folder: Path) -> dict[str, Any]:
    facts_of_base: dict[str, Any] = json.loads((folder / "delta.json").read_text())["base"]
    return facts_of_base


# accelerate cannot move the tensors of deltas by a device_map, which has to name all tensors
@pytest.mark.parametrize(("kind", "when"), [*((k, "before") for k in OFFLOADS), *((k, "after") for k in AFTER)])
@pytest.mark.parametrize(("family", "text"), CELLS, ids=str)
@pytest.mark.sample(20)
def test_it_is_the_plain_model(family: str, text: str, kind: str, when: str, tmp_path: Path) -> None:
    """Outputs, gradients, trained values, files and the base are those of the plain model; the base stays away."""
    base = build(FAMILIES[family], main_role(FAMILIES[family]))
    plain, model, inputs = copy.deepcopy(base), copy.deepcopy(base), batch(base)
    before = run(base, inputs)
    reference = attached(plain, text)
    optimizer = adam(reference)
    expected = train(plain, inputs, optimizer)

    known: dict[str, Any] = {}
    stays: set[str] = set()
    if when == "before":
        offloaded(model, kind, tmp_path / "weights")
        stays = resident(model)
        assert len(stays) < len(resident(base)) if kind == "device_map" else not stays
        run(model, inputs)
        known = structure(model)
        tuned = attached(model, text)
        of_model = adam(tuned)
    else:
        tuned = attached(model, text)
        of_model = adam(tuned)  # it has the very parameters that are trained
        offloaded(model, kind, tmp_path / "weights")
    assert tuned.count().trained == reference.count().trained
    outputs = train(model, inputs, of_model)
    assert max(distance(one, two) for one, two in zip(outputs, expected, strict=True)) < TOLERANCE
    assert close(gradients(tuned), gradients(reference)) and close(values(tuned), values(reference))
    trained = {n for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad or "classifier" in n}
    assert resident(model) == stays | {name for name in trained if not name.startswith("deltune.")}
    after = run(plain, inputs)
    assert close(run(model, inputs), after) and not torch.equal(after["logits"], before["logits"])
    with tuned.disable():
        assert close(run(model, inputs), before)

    tuned.save(tmp_path / "of offloaded")
    reference.save(tmp_path / "of plain")
    assert base_facts(tmp_path / "of offloaded") == base_facts(tmp_path / "of plain")
    assert close(run(deltune.load(copy.deepcopy(base), tmp_path / "of offloaded").model, inputs), after)
    deltune.load(model, tmp_path / "of plain", name="other")
    assert close(run(model, inputs), after)
    if "full" not in text and "prompt" not in text and "head" not in text:
        with tuned.rows(["default", None]):
            mixed = run(model, inputs)
        with reference.rows(["default", None]):
            assert close(mixed, run(plain, inputs))

    assert tuned.detach() is model
    assert resident(model) == stays
    assert close(run(model, inputs), before)
    if when == "before":
        assert differences(known, structure(model)) == []
    remove_hook_from_submodules(model)
    assert resident(model) == set(dict(model.named_parameters(remove_duplicate=False)))
    assert close(run(model, inputs), before)


@pytest.mark.parametrize("kind", ["cpu", "disk"])
@pytest.mark.parametrize("text", ["lora(rank=2)", "layernorm", "apet(layernorm + lora(rank=2), parameters=40)"])
def test_refused(kind: str, text: str, tmp_path: Path) -> None:
    """What needs all weights at once is refused, and works once the hooks are gone."""
    base = build(FAMILIES["bert"], "sequence")
    model, inputs = offloaded(copy.deepcopy(base), kind, tmp_path / "weights"), batch(base)
    plain = copy.deepcopy(base)
    after = run(stir(attached(plain, text)).model, inputs)
    tuned = stir(attached(model, text))
    ways: tuple[Callable[[], Any], ...] = (
        tuned.merge,
        lambda: model.save_pretrained(tmp_path / "model"),
        lambda: model.load_state_dict(base.state_dict(), strict=False),
    )
    for way in ways:
        with pytest.raises(deltune.DeltuneError, match=r"some are offloaded.*remove_hook_from_submodules"):
            way()
        assert tuned.active == "default" and close(run(model, inputs), after)
    assert not (tmp_path / "model").exists()
    remove_hook_from_submodules(model)
    assert close(run(model, inputs), after)
    assert close(run(tuned.merge(), inputs), after)


@pytest.mark.parametrize("kind", ["cpu", "disk"])
@pytest.mark.parametrize("text", ["layernorm", "lora(rank=2)", "apet(layernorm + lora(rank=2), parameters=40)"])
def test_loaded_again(kind: str, text: str, tmp_path: Path) -> None:
    """The hooks may go and come back while a delta is attached, and it is the base that detaching leaves."""
    base = build(FAMILIES["gpt2"], "causal")
    model, inputs = copy.deepcopy(base), batch(base)
    before = run(base, inputs)
    tuned = stir(attached(model, text))
    after = run(model, inputs)
    for number in range(2):
        offloaded(model, kind, tmp_path / str(number))
        assert close(run(model, inputs), after)
        remove_hook_from_submodules(model)
        assert close(run(model, inputs), after)
    offloaded(model, kind, tmp_path / "last")
    tuned.use(None)
    assert close(run(model, inputs), before)
    tuned.detach()
    remove_hook_from_submodules(model)
    assert differences({n: v for n, v in facts(base).items() if n.startswith("value")},
                       {n: v for n, v in facts(model).items() if n.startswith("value")}) == []  # fmt: skip


@pytest.mark.parametrize("text", ["layernorm", "lora(rank=2)", "apet(layernorm + lora(rank=2), parameters=40)"])
def test_an_exception_in_a_pass(text: str) -> None:
    """accelerate leaves the weights of a module in it whose call fails; the next pass is right, and so is detaching."""
    base = build(FAMILIES["bert"], "sequence")
    model, inputs = offloaded(copy.deepcopy(base), "cpu", Path()), batch(base)
    before = run(base, inputs)
    tuned = stir(attached(model, text))
    after = run(model, inputs)

    def fail(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("in a pass")

    norm = model.bert.encoder.layer[0].output.LayerNorm
    inner, norm._old_forward = norm._old_forward, fail
    if "apet" not in text:
        with pytest.raises(RuntimeError, match="in a pass"):
            run(model, inputs)
    norm._old_forward = inner
    assert close(run(model, inputs), after)
    tuned.detach()
    assert close(run(model, inputs), before) and not resident(model)


@pytest.mark.parametrize("family", ["bert", "t5"])
@pytest.mark.parametrize("text", ["layernorm", "lora(rank=2)", "prefix(length=2)"])
def test_checkpointing_and_copies(family: str, text: str) -> None:
    """Layers that are computed again load their weights again; a copy is offloaded for itself."""
    base = build(FAMILIES[family], main_role(FAMILIES[family]))
    plain, inputs = copy.deepcopy(base), batch(base)
    reference = attached(plain, text)
    train(plain, inputs, adam(reference), steps=1)
    model = offloaded(copy.deepcopy(base), "cpu", Path())
    model.gradient_checkpointing_enable()
    model.train()
    tuned = attached(model, text)
    train(model, inputs, adam(tuned), steps=1)
    assert close(gradients(tuned), gradients(reference))
    model.eval()
    other = copy.deepcopy(model)
    outputs = run(model, inputs)
    stir(deltune.tuned(other))
    assert distance(run(other, inputs), outputs) > 1e-9
    assert close(run(model, inputs), outputs)
    deltune.tuned(other).detach()
    assert close(run(other, inputs), run(base, inputs))


@pytest.mark.parametrize("kind", ["cpu", "disk"])
def test_generating_and_started_prompts(kind: str, tmp_path: Path) -> None:
    base = build(FAMILIES["gpt2"], "causal")
    model, plain = offloaded(copy.deepcopy(base), kind, tmp_path), copy.deepcopy(base)
    ids = batch(base, pad=0)["input_ids"]
    made = []
    for one in (model, plain):
        stir(attached(one, "prompt(length=2, init_from=(5, 6)) + lora(rank=2)"))
        made.append(one.generate(ids, max_new_tokens=5, do_sample=False))
    assert torch.equal(*made)


@pytest.mark.parametrize("text", ["lora(rank=2)", "layernorm", "full"])
def test_loaded_by_a_device_map(text: str, tmp_path: Path) -> None:
    """As from_pretrained loads a model: what is on the disk was never in memory, and stays in the checkpoint's file."""
    base = build(FAMILIES["gpt2"], "causal")
    base.save_pretrained(tmp_path / "model")
    places = {f"transformer.{n}": ("disk", "cpu")[i % 2] for i, (n, _) in enumerate(base.transformer.named_children())}
    places["lm_head"] = "disk"
    model = type(base).from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "weights", dtype=torch.float64
    )
    stays = resident(model)
    assert len(stays) < len(resident(base))
    plain, inputs = copy.deepcopy(base), batch(base)
    reference, tuned = attached(plain, text), attached(model, text)
    expected, outputs = train(plain, inputs, adam(reference)), train(model, inputs, adam(tuned))
    assert max(distance(one, two) for one, two in zip(outputs, expected, strict=True)) < TOLERANCE
    tuned.save(tmp_path / "delta")
    assert close(run(deltune.load(copy.deepcopy(base), tmp_path / "delta").model, inputs), run(plain, inputs))
    tuned.detach()
    assert resident(model) == stays and close(run(model, inputs), run(base, inputs))


def test_other_labels(tmp_path: Path) -> None:
    """A head of another number of labels than the base's."""
    wide = build(FAMILIES["bert"], "sequence", num_labels=5)
    base = build(FAMILIES["bert"], "sequence")
    base.bert.load_state_dict(wide.bert.state_dict())
    stir(attached(wide, "lora(rank=2)")).save(tmp_path / "delta")
    inputs = batch(base)
    before = run(base, inputs)
    model = offloaded(copy.deepcopy(base), "cpu", tmp_path)
    tuned = deltune.load(model, tmp_path / "delta")
    assert close(run(model, inputs), run(wide, inputs))
    tuned.use(None)
    assert close(run(model, inputs), before)


def test_quantised_weights_are_refused() -> None:
    """What a quantised weight is made of is no parameter, so that accelerate would not move it with the weight."""
    torchao = pytest.importorskip("torchao.quantization")
    model = build(FAMILIES["bert"], "sequence", torch.float32)
    torchao.quantize_(model.bert.encoder, torchao.Int8WeightOnlyConfig())
    inputs = batch(model)
    before = run(model, inputs)
    accelerate.cpu_offload(model.classifier, "cpu")
    known = structure(model)
    with pytest.raises(deltune.DeltuneError, match=r"is quantised \(torchao int8\) and some .* offloaded"):
        attached(model, "lora(rank=2)")
    assert differences(known, structure(model)) == []
    assert torch.equal(run(model, inputs)["logits"], before["logits"])


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("text", ["layernorm", "lora(rank=2)"])
def test_a_part_of_the_model(text: str, when: str, tmp_path: Path) -> None:
    """One layer alone is offloaded, so that no hook is on the model itself."""
    base = build(FAMILIES["bert"], "sequence")
    plain, model, inputs = copy.deepcopy(base), copy.deepcopy(base), batch(base)
    reference = attached(plain, text)
    expected = train(plain, inputs, adam(reference))
    if when == "before":
        accelerate.cpu_offload(model.bert.encoder.layer[0], "cpu")
    tuned = attached(model, text)
    optimizer = adam(tuned)
    if when == "after":
        accelerate.cpu_offload(model.bert.encoder.layer[0], "cpu")
    outputs = train(model, inputs, optimizer)
    assert max(distance(one, two) for one, two in zip(outputs, expected, strict=True)) < TOLERANCE
    tuned.save(tmp_path / "of offloaded")
    reference.save(tmp_path / "of plain")
    assert base_facts(tmp_path / "of offloaded") == base_facts(tmp_path / "of plain")
    tuned.detach()
    assert close(run(model, inputs), run(base, inputs))


def test_tied_weights_are_one_tensor(tmp_path: Path) -> None:
    base = build(FAMILIES["gpt2"], "causal")
    for kind in OFFLOADS:
        model = offloaded(copy.deepcopy(base), kind, tmp_path / kind)
        assert deltune.inspect(model).tensors == deltune.inspect(base).tensors, kind
        run(model, batch(base))
        assert deltune.inspect(model).tensors == deltune.inspect(base).tensors, kind
