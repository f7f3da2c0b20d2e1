"""Mixed batches: a row with a delta of its own gives what it gives alone, whatever stands in the other rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import deltune
from deltune.runtime.modules import HeadLabels
from tables.families import FAMILIES, Family
from tables.methods import METHODS, Row, cells
from tables.specimens import batch, build, differences, equal, facts, run, specimen, stir

WHOLE = ("full", "apet(full")
"""Methods that train what all rows share."""

SOME = ("bert", "albert", "gpt2", "llama", "gemma2", "bart", "t5")
"""Families that between them have every kind of position, norm, attention and stack."""


def model_of(family: Family) -> PreTrainedModel:
    """In float64, but for Gemma 2: its own softmax is in float32, where float64's mask value is -inf, and what sees
    nothing but padding becomes NaN, with or without deltune."""
    return specimen(family.name, dtype=torch.float32 if family.name == "gemma2" else torch.float64)


def tolerance(family: Family) -> float:
    return 1e-10 if family.exact else 1e-4


def answer(model: PreTrainedModel, inputs: dict[str, Any]) -> torch.Tensor:
    """Logits, or the last states."""
    options = {"use_cache": False} if model.config.is_encoder_decoder or hasattr(model.config, "use_cache") else {}
    output: torch.Tensor = model(**inputs, **options)[0]
    return output


def of_rows(inputs: dict[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    return {name: value[list(rows)] for name, value in inputs.items()}


def squared(output: torch.Tensor) -> torch.Tensor:
    return output[output.isfinite()].square().sum()


def check(family: Family, tuned: deltune.Tuned, names: Sequence[str | None], inputs: dict[str, Any]) -> None:
    """Outputs and gradients of the mixed batch are those of its rows alone."""
    model = tuned.model
    alone, gradients = [], {}
    for row, name in enumerate(names):
        tensor = answer(tuned.use(name).model, of_rows(inputs, [row]))
        alone.append(tensor.detach())
        if name is not None and tensor.requires_grad:
            squared(tensor).backward()
            for key, parameter in tuned.delta().named_parameters():
                gradients[name, key] = None if parameter.grad is None else parameter.grad.clone()
            for key in tuned.delta().owned_tensor_names:
                grad = tuned.attached.state.delta_value(tuned.delta(), key).grad
                gradients[name, f"held.{key}"] = None if grad is None else grad.clone()
    model.zero_grad()
    with tuned.use(None).rows(names):
        mixed = answer(model, inputs)
        for row, expected in enumerate(alone):
            width = expected.shape[-1]
            assert torch.isinf(mixed[row, ..., width:]).all()
            size = expected.abs().max()
            assert (mixed[row : row + 1, ..., :width] - expected).abs().max() < tolerance(family) * size, names[row]
        if mixed.requires_grad:
            squared(mixed).backward()
        scale = max((grad.abs().max().item() for grad in gradients.values() if grad is not None), default=0.0)
        for (name, key), grad in gradients.items():
            delta = tuned.delta(name)
            held = key.startswith("held.")
            tensor = (tuned.attached.state.delta_value(delta, key[5:]) if held else delta.get_parameter(key)).grad
            assert (tensor is None) == (grad is None), (name, key)
            if grad is not None:
                assert (tensor - grad).abs().max() <= tolerance(family) * scale, (name, key)
    assert tuned.active is None and tuned.mixed == ()
    model.zero_grad()


@cells(families=lambda f: f.name in SOME)
@pytest.mark.sample(36)
def test_every_method_by_row(family: Family, row: Row) -> None:
    model = model_of(family)
    tuned = stir(deltune.attach(model, row.text, name="one"))
    stir(deltune.attach(model, "layernorm + adapter(rank=3)", name="two"))
    try:
        if row.text.startswith(WHOLE):
            with pytest.raises(deltune.DeltuneError, match="which all rows of a batch share"), tuned.rows(["one"]):
                pass
            assert tuned.active == "two"
        else:
            check(family, tuned, ["two", "one", None, "one"], batch(model, rows=4))
    finally:
        tuned.detach()


MANY = (
    "prefix(length=3) + layernorm", "prefix(length=5)", "adapter(style='pfeiffer', rank=2) + layernorm",
    "prompt(length=3)", "prompt(length=5) + prefix(length=1)", "lora(rank=2)", "head",
)  # fmt: skip


@pytest.mark.parametrize("family", [f for f in FAMILIES.values() if f.interface], ids=lambda f: f.name)
@pytest.mark.parametrize("left", [None, False, True], ids=["padded right", "padded left", "padded left and numbered"])
@pytest.mark.sample(14)
def test_all_at_once(family: Family, left: bool | None) -> None:
    """Prompts and prefixes of different lengths, norms, adapters and nothing, in one batch with padding."""
    model = model_of(family)
    names: list[str | None] = [None]
    for number, text in enumerate(MANY):
        tuned = stir(deltune.attach(model, text, name=f"d{number}"))
        names.append(f"d{number}")
    try:
        names += ["d3", "d0"]
        inputs = batch(model, rows=len(names), pad=0)
        for row in (2, 4, 5):
            columns = slice(0, row - 1) if left is not None and family.kind == "decoder" else slice(-row + 1, None)
            inputs["input_ids"][row, columns] = model.config.pad_token_id
            inputs["attention_mask"][row, columns] = 0
        if left and family.kind == "decoder":
            inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        (check_text if family.kind == "decoder" else check)(family, tuned, names, inputs)
    finally:
        tuned.detach()


def check_text(family: Family, tuned: deltune.Tuned, names: Sequence[str | None], inputs: dict[str, Any]) -> None:
    """Outputs where there is text: what a causal model gives for padding is nobody's business."""
    shown = inputs["attention_mask"].bool()
    with torch.no_grad():
        alone = [answer(tuned.use(n).model, of_rows(inputs, [row])) for row, n in enumerate(names)]
        with tuned.rows(names):
            mixed = answer(tuned.model, inputs)
    for row, expected in enumerate(alone):
        gap = (mixed[row] - expected[0])[shown[row]].abs().max()
        assert gap < tolerance(family) * expected.abs().max(), names[row]


