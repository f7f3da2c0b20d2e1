"""PEFT beside deltune: the same weights give the same logits, through the files that each of them writes.

Models are float64, so equal means to the order of sums; where a family computes norms in float32 (`exact` is false), or
PEFT keeps a prompt in float32, to float32's rounding.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import deltune
from deltune.interop import peft_table
from tables.families import FAMILIES
from tables.specimens import batch, build, differences, facts, main_role, stir

peft = pytest.importorskip("peft", reason="no PEFT: pip install -e '.[peers]' -c constraints.txt")

pytestmark = pytest.mark.peers


@dataclass(frozen=True)
class Row:
    """A family as a class, PEFT's configuration, and the expression that means the same.

    rows: of PEFT's prompt, which stand in its logits; rounded: PEFT computes what it keeps anew, in float32.
    """

    family: str
    role: str
    config: Callable[[], Any]
    method: str
    rows: int = 0
    rounded: bool = False

    @property
    def id(self) -> str:
        return f"{self.family} {self.role}: {self.method}"


def lora(task: str, **options: Any) -> Callable[[], Any]:
    return lambda: peft.LoraConfig(task_type=task, **options)


LN_BERT = {"target_modules": ["LayerNorm"]}
ROWS = (
    Row("bert", "sequence", lora("SEQ_CLS", r=2, lora_alpha=6), "lora(rank=2, scale=3.0)"),
    Row("roberta", "sequence", lora("SEQ_CLS", r=4), "lora(rank=4, scale=2.0)"),
    Row("bert", "tokens", lora("TOKEN_CLS", r=2, lora_alpha=2, layers_to_transform=[1]), "lora(rank=2, layers=(1,))"),
    Row("distilbert", "sequence", lora("SEQ_CLS", r=2, lora_alpha=2, target_modules=["q_lin", "lin2"]),
        "lora(rank=2, at=('query', 'ffn_down'))"),
    Row("gpt2", "causal", lora("CAUSAL_LM", r=2, lora_alpha=6),
        "lora(rank=2, scale=3.0, at=('query', 'key', 'value'))"),
    Row("gpt2", "sequence", lora("SEQ_CLS", r=2, target_modules=["mlp.c_fc", "mlp.c_proj"], lora_alpha=2),
        "lora(rank=2, at=('ffn_up', 'ffn_down'))"),
    Row("llama", "causal", lora("CAUSAL_LM", r=2, lora_alpha=2), "lora(rank=2)"),
    Row("llama", "causal", lora("CAUSAL_LM", r=2, lora_alpha=2, use_rslora=True, target_modules="all-linear"),
        "lora(rank=2, scale=1.414213562373095, at=('query', 'key', 'value', 'output', 'ffn_up', 'ffn_down'))"),
    Row("bart", "seq2seq", lora("SEQ_2_SEQ_LM", r=2, lora_alpha=2), "lora(rank=2)"),
    Row("t5", "seq2seq", lora("SEQ_2_SEQ_LM", r=2, lora_alpha=2), "lora(rank=2)"),
    Row("llama", "causal",
        lora("CAUSAL_LM", r=2, lora_alpha=2, rank_pattern={"v_proj": 4}, alpha_pattern={"v_proj": 8}),
        "lora(rank=2, at='query') + lora(rank=4, scale=2.0, at='value')"),
    Row("llama", "causal", lora("CAUSAL_LM", r=2, lora_alpha=2, target_modules=["gate_proj", "q_proj"]),
        "lora(rank=2, at=('query', 'gate_proj'))"),
    Row("llama", "causal",
        lora("CAUSAL_LM", r=2, lora_alpha=2, target_modules=["embed_tokens", "lm_head", "layers.0.mlp.up_proj"]),
        "lora(rank=2, at=('embedding', 'lm_head')) + lora(rank=2, at='up_proj', layers=(0,))"),
    Row("bert", "sequence", lambda: peft.IA3Config(
        task_type="SEQ_CLS", target_modules=["key", "value", r"intermediate.dense", "layer.0.output.dense",
        "layer.1.output.dense"], feedforward_modules=["layer.0.output.dense", "layer.1.output.dense"]),
        "ia3 + Modification(site='ffn_up', form=Rescale(), insertion='sequential')"),
    Row("gpt2", "causal", lambda: peft.IA3Config(task_type="CAUSAL_LM"),
        "Modification(site='query', form=Rescale(), insertion='sequential') + ia3"),
    Row("llama", "causal", lambda: peft.IA3Config(task_type="CAUSAL_LM"), "ia3"),
    Row("gpt2", "causal", lambda: peft.LNTuningConfig(task_type="CAUSAL_LM"), "layernorm"),
    Row("llama", "causal", lambda: peft.LNTuningConfig(task_type="CAUSAL_LM"), "layernorm"),
    Row("bert", "sequence", lambda: peft.LNTuningConfig(task_type="SEQ_CLS", **LN_BERT), "layernorm"),
    Row("bart", "seq2seq", lambda: peft.LNTuningConfig(task_type="SEQ_2_SEQ_LM"), "layernorm(embedding=False)"),
    Row("t5", "seq2seq", lambda: peft.LNTuningConfig(task_type="SEQ_2_SEQ_LM"), "layernorm"),
    Row("gpt2", "causal", lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "prompt(length=3)", rows=3),
    Row("llama", "causal", lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "prompt(length=3)", rows=3),
    *(Row(family, "causal", lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "prefix(length=3, shift_positions=True)") for family in ("gpt2", "opt", "llama", "qwen3", "gpt_neox")),
    Row("gpt2", "causal", lambda: peft.PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, prefix_projection=True, encoder_hidden_size=8),
        "prefix(length=3, shift_positions=True)", rounded=True),
)  # fmt: skip

rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def logits(model: Any, inputs: dict[str, Any], rows: int = 0) -> torch.Tensor:
    """Without PEFT's prompt, and of real tokens: OPT gives padding positions of its own, by its mask."""
    with torch.no_grad():
        output = model(**inputs).logits[:, rows:]
    mask = inputs["attention_mask"].bool()
    return output[mask] if output.shape[:2] == mask.shape else output


