"""The named methods, each a few lines over the algebra. LN is LN-tuning, UV Towards a Unified View, AP APET."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from typing import Any, Literal

from . import algebra, expressions
from .algebra import Add, Composition, Gate, LayersArg, Method, Modification, Named, Scale, Selection
from .errors import DeltuneError, unknown
from .forms import Bottleneck, Init, LowRank, Prefix, Prompt, Vector

Site = str | tuple[str, ...]
Learned = float | str
"""A number, "learned" (starts at 1) or "learned(4)" (starts at 4)."""


def _named(make: Callable[..., tuple[Modification | Selection, ...]]) -> Callable[..., Named]:
    """A function that returns parts becomes one that returns the named method, with its arguments on record."""
    shape = signature(make)

    @wraps(make)
    def method(*args: Any, **kwargs: Any) -> Named:
        try:
            bound = shape.bind(*args, **kwargs)
        except TypeError as error:
            raise DeltuneError(f"{make.__name__}: {error}; it takes {expressions.usage(make)}") from None
        bound.apply_defaults()
        arguments = {key: tuple(v) if isinstance(v, list) else v for key, v in bound.arguments.items()}
        given = tuple((key, v) for key, v in arguments.items() if v != shape.parameters[key].default)
        return Named(make.__name__, given, tuple(arguments.items()), make(**arguments))

    return method


def _sites(at: Site, known: tuple[str, ...]) -> tuple[str, ...]:
    sites = (at,) if isinstance(at, str) else tuple(at)
    for site in sites:
        if site not in known:
            raise DeltuneError(unknown("site", site, known))
    if not sites:
        raise DeltuneError(f"at is empty; give one or more of {', '.join(known)}")
    return sites


def _compose(scale: Learned) -> Composition:
    if isinstance(scale, str):
        inner = scale.removeprefix("learned").strip("()") if scale.startswith("learned") else ""
        if scale == "learned":
            return Scale(1.0, learned=True)
        try:
            return Scale(float(inner), learned=True)
        except ValueError:
            raise DeltuneError(f"scale={scale!r}: give a number, 'learned' or 'learned(4)'") from None
    return Add() if scale == 1 else Scale(float(scale))


# -- whole tensors ----------------------------------------------------------------------------------------------------


@_named
def full() -> tuple[Modification | Selection, ...]:
    """W: every tensor of the model is trained."""
    return (Selection(("all",), algebra.AREAS),)


@_named
def head() -> tuple[Modification | Selection, ...]:
    """Nothing but the task head is trained."""
    return ()


@_named
def layernorm(
    terms: Literal["both", "gain", "bias"] = "both",
    of: Literal["both", "attention", "ffn"] = "both",
    layers: LayersArg = "all",
    embedding: bool | None = None,
    final: bool | None = None,
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
    return (Selection(roles, areas, of, layers),)


@_named
def bitfit(
    which: Literal["all", "layers", "linear", "query+ffn_up", "norm"] = "all", layers: LayersArg = "all"
) -> tuple[Modification | Selection, ...]:
    """b: existing biases alone are trained (Ben Zaken et al. 2022).

    which: all (every bias of the base model, pooler included), layers (linears and norms of the layers), linear
    (linears of the layers), query+ffn_up (two a layer), norm (the norms of the layers). Error: a model without biases.
    """
    if which == "all":
        if layers != "all":
            raise DeltuneError("bitfit(which='all') reaches beyond the layers; give which='layers' with layers=")
        return (Selection(("bias",), tuple(area for area in algebra.AREAS if area != "vocabulary")),)
    if which == "query+ffn_up":  # a part of a fused projection's bias is no tensor of its own, a vector added there is
        return tuple(Modification(site, Vector(existing=True), layers=layers) for site in ("query", "ffn_up"))
    roles = {"layers": ("norm.bias", "linear.bias"), "linear": ("linear.bias",), "norm": ("norm.bias",)}[which]
    return (Selection(roles, ("layers",), layers=layers),)


# -- bottlenecks ------------------------------------------------------------------------------------------------------


@_named
def adapter(
    style: Literal["houlsby", "pfeiffer"] = "houlsby",
    rank: int = 16,
    bias: bool = False,
    activation: str = "relu",
    layer_norm: bool = False,
    dropout: float = 0.0,
    init: Init = "bert",
    zero_up: bool = True,
    layers: LayersArg = "all",
    stack: Literal["all", "encoder", "decoder"] = "all",
    attention: Literal["all", "self", "cross"] = "all",
) -> tuple[Modification | Selection, ...]:
    """h + f(h W_down) W_up after attention and FFN (houlsby), or after the FFN alone (pfeiffer) (UV eq. 4).

    pfeiffer in post-norm models stands after the FFN's add & norm, and that norm is applied again, as its authors do.
    """
    form = Bottleneck(rank, activation, bias, layer_norm, dropout, init, zero_up)
    after_ffn = Modification(
        "ffn", form, "sequential", layers=layers, stack=stack, x="normed" if style == "pfeiffer" else "input"
    )
    if style == "pfeiffer":
        return (after_ffn,)
    return (Modification("attention", form, "sequential", layers=layers, stack=stack, attention=attention), after_ffn)


@_named
def parallel_adapter(
    at: Site = "ffn",
    rank: int = 16,
    scale: Learned = 1,
    bias: bool = False,
    activation: str = "relu",
    layer_norm: bool = False,
    dropout: float = 0.0,
    init: Init = "bert",
    x: Literal["input", "residual"] = "input",
    layers: LayersArg = "all",
    stack: Literal["all", "encoder", "decoder"] = "all",
    attention: Literal["all", "self", "cross"] = "all",
) -> tuple[Modification | Selection, ...]:
    """h + s f(x W_down) W_up at "ffn", "attention" or "heads" (before W_o), or several of them (UV §3.3)."""
    form = Bottleneck(rank, activation, bias, layer_norm, dropout, init)
    return tuple(
        Modification(site, form, "parallel", _compose(scale), layers, stack, attention, x)
        for site in _sites(at, ("ffn", "attention", "heads"))
    )


@_named
def scaled_parallel_adapter(
    at: Site = "ffn",
    rank: int = 16,
    scale: Learned = 4,
    bias: bool = False,
    activation: str = "relu",
    layer_norm: bool = False,
    dropout: float = 0.0,
    init: Init = "lora",
    x: Literal["input", "residual"] = "input",
    layers: LayersArg = "all",
    stack: Literal["all", "encoder", "decoder"] = "all",
    attention: Literal["all", "self", "cross"] = "all",
) -> tuple[Modification | Selection, ...]:
    """h + s f(x W_down) W_up with s = 4 and LoRA's initialisation (UV §3.3, §4.5)."""
    return parallel_adapter(
        at, rank, scale, bias, activation, layer_norm, dropout, init, x, layers, stack, attention
    ).parts


