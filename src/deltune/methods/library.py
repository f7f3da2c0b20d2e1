"""The named methods, such as `lora` and `prefix`: each a few lines that return modifications and selections.

In the docstrings LN is the LN-tuning paper, UV is "Towards a Unified View of Parameter-Efficient Transfer Learning",
and AP is the APET paper.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypedDict, Unpack

from ..errors import DeltuneError, excerpt, unknown_name
from . import spec
from .compositions import Add, Composition, Gate, PrefixGate, Scale, SigmoidGate
from .forms.attention import MultiHead, OwnMultiHead, Prefix
from .forms.base import Form, check_positive
from .forms.entries import SHiRA, SuperTuning
from .forms.hidden import Bottleneck, Mixture, Rescale, Vector
from .forms.low_rank import Init, LowRank
from .forms.orthogonal import Butterfly, Householder, PairRotation, PrincipalRotation, Rotation
from .forms.prompt import Prompt
from .forms.routed import MTLLoRA, Poly, XLoRA
from .forms.shared import FRoD, NoLA, RandLoRA, TinyLoRA, UniLoRA, VBLoRA, VeRA
from .forms.side import Ladder
from .forms.spectral import SVFT, AdaMSS, Centred, Circulant, FourierFT, LoRAXS, WaveFT
from .forms.structured import SVD, FrozenSide, GraLoRA, KroneckerBottleneck, LoHa, LoKr, LoReFT, MiSS
from .forms.weights import DEFT, OSF, DeLoRA, DoRA, GLoRA, HiRA, PEANuT
from .other_names import hint_for_site
from .parser import NUMERAL
from .positions import ALL, Positions
from .schedules import ClusterSchedule, RankSchedule
from .spec import ADD, ExpertsArg, LayersArg, MaskedMethod, Method, Modification, NamedMethod, Selection, named_method

Stack = Literal["all", "encoder", "decoder"]
Attention = Literal["all", "self", "cross"]
Tower = Literal["main", "text", "vision", "audio", "projector", "all"]
Site = str | tuple[str, ...]
Parts = tuple[Modification | Selection, ...]

QUERY_AND_VALUE = ("query", "value")
LINEARS = ("query", "key", "value", "output", "ffn_up", "ffn_down")


class Where(TypedDict, total=False):
    """The layers and attentions that a method acts in."""

    layers: LayersArg
    stack: Stack
    attention: Attention
    tower: Tower


class AtProjections(Where, total=False):
    """The layers, attentions and projections that a method acts in, by default queries and values."""

    at: Site


_WHERE_DEFAULTS: Mapping[str, Any] = {
    "at": QUERY_AND_VALUE,
    "layers": "all",
    "stack": "all",
    "attention": "all",
    "tower": "main",
}

P = ParamSpec("P")

_SHARED_ARGUMENTS = {
    "rank": "The inner width r, at least 1.",
    "at": 'One or more of "ffn", "attention" and "heads".',
    "scale": 's: a number, "learned" (starts at 1), or as in "learned(4)" (starts at 4).',
    "x": '"input" (what the sub-layer reads) or "residual" (the residual stream before its norm).',
    "bias": "Whether both projections have biases.",
    "activation": 'f: "relu", "gelu", "silu", "tanh", "sigmoid" or "identity".',
    "layer_norm": "Whether a LayerNorm of its own stands before the down projection.",
    "dropout": "The probability of dropping an inner value while training.",
    "init": '"bert" (down N(0, 0.02)) or "lora" (down Kaiming uniform).',
    "zero_up": "Whether W_up starts at 0, so that the model is unchanged at first; else N(0, 0.02).",
    "seed": "The seed of what is drawn and not trained.",
    "layers": '"all", "lower half", "upper half", "first N", "last N", or indices within each stack (-1 is the last).',
    "stack": '"all", "encoder" or "decoder".',
    "attention": 'Which attentions, "all", "self" or "cross"; it restricts no FFN.',
    "tower": (
        'The part of a multimodal model to tune: "main" (the default, what reads the model\'s main input, which is\n'
        '        the text in a vision-language model), "text", "vision", "audio", "projector" (between two of them) '
        'or "all".'
    ),
}
"""Descriptions of the arguments that several methods take, with one meaning."""

_PROJECTION_ARGUMENTS = {
    "at": (
        'One or more projections: "query", "key", "value", "output", "ffn_up", "ffn_down", "ffn" (all linears of an\n'
        '        FFN), "gate_proj" and "up_proj" (of a gated FFN), "pooler", "lm_head", or a pattern of paths.'
    ),
    "scale": "s, a number.",
}
"""The same for methods that act at projections."""


def _with_where(signature: inspect.Signature) -> inspect.Signature:
    """Write the arguments out that **where stands for."""
    parameters = dict(signature.parameters)
    if where := parameters.pop("where", None):
        hints = (AtProjections if "AtProjections" in where.annotation else Where).__annotations__
        for name in (name for name in _WHERE_DEFAULTS if name in hints):
            hint, default = hints[name].__forward_arg__, _WHERE_DEFAULTS[name]
            parameters[name] = inspect.Parameter(name, where.KEYWORD_ONLY, default=default, annotation=hint)
    return signature.replace(parameters=[*parameters.values()])


def _library_method(
    make: Callable[P, Parts], arguments_of_kind: Mapping[str, str] | None = None
) -> Callable[P, NamedMethod]:
    """Make a named method, whose signature and docstring get the shared arguments beside its own."""
    make.__signature__ = _with_where(inspect.signature(make))  # type: ignore[attr-defined]
    make.__annotations__ = {name: one.annotation for name, one in inspect.signature(make).parameters.items()}
    if make.__doc__ is None:  # python -OO
        return named_method(make)
    text, _, rest = inspect.cleandoc(make.__doc__).partition("\n\nArgs:\n")
    arguments, raises, errors = (rest or text).partition("\n\nRaises:\n")
    written = dict(re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", arguments if rest else "", re.MULTILINE))
    shared = {**_SHARED_ARGUMENTS, **(arguments_of_kind or {})}
    described = {name: written.get(name) or shared[name] for name in inspect.signature(make).parameters}
    lines = [f"    {name}: {meaning}" for name, meaning in described.items()]
    sections = ["\n".join(("Args:", *lines))] if lines else []
    sections.append("Returns:\n    The method, to attach, count or add to others.")
    make.__doc__ = "\n\n".join((text, *sections)) + raises + errors
    return named_method(make)


def _projection_method(make: Callable[P, Parts]) -> Callable[P, NamedMethod]:
    """Make a named method that acts at projections."""
    return _library_method(make, _PROJECTION_ARGUMENTS)


@_library_method
def full(tower: Tower = "main") -> Parts:
    """Train W, every tensor of the model."""
    return (Selection(("all",), spec.AREAS, tower=tower),)


@_library_method
def head() -> Parts:
    """Train nothing but the task head."""
    return ()


@_library_method
def layernorm(
    terms: Literal["both", "gain", "bias"] = "both",
    of: Literal["both", "attention", "ffn"] = "both",
    layers: LayersArg = "all",
    *,
    embedding: bool | None = None,
    final: bool | None = None,
    stack: Stack = "all",
    tower: Tower = "main",
) -> Parts:
    """Train the gain g and bias b of the norms in place, g ⊙ (x - μ)/σ + b (LN §2, eq. 1).

    Args:
        terms: "both", "gain" or "bias"; "bias" is an error where no norm has one.
        of: Norms of the attentions (query, key and cross-attention norms included), of the FFNs, or "both".
        embedding: Whether norms after the embeddings are trained; by default where `of` and `layers` restrict nothing.
        final: Whether norms after the last layer are trained; by default as `embedding`.
    """
    every_norm = of == "both" and layers == "all"
    areas: tuple[str, ...] = ("layers",)
    areas += ("embedding",) if (every_norm if embedding is None else embedding) else ()
    areas += ("final",) if (every_norm if final is None else final) else ()
    roles = {"both": ("norm.gain", "norm.bias"), "gain": ("norm.gain",), "bias": ("norm.bias",)}[terms]
    return (Selection(roles, areas, of, layers, stack, tower=tower),)


@_library_method
def bitfit(
    which: Literal["all", "layers", "linear", "attention", "ffn", "query+ffn_up", "norm"] = "all",
    *,
    add_missing: bool = False,
    layers: LayersArg = "all",
    tower: Tower = "main",
) -> Parts:
    """Train b, the existing biases alone (Ben Zaken et al. 2022).

    A model without biases is an error, unless `add_missing` adds them.

    Args:
        which: "all" (every bias of the base model, the pooler's included), "layers" (of linears and norms in the
            layers), "linear" (of linears in the layers), "attention" or "ffn" (of the linears of these),
            "query+ffn_up" (two in each layer) or "norm" (of norms in the layers).
        add_missing: Whether linears and norms in the layers that `which` names and that have no bias get one, 0 at the
            start.

    Raises:
        DeltuneError: `which` is "all" and `layers` restricts the layers, or an argument is of the wrong type.
    """
    if which == "all" and layers != "all":
        raise DeltuneError("bitfit(which='all') reaches beyond the layers; give which='layers' with layers=")
    sites = {"all": (*_LINEARS, "norm"), "layers": (*_LINEARS, "norm"), "norm": ("norm",), "linear": _LINEARS}
    sites |= {"attention": _LINEARS[:4], "ffn": _LINEARS[4:], "query+ffn_up": ("query", "ffn_up")}
    missing = [_bias_vector(site, "unbiased", layers, True, tower) for site in sites[which]] if add_missing else []
    if which == "query+ffn_up":  # a part of a fused projection's bias is no tensor of its own, a vector added there is
        return (*(_bias_vector(site, "biased", layers, add_missing, tower) for site in sites[which]), *missing)
    of_layers = {"layers": ("norm.bias", "linear.bias"), "norm": ("norm.bias",)}
    of_base = tuple(area for area in spec.AREAS if area != "vocabulary")
    roles, areas = (("bias",), of_base) if which == "all" else (of_layers.get(which, ("linear.bias",)), ("layers",))
    of = which if which in ("attention", "ffn") else "both"
    return (Selection(roles, areas, of, layers, optional=add_missing, tower=tower), *missing)


_LINEARS = ("query", "key", "value", "output", "ffn_up", "ffn_down")


def _bias_vector(
    site: str, where: Literal["biased", "unbiased"], layers: LayersArg, optional: bool, tower: str
) -> Modification:
    insertion: Literal["parallel", "sequential"] = "sequential" if site == "norm" else "parallel"
    return Modification(site, Vector(where), insertion, layers=layers, optional=optional, tower=tower)


@_library_method
def diff_pruning(
    sparsity: float = 0.005, over: Literal["linear", "all"] = "linear", layers: LayersArg = "all"
) -> Parts:
    """Train W + z ⊙ δ, a difference of which only the share `sparsity` is left in the end (Guo et al. 2021).

    In the first half of training every scalar has a gate z under a growing L0 penalty (hard concrete distribution with
    β = 2/3, γ = -0.1, ζ = 1.1). Then the largest |z δ| are selected and trained on under this fixed mask. In a training
    loop of your own, call `tuned.advance(share)` with the share of training that is done.

    Args:
        sparsity: The share of scalars that differ from the pretrained ones in the end, between 0 and 1.
        over: "linear" (weights and biases of the linears in the layers) or "all" (every tensor of the model).

    Raises:
        DeltuneError: `over` is "all" and `layers` restricts the layers, or an argument is of the wrong type.
    """
    if over == "all":
        if layers != "all":
            raise DeltuneError("diff_pruning(over='all') reaches beyond the layers; give over='linear' with layers=")
        return (Selection(("all",), spec.AREAS, sparsity=sparsity),)
    return (Selection(("linear.weight", "linear.bias"), layers=layers, sparsity=sparsity),)


Learned = float | str
"""A number, "learned" (starts at 1) or "learned(4)" (starts at 4)."""


def _checked_sites(at: Site, allowed: tuple[str, ...], patterns: bool = False) -> tuple[str, ...]:
    """Return `at` as a tuple of sites, each of which must be allowed, or be a pattern of paths if these are."""
    sites = (at,) if isinstance(at, str) else tuple(at)
    for site in sites:
        if site not in allowed and not (patterns and spec.is_pattern(site)):
            raise DeltuneError(unknown_name("site", site, allowed, hint=hint_for_site(site)))
    if not sites:
        raise DeltuneError(f"at is empty; give one or more of {', '.join(allowed)}")
    return sites


def _attention_at(attention: Attention, site: str, sites: Sequence[str]) -> Attention:
    """Return the attention= of one site: of several sites, it restricts those inside attentions and no others."""
    outside_attention = site not in spec.ATTENTION_SITES and any(other in spec.ATTENTION_SITES for other in sites)
    return "all" if outside_attention else attention


def _at_each(
    sites: tuple[str, ...],
    form: Form,
    insertion: Literal["parallel", "sequential", "input"],
    compose: Composition,
    x: str = "input",
    experts: ExpertsArg = "all",
    positions: Positions = ALL,
    **where: Unpack[Where],
) -> tuple[Modification, ...]:
    """Return a modification at each of some sites, with the arguments that are about it.

    Beside sites in layers, `layers` and `stack` are about those and no others, as `experts` is about linears of FFNs.
    """
    parts = []
    for site in sites:
        is_chosen = site not in spec.OUTSIDE_LAYERS or set(sites) <= set(spec.OUTSIDE_LAYERS)
        at_site: Where = {**where} if is_chosen else {**where, "layers": "all", "stack": "all"}
        at_site["attention"] = _attention_at(where.get("attention", "all"), site, sites)
        of_experts = experts if site in spec.FFN_LINEARS else "all"
        parts.append(
            Modification(site, form, insertion, compose, x=x, experts=of_experts, positions=positions, **at_site)
        )
    return tuple(parts)


def _compose(scale: Learned) -> Composition:
    if isinstance(scale, str):
        match = re.fullmatch(rf"learned(?:\(({NUMERAL})\))?", scale.replace(" ", ""))
        if match is None:
            raise DeltuneError(f"scale={excerpt(scale)}: give a number, 'learned' or 'learned(4)'")
        return Scale(float(match[1] or 1), learned=True)
    return Add() if scale == 1 else Scale(float(scale))


# -- bottlenecks ------------------------------------------------------------------------------------------------------


@_library_method
def adapter(
    style: Literal["houlsby", "pfeiffer"] = "houlsby",
    rank: int = 16,
    *,
    bias: bool = False,
    activation: str = "relu",
    layer_norm: bool = False,
    dropout: float = 0.0,
    init: Init = "bert",
    zero_up: bool = True,
    **where: Unpack[Where],
) -> Parts:
    """Add h + f(h W_down) W_up after attention and FFN (houlsby), or after the FFN alone (pfeiffer) (UV eq. 4).

    In post-norm models, pfeiffer stands after the FFN's add & norm, and that norm is applied again, as its authors do.

    Args:
        style: "houlsby" (Houlsby et al. 2019) or "pfeiffer" (Pfeiffer et al. 2021).
    """
    form = Bottleneck(rank, activation, bias=bias, layer_norm=layer_norm, dropout=dropout, init=init, zero_up=zero_up)
    if style == "pfeiffer":
        return (Modification("ffn", form, "sequential", ADD, x="normed", **where),)
    return _at_each(("attention", "ffn"), form, "sequential", ADD, **where)


@_library_method
def parallel_adapter(
    at: Site = "ffn",
    rank: int = 16,
    scale: Learned = 1,
    *,
    bias: bool = False,
    activation: str = "relu",
    layer_norm: bool = False,
    dropout: float = 0.0,
    init: Init = "bert",
    zero_up: bool = True,
    x: Literal["input", "residual"] = "input",
    **where: Unpack[Where],
) -> Parts:
    """Add h + s f(x W_down) W_up at "ffn", "attention" or "heads" (before W_o), or several of them (UV §3.3)."""
    form = Bottleneck(rank, activation, bias=bias, layer_norm=layer_norm, dropout=dropout, init=init, zero_up=zero_up)
    sites = _checked_sites(at, ("ffn", "attention", "heads"))
    return _at_each(sites, form, "parallel", _compose(scale), x, **where)


@_library_method
def scaled_parallel_adapter(
    at: Site = "ffn",
    rank: int = 16,
    scale: Learned = 4,
    *,
    bias: bool = False,
    activation: str = "relu",
    layer_norm: bool = False,
    dropout: float = 0.0,
    init: Init = "lora",
    zero_up: bool = True,
    x: Literal["input", "residual"] = "input",
    **where: Unpack[Where],
) -> Parts:
    """Add h + s f(x W_down) W_up with s = 4 and LoRA's initialisation (UV §3.3, §4.5)."""
    return parallel_adapter(
        at, rank, scale, bias=bias, activation=activation, layer_norm=layer_norm, dropout=dropout, init=init,
        zero_up=zero_up, x=x, **where,
    ).parts  # fmt: skip


