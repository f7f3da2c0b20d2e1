"""Folders of each of PEFT's types, written by PEFT here: read by deltune, written back, and read by PEFT again.

Models are float64, so equal means to the order of sums; where PEFT computes or keeps something in float32, or a family
computes norms in float32, to float32's rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import deltune
from deltune.interop import peft_table
from deltune.runtime.attach import find_tuned
from tables.families import FAMILIES
from tables.specimens import batch, build, stir

from .test_field_peft import EXACT, ROUNDED, ROWS, TARGETS, Row, distance, peft
from .test_peft import ROWS as LORA_ROWS

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

TASKS = {"bert": ("sequence", "SEQ_CLS"), "llama": ("causal", "CAUSAL_LM"), "gpt2": ("causal", "CAUSAL_LM")}


def lora(**options: Any) -> Callable[[list[str]], Any]:
    return lambda targets: peft.LoraConfig(r=4, lora_alpha=8, **{"target_modules": targets, **options})


def no_values(layer: Any) -> dict[str, torch.Tensor]:
    return {}


FOLDERS_ALONE = (
    "PVERA", "P_TUNING", "CARTRIDGE", "MULTITASK_PROMPT_TUNING", "CPT", "ADAPTION_PROMPT",
)  # fmt: skip
SUMS = ("+ beft", "+ bitfit", "gralora(rank=4) + ", "supertuning(sparsity=0.9) + ", "gate=False")
LINEARS = "('query', 'key', 'value', 'output', 'ffn')"
ROWS_OF = "Selection(roles=('embedding',), areas=('{}',), tokens=({}))"
ONLY_BERT, ONLY_LLAMA = {"families": ("bert",)}, {"families": ("llama",)}
MORE = tuple(
    Row(method, config, no_values, **options)
    for method, config, options in (
        ("lora(rank=4, scale=2)", lora(), {}),
        ("alora(invocation=(26, 46), rank=4, scale=2, at=('query', 'value'))",
         lora(alora_invocation_tokens=[26, 46], task_type="CAUSAL_LM"), ONLY_LLAMA),
        ("lora(rank=4, scale=2) + beft(at=('query', 'value'))", lora(lora_bias=True), {}),
        ("lora(rank=4, scale=4) + beft(at=('query', 'value'))", lora(lora_bias=True, use_rslora=True), {}),
        ("lora(rank=4, scale=2) + beft(at=('query', 'value'))", lora(bias="lora_only"), ONLY_BERT),
        ("lora(rank=4, scale=2) + bitfit", lora(bias="all"), ONLY_BERT),
        (f"lora(rank=6, scale={8 / (6 + 1e-5)})", lambda t: peft.AdaLoraConfig(
            init_r=6, target_r=4, total_step=10, tinit=2, tfinal=3, deltaT=2, target_modules=t), {}),
        ("gralora(rank=4) + lora(rank=2, scale=2)", lambda t: peft.GraloraConfig(
            r=4, hybrid_r=2, alpha=12, target_modules=t), {}),
        ("lora(rank=4)", lambda t: peft.PveraConfig(r=4, target_modules=t), {}),
        ("unilora(rank=4, length=50)", lambda t: peft.UniLoraConfig(
            r=4, theta_d_length=50, save_indices=True, target_modules=t), {}),
        (f"tinylora(rank=2, parameters=5, at={LINEARS})", lambda t: peft.TinyLoraConfig(
            r=2, u=5, target_modules="all-linear"), ONLY_LLAMA),
        ("loha(rank=4, scale=2, at='query') + loha(rank=4, scale=2, at='value', layers=(0,))"
         "+ loha(rank=2, scale=2, at='value', layers=(1,))", lambda t: peft.LoHaConfig(
            r=4, alpha=8, rank_pattern={"1.*value": 2}, alpha_pattern={"1.*value": 4}, target_modules=t), ONLY_BERT),
        ("lora(rank=4, scale=2) + trainable_tokens(tokens=(5, 7))", lora(trainable_token_indices=[7, 5]), ONLY_BERT),
        (f"lora(rank=4, scale=2) + {ROWS_OF.format('embedding', '5, 7')}", lora(trainable_token_indices=[7, 5]),
         ONLY_LLAMA),
        (f"lora(rank=4, scale=2) + {ROWS_OF.format('vocabulary', '3,')}",
         lora(trainable_token_indices={"lm_head": [3]}), ONLY_LLAMA),
        ("trainable_tokens(tokens=(5, 7))", lambda t: peft.TrainableTokensConfig(token_indices=[7, 5]), ONLY_BERT),
        ("prompt(length=3)", lambda t: peft.PromptEncoderConfig(num_virtual_tokens=3), ONLY_LLAMA),
        ("prompt(length=3)", lambda t: peft.MultitaskPromptTuningConfig(num_virtual_tokens=3, num_ranks=2), ONLY_LLAMA),
        ("prompt(length=3)", lambda t: peft.CPTConfig(
            task_type="CAUSAL_LM", cpt_token_ids=[3, 4, 5], cpt_mask=[1, 1, 1],
            cpt_tokens_type_mask=[1, 2, 3]), ONLY_LLAMA),
        ("prefix(length=3, gate=False, layers=(1,))", lambda t: peft.AdaptionPromptConfig(
            adapter_len=3, adapter_layers=1), ONLY_LLAMA),
        ("supertuning(sparsity=0.9) + lora(rank=2, scale=3)", lambda t: peft.SupertuningConfig(
            sparsity=0.9, r=2, lora_alpha=6, target_modules=t), {}),
        ("prefix(length=3, shift_positions=True)", lambda t: peft.CartridgeConfig(num_virtual_tokens=3), ONLY_LLAMA),
    )
)  # fmt: skip

READ = [row for row in (*ROWS, *MORE) if not row.method.startswith("adalora")]
"""What folders are read as; an AdaLoRA's is the LoRA that it ends as, which is in MORE."""

