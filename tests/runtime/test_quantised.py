"""Quantised base models: every method lives on every form as on floats, and a refusal changes nothing.

Of the product of forms, families and methods `make test` takes a sample, in which every form has a cell.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainingArguments

import deltune
from deltune.anatomy.quantization import quantization_of, quantized_modules, stored_bytes
from deltune.anatomy.quantizers import dequantized_weight
from deltune.errors import DeltuneError
from deltune.models import NO_MODULE, Quantization, quantization_config
from tables.families import FAMILIES
from tables.methods import ROWS, Row
from tables.quantized import FORMS, TRAINED, Form, batch, changed, load_form, logits, save_models, snapshot

NF4, INT8 = FORMS["bitsandbytes nf4"], FORMS["torchao int8"]

MISSING = [name for name in ("bitsandbytes", "torchao", "optimum", "hqq") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        bool(MISSING), reason=f"no {', '.join(MISSING)}: pip install -e '.[quant]' hqq -c constraints.txt"
    ),
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_models(tmp_path_factory.mktemp("quantised"))


def product() -> list[Any]:
    return [
        pytest.param(form, family, row, id=f"{form}: {family}: {row.text}")
        for row in ROWS
        for form in TRAINED
        for family in ("llama", "bert")
    ]


def trains_quantised(model: PreTrainedModel, method: str, form: Form) -> bool:
    """Whether a method trains in place, of a model in floating point, what a form has quantised."""
    leaves = () if form.holds_floats else ("weight",) if form.trains_biases else ("weight", "bias")
    selected = deltune.attach(model, method)
    planned = selected.delta().planned
    names = {t.name for t in (*planned.selected, *planned.trained_in_part)}
    linears = {f"{n}.{x}" for n, m in model.base_model.named_modules() if isinstance(m, nn.Linear) for x in leaves}
    prefix = f"{model.base_model_prefix}."
    selected.detach()
    return bool({name.removeprefix(prefix) for name in names} & linears)


@pytest.mark.parametrize(("form", "family", "row"), product())
@pytest.mark.sample(10)
def test_a_method_lives_on_a_form(form: Form, family: str, row: Row, folder: Path, tmp_path: Path) -> None:
    """Attach, count, train, mix rows, save, load, generate and detach."""
    model, data = load_form(folder, family, form), batch(family)
    logits(model, family)  # bitsandbytes moves the state of its 8-bit linears in the first pass
    before, plain = snapshot(model), logits(model, family)
    floats = load_form(folder, family, None)
    if row.lacking(FAMILIES[family]):
        with pytest.raises(DeltuneError):
            deltune.attach(model, row.text)
        assert not changed(before, snapshot(model))
        return
    if trains_quantised(floats, row.text, form):
        with pytest.raises(DeltuneError, match=r"are quantised .*cannot be trained"):
            deltune.attach(model, row.text)
        assert not changed(before, snapshot(model)) and torch.equal(logits(model, family), plain)
        return
    torch.manual_seed(1)
    tuned = deltune.attach(model, row.text)
    assert tuned.count() == deltune.count(floats, row.text), "counted as on floats"
    if not list(tuned.trainable_parameters()):
        # a causal language model has no task head
        assert (row.text, family) == ("head", "llama") or not row.trains
        return
    untouched = _of_base(before, tuned)
    losses = []
    few = tuned.count().trained < 1000  # whose steps would stay below the rounding of int8
    optimizer = torch.optim.Adam(tuned.trainable_parameters(), lr=5e-2 if few else 5e-3)
    for step in range(6):
        loss = model(**data).loss
        loss.backward()
        optimizer.step()
        tuned.advance((step + 1) / 6)
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[-1] < losses[0], "training lowers the loss"
    assert not [name for name in changed(before, snapshot(model)) if name in untouched], "no number of the base changed"
    answers = logits(model, family)
    if row.text != "full" and "diff_pruning" not in row.text:
        with tuned.rows(["default", None, "default"]):
            mixed = logits(model, family)
        torch.testing.assert_close(mixed[::2], answers[::2], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(mixed[1], plain[1], atol=2e-5, rtol=1e-4)
    if family == "llama":
        ids, options = data["input_ids"], {"use_cache": False} if "ladder" in row.text else {}
        inputs = {"attention_mask": torch.ones_like(ids), "pad_token_id": 1, **options}
        assert model.generate(ids, max_new_tokens=2, **inputs).shape == (3, 9)
    tuned.save(tmp_path / "delta")
    tuned.detach()
    assert not changed(before, snapshot(model)), "detach restores everything"
    assert torch.equal(logits(model, family), plain)
    again = load_form(folder, family, form)
    deltune.load(again, tmp_path / "delta")
    torch.testing.assert_close(logits(again, family), answers, atol=1e-5, rtol=1e-5)


def _of_base(before: dict[str, Any], tuned: deltune.Tuned) -> set[str]:
    """The names in a snapshot of the numbers that belong to quantised linears, and of everything inside them."""
    paths = [path for path, _, row in quantized_modules(tuned.model) if not row.trainable_weight]
    ends = (" is", "requires_grad")
    return {
        name
        for name, value in before.items()
        if isinstance(value, torch.Tensor)
        and name.startswith(tuple(f"{p}.weight" for p in paths))
        and name[-3:] not in ends
    }


# -- what the table says


@pytest.mark.parametrize("form", FORMS.values(), ids=str)
def test_the_table_describes_the_linears(form: Form, folder: Path) -> None:
    """Name, sizes, weight, gradient and bytes of every quantised linear, against the linear itself."""
    model = load_form(folder, "bert", form)
    assert quantization_of(model) == form.name and quantization_of(load_form(folder, "bert", None)) == ""
    linears = list(quantized_modules(model))
    assert len(linears) == len([n for n, m in load_form(folder, "bert", None).named_modules() if _is_quantised(n, m)])
    model.train()  # bitsandbytes rounds what an 8-bit linear is given in eval mode
    for path, module, row in linears:
        x = torch.randn(5, module.in_features, requires_grad=True)
        product, weight = module(x), dequantized_weight(module)
        assert weight.shape == (module.out_features, module.in_features)
        if form.exact or form.passes_gradients:
            torch.testing.assert_close(product.detach(), nn.functional.linear(x, weight, module.bias).detach())
        passes = product.requires_grad and (product.sum().backward() or x.grad is not None)
        through_bias = module.bias is not None and module.bias.requires_grad and not form.passes_gradients
        assert (bool(passes) and not through_bias) == form.passes_gradients == (row.no_gradient(module) == ""), path
        if form.passes_gradients:
            torch.testing.assert_close(x.grad, weight.sum(0).expand_as(x).detach())
    plain = (
        sum(m.weight.numel() for _, m, _ in linears)
        if form.holds_floats
        else sum(m.in_features * m.out_features for _, m, _ in linears)
    )
    rest = stored_bytes(load_form(folder, "bert", None)) - 4 * plain
    scales = stored_bytes(model) - rest - plain * form.bits / 8
    assert 0 <= scales <= plain, "the bytes are those of the codes and few more"


def _is_quantised(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and "classifier" not in name


# -- beside PEFT


@pytest.mark.peers
@pytest.mark.parametrize(
    ("form", "family"),
    [
        pytest.param(f, k, id=f"{f}: {k}", marks=() if k == "llama" or f is NF4 else pytest.mark.slow)
        for f in TRAINED
        for k in ("llama", "bert")
    ],
)
def test_lora_equals_pefts(form: Form, family: str, folder: Path, tmp_path: Path) -> None:
    """The same logits, loss and gradients on the same quantised model."""
    peft = pytest.importorskip("peft")
    model, data = load_form(folder, family, form).train(), batch(family)
    torch.manual_seed(3)
    tuned = deltune.attach(model, "lora(rank=4)", head="freeze")
    with torch.no_grad():
        for parameter in tuned.trainable_parameters():
            parameter.copy_(0.1 * torch.randn_like(parameter))
    deltune.export(model, tmp_path / "peft")
    out = model(**data)
    out.loss.backward()
    with torch.no_grad():  # a delta whose values are the gradients, so that the export gives them PEFT's names
        for parameter in tuned.trainable_parameters():
            parameter.copy_(parameter.grad)
    deltune.export(model, tmp_path / "gradients")
    from safetensors.torch import load_file

    gradients = load_file(tmp_path / "gradients" / "adapter_model.safetensors")
    theirs = peft.PeftModel.from_pretrained(
        load_form(folder, family, form), tmp_path / "peft", is_trainable=True
    ).train()
    their_out = theirs(**data)
    their_out.loss.backward()
    torch.testing.assert_close(out.logits, their_out.logits, atol=1e-5, rtol=1e-5)
    compared = 0
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            ours = gradients[name.replace(".default", "")]
            torch.testing.assert_close(ours, parameter.grad, atol=1e-6, rtol=1e-4)
            compared += 1
    assert compared == 2 * 2 * 2  # A and B of query and value in two layers


# -- from one form to another


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(f, id=str(f), marks=() if f in (NF4, INT8) or not f.passes_gradients else pytest.mark.slow)
        for f in FORMS.values()
    ],
)
def test_a_delta_moves_between_forms_on_request(form: Form, folder: Path, tmp_path: Path) -> None:
    floats = load_form(folder, "llama", None)
    tuned = deltune.attach(floats, "lora(rank=2) + layernorm")
    with torch.no_grad():
        for parameter in tuned.trainable_parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    tuned.save(tmp_path / "delta")
    answers = logits(floats, "llama")
    model = load_form(folder, "llama", form)
    logits(model, "llama")
    before, plain = snapshot(model), logits(model, "llama")
    with pytest.raises(DeltuneError, match=rf'floating point, and .* quantised by {form.name}.*base="any"'):
        deltune.load(model, tmp_path / "delta")
    assert not changed(before, snapshot(model))
    with pytest.warns(UserWarning, match="evaluate it on this model before you rely on it"):
        moved = deltune.load(model, tmp_path / "delta", base="any")
    near = (logits(model, "llama") - answers).norm() / answers.norm()
    assert near < 0.35 and (logits(model, "llama") - plain).norm() > 0.05 * plain.norm()
    if not form.passes_gradients:
        assert not any(p.requires_grad for p in moved.delta().parameters()), "it can be used and not trained"
        return
    moved.save(tmp_path / "moved")
    assert json.loads((tmp_path / "moved" / "delta.json").read_text())["base"]["quantization"] == form.name
    other = load_form(folder, "llama", None)
    with pytest.raises(DeltuneError, match="weights in floating point"):
        deltune.load(other, tmp_path / "moved")
    with pytest.warns(UserWarning, match="another base model"):
        deltune.load(other, tmp_path / "moved", base="any")
    torch.testing.assert_close(logits(other, "llama"), answers)


def test_any_base_still_has_the_same_tensors(folder: Path, tmp_path: Path) -> None:
    model = load_form(folder, "llama", NF4)
    deltune.attach(model, "layernorm").save(tmp_path / "delta")
    save = tmp_path / "model"
    smaller = copy.deepcopy(load_form(folder, "llama", None).config)
    smaller.intermediate_size = 96
    type(load_form(folder, "llama", None))(smaller).save_pretrained(save)
    with pytest.raises(DeltuneError, match="names or shapes of the tensors"):
        deltune.load(type(model).from_pretrained(save), tmp_path / "delta", base="any")
    with pytest.raises(DeltuneError, match="unknown base 'other'"):
        deltune.load(load_form(folder, "llama", NF4), tmp_path / "delta", base="other")  # type: ignore[arg-type]


def test_other_weights_in_the_same_form_are_another_base(folder: Path, tmp_path: Path) -> None:
    deltune.attach(load_form(folder, "llama", NF4), "layernorm").save(tmp_path / "delta")
    other = load_form(folder, "llama", NF4)
    with torch.no_grad():
        other.get_input_embeddings().weight.add_(1)
    with pytest.raises(DeltuneError, match=r"the embedding of this one .* differ"):
        deltune.load(other, tmp_path / "delta")


def test_another_revision_of_the_same_form_is_another_base(folder: Path, tmp_path: Path) -> None:
    """Quantised numbers are not compared, so the revision is."""
    model, other = load_form(folder, "llama", NF4), load_form(folder, "llama", NF4)
    model.config._commit_hash, other.config._commit_hash = "a" * 40, "b" * 40
    deltune.attach(model, "layernorm").save(tmp_path / "delta")
    with pytest.raises(DeltuneError, match=r"revision aaaaaaaaaaaa, and .* is revision bbbbbbbbbbbb"):
        deltune.load(other, tmp_path / "delta")


# -- merging


@pytest.mark.parametrize("form", TRAINED, ids=str)
@pytest.mark.sample(5)
def test_merging(form: Form, folder: Path, tmp_path: Path) -> None:
    """Quantised again with the error printed, or in floating point with none."""

    in_place = "bitfit" if form.trains_biases else "layernorm"

    def tuned_model() -> tuple[PreTrainedModel, deltune.Tuned]:
        model = load_form(folder, "bert", form)
        torch.manual_seed(5)
        tuned = deltune.attach(model, f"lora(rank=4, at='ffn') + lora(rank=4) + {in_place}")
        with torch.no_grad():
            for parameter in tuned.trainable_parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        return model, tuned

    model, tuned = tuned_model()
    answers, base = logits(model, "bert"), logits(load_form(folder, "bert", form), "bert")
    weights = {path: dequantized_weight(m).float().clone() for path, m, _ in quantized_modules(model)}
    with pytest.warns(UserWarning, match=r"merged into 8 weights of .*quantising again, .* by (\d+\.\d)%") as caught:
        merged = tuned.merge()
    assert merged is model and quantization_of(model) == form.name and not hasattr(model, "deltune")
    text = next(str(w.message) for w in caught if "merged into" in str(w.message))
    share = float(re.findall(r"by (\d+\.\d)% of what the delta does", text)[0]) / 100
    change = sum(
        float((dequantized_weight(m).float() - weights[p]).square().sum()) for p, m, _ in quantized_modules(model)
    )
    assert abs(change**0.5 - _norm(text)) <= (share + 0.02) * _norm(text), "the weights moved as the delta does"
    assert (logits(model, "bert") - answers).norm() < 0.9 * (answers - base).norm()
    floats, tuned = tuned_model()
    answers = logits(floats, "bert")
    if form.holds_floats:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert tuned.merge(dequantize=True) is floats
    assert quantization_of(floats) == "" and not getattr(floats, "is_quantized", False)
    assert all(type(m) is nn.Linear for n, m in floats.named_modules() if isinstance(m, nn.Linear))
    tolerance = 1e-4 if form.exact else 0.1
    torch.testing.assert_close(logits(floats, "bert"), answers, atol=tolerance, rtol=tolerance)
    floats.save_pretrained(tmp_path / "merged")
    read = type(floats).from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(logits(read, "bert"), logits(floats, "bert"))


def _norm(text: str) -> float:
    return float(re.findall(r"norms \S+ and (\S+)\)", text)[0])


def test_what_cannot_be_merged_changes_nothing(folder: Path) -> None:
    model = load_form(folder, "llama", NF4)
    tuned = deltune.attach(model, "prefix(length=3) + lora(rank=2)")
    before, answers = snapshot(model), logits(model, "llama")
    for dequantize in (False, True):
        with pytest.raises(DeltuneError, match="cannot be merged into the weights"):
            tuned.merge(dequantize=dequantize)
        assert not changed(before, snapshot(model)) and torch.equal(logits(model, "llama"), answers)


BIASES = ("bitfit", "Modification(site='query', form=Vector(), insertion='sequential')")


@pytest.mark.parametrize("method", BIASES)
@pytest.mark.parametrize("in_use", [True, False], ids=["in use", "another in use"])
def test_biases_are_merged_into_plain_linears(method: str, in_use: bool, folder: Path) -> None:
    """What a delta changes in the bias of a quantised linear is in the linear that stands in its place."""
    model = load_form(folder, "bert", INT8)
    tuned = deltune.attach(model, method)
    with torch.no_grad():
        for parameter in tuned.trainable_parameters():
            parameter.add_(0.3)
    answers, base = logits(model, "bert"), logits(load_form(folder, "bert", INT8), "bert")
    assert not torch.allclose(answers, base, atol=0.01)
    if not in_use:
        deltune.attach(model, "layernorm", name="other")
    tuned.merge("default", dequantize=True)
    torch.testing.assert_close(logits(model, "bert"), answers, atol=1e-4, rtol=1e-4)


def test_a_merge_of_a_delta_that_changes_nothing_says_so(folder: Path) -> None:
    model = load_form(folder, "bert", INT8)
    tuned = deltune.attach(model, "lora(rank=2)")
    with pytest.warns(UserWarning, match="the delta changes nothing of"):
        tuned.merge()


def test_quantised_models_are_tuned_in_inference_mode_too(folder: Path) -> None:
    model = load_form(folder, "bert", INT8)
    with torch.inference_mode():
        tuned = deltune.attach(model, "lora(rank=2)")
    model(**batch("bert")).logits.sum().backward()
    assert any(p.grad is not None for p in tuned.trainable_parameters())


def test_what_cannot_be_trained_stays_frozen_when_it_is_used(folder: Path, tmp_path: Path) -> None:
    """A delta that is loaded beside another one, on linears that let no gradient through."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    dense = load_form(folder, "bert", None)
    saved = deltune.attach(dense, "lora(rank=2)").save(tmp_path / "delta")
    model = load_form(folder, "bert", None)
    quantize_(model, Int8DynamicActivationInt8WeightConfig(), filter_fn=lambda m, _: isinstance(m, nn.Linear))
    tuned = deltune.load(model, saved, base="any", use=False)
    tuned.use("default")
    assert not list(tuned.trainable_parameters())


