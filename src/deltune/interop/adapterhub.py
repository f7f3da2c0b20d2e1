"""Reads adapters that AdapterHub saved: bottlenecks, prefixes, LoRA and unions of them.

AdapterHub puts a prefix before the keys and values after it has read the cache, so positions do not shift.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

from ..anatomy.types import Anatomy, Layer, is_inside
from ..errors import DeltuneError, error_from_problems
from ..methods.compositions import Add, Composition, Gate, Scale
from ..methods.forms.attention import Prefix
from ..methods.forms.hidden import Bottleneck
from ..methods.forms.low_rank import LowRank
from ..methods.library import adapter, lora, parallel_adapter, prefix, scaled_parallel_adapter
from ..methods.sites import resolve_locations
from ..methods.spec import PROJECTIONS, Method, MethodSum, Modification
from .base import (
    ForeignFolder,
    PlacedTensors,
    Translation,
    UnusedTensors,
    locations_or_none,
    method_from_pieces,
    tensors_by_deltune_name,
)

ACTIVATION_NAMES = {
    "relu": "relu", "gelu": "gelu", "swish": "silu", "silu": "silu", "tanh": "tanh", "sigmoid": "sigmoid",
    "linear": "identity",
}  # fmt: skip
TRAINING_OPTIONS = {
    "architecture", "dropout", "init_weights", "init_weights_seed", "stochastic_depth", "leave_out", "dtype",
}  # fmt: skip
"""Options that change nothing once an adapter is trained, or that show in its tensors."""

_PHM_OPTIONS = {
    "phm_dim", "factorized_phm_W", "shared_W_phm", "shared_phm_rule", "factorized_phm_rule", "phm_c_init",
    "phm_init_range", "learn_phm", "hypercomplex_nonlinearity", "phm_rank", "phm_bias",
}  # fmt: skip
BOTTLENECK_OPTIONS = {
    *TRAINING_OPTIONS, *_PHM_OPTIONS, "mh_adapter", "output_adapter", "cross_adapter", "reduction_factor",
    "non_linearity", "original_ln_before", "original_ln_after", "ln_before", "is_parallel", "scaling",
    "residual_before_ln", "adapter_residual_before_ln", "inv_adapter_reduction_factor",
}  # fmt: skip
"""The options of a bottleneck that are read."""


@dataclass(frozen=True)
class ReadConfig:
    """One configuration as read: its pieces, and named methods that may be the same."""

    pieces: list[PlacedTensors]  # the modifications with their tensors
    known: list[Callable[[], Method]]  # functions that make the named methods


def residual_problems(config: Mapping[str, Any]) -> list[str]:
    """Return which options on norms and residuals are combined in a way that is no point of the design space."""
    if config.get("scaling", 1.0) == "channel":
        return ["deltune cannot reproduce scaling='channel'; its default is 1.0"]
    before, after = config.get("original_ln_before"), config.get("original_ln_after", True)
    residual = config.get("residual_before_ln", True)
    if config.get("is_parallel"):
        return [] if after else ["option original_ln_after=False on a parallel adapter leaves the residual out"]
    if before and after and residual is not True:
        return [f"option residual_before_ln={residual!r} adds the normed sum twice"]
    if not after and not (before and residual is False):
        return ["option original_ln_after=False without original_ln_before leaves the residual out"]
    return []


def _read_bottleneck(anatomy: Anatomy, config: Mapping[str, Any], name: str, unused: UnusedTensors) -> ReadConfig:
    parallel, before = bool(config.get("is_parallel")), bool(config.get("original_ln_before"))
    after = bool(config.get("original_ln_after", True))
    pieces: list[PlacedTensors] = []
    missing: list[str] = []
    for layer, kind, owner, postnorm in _adapter_owners(anatomy, config, name, unused):
        if parallel:
            site, insertion, x = ("ffn" if kind == "ffn" else "attention"), "parallel", "residual"
        elif before and not (postnorm and after):
            site, insertion, x = "block", "sequential", "input"
            if kind != "ffn":
                raise DeltuneError(
                    "option original_ln_before=True at an attention: its residual sum is no site of this model"
                )
        else:
            site, insertion = ("ffn" if kind == "ffn" else "attention"), "sequential"
            x = "normed" if before else "input"
            if x == "normed" and kind != "ffn":
                raise DeltuneError(
                    "option original_ln_before=True at an attention: a normed sum is a site of FFNs alone"
                )
        tensors = _take_bottleneck(owner, config, unused, missing)
        if not tensors:
            continue
        if parallel and postnorm:
            x = "input"  # without a norm before the sub-layer both are the same
        form = Bottleneck(
            tensors["down"].shape[0],
            ACTIVATION_NAMES[str(config["non_linearity"]).lower()],
            bias=True,
            layer_norm=bool(config.get("ln_before")),
        )
        if config.get("init_weights") == "mam_adapter":
            form = replace(form, init="lora")
        compose = _compose(config.get("scaling", 1.0))
        modification = Modification(site, form, insertion, compose, x=x)  # type: ignore[arg-type]
        stem = f"{layer.stack}.{layer.index}"
        location_name = {"block": f"{stem}.block", "ffn": f"{stem}.ffn"}.get(site, f"{stem}.{kind}.attention")
        places = locations_or_none(anatomy, modification)
        location = next((place for place in places if place.name == location_name), None)
        if location is None:
            raise DeltuneError(f"this model has no place {location_name}")
        pieces.append(PlacedTensors(modification, location, tensors))
    if missing or not pieces:
        raise error_from_problems("bottleneck", missing or ["no adapter in a place that this model has"])
    return ReadConfig(pieces, _candidate_bottlenecks(pieces[0].modification))


def _adapter_owners(
    anatomy: Anatomy, config: Mapping[str, Any], name: str, unused: UnusedTensors
) -> Iterator[tuple[Layer, str, str, bool]]:
    """Yield the sub-layers that the options name.

    Each is its layer, its kind (self, cross, ffn), the path of the module with its adapter, and whether a norm follows
    its residual sum.

    AdapterHub keeps the adapter in the module around the sub-layer's last linear, or under a name of its own in a
    module around the whole sub-layer.
    """
    option_names = {"self": "mh_adapter", "cross": "cross_adapter", "ffn": "output_adapter"}
    if anatomy.shared and config.get("mh_adapter"):
        raise DeltuneError("option mh_adapter=True: where layers share modules, it swaps output and residual there")
    left_out = set(config.get("leave_out") or ())
    for number, layer in enumerate(anatomy.layers):
        sublayers: list[tuple[str, Any]] = [(a.kind, a) for a in layer.attentions] + [
            ("ffn", f) for f in layer.ffns[:1]
        ]
        if any(f.pre is not None and f.pre == a.pre for f in layer.ffns for a in layer.attentions):
            raise DeltuneError(
                "attention and FFN stand side by side in this model; AdapterHub's residual differs there"
            )
        for kind, sublayer in sublayers:
            if not config.get(option_names[kind]) or number in left_out:
                continue
            owner = _owner(sublayer.output.path, layer, kind, name, unused)
            yield layer, kind, owner, sublayer.post is not None


def _owner(output: str, layer: Layer, kind: str, name: str, unused: UnusedTensors) -> str:
    """Return the path of the module that holds the adapter of one sub-layer."""
    adapter_names = {"self": ("attention_adapters",), "cross": ("cross_attention_adapters", "attention_adapters")}
    parent = output.rpartition(".")[0]
    candidates = []
    while is_inside(parent, layer.path):
        suffixes = ("", *(f".{word}" for word in adapter_names.get(kind, ("output_adapters",))))
        candidates += [f"{parent}{word}.adapters.{name}" for word in suffixes]
        parent = parent.rpartition(".")[0]
    return next((c for c in candidates if f"{c}.adapter_up.weight" in unused.tensors), candidates[0])


def _take_bottleneck(
    owner: str, config: Mapping[str, Any], unused: UnusedTensors, missing: list[str]
) -> dict[str, torch.Tensor]:
    """Return the tensors of one adapter by our names, or nothing if one is missing."""
    names = {"down": "adapter_down.0.weight", "down_bias": "adapter_down.0.bias", "up": "adapter_up.weight",
             "up_bias": "adapter_up.bias"}  # fmt: skip
    if config.get("ln_before"):  # the norm is the first module, and is saved under two names
        names |= {"down": "adapter_down.1.weight", "down_bias": "adapter_down.1.bias",
                  "norm_gain": "adapter_down.0.weight", "norm_bias": "adapter_down.0.bias"}  # fmt: skip
        unused.take_all(f"{owner}.adapter_norm_before.{leaf}" for leaf in ("weight", "bias"))
    if config.get("scaling") == "learned":
        names["scale"] = "scaling"
    axes = {"down": 2, "up": 2}
    by_name = {ours: unused.take(f"{owner}.{theirs}", axes.get(ours)) for ours, theirs in names.items()}
    missing += [f"missing tensor {owner}.{names[ours]}" for ours, tensor in by_name.items() if tensor is None]
    tensors = {ours: tensor for ours, tensor in by_name.items() if tensor is not None}
    if "scale" in tensors:
        if tensors["scale"].numel() != 1:
            raise DeltuneError(f"{owner}.scaling has shape {tuple(tensors['scale'].shape)}, it should be one number")
        tensors["scale"] = tensors["scale"].reshape(())
    return tensors if len(tensors) == len(names) else {}


def _compose(scaling: Any) -> Composition:
    if scaling == "learned":
        return Scale(1.0, learned=True)
    return Add() if scaling == 1 else Scale(float(scaling))


def _candidate_bottlenecks(modification: Modification) -> list[Callable[[], Method]]:
    """Return functions that make the named methods which may consist of such modifications."""
    form = modification.form
    assert isinstance(form, Bottleneck)
    arguments: dict[str, Any] = {"rank": form.rank, "bias": True, "activation": form.activation,
           "layer_norm": form.layer_norm, "init": form.init}  # fmt: skip
    if modification.insertion == "sequential":
        return [
            lambda: adapter("pfeiffer", **arguments),
            lambda: adapter("houlsby", **arguments),
            lambda: adapter("houlsby", **arguments, attention="self"),
        ]
    scale: Any = (
        "learned"
        if isinstance(modification.compose, Scale) and modification.compose.learned
        else modification.compose.factor({})
    )
    make = scaled_parallel_adapter if form.init == "lora" else parallel_adapter
    arguments |= {"scale": scale, "x": modification.x}
    return [lambda: make("ffn", **arguments), lambda: make("attention", **arguments)]


WEIGHT_FILES = ("adapter.safetensors", "pytorch_adapter.bin")
HEAD_CONFIG = "head_config.json"
HEAD_WEIGHTS = ("model_head.safetensors", "pytorch_model_head.bin")
PLUGIN_FILE = "adapter_interface.json"

READ_OPTIONS = {
    "bottleneck": BOTTLENECK_OPTIONS,
    "prefix_tuning": {*TRAINING_OPTIONS, "encoder_prefix", "cross_prefix", "flat", "prefix_length", "bottleneck_size",
                      "non_linearity", "shared_gating"},
    "lora": {*TRAINING_OPTIONS, "selfattn_lora", "intermediate_lora", "output_lora", "r", "alpha", "attn_matrices"},
}  # fmt: skip
"""The options that are read, by architecture; others are refused unless they are unset."""

MAX_EXPANSION = 16
"""How many times larger than its MLP a prefix may be; in a real file it is smaller."""

_NEUTRAL_VALUES = {"composition_mode": ("add",)}


def read_adapterhub(anatomy: Anatomy, folder: ForeignFolder, relative: bool = False) -> Translation:
    """Translate an AdapterHub folder for a model, which may add a bias by `relative` position to its attention."""
    options = folder.options
    if options.get("model_type") != anatomy.family:
        family = options.get("model_type")
        raise DeltuneError(
            f"{folder.where} was trained on a {family} model; this is a {anatomy.family} model", fault="model"
        )
    config_option = options.get("config")
    if not isinstance(config_option, dict):
        raise DeltuneError(
            f"{folder.where}: its options are on AdapterHub's site ({config_option!r}); save the adapter again"
        )
    configs = config_option["configs"] if config_option.get("architecture") == "union" else [config_option]
    problems = [problem for config in configs for problem in _untranslatable_options(config)]
    if relative and any(_architecture(config) == "prefix_tuning" for config in configs):
        problems.append("its prefix has relative positions in this model, that of deltune has none")
    if "version" not in options:
        problems.append("it was saved before names of activations had their present meaning; save it again")
    if (folder.where / PLUGIN_FILE).is_file():
        problems.append(
            "it was trained through AdapterHub's plug-in interface, which does not say where its adapters are"
        )
    if folder.head and folder.head_options.get("config"):
        problems.append(f"deltune cannot reproduce its flexible head; without {HEAD_CONFIG} the adapter alone is read")
    if problems:
        raise error_from_problems(str(folder.where), problems)
    name = str(options.get("name"))
    unused = UnusedTensors(anatomy, {n: t for n, t in folder.tensors.items() if ".prefix_tuning.pool." not in n})
    try:
        parts = [_READERS[_architecture(config)](anatomy, config, name, unused) for config in configs]
        method = _union(anatomy, parts)
    except DeltuneError as error:
        unused.check(folder.where, [str(error)])
        raise
    unused.check(folder.where)
    tensors = tensors_by_deltune_name(anatomy, method, [piece for part in parts for piece in part.pieces])
    return Translation(method, tensors, _read_head(anatomy, folder), _read_labels(folder))


def _union(anatomy: Anatomy, parts: list[ReadConfig]) -> Method:
    """Return the sum of all configurations, each by the name of its method where it has one."""
    methods = [method_from_pieces(anatomy, part.pieces, part.known) for part in parts]
    if len(methods) == 1:
        return methods[0]
    return MethodSum(tuple(term for method in methods for term in method.terms))


def _architecture(config: Mapping[str, Any]) -> str:
    return str(config.get("architecture") or "bottleneck")


def _untranslatable_options(config: Mapping[str, Any]) -> list[str]:
    """Return the options of one configuration that have no translation."""
    kind = _architecture(config)
    if kind not in READ_OPTIONS:
        return [f"deltune cannot reproduce architecture={kind!r}; known: {', '.join(READ_OPTIONS)} and unions of them"]
    problems = [
        f"deltune cannot reproduce {name}={value!r}; use its default"
        for name, value in config.items()
        if name not in READ_OPTIONS[kind] and value and value not in _NEUTRAL_VALUES.get(name, ())
    ]
    active = kind == "bottleneck" or (kind == "prefix_tuning" and not config.get("flat"))
    if active and str(config.get("non_linearity")).lower() not in ACTIVATION_NAMES:
        name = config.get("non_linearity")
        problems.append(f"deltune cannot reproduce non_linearity={name!r}; known: {', '.join(ACTIVATION_NAMES)}")
    if kind == "prefix_tuning" and active and config.get("non_linearity") != "tanh":
        problems.append(f"option non_linearity={config.get('non_linearity')!r}: a prefix's is tanh")
    return problems + (residual_problems(config) if kind == "bottleneck" else [])


# -- prefixes ---------------------------------------------------------------------------------------------------------


def _read_prefix(anatomy: Anatomy, config: Mapping[str, Any], name: str, unused: UnusedTensors) -> ReadConfig:
    left_out = set(config.get("leave_out") or ())
    locations: dict[str, list[Any]] = {}
    modification = Modification("heads", Prefix(int(config["prefix_length"])), compose=Gate())
    by_name = {location.name: location for location in resolve_locations(anatomy, modification)}
    for number, layer in enumerate(anatomy.layers):
        for attention in layer.attentions:
            in_encoder = len(anatomy.stacks) > 1 and layer.stack == "encoder"
            pool = "cross" if attention.kind == "cross" else "encoder" if in_encoder else "self"
            if number not in left_out and config.get(f"{pool}_prefix", True):
                locations.setdefault(pool, []).append(by_name[f"{layer.stack}.{layer.index}.{attention.kind}.heads"])
    pieces = []
    for pool, pool_locations in locations.items():
        tensor = _take_prefix(unused, name, pool, flat=bool(config.get("flat")))
        widths, length = pool_locations[0].widths, modification.form.length  # type: ignore[attr-defined]
        sizes = (length, 2 * len(pool_locations), widths.kv_heads, widths.head_width)
        if tensor.numel() != torch.Size(sizes).numel():
            raise DeltuneError(
                f"{pool}_prefix has {tensor.numel()} numbers, this model's {len(pool_locations)} layers take {sizes}"
            )
        pairs = tensor.reshape(sizes)
        for index, location in enumerate(pool_locations):
            keys, values = pairs[:, 2 * index].contiguous(), pairs[:, 2 * index + 1].contiguous()
            pieces.append(PlacedTensors(modification, location, {"keys": keys, "values": values}))
    if not pieces:
        raise DeltuneError("its options leave every layer without a prefix")
    return ReadConfig(pieces, [lambda: prefix(int(config["prefix_length"]))])


def _take_prefix(unused: UnusedTensors, name: str, pool: str, *, flat: bool) -> torch.Tensor:
    """Return all keys and values of one kind of attention: as they are, or computed by the MLP that makes them."""
    stem = re.compile(rf"(?:.*\.)?prefix_tuning\.prefix_tunings\.{re.escape(name)}\.(?:\w*_)?{pool}(?:_prefix)?\.(.*)")
    names = {match[1]: n for n in list(unused.tensors) if (match := stem.fullmatch(n))}
    mlp = ("wte.weight", "control_trans.0.weight", "control_trans.0.bias", "control_trans.2.weight",
           "control_trans.2.bias")  # fmt: skip
    leaves = ("control_trans",) if flat else mlp
    if missing := [leaf for leaf in leaves if leaf not in names]:
        raise error_from_problems("prefix", [f"missing tensor {leaf} of {pool}_prefix" for leaf in missing])
    tensors = unused.take_all(names[leaf] for leaf in leaves)
    if flat:
        return tensors[names["control_trans"]]
    rows, down, down_bias, up, up_bias = (tensors[names[leaf]].double() for leaf in leaves)
    shapes = [tuple(tensor.shape) for tensor in (rows, down, down_bias, up, up_bias)]
    if not (rows.dim() == down.dim() == up.dim() == 2) or shapes != [
        (len(rows), down.shape[1]), (len(down), rows.shape[1]), (len(down),), (len(up), len(down)), (len(up),),
    ]:  # fmt: skip
        raise DeltuneError(f"the MLP of {pool}_prefix has tensors that do not fit each other: {shapes}")
    if len(rows) * len(up) > MAX_EXPANSION * sum(tensor.numel() for tensor in (rows, down, up)):
        raise DeltuneError(
            f"the MLP of {pool}_prefix would make {len(rows):,} × {len(up):,} numbers, far more than it has"
        )
    return F.linear(torch.tanh(F.linear(rows, down, down_bias)), up, up_bias)


# -- low rank ---------------------------------------------------------------------------------------------------------


def _read_lora(anatomy: Anatomy, config: Mapping[str, Any], name: str, unused: UnusedTensors) -> ReadConfig:
    rank, dropout = int(config["r"]), float(config.get("dropout") or 0)
    scale = config["alpha"] / rank
    compose: Composition = Add() if scale == 1 else Scale(scale)
    by_path: dict[str, list[PlacedTensors]] = {}
    for site in PROJECTIONS:
        modification = Modification(site, LowRank(rank, dropout), compose=compose)
        for location in locations_or_none(anatomy, modification):
            by_path.setdefault(location.target.path, []).append(PlacedTensors(modification, location, {}))
    left_out = set(config.get("leave_out") or ())
    skipped = tuple(f"{layer.stack}.{layer.index}." for n, layer in enumerate(anatomy.layers) if n in left_out)
    sites = _lora_sites(config)
    pieces: list[PlacedTensors] = []
    missing: list[str] = []
    for path, all_parts in by_path.items():
        parts = [p for p in all_parts if p.modification.site in sites and not p.place.name.startswith(skipped)]
        if not parts:
            continue
        names = [f"{path}.loras.{name}.lora_{leaf}" for leaf in ("A", "B")]
        down, up = (unused.take(tensor, axes=2) for tensor in names)
        if down is None or up is None:
            missing += [f"missing tensor {n}" for n, tensor in zip(names, (down, up), strict=True) if tensor is None]
            continue
        if len(down) != rank * len(parts) or len(up) % len(parts):  # of a fused module the factors are joined
            shapes = f"{tuple(down.shape)} and {tuple(up.shape)}"
            raise DeltuneError(f"LoRA at {path} has factors of shapes {shapes} for {len(parts)} parts of rank {rank}")
        downs, ups = down.chunk(len(parts)), up.chunk(len(parts))
        pieces += [
            PlacedTensors(piece.modification, piece.place, {"down": d.contiguous(), "up": u.contiguous()})
            for piece, d, u in zip(parts, downs, ups, strict=True)
        ]
    if missing or not pieces:
        raise error_from_problems("LoRA", missing or ["its options leave every module of this model without LoRA"])
    used = tuple(dict.fromkeys(piece.modification.site for piece in pieces))
    at = ("query", "value") if set(used) == {"query", "value"} else used
    return ReadConfig(pieces, [lambda: lora(rank, scale=scale, at=at, dropout=dropout)])


def _lora_sites(config: Mapping[str, Any]) -> set[str]:
    """Return the sites of LoRA, which AdapterHub's options name by kinds of modules and by letters."""
    letters = config.get("attn_matrices", ("q", "v")) or ()
    sites = {site for site in ("query", "key", "value", "output") if site[0] in letters}
    if not config.get("selfattn_lora", True):
        sites.clear()
    others = {"ffn_up": "intermediate_lora", "ffn_down": "output_lora"}
    return sites | {site for site, option in others.items() if config.get(option)}


_READERS: Mapping[str, Callable[[Anatomy, Mapping[str, Any], str, UnusedTensors], ReadConfig]] = {
    "bottleneck": _read_bottleneck, "prefix_tuning": _read_prefix, "lora": _read_lora,
}  # fmt: skip


# -- heads ------------------------------------------------------------------------------------------------------------


def _read_head(anatomy: Anatomy, folder: ForeignFolder) -> dict[str, torch.Tensor]:
    """Return the head that was saved with a class of transformers, by its names; a vocabulary projection is no head."""
    if not folder.head:
        return {}
    unused = UnusedTensors(anatomy, folder.head)
    tensors = unused.take_all([t.name for t in anatomy.tensors if t.area == "head"])
    unused.check(folder.where)
    return tensors


def _read_labels(folder: ForeignFolder) -> tuple[str, ...]:
    label_ids = folder.head_options.get("label2id") or {}
    return tuple(sorted(label_ids, key=lambda label: int(label_ids[label]))) if folder.head else ()