cells = pytest.mark.parametrize(
    ("row", "family"), [(row, f) for row in READ for f in row.families], ids=lambda v: getattr(v, "method", v)
)


def trained(row: Row, family: str) -> Any:
    """PEFT's model, each trained tensor moved, in float32's values, which some types keep."""
    role, task = TASKS[family]
    torch.manual_seed(3)
    config = row.config(TARGETS[family])
    config.task_type = task
    model = peft.get_peft_model(build(FAMILIES[family], role, row.dtype), config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "ranknum" not in name:  # which AdaLoRA trains, and does not save
                parameter.add_(0.1 * torch.randn(parameter.shape)).copy_(parameter.float())
    return model


def logits(model: Any, family: str) -> torch.Tensor:
    inputs = batch(build(FAMILIES[family], TASKS[family][0]))
    config = getattr(model, "peft_config", {}).get("default")
    tasks = torch.arange(len(inputs["input_ids"]))
    if hasattr(config, "num_tasks") or hasattr(config, "n_tasks"):
        inputs["task_ids"] = tasks * 0 if hasattr(config, "num_tasks") else tasks
    handle = find_tuned(model)
    with torch.no_grad(), handle.condition(task_ids=tasks) if handle else nullcontext():
        return model(**inputs).logits[:, -inputs["input_ids"].shape[1] :]  # without those of a prompt


def expression(row: Row) -> str:
    """Return the expression of a row with the seed of its configuration."""
    return row.method.replace("shira(rank=2)", "shira(rank=2, seed=5)")


def tolerance(row: Row, family: str) -> float:
    kept = ("osf", "unilora")  # what PEFT computes anew in float32, or keeps so
    exact = (
        not row.rounded and not row.method.startswith(kept) and row.dtype == torch.float64 and FAMILIES[family].exact
    )
    return EXACT if exact else ROUNDED


@cells
def test_a_configuration_is_attached(row: Row, family: str) -> None:
    config = row.config(TARGETS[family])
    config.task_type = TASKS[family][1]
    model = build(FAMILIES[family], TASKS[family][0], row.dtype)
    if config.peft_type.value in FOLDERS_ALONE:
        with pytest.raises(deltune.DeltuneError, match=r"is read from folders alone"):
            deltune.attach(model, config)
        return
    tuned = deltune.attach(model, config)
    if config.peft_type.value == "ADALORA":
        expected = "adalora(rank=4, initial_rank=6, alpha=8, start=0.2, stop=0.7, every=2)"
        assert tuned.method == deltune.parse(expected)
        return
    assert set(tuned.method.parts) == set(deltune.parse(expression(row)).parts)


@cells
def test_a_folder_is_read_and_written_back(row: Row, family: str, tmp_path: Path) -> None:
    theirs = trained(row, family)
    theirs.save_pretrained(tmp_path / "peft")
    model = build(FAMILIES[family], TASKS[family][0], row.dtype)
    plain, expected = logits(model, family), logits(theirs, family)
    assert distance(plain, expected) > 1e-3
    tuned = deltune.load(model, tmp_path / "peft")
    assert distance(logits(model, family), expected) < tolerance(row, family)
    expected_parts = deltune.parse(expression(row)).parts
    assert set(tuned.method.parts) == set(expected_parts)
    if any(text in row.method for text in SUMS):
        with pytest.raises(
            deltune.DeltuneError, match=r"PEFT keeps one type of adapter|nothing else|joins the keys and values"
        ):
            deltune.export(model, tmp_path / "ours")
        return
    deltune.export(model, tmp_path / "ours")
    again = peft.PeftModel.from_pretrained(
        build(FAMILIES[family], TASKS[family][0], row.dtype), str(tmp_path / "ours")
    ).eval()
    assert distance(logits(again, family), expected) < tolerance(row, family)


@pytest.mark.parametrize("saved", [True, False])
def test_random_matrices_of_other_widths_are_refused(saved: bool, tmp_path: Path) -> None:
    """PEFT draws RandLoRA's for the greatest widths of all modules, which here are those of each."""
    targets = ["intermediate.dense", "output.dense"]
    config = peft.RandLoraConfig(r=4, target_modules=targets, task_type="SEQ_CLS", save_projection=saved)
    peft.get_peft_model(build(FAMILIES["bert"], "sequence"), config).save_pretrained(tmp_path)
    with pytest.raises(deltune.DeltuneError, match="draws its random matrices for the greatest widths"):
        deltune.load(build(FAMILIES["bert"], "sequence"), tmp_path)


@pytest.mark.parametrize("method", ["hira(rank=4)", "vera(rank=8, seed=5)", "tinylora(rank=4, parameters=6)"])
def test_a_fused_module_stays_whole(method: str, tmp_path: Path) -> None:
    row = next(row for row in ROWS if row.method == method)
    config = row.config(["c_attn", "mlp.c_proj"])
    config.task_type = "CAUSAL_LM"
    theirs = peft.get_peft_model(build(FAMILIES["gpt2"], "causal"), config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape)).copy_(parameter.float())
    theirs.save_pretrained(tmp_path)
    model = build(FAMILIES["gpt2"], "causal")
    tuned = deltune.load(model, tmp_path)
    assert "at=('*.attn.c_attn', 'ffn_down')" in repr(tuned.method)
    assert distance(logits(model, "gpt2"), logits(theirs, "gpt2")) < EXACT


