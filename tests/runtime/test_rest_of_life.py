"""Laws of the rest of life with a delta attached: what else people do to a model is right, or refused with the model
unchanged, and never silently wrong.

A cell is one method on one family. Each law gets a deep copy of the tuned model, and is a subtest, so that one that
fails hides no other.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import accelerate
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

import deltune
from deltune.runtime.model_methods import METHODS, Refused
from tables.families import FAMILIES
from tables.methods import ROWS, Row, product
from tables.specimens import (
    Outputs,
    batch,
    build,
    distance,
    equal,
    forward,
    layers,
    loss,
    main_role,
    run,
    stir,
    tensors,
)
from tables.versions import needs

TEXTS = (
    "layernorm", "lora(rank=2)", "prefix(length=2) + layernorm", "bitfit", "full",
    "apet(layernorm + lora(rank=2), parameters=40)", "parallel_adapter(rank=2)", "prompt(length=2)",
)  # fmt: skip

CELLS = [
    *((name, main_role(FAMILIES[name]), text) for name in ("bert", "gpt2", "llama", "t5") for text in TEXTS
      if text != "bitfit" or FAMILIES[name].biases),
    *((name, "sequence", "head") for name in ("bert", "gpt2", "llama")),
]  # fmt: skip


@dataclass
class Cell:
    """A copy of a tuned model, with what it gives, and what its base was and gave."""

    model: PreTrainedModel
    tuned: deltune.Tuned
    inputs: dict[str, Any]
    base: PreTrainedModel
    before: Outputs
    outputs: Outputs
    folder: Path

    def now(self) -> Outputs:
        return run(self.model, self.inputs)

    def is_untouched(self) -> bool:
        """Whether the delta and the base are what they were, in use and resting."""
        same = equal(self.now(), self.outputs)
        with self.tuned.disable():
            return same and equal(self.now(), self.before)

    def detaches(self, exactly: bool = True) -> None:
        """Taken off, it is the base."""
        assert self.tuned.detach() is self.model
        outputs = self.now()
        assert equal(outputs, self.before) if exactly else distance(outputs, self.before) < 1e-5
        assert list(self.model.state_dict()) == list(self.base.state_dict())


def refused(cell: Cell, change: Callable[[], Any], match: str) -> None:
    """A clear error, and the model is as it was, in use, resting and detached."""
    state = {name: value.clone() for name, value in cell.model.state_dict().items()}
    with pytest.raises(deltune.DeltuneError, match=match):
        change()
    after = cell.model.state_dict()
    assert list(after) == list(state) and all(torch.equal(after[name], value) for name, value in state.items())
    assert cell.is_untouched()
    cell.detaches()


# -- states


def law_its_own_state_dict(cell: Cell) -> None:
    """Everything is what it was, whichever delta was in use then and is now."""
    for then in ("default", None):
        for now in ("default", None):
            state = {name: value.clone() for name, value in cell.tuned.use(then).model.state_dict().items()}
            stir(cell.tuned.use("default"), seed=3)
            result = cell.tuned.use(now).model.load_state_dict(state)
            assert not result.missing_keys and not result.unexpected_keys
            assert cell.tuned.active == now
            cell.tuned.use("default")
            assert cell.is_untouched(), (then, now)
    cell.detaches()


def law_the_bases_state_dict(cell: Cell) -> None:
    """It goes into the base, not into the delta; where every key is asked for, it is refused before anything moves."""
    state = cell.base.state_dict()
    other = {name: value * 1.5 if value.is_floating_point() else value for name, value in state.items()}
    moved = copy.deepcopy(cell.base)
    moved.load_state_dict(other)
    expected = run(moved, cell.inputs)
    parameters = {name: p.detach().clone() for name, p in cell.tuned.named_trainable_parameters()}
    cell.model.load_state_dict(other, strict=False)
    assert all(torch.equal(p, parameters[name]) for name, p in cell.tuned.named_trainable_parameters())
    with cell.tuned.disable():
        assert equal(cell.now(), expected)
    cell.tuned.detach()
    assert equal(cell.now(), expected)


def law_the_bases_state_dict_in_full(cell: Cell) -> None:
    refused(cell, lambda: cell.model.load_state_dict(cell.base.state_dict()), "strict=False")


def law_save_pretrained(cell: Cell) -> None:
    """What is in use, merged; alone where it cannot be; and the base where nothing is in use."""
    where, merged = cell.folder / "default", copy.deepcopy(cell.model)
    try:
        deltune.tuned(merged).merge()
    except deltune.DeltuneError:
        with pytest.warns(UserWarning, match=r"holds the delta alone.*deltune\.load"):
            cell.model.save_pretrained(where)
        assert not (where / "config.json").exists()
    else:
        cell.model.save_pretrained(where)
        again = type(cell.base).from_pretrained(where, dtype=torch.float64).eval()
        assert distance(run(again, cell.inputs), run(merged, cell.inputs)) < 1e-12
    assert (where / "delta" / "delta.json").is_file() and cell.tuned.active == "default"
    where = cell.folder / "base"
    cell.tuned.use(None).model.save_pretrained(where)
    assert cell.tuned.active is None
    again = type(cell.base).from_pretrained(where, dtype=torch.float64).eval()
    for parameter in again.parameters():
        parameter.data = parameter.data.clone()  # a file's memory is not aligned, which may change the last bits
    assert equal(run(again, cell.inputs), cell.before)
    assert again.config.num_labels == cell.base.config.num_labels
    assert "deltune" not in (where / "config.json").read_text()
    state, expected = again.state_dict(), cell.base.state_dict()
    assert list(state) == list(expected) and all(torch.equal(state[name], expected[name]) for name in expected)
    cell.tuned.use("default").model.save_pretrained(cell.folder / "checkpoint-1")
    assert cell.is_untouched()
    stir(cell.tuned, seed=5)
    saved = load_file(cell.folder / "checkpoint-1" / "model.safetensors")
    cell.model.load_state_dict(saved, strict=False)  # as a Trainer resumes
    assert all(name.startswith("deltune.") for name in saved) and cell.is_untouched()
    cell.detaches()


# -- precisions and devices


def _in(dtype: torch.dtype, move: Callable[[PreTrainedModel], Any]) -> Callable[[Cell], None]:
    def law(cell: Cell) -> None:
        moved = move(copy.deepcopy(cell.base))
        before = run(moved, cell.inputs)
        move(cell.model)
        outputs = cell.now()
        assert all(torch.isfinite(v).all() for v in outputs.values())
        assert {v.dtype for v in outputs.values()} == {dtype}
        for name, value in cell.outputs.items():
            assert (outputs[name].double() - value).norm() < 0.1 * value.norm(), name
        assert not equal(outputs, before)
        loss(forward(cell.model, cell.inputs)).backward()
        assert any(p.grad is not None for p in cell.tuned.trainable_parameters())
        with cell.tuned.disable():
            assert equal(cell.now(), before)
        assert cell.tuned.detach() is cell.model
        assert equal(cell.now(), before)
        after, plain = cell.model.state_dict(), moved.state_dict()
        assert all(torch.equal(after[n], v) and after[n].dtype == v.dtype for n, v in plain.items())

    return law


law_float = _in(torch.float32, lambda m: m.float())
law_to_float = _in(torch.float32, lambda m: m.to(torch.float32))
law_half = _in(torch.float16, lambda m: m.half())
law_bfloat16 = _in(torch.bfloat16, lambda m: m.bfloat16())


def law_meta(cell: Cell) -> None:
    """Shapes alone: outputs are meta, and detaching leaves nothing behind."""
    shapes = {name: value.shape for name, value in cell.outputs.items()}
    cell.model.to("meta")
    ids = {name: value.to("meta") for name, value in cell.inputs.items() if name != "attention_mask"}
    try:
        run(copy.deepcopy(cell.base).to("meta"), ids)
    except RuntimeError as error:  # GPT-2 and Llama read values of their masks
        assert "meta tensors" in str(error)
        outputs = {}
    else:
        outputs = run(cell.model, ids)
    assert not outputs or {n: v.shape for n, v in outputs.items()} == shapes
    assert all(v.is_meta for v in outputs.values())
    cell.tuned.detach()
    assert list(cell.model.state_dict()) == list(cell.base.state_dict())
    assert all(value.is_meta for value in cell.model.state_dict().values())


# -- what changes tensors behind our back


def law_resizing(cell: Cell) -> None:
    rows = cell.model.get_input_embeddings().weight.shape[0]
    assert cell.model.resize_token_embeddings() is cell.model.get_input_embeddings()
    assert cell.model.resize_token_embeddings(rows) is cell.model.get_input_embeddings()
    assert cell.is_untouched()
    refused(cell, lambda: cell.model.resize_token_embeddings(rows + 20), "(?s)resize_token_embeddings.*detach.*attach")
    assert cell.model.resize_token_embeddings(rows + 20).weight.shape[0] == rows + 20  # detached


def law_other_embeddings(cell: Cell) -> None:
    new = copy.deepcopy(cell.model.get_input_embeddings())
    refused(cell, lambda: cell.model.set_input_embeddings(new), "(?s)set_input_embeddings.*detach")


def inner_models(model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """The models of transformers inside a model, by path."""
    return {path: m for path, m in model.named_modules() if path and isinstance(m, PreTrainedModel)}


def law_inner_models(cell: Cell) -> None:
    """What is refused of the model is refused of every model inside it, in copies too; detaching leaves none of it."""
    for other in (cell.model, copy.deepcopy(cell.model), pickle.loads(pickle.dumps(cell.model))):
        inner = inner_models(other)
        assert inner
        for path, model in inner.items():
            for name in [name for name, kind in METHODS.items() if kind is Refused and hasattr(type(model), name)]:
                taken = len(inspect.signature(getattr(type(model), name)).parameters) - 1
                with pytest.raises(deltune.DeltuneError, match=rf"(?s){name} changes modules.*detach\(\)"):
                    getattr(model, name)(*[7] * min(taken, 1))
            assert model.__dict__["resize_token_embeddings"].model is model, path
        assert equal(run(other, cell.inputs), cell.outputs)
        deltune.tuned(other).detach()
        assert equal(run(other, cell.inputs), cell.before)
        assert not any(set(METHODS) & set(model.__dict__) for model in (other, *inner.values()))


def law_save_pretrained_of_an_inner_model(cell: Cell) -> None:
    """It writes the inner model's part of what is in use, merged."""
    path, inner = next(iter(inner_models(cell.model).items()))
    merged = copy.deepcopy(cell.model)
    try:
        deltune.tuned(merged).merge()
    except deltune.DeltuneError:
        refused(cell, lambda: inner.save_pretrained(cell.folder / "inner"), "merge")
        return
    inner.save_pretrained(cell.folder / "inner")
    saved, expected = load_file(cell.folder / "inner" / "model.safetensors"), merged.get_submodule(path).state_dict()
    assert saved.keys() <= expected.keys() and all(torch.equal(value, expected[name]) for name, value in saved.items())
    assert cell.is_untouched()
    cell.detaches()


