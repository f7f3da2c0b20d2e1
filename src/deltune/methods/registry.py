"""The registry of named methods, the names that expressions may use, and `deltune.parse`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import lru_cache
from inspect import isclass, signature
from math import log
from typing import Any, TypeVar

from ..errors import DeltuneError, error_from_problems, excerpt
from . import library, parser, spec
from .compositions import Add, Composition, Gate, PrefixGate, Scale, SigmoidGate
from .forms import (
    attention,
    entries,
    hidden,
    low_rank,
    mix,
    orthogonal,
    prompt,
    routed,
    shared,
    side,
    spectral,
    structured,
    weights,
)
from .forms.base import Form, check_form_class, check_frozen
from .schedules import ClusterSchedule, RankSchedule
from .spec import MaskedMethod, Method, Modification, NamedMethod, Selection

DEFAULT_RATE, DEFAULT_SHORT_RATE = 1e-3, 1e-2
"""The learning rates of methods that have none of their own, in long and in short runs."""
SHORT_STEPS, LONG_STEPS = 320, 5000
"""The most steps of a short run, which the study own/defaults measured, and the fewest steps of a long run."""


@dataclass(frozen=True)
class RegistryEntry:
    """What is known of a named method."""

    make: Callable[..., Method]  # the function that makes the method
    paper: str  # where it was published
    # what it trains in a layer with one self-attention and a plain FFN, biases apart, as a formula: d is the width, m
    # the inner width of the FFN, r the rank, l the length, b the bottleneck, L the number of layers, and N_h the number
    # of heads
    scalars: str
    example: str  # an expression with it
    rate: float = DEFAULT_RATE  # the learning rate of long runs where the user gives none
    short_rate: float = DEFAULT_SHORT_RATE  # the learning rate of short runs

    @property
    def plain(self) -> Method:
        """The method with every argument at its default; the example where an argument has none."""
        needed = any(p.default is p.empty for p in signature(self.make).parameters.values())
        return parse(self.example) if needed else self.make()

    @property
    def formula(self) -> str:
        """The first sentence of the function's docstring, with the formula."""
        return " ".join((self.make.__doc__ or "").split("\n\n")[0].split())