NAMED = [r for r in LORA_ROWS if getattr(r.config(), "target_modules", "prompts") is not None]


@pytest.mark.parametrize("row", NAMED, ids=lambda row: row.id)
def test_a_configuration_with_targets_is_attached(row: Any) -> None:
    tuned = deltune.attach(build(FAMILIES[row.family], row.role), row.config())
    if "reparameterise" not in repr(tuned.method):
        assert {repr(part) for part in tuned.method.parts} == {repr(part) for part in deltune.parse(row.method).parts}


REFUSED_CONFIGS: tuple[tuple[Callable[[], Any], str], ...] = (
    (lambda: peft.LoraConfig(target_modules=["query"], init_lora_weights="gaussian"), "init_lora_weights='gaussian'"),
    (lambda: peft.LoraConfig(target_modules=["q_proj"]), "names no module of BertForSequenceClassification"),
    (lambda: peft.LoraConfig(target_modules=["query"], layer_replication=[[0, 1]]), "cannot reproduce layer_repl"),
    (lambda: peft.HiraConfig(target_modules=["query"], hira_dropout=0.1), "deltune cannot reproduce hira_dropout=0.1"),
    (lambda: peft.OFTConfig(target_modules=["query"], coft=True, eps=1e-4), "2 problems|cannot reproduce coft=True"),
    (lambda: peft.OFTConfig(target_modules=["query"], r=8, oft_block_size=0), "r=8 is a number of blocks"),
    (lambda: peft.XLoraConfig(), "deltune cannot reproduce peft_type XLORA: PEFT calls its low ranks 0, 1"),
    (lambda: peft.LilyConfig(target_modules=["query"]), "cannot reproduce peft_type LILY: its router is averaged"),
    (lambda: peft.ShadowConfig(), "cannot reproduce peft_type SHADOW: it is a second model beside this one"),
    (lambda: peft.PveraConfig(target_modules=["query"]), "PVERA is read from folders alone"),
    (lambda: peft.LoraConfig(trainable_token_indices=[3], target_modules=["embeddings.Nothing"]), "names no module"),
)  # fmt: skip


@pytest.mark.parametrize(("config", "message"), REFUSED_CONFIGS, ids=[message for _, message in REFUSED_CONFIGS])
def test_a_configuration_without_a_translation(config: Callable[[], Any], message: str) -> None:
    model = build(FAMILIES["bert"], "sequence")
    with pytest.raises(deltune.DeltuneError, match=message):
        deltune.attach(model, config())
    assert "deltune" not in model._modules


