"""Fuzzing of expressions: a result that is counted, trains and comes off again, or a DeltuneError that changes nothing.

What fuzzing found once stands in FOUND, so that it is tried every time.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings

import deltune
from deltune.errors import MAX_MESSAGE_LENGTH
from deltune.methods import spec
from deltune.methods.registry import REGISTRY
from tables.families import FAMILIES
from tables.specimens import batch, build, differences, facts, forward, loss, specimen

MODELS = ("bert", "llama", "gpt2", "t5")

HUGE = ["9999999999", "9223372036854775807", "9223372036854775808", "9" * 30, "9" * 400, "0x" + "f" * 5000]
ODD = [
    *HUGE, "0", "-1", "-0", "1.5", "1e5", "1e309", "-1e309", "nan", "inf", "float('nan')", "True", "None", "'x'", "''",
    "()", "[]", "(1,)", "[[1]]", "{}", "٣", "'٣'", "1_000", "1j", "b'a'", "...", "2**70", "-(-1)", "lambda: 1",
]  # fmt: skip


def odd(usual: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Mostly what is usual there, now and then anything."""
    return st.integers(0, 24).flatmap(lambda n: st.sampled_from(ODD) if n == 0 else usual)


def words(*known: str) -> st.SearchStrategy[str]:
    return odd(st.sampled_from([repr(word) for word in known]))


SIZE = odd(st.integers(1, 6).map(str))
TRUTH = odd(st.sampled_from(["True", "False"]))
LAYERS = odd(st.sampled_from(["'all'", "'lower half'", "'upper half'", "[0]", "(0, 1)", "(0, 0)", "[99]", "[-1]"]))
SHARE = odd(st.sampled_from(["0.0", "0.1", "0.5", "1.0"]))
SCALE = odd(
    st.sampled_from(["1", "2", "-0.5", "'learned'", "'learned(4)'", "0", "'learned(0)'", "1e308", "'learned(x)'"])
)
STACK, ATTENTION = words("all", "all", "encoder", "decoder"), words("all", "all", "self", "cross")
ACTIVATION = words("relu", "gelu", "tanh", "sigmoid", "identity")
WHERE = {"layers": LAYERS, "stack": STACK, "attention": ATTENTION}
TOWER = {"tower": words("main", "text", "vision", "projector", "all")}
BOTTLENECK = {
    "rank": SIZE, "bias": TRUTH, "activation": ACTIVATION, "layer_norm": TRUTH, "dropout": SHARE,
    "init": words("lora", "bert"),
}  # fmt: skip
PARALLEL = {
    "at": words("ffn", "attention", "heads"), "scale": SCALE, "x": words("input", "residual"), "zero_up": TRUTH,
}  # fmt: skip
AT = odd(st.sampled_from(["'query'", "'ffn'", "('query', 'value')", "('ffn', 'ffn_up')", "()"]))
ARGUMENTS: dict[str, Mapping[str, st.SearchStrategy[str]]] = {
    "full": TOWER,
    "head": {},
    "three_vectors": {},
    "ladder": {"width": SIZE, "heads": SIZE},
    "trainable_tokens": {
        "tokens": odd(st.sampled_from(["(1,)", "(5, 7)", "[0]", "(1, 1)", "()", "(-1,)", "(99999999,)"])),
    },
    "ia3": WHERE,
    "layernorm": {
        "terms": words("both", "gain", "bias"), "of": words("both", "attention", "ffn"), "layers": LAYERS,
        "embedding": TRUTH, "final": TRUTH, "stack": STACK, **TOWER,
    },
    "bitfit": {"which": words("all", "layers", "linear", "query+ffn_up", "norm"), "add_missing": TRUTH, **TOWER},
    "adapter": {"style": words("houlsby", "pfeiffer"), "zero_up": TRUTH, **BOTTLENECK, **WHERE, **TOWER},
    "parallel_adapter": {**PARALLEL, **BOTTLENECK, **WHERE, **TOWER},
    "scaled_parallel_adapter": {**PARALLEL, **BOTTLENECK, **WHERE, **TOWER},
    "prefix": {
        "length": SIZE, "reparameterise": odd(st.just("None")), "gate": TRUTH, "shift_positions": TRUTH, **WHERE,
        **TOWER,
    },
    "prompt": {
        "length": SIZE, "init_from": odd(st.sampled_from(["None", "(7, 8)", "()", "[99]", "(-1,)"])),
        "positions": words("shift", "none"),
    },
    "p_tuning_v2": {"length": SIZE, **WHERE},
    "multi_head_parallel_adapter": {"length": SIZE, "own_down": TRUTH, "zero_up": TRUTH, **WHERE},
    "lora": {
        "rank": SIZE, "scale": SCALE, "at": AT, "alpha": odd(st.sampled_from(["None", "8", "0"])), "dropout": SHARE,
        **WHERE, **TOWER,
    },
    "mam": {"length": SIZE, "rank": SIZE, "scale": SCALE, **WHERE},
    "prefix_layernorm": {"length": SIZE, "layers": LAYERS, "stack": STACK},
    "unipelt": {"length": SIZE, "rank": SIZE, "bottleneck": SIZE, "layers": LAYERS, "stack": STACK},
    "diff_pruning": {"sparsity": odd(st.sampled_from(["0.02", "0.5", "1e-9"])), "over": words("linear", "all")},
}  # fmt: skip