def close(row: Row, one: torch.Tensor, two: torch.Tensor) -> bool:
    """Sums of a few dozen float64 products; float32 norms leave some 1e-7 of values of order 1."""
    tolerance = 1e-11 if FAMILIES[row.family].exact and not row.rounded else 2e-6
    return torch.allclose(one, two, rtol=tolerance, atol=tolerance)


def trained(row: Row) -> Any:
    """PEFT's model, every trained tensor moved, in float32's values, which are what it keeps a prompt in."""
    model = peft.get_peft_model(build(FAMILIES[row.family], row.role), row.config()).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter), alpha=0.2)
                parameter.copy_(parameter.float())
    return model


def gradients_of(model: Any, outputs: torch.Tensor) -> torch.Tensor:
    """Every gradient of a model in one vector, in the order of its values, whichever tensors they are of."""
    direction = torch.randn(outputs.shape, dtype=outputs.dtype, generator=torch.Generator().manual_seed(7))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad((outputs * direction).sum(), trained)]).sort().values


def differences_of_folder(row: Row, folder: Path) -> tuple[float, float]:
    """The greatest difference of logits and of gradients from PEFT's, by the greatest entry, by a folder of PEFT's."""
    theirs = trained(row)
    theirs.save_pretrained(folder)
    model = build(FAMILIES[row.family], row.role)
    deltune.load(model, folder)
    inputs = batch(model, pad=0)
    ours, peers = model(**inputs).logits, theirs(**inputs).logits[:, row.rows :]
    pairs = (ours, peers), (gradients_of(model, ours), gradients_of(theirs, peers))
    outputs, gradients = (float((one - two).abs().max() / two.abs().max()) for one, two in pairs)
    return outputs, gradients


OF_FOLDERS = (
    *(next(row for row in ROWS if row.family == "gpt2" and begins in row.method)
      for begins in ("ia3", "layernorm", "prompt", "prefix")),
    Row("bert", "sequence", lambda: peft.TrainableTokensConfig(task_type="SEQ_CLS", token_indices=[7, 5]),
        "trainable_tokens(tokens=(5, 7))"),
)  # fmt: skip
"""A row of each method that is no form at projections, in a family that computes all of it in float64."""


@pytest.mark.parametrize("row", OF_FOLDERS, ids=lambda row: row.id)
def test_gradients_are_pefts(row: Row, tmp_path: Path) -> None:
    outputs, gradients = differences_of_folder(row, tmp_path / "peft")
    kept_in_float32 = "length" in row.method
    assert outputs < 1e-11 and gradients < (2e-6 if kept_in_float32 else 1e-11)


def same(one: str, two: deltune.Tuned) -> bool:
    """The same modifications and selections, in any order."""
    return {repr(p) for p in deltune.parse(one).parts} == {repr(p) for p in two.method.parts}


