"""Expressions: what is printed is read back, every mistake is shown in its place, nothing is evaluated."""

from __future__ import annotations

import math
from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import deltune
from deltune.methods.forms.hidden import ACTIVATIONS
from deltune.methods.registry import REGISTRY
from deltune.methods.spec import ATTENTIONS, LAYERS, STACKS, TOWERS, Method, explicit_expression

RANKS = st.integers(1, 4096)
LENGTHS = st.integers(2, 4096)  # one ungated prefix vector is refused
SHARES = st.floats(0, 1, exclude_max=True)
NUMBERS = st.one_of(st.integers(-100, 100), st.floats(allow_nan=False, allow_infinity=False)).filter(bool)
SCALES = st.one_of(NUMBERS, st.just("learned"), NUMBERS.map(lambda n: f"learned({n})"))
WHERE = {
    "layers": st.one_of(st.sampled_from(LAYERS), st.lists(st.integers(0, 99), min_size=1).map(tuple)),
    "stack": st.sampled_from(STACKS),
    "attention": st.sampled_from(ATTENTIONS),
}
TOWER = {"tower": st.sampled_from(TOWERS)}
INITS = {"init": st.sampled_from(["lora", "bert"]), "dropout": SHARES}
BOTTLENECK = {
    "rank": RANKS, "bias": st.booleans(), "activation": st.sampled_from(sorted(ACTIVATIONS)),
    "layer_norm": st.booleans(), **INITS,
}  # fmt: skip
PROJECTIONS = [
    "query", "key", "value", "output", "ffn_up", "ffn_down", "ffn", "gate_proj", "up_proj", "router", "*.mixer.in_proj",
]  # fmt: skip
FFN_LINEARS = {"ffn_up", "ffn_down", "ffn", "gate_proj", "up_proj"}
EXPERTS = st.sampled_from(["all", "shared", "routed"]) | st.lists(st.integers(0, 99), min_size=1, unique=True).map(
    tuple
)


def sites(*known: str) -> st.SearchStrategy[str | tuple[str, ...]]:
    return st.one_of(
        st.sampled_from(known), st.lists(st.sampled_from(known), min_size=1, unique=True).map(tuple)
    )  # fmt: skip


