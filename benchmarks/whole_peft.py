"""The other side of a whole run: PEFT and Trainer as their guides have it, batches in random order, each padded to its
longest row.

    python -m benchmarks.whole_peft MODEL DATA OUTPUT --epochs 3 --seed 0

DATA: a folder of train.jsonl, validation.jsonl, test.jsonl with text, label and perhaps pair.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import transformers
from datasets import load_dataset


def begin(description: str | None, epochs: int, kinds: Sequence[str] = ()) -> tuple[argparse.Namespace, Any]:
    """Return the options of the command and the rows of its splits, with the random numbers seeded."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if kinds:
        parser.add_argument("kind", choices=kinds)
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--length", type=int, default=128, help="the most tokens of a row")
    options = parser.parse_args()
    transformers.set_seed(options.seed)
    files = {split: str(options.data / f"{split}.jsonl") for split in ("train", "validation", "test")}
    return options, load_dataset("json", data_files=files, cache_dir=str(options.output / "cache"))


def main() -> None:
    options, data = begin(__doc__, 3)
    texts = [name for name in ("text", "pair") if name in data["train"].column_names]
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)

    def encode(rows: dict[str, Any]) -> Any:
        return tokenizer(*(rows[name] for name in texts), truncation=True, max_length=options.length)

    data = data.map(encode, batched=True, remove_columns=texts)
    labels = len(set(data["train"]["label"]))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=labels)
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=8))
    arguments = transformers.TrainingArguments(
        output_dir=str(options.output), num_train_epochs=options.epochs, per_device_train_batch_size=32,
        learning_rate=1e-3, seed=options.seed, eval_strategy="epoch", save_strategy="epoch", report_to="none",
        load_best_model_at_end=True, metric_for_best_model="accuracy", disable_tqdm=True,
    )  # fmt: skip

    def accuracy(predicted: Any) -> dict[str, float]:
        return {"accuracy": float(np.mean(predicted.predictions.argmax(-1) == predicted.label_ids))}

    trainer = transformers.Trainer(
        model, arguments, train_dataset=data["train"], eval_dataset=data["validation"], processing_class=tokenizer,
        data_collator=transformers.DataCollatorWithPadding(tokenizer), compute_metrics=accuracy,
    )  # fmt: skip
    trainer.train()
    metrics = trainer.predict(data["test"]).metrics
    (options.output / "found.json").write_text(json.dumps(metrics), encoding="utf-8")


if __name__ == "__main__":
    main()
