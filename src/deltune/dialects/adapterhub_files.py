"""AdapterHub's saved adapters read: bottlenecks, prefixes, LoRA and unions of them.

A prefix stands before the keys and values after the cache was read, so positions do not move.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional as F

from ..algebra.elements import PROJECTIONS, Method, Modification, Sum
from ..algebra.recipes import lora, prefix
from ..algebra.sites import places
from ..anatomy.values import Anatomy
from ..errors import DeltuneError, all_problems
from ..mathematics.compositions import Add, Composition, Gate, Scale
from ..mathematics.forms import LowRank
from ..mathematics.heads import Prefix
from .adapterhub_bottlenecks import ACTIVATIONS, IN_TRAINING, OPTIONS, Found, bottleneck, residual_problems
from .foreign import Folder, Left, Piece, Translation, express, numbered, sites_of

WEIGHTS = ("adapter.safetensors", "pytorch_adapter.bin")
HEAD_CONFIG = "head_config.json"
HEAD_WEIGHTS = ("model_head.safetensors", "pytorch_model_head.bin")
INTERFACE = "adapter_interface.json"

READ = {
    "bottleneck": OPTIONS,
    "prefix_tuning": {*IN_TRAINING, "encoder_prefix", "cross_prefix", "flat", "prefix_length", "bottleneck_size",
                      "non_linearity", "shared_gating"},
    "lora": {*IN_TRAINING, "selfattn_lora", "intermediate_lora", "output_lora", "r", "alpha", "attn_matrices"},
}  # fmt: skip
"""The options that are read, by architecture; any other must be unset."""

MOST_MADE = 16
"""Numbers of a prefix for each number of the MLP that makes it. A sound MLP makes fewer than it has."""

_NEUTRAL = {"composition_mode": ("add",)}


def read(anatomy: Anatomy, folder: Folder, relative: bool = False) -> Translation:
    """What an AdapterHub folder says on this model. Errors: an architecture or options without a translation, all of
    them; tensors that are missing or extra; a flexible head. relative: the model adds a bias by relative position."""
    options = folder.options
    if options.get("model_type") != anatomy.family:
        family = options.get("model_type")
        raise DeltuneError(f"{folder.where} was trained on a {family} model; this is a {anatomy.family} model")
    whole = options.get("config")
    if not isinstance(whole, dict):
        raise DeltuneError(f"{folder.where}: its options lie on AdapterHub's site ({whole!r}); save the adapter anew")
    configs = whole["configs"] if whole.get("architecture") == "union" else [whole]
    wrong = [problem for config in configs for problem in _problems(config)]
    if relative and any(_architecture(config) == "prefix_tuning" for config in configs):
        wrong.append("its prefix takes part in the relative positions of this model, ours has bias 0")
    if "version" not in options:
        wrong.append("it was written before names of activations had their present meaning; save it anew")
    if (folder.where / INTERFACE).is_file():
        wrong.append("it was trained through AdapterHub's plug-in interface, whose places are not known here")
    if folder.head and folder.head_options.get("config"):
        wrong.append(f"its flexible head has no translation; without {HEAD_CONFIG} the adapter alone is read")
    if wrong:
        raise all_problems(str(folder.where), wrong)
    name = str(options.get("name"))
    left = Left(anatomy, {n: t for n, t in folder.tensors.items() if ".prefix_tuning.pool." not in n})
    try:
        found = [_READERS[_architecture(config)](anatomy, config, name, left) for config in configs]
        method = _method(anatomy, found)
    except DeltuneError as error:
        left.check(folder.where, error)
        raise
    left.check(folder.where)
    numbers = numbered(anatomy, method, [piece for one in found for piece in one.pieces])
    return Translation(method, numbers, _head(anatomy, folder), _labels(folder))


def _method(anatomy: Anatomy, found: list[Found]) -> Method:
    """The union of all; the table's name for it, where it has one."""
    methods = [express(anatomy, one.pieces, one.known) for one in found]
    if len(methods) == 1:
        return methods[0]
    return Sum(tuple(term for method in methods for term in method.terms))


def _architecture(config: Mapping[str, Any]) -> str:
    return str(config.get("architecture") or "bottleneck")


