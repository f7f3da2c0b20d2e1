"""Tiny models in every quantised form that runs on a CPU, and everything about one that must not change.

The walk over a model's tensors is written apart from deltune's own, so that the two cannot share a mistake.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from .families import FAMILIES
from .specimens import config, configurations

WIDTHS = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 96}
CLASSES = {"llama": transformers.AutoModelForCausalLM, "bert": transformers.AutoModelForSequenceClassification}


@dataclass(frozen=True)
class Form:
    """A way of quantising.

    Attributes:
        name: What deltune calls it.
        options: Returns transformers' configuration, or None where `change` quantises a loaded model.
        change: Quantises the linears of a model in place.
        passes_gradients: Whether gradients pass through its linears.
        holds_floats: Whether its weights stay in floating point and are quantised in each pass.
        bits: The bits of a weight, without its scales.
        exact: Whether evaluation multiplies by the dequantised weight, and does not round what it is multiplied with.
        trains_biases: Whether the biases of its linears can be trained.
    """

    name: str
    options: Callable[[], Any] | None = None
    change: Callable[[nn.Module], None] | None = None
    passes_gradients: bool = True
    holds_floats: bool = False
    bits: int = 8
    exact: bool = True
    trains_biases: bool = True

    def __str__(self) -> str:
        return self.name


def _bitsandbytes(**options: Any) -> Callable[[], Any]:
    return lambda: transformers.BitsAndBytesConfig(**options)


def _torchao(name: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        from torchao import quantization

        group = {"granularity", "weight_granularity"} & options.keys()
        changed = {option: quantization.PerGroup(options[option]) for option in group}
        return transformers.TorchAoConfig(getattr(quantization, name)(**options | changed))

    return make


def _quanto(weights: str) -> Callable[[], Any]:
    return lambda: transformers.QuantoConfig(weights=weights)


def _fake(model: nn.Module) -> None:
    from torchao import quantization
    from torchao.quantization.qat import QATConfig

    base = quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=quantization.PerGroup(32))
    quantization.quantize_(
        model, QATConfig(base, step="prepare"), lambda m, name: type(m) is nn.Linear and "classifier" not in name
    )


def _hqq(bits: int) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

        options = BaseQuantizeConfig(nbits=bits, group_size=32, axis=1)
        for path, module in list(model.named_modules()):
            if type(module) is nn.Linear and "classifier" not in path:
                model.set_submodule(path, HQQLinear(module, options, compute_dtype=torch.float32, device="cpu"))

    return change


INT4 = {"weight_dtype": torch.int4}
FORMS = {
    form.name: form
    for form in (
        Form("bitsandbytes nf4", _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"), bits=4),
        Form(
            "bitsandbytes nf4 with double quantisation",
            _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
            bits=4,
        ),
        Form("bitsandbytes fp4", _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="fp4"), bits=4),
        Form("bitsandbytes int8", _bitsandbytes(load_in_8bit=True), exact=False),
        Form("torchao int8", _torchao("Int8WeightOnlyConfig", version=2)),
        Form("torchao float8", _torchao("Float8WeightOnlyConfig")),
        Form("torchao int4", _torchao("IntxWeightOnlyConfig", granularity=32, **INT4)),
        Form("torchao fake-quantised int4", change=_fake, holds_floats=True, bits=32),
        Form("quanto int8", _quanto("int8")),
        Form("quanto float8_e4m3fn", _quanto("float8")),
        Form("hqq int8", change=_hqq(8), trains_biases=False),
        Form("hqq int4", change=_hqq(4), bits=4, trains_biases=False),
        Form(
            "torchao int8 with quantised activations",
            _torchao("Int8DynamicActivationInt8WeightConfig", version=2),
            passes_gradients=False,
            exact=False,
        ),
        Form(
            "torchao int4 with quantised activations",
            _torchao("Int8DynamicActivationIntxWeightConfig", weight_granularity=32, **INT4),
            passes_gradients=False,
            exact=False,
        ),
    )
}
"""All forms. torchao keeps this int4 in a byte; quanto's int4, whose first call compiles C++, is left out."""

TRAINED = [form for form in FORMS.values() if form.passes_gradients]