def law_the_state_dict_of_an_inner_model(cell: Cell) -> None:
    """Refused where deltas have values of their own in it, since it does not say whose values it has."""
    path, inner = next(iter(inner_models(cell.model).items()))
    state = cell.base.get_submodule(path).state_dict()
    if any(owned.startswith(f"{path}.") for owned in cell.tuned.delta().owned_tensor_names):
        message = f"load_state_dict of {path}: delta 'default' has its own values"
        refused(cell, lambda: inner.load_state_dict(state), message)
    else:
        other = {name: value * 1.5 if value.is_floating_point() else value for name, value in state.items()}
        inner.load_state_dict(other, strict=False)
        inner.load_state_dict(state, strict=False)
        assert cell.is_untouched()
        cell.detaches()


def law_tying(cell: Cell) -> None:
    for use in ("default", None):
        cell.tuned.use(use).model.tie_weights()
        cell.tuned.use("default")
        assert cell.is_untouched()
    cell.detaches()


def law_a_part_replaced(cell: Cell) -> None:
    """A module that a delta acts at is another one: refused at the next pass."""
    path = next(path for path, side in cell.tuned.attached.hooks.installed if path and "." in path)
    outer, _, leaf = path.rpartition(".")
    parent = cell.model.get_submodule(outer)
    part = parent._modules[leaf]
    parent._modules[leaf] = copy.deepcopy(cell.base.get_submodule(path))
    with pytest.raises(deltune.DeltuneError, match="was replaced"):
        cell.now()
    parent._modules[leaf] = part
    assert cell.is_untouched()
    cell.detaches()