def _problems(config: Mapping[str, Any]) -> list[str]:
    """Every option of one configuration that has no translation."""
    kind = _architecture(config)
    if kind not in READ:
        return [f"architecture {kind!r} has no translation; known: {', '.join(READ)} and unions of them"]
    wrong = [
        f"option {name}={value!r} has no translation"
        for name, value in config.items()
        if name not in READ[kind] and value and value not in _NEUTRAL.get(name, ())
    ]
    active = kind == "bottleneck" or (kind == "prefix_tuning" and not config.get("flat"))
    if active and str(config.get("non_linearity")).lower() not in ACTIVATIONS:
        wrong.append(f"option non_linearity={config.get('non_linearity')!r} has no translation")
    if kind == "prefix_tuning" and active and config.get("non_linearity") != "tanh":
        wrong.append(f"option non_linearity={config.get('non_linearity')!r}: a prefix's is tanh")
    return wrong + (residual_problems(config) if kind == "bottleneck" else [])


# -- prefixes ---------------------------------------------------------------------------------------------------------


def _prefixes(anatomy: Anatomy, config: Mapping[str, Any], name: str, left: Left) -> Found:
    left_out = set(config.get("leave_out") or ())
    pools: dict[str, list[Any]] = {}
    modification = Modification("heads", Prefix(int(config["prefix_length"])), compose=Gate())
    at = {place.name: place for place in places(anatomy, modification)}
    for number, layer in enumerate(anatomy.layers):
        for a in layer.attentions:
            inside = len(anatomy.stacks) > 1 and layer.stack == "encoder"
            word = "cross" if a.kind == "cross" else "encoder" if inside else "self"
            if number not in left_out and config.get(f"{word}_prefix", True):
                pools.setdefault(word, []).append(at[f"{layer.stack}.{layer.index}.{a.kind}.heads"])
    pieces = []
    for word, chosen in pools.items():
        found = _pool(left, name, word)
        if found is None:
            raise DeltuneError(f"missing tensors of {word}_prefix")
        widths, length = chosen[0].widths, modification.form.length  # type: ignore[attr-defined]
        sizes = (length, 2 * len(chosen), widths.kv_heads, widths.head_width)
        if found.numel() != torch.Size(sizes).numel():
            raise DeltuneError(
                f"{word}_prefix has {found.numel()} numbers, this model's {len(chosen)} layers take {sizes}"
            )
        pairs = found.reshape(sizes)
        for index, place in enumerate(chosen):
            keys, values = pairs[:, 2 * index].contiguous(), pairs[:, 2 * index + 1].contiguous()
            pieces.append(Piece(modification, place, {"keys": keys, "values": values}))
    if not pieces:
        raise DeltuneError("a prefix in no layer")
    return Found(pieces, [lambda: prefix(int(config["prefix_length"]))])


def _pool(left: Left, name: str, word: str) -> torch.Tensor | None:
    """All keys and values of one kind of attention: as they are, or what the MLP makes of its embedding."""
    stem = re.compile(rf"(?:.*\.)?prefix_tuning\.prefix_tunings\.{re.escape(name)}\.(?:\w*_)?{word}(?:_prefix)?\.(.*)")
    mine = {found[1]: n for n in list(left.tensors) if (found := stem.fullmatch(n))}
    t = {leaf: left.take(n) for leaf, n in mine.items()}
    if "control_trans" in t:
        return t["control_trans"]
    wanted = ("wte.weight", "control_trans.0.weight", "control_trans.0.bias", "control_trans.2.weight",
              "control_trans.2.bias")  # fmt: skip
    rows, down, down_bias, up, up_bias = (t.get(leaf) for leaf in wanted)
    if rows is None or down is None or up is None:
        return None
    shapes = [None if tensor is None else tuple(tensor.shape) for tensor in (rows, down, down_bias, up, up_bias)]
    if not (rows.dim() == down.dim() == up.dim() == 2) or shapes != [
        (len(rows), down.shape[1]), (len(down), rows.shape[1]), down_bias if down_bias is None else (len(down),),
        (len(up), len(down)), up_bias if up_bias is None else (len(up),),
    ]:  # fmt: skip
        raise DeltuneError(f"the MLP of {word}_prefix has tensors that do not fit each other: {shapes}")
    if len(rows) * len(up) > MOST_MADE * sum(tensor.numel() for tensor in (rows, down, up)):
        raise DeltuneError(f"the MLP of {word}_prefix would make {len(rows):,} × {len(up):,} numbers of a few")
    double = {leaf: tensor.double() for leaf, tensor in t.items() if tensor is not None}
    inner = torch.tanh(F.linear(double[wanted[0]], double[wanted[1]], double.get(wanted[2])))
    return F.linear(inner, double[wanted[3]], double.get(wanted[4]))


