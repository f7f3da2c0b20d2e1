"""Methods whose initial values read data, or the model before it was quantised: equal to PEFT's, and nothing stays."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import deltune
from deltune.anatomy.quantizers import dequantized_weight
from deltune.runtime.modules import Edit
from tables.families import FAMILIES
from tables.quantized import FORMS, load_form, save_models
from tables.quantized import batch as quantised_batch
from tables.specimens import batch, build, differences, distance, equal, facts, run, stir

METHODS = ("eva(rank=4)", "corda(rank=4, scale=2)", "corda(rank=4, keep='knowledge')", "lora_ga(rank=4, scale=2)")
ROLES = {"bert": "sequence", "gpt2": "causal", "llama": "causal", "t5": "seq2seq"}  # gpt2 is fused and transposed


def batches(model: PreTrainedModel, number: int = 3, pad: int = 2) -> list[dict[str, Any]]:
    made = [batch(model, rows=2, length=9, seed=seed, pad=pad) for seed in range(number)]
    for one in made:
        one["labels"] = torch.tensor([0, 1]) if "Sequence" in type(model).__name__ else one["input_ids"].clone()
        one.pop("decoder_input_ids", None)
    return made


def hooks(model: PreTrainedModel) -> list[torch.nn.Module]:
    return [module for module in model.modules() if module._forward_hooks]


@pytest.mark.parametrize("family", ROLES)
@pytest.mark.parametrize("method", METHODS)
def test_life(method: str, family: str, tmp_path: Path) -> None:
    """The outputs are the base's at first, nothing else of the model is changed, and files, merging and rows agree."""
    model = build(FAMILIES[family], ROLES[family]).train()
    data = batches(model)
    known, inputs = facts(model), {n: t for n, t in data[0].items() if n != "labels" or family == "t5"}
    bare = run(model.eval(), inputs)
    model.train()
    tuned = deltune.attach(model, method, data=data)
    assert model.training
    model.eval()
    assert distance(run(model, inputs), bare) < 1e-6
    stir(tuned, size=0.05)
    changed = run(model, inputs)
    assert distance(changed, bare) > 1e-4
    tuned.save(tmp_path / "delta")
    tuned.detach()
    assert not differences(known, facts(model.train())) and not hooks(model)
    loaded = deltune.load(model.eval(), tmp_path / "delta")
    assert equal(run(model, inputs), changed)
    loaded.merge()
    assert distance(run(model, inputs), changed) < 1e-5


REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("eva", {}, "eva starts from data: give some batches as the model reads them, data="),
    ("lora_ga", {}, "with labels, data="),
    ("lora_ga", {"data": [{"input_ids": torch.tensor([[5, 6, 7]])}]}, "no loss, .*give batches with labels"),
    ("lora", {"data": [{"input_ids": torch.tensor([[5, 6, 7]])}]}, "reads no data at its start: leave data= out"),
    ("eva", {"data": [torch.tensor([[5, 6, 7]])]}, "mappings|not a tensor|input_ids"),
    ("eva", {"data": []}, "has no token that"),
    ("eva", {"data": [{"bad": torch.tensor([[5, 6, 7]])}]}, "cannot read a batch of data="),
    ("eva(at='embedding')", {"data": [{"input_ids": torch.tensor([[5, 6, 7]])}]}, "no such place"),
    ("loftq", {}, "give the model before it, original="),
    ("loftq", {"original": build(FAMILIES["bert"], "sequence")}, "is not quantised"),
    ("lora_ga(rank=20)", {"data": []}, "rank=40"),
)


@pytest.mark.parametrize(("method", "arguments", "message"), REFUSED)
def test_what_is_missing_is_said(method: str, arguments: dict[str, Any], message: str) -> None:
    model = build(FAMILIES["bert"], "sequence").train()
    known = facts(model)
    with pytest.raises(deltune.DeltuneError, match=f"(?s){message}"):
        deltune.attach(model, method, **arguments)
    assert not differences(known, facts(model)) and not hooks(model) and model.training


@pytest.mark.parametrize("method", METHODS[:3])
def test_what_is_infinite_is_refused(method: str) -> None:
    model = build(FAMILIES["bert"], "sequence").train()
    data = batches(model)
    with torch.no_grad():
        model.get_input_embeddings().weight[data[0]["input_ids"][0, 1], 0] = torch.inf
    known = facts(model)
    with pytest.raises(deltune.DeltuneError, match=r"(?s)cannot start from what .*layer.* infinite or NaN"):
        deltune.attach(model, method, data=data)
    assert not differences(known, facts(model)) and not hooks(model)