# -- attention


def law_attention(cell: Cell) -> None:
    """Another implementation: the same outputs, gradients for all that is trained; detaching keeps the user's."""
    for name in ("eager", "sdpa", "eager"):
        cell.model.set_attn_implementation(name)
        assert distance(cell.now(), cell.outputs) < 1e-5, name
        plain = copy.deepcopy(cell.base)
        plain.set_attn_implementation(name)
        with cell.tuned.disable():
            assert equal(cell.now(), run(plain, cell.inputs))
    loss(forward(cell.model, cell.inputs)).backward()
    assert any(p.grad is not None and p.grad.any() for _, p in cell.tuned.named_trainable_parameters())
    assert all(
        p.grad is not None and p.grad.any()
        for n, p in cell.tuned.named_trainable_parameters()
        if n.endswith((".keys", ".values"))
    )
    cell.tuned.detach()
    assert cell.model.config._attn_implementation == "eager"


def law_attention_without_prefixes(cell: Cell) -> None:
    if "prefix" not in repr(cell.tuned.method):
        return
    cell.model.config._attn_implementation = "flex_attention"
    with pytest.raises(deltune.DeltuneError, match="attention 'flex_attention' does not support prefixes"):
        cell.now()
    with pytest.raises(deltune.DeltuneError, match="attention 'flex_attention' does not support prefixes"):
        cell.now()
    cell.model.set_attn_implementation("sdpa")
    assert cell.is_untouched()
    cell.model.config._attn_implementation = "flex_attention"
    cell.tuned.detach()
    assert cell.model.config._attn_implementation == "flex_attention"
    cell.model.set_attn_implementation("sdpa")
    assert equal(cell.now(), cell.before)


