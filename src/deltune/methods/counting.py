"""Counts the scalars that a method trains on a model, exactly and from shapes alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedConfig,
    PreTrainedModel,
)

from ..anatomy.inspection import check_model_or_config, inspect
from ..anatomy.quantization import quantization_of, stored_bytes
from ..anatomy.quantized_storage import quantized_storage
from ..anatomy.skeleton import base_tensors
from ..anatomy.tracing import meta_model
from ..anatomy.types import Anatomy, html_table
from ..compat import auto_class_mapping
from ..errors import DeltuneError, check_choice, excerpt, unknown_name
from .parser import MAX_INTEGER, explain_arguments
from .registry import parse
from .resolve import ResolvedMethod, resolve
from .sites import resolve_locations, select_layers
from .spec import OUTSIDE_LAYERS, Method, Modification, is_pattern

DENOMINATORS = {
    "model": "the base model, as AutoModel makes it",
    "no_pooler": "without the pooler",
    "no_embeddings": "without the whole embedding module",
    "layers": "without embeddings and pooler",
    "untied": "as if input and output embeddings were not tied",
}

LEFT_OUT_AREAS = {"no_pooler": ("pooler",), "no_embeddings": ("embedding",), "layers": ("embedding", "pooler")}
"""The areas of the base model that a denominator leaves out."""

LANGUAGE_MODELS = (
    AutoModelForSeq2SeqLM, AutoModelForMaskedLM, AutoModelForSpeechSeq2Seq, AutoModelForImageTextToText,
    AutoModelForCausalLM,
)  # fmt: skip
"""The classes with a projection to the vocabulary. The causal one is last: of BART it has the decoder alone."""

TRAINING_COPIES = 4
"""The memory that training takes for a scalar, in scalars: its value, its gradient and the two moments of Adam."""

OF_QUANTIZED = ("quantization", "base_bytes")
"""The attributes of a count that `as_dict` has for quantised models only."""


@dataclass(frozen=True)
class Count:
    """How many scalars a method has on a model. A scalar that several modules share counts once.

    Attributes:
        method: Scalars of the method that are saved.
        head: Scalars of the task head that are trained.
        training_only: Scalars that are trained too but not saved, such as those of a reparameterisation.
        stored: Numbers in the saved file, the task head's and the positions of masked scalars included.
        denominator: The name of what the method's size is compared with.
        denominator_size: The scalars of the denominator.
        scope: What to know beside the numbers: what is not in the denominator, and what the method leaves out, which is
            layers without a site, towers that it does not act on, and what looks like a norm or bias that it trains
            and is not observed as one.
        quantization: How the base model's weights are quantised, such as "bitsandbytes nf4"; "" where they are not.
        base_bytes: Bytes that the base model stores, its quantised weights as they are; None of a configuration that is
            counted unquantised.
    """

    method: int
    head: int
    training_only: int
    stored: int
    denominator: str
    denominator_size: int
    scope: tuple[str, ...] = ()
    quantization: str = field(default="", compare=False)
    base_bytes: int | None = field(default=None, compare=False)

    @property
    def training_bytes(self) -> int:
        """Bytes of what is trained, with its gradients and the two moments of Adam, all in float32."""
        return 4 * TRAINING_COPIES * self.trained

    @property
    def trained(self) -> int:
        """All scalars that the optimizer sees."""
        return self.method + self.head + self.training_only

    @property
    def percent(self) -> float:
        """The method's share of the denominator in percent, 100 · method / denominator_size."""
        return 100 * self.method / self.denominator_size

    def as_dict(self) -> dict[str, Any]:
        """Return all values, as `deltune count --json` prints them.

        Returns:
            A dictionary with a key for each attribute, "trained" and "percent". The quantization, with the bytes that
            are stored, is in it for a quantised model only.
        """
        values = {**asdict(self), "scope": list(self.scope), "trained": self.trained, "percent": self.percent}
        return values if self.quantization else {n: v for n, v in values.items() if n not in OF_QUANTIZED}

    def __str__(self) -> str:
        """Return the count in one line."""
        base = DENOMINATORS.get(self.denominator, "the number given")
        text = f"{self.method:,} scalars, {self.percent:.4f} % of {self.denominator_size:,}"
        text += f" ({self.denominator}: {base})"
        text += f"; head {self.head:,}" if self.head else ""
        text += f"; while training {self.training_only:,} more" if self.training_only else ""
        if self.quantization and self.base_bytes is not None:
            text += f"; {format_bytes(self.base_bytes)} of weights stored ({self.quantization}), "
            text += f"{format_bytes(self.training_bytes)} to train with Adam"
        return "; ".join((text, *self.scope))

    def _repr_html_(self) -> str:
        rows = [
            ("method", f"{self.method:,}"),
            (f"share of {self.denominator_size:,} ({self.denominator})", f"{self.percent:.4f} %"),
            ("task head", f"{self.head:,}"),
            ("while training only", f"{self.training_only:,}"),
            ("trained in all", f"{self.trained:,}"),
            ("numbers in the saved file", f"{self.stored:,}"),
            *([("weights stored", format_bytes(self.base_bytes))] if self.quantization and self.base_bytes else ()),
            *(("note", text) for text in self.scope),
        ]
        return html_table("Trained scalars", ("of", "scalars"), rows)


