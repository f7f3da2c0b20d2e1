"""Laws of what stands around a prompt: caches that are passed on, several texts in a row, positions of several axes.

A prompt that starts from the embeddings of tokens (`init_from`) is these tokens before the text, which says what is
right without a second implementation.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    ContinuousBatchingConfig,
    DataCollatorWithFlattening,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    StaticCache,
)

import deltune
from runtime.identity.configurations import tiny
from runtime.identity.specimens import random_model
from tables.families import FAMILIES, Family
from tables.specimens import build, main_role, stir
from tables.versions import needs

PROMPT = "prompt(length=3)"
DECODERS = [family for family in FAMILIES.values() if family.kind == "decoder"]
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13, 14]])
TEXT, NEXT = IDS[:, :6], IDS[:, 6:]
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4, "pad_token_id": 0}


def tuned_model(family: str, method: str = PROMPT) -> tuple[PreTrainedModel, deltune.Tuned]:
    model = build(FAMILIES[family], main_role(FAMILIES[family])).eval()
    return model, stir(deltune.attach(model, method, name="a"), size=0.5)


def generate(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> Any:
    mask = options.pop("attention_mask", torch.ones_like(ids))
    return model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **GREEDY, **options)


CACHES: dict[str, Callable[[PreTrainedModel], Any]] = {
    "made by the model": lambda model: None,
    "dynamic": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=40),
}


@pytest.mark.parametrize("family", DECODERS, ids=[family.name for family in DECODERS])
@pytest.mark.parametrize("made", CACHES)
@pytest.mark.sample(12)
@torch.no_grad()
def test_a_second_turn_is_the_whole_text_read_at_once(family: Family, made: str) -> None:
    model, _ = tuned_model(family.name)
    cache = CACHES[made](model)
    if made == "static" and family.config.get("sliding_window"):
        with pytest.raises(deltune.DeltuneError, match="sliding windows"):
            generate(model, TEXT, past_key_values=cache)
        return
    cache = model(TEXT, past_key_values=cache, use_cache=True).past_key_values
    assert cache.get_seq_length() == 6
    following = copy.deepcopy(cache)
    whole = generate(model, IDS, use_cache=False).sequences
    turn = generate(model, IDS, past_key_values=cache)
    assert torch.equal(turn.sequences, whole)
    third = torch.cat([turn.sequences, IDS[:, :3]], 1)
    expected = generate(model, third, use_cache=False).sequences
    assert torch.equal(generate(model, third, past_key_values=turn.past_key_values).sequences, expected)
    if made != "static":  # whose masks `generate` prepares
        logits = model(IDS, use_cache=False).logits[:, 6:]
        torch.testing.assert_close(model(NEXT, past_key_values=following).logits, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"prefill_chunk_size": 2}, marks=needs("transformers", "5.23"), id="prefill_chunk_size"),
        {"num_beams": 3},
        {"prompt_lookup_num_tokens": 3},
        {"assistant": PROMPT},
    ],
    ids=lambda options: next(iter(options)),
)
@torch.no_grad()
def test_who_reads_the_length_of_the_cache(options: dict[str, Any]) -> None:
    model, _ = tuned_model("llama")
    if text := options.get("assistant"):
        options = {"assistant_model": tuned_model("llama", text)[0]}
    cache = model(TEXT, use_cache=True).past_key_values
    whole = generate(model, IDS, use_cache=False, num_beams=options.get("num_beams", 1)).sequences
    assert torch.equal(generate(model, IDS, **options).sequences, whole)
    if "prefill_chunk_size" in options:  # the others read a cache that they are given wrongly without any delta
        assert torch.equal(generate(model, IDS, past_key_values=cache, **options).sequences, whole)


@pytest.mark.parametrize("names", [None, ("a", "b"), (None, "b")], ids=str)
@torch.no_grad()
def test_a_second_turn_of_a_padded_batch(names: tuple[str | None, ...] | None) -> None:
    model, tuned = tuned_model("llama")
    stir(deltune.attach(model, "prompt(length=5)", name="b"), seed=2, size=0.5).use("a")
    ids = torch.tensor([[0, 0, 7, 8, 9, 10], [5, 6, 7, 8, 9, 10]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    with tuned.rows(list(names)) if names else contextlib.nullcontext():
        turn = generate(model, ids, attention_mask=mask)
        ids = torch.cat([turn.sequences, torch.tensor([[3, 4], [4, 3]])], 1)
        mask = torch.cat([mask, torch.ones(2, 6, dtype=torch.long)], 1)
        expected = generate(model, ids, attention_mask=mask, use_cache=False).sequences
        second = generate(model, ids, attention_mask=mask, past_key_values=turn.past_key_values)
    assert torch.equal(second.sequences, expected)


CONTINUED: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda cache: cache,
    "copied": copy.deepcopy,
    "pickled": lambda cache: pickle.loads(pickle.dumps(cache)),
}


@pytest.mark.parametrize("way", CONTINUED)
@pytest.mark.parametrize(
    "arguments",
    [{}, {"attention_mask": torch.ones(1, 10, dtype=torch.long)}, {"position_ids": torch.arange(6, 10)[None]}],
    ids=["alone", "mask", "positions"],
)
@torch.no_grad()
def test_a_cache_that_is_passed_on(way: str, arguments: dict[str, Any]) -> None:
    model, tuned = tuned_model("llama")
    expected = model(IDS, use_cache=False).logits
    cache = CONTINUED[way](model(TEXT, use_cache=True).past_key_values)
    torch.testing.assert_close(model(NEXT, past_key_values=cache, **arguments).logits, expected[:, 6:])
    cache.crop(-5)
    with tuned.rows(["a"]):
        torch.testing.assert_close(model(IDS[:, 5:], past_key_values=cache).logits, expected[:, 5:])


@needs("transformers", "5.23")  # a cache of 5.17 keeps its length when it is reset
@torch.no_grad()
def test_a_cache_that_is_reset() -> None:
    model, tuned = tuned_model("llama")
    expected = model(IDS, use_cache=False).logits
    cache = model(TEXT, use_cache=True).past_key_values
    cache.reset()
    torch.testing.assert_close(model(TEXT, past_key_values=cache).logits, expected[:, :6])
    cache.reset()
    with tuned.disable():
        torch.testing.assert_close(model(TEXT, past_key_values=cache).logits, model(TEXT).logits)
        assert cache.get_seq_length() == 6


@torch.no_grad()
def test_a_cache_of_another_delta_is_refused() -> None:
    model, tuned = tuned_model("llama")
    deltune.attach(model, PROMPT, name="b")
    tuned.use("a")
    of_a = model(TEXT, use_cache=True).past_key_values
    with tuned.disable():
        of_base = model(TEXT, use_cache=True).past_key_values

    def refused(cache: Any, says: str, **arguments: Any) -> None:
        for run in (
            lambda c: model(NEXT, past_key_values=c, **arguments),
            lambda c: generate(model, IDS, past_key_values=c),
        ):
            with pytest.raises(deltune.DeltuneError, match=says):
                run(copy.deepcopy(cache))

    refused(of_base, "read with no prompt")
    tuned.use("b")
    refused(of_a, "read with another prompt")
    tuned.use("a")
    with tuned.rows(["b"]):
        refused(of_a, "read with another prompt")
    with tuned.disable():
        refused(of_a, "holds the 3 rows of a prompt")
    cropped = copy.deepcopy(of_a)
    cropped.crop(-7)
    refused(cropped, "a part of the prompt")
    for columns in (4, 13):
        with pytest.raises(deltune.DeltuneError, match=f"{columns} columns for 10 tokens"):
            model(NEXT, past_key_values=copy.deepcopy(of_a), attention_mask=torch.ones(1, columns, dtype=torch.long))
    tuned.detach("a")
    tuned.detach("b")
    refused(of_a, "holds the 3 rows of a prompt")


@torch.no_grad()
def test_states_that_do_not_say_what_they_have_read() -> None:
    model = random_model("MambaForCausalLM", tiny("mamba"))
    with_tokens = model(torch.cat([torch.tensor([[20, 21]]), IDS], 1)).logits[:, 2:]
    deltune.attach(model, "prompt(length=2, init_from=(20, 21))")
    torch.testing.assert_close(model(IDS).logits, with_tokens)
    with pytest.raises(deltune.DeltuneError, match="use_cache=False"):
        generate(model, IDS)
    generate(model, IDS, use_cache=False)


def test_layers_that_read_token_ids() -> None:
    with pytest.raises(deltune.DeltuneError, match="reads the token ids again"):
        deltune.attach(random_model("Gemma3nForCausalLM", tiny("gemma3n_text")), PROMPT)


# -- several texts in a row

RESTARTED = torch.tensor([[0, 1, 2, 0, 1]])
FIVE = IDS[:, :5]
SEQUENCES = torch.tensor([0, 3, 5], dtype=torch.int32)
PACKED: dict[str, dict[str, Any]] = {
    "positions": {"position_ids": RESTARTED},
    "positions and a cache": {"position_ids": RESTARTED, "use_cache": True},
    "positions and a mask": {"position_ids": RESTARTED, "attention_mask": torch.ones_like(FIVE)},
    "positions of one of two rows": {
        "input_ids": FIVE.expand(2, -1), "position_ids": torch.cat([RESTARTED, torch.arange(5)[None]]),
    },
    "two texts of one token": {"input_ids": FIVE[:, :2], "position_ids": torch.tensor([[0, 0]])},
    "a gap": {"position_ids": torch.tensor([[0, 1, 2, 7, 8]])},
    "lengths": {"cu_seq_lens_q": SEQUENCES, "cu_seq_lens_k": SEQUENCES, "max_length_q": 3, "max_length_k": 3},
    "numbers": {"seq_idx": torch.tensor([[0, 0, 0, 1, 1]])},
    "a collator": DataCollatorWithFlattening()([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]),
}  # fmt: skip


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("method", [PROMPT, "prompt(length=3) + lora(rank=2)"])
def test_packed_rows_are_refused(kind: str, method: str) -> None:
    model, tuned = tuned_model("llama", method)
    arguments = {"input_ids": FIVE, "use_cache": False, **PACKED[kind]}
    with pytest.raises(deltune.DeltuneError, match="holds several texts"):
        model(**arguments)
    with tuned.disable():
        model(**arguments)


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_packed_rows_of_encoders_are_refused(family: str) -> None:
    model, _ = tuned_model(family)
    arguments = {"position_ids": RESTARTED} if family == "bert" else {"cu_seq_lens_q": SEQUENCES}
    encoder = model.get_encoder() if family == "t5" else model
    with pytest.raises(deltune.DeltuneError, match="holds several texts"):
        encoder(input_ids=FIVE, **arguments)


@pytest.mark.parametrize("shown", [slice(0, 3), slice(2, 5)], ids=["right", "left"])
@torch.no_grad()
def test_positions_of_padding_are_no_texts(shown: slice) -> None:
    model, _ = tuned_model("llama")
    mask, positions = torch.zeros_like(FIVE), torch.zeros_like(FIVE)
    mask[:, shown], positions[:, shown] = 1, torch.arange(3)
    logits = model(FIVE, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, shown]
    torch.testing.assert_close(logits, model(FIVE[:, shown], use_cache=False).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", [PROMPT, "prefix(length=3)", "prefix(length=3, shift_positions=True)"])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32], ids=str)
@torch.no_grad()
def test_each_text_sees_the_prompt_under_a_mask_of_blocks(method: str, kind: torch.dtype) -> None:
    """A prefix also without a mask, where transformers makes one from the positions."""
    model, _ = tuned_model("llama", method)
    model.float()
    same = torch.tensor([0, 0, 0, 1, 1])
    blocks = (same[:, None] == same) & torch.ones(5, 5, dtype=torch.bool).tril()
    mask = blocks if kind == torch.bool else torch.zeros(5, 5).masked_fill(~blocks, torch.finfo(kind).min)
    for attention_mask_4d in (mask[None, None], *([None] if method != PROMPT else [])):
        packed = model(FIVE, position_ids=RESTARTED, attention_mask=attention_mask_4d, use_cache=False).logits
        for text in (slice(0, 3), slice(3, 5)):
            alone = model(FIVE[:, text], use_cache=False).logits
            torch.testing.assert_close(packed[:, text], alone, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_masks_of_encoders() -> None:
    model, _ = tuned_model("bert")
    expected = model(FIVE).logits
    broadcast = model(FIVE, attention_mask=torch.ones(1, 1, 1, 5, dtype=torch.bool)).logits
    torch.testing.assert_close(broadcast, expected)
    with pytest.raises(deltune.DeltuneError, match="does not say what its rows see"):
        model(FIVE, attention_mask=torch.ones(1, 1, 5, 5, dtype=torch.bool))


@torch.no_grad()
def test_outputs_of_an_encoder_are_passed_on() -> None:
    model, tuned = tuned_model("t5")
    mask, start = torch.ones_like(FIVE), torch.tensor([[3, 4]])
    expected = model(FIVE, attention_mask=mask, decoder_input_ids=start).logits
    encoded = model.get_encoder()(FIVE, attention_mask=mask)
    decoder_inputs = {"attention_mask": mask, "decoder_input_ids": start}
    torch.testing.assert_close(model(encoder_outputs=encoded, **decoder_inputs).logits, expected)
    with tuned.disable():
        of_base = model.get_encoder()(FIVE, attention_mask=mask)
        with pytest.raises(deltune.DeltuneError, match="8 states of the encoder"):
            model(encoder_outputs=encoded, **decoder_inputs)
    with pytest.raises(deltune.DeltuneError, match="5 states of the encoder"):
        model(encoder_outputs=of_base, **decoder_inputs)


@pytest.mark.parametrize(
    ("method", "reason"),
    [("prompt(length=3)", "packs several texts"), ("prefix(length=3)", "no prefix"), ("lora(rank=2)", "")],
)
def test_continuous_batching_gives_the_texts_of_generate_or_is_refused(method: str, reason: str) -> None:
    model = build(FAMILIES["llama"], "causal")
    stir(deltune.attach(model, method))
    ways = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=16)
    refused = pytest.raises(deltune.DeltuneError, match=f"generate_batch .*{reason}")
    with refused if reason else contextlib.nullcontext():
        (answer,) = model.generate_batch([[5, 6, 7]], ways, small).values()
        expected = model.generate(torch.tensor([[5, 6, 7]]), generation_config=ways)[0, 3:]
        assert answer.generated_tokens == expected.tolist()


# -- positions of several axes

IMAGE = 95
_IDS = {"image_token_id": IMAGE, "video_token_id": 96, "vision_start_token_id": 97, "vision_end_token_id": 98}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_PICTURE = {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "intermediate_size": 32}
VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {**_PICTURE, "embed_dim": 32, "mlp_ratio": 2},
    "qwen2_5_vl": {**_PICTURE, "out_hidden_size": 32, "fullatt_block_indexes": [0]},
    "qwen3_vl": {
        **_PICTURE, "out_hidden_size": 32, "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
    },
}  # fmt: skip
CLASSES = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}
BEFORE = torch.tensor([[11, 12, 13]])
WITH_IMAGE = torch.tensor([[5, 97, IMAGE, IMAGE, IMAGE, IMAGE, 98, 6, 7, 8]])


def with_images(family: str) -> PreTrainedModel:
    text = {"rope_parameters": _ROPE, "vocab_size": 100, "head_dim": 8}
    usual = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = tiny(family, text_config={**usual, "num_key_value_heads": 2, **text}, vision_config=VISION[family], **_IDS)
    return random_model(CLASSES[family], config, noise=0.2)


def pictured(ids: torch.Tensor) -> dict[str, Any]:
    """A picture in each row that has a place for it."""
    made = torch.Generator().manual_seed(0)
    pixels, sizes = torch.randn(16, 96, generator=made), torch.tensor([[1, 4, 4]])
    rows = int((ids == IMAGE).any(1).sum())
    if not rows:
        return {"input_ids": ids}
    return {
        "input_ids": ids, "mm_token_type_ids": (ids == IMAGE).int(), "pixel_values": pixels.repeat(rows, 1),
        "image_grid_thw": sizes.repeat(rows, 1),
    }  # fmt: skip


@pytest.mark.parametrize("family", VISION)
@pytest.mark.parametrize("ids", [IDS, WITH_IMAGE], ids=["text", "image"])
@torch.no_grad()
def test_positions_of_several_axes(family: str, ids: torch.Tensor) -> None:
    model = with_images(family)
    tokens = torch.cat([BEFORE, ids], 1)
    expected = model(**pictured(tokens)).logits[:, 3:]
    written = model.generate(**pictured(tokens), **GREEDY)[:, 13:]
    tuned = deltune.attach(model, "prompt(length=3, init_from=(11, 12, 13))")
    torch.testing.assert_close(model(**pictured(ids)).logits, expected, rtol=1e-4, atol=1e-5)
    first = model.generate(**pictured(ids), return_dict_in_generate=True, **GREEDY)
    assert torch.equal(first.sequences[:, 10:], written)
    padded = torch.cat([torch.zeros_like(BEFORE), ids], 1)
    both, mask = torch.cat([padded, padded]), (torch.cat([padded, padded]) != 0).long()
    answers = model.generate(**pictured(both), attention_mask=mask, **GREEDY)
    assert torch.equal(answers[:, 13:], written.expand(2, -1))
    # a second turn
    ids = torch.cat([first.sequences, IDS[:, :4]], 1)
    more = pictured(ids)
    with tuned.disable():
        written = model.generate(**pictured(torch.cat([BEFORE, ids], 1)), **GREEDY)[:, -4:]
    model.generate(**pictured(ids[:, :10]), **GREEDY)  # the model remembers what is due to the last picture
    more.pop("pixel_values", None)
    second = model.generate(**more, past_key_values=first.past_key_values, **GREEDY)
    assert torch.equal(second[:, -4:], written)
    for axes in (3, 4):
        with pytest.raises(deltune.DeltuneError, match="holds several texts"):
            model(IDS[:, :5], position_ids=RESTARTED.expand(axes, 1, -1), use_cache=False)


@torch.no_grad()
def test_shifted_positions_of_several_axes_by_row() -> None:
    model = with_images("qwen3_vl")
    tuned = deltune.attach(model, "prefix(length=3, shift_positions=True)", name="a")
    stir(deltune.attach(model, "lora(rank=2)", name="b"))
    alone = torch.cat([tuned.use(name).model(**pictured(WITH_IMAGE)).logits for name in ("a", "b")])
    with tuned.rows(["a", "b"]):
        in_batch = model(**pictured(WITH_IMAGE.expand(2, -1))).logits
    torch.testing.assert_close(in_batch, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [64, 6])
@torch.no_grad()
def test_masks_that_a_model_around_the_stack_prepares(window: int) -> None:
    text = {**tiny("gemma3_text").to_dict(), "sliding_window": window}
    config = tiny("gemma3", text_config=text)
    model = random_model("Gemma3ForConditionalGeneration", config)
    expected = model(torch.cat([BEFORE, IDS], 1)).logits[:, 3:]
    written = generate(model, torch.cat([BEFORE, IDS], 1)).sequences[:, 3:]
    deltune.attach(model, "prompt(length=3, init_from=(11, 12, 13))")
    if window < 13:
        with pytest.raises(deltune.DeltuneError, match="more than a window of 6"):
            model(IDS)
        return
    torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-4, atol=1e-5)
    turn = generate(model, IDS[:, :7])
    assert torch.equal(generate(model, IDS).sequences, written)
    ids = torch.cat([turn.sequences, IDS[:, :2]], 1)
    whole = generate(model, ids, use_cache=False).sequences
    assert torch.equal(generate(model, ids, past_key_values=turn.past_key_values).sequences, whole)