# -- prefixes and prompts ---------------------------------------------------------------------------------------------


@_library_method
def prefix(
    length: int = 16,
    reparameterise: int | None = None,
    *,
    gate: bool = True,
    shift_positions: bool = False,
    **where: Unpack[Where],
) -> Parts:
    """Prepend l trained keys and values in every attention, softmax(q [P_k; K]ᵀ) [P_v; V] (UV eq. 5, 7).

    Every query sees the prefix, also where the attention is causal or has a window.

    Args:
        length: l, at least 1.
        reparameterise: The inner width W of an MLP that computes the prefix while training; saving folds it away
            (UV §A.3). None: the keys and values are trained themselves.
        gate: False: h + softmax(q P_kᵀ) P_v, without the gate of UV eq. 8 (UV table 4).
        shift_positions: Whether positions start at l in a stack with a prefix in its self-attention, as PEFT has it.
    """
    form = Prefix(length, reparameterise, shift_positions=shift_positions)
    return (Modification("heads", form, "parallel", Gate() if gate else Add(), **where),)


@_library_method
def prompt(
    length: int = 100, init_from: tuple[int, ...] | None = None, positions: Literal["shift", "none"] = "shift"
) -> Parts:
    """Put l trained vectors before the input embeddings, [P; E(x)] (Lester et al. 2021).

    In an encoder-decoder model they stand before the encoder's.

    Args:
        length: l, at least 1.
        init_from: Token ids whose embeddings the vectors start from, repeated up to l; None: N(0, 0.02).
        positions: "shift" (the vectors take positions 0 to l - 1 and the text follows) or "none" (they have no position
            and the text keeps its own; for absolute positions only).
    """
    return (Modification("embedding", Prompt(length, init_from, positions)),)