def test_a_configuration_without_targets_is_said() -> None:
    with pytest.warns(UserWarning, match=r"names no target_modules.*here it is lora\(rank=4, scale=2\.0\)"):
        deltune.attach(build(FAMILIES["bert"], "sequence"), peft.LoraConfig(r=4, lora_alpha=8))


def table() -> list[str]:
    """Return the lines of the table: each type, what it is here, whether it is written, and notes."""
    lines = []
    for kind in peft_table.KINDS:
        for row in (row for row in (*peft_table.IN_TRAINING, *peft_table.ROWS) if row.kind == kind):
            arguments = [f"{name}={option}" for name, option in row.arguments.items()]
            arguments += [f"scale={row.alpha} / {row.rank}"] if row.alpha else []
            when = "".join(f" with `{name}={value!r}`" for name, value in row.when.items())
            call = f"{row.make.__name__}({', '.join(arguments)})" if arguments else row.make.__name__
            lines.append(f"| `{kind}`{when} | `{call}` | {'yes' if row.written else 'no'} | {row.note} |")
        if kind in peft_table.OTHERS:
            other = peft_table.OTHERS[kind]
            lines.append(f"| `{kind}` | `{other.method}` | {'yes' if other.written else 'no'} | {other.note} |")
        if kind in peft_table.REFUSED:
            lines.append(f"| `{kind}` | not read | no | {peft_table.REFUSED[kind]} |")
    return lines


def test_the_documentation_has_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "library" / "peft.md").read_text(encoding="utf-8")
    assert "\n".join(table()) in page


def test_the_gradient_of_an_input_of_c3a() -> None:
    """PEFT's own convolution fails gradcheck; the form here passes it."""
    from peft.tuners.c3a.utils import BlockCircularConvolution

    x, kernel = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 8), (2, 2, 4)))
    form = deltune.parse("Modification('query', Circulant(block_size=4))").parts[0].form

    def ours(x: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        return x @ form.matrix({"kernel": kernel}).T

    assert torch.allclose(ours(x, kernel), BlockCircularConvolution.apply(x, kernel) / 8, atol=1e-6)
    assert torch.autograd.gradcheck(ours, (x, kernel))
    assert not torch.autograd.gradcheck(BlockCircularConvolution.apply, (x, kernel), raise_exception=False)


def test_adalora_trains_its_count_of_ranks(tmp_path: Path) -> None:
    row = next(row for row in MORE if "1.3333" in row.method)
    theirs = trained(row, "bert")
    assert all(p.requires_grad for n, p in theirs.named_parameters() if "ranknum" in n)
    theirs.save_pretrained(tmp_path)
    assert not any("ranknum" in name for name in load_file(tmp_path / "adapter_model.safetensors"))


def test_alora_without_a_cache(tmp_path: Path) -> None:
    """PEFT counts from the end of the prompt, which without a cache is not where the text ends."""
    row = next(row for row in MORE if row.method.startswith("alora"))
    theirs, model = trained(row, "llama"), build(FAMILIES["llama"], "causal")
    theirs.save_pretrained(tmp_path)
    deltune.load(model, tmp_path)
    inputs, options = batch(model, pad=0), {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    ours, peers = (
        [one.generate(**inputs, **options, use_cache=use_cache) for use_cache in (True, False)]
        for one in (model, theirs)
    )
    assert torch.equal(ours[0], ours[1]) and torch.equal(ours[0], peers[0]) and not torch.equal(ours[0], peers[1])


def test_most_types_ignore_the_adapters_of_rows() -> None:
    """PEFT answers every row with the active adapter; here each row has its own."""
    model = build(FAMILIES["bert"], "sequence")
    inputs = batch(model)
    config = peft.LoHaConfig(r=2, target_modules=["query"], init_weights=False)
    theirs = peft.get_peft_model(copy.deepcopy(model), config).eval()
    theirs.add_adapter("other", config)
    names = ["default", "other"]
    with torch.no_grad():
        mixed, alone = theirs(**inputs, adapter_names=names).logits, theirs(**inputs).logits
        assert torch.equal(mixed, alone)
        for name in names:
            tuned = stir(
                deltune.attach(model, peft.LoHaConfig(r=2, target_modules=["query"]), name=name), seed=len(name)
            )
        with tuned.rows(names):
            rows = model(**inputs).logits
        tuned.use("other")
        assert torch.allclose(rows[1], model(**inputs).logits[1]) and not torch.allclose(rows[1], alone[1])
