"""Pooling: what the head of a classifier reads where its class reads the model's `pooler_output`.

A delta may put the mean of the last hidden states, or one of them, in the place of what the class's pooler gives. Its
hook is at the base model, whose own arguments say which positions are text: the rows of a prompt are no part of it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from ..anatomy.inspection import inspect
from ..anatomy.skeleton import structural_copy
from ..anatomy.types import Anatomy, is_inside
from ..errors import DeltuneError, excerpt, unknown_name
from ..files import write_json
from ..models import (
    HEAD_LABELS,
    POOLING_SWITCHES,
    POOLINGS,
    SENTENCE_POOLINGS,
    Pooling,
    fresh_tensors,
    sentence_modules,
)
from .modules import HeadLabels
from .pass_manager import ModuleHook, PassManager
from .row_assignment import name_arguments, parameter_names


def head_reads_pooler(model: PreTrainedModel, anatomy: Anatomy) -> bool:
    """Return whether the head of a model reads the `pooler_output` of its base model, and nothing else of it.

    The head of a copy without values runs on outputs that are made up, of which only `pooler_output` has a gradient.
    """
    if anatomy.pooler is None or anatomy.output_kind not in ("labels", "choices"):
        return False
    twin, _ = structural_copy(model)
    twin.requires_grad_(False)
    width = anatomy.stacks[-1].width if anatomy.stacks else 1

    def reads(name: str) -> bool:
        shapes = {"last_hidden_state": (2, 4, width), "pooler_output": (2, width)}
        made: Any = {n: torch.zeros(shape, device="meta", requires_grad=n == name) for n, shape in shapes.items()}
        twin.get_submodule(anatomy.base).__dict__["forward"] = lambda *_, **__: BaseModelOutputWithPooling(**made)
        ids = torch.zeros((1, 2, 4) if anatomy.output_kind == "choices" else (2, 4), dtype=torch.long, device="meta")
        logits: torch.Tensor = twin(ids)[0]
        return logits.requires_grad

    try:
        with torch.enable_grad():
            return reads("pooler_output") and not reads("last_hidden_state")
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError):
        return False  # it reads something else, or outputs of another form


def check_pooling(model: PreTrainedModel, anatomy: Anatomy, pooling: str) -> None:
    """Raise an error unless the head of a model can be given this pooling."""
    if pooling not in POOLINGS:
        raise DeltuneError(unknown_name("pooling", pooling, POOLINGS))
    if pooling != "model" and not head_reads_pooler(model, anatomy):
        raise DeltuneError(
            f"pooling={pooling!r} replaces the pooler that a head reads, and {anatomy.model} has none: "
            "leave pooling out"
        )


def gives_up_pooling(pooling: str | None) -> bool:
    """Return whether a head is to read its class's pooler from now on, whatever it was trained on."""
    if pooling not in (None, "model"):
        raise DeltuneError(
            f"pooling={excerpt(pooling)}: what is merged or exported has the pooling that was trained, or "
            "pooling='model', the class's own pooler"
        )
    return pooling is not None


def choose_pooling(model: PreTrainedModel, name: str, requested: Pooling | None) -> tuple[Pooling, str]:
    """Return the pooling of a run on a model of this name, and why; "" where the head reads no pooler."""
    anatomy = inspect(model)
    if not head_reads_pooler(model, anatomy):
        return requested or "model", ""
    if requested is not None:
        return requested, "as asked for"
    modules = sentence_modules(name)
    if (known := next((one for one in POOLINGS if modules is not None and modules.pooling == one), None)) is not None:
        return known, "as the model's modules.json says"
    unknown = (
        "" if modules is None else f"; modules.json says {modules.pooling}, which is none of {', '.join(POOLINGS)}"
    )
    fresh = fresh_tensors(model)
    if any(tensor.area == "pooler" and tensor.name in fresh for tensor in anatomy.tensors):
        return "mean", f"as its weights have no pooler{unknown}"
    return "model", f"which its weights have{unknown}"


def without_pooler(anatomy: Anatomy) -> Anatomy:
    """Return the anatomy of a model whose head reads something else than its pooler gives, so that nothing reads it."""
    pooler = anatomy.pooler
    if pooler is None:
        return anatomy
    return replace(
        anatomy,
        pooler=None,
        tensors=tuple(tensor for tensor in anatomy.tensors if tensor.area != "pooler"),
        linears=tuple(linear for linear in anatomy.linears if not is_inside(linear.path, pooler)),
    )


def pool(states: torch.Tensor, mask: torch.Tensor | None, pooling: str) -> torch.Tensor:
    """Return the mean, the first or the last of the hidden states (B, n, d) that are no padding, (B, d)."""
    if mask is None:
        mask = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    if mask.dim() != 2:
        raise DeltuneError(
            f"pooling={pooling!r} needs an attention_mask (B, n), which says what is padding; here it has the shape "
            f"{tuple(mask.shape)}"
        )
    is_text = mask.to(states.device).bool()
    if pooling == "mean":
        precision = torch.promote_types(states.dtype, torch.float32)
        total = states.masked_fill(~is_text[..., None], 0).sum(1, dtype=precision)
        return total / is_text.sum(1, keepdim=True).clamp(min=1).to(precision)
    counted = is_text.to(torch.int32)
    if pooling == "first":
        index = counted.argmax(1)
    else:
        index = states.shape[1] - 1 - counted.flip(1).argmax(1)
    return states[torch.arange(len(states), device=states.device), index]