# -- low rank ---------------------------------------------------------------------------------------------------------


def _low_rank(anatomy: Anatomy, config: Mapping[str, Any], name: str, left: Left) -> Found:
    rank, dropout = int(config["r"]), float(config.get("dropout") or 0)
    scale = config["alpha"] / rank
    compose: Composition = Add() if scale == 1 else Scale(scale)
    by_path: dict[str, list[Piece]] = {}
    for site in PROJECTIONS:
        modification = Modification(site, LowRank(rank, dropout), compose=compose)
        for place in sites_of(anatomy, modification):
            by_path.setdefault(place.target.path, []).append(Piece(modification, place, {}))
    words = config.get("attn_matrices") or ()
    chosen = {site for site in ("query", "key", "value", "output") if site[0] in words}
    pieces: list[Piece] = []
    for path, own in by_path.items():
        down, up = (left.take(f"{path}.loras.{name}.lora_{leaf}", axes=2) for leaf in ("A", "B"))
        if down is None or up is None:
            continue
        if own[0].place.target.columns is not None:  # one pair of factors a chosen part, one after the other
            own = [piece for piece in own if piece.modification.site in chosen]
        if not own or len(down) != rank * len(own) or len(up) % len(own):
            shapes = f"{tuple(down.shape)} and {tuple(up.shape)}"
            raise DeltuneError(f"LoRA at {path} has factors of shapes {shapes} for {len(own)} parts of rank {rank}")
        downs, ups = down.chunk(len(own)), up.chunk(len(own))
        pieces += [
            Piece(piece.modification, piece.place, {"down": d.contiguous(), "up": u.contiguous()})
            for piece, d, u in zip(own, downs, ups, strict=True)
        ]
    _check_layers(anatomy, config, pieces)
    sites = tuple(dict.fromkeys(piece.modification.site for piece in pieces))
    at = ("query", "value") if set(sites) == {"query", "value"} else sites
    return Found(pieces, [lambda: lora(rank, scale, at, dropout=dropout)])


def _check_layers(anatomy: Anatomy, config: Mapping[str, Any], pieces: list[Piece]) -> None:
    """Every layer that is not left out must have what the others of its stack have."""
    left_out = set(config.get("leave_out") or ())
    kept = [layer for number, layer in enumerate(anatomy.layers) if number not in left_out]
    names = {piece.place.name for piece in pieces}
    rest = {(name.split(".")[0], name.split(".", 2)[2]) for name in names}
    wanted = {f"{layer.stack}.{layer.index}.{tail}" for layer in kept for stack, tail in rest if stack == layer.stack}
    if not pieces or wanted - names:
        raise all_problems(
            "LoRA", [f"missing tensors at {place}" for place in sorted(wanted - names)] or ["no tensors"]
        )


_READERS: Mapping[str, Callable[[Anatomy, Mapping[str, Any], str, Left], Found]] = {
    "bottleneck": bottleneck, "prefix_tuning": _prefixes, "lora": _low_rank,
}  # fmt: skip


# -- heads ------------------------------------------------------------------------------------------------------------


def _head(anatomy: Anatomy, folder: Folder) -> dict[str, torch.Tensor]:
    """A head that was saved with a class of transformers, by its names; a vocabulary projection is no head."""
    if not folder.head:
        return {}
    left = Left(anatomy, folder.head)
    found = left.take_all([t.name for t in anatomy.tensors if t.area == "head"])
    left.check(folder.where)
    return found


def _labels(folder: Folder) -> tuple[str, ...]:
    named = folder.head_options.get("label2id") or {}
    return tuple(sorted(named, key=lambda label: int(named[label]))) if folder.head else ()