def test_heads_of_different_sizes_and_their_losses(tmp_path: Any) -> None:
    """Logits are padded with -inf to the widest head, and the loss is the mean of the rows' own losses."""
    deltas = {}
    for labels, name in ((2, "two"), (4, "four"), (3, "three")):
        torch.manual_seed(labels)
        model = build(FAMILIES["bert"], "sequence", num_labels=labels)
        shared = build(FAMILIES["bert"], "base")
        model.bert.load_state_dict(shared.state_dict())
        tuned = stir(deltune.attach(model, "lora(rank=2) + layernorm"), seed=labels)
        deltas[name] = tuned.save(tmp_path / name)
    model = build(FAMILIES["bert"], "sequence", num_labels=2)
    model.bert.load_state_dict(build(FAMILIES["bert"], "base").state_dict())
    for name, folder in deltas.items():
        tuned = deltune.load(model, folder, name=name)
    names = ["four", "two", None, "three", "four"]
    inputs = batch(model, rows=5)
    check(FAMILIES["bert"], tuned, names, inputs)
    labels = torch.tensor([3, 1, 0, 2, 0])
    losses = [tuned.use(n).model(**of_rows(inputs, [i]), labels=labels[i : i + 1]).loss for i, n in enumerate(names)]
    before = tuned.use(None).model.config.num_labels
    with tuned.rows(names):
        output = model(**inputs, labels=labels)
        assert output.logits.shape == (5, 4)
        assert torch.isclose(output.loss, torch.stack(losses).mean(), rtol=1e-12)
        output.loss.backward()
    with tuned.rows(["two", "three", "two", "two", "three"]):
        assert model(**inputs).logits.shape == (5, 3)
    assert (model.config.num_labels, model.num_labels, tuned.active) == (before, before, None)
    for _, parameter in tuned.delta("four").named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all()


