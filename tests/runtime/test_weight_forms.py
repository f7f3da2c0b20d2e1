"""Forms of the user's own that read the frozen weight, share buffers or change the input of a projection.

Each is a few lines. Detaching, files, merging, mixed rows, sums, fused projections and counting follow from its
tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import deltune
from deltune import Modification, TensorSpec
from deltune.methods.forms.orthogonal import Rotation
from deltune.methods.registry import FORMS
from tables.families import FAMILIES
from tables.specimens import batch, build, differences, distance, equal, facts, forward, loss, run, stir

FAMILY_NAMES = ("bert", "gpt2", "llama", "phi3", "t5")  # gpt2's and phi3's projections are fused, gpt2's transposed


@dataclass(frozen=True, repr=False)
class Vera(deltune.FactorForm):
    """b ⊙ B (d ⊙ A x) with A and B drawn once for all places (Kopiczko et al. 2024)."""

    rank: int = 4
    seed: int = 0

    def tensors(self, widths):  # type: ignore[no-untyped-def]
        drawn = {"A": (self.rank, widths.in_width), "B": (widths.out_width, self.rank)}
        specs = {n: TensorSpec(s, trained=False, saved=False, shared="term", seed=self.seed) for n, s in drawn.items()}
        return {"d": TensorSpec((self.rank,)), "b": TensorSpec((widths.out_width,)), **specs}

    def draw(self, shapes, generator):  # type: ignore[no-untyped-def]
        return {name: torch.randn(shape, generator=generator) / shape[1] ** 0.5 for name, shape in shapes.items()}

    def initialize(self, tensors, at):  # type: ignore[no-untyped-def]
        tensors["b"].zero_(), tensors["d"].fill_(0.1)

    def factors(self, tensors):  # type: ignore[no-untyped-def]
        return tensors["d"][:, None] * tensors["A"], tensors["b"][:, None] * tensors["B"]


@dataclass(frozen=True, repr=False)
class Dora(deltune.WeightForm):
    """m / ‖W + B A‖ ⊙ (W + B A) x, the norm held constant (Liu et al. 2024)."""

    rank: int = 2

    def tensors(self, widths):  # type: ignore[no-untyped-def]
        down, up = (self.rank, widths.in_width), (widths.out_width, self.rank)
        return {"down": TensorSpec(down), "up": TensorSpec(up), "magnitude": TensorSpec((widths.out_width,))}

    def initialize(self, tensors, at):  # type: ignore[no-untyped-def]
        torch.nn.init.kaiming_uniform_(tensors["down"], a=5**0.5)
        tensors["up"].zero_(), tensors["magnitude"].copy_(at.weight.norm(dim=1))

    def weight(self, tensors, at):  # type: ignore[no-untyped-def]
        changed = at.weight + (tensors["up"] @ tensors["down"]).to(at.weight.dtype)
        return (tensors["magnitude"] / changed.detach().norm(dim=1))[:, None] * changed


@dataclass(frozen=True, repr=False)
class DoraByOutput(Dora):
    """The same, computed from W x as the projection has it."""

    through_weight = False

    def __call__(self, tensors, u, at):  # type: ignore[no-untyped-def]
        change = F.linear(F.linear(u, tensors["down"]), tensors["up"])
        norm = (at.weight + tensors["up"] @ tensors["down"]).detach().norm(dim=1)
        return tensors["magnitude"] / norm * (at.output + change) - at.output


@dataclass(frozen=True, repr=False)
class Hira(deltune.WeightForm):
    """(W ⊙ B A) x + b (Huang et al. 2025), with a bias of its own."""

    rank: int = 2

    def tensors(self, widths):  # type: ignore[no-untyped-def]
        down, up = (self.rank, widths.in_width), (widths.out_width, self.rank)
        return {"down": TensorSpec(down), "up": TensorSpec(up)}

    def initialize(self, tensors, at):  # type: ignore[no-untyped-def]
        torch.nn.init.kaiming_uniform_(tensors["down"], a=5**0.5), tensors["up"].zero_()

    def weight(self, tensors, at):  # type: ignore[no-untyped-def]
        return torch.addcmul(at.weight, at.weight, (tensors["up"] @ tensors["down"]).to(at.weight.dtype))


@dataclass(frozen=True, repr=False)
class Product(deltune.MatrixForm):
    """(B₁ A₁ ⊙ B₂ A₂) x (LoHa; Hyeon-Woo et al. 2022)."""

    rank: int = 2

    def tensors(self, widths):  # type: ignore[no-untyped-def]
        sizes = {"a1": (widths.out_width, self.rank), "b1": (self.rank, widths.in_width)}
        return {f"{n[0]}{i}": TensorSpec(s) for i in (1, 2) for n, s in sizes.items()}

    def initialize(self, tensors, at):  # type: ignore[no-untyped-def]
        for name, tensor in tensors.items():
            tensor.zero_() if name == "a2" else torch.nn.init.normal_(tensor, std=0.1)

    def matrix(self, tensors):  # type: ignore[no-untyped-def]
        return (tensors["a1"] @ tensors["b1"]) * (tensors["a2"] @ tensors["b2"])


@dataclass(frozen=True, repr=False)
class Turn(deltune.MatrixForm):
    """A matrix on the input of a projection, W (1 + A) x."""

    def tensors(self, widths):  # type: ignore[no-untyped-def]
        return {"a": TensorSpec((widths.in_width, widths.in_width))}

    def initialize(self, tensors, at):  # type: ignore[no-untyped-def]
        tensors["a"].zero_()

    def matrix(self, tensors):  # type: ignore[no-untyped-def]
        return tensors["a"]


def at_projections(form: deltune.Form, **arguments: str) -> deltune.Method:
    return Modification("query", form, **arguments) + Modification("value", form, **arguments)  # type: ignore[arg-type]


METHODS: dict[str, Callable[[], deltune.Method]] = {
    "vera": lambda: at_projections(Vera()),
    "dora": lambda: at_projections(Dora()),
    "dora by output": lambda: at_projections(DoraByOutput()),
    "hira": lambda: at_projections(Hira()),
    "product": lambda: at_projections(Product()),
    "turn": lambda: at_projections(Turn(), insertion="input"),
    "lora + dora": lambda: deltune.lora(rank=2) + at_projections(Dora()),
    "dora + hira": lambda: at_projections(Dora()) + at_projections(Hira()),
}

cells = pytest.mark.parametrize(
    ("name", "family"), [(n, f) for f in FAMILY_NAMES for n in METHODS], ids=lambda value: str(value)
)


@pytest.fixture(autouse=True)
def registered() -> None:
    for kind in (Vera, Dora, DoraByOutput, Hira, Product, Turn):
        deltune.register(kind)


def exactness(family: str) -> float:
    return 1e-12 if FAMILIES[family].exact else 1e-5


@cells
def test_life(name: str, family: str, tmp_path: Path) -> None:
    """Identity at the start, files, merging and detaching."""
    model = build(FAMILIES[family], "base")
    inputs, before = batch(model), facts(model)
    bare = run(model, inputs)
    tuned = deltune.attach(model, METHODS[name]())
    assert distance(run(model, inputs), bare) < exactness(family)
    assert tuned.count().method == sum(p.numel() for p in tuned.trainable_parameters())
    stir(tuned, size=0.05)
    changed = run(model, inputs)
    assert distance(changed, bare) > 1e-3
    tuned.save(tmp_path / "delta")
    with tuned.disable():
        assert equal(run(model, inputs), bare)
    tuned.detach()
    assert not differences(before, facts(model))
    loaded = deltune.load(model, tmp_path / "delta")
    assert equal(run(model, inputs), changed)
    loaded.merge()
    assert distance(run(model, inputs), changed) < exactness(family)


@cells
def test_rows(name: str, family: str) -> None:
    """Rows with it, without, and with another delta give what they give alone, gradients included."""
    model = build(FAMILIES[family], "base")
    inputs = batch(model, rows=4, pad=0)
    tuned = stir(deltune.attach(model, METHODS[name](), name="a"), size=0.05)
    stir(deltune.attach(model, "lora(rank=2) + layernorm", name="b"), seed=2, size=0.05)
    parameters = list(tuned.delta("a").edits.parameters())

    def answer(names: list[str | None], rows: slice) -> tuple[torch.Tensor, list[torch.Tensor]]:
        with tuned.rows(names):
            output = forward(model, {key: value[rows] for key, value in inputs.items()})["last_hidden_state"]
            if "a" not in names:
                return output.detach(), [torch.zeros_like(p) for p in parameters]
            return output.detach(), list(torch.autograd.grad(output.square().sum(), parameters))

    names = ["a", None, "b", "a"]
    mixed, gradients = answer(names, slice(None))
    alone = [answer([name], slice(row, row + 1)) for row, name in enumerate(names)]
    expected = torch.cat([output for output, _ in alone])
    assert (mixed - expected).abs().max() < exactness(family) * expected.abs().max()
    for number, of_all in enumerate(gradients):
        of_rows = sum(grads[number] for _, grads in alone)
        assert (of_all - of_rows).abs().max() <= 10 * exactness(family) * (1 + of_all.abs().max())


def test_two_views_of_one_form() -> None:
    """DoRA by its weight and by the output of the projection are the same."""
    model = build(FAMILIES["gpt2"], "causal")
    inputs = batch(model)
    outputs = []
    for form in (Dora(), DoraByOutput()):
        torch.manual_seed(0)
        tuned = stir(deltune.attach(model, at_projections(form)), size=0.05)
        grads = torch.autograd.grad(loss(forward(model, inputs)), list(tuned.trainable_parameters()))
        outputs.append(run(model, inputs) | {f"grad {i}": g for i, g in enumerate(grads)})
        tuned.detach()
    assert distance(*outputs) < 1e-9


def test_a_shared_buffer_is_drawn_again_and_not_saved(tmp_path: Path) -> None:
    model = build(FAMILIES["bert"], "base")
    tuned = deltune.attach(model, at_projections(Vera(seed=3)))
    assert tuned.count().method == tuned.count().stored == 2 * 2 * (4 + 32)
    drawn = [t.clone() for t in tuned.delta().buffers()]
    tuned.save(tmp_path / "delta")
    tuned.detach()
    torch.manual_seed(99)
    loaded = deltune.load(model, tmp_path / "delta")
    assert drawn and all(torch.equal(a, b) for a, b in zip(drawn, loaded.delta().buffers(), strict=True))


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_masks_of_them_train_exactly_as_many(family: str) -> None:
    model = build(FAMILIES[family], "base")
    tuned = deltune.attach(model, deltune.apet(at_projections(Product()), parameters=37))
    assert sum(p.numel() for p in tuned.trainable_parameters()) == tuned.count().method == 37


BUILT_IN = [kind for kind in FORMS if kind.reads_weight and not issubclass(kind, deltune.MatrixForm)]


@pytest.mark.parametrize("kind", [Dora, Hira, *BUILT_IN])
def test_what_is_computed_from_a_weight_reads_what_it_reads(kind: type[deltune.Form]) -> None:
    """W' x is neither a function of W x nor of another input of W; the way out is another insertion."""
    needed = {"rank": 2, "block_size": 4}
    form = kind(**{f.name: needed[f.name] for f in fields(kind) if f.default is MISSING})
    for site, insertion in itertools.product(("query", "ffn_up", "embedding"), ("sequential", "input")):
        if not (kind is Rotation and insertion == "input"):
            with pytest.raises(deltune.DeltuneError, match="reads what the projection reads: give insertion="):
                Modification(site, form, insertion)
    with pytest.raises(deltune.DeltuneError, match=r"reads token ids, which .* cannot: choose another site"):
        Modification("embedding", form)