@_library_method
def p_tuning_v2(
    length: int = 16,
    layers: LayersArg = "all",
    stack: Stack = "all",
    attention: Attention = "all",
) -> Parts:
    """Train `prefix(length)` without reparameterisation (Liu et al. 2022).

    Args:
        length: The number of keys and values before an attention's own, at least 1.
    """
    return prefix(length, layers=layers, stack=stack, attention=attention).parts


@_library_method
def multi_head_parallel_adapter(
    length: int = 16,
    *,
    own_down: bool = False,
    zero_up: bool = True,
    layers: LayersArg = "all",
    stack: Stack = "all",
    attention: Attention = "all",
) -> Parts:
    """Add h + relu(q P_kᵀ) P_v to each head, with the model's own query q (UV §3.3).

    Args:
        length: The rows l of P_k and P_v, at least 1.
        own_down: True: h + relu(x W_down) P_v, with a W_down of its own for each head.
        zero_up: Whether P_v starts at 0, so that the model is unchanged at first; else N(0, 0.02).
    """
    form: Form = (OwnMultiHead if own_down else MultiHead)(length, zero_up=zero_up)
    return (Modification("heads", form, "parallel", Add(), layers, stack, attention),)


# -- low rank ---------------------------------------------------------------------------------------------------------


def _scale_of_alpha(arguments: dict[str, Any]) -> dict[str, Any]:
    alpha = arguments["alpha"]
    return arguments if alpha is None else {**arguments, "scale": alpha / arguments["rank"]}


def _scale_from(scale: float, alpha: float | None, rank: int) -> float:
    """Return s, which is given as `scale` or by alpha / rank."""
    if alpha is None:
        return scale
    check_positive(rank=rank)
    if alpha <= 0:
        raise DeltuneError(f"alpha={alpha:g}: give a number above 0; the scale is alpha / rank")
    if scale not in (1, alpha / rank):
        raise DeltuneError("give scale or alpha, not both (scale = alpha / rank)")
    return alpha / rank