def test_labels_of_different_kinds_have_no_common_loss() -> None:
    model = build(FAMILIES["bert"], "sequence", num_labels=1)
    tuned = deltune.attach(model, "layernorm", name="number")
    tuned.delta().labels = HeadLabels(((0, "x"),), "regression")
    tuned.attached.base_labels = HeadLabels(((0, "a"), (1, "b")))
    inputs = batch(model)
    with tuned.rows([None, "number"]):
        model(**inputs)
        with pytest.raises(deltune.DeltuneError, match="different kinds of labels"):
            model(**inputs, labels=torch.tensor([0, 0]))


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama", "gemma2", "bart", "t5"])
@pytest.mark.parametrize("ways", [{}, {"num_beams": 3}, {"use_cache": False}], ids=["cached", "beams", "no cache"])
@pytest.mark.sample(9)
def test_generation(name: str, ways: dict[str, Any]) -> None:
    """Beams repeat rows; the cache of each row holds its own prompt."""
    family = FAMILIES[name]
    model = model_of(family)
    texts = ("prefix(length=3) + layernorm", "prompt(length=3)", "prompt(length=5)", "lora(rank=2) + adapter(rank=2)")
    for number, text in enumerate(texts):
        tuned = stir(deltune.attach(model, text, name=f"d{number}"), size=0.5)
    try:
        names = ["d1", "d0", None, "d2", "d3"]
        inputs = {k: v for k, v in batch(model, rows=5, pad=0).items() if k != "decoder_input_ids"}
        if family.kind == "decoder":
            inputs["attention_mask"][1, :2] = 0
            inputs["input_ids"][1, :2] = model.config.pad_token_id
        options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "num_beams": 1, **ways}
        with torch.no_grad():
            alone = [tuned.use(n).model.generate(**of_rows(inputs, [i]), **options)[0] for i, n in enumerate(names)]
            with tuned.rows(names):
                mixed = model.generate(**inputs, **options)
        assert torch.equal(mixed, torch.stack(alone))
        assert len({tuple(row[-6:].tolist()) for row in alone}) > 2  # the deltas do say different things
    finally:
        tuned.detach()


def test_what_rows_left_goes_when_a_delta_is_detached() -> None:
    """Modules whose tensors differed by row run as before; inside of a block they go on with those of the rows."""
    model = build(FAMILIES["bert"], "sequence")
    tuned = stir(deltune.attach(model, "layernorm", name="one"))
    deltune.attach(model, "lora(rank=2)", name="two")
    known, inputs = facts(model), batch(model, rows=2)
    deltune.attach(model, "lora(rank=2)", name="three")
    with tuned.rows(["one", None]):
        expected = run(model, inputs)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(tuned.detach, "three").result()
        assert equal(run(model, inputs), expected)
    deltune.attach(model, "lora(rank=2)", name="three")
    tuned.detach("three")
    tuned.use("two")
    assert differences(known, facts(model)) == []


def test_what_is_no_batch() -> None:
    model = build(FAMILIES["bert"], "sequence")
    tuned = deltune.attach(model, "layernorm", name="one")
    for names, message in (([], r"not \[\]"), (["two"], "'two'"), (["one", "tow", "three"], "2 problems")):
        with pytest.raises(deltune.DeltuneError, match=message), tuned.rows(names):
            pass
    with tuned.rows(["one", None]), pytest.raises(deltune.DeltuneError, match=r"one name .* for each row"):
        model(**batch(model, rows=3))
    assert tuned.active == "one"
    with pytest.raises(ZeroDivisionError), tuned.rows(["one", None]):
        raise ZeroDivisionError
    assert tuned.active == "one" and tuned.mixed == ()


def test_states_inside_states() -> None:
    """disable() and rows() inside rows() hold inside, and the outer rows hold again after them."""
    model = build(FAMILIES["bert"], "sequence")
    inputs = batch(model, rows=4)
    plain = answer(model, inputs)
    for name in ("a", "b"):
        tuned = stir(deltune.attach(model, "prefix(length=2) + layernorm", name=name), seed=ord(name))
    names: list[str | None] = ["a", "b", None, "a"]
    with tuned.rows(names):
        outer = answer(model, inputs)
        with tuned.disable():
            assert torch.equal(answer(model, inputs), plain)
        assert torch.equal(answer(model, inputs), outer) and tuned.mixed == tuple(names)
        with tuned.rows(["b"] * 4):
            inner = answer(model, inputs)
        assert torch.equal(answer(model, inputs), outer)
        for refused in (lambda: tuned.use("a"), lambda: tuned.detach("a"), lambda: tuned.merge()):
            with pytest.raises(deltune.DeltuneError, match="inside rows"):
                refused()
        with pytest.raises(deltune.DeltuneError, match="inside rows"):
            deltune.attach(model, "lora(rank=2)", name="c")
        assert torch.equal(answer(model, inputs), outer)
    assert tuned.active == "b" and tuned.names == ("a", "b")
    assert (inner - answer(model, inputs)).abs().max() < 1e-12


