"""Tiny models with random weights, batches for them, and what the laws compare."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

import deltune

from .families import FAMILIES, Family

ROLES = {
    "base": (transformers.AutoModel, "MODEL_MAPPING_NAMES"),
    "sequence": (transformers.AutoModelForSequenceClassification, "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"),
    "tokens": (transformers.AutoModelForTokenClassification, "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES"),
    "choice": (transformers.AutoModelForMultipleChoice, "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES"),
    "question": (transformers.AutoModelForQuestionAnswering, "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES"),
    "causal": (transformers.AutoModelForCausalLM, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "seq2seq": (transformers.AutoModelForSeq2SeqLM, "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    "masked": (transformers.AutoModelForMaskedLM, "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
}
"""The auto classes, each with transformers' own table of the families that have it (BART's seq2seq is its masked)."""

HEADS = ("sequence", "tokens", "choice", "question")


def roles(family: Family) -> list[str]:
    """The auto classes that transformers has for a family."""
    return [role for role, (_, table) in ROLES.items() if family.name in getattr(modeling_auto, table)]


def main_role(family: Family) -> str:
    """The class a family is mostly used as: classifier, language model, or encoder-decoder language model."""
    return {"encoder": "sequence", "decoder": "causal", "both": "seq2seq"}[family.kind]


def config(family: Family, **changes: Any) -> PreTrainedConfig:
    """The tiny configuration, without dropout, so that training mode computes the same numbers."""
    made = AutoConfig.for_model(family.name, **{**family.config, **changes})
    for name, value in made.to_dict().items():
        if isinstance(value, float) and ("drop" in name):
            setattr(made, name, 0.0)
    return made


def layers(family: Family, number: int) -> dict[str, int]:
    """What changes in the configuration of a model that has so many layers in a stack."""
    return {name: number for name in family.config if name.endswith("layers") or name == "n_layer"}


def build(family: Family, role: str, dtype: torch.dtype = torch.float64, **changes: Any) -> PreTrainedModel:
    """A fresh model in eval mode, every weight moved a little so that biases and norms are not trivial.

    Changes go to the configuration; attn_implementation goes to the model.
    """
    implementation = changes.pop("attn_implementation", None)
    torch.manual_seed(zlib.crc32(f"{family.name} {role}".encode()))
    model = ROLES[role][0].from_config(config(family, **changes), attn_implementation=implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # sinusoids are computed again when a checkpoint is read
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.to(dtype).eval()


@functools.cache
def _kept(name: str, role: str, dtype: torch.dtype) -> dict[str, Any]:
    return {}


def specimen(name: str, role: str | None = None, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """The model of a family that tests share; a new one when the last test did not leave it as it was."""
    family = FAMILIES[name]
    role = role or main_role(family)
    kept = _kept(name, role, dtype)
    if kept and not differences(kept["facts"], facts(kept["model"])):
        return kept["model"]
    kept["model"] = build(family, role, dtype)
    kept["facts"] = facts(kept["model"])
    return kept["model"]


def facts(model: PreTrainedModel) -> dict[str, Any]:
    """Everything about a model that attaching and detaching must leave alone."""
    values: dict[str, Any] = {"keys": list(model.state_dict()), "names": [n for n, _ in model.named_modules()]}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        values[f"value of {name}"] = parameter.detach().clone()
        values[f"identity of {name}"] = id(parameter)
        values[f"flag of {name}"] = parameter.requires_grad
    for name, buffer in model.named_buffers():
        values[f"value of {name}"] = buffer.detach().clone()
    for config in configurations(model):
        values[f"configuration {id(config)}"] = str(config.to_dict())
        values[f"attention of {id(config)}"] = config._attn_implementation
    for name, module in model.named_modules():
        values[f"hooks of {name}"] = (len(module._forward_hooks), len(module._forward_pre_hooks))
        values[f"attributes of {name}"] = sorted(module.__dict__)
        values[f"mode of {name}"] = module.training
        for plain in ("num_labels", "out_features", "in_features"):
            values[f"{plain} of {name}"] = getattr(module, plain, None)
    return values


def configurations(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Every configuration object in the model, once."""
    by_id = {
        id(m.config): m.config for m in model.modules() if isinstance(getattr(m, "config", None), PreTrainedConfig)
    }
    return list(by_id.values())


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Names of the facts that differ."""
    return [
        key
        for key in dict.fromkeys((*before, *after))
        if key not in before or key not in after or not _same(before[key], after[key])
    ]


def _same(one: Any, two: Any) -> bool:
    return torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two


def batch(model: PreTrainedModel, rows: int = 2, length: int = 7, seed: int = 0, pad: int = 2) -> dict[str, Any]:
    """Token ids and masks; the last row ends in `pad` padding tokens. Multiple choice has two choices a row."""
    made = torch.Generator().manual_seed(seed)
    role = role_of(model)
    shape = (rows, 2, length) if role == "choice" else (rows, length)
    ids = torch.randint(5, 99, shape, generator=made)
    mask = torch.ones_like(ids)
    if pad:
        ids[-1, ..., -pad:] = model.config.pad_token_id
        mask[-1, ..., -pad:] = 0
    if role == "sequence" and model.config.is_encoder_decoder:  # these heads read the last end-of-sequence token
        last = mask.sum(-1) - 1
        ids[torch.arange(rows), last] = model.config.eos_token_id
    made_batch: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder and role in ("base", "seq2seq"):
        made_batch["decoder_input_ids"] = torch.randint(5, 99, (rows, 4), generator=made)
    return made_batch


def role_of(model: PreTrainedModel) -> str:
    """The auto class a model was made by."""
    name = type(model).__name__
    for role, (_, table) in ROLES.items():
        if getattr(modeling_auto, table).get(model.config.model_type) == name:
            return role
    raise AssertionError(name)


Outputs = dict[str, torch.Tensor]


def run(model: PreTrainedModel, inputs: Mapping[str, Any], **options: Any) -> Outputs:
    """Every tensor that a forward pass returns, without gradients: with them torch may multiply in another order, and
    two runs are equal to the last bit only in one mode."""
    with torch.no_grad():
        return forward(model, inputs, **options)


def forward(model: PreTrainedModel, inputs: Mapping[str, Any], **options: Any) -> Outputs:
    """Every tensor that a forward pass returns, without caches."""
    if model.config.is_encoder_decoder or hasattr(model.config, "use_cache"):
        options = {"use_cache": False, **options}
    return dict(tensors(model(**inputs, **options)))


def tensors(output: Mapping[str, Any]) -> Iterable[tuple[str, torch.Tensor]]:
    """The tensors of a model output, those in tuples by their place."""
    for name, value in output.items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, tuple):
            yield from ((f"{name}.{i}", v) for i, v in enumerate(value) if isinstance(v, torch.Tensor))


def shapes(outputs: Outputs, grown: int = 0) -> dict[str, tuple[int, ...]]:
    """Shapes of outputs. grown: rows that the encoder's own outputs have besides, since the decoder attends to them."""
    by_name = {}
    for name, value in outputs.items():
        shape = list(value.shape)
        for axis in {"encoder_l": [1], "encoder_h": [1], "encoder_a": [2, 3], "cross_att": [3]}.get(name[:9], []):
            shape[axis] += grown
        by_name[name] = tuple(shape)
    return by_name


def loss(outputs: Outputs) -> torch.Tensor:
    """A number that depends on every output."""
    total = torch.zeros((), dtype=torch.float64)
    for name, value in outputs.items():
        weights = torch.randn(value.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        total = total + (value.double() * weights.double()).mean()
    return total


def equal(one: Outputs, two: Outputs) -> bool:
    """The same outputs, bit for bit."""
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def distance(one: Outputs, two: Outputs) -> float:
    """The largest difference over all outputs, relative to the largest value."""
    assert one.keys() == two.keys()
    return max((one[n] - two[n]).abs().max().item() / (1e-12 + two[n].abs().max().item()) for n in one)


def stir(tuned: deltune.Tuned, seed: int = 1, size: float = 0.2) -> deltune.Tuned:
    """Move every trained tensor, as training would."""
    made = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in tuned.trainable_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=made).to(parameter), alpha=size)
    return tuned