@_library_method
@spec.derives(_scale_of_alpha)
def lora(
    rank: int = 8,
    *,  # PEFT's second number is alpha
    scale: float = 1,
    at: Site = ("query", "value"),
    alpha: float | None = None,
    dropout: float = 0.0,
    experts: ExpertsArg = "all",
    **where: Unpack[Where],
) -> Parts:
    """Add h + s x W_down W_up at projections (UV eq. 6; Hu et al. 2021).

    Args:
        rank: r, at least 1.
        scale: s.
        at: One or more of "query", "key", "value", "output", "ffn_up", "ffn_down", and "ffn" for all linears of an FFN;
            "gate_proj" and "up_proj", of a gated FFN's input linears; "router", of a mixture of experts; "embedding",
            "pooler" and "lm_head"; or paths of linears as a pattern, such as "*.mixer.in_proj".
        alpha: Another way to give s, which is then alpha / rank; above 0.
        dropout: The probability of dropping a value of x while training.
        experts: Where FFNs are mixtures of experts, "all" of them, "shared" (those that every token goes through),
            "routed" (those that the router chooses from), or the numbers of some of the latter.

    Raises:
        DeltuneError: Both `scale` and `alpha` are given, alpha is 0 or less, or an argument does not exist or is of the
            wrong type.
    """
    scale = _scale_from(scale, alpha, rank)
    return _at_projections(LowRank(rank, dropout), at, scale=scale, experts=experts, **where)


def _at_projections(
    form: Form, at: Site = QUERY_AND_VALUE, *, scale: Learned = 1,
    insertion: Literal["parallel", "sequential", "input"] = "parallel", experts: ExpertsArg = "all",
    positions: Positions = ALL, **where: Unpack[Where],
) -> tuple[Modification, ...]:  # fmt: skip
    """Return a modification at each of some projections."""
    sites: list[str] = []
    for site in _checked_sites(at, (*spec.PROJECTIONS, *spec.OTHER_PROJECTIONS, "ffn"), patterns=True):
        sites.extend(("ffn_up", "ffn_down") if site == "ffn" else (site,))
    spec.check_experts(experts, tuple(sites))
    return _at_each(tuple(sites), form, insertion, _compose(scale), experts=experts, positions=positions, **where)


@_projection_method
def alora(
    invocation: tuple[int, ...], rank: int = 32, *, scale: float = 1, at: Site = ("query", "key", "value"),
    alpha: float | None = None, dropout: float = 0.0, **where: Unpack[Where],
) -> Parts:  # fmt: skip
    """Add h + s x W_down W_up from the last occurrence of a sequence on (aLoRA; Greenewald et al. 2025).

    What stands before is computed by the base model, whose cache can be continued. PEFT:
    LoraConfig(alora_invocation_tokens).

    Args:
        invocation: The token ids of the sequence; a text without it is the base model's.
        scale: s.
        alpha: Another way to give s, which is then alpha / rank; above 0.
        dropout: The probability of dropping a value of x while training.

    Raises:
        DeltuneError: Both `scale` and `alpha` are given, or an argument is out of its range.
    """
    scale = _scale_from(scale, alpha, rank)
    form = LowRank(rank, dropout)
    return _at_projections(form, at, scale=scale, positions=invocation, **where)


@_library_method
def trainable_tokens(tokens: tuple[int, ...]) -> Parts:
    """Train E[t] for t in `tokens`, the rows of chosen tokens in the word embeddings.

    Where the output projection is tied to the word embeddings, its rows are the same; where it is not, its rows of
    these tokens are trained too. New values replace the old ones, so that what was in the rows does not matter: this is
    how tokens that were added to a vocabulary are saved with a delta.

    Args:
        tokens: The token ids, such as the ids of added tokens.
    """
    return (Selection(("embedding",), ("embedding", "vocabulary"), tokens=tokens),)


# -- sums -------------------------------------------------------------------------------------------------------------


@_library_method
def mam(
    length: int = 16,
    rank: int = 16,
    scale: float = 4,
    layers: LayersArg = "all",
    stack: Stack = "all",
    attention: Attention = "all",
) -> Parts:
    """Train the mix-and-match adapter, prefix(length) + scaled_parallel_adapter("ffn", rank, scale) (UV §4.6).

    Args:
        length: The length of the prefix.
        rank: The inner width of the adapter.
        scale: The adapter's scale.
        attention: Which attentions have a prefix, "all", "self" or "cross".
    """
    at_heads = prefix(length, layers=layers, stack=stack, attention=attention)
    return (at_heads + scaled_parallel_adapter("ffn", rank, scale, layers=layers, stack=stack)).parts


@_library_method
def prefix_layernorm(length: int = 16, layers: LayersArg = "all", stack: Stack = "all") -> Parts:
    """Train prefix(length) + layernorm (LN §3.2).

    Args:
        length: The length of the prefix.
    """
    return (prefix(length, layers=layers, stack=stack) + layernorm(layers=layers, stack=stack)).parts


@_library_method
def unipelt(
    length: int = 10,
    rank: int = 8,
    bottleneck: int = 48,
    layers: LayersArg = "all",
    stack: Stack = "all",
) -> Parts:
    """Add a prefix, LoRA and an adapter, each with a gate σ(x · w_g) of its own (UniPELT; Mao et al. 2022).

    LoRA acts on query and value, which share a gate; the adapter stands after the FFN. The gate of the prefix
    multiplies its keys and values, and the gates of LoRA and the adapter what these add. Two things differ from the
    authors' code: a gate is of one position and not the mean over the tokens, on which padding and later tokens have
    an influence, and it has no bias.

    Args:
        length: The length of the prefix.
        rank: The rank of LoRA.
        bottleneck: The inner width of the adapter.
    """
    low_rank = LowRank(rank)
    return (
        Modification("heads", Prefix(length), "parallel", PrefixGate("prefix"), layers, stack),
        Modification("query", low_rank, "parallel", SigmoidGate("lora"), layers, stack),
        Modification("value", low_rank, "parallel", SigmoidGate("lora"), layers, stack),
        Modification("ffn", Bottleneck(bottleneck), "sequential", SigmoidGate("adapter"), layers, stack),
    )


# -- rescaling and mixing ---------------------------------------------------------------------------------------------


@_library_method
def ia3(
    layers: LayersArg = "all",
    stack: Stack = "all",
    attention: Attention = "all",
) -> Parts:
    """Multiply keys, values and the FFN's inner activation by trained vectors w, w ⊙ h (Liu et al. 2022).

    Every w is 1 at first, so that the model is unchanged.
    """
    return _at_each(
        ("key", "value", "ffn_inner"), Rescale(), "sequential", ADD, layers=layers, stack=stack, attention=attention
    )


@_library_method
def three_vectors() -> Parts:
    """Mix all hidden states where the head reads them, γ ⊙ Σ_l α_l h_l + β (3V; LN table 1).

    At first the model is unchanged. A model that generates or chooses has no head over hidden states, and is an error.
    """
    return (Modification("hidden_states", Mixture()),)


@_library_method
def ladder(width: int = 64, heads: int = 4, temperature: float = 0.1) -> Parts:
    """Add what a small network beside the model makes of all its states, U n(g_L) (side tuning; Sung et al. 2022).

    g_i = T_i(μ_i g_{i-1} + (1 - μ_i) D_i h_i), with a transformer layer T_i of this width for each layer. No gradient
    goes through the model, so that a step keeps of it the hidden states alone: at MiniLM's shape with 32 × 64 tokens it
    adds 101 MiB to the weights at its peak, and one of lora(rank=8) 224. Generate with use_cache=False.

    Args:
        width: The width of the network.
        heads: The number of heads of its attentions, which divide the width.
        temperature: τ of the gates μ_i = σ(α_i / τ).
    """
    return (Modification("hidden_states", Ladder(width, heads, temperature)),)


