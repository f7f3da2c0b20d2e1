"""Writes a delta as AdapterHub's library saves adapters: bottlenecks, LoRA, prefixes and sums of them.

Which options mean a delta is found by the reader: of a few candidates the one is written that reads back as the same
modifications at the same places with the same tensors. What no candidate means is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ..anatomy.types import Layer, is_inside
from ..errors import DeltuneError
from ..methods.compositions import Scale
from ..methods.forms.attention import Prefix
from ..methods.forms.hidden import Bottleneck
from ..methods.forms.low_rank import LowRank
from ..methods.resolve import ResolvedEdit, resolve
from ..methods.spec import PROJECTIONS, Modification
from .adapterhub import ACTIVATION_NAMES, read_adapterhub
from .base import ExportedDelta, ForeignFolder, without_scope

VERSION = "adapters.1.3.0"
"""The release of AdapterHub's library whose format is written."""

_BOTTLENECK: dict[str, Any] = {
    "adapter_residual_before_ln": False, "dropout": 0.0, "factorized_phm_W": True, "factorized_phm_rule": False,
    "hypercomplex_nonlinearity": "glorot-uniform", "init_weights": "bert", "init_weights_seed": None,
    "inv_adapter": None, "inv_adapter_reduction_factor": None, "learn_phm": True, "ln_after": False,
    "phm_bias": True, "phm_c_init": "normal", "phm_dim": 4, "phm_init_range": 0.0001, "phm_layer": False, "phm_rank": 1,
    "shared_W_phm": False, "shared_phm_rule": True, "stochastic_depth": 0.0, "use_gating": False,
}  # fmt: skip
_LORA: dict[str, Any] = {
    "architecture": "lora", "composition_mode": "add", "dropout": 0.0, "dtype": None, "init_weights": "lora",
    "init_weights_seed": None, "use_dora": False, "use_gating": False, "vera_b": None, "vera_d": None,
}  # fmt: skip
_PREFIX: dict[str, Any] = {
    "architecture": "prefix_tuning", "bottleneck_size": 512, "dropout": 0.0, "flat": True, "init_weights_seed": None,
    "non_linearity": "tanh", "shared_gating": True, "use_gating": False,
}  # fmt: skip
"""Options of AdapterHub's that are the same in everything that is written."""

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]


def write_adapterhub(content: ExportedDelta, model_class: str, name: str, labels: dict[str, int]) -> ForeignFolder:
    """Return what the folder of an adapter of a name holds.

    `model_class` is the class of the model, and `labels` are the ids of its labels by name.
    """
    if content.in_place:
        trained = next(iter(content.in_place))
        raise DeltuneError(f"this delta cannot be written for adapterhub: it trains {trained} in place")
    width = content.anatomy.stacks[0].width if content.anatomy.stacks else 0
    common = {"hidden_size": width, "model_class": model_class, "model_name": "", "model_type": content.anatomy.family,
              "version": VERSION}  # fmt: skip
    head_options: Config = {}
    if content.head:
        count = content.anatomy.tensor(list(content.head)[-1]).shape[0]
        head_options = {**common, "config": None, "label2id": labels, "name": None, "num_labels": count}
    for configs, tensors in _candidates(content, name):
        config = configs[0] if len(configs) == 1 else {"architecture": "union", "configs": configs}
        options = {**common, "config": config, "name": name}
        folder = ForeignFolder(Path("adapterhub"), options, tensors, head_options, dict(content.head))
        if _reads_back(content, folder):
            return folder
    parts = ", ".join(dict.fromkeys(repr(without_scope(edit.modification)) for edit in content.edits))
    raise DeltuneError(f"this delta cannot be written for adapterhub: its library has no options that mean {parts}")


def _reads_back(content: ExportedDelta, folder: ForeignFolder) -> bool:
    """Return whether the reader makes the same delta of a folder."""
    try:
        translation = read_adapterhub(content.anatomy, folder)
        edits = resolve(content.anatomy, translation.method, lambda: 0).edits
    except DeltuneError:
        return False
    read = {
        (_meaning(edit.modification), edit.place.name): {
            leaf: translation.tensors[f"edit.{edit.key}.{leaf}"] for leaf in edit.tensors
        }
        for edit in edits
    }
    written = {(_meaning(e.modification), e.place.name): content.full_tensors[e.key] for e in content.edits}
    return read.keys() == written.keys() and all(
        torch.equal(tensor, read[place][leaf].to(tensor))
        for place, leaves in written.items()
        for leaf, tensor in leaves.items()
    )