_ENTRIES = {
    "selections: existing parameters, trained in place": (
        RegistryEntry(library.full, "all three", "all", "full", rate=5e-5, short_rate=3e-4),
        RegistryEntry(library.head, "Alain and Bengio 2017", "0", "head", short_rate=3e-2),
        RegistryEntry(library.layernorm, "LN §2, eq. 1", "4d (+ 2d)", "layernorm(terms='gain')", rate=1e-2),
        RegistryEntry(library.bitfit, "Ben Zaken et al. 2022", "7d + m", "bitfit(which='query+ffn_up')"),
        RegistryEntry(library.trainable_tokens, "ours", "d for each token, once",
            "trainable_tokens(tokens=(5, 7)) + lora" ),
        RegistryEntry(library.diff_pruning, "Guo et al. 2021", "share of 4d² + 2dm + 5d + m",
            "diff_pruning(sparsity=0.01)", rate=5e-5),
        RegistryEntry(library.apet, "AP §5.1, §C", "N in all", "apet(lora(rank=8), parameters='0.05%')"),
    ),
    "adapters: changes of hidden states": (
        RegistryEntry(library.adapter, "UV eq. 4; Houlsby et al. 2019; Pfeiffer et al. 2021", "4dr",
            "adapter(style='pfeiffer', rank=32)"),
        RegistryEntry(library.parallel_adapter, "UV §3.3", "2dr", "parallel_adapter(at='attention', rank=32)"),
        RegistryEntry(library.scaled_parallel_adapter, "UV §3.3, §4.5", "2dr",
            "scaled_parallel_adapter(rank=512, scale='learned')", short_rate=3e-3),  # 1e-2 diverges
        RegistryEntry(library.multi_head_parallel_adapter, "UV §3.3, table 4", "2ld; (N_h + 1)·l·d with own_down",
            "multi_head_parallel_adapter(length=30)"),
        RegistryEntry(library.compacter, "Karimi Mahabadi et al. 2021", "4d + 6r; n³ once", "compacter(rank=32)"),
        RegistryEntry(library.loreft, "Wu et al. 2024", "2dr + r", "loreft(rank=4, positions='first 4 + last 4')"),
        RegistryEntry(library.ia3, "Liu et al. 2022", "2d + m", "ia3 + layernorm", short_rate=3e-2),
        RegistryEntry(library.ssf, "Lian et al. 2022", "10d + 2m", "ssf(at=('query', 'value', 'ffn'))"),
        RegistryEntry(library.beft, "PEFT", "d", "beft(at=('query', 'value'))"),
        RegistryEntry(library.ladder, "Sung et al. 2022",
            "wd + 12w² + 2w + 1; 2wd + w once", "ladder(width=64, heads=4)"),
        RegistryEntry(library.three_vectors, "LN, table 1", "2d + L + 1 once", "three_vectors", short_rate=3e-2),
    ),
    "prompts: vectors that an attention reads beside the text": (
        RegistryEntry(library.prefix, "UV eq. 5; Li and Liang 2021", "2ld", "prefix(length=16) + layernorm",
            rate=1e-2, short_rate=3e-2),
        RegistryEntry(library.p_tuning_v2, "Liu et al. 2022", "2ld", "p_tuning_v2(length=20)", rate=1e-2,
            short_rate=3e-2 ),
        RegistryEntry(library.prompt, "Lester et al. 2021", "l·d once", "prompt(length=20)", rate=3e-2,
            short_rate=1e-1 ),
    ),
    "low-rank: matrices of few ranks, blocks or products": (
        RegistryEntry(library.lora, "UV eq. 6; Hu et al. 2021", "4dr", "lora(rank=8, at=('query', 'value'))"),
        RegistryEntry(library.alora, "Greenewald et al. 2025", "6dr", "alora(invocation=(5, 7))"),
        RegistryEntry(library.adalora, "Zhang et al. 2023", "6dr + 3r", "adalora(rank=8, initial_rank=12)"),
        RegistryEntry(library.dora, "Liu et al. 2024", "4dr + 2d", "dora(rank=8, at='ffn')"),
        RegistryEntry(library.pissa, "Meng et al. 2024", "4dr", "pissa(rank=8)"),
        RegistryEntry(library.olora, "Büyükakyüz 2024", "4dr", "olora(rank=8)"),
        RegistryEntry(library.corda, "Yang et al. 2024", "4dr", "corda(rank=8)"),
        RegistryEntry(library.lora_ga, "Wang et al. 2024", "4dr", "lora_ga(rank=8)"),
        RegistryEntry(library.eva, "Paischer et al. 2024", "4dr", "eva(rank=8)"),
        RegistryEntry(library.loftq, "Li et al. 2023", "10dr + 2mr", "loftq(rank=8)"),
        RegistryEntry(library.mica, "PEFT", "2dr", "mica(rank=8)"),
        RegistryEntry(library.lora_fa, "Zhang et al. 2023", "2dr", "lora_fa(rank=8)"),
        RegistryEntry(library.lora_xs, "Bałazy et al. 2024", "2r²", "lora_xs(rank=25)"),
        RegistryEntry(library.hira, "Huang et al. 2025", "4dr", "hira(rank=16)"),
        RegistryEntry(library.glora, "Chavan et al. 2023", "8dr + 2(d + 1)r + 4", "glora(rank=4, bias='vector')"),
        RegistryEntry(library.deft, "PEFT", "4dr", "deft(rank=4)"),
        RegistryEntry(library.peanut, "PEFT", "4dr + 4lr²", "peanut(rank=16, depth=1)"),
        RegistryEntry(library.delora, "Bini et al. 2025", "4dr + 2", "delora(rank=8, bound=5)"),
        RegistryEntry(library.loha, "Hyeon-Woo et al. 2022", "8dr", "loha(rank=4)"),
        RegistryEntry(library.lokr, "Yeh et al. 2024", "about 2d + 4r√d", "lokr(rank=4, factor=8)"),
        RegistryEntry(library.miss, "Kang and Yin 2024", "2dr", "miss(rank=32)", short_rate=3e-3),
        RegistryEntry(library.gralora, "Jung et al. 2025", "4dr", "gralora(rank=8, blocks=4)"),
    ),
    "routers: experts of low rank, weighed by the task of a row or by what a first pass reads": (
        RegistryEntry(library.poly, "Ponti et al. 2023", "4drs + 2qst", "poly(tasks=3, rank=4)", rate=3e-3,
            short_rate=3e-2),  # r divides its change, and skills are averaged: at one rate a step is 1 / 2r of LoRA's
        RegistryEntry(library.mtl_lora, "Yang et al. 2024", "2dr(n + 1) + 2(r² + n)t", "mtl_lora(tasks=3, rank=4)"),
        RegistryEntry(library.xlora, "Buehler and Buehler 2024", "4dnr; (d + 1)n once", "xlora(number=4, rank=4)"),
    ),
    "shared: few numbers and matrices that all places have in common": (
        RegistryEntry(library.vera, "Kopiczko et al. 2024", "2(d + r)", "vera(rank=64) + layernorm", short_rate=3e-2),
        RegistryEntry(library.randlora, "ICLR 2025", "2(d + d²/r)", "randlora(rank=64)"),
        RegistryEntry(library.vblora, "Li et al. 2024", "4rhd/b + hb once", "vblora(vectors=64, length=32)"),
        RegistryEntry(library.unilora, "Li et al. 2025", "n once", "unilora(length=1000)"),
        RegistryEntry(library.tinylora, "PEFT", "2u", "tinylora(parameters=16, tied=True)"),
        RegistryEntry(library.nola, "Koohpayegani et al. 2024", "4n", "nola(rank=8, bases=100)"),
    ),
    "orthogonal: rotations and reflections": (
        RegistryEntry(library.oft, "Qiu et al. 2023", "d(b − 1)", "oft(block_size=16)"),
        RegistryEntry(library.boft, "Liu et al. 2024", "2dbm + 2d", "boft(block_size=8, factors=2)"),
        RegistryEntry(library.hra, "Yuan et al. 2024", "2dr", "hra(rank=4)"),
        RegistryEntry(library.psoft, "PEFT", "r(r − 1) + 4r", "psoft(rank=16)"),
        RegistryEntry(library.road, "Liao and Monz 2024", "2d", "road(variant=2, group_size=32)"),
    ),
    "spectral and sparse: transforms, spectra and entries of weights": (
        RegistryEntry(library.fourierft, "Gao et al. 2024", "2n", "fourierft(frequencies=500)"),
        RegistryEntry(library.waveft, "Bilican et al. 2025", "2n", "waveft(frequencies=1000)"),
        RegistryEntry(library.c3a, "Chen et al. 2025", "2d²/b", "c3a(block_size=32)"),
        RegistryEntry(library.adamss, "PEFT", "2r(d + cs)", "adamss(rank=2, clusters=8)"),
        RegistryEntry(library.frod, "PEFT", "2(d + n)", "frod(density=0.02)"),
        RegistryEntry(library.svft, "Lingam et al. 2024", "2(d + b(2d − b − 1))", "svft(band=1)"),
        RegistryEntry(library.osf, "Nayak et al. 2025", "2(2d + 1)(d − r)", "osf(rank=16)"),
        RegistryEntry(library.shira, "Bhardwaj et al. 2024", "4dr", "shira(rank=4)"),
        RegistryEntry(library.supertuning, "PEFT", "0.02 d²", "supertuning(sparsity=0.98)"),
    ),
    "sums: several of them at once": (
        RegistryEntry(library.mam, "UV §4.6", "2ld + 2dr", "mam(length=30, rank=512)"),
        RegistryEntry(library.prefix_layernorm, "LN §3.2", "2ld + 4d (+ 2d)", "prefix_layernorm(length=16)",
            rate=1e-2),
        RegistryEntry(library.unipelt, "Mao et al. 2022", "2ld + 4dr + 2db + 3d",
            "unipelt(length=10, rank=8, bottleneck=48)" ),
    ),
}  # fmt: skip