# -- arbitrary parameters ---------------------------------------------------------------------------------------------


def apet(
    method: Method | Literal["add", "concatenate", "plugin"],
    parameters: int | str,
    pattern: Literal["adjacent", "discrete", "uniform"] = "discrete",
    along: Literal["rows", "columns"] = "rows",
    seed: int = 0,
) -> MaskedMethod:
    """Train W ⊙ m, exactly N scalars of any method under a fixed mask m (AP §5.1, eq. 14 to 17).

    Args:
        method: Any method or sum, or one of the paper's operations: "add" (vectors on the sub-layers' outputs, eq. 14),
            "concatenate" (prompt vectors and low rank, eq. 15) or "plugin" (adapters, eq. 16). The rows of a prompt or
            prefix are there whatever is drawn, zero where they are not trained.
        parameters: N, or a share of the base model such as "0.05%".
        pattern: "discrete" (drawn so that each of them can change the output), "uniform" (every scalar of a weight is
            as likely as any other, so that one whose partners in a product were not drawn changes nothing) or
            "adjacent" (consecutive rows or columns).
        along: "rows" or "columns", for the adjacent pattern.
        seed: The seed of the draw.

    Returns:
        The method, to attach, count or add to others.

    Raises:
        DeltuneError: `method` is a text that names no operation, it has a mask already, or an argument is of the wrong
            type.
    """
    if isinstance(method, str) and method not in OPERATIONS:
        raise DeltuneError(unknown_name("operation", method, [*OPERATIONS, "a method"]))
    return MaskedMethod(OPERATIONS[method]() if isinstance(method, str) else method, parameters, pattern, along, seed)


OPERATIONS: Mapping[str, Callable[[], Method]] = {
    "add": lambda: Modification("attention", Vector()) + Modification("ffn", Vector()),
    "concatenate": lambda: prompt() + lora(),
    "plugin": lambda: adapter(),
}
"""The three operations of the APET paper that insert a masked weight, by name (AP §C)."""


# -- functions of the weight ------------------------------------------------------------------------------------------


@_projection_method
@spec.derives(_scale_of_alpha)
def dora(
    rank: int = 8, *, scale: float = 1, at: Site = QUERY_AND_VALUE, alpha: float | None = None, dropout: float = 0.0,
    **where: Unpack[Where],
) -> Parts:  # fmt: skip
    """Train a low rank and a magnitude, m / ‖W + s B A‖ ⊙ (W + s B A) x (Liu et al. 2024).

    PEFT: LoraConfig(use_dora=True). The norm of each row is a constant of the gradient.

    Args:
        alpha: Another way to give s, which is then alpha / rank; above 0.
        dropout: The probability of dropping a value of x while training.

    Raises:
        DeltuneError: Both `scale` and `alpha` are given, or an argument is out of its range.
    """
    form = DoRA(rank, float(_scale_from(scale, alpha, rank)), dropout)
    return _at_projections(form, at, **where)


