"""Counts the scalars that a method trains on a model, exactly and from shapes alone.

By the same shapes a method whose tensors would not fit in the free memory is refused before any of it is allocated.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
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
from ..anatomy.offloading import loaded_devices, offloaded_tensors
from ..anatomy.quantization import quantization_of, stored_bytes
from ..anatomy.quantized_storage import quantized_storage
from ..anatomy.skeleton import base_tensors
from ..anatomy.tracing import meta_model
from ..anatomy.types import Anatomy, html_table
from ..compat import auto_class_mapping
from ..errors import DeltuneError, excerpt, unknown_name
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
            text += f"; {_format_bytes(self.base_bytes)} of weights stored ({self.quantization}), "
            text += f"{_format_bytes(self.training_bytes)} to train with Adam"
        return "; ".join((text, *self.scope))

    def _repr_html_(self) -> str:
        rows = [
            ("method", f"{self.method:,}"),
            (f"share of {self.denominator_size:,} ({self.denominator})", f"{self.percent:.4f} %"),
            ("task head", f"{self.head:,}"),
            ("while training only", f"{self.training_only:,}"),
            ("trained in all", f"{self.trained:,}"),
            ("numbers in the saved file", f"{self.stored:,}"),
            *([("weights stored", _format_bytes(self.base_bytes))] if self.quantization and self.base_bytes else ()),
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
    if head not in ("train", "freeze"):
        raise DeltuneError(unknown_name("head", head, ("train", "freeze")))
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


LIMIT_VARIABLE = "DELTUNE_MEMORY_LIMIT"
"""The environment variable that sets a limit in place of the free memory: a number of bytes, or as in 8GiB."""

NEGLIGIBLE_BYTES = 4 << 20
"""A method that needs at most this is attached without reading the free memory, which takes longer than attaching."""

UNITS = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)},
}


TRAINING_COPIES = 4
"""The memory that training takes for a scalar, in scalars: its value, its gradient and the two moments of Adam."""


def needed_bytes(anatomy: Anatomy, resolved: ResolvedMethod, scalar_bytes: int, copies: int = 1) -> int:
    """Return the bytes that a resolved method allocates.

    These are the parameters, the positions of masked ones, and the dense tensors that masked entries are drawn from and
    computed in. The model's own tensors, those of its head and those that the method selects, count once: their size
    does not depend on the method's arguments, and sharding or another optimizer trains them in less than Adam takes.
    """
    shared = resolved.shared_tensors(folded=False).values()
    added = sum(spec.numel for specs in shared for spec in specs.values())
    dense = masked = 0
    for edit in resolved.edits:
        of_place = sum(spec.numel for spec in edit.own_tensors(folded=False).values())
        if edit.mask is None:
            added += of_place
        else:  # a forward pass computes in dense tensors, whatever the mask keeps
            dense += of_place
            masked += edit.mask.count
    in_model = sum(t.numel for t in resolved.selected) + sum(2 * gates.size for gates in resolved.gated)
    in_model += sum(t.numel for t in anatomy.tensors if t.area == "head")
    masked += sum(mask.count for _, mask in resolved.masked)
    added += masked
    return scalar_bytes * (copies * added + dense + in_model) + 8 * masked  # a position is an int64


def check_memory(
    model: PreTrainedModel, anatomy: Anatomy, resolved: ResolvedMethod, method: Method, copies: int = 1
) -> None:
    """Check that a resolved method fits in memory.

    The limit is DELTUNE_MEMORY_LIMIT where it is set. Otherwise it is what is free on the model's devices, and on the
    CPU for a model on the meta device.
    """
    needed = needed_bytes(anatomy, resolved, 8, copies)
    if needed <= NEGLIGIBLE_BYTES and not os.environ.get(LIMIT_VARIABLE, "").strip():
        return
    if not any(tensor.dtype == torch.float64 for tensor in base_tensors(model)):
        needed = needed_bytes(anatomy, resolved, 4, copies)
    limit, source = _limit({device for _, _, device in loaded_devices(model, offloaded_tensors(model))})
    if limit is None or needed <= limit:
        return
    count = count_resolved(anatomy, resolved, "number", 1)
    use = "loading them" if copies == 1 else "training them, with their gradients and the two moments of Adam,"
    raise DeltuneError(
        f"{method!r} has {count.trained:,} trained scalars on {anatomy.model}, and {use} takes "
        f"{_format_bytes(needed)} of memory: {_format_bytes(limit)} {source}. Give smaller sizes, or set another "
        f"limit in the environment variable {LIMIT_VARIABLE}",
        "deltune.fit finds sizes for a budget",
    )


def _limit(devices_of_model: set[torch.device]) -> tuple[int | None, str]:
    """Return the bytes that may be used, None where they are not known, and where the number comes from."""
    if stated := os.environ.get(LIMIT_VARIABLE, "").strip():
        return _parse_limit(stated), f"is the limit of {LIMIT_VARIABLE}"
    devices = devices_of_model - {torch.device("meta")} or {torch.device("cpu")}
    free = [_free_on_device(device) for device in devices]
    names = ", ".join(sorted(map(str, devices)))
    return (None if None in free else sum(f for f in free if f is not None)), f"is free ({names})"


def _parse_limit(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Z]{0,3})", text.upper())
    if match is None or match[2] not in UNITS:
        raise DeltuneError(f"{LIMIT_VARIABLE}={text!r}: give a number of bytes, or one with a unit such as 8GiB")
    return int(float(match[1]) * UNITS[match[2]])


def _free_on_device(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated on a device, or None where they are not known."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type != "cpu":
        return None
    limits = [_free_physical(), _free_in_process(), _free_in_cgroup()]
    return min((limit for limit in limits if limit is not None), default=None)


def _free_physical() -> int | None:
    """Return the memory that Linux says is available; on other systems all memory of the machine."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _free_in_process() -> int | None:
    """Return what the process's limit on its address space (ulimit -v) leaves, or None without a limit."""
    try:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft == resource.RLIM_INFINITY:
            return None
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        return max(0, soft - pages * os.sysconf("SC_PAGE_SIZE"))
    except (ImportError, OSError, ValueError, IndexError):
        return None


def _free_in_cgroup() -> int | None:
    """Return what the memory limit of a container (cgroup v2 or v1) leaves, or None; its file cache can be freed."""
    for folder, limit, usage, cache in CGROUP_FILES:
        try:
            maximum, used = (int((folder / name).read_text()) for name in (limit, usage))
            cached = [line.split()[1] for line in (folder / "memory.stat").read_text().splitlines() if cache in line]
            return max(0, maximum - used + sum(map(int, cached)))
        except (OSError, ValueError, IndexError):  # no such group, or no limit: "max"
            continue
    return None


CGROUP_FILES = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "active_file "),  # inactive_file too
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "),
)
"""For cgroup v2 and v1: the folder, the files of limit and usage, and the line of the cache that can be freed."""


def _format_bytes(size: float) -> str:
    """Return a number of bytes with a unit."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.1f} {unit}" if unit != "bytes" else f"{size:,} bytes"
        size /= 1024
    return f"{size:,.1f} TiB"