def test_a_multiple_of_the_rows_is_no_batch_but_of_generate() -> None:
    model = build(FAMILIES["bert"], "sequence")
    tuned = deltune.attach(model, "layernorm", name="a")
    with tuned.rows(["a", None]), pytest.raises(deltune.DeltuneError, match="the batch has 4 rows"):
        model(**batch(model, rows=4))


ENCODED: dict[str, Callable[[Any], Any]] = {
    "an output": lambda encoded: encoded,
    "a tuple": lambda encoded: (encoded[0],),
}
"""How the encoder's outputs may be handed to a model, instead of token ids."""


@pytest.mark.parametrize("kind", ENCODED)
@pytest.mark.parametrize("name", ["bart", "t5"])
def test_what_the_encoder_gave_has_the_rows_of_the_batch(name: str, kind: str) -> None:
    """A decoder that is given them computes what the whole model computes; of another number of rows they are refused,
    a multiple too, which only generation makes of its prompts."""
    model = build(FAMILIES[name], "seq2seq")
    for delta, text in {"a": "lora(rank=2) + layernorm", "b": "parallel_adapter(rank=2)"}.items():
        tuned = stir(deltune.attach(model, text, name=delta), seed=ord(delta))
    inputs = batch(model, rows=2, pad=0)
    inputs.pop("decoder_input_ids")
    labels, ways = torch.tensor([[7, 8, 9], [9, 8, 7]]), {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}

    def encoded(rows: int) -> dict[str, Any]:
        with torch.no_grad():
            states = model.get_encoder()(**{n: v[:1].expand(rows, -1) if rows != 2 else v for n, v in inputs.items()})
        mask = torch.ones(rows, inputs["input_ids"].shape[1], dtype=torch.long)
        return {"encoder_outputs": ENCODED[kind](states), "attention_mask": mask}

    others = {rows: encoded(rows) for rows in (1, 3, 4)}
    with torch.no_grad(), tuned.rows(["a", "b"]):
        whole = model(**inputs, labels=labels)
        output = model(**encoded(2), labels=labels)
        assert torch.equal(output.logits, whole.logits) and torch.equal(output.loss, whole.loss)
        answers = model.generate(**inputs, **ways)
        if kind == "an output":  # generate takes nothing else
            assert torch.equal(model.generate(**encoded(2), **ways), answers)
        for rows, other in others.items():
            with pytest.raises(deltune.DeltuneError, match=f"was given 2 names, but the batch has {rows} rows"):
                model(**other, labels=labels[:1].expand(rows, -1))
            for arguments in (other, {"encoder_outputs": other["encoder_outputs"]}):
                with pytest.raises(deltune.DeltuneError, match=f"was given 2 names, but generate got {rows} prompts"):
                    model.generate(**arguments, **ways)
        assert torch.equal(model.generate(**inputs, **ways), answers)


def test_several_labels_at_once_have_no_common_loss() -> None:
    model = build(FAMILIES["bert"], "sequence", num_labels=2)
    tuned = deltune.attach(model, "layernorm", name="two")
    tuned.attached.base_labels = HeadLabels(((0, "x"), (1, "y"), (2, "z")))
    with tuned.rows(["two", None]), pytest.raises(deltune.DeltuneError, match="no common loss"):
        model(**batch(model), labels=torch.ones(2, 3, dtype=torch.float64))


def test_what_reads_nothing_of_the_batch_is_shared() -> None:
    """DeBERTa-v3's norm of its relative positions: no row of it is a row of the batch."""
    changes = {"norm_rel_ebd": "layer_norm", "share_att_key": True, "position_buckets": 8, "max_relative_positions": -1}
    model = build(FAMILIES["deberta-v2"], "sequence", **changes)
    tuned = deltune.attach(model, "layernorm", name="all")
    with pytest.raises(deltune.DeltuneError, match=r"encoder\.LayerNorm\..* all rows"), tuned.rows(["all", None]):
        pass
    stir(deltune.attach(model, "layernorm(embedding=False, final=False)", name="layers"))
    check(FAMILIES["deberta-v2"], tuned, ["layers", None, "layers"], batch(model, rows=3))


