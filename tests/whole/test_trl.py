"""TRL's SFT and DPO on a tuned model, with the model without its delta as the reference, and no second base model."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import deltune
import tiny

trl = pytest.importorskip("trl", reason="no TRL: pip install -e '.[align]' -c constraints.txt")

pytestmark = pytest.mark.peers

METHODS = ["lora(rank=2)", "prefix(length=4)", pytest.param("layernorm", marks=pytest.mark.slow)]
PAIRS = [("my old", "apple is near", "hammer was here"), ("the", "small saw", "very old fig")] * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny language model and its tokenizer."""
    folder = tiny.model(tmp_path_factory.mktemp("trl") / "base", "llama")
    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    loaded = AutoTokenizer.from_pretrained(folder)
    loaded.eos_token = "[SEP]"
    return loaded


def attached(folder: Path, method: str) -> tuple[PreTrainedModel, deltune.Tuned]:
    """The base with a delta that already changes what it computes, as after an SFT."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    tuned = deltune.attach(model, method)
    with torch.no_grad():
        for number, parameter in enumerate(tuned.trainable_parameters()):
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    return model, tuned


def dpo(model: PreTrainedModel, folder: Path, out: Path, tuned: deltune.Tuned | None = None, **options: Any) -> Any:
    """A trained DPOTrainer; with a handle, its reference is the model with the delta disabled."""

    class DeltaDPOTrainer(trl.DPOTrainer):
        def compute_ref_log_probs(self, model: Any, inputs: Any) -> Any:
            if tuned is None:
                return super().compute_ref_log_probs(model, inputs)
            with tuned.disable():
                return super().compute_ref_log_probs(model, inputs)

    rows = Dataset.from_list([{"prompt": p, "chosen": f" {c}", "rejected": f" {r}"} for p, c, r in PAIRS])
    arguments = trl.DPOConfig(
        str(out), max_steps=3, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1, report_to="none",
        disable_tqdm=True, seed=0, bf16=False, use_cpu=True, save_strategy="no",
        precompute_ref_log_probs=tuned is not None,
    )  # fmt: skip
    trainer = DeltaDPOTrainer(
        model=model, args=arguments, train_dataset=rows, processing_class=tokenizer(folder), **options
    )
    trainer.train()
    return trainer


def logged(trainer: Any, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def bytes_of_parameters() -> int:
    """The bytes of all parameters in this process, each storage once."""
    gc.collect()
    parameters = [value for value in gc.get_objects() if type(value) is torch.nn.Parameter]
    return sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters}.values())


@pytest.mark.parametrize("method", METHODS)
def test_dpo_with_the_disabled_delta_as_reference(method: str, folder: Path, tmp_path: Path) -> None:
    """The losses are those with a second base model as the reference, and no second base model is held."""
    before = bytes_of_parameters()
    model, tuned = attached(folder, method)
    alone = bytes_of_parameters() - before
    trainer = dpo(model, folder, tmp_path / "without", tuned)
    assert trainer.ref_model is None and bytes_of_parameters() - before == alone
    base = sum(p.numel() * p.element_size() for p in model.parameters())
    losses = logged(trainer, "loss")
    del model, tuned, trainer
    model, _ = attached(folder, method)
    second = dpo(model, folder, tmp_path / "with", ref_model=AutoModelForCausalLM.from_pretrained(folder))
    assert bytes_of_parameters() - before > 1.8 * base
    assert losses == pytest.approx(logged(second, "loss"), abs=2e-5)
    assert abs(losses[0] - 0.6931) > 1e-4  # a reference with the delta in it would begin with log 2


@pytest.mark.parametrize("method", METHODS)
def test_sft(method: str, folder: Path, tmp_path: Path) -> None:
    """The loss falls, checkpoints hold the delta alone, and what is saved computes what was trained."""
    model, tuned = attached(folder, method)
    rows = Dataset.from_list([{"text": f"{p} {c}"} for p, c, _ in PAIRS])
    arguments = trl.SFTConfig(
        str(tmp_path / "out"), max_steps=6, per_device_train_batch_size=8, learning_rate=1e-2, logging_steps=1, seed=0,
        report_to="none", disable_tqdm=True, save_steps=6, bf16=False, use_cpu=True,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model=model, args=arguments, train_dataset=rows, processing_class=tokenizer(folder),
    )  # fmt: skip
    trainer.train()
    losses = logged(trainer, "loss")
    assert losses[-1] < losses[0]
    batch = tokenizer(folder)(["my old apple is near"], return_tensors="pt")
    batch.pop("token_type_ids", None)
    model.eval()
    with torch.no_grad():
        outputs = model(**batch).logits
        for saved in (tuned.save(tmp_path / "sft"), tmp_path / "out" / "checkpoint-6"):
            fresh = AutoModelForCausalLM.from_pretrained(folder).eval()
            deltune.load(fresh, saved)
            torch.testing.assert_close(fresh(**batch).logits, outputs)
