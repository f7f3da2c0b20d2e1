"""Every model class of transformers' auto mappings that reads token ids, tiny and with random weights, and batches."""

from __future__ import annotations

import functools
import inspect
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import deltune

from .configurations import tiny
from .tables import ELSEWHERE, HIDDEN, LARGEST, LAYERLESS, NORMLESS, looked_up

ROLES = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "sequence": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "tokens": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "question": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "choice": "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES",
    "base": "MODEL_MAPPING_NAMES",
}
GENERATING = ("causal", "seq2seq")
VARIANTS = {"layernorm": "layernorm", "lora": "lora(rank=2)", "sum": "layernorm + lora(rank=2)"}
"""Deltas that leave the outputs as they are: layer norms not trained yet, and an up-projection of zeros."""


@dataclass(frozen=True)
class Entry:
    """One model class: the role it has in the auto mappings, and the family whose configuration it is built from."""

    role: str
    model_type: str
    class_name: str

    def __str__(self) -> str:
        return self.class_name


def _stem(model_type: str) -> str:
    return CONFIG_MAPPING_NAMES[model_type].removesuffix("Config").removesuffix("Text")


@functools.cache
def entries() -> tuple[Entry, ...]:
    """All classes, each once, of the families that have a class for text; no class is imported for this.

    A class that several families share (a model of text and images and its text half) is built for the family that it
    is named after, the text half first.
    """
    families: dict[tuple[str, str], list[str]] = {}
    text = {family for role, table in ROLES.items() if role != "base" for family in getattr(modeling_auto, table)}
    for role, table in ROLES.items():
        for family, names in getattr(modeling_auto, table).items():
            for name in (names,) if isinstance(names, str) else names:
                if family in text and family in CONFIG_MAPPING_NAMES:
                    families.setdefault((role, name), []).append(family)
    made: dict[str, Entry] = {}
    for (role, name), types in families.items():
        named = [t for t in types if name.startswith(_stem(t))] or types
        chosen = max(named, key=lambda t: (t.endswith("_text"), len(_stem(t))))
        made.setdefault(name, Entry(role, chosen, name))
    return tuple(sorted(made.values(), key=lambda e: (e.model_type, list(ROLES).index(e.role), e.class_name)))


def configuration(entry: Entry, **changes: Any) -> PreTrainedConfig:
    """The tiny configuration of a class: its family's, or the part of it that the class is built from."""
    config = tiny(entry.model_type, **changes)
    config_class = getattr(transformers, entry.class_name).config_class
    parts = [
        name
        for name, kind in config.sub_configs.items()
        if kind is config_class and not isinstance(config, config_class)
    ]
    config = getattr(config, parts[0]) if parts else config
    if hasattr(config, "is_decoder") and not config.is_encoder_decoder:
        config.is_decoder = entry.role == "causal"  # families of encoders have a class of each kind
    return config


def random_model(
    class_name: str, config: PreTrainedConfig, seed: int = 0, noise: float = 0.05, largest: int = LARGEST
) -> PreTrainedModel:
    """A model in float32 and eval mode, its weights moved a little so that biases and norms are not trivial.

    It is frozen, as a base under a delta is: torch multiplies by a weight that wants a gradient in another order
    (`should_fold` in ATen's LinearAlgebra.cpp), so that the last bit of a product tells the two apart, delta or none.

    Args:
        class_name: The name of its class in transformers.
        config: Its configuration.
        seed: The seed of its weights.
        noise: How far the weights are moved: the standard deviation.
        largest: The most parameters that it may have.

    Raises:
        MemoryError: It would have more parameters.
    """
    kind = getattr(transformers, class_name)
    torch.manual_seed(seed)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(config).parameters())
    if size > largest:
        raise MemoryError(f"a tiny one has {size:,} parameters")
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=noise)
    return model.requires_grad_(False).eval()