def drawn_by_type(make: Callable[..., object]) -> dict[str, st.SearchStrategy[str]]:
    """Strategies for the arguments of a method at projections, which are told by their names or by their defaults."""
    by_name = {**WHERE, **TOWER, "at": AT, "scale": SCALE, "dropout": SHARE, "alpha": odd(st.sampled_from(["8", "0"]))}
    parameters = inspect.signature(make).parameters
    return {
        name: by_name.get(name, TRUTH if isinstance(parameter.default, bool) else SIZE)
        for name, parameter in parameters.items()
    }


ARGUMENTS = ARGUMENTS | {
    name: drawn_by_type(entry.make) for name, entry in REGISTRY.items() if name not in {*ARGUMENTS, "apet"}
}


def calls(name: str, arguments: Mapping[str, st.SearchStrategy[str]]) -> st.SearchStrategy[str]:
    """Calls of a name with some of its arguments, now and then one that it does not have."""
    some = st.fixed_dictionaries({}, optional={**arguments, "foo": st.just("1")} if arguments else {})
    return some.map(lambda chosen: f"{name}({', '.join(f'{key}={value}' for key, value in chosen.items())})")


SITES = words(*spec.SITES)
FORMS = st.one_of(
    *(st.builds(f"{name}({{}})".format, SIZE) for name in ("LowRank", "Prefix", "MultiHead", "OwnMultiHead", "Prompt")),
    st.builds("Bottleneck({}, activation={}, bias={})".format, SIZE, ACTIVATION, TRUTH),
    st.sampled_from(["Vector()", "Vector('biased')", "Vector('unbiased')", "Rescale()", "Mixture()"]),
)
COMPOSITIONS = st.sampled_from(
    [
        "Add()", "Scale(2)", "Scale(0.0)", "Scale(1.0, learned=True)", "Scale(0.0, learned=True)", "Gate()",
        "SigmoidGate('a')", "PrefixGate('a')",        "SigmoidGate('a.b')", "SigmoidGate('')", "SigmoidGate('keys')",
    ]
)  # fmt: skip
MODIFICATIONS = st.builds(
    "Modification({}, {}, {}, compose={}, layers={}, stack={})".format, SITES, FORMS,
    words("parallel", "sequential"), COMPOSITIONS, LAYERS, STACK,
)  # fmt: skip
SELECTIONS = st.builds(
    "Selection(({},), areas=({},), sparsity={}, optional={})".format,
    words("norm.gain", "norm.bias", "linear.weight", "bias", "all"),
    words("layers", "embedding", "final", "pooler", "vocabulary", "other"),
    odd(st.sampled_from(["None", "None", "None", "0.1", "1e-12"])), TRUTH,
)  # fmt: skip
TERMS = st.one_of(*(calls(name, arguments) for name, arguments in ARGUMENTS.items()), MODIFICATIONS, SELECTIONS)
PLAIN = st.lists(TERMS, min_size=1, max_size=2).map(" + ".join)
MASKED = st.builds(
    "apet({}, {}, pattern={}, along={}, seed={})".format,
    st.one_of(PLAIN, words("add", "concatenate", "plugin")),
    odd(st.one_of(st.integers(1, 300).map(str), st.sampled_from(["'1%'", "'0.5%'", "'٣%'", "'1e400%'", "'nan%'"]))),
    words("adjacent", "discrete", "uniform"), words("rows", "columns"), odd(st.integers(0, 9).map(str)),
)  # fmt: skip
EXPRESSIONS = st.lists(st.one_of(TERMS, TERMS, MASKED), min_size=1, max_size=3).map(" + ".join)

