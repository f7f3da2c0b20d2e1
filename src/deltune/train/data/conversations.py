"""Conversations as tokens, by the chat template of a tokenizer, and which of the tokens are trained.

An answer begins where the prompt for it ends, so that a model is trained on what it goes on with in use, and ends with
the token by which the template ends it. Where the template marks answers (`{% generation %}`), the marks decide.
Everything else is found by tokenising beginnings: the tokens of a beginning must be those of the whole text.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from ...errors import DeltuneError, counted, error_summary
from ...templates import (
    Tokens,
    break_control_tokens,
    has_control_tokens,
    input_of,
    special_tokens,
    surrounding_tokens,
    without_sentinel,
)
from .columns import LossOn

MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
BATCH = 200
"""Conversations that are tokenised together."""


@dataclass(frozen=True)
class Tokenized:
    """The tokens of a row, which of them are trained, and the row of the data that it is of."""

    row: int
    ids: list[int]
    trained: list[bool]


@dataclass
class _Text:
    """A text with the parts of it that are trained, as pairs of positions.

    Attributes:
        plain: Whether no template wrote it, so that it gets what the tokenizer writes before a text, and an end.
        sentinel: A letter that the row did not have, which breaks up the texts of control tokens; "" if there are none.
    """

    row: int
    text: str
    spans: list[tuple[int, int]]
    plain: bool = False
    sentinel: str = ""


@dataclass
class Conversations:
    """Makes rows in the one form of `formats` to tokens.

    Attributes:
        tokenizer: The tokenizer, with its chat template.
        end: What training writes behind a text without a template.
        loss_on: Which tokens are trained: of every answer, all, or of the last answer.
        counts: How often something happened that a user should know.
    """

    tokenizer: Any
    end: Tokens = ()
    loss_on: LossOn = "answers"
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.special = special_tokens(self.tokenizer)
        self.begin, _ = surrounding_tokens(self.tokenizer)

    def tokenize(self, rows: Sequence[str], places: Sequence[str], problems: list[str]) -> Iterator[Tokenized]:
        """Yield the rows as tokens; what is wrong with a row is appended to the problems, with its place."""
        texts: list[_Text] = []
        for i, row in enumerate(rows):
            try:
                texts += self.texts(json.loads(row), i)
            except DeltuneError as error:
                problems.append(f"{places[i]}: {error}")
        for text, tokens in zip(texts, self._tokens(texts), strict=True):
            try:
                yield self._with_mask(text, tokens)
            except DeltuneError as error:
                problems.append(f"{places[text.row]}: {error}")

    def notes(self) -> list[str]:
        """Return what a user should know about what was tokenised."""
        counts = self.counts
        chats = {name: counted(count, "conversation") for name, count in counts.items()}
        answers = {name: counted(count, "answer") for name, count in counts.items()}
        texts = {
            "question": "a question contains control tokens, which are read as text ({question})",
            "answer": "an answer contains control tokens, which are trained as such ({answer})",
            "split": (
                "the chat template changes earlier turns (it drops reasoning, say), so each answer of {split} is a row "
                "of its own"
            ),
            "dropped": "{dropped} with a message that the template leaves out",
        }
        of_answers = {
            "prompt": (
                "add_generation_prompt does not end where the template starts the answer; generation will see another "
                "prompt than training ({prompt})"
            ),
            "endless": "{endless} without an end, as the template writes none",
        }
        lines = [text.format(**chats) for name, text in texts.items() if counts[name]]
        return [*lines, *(text.format(**answers) for name, text in of_answers.items() if counts[name])]

    # -- texts

    def texts(self, row: Mapping[str, Any], number: int = 0) -> list[_Text]:
        """Return the texts of a row: one, or one for each answer where the template changes earlier answers."""
        if "text" in row:
            return [_Text(number, row["text"], [(0, len(row["text"]))], plain=True)]
        if "completion" in row:
            whole = row["prompt"] + row["completion"]
            start = 0 if self.loss_on == "all" else len(row["prompt"])
            return [_Text(number, whole, [(start, len(whole))], plain=True)]
        return self._rendered(row["messages"], row.get("tools"), number)

    def _rendered(self, messages: list[dict[str, Any]], tools: Any, number: int) -> list[_Text]:
        self.counts["answer"] += any(
            has_control_tokens(self.special.values(), one["content"]) for one in messages if one["role"] == "assistant"
        )
        broken, sentinel = break_control_tokens(self.special.values(), messages)
        self.counts["question"] += bool(sentinel)
        plain = [{k: v for k, v in one.items() if k != "weight"} for one in broken]
        answers = [i for i, one in enumerate(messages) if one["role"] == "assistant"]
        whole, marks = self._render(plain, tools)
        self._check_written(plain, whole)
        ends = {i: self._render(plain[: i + 1], tools) for i in answers}
        weights = {i: messages[i].get("weight", 1) for i in answers}

        def part(i: int) -> Iterator[tuple[int, int]]:
            """Yield where answer i stands in the whole, by the marks of the template or by the prompt before it."""
            before = len(ends[answers[answers.index(i) - 1]][0]) if i != answers[0] else 0
            if marks is not None:
                yield from ((a, b) for a, b in marks if before <= a < len(ends[i][0]) and a < b)
            else:
                yield self._answer_start(plain, i, tools, ends[i][0]), len(ends[i][0])

        if all(whole.startswith(text) for text, _ in ends.values()):
            chosen = answers[-1:] if self.loss_on == "last" else answers
            spans = {i: list(part(i)) for i in chosen}
            if self.loss_on == "all":
                unweighted = [span for i in answers if not weights[i] for span in spans[i]]
                points = [0, *(point for span in unweighted for point in span), len(whole)]
                return [_Text(number, whole, list(zip(points[::2], points[1::2], strict=True)), sentinel=sentinel)]
            trained = [span for i in chosen if weights[i] for span in spans[i]]
            return [_Text(number, whole, trained, sentinel=sentinel)]
        if self.loss_on == "all":
            return [_Text(number, whole, [(0, len(whole))], sentinel=sentinel)]
        self.counts["split"] += 1
        texts = []
        for i in answers[-1:] if self.loss_on == "last" else [i for i in answers if weights[i]]:
            text, marked = ends[i]
            span = marked[-1:] if marked is not None else [(self._answer_start(plain, i, tools, text), len(text))]
            texts.append(_Text(number, text, span, sentinel=sentinel))
        return texts

    def _answer_start(self, messages: list[dict[str, Any]], i: int, tools: Any, text: str) -> int:
        """Return where an answer begins in the text that ends with it: behind the prompt in use, if that fits."""
        try:
            prompt = self._render(messages[:i], tools, prompt=True)[0]
        except DeltuneError:  # a template need not take what no answer follows, such as no messages at all
            prompt = None
        if prompt is not None and text.startswith(prompt):
            return len(prompt)
        probes = [self._render([*messages[:i], {"role": "assistant", "content": c}], tools)[0] for c in ("0", "1")]
        start = next(n for n, (a, b) in enumerate(zip(*probes, strict=False)) if a != b)
        if text[:start] != probes[0][:start]:
            raise DeltuneError(
                f"the chat template writes something else before message {i + 1} than before other answers"
            )
        self.counts["prompt"] += prompt is not None
        return start

    def _render(
        self, messages: list[dict[str, Any]], tools: Any, prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]] | None]:
        """Return what the template makes of messages, and the parts that it marks as answers, if it marks any."""
        tokenizer = self.tokenizer
        try:
            template = tokenizer.get_chat_template(None, tools)
            marks = bool(MARKS.search(template))
            rendered: Any = render_jinja_template(
                [messages], tools, chat_template=template, add_generation_prompt=prompt,
                return_assistant_tokens_mask=marks and not prompt, **tokenizer.special_tokens_map,
            )  # fmt: skip
        except Exception as error:  # a template may raise anything about what it is given
            raise DeltuneError(f"the chat template refuses it: {error_summary(error)}") from error
        (text,), spans = rendered
        return text, [(start, stop) for start, stop in spans[0]] if marks and not prompt else None

    def _check_written(self, messages: list[dict[str, Any]], whole: str) -> None:
        """Check that a template writes the calls of tools; count conversations of which it leaves out a message."""
        for message in messages:
            for call in message.get("tool_calls", ()):
                if call["function"]["name"] not in whole:
                    raise DeltuneError("the chat template does not write calls of tools; give another one (--template)")
        others = [one for one in messages if one["role"] != "assistant"]
        texts = [(one["content"], input_of(one)) for one in others]
        parts = [part for text, more in texts for part in (text.removesuffix(more), more)]
        self.counts["dropped"] += any(part.strip() not in whole for part in parts)

    # -- tokens

    def _tokens(self, texts: Sequence[_Text]) -> list[dict[int, list[int]]]:
        """Return for each text the tokens of its beginnings, by their length.

        Where a token of the whole ends where a beginning does, no merge of letters went across, so the tokens up to it
        are those of the beginning. Others are tokenised by themselves: a token may hold a blank beside its place.
        """
        if not texts:
            return []
        fast = bool(self.tokenizer.is_fast)
        options = {"add_special_tokens": False, "verbose": False}
        whole = self.tokenizer([one.text for one in texts], return_offsets_mapping=fast, **options)
        tokens: list[dict[int, list[int]]] = []
        alone: list[tuple[int, int]] = []
        for number, (one, ids) in enumerate(zip(texts, whole["input_ids"], strict=True)):
            tokens.append({0: [], len(one.text): list(map(int, ids))})
            places = whole["offset_mapping"][number] if fast else []
            begins = [begin for begin, _ in places]
            for point in {point for span in one.spans for point in span} - tokens[-1].keys():
                count = bisect_left(begins, point)
                if count and places[count - 1][1] == point:
                    tokens[-1][point] = tokens[-1][len(one.text)][:count]
                else:
                    alone.append((number, point))
        parts = [texts[number].text[:point] for number, point in alone]
        for (number, point), ids in zip(
            alone, self.tokenizer(parts, **options)["input_ids"] if parts else [], strict=True
        ):
            tokens[number][point] = list(map(int, ids))
        return tokens

    def _with_mask(self, text: _Text, tokens: dict[int, list[int]]) -> Tokenized:
        if text.sentinel:
            breaks = {n: text.text[:n].count(text.sentinel) for n in tokens}
            tokens = {n: without_sentinel(self.tokenizer, ids, text.sentinel, breaks[n]) for n, ids in tokens.items()}
        ids = tokens[len(text.text)]
        trained = [False] * len(ids)
        for span in text.spans:
            start, stop = (self._position(text, point, tokens[point], ids) for point in span)
            if not text.plain and self.loss_on != "all":
                stop = self._answer_stop(ids, start, stop)
            trained[start:stop] = [True] * (stop - start)
        if text.plain:
            ids, trained = self._with_ends(ids, trained)
        return Tokenized(text.row, ids, trained)

    def _position(self, text: _Text, point: int, beginning: list[int], ids: list[int]) -> int:
        """Return how many tokens stand before a point of a text; none may stand on both sides of it."""
        if ids[: len(beginning)] == beginning:
            return len(beginning)
        same = next(i for i, (a, b) in enumerate(zip([*beginning, None], [*ids, None], strict=False)) if a != b)
        token = self.tokenizer.decode(ids[same : same + 1])
        self.counts["shared"] += 1
        before, after = text.text[max(0, point - 12) : point], text.text[point : point + 12]
        raise DeltuneError(f"the token {token!r} belongs to both sides of {before!r} | {after!r}")

    def _answer_stop(self, ids: list[int], start: int, stop: int) -> int:
        """Return where an answer ends: behind its last control token, if only white space follows that."""
        last = next((i for i in range(stop - 1, start - 1, -1) if ids[i] in self.special), None)
        if last is not None and not self.tokenizer.decode(ids[last + 1 : stop]).strip():
            return last + 1
        self.counts["endless"] += 1
        return stop

    def _with_ends(self, ids: list[int], trained: list[bool]) -> tuple[list[int], list[bool]]:
        """Write what the tokenizer writes before a text, and the end of a text, each once; the end is trained."""
        begin, end = list(self.begin), list(self.end)
        if ids[: len(begin)] != begin:
            ids, trained = [*begin, *ids], [False] * len(begin) + trained
        if end and ids[-len(end) :] != end:
            ids, trained = [*ids, *end], [*trained, *[True] * len(end)]
        return ids, trained
