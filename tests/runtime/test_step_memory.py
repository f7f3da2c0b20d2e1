"""Where the memory of a step goes: predicted from a configuration as the allocator counts it on the live model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

import deltune
from benchmarks.memory import peak
from deltune.models import HEADS
from deltune.runtime import step_memory as module
from deltune.runtime.step_memory import CHECKPOINTING, StepTracker, checkpoint_activations, step_memory
from tables.families import FAMILIES
from tables.specimens import config, layers

ROWS, LENGTH = 4, 48
CASES = [(f, c) for f, family in FAMILIES.items() for c in CHECKPOINTING if c == "off" or family.checkpoints]
METHODS = ("lora(rank=2)", "full", "adapter(rank=4)", "dora(rank=2)", "ia3", "layernorm + prompt(length=3)")


def settings(family: str, **changes: Any) -> PreTrainedConfig:
    """Granite's default scale is 1, which the values of the logits do not show."""
    return config(FAMILIES[family], **changes, **({"logits_scaling": 3.0} if family == "granite" else {}))


def live(settings: PreTrainedConfig, checkpointing: str) -> tuple[PreTrainedModel, Any]:
    """A model that trains, and its loss of the batch that is predicted for."""
    _, head = module._text_model(settings)
    torch.manual_seed(0)
    model = getattr(transformers, HEADS[head].auto_class).from_config(copy.deepcopy(settings)).train()
    if every := CHECKPOINTING[checkpointing]:
        checkpoint_activations(model, every)
    batch = module._batch(settings, ROWS, LENGTH, head)
    plain = head == "classification"
    return model, lambda: model(**batch).loss if plain else deltune.causal_loss(model, batch)


@pytest.mark.sample(6)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("family", "checkpointing"), CASES)
def test_a_step_takes_what_was_predicted(family: str, checkpointing: str, method: str) -> None:
    """Of four layers, beside which a small tensor that is not predicted is no tenth of a step."""
    of_four = settings(family, **layers(FAMILIES[family], 4))
    model, loss = live(of_four, checkpointing)
    tuned = deltune.attach(model, method)
    optimizer = torch.optim.AdamW(tuned.trainable_parameters())

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    predicted = step_memory(of_four, method, ROWS, LENGTH, activation_checkpointing=checkpointing)
    assert predicted.step == pytest.approx(peak(step), rel=0.1)
    kept = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    values = [*model.parameters(), *model.buffers()]
    assert predicted.optimizer == kept and predicted.weights + predicted.delta == sum(v.nbytes for v in values)


def test_experts_are_grouped_without_numbers() -> None:
    settings = transformers.MixtralConfig(
        vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, pad_token_id=0,
    )  # fmt: skip
    model, loss = live(settings, "off")
    deltune.attach(model, "lora(rank=2)")
    loss()
    predicted = step_memory(settings, "lora(rank=2)", ROWS, LENGTH)
    assert predicted.step == pytest.approx(peak(lambda: loss().backward()), rel=0.1)


def test_measuring_changes_no_number_and_finds_what_was_predicted() -> None:
    losses = []
    for tracked in (False, True):
        model, loss = live(settings("llama"), "off")
        tuned = deltune.attach(model, "lora(rank=2)")
        optimizer = torch.optim.AdamW(tuned.trainable_parameters(), lr=0.1)
        tracker = StepTracker(model, tuned.anatomy)
        for first in (True, False):
            if first and tracked:
                loss()  # what is made once
                with tracker:
                    losses.append(loss())
                    losses.pop().backward()
                    optimizer.step()
                measured = tracker.peak(optimizer)
            else:
                loss().backward()
                optimizer.step()
            optimizer.zero_grad()
        losses.append(loss().detach())
    assert torch.equal(*losses)
    predicted = step_memory(settings("llama"), "lora(rank=2)", ROWS, LENGTH).as_dict()
    sizes = measured.as_dict()
    assert list(sizes["activations"]) == list(predicted["activations"]) == ["model.layers.0", "model.layers.1"]
    assert sizes["activations"] == pytest.approx(predicted["activations"], rel=0.1)
    assert all(sizes[name] == predicted[name] for name in ("weights", "delta", "optimizer"))


def test_options_change_what_they_are_for() -> None:
    sizes = {
        name: step_memory(settings("qwen2", num_hidden_layers=4), "lora(rank=2)", ROWS, LENGTH, **options)
        for name, options in {
            "plain": {}, "bf16": {"precision": "bf16"}, "half": {"activation_checkpointing": "half"},
            "on": {"activation_checkpointing": "on"},
        }.items()
    }  # fmt: skip
    steps = {name: memory.step for name, memory in sizes.items()}
    assert steps["on"] < steps["half"] < steps["plain"] > steps["bf16"]
    assert len({memory.weights for memory in sizes.values()}) == 1
    with pytest.MonkeyPatch.context() as limited:  # of this machine, which need not have what a step takes
        limited.setenv("DELTUNE_MEMORY_LIMIT", "1KiB")
        assert step_memory(settings("qwen2"), "full", ROWS, LENGTH).gradients
    lines = str(sizes["plain"]).splitlines()
    assert "activations of model.layers.0" in lines[4] and lines[-1].endswith("at the peak of a step")


def test_layers_below_what_is_trained_compute_nothing_again() -> None:
    """transformers asks for gradients of the embeddings, so that each layer would be computed again."""
    model, loss = live(settings("llama"), "on")
    deltune.attach(model, "lora(rank=2, layers=(1,))")
    calls: list[int] = []
    for i, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, i=i: calls.append(i))
    loss().backward()
    assert calls == [0, 1, 1]


def test_the_state_of_8_bits_is_that_of_bitsandbytes() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    bitsandbytes.optim.GlobalOptimManager.get_instance().initialize()  # what Trainers told it, by ids that recur
    wider = settings("llama", hidden_size=128)
    model, loss = live(wider, "off")
    optimizer = bitsandbytes.optim.AdamW8bit(list(deltune.attach(model, "full").trainable_parameters()))
    loss().backward()
    optimizer.step()
    kept = {id(v): v.nbytes for state in optimizer.state.values() for n, v in state.items() if n in STATE}
    predicted = step_memory(wider, "full", ROWS, LENGTH, optimizer="adamw_8bit").optimizer
    assert predicted == pytest.approx(sum(kept.values()), rel=0.01)


STATE = ("state1", "state2", "absmax1", "absmax2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "adam"}, "adamw_8bit"),
        ({"activation_checkpointing": "cpu"}, "half"),
        ({"batch_size": 0}, "at least 1"),
        ({"rows": 3}, "batch_size"),
    ],
)
def test_what_does_not_exist_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(deltune.DeltuneError, match=message):
        step_memory(settings("llama"), "lora(rank=2)", **options)
    with pytest.raises(deltune.DeltuneError, match="read text"):
        step_memory(transformers.ViTConfig(num_hidden_layers=1), "lora(rank=2)")