PARALLEL = {
    "at": sites("ffn", "attention", "heads"), "scale": SCALES, "x": st.sampled_from(["input", "residual"]),
    "zero_up": st.booleans(), **BOTTLENECK, **WHERE, **TOWER,
}  # fmt: skip
FIELD = {"at": sites("query", "key", "value", "output"), **WHERE, **TOWER}
SEEDS, EVEN = st.integers(0, 99), st.integers(1, 32).map(lambda n: 2 * n)
ARGUMENTS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "full": TOWER,
    "head": {},
    "layernorm": {
        "terms": st.sampled_from(["both", "gain", "bias"]), "of": st.sampled_from(["both", "attention", "ffn"]),
        "layers": WHERE["layers"], "embedding": st.none() | st.booleans(),
        "final": st.none() | st.booleans(), "stack": WHERE["stack"], **TOWER,
    },
    "bitfit": {
        "which": st.sampled_from(["layers", "linear", "query+ffn_up", "norm"]), "layers": WHERE["layers"],
        "add_missing": st.booleans(), **TOWER,
    },
    "adapter": {
        "style": st.sampled_from(["houlsby", "pfeiffer"]), "zero_up": st.booleans(), **BOTTLENECK, **WHERE, **TOWER,
    },
    "parallel_adapter": PARALLEL,
    "scaled_parallel_adapter": PARALLEL,
    "prefix": {
        "length": LENGTHS, "reparameterise": st.none() | RANKS, "gate": st.booleans(), "shift_positions": st.booleans(),
        **WHERE, **TOWER,
    },
    "prompt": {
        "length": RANKS, "init_from": st.none() | st.lists(st.integers(0, 99), min_size=1).map(tuple),
        "positions": st.sampled_from(["shift", "none"]),
    },
    "lora": {
        "rank": RANKS, "scale": NUMBERS, "at": sites(*PROJECTIONS), "dropout": SHARES, "experts": EXPERTS, **WHERE,
        **TOWER,
    },
    "alora": {
        "invocation": st.lists(st.integers(0, 99), min_size=1).map(tuple), "rank": RANKS, "scale": NUMBERS,
        "dropout": SHARES, **FIELD,
    },
    "trainable_tokens": {"tokens": st.lists(st.integers(0, 99), min_size=1, unique=True).map(tuple)},
    "mam": {"length": RANKS, "rank": RANKS, "scale": NUMBERS, **WHERE},
    "p_tuning_v2": {"length": RANKS, **WHERE},
    "multi_head_parallel_adapter": {
        "length": RANKS, "own_down": st.booleans(), "zero_up": st.booleans(), **WHERE,
    },
    "prefix_layernorm": {"length": RANKS, "layers": WHERE["layers"], "stack": WHERE["stack"]},
    "unipelt": {
        "length": LENGTHS, "rank": RANKS, "bottleneck": RANKS, "layers": WHERE["layers"], "stack": WHERE["stack"],
    },
    "ia3": WHERE,
    "three_vectors": {},
    "diff_pruning": {
        "sparsity": st.floats(0, 1, exclude_min=True, exclude_max=True), "over": st.sampled_from(["linear", "all"]),
        "layers": WHERE["layers"],
    },
    "dora": {"rank": RANKS, "scale": NUMBERS, "dropout": SHARES, **FIELD},
    "adalora": {
        "rank": RANKS, "initial_rank": st.none() | RANKS.map(lambda n: 4096 + n), "start": st.floats(0, 0.4),
        "stop": st.floats(0.5, 1), "every": RANKS, "orthogonality": SHARES, "dropout": SHARES,
        **{f"beta{n}": st.floats(0.1, 0.9) for n in (1, 2)}, **FIELD,
    },
    "hira": {"rank": RANKS, **FIELD},
    "glora": {"rank": RANKS, "bias": st.sampled_from(["constant", "vector"]), **FIELD},
    "deft": {"rank": RANKS, **FIELD},
    "peanut": {
        "rank": RANKS, "depth": st.integers(0, 3), "activation": st.sampled_from(sorted(ACTIVATIONS)), "scale": NUMBERS,
        **FIELD,
    },
    "delora": {"rank": RANKS, "bound": NUMBERS, **FIELD},
    "osf": {"rank": st.none() | RANKS, **FIELD},
    "loha": {"rank": RANKS, "scale": NUMBERS, **FIELD},
    "lokr": {
        "rank": RANKS, "scale": NUMBERS, "factor": st.just(-1) | RANKS, "decompose_both": st.booleans(), **FIELD,
    },
    "miss": {"rank": RANKS, "mini_rank": st.none() | RANKS, **FIELD},
    "gralora": {"rank": RANKS.map(lambda n: 8 * n), "blocks": st.just(4), "scale": NUMBERS, **FIELD},
    "c3a": {"block_size": RANKS, **FIELD},
    "fourierft": {"frequencies": RANKS, "scale": NUMBERS, "seed": SEEDS, **FIELD},
    "waveft": {"frequencies": RANKS, "scale": NUMBERS, "seed": SEEDS, **FIELD},
    "supertuning": {"sparsity": st.floats(0, 0.9), "largest": st.booleans(), **FIELD},
    "shira": {"rank": RANKS, "seed": SEEDS, **FIELD},
    "vera": {"rank": RANKS, "d_initial": NUMBERS, "seed": SEEDS, **FIELD},
    "randlora": {"rank": RANKS, "scale": NUMBERS, "seed": SEEDS, **FIELD},
    "vblora": {"rank": RANKS, "vectors": RANKS, "length": RANKS, "top_k": RANKS, **FIELD},
    "unilora": {"rank": RANKS, "length": RANKS, **FIELD},
    "tinylora": {"rank": RANKS, "parameters": RANKS, "tied": st.booleans(), **FIELD},
    "nola": {"rank": RANKS, "bases": RANKS, "scale": NUMBERS, "seed": SEEDS, **FIELD},
    **{name: {"rank": RANKS, "scale": NUMBERS, **FIELD} for name in ("lora_xs", "lora_fa", "mica")},
    **{name: {"rank": RANKS, "scale": st.floats(0.1, 9), **FIELD} for name in ("pissa", "olora", "lora_ga")},
    "corda": {"rank": RANKS, "scale": st.floats(0.1, 9), "keep": st.sampled_from(["task", "knowledge"]), **FIELD},
    "eva": {"rank": RANKS, "scale": NUMBERS, "dropout": SHARES, **FIELD},
    "loftq": {"rank": RANKS, "dropout": SHARES, **FIELD},
    "oft": {
        "block_size": st.integers(2, 64), "terms": st.just(0) | st.integers(4, 9), "shared_block": st.booleans(),
        **FIELD,
    },
    "boft": {"block_size": EVEN, "factors": st.integers(1, 62), **FIELD},
    "hra": {"rank": EVEN, **FIELD},
    "psoft": {"rank": st.integers(2, 64), "scale": NUMBERS, "scales": st.booleans(), **FIELD},
    "road": {"variant": st.sampled_from([1, 2, 4]), "group_size": EVEN, **FIELD},
    "adamss": {
        "rank": RANKS, "clusters": RANKS, "singular_values": RANKS, "seed": SEEDS, "target": st.none() | EVEN,
        "start": st.floats(0, 0.4), "stop": st.floats(0.5, 1), "every": RANKS, "exponent": st.floats(0.5, 4),
        **{f"beta{n}": st.floats(0.1, 0.9) for n in (1, 2)}, **FIELD,
    },
    "frod": {"density": st.floats(0.01, 0.9), "seed": SEEDS, **FIELD},
    "svft": {"band": st.integers(0, 4), **FIELD},
    "mtl_lora": {
        "rank": RANKS, "tasks": RANKS, "ups": RANKS, "temperature": st.floats(0.01, 2), "scale": NUMBERS, **FIELD
    },
    "xlora": {
        "number": st.integers(3, 5), "rank": RANKS, "depth": st.integers(1, 3), "width": RANKS, "top_k": st.none() |
        st.integers(1, 3), "by_place": st.booleans(), "softmax": st.booleans(), "softmax_top_k": st.booleans(),
        "temperature": st.floats(0.01, 2), "dropout": st.floats(0, 0.9), "first": NUMBERS, "scale": NUMBERS,
        "frozen": st.booleans(), **FIELD,
    },
    "ladder": {"width": st.just(8), "heads": st.sampled_from([1, 2, 4]), "temperature": st.floats(0.01, 2)},
    "poly": {"rank": RANKS, "tasks": RANKS, "skills": RANKS, "splits": st.just(1), **FIELD},
    "ssf": FIELD,
    "beft": FIELD,
    "compacter": {
        "rank": RANKS.map(lambda n: 12 * n), "divisions": st.sampled_from([2, 4]),
        "activation": st.sampled_from(sorted(ACTIVATIONS)), **WHERE, **TOWER,
    },
    "loreft": {
        "rank": RANKS, "positions": st.sampled_from(["all", "first 2", "last 1 + first 3"]), "layers": WHERE["layers"],
        "stack": WHERE["stack"], **TOWER,
    },
    "apet": {
        "pattern": st.sampled_from(["adjacent", "discrete", "uniform"]), "along": st.sampled_from(["rows", "columns"]),
        "seed": st.integers(0, 99),
    },
}  # fmt: skip