def _meaning(modification: Modification) -> Modification:
    """Return what a modification computes, without its places, its initial values and its dropout."""
    form = modification.form
    if isinstance(form, Bottleneck):
        form = replace(form, init="bert", zero_up=True, dropout=0.0)
    elif isinstance(form, LowRank):
        form = replace(form, dropout=0.0, init="lora")
    elif isinstance(form, Prefix):
        form = Prefix(form.length, shift_positions=bool(form.shift))
    compose = modification.compose
    compose = replace(compose, value=1.0) if isinstance(compose, Scale) and compose.learned else compose
    return replace(without_scope(modification), form=form, compose=compose)


def _candidates(content: ExportedDelta, name: str) -> Iterator[tuple[list[Config], Tensors]]:
    """Yield configurations with tensors, one for each kind of form that the delta has."""
    kinds = {Prefix: _prefixes, LowRank: _low_ranks, Bottleneck: _bottlenecks}
    forms = [edit.modification.form for edit in content.edits]
    present = [make(content, name) for kind, make in kinds.items() if any(isinstance(form, kind) for form in forms)]
    if all(isinstance(form, tuple(kinds)) for form in forms):
        for choice in product(*present) if present else ():
            tensors: Tensors = {}
            for _, of_config in choice:
                tensors |= of_config
            yield [config for config, _ in choice], tensors


def _edits(content: ExportedDelta, kind: type) -> list[ResolvedEdit]:
    return [edit for edit in content.edits if isinstance(edit.modification.form, kind)]


def _left_out(content: ExportedDelta, edits: list[ResolvedEdit]) -> list[int]:
    """Return the numbers of the layers without an edit."""
    stems = {tuple(edit.place.name.split(".")[:2]) for edit in edits}
    return [n for n, layer in enumerate(content.anatomy.layers) if (layer.stack, str(layer.index)) not in stems]


