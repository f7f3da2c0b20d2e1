"""sentence-transformers: what its classes save they read as what was trained; training, and the best checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from sentence_transformers import (
    CrossEncoder,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Dense, Pooling, Transformer
from transformers import TrainerCallback

import deltune
from deltune import models
from tables.specimens import stir

TEXTS = ["a man plays a guitar", "someone makes music", "a cat sleeps on the sofa", "the stock market fell"]


def sentence_model(folder: Path) -> SentenceTransformer:
    if not folder.exists():
        models.load_model("minilm", "base").save_pretrained(folder)
        models.load_tokenizer("minilm").save_pretrained(folder)
    transformer = Transformer(str(folder), max_seq_length=16)
    return SentenceTransformer(modules=[transformer, Pooling(384)], device="cpu")


def cross_encoder(folder: Path) -> CrossEncoder:
    if not folder.exists():
        models.load_model("minilm", "classification", labels=("no",)).save_pretrained(folder)
        models.load_tokenizer("minilm").save_pretrained(folder)
    return CrossEncoder(str(folder), device="cpu")


def encoded(model: Any) -> torch.Tensor:
    if isinstance(model, CrossEncoder):
        return torch.as_tensor(model.predict([(TEXTS[0], text) for text in TEXTS]))
    return torch.as_tensor(model.encode(TEXTS))


@pytest.mark.parametrize("make", [sentence_model, cross_encoder])
@pytest.mark.parametrize("method", ["lora(rank=4) + layernorm", "prefix(length=4)"])
def test_what_is_saved_is_read_as_what_was_trained(make: Any, method: str, tmp_path: Path) -> None:
    """Or it is not read at all, with a warning at once; deltune.load reads both."""
    model = make(tmp_path / "base")
    before = encoded(model)
    tuned = stir(deltune.attach(model, method))
    assert deltune.tuned(model) is tuned
    after = encoded(model)
    assert not torch.allclose(before, after, atol=1e-3)
    if method.startswith("prefix"):
        with pytest.warns(UserWarning, match="holds the delta alone"):
            model.save_pretrained(str(tmp_path / "saved"))
        with pytest.raises((OSError, ValueError)):
            type(model)(str(tmp_path / "saved"), device="cpu")
    else:
        model.save_pretrained(str(tmp_path / "saved"))
        torch.testing.assert_close(
            encoded(type(model)(str(tmp_path / "saved"), device="cpu")), after, atol=1e-5, rtol=0
        )
    again = make(tmp_path / "base")
    deltune.load(again, tmp_path / "saved")
    torch.testing.assert_close(encoded(again), after, atol=1e-5, rtol=0)


class Trainer(deltune.DeltaCheckpointMixin, SentenceTransformerTrainer):
    """Theirs, with checkpoints of deltas."""


class Stop(TrainerCallback):
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = True


def trainer(folder: Path, output: str, *callbacks: TrainerCallback, **options: Any) -> Trainer:
    """Four passes over two pairs, of a model with a tuned transformer and a dense layer that learns beside it."""
    torch.manual_seed(0)
    model = sentence_model(folder / "base")
    model.append(Dense(384, 8))
    deltune.attach(model, "lora(rank=4)")
    rows = Dataset.from_dict({"anchor": TEXTS[::2] * 4, "positive": TEXTS[1::2] * 4})
    arguments = SentenceTransformerTrainingArguments(
        str(folder / output), max_steps=6, per_device_train_batch_size=2, learning_rate=5e-2, report_to="none",
        disable_tqdm=True, save_steps=2, use_cpu=True, seed=0, **options,
    )  # fmt: skip
    return Trainer(
        model=model, args=arguments, train_dataset=rows, eval_dataset=rows, loss=MultipleNegativesRankingLoss(model),
        callbacks=[*callbacks],
    )  # fmt: skip


def trained(model: SentenceTransformer) -> dict[str, torch.Tensor]:
    return {name: one.detach() for name, one in model.named_parameters() if one.requires_grad}


def test_training_with_the_best_checkpoint(tmp_path: Path) -> None:
    run = trainer(tmp_path, "out", eval_steps=2, eval_strategy="steps", load_best_model_at_end=True)
    run.train()
    best = run.state.best_model_checkpoint
    assert best is not None and len(trained(run.model)) > 2
    expected = sentence_model(tmp_path / "base")
    deltune.load(expected, best)
    expected.append(Dense.load(f"{best}/2_Dense"))
    torch.testing.assert_close(encoded(run.model), encoded(expected), atol=1e-6, rtol=0)


def test_resuming_gives_what_an_uninterrupted_run_gives(tmp_path: Path) -> None:
    whole = trainer(tmp_path, "whole")
    whole.train()
    trainer(tmp_path, "cut", Stop()).train()
    assert [path.name for path in (tmp_path / "cut").glob("checkpoint-*")] == ["checkpoint-2"]
    resumed = trainer(tmp_path, "cut")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6
    torch.testing.assert_close(trained(resumed.model), trained(whole.model), atol=1e-6, rtol=0)


def test_setfit_saves_the_tuned_body_beside_its_head(tmp_path: Path) -> None:
    setfit = pytest.importorskip("setfit")
    sentence_model(tmp_path / "base").save(str(tmp_path / "body"))
    model = setfit.SetFitModel.from_pretrained(str(tmp_path / "body"), device="cpu")
    stir(deltune.attach(model.model_body, "lora(rank=4)"))
    model.model_head.fit(model.model_body.encode(TEXTS), [0, 1, 0, 1])
    expected = torch.as_tensor(model.predict_proba(TEXTS))
    model.save_pretrained(str(tmp_path / "saved"))
    again = setfit.SetFitModel.from_pretrained(str(tmp_path / "saved"), device="cpu")
    torch.testing.assert_close(torch.as_tensor(again.predict_proba(TEXTS)), expected, atol=1e-5, rtol=0)