PIECES = [
    *"()[]{}=+-*/'\",.:;@#\\?!~`%^&|<>\n\t\0 0129eE_é٣", "\ud800", "lambda: ", "**", "if ", "(" * 40, "[" * 300,
    "-" * 3000, "not " * 3000, "lora + " * 1200, "9" * 5000, "'a' " * 300,
]  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """An expression with pieces put in, left out and doubled."""
    text = draw(EXPRESSIONS)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(text)))
        kind = draw(st.sampled_from(["insert", "delete", "double", "cut"]))
        if kind == "insert":
            text = text[:at] + draw(st.sampled_from(PIECES)) + text[at:]
        elif kind == "delete":
            text = text[:at] + text[at + 1 :]
        elif kind == "double":
            text = text[:at] + text[at:] * 2
        else:
            text = text[at:]
    return text


def check(name: str, text: str) -> None:
    """The law of one expression on one model."""
    model = specimen(name)
    before = facts(model)
    counted = refused = tuned = None
    try:
        counted = deltune.count(model, text)
    except deltune.DeltuneError as error:
        refused = error
    try:
        tuned = deltune.attach(model, text)
    except deltune.DeltuneError as error:
        assert len(str(error)) < MAX_MESSAGE_LENGTH + 300
        assert differences(before, facts(model)) == []
        of_attaching = re.search("of memory|starts from (data|what quantisation)", str(error))
        assert refused is not None or of_attaching, f"counted and refused: {error}"
    if tuned is not None:
        assert counted is not None, f"attached and not counted: {refused}"
        assert counted.trained == tuned.count().trained == sum(p.numel() for p in tuned.trainable_parameters())
        _step(tuned, counted.trained)
        assert tuned.detach() is model
        assert differences(before, facts(model)) == []


def _step(tuned: deltune.Tuned, trained: int) -> None:
    """One step of training. A prompt that is too long for the model says so when it runs."""
    model = tuned.model
    try:
        outputs = forward(model, batch(model))
    except deltune.DeltuneError:
        return
    if trained:
        loss(outputs).backward()
        with torch.no_grad():
            for parameter in tuned.trainable_parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.01)
        model.zero_grad(set_to_none=True)


quick = settings(deadline=None, max_examples=15, suppress_health_check=list(HealthCheck))
long = settings(deadline=None, max_examples=500, suppress_health_check=list(HealthCheck))


@given(name=st.sampled_from(MODELS), text=EXPRESSIONS)
@example(name="bert", text="full(foo=1) + apet(head() + full(), 10)")  # a sum inside, beside a term that is wrong
@quick
def test_expressions(name: str, text: str) -> None:
    check(name, text)


@given(name=st.sampled_from(MODELS), text=mutated())
@quick
def test_mutated_expressions(name: str, text: str) -> None:
    check(name, text)