@_projection_method
def adalora(
    rank: int = 8, initial_rank: int | None = None, *, alpha: float | None = None, start: float = 0.1,
    stop: float = 0.7, every: int = 1, beta1: float = 0.85, beta2: float = 0.85, orthogonality: float = 0.5,
    dropout: float = 0.0, **where: Unpack[AtProjections],
) -> Parts:  # fmt: skip
    """Prune the ranks of B diag(e) A x that matter least, over all places (AdaLoRA; Zhang et al. 2023).

    PEFT: AdaLoraConfig(init_r, target_r, tinit, tfinal, deltaT, orth_reg_weight). A training loop of your own calls
    `tuned.advance`, a Trainer `ScheduleCallback`. Once the ranks are final, the file is a LoRA with exactly those.

    Args:
        rank: The mean number of ranks of a place in the end, at least 1.
        initial_rank: The ranks of each place at the start; None: one and a half times as many.
        alpha: s is alpha / initial_rank; None: s is 1.
        start: The share of the training without pruning at its beginning.
        stop: The share of the training after which the ranks are final.
        every: After how many steps ranks are pruned.
        beta1: Of the moving average of the sensitivity |w ∂L/∂w|.
        beta2: Of the moving average of how much the sensitivity varies.
        orthogonality: The weight of the penalty that keeps A and B orthogonal.
        dropout: The probability of dropping a value of x while training.

    Raises:
        DeltuneError: An argument is out of its range.
    """
    first = -(-3 * rank // 2) if initial_rank is None else initial_rank
    scale = 1.0 if alpha is None else alpha / (first + 1e-5)  # as PEFT divides, so that folders agree
    form = SVD(first, scale, dropout, RankSchedule(rank, start, stop, every, beta1, beta2, orthogonality))
    return _at_projections(form, **where)


@_projection_method
def hira(rank: int = 32, **where: Unpack[AtProjections]) -> Parts:
    """Multiply the weight by a low rank, (W + W ⊙ B A) x (HiRA; Huang et al. 2025; PEFT: HiraConfig)."""
    return _at_projections(HiRA(rank), **where)


@_projection_method
def glora(rank: int = 8, bias: Literal["constant", "vector"] = "constant", **where: Unpack[AtProjections]) -> Parts:
    """Train (W + W ⊙ A + B) x + c + D ⊙ c + E + W C with A, B and C of low rank (GLoRA; Chavan et al. 2023).

    PEFT: GloraConfig(config_D_E). Without a bias c there is no C, D or E.


    Args:
        bias: Whether D and E are one number each ("constant") or one for each output ("vector").
    """
    return _at_projections(GLoRA(rank, bias), **where)


@_projection_method
def deft(rank: int = 8, **where: Unpack[AtProjections]) -> Parts:
    """Project out of a subspace and write into it, (1 - P relu(P)ᵀ) W x + P R x (DEFT; PEFT: DeftConfig)."""
    return _at_projections(DEFT(rank), **where)


@_projection_method
def peanut(
    rank: int = 32, depth: int = 0, activation: str = "relu", scale: float = 1, **where: Unpack[AtProjections],
) -> Parts:  # fmt: skip
    """Change the weight by a network on itself, W + s (B f(A Wᵀ))ᵀ (PEANuT; PEFT: PeanutConfig).

    Args:
        depth: The number of encoders and of decoders (r, r) between A and B.
    """
    return _at_projections(PEANuT(rank, depth, activation), scale=scale, **where)


@_projection_method
def delora(rank: int = 8, bound: float = 15.0, **where: Unpack[AtProjections]) -> Parts:
    """Add a bounded low rank, λ/r Σ_i b_i a_iᵀ / (‖b_i‖ ‖a_i‖) diag(‖W_j‖) x (DeLoRA; Bini et al. 2025).

    PEFT: DeloraConfig(delora_lambda).


    Args:
        bound: λ at the start; it is trained.
    """
    return _at_projections(DeLoRA(rank, bound), **where)


@_projection_method
def osf(rank: int | None = None, **where: Unpack[AtProjections]) -> Parts:
    """Train the lower part of W's spectrum, U_h S_h V_h + U_l S_l V_l (OSF; Nayak et al. 2025).

    PEFT: OSFConfig(effective_rank). Gradients are orthogonal to the upper part, so that what was learned there stays.


    Args:
        rank: The number of singular values that are kept; None: half of them.
    """
    return _at_projections(OSF(rank), **where)


# -- matrices of a structure ------------------------------------------------------------------------------------------


@_projection_method
def loha(rank: int = 8, scale: float = 1, **where: Unpack[AtProjections]) -> Parts:
    """Add the Hadamard product of two low ranks, s (A₁B₁ ⊙ A₂B₂) x (LoHa; Hyeon-Woo et al. 2022; PEFT: LoHaConfig)."""
    return _at_projections(LoHa(rank), scale=scale, **where)


@_projection_method
def lokr(
    rank: int = 8, scale: float = 1, factor: int = -1, *, decompose_both: bool = False, **where: Unpack[AtProjections],
) -> Parts:  # fmt: skip
    """Add a Kronecker product, s (C ⊗ B A) x (LoKr; Yeh et al. 2024; PEFT: LoKrConfig(decompose_factor)).

    Args:
        factor: The factor of the widths that gives the sides of C, or the greatest that it may be; -1: any.
        decompose_both: Whether C is a low rank too, where this is smaller.
    """
    return _at_projections(LoKr(rank, factor, decompose_both=decompose_both), scale=scale, **where)


@_projection_method
def miss(rank: int = 64, mini_rank: int | None = None, **where: Unpack[AtProjections]) -> Parts:
    """Add one matrix on the sum of the blocks of x, B Σ_k x_k (MiSS, Bone; Kang and Yin 2024; PEFT: MissConfig).

    Args:
        rank: The width r of the blocks, at least 1.
        mini_rank: How many outputs have rows of their own, which the others repeat; None: all.
    """
    return _at_projections(MiSS(rank, mini_rank), **where)


@_projection_method
def gralora(rank: int = 32, blocks: int = 2, scale: float = 2, **where: Unpack[AtProjections]) -> Parts:
    """Add k × k blocks with a low rank each, s Σ_k B_k A_k x_k (GraLoRA; Jung et al. 2025; PEFT: GraloraConfig).

    Args:
        rank: r, a multiple of `blocks`.
        blocks: k, which divides the widths.
    """
    return _at_projections(GraLoRA(rank, blocks), scale=scale, **where)


@_projection_method
def c3a(block_size: int = 64, **where: Unpack[AtProjections]) -> Parts:
    """Add blocks of circulant matrices, C x (C3A; Chen et al. 2025; PEFT: C3AConfig).

    Args:
        block_size: The size of a block, which divides the widths.
    """
    return _at_projections(Circulant(block_size), **where)


@_projection_method
def fourierft(frequencies: int = 1000, scale: float = 150, seed: int = 777, **where: Unpack[AtProjections]) -> Parts:
    """Add the inverse Fourier transform of n entries, s IDFT(c) x (FourierFT; Gao et al. 2024; PEFT: FourierFTConfig).

    Args:
        frequencies: n.
    """
    return _at_projections(FourierFT(frequencies, float(scale), seed), **where)


@_projection_method
def waveft(frequencies: int = 2592, scale: float = 25, seed: int = 777, **where: Unpack[AtProjections]) -> Parts:
    """Add the inverse Haar transform of n entries, s IDWT(c) x (WaveFT; Bilican et al. 2025; PEFT: WaveFTConfig).

    Args:
        frequencies: n.
    """
    return _at_projections(WaveFT(frequencies, float(scale), seed), **where)


@_projection_method
def supertuning(sparsity: float = 0.99, *, largest: bool = True, **where: Unpack[AtProjections]) -> Parts:
    """Train the entries of a weight of the greatest magnitude, W + v (PEFT: SupertuningConfig).

    Args:
        sparsity: The share of the entries that stay as they are.
        largest: Whether the greatest entries are trained, and not the smallest.
    """
    return _at_projections(SuperTuning(sparsity, largest=largest), **where)


@_projection_method
def shira(rank: int = 32, seed: int = 0, **where: Unpack[AtProjections]) -> Parts:
    """Train r (d_in + d_out) random entries of a weight, W + v (SHiRA; Bhardwaj et al. 2024; PEFT: ShiraConfig)."""
    return _at_projections(SHiRA(rank, seed), **where)


# -- low ranks of few numbers, or of another start --------------------------------------------------------------------


@_projection_method
def vera(rank: int = 256, d_initial: float = 0.1, seed: int = 0, **where: Unpack[AtProjections]) -> Parts:
    """Scale shared random matrices, b ⊙ B (d ⊙ A x) (VeRA; Kopiczko et al. 2024; PEFT: VeraConfig).

    Args:
        d_initial: d at the start.
    """
    return _at_projections(VeRA(rank, d_initial, seed), **where)


@_projection_method
def randlora(rank: int = 32, scale: float = 20, seed: int = 0, **where: Unpack[AtProjections]) -> Parts:
    """Scale shared random matrices to a full rank, s Σ_n B_n Λ_n A Γ_n x (RandLoRA; Albert et al. 2025).

    PEFT: RandLoraConfig.
    """
    return _at_projections(RandLoRA(rank, seed), scale=scale, **where)


@_projection_method
def vblora(
    rank: int = 4, vectors: int = 256, length: int = 64, top_k: int = 2, **where: Unpack[AtProjections],
) -> Parts:  # fmt: skip
    """Mix a low rank B A x from one bank of vectors (VB-LoRA; Li et al. 2024; PEFT: VBLoRAConfig).

    Args:
        vectors: The number of vectors.
        length: Their length, which divides the widths.
        top_k: How many are mixed to a piece.
    """
    return _at_projections(VBLoRA(rank, vectors, length, top_k), **where)


@_projection_method
def unilora(rank: int = 4, length: int = 256, **where: Unpack[AtProjections]) -> Parts:
    """Take the entries of a low rank B A x from one vector θ (Uni-LoRA; Li et al. 2025; PEFT: UniLoraConfig).

    Args:
        length: The length of θ.
    """
    return _at_projections(UniLoRA(rank, length), **where)


@_projection_method
def tinylora(rank: int = 2, parameters: int = 64, *, tied: bool = False, **where: Unpack[AtProjections]) -> Parts:
    """Train few numbers v in B (Σ_i v_i P_i) A x, where B A is from W's spectrum (TinyLoRA; PEFT: TinyLoraConfig).

    Args:
        parameters: The length u of v.
        tied: Whether all places have one v in common (PEFT: weight_tying=1).
    """
    return _at_projections(TinyLoRA(rank, parameters, tied=tied), **where)


@_projection_method
def nola(rank: int = 8, bases: int = 64, scale: float = 1, seed: int = 0, **where: Unpack[AtProjections]) -> Parts:
    """Mix a low rank from random matrices, s (Σ_i β_i B_i) (Σ_i α_i A_i) x (NOLA; Koohpayegani et al. 2024).

    Args:
        bases: The number of random matrices on either side.
    """
    return _at_projections(NoLA(rank, bases, seed), scale=scale, **where)


@_projection_method
def lora_xs(rank: int = 16, scale: float = 1, **where: Unpack[AtProjections]) -> Parts:
    """Train R in s B R A x, where B A is from W's spectrum (LoRA-XS; Bałazy et al. 2024)."""
    return _at_projections(LoRAXS(rank), scale=scale, **where)


@_projection_method
def svft(band: int = 0, **where: Unpack[AtProjections]) -> Parts:
    """Train M in U (Σ + M) V x, where U Σ V is W (SVFT; Lingam et al. 2024).

    Args:
        band: How far from its diagonal M is trained; 0: the diagonal alone.
    """
    return _at_projections(SVFT(band), **where)


@_projection_method
def poly(rank: int = 8, tasks: int = 1, skills: int = 4, splits: int = 1, **where: Unpack[AtProjections]) -> Parts:
    """Mix a low rank from skills by the task of a row, (Σ_s w_s A_s) (Σ_s w_s B_s) x / r (Poly; Ponti et al. 2023).

    PEFT: PolyConfig. With several tasks a pass is told them: with tuned.condition(task_ids=[0, 2, …]): model(…).

    Args:
        tasks: The number of tasks.
        skills: The number of skills of each place, s.
        splits: In how many parts the widths are split, each with weights of its own.
    """
    return _at_projections(Poly(rank, tasks, skills, splits), **where)


@_projection_method
def mtl_lora(
    rank: int = 8, tasks: int = 1, ups: int = 3, temperature: float = 0.05, scale: float = 1,
    **where: Unpack[AtProjections],
) -> Parts:  # fmt: skip
    """Share A and mix several B by the task t of a row, s Σ_i softmax_i(w_t / τ) B_i Λ_t A x (Yang et al. 2024).

    With several tasks a pass is told them: with tuned.condition(task_ids=[0, 2, …]): model(…).

    Args:
        tasks: The number of tasks.
        ups: The number of B, which the tasks share.
        temperature: τ; the lower, the more a task keeps to one B.
    """
    return _at_projections(MTLLoRA(rank, tasks, ups, temperature), scale=scale, **where)


@_projection_method
def xlora(
    number: int = 4, rank: int = 8, *, depth: int = 1, width: int = 2048, dropout: float = 0.2, by_place: bool = False,
    softmax: bool = True, temperature: float = 1.0, top_k: int | None = None, softmax_top_k: bool = False,
    first: float = 0.0, scale: float = 1.0, frozen: bool = False, **where: Unpack[AtProjections],
) -> Parts:  # fmt: skip
    """Weigh low ranks for each token, s Σ_i softmax_i(C(h) / τ) B_i A_i x (X-LoRA; Buehler 2024; PEFT: XLoraConfig).

    The classifier C reads the last hidden states h of a first pass of the model, which has no gradient. LoRAs that are
    trained already are weighed by tuned.combine("mix(a, b)", name="m", mixing="xlora"), which trains C alone.

    Args:
        number: n, the number of low ranks of each place (PEFT: adapters).
        depth: The number of linears of the classifier (PEFT: xlora_depth).
        width: The width between them (PEFT: xlora_size).
        dropout: The probability of dropping a value between them while training (PEFT: xlora_dropout_p).
        by_place: Whether each place has weights of its own (PEFT: layerwise_scalings).
        softmax: Whether the weights are a softmax (PEFT: enable_softmax).
        temperature: τ of the softmax (PEFT: softmax_temperature).
        top_k: How many of the largest weights are kept (PEFT: top_k_lora).
        softmax_top_k: Whether a softmax is made of those that are kept (PEFT: enable_softmax_topk).
        first: The weights in the first pass (PEFT: scaling_pass_value).
        scale: s (PEFT: global_scaling_weight).
        frozen: Whether the classifier alone is trained (PEFT: not use_trainable_adapters).
    """
    form = XLoRA(
        number, rank, depth=depth, width=width, dropout=dropout, by_place=by_place, softmax=softmax,
        temperature=temperature, top_k=top_k, softmax_top_k=softmax_top_k, first=first, scale=scale, frozen=frozen,
    )  # fmt: skip
    return _at_projections(form, **where)


@_projection_method
def adamss(
    rank: int = 1, clusters: int = 5, singular_values: int = 100, seed: int = 0, *, target: int | None = None,
    start: float = 0.1, stop: float = 0.5, every: int = 1, beta1: float = 0.85, beta2: float = 0.85,
    exponent: float = 3.0, **where: Unpack[AtProjections],
) -> Parts:  # fmt: skip
    """Train a low rank for each cluster of outputs, b_j A_i V x (AdaMSS; PEFT: AdamssConfig).

    V has the first right singular vectors of W, with its bias beside it; outputs are clustered by the left ones.

    Args:
        clusters: The number of clusters of outputs.
        singular_values: How many singular vectors V has, where there are so many.
        seed: The seed by which the singular vectors are approximated.
        target: How many clusters of all places train in the end, after a schedule that `tuned.advance` follows, or in a
            Trainer `ScheduleCallback` (PEFT: use_asa, asa_target_subspaces); None: all clusters.
        start: The share of the training at whose end clusters are first left as they are (PEFT: init_warmup).
        stop: The share of the training after which no more are (PEFT: final_warmup).
        every: After how many steps clusters are chosen (PEFT: mask_interval).
        beta1: Of the moving average of the sensitivity |w ∂L/∂w|.
        beta2: Of the moving average of how much the sensitivity varies.
        exponent: By which power the number of clusters falls.

    Raises:
        DeltuneError: An argument is out of its range, or scikit-learn is not installed.
    """
    schedule = None if target is None else ClusterSchedule(target, start, stop, every, beta1, beta2, exponent)
    return _at_projections(AdaMSS(rank, clusters, singular_values, seed, schedule), **where)


@_projection_method
def frod(density: float = 0.01, seed: int = 0, **where: Unpack[AtProjections]) -> Parts:
    """Rotate and scale the weight in a basis that layers share, U (S + diag(λ)) Vᵀ x (FRoD; PEFT: FrodConfig).

    W is U diag(λ₀) Vᵀ, with one V for the weights of all layers at a site. λ and the sparse S are trained.

    Args:
        density: The share of the entries of S that are trained.
    """
    return _at_projections(FRoD(density, seed), **where)


@_projection_method
def lora_fa(rank: int = 8, scale: float = 1, **where: Unpack[AtProjections]) -> Parts:
    """Train B in s B A x with a random A (LoRA-FA; Zhang et al. 2023)."""
    return _at_projections(FrozenSide(rank), scale=scale, **where)


@_projection_method
def mica(rank: int = 8, scale: float = 1, **where: Unpack[AtProjections]) -> Parts:
    """Train A in s B A x, where B has the last left singular vectors of W (MiCA; PEFT: init_lora_weights="mica")."""
    return _at_projections(FrozenSide(rank, "up"), scale=scale, **where)


@_projection_method
def pissa(rank: int = 8, scale: float = 1, **where: Unpack[AtProjections]) -> Parts:
    """Train the first part of W's spectrum, s (B A - B₀ A₀) x (PiSSA; Meng et al. 2024).

    PEFT: LoraConfig(init_lora_weights="pissa"). The base model is not changed.

    Args:
        scale: s, above 0.
    """
    return _at_projections(Centred(rank, "pissa", float(scale)), **where)


@_projection_method
def olora(rank: int = 8, scale: float = 1, **where: Unpack[AtProjections]) -> Parts:
    """Train a low rank from W's QR decomposition, s (B A - B₀ A₀) x (OLoRA; Büyükakyüz 2024).

    PEFT: LoraConfig(init_lora_weights="olora"). The base model is not changed.

    Args:
        scale: s, above 0.
    """
    return _at_projections(Centred(rank, "olora", float(scale)), **where)


@_projection_method
def corda(
    rank: int = 8, scale: float = 1, keep: Literal["task", "knowledge"] = "task", **where: Unpack[AtProjections],
) -> Parts:  # fmt: skip
    """Train a part of the spectrum of W by data, s (B A - B₀ A₀) x (CorDA; Yang et al. 2024).

    PEFT: LoraConfig(init_lora_weights="corda"). The base model is not changed. It starts from data.

    Args:
        scale: s, above 0.
        keep: "task" (the first part, of the data of the task; PEFT: "ipm") or "knowledge" (the last part, of data whose
            knowledge is kept; PEFT: "kpm").
    """
    form = Centred(rank, "corda" if keep == "task" else "corda_kpm", float(scale))
    return _at_projections(form, **where)


@_projection_method
def lora_ga(rank: int = 8, scale: float = 1, **where: Unpack[AtProjections]) -> Parts:
    """Train a low rank from the gradient of W, s (B A - B₀ A₀) x (LoRA-GA; Wang et al. 2024).

    PEFT: LoraConfig(init_lora_weights="lora_ga"). The base model is not changed. It starts from data with labels.

    Args:
        rank: r, at least 1; twice as many singular values are needed.
        scale: s, above 0.
    """
    return _at_projections(Centred(rank, "lora_ga", float(scale)), **where)


@_projection_method
def eva(rank: int = 8, scale: float = 1, dropout: float = 0.0, **where: Unpack[AtProjections]) -> Parts:
    """Train s B A x, where A starts as the first principal components of x (EVA; Paischer et al. 2024).

    PEFT: LoraConfig(init_lora_weights="eva", eva_config=EvaConfig(rho=1)): all places have one rank. It starts from
    data.

    Args:
        dropout: The probability of dropping a value of x while training.
    """
    return _at_projections(LowRank(rank, dropout, "eva"), scale=scale, **where)


@_projection_method
def loftq(rank: int = 8, dropout: float = 0.0, *, at: Site = LINEARS, **where: Unpack[Where]) -> Parts:
    """Train B A x on a quantised base Q, where B A starts as the best part of W - Q (LoftQ; Li et al. 2023).

    PEFT: replace_lora_weights_loftq. The base is not changed. It starts from the model before it was quantised.

    Args:
        dropout: The probability of dropping a value of x while training.
    """
    return _at_projections(LowRank(rank, dropout, "loftq"), at, **where)


# -- rotations, vectors and subspaces ---------------------------------------------------------------------------------


@_projection_method
def oft(block_size: int = 32, terms: int = 5, *, shared_block: bool = False, **where: Unpack[AtProjections]) -> Parts:
    """Rotate the input of a projection in blocks, W R x (OFT; Qiu et al. 2023; PEFT: OFTConfig).

    Args:
        block_size: The size of a block, which divides the width.
        terms: The number of terms, at least 4, of a series in place of the inverse; 0: the inverse.
        shared_block: Whether all blocks are one.
    """
    return _at_projections(Rotation(block_size, terms, shared_block=shared_block), insertion="input", **where)


@_projection_method
def boft(block_size: int = 4, factors: int = 1, **where: Unpack[AtProjections]) -> Parts:
    """Rotate and scale the weight, diag(s) W R with butterfly factors R (BOFT; Liu et al. 2024; PEFT: BOFTConfig).

    Args:
        block_size: The size b of a block, an even number that divides the width.
        factors: The number m of factors; b · 2^(m - 1) divides the width.
    """
    return _at_projections(Butterfly(block_size, factors), **where)


@_projection_method
def hra(rank: int = 8, **where: Unpack[AtProjections]) -> Parts:
    """Reflect the input of a projection, W ∏ (1 - 2 u_i u_iᵀ) x (HRA; Yuan et al. 2024; PEFT: HRAConfig).

    Args:
        rank: The number of reflections, which is even.
    """
    return _at_projections(Householder(rank), insertion="input", **where)


@_projection_method
def psoft(rank: int = 32, scale: float = 1, *, scales: bool = True, **where: Unpack[AtProjections]) -> Parts:
    """Rotate the first part of W's spectrum, s B (R - 1) A x (PSOFT; PEFT: PsoftConfig).

    Args:
        scales: Whether R is scaled on both sides (PEFT: psoft_mag_a and psoft_mag_b).
    """
    return _at_projections(PrincipalRotation(rank, scales=scales), scale=scale, **where)


@_projection_method
def road(variant: Literal[1, 2, 4] = 1, group_size: int = 64, **where: Unpack[AtProjections]) -> Parts:
    """Rotate and scale pairs of h, α (cos θ h + sin θ h⊥) (RoAd; Liao and Monz 2024; PEFT: RoadConfig).

    Args:
        variant: One θ and α for each pair (1), for each number (2), or for each product (4).
        group_size: The pairs are the two halves of each group of so many numbers, which divides the width.
    """
    return _at_projections(PairRotation(group_size, variant), insertion="sequential", **where)


@_projection_method
def ssf(*, at: Site = LINEARS, **where: Unpack[Where]) -> Parts:
    """Scale and shift what projections compute, γ ⊙ h + β (SSF; Lian et al. 2022)."""
    scaled = _at_projections(Rescale(), at, insertion="sequential", **where)
    return (*scaled, *_at_projections(Vector(), at, **where))


@_projection_method
def beft(*, at: Site = "value", **where: Unpack[Where]) -> Parts:
    """Add a bias to projections, h + b (BEFT; PEFT: BeftConfig)."""
    return _at_projections(Vector(), at, **where)


@_library_method
def compacter(rank: int = 16, divisions: int = 4, *, activation: str = "gelu", **where: Unpack[Where]) -> Parts:
    """Add h + f(h D) U with D and U sums of Kronecker products (Compacter; Karimi Mahabadi et al. 2021).

    Their first factors are shared by all places, and the second ones are of rank 1.

    Args:
        rank: The inner width r, a multiple of `divisions`.
        divisions: The number of products, which divides the widths.
    """
    form = KroneckerBottleneck(rank, divisions, activation=activation)
    return _at_each(("attention", "ffn"), form, "sequential", ADD, **where)


@_library_method
def loreft(
    rank: int = 4, positions: Positions = ALL, *, layers: LayersArg = "all", stack: Stack = "all",
    tower: Tower = "main",
) -> Parts:  # fmt: skip
    """Edit what layers compute at some tokens of a text, h + Rᵀ (W h + b - R h) (LoReFT; Wu et al. 2024).

    Args:
        positions: "all", or ends of the text such as "first 4 + last 4", as in the paper.
    """
    return (Modification("block", LoReFT(rank), "sequential", ADD, layers, stack, tower=tower, positions=positions),)