# -- prefixes and prompts ---------------------------------------------------------------------------------------------


@_named
def prefix(
    length: int = 16,
    reparameterise: int | None = None,
    gate: bool = True,
    layers: LayersArg = "all",
    stack: Literal["all", "encoder", "decoder"] = "all",
    attention: Literal["all", "self", "cross"] = "all",
) -> tuple[Modification | Selection, ...]:
    """softmax(q [P_k; K]ᵀ) [P_v; V]: l trained keys and values before those of every attention (UV eq. 5, 7).

    reparameterise=W: an MLP of inner width W makes them while training, folded when saved (UV §A.3). gate=False:
    h + softmax(q P_kᵀ) P_v (UV table 4). Positions do not shift; every query sees the prefix.
    """
    form = Prefix(length, reparameterise)
    return (Modification("heads", form, "parallel", Gate() if gate else Add(), layers, stack, attention),)


@_named
def prompt(
    length: int = 100, init_from: tuple[int, ...] | None = None, positions: Literal["shift", "none"] = "shift"
) -> tuple[Modification | Selection, ...]:
    """[P; E(x)]: l trained vectors before the input embeddings (Lester et al. 2021), of the encoder where there is one.

    init_from: token ids whose embeddings they start from, else N(0, 0.02). positions: "shift" (they take positions
    0 ... l-1 and the text follows) or "none" (no position; the text keeps its own).
    """
    return (Modification("embedding", Prompt(length, init_from, positions)),)


# -- low rank ---------------------------------------------------------------------------------------------------------