REGISTRY: Mapping[str, RegistryEntry] = {e.make.__name__: e for group in _ENTRIES.values() for e in group}
"""Every named method, by name."""

GROUPS = {name: tuple(entry.make.__name__ for entry in group) for name, group in _ENTRIES.items()}
"""The named methods by kind."""

FORMS = tuple(
    kind
    for module in (
        attention,
        entries,
        hidden,
        low_rank,
        mix,
        orthogonal,
        prompt,
        routed,
        shared,
        side,
        spectral,
        structured,
        weights,
    )
    for kind in vars(module).values()
    if isclass(kind) and issubclass(kind, Form) and kind.__module__ == module.__name__ and is_dataclass(kind)
    if not kind.__name__.startswith("_")
)
"""The forms of the library. Any other is a user's own, and checked before it acts (`forms.checks`)."""

VOCABULARY: dict[str, Callable[..., Any]] = {
    **{name: entry.make for name, entry in REGISTRY.items()},
    **{
        kind.__name__: kind
        for kind in (Modification, Selection, Add, Scale, Gate, SigmoidGate, PrefixGate, RankSchedule, ClusterSchedule)
    },
    **{kind.__name__: kind for kind in FORMS},
}
"""Everything that an expression may call, by name; `register` adds to it."""

_BUILT_IN = frozenset(VOCABULARY)

T = TypeVar("T", bound=Callable[..., Any])