def test_what_trains_is_remembered() -> None:
    model = build(FAMILIES["bert"], "sequence")
    tuned = deltune.attach(model, "lora(rank=2) + layernorm")
    for name, parameter in tuned.named_trainable_parameters():
        parameter.requires_grad_("LayerNorm" not in name)
    chosen = [name for name, _ in tuned.named_trainable_parameters()]
    with tuned.disable():
        assert not list(tuned.named_trainable_parameters())
    with tuned.rows(["default", None]):
        assert len(list(tuned.named_trainable_parameters())) == len(chosen)
    assert [name for name, _ in tuned.named_trainable_parameters()] == chosen


def test_every_method_is_tried() -> None:
    """But for those that need data or another model to start; test_starts has their life."""
    others = {"apet", "eva", "corda", "lora_ga", "loftq"}
    assert {name.partition("(")[0] for text in METHODS for name in [text]} >= set(deltune.methods()) - others


def test_training_after_inference_in_the_same_rows() -> None:
    """Nothing made in inference mode is kept."""
    model = build(FAMILIES["bert"], "sequence")
    inputs = batch(model, rows=2)
    for name in ("a", "b"):
        tuned = stir(deltune.attach(model, "lora(rank=2) + layernorm", name=name), seed=ord(name))
    with tuned.rows(["a", "b"]):
        with torch.inference_mode():
            output = answer(model, inputs)
        again = answer(model, inputs)
        again.sum().backward()
    assert (again - output).abs().max() < 1e-12
    assert all(tuned.delta(name).get_parameter(n).grad is not None for name in "ab"
               for n, _ in tuned.delta(name).named_parameters() if n.startswith("edits"))  # fmt: skip


@pytest.mark.parametrize("text", ["layernorm", "lora(rank=2)"])
def test_rows_that_are_refused_are_refused_again(text: str) -> None:
    model = build(FAMILIES["bert"], "base")
    tuned = deltune.attach(model, text, name="a")
    norm = model.encoder.layer[0].attention.output.LayerNorm
    query = model.encoder.layer[0].attention.self.query
    with tuned.rows(["a", "a"]):
        for _ in range(2):
            with pytest.raises(deltune.DeltuneError, match="a tensor has 3 rows"):
                (norm if text == "layernorm" else query)(torch.zeros(3, 4, model.config.hidden_size, dtype=model.dtype))