def _some(arguments: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=arguments)


def _made(name: str, arguments: dict[str, Any]) -> Method:
    arguments = (
        {"which": "layers", **arguments} if name == "bitfit" and "layers" in arguments else arguments
    )  # "all" has no layers
    if name == "diff_pruning" and "layers" in arguments:
        arguments = {**arguments, "over": "linear"}
    if name in ("trainable_tokens", "alora"):
        arguments = {"tokens" if name == "trainable_tokens" else "invocation": (5,), **arguments}
    at = arguments.get("at", ("ffn",) if "parallel_adapter" in name and "multi" not in name else ("query",))
    if not {"query", "key", "value", "output", "heads", "attention"} & set([at] if isinstance(at, str) else at) or (
        arguments.get("style") == "pfeiffer"
    ):
        arguments = {
            key: value for key, value in arguments.items() if key != "attention"
        }  # it has no attention to choose
    if not FFN_LINEARS & set([at] if isinstance(at, str) else at):
        arguments = {key: value for key, value in arguments.items() if key != "experts"}
    return REGISTRY[name].make(**arguments)


NAMES = {
    name: _some(arguments).map(lambda a, name=name: _made(name, a))
    for name, arguments in ARGUMENTS.items()
    if name != "apet"
}
NAMED = st.one_of(list(NAMES.values()))
FORMS = st.one_of(
    _some({k: v for k, v in BOTTLENECK.items() if k != "rank"} | {"zero_up": st.booleans()}).flatmap(
        lambda a: RANKS.map(lambda r: deltune.Bottleneck(r, **a))
    ),
    st.builds(deltune.LowRank, RANKS, SHARES, INITS["init"]),
    st.builds(deltune.Vector),
)
COMPOSITIONS = st.one_of(st.just(deltune.Add()), st.builds(deltune.Scale, NUMBERS, learned=st.booleans()))
MODIFICATIONS = st.one_of(
    *(
        st.builds(
            deltune.Modification, st.sampled_from(sites), FORMS, st.sampled_from(["parallel", "sequential"]),
            COMPOSITIONS, WHERE["layers"], WHERE["stack"], kinds,
        )
        for sites, kinds in ((["heads", "attention", "query"], WHERE["attention"]), (["ffn", "block"], st.just("all")))
    )
)  # fmt: skip
PREFIXES = st.builds(
    deltune.Modification, st.just("heads"), st.builds(deltune.Prefix, LENGTHS, st.none() | RANKS),
    compose=st.one_of(COMPOSITIONS, st.just(deltune.Gate())),
)  # fmt: skip
SELECTIONS = st.builds(
    deltune.Selection, st.lists(st.sampled_from(["norm.gain", "linear.bias", "all"]), min_size=1).map(tuple),
    st.lists(st.sampled_from(["layers", "embedding", "pooler"]), min_size=1).map(tuple),
)  # fmt: skip
TERMS = st.lists(st.one_of(NAMED, MODIFICATIONS, PREFIXES, SELECTIONS), min_size=1, max_size=4)
SUMS = TERMS.map(lambda terms: sum(terms[1:], terms[0]))
MASKABLE = SUMS.filter(
    lambda method: all(getattr(part, key, None) is None for part in method.parts for key in ("sparsity", "tokens"))
)
MASKED = st.builds(
    lambda method, parameters, arguments: REGISTRY["apet"].make(method, parameters, **arguments),
    MASKABLE, RANKS | st.sampled_from(["0.05%", "1%"]), _some(ARGUMENTS["apet"]),
)  # fmt: skip
METHODS = st.one_of(SUMS, SUMS, MASKED, st.builds(lambda one, two: one + two, MASKED, SUMS))