@rows
@pytest.mark.sample(16)
def test_a_file_that_peft_wrote(row: Row, tmp_path: Path) -> None:
    theirs = trained(row)
    theirs.save_pretrained(tmp_path / "peft")
    model = build(FAMILIES[row.family], row.role)
    inputs = batch(model)
    plain = logits(model, inputs)
    tuned = deltune.load(model, tmp_path / "peft")
    actual = logits(model, inputs)
    assert close(row, actual, logits(theirs, inputs, row.rows))
    assert not torch.allclose(actual, plain, atol=1e-3)
    assert same(row.method, tuned)
    tuned.save(tmp_path / "ours")
    other = build(FAMILIES[row.family], row.role)
    deltune.load(other, tmp_path / "ours")
    assert torch.equal(logits(other, inputs), actual)
    deltune.export(model, tmp_path / "again")
    before, after = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("peft", "again"))
    before = {name: t for name, t in before.items() if ".base_layer." not in name}  # embeddings, which are the base's
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n].to(before[n])) for n in before)


@rows
def test_a_file_for_peft(row: Row, tmp_path: Path) -> None:
    model = build(FAMILIES[row.family], row.role)
    inputs = batch(model)
    fused = FAMILIES[row.family].columns is not None and "query" in row.method and "Rescale" not in row.method
    if fused:  # what PEFT can express of it has one down matrix; the other test goes there and back
        deltune.attach(model, row.method)
        stir(deltune.tuned(model))
        with pytest.raises(deltune.DeltuneError, match="have matrices of their own, in PEFT they share one"):
            deltune.export(model, tmp_path / "peft")
        return
    tuned = stir(deltune.attach(model, row.method))
    with torch.no_grad():
        for parameter in tuned.trainable_parameters():
            parameter.copy_(parameter.float())
    expected = logits(model, inputs)
    deltune.export(model, tmp_path / "peft")
    theirs = peft.PeftModel.from_pretrained(build(FAMILIES[row.family], row.role), str(tmp_path / "peft")).eval()
    assert close(row, logits(theirs, inputs, row.rows), expected)
    hit = {re.split(r"\.lora_(?:embedding_)?A$", n)[0] for n, _ in theirs.named_modules() if n.endswith("_A")}
    if hit:
        edited_paths = {edit.place.target.path for edit in tuned.delta().all_edits()}
        assert {n.removeprefix("base_model.model.") for n in hit} == edited_paths


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_generating_with_a_prefix_of_peft(family: str, tmp_path: Path) -> None:
    row = next(r for r in ROWS if r.family == family and "prefix" in r.method)
    theirs = trained(row)
    theirs.save_pretrained(tmp_path / "peft")
    model = build(FAMILIES[family], "causal")
    inputs = batch(model, pad=0)
    deltune.load(model, tmp_path / "peft")
    options = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(**inputs, **options), theirs.generate(**inputs, **options))


