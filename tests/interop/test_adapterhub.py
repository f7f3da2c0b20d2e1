"""Folders that AdapterHub's library wrote (make_adapterhub.py) give here the logits that it computed, in float64."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import deltune

pytestmark = pytest.mark.peers

HERE = Path(__file__).parent / "adapterhub"
CLASSES = {
    "bert": transformers.BertForSequenceClassification,
    "gpt2": transformers.GPT2LMHeadModel,
    "bart": transformers.BartForConditionalGeneration,
}
_PARALLEL = "scaled_parallel_adapter(rank=2, bias=True)"
_RESIDUAL = "scaled_parallel_adapter(rank=2, bias=True, x='residual')"
_LORA = "lora(rank=2, scale=3.0, at=('query', 'value', 'ffn_up', 'ffn_down'))"
_BLOCK = "Modification(site='block', form=Bottleneck(rank=2, bias=True), insertion='sequential'"
_PFEIFFER = "adapter(style='pfeiffer', rank=2, bias=True"

MEANT = {
    ("bert", "seq_bn"): f"{_PFEIFFER})",
    ("bert", "normed_seq_bn"): f"{_PFEIFFER}, activation='gelu', layer_norm=True)",
    ("bert", "block_bn"): f"{_BLOCK}, compose=Scale(value=0.5))",
    ("bert", "double_seq_bn"): "adapter(rank=2, bias=True, activation='silu')",
    ("bert", "par_bn"): _PARALLEL,
    ("bert", "learned_par_bn"): "Modification(site='ffn', form=Bottleneck(rank=2, bias=True, init='lora'), "
    "compose=Scale(learned=True), layers=(1,))",
    ("bert", "attention_par_bn"): "scaled_parallel_adapter(at='attention', rank=2, scale=2.0, bias=True)",
    ("bert", "lora"): _LORA,
    ("bert", "prefix_flat"): "prefix(length=3)",
    ("bert", "prefix_mlp"): "prefix(length=3)",
    ("bert", "mam"): f"prefix(length=3) + {_PARALLEL}",
    ("gpt2", "seq_bn"): f"{_BLOCK})",  # pre-norm: it reads and changes the residual stream
    ("gpt2", "block_bn"): f"{_BLOCK}, compose=Scale(value=0.5))",
    ("gpt2", "double_seq_bn"): "adapter(rank=2, bias=True, activation='silu')",
    ("gpt2", "par_bn"): _RESIDUAL,
    ("gpt2", "attention_par_bn"): "scaled_parallel_adapter(at='attention', rank=2, scale=2.0, bias=True, x='residual')",
    ("gpt2", "lora"): _LORA,
    ("gpt2", "prefix_flat"): "prefix(length=3)",
    ("gpt2", "prefix_mlp"): "prefix(length=3)",
    ("gpt2", "mam"): f"prefix(length=3) + {_RESIDUAL}",
    ("bart", "seq_bn"): f"{_PFEIFFER})",
    ("bart", "block_bn"): f"{_BLOCK}, compose=Scale(value=0.5))",
    ("bart", "double_seq_bn"): "adapter(rank=2, bias=True, activation='silu', attention='self')",
    ("bart", "par_bn"): _PARALLEL,
    ("bart", "attention_par_bn"): "scaled_parallel_adapter(at='attention', rank=2, scale=2.0, bias=True)",
    ("bart", "lora"): _LORA,
    ("bart", "prefix_flat"): "prefix(length=3)",
    ("bart", "mam"): f"prefix(length=3) + {_PARALLEL}",
}
"""Every folder, with the point of the design space that computes the same."""


@functools.cache
def recorded(family: str) -> dict[str, torch.Tensor]:
    return load_file(HERE / family / "logits.safetensors")


def base(family: str, **options: Any) -> PreTrainedModel:
    model = CLASSES[family].from_pretrained(HERE / family / "base", dtype=torch.float64, **options)
    return model.eval()


def logits(model: PreTrainedModel, family: str) -> torch.Tensor:
    inputs = {n: t for n, t in recorded(family).items() if n.endswith(("input_ids", "attention_mask"))}
    with torch.no_grad():
        return model(**inputs).logits


def close(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.allclose(one, two, rtol=1e-12, atol=1e-12)  # sums of a few dozen products of order 1


def test_every_folder_is_here() -> None:
    folders = {(f.name, a.name) for f in HERE.iterdir() if f.is_dir() for a in f.iterdir() if a.is_dir()}
    assert folders - {(f, "base") for f in CLASSES} == set(MEANT)
    assert sum(p.stat().st_size for p in HERE.rglob("*") if p.is_file()) < 300_000
    assert json.loads((HERE / "versions.json").read_text()).keys() == {"adapters", "transformers", "torch"}


@pytest.mark.parametrize("family", CLASSES)
def test_the_base_is_the_same(family: str) -> None:
    assert close(logits(base(family), family), recorded(family)["none"])


@pytest.mark.parametrize(("family", "name"), MEANT, ids=[f"{f}: {n}" for f, n in MEANT])
@pytest.mark.sample(14)
def test_the_same_logits(family: str, name: str, tmp_path: Path) -> None:
    model = base(family)
    plain = logits(model, family)
    tuned = deltune.load(model, HERE / family / name)
    actual = logits(model, family)
    assert close(actual, recorded(family)[name]) and not torch.allclose(actual, plain, atol=1e-2)
    assert repr(tuned.method) == MEANT[family, name]
    tuned.save(tmp_path / "delta")
    other = base(family)
    deltune.load(other, tmp_path / "delta")
    assert torch.equal(logits(other, family), actual)
    tuned.detach()
    assert torch.equal(logits(model, family), plain)


@pytest.mark.parametrize(("family", "name"), MEANT, ids=[f"{f}: {n}" for f, n in MEANT])
@pytest.mark.sample(14)
def test_what_is_written_is_what_the_library_wrote(family: str, name: str, tmp_path: Path) -> None:
    """The same options and tensors; a prefix is flat, once, and a head is with every classifier."""
    model = base(family)
    deltune.load(model, HERE / family / name, name=name)
    deltune.export(model, tmp_path / "again", format="adapterhub")
    theirs, ours = (
        json.loads((f / "adapter_config.json").read_text()) for f in (HERE / family / name, tmp_path / "again")
    )
    configs = [c["config"].pop("configs", None) or [c["config"]] for c in (theirs, ours)]
    for one, two in zip(*configs, strict=True):
        one = one | ({"flat": True, "bottleneck_size": 512} if "prefix_length" in one else {})
        neutral = {"cross_adapter", "encoder_prefix", "cross_prefix", "residual_before_ln", "original_ln_before"}
        neutral |= {"original_ln_after"} if family == "gpt2" else set()  # its layers have no norm after the residual
        assert {n: v for n, v in one.items() if n not in neutral} == {n: v for n, v in two.items() if n not in neutral}
    assert {n: theirs[n] for n in theirs if n != "config"} == {n: ours[n] for n in ours if n != "config"}
    files = [next((HERE / family / name).glob("*adapter.*[sn]")), tmp_path / "again" / "adapter.safetensors"]
    before, after = (load_file(f) if f.suffix == ".safetensors" else torch.load(f) for f in files)
    if "prefix" not in name and name != "mam":
        assert before.keys() == after.keys() and all(torch.equal(before[n].double(), after[n].double()) for n in before)
    again = base(family)
    deltune.load(again, tmp_path / "again")
    assert close(logits(again, family), recorded(family)[name])


NOT_WRITTEN = (
    ("bert", "adapter(rank=2)", "no options that mean"),  # without biases
    ("bert", "layernorm", r"trains bert\..* in place"),
    ("bert", "vera(rank=2)", "no options that mean .*VeRA"),
    ("bert", "lora(rank=2) + lora(rank=4, at='output')", "no options that mean"),
)


@pytest.mark.parametrize(("family", "method", "message"), NOT_WRITTEN)
def test_what_the_library_has_no_options_for(family: str, method: str, message: str, tmp_path: Path) -> None:
    model = base(family)
    deltune.attach(model, method)
    with pytest.raises(deltune.DeltuneError, match=message):
        deltune.export(model, tmp_path / "new", format="adapterhub")
    assert not any(tmp_path.iterdir())


def test_a_head_comes_along() -> None:
    model = base("bert", num_labels=2, ignore_mismatched_sizes=True)
    tuned = deltune.load(model, HERE / "bert" / "seq_bn")
    assert model.config.num_labels == 3 and close(logits(model, "bert"), recorded("bert")["seq_bn"])
    assert tuned.delta().head_mode == "train"
    assert deltune.load(base("bert"), HERE / "bert" / "par_bn").delta().head_mode == "freeze"
    with pytest.raises(deltune.DeltuneError, match=r"has no head(?s:.*)extra tensor classifier.bias"):
        deltune.load(transformers.BertModel.from_pretrained(HERE / "bert" / "base"), HERE / "bert" / "seq_bn")
    inside = transformers.BertModel.from_pretrained(HERE / "bert" / "base")
    assert repr(deltune.load(inside, HERE / "bert" / "par_bn").method) == _PARALLEL


def changed(tmp_path: Path, name: str, change: Callable[[dict[str, Any]], Any], family: str = "bert") -> Path:
    """A folder with its options changed."""
    shutil.copytree(HERE / family / name, tmp_path / "folder")
    path = tmp_path / "folder" / "adapter_config.json"
    options = json.loads(path.read_text())
    change(options)
    path.write_text(json.dumps(options))
    return tmp_path / "folder"


def _set(**options: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda content: content["config"].update(options)


REFUSED: tuple[tuple[str, str, Callable[[dict[str, Any]], Any], str], ...] = (
    ("bert", "seq_bn", _set(use_gating=True, phm_layer=True), "2 problems\n(?s:.*)phm_layer(?s:.*)use_gating"),
    ("bert", "seq_bn", _set(inv_adapter="nice"), "deltune cannot reproduce inv_adapter='nice'"),
    ("bert", "seq_bn", _set(ln_after=True), "ln_after"),
    ("bert", "seq_bn", _set(scaling="channel"), "scaling='channel'"),
    ("bert", "seq_bn", _set(non_linearity="gelu_new"), "non_linearity='gelu_new'"),
    ("bert", "seq_bn", _set(residual_before_ln=False), "adds the normed sum twice"),
    ("bert", "double_seq_bn", _set(original_ln_after=False), "leaves the residual out"),
    ("bert", "double_seq_bn", _set(original_ln_before=True), "at an attention"),
    ("bert", "double_seq_bn", _set(mh_adapter=False), r"extra tensor bert.encoder.layer.0.attention.output.adapters"),
    ("bert", "learned_par_bn", _set(leave_out=[]), r"missing tensor bert.encoder.layer.0.output.adapters"),
    ("bert", "lora", _set(composition_mode="scale"), "composition_mode='scale'"),
    ("bert", "lora", _set(use_dora=True), "use_dora"),
    ("bert", "prefix_flat", _set(prefix_length=2), "96 numbers"),
    ("bert", "prefix_mlp", _set(use_gating=True), "use_gating"),
    ("bert", "seq_bn", _set(architecture="reft"), "architecture='reft'; known: bottleneck"),
    ("bert", "seq_bn", lambda o: o.update(model_type="roberta"), "trained on a roberta model; this is a bert model"),
    ("bert", "seq_bn", lambda o: o.pop("version"), "save it again"),
    ("bert", "seq_bn", lambda o: o.update(config="pfeiffer"), "are on AdapterHub's site"),
    ("gpt2", "double_seq_bn", _set(original_ln_before=True), "residual sum is no site"),
    ("bart", "prefix_flat", _set(cross_prefix=False), r"extra tensor model.prefix_tuning(?s:.*)cross_prefix"),
)


@pytest.mark.parametrize(("family", "name", "change", "message"), REFUSED, ids=[f"{r[1]}: {r[3]}" for r in REFUSED])
def test_what_does_not_translate(
    family: str, name: str, change: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path
) -> None:
    model = base(family)
    with pytest.raises(deltune.DeltuneError, match=message):
        deltune.load(model, changed(tmp_path, name, change, family))
    assert "deltune" not in model._modules


DROPPED: tuple[tuple[str, str, str, dict[str, Any], str], ...] = (
    ("bert", "seq_bn", "layer.1.", {}, r"missing tensor bert.encoder.layer.1.output.adapters"),
    ("bert", "seq_bn", "0.output.adapters.seq_bn.adapter_up.bias", {}, r"missing tensor .*layer.0.*adapter_up.bias"),
    ("bart", "double_seq_bn", "decoder.layers.0.attention_adapters", {}, r"missing tensor model.decoder.layers.0"),
    ("bert", "lora", "layer.0.", {}, r"missing tensor bert.encoder.layer.0.attention.self.query.loras.lora.lora_A"),
    ("bert", "lora", "lora_B", {}, r"missing tensor .*query.loras.lora.lora_B"),
    (
        "bert",
        "lora",
        "1.output.dense.loras.lora.lora_B",
        {},
        r"missing tensor bert.encoder.layer.1.output.dense.*lora_B",
    ),
    ("bert", "lora", "value", {}, r"missing tensor bert.encoder.layer.0.attention.self.value"),
    ("bart", "lora", "encoder_attn", {}, r"missing tensor model.decoder.layers.0.encoder_attn.q_proj"),
    ("gpt2", "lora", "h.1.attn", {}, r"missing tensor transformer.h.1.attn.c_attn.loras.lora.lora_A"),
    ("bert", "lora", "nothing", {"attn_matrices": ["q"]}, r"extra tensor .*attention.self.value"),
    ("bert", "lora", "nothing", {"output_lora": False}, r"extra tensor bert.encoder.layer.0.output.dense"),
    ("bert", "lora", "nothing", {"leave_out": [1]}, r"extra tensor bert.encoder.layer.1"),
    ("bert", "lora", "nothing", {"attn_matrices": ["q", "k", "v"]}, r"missing tensor .*attention.self.key"),
    ("bert", "prefix_mlp", "control_trans.0.bias", {}, r"missing tensor control_trans.0.bias of self_prefix"),
    ("bert", "prefix_mlp", "nothing", {"flat": True}, r"missing tensor control_trans of self_prefix"),
    ("bart", "prefix_flat", "cross_prefix", {}, r"missing tensor control_trans of cross_prefix"),
)
"""What a folder lacks, or has and does not name: family, name, what the names of dropped tensors contain, options."""


@pytest.mark.parametrize(
    ("family", "name", "dropped", "options", "message"), DROPPED, ids=[f"{d[1:4]}" for d in DROPPED]
)
def test_a_folder_that_is_not_what_its_options_say(
    family: str, name: str, dropped: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder, model = changed(tmp_path, name, _set(**options), family), base(family)
    path = next(path for path in folder.iterdir() if path.name in ("adapter.safetensors", "pytorch_adapter.bin"))
    tensors = load_file(path) if path.suffix == ".safetensors" else torch.load(path)
    kept = {n: t for n, t in tensors.items() if dropped not in n}
    assert (len(kept) == len(tensors)) == (dropped == "nothing")
    path.unlink()
    save_file({n: t.clone() for n, t in kept.items()}, folder / "adapter.safetensors")
    with pytest.raises(deltune.DeltuneError, match=message):
        deltune.load(model, folder)
    assert "deltune" not in model._modules


def test_a_flexible_head_and_the_plug_in_interface_are_refused(tmp_path: Path) -> None:
    folder = changed(tmp_path, "seq_bn", lambda o: None)
    (folder / "adapter_interface.json").write_text("{}")
    head = json.loads((folder / "head_config.json").read_text())
    (folder / "head_config.json").write_text(json.dumps({**head, "config": {"head_type": "classification"}}))
    with pytest.raises(deltune.DeltuneError, match=r"plug-in interface(?s:.*)without head_config.json"):
        deltune.load(base("bert"), folder)
