"""Laws of running: checkpointing, lower precision, inference mode, compilation, outputs, kernels, greatest lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import deltune
from tables.families import FAMILIES, Family
from tables.methods import Row, cells, product
from tables.specimens import (
    batch,
    build,
    distance,
    equal,
    forward,
    layers,
    loss,
    main_role,
    run,
    shapes,
    specimen,
    stir,
)

EVERY = "adapter(rank=4, bias=True, layer_norm=True, activation='gelu')"
FEW = ("prefix(length=3) + lora(rank=2) + layernorm", "prefix(length=3, reparameterise=8)", "prompt(length=3)", EVERY)
CHECKPOINTED = (
    *FEW, "parallel_adapter(at=('ffn', 'attention'), rank=4, x='residual')", "bitfit(which='layers')",
    "adapter(style='pfeiffer', rank=4)", "lora(rank=2, at='ffn', alpha=6)", "mam(length=3, rank=4)",
)  # fmt: skip


def gradients(model: PreTrainedModel, tuned: deltune.Tuned, inputs: dict[str, Any]) -> dict[str, torch.Tensor | None]:
    model.zero_grad()
    loss(forward(model, inputs)).backward()
    grads = {name: p.grad for name, p in tuned.named_trainable_parameters()}
    model.zero_grad()
    return grads


@cells(*CHECKPOINTED, families=lambda f: f.checkpoints)
@pytest.mark.sample(20)
def test_gradient_checkpointing(family: Family, row: Row) -> None:
    """The layers are computed a second time, in both of torch's ways, and the gradients are the same."""
    model = build(family, main_role(family))
    inputs = batch(model)
    tuned = stir(deltune.attach(model, row.text))
    model.train()
    plain = gradients(model, tuned, inputs)
    runs: list[str] = []  # of a linear inside the first layer: a layer's own hooks stay outside its checkpoint
    inner = model.base_model.get_submodule(f"{family.stacks[0].layers}.0.{family.stacks[0].ffn[0]}")
    inner.register_forward_pre_hook(lambda *_: runs.append("run"))
    for reentrant in (False, True):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant:  # these checkpoints need an input that wants a gradient, as with every frozen model
            model.enable_input_require_grads()
        runs.clear()
        saved = gradients(model, tuned, inputs)
        assert len(runs) == 2, "the layers were not computed again: nothing was checkpointed"
        assert saved.keys() == plain.keys()
        for name, gradient in plain.items():
            assert (saved[name] is None) == (gradient is None), (name, reentrant)
            assert gradient is None or torch.allclose(saved[name], gradient, rtol=1e-9, atol=1e-12), (name, reentrant)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda f: f.name)
def test_who_checkpoints(family: Family) -> None:
    assert specimen(family.name).supports_gradient_checkpointing == family.checkpoints


