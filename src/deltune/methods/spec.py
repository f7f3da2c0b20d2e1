"""Methods as values: a method is a sum of modifications of hidden states and selections of existing parameters.

A Modification is a point of the design space (UV table 1): site, form, insertion and composition, and where it applies.
A Selection trains existing parameters, chosen by role. All methods are frozen, comparable and hashable, and their repr
is the expression that makes them.
"""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, wraps
from inspect import signature
from typing import Annotated, Any, ClassVar, Literal, NoReturn, ParamSpec, TypeVar, cast

from ..anatomy.types import html_table
from ..errors import DeltuneError, check_choice, error_from_problems, unknown_name
from .compositions import Add, Composition, Scale, SigmoidGate
from .forms.attention import Prefix
from .forms.base import INSERTIONS, Form, Routed, check_form_class, check_frozen, refuse_sum
from .forms.hidden import Vector
from .other_names import hint_for_site
from .parser import (
    argument_types,
    check_fields,
    fits_type,
    parse_percentage,
    signature_text,
    to_expression,
    type_mismatch,
    unknown_argument,
)
from .positions import ALL, Positions, check_positions

SITES = {
    "heads": "per-head attention output, before W_o",
    "attention": "output of W_o, before dropout, residual and norm",
    "query": "output of the query projection",
    "key": "output of the key projection",
    "value": "output of the value projection",
    "output": "output of the output projection W_o, as a projection",
    "ffn": "output of the FFN's last linear, before residual and norm",
    "ffn_up": "outputs of the FFN's input linears",
    "gate_proj": "of a gated FFN, output of the input linear that the activation follows",
    "up_proj": "of a gated FFN, output of the input linear that the activation is multiplied by",
    "ffn_down": "output of the FFN's last linear, as a projection",
    "ffn_inner": "the FFN's inner activation, before its last linear",
    "router": "scores of the router of a mixture of experts, as a projection",
    "norm": "outputs of the norms in the layers",
    "embedding": "the input hidden states: vectors before them, or the word embeddings as a projection of token ids",
    "pooler": "output of the pooler's linear, as a projection",
    "lm_head": "output of the projection to the vocabulary, as a projection",
    "block": "a layer's output",
    "hidden_states": "all layers' outputs, read together by the head",
}
"""The sites that a modification can act at (UV's third dimension), with what each is."""

ATTENTION_SITES = ("heads", "attention", "query", "key", "value", "output")
"""The sites that each attention has, where attention= chooses."""

PROJECTIONS = ("query", "key", "value", "output", "ffn_up", "ffn_down")
"""The linears of attentions and FFNs, each in one site."""

FFN_LINEARS = ("ffn_up", "ffn_down", "gate_proj", "up_proj")
"""The linears of FFNs, where experts= chooses in a mixture of experts."""

OTHER_PROJECTIONS = ("gate_proj", "up_proj", "router", "embedding", "pooler", "lm_head")
"""Further sites that are linears: parts of another site, and those outside of attentions and FFNs."""

OUTSIDE_LAYERS = ("embedding", "pooler", "lm_head", "hidden_states")
"""The sites that are in no layer."""
LAYERS = ("all", "lower half", "upper half")
OUTER_LAYERS = re.compile("(first|last) ([1-9][0-9]{0,5})")
STACKS = ("all", "encoder", "decoder")
ATTENTIONS = ("all", "self", "cross")
TOWERS = ("main", "text", "vision", "audio", "projector", "all")
X_CHOICES = ("input", "residual", "normed")

LayersArg = Annotated[
    str | tuple[int, ...], "'all', 'lower half', 'upper half', 'first N', 'last N' or a list of indices"
]
ExpertsArg = Annotated[str | tuple[int, ...], "'all', 'shared', 'routed' or a list of numbers"]
P = ParamSpec("P")