# -- gradient checkpointing


def _gradients(model: PreTrainedModel, inputs: dict[str, Any]) -> dict[str, torch.Tensor | None]:
    model.zero_grad()
    loss(forward(model, inputs)).backward()
    return {name: p.grad for name, p in deltune.tuned(model).named_trainable_parameters()}


def law_checkpointing(cell: Cell) -> None:
    """Enabled before attaching and after it: the gradients of the plain way, also after disable()."""
    cell.tuned.save(cell.folder / "checkpointed")
    first = copy.deepcopy(cell.base).train()
    first.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    deltune.load(first, cell.folder / "checkpointed")
    cell.model.train()
    plain = _gradients(cell.model, cell.inputs)
    cell.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    cell.model.enable_input_require_grads()
    for model in (cell.model, first):
        gradients = _gradients(model, cell.inputs)
        for name, gradient in plain.items():
            assert (gradients[name] is None) == (gradient is None), name
            assert gradient is None or torch.allclose(gradients[name], gradient, rtol=1e-9, atol=1e-12), name
    if all(name.startswith("deltune.") for name in plain):
        other = _gradients(first, cell.inputs)
        total = loss(forward(first, cell.inputs))
        with deltune.tuned(first).disable():
            run(first, cell.inputs)
        first.zero_grad()
        total.backward()
        for name, p in deltune.tuned(first).named_trainable_parameters():
            assert p.grad is None or torch.equal(p.grad, other[name]), name
    deltune.tuned(first).detach()
    assert not any("deltune" in type(v).__module__ for m in first.modules() for v in m.__dict__.values())
    cell.model.disable_input_require_grads()
    cell.model.gradient_checkpointing_disable()
    cell.model.eval()
    assert cell.is_untouched()
    cell.detaches()


# -- accelerate


def law_prepare(cell: Cell) -> None:
    for state in (accelerate.state.AcceleratorState, accelerate.state.GradientState, accelerate.state.PartialState):
        state._reset_state()
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = torch.optim.SGD(cell.tuned.trainable_parameters(), lr=0.1)
    prepared, optimizer = accelerator.prepare(cell.model, optimizer)
    assert equal(run(prepared, cell.inputs), cell.outputs)
    accelerator.backward(loss(forward(prepared, cell.inputs)))
    optimizer.step()
    assert distance(run(prepared, cell.inputs), cell.outputs) > 1e-9
    accelerator.unwrap_model(prepared)
    cell.detaches()


def law_dispatched(cell: Cell) -> None:
    """Hooks that only move inputs between devices: before and after attaching."""
    cell.tuned.save(cell.folder / "dispatched")
    model = copy.deepcopy(cell.base)
    accelerate.dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)
    assert equal(run(deltune.load(model, cell.folder / "dispatched").model, cell.inputs), cell.outputs)
    accelerate.dispatch_model(cell.model, {"": "cpu"}, main_device="cpu", force_hooks=True)
    assert cell.is_untouched()


# -- quantised weights