@pytest.mark.parametrize("form", [Product(), deltune.LowRank(2)])
@pytest.mark.parametrize("site", ["query", "ffn_up", "embedding"])
def test_a_matrix_on_the_output(form: deltune.Form, site: str) -> None:
    """h + A h, not W x + A x."""
    model = build(FAMILIES["bert"], "base")
    inputs = batch(model)
    tuned = stir(deltune.attach(model, Modification(site, form, "sequential", layers="all")))  # type: ignore[arg-type]
    edit = next(iter(tuned.delta().all_edits()))
    seen: list[torch.Tensor] = []
    with tuned.disable():
        keep = model.get_submodule(edit.place.target.path).register_forward_hook(lambda *call: seen.append(call[2]))
        forward(model, inputs)
        keep.remove()
    changes: list[torch.Tensor] = []
    keep = model.get_submodule(edit.place.target.path).register_forward_hook(lambda *call: changes.append(call[2]))
    trained = run(model, inputs)
    keep.remove()
    matrix = form.affine(edit.tensors(), None)[0]  # type: ignore[index]
    assert torch.allclose(changes[0], seen[0] + seen[0] @ matrix.T, rtol=0, atol=1e-12)
    tuned.merge()
    assert distance(run(model, inputs), trained) < 1e-12


def test_refusals() -> None:
    model = build(FAMILIES["bert"], "base")
    for method, says in (
        (Modification("attention", Dora()), "acts at a projection, and encoder.0.self.attention is none"),
        (Modification("ffn", Turn(), "input"), "acts at a projection"),
        (Modification("embedding", Turn(), "input"), "acts at a projection"),
    ):
        with pytest.raises(deltune.DeltuneError, match=says):
            deltune.attach(model, method)