class Method:
    """Anything that can be attached to a model. `a + b` is the sum of two methods.

    It prints as its shortest expression, without arguments at their defaults, unless `printed_as` gave it another one.
    """

    _text: ClassVar[str | None] = None

    def __repr__(self) -> str:
        return self._text or self._expression()

    def _expression(self) -> str:
        """Return the shortest expression of the method."""
        return to_expression(self)

    def __add__(self, other: Method) -> Method:
        if not isinstance(other, Method):
            refuse_sum(self, other)
        return MethodSum((*self.terms, *other.terms))

    def __radd__(self, other: object) -> Method:
        if not isinstance(other, int) or other != 0:  # sum() begins with 0
            refuse_sum(other, self)
        return self

    def _refuse_arithmetic(self, other: object) -> NoReturn:
        raise DeltuneError(
            f"methods can only be added; how strongly {self!r} acts is an argument of it, such as lora(scale=2) or "
            "Modification(…, compose=Scale(2))"
        )

    __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse_arithmetic

    @property
    def terms(self) -> tuple[Method, ...]:
        """The methods that are joined by +, in order; one for a method that is no sum."""
        return (self,)

    @property
    def tasks(self) -> int:
        """How many tasks rows may have, of which a pass is told each row's; 1 where there is nothing to tell."""
        forms = [part.form for part in self.parts if isinstance(part, Modification)]
        return max((form.tasks for form in forms if isinstance(form, Routed)), default=1)

    @property
    def parts(self) -> tuple[Modification | Selection, ...]:
        """The modifications and selections that the method consists of, in order."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        rows = [part._table_row() for part in self.parts]
        return html_table(repr(self), ("what", "where", "layers", "how"), rows)


ADD = Add()

SITES_FOR_NEED = {"attention": ("heads",), "tokens": ("embedding",), "states": ("hidden_states",)}
"""The sites that offer what `Form.needs` names, where it is more than hidden states at one point."""


@dataclass(frozen=True, repr=False)
class Modification(Method):
    """Change the hidden states at every place of a site, h <- compose(h, form(u)).

    u, what the form reads, is the input x of the frozen sub-module (parallel) or the hidden states h (sequential).

    Args:
        site: The place, one of `SITES`, such as "query" or "ffn"; or the paths of linears as a pattern with * for any
            text, such as "*.mixer.in_proj".
        form: What Δh is computed by, such as `LowRank(8)`.
        insertion: "parallel" or "sequential".
        compose: How Δh joins h.
        layers: "all", "lower half", "upper half", "first N", "last N", or indices within each stack (-1 is the last).
        stack: "all", "encoder" or "decoder".
        attention: "all", "self" or "cross", at the sites inside attentions.
        x: "input" (what the frozen sub-module reads), "residual" (the residual stream before its norm) or "normed"
            (sequential after the FFN's add & norm, with that norm applied again).
        optional: Whether a model without such a place is accepted.
        tower: The part of a multimodal model to tune: "main" (the default, what reads the model's main input, which is
            the text in a vision-language model), "text", "vision", "audio" or "all".
        experts: At linears of FFNs that are mixtures of experts: "all", "shared" (those that every token goes through),
            "routed" (those that the router chooses from), or the numbers of some of the latter.
        positions: At which tokens it acts: "all"; ends of the text such as "first 2 + last 2"; or the ids of a
            sequence, from whose last occurrence on it acts. They are those of the text that a pass reads, without
            padding; a pass that continues a cache goes on where a sequence was found, and has no ends.

    Raises:
        DeltuneError: A value does not exist, or the combination has no meaning; the message says why.
    """

    site: str
    form: Form
    insertion: Literal["parallel", "sequential", "input"] = "parallel"
    compose: Composition = ADD
    layers: LayersArg = "all"
    stack: str = "all"
    attention: str = "all"
    x: str = "input"
    optional: bool = field(default=False, kw_only=True)
    tower: str = "main"
    experts: ExpertsArg = "all"
    positions: Positions = field(default=ALL, kw_only=True)

    def __post_init__(self) -> None:
        check_fields(self)
        check_positions(self.positions)
        check_form_class(type(self.form))
        check_frozen(type(self.compose))
        check_scope(self.layers, self.stack, self.attention, self.tower)
        check_experts(self.experts, (self.site,))
        for name, value, allowed in (
            ("site", "ffn" if is_pattern(self.site) else self.site, SITES),
            ("insertion", self.insertion, INSERTIONS),
            ("x", self.x, X_CHOICES),
        ):
            if value not in allowed:
                hint = hint_for_site(value) if name == "site" else None
                raise DeltuneError(unknown_name(name, value, allowed, hint=hint))
        if self.attention != "all" and self.site not in ATTENTION_SITES:
            raise DeltuneError(f"attention={self.attention!r} chooses attentions; site {self.site!r} is in none")
        needs, form = self.form.needs, type(self.form).__name__
        if needs in SITES_FOR_NEED and self.site not in SITES_FOR_NEED[needs]:
            raise DeltuneError(f"{form} acts at site {SITES_FOR_NEED[needs][0]!r}, not at {self.site!r}")
        if self.site == "hidden_states" and needs != "states":
            raise DeltuneError(f"{form} cannot act at site {self.site!r}: it changes hidden states at one point")
        if self.insertion not in (possible := self.form.insertions):
            raise DeltuneError(
                f"{form} is computed from the weight of a projection, and so reads what the projection reads: give "
                f"insertion={possible[-1]!r}"
            )
        if self.site == "embedding" and needs == "hidden" and self.insertion == "parallel":
            if not self.form.reads_ids:
                advice = "give insertion='sequential'" if "sequential" in possible else "choose another site"
                raise DeltuneError(f"the embedding reads token ids, which {form} cannot: {advice}")
            if self.compose.reads_x:
                raise DeltuneError(f"the embedding reads token ids, which {self.compose!r} cannot read")
        if self.site in ("norm", "ffn_inner") and self.insertion != "sequential":
            raise DeltuneError(f"site {self.site!r} has no input x of its own: give insertion='sequential'")
        if self.compose.in_softmax and not isinstance(self.form, Prefix):
            raise DeltuneError(
                f"{type(self.compose).__name__} composes a Prefix only, which shares a softmax with the model's keys"
            )
        if needs in SITES_FOR_NEED and self.insertion == "sequential":
            raise DeltuneError(f"{type(self.form).__name__} reads the input x: give insertion='parallel'")
        if self.x == "residual" and (self.site not in ("attention", "ffn", "heads") or self.insertion != "parallel"):
            raise DeltuneError("x='residual' is for a parallel insertion at 'attention', 'ffn' or 'heads'")
        if self.x == "normed" and (self.site, self.insertion) != ("ffn", "sequential"):
            raise DeltuneError("x='normed' is for a sequential insertion at 'ffn'")
        with_biases = (*PROJECTIONS, *OTHER_PROJECTIONS, "norm")
        of_some = isinstance(self.form, Vector) and self.form.where != "all"
        if of_some and self.site not in with_biases and not is_pattern(self.site):
            raise DeltuneError(f"{self.form!r} acts at one of {', '.join(with_biases)}")
        if self.positions != ALL and self.site in OUTSIDE_LAYERS:
            raise DeltuneError(f"positions={self.positions!r} choose tokens in layers, and {self.site!r} is in none")
        if self.site in OUTSIDE_LAYERS and (self.layers, self.stack) != ("all", "all"):
            raise DeltuneError(f"site {self.site!r} is in no layer, so layers= and stack= choose nothing there")
        if needs == "tokens" and self.compose != ADD:
            raise DeltuneError(f"vectors before the embeddings are joined by Add() alone, not by {self.compose!r}")
        if isinstance(self.form, Prefix) and self.form.length == 1 and not self.compose.in_softmax:
            raise DeltuneError(
                "one prefix vector without the gate of UV eq. 8: its softmax is 1 whatever its key is, so that the key "
                "would never be trained; give a length of at least 2"
            )
        if isinstance(self.compose, Scale) and not self.compose.value and self.form.starts_at_zero:
            raise DeltuneError(
                f"a learned scale that starts at 0 on {self.form!r}, which starts at 0 too: neither would ever have a "
                "gradient; start the scale at another number"
            )
        without_x = needs in ("tokens", "states") or self.site in ("norm", "ffn_inner")
        if isinstance(self.compose, SigmoidGate) and without_x:
            raise DeltuneError(
                f"{type(self.compose).__name__} reads a sub-module's input, which site {self.site!r} does not have"
            )

    @property
    def parts(self) -> tuple[Modification | Selection, ...]:
        return (self,)

    def _table_row(self) -> tuple[str, ...]:
        """Return the row that a notebook shows: what, where, layers and how."""
        where = self.site if self.attention == "all" else f"{self.site} of {self.attention} attention"
        where += "" if self.experts == "all" else f" of experts {self.experts}"
        return repr(self.form), where, _scope_text(self.layers, self.stack), f"{self.insertion}, {self.compose!r}"


@dataclass(frozen=True, repr=False)
class Selection(Method):
    """Train existing parameters in place, chosen by role and area and never by name.

    Args:
        roles: "norm.gain", "norm.bias", "linear.weight", "linear.bias", "bias" (every bias), "embedding" (the word
            embeddings and other tables of vectors) or "all".
        areas: "layers", "embedding", "final", "pooler", "vocabulary" or "other".
        of: In the layers, what belongs to the "attention" or to the "ffn", their norms included, or "both".
        layers: "all", "lower half", "upper half", "first N", "last N", or indices within each stack (-1 is the last).
        stack: "all", "encoder" or "decoder".
        sparsity: The share of the scalars that differ in the end, which training finds: W + z ⊙ δ with gates z under an
            L0 penalty (Guo et al. 2021). None: all of them are trained.
        optional: Whether a model without such parameters is accepted.
        tower: The part of a multimodal model to tune: "main" (the default, what reads the model's main input, which is
            the text in a vision-language model), "text", "vision", "audio", "projector" (between two of them) or "all".
        tokens: Of the tables with a row for each token, the word embeddings and an output projection of its own in the
            areas, the rows of these token ids alone; with roles=("embedding",).

    Raises:
        DeltuneError: A value does not exist, or the combination has no meaning; the message says why.
    """

    roles: tuple[str, ...]
    areas: tuple[str, ...] = ("layers",)
    of: str = "both"
    layers: LayersArg = "all"
    stack: str = "all"
    sparsity: float | None = None
    optional: bool = field(default=False, kw_only=True)
    tower: str = "main"
    tokens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_scope(self.layers, self.stack, tower=self.tower)
        if self.tokens is not None:
            if not self.tokens or any(i < 0 for i in self.tokens) or len(set(self.tokens)) < len(self.tokens):
                raise DeltuneError(f"tokens={self.tokens!r}: give token ids, each once, from 0 on")
            if self.roles != ("embedding",) or self.sparsity is not None:
                raise DeltuneError("tokens= chooses rows of embeddings: give roles=('embedding',), and no sparsity")
        if self.sparsity is not None and not 0 < self.sparsity < 1:
            raise DeltuneError(f"sparsity={self.sparsity}: the share that changes lies between 0 and 1")
        for role in self.roles:
            check_choice("role", role, ROLES)
        for area in self.areas:
            if area not in AREAS:
                hint = f"It is a part of the layers: give of={area!r}." if area in ("attention", "ffn") else None
                raise DeltuneError(unknown_name("area", area, AREAS, hint=hint))
        check_choice("of", self.of, ("both", "attention", "ffn"))

    @property
    def parts(self) -> tuple[Modification | Selection, ...]:
        return (self,)

    def _table_row(self) -> tuple[str, ...]:
        """Return the row that a notebook shows: what, where, layers and how."""
        where = ", ".join(self.areas) if self.of == "both" else f"{', '.join(self.areas)} ({self.of})"
        how = "in place" if self.sparsity is None else f"a share of {self.sparsity:g} in place"
        how = how if self.tokens is None else f"the rows of {len(self.tokens)} tokens in place"
        return ", ".join(self.roles), where, _scope_text(self.layers, self.stack), how


def _scope_text(layers: LayersArg, stack: str) -> str:
    text = layers if isinstance(layers, str) else ", ".join(map(str, layers))
    return text if stack == "all" else f"{text} of the {stack}"


ROLES = ("norm.gain", "norm.bias", "linear.weight", "linear.bias", "bias", "embedding", "all")
AREAS = ("layers", "embedding", "final", "pooler", "vocabulary", "other")


@dataclass(frozen=True, repr=False)
class NamedMethod(Method):
    """A method of the registry, such as `lora(rank=8)`."""

    name: str  # its name
    non_defaults: tuple[tuple[str, Any], ...]  # the arguments that differ from their defaults
    arguments: tuple[tuple[str, Any], ...]  # all arguments as they act, those that follow from others included
    built_parts: tuple[Modification | Selection, ...]  # the modifications and selections that it consists of

    @property
    def parts(self) -> tuple[Modification | Selection, ...]:
        return self.built_parts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NamedMethod) and (self.name, self.non_defaults) == (other.name, other.non_defaults)

    def __hash__(self) -> int:
        return hash((self.name, self.non_defaults))

    def _expression(self) -> str:
        return _call_text(self.name, self.non_defaults)


Maker = TypeVar("Maker", bound=Callable[..., Any])


def derives(derive: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Maker], Maker]:
    """Tell `named_method` how some arguments of a method follow from others.

    Args:
        derive: Returns all arguments as they act, from those that were given.
    """

    def mark(make: Maker) -> Maker:
        make.derive = derive  # type: ignore[attr-defined]
        return make

    return mark


def named_method(make: Callable[P, tuple[Modification | Selection, ...]]) -> Callable[P, NamedMethod]:
    """Turn a function that returns modifications and selections into one that returns a named method.

    The new function checks its arguments against the type hints, as expressions are checked.

    Args:
        make: The function; the first sentence of its docstring says what the method computes.

    Returns:
        The new function, under the same name.
    """
    accepted = signature(make)
    hints = cache(lambda: argument_types(make))  # resolved at the first call, when all modules are imported

    @wraps(make)
    def method(*args: P.args, **kwargs: P.kwargs) -> NamedMethod:
        if unknown := [key for key in kwargs if key not in accepted.parameters]:
            raise DeltuneError("; ".join(unknown_argument(make.__name__, key, make) for key in unknown))
        try:
            bound = accepted.bind(*args, **kwargs)
        except TypeError as error:
            raise DeltuneError(f"{make.__name__}: {error}; it takes {signature_text(make)}") from None
        bound.apply_defaults()
        arguments = {key: tuple(v) if isinstance(v, list) else v for key, v in bound.arguments.items()}
        problems = [type_mismatch(k, hints()[k], v) for k, v in arguments.items() if not fits_type(hints()[k], v)]
        if problems:
            raise error_from_problems(make.__name__, problems)
        parts = cast(Callable[..., tuple[Modification | Selection, ...]], make)(**arguments)
        derive: Callable[[dict[str, Any]], dict[str, Any]] = getattr(make, "derive", dict)

        def is_given(key: str, value: Any) -> bool:
            default = accepted.parameters[key].default
            return bool(value != default and derive({**arguments, key: default})[key] != value)

        non_defaults = tuple((key, value) for key, value in arguments.items() if is_given(key, value))
        return NamedMethod(make.__name__, non_defaults, tuple(derive(arguments).items()), parts)

    method.__signature__ = accepted.replace(return_annotation="NamedMethod")  # type: ignore[attr-defined]
    _NAMED.add(method)
    return method


_NAMED: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()
"""The functions that `named_method` has made."""


def is_named_method(function: object) -> bool:
    """Whether a function is what `named_method` has made of another."""
    return callable(function) and not isinstance(function, type) and function in _NAMED


@dataclass(frozen=True, repr=False)
class MaskedMethod(Method):
    """Train exactly N scalars of a method, W ⊙ m; the others stay zero, or pretrained (AP §5.1).

    Args:
        method: The method.
        parameters: N, or a share of the base model such as "0.05%".
        pattern: "discrete", "uniform" or "adjacent".
        along: "rows" or "columns".
        seed: The seed of the draw.
    """

    method: Method
    parameters: int | str
    pattern: str = "discrete"
    along: str = "rows"
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        for name, value, allowed in (
            ("pattern", self.pattern, ("discrete", "uniform", "adjacent")),
            ("along", self.along, ("rows", "columns")),
        ):
            check_choice(name, value, allowed)
        if any(isinstance(term, MaskedMethod) for term in self.method.terms):
            raise DeltuneError("a mask on a mask: give one apet(...) a method with all terms")
        if any(isinstance(part, Selection) and part.sparsity is not None for part in self.method.parts):
            raise DeltuneError(f"{self.method!r} finds its mask by training; give its sparsity instead of apet(...)")
        if any(isinstance(part, Selection) and part.tokens is not None for part in self.method.parts):
            raise DeltuneError(
                f"{self.method!r} has rows that you chose, and a mask draws its own: put it outside of apet(...)"
            )
        if isinstance(self.parameters, str) and parse_percentage(self.parameters) is None:
            raise DeltuneError(f"parameters={self.parameters!r}: give a number or a share such as '0.05%'")

    def target_count(self, base: Callable[[], int]) -> int:
        """Return N.

        Args:
            base: Returns the scalars of the base model; called only where N is a share. The result is rounded down.
        """
        share = parse_percentage(self.parameters) if isinstance(self.parameters, str) else None
        return int(self.parameters) if share is None else int(base() * share)

    @property
    def parts(self) -> tuple[Modification | Selection, ...]:
        return self.method.parts

    def expression_around(self, method: str) -> str:
        """Return the expression that masks the method of another expression."""
        arguments = [("parameters", self.parameters), ("pattern", self.pattern), ("along", self.along)]
        return f"apet({method}, {', '.join(f'{k}={v!r}' for k, v in [*arguments, ('seed', self.seed)])})"

    def _expression(self) -> str:
        return self.expression_around(repr(self.method))


@dataclass(frozen=True, repr=False)
class MethodSum(Method):
    """Several methods at once. + is associative, and the terms stay in their order."""

    members: tuple[Method, ...]

    @property
    def terms(self) -> tuple[Method, ...]:
        return self.members

    @property
    def parts(self) -> tuple[Modification | Selection, ...]:
        return tuple(part for member in self.members for part in member.parts)

    def _expression(self) -> str:
        return " + ".join(repr(member) for member in self.members)


def _call_text(name: str, arguments: tuple[tuple[str, Any], ...]) -> str:
    text = ", ".join(f"{key}={value!r}" for key, value in arguments)
    return f"{name}({text})" if text else name


def printed_as(method: Method, text: str) -> Method:
    """Return the same method, equal to this one, which prints as another expression of it."""
    same = copy.copy(method)
    object.__setattr__(same, "_text", text)
    return same


def expressions_apart(methods: Sequence[Method]) -> list[str]:
    """Return expressions that tell methods apart: what one of them gives an argument stands in all, as lora(rank=8)."""
    terms = [term for method in methods for term in method.terms if isinstance(term, NamedMethod)]
    arguments = {(term.name, key) for term in terms for key, _ in term.non_defaults}

    def text(term: Method) -> str:
        if not isinstance(term, NamedMethod):
            return repr(term)
        return _call_text(term.name, tuple(pair for pair in term.arguments if (term.name, pair[0]) in arguments))

    return [" + ".join(map(text, method.terms)) for method in methods]


def explicit_expression(method: Method) -> str:
    """Return the expression with all arguments of its named methods, for files that must outlive changed defaults."""
    return " + ".join(_explicit_term(term) for term in method.terms)


def _explicit_term(term: Method) -> str:
    if isinstance(term, MaskedMethod):
        return term.expression_around(explicit_expression(term.method))
    return _call_text(term.name, term.arguments) if isinstance(term, NamedMethod) else repr(term)


def check_experts(experts: ExpertsArg, sites: tuple[str, ...]) -> None:
    """Check the argument that chooses experts.

    Raises:
        DeltuneError: It does not exist, or none of the sites is a linear of an FFN.
    """
    if isinstance(experts, str):
        if experts not in ("all", "shared", "routed"):
            raise DeltuneError(unknown_name("experts", experts, ("all", "shared", "routed", "a list of numbers")))
    elif not experts or any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in experts):
        raise DeltuneError(f"experts={experts!r}: give 'all', 'shared', 'routed' or a list of numbers from 0 on")
    elif len(set(experts)) < len(experts):
        raise DeltuneError(f"experts={experts!r}: a number stands twice")
    if experts != "all" and not any(site in FFN_LINEARS for site in sites):
        raise DeltuneError(f"experts={experts!r} chooses among linears of FFNs: {', '.join(FFN_LINEARS)}")


def is_pattern(site: str) -> bool:
    """Whether a site is the path of a module, or a pattern of paths in which * stands for any text, and not a name."""
    return "." in site or "*" in site


def check_scope(layers: LayersArg, stack: str = "all", attention: str = "all", tower: str = "main") -> None:
    """Check the arguments that choose layers, a stack, attentions and towers.

    Raises:
        DeltuneError: One of them does not exist.
    """
    if isinstance(layers, str):
        if layers not in LAYERS and OUTER_LAYERS.fullmatch(layers) is None:
            raise DeltuneError(unknown_name("layers", layers, [*LAYERS, "first N", "last N", "a list of indices"]))
    elif not layers or any(not isinstance(i, int) or isinstance(i, bool) for i in layers):
        choices = ", ".join(map(repr, (*LAYERS, "first N", "last N")))
        raise DeltuneError(f"layers={layers!r}: give {choices} or a list of indices, of which -1 is the last")
    check_choice("stack", stack, STACKS)
    check_choice("attention", attention, ATTENTIONS)
    check_choice("tower", tower, TOWERS)