@pytest.mark.slow
@given(name=st.sampled_from(MODELS), text=st.one_of(EXPRESSIONS, mutated()))
@long
def test_many_expressions(name: str, text: str) -> None:
    check(name, text)


DEEP = "(" * 31 + "lora" + ")" * 31
FOUND = {
    # sizes
    "lora(rank=9999999999)": "trained scalars on .* of memory",
    "lora(rank=9223372036854775807)": "of memory",
    "lora(rank=9223372036854775808)": r"(?s)too large.*2\^63.*\^",
    "prompt(length=9999999999)": "of memory",
    "prefix_layernorm(length=9999999999)": "of memory",
    f"multi_head_parallel_adapter(length={'9' * 30})": r"(?s)too large.*\^",
    f"Modification('ffn', Bottleneck(0x{'f' * 5000}))": r"(?s)digits is too large.*\^",
    f"lora(rank={'9' * 5000})": "cannot be read",
    "apet(lora(rank=9223372036854775807), parameters=10)": "of memory",
    "apet(prefix(length=1000000000), parameters=10)": "of memory",
    "peanut(depth=9999999999)": "from 0 to 64",
    "boft(factors=9999999999)": "from 1 to 62",
    "oft(terms=9999999999)": "from 0 to 64",
    "adamss(target=1)": "at least 2",
    # numbers
    "lora(dropout=1e309)": r"(?s)too large: a number is finite.*\^",
    "lora(scale=-1e400)": r"(?s)too large.*\^",
    "lora(rank=True)": r"(?s)rank=True is not a whole number.*\^",
    "lora(rank=-1)": r"(?s)rank=-1.*\^",
    "lora(rank=٣)": r"(?s)cannot be read.*\^",
    "apet(lora, parameters='٣%')": "a number or a share",
    "apet(lora, parameters='1e400%')": "a number or a share|give 2 to",
    "apet(lora, parameters='nan%')": "a number or a share",
    "scaled_parallel_adapter(scale='learned(1e400)')": "finite",
    # depth, length, number
    DEEP: r"(?s)nested too deeply.*\^",
    "lora(rank=" + "-" * 100_000 + "1)": "nested too deeply|characters",
    "lora(rank=" + "-" * 5000 + "1)": "nested too deeply",
    "not " * 5000 + "lora": "nested too deeply",
    " + ".join(["ia3"] * 1001): "1,001 terms",
    " + ".join(["lora"] * 20_000): "characters",
    "x" * 50_000: "unknown name",
    " + ".join(f"x{i}" for i in range(200)): "more",
    "\ud800": "cannot be read",
    # what would be counted and not trained
    "three_vectors + three_vectors": "would have no effect",
    "layernorm + layernorm": "has no effect beside layernorm",
    "full + bitfit": "has no effect beside full",
    "apet(full + layernorm, parameters=50)": "has no effect",
    "lora(scale=0)": "switches the term off",
    "lora(alpha=0)": "alpha=0: give a number above 0",
    "parallel_adapter(scale='learned(0)')": "starts at 0 too",
    "prefix(length=1, gate=False)": "key would never be trained",
    "Modification('embedding', Prompt(2), compose=Scale(2, learned=True))": "joined by Add",
    "Modification('embedding', Prompt(2), layers=[0])": "in no layer",
    "Modification('hidden_states', Mixture(), stack='decoder')": "in no layer",
    "apet(Modification('ffn', LowRank(2), compose=SigmoidGate('g'), layers=(0,)), parameters=1)": "give 2 to",
    "apet(parallel_adapter(scale='learned', layers=(0,)), parameters=1)": "give 2 to",
    # names
    "Modification('ffn', Bottleneck(2), compose=SigmoidGate('a.b'))": "letters, digits",
    "prompt(init_from=())": "init_from is empty",
}


@pytest.mark.parametrize(("text", "message"), FOUND.items(), ids=[text[:60] for text in FOUND])
def test_refused_with_a_reason(text: str, message: str) -> None:
    check("bert", text)
    with pytest.raises(deltune.DeltuneError, match=message):
        deltune.attach(specimen("bert"), text)