def law_quantize_dynamic(cell: Cell) -> None:
    """Refused where a delta acts at a linear that became another; else the delta acts on the quantised base."""
    model = cell.model.float()
    outputs = cell.now()
    quantised = quantise(model)
    linears = {path for path, module in model.named_modules() if type(module) is torch.nn.Linear}
    touched = any(path in linears for path in deltune.tuned(model).attached.passes.modules.entries)
    if touched:
        with pytest.raises(deltune.DeltuneError, match=r"was replaced .*quantise a tuned model, merge\(\) first"):
            run(quantised, cell.inputs)
    else:
        with deltune.tuned(quantised).disable():
            bare = run(quantised, cell.inputs)
        assert equal(bare, run(quantise(copy.deepcopy(cell.base).float()), cell.inputs))
        answers = run(quantised, cell.inputs)
        assert not equal(answers, bare)
        assert all((answers[n].double() - v.double()).norm() < 0.1 * v.double().norm() for n, v in outputs.items())
    with pytest.raises(deltune.DeltuneError, match="are quantised" if "Dynamic" in repr(quantised) else "in use"):
        deltune.attach(quantised, "layernorm")
    assert equal(cell.now(), outputs)


def quantise(model: PreTrainedModel) -> PreTrainedModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is going away
        made: PreTrainedModel = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    return made


# -- wrappers and copies


def law_copies(cell: Cell) -> None:
    other = copy.deepcopy(cell.model)
    with deltune.tuned(other).disable():
        assert equal(run(other, cell.inputs), cell.before)
    torch.save(cell.model, cell.folder / "whole.pt")
    again = torch.load(cell.folder / "whole.pt", weights_only=False)
    for one in (other, again):
        assert equal(run(one, cell.inputs), cell.outputs)
        with pytest.raises(deltune.DeltuneError, match="resize_token_embeddings"):
            one.resize_token_embeddings(7)
        deltune.tuned(one).detach()
        assert equal(run(one, cell.inputs), cell.before)
        assert one.resize_token_embeddings(101).weight.shape[0] == 101
    assert cell.is_untouched()


def law_data_parallel(cell: Cell) -> None:
    with pytest.raises(deltune.DeltuneError, match="DataParallel"):
        cell.tuned._replicate_for_data_parallel()
    cell.detaches()


def law_distributed(cell: Cell) -> None:
    """DistributedDataParallel of one process: outputs and gradients are the plain ones."""
    plain = _gradients(cell.model, cell.inputs)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(cell.model, find_unused_parameters=True)

        def outputs() -> Outputs:
            return dict(tensors(wrapped(**cell.inputs, **no_cache(cell.model))))

        with torch.no_grad():
            assert equal(outputs(), cell.outputs)
            with cell.tuned.disable():
                assert equal(outputs(), cell.before)
        cell.model.zero_grad()
        loss(outputs()).backward()
        for name, p in cell.tuned.named_trainable_parameters():
            assert plain[name] is None or torch.allclose(p.grad, plain[name], rtol=1e-9, atol=1e-12), name
    finally:
        torch.distributed.destroy_process_group()
    cell.detaches()


def no_cache(model: PreTrainedModel) -> dict[str, Any]:
    return {"use_cache": False} if hasattr(model.config, "use_cache") else {}


LAWS: tuple[Callable[[Cell], None], ...] = (
    law_its_own_state_dict, law_the_bases_state_dict, law_the_bases_state_dict_in_full, law_save_pretrained, law_float,
    law_to_float, law_half, law_bfloat16, law_meta, law_resizing, law_other_embeddings, law_inner_models,
    law_save_pretrained_of_an_inner_model, law_the_state_dict_of_an_inner_model, law_tying, law_a_part_replaced,
    law_attention, law_attention_without_prefixes, law_checkpointing, law_prepare, law_dispatched,
    law_quantize_dynamic, law_copies, law_data_parallel, law_distributed,
)  # fmt: skip


def name_of(law: Callable[[Cell], None]) -> str:
    """Laws that are made have the name that they are kept under."""
    return next(name for name, value in globals().items() if value is law).removeprefix("law_")


@pytest.mark.parametrize(("family", "role", "text"), CELLS, ids=str)
@pytest.mark.sample(3)
def test_rest_of_life(family: str, role: str, text: str, tmp_path: Path, subtests: pytest.Subtests) -> None:
    model = build(FAMILIES[family], role)
    base, inputs = copy.deepcopy(model), batch(model)
    before = run(base, inputs)
    outputs = run(stir(deltune.attach(model, text), size=0.05).model, inputs)
    for law in LAWS:
        with subtests.test(name_of(law)):
            other = copy.deepcopy(model)
            law(Cell(other, deltune.tuned(other), inputs, base, before, outputs, tmp_path))


