"""LoRA for vLLM and llama.cpp: what each computes from the folder is what the delta computes, or it is refused.

vLLM (lora/peft_helper.py) takes `lora_alpha / r` of the options for every module and ignores `rank_pattern` and
`alpha_pattern`; llama.cpp (convert_lora_to_gguf.py, llama-adapter.h) divides the one `lora_alpha` by the rank of each
tensor. Both read modules by their names in the class with the language model's head.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import deltune
import tiny
from tables.families import FAMILIES
from tables.specimens import batch, build, run, stir

STEM = "base_model.model."
MIXED = (
    "lora(rank=2, at='query') + lora(rank=4, scale=3.0, at=('value', 'ffn_down')) + lora(rank=3, alpha=1, at='output')"
)


def options(folder: Path) -> dict[str, Any]:
    value = json.loads((folder / "adapter_config.json").read_text())
    assert isinstance(value, dict)
    return value


def changes(folder: Path, server: str) -> dict[str, torch.Tensor]:
    """What a server adds to each weight, computed from the folder as the server does it."""
    settings, tensors = options(folder), load_file(folder / "adapter_model.safetensors")
    added = {}
    for name, down in tensors.items():
        if not name.endswith((".lora_A.weight", ".lora_embedding_A")):
            continue
        up = tensors[name.replace("lora_A", "lora_B").replace("lora_embedding_A", "lora_embedding_B")]
        rank = settings["r"] if server == "vllm" else up.shape[1]
        change = settings["lora_alpha"] / rank * (up.double() @ down.double())
        path = name.removeprefix(STEM).partition(".lora_")[0]
        added[f"{path}.weight"] = change.T if "embedding" in name else change
    assert len(tensors) == 2 * len(added)  # pairs, and nothing that a server does not know
    return added


@pytest.mark.parametrize("server", ["vllm", "llama.cpp"])
@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("llama", "lora(rank=2, scale=0.5)"),
        ("llama", MIXED),
        ("qwen3", MIXED),
        ("gemma2", MIXED),
        ("llama", "lora(rank=2, at=('embedding', 'gate_proj'))"),
        ("llama", "apet(lora(rank=4), parameters=40)"),
    ],
)
def test_a_server_computes_what_the_delta_does(family: str, method: str, server: str, tmp_path: Path) -> None:
    model = build(FAMILIES[family], "causal")
    tuned = stir(deltune.attach(model, method))
    before = {
        name: tuned.attached.state.base_value(name).detach().clone() for name in (t.name for t in tuned.anatomy.tensors)
    }
    folder = deltune.export(model, tmp_path / "out", format=server)
    settings = options(folder)
    assert settings["bias"] == "none" and settings["rank_pattern"] == settings["alpha_pattern"] == {}
    assert "modules_to_save" not in settings and settings["task_type"] == "CAUSAL_LM"
    added = changes(folder, server)
    merged = copy.deepcopy(model)
    deltune.tuned(merged).merge()
    after = dict(merged.named_parameters(remove_duplicate=False))
    assert added
    for name, value in before.items():
        change = after[name].detach() - value
        torch.testing.assert_close(change, added.get(name, torch.zeros_like(change)).to(change), rtol=1e-5, atol=1e-6)


@pytest.mark.peers
@pytest.mark.parametrize("server", ["vllm", "llama.cpp"])
def test_peft_computes_it_too(server: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="no PEFT: pip install -e '.[peers]' -c constraints.txt")
    model = build(FAMILIES["llama"], "causal")
    stir(deltune.attach(model, MIXED))
    outputs = run(model, batch(model))["logits"]
    folder = deltune.export(model, tmp_path / "out", format=server)
    theirs = peft.PeftModel.from_pretrained(build(FAMILIES["llama"], "causal"), str(folder)).eval()
    with torch.no_grad():
        logits = theirs(**batch(model)).logits
    torch.testing.assert_close(logits, outputs, rtol=1e-5, atol=1e-5)


def test_one_rank_and_scale_are_written_as_they_are(tmp_path: Path) -> None:
    model = build(FAMILIES["llama"], "causal")
    stir(deltune.attach(model, "lora(rank=2, alpha=6)"))
    plain = load_file(deltune.export(model, tmp_path / "peft") / "adapter_model.safetensors")
    for server in ("vllm", "llama.cpp"):
        tensors = load_file(deltune.export(model, tmp_path / server, format=server) / "adapter_model.safetensors")
        assert plain.keys() == tensors.keys() and all(torch.equal(plain[name], tensors[name]) for name in plain)
        assert (options(tmp_path / server)["r"], options(tmp_path / server)["lora_alpha"]) == (2, 6)


BOTH = ("vllm", "llama.cpp")
REFUSED = (
    ("bert", "sequence", "lora(rank=2)", BOTH, r"in a causal language model .*BertFor(?s:.*)no task heads"),
    ("llama", "sequence", "lora(rank=2)", BOTH, "no task heads"),
    ("llama", "base", "lora(rank=2)", BOTH, "in a causal language model"),
    ("llama", "causal", "ia3", BOTH, r"reads LoRA alone, and .*Rescale\(\).* is none"),
    ("llama", "causal", "layernorm", BOTH, r"reads LoRA alone, and this delta trains .*norm.* in place"),
    ("llama", "causal", "lora(rank=2) + layernorm", BOTH, "reads LoRA alone, and this delta trains"),
    ("llama", "causal", "adapter(rank=2)", BOTH, "reads LoRA alone, and .*Bottleneck.* is none"),
    ("llama", "causal", "head", BOTH, "reads LoRA alone, and this delta has none"),
    ("llama", "causal", "lora(rank=2) + lora(rank=4)", BOTH, "two terms change one projection"),
    ("gpt2", "causal", "lora(rank=2)", BOTH, "is a part of the fused c_attn"),
    ("llama", "causal", "lora(rank=513, at='query')", ("vllm",), "ranks of at most 512, and this delta has rank 513"),
    ("gpt2", "causal", "lora(rank=2, at='ffn_down')", ("llama.cpp",), r"transposed \(Conv1D\)"),
    ("gpt2", "causal", "lora(rank=2, at='lm_head')", ("llama.cpp",), "lm_head shares its weight with the embeddings"),
)


@pytest.mark.filterwarnings("ignore:.*rank")
@pytest.mark.parametrize(("family", "role", "method", "servers", "message"), REFUSED)
def test_what_a_server_cannot_serve(
    family: str, role: str, method: str, servers: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    model = build(FAMILIES[family], role)
    deltune.attach(model, method)
    for server in servers:
        with pytest.raises(deltune.DeltuneError, match=message):
            deltune.export(model, tmp_path / "out", format=server)
    assert not any(tmp_path.iterdir())


@pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="no LLAMA_CPP: set it to a checkout of llama.cpp")
def test_the_script_of_llama_cpp_converts_the_folder(tmp_path: Path) -> None:
    """What convert_lora_to_gguf.py writes changes each weight as the folder does, by llama.cpp's own formula."""
    gguf = pytest.importorskip("gguf")
    base = tiny.model(tmp_path / "base", "llama")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
    model.save_pretrained(base)
    stir(deltune.attach(model, MIXED))
    folder, out = deltune.export(model, tmp_path / "lora", format="llama.cpp"), tmp_path / "lora.gguf"
    script = Path(os.environ["LLAMA_CPP"]) / "convert_lora_to_gguf.py"
    arguments = [str(folder), "--base", str(base), "--outfile", str(out), "--outtype", "f32"]
    subprocess.run([sys.executable, str(script), *arguments], check=True)
    reader = gguf.GGUFReader(out)
    alpha = float(reader.fields["adapter.lora.alpha"].parts[-1][0])
    converted = {tensor.name: torch.tensor(tensor.data) for tensor in reader.tensors}
    expected = changes(folder, "llama.cpp")
    names = {"q_proj": "attn_q", "v_proj": "attn_v", "o_proj": "attn_output", "down_proj": "ffn_down"}
    assert len(converted) == 2 * len(expected)
    for name, change in expected.items():
        layer, module = name.split(".")[2], name.split(".")[-2]
        stem = f"blk.{layer}.{names[module]}.weight.lora_"
        up, down = converted[f"{stem}b"], converted[f"{stem}a"]
        if module == "q_proj":  # llama.cpp keeps the halves of each head's rotary pairs beside each other
            heads = model.config.num_attention_heads
            change = change.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        torch.testing.assert_close(alpha / up.shape[1] * (up.double() @ down.double()), change, rtol=1e-5, atol=1e-6)