TAKEN = (
    "Selection(('bias',), areas=('layers',), sparsity=0.1, optional=True) + ia3",
    "layernorm + Selection(('norm.gain', 'linear.weight'))",
    "prefix_layernorm + prefix(length=3)",
    "head",
    "lora(at=('query', 'query'))",
    "lora(layers=(0, 0))",
    "prompt(length=3) + prompt(length=2)",
    "prefix(length=1) + prefix(length=2, gate=False) + multi_head_parallel_adapter(length=1)",
    "apet(lora(rank=100000), parameters=10)",
    "apet(unipelt(length=2, rank=2, bottleneck=4), parameters=50)",
    "apet(bitfit(add_missing=True), parameters=3, seed=-1)",
)


@pytest.mark.parametrize("name", ["llama", "t5"])
@pytest.mark.parametrize("text", TAKEN)
@pytest.mark.sample(11)
def test_taken_after_all(name: str, text: str) -> None:
    check(name, text)
    deltune.attach(specimen(name), text).detach()


@pytest.mark.parametrize(
    ("text", "budget", "count"),
    [
        ("prefix(length=?, gate=False)", 10**30, None),
        ("lora(rank=?) + prefix(length=?)", 10**30, None),
        ("lora(rank=?)", "50%", None),
        ("diff_pruning(sparsity=0.?)", 1000, None),
        ("lora(rank=?)", True, "number of scalars"),
        ("lora(rank=?)", "٣", "number of scalars"),
        ("lora(rank=?)", 1.5, "number of scalars"),
        ("lora(rank=?)", "1e999999999%", "number of scalars"),
        ("lora(rank=?)", "9" * 5000, "number of scalars"),
    ],
)
def test_budgets_of_any_size(text: str, budget: int | str, count: str | None) -> None:
    """They are solved, or refused, and never passed."""
    try:
        solved = deltune.fit(specimen("bert"), text, budget)
    except deltune.DeltuneError as error:
        assert count is None or count in str(error)
    else:
        assert count is None
        share = isinstance(budget, str)
        assert share or deltune.count(specimen("bert"), solved).method <= budget


def test_training_must_fit_and_not_the_values_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients and the two moments of Adam count; of a delta that is only loaded, the values."""
    model = build(FAMILIES["bert"], "base", torch.float32)
    values = deltune.count(model, "prompt(length=1000)").method * 4
    assert values == 1000 * 32 * 4
    monkeypatch.setenv("DELTUNE_MEMORY_LIMIT", str(4 * values - 1))
    with pytest.raises(
        deltune.DeltuneError, match=r"32,000 trained scalars .* moments of Adam, takes 500\.0 KiB of memory"
    ):
        deltune.attach(model, "prompt(length=1000)")
    monkeypatch.setenv("DELTUNE_MEMORY_LIMIT", str(4 * values))
    deltune.attach(model, "prompt(length=1000)").save(tmp_path / "delta")
    deltune.tuned(model).detach()
    monkeypatch.setenv("DELTUNE_MEMORY_LIMIT", str(values))
    deltune.load(model, tmp_path / "delta").detach()


def test_a_stated_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """DELTUNE_MEMORY_LIMIT stands in place of the memory that is free; counting needs none."""
    model = specimen("bert")
    monkeypatch.setenv("DELTUNE_MEMORY_LIMIT", "10 kB")
    with pytest.raises(deltune.DeltuneError, match=r"of memory: 9.8 KiB is the limit of DELTUNE_MEMORY_LIMIT"):
        deltune.attach(model, "lora(rank=100)")
    assert deltune.count(model, "lora(rank=100)").method == 100 * 2 * 2 * 2 * 32
    deltune.attach(model, "lora(rank=1)").detach()
    monkeypatch.setenv("DELTUNE_MEMORY_LIMIT", "much")
    with pytest.raises(deltune.DeltuneError, match="such as 8GiB"):
        deltune.attach(model, "lora(rank=1)")