def register(term: T) -> T:
    """Make your own form, composition or named method known by its name in expressions and in saved deltas.

    It is known by the name of its class or function, in this process: a program that loads a delta with it registers it
    first. It can be used as a decorator.

    Args:
        term: A class that derives from `deltune.Form` or `deltune.Composition` and is a frozen dataclass, or a function
            that `deltune.named_method` has made a named method of.

    Returns:
        The term itself.

    Raises:
        DeltuneError: It is nothing of these, something else has its name, or a form lacks what every form needs; the
            message shows the lines to write.
    """
    name = getattr(term, "__name__", "")
    is_term = isclass(term) and issubclass(term, Form | Composition)
    if not is_term and not spec.is_named_method(term):
        raise DeltuneError(
            f"register takes a Form, a Composition or a named method, not {excerpt(term)}: derive a frozen dataclass "
            "from deltune.Form or deltune.Composition, or put @deltune.named_method above a function that returns parts"
        )
    if is_term and "__dataclass_params__" not in term.__dict__:
        raise DeltuneError(f"{name} is no dataclass of its own: put @dataclass(frozen=True, repr=False) above it")
    if isclass(term):
        check_frozen(term)
    other = VOCABULARY.get(name)
    if name in _BUILT_IN or name in spec.SITES or (other is not None and _origin(other) != _origin(term)):
        raise DeltuneError(f"the name {name!r} is taken by {_origin(other) if other else 'a site'}; choose another")
    if isclass(term) and issubclass(term, Form):
        check_form_class(term)
    VOCABULARY[name] = term
    _parse_cached.cache_clear()
    return term


def _origin(term: Any) -> str:
    """Return where a term was defined; one that is defined again there replaces the first."""
    return f"{term.__module__}.{term.__qualname__}"


def unregistered_names(text: str) -> list[str]:
    """Return the names that an expression calls and that nothing has, in their order; attributes are no such names."""
    called = re.findall(r"(?<![\w.])([A-Za-z][A-Za-z0-9_]*)\s*\(", text)
    return list(dict.fromkeys(name for name in called if name not in VOCABULARY))


def check_registered(method: Method) -> None:
    """Check that an expression can name everything that a method consists of."""
    terms: dict[str, Any] = {}
    for term in method.terms:
        inner = term.method.terms if isinstance(term, MaskedMethod) else (term,)
        for each in inner:
            if isinstance(each, NamedMethod):
                terms.setdefault(each.name, each.name)
    for part in method.parts:
        if isinstance(part, Modification):
            terms |= {type(value).__name__: type(value) for value in (part.form, part.compose)}
    missing = [
        name
        for name, kind in terms.items()
        if name not in VOCABULARY or (isclass(kind) and VOCABULARY[name] is not kind)
    ]
    if missing:
        raise error_from_problems(
            f"{method!r} cannot be written to a file, which no program could read",
            [f"{name} is not registered: deltune.register({name})" for name in missing],
        )


def parse(text: str | Method) -> Method:
    """Parse an expression such as "prefix(length=16) + layernorm" to a method.

    Args:
        text: The expression; a method is returned as it is.

    Returns:
        The method.

    Raises:
        DeltuneError: The expression has mistakes. The message lists all of them, each with a caret under its place and
            the nearest name that exists.
    """
    if isinstance(text, Method):
        return text
    return (
        _parse_cached(text) if isinstance(text, str) else _parse_cached.__wrapped__(text)
    )  # an unhashable value is refused there


@lru_cache(maxsize=4096)
def _parse_cached(text: str) -> Method:
    """Parse an expression; cached, because a study reads the same few expressions for each of its runs."""
    value = parser.parse_expression(text, VOCABULARY, spec.SITES)
    if not isinstance(value, Method):
        raise DeltuneError(f"{text!r} is a {type(value).__name__}, a part of a method; wrap it in Modification(...)")
    return value


def default_learning_rate(method: str | Method, steps: int | None = None) -> float:
    """Return the learning rate of a method where the user gives none.

    It is the smallest rate of the method's terms, so that none of them diverges. In long runs, of 5,000 steps or more,
    that is 5e-5 for full and diff_pruning, 1e-2 for layernorm and prefix and so for their sum, 3e-2 for prompt, and
    1e-3 for everything else. Short runs need more, of 320 steps or fewer `RegistryEntry.short_rate`. In between the
    logarithm of the rate falls with the logarithm of the number of steps.
    """
    return min(_term_rate(term, steps) for term in parse(method).terms)


def _term_rate(term: Method, steps: int | None) -> float:
    if isinstance(term, MaskedMethod):
        return default_learning_rate(term.method, steps)
    entry = REGISTRY.get(term.name) if isinstance(term, NamedMethod) else None
    long, short = (DEFAULT_RATE, DEFAULT_SHORT_RATE) if entry is None else (entry.rate, entry.short_rate)
    if steps is None or steps >= LONG_STEPS:
        return long
    shortness = min(1.0, log(LONG_STEPS / steps) / log(LONG_STEPS / SHORT_STEPS))
    return float(f"{long * (short / long) ** shortness:.2g}")


def methods() -> tuple[str, ...]:
    """List the named methods.

    Returns:
        Their names, each of which can be called in an expression.
    """
    return tuple(REGISTRY)