TASKS = {"sequence": "SEQ_CLS", "causal": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM"}
KINDS: dict[str, Callable[[str], Any]] = {
    "LoRA": lambda task: peft.LoraConfig(task_type=task, r=2, lora_alpha=4, target_modules="all-linear"),
    "IA3": lambda task: peft.IA3Config(task_type=task),
    "LN": lambda task: peft.LNTuningConfig(task_type=task),
    "prompt": lambda task: peft.PromptTuningConfig(task_type=task, num_virtual_tokens=3),
    "prefix": lambda task: peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=3),
}
NOT_HERE = {
    "modernbert LoRA": "extra tensor",  # a head that is more than one linear
    "deberta-v2 LoRA": "not visible",
    "deberta-v2 IA3": "only a part of a head",
    **dict.fromkeys([f"{f} prefix" for f in ("mistral", "gemma2", "phi3", "starcoder2")], "sliding window"),
    **dict.fromkeys([f"{f} prefix" for f in ("bloom", "gptj")], "attention interface"),
}
"""What PEFT makes of a family at its defaults and has no translation here."""
PEFT_REFUSES = (
    "Please specify `",  # it has no defaults for the family
    "modules_to_save cannot be applied to modules of type",  # "all-linear" took the head, which is saved as a whole
)
"""How the errors begin with which PEFT refuses its own defaults on a family."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)  # by name: all of the product, since the facts above are of single pairs
def test_peft_s_defaults_on_every_family(name: str, kind: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    role = main_role(family)
    row = Row(family.name, role, lambda: KINDS[kind](TASKS[role]), "", rows=3 if kind == "prompt" else 0)
    try:
        theirs = trained(row)
    except (ValueError, TypeError) as error:
        if not str(error).startswith(PEFT_REFUSES):
            raise
        pytest.skip(f"PEFT: {error}")
    theirs.save_pretrained(tmp_path / "peft")
    model = build(family, role)
    no_words = kind in ("prompt", "prefix") and role != "causal"
    if message := "language models of one decoder stack" if no_words else NOT_HERE.get(f"{name} {kind}"):
        with pytest.raises(deltune.DeltuneError, match=message):
            deltune.load(model, tmp_path / "peft")
        return
    deltune.load(model, tmp_path / "peft")
    inputs = batch(model)
    expected = logits(theirs, inputs, row.rows)
    assert close(row, logits(model, inputs), expected)
    deltune.export(model, tmp_path / "ours")
    again = peft.PeftModel.from_pretrained(build(family, role), str(tmp_path / "ours")).eval()
    assert close(row, logits(again, inputs, row.rows), expected)


REFUSED = (
    ("gpt2", "causal", "prefix(length=3)", "train with shift_positions=True"),
    ("gpt2", "causal", "prefix(length=3, gate=False, shift_positions=True)", "joins the keys and values"),
    ("gpt2", "causal", "prefix(length=3, shift_positions=True, layers=(0,))", "in every layer's self-attention"),
    ("bert", "sequence", "prefix(length=3, shift_positions=True)", "language models of one decoder stack"),
    ("mistral", "causal", "prefix(length=3, shift_positions=True)", "sliding window"),
    ("gpt2", "causal", "prompt(length=3, positions='none')", "PEFT's prompt takes positions"),
    ("gpt2", "causal", "lora(rank=2)", "query and value is a part of the fused c_attn, PEFT changes whole modules"),
    ("bert", "sequence", "adapter(rank=2)", "PEFT has no Bottleneck at site 'attention'"),
    ("bert", "sequence", "lora(rank=2) + layernorm", "a sum of LORA and LN_TUNING"),
    ("bert", "sequence", "lora(rank=2) + lora(rank=4)", "two terms change one projection"),
    ("bert", "sequence", "bitfit", "trains norms in place and nothing else"),
    ("bert", "sequence", "head", "the head alone is no method of PEFT"),
    ("bert", "sequence", "unipelt(length=2, rank=2, bottleneck=2)", "no gate"),
    ("bert", "sequence", "lora(rank=2) + lora(rank=2, at='key', dropout=0.1)", "one lora_dropout"),
    ("bert", "sequence", "three_vectors", "no Mixture"),
    ("bert", "sequence", "lora(rank=2, at='key') + dora(rank=2)", r"a sum of LORA and LORA \(dora\)"),
    ("bert", "sequence", "oft(block_size=4, at='key') + oft(block_size=8)", "PEFT's OFT has one oft_block_size, here"),
    ("gpt2", "causal", "hira(rank=2, at='query')", "query is a part of the fused c_attn"),
)


@pytest.mark.parametrize(("family", "role", "method", "message"), REFUSED, ids=[f"{r[0]}: {r[2]}" for r in REFUSED])
def test_what_peft_cannot_express(family: str, role: str, method: str, message: str, tmp_path: Path) -> None:
    model = build(FAMILIES[family], role)
    deltune.attach(model, method)
    with pytest.raises(deltune.DeltuneError, match=message):
        deltune.export(model, tmp_path / "peft")
    assert not any(tmp_path.iterdir())


def test_a_mask_is_written_dense(tmp_path: Path) -> None:
    model = build(FAMILIES["bert"], "sequence")
    stir(deltune.attach(model, "apet(lora(rank=4), parameters=40)"))
    expected = logits(model, batch(model))
    deltune.export(model, tmp_path / "peft")
    theirs = peft.PeftModel.from_pretrained(build(FAMILIES["bert"], "sequence"), str(tmp_path / "peft")).eval()
    assert torch.allclose(logits(theirs, batch(model)), expected, atol=1e-11)


EMBEDDING, OUTPUT = (
    "Selection(roles=('embedding',), areas=('embedding',))",
    "roles=('linear.weight',), areas=('vocabulary',)",
)
WHOLE_MODULES = (
    ("llama", "causal", {"modules_to_save": ["embed_tokens"]}, EMBEDDING),
    ("llama", "causal", {"modules_to_save": ["embed_tokens", "lm_head"]}, f"{EMBEDDING} + Selection({OUTPUT})"),
    ("llama", "causal", {"modules_to_save": ["lm_head"]}, f"Selection({OUTPUT})"),
    ("llama", "causal", {"modules_to_save": ["layers.0.mlp"]},
     "Selection(roles=('linear.weight',), of='ffn', layers=(0,))"),
    ("bert", "sequence", {"modules_to_save": ["pooler", "classifier"]},
     "Selection(roles=('linear.bias',), areas=('pooler',)) + Selection(roles=('linear.weight',), areas=('pooler',))"),
)  # fmt: skip


def with_whole_modules(family: str, role: str, options: dict[str, Any], folder: Path, **config: Any) -> Any:
    """PEFT's LoRA with trained copies of whole modules, saved."""
    task = {"causal": "CAUSAL_LM", "sequence": "SEQ_CLS"}[role]
    model = peft.get_peft_model(build(FAMILIES[family], role, **config), lora(task, r=2, lora_alpha=2, **options)())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=0.1)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize(("family", "role", "options", "method"), WHOLE_MODULES)