COMPILED = (
    ("bert", "sequence", "lora(rank=2)"), ("bert", "sequence", "prefix(length=2) + layernorm"),
    ("gpt2", "causal", "apet(layernorm + lora(rank=2), parameters=40)"), ("llama", "causal", "full"),
    ("t5", "seq2seq", "parallel_adapter(rank=2)"), ("llama", "causal", "prompt(length=2)"),
)  # fmt: skip


TIMES = ("before", "after", "in place")


@pytest.mark.parametrize(
    ("family", "role", "text", "when"),
    [
        pytest.param(*case, when, marks=() if "prompt" in case[2] and when == "after" else pytest.mark.slow)
        for case in COMPILED
        for when in TIMES
    ],
)
def test_compiled(family: str, role: str, text: str, when: str) -> None:
    """Compiled before or after attaching: right after use, and inside of rows() and disable()."""
    torch._dynamo.reset()
    model = build(FAMILIES[family], role, **layers(FAMILIES[family], 1))
    inputs, compiled = batch(model), model
    before = run(model, inputs)
    if when == "before":
        compiled = torch.compile(model, dynamic=None, backend="eager")
        assert distance(run(compiled, inputs), before) < 1e-9
    tuned = stir(deltune.attach(model, text), size=0.05)
    expected: dict[Any, Outputs] = {None: before, "default": run(model, inputs)}
    rows = "full" not in text
    if rows:
        with tuned.rows(["default", None]):
            expected["rows"] = run(model, inputs)
    if when == "after":
        compiled = torch.compile(model, dynamic=None, backend="eager")
    elif when == "in place":
        model.compile(dynamic=None, backend="eager")
    for _ in range(2):
        for use in ("default", None):
            tuned.use(use)
            assert distance(run(compiled, inputs), expected[use]) < 1e-9
        tuned.use("default")
        with tuned.disable():
            assert distance(run(compiled, inputs), before) < 1e-9
        if rows:
            with tuned.rows(["default", None]):
                assert distance(run(compiled, inputs), expected["rows"]) < 1e-9


class Guarded(nn.Parameter):
    """Stands for a quantised weight: a method of it that copies or moves it would lose its state."""

    touched: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("to", "cpu", "cuda", "detach", "clone", "float", "requires_grad_", "type", "__deepcopy__"):
            cls.touched.append(name)
            raise AssertionError(f"{name} of a quantised weight was called")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_weight_quantised_in_its_place_is_refused() -> None:
    """As torchao's quantize_ does: the module stays, its weight is another kind of tensor."""
    model = build(FAMILIES["bert"], "base")
    tuned = deltune.attach(model, "lora(rank=2)")
    query = model.encoder.layer[0].attention.self.query
    before = query._parameters["weight"]
    query._parameters["weight"] = Guarded(before.detach())
    with pytest.raises(deltune.DeltuneError, match=r"query was replaced or quantised .*merge\(\) first"):
        model(**batch(model))
    query._parameters["weight"] = before
    model(**batch(model))
    tuned.detach()


