"""A tuned model in the tools people already have: Trainer, Seq2SeqTrainer, pipeline, save_pretrained."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from datasets import Dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainingArguments,
    pipeline,
)

import deltune
from deltune import models
from deltune.train.data import loading
from tables.families import FAMILIES
from tables.specimens import batch, build


@pytest.fixture(scope="module")
def tickets() -> loading.TaskData:
    return loading.load_data(str(Path(deltune.__file__).parent / "train" / "demo" / "tickets"))


@pytest.mark.parametrize(
    ("method", "merges"),
    [
        ("prefix(length=8) + layernorm", False),
        pytest.param("lora", True, marks=pytest.mark.slow),
        pytest.param("prompt(length=5)", False, marks=pytest.mark.slow),
        pytest.param("adapter", False, marks=pytest.mark.slow),
    ],
)
def test_trainer_and_pipeline(method: str, merges: bool, tickets: loading.TaskData, tmp_path: Path) -> None:
    """A stock Trainer lowers the loss, its checkpoint resumes, and a pipeline answers with the delta's labels.

    A checkpoint holds the delta alone, and so does `save_model` of what cannot be merged; both load with the base.
    """
    tokenizer = models.load_tokenizer("minilm")
    model = models.load_model("minilm", "classification", labels=tickets.labels)
    tuned = deltune.attach(model, method)
    rows = tickets.splits["train"].select(range(24))[:]
    train = Dataset.from_dict(
        {"input_ids": tokenizer(rows["text"], truncation=True)["input_ids"], "labels": rows["label"]}
    )
    arguments = TrainingArguments(
        str(tmp_path), max_steps=4, per_device_train_batch_size=24, learning_rate=1e-2, save_steps=2, report_to=[],
        disable_tqdm=True, seed=0, logging_steps=1,
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=arguments, train_dataset=train, data_collator=DataCollatorWithPadding(tokenizer),
    )  # fmt: skip
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]  # every step sees the same 24 rows
    after = {name: p.detach().clone() for name, p in tuned.named_trainable_parameters()}
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name, parameter in tuned.named_trainable_parameters():
        torch.testing.assert_close(parameter, after[name])
    model.eval()
    classify = pipeline("text-classification", model=model, tokenizer=tokenizer)
    answer = classify(rows["text"][0])[0]
    with torch.no_grad():
        logits = model(**tokenizer(rows["text"][0], return_tensors="pt")).logits
        assert answer["label"] == tickets.labels[int(logits.argmax())]
        with contextlib.nullcontext() if merges else pytest.warns(UserWarning, match="holds the delta alone"):
            trainer.save_model(str(tmp_path / "whole"))
        if merges:
            whole = type(model).from_pretrained(tmp_path / "whole").eval()
            torch.testing.assert_close(whole(**tokenizer(rows["text"][0], return_tensors="pt")).logits, logits)
        assert deltune.load(tmp_path / "whole").delta().method == tuned.delta().method
        assert (tmp_path / "checkpoint-4" / "model.safetensors").stat().st_size < 1_000_000  # the base has 90 MB
        again = deltune.load(tmp_path / "checkpoint-4")
        torch.testing.assert_close(again.model.eval()(**tokenizer(rows["text"][0], return_tensors="pt")).logits, logits)
    deltune.load(again.model, tmp_path / "checkpoint-2", name="earlier", use=False)
    assert again.active == "default" and again.names == ("default", "earlier")


@pytest.mark.parametrize("method", ["lora(rank=2)", "layernorm"])
@pytest.mark.parametrize(("family", "role"), [("bert", "sequence"), ("gpt2", "causal"), ("t5", "seq2seq")])
@pytest.mark.sample(5)
def test_checkpoints_are_loaded_without_a_warning(
    family: str, role: str, method: str, tmp_path: Path, capture_warnings: list[str]
) -> None:
    """A checkpoint of deltas lacks the base on purpose, and one name of a tied tensor stands for all of them."""
    model = build(FAMILIES[family], role)
    deltune.attach(model, method)
    inputs = batch(model, rows=4)
    words = inputs.get("decoder_input_ids", inputs["input_ids"])
    inputs["labels"] = torch.tensor([0, 1, 0, 1]) if role == "sequence" else words
    rows = [{name: value[i] for name, value in inputs.items()} for i in range(4)]
    arguments = TrainingArguments(
        str(tmp_path), num_train_epochs=3, per_device_train_batch_size=4, eval_strategy="epoch", save_strategy="epoch",
        load_best_model_at_end=True, learning_rate=2.0, report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    for checkpoint in (None, str(tmp_path / "checkpoint-2")):
        trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
        trainer.train(resume_from_checkpoint=checkpoint)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-5)
    assert [text for text in capture_warnings if "keys" in text] == []


@pytest.fixture
def capture_warnings() -> Iterator[list[str]]:
    """What transformers logs as a warning in a test."""
    texts: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    handler, level = Kept(), transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_warning()
    transformers.logging.add_handler(handler)
    yield texts
    transformers.logging.remove_handler(handler)
    transformers.logging.set_verbosity(level)


@pytest.mark.slow  # test_trainer_and_pipeline has a small case
@pytest.mark.parametrize(
    "method",
    [
        "prefix(length=8) + layernorm",
        "lora(rank=8, at=('query', 'value', 'ffn'))",
    ],
)
def test_g2p_with_seq2seq_trainer(method: str, shared: Path, tmp_path: Path) -> None:
    """A real small BART learns British pronunciation: exact match rises under generate, detach restores it exactly."""
    folder = shared / "models" / "g2p-en-us-bart"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder)

    def rows(split: str, count: int) -> list[dict[str, str]]:
        with gzip.open(shared / "data" / "g2p_us_to_gb" / f"{split}.jsonl.gz", "rt", encoding="utf-8") as file:
            return [json.loads(line) for line, _ in zip(file, range(count), strict=False)]

    def decoded(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    test = rows("test", 300)

    def answers() -> list[str]:
        model.eval()
        batch = tokenizer([r["source"] for r in test], return_tensors="pt", padding=True)
        output = model.generate(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=40, num_beams=1
        )
        return [decoded(ids) for ids in output]

    expected = [decoded(tokenizer(r["targets"][0])["input_ids"]) for r in test]
    before = answers()
    train = rows("train", 4000)
    encoded = Dataset.from_dict(
        {
            "input_ids": tokenizer([r["source"] for r in train])["input_ids"],
            "labels": tokenizer([r["targets"][0] for r in train])["input_ids"],
        }
    )
    deltune.attach(model, method)
    arguments = Seq2SeqTrainingArguments(
        str(tmp_path), num_train_epochs=2, per_device_train_batch_size=64, learning_rate=5e-3, report_to=[],
        save_strategy="no", disable_tqdm=True, seed=0,
    )  # fmt: skip
    Seq2SeqTrainer(
        model=model, args=arguments, train_dataset=encoded, data_collator=DataCollatorForSeq2Seq(tokenizer, model=model)
    ).train()
    after = answers()

    def exact(predicted: list[str]) -> float:
        return sum(a == b for a, b in zip(predicted, expected, strict=True)) / len(expected)

    assert exact(after) > exact(before) + 0.05
    deltune.tuned(model).detach()
    assert answers() == before


def test_a_model_of_diffusers_has_its_own_adapters() -> None:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=8, attention_head_dim=4,
        norm_num_groups=4, layers_per_block=1,
    )  # fmt: skip
    with pytest.raises(deltune.DeltuneError, match=r"UNet2DConditionModel: it has its own adapters \(add_adapter\)"):
        deltune.attach(model, "lora(rank=2)")