@pytest.mark.parametrize("first", [True, False])
def test_a_norm_that_runs_again_has_the_values_in_use(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Pfeiffer adapter reads the norm of h; the norm is trained in part; hooks are made by who is attached first."""
    model = build(FAMILIES["bert"], "base")
    inputs = batch(model)
    if not first:
        deltune.attach(model, "apet(layernorm, parameters=40)", name="other")
    text = "adapter(style='pfeiffer', rank=2) + apet(layernorm, parameters=40)"
    tuned = stir(deltune.attach(model, text, name="a"))
    expected = answer(model, inputs)
    with tuned.rows(["a"] * len(expected)):
        assert (answer(model, inputs) - expected).abs().max() < 1e-10
    adapters = [e for e in tuned.delta().all_edits() if e.place.apply_norm_first]
    assert adapters
    norm = model.get_submodule(adapters[0].place.target.path)
    weights = []
    original = torch.nn.LayerNorm.forward

    def watched(self: torch.nn.LayerNorm, h: torch.Tensor) -> torch.Tensor:
        if self.__dict__.get("forward") is norm.forward:
            weights.append(self.weight.detach().clone())
        return original(self, h)

    monkeypatch.setattr(torch.nn.LayerNorm, "forward", watched)
    answer(model, inputs)
    assert len(weights) == 2 and torch.equal(*weights) and not torch.equal(weights[0], norm.weight)


def test_a_forward_that_was_replaced_is_refused() -> None:
    """It computes with the module's own tensors, and would leave out those that are trained."""
    model = build(FAMILIES["bert"], "base")
    norm = model.encoder.layer[0].output.LayerNorm
    tuned = deltune.attach(model, "apet(layernorm, parameters=40)")
    ours, norm.forward = norm.forward, partial(type(norm).forward, norm)
    with pytest.raises(deltune.DeltuneError, match=r"encoder\.layer\.0\.output\.LayerNorm.*was replaced after"):
        answer(model, batch(model))
    tuned.detach()
    with pytest.raises(deltune.DeltuneError, match="was replaced"):
        deltune.attach(model, "apet(layernorm, parameters=40)")
    assert norm.forward is not ours and "deltune" not in model._modules
    answer(model, batch(model))


def test_a_backward_pass_outside_its_rows_is_an_error() -> None:
    """It would train whoever is in use alone, or nobody."""
    model = build(FAMILIES["bert"], "sequence")
    inputs = batch(model, rows=2)
    for name in ("a", "b"):
        tuned = stir(deltune.attach(model, "lora(rank=2) + layernorm", name=name), seed=ord(name))
    for _ in range(2):
        with tuned.rows(["a", "b"]):
            assert len(list(tuned.trainable_parameters())) == len(
                [*tuned.delta("a").parameters(), *tuned.delta("b").parameters()]
            )
            output = answer(model, inputs)
        with pytest.raises(deltune.DeltuneError, match=r"inside its rows\(\)"):
            output.sum().backward()
    model.zero_grad()
    answer(tuned.use("b").model, inputs).sum().backward()  # alone it trains as before
    assert all(p.grad is not None for n, p in tuned.delta("b").named_parameters() if n.startswith("edits"))
    assert all(p.grad is None for n, p in tuned.delta("a").named_parameters() if n.startswith("edits"))


@pytest.mark.parametrize("name", ["bert", "gpt2", "modernbert"])
def test_gains_of_one_delta_and_biases_of_another(name: str) -> None:
    """ModernBERT's norms have no biases."""
    family = FAMILIES[name]
    tuned = stir(deltune.attach(model_of(family), deltune.Selection(("norm.gain",)), name="gains"))
    other = "layernorm" if name == "modernbert" else "bitfit(which='norm')"
    stir(deltune.attach(tuned.model, other, name="other"), seed=2)
    try:
        check(family, tuned, ["gains", "other", None, "gains"], batch(tuned.model, rows=4))
    finally:
        tuned.detach()


PAIRED = {
    "bert": (
        "three_vectors", "prompt(length=3)", "prompt(length=1, positions='none')",
        "prefix(length=2, shift_positions=True)", "layernorm", "lora(rank=2)", "unipelt", "adapter(rank=2)", "bitfit",
        "apet(layernorm, parameters=20)", "multi_head_parallel_adapter(length=2)",
    ),
    "llama": (
        "prompt(length=3)", "prefix(length=2, shift_positions=True)", "layernorm", "ia3", "mam(length=2, rank=2)",
    ),
    "bart": (
        "prompt(length=3)", "prompt(length=1, positions='none')", "prefix(length=2, shift_positions=True)", "layernorm",
    ),
    "t5": ("prompt(length=3)", "prefix(length=2)", "ia3", "parallel_adapter(rank=2)"),
}  # fmt: skip
"""By family, methods of which each kind acts at other places of a pass; the first ones share modules with others."""


PAIRS = [
    (name, *pair)
    for name, texts in PAIRED.items()
    for pair in permutations(texts, 2)
    if not all(text.startswith("prompt") for text in pair)  # which rows() refuses
]


@pytest.mark.parametrize(("name", "first", "second"), PAIRS)
@pytest.mark.parametrize("left", [False, True], ids=["padded right", "padded left"])
@pytest.mark.sample(20)
def test_every_pair_whatever_was_attached_first(name: str, first: str, second: str, left: bool) -> None:
    family = FAMILIES[name]
    model = model_of(family)
    for text, delta in zip((first, second), ("one", "two"), strict=True):
        tuned = stir(deltune.attach(model, text, name=delta), seed=len(text))
    inputs = batch(model, rows=3, pad=0)
    inputs["input_ids"][:2, slice(2) if left else slice(-2, None)] = model.config.pad_token_id
    inputs["attention_mask"][:2, slice(2) if left else slice(-2, None)] = 0
    try:
        for names in (["one", "two", None], ["two", None, "one"]):
            (check_text if family.kind == "decoder" else check)(family, tuned, names, inputs)
    finally:
        tuned.detach()