@pytest.mark.parametrize("kind", ["subclass", "int8", "uint8", "torch"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_quantised_weights_are_refused(name: str, kind: str, tmp_path: Path) -> None:
    """By attach, load and inspect, before anything runs; weights, buffers and the state beside them stay."""
    model = build(FAMILIES[name], main_role(FAMILIES[name]), torch.float32)
    inputs = batch(model)
    deltune.attach(model, "lora(rank=2)").save(tmp_path / "delta")
    deltune.tuned(model).detach()
    path = next(path for path, module in model.base_model.named_modules() if type(module) is nn.Linear)
    linear = model.base_model.get_submodule(path)
    state = object()
    if kind == "torch":
        model = quantise(model)
    elif kind == "subclass":
        linear.weight = Guarded(linear.weight.detach(), requires_grad=False)
        linear.weight.quant_state = state  # type: ignore[assignment]
    else:
        linear.weight = nn.Parameter(torch.ones(linear.weight.shape, dtype=getattr(torch, kind)), requires_grad=False)
    known = {name: (id(p), p._version) for name, p in model.named_parameters()}
    numbers = {name: p.data_ptr() for name, p in (*model.named_parameters(), *model.named_buffers())}
    outputs = run(model, inputs) if kind in ("torch", "subclass") else None
    Guarded.touched.clear()
    ways: tuple[Callable[[], Any], ...] = (
        lambda: deltune.inspect(model),
        lambda: deltune.attach(model, "layernorm"),
        lambda: deltune.load(model, tmp_path / "delta"),
    )
    for way in ways:
        with pytest.raises(deltune.DeltuneError, match=r"are quantised in a way that deltune cannot tune"):
            way()
    assert Guarded.touched == [] and "deltune" not in model._modules
    assert known == {name: (id(p), p._version) for name, p in model.named_parameters()}
    assert numbers == {name: p.data_ptr() for name, p in (*model.named_parameters(), *model.named_buffers())}
    assert kind != "subclass" or linear.weight.quant_state is state
    assert outputs is None or equal(run(model, inputs), outputs)


EXPORTED = (
    "lora(rank=2) + layernorm", "merged", "prefix(length=2)", "adapter(rank=2)", "prompt(length=2)",
    "apet(layernorm + lora(rank=2), parameters=40)", "disabled", "rows",
)  # fmt: skip
"""What a model is when it is exported: with a delta merged or in use, with none in use, or with one for each row."""


@contextlib.contextmanager
def exported_as(name: str, what: str) -> Iterator[tuple[PreTrainedModel, dict[str, Any], Outputs]]:
    """A model, its inputs and what it gives, in the state that it is exported in."""
    model = build(FAMILIES[name], "sequence", torch.float32, **layers(FAMILIES[name], 1))
    named = what if "(" in what else "lora(rank=2) + layernorm"
    tuned = stir(deltune.attach(model, named), size=0.05)
    scopes: dict[str, Callable[[], Any]] = {
        "rows": lambda: tuned.rows(["default", None]), "disabled": tuned.disable, "merged": tuned.merge
    }  # fmt: skip
    scope = scopes.get(what, contextlib.nullcontext)()
    inputs = batch(model)
    inputs["position_ids"] = torch.arange(inputs["input_ids"].shape[1]).expand_as(inputs["input_ids"]).clone()
    with contextlib.nullcontext() if what == "merged" else scope:
        yield model, inputs, run(model, inputs)


STRICT = pytest.param(True, marks=needs("torch", "2.13"))  # torch 2.11 says of masks and rows that it cannot


@pytest.mark.parametrize("strict", [False, STRICT])
@pytest.mark.parametrize(("name", "what"), product(["bert", "gpt2"], EXPORTED))
@pytest.mark.sample(3)
def test_exported(name: str, what: str, strict: bool) -> None:
    """torch.export takes the model as it is, and leaves it as it was."""
    with exported_as(name, what) as (model, inputs, outputs):
        options = {**no_cache(model), "return_dict": False}
        with torch.set_grad_enabled(strict):  # without gradients, a plain pass writes over some outputs
            program = torch.export.export(model, (), {**inputs, **options}, strict=strict)
        logits = program.module()(**inputs, **options)[0]
        assert torch.allclose(logits, outputs["logits"], rtol=1e-5, atol=1e-6)
        assert equal(run(model, inputs), outputs)


def test_exported_before_it_ran_with_these_rows() -> None:
    """What a scope keeps for its later passes is not kept while tracing, when it has no numbers."""
    model = build(FAMILIES["bert"], "sequence", torch.float32)
    tuned, inputs = stir(deltune.attach(model, "lora(rank=2) + layernorm"), size=0.05), batch(model)
    with tuned.rows(["default", None]):
        outputs = run(model, inputs)
    with tuned.rows(["default", None]):
        program = torch.export.export(model, (), {**inputs, "return_dict": False}, strict=False)
        assert equal(run(model, inputs), outputs)
    assert torch.allclose(program.module()(**inputs, return_dict=False)[0], outputs["logits"], rtol=1e-5, atol=1e-6)


def test_a_learned_mask_is_not_exported() -> None:
    model = build(FAMILIES["bert"], "sequence", torch.float32)
    stir(deltune.attach(model, "diff_pruning(sparsity=0.02)"), size=0.05)
    inputs = batch(model)
    outputs = run(model, inputs)
    with pytest.raises(deltune.DeltuneError, match=r"a learned mask .* cannot be exported .*merge\(\) first"):
        torch.export.export(model, (), {**inputs, "return_dict": False}, strict=False)
    assert equal(run(model, inputs), outputs)


class Logits(nn.Module):
    """A model that takes tensors in order and gives one, as ONNX has it."""

    def __init__(self, model: PreTrainedModel, names: Iterable[str]) -> None:
        super().__init__()
        self.model, self.names = model, tuple(names)

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        named = dict(zip(self.names, tensors, strict=True))
        logits: torch.Tensor = self.model(**named, **no_cache(self.model), return_dict=False)[0]
        return logits


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("bert", "merged"),
        ("gpt2", "merged"),
        ("bert", "prefix(length=2)"),
        ("gpt2", "rows"),
    ],
)
@pytest.mark.slow
def test_exported_to_onnx(name: str, what: str) -> None:
    """What torch.onnx writes gives the same logits by ONNX's own evaluator."""
    pytest.importorskip("onnxscript", reason="no onnxscript: the extra dev has it")
    reference = pytest.importorskip("onnx.reference", reason="no onnx: the extra dev has it")
    with exported_as(name, what) as (model, inputs, outputs):
        if name == "bert":
            inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
        program = torch.onnx.export(
            Logits(model, inputs).eval(), tuple(inputs.values()), dynamo=True, verbose=False, input_names=list(inputs)
        )
    evaluator = reference.ReferenceEvaluator(program.model_proto)
    (logits,) = evaluator.run(None, {name: value.numpy() for name, value in inputs.items()})
    assert torch.allclose(torch.from_numpy(logits), outputs["logits"], rtol=1e-5, atol=1e-6)


