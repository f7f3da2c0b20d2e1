"""The named methods that train what the model already has, each a few lines over the elements. LN is LN-tuning."""

from __future__ import annotations

from typing import Literal

from ..errors import DeltuneError
from ..mathematics.forms import Vector
from . import elements
from .elements import LayersArg, Modification, Selection, named


@named
def full() -> tuple[Modification | Selection, ...]:
    """W: every tensor of the model is trained."""
    return (Selection(("all",), elements.AREAS),)


@named
def head() -> tuple[Modification | Selection, ...]:
    """Nothing but the task head is trained."""
    return ()


@named
def layernorm(
    terms: Literal["both", "gain", "bias"] = "both",
    of: Literal["both", "attention", "ffn"] = "both",
    layers: LayersArg = "all",
    embedding: bool | None = None,
    final: bool | None = None,
    stack: Literal["all", "encoder", "decoder"] = "all",
) -> tuple[Modification | Selection, ...]:
    """g ⊙ (x - μ)/σ + b: the gain g and bias b of the norms, in place (LN §3.1).

    of: norms of the attentions (query, key and cross-attention norms included) or of the FFNs. embedding, final: the
    norms outside the layers; on when neither `of` nor `layers` is restricted. Error: terms="bias" without any bias.
    """
    whole = of == "both" and layers == "all"
    areas: tuple[str, ...] = ("layers",)
    areas += ("embedding",) if (whole if embedding is None else embedding) else ()
    areas += ("final",) if (whole if final is None else final) else ()
    roles = {"both": ("norm.gain", "norm.bias"), "gain": ("norm.gain",), "bias": ("norm.bias",)}[terms]
    return (Selection(roles, areas, of, layers, stack),)


@named
def bitfit(
    which: Literal["all", "layers", "linear", "query+ffn_up", "norm"] = "all",
    add_missing: bool = False,
    layers: LayersArg = "all",
) -> tuple[Modification | Selection, ...]:
    """b: existing biases alone are trained (Ben Zaken et al. 2022).

    which: all (every bias of the base model, pooler included), layers (linears and norms of the layers), linear
    (linears of the layers), query+ffn_up (two a layer), norm (the norms of the layers). add_missing: biases that start
    at 0 where a linear or norm that `which` names in the layers has none. Error: a model without biases otherwise.
    """
    if which == "all" and layers != "all":
        raise DeltuneError("bitfit(which='all') reaches beyond the layers; give which='layers' with layers=")
    sites = {"all": (*_LINEARS, "norm"), "layers": (*_LINEARS, "norm"), "norm": ("norm",), "linear": _LINEARS}
    sites["query+ffn_up"] = ("query", "ffn_up")
    missing = [_bias(site, "unbiased", layers, True) for site in sites[which]] if add_missing else []
    if which == "query+ffn_up":  # a part of a fused projection's bias is no tensor of its own, a vector added there is
        return (*(_bias(site, "biased", layers, add_missing) for site in sites[which]), *missing)
    of_layers = {"layers": ("norm.bias", "linear.bias"), "linear": ("linear.bias",), "norm": ("norm.bias",)}
    of_base = tuple(area for area in elements.AREAS if area != "vocabulary")
    roles, areas = (("bias",), of_base) if which == "all" else (of_layers[which], ("layers",))
    return (Selection(roles, areas, layers=layers, optional=add_missing), *missing)


_LINEARS = ("query", "key", "value", "output", "ffn_up", "ffn_down")


def _bias(site: str, where: Literal["biased", "unbiased"], layers: LayersArg, optional: bool) -> Modification:
    insertion: Literal["parallel", "sequential"] = "sequential" if site == "norm" else "parallel"
    return Modification(site, Vector(where), insertion, layers=layers, optional=optional)


@named
def diff_pruning(
    sparsity: float = 0.005, over: Literal["linear", "all"] = "linear", layers: LayersArg = "all"
) -> tuple[Modification | Selection, ...]:
    """W + z ⊙ δ: a difference of which only the share `sparsity` is left in the end (Guo et al. 2021).

    While the first half of training runs, every scalar has a gate z under a growing L0 penalty (hard concrete, β = 2/3,
    γ = -0.1, ζ = 1.1); then the largest |z δ| are kept, and trained on under their fixed mask. over: the weights and
    biases of the layers' linears, or all tensors of the model. A loop of your own calls tuned.advance(share).
    """
    if over == "all":
        if layers != "all":
            raise DeltuneError("diff_pruning(over='all') reaches beyond the layers; give over='linear' with layers=")
        return (Selection(("all",), elements.AREAS, sparsity=sparsity),)
    return (Selection(("linear.weight", "linear.bias"), layers=layers, sparsity=sparsity),)