@explain_arguments
def count(
    model: PreTrainedModel | PreTrainedConfig,
    method: str | Method,
    denominator: str | int = "model",
    head: str = "train",
    quantization_config: Any = None,
) -> Count:
    """Count the scalars that a method trains on a model, without attaching it.

    Args:
        model: A live model, or a configuration; of the latter, the base model (AutoModel) is counted without creating
            weights, or a language model where the method acts at "lm_head".
        method: An expression such as "lora(rank=8)", or a method.
        denominator: What the size is compared with: "model" (AutoModel of the configuration), "no_pooler",
            "no_embeddings", "layers" (without embeddings and pooler), "untied" (input and output embeddings counted
            apart), or a number of scalars.
        head: "train" or "freeze", in which case the task head counts as saved but not as trained.
        quantization_config: Of a configuration: how the model would be quantised while it is loaded, such as a
            BitsAndBytesConfig of transformers. The count has the bytes that it would store, the rest in float32.

    Returns:
        The count.

    Raises:
        DeltuneError: The method cannot be attached to the model, or an argument does not exist.
    """
    check_model_or_config(model, "count")
    parsed, storage = parse(method), None
    if quantization_config is not None:
        if isinstance(model, PreTrainedModel):
            raise DeltuneError("quantization_config is for a configuration: a live model counts in the form it has")
        if acts_at_vocabulary(parsed):
            raise DeltuneError(
                "a method at the output embeddings (lm_head) cannot be counted from a configuration that is to be "
                "quantised: load the quantised model, and count the method on it"
            )
        storage = quantized_storage(model, quantization_config)
    anatomy = anatomy_to_count(model, acts_at_vocabulary(parsed)) if storage is None else storage.anatomy
    check_choice("head", head, ("train", "freeze"))
    resolved = resolve(anatomy, parsed, lambda: base_size(model)[1])
    counted = count_resolved(anatomy, resolved, *base_size(model, denominator), head=head)
    if isinstance(model, PreTrainedConfig) and anatomy.vocabulary is not None:
        note = f"counted on {anatomy.model}, since the base model has no output embeddings"
        counted = replace(counted, scope=(note, *counted.scope))
    if storage is not None:
        return replace(counted, quantization=storage.quantization, base_bytes=storage.stored_bytes)
    return with_storage(counted, model) if isinstance(model, PreTrainedModel) else counted


def acts_at_vocabulary(method: Method) -> bool:
    """Whether a method acts at the output embeddings, or trains rows of tokens there."""
    return any(part.site == "lm_head" if isinstance(part, Modification) else bool(part.tokens) for part in method.parts)


def anatomy_to_count(model: PreTrainedModel | PreTrainedConfig, with_vocabulary: bool) -> Anatomy:
    """Return the anatomy that a method is counted on."""
    if not isinstance(model, PreTrainedConfig) or not with_vocabulary:
        return inspect(model)
    classes = [auto_class for auto_class in LANGUAGE_MODELS if type(model) in auto_class_mapping(auto_class)]
    named = [c for c in classes if auto_class_mapping(c)[type(model)].__name__ in (model.architectures or ())]
    return inspect(meta_model(model, *(named or classes)[:1]))


def with_storage(counted: Count, model: PreTrainedModel) -> Count:
    """Return a count with what a live model stores; one on the meta device stores nothing."""
    if any(tensor.is_meta for tensor in base_tensors(model)):
        return counted
    return replace(counted, quantization=quantization_of(model), base_bytes=stored_bytes(model))