@pytest.mark.parametrize("role", ["sequence", "choice"])
@pytest.mark.parametrize("method", METHODS[:3])
def test_padding_is_no_token(method: str, role: str) -> None:
    starts = []
    for pad in (0, 3):
        model = build(FAMILIES["bert"], role)
        data = [{n: torch.nn.functional.pad(t, (0, pad)) for n, t in batch(model, rows=2, length=6, pad=0).items()}]
        starts.append(start_of(model, method, data))
    for path, tensors in starts[0].items():
        assert all(same_up_to_signs(tensor, starts[1][path][name]) < 1e-4 for name, tensor in tensors.items()
                   if name == "down")  # fmt: skip


def start_of(model: PreTrainedModel, method: Any, data: list[dict[str, Any]]) -> dict[str, dict[str, torch.Tensor]]:
    tuned = deltune.attach(model, method, data=data)
    edits = [edit for edit in tuned.delta().all_edits() if isinstance(edit, Edit)]
    return {e.place.target.path: {n: t.detach().clone() for n, t in e.own_tensors().items()} for e in edits}


def same_up_to_signs(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference of rows that may be turned around."""
    signs = (ours * theirs).sum(1, keepdim=True).sign()
    return float((ours - signs * theirs).abs().max() / theirs.abs().max())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["bitsandbytes nf4", "torchao int4"])
def test_loftq_makes_up_for_quantisation(form: str, tmp_path: Path) -> None:
    """The low rank is the best part of what was lost, as PEFT decomposes it, and detaching leaves the base."""
    for package in ("bitsandbytes", "torchao"):
        pytest.importorskip(package, reason=f"no {package}: pip install -e '.[quant]' -c constraints.txt")
    save_models(tmp_path)
    whole, model = load_form(tmp_path, "llama", None), load_form(tmp_path, "llama", FORMS[form])
    inputs = {n: t for n, t in quantised_batch("llama").items() if n != "labels"}
    expected, bare = run(whole, inputs), run(model, inputs)
    tuned = deltune.attach(model, "loftq(rank=4)", original=whole)
    for edit in tuned.delta().all_edits():
        path = edit.place.target.path
        weight = dequantized_weight(model.get_submodule(path))
        lost = (whole.get_submodule(path).weight - weight).detach().float()
        u, s, v = torch.linalg.svd(lost)
        best = u[:, :4] * s[:4] @ v[:4]
        assert distance({"": edit.up @ edit.down}, {"": best}) < 1e-5
        assert torch.dist(weight + edit.up @ edit.down, whole.get_submodule(path).weight) < 0.95 * lost.norm()
    assert distance(run(model, inputs), expected) < distance(bare, expected)
    tuned.detach()
    assert equal(run(model, inputs), bare)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", METHODS)
def test_the_start_is_pefts(method: str) -> None:
    """PEFT computes in float32. Its principal components are approximate where there are fewer than half the width."""
    peft = pytest.importorskip("peft", reason="no PEFT: pip install -e '.[peers]' -c constraints.txt")
    from peft.tuners.lora.corda import preprocess_corda
    from peft.tuners.lora.loraga import preprocess_loraga

    model = build(FAMILIES["bert"], "sequence", torch.float32)
    data = batches(model, pad=0)
    rank = 16 if method.startswith("eva") else 4
    options: dict[str, Any] = {"r": rank, "lora_alpha": 8, "target_modules": ["query", "value"], "lora_dropout": 0.0}
    peer = copy.deepcopy(model)
    if method.startswith("eva"):
        data = data[:1]
        unlabelled = [{n: t for n, t in data[0].items() if n != "labels"}]
        config = peft.LoraConfig(init_lora_weights="eva", eva_config=peft.EvaConfig(rho=1.0), **options)
        made = peft.get_peft_model(peer, config)
        peft.initialize_lora_eva_weights(made, unlabelled, show_progress_bar=False)
    elif method.startswith("corda"):
        kind = "kpm" if "knowledge" in method else "ipm"
        scale = {"lora_alpha": 4} if kind == "kpm" else {}
        config = peft.LoraConfig(
            init_lora_weights="corda", corda_config=peft.tuners.lora.config.CordaConfig(corda_method=kind),
            **options | scale,
        )  # fmt: skip
        data = [{n: t[i : i + 1] for n, t in one.items()} for one in data for i in range(2)]  # it takes one row alone
        preprocess_corda(peer, config, lambda: [peer(**one) for one in data])
        made = peft.get_peft_model(peer, config)
    else:
        config = peft.LoraConfig(init_lora_weights="lora_ga", lora_ga_config=peft.LoraGAConfig(), **options)
        for module in peer.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        preprocess_loraga(peer, config, lambda: [peer(**one).loss.backward() for one in data])
        made = peft.get_peft_model(peer, config)
    for path, ours in start_of(model, config, data).items():
        layer = made.base_model.model.get_submodule(path)
        assert same_up_to_signs(ours["down"], layer.lora_A["default"].weight) < 2e-3
        up = layer.lora_B["default"].weight
        if up.any():
            assert same_up_to_signs(ours["up"].T, up.T) < 2e-3
        else:
            assert not ours["up"].any()