def test_every_argument_of_every_method_is_generated() -> None:
    assert set(ARGUMENTS) == set(REGISTRY)
    for name, arguments in ARGUMENTS.items():
        missing = set(signature(REGISTRY[name].make).parameters) - set(arguments)
        assert missing <= {
            "lora": {"alpha"},
            "dora": {"alpha"},
            "alora": {"alpha"},
            "adalora": {"alpha"},
            "apet": {"method", "parameters"},
        }.get(name, set()), name


@given(METHODS)
@settings(deadline=None, max_examples=300)
def test_what_is_printed_is_read_back(method: Method) -> None:
    again = deltune.parse(repr(method))
    assert again == method and hash(again) == hash(method) and again.parts == method.parts
    assert repr(again) == repr(method)
    spelled = deltune.parse(explicit_expression(method))  # with the defaults written out, as files have it
    assert spelled.parts == method.parts


@given(METHODS, METHODS, METHODS)
@settings(deadline=None, max_examples=50)
def test_sums(one: Method, two: Method, three: Method) -> None:
    assert (one + two) + three == one + (two + three)
    assert (one + two).parts == one.parts + two.parts
    assert deltune.parse(f"{one!r}+{two!r}") == one + two


@given(RANKS, st.integers(1, 1000))
@settings(max_examples=100)
def test_alpha_is_a_scale(rank: int, alpha: int) -> None:
    method = deltune.parse(f"lora(rank={rank}, alpha={alpha})")
    scale = method.parts[0].compose  # type: ignore[union-attr]
    assert scale == (deltune.Add() if alpha == rank else deltune.Scale(alpha / rank))
    assert deltune.parse(repr(method)) == method


