"""The named methods that insert something, each a few lines over the algebra, and their sums.

LN is LN-tuning, UV Towards a Unified View, AP APET.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from ..errors import DeltuneError, excerpt, unknown_name
from . import spec
from .arguments import NUMERAL
from .attention_forms import MultiHead, OwnMultiHead, Prefix
from .compositions import Add, Composition, Gate, Scale, SigmoidGate
from .forms import Bottleneck, Form, Init, LowRank, Mixture, Prompt, Rescale, Vector
from .spec import ADD, LayersArg, MaskedMethod, Method, Modification, Selection, named_method


@named_method
def full() -> tuple[Modification | Selection, ...]:
    """W: every tensor of the model is trained."""
    return (Selection(("all",), spec.AREAS),)


@named_method
def head() -> tuple[Modification | Selection, ...]:
    """Nothing but the task head is trained."""
    return ()


@named_method
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
    every_norm = of == "both" and layers == "all"
    areas: tuple[str, ...] = ("layers",)
    areas += ("embedding",) if (every_norm if embedding is None else embedding) else ()
    areas += ("final",) if (every_norm if final is None else final) else ()
    roles = {"both": ("norm.gain", "norm.bias"), "gain": ("norm.gain",), "bias": ("norm.bias",)}[terms]
    return (Selection(roles, areas, of, layers, stack),)


@named_method
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
    missing = [_bias_vector(site, "unbiased", layers, True) for site in sites[which]] if add_missing else []
    if which == "query+ffn_up":  # a part of a fused projection's bias is no tensor of its own, a vector added there is
        return (*(_bias_vector(site, "biased", layers, add_missing) for site in sites[which]), *missing)
    of_layers = {"layers": ("norm.bias", "linear.bias"), "linear": ("linear.bias",), "norm": ("norm.bias",)}
    of_base = tuple(area for area in spec.AREAS if area != "vocabulary")
    roles, areas = (("bias",), of_base) if which == "all" else (of_layers[which], ("layers",))
    return (Selection(roles, areas, layers=layers, optional=add_missing), *missing)


_LINEARS = ("query", "key", "value", "output", "ffn_up", "ffn_down")


def _bias_vector(site: str, where: Literal["biased", "unbiased"], layers: LayersArg, optional: bool) -> Modification:
    insertion: Literal["parallel", "sequential"] = "sequential" if site == "norm" else "parallel"
    return Modification(site, Vector(where), insertion, layers=layers, optional=optional)


@named_method
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
        return (Selection(("all",), spec.AREAS, sparsity=sparsity),)
    return (Selection(("linear.weight", "linear.bias"), layers=layers, sparsity=sparsity),)


Site = str | tuple[str, ...]
Learned = float | str
"""A number, "learned" (starts at 1) or "learned(4)" (starts at 4)."""


def _checked_sites(at: Site, allowed: tuple[str, ...]) -> tuple[str, ...]:
    sites = (at,) if isinstance(at, str) else tuple(at)
    for site in sites:
        if site not in allowed:
            raise DeltuneError(unknown_name("site", site, allowed))
    if not sites:
        raise DeltuneError(f"at is empty; give one or more of {', '.join(allowed)}")
    return sites


def _attention_at(attention: str, site: str, sites: Sequence[str]) -> str:
    """attention= at one of several sites: it chooses among attentions, and means nothing at the others beside them."""
    outside_attention = site not in spec.ATTENTION_SITES and any(other in spec.ATTENTION_SITES for other in sites)
    return "all" if outside_attention else attention


def _compose(scale: Learned) -> Composition:
    if isinstance(scale, str):
        match = re.fullmatch(rf"learned(?:\(({NUMERAL})\))?", scale.replace(" ", ""))
        if match is None:
            raise DeltuneError(f"scale={excerpt(scale)}: give a number, 'learned' or 'learned(4)'")
        return Scale(float(match[1] or 1), learned=True)
    return Add() if scale == 1 else Scale(float(scale))


# -- bottlenecks ------------------------------------------------------------------------------------------------------


@named_method
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
    if style == "pfeiffer":
        return (Modification("ffn", form, "sequential", ADD, layers, stack, attention, x="normed"),)
    return tuple(
        Modification(site, form, "sequential", ADD, layers, stack, _attention_at(attention, site, ("attention", "ffn")))
        for site in ("attention", "ffn")
    )


@named_method
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
    sites = _checked_sites(at, ("ffn", "attention", "heads"))
    return tuple(
        Modification(site, form, "parallel", _compose(scale), layers, stack, _attention_at(attention, site, sites), x)
        for site in sites
    )


@named_method
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


@named_method
def prefix(
    length: int = 16,
    reparameterise: int | None = None,
    gate: bool = True,
    shift_positions: bool = False,
    layers: LayersArg = "all",
    stack: Literal["all", "encoder", "decoder"] = "all",
    attention: Literal["all", "self", "cross"] = "all",
) -> tuple[Modification | Selection, ...]:
    """softmax(q [P_k; K]ᵀ) [P_v; V]: l trained keys and values before those of every attention (UV eq. 5, 7).

    reparameterise=W: an MLP of inner width W makes them while training, folded when saved (UV §A.3). gate=False:
    h + softmax(q P_kᵀ) P_v (UV table 4). Every query sees the prefix, and positions do not shift; shift_positions=True:
    those of a stack with a prefix in its self-attention start at l, as PEFT has it.
    """
    form = Prefix(length, reparameterise, shift_positions)
    return (Modification("heads", form, "parallel", Gate() if gate else Add(), layers, stack, attention),)


@named_method
def prompt(
    length: int = 100, init_from: tuple[int, ...] | None = None, positions: Literal["shift", "none"] = "shift"
) -> tuple[Modification | Selection, ...]:
    """[P; E(x)]: l trained vectors before the input embeddings (Lester et al. 2021), of the encoder where there is one.

    init_from: token ids whose embeddings they start from, else N(0, 0.02). positions: "shift" (they take positions
    0 ... l-1 and the text follows) or "none" (no position; the text keeps its own).
    """
    return (Modification("embedding", Prompt(length, init_from, positions)),)


@named_method
def p_tuning_v2(
    length: int = 16,
    layers: LayersArg = "all",
    stack: Literal["all", "encoder", "decoder"] = "all",
    attention: Literal["all", "self", "cross"] = "all",
) -> tuple[Modification | Selection, ...]:
    """prefix(length) without reparameterisation (Liu et al. 2022)."""
    return prefix(length, layers=layers, stack=stack, attention=attention).parts


@named_method
def multi_head_parallel_adapter(
    length: int = 16,
    own_down: bool = False,
    layers: LayersArg = "all",
    stack: Literal["all", "encoder", "decoder"] = "all",
    attention: Literal["all", "self", "cross"] = "all",
) -> tuple[Modification | Selection, ...]:
    """h + relu(q P_kᵀ) P_v per head, q the model's own query (UV §3.3).

    own_down=True: h + relu(x W_down) P_v per head, each head with a W_down of its own.
    """
    form: Form = OwnMultiHead(length) if own_down else MultiHead(length)
    return (Modification("heads", form, "parallel", Add(), layers, stack, attention),)


# -- low rank ---------------------------------------------------------------------------------------------------------


@named_method
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
        if rank < 1:
            raise DeltuneError(f"rank={rank}: must be a whole number of at least 1")
        if scale != 1:
            raise DeltuneError("give scale or alpha, not both (scale = alpha / rank)")
        scale = alpha / rank
    sites: list[str] = []
    for site in _checked_sites(at, (*spec.PROJECTIONS, "ffn")):
        sites.extend(("ffn_up", "ffn_down") if site == "ffn" else (site,))
    form = LowRank(rank, dropout)
    return tuple(
        Modification(s, form, "parallel", _compose(scale), layers, stack, _attention_at(attention, s, sites))
        for s in sites
    )


# -- sums -------------------------------------------------------------------------------------------------------------


@named_method
def mam(
    length: int = 16,
    rank: int = 16,
    scale: float = 4,
    layers: LayersArg = "all",
    stack: Literal["all", "encoder", "decoder"] = "all",
    attention: Literal["all", "self", "cross"] = "all",
) -> tuple[Modification | Selection, ...]:
    """prefix(length) + scaled_parallel_adapter("ffn", rank, scale): the mix-and-match adapter (UV §4.6).

    attention: which have a prefix.
    """
    at_heads = prefix(length, layers=layers, stack=stack, attention=attention)
    return (at_heads + scaled_parallel_adapter("ffn", rank, scale, layers=layers, stack=stack)).parts


@named_method
def prefix_layernorm(
    length: int = 16, layers: LayersArg = "all", stack: Literal["all", "encoder", "decoder"] = "all"
) -> tuple[Modification | Selection, ...]:
    """prefix(length) + layernorm (LN §3.2)."""
    return (prefix(length, layers=layers, stack=stack) + layernorm(layers=layers, stack=stack)).parts


@named_method
def unipelt(
    length: int = 10,
    rank: int = 8,
    bottleneck: int = 48,
    layers: LayersArg = "all",
    stack: Literal["all", "encoder", "decoder"] = "all",
) -> tuple[Modification | Selection, ...]:
    """h + σ(x · w_g) Δh for a prefix, LoRA (one gate for query and value) and an adapter after the FFN (UniPELT; Mao et
    al. 2022)."""
    low_rank = LowRank(rank)
    return (
        Modification("heads", Prefix(length), "parallel", SigmoidGate("prefix"), layers, stack),
        Modification("query", low_rank, "parallel", SigmoidGate("lora"), layers, stack),
        Modification("value", low_rank, "parallel", SigmoidGate("lora"), layers, stack),
        Modification("ffn", Bottleneck(bottleneck), "sequential", SigmoidGate("adapter"), layers, stack),
    )


# -- rescaling and mixing ---------------------------------------------------------------------------------------------


@named_method
def ia3(
    layers: LayersArg = "all",
    stack: Literal["all", "encoder", "decoder"] = "all",
    attention: Literal["all", "self", "cross"] = "all",
) -> tuple[Modification | Selection, ...]:
    """w ⊙ h at the keys, the values and the FFN's inner activation, w = 1 at the start (Liu et al. 2022)."""
    sites = ("key", "value", "ffn_inner")
    return tuple(
        Modification(s, Rescale(), "sequential", ADD, layers, stack, _attention_at(attention, s, sites)) for s in sites
    )