def test_modules_that_were_trained_as_a_whole(
    family: str, role: str, options: dict[str, Any], method: str, tmp_path: Path
) -> None:
    theirs = with_whole_modules(family, role, options, tmp_path)
    model = build(FAMILIES[family], role)
    assert repr(deltune.load(model, tmp_path).method) == f"lora(rank=2) + {method}"
    assert torch.allclose(logits(model, batch(model)), logits(theirs, batch(model)), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("modules", "says"),
    [
        (
            ["embed_tokens"],
            r"embed_tokens.weight and lm_head.weight are one .*the file has model.embed_tokens.weight alone",
        ),
        (["embed_tokens", "lm_head"], "are one tensor of this model, and the file has values of their own"),
    ],
)
def test_whole_modules_that_are_tied_here(modules: list[str], says: str, tmp_path: Path) -> None:
    """PEFT trains a copy of its own for each name of a tied tensor."""
    theirs = with_whole_modules("llama", "causal", {"modules_to_save": modules}, tmp_path, tie_word_embeddings=True)
    model = build(FAMILIES["llama"], "causal", tie_word_embeddings=True)
    with pytest.raises(deltune.DeltuneError, match=says) as caught:
        deltune.load(model, tmp_path)
    assert "no head" not in str(caught.value)
    output = model.get_output_embeddings()  # as the message says
    output.weight = torch.nn.Parameter(output.weight.detach().clone())
    deltune.load(model, tmp_path)
    assert torch.allclose(logits(model, batch(model)), logits(theirs, batch(model)), rtol=1e-11, atol=1e-11)


def test_a_part_of_what_one_selection_trains(tmp_path: Path) -> None:
    with_whole_modules("bert", "sequence", {"modules_to_save": ["word_embeddings"]}, tmp_path)
    with pytest.raises(
        deltune.DeltuneError, match=r"no selection .* trains bert.embeddings.word_embeddings.weight and no others"
    ) as caught:
        deltune.load(build(FAMILIES["bert"], "sequence"), tmp_path)
    assert "no head" not in str(caught.value)


def saved(tmp_path: Path, row: Row = ROWS[0], **options: Any) -> Path:
    """A folder of PEFT, with options changed afterwards."""
    trained(row).save_pretrained(tmp_path / "peft")
    path = tmp_path / "peft" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **options}))
    return tmp_path / "peft"


UNREAD = (
    ({"use_qalora": True, "bias": "vera_only"}, "2 problems\n(?s:.*)bias='vera_only'(?s:.*)use_qalora=True"),
    ({"init_lora_weights": "corda"}, "init_lora_weights='corda'"),
    ({"layer_replication": [[0, 1]]}, "layer_replication"),
    ({"something_new": 3}, "deltune cannot reproduce something_new=3"),
    ({"peft_type": "OPT"}, "unknown peft_type 'OPT'"),
    *(
        ({"peft_type": kind}, f"deltune cannot reproduce peft_type {kind}: {reason[:40]}")
        for kind, reason in peft_table.REFUSED.items()
    ),
    ({"peft_type": "IA3"}, "lora_alpha=6"),
)


