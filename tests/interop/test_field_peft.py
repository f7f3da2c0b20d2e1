"""Forms beside PEFT's tuners: from PEFT's own state, the same outputs and gradients.

Models are float64. Where PEFT computes in float32, or a family computes norms in float32, equal means to its rounding.
PEFT's own mistakes are said where a row leaves a gradient out.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import deltune
from deltune.runtime.modules import Edit
from tables.families import FAMILIES
from tables.specimens import batch, build

peft = pytest.importorskip("peft", reason="no PEFT: pip install -e '.[peers]' -c constraints.txt")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

TARGETS = {"bert": ["query", "value"], "llama": ["q_proj", "v_proj"]}
NAME = "default"
EXACT, ROUNDED = 1e-12, 2e-6
Values = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Parts:
    """Parameters of PEFT's that are one of ours."""

    parts: list[torch.Tensor]
    join: Callable[[list[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class Row:
    """An expression, PEFT's configuration for a family, and our tensors in a layer of PEFT's by name.

    rounded: PEFT computes some of it in float32. dtype: of the model, where PEFT takes no float64. gradients: those
    that PEFT has right.
    """

    method: str
    config: Callable[[list[str]], Any]
    values: Callable[[Any], Values]
    rounded: bool = False
    dtype: torch.dtype = torch.float64
    gradients: bool = True
    role: str = "base"
    tasks: tuple[int, ...] = ()
    families: tuple[str, ...] = field(default=("bert", "llama"))


def named(**leaves: str) -> Callable[[Any], Values]:
    """Our tensors by PEFT's attributes: a parameter of an adapter, or a module's weight."""

    def values(layer: Any) -> Values:
        ours = {}
        for name, leaf in leaves.items():
            attribute = getattr(layer, leaf)
            if NAME in attribute:
                value = attribute[NAME]
                ours[name] = getattr(value, "weight", value)
        return ours

    return values


LORA = named(down="lora_A", up="lora_B")
LOKR = named(**{n: f"lokr_{n}" for n in ("w1", "w2", "w1_a", "w1_b", "w2_a", "w2_b")})


def glora(layer: Any) -> Values:
    paths = {n: getattr(layer, f"glora_{n.upper()}")[NAME] for n in "abcde"}
    values = {f"{n}_{side}": getattr(paths[n], x) for n in "abc" for side, x in (("up", "Xd"), ("down", "Xu"))
              if hasattr(paths[n], x)}  # fmt: skip
    return values | {n: paths[n].X for n in "de" if hasattr(paths[n], "X")}


def peanut(layer: Any) -> Values:
    kinds = {kind: getattr(layer, f"peanut_{kind}s")[NAME] for kind in ("encoder", "decoder")}
    inner = {f"{kind}_{n}": module.weight for kind, modules in kinds.items() for n, module in enumerate(modules)}
    return {"a": layer.peanut_A[NAME].weight, "b": layer.peanut_B[NAME].weight, **inner}


def tinylora(layer: Any) -> Values:
    v = layer.tinylora_v[NAME][layer._tinylora_v_key[NAME]]
    return {"v": v, **named(A="tinylora_A", B="tinylora_B", P="tinylora_P")(layer)}


def psoft(layer: Any) -> Values:
    turn = layer.psoft_R[NAME]
    fixed = {"A": layer._psoft_A_cache[NAME], "B": layer._psoft_B_cache[NAME]}
    return {"skew": turn.weight, "alpha": turn.vector_a, "beta": turn.vector_b, **fixed}


def osf(layer: Any) -> Values:
    values = layer.osf_svd_params[NAME]
    start = {n: getattr(layer, f"_osf_{n.upper()}_low_init")[NAME] for n in "usv"}
    upper = {n: getattr(layer, f"_osf_{n.upper()}_high") for n in "uv"}
    return {
        **{n: values[f"{n.upper()}_low"] for n in "usv"},
        **{f"{n}_start": tensor for n, tensor in start.items()},
        **{f"{n}_upper": tensors[NAME] for n, tensors in upper.items() if NAME in tensors},
    }


def shira(layer: Any) -> Values:
    rows, columns = layer.shira_indices[NAME].long()
    return {"values": layer.shira_weight[NAME], "entries": rows * layer.in_features + columns}


def adamss(layer: Any) -> dict[str, Any]:
    """A cluster of one row has a rank of one."""
    pad = torch.nn.functional.pad
    return {
        "down": Parts(list(layer.adamss_A[NAME]), lambda p: torch.stack([pad(x, (0, 0, 0, 2 - len(x))) for x in p])),
        "up": Parts(list(layer.adamss_B[NAME]), lambda p: torch.cat([pad(x, (0, 2 - x.shape[1])) for x in p])),
    }


def frod(layer: Any) -> Values:
    return {
        **named(values="frod_lambda_l", entries="frod_lambda_s_values", basis="frod_V")(layer),
        "U": layer.frod_U[NAME],
        "positions": layer.in_features * layer.frod_s_indices[NAME][0] + layer.frod_s_indices[NAME][1],
        "start": layer._calculate_frod_u_and_lambda(layer.frod_V[NAME], layer.base_layer.weight)[1],
    }


def poly(layer: Any) -> Values:
    logits = layer.poly_router[NAME].module_logits
    return {**named(down="poly_lora_A", up="poly_lora_B")(layer), "logits": logits}


def oft(layer: Any) -> Values:
    return {"skew": layer.oft_R[NAME].weight}


ROWS = (
    Row("lora(rank=4, alpha=8)", lambda t: peft.LoraConfig(r=4, lora_alpha=8, target_modules=t), LORA),
    Row("adalora(rank=4, initial_rank=6, alpha=8, orthogonality=0)", lambda t: peft.AdaLoraConfig(
        init_r=6, target_r=4, lora_alpha=8, total_step=10, target_modules=t),
        named(down="lora_A", up="lora_B", values="lora_E")),
    Row("dora(rank=4, alpha=8)", lambda t: peft.LoraConfig(r=4, lora_alpha=8, use_dora=True, target_modules=t),
        named(down="lora_A", up="lora_B", magnitude="lora_magnitude_vector")),
    Row("alora(invocation=(26, 46), rank=4, alpha=8, at=('query', 'value'))", lambda t: peft.LoraConfig(
        r=4, lora_alpha=8, alora_invocation_tokens=[26, 46], task_type="CAUSAL_LM", target_modules=t), LORA,
        role="causal", families=("llama",)),
    Row("hira(rank=4)", lambda t: peft.HiraConfig(r=4, target_modules=t), named(down="hira_A", up="hira_B")),
    Row("glora(rank=3)", lambda t: peft.GloraConfig(r=3, target_modules=t), glora),
    Row("glora(rank=3, bias='vector')", lambda t: peft.GloraConfig(r=3, config_D_E="vector", target_modules=t), glora),
    Row("deft(rank=4)", lambda t: peft.DeftConfig(r=4, target_modules=t), named(p="deft_P", r="deft_R"), rounded=True),
    Row("peanut(rank=4)", lambda t: peft.PeanutConfig(r=4, target_modules=t), peanut),
    Row("peanut(rank=4, depth=2, scale=0.5)", lambda t: peft.PeanutConfig(
        r=4, depth=2, scaling=0.5, target_modules=t), peanut),
    Row("delora(rank=4, bound=5.0)", lambda t: peft.DeloraConfig(r=4, delora_lambda=5, target_modules=t),
        named(down="delora_A", up="delora_B", bound="delora_lambda")),
    Row("osf(rank=8)", lambda t: peft.OSFConfig(effective_rank=8, target_modules=t), osf),
    Row("loha(rank=4, scale=2)", lambda t: peft.LoHaConfig(r=4, alpha=8, target_modules=t),
        named(w1_a="hada_w1_a", w1_b="hada_w1_b", w2_a="hada_w2_a", w2_b="hada_w2_b")),
    Row("lokr(rank=2, scale=2)", lambda t: peft.LoKrConfig(r=2, alpha=4, target_modules=t), LOKR),
    Row("lokr(rank=1, factor=2, decompose_both=True)", lambda t: peft.LoKrConfig(
        r=1, alpha=1, decompose_factor=2, decompose_both=True, target_modules=t), LOKR),
    Row("miss(rank=4)", lambda t: peft.MissConfig(r=4, target_modules=t), named(block="miss_block")),
    Row("miss(rank=5, mini_rank=4)", lambda t: peft.MissConfig(
        r=5, mini_r=4, init_weights="mini", target_modules=t), named(block="miss_block")),
    Row("gralora(rank=4, scale=2)", lambda t: peft.GraloraConfig(r=4, gralora_k=2, alpha=8, target_modules=t),
        named(down="gralora_A", up="gralora_B")),
    Row("c3a(block_size=8)", lambda t: peft.C3AConfig(block_size=8, target_modules=t), named(kernel="c3a_kernel"),
        rounded=True, gradients=False),  # PEFT's gradient of its convolution's input fails gradcheck
    Row("fourierft(frequencies=40, scale=30)", lambda t: peft.FourierFTConfig(
        n_frequency=40, scaling=30.0, target_modules=t), named(spectrum="fourierft_spectrum"), rounded=True),
    Row("waveft(frequencies=40, scale=30)", lambda t: peft.WaveFTConfig(
        n_frequency=40, scaling=30.0, target_modules=t), named(spectrum="waveft_spectrum")),
    Row("supertuning(sparsity=0.9)", lambda t: peft.SupertuningConfig(sparsity=0.9, target_modules=t),
        named(values="supertuning_values", entries="supertuning_indices")),
    Row("shira(rank=2)", lambda t: peft.ShiraConfig(r=2, random_seed=5, target_modules=t), shira),
    Row("vera(rank=8, seed=5)", lambda t: peft.VeraConfig(r=8, projection_prng_key=5, target_modules=t),
        named(d="vera_lambda_d", b="vera_lambda_b")),
    Row("randlora(rank=4, scale=2, seed=5)", lambda t: peft.RandLoraConfig(
        r=4, randlora_alpha=8, projection_prng_key=5, target_modules=t),
        named(lambda_="randlora_lambda", gamma_in="randlora_gamma", gamma_out="randlora_gamma")),
    Row("vblora(rank=4, vectors=10, length=8)", lambda t: peft.VBLoRAConfig(
        r=4, num_vectors=10, vector_length=8, topk=2, target_modules=t),
        named(logits_down="vblora_logits_A", logits_up="vblora_logits_B", bank="vblora_vector_bank")),
    Row("unilora(rank=4, length=50)", lambda t: peft.UniLoraConfig(r=4, theta_d_length=50, target_modules=t),
        named(theta="unilora_theta_d", entries_down="unilora_indices_A", entries_up="unilora_indices_B",
              scales_down="unilora_scales_A", scales_up="unilora_scales_B")),
    Row("tinylora(rank=4, parameters=6)", lambda t: peft.TinyLoraConfig(r=4, u=6, target_modules=t), tinylora),
    Row("tinylora(rank=4, parameters=6, tied=True)", lambda t: peft.TinyLoraConfig(
        r=4, u=6, weight_tying=1.0, target_modules=t), tinylora),
    Row("mica(rank=4)", lambda t: peft.LoraConfig(r=4, lora_alpha=4, init_lora_weights="mica", target_modules=t), LORA,
        dtype=torch.float32),
    Row("pissa(rank=4, scale=2)", lambda t: peft.LoraConfig(
        r=4, lora_alpha=8, init_lora_weights="pissa", target_modules=t), LORA, dtype=torch.float32),
    Row("olora(rank=4, scale=2)", lambda t: peft.LoraConfig(
        r=4, lora_alpha=8, init_lora_weights="olora", target_modules=t), LORA, dtype=torch.float32),
    Row("adamss(rank=2, clusters=3, singular_values=10)", lambda t: peft.AdamssConfig(
        r=10, num_subspaces=3, subspace_rank=2, target_modules=t), adamss),
    Row("frod(density=0.05, seed=3)", lambda t: peft.FrodConfig(
        sparse_rate=0.05, projection_prng_key=3, target_modules=t, progressbar=False), frod, rounded=True),
    Row("poly(rank=2, tasks=3, skills=3, splits=2)", lambda t: peft.PolyConfig(
        r=2, n_tasks=3, n_skills=3, n_splits=2, target_modules=t), poly, tasks=(2, 0)),
    Row("oft(block_size=4, terms=0)", lambda t: peft.OFTConfig(
        oft_block_size=4, use_cayley_neumann=False, target_modules=t), oft),
    Row("oft(block_size=4)", lambda t: peft.OFTConfig(oft_block_size=4, target_modules=t), oft),
    Row("oft(block_size=8, terms=4, shared_block=True)", lambda t: peft.OFTConfig(
        oft_block_size=8, num_cayley_neumann_terms=4, block_share=True, target_modules=t), oft),
    Row("boft(block_size=4)", lambda t: peft.BOFTConfig(boft_block_size=4, target_modules=t),
        named(skew="boft_R", gain="boft_s")),
    Row("hra(rank=4)", lambda t: peft.HRAConfig(r=4, target_modules=t), named(vectors="hra_u")),
    Row("psoft(rank=4)", lambda t: peft.PsoftConfig(r=4, psoft_alpha=4, target_modules=t), psoft,
        dtype=torch.float32),
    *(Row(f"road(variant={n}, group_size=8)", lambda t, n=n: peft.RoadConfig(
        variant=f"road_{n}", group_size=8, target_modules=t), named(theta="road_theta", alpha="road_alpha"))
      for n in (1, 2, 4)),
    Row("beft(at=('query', 'value'))", lambda t: peft.BeftConfig(target_modules=t), named(vector="beft_bias")),
)  # fmt: skip

cells = pytest.mark.parametrize(
    ("row", "family"), [(row, f) for row in ROWS for f in row.families], ids=lambda v: getattr(v, "method", v)
)


def fresh_of_peft(model: PreTrainedModel, row: Row, family: str) -> Any:
    torch.manual_seed(3)
    return peft.get_peft_model(copy.deepcopy(model), row.config(TARGETS[family])).eval()


def peft_of(model: PreTrainedModel, row: Row, family: str) -> Any:
    """PEFT's model with every parameter moved, in a copy."""
    made = fresh_of_peft(model, row, family)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.requires_grad and "ranknum" not in name:  # which AdaLoRA trains, and divides by
                parameter.add_(0.1 * torch.randn(parameter.shape, dtype=torch.float64).to(parameter.dtype))
    return made


def paired(tuned: deltune.Tuned, made: Any, row: Row) -> Iterator[tuple[str, torch.Tensor, Parts]]:
    """Our tensors by name, with PEFT's."""
    for edit in tuned.delta().all_edits():
        assert isinstance(edit, Edit) and edit.place.linear is not None
        layer = made.base_model.model.get_submodule(edit.place.linear.path)
        tensors = edit.own_tensors() | {name: table.own_tensors()[name] for name, (table, _) in edit.shared.items()}
        for name, value in row.values(layer).items():
            if name in tensors:
                yield name, tensors[name], value if isinstance(value, Parts) else Parts([value], lambda one: one[0])


def copied(tuned: deltune.Tuned, made: Any, row: Row) -> Iterator[tuple[torch.Tensor, Parts]]:
    """Copy PEFT's tensors into ours, and return those that are trained in pairs."""
    for _, tensor, parts in paired(tuned, made, row):
        with torch.no_grad():
            tensor.copy_(parts.join(parts.parts).reshape(tensor.shape))
        if parts.parts[0].requires_grad:
            yield tensor, parts


def answer_of(made: Any, row: Row, inputs: dict[str, Any]) -> torch.Tensor:
    """PEFT's answer; its outermost model loses task_ids where it has no task_type."""
    return made.base_model(**inputs, task_ids=torch.tensor(row.tasks))[0] if row.tasks else made(**inputs)[0]


def distance(one: torch.Tensor, two: torch.Tensor) -> float:
    return float((one - two).abs().max() / two.abs().max().clamp_min(1e-30))


def differences(row: Row, family: str) -> tuple[float, float | None]:
    """The greatest difference of outputs and of gradients, by the greatest entry; None where PEFT's are wrong."""
    model = build(FAMILIES[family], row.role, row.dtype)
    inputs, made = batch(model), peft_of(model, row, family)
    tuned = deltune.attach(model, row.method)
    pairs = list(copied(tuned, made, row))
    assert {id(ours) for ours, _ in pairs} == {id(p) for p in tuned.trainable_parameters()}
    with tuned.condition(task_ids=row.tasks) if row.tasks else nullcontext():
        ours, theirs = model(**inputs)[0], answer_of(made, row, inputs)
    plain = copy.deepcopy(made)
    with plain.disable_adapter(), torch.no_grad():
        assert distance(theirs, answer_of(plain, row, inputs)) > 1e-3
    direction = torch.randn(ours.shape, dtype=ours.dtype, generator=torch.Generator().manual_seed(7))
    if not row.gradients:
        return distance(ours, theirs), None
    mine = torch.autograd.grad((ours * direction).sum(), [parameter for parameter, _ in pairs])
    peers = iter(torch.autograd.grad((theirs * direction).sum(), [p for _, value in pairs for p in value.parts]))
    joined = [value.join([next(peers) for _ in value.parts]) for _, value in pairs]
    of_gradients = (distance(one, two.reshape(one.shape)) for one, two in zip(mine, joined, strict=True))
    return distance(ours, theirs), max(of_gradients)


@cells
def test_outputs_and_gradients_are_pefts(row: Row, family: str) -> None:
    exact = not row.rounded and row.dtype == torch.float64 and FAMILIES[family].exact
    tolerance = EXACT if exact else ROUNDED
    outputs, gradients = differences(row, family)
    assert outputs < tolerance and (gradients or 0) < 10 * tolerance


OTHER_STARTS = {
    "c3a(block_size=8)": "PEFT draws the kernel, so that its first pass differs from the base model's",
    "fourierft(frequencies=40, scale=30)": "PEFT draws the spectrum, so that its first pass differs, too",
}
"""Methods that begin otherwise than PEFT's, at no change."""


@pytest.mark.parametrize("row", [row for row in ROWS if row.method not in OTHER_STARTS], ids=lambda row: row.method)
def test_fresh_tensors_are_drawn_as_pefts(row: Row) -> None:
    """What PEFT sets is equal; what it draws has its mean and its standard deviation, over all places together."""
    family = row.families[0]
    model = build(FAMILIES[family], row.role, row.dtype)
    made = fresh_of_peft(model, row, family)
    torch.manual_seed(4)
    drawn: dict[str, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}  # by the tensor, which places may share
    for name, tensor, parts in paired(deltune.attach(model, row.method), made, row):
        if parts.parts[0].requires_grad:
            theirs = parts.join(parts.parts).detach()
            pair = tensor.detach().flatten().double(), theirs.flatten().double()
            drawn.setdefault(name, {})[id(tensor)] = pair
    assert drawn
    for name, pairs in drawn.items():
        ours, theirs = (torch.cat(both) for both in zip(*pairs.values(), strict=True))
        if theirs.min() == theirs.max():
            assert distance(ours, theirs) < ROUNDED, name
        else:
            spread, noise = theirs.std(), len(theirs) ** -0.5
            assert abs(math.log(ours.std() / spread)) < 4 * noise, name  # four standard deviations, where it is normal
            assert (ours.mean() - theirs.mean()).abs() < 4 * 2**0.5 * noise * spread, name


def places(tuned: deltune.Tuned) -> list[tuple[dict[str, torch.Tensor], torch.nn.Linear]]:
    """The tensors of every edit of a delta, moved, with its frozen projection."""
    model = tuned.model
    with torch.no_grad():
        for number, parameter in enumerate(tuned.delta().parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.add_(noise.to(parameter.dtype), alpha=0.1)
    return [(dict(e.full_tensors()), model.get_submodule(e.place.target.path)) for e in tuned.delta().all_edits()]


def nola(t: Values, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    down = sum(a * m for a, m in zip(t["alpha"], t["A"], strict=True))
    up = sum(b * m for b, m in zip(t["beta"], t["B"], strict=True))
    return h + x @ down.T @ up.T


def compacter(t: Values, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    down, up = (
        sum(torch.kron(t["rules"][i], t[f"{side}_s"][i] @ t[f"{side}_t"][i]) for i in range(len(t["rules"])))
        for side in ("down", "up")
    )
    inner = torch.nn.functional.gelu(h @ down.T + t["down_bias"])
    return h + inner @ up.T + t["up_bias"]


def loreft(t: Values, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    q, r = torch.linalg.qr(t["rotation"].T)
    rows = (q @ torch.diag(torch.diag(r).sign())).T
    assert torch.allclose(rows @ rows.T, torch.eye(len(rows), dtype=rows.dtype))
    return h + (h @ t["source"].T + t["bias"] - h @ rows.T) @ rows


def svft(t: Values, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    k = len(t["V"])
    assert torch.allclose(t["U"].T @ t["U"], torch.eye(k, dtype=x.dtype))
    m, entries = torch.zeros(k, k, dtype=x.dtype), iter(t["entries"])
    for i in range(k):
        for j in range(k):
            if abs(i - j) <= 2:
                m[i, j] = next(entries)
    return h + x @ t["V"].T @ m.T @ t["U"].T


FORMULAS: dict[str, Callable[[Values, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "nola(rank=2, bases=5)": nola,
    "lora_xs(rank=3)": lambda t, x, h: h + x @ t["A"].T @ t["R"].T @ t["B"].T,
    "svft(band=2)": svft,
    "lora_fa(rank=3)": lambda t, x, h: h + x @ t["down"].T @ t["up"].T,
    "compacter(rank=8)": compacter,
    "loreft(rank=3)": loreft,
}
"""What a module of a method that PEFT lacks computes, as the paper has it, from x and what the frozen module has."""


@pytest.mark.parametrize("method", FORMULAS)
def test_what_peft_lacks_is_the_papers_formula(method: str) -> None:
    model = build(FAMILIES["bert"], "base")
    inputs = batch(model)
    bare = copy.deepcopy(model)
    tuned = deltune.attach(model, method)
    places(tuned)
    by_path = {e.place.target.path: dict(e.full_tensors()) for e in tuned.delta().all_edits()}
    for path, tensors in by_path.items():

        def hook(module: Any, args: Any, output: Any, t: Values = tensors) -> Any:
            h = output[0] if isinstance(output, tuple) else output
            changed = FORMULAS[method](t, args[0], h)
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

        bare.get_submodule(path).register_forward_hook(hook)
    with torch.no_grad():
        assert distance(model(**inputs)[0], bare(**inputs)[0]) < EXACT


def test_ssf_scales_and_shifts() -> None:
    model = build(FAMILIES["bert"], "base")
    inputs, bare = batch(model), copy.deepcopy(model)
    tuned = deltune.attach(model, "ssf(at='query')")
    places(tuned)
    by_path: dict[str, Values] = {}
    for edit in tuned.delta().all_edits():
        by_path.setdefault(edit.place.target.path, {}).update(edit.full_tensors())
    for path, t in by_path.items():
        bare.get_submodule(path).register_forward_hook(lambda m, a, h, t=t: t["gain"] * h + t["vector"])
    with torch.no_grad():
        assert distance(model(**inputs)[0], bare(**inputs)[0]) < EXACT


@pytest.mark.parametrize("factors", [1, 2, 3])
def test_butterfly_factors_are_pefts(factors: int) -> None:
    """PEFT computes more than one factor on a GPU alone; its permutations and rotations are asked here."""
    from peft.tuners.boft.layer import BOFTLayer

    model = build(FAMILIES["bert"], "base")
    tuned = deltune.attach(model, f"boft(block_size=4, factors={factors}, at='query')")
    tensors, linear = places(tuned)[0]
    width, block = linear.in_features, 4
    peer = BOFTLayer.__new__(BOFTLayer)
    rotation = torch.eye(width, dtype=torch.float64)
    for number, matrix in enumerate(tensors["skew"]):
        order = BOFTLayer.block_butterfly_perm(peer, width, width // block // 2**number, block // 2, factors - 1)
        permutation = BOFTLayer.perm2mat(peer, order).double()
        blocks = torch.block_diag(*BOFTLayer.cayley_batch(peer, matrix))
        rotation = permutation @ blocks @ permutation.T @ rotation
    x = torch.randn(3, width, dtype=torch.float64)
    expected = x @ (tensors["gain"] * (rotation @ linear.weight.T).T).T + linear.bias
    assert distance(linear(x), expected) < EXACT