@_named
def lora(
    rank: int = 8,
    scale: float = 1,
    at: Site = ("query", "value"),
    alpha: float | None = None,
    dropout: float = 0.0,
    layers: LayersArg = "all",
    stack: Literal["all", "encoder", "decoder"] = "all",
    attention: Literal["all", "self", "cross"] = "all",
) -> tuple[Modification | Selection, ...]:
    """h + s x W_down W_up at projections (UV eq. 6; Hu et al. 2021).

    at: query, key, value, output, ffn_up, ffn_down, or "ffn" for all linears of the FFN. alpha: s = alpha / rank.
    """
    if alpha is not None:
        if scale != 1:
            raise DeltuneError("lora: give scale or alpha, not both (scale = alpha / rank)")
        scale = alpha / rank
    sites: list[str] = []
    for site in _sites(at, (*algebra.PROJECTIONS, "ffn")):
        sites.extend(("ffn_up", "ffn_down") if site == "ffn" else (site,))
    form = LowRank(rank, dropout)
    return tuple(Modification(s, form, "parallel", _compose(scale), layers, stack, attention) for s in sites)


# -- sums -------------------------------------------------------------------------------------------------------------


@_named
def mam(length: int = 16, rank: int = 16, scale: float = 4) -> tuple[Modification | Selection, ...]:
    """prefix(length) + scaled_parallel_adapter("ffn", rank, scale): the mix-and-match adapter (UV §4.6)."""
    return (prefix(length) + scaled_parallel_adapter("ffn", rank, scale)).parts


RATE = 1e-3
"""The learning rate of what has none of its own."""


@dataclass(frozen=True)
class Entry:
    """A row of the table: the function, its paper, an expression with it, and the learning rate where none is given."""

    make: Callable[..., Named]
    paper: str
    example: str
    rate: float = RATE

    @property
    def formula(self) -> str:
        return (self.make.__doc__ or "").strip().split("\n")[0]


TABLE: Mapping[str, Entry] = {
    "full": Entry(full, "all three", "full", rate=5e-5),
    "head": Entry(head, "LN, table 1", "head"),
    "layernorm": Entry(layernorm, "LN §3.1", "layernorm(terms='gain')", rate=1e-2),
    "bitfit": Entry(bitfit, "Ben Zaken et al. 2022", "bitfit(which='query+ffn_up')"),
    "adapter": Entry(
        adapter, "UV eq. 4; Houlsby et al. 2019; Pfeiffer et al. 2021", "adapter(style='pfeiffer', rank=32)"
    ),
    "parallel_adapter": Entry(parallel_adapter, "UV §3.3", "parallel_adapter(at='attention', rank=32)"),
    "scaled_parallel_adapter": Entry(
        scaled_parallel_adapter, "UV §3.3, §4.5", "scaled_parallel_adapter(rank=512, scale='learned')"
    ),
    "prefix": Entry(prefix, "UV eq. 5; Li and Liang 2021", "prefix(length=16) + layernorm", rate=1e-2),
    "prompt": Entry(prompt, "Lester et al. 2021", "prompt(length=20)", rate=3e-2),
    "lora": Entry(lora, "UV eq. 6; Hu et al. 2021", "lora(rank=8, at=('query', 'value'))"),
    "mam": Entry(mam, "UV §4.6", "mam(length=30, rank=512)"),
}
"""Every named method."""

VOCABULARY: Mapping[str, Callable[..., Any]] = {
    **{name: entry.make for name, entry in TABLE.items()},
    **{kind.__name__: kind for kind in (Modification, Selection, Add, Scale, Gate)},
    **{kind.__name__: kind for kind in (Bottleneck, LowRank, Prefix, Prompt, Vector)},
}
"""What an expression may name."""


def parse(text: str | Method) -> Method:
    """The method of an expression such as "prefix(length=16) + layernorm"; a method is returned as is.

    Errors: DeltuneError with every unknown name, argument, site and value, its place and the nearest that exists.
    """
    if isinstance(text, Method):
        return text
    value = expressions.parse(text, VOCABULARY, algebra.SITES)
    if not isinstance(value, Method):
        raise DeltuneError(f"{text!r} is a {type(value).__name__}, a part of a method; wrap it in Modification(...)")
    return value


def rate(method: str | Method) -> float:
    """The learning rate where none is given: the smallest rate of the terms, so that none of them diverges.

    full 5e-5; layernorm, prefix and so their sum 1e-2; prompt 3e-2; everything else 1e-3.
    """
    return min(TABLE[term.name].rate if isinstance(term, Named) else RATE for term in parse(method).terms)


def methods() -> tuple[str, ...]:
    """Names of all methods of the table."""
    return tuple(TABLE)


__all__ = ["TABLE", "VOCABULARY", "Entry", "methods", "parse", "rate", *TABLE]