@cells(*FEW, "bitfit", "full", "ia3", "scaled_parallel_adapter(rank=4, scale='learned', x='residual')")
@pytest.mark.sample(20)
def test_autocast(family: Family, row: Row) -> None:
    """bfloat16 keeps 8 bits, 2^-9 of relative error a rounding; a few dozen roundings in sequence are under 5 %."""
    model = specimen(family.name, dtype=torch.float32)
    inputs = batch(model)
    tuned = stir(deltune.attach(model, row.text), size=0.05)
    assert {p.dtype for p in tuned.trainable_parameters()} == {torch.float32}
    whole = run(model, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        half = run(model, inputs)
        training = loss(forward(model, inputs))
    training.backward()
    for name, value in whole.items():
        assert (half[name].float() - value).norm() < 0.05 * value.norm(), name
    assert all(torch.isfinite(p.grad).all() for p in tuned.trainable_parameters() if p.grad is not None)
    model.zero_grad()
    tuned.detach()


@cells(*FEW, "bitfit", "parallel_adapter(rank=4)", "prompt(length=3, positions='none')")
@pytest.mark.sample(20)
def test_a_model_in_half_precision(family: Family, row: Row) -> None:
    """The base in bfloat16, what is added in float32: it runs, in the base's precision, and gradients are float32."""
    model = build(family, main_role(family), torch.bfloat16)
    inputs = batch(model)
    before = run(model, inputs)
    tuned = deltune.attach(model, row.text)
    after = run(model, inputs)
    assert [v.dtype for v in after.values()] == [v.dtype for v in before.values()]
    assert row.identity is None or equal(after, before) == row.identity
    assert all(p.dtype == torch.float32 for n, p in tuned.named_trainable_parameters() if n.startswith("deltune."))
    loss(forward(model, inputs)).backward()
    assert all(p.grad.dtype == p.dtype for p in tuned.trainable_parameters() if p.grad is not None)


INDUCTED = ("bert", "llama", "bart", "gpt_neox", "bloom")


def _backends() -> list[Any]:
    """Every family with torch's eager backends, a family of each kind with inductor; compiling takes seconds."""
    cases = []
    for family in FAMILIES.values():
        for text, backend in (("{}lora(rank=2, at='output') + layernorm", "aot_eager"), ("prompt(length=3)", "eager")):
            method = text.format("prefix(length=3) + " if family.interface else "") + " + parallel_adapter(rank=2)"
            for chosen in (backend, "inductor") if family.name in INDUCTED else (backend,):
                marks = () if (family.name, chosen) == ("llama", "eager") else pytest.mark.slow
                cases.append(pytest.param(family, method, chosen, marks=marks, id=f"{family.name}: {method} {chosen}"))
    return cases


@pytest.mark.parametrize(("family", "method", "backend"), _backends())
def test_compiled(family: Family, method: str, backend: str) -> None:
    model = specimen(family.name)
    inputs = batch(model)
    tuned = stir(deltune.attach(model, method))
    outputs = run(model, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    # Rotary angles and the slopes of ALiBi are computed in float32, where inductor's cosine and power round
    # differently: 5e-9 in the logits of the bare GPT-NeoX.
    rounded = not family.exact or (backend == "inductor" and family.positions in ("rotary", "alibi"))
    bound = 1e-5 if rounded else 1e-12
    assert distance(run(compiled, inputs), outputs) < bound
    stir(tuned, seed=7)  # a training step is seen by the compiled model
    assert distance(run(compiled, inputs), run(model, inputs)) < bound
    with torch.no_grad():
        assert distance(run(compiled, inputs), run(model, inputs)) < bound
    tuned.detach()


@pytest.mark.parametrize(
    ("name", "text", "gradients"),
    product(
        ["bert", "gpt2", "gpt_neox", "llama"],
        ["mam(length=2, rank=2)", "lora(rank=2)", "xlora(number=2)", "ia3", "Modification('key', Vector()) + ia3"],
        [True, False],
    ),
)
@pytest.mark.sample(4)
def test_a_compiled_graph_is_in_one_piece(name: str, text: str, gradients: bool) -> None:
    """As the bare model's: nothing that an edit does in a pass breaks it."""
    family = FAMILIES[name]
    model = build(family, main_role(family), **layers(family, 1))
    deltune.attach(model, text)
    torch._dynamo.reset()
    with torch.set_grad_enabled(gradients):
        assert torch._dynamo.explain(model)(**batch(model)).graph_break_count == 0


@cells("prefix(length=3) + lora(rank=2) + layernorm", "prefix(length=3, gate=False)", "prompt(length=3)", EVERY)
@pytest.mark.sample(18)
def test_hidden_states_and_attentions_keep_their_shapes(family: Family, row: Row) -> None:
    model = build(family, main_role(family), attn_implementation="eager")
    inputs = batch(model)
    options = {"output_hidden_states": True, "output_attentions": True}
    before = run(model, inputs, **options)
    assert any("attentions" in name for name in before) and any("hidden_states" in name for name in before)
    deltune.attach(model, row.text)
    after = run(model, inputs, **options)
    assert shapes(after) == shapes(before, grown=3 if "prompt" in row.text else 0)
    assert equal(run(model, inputs), {k: v for k, v in after.items() if "." not in k})


@cells(*FEW, "prefix(length=3, gate=False)", families=lambda f: len(f.kernels) == 2)
@pytest.mark.sample(17)
def test_kernels_agree(family: Family, row: Row) -> None:
    """sdpa and eager attention give the same outputs, with and without padding and without a mask at all."""
    outputs: dict[str, list[dict[str, torch.Tensor]]] = {}
    for name in ("sdpa", "eager"):
        model = build(family, main_role(family), attn_implementation=name)
        stir(deltune.attach(model, row.text))
        padded, full = batch(model), batch(model, pad=0)
        bare = {name: value for name, value in full.items() if name != "attention_mask"}
        outputs[name] = [run(model, inputs) for inputs in (padded, full, bare)]
        assert distance(outputs[name][1], outputs[name][2]) < 1e-5  # a mask of ones is no mask
    for sdpa, eager in zip(outputs["sdpa"], outputs["eager"], strict=True):
        kept = slice(None) if family.kind != "decoder" else slice(0, 5)  # what a padded position itself gives is noise
        one, two = ({n: v[:, kept] if v.dim() == 3 else v for n, v in o.items()} for o in (sdpa, eager))
        assert distance(one, two) < 1e-5  # eager attention takes its softmax in float32


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("text", ["lora(rank=2, dropout=0.5)", "adapter(rank=2, dropout=0.5)"])
def test_dropout_is_drawn_in_training_alone(text: str, training: bool) -> None:
    model = build(FAMILIES["bert"], "base")
    inputs = batch(model)
    stir(deltune.attach(model, text))
    model.train(training)
    assert equal(run(model, inputs), run(model, inputs)) != training


@cells("prefix(length=3)", "mam(length=3, rank=4)", families=lambda f: f.table)
def test_the_longest_input_fits_beside_a_prefix(family: Family, row: Row) -> None:
    model = specimen(family.name)
    inputs = batch(model, rows=1, length=family.longest, pad=0)
    tuned = deltune.attach(model, row.text)
    assert all(torch.isfinite(v).all() for v in run(model, inputs).values())
    tuned.detach()
    with pytest.raises((IndexError, ValueError, RuntimeError)):  # longest it was: one more the family refuses
        run(model, batch(model, rows=1, length=family.longest + 1, pad=0))


@cells("prompt(length=3)", "prompt(length=3, positions='none')", families=lambda f: f.table)
def test_the_longest_input_with_a_prompt(family: Family, row: Row) -> None:
    """Rows with positions leave `length` fewer for the text, and one token more is a stated error; without, none."""
    model = specimen(family.name)
    tuned = deltune.attach(model, row.text)
    room = family.longest - (0 if "none" in row.text else 3)
    assert all(torch.isfinite(v).all() for v in run(model, batch(model, rows=1, length=room, pad=0)).values())
    if room < family.longest:
        with pytest.raises(deltune.DeltuneError, match=rf"{room + 1} tokens and a prompt of 3.*{family.longest}"):
            run(model, batch(model, rows=1, length=room + 1, pad=0))
    tuned.detach()


@pytest.mark.parametrize("positions", ["shift", "none"])
@pytest.mark.parametrize("family", [f for f in FAMILIES.values() if f.table], ids=lambda f: f.name)
def test_positions_beside_a_prompt(family: Family, positions: str) -> None:
    """shift: rows and text have the positions of one text as long as both; none: the text keeps its own, rows none."""
    model = specimen(family.name)
    table = model.get_submodule(deltune.inspect(model).stacks[0].positions or "")
    embedded: list[torch.Tensor] = []

    def looked_up(inputs: dict[str, Any]) -> torch.Tensor:
        embedded.clear()
        hook = table.register_forward_hook(lambda module, args, output: embedded.append(output))
        run(model, inputs)
        hook.remove()
        return embedded[0].reshape(-1, embedded[0].shape[-1])  # (n, d)

    alone = looked_up(batch(model, rows=1, length=7, pad=0))
    longer = looked_up(batch(model, rows=1, length=10, pad=0))
    tuned = deltune.attach(model, f"prompt(length=3, positions={positions!r})")
    beside = looked_up(batch(model, rows=1, length=7, pad=0))
    expected = longer if positions == "shift" else torch.cat([torch.zeros(3, alone.shape[-1]).to(alone), alone])
    assert torch.equal(beside, expected)
    tuned.detach()