@pytest.mark.parametrize(("options", "message"), UNREAD, ids=[str(o) for o, _ in UNREAD])
def test_options_without_a_translation(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = build(FAMILIES["bert"], "sequence")
    with pytest.raises(deltune.DeltuneError, match=message):
        deltune.load(model, saved(tmp_path, **options))
    assert "deltune" not in model._modules


def with_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    path.unlink()
    save_file(tensors, path)
    return folder


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    model: PreTrainedModel = build(FAMILIES["bert"], "sequence")
    folder = saved(tmp_path)
    stem = "base_model.model.bert.encoder.layer.0.attention.self.query"
    with_tensors(folder, lambda t: t.update({"base_model.model.bert.nowhere.lora_A.weight": torch.zeros(2, 2)}))
    with pytest.raises(deltune.DeltuneError, match=r"extra tensor base_model.model.bert.nowhere.lora_A.weight"):
        deltune.load(model, folder)
    with_tensors(folder, lambda t: t.pop("base_model.model.bert.nowhere.lora_A.weight"))
    with_tensors(folder, lambda t: t.pop(f"{stem}.lora_B.weight"))
    with pytest.raises(deltune.DeltuneError, match=r"missing tensor .*query.lora_B.weight"):
        deltune.load(model, folder)
    with_tensors(folder, lambda t: t.update({f"{stem}.lora_B.weight": torch.zeros(7, 2)}))
    with pytest.raises(deltune.DeltuneError, match=r"\(7, 2\), by the options and this model it is"):
        deltune.load(model, folder)
    with_tensors(folder, lambda t: t.update({f"{stem}.lora_B.weight": torch.zeros(32, 2)}))
    with_tensors(folder, lambda t: t.pop("base_model.model.classifier.bias"))
    with pytest.raises(deltune.DeltuneError, match=r"missing tensors classifier.bias, whose modules"):
        deltune.load(model, folder)
    data = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(data[:-40])
    with pytest.raises(deltune.DeltuneError, match="is damaged"):
        deltune.load(model, folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(deltune.DeltuneError, match="incomplete"):
        deltune.load(model, folder)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(deltune.DeltuneError, match=r"is damaged, or is not JSON.* at line 1, column 2"):
        deltune.load(model, folder)
    assert "deltune" not in model._modules


def without(*parts: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    """Drop the tensors whose names contain one of these parts."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if any(part in name for part in parts)]:
            del tensors[name]

    return change


def shaped(part: str, *shape: int) -> Callable[[dict[str, torch.Tensor]], Any]:
    """Give the tensors whose names contain a part another shape."""
    return lambda tensors: tensors.update({name: torch.ones(shape) for name in tensors if part in name})


def twice(tensors: dict[str, torch.Tensor]) -> None:
    """Add the tensors of a third layer."""
    tensors.update({n.replace("layers.1.", "layers.2."): t.clone() for n, t in tensors.items() if "layers.1." in n})


LLAMA = Row("llama", "causal", lora("CAUSAL_LM", r=2), "")
ALL_LINEAR = Row("llama", "causal", lora("CAUSAL_LM", r=2, target_modules="all-linear"), "")
ONE_LAYER = Row("llama", "causal", lora("CAUSAL_LM", r=2, layers_to_transform=[1], layers_pattern="layers"), "")
T5_V = Row("t5", "seq2seq", lora("SEQ_2_SEQ_LM", r=2, target_modules=["v"]), "")
GPT2_NORMS = Row("gpt2", "causal", lambda: peft.LNTuningConfig(task_type="CAUSAL_LM"), "")
LLAMA_IA3 = Row("llama", "causal", lambda: peft.IA3Config(task_type="CAUSAL_LM"), "")
GPT2_PREFIX = next(row for row in ROWS if "prefix" in row.method and row.family == "gpt2")
TIED = Row("llama", "causal", lora("CAUSAL_LM", r=2, target_modules=["embed_tokens", "lm_head", "q_proj"]), "")
FULL_PATHS = {"target_modules": ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"]}

INCOMPLETE: dict[str, tuple[Row, dict[str, Any], Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "a layer": (LLAMA, {}, without("layers.1."),
        r"missing tensors of model.layers.1.self_attn.q_proj and model.layers.1.self_attn.v_proj, which its options"),
    "the first layer": (LLAMA, {}, without("layers.0."), r"layers.0.self_attn.q_proj"),
    "a module of a layer": (
        LLAMA, {}, without("layers.1.self_attn.v_proj"), r"missing tensors of model.layers.1.self_"),
    "a module of every layer": (LLAMA, {}, without("v_proj"), r"layers.0.self_attn.v_proj and model.layers.1"),
    "A of a module": (LLAMA, {}, without("0.self_attn.v_proj.lora_A"), r"missing tensor .*v_proj.lora_A"),
    "B of all modules": (LLAMA, {}, without("lora_B"), r"missing tensor .*q_proj.lora_B"),
    "everything": (LLAMA, {}, without("lora"), r"missing tensors of .* and model.layers.1.self_attn.v_proj"),
    "a layer of all-linear": (
        ALL_LINEAR, {}, without("layers.0.mlp"), r"layers.0.mlp.gate_proj, .*and model.layers.0.m"),
    "all-linear by name": (
        ALL_LINEAR, {"target_modules": "all-linear"}, without("1.mlp.up"), r"layers.1.mlp.up_proj, w"),
    "by a pattern": (
        LLAMA, {"target_modules": r".*\.(q|v)_proj"}, without("0.self_attn.v"), r"layers.0.self_attn.v_proj"),
    "by full paths": (
        LLAMA, FULL_PATHS, without("v_proj", "layers.1"), r"missing tensors of model.layers.1.self_attn.q"),
    "a layer of those that are named": (
        LLAMA, {"layers_to_transform": [0, 1]}, without("layers.0."), r"layers.0.self_"),
    "the only layer": (ONE_LAYER, {}, without("layers.1."), r"missing tensors of model.layers.1"),
    "cross-attention": (
        T5_V, {}, without("EncDecAttention"), r"missing tensors of decoder.block.0.layer.1.EncDecAttention"),
    "a tied module": (TIED, {}, without("lm_head.lora"), r"missing tensors of lm_head"),
    "the embeddings": (TIED, {}, without("embed_tokens.lora"), r"missing tensors of model.embed_tokens"),
    "a vector": (LLAMA_IA3, {}, without("layers.0.mlp"), r"missing tensors of model.layers.0.mlp.down_proj"),
    "a norm": (GPT2_NORMS, {}, without("h.1.ln_2"), r"missing tensors of transformer.h.1.ln_2"),
    "a layer's norms": (
        GPT2_NORMS, {}, without("h.1."), r"missing tensors of transformer.h.1.ln_1 and transformer.h.1.ln_2"),
    "a norm's bias": (
        GPT2_NORMS, {}, without("h.0.ln_1.ln_tuning_layers.bias"), r"missing tensor transformer.h.0.ln_1.bias"),
    "all biases of norms": (
        GPT2_NORMS, {}, without("ln_tuning_layers.bias"), r"missing tensor transformer.h.0.ln_1.bias"),
    "the head": (
        ROWS[0], {}, without("classifier"), r"missing tensors classifier.weight and classifier.bias, whose mod"),
    "rows of a prompt": (next(r for r in ROWS if "prompt" in r.method), {}, shaped("prompt", 2, 32), r"2 rows.* is 3"),
    "rows of a prefix": (GPT2_PREFIX, {}, shaped("prompt", 2, 128), r"2 rows.* is 3"),
    "a layer of a prefix": (GPT2_PREFIX, {}, shaped("prompt", 3, 64), r"rows of 64; the 2 layers"),
    "a rank": (LLAMA, {}, shaped("1.self_attn.q_proj.lora_A", 1, 32), r"this model it is \(2, 32\)"),
    "another rank throughout": (LLAMA, {"r": 4}, without("nothing"), r"LORA: .*this model it is \(4, 32\)"),
    "a rank of a pattern": (LLAMA, {"rank_pattern": {"v_proj": 3}}, without("nothing"), r"v_proj.* it is \(3, 32\)"),
    "a side of a vector": (LLAMA_IA3, {"feedforward_modules": []}, without("nothing"), r"feedforward_modules"),
    "what is said to be there": (LLAMA, {"target_modules": None}, without("nothing"), r"target_modules is missing"),
    "a module too many": (
        LLAMA, {"target_modules": ["q_proj"]}, without("nothing"), r"extra tensors of .*v_proj, which"),
    "a layer too many": (
        LLAMA, {"layers_to_transform": 0}, without("nothing"), r"extra tensors of model.layers.1.self_a"),
    "an excluded module": (
        LLAMA, {"exclude_modules": ["1.self_attn.v_proj"]}, without("nothing"), r"extra tensors of model"),
    "a layer that the model has not": (LLAMA, {}, twice, r"extra tensor base_model.model.model.layers.2"),
}  # fmt: skip
"""What a folder lacks or has too much of: who wrote it, other options, other tensors, and the message."""


@pytest.mark.parametrize("what", INCOMPLETE)
def test_a_folder_that_is_not_what_its_options_say(what: str, tmp_path: Path) -> None:
    row, options, change, message = INCOMPLETE[what]
    model = build(FAMILIES[row.family], row.role)
    with pytest.raises(deltune.DeltuneError, match=message) as error:
        deltune.load(model, with_tensors(saved(tmp_path, row, **options), change))
    assert len(str(error.value)) < 1200 and "deltune" not in model._modules


COMPLETE: dict[str, tuple[Row, dict[str, Any], str]] = {
    "one layer by its number": (ONE_LAYER, {}, ""),
    "one layer by a number alone": (ONE_LAYER, {"layers_to_transform": 1, "layers_pattern": None}, ""),
    "all-linear": (ALL_LINEAR, {}, ""),
    "all-linear, not written out": (ALL_LINEAR, {"target_modules": "All-Linear"}, ""),
    "a pattern": (LLAMA, {"target_modules": r"model\.layers\.\d+\.self_attn\.[qv]_proj"}, ""),
    "a pattern and what it excludes": (
        LLAMA, {"target_modules": r".*_proj", "exclude_modules": r".*(mlp|[ko]_proj).*"}, ""),
    "names that the model lacks": (LLAMA, {"target_modules": ["q_proj", "v_proj", "c_attn"]}, ""),
    "modules that are saved whole": (ROWS[0], {"target_modules": ["query", "value", "classifier"]}, ""),
    "a sequence classifier's head": (
        Row("bert", "sequence", lora("SEQ_CLS", r=2, target_modules="all-linear", exclude_modules=["pooler.dense"]),
            ""), {}, ""),
    "a model of one stack more": (
        Row("bert", "base", lora("FEATURE_EXTRACTION", r=2, layers_to_transform=[1]), ""), {}, "sequence"),
    "a model without the head": (Row("bert", "sequence", lora(None, r=2), ""), {}, "base"),
}  # fmt: skip
"""Folders that are whole: who wrote them, other options that mean the same, and another class of model to load on."""


@pytest.mark.parametrize("what", COMPLETE)
def test_a_folder_that_is_whole_loads(what: str, tmp_path: Path) -> None:
    row, options, role = COMPLETE[what]
    folder = saved(tmp_path, row, **options)
    tuned = deltune.load(build(FAMILIES[row.family], role or row.role), folder)
    names = {n.rpartition(".lora")[0] for n in load_file(folder / "adapter_model.safetensors") if ".lora" in n}
    edited = {edit.place.target.path for edit in tuned.delta().all_edits()}
    assert len(names) == len(edited) and all(any(n.endswith(path) or path.endswith(
        n.removeprefix("base_model.model.")) for n in names) for path in edited)  # fmt: skip


class Harm:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("harm"),)


def test_embeddings_of_another_base(tmp_path: Path) -> None:
    """PEFT saves the base's embeddings beside LoRA on them; on another base the adapter would mean something else."""
    row = next(row for row in ROWS if "embedding" in row.method)
    trained(row).save_pretrained(tmp_path / "peft")
    model = build(FAMILIES[row.family], row.role)
    with torch.no_grad():
        model.get_input_embeddings().weight[3, 0] += 1
    before = facts(model)
    with pytest.raises(deltune.DeltuneError, match=r"embed_tokens.weight is not the one that the adapter was trained"):
        deltune.load(model, tmp_path / "peft")
    assert differences(before, facts(model)) == []
    model.resize_token_embeddings(model.config.vocab_size + 1)
    with pytest.raises(deltune.DeltuneError, match=r"embed_tokens.weight has shape .* resize the embeddings"):
        deltune.load(model, tmp_path / "peft")


def test_torch_files_are_read_as_tensors_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = build(FAMILIES["bert"], "sequence")
    folder = saved(tmp_path)
    tensors = load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    torch.save(tensors, folder / "adapter_model.bin")
    deltune.load(model, folder).detach()
    torch.save({"a": Harm()}, folder / "adapter_model.bin")
    with pytest.raises(deltune.DeltuneError, match="holds more than tensors"):
        deltune.load(model, folder)
    assert not Path("harm").exists()


def test_a_head_with_other_labels_and_a_base_without_head(tmp_path: Path) -> None:
    three = build(FAMILIES["bert"], "sequence", num_labels=3)
    peft.get_peft_model(three, ROWS[0].config()).save_pretrained(tmp_path / "peft")
    model = build(FAMILIES["bert"], "sequence")
    deltune.load(model, tmp_path / "peft")
    assert model.config.num_labels == 3 and logits(model, batch(model)).shape[-1] == 3
    with pytest.raises(deltune.DeltuneError, match=r"has no head(?s:.*)extra tensor base_model.model.classifier"):
        deltune.load(build(FAMILIES["bert"], "base"), tmp_path / "peft")


def test_a_folder_that_is_not_empty(tmp_path: Path) -> None:
    model = build(FAMILIES["bert"], "sequence")
    deltune.attach(model, "lora(rank=2)")
    (tmp_path / "mine").write_text("…")
    with pytest.raises(deltune.DeltuneError, match="not an empty folder"):
        deltune.export(model, tmp_path)
    with pytest.raises(deltune.DeltuneError, match=r"unknown format 'pfet'\. Did you mean 'peft'"):
        deltune.export(model, tmp_path / "new", format="pfet")
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