@named_method
def three_vectors() -> tuple[Modification | Selection, ...]:
    """γ ⊙ Σ_l α_l h_l + β over all hidden states, where the head reads (3V; LN table 1).

    The identity at the start. Error: a model that generates or chooses, which has no head over hidden states.
    """
    return (Modification("hidden_states", Mixture()),)


# -- arbitrary parameters ---------------------------------------------------------------------------------------------


def apet(
    method: Method | Literal["add", "concatenate", "plugin"],
    parameters: int | str,
    pattern: Literal["adjacent", "discrete"] = "discrete",
    along: Literal["rows", "columns"] = "rows",
    seed: int = 0,
) -> MaskedMethod:
    """W ⊙ m: exactly N scalars of any method are trained under a fixed mask (AP §5.1, eq. 14 to 17).

    method: any method or sum, or one of the paper's operations: add (vectors on the sub-layers' outputs, eq. 14),
    concatenate (prompt vectors and low rank, eq. 15), plugin (adapters, eq. 16). parameters: N, or a share of the
    base model such as "0.05%"; pattern: discrete (uniform) or adjacent (consecutive rows or columns); seed of the draw.
    """
    if isinstance(method, str) and method not in OPERATIONS:
        raise DeltuneError(unknown_name("operation", method, [*OPERATIONS, "a method"]))
    return MaskedMethod(OPERATIONS[method]() if isinstance(method, str) else method, parameters, pattern, along, seed)


OPERATIONS: Mapping[str, Callable[[], Method]] = {
    "add": lambda: Modification("attention", Vector()) + Modification("ffn", Vector()),
    "concatenate": lambda: prompt() + lora(),
    "plugin": lambda: adapter(),
}
"""The three operations that insert a masked weight (AP §C)."""