@pytest.mark.parametrize("wrong", [-1, 32 * 32])
def test_positions_beyond_a_weight_are_refused(wrong: int, tmp_path: Path) -> None:
    """On a GPU such an index would end the process."""
    model = build(FAMILIES["bert"], "base")
    tuned = deltune.attach(model, "shira(rank=1)")
    entries = next(iter(tuned.delta().all_edits())).own_tensors()["entries"]
    assert entries.dtype == torch.int64
    entries[3] = wrong
    tuned.save(tmp_path / "delta")
    tuned.detach()
    with pytest.raises(deltune.DeltuneError, match="entries has positions from"):
        deltune.load(model, tmp_path / "delta")


@pytest.mark.parametrize("form", ["HiRA(2)", "SHiRA(2)", "FourierFT(4)", "OSF(2)", "PEANuT(2)", "DoRA(2)"])
def test_a_learned_scale_is_trained_where_it_is_1(form: str) -> None:
    model = build(FAMILIES["bert"], "base")
    tuned = stir(deltune.attach(model, f"Modification('query', {form}, compose=Scale(1.0, learned=True))"))
    scales = [p for name, p in tuned.named_trainable_parameters() if name.endswith("scale")]
    inputs = batch(model)
    for scale in scales:
        scale.data.fill_(1.0)
    loss(forward(model, inputs)).backward()
    for scale in scales:
        values = []
        for step in (1e-5, -1e-5):
            scale.data.fill_(1 + step)
            values.append(loss(run(model, inputs)))
        scale.data.fill_(1.0)
        assert scale.grad is not None
        torch.testing.assert_close(scale.grad, (values[0] - values[1]) / 2e-5, rtol=1e-4, atol=1e-8)
