"""Laws of generation: caches, beams, sampling and padding change nothing about what a tuned model says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import deltune
from tables.families import FAMILIES, Family
from tables.methods import ABSOLUTE, NUMBERED, ONE_STACK, Need
from tables.specimens import batch, build, main_role, specimen, stir

NEW = 5
WAYS: dict[str, dict[str, Any]] = {
    "cached": {},
    "static cache": {"cache_implementation": "static"},
    "beam 3": {"num_beams": 3},
    "sampled": {"do_sample": True, "top_k": 20, "temperature": 2.0},
}
GENERATED: tuple[tuple[str, Need | None], ...] = (
    ("prefix(length=3)", None),
    ("prefix(length=3, gate=False) + layernorm", None),
    ("prefix(length=3, shift_positions=True)", NUMBERED),
    ("prompt(length=3)", None),
    ("prompt(length=3, positions='none')", ABSOLUTE),
    ("lora(rank=2)", None),
    ("adapter(rank=4)", None),
    ("loreft(rank=2, positions='first 2')", ONE_STACK),
    ("prefix(length=2) + prompt(length=3) + lora(rank=2) + layernorm", None),
)
HIDDEN = ("lora(rank=2, at='ffn')", "adapter(rank=4)", "prompt(length=3)")
"""Methods for families without the attention interface."""


def _generating() -> list[tuple[Family, str]]:
    cases = []
    for family in FAMILIES.values():
        if family.kind != "encoder":
            on = [text for text, need in GENERATED if need is None or need.holds(family)]
            cases += [(family, text) for text in (on if family.interface else HIDDEN)]
    return cases


GENERATING = pytest.mark.parametrize(
    ("family", "text"), _generating(), ids=[f"{f.name}: {text}" for f, text in _generating()]
)


@pytest.mark.parametrize("name", ["bart", "mbart", "pegasus", "marian", "blenderbot"])
@pytest.mark.parametrize("text", ["prompt(length=3)", "prompt(length=3, positions='none')"])
def test_decoders_of_encoder_decoders_on_their_own(name: str, text: str) -> None:
    """They count positions by the length of the cache, which has the rows of a prompt too."""
    model = build(FAMILIES[name], "causal")
    stir(deltune.attach(model, text), seed=1, size=0.3)
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])}
    cached, whole = (generate(model, inputs, use_cache=use_cache) for use_cache in (True, False))
    assert torch.equal(cached, whole)
    one = model(**inputs).logits[:, -1]
    assert torch.equal(whole[:, 0], one.argmax(-1))


def generate(model: PreTrainedModel, inputs: dict[str, Any], **options: Any) -> torch.Tensor:
    """Exactly NEW tokens after the prompt (or after the decoder's start)."""
    prompt = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
    torch.manual_seed(0)
    with torch.no_grad():
        output = model.generate(**prompt, max_new_tokens=NEW, min_new_tokens=NEW, **{"num_beams": 1, **options})
    return output[:, -NEW:]


def by_hand(model: PreTrainedModel, inputs: dict[str, Any]) -> torch.Tensor:
    """Greedy generation written out: the whole sequence again for every token, no cache, the likeliest token next."""
    banned = model.generation_config.eos_token_id
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    both = model.config.is_encoder_decoder
    start = torch.full((ids.shape[0], 1), model.generation_config.decoder_start_token_id) if both else ids
    for _ in range(NEW):
        arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": start}
        if not both:
            arguments = {"input_ids": start, "attention_mask": torch.ones_like(start)}
        with torch.no_grad():
            scores = model(**arguments, use_cache=False)["logits"][:, -1].clone()
        if banned is not None:
            scores[:, banned] = -torch.inf
        start = torch.cat([start, scores.argmax(-1, keepdim=True)], 1)
    return start[:, -NEW:]


@GENERATING
@pytest.mark.sample(14)
def test_caches_beams_and_sampling_agree(family: Family, text: str, subtests: pytest.Subtests) -> None:
    model = specimen(family.name, main_role(family))
    inputs = batch(model, pad=0)
    before = generate(model, inputs)
    tuned = stir(deltune.attach(model, text), size=0.5)
    with subtests.test("by hand"):
        assert torch.equal(generate(model, inputs, use_cache=False), by_hand(model, inputs))
    for way, options in WAYS.items():
        if way == "static cache" and not _takes_static_cache(model):
            continue  # transformers refuses it without any delta
        if way == "static cache" and "prompt" in text and family.config.get("sliding_window"):
            with pytest.raises(deltune.DeltuneError, match="sliding windows"):
                generate(model, inputs, **options)
            continue
        with subtests.test(way):
            plain = {k: v for k, v in options.items() if k != "cache_implementation"}
            uncached = generate(model, inputs, use_cache=False, **plain)
            assert torch.equal(generate(model, inputs, **options), uncached)
    tuned.detach()
    with subtests.test("detached"):
        assert torch.equal(generate(model, inputs), before)


def _takes_static_cache(model: PreTrainedModel) -> bool:
    tuned = deltune.tuned(model)
    with tuned.disable():
        try:
            generate(model, batch(model, pad=0), cache_implementation="static")
        except Exception:
            return False
    return True


@GENERATING
@pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "uncached"])
@pytest.mark.sample(18)
def test_padding_changes_nothing(family: Family, text: str, use_cache: bool) -> None:
    """A row of a padded batch (left for decoders, right for encoders) continues as it does alone. In float32: in
    float64 some families make a row that sees nothing NaN, and padded positions are such rows."""
    model = specimen(family.name, main_role(family), torch.float32)
    inputs = batch(model, rows=2, pad=0)
    tuned = stir(deltune.attach(model, text), size=0.5)
    short = {name: value[1:, :4] for name, value in inputs.items()}
    padded = {name: value.clone() for name, value in inputs.items()}
    gap, text_at = (slice(0, 3), slice(3, 7)) if family.kind == "decoder" else (slice(4, 7), slice(0, 4))
    padded["input_ids"][1, text_at] = short["input_ids"][0]
    padded["input_ids"][1, gap] = model.config.pad_token_id
    padded["attention_mask"][1, gap] = 0
    batched = scores(model, padded, use_cache)
    for row, alone in enumerate(({name: value[:1] for name, value in inputs.items()}, short)):
        assert torch.allclose(batched[row], scores(model, alone, use_cache)[0], rtol=1e-3, atol=1e-3)
    tuned.detach()


def scores(model: PreTrainedModel, inputs: dict[str, Any], use_cache: bool) -> torch.Tensor:
    """(B, NEW, vocabulary): what every next token was chosen by."""
    prompt = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
    options = {"use_cache": use_cache, "return_dict_in_generate": True, "output_logits": True, "num_beams": 1}
    with torch.no_grad():
        output = model.generate(**prompt, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, **options)
    return torch.stack(output.logits, 1)