# -- refusals


def _gives_a_head(model: PreTrainedModel) -> None:
    from torchao import quantization

    quantization.quantize_(model.classifier, quantization.Int8WeightOnlyConfig(version=2), lambda *_: True)


def _quantises_embeddings(model: PreTrainedModel) -> None:
    from torchao import quantization

    config = quantization.IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=quantization.PerAxis(0))
    quantization.quantize_(model, config, lambda m, _: isinstance(m, nn.Embedding))


REFUSALS: dict[str, tuple[str, Callable[[PreTrainedModel, Path], Any]]] = {
    "an unknown method": ("unknown name", lambda m, f: deltune.attach(m, "lorra")),
    "a wrong argument": ("rank", lambda m, f: deltune.attach(m, "lora(rank=-1)")),
    "full": ("are quantised", lambda m, f: deltune.attach(m, "full")),
    "a part of the weights": ("are quantised", lambda m, f: deltune.attach(m, "diff_pruning(sparsity=0.02)")),
    "a missing place": ("cannot be had on", lambda m, f: deltune.attach(m, "adapter(rank=4, layers=(7,))")),
    "a missing tower": ("tower", lambda m, f: deltune.attach(m, "layernorm(tower='vision')")),
    "a bad name": ("cannot name a delta", lambda m, f: deltune.attach(m, "layernorm", name="a b")),
    "a bad head": ("head", lambda m, f: deltune.attach(m, "layernorm", head="drop")),  # type: ignore[arg-type]
    "memory": ("memory", lambda m, f: deltune.attach(m, "adapter(rank=4)")),
    "no folder": ("there is no folder", lambda m, f: deltune.load(m, f / "nothing")),
    "another base": ("another base model", lambda m, f: deltune.load(m, f / "floats")),
    "another family": ("tuned on a", lambda m, f: deltune.load(m, f / "other")),
    "a damaged file": ("checksum", lambda m, f: deltune.load(m, f / "damaged")),
    "a place that is not reached": ("does not call", lambda m, f: deltune.attach(m, "adapter(rank=2)")),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=str)