def count_resolved(
    anatomy: Anatomy,
    resolved: ResolvedMethod,
    denominator: str,
    size: int,
    head: str = "train",
    folded: bool = False,
    head_size: int | None = None,
) -> Count:
    """Count a resolved method."""
    whole = [edit for edit in resolved.edits if edit.mask is None]
    shared = replace(resolved, edits=tuple(whole)).shared_tensors(folded=False).values()
    saved = [spec for edit in whole for spec in edit.own_tensors(folded=True).values() if spec.saved]
    saved += [spec for specs in shared for spec in specs.values() if spec.saved]
    trained = sum(spec.numel for edit in whole for spec in edit.own_tensors(folded=False).values() if spec.trained)
    trained += sum(spec.numel for specs in shared for spec in specs.values() if spec.trained)
    stored, kept = sum(spec.numel for spec in saved), sum(spec.numel for spec in saved if spec.trained)
    masked = sum(edit.mask.count for edit in resolved.edits if edit.mask is not None)
    masked += sum(mask.count for _, mask in (*resolved.masked, *resolved.common))
    masked += sum(gates.keep for gates in resolved.gated)
    trained += sum(2 * gates.size - gates.keep for gates in resolved.gated)  # a difference and a gate for every scalar
    selected = sum(t.numel for t in resolved.selected) + masked
    method = kept + selected
    if head_size is None:
        head_size = sum(t.numel for t in anatomy.tensors if t.area == "head")
    return Count(
        method=method,
        head=head_size if head == "train" else 0,
        training_only=0 if folded else trained - kept,
        stored=stored + selected + masked + head_size,  # a masked scalar is stored with its index
        denominator=denominator,
        denominator_size=size,
        scope=(
            *_outside_of_the_denominator(anatomy, resolved, denominator),
            *layers_left_out(anatomy, resolved),
            *towers_left_out(anatomy, resolved),
            *unread_left_out(anatomy, resolved),
            *unrecognized_left_out(resolved),
        ),
    )


def _outside_of_the_denominator(anatomy: Anatomy, resolved: ResolvedMethod, denominator: str) -> Iterator[str]:
    """Yield how much of what a method trains in place is not in the denominator, so that it may be above 100 %.

    Such are output embeddings of their own, which the base model does not have.
    """
    left_out = {"vocabulary", *LEFT_OUT_AREAS.get(denominator, ())}
    counted = anatomy.vocabulary.path if anatomy.vocabulary is not None and denominator == "untied" else None
    sizes = [(t, t.numel) for t in resolved.selected] + [(t, mask.count) for t, mask in resolved.masked]
    outside = {t.name: n for t, n in sizes if t.area in left_out and t.name != f"{counted}.weight"}
    if outside and denominator != "number":
        first = next(iter(outside)).rpartition(".")[0]
        yield f"{sum(outside.values()):,} of these scalars, such as those of {first}, are not in the denominator"


def layers_left_out(anatomy: Anatomy, resolved: ResolvedMethod) -> Iterator[str]:
    """Yield for each modification that does not act in every layer that it chooses, in how many it does, and why."""
    trained: dict[Modification, set[str]] = {}
    masked = {edit.modification for edit in resolved.edits if edit.mask is not None}
    for edit in resolved.edits:
        trained.setdefault(edit.modification, set()).add(edit.place.layer)
    for modification, layers in trained.items():
        if modification.site in OUTSIDE_LAYERS or is_pattern(modification.site) or modification.optional:
            continue
        if modification.attention != "all" or modification.tower not in ("main", anatomy.tower):
            continue
        chosen = select_layers(anatomy, modification.layers, modification.stack)
        if modification.experts != "all":
            chosen = [layer for layer in chosen if layer.experts]
        existing = layers
        if modification in masked:  # a mask can leave out places that exist
            existing = layers | {location.layer for location in resolve_locations(anatomy, modification)}
        if len(existing) < len(chosen):
            yield f"site {modification.site!r} exists in {len(existing)} of {len(chosen)} layers"
        if len(layers) < len(existing):
            yield f"the mask has scalars at site {modification.site!r} in {len(layers)} of {len(existing)} layers"


def _towers_acted_on(anatomy: Anatomy, resolved: ResolvedMethod) -> set[str]:
    """Return the names of the towers that a method acts on."""
    names = {t.name for t in (*resolved.selected, *resolved.trained_in_part)}
    return {t.tower for t in anatomy.tensors if t.name in names} | {edit.place.tower for edit in resolved.edits}


