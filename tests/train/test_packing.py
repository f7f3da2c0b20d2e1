"""Several texts in one row: none sees another, so that loss and gradients are those of the texts alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import deltune
import tiny
from deltune.errors import DeltuneError
from deltune.train.config import RunConfig
from deltune.train.data.packing import best_fit, choose_packing
from deltune.train.run import train
from deltune.train.tasks.encoding import IGNORE_INDEX, collate
from tables.families import FAMILIES
from tables.specimens import build

from .test_conversations import byte_tokenizer

KEPT_APART = {
    "llama": "none", "gpt2": "none", "gpt_neox": "none", "qwen3": "none", "mistral": "none", "gemma2": "none",
    "gptj": "none", "opt": "bool", "bloom": "", "bart": "",
}  # fmt: skip
"""Family -> what keeps texts of one row apart, as measured with transformers 5.23; "" if nothing does."""

METHODS = (
    "lora(rank=2)", "prefix(length=3)", "prompt(length=3)", "adapter(rank=4)", "layernorm", "ia3",
    "prefix(length=2) + lora(rank=2)",
)  # fmt: skip


def rows(seed: int = 0) -> list[dict[str, Any]]:
    """Rows of several lengths, of which a part is trained."""
    chance = random.Random(seed)
    made = []
    for length in (3, 11, 7, 5, 9, 4, 12, 6):
        ids = [chance.randint(3, 98) for _ in range(length)]
        labels = [token if i > length // 2 else IGNORE_INDEX for i, token in enumerate(ids)]
        made.append({"input_ids": ids, "attention_mask": [1] * length, "labels": labels})
    return made


class Padder:
    """Pads as a tokenizer does."""

    def pad(self, inputs: list[dict[str, Any]], max_length: int, **_: Any) -> dict[str, torch.Tensor]:
        return {
            name: torch.tensor([[*one[name], *[0] * (max_length - len(one[name]))] for one in inputs])
            for name in inputs[0]
        }


def loss_and_gradients(model: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loss = model(**batch).loss
    return loss.detach(), [g for g in torch.autograd.grad(loss, parameters, allow_unused=True) if g is not None]


@pytest.mark.parametrize("family", KEPT_APART)
def test_what_keeps_texts_apart_is_tried(family: str) -> None:
    model = build(FAMILIES[family], "causal", torch.float32)
    if KEPT_APART[family]:
        assert choose_packing(model, 0).mask == KEPT_APART[family]
    else:
        with pytest.raises(DeltuneError, match="see each other"):
            choose_packing(model, 0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "opt"])
def test_packed_texts_have_the_loss_and_gradients_of_texts_alone(family: str, method: str) -> None:
    model = build(FAMILIES[family], "causal", torch.float64)
    tuned = deltune.attach(model, method)
    with torch.no_grad():
        for parameter in tuned.trainable_parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)  # else many methods begin as the model
    packing, texts = choose_packing(model, 0), rows()
    bins = best_fit([len(text["input_ids"]) for text in texts], 24)
    assert len(bins) < len(texts)
    packed = packing.batch([[texts[i] for i in one] for one in bins], model.dtype)
    alone = collate(Padder(), model, texts)  # type: ignore[arg-type]
    (loss, gradients), (expected, expected_gradients) = (
        loss_and_gradients(model.train(mode), batch) for mode, batch in ((True, packed), (False, alone))
    )
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-8)
    for got, one in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(got, one, rtol=1e-5, atol=1e-8)


def test_no_text_is_split_and_little_room_is_left() -> None:
    chance = random.Random(0)
    lengths = [chance.randint(1, 30) for _ in range(200)]
    bins = best_fit([*lengths, 50], 32)
    assert sorted(i for one in bins for i in one) == list(range(201))
    assert [one for one in bins if sum([*lengths, 50][i] for i in one) > 32] == [[200]]
    assert len(bins) <= 1.1 * (sum(lengths) / 32) + 2


def test_a_run_is_the_same_packed_and_in_parts(tmp_path: Path) -> None:
    """A step has as many conversations, and its loss is the mean over its trained tokens, of which a row may have none.

    So is the loss of a validation, whatever its batches.
    """
    tokenizer = byte_tokenizer("plain")
    torch.manual_seed(0)
    sizes = {**tiny.FAMILIES["llama"], "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    chats = [
        {"messages": [{"role": "user", "content": "q" * (i % 7 + 1)}, {"role": "assistant", "content": "a" * (i % 5)}]}
        for i in range(12)
    ]
    for chat in chats[::4]:
        chat["messages"].pop()
    for split in ("train", "validation"):
        tiny.lines(tmp_path / "chats" / f"{split}.jsonl", chats)
    config = RunConfig.from_flat(
        model=str(tmp_path / "model"), data=str(tmp_path / "chats"), method="prefix(length=2) + lora(rank=2)", lr=1e-2,
        epochs=2, batch_size=6, device_batch_size=3, max_length=40,
    )  # fmt: skip
    losses = []
    for number, changes in enumerate(({}, {"packing": True}, {"device_batch_size": 1}, {"device_batch_size": 6})):
        metrics = train(config.replace(**changes), tmp_path / f"{number}", progress=False)
        log = tiny.objects(tmp_path / f"{number}" / "log.jsonl")
        losses.append([*(one["loss"] for one in log if "loss" in one), metrics.validation["loss"]])
    assert len(losses[0]) == 5
    for others in losses[1:]:
        assert others == pytest.approx(losses[0], rel=1e-4)
    alone = train(config.replace(batch_size=1, device_batch_size=1, epochs=1), tmp_path / "alone", progress=False)
    steps = [one["loss"] for one in tiny.objects(tmp_path / "alone" / "log.jsonl") if "loss" in one]
    assert steps.count(0) == 3 and alone.validation["loss"] > 0


def test_what_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    config = RunConfig.from_flat(
        model="minilm", data=str(tiny.data(tmp_path / "data")), method="layernorm", packing=True
    )
    with pytest.raises(DeltuneError, match="packing is for chat, generation, language by a decoder"):
        train(config, tmp_path / "run", progress=False)