def _number(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value


def _low_ranks(content: ExportedDelta, name: str) -> Iterator[tuple[Config, Tensors]]:
    edits = _edits(content, LowRank)
    form, factor = edits[0].modification.form, edits[0].modification.compose.factor({})
    if not isinstance(form, LowRank) or not isinstance(factor, float | int):
        return
    sites = {edit.modification.site for edit in edits}
    tensors: Tensors = {}
    for path in dict.fromkeys(edit.place.target.path for edit in edits):
        parts = sorted((e for e in edits if e.place.target.path == path), key=_order_of_site)
        for leaf, ours in (("A", "down"), ("B", "up")):
            tensors[f"{path}.loras.{name}.lora_{leaf}"] = torch.cat([content.full_tensors[e.key][ours] for e in parts])
    yield {
        **_LORA, "r": form.rank, "alpha": _number(factor * form.rank), "leave_out": _left_out(content, edits),
        "attn_matrices": [site[0] for site in PROJECTIONS[:4] if site in sites],
        "selfattn_lora": not sites.isdisjoint(PROJECTIONS[:4]), "intermediate_lora": "ffn_up" in sites,
        "output_lora": "ffn_down" in sites,
    }, tensors  # fmt: skip


def _order_of_site(edit: ResolvedEdit) -> int:
    site = edit.modification.site
    return PROJECTIONS.index(site) if site in PROJECTIONS else len(PROJECTIONS)


def _prefixes(content: ExportedDelta, name: str) -> Iterator[tuple[Config, Tensors]]:
    edits = _edits(content, Prefix)
    form = edits[0].modification.form
    assert isinstance(form, Prefix)
    several = len(content.anatomy.stacks) > 1
    pools: dict[str, list[ResolvedEdit]] = {}
    for edit in edits:
        stack, _, kind, *_ = edit.place.name.split(".")
        pool = "cross" if kind == "cross" else "encoder" if several and stack == "encoder" else "self"
        pools.setdefault(pool, []).append(edit)
    base = f"{content.anatomy.base}." if content.anatomy.base else ""
    tensors = {}
    for pool, of_pool in pools.items():
        both = [content.full_tensors[edit.key][leaf] for edit in of_pool for leaf in ("keys", "values")]
        stem = f"{base}prefix_tuning.prefix_tunings.{name}.{pool}_prefix"
        tensors[f"{stem}.control_trans"] = torch.stack(both, 1).flatten()
    flags = {f"{pool}_prefix": pool in pools for pool in ("encoder", "cross")}
    yield {**_PREFIX, **flags, "prefix_length": form.length, "leave_out": _left_out(content, edits)}, tensors


def _bottlenecks(content: ExportedDelta, name: str) -> Iterator[tuple[Config, Tensors]]:
    edits = _edits(content, Bottleneck)
    modification = edits[0].modification
    form, compose = modification.form, modification.compose
    factor = compose.factor({}) if not (isinstance(compose, Scale) and compose.learned) else "learned"
    if not isinstance(form, Bottleneck) or not form.bias or not isinstance(factor, str | float | int):
        return
    kinds: set[str] = set()
    tensors: Tensors = {}
    for edit in edits:
        layer, kind, sublayer = _sublayer(content, edit)
        owner = None if sublayer is None else _owner(layer, kind, sublayer)
        if owner is None:
            raise DeltuneError(
                f"this delta cannot be written for adapterhub: where its library has the adapter of {edit.place.name} "
                "is known for layers whose norms are in them, or beside the last linear of a sub-layer"
            )
        kinds.add(kind)
        stem, first = f"{owner}.adapters.{name}", 1 if form.layer_norm else 0
        values = content.full_tensors[edit.key]
        names = {"down": f"adapter_down.{first}.weight", "down_bias": f"adapter_down.{first}.bias",
                 "up": "adapter_up.weight", "up_bias": "adapter_up.bias"}  # fmt: skip
        if form.layer_norm:
            names |= {"norm_gain": "adapter_down.0.weight", "norm_bias": "adapter_down.0.bias"}
            tensors |= {f"{stem}.adapter_norm_before.{leaf}": values[f"norm_{ours}"]
                        for leaf, ours in (("weight", "gain"), ("bias", "bias"))}  # fmt: skip
        tensors |= {f"{stem}.{leaf}": values[ours] for ours, leaf in names.items()}
        if factor == "learned":
            tensors[f"{stem}.scaling"] = values["scale"].reshape(1)
    activation = {ours: theirs for theirs, ours in reversed(ACTIVATION_NAMES.items())}[form.activation]
    config = {
        **_BOTTLENECK, "mh_adapter": "self" in kinds, "cross_adapter": "cross" in kinds,
        "output_adapter": "ffn" in kinds,
        "non_linearity": "swish" if activation == "silu" else activation, "ln_before": form.layer_norm,
        "reduction_factor": _reduction(edits[0].place.widths.in_width, form.rank),
        "scaling": factor if isinstance(factor, str) else _number(factor),
        "init_weights": "mam_adapter" if form.init == "lora" else "bert", "leave_out": _left_out(content, edits),
        "is_parallel": modification.insertion == "parallel",
    }  # fmt: skip
    for before, after, residual in ((False, True, True), (True, True, True), (True, False, False)):
        yield (
            {**config, "original_ln_before": before, "original_ln_after": after, "residual_before_ln": residual},
            tensors,
        )


def _reduction(width: int, rank: int) -> float | int:
    """Return the number by which AdapterHub divides the width, rounded down, to get the rank."""
    factor = width / rank
    return _number(factor if int(width // factor) == rank else math.nextafter(factor, 0))


def _sublayer(content: ExportedDelta, edit: ResolvedEdit) -> tuple[Layer, str, Any]:
    """Return the layer of an edit, its kind of sub-layer (self, cross, ffn), and that sub-layer."""
    stack, index, *rest = edit.place.name.split(".")
    layer = next(x for x in content.anatomy.layers if (x.stack, str(x.index)) == (stack, index))
    kind = rest[0] if rest[0] in ("self", "cross") else "ffn"
    sublayers = layer.ffns if kind == "ffn" else [a for a in layer.attentions if a.kind == kind]
    return layer, kind, next(iter(sublayers), None)


def _owner(layer: Layer, kind: str, sublayer: Any) -> str | None:
    """Return the module that has the adapter of a sub-layer in AdapterHub's classes; None where it is not known."""
    parent = str(sublayer.output.path.rpartition(".")[0])
    norms = [norm.path for norm in layer.norms]
    if parent != layer.path and sublayer.post is not None and is_inside(sublayer.post, parent):
        return parent
    if norms and all(path.rpartition(".")[0] == layer.path for path in norms):
        part = {"ffn": "output", "self": "attention", "cross": "cross_attention"}[kind]
        return f"{layer.path}.{part}_adapters"
    return None
