"""Where a prompt begins and which tokens end an answer: the same in training, in generation and in serving.

A prompt is what its author wrote, behind what the tokenizer writes before every text. Training writes an end behind
each target, and an answer ends at any of the tokens by which tokenizer, model or chat template end one.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from typing import Any

Tokens = tuple[int, ...]


def surrounding_tokens(tokenizer: Any, side: str = "text") -> tuple[Tokens, Tokens]:
    """Return the tokens that a tokenizer writes before and behind every text."""
    text = string.ascii_letters + string.digits
    whole = tokenizer(**{side: text})["input_ids"]
    inner = tokenizer(**{side: text}, add_special_tokens=False)["input_ids"]
    start = max(i for i in range(len(whole) - len(inner) + 1) if whole[i : i + len(inner)] == inner)
    return tuple(whole[:start]), tuple(whole[start + len(inner) :])


def tokenize_prompts(tokenizer: Any, prompts: Sequence[str], side: str = "text") -> list[Tokens]:
    """Tokenize texts that are to be continued.

    What the tokenizer writes before a text stands before each prompt once, also where its author wrote it. Nothing
    stands behind a prompt but what its author wrote.
    """
    before, _ = surrounding_tokens(tokenizer, side)
    tokenized = tokenizer(**{side: list(prompts)}, add_special_tokens=False, verbose=False)["input_ids"]
    rows = [tuple(map(int, ids)) for ids in tokenized]
    return [ids if ids[: len(before)] == before else before + ids for ids in rows]


def begin_token(tokenizer: Any) -> int | None:
    """Return the token that begins a text; the end-of-text token of a tokenizer that has no other, or None."""
    tokens = (tokenizer.bos_token_id, tokenizer.cls_token_id, tokenizer.eos_token_id)
    return next((int(token) for token in tokens if token is not None), None)


def end_tokens(tokenizer: Any, model: Any) -> Tokens:
    """Return the tokens that end an answer.

    They are the tokenizer's end-of-text token, the token that it writes behind texts, the `eos_token_id` of the model's
    generation config and configuration, and the token that the chat template writes behind an answer. A number that
    only the configuration's class gives is none of them where the tokenizer has an ordinary text for it.
    """
    declared = as_ids(getattr(getattr(model, "generation_config", None), "eos_token_id", None))
    if tokenizer is None:
        return declared
    config = model.config.get_text_config()
    _, behind = surrounding_tokens(tokenizer, "text_target" if model.config.is_encoder_decoder else "text")
    eos = as_ids(tokenizer.eos_token_id)
    written = () if set(eos) & set(behind) else behind[:1]
    declared += tuple(token for token in as_ids(config.eos_token_id) if token not in declared)
    default = getattr(type(config), "eos_token_id", None)
    known = [token for token in declared if token != default or not _is_ordinary(tokenizer, token)]
    candidates = dict.fromkeys([*written, *eos, *known, *_answer_end(tokenizer)])
    return tuple(token for token in candidates if token < config.vocab_size)


def target_end(tokenizer: Any, model: Any, side: str = "text") -> Tokens:
    """Return what training writes behind a target: what the tokenizer writes there, else the first of `end_tokens`.

    It is empty where neither tokenizer nor model has a token that ends a text.
    """
    return surrounding_tokens(tokenizer, side)[1] or end_tokens(tokenizer, model)[:1]


def cut_at_end(tokens: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Return the tokens before the first that ends an answer."""
    stop = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return list(tokens[:stop])


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the tokens that `skip_special_tokens` leaves out of a text, with their names."""
    tokens = {*tokenizer.all_special_ids, *(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)}
    return {int(token): str(tokenizer.convert_ids_to_tokens(token)) for token in sorted(tokens)}


def _answer_end(tokenizer: Any) -> Iterator[int]:
    """Yield the special token that a chat template writes behind an answer, if there is one."""
    if not getattr(tokenizer, "chat_template", None):
        return
    answer = "0123456789"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # a template may raise anything; whoever chats is told what it says
        return
    special = special_tokens(tokenizer)
    rest = text.rpartition(answer)[2] if answer in text else ""
    yield from [token for token in tokenizer(rest, add_special_tokens=False)["input_ids"] if token in special][:1]


def as_ids(value: int | Sequence[int] | None) -> Tokens:
    """Return the tokens of an `eos_token_id`."""
    if value is None:
        return ()
    return (int(value),) if isinstance(value, int) else tuple(map(int, value))


def _is_ordinary(tokenizer: Any, token: int) -> bool:
    """Whether a token stands for a text that anybody may write."""
    if token in special_tokens(tokenizer):
        return False
    return list(tokenizer(tokenizer.decode([token]), add_special_tokens=False)["input_ids"]) == [token]