def test_python_objects_and_text_are_one() -> None:
    modification = deltune.Modification(site="ffn", form=deltune.Bottleneck(512), compose=deltune.Scale(4))
    text = "Modification(site=ffn, form=Bottleneck(512), insertion='parallel', compose=Scale(4)) + prefix(30)"
    assert deltune.parse(text) == modification + deltune.parse("prefix(length=30)")
    assert deltune.parse(modification) is modification
    assert deltune.parse("  lora\n  +   layernorm ") == deltune.parse("lora+layernorm")
    assert deltune.parse("lora()") == deltune.parse("lora") == deltune.parse("lora(8)")
    assert deltune.parse("lora(layers=[0, 1])") == deltune.parse("lora(layers=(0, 1))")


# text, where each caret stands (the text from there on), and what the messages say
MISTAKES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    (
        "prefx(length=16)",
        ("prefx",),
        ("unknown name 'prefx'", "Did you mean 'prefix'?", "Known: adalora, adamss, adapter", "more"),
    ),
    ("lora(r=8)", ("r=8",), ("no argument 'r'", "Here it is called 'rank'.")),
    ("prefix(num_virtual_tokens=8)", ("num_virtual_tokens",), ("Here it is called 'length'.",)),
    ("lora(rnk=8)", ("rnk",), ("no argument 'rnk'", "Did you mean 'rank'?", "rank=8, scale=1")),
    ("lora(at='quey')", ("lora",), ("unknown site 'quey'", "Did you mean 'query'?", "ffn_up")),
    ("lora(rank='8')", ("rank",), ("rank='8' is not a whole number",)),
    ("lora(rank=8.0)", ("rank",), ("rank=8.0 is not a whole number",)),
    ("lora(rank=True)", ("rank",), ("rank=True is not a whole number",)),
    ("lora(rank=0)", ("lora",), ("rank=0: must be a whole number of at least 1",)),
    ("lora(rank=-1)", ("lora",), ("rank=-1",)),
    ("lora(dropout=1)", ("lora",), ("dropout=1", "[0, 1)")),
    ("lora(scale=2, alpha=2)", ("lora",), ("give scale or alpha, not both",)),
    ("full('main', 9)", ("9",), ("full takes 1 argument:",)),
    ("lora(8, 16)", ("16",), ("lora takes 1 argument without a name", "scale=1")),  # PEFT's second number is alpha
    ("lora(8, rank=9)", ("rank",), ("'rank' is given twice",)),
    ("lora(rank=2, rank=3)", ("rank=3",), ("lora: 'rank' is given twice",)),
    ("lora(rank=2, at=quey, rank=3, rank=4)", ("quey", "rank=3", "rank=4"), ("2 problems", "'quey'")),
    ("layernorm(terms='gains')", ("terms",), ("terms='gains' is not one of 'both', 'gain', 'bias'",)),
    ("layernorm(layers='middle')", ("layernorm",), ("unknown layers 'middle'", "lower half")),
    ("adapter(layers=[])", ("adapter",), ("layers=()",)),
    ("prefix(stack='coder')", ("stack",), ("stack='coder' is not one of 'all', 'encoder', 'decoder'",)),
    ("scaled_parallel_adapter(scale='learn')", ("scaled",), ("scale='learn'", "learned(4)")),
    ("Modification('fn', Bottleneck(4))", ("Modification",), ("unknown site 'fn'", "Did you mean 'ffn'?")),
    ("Modification(fn, Bottleneck(4))", ("fn",), ("a text stands in quotes: site='fn'. Did you mean 'ffn'?",)),
    ("Modification(ffn, Bottleneck())", ("Bottleneck",), ("Bottleneck needs rank", "deltune methods Bottleneck")),
    ("Modification(ffn, LowRank(2), compose=SigmoidGate())", ("SigmoidGate",), ("SigmoidGate needs name",)),
    ("Modification(ffn, Botleneck)", ("Botleneck",), ("unknown name 'Botleneck'. Did you mean 'Bottleneck'?",)),
    ("Modification(ffn, TanhLowRank(4))", ("TanhLowRank",), ("Did you mean 'LowRank'? A part of your own", "--import")),
    ("Modification(ffn, Wave)", ("Wave",), ("is registered first: deltune.register(Wave); on the command line,",)),
    ("tides(rank=4)", ("tides",), ("deltune.register(tides)",)),
    ("lora(layers='first2')", ("lora",), ("unknown layers 'first2'. Did you mean 'first N'?", "first N, last N")),
    ("lora(rank=8, bias=all)", ("bias",), ("lora has no argument 'bias'. Add a term that trains biases",)),
    ("lora(rank=eight, layers=upper)", ("eight", "upper"), ("'eight' is not a whole number", "layers='upper'")),
    ("bitfit(which=linear)", ("linear",), ("bitfit: a text stands in quotes: which='linear'",)),
    ("bitfit(which=linears)", ("linears",), ("which='linears' is not one of 'all', 'layers'",)),
    ("adapter(bias=true)", ("true",), ("bias='true' is not True or False",)),
    ("lora(at=(q, v_proj))", ("q, v",), ("at='q'. Here it is called 'query'.",)),
    ("lora(alpha=0)", ("lora",), ("alpha=0: give a number above 0",)),
    ("lora(rank=4, alpha=-16)", ("lora",), ("alpha=-16: give a number above 0",)),
    ("lora(layers=0)", ("layers",), ("layers=0 is not 'all', 'lower half'", "one alone is written (0,)")),
    (
        "Selection('linear.bias')",
        ("'linear.bias'",),
        ("is not a list of texts; one alone is written ('linear.bias',)",),
    ),
    ("Modification(ffn, Prefix(4))", ("Modification",), ("Prefix acts at site 'heads', not at 'ffn'",)),
    ("Modification(ffn, LowRank(4), compose=Gate())", ("Modification",), ("Gate composes a Prefix only",)),
    ("Modification(ffn, 4)", ("4",), ("form=4 is not a Form",)),
    ("bitfit(which='all', layers=[0])", ("bitfit",), ("give which='layers'",)),
    ("lora + (prefix", ("(prefix",), ("cannot be read", "never closed")),
    ("lora head", ("head",), ("cannot be read",)),
    ("lora +", (), ("cannot be read",)),
    ("lora + 3", ("3",), ("only names, calls, + and literal arguments",)),
    ("lora * 2", ("lora",), ("only names, calls, +",)),
    ("'lora'", ("'lora'",), ("only names, calls, +",)),
    ("lora(**{})", ("{}",), ("** is not allowed",)),
    ("lora(*[])", ("*[]",), ("only names, calls, +",)),
    ("Bottleneck(3)", (), ("is a Bottleneck, a part of a method; wrap it in Modification",)),
    ("lora + Bottleneck(3)", ("lora",), ("cannot be added: only methods can. Bottleneck(rank=3) is a part",)),
    ("Bottleneck(3) + lora", ("Bottleneck",), ("cannot be added", "wrap it: Modification(site, Bottleneck(rank=3))")),
    ("Add() + Gate()", ("Add",), ("Add() and Gate() cannot be added",)),
    ("", (), ("the method expression is empty",)),
    (
        "prefx(length=16) + lora(rnk=8, at=quey) + adapter(rank='a', bias=1)",
        ("prefx", "rnk", "quey", "rank='a'", "bias"),
        ("5 problems", "'prefix'", "'quey'", "rank='a'", "bias=1 is not True or False"),
    ),
    ("lora(rank='a', rnk=2, scale=None)", ("rank='a'", "rnk", "scale"), ("3 problems", "'rnk'", "scale=None")),
    ("prefix(length=16, größe=2) + lörа", ("größe", "lörа"), ("2 problems", "'größe'", "'lörа'")),
)


