"""What a model that answers in words is given: a template filled with the inputs of every row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from string import Formatter
from typing import Any

from ..data.columns import INPUTS
from ..errors import DeltuneError, unknown_name
from .base import Columns
from .encoding import CHUNK

Tokens = tuple[int, ...]


def join_prompt_and_target(
    tokenizer: Any, befores: Sequence[str], afters: Sequence[Sequence[str]], side: str = "text"
) -> Iterator[tuple[Tokens, list[Tokens], Tokens]]:
    """For every row the tokens of what comes before, of each text that it makes with what follows, and of the end.

    A blank stands between, unless what comes before is empty or ends with white space. Tokens are those of the joined
    text: a tokenizer may put the blank at the word, or make one token of the last letters before and the first after,
    so that a text need not begin with the tokens before. The end is taken off: special tokens at the end of a text as
    the tokenizer writes it, else its token for the end.
    """
    special = set(tokenizer.all_special_ids)
    nothing = tokenizer(**{side: ""})["input_ids"]
    start = common_prefix_length([nothing, tokenizer(**{side: "a"})["input_ids"]])
    usual = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    written = tuple(nothing[start:]) if special.issuperset(nothing[start:]) else ()
    for first in range(0, len(befores), CHUNK):
        part = list(zip(befores[first : first + CHUNK], afters[first : first + CHUNK], strict=True))
        texts = [[b, *(b + (" " if b and not b[-1].isspace() else "") + a for a in own)] for b, own in part]
        found = iter(tokenizer(**{side: [text for row in texts for text in row]}, verbose=False)["input_ids"])
        for row in texts:
            alone, *wholes = [_without(tuple(next(found)), written) for _ in row]
            yield alone, wholes, written or usual


def _without(tokens: Tokens, end: Tokens) -> Tokens:
    return tokens[: len(tokens) - len(end)] if end and tokens[-len(end) :] == end else tokens


def common_prefix_length(several: Sequence[Sequence[int]]) -> int:
    """How many tokens all of them begin with."""
    same = [len(set(tokens)) == 1 for tokens in zip(*several, strict=False)]
    return [*same, False].index(False)


def truncate_prompt(tokenizer: Any, before: Tokens, max_length: int) -> Tokens:
    """The last tokens of what comes before: a long one loses its beginning, an empty one is the token for a beginning.

    Error: a tokenizer that has none.
    """
    if before:
        return before[-max_length:]
    found = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if found is None:
        raise DeltuneError("a prompt is empty, and the tokenizer has no token for the beginning of a text")
    return (found,)


def fill_template(columns: Columns, template: str) -> list[str]:
    """The template filled with every row's inputs, a list of texts as one with blanks between.

    Without a template: the texts of a row, or its tokens where these are all. Errors: a template with a lone brace, a
    role that is no input of the rows.
    """
    inputs = {role: columns[role] for role in INPUTS if role in columns}
    texts = [role for role in inputs if INPUTS[role] == "text"] or list(inputs)
    template = template or " ".join(f"{{{role}}}" for role in texts)
    try:
        parts = [part for part in Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise DeltuneError(f"template {template!r}: {error}; a brace that is meant is doubled") from error
    asked = [str(name) for _, name, _, _ in parts]
    if styled := [name for _, name, style, conversion in parts if style or conversion]:
        raise DeltuneError(f"template {template!r}: {{{styled[0]}}} takes no format after its name")
    if wrong := [unknown_name("role", name, inputs, where="template") for name in asked if name not in inputs]:
        raise DeltuneError(" ".join(wrong))
    told = {role: [v if isinstance(v, str) else " ".join(v) for v in inputs[role]] for role in dict.fromkeys(asked)}
    return [template.format(**{r: told[r][i] for r in told}) for i in range(len(next(iter(inputs.values()))))]
