"""A conversation with a run, or with a language model as it is: history in the template, answers as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import TextStreamer

from ..errors import DeltuneError, error_summary
from ..templates import chat_prompt, tokenize_prompts, with_chat_template
from .inference import continue_prompt, open_language_model
from .tasks.chat import CHAT, no_chat_template
from .tasks.encoding import longest_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass
class Chat:
    """A conversation.

    Attributes:
        model: The model, with the delta of a run in use.
        tokenizer: Its tokenizer.
        templated: Whether a chat template makes the prompt. Of a run on prompts and completions, or on texts, each
            line is a prompt of its own.
        system: The system message, if there is one.
        max_tokens: The most tokens of an answer.
        temperature: 0 for the likeliest token each time.
        messages: The conversation so far.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    templated: bool
    system: str | None = None
    max_tokens: int = 512
    temperature: float = 0.0
    messages: list[dict[str, str]] = field(default_factory=list)

    @classmethod
    def open(
        cls,
        source: str,
        system: str | None = None,
        max_tokens: int = 512,
        temperature: float = 0.0,
        seed: int = 0,
        template: str | None = None,
        base: str | None = None,
    ) -> Chat:
        """Load a run or a model, and begin a conversation.

        Args:
            source: The folder of a run, or a language model as `models.load_model` takes it.
            system: A system message, which begins the conversation.
            max_tokens: The most tokens of an answer.
            temperature: 0 for the likeliest token each time; above, tokens are drawn.
            seed: Seed of the draws.
            template: The chat template of a model without a run, as `with_chat_template` takes it.
            base: The base model of a run, where it is not at the place that the folder names.

        Raises:
            DeltuneError: There is no such run or model, it generates no text, or it has no chat template.
        """
        loaded, model, tokenizer = open_language_model(source, base)
        templated = True
        if loaded is not None:
            if loaded.kind.head != "causal-lm" or template is not None:
                raise DeltuneError(
                    f"{source} is a run, whose template is saved with it: leave --template out"
                    if template is not None
                    else f"{source} answers {loaded.kind.name} and does not chat: deltune predict"
                )
            templated = loaded.is_conversational or (loaded.kind is not CHAT and bool(tokenizer.chat_template))
        elif template is not None:
            tokenizer = with_chat_template(tokenizer, template)
        if templated and not tokenizer.chat_template:
            raise no_chat_template()
        if system is not None and not templated:
            raise DeltuneError(f"{source} was trained without a chat template, so it takes no system message")
        torch.manual_seed(seed)
        model.eval()
        chat = cls(model, tokenizer, templated, system, max_tokens, temperature)
        chat.reset()
        return chat

    def reset(self) -> None:
        """Forget the conversation but for the system message."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def answer(self, text: str, write: Callable[[str], None] | None = None) -> str:
        """Answer a message; both belong to the conversation then.

        Args:
            text: The message.
            write: Called with each part of the answer as it comes.

        Returns:
            The whole answer.

        Raises:
            DeltuneError: The template refuses the conversation, or the model has no positions left.
        """
        question = {"role": "user", "content": text}
        prompt = self._prompt([*self.messages, question], text)
        room = longest_length(self.model, len(prompt) + self.max_tokens) - len(prompt)
        if room < 1:
            raise DeltuneError(
                f"the conversation has {len(prompt):,} tokens, and {type(self.model).__name__} has no more positions; "
                "/reset begins anew"
            )
        parts: list[str] = []
        streamer = _Parts(self.tokenizer, [parts.append, *([write] if write else [])])
        continue_prompt(
            self.model, self.tokenizer, prompt, min(room, self.max_tokens), self.temperature, streamer=streamer
        )
        answer = "".join(parts)
        self.messages += [question, {"role": "assistant", "content": answer}]
        return answer

    def _prompt(self, messages: list[dict[str, str]], text: str) -> list[int]:
        if not self.templated:
            return list(tokenize_prompts(self.tokenizer, [text])[0])
        try:
            return chat_prompt(self.tokenizer, messages)
        except Exception as error:  # a template may raise anything about what it is given
            raise DeltuneError(f"the chat template refuses the conversation: {error_summary(error)}") from error


class _Parts(TextStreamer):
    """Hands on the parts of an answer as they come."""

    def __init__(self, tokenizer: Any, listeners: Sequence[Callable[[str], None]]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.listeners = listeners

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        for listener in self.listeners:
            listener(text)