@pytest.mark.parametrize(("text", "places", "says"), MISTAKES, ids=[m[0] or "empty" for m in MISTAKES])
def test_mistakes(text: str, places: tuple[str, ...], says: tuple[str, ...]) -> None:
    with pytest.raises(deltune.DeltuneError) as caught:
        deltune.parse(text)
    message = str(caught.value)
    assert all(part in message for part in says), message
    lines = message.splitlines()
    carets = [i for i, line in enumerate(lines) if line.strip() == "^"]
    if places:
        assert [lines[i - 1][lines[i].index("^") :] for i in carets] == [text[text.index(p) :] for p in places]


@pytest.mark.parametrize("text", ["prefx(length=16)", "lorra", "LoRA(rank=8)", "lily", "Modification(ffn, lowrank(4))"])
def test_a_name_of_ours_misspelt_is_no_part_of_the_users_own(text: str) -> None:
    with pytest.raises(deltune.DeltuneError) as caught:
        deltune.parse(text)
    assert "register" not in str(caught.value)


def test_a_caret_in_a_long_text_is_in_view() -> None:
    text = " + ".join(["lora(rank=2)"] * 40 + ["lra(rank=2)"] + ["lora(rank=2)"] * 10)
    with pytest.raises(deltune.DeltuneError) as caught:
        deltune.parse(text)
    shown, caret = str(caught.value).splitlines()[-2:]
    assert shown[caret.index("^") :].startswith("lra(rank=2) + lora") and len(shown) < 120


