"""Prompts: a template filled with a row's inputs, and the tokens of a prompt together with its target."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from string import Formatter
from typing import Any

from ..data.columns import INPUT_TYPES
from ..errors import DeltuneError, unknown_name
from .base import Columns
from .encoding import TOKENIZER_BATCH

Tokens = tuple[int, ...]


def join_prompt_and_target(
    tokenizer: Any, prompts: Sequence[str], targets: Sequence[Sequence[str]], side: str = "text"
) -> Iterator[tuple[Tokens, list[Tokens], Tokens]]:
    """Tokenize each prompt alone and together with each of its targets.

    A blank stands between prompt and target, unless the prompt is empty or ends with white space. The joined text is
    tokenized as a whole: a tokenizer may attach the blank to the next word, or join the last letters of the prompt and
    the first of the target to one token, so that the tokens of the joined text need not begin with the prompt's.

    Args:
        tokenizer: The tokenizer.
        prompts: One for each row.
        targets: The targets of each row.
        side: "text", or "text_target" to tokenize as the tokenizer does for a decoder.

    Yields:
        For each row the tokens of its prompt, those of the prompt with each target, all without the end, and the
        end: the special tokens that the tokenizer writes at the end of a text, else its end-of-text token.
    """
    special = set(tokenizer.all_special_ids)
    empty = tokenizer(**{side: ""})["input_ids"]
    start = common_prefix_length([empty, tokenizer(**{side: "a"})["input_ids"]])
    eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    written_end = tuple(empty[start:]) if special.issuperset(empty[start:]) else ()
    for first in range(0, len(prompts), TOKENIZER_BATCH):
        chunk = slice(first, first + TOKENIZER_BATCH)
        texts = [
            [prompt, *(prompt + (" " if prompt and not prompt[-1].isspace() else "") + t for t in row_targets)]
            for prompt, row_targets in zip(prompts[chunk], targets[chunk], strict=True)
        ]
        flat = [text for row in texts for text in row]
        tokenized = iter(tokenizer(**{side: flat}, verbose=False)["input_ids"])
        for row in texts:
            prompt_tokens, *joined = [_strip_end(tuple(next(tokenized)), written_end) for _ in row]
            yield prompt_tokens, joined, written_end or eos


def _strip_end(tokens: Tokens, end: Tokens) -> Tokens:
    return tokens[: len(tokens) - len(end)] if end and tokens[-len(end) :] == end else tokens


def common_prefix_length(sequences: Sequence[Sequence[int]]) -> int:
    """Return the number of tokens that all sequences begin with."""
    is_same = [len(set(tokens)) == 1 for tokens in zip(*sequences, strict=False)]
    return [*is_same, False].index(False)


def truncate_prompt(tokenizer: Any, prompt: Tokens, max_length: int) -> Tokens:
    """Return the last `max_length` tokens of a prompt; for an empty prompt the token that begins a text.

    Args:
        tokenizer: The tokenizer, for an empty prompt.
        prompt: The tokens of the prompt.
        max_length: The most tokens to keep.

    Raises:
        DeltuneError: The prompt is empty and the tokenizer has neither a beginning- nor an end-of-text token.
    """
    if prompt:
        return prompt[-max_length:]
    bos = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if bos is None:
        raise DeltuneError("a prompt is empty, and the tokenizer has no token for the beginning of a text")
    return (bos,)


def fill_template(columns: Columns, template: str) -> list[str]:
    """Fill a template with the inputs of every row; a list of texts is joined with blanks.

    Args:
        columns: Role -> values.
        template: Text with roles in braces; a literal brace is doubled. Empty: the texts of a row, or its tokens if it
            has no texts, with blanks between.

    Raises:
        DeltuneError: The template has a lone brace or a format, or names a role that is not an input of the rows.
    """
    inputs = {role: columns[role] for role in INPUT_TYPES if role in columns}
    text_roles = [role for role in inputs if INPUT_TYPES[role] == "text"] or list(inputs)
    template = template or " ".join(f"{{{role}}}" for role in text_roles)
    try:
        fields = [part for part in Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise DeltuneError(f"template {template!r}: {error}; write a literal brace twice") from error
    roles = [str(name) for _, name, _, _ in fields]
    if formatted := [name for _, name, format_spec, conversion in fields if format_spec or conversion]:
        raise DeltuneError(f"template {template!r}: {{{formatted[0]}}} cannot have a format after its name")
    if problems := [unknown_name("role", role, inputs, where="template") for role in roles if role not in inputs]:
        raise DeltuneError(" ".join(problems))
    values = {role: [v if isinstance(v, str) else " ".join(v) for v in inputs[role]] for role in dict.fromkeys(roles)}
    num_rows = len(next(iter(inputs.values())))
    return [template.format(**{role: texts[i] for role, texts in values.items()}) for i in range(num_rows)]
