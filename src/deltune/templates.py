"""Where a prompt begins and which tokens end an answer: the same in training, in generation and in serving.

A prompt is what its author wrote, behind what the tokenizer writes before every text. Training writes an end behind
each target, and an answer ends at any of the tokens by which tokenizer, model or chat template end one.
"""

from __future__ import annotations

import copy
import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import DeltuneError, error_summary, unknown_name
from .files import user_path

Tokens = tuple[int, ...]


def split_words(text: str) -> list[tuple[int, int]]:
    """Return where the words and the marks between them begin and end, as texts with spans are split."""
    return [match.span() for match in re.finditer(r"\w+|[^\w\s]", text)]


def words_to_tag(text: str, columns: Mapping[str, str]) -> list[str]:
    """Return the words of a text for a tagger that was trained on these columns: without spans, split at blanks."""
    return [text[i:j] for i, j in split_words(text)] if "spans" in columns else text.split()


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


def chat_prompt(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Any = None, template: str | None = None
) -> list[int]:
    """Return the tokens of a conversation up to where the next answer begins; control tokens in questions are text.

    The chat template is the one that is given, or else the tokenizer's.

    Raises:
        Exception: Whatever the chat template raises.
        DeltuneError: The tokenizer cannot read a control token as text.
    """
    broken, sentinel = break_control_tokens(special_tokens(tokenizer).values(), messages)
    text = tokenizer.apply_chat_template(
        broken, tools=tools, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    ids = [int(i) for i in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
    return without_sentinel(tokenizer, ids, sentinel, text.count(sentinel)) if sentinel else ids


def question(instruction: str, more: str = "") -> dict[str, str]:
    """Return a message of a user, of an instruction and what it is about, which some templates keep apart as input."""
    if not more:
        return {"role": "user", "content": instruction}
    return {"role": "user", "content": f"{instruction}\n{more}" if instruction else more, "input": more}


def input_of(message: Mapping[str, Any]) -> str:
    """Return the field `input` of a message, or "" if it is no text."""
    more = message.get("input")
    return more if isinstance(more, str) else ""


def has_control_tokens(names: Iterable[str], text: str) -> bool:
    """Return whether a text contains the text of a control token."""
    return any(name in text for name in names)


def break_control_tokens(
    names: Iterable[str], messages: Sequence[Mapping[str, Any]]
) -> tuple[list[Mapping[str, Any]], str]:
    """Break up the texts of control tokens in all messages but answers, by a letter that the messages do not have.

    Returns:
        The messages, and the letter, which is to be taken out of the tokens again (`without_sentinel`); "" without any.
    """
    pattern = re.compile("|".join(sorted(map(re.escape, names), key=len, reverse=True)) or "(?!)")
    is_broken = [one["role"] != "assistant" and pattern.search(str(one["content"])) for one in messages]
    if not any(is_broken):
        return list(messages), ""
    letters = str([one["content"] for one in messages])
    sentinel = next(letter for letter in map(chr, range(0xE000, 0xF8FF)) if letter not in letters)

    def broken_text(text: str) -> str:
        return pattern.sub(lambda m: m[0][0] + sentinel + m[0][1:], text)

    broken = [
        {**one, **{name: broken_text(str(one[name])) for name in ("content", *(["input"] if input_of(one) else []))}}
        if breaks
        else one
        for one, breaks in zip(messages, is_broken, strict=True)
    ]
    return broken, sentinel


def without_sentinel(tokenizer: Any, ids: Sequence[int], sentinel: str, count: int) -> list[int]:
    """Return tokens without those of a letter that stood so often in their text."""
    alone, between = (list(row) for row in tokenizer(["a", f"a{sentinel}a"], add_special_tokens=False)["input_ids"])
    letter = between[len(alone) : len(between) - 1]
    kept: list[int] = []
    for token in ids:
        kept.append(int(token))
        if kept[-len(letter) :] == letter:
            del kept[-len(letter) :]
            count -= 1
    if count or not letter:
        raise DeltuneError("a question contains control tokens, which this tokenizer cannot read as text")
    return kept


@dataclass(frozen=True)
class NamedTemplate:
    """A chat template for models whose tokenizer has none, and the tokens that it needs; "eos" is the tokenizer's."""

    text: str
    needs: tuple[str, ...] = ("eos",)


NAMED_TEMPLATES = {
    "roles": NamedTemplate(  # a line end behind a name, since many tokenizers join a blank and the next word
        "{{ bos_token }}{% for message in messages %}"
        "{{ {'system': 'System', 'user': 'User', 'assistant': 'Assistant', 'tool': 'Tool'}[message['role']] }}:"
        "{{ '\n' }}{{ message['content'] }}{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}Assistant:{{ '\n' }}{% endif %}"
    ),
    "alpaca": NamedTemplate(  # Stanford's two prompts, with and without an input
        "{% set inputs = messages | selectattr('role', 'equalto', 'user') | map(attribute='input') | list %}"
        "{{ bos_token }}{% if messages[0]['role'] != 'system' %}Below is an instruction that describes a task"
        "{% if inputs and inputs[-1] is string and inputs[-1] %}, paired with an input that provides further context"
        "{% endif %}. Write a response that appropriately completes the request.\n\n{% endif %}"
        "{% for message in messages %}"
        "{% if message['role'] == 'assistant' %}### Response:{{ message['content'] }}{{ eos_token }}"
        "{% elif message['role'] != 'user' %}{{ message['content'] }}"
        "{% elif message['input'] is string and message['input'] %}### Instruction:\n"
        "{{ ('\n' + message['content']).removesuffix('\n' + message['input']).removeprefix('\n') }}"
        "\n\n### Input:\n{{ message['input'] }}"
        "{% else %}### Instruction:\n{{ message['content'] }}{% endif %}{{ '\n\n' }}{% endfor %}"
        "{% if add_generation_prompt %}### Response:{% endif %}"
    ),
    "zephyr": NamedTemplate(
        "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}{{ eos_token }}{{ '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
    "chatml": NamedTemplate(
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>{{ '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        ("<|im_start|>", "<|im_end|>"),
    ),
}
"""Name -> chat template."""


def with_chat_template(tokenizer: Any, template: str) -> Any:
    """Return a copy of a tokenizer with a chat template: a named one, a file that ends with .jinja, or its text.

    Raises:
        DeltuneError: There is no such template, or the tokenizer lacks the tokens that it needs.
    """
    if template in NAMED_TEMPLATES:
        fitting = [name for name, one in NAMED_TEMPLATES.items() if not _missing_tokens(tokenizer, one)]
        if missing := _missing_tokens(tokenizer, NAMED_TEMPLATES[template]):
            raise DeltuneError(
                f"template {template} needs the tokens {', '.join(missing)}, which the tokenizer does not have, so "
                f"that no answer would end; it has those of {', '.join(fitting) or 'no named template'}"
            )
        template = NAMED_TEMPLATES[template].text
    elif template.endswith(".jinja"):
        path = user_path(template, "template")
        try:
            template = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise DeltuneError(f"template {path} cannot be read: {error_summary(error)}") from error
    elif "{%" not in template and "{{" not in template:
        raise DeltuneError(
            unknown_name("chat template", template, NAMED_TEMPLATES, hint="Or give a file with one in Jinja (.jinja).")
        )
    copied = copy.deepcopy(tokenizer)
    copied.chat_template = template
    return copied


def _missing_tokens(tokenizer: Any, template: NamedTemplate) -> list[str]:
    """Return the tokens that a named template needs and a tokenizer does not have as special tokens."""
    known = {*special_tokens(tokenizer).values()}
    return [one for one in template.needs if (tokenizer.eos_token is None if one == "eos" else one not in known)]