def unread_left_out(anatomy: Anatomy, resolved: ResolvedMethod) -> Iterator[str]:
    """Yield what the model does not read of the towers that a method acts on, which is left as it is."""
    acted = _towers_acted_on(anatomy, resolved)
    for tower in anatomy.towers:
        if tower in acted and (unread := anatomy.unread(tower)):
            yield f"of the tower {tower}, {unread} and are left as they are"
    for part in anatomy.other_towers:
        if part.tower in acted and not part.is_reading_observed:
            yield (
                f"which layers of the tower {part.tower_path} the rest of the model reads cannot be seen, so that "
                "some of what is trained there may get no gradient"
            )


def towers_left_out(anatomy: Anatomy, resolved: ResolvedMethod) -> Iterator[str]:
    """Yield the towers of a model that a method does not act on, with their sizes."""
    acted = _towers_acted_on(anatomy, resolved)
    for tower in anatomy.towers:
        if tower not in acted:
            size = sum(t.numel for t in anatomy.tensors if t.tower == tower and t.area != "head")
            yield f"the tower {tower} with {size:,} scalars is left as it is (tower= chooses another)"


def unrecognized_left_out(resolved: ResolvedMethod) -> Iterator[str]:
    """Yield what looks like the norms or biases that a method trains, and is left as it is."""
    names = [t.name for t in resolved.unrecognized]
    norms = list(dict.fromkeys(n.rpartition(".")[0] for n in names if n.rpartition(".")[2] in ("weight", "bias")))
    biases = [n for n in names if n.rpartition(".")[2] not in ("weight", "bias")]
    if norms:
        yield f"what may be norms over other axes is left as it is: {len(norms)}, such as {norms[0]}"
    if biases:
        yield f"biases of no linear or norm are left as they are: {len(biases)}, such as {biases[0]}"


def base_size(model: PreTrainedModel | PreTrainedConfig, denominator: str | int = "model") -> tuple[str, int]:
    """Return the name and the number of scalars of a denominator: AutoModel of the configuration where there is one."""
    size = denominator if isinstance(denominator, int) and not isinstance(denominator, bool) else None
    if isinstance(denominator, str) and re.fullmatch(r"[0-9][0-9,]{0,30}", denominator):
        size = int(denominator.replace(",", ""))
    if size is not None:
        if not 1 <= size <= MAX_INTEGER:
            raise DeltuneError(f"denominator={excerpt(denominator)}: must be at least 1 and at most {MAX_INTEGER:,}")
        return "number", size
    if not isinstance(denominator, str) or denominator not in DENOMINATORS:
        raise DeltuneError(unknown_name("denominator", denominator, [*DENOMINATORS, "a number"]))
    config = model if isinstance(model, PreTrainedConfig) else model.config
    try:
        tensors = inspect(meta_model(config)).tensors
    except DeltuneError:
        if isinstance(model, PreTrainedConfig):
            raise
        # AutoModel has no class for it, as for a SpeechEncoderDecoderModel
        tensors = tuple(t for t in inspect(model).tensors if t.area not in ("head", "vocabulary"))
    areas: dict[str, int] = {}
    for tensor in tensors:
        areas[tensor.area] = areas.get(tensor.area, 0) + tensor.numel
    total = sum(areas.values())
    if denominator == "untied":
        return denominator, total + _output_embeddings(inspect(meta_model(config)), config)
    return denominator, total - sum(areas.get(area, 0) for area in LEFT_OUT_AREAS.get(denominator, ()))


def _output_embeddings(anatomy: Anatomy, config: PreTrainedConfig) -> int:
    """Return the scalars of the output embeddings that an untied model has beside its input embeddings."""
    word_embedding = anatomy.stacks[-1].words
    matches = [t for t in anatomy.tensors if word_embedding and f"{word_embedding}.weight" in (t.name, *t.aliases)]
    if not matches:
        raise DeltuneError(f"{config.model_type}: the word embeddings cannot be seen, so there is no untied size")
    return matches[0].numel


def format_bytes(size: float) -> str:
    """Return a number of bytes with a unit."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.1f} {unit}" if unit != "bytes" else f"{size:,} bytes"
        size /= 1024
    return f"{size:,.1f} TiB"
