"""AdapterHub's bottlenecks: the point of the design space that their options come down to, and their tensors.

h is a sub-layer's output after dropout, r the residual stream beside it, LN the norm after their sum (none in pre-norm
models). A(u) = s (f(u W_down + b) W_up + b'). What its options come down to:
  sequential, original_ln_before=False:  LN(h + A(h) + r)          the adapter at the sub-layer's output
  …True, post-norm:                      LN(h + A(LN(h + r)) + r)  the same with x="normed"
  …True, pre-norm:                       h + r + A(h + r)          the adapter at the layer's output (FFN only)
  original_ln_after=False, residual_before_ln=False: u + A(u), u = LN(h + r) or h + r: at the layer's output (FFN only)
  parallel:                              LN(h + A(r) + r)          x="residual"
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..algebra.elements import Method, Modification
from ..algebra.recipes import adapter, parallel_adapter, scaled_parallel_adapter
from ..anatomy.values import Anatomy, Layer
from ..errors import DeltuneError, all_problems
from ..mathematics.compositions import Add, Composition, Scale
from ..mathematics.forms import Bottleneck
from .foreign import Left, Piece, sites_of

ACTIVATIONS = {
    "relu": "relu", "gelu": "gelu", "swish": "silu", "silu": "silu", "tanh": "tanh", "sigmoid": "sigmoid",
    "linear": "identity",
}  # fmt: skip
IN_TRAINING = {"architecture", "dropout", "init_weights", "init_weights_seed", "stochastic_depth", "leave_out",
               "dtype"}  # fmt: skip
"""Options that change nothing once an adapter is trained, and those that its tensors show."""

_OF_PHM = {"phm_dim", "factorized_phm_W", "shared_W_phm", "shared_phm_rule", "factorized_phm_rule", "phm_c_init",
           "phm_init_range", "learn_phm", "hypercomplex_nonlinearity", "phm_rank", "phm_bias"}  # fmt: skip
OPTIONS = {*IN_TRAINING, *_OF_PHM, "mh_adapter", "output_adapter", "cross_adapter", "reduction_factor", "non_linearity",
           "original_ln_before", "original_ln_after", "ln_before", "is_parallel", "scaling", "residual_before_ln",
           "adapter_residual_before_ln", "inv_adapter_reduction_factor"}  # fmt: skip
"""The options that are read."""


@dataclass(frozen=True)
class Found:
    """What one configuration comes down to: its pieces, and named methods that may be it."""

    pieces: list[Piece]
    known: list[Callable[[], Method]]


def residual_problems(config: Mapping[str, Any]) -> list[str]:
    """Combinations of the options on norms and residuals that are no point of our design space."""
    if config.get("scaling", 1.0) == "channel":
        return ["option scaling='channel' has no translation"]
    before, after = config.get("original_ln_before"), config.get("original_ln_after", True)
    residual = config.get("residual_before_ln", True)
    if config.get("is_parallel"):
        return [] if after else ["option original_ln_after=False on a parallel adapter leaves the residual out"]
    if before and after and residual is not True:
        return [f"option residual_before_ln={residual!r} adds the normed sum twice"]
    if not after and not (before and residual is False):
        return ["option original_ln_after=False without original_ln_before leaves the residual out"]
    return []


def bottleneck(anatomy: Anatomy, config: Mapping[str, Any], name: str, left: Left) -> Found:
    parallel, before = bool(config.get("is_parallel")), bool(config.get("original_ln_before"))
    after = bool(config.get("original_ln_after", True))
    pieces: list[Piece] = []
    missing: list[str] = []
    for layer, kind, owner, postnorm in _owners(anatomy, config, name, left):
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
        found = _tensors(owner, config, left, missing)
        if not found:
            continue
        if parallel and postnorm:
            x = "input"  # the same there
        form = Bottleneck(
            found["down"].shape[0],
            ACTIVATIONS[str(config["non_linearity"]).lower()],
            True,
            bool(config.get("ln_before")),
        )
        if config.get("init_weights") == "mam_adapter":
            form = replace(form, init="lora")
        modification = Modification(site, form, insertion, _compose(config.get("scaling", 1.0)), x=x)  # type: ignore[arg-type]
        stem = f"{layer.stack}.{layer.index}"
        wanted = {"block": f"{stem}.block", "ffn": f"{stem}.ffn"}.get(site, f"{stem}.{kind}.attention")
        place = next((p for p in sites_of(anatomy, modification) if p.name == wanted), None)
        if place is None:
            raise DeltuneError(f"this model has no place {wanted}")
        pieces.append(Piece(modification, place, found))
    if missing or not pieces:
        raise all_problems("bottleneck", missing or ["no adapter in a place that this model has"])
    return Found(pieces, _named_bottlenecks(pieces[0].modification))


def _owners(
    anatomy: Anatomy, config: Mapping[str, Any], name: str, left: Left
) -> Iterator[tuple[Layer, str, str, bool]]:
    """For every sub-layer that the options name: its layer, its kind (self, cross, ffn), the module with its adapter,
    and whether a norm follows its residual sum.

    AdapterHub keeps the adapter in the module around the sub-layer's last linear, or under a name of its own in a
    module around the whole sub-layer.
    """
    asked = {"self": "mh_adapter", "cross": "cross_adapter", "ffn": "output_adapter"}
    if anatomy.shared and config.get("mh_adapter"):
        raise DeltuneError("option mh_adapter=True: where layers share modules, it swaps output and residual there")
    left_out = set(config.get("leave_out") or ())
    for number, layer in enumerate(anatomy.layers):
        parts: list[tuple[str, Any]] = [(a.kind, a) for a in layer.attentions] + [("ffn", f) for f in layer.ffns[:1]]
        if any(f.pre is not None and f.pre == a.pre for f in layer.ffns for a in layer.attentions):
            raise DeltuneError(
                "attention and FFN stand side by side in this model; AdapterHub's residual differs there"
            )
        for kind, sublayer in parts:
            if not config.get(asked[kind]) or number in left_out:
                continue
            owner = _owner(sublayer.output.path, layer, kind, name, left)
            yield layer, kind, owner, sublayer.post is not None


def _owner(output: str, layer: Layer, kind: str, name: str, left: Left) -> str:
    words = {"self": ("attention_adapters",), "cross": ("cross_attention_adapters", "attention_adapters")}
    around = output.rpartition(".")[0]
    candidates = []
    while around.startswith(layer.path):
        own = ("", *(f".{word}" for word in words.get(kind, ("output_adapters",))))
        candidates += [f"{around}{word}.adapters.{name}" for word in own]
        around = around.rpartition(".")[0]
    return next((c for c in candidates if f"{c}.adapter_up.weight" in left.tensors), candidates[0])


def _tensors(owner: str, config: Mapping[str, Any], left: Left, missing: list[str]) -> dict[str, torch.Tensor]:
    names = {"down": "adapter_down.0.weight", "down_bias": "adapter_down.0.bias", "up": "adapter_up.weight",
             "up_bias": "adapter_up.bias"}  # fmt: skip
    if config.get("ln_before"):  # a norm stands first, under two names
        names |= {"down": "adapter_down.1.weight", "down_bias": "adapter_down.1.bias",
                  "norm_gain": "adapter_down.0.weight", "norm_bias": "adapter_down.0.bias"}  # fmt: skip
        left.take_all(f"{owner}.adapter_norm_before.{leaf}" for leaf in ("weight", "bias"))
    if config.get("scaling") == "learned":
        names["scale"] = "scaling"
    axes = {"down": 2, "up": 2}
    found = {ours: left.take(f"{owner}.{theirs}", axes.get(ours)) for ours, theirs in names.items()}
    missing += [f"missing tensor {owner}.{names[ours]}" for ours, tensor in found.items() if tensor is None]
    given = {ours: tensor for ours, tensor in found.items() if tensor is not None}
    if "scale" in given:
        if given["scale"].numel() != 1:
            raise DeltuneError(f"{owner}.scaling has shape {tuple(given['scale'].shape)}, it should be one number")
        given["scale"] = given["scale"].reshape(())
    return given if len(given) == len(names) else {}


def _compose(scaling: Any) -> Composition:
    if scaling == "learned":
        return Scale(1.0, learned=True)
    return Add() if scaling == 1 else Scale(float(scaling))


def _named_bottlenecks(m: Modification) -> list[Callable[[], Method]]:
    form = m.form
    assert isinstance(form, Bottleneck)
    own = {"rank": form.rank, "bias": True, "activation": form.activation, "layer_norm": form.layer_norm,
           "init": form.init}  # fmt: skip
    if m.insertion == "sequential":
        return [
            lambda: adapter("pfeiffer", **own),
            lambda: adapter("houlsby", **own),
            lambda: adapter("houlsby", **own, attention="self"),
        ]
    scale: Any = "learned" if isinstance(m.compose, Scale) and m.compose.learned else m.compose.factor({})
    make = scaled_parallel_adapter if form.init == "lora" else parallel_adapter
    return [lambda: make("ffn", scale=scale, x=m.x, **own), lambda: make("attention", scale=scale, x=m.x, **own)]