OF_BERT = [row for row in ROWS if not row.lacking(FAMILIES["bert"])]


@pytest.mark.parametrize(("row", "way"), product(OF_BERT, ["attach", "load"]))
@pytest.mark.sample(20)
def test_made_in_inference_mode(row: Row, way: str, tmp_path: Path) -> None:
    """Nothing that is kept is made in inference mode, so that it trains outside, and so does the model afterwards."""
    model = build(FAMILIES["bert"], "sequence")
    inputs = batch(model)
    before = run(model, inputs)
    if way == "load":
        stir(deltune.attach(model, row.text), size=0.05).save(tmp_path / "delta")
        outputs = run(model, inputs)
        deltune.tuned(model).detach()
    with torch.inference_mode():
        tuned = deltune.load(model, tmp_path / "delta") if way == "load" else deltune.attach(model, row.text)
        inside = forward(model, inputs)
        tuned.use(None).use("default")
    assert not any(p.is_inference() for p in (*model.parameters(), *model.buffers()))
    outside = run(model, inputs)
    assert equal(inside, outside) and (way == "attach" or equal(outside, outputs))
    for training in (False, True):
        loss(forward(model.train(training), inputs)).backward()
    assert all(p.grad is not None for n, p in tuned.named_trainable_parameters() if n.startswith("deltune."))
    model.eval()
    with torch.inference_mode():
        tuned.merge() if row.merges else tuned.detach()
    assert row.merges or equal(run(model, inputs), before)
    loss(forward(model.train(), inputs)).backward()


def test_a_model_made_in_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        model = build(FAMILIES["bert"], "base")
    with pytest.raises(deltune.DeltuneError, match=r"made inside torch\.inference_mode\(\)"):
        deltune.attach(model, "layernorm")
    assert "deltune" not in model._modules


def test_other_labels_are_saved_with_what_is_in_use(tmp_path: Path) -> None:
    """A tuned head with five labels on a base with two. (push_to_hub gives the hub what save_pretrained writes.)"""
    wide = build(FAMILIES["bert"], "sequence", num_labels=5)
    wide.config.id2label = {number: f"kind {number}" for number in range(5)}
    model = build(FAMILIES["bert"], "sequence")
    wide.bert.load_state_dict(model.bert.state_dict())
    deltune.attach(wide, "head").save(tmp_path / "five")
    inputs = batch(model)
    before = run(model, inputs)
    tuned = deltune.load(model, tmp_path / "five")
    expected = run(model, inputs)
    for use, labels, outputs in (("default", 5, expected), (None, 2, before)):
        tuned.use(use).model.save_pretrained(tmp_path / f"labels {labels}")
        again = type(model).from_pretrained(tmp_path / f"labels {labels}", dtype=torch.float64).eval()
        assert again.config.num_labels == labels and equal(run(again, inputs), outputs)


def test_parameters_keep_their_meaning_in_torch() -> None:
    """`parameters()` has everything that is registered in the model; `trainable_parameters()` what is in use."""
    tuned = deltune.attach(build(FAMILIES["bert"], "sequence"), "lora(rank=2)", name="one")
    deltune.attach(tuned.model, "layernorm", name="two")
    assert {id(p) for p in tuned.parameters()} == {id(p) for _, p in tuned.named_parameters()}
    in_model = dict(tuned.model.named_parameters())
    assert all(in_model[name] is parameter for name, parameter in tuned.named_trainable_parameters())
    assert set(tuned.delta("two").selected) <= {name for name, _ in tuned.named_trainable_parameters()}
