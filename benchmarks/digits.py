"""Deltas on real images: scikit-learn's handwritten digits, by a small ViT and transformers' Trainer.

    python -m benchmarks.digits [--seeds 3]

The base learns the digits 0 to 4 from random weights, all of it trained. Then each method tunes it to tell 5, 6, 7, 8
and 9, which it has never seen. A quarter of the images of each digit is kept for the test. Printed are the scalars
trained (head apart) and the accuracy on the test images, with its spread over seeds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

import deltune

METHODS = ("head", "layernorm", "lora(rank=4)", "lora(rank=4) + layernorm", "prefix(length=4) + layernorm", "full")
LABELS = 5


def digits(first: int) -> tuple[Dataset, Dataset]:
    """Return the training and test images of five digits, from `first` on, with labels from 0."""
    data: Any = load_digits()
    chosen = (data.target >= first) & (data.target < first + LABELS)
    images = (data.images[chosen, None] / 8 - 1).astype(np.float32)  # 16 greys as -1 to 1; one channel
    labels = data.target[chosen] - first
    parts = train_test_split(images, labels, test_size=0.25, stratify=labels, random_state=0)
    rows = [
        Dataset.from_dict({"pixel_values": x, "labels": y}).with_format("torch")
        for x, y in ((parts[0], parts[2]), (parts[1], parts[3]))
    ]
    return rows[0], rows[1]


def small_vit() -> PreTrainedModel:
    """Return a ViT with random weights for images of 8 × 8: four layers of width 64, patches of 2 × 2."""
    config = AutoConfig.for_model(
        "vit", image_size=8, patch_size=2, num_channels=1, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=128, num_labels=LABELS,
    )  # fmt: skip
    return AutoModelForImageClassification.from_config(config)


def train(model: PreTrainedModel, first: int, epochs: float, lr: float, seed: int) -> float:
    """Train what can be trained on five digits, and return the accuracy on their test images."""
    rows, test = digits(first)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, num_train_epochs=epochs, per_device_train_batch_size=32, learning_rate=lr, seed=seed, use_cpu=True,
            save_strategy="no", report_to="none", disable_tqdm=True, logging_strategy="no", warmup_steps=20,
            per_device_eval_batch_size=512,
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        predictions = trainer.predict(test)
    labels: Any = predictions.label_ids
    return float((np.asarray(predictions.predictions).argmax(-1) == labels).mean())


def pretrained(seed: int) -> tuple[PreTrainedModel, float]:
    """Return a base that knows the digits 0 to 4, and its accuracy on them."""
    set_seed(seed)
    model = small_vit()
    return model, train(model, 0, epochs=30, lr=1e-3, seed=seed)


def tune(base: PreTrainedModel, method: str, seed: int, epochs: float = 30) -> tuple[float, int]:
    """Tune a base to five other digits, and leave it as it was.

    Returns:
        The accuracy on their test images, and the scalars that the method trains.
    """
    set_seed(seed)
    tuned = deltune.attach(base, method)
    with torch.no_grad():  # the labels are others, so the head begins anew
        for name, parameter in tuned.named_trainable_parameters():
            if name.startswith("classifier."):
                parameter.normal_(std=0.02) if parameter.ndim > 1 else parameter.zero_()
    accuracy = train(base, LABELS, epochs, lr=5e-4 if method == "full" else 5e-3, seed=seed)
    count = tuned.count().method
    tuned.detach()
    return accuracy, count


def main() -> None:
    """Measure all methods and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = range(parser.parse_args().seeds)
    bases = [pretrained(seed) for seed in seeds]
    print("| method | scalars | accuracy | spread |\n|---|---|---|---|")
    print(f"| the base, on 0 to 4 | | {statistics.mean(accuracy for _, accuracy in bases):.3f} | |")
    for method in METHODS:
        results = [tune(base, method, seed) for seed, (base, _) in enumerate(bases)]
        accuracies = [accuracy for accuracy, _ in results]
        spread = f"{min(accuracies):.3f} to {max(accuracies):.3f}"
        print(f"| `{method}` | {results[0][1]:,} | {statistics.mean(accuracies):.3f} | {spread} |", flush=True)


if __name__ == "__main__":
    main()