@pytest.mark.sample(6)
def test_a_refusal_changes_nothing(form: Form, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, quantisation state, buffers, hooks, attributes and configurations, after every kind of refusal."""
    model = load_form(folder, "bert", form)
    deltune.attach(load_form(folder, "bert", None), "layernorm").save(tmp_path / "floats")
    deltune.attach(load_form(folder, "llama", NF4), "layernorm").save(tmp_path / "other")
    if form.passes_gradients:
        deltune.attach(load_form(folder, "bert", form), "layernorm").save(tmp_path / "damaged")
        (path := tmp_path / "damaged" / "delta.safetensors").write_bytes(path.read_bytes()[:-1] + b"\x01")
    plain = logits(model, "bert")
    before = snapshot(model)
    for name, (says, refuse) in REFUSALS.items():
        if (form.holds_floats and says == "are quantised") or (not form.passes_gradients and name == "a damaged file"):
            continue
        with monkeypatch.context() as patch:
            if name == "memory":
                patch.setenv("DELTUNE_MEMORY_LIMIT", "1KiB")
            if name == "a place that is not reached":
                layer = model.bert.encoder.layer[0]
                patch.setattr(layer, "forward", lambda hidden, *_, **__: hidden)
                with pytest.raises(DeltuneError):
                    refuse(model, tmp_path)
            else:
                refused_by_attach = not form.passes_gradients and "attach" in refuse.__code__.co_names
                expected = "no gradient passes" if refused_by_attach else says
                with pytest.raises(DeltuneError, match=expected):
                    refuse(model, tmp_path)
        assert not changed(before, snapshot(model)), name
        assert torch.equal(logits(model, "bert"), plain), name


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_gives_a_head, "the task head .* is quantised"),
        (_quantises_embeddings, "quantised in a way that deltune cannot tune .*embeddings"),
    ],
)
@pytest.mark.parametrize("form", [NF4, INT8, None], ids=str)
def test_what_is_quantised_otherwise_is_refused(
    form: Form | None, change: Callable[[PreTrainedModel], None], says: str, folder: Path
) -> None:
    model = load_form(folder, "bert", form)
    change(model)
    plain = logits(model, "bert")
    before = snapshot(model)
    for method in ("lora(rank=2)", "layernorm", "prefix(length=2)"):
        with pytest.raises(DeltuneError, match=says):
            deltune.attach(model, method)
        assert not changed(before, snapshot(model)) and torch.equal(logits(model, "bert"), plain)


def test_weights_that_are_quantised_later_are_refused(folder: Path) -> None:
    model = load_form(folder, "llama", None)
    deltune.attach(model, "lora(rank=2)")
    from torchao import quantization

    quantization.quantize_(model.model, quantization.Int8WeightOnlyConfig(version=2))
    with pytest.raises(DeltuneError, match=r"replaced or quantised after deltas were attached .*merge\(\) first"):
        logits(model, "llama")


# -- bitsandbytes on a CPU


def _packed(model: PreTrainedModel) -> list[bool]:
    weights = [module.weight for _, module, _ in quantized_modules(model)]
    return [bool(getattr(weight.quant_state, "packing_format_for_cpu", False)) for weight in weights]


def test_weights_stay_unpacked_while_a_delta_is_attached(folder: Path) -> None:
    """An evaluation packs them on some CPUs, and no gradient passes from then on."""
    model = load_form(folder, "llama", NF4, packs=True)
    packs = [module.support_avx512bf16_for_cpu for _, module, _ in quantized_modules(model)]
    tuned = deltune.attach(model, "lora(rank=2)")
    answers = logits(model, "llama")
    assert not any(_packed(model))
    copied = copy.deepcopy(model)
    assert torch.equal(logits(copied, "llama"), answers) and not any(_packed(copied))
    model.train()
    model(**batch("llama")).loss.backward()
    assert all(p.grad is not None for p in tuned.trainable_parameters())
    tuned.detach()
    assert [module.support_avx512bf16_for_cpu for _, module, _ in quantized_modules(model)] == packs
    if not any(packs):
        pytest.skip("bitsandbytes packs nothing on this CPU")
    logits(model.eval(), "llama")
    assert all(_packed(model))
    before = snapshot(model)
    weight = dequantized_weight(model.model.layers[0].mlp.up_proj)
    near = dequantized_weight(load_form(folder, "llama", NF4).model.layers[0].mlp.up_proj)
    torch.testing.assert_close(weight, near, atol=0, rtol=2**-8)
    with pytest.raises(DeltuneError, match="packed its weights for inference"):
        deltune.attach(model, "lora(rank=2)")
    assert not changed(before, snapshot(model))


# -- with transformers, and from the command line


@pytest.mark.parametrize("form", [NF4, FORMS["torchao int4"]], ids=str)
def test_the_trainer_trains_it(form: Form, folder: Path, tmp_path: Path) -> None:
    """transformers refuses to train a quantised model that PEFT has not wrapped, or that it calls untrainable."""
    model = load_form(folder, "llama", form, packs=True)
    model.gradient_checkpointing_enable()
    tuned = deltune.attach(model, "lora(rank=4) + layernorm")
    before = [p.detach().clone() for p in tuned.trainable_parameters()]
    rows = [{"input_ids": row, "labels": row} for row in batch("llama")["input_ids"]]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, learning_rate=1e-2, report_to="none", use_cpu=True, save_steps=3,
        eval_strategy="steps", eval_steps=1,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    assert all(not torch.equal(a, b) for a, b in zip(before, tuned.trainable_parameters(), strict=True))
    answers = logits(model.eval(), "llama")
    tuned.detach()
    assert model.is_quantized
    again = load_form(folder, "llama", form)
    deltune.load(again, tmp_path / "checkpoint-3")
    torch.testing.assert_close(logits(again, "llama"), answers, atol=1e-4, rtol=1e-4)


def test_the_count_says_what_is_stored(folder: Path) -> None:
    floats, model = load_form(folder, "llama", None), load_form(folder, "llama", NF4)
    count = deltune.count(model, "lora(rank=4)")
    linears = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    rest = sum(p.numel() for p in floats.parameters()) - linears
    assert abs(count.base_bytes - (4 * rest + linears / 2)) < linears / 4
    assert count.training_bytes == 16 * count.trained and "bitsandbytes nf4" in str(count)
    assert count.as_dict()["quantization"] == "bitsandbytes nf4"
    assert "quantization" not in deltune.count(floats, "lora(rank=4)").as_dict()
    assert deltune.attach(model, "lora(rank=4)").count().base_bytes == count.base_bytes


@pytest.mark.parametrize("name", get_args(Quantization))
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_configuration_counts_as_the_quantised_model_would(name: str, family: str, folder: Path) -> None:
    """Sizes and refusals are those of the model that is loaded, and no weights are read."""
    options = quantization_config(name, [NO_MODULE])
    model = transformers.AutoModel.from_pretrained(folder / family, quantization_config=options, dtype=torch.float32)
    described = transformers.AutoConfig.from_pretrained(folder / family)
    for method in ("lora(rank=4)", "layernorm + prefix(length=2)"):
        live, counted = deltune.count(model, method), deltune.count(described, method, quantization_config=options)
        assert counted == live
        assert (counted.quantization, counted.base_bytes) == (live.quantization, live.base_bytes)
    with pytest.raises(DeltuneError, match="cannot be trained"):
        deltune.count(described, "full", quantization_config=options)


def test_what_cannot_be_counted_quantised(folder: Path) -> None:
    described = transformers.AutoConfig.from_pretrained(folder / "llama")
    with pytest.raises(DeltuneError, match=r"GPTQConfig .* from its configuration alone .* load the quantised model"):
        deltune.count(described, "lora", quantization_config=transformers.GPTQConfig(bits=4))
    nf4 = quantization_config("nf4")
    with pytest.raises(DeltuneError, match="is for a configuration"):
        deltune.count(load_form(folder, "llama", None), "lora", quantization_config=nf4)
    described.quantization_config = nf4
    with pytest.raises(DeltuneError, match="stored quantised already: leave BitsAndBytesConfig out"):
        deltune.count(described, "lora", quantization_config=nf4)


def test_a_run_on_a_quantised_model(tmp_path: Path) -> None:
    """`deltune train --quantize`, and everything that is done with its folder."""
    import tiny
    from deltune.train.config import RunConfig
    from deltune.train.inference import evaluate, merge_run
    from deltune.train.run import train

    values = {"model": str(tiny.model(tmp_path / "model", "bert")), "data": str(tiny.data(tmp_path / "data"))}
    config = RunConfig.from_flat(**values, method="lora(rank=2) + layernorm", quantize="nf4", epochs=2, lr=1e-2)
    assert config.canonical()["quantize"] == "nf4" and config.name != config.replace(quantize=None).name
    metrics = train(config, tmp_path / "run")
    assert metrics.count["quantization"] == "bitsandbytes nf4" and metrics.count["base_bytes"] > 0
    assert evaluate(tmp_path / "run") == metrics.scores
    merge_run(tmp_path / "run", tmp_path / "merged", dequantize=True)
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())


def test_ways_of_quantising_that_do_not_exist(folder: Path) -> None:
    from deltune.models import QUANTIZATIONS, load_model
    from deltune.train.config import RunConfig

    for name in QUANTIZATIONS:
        assert quantization_config(name, ["classifier"]).quant_method
    with pytest.raises(DeltuneError, match="unknown quantize 'nf5'"):
        load_model(str(folder / "llama"), "causal-lm", quantize="nf5")
    with pytest.raises(DeltuneError, match="quantize"):
        RunConfig.from_flat(model=str(folder / "llama"), data="x", method="layernorm", quantize="nf5")
    model = load_model(str(folder / "bert"), "classification", ["a", "b"], quantize="torchao-int8")
    assert quantization_of(model) == "torchao int8" and deltune.inspect(model).head == ("classifier",)
    deltune.attach(model, "lora(rank=2)")
