"""Answers that keep to a JSON schema: which tokens may come next, by llguidance."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from ...errors import error_summary, excerpt, is_installed
from ..errors import InvalidRequest

OPTIONS: Any = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n\r\t]{0,20}"}
"""Blanks between the parts of JSON are bounded, lest a weak model writes nothing else."""


class Grammar:
    """What the answer to one request keeps to, and how much of the answer it has read. Belongs to the request."""

    def __init__(self, matcher: Any) -> None:
        self.matcher, self.read = matcher, 0

    def begin(self, before: int, ends: Sequence[int]) -> Grammar:
        """Set how many tokens stand before the answer, and by which tokens it ends; return itself."""
        self.read, self.ends = before, list(ends)
        return self

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores (1, vocabulary) of those tokens that may follow, and minus infinity for the others."""
        fresh = ids[0, self.read :].tolist()
        self.read += len(fresh)
        self.matcher.consume_tokens(fresh)
        mask = torch.frombuffer(bytearray(self.matcher.compute_logit_bias()), dtype=torch.uint8).bool()
        if error := self.matcher.get_error():
            raise InvalidRequest(f"the answer cannot keep to the JSON schema: {error_summary(error)}")
        allowed = torch.zeros(scores.shape[-1], dtype=torch.bool)
        size = min(len(mask), len(allowed))
        allowed[:size] = mask[:size]
        allowed[self.ends] = self.matcher.is_accepting()
        return scores.masked_fill(~allowed, -torch.inf)


class Grammars:
    """Makes the grammars of requests. Any thread may call it."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._vocabulary: Any = None
        self._lock = threading.Lock()

    def grammar(self, schema: str) -> Grammar:
        """Return the grammar of a JSON schema, if the schema and the tokenizer of the model can be used."""
        if not is_installed("llguidance"):
            raise InvalidRequest("answers in JSON (response_format) need llguidance: pip install 'deltune[serve]'")
        from llguidance import LLMatcher
        from llguidance.hf import from_tokenizer

        with self._lock:
            if self._vocabulary is None:
                try:
                    self._vocabulary = from_tokenizer(self.tokenizer)
                except Exception as error:
                    raise InvalidRequest(
                        f"llguidance, by which answers keep to a JSON schema, cannot read the model's tokenizer: "
                        f"{error_summary(error)}"
                    ) from error
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=OPTIONS)
            matcher = LLMatcher(self._vocabulary, grammar, log_level=0)
        except ValueError as error:
            raise InvalidRequest(f"the JSON schema {excerpt(schema)} cannot be used: {error}") from error
        if problem := matcher.get_error():
            raise InvalidRequest(f"the JSON schema {excerpt(schema)} cannot be used: {problem.strip()[:300]}")
        return Grammar(matcher)