def build(entry: Entry, **changes: Any) -> PreTrainedModel:
    """A model of a class, by its tiny configuration."""
    seed = zlib.crc32(entry.class_name.encode())
    model = random_model(entry.class_name, configuration(entry, **changes), seed, noise=0.1)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.pad_token_id = 1
    return model


def variants(entry: Entry, names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the variants that a class can have."""
    lacking = {"layernorm": NORMLESS, "lora": LAYERLESS}
    return tuple(name for name in names if name not in lacking or not looked_up(lacking[name], entry))


def attach(entry: Entry, model: PreTrainedModel, variant: str) -> deltune.Tuned:
    """Attach one of the deltas; where queries and values do not show, LoRA goes to the output projection or the FFN."""
    if looked_up(NORMLESS, entry):
        variant = "lora"
    if looked_up(LAYERLESS, entry):
        variant = "layernorm"
    method = VARIANTS[variant]
    if looked_up(HIDDEN, entry):
        method = method.replace("rank=2", f"rank=2, at='{ELSEWHERE.get(entry.model_type, 'output')}'")
    return deltune.attach(model, method)


@dataclass
class Specimen:
    """The models of one class: the bare one, and others of the same weights with a delta, made when asked for first."""

    entry: Entry
    bare: PreTrainedModel
    tuned: dict[str, PreTrainedModel] = field(default_factory=dict)

    def with_delta(self, variant: str) -> PreTrainedModel:
        """A model under one of the deltas.

        "disabled" and "detached" have a delta that was trained, so to speak: only off does it change nothing.
        """
        if variant not in self.tuned:
            model = build(self.entry)
            tuned = attach(self.entry, model, variant if variant in VARIANTS else "sum")
            if variant not in VARIANTS:
                move(tuned)
            if variant == "detached":
                tuned.detach()
            self.tuned[variant] = model
        return self.tuned[variant]


def move(tuned: deltune.Tuned) -> None:
    """Move every trained tensor, as training would."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in tuned.trainable_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter), alpha=0.3)


@functools.lru_cache(maxsize=1)
def specimen(entry: Entry) -> Specimen:
    """The specimen that all rows of one class share; rows of one class follow each other."""
    return Specimen(entry, build(entry))


EXTRA: dict[str, Callable[[torch.Tensor], dict[str, Any]]] = {
    "bros": lambda ids: {"bbox": torch.linspace(0, 1, 4).expand(*ids.shape, 4).contiguous()},
    "longformer": lambda ids: {"global_attention_mask": torch.eye(1, ids.shape[-1], dtype=torch.long).expand_as(ids)},
}
"""Inputs that a family wants besides token ids, made of them."""


def batch(
    entry: Entry, model: PreTrainedModel, padding: str | None = "right", rows: int = 2, length: int = 8
) -> dict[str, Any]:
    """Token ids and masks of a class; the last row is padded. Multiple choice has two choices a row."""
    generator = torch.Generator().manual_seed(0)
    shape = (rows, 2, length) if entry.role == "choice" else (rows, length)
    ids = torch.randint(5, 89, shape, generator=generator)
    mask = torch.ones_like(ids)
    if padding and rows > 1:
        columns = slice(None, 2) if padding == "left" else slice(-2, None)
        ids[-1, ..., columns] = 1
        mask[-1, ..., columns] = 0
    both = getattr(model.config, "is_encoder_decoder", False)
    if both and entry.role == "sequence":  # these heads read the last end-of-sequence token, one in every row
        last = (mask * torch.arange(length)).argmax(-1)
        ids[torch.arange(rows), last] = 2
    made = {"input_ids": ids, "attention_mask": mask, **EXTRA.get(entry.model_type, lambda ids: {})(ids)}
    if both and entry.role in ("base", "seq2seq", "masked"):
        made["decoder_input_ids"] = torch.randint(5, 89, (rows, 5), generator=generator)
    accepted = inspect.signature(model.forward).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        made = {name: value for name, value in made.items() if name in accepted}
    return made