@pytest.mark.parametrize("value", [None, 3, b"lora", ["lora"], object()])
def test_what_is_no_text(value: Any) -> None:
    with pytest.raises(deltune.DeltuneError, match="an expression"):
        deltune.parse(value)


BEYOND: dict[str, str] = {
    "call of a builtin": "__import__('deltune').touched()",
    "call in an argument": "lora(rank=__import__('deltune').touched())",
    "attribute": "lora.__class__",
    "attribute of a literal": "lora(rank=(1).__class__)",
    "method call": "lora.x()",
    "call of a call": "lora()()",
    "subscript": "lora[0]",
    "subscript in an argument": "lora(rank=[1][0])",
    "f-string": "f'{lora}'",
    "f-string in an argument": "lora(at=f'{1}')",
    "lambda": "lora(rank=lambda: 1)",
    "comprehension": "lora(at=[s for s in ('query',)])",
    "condition": "lora(rank=1 if True else 2)",
    "power": "lora(rank=9**9**9)",
    "arithmetic": "lora(rank=1+1)",
    "comparison": "lora(rank=1<2)",
    "boolean": "lora or head",
    "walrus": "(x := lora)",
    "await": "await lora",
    "dict": "lora(at={'query': 1})",
    "set": "lora(at={'query'})",
    "bytes": "lora(at=b'query')",
    "ellipsis": "lora(rank=...)",
    "complex": "lora(rank=1j)",
    "not": "lora(rank=not 1)",
    "plus sign": "lora(rank=+1)",
    "statement": "import os",
    "two statements": "lora; lora",
    "assignment": "lora = 1",
    "comment hides the rest": "lora(rank=8 # )",
    "nested parentheses": "(" * 5000 + "lora" + ")" * 5000,
    "nested calls": "lora(" * 3000 + ")" * 3000,
    "nested lists": "lora(at=" + "[" * 150 + "]" * 150 + ")",
    "many signs": "lora(rank=" + "-" * 20000 + "1)",
    "many digits": "lora(rank=" + "9" * 10000 + ")",
    "zero byte": "lora\0",
    "surrogate": "lora\udc80",
    "infinity": "lora(scale=1e999)",
}