def save_models(folder: Path) -> Path:
    """Save the unquantised models below a folder, one for each family."""
    for family, kind in CLASSES.items():
        torch.manual_seed(0)
        problem = {"problem_type": "single_label_classification"} if family == "bert" else {}  # else the loss writes it
        model = kind.from_config(config(FAMILIES[family], **WIDTHS, **problem))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        model.save_pretrained(folder / family)
    return folder


def load_form(folder: Path, family: str, form: Form | None, packs: bool = False) -> PreTrainedModel:
    """Load a model of `save_models` in a form, in eval mode; None: in floating point.

    Args:
        packs: Whether bitsandbytes may pack 4-bit weights in a pass in eval mode, which changes the numbers.
    """
    logging.getLogger("torchao").setLevel(logging.ERROR)
    options = form.options() if form is not None and form.options is not None else None
    if options is not None and family == "bert":  # transformers would quantise a new head as well
        name = "llm_int8_skip_modules" if hasattr(options, "llm_int8_skip_modules") else "modules_to_not_convert"
        setattr(options, name, ["classifier"])
    model: PreTrainedModel = CLASSES[family].from_pretrained(folder / family, quantization_config=options)
    if form is not None and form.change is not None:
        form.change(model.base_model)
    for module in model.modules():
        if not packs and hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model.eval()


def batch(family: str) -> dict[str, torch.Tensor]:
    """Three rows with the targets of the family's class; the first has the invocation of alora's row in the tables."""
    ids = torch.randint(12, 96, (3, 7), generator=torch.Generator().manual_seed(7))
    ids[0, 2:4] = torch.tensor((26, 46))
    return {"input_ids": ids, "labels": ids if family == "llama" else torch.tensor([0, 1, 0])}


def logits(model: PreTrainedModel, family: str) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=batch(family)["input_ids"]).logits
    return result


def stored(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Iterate over everything that a quantised weight holds: inner tensors, scales, states, numbers."""
    if isinstance(value, torch.Tensor):
        if id(value) in seen:
            return
        seen.add(id(value))
        yield f"{name} is", (type(value), tuple(value.shape), value.dtype, value.requires_grad)
        if hasattr(value, "__tensor_flatten__"):
            for inner in value.__tensor_flatten__()[0]:
                yield from stored(getattr(value, inner), f"{name}.{inner}", seen)
            return
        dense = torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())  # any strides
        yield name, dense.view(torch.uint8) if value.dim() else dense
        for leaf, inner in vars(value).items():
            yield from stored(inner, f"{name}.{leaf}", seen)
    elif type(value).__module__.startswith("bitsandbytes.") and not isinstance(value, nn.Module):
        if id(value) not in seen:
            seen.add(id(value))
            for leaf, inner in vars(value).items():
                yield from stored(inner, f"{name}.{leaf}", seen)
    elif isinstance(value, str | int | float | torch.dtype | None):
        yield name, value


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """Everything about a quantised model that a refusal, or attaching and detaching, must leave alone."""
    seen: set[int] = set()
    values: dict[str, Any] = {"modules": [(n, id(m), type(m)) for n, m in model.named_modules()]}
    for path, module in model.named_modules():
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            values |= dict(stored(tensor, f"{path}.{leaf}", seen))
            values[f"identity of {path}.{leaf}"] = id(tensor)
        for leaf in ("state", "quant_state", "compute_dtype", "meta", "bias"):
            values |= dict(stored(module.__dict__.get(leaf), f"{path}.{leaf}", seen))
        values[f"hooks of {path}"] = (len(module._forward_hooks), len(module._forward_pre_hooks))
        values[f"attributes of {path}"] = sorted(module.__dict__)
        values[f"mode of {path}"] = module.training
    for number, settings in enumerate(configurations(model)):
        values[f"configuration {number}"] = (str(settings.to_dict()), settings._attn_implementation)
    values["is_quantized"] = getattr(model, "is_quantized", None)
    return values


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of what differs between two snapshots."""

    def same(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else bool(a == b)

    return [n for n in {**before, **after} if n not in before or n not in after or not same(before[n], after[n])]