def linear_head(model: PreTrainedModel, anatomy: Anatomy) -> nn.Linear | None:
    """Return the head of a model where it is one linear over labels."""
    modules = [model.get_submodule(path) for path in anatomy.head]
    is_linear = len(modules) == 1 and anatomy.output_kind == "labels" and type(modules[0]) is nn.Linear
    return cast("nn.Linear", modules[0]) if is_linear else None


def begin_with_head_of(name: str, model: PreTrainedModel, anatomy: Anatomy, pooling: Pooling) -> bool:
    """Give the delta in use the head that a model of this name ends with as sentence-transformers has it, if it fits.

    Only with the pooling of that folder does such a head say what it was trained to say. Return whether it fits.
    """
    modules, head = sentence_modules(name), linear_head(model, anatomy)
    if modules is None or modules.head is None or modules.pooling != pooling or head is None:
        return False
    stored = {key.rpartition(".")[2]: tensor for key, tensor in load_file(modules.head).items()}
    leaves = dict(head.named_parameters())
    shapes, needed = ({leaf: tensor.shape for leaf, tensor in some.items()} for some in (stored, leaves))
    if shapes == needed:
        with torch.no_grad():
            for leaf, tensor in leaves.items():
                tensor.copy_(stored[leaf])
    return shapes == needed


def write_sentence_model(
    model: PreTrainedModel, tokenizer: Any, pooling: str, folder: Path, max_length: int | None = None
) -> None:
    """Write a merged model as sentence-transformers has it: the base model, the pooling, and the head as a linear.

    The labels stand beside the linear, and the model's own configuration loses them. Longer texts than `max_length`
    tokens are cut there too.
    """
    anatomy = inspect(model)
    head = linear_head(model, anatomy)
    if head is None:
        raise DeltuneError(
            f"the head of {anatomy.model} ({', '.join(anatomy.head)}) is not one linear over labels, the only head "
            "that a folder of sentence-transformers has: keep the delta, or train with --pooling model"
        )
    labels = HeadLabels.from_config(model.config)
    HeadLabels.from_config(PreTrainedConfig()).write_to(model.config)
    model.get_submodule(anatomy.base).save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save_pretrained(folder)
    modules = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense"}
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(modules.items())
    ]
    switches = {switch: name == SENTENCE_POOLINGS[pooling] for switch, name in POOLING_SWITCHES.items()}
    dense = {
        "in_features": head.in_features, "out_features": head.out_features, "bias": head.bias is not None,
        "activation_function": "torch.nn.modules.linear.Identity",
    }  # fmt: skip
    write_json(folder / "modules.json", listed)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    for path, options in (
        ("1_Pooling", {"word_embedding_dimension": head.in_features, **switches}),
        ("2_Dense", dense),
    ):
        (folder / path).mkdir()
        write_json(folder / path / "config.json", options)
    values = {f"linear.{leaf}": p.detach().cpu().contiguous() for leaf, p in head.named_parameters()}
    save_file(values, folder / "2_Dense" / "model.safetensors", metadata={"format": "pt"})
    names = [name for _, name in labels.id2label]
    write_json(folder / "2_Dense" / HEAD_LABELS, {"labels": names, "problem_type": labels.problem_type})


class PoolingHook(ModuleHook):
    """Replaces what the base model gives as `pooler_output`, for the rows whose delta says so."""

    def __init__(self, passes: PassManager, path: str) -> None:
        super().__init__(passes, path)
        self.arguments = parameter_names(self.module)

    def install(self) -> None:
        # before a prompt lengthens the mask, and after its rows were removed from the states
        self.module.register_forward_pre_hook(self.before, with_kwargs=True, prepend=True)
        self.module.register_forward_hook(self.after)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the mask of the text."""
        if self.passes.assignment().pooled:
            self.passes.current_pass().mask = name_arguments(self.arguments, args, kwargs).get("attention_mask")

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Replace the rows of `pooler_output`."""
        groups = self.passes.assignment().pooled
        if not groups:
            return None
        this_pass = self.passes.current_pass()
        mask, this_pass.mask = this_pass.mask, None
        states, pooled = (output[0], output[1]) if isinstance(output, tuple) else (output[0], output["pooler_output"])
        for group in groups:
            rows = pool(group.select(states), None if mask is None else group.select(mask), group.pooling)
            pooled = group.replace(pooled, rows.to(pooled.dtype))
        if isinstance(output, tuple):
            return type(output)((states, pooled, *output[2:]))
        output["pooler_output"] = pooled
        return output