@pytest.mark.parametrize("text", BEYOND.values(), ids=BEYOND)
def test_nothing_is_evaluated(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(deltune, "touched", lambda: calls.append("touched"), raising=False)
    with pytest.raises(deltune.DeltuneError):
        deltune.parse(text)
    assert calls == []


def test_a_long_sum_is_no_deep_one() -> None:
    method = deltune.parse(" + ".join(f"lora(rank={i + 1})" for i in range(300)))
    assert len(method.terms) == 300 and deltune.parse(repr(method)) == method


@given(st.text(max_size=40))
@settings(deadline=None, max_examples=200)
def test_any_text_is_a_method_or_a_deltune_error(text: str) -> None:
    try:
        deltune.parse(text)
    except deltune.DeltuneError as error:
        assert str(error)


CALLS: tuple[tuple[Callable[[], object], str], ...] = (
    (lambda: REGISTRY["lora"].make(rnk=8), "rnk.*Did you mean 'rank'.*It takes.*rank=8"),
    (lambda: deltune.lora(r=8), "no argument 'r'.*Here it is called 'rank'"),
    (lambda: REGISTRY["lora"].make(at=("query", "values")), "unknown site 'values'"),
    (lambda: deltune.Modification("ffn", deltune.Prefix(2)), "site 'heads'"),
    (lambda: deltune.Scale(math.nan), "a number is finite"),
    (lambda: deltune.Selection(("gain",)), "unknown role 'gain'.*Did you mean 'norm.gain'"),
)


@pytest.mark.parametrize(("make", "says"), CALLS, ids=[says for _, says in CALLS])
def test_the_same_mistakes_in_python(make: Callable[[], object], says: str) -> None:
    with pytest.raises(deltune.DeltuneError, match=says):
        make()


def test_signatures_have_no_catch_alls() -> None:
    for entry in REGISTRY.values():
        kinds = {p.kind for p in signature(entry.make).parameters.values()}
        assert not kinds & {Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL}


@pytest.mark.parametrize(
    ("expression", "scale", "printed"),
    [
        ("lora(alpha=16)", 2.0, "lora(alpha=16)"),
        ("lora(rank=4, alpha=2)", 0.5, "lora(rank=4, alpha=2)"),
        ("lora(alpha=8)", 1.0, "lora(alpha=8)"),
        ("lora(alpha=16, scale=2)", 2.0, "lora(alpha=16)"),
        ("lora(scale=2)", 2, "lora(scale=2)"),
    ],
)
def test_the_scale_that_is_written_is_the_one_that_acts(expression: str, scale: float, printed: str) -> None:
    """delta.json has every argument, also the scale that follows from alpha; what it says can be read again."""
    method = deltune.parse(expression)
    explicit = explicit_expression(method)
    assert f"scale={scale}," in explicit and repr(method) == printed
    again = deltune.parse(explicit)
    assert again == method and again.parts == method.parts and repr(again) == printed
    assert explicit_expression(again) == explicit
