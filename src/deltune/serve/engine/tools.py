"""Calls of tools: the form in which a chat template writes them, and calls read back from what a model writes."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import DeltuneError, error_summary, excerpt
from ...templates import special_tokens
from .requests import ToolCall
from .sampling import beginning_of

FORMS = (("<tool_call>", "</tool_call>"), ("[TOOL_CALLS]", ""), ("", ""))
"""The texts before and behind a call, as Hermes and Qwen, Mistral, and Llama 3 write it; Llama writes nothing else."""
PARAMETER = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)

PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Probe.",
        "parameters": {"type": "object", "properties": {"letter": {"type": "string"}}, "required": ["letter"]},
    },
}
PROBE_CALL = {"name": "probe_tool", "arguments": {"letter": "a"}}
READ = (ToolCall("probe_tool", '{"letter": "a"}'),)


@dataclass(frozen=True)
class CallForm:
    """The form in which a model writes calls."""

    begin: str  # the text before a call; "" where a call is the whole answer
    end: str  # the text behind a call, or ""
    marks: Mapping[int, str]  # special tokens of the form, which are no part of an answer's text, by id

    def read(self, text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[ToolCall, ...]]:
        """Return what stands before the calls of an answer, and the calls; all of it and none, if one is no call."""
        schemas = {one["function"]["name"]: one["function"].get("parameters") or {} for one in tools}
        head, _, rest = text.partition(self.begin) if self.begin else ("", "", text)
        calls: list[ToolCall] = []
        try:
            for piece in rest.split(self.begin) if self.begin else [rest]:
                inner = piece[: piece.index(self.end)] if self.end else piece
                calls += _calls(inner.strip(), schemas)
        except (ValueError, RecursionError):
            return text, ()
        if not self.begin and not {call.name for call in calls} <= schemas.keys():
            return text, ()  # some other JSON
        return head, tuple(calls)


def _calls(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> list[ToolCall]:
    """Return the calls of a text: JSON, a list of it, name[ARGS]JSON, or Qwen's tags; a ValueError if it is no call."""
    if text.startswith("<function="):
        name, _, rest = text.removeprefix("<function=").partition(">")
        types = schemas.get(name, {}).get("properties", {})
        values = {key: _value(value, types.get(key, {})) for key, value in PARAMETER.findall(rest)}
        return [ToolCall(name, json.dumps(values, ensure_ascii=False))]
    name, mark, rest = text.partition("[ARGS]")
    if mark:
        return [ToolCall(name.strip(), json.dumps(_object(json.loads(rest)), ensure_ascii=False))]
    value = json.loads(text)
    calls = []
    for one in value if isinstance(value, list) else [value]:
        arguments = _object(one).get("arguments", one.get("parameters", {}))
        arguments = _object(json.loads(arguments) if isinstance(arguments, str) else arguments)
        if not isinstance(one.get("name"), str):
            raise ValueError("a call has no name")
        calls.append(ToolCall(one["name"], json.dumps(arguments, ensure_ascii=False)))
    return calls


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    """Return a value that stands between tags, where texts have no quotes."""
    try:
        return text if schema.get("type") == "string" else json.loads(text)
    except ValueError:
        return text


def call_form(tokenizer: Any, template: str | None) -> CallForm:
    """Return the form of calls that a chat template writes, one of `FORMS`, by letting it write one."""

    def render(*messages: dict[str, Any], **options: Any) -> str:
        chat = [{"role": "user", "content": "a"}, *messages]
        try:
            return str(
                tokenizer.apply_chat_template(
                    chat, tools=[PROBE_TOOL], chat_template=template, tokenize=False, **options
                )
            )
        except Exception as error:  # a template may raise anything
            raise DeltuneError(f"the chat template refuses calls of tools: {error_summary(error)}") from error

    prompt = render(add_generation_prompt=True)
    if READ[0].name not in prompt:
        raise DeltuneError(
            "the model's chat template shows no tools, so the model would not see them: leave tools out, or tune and "
            "serve it with a template that has them"
        )
    call = {"id": "000000000", "type": "function", "function": PROBE_CALL}
    whole = render({"role": "assistant", "content": "", "tool_calls": [call]})
    pairs = enumerate(zip(prompt, whole, strict=False))
    written = whole[next((i for i, (a, b) in pairs if a != b), len(prompt)) :]
    for begin, end in FORMS:
        marks = {i: name for i, name in special_tokens(tokenizer).items() if name in (begin, end, "[ARGS]")}
        form = CallForm(begin, end, marks)
        answer = written if end else re.sub(r"[^}\]]*$", "", written)  # without what ends an answer
        if begin in written and form.read(answer, [PROBE_TOOL])[1] == READ:
            return form
    raise DeltuneError(
        f"the model's chat template writes a call of a tool as {excerpt(written)}, which this server cannot read back; "
        'it reads <tool_call>…</tool_call>, [TOOL_CALLS]… and {"name": …, "parameters": …}: leave tools out'
    )


def check_tools(tokenizer: Any, tools: Collection[Mapping[str, Any]]) -> None:
    """Refuse control tokens in the descriptions of tools: the model would read them as such."""
    text = json.dumps(list(tools), ensure_ascii=False)
    if names := [name for name in special_tokens(tokenizer).values() if name in text]:
        raise DeltuneError(f"tools contain control tokens of the model, {', '.join(names[:5])}: leave them out")


class CallReader:
    """Parts the text of an answer, token by token, into its content and its calls."""

    def __init__(self, form: CallForm, tools: Sequence[Mapping[str, Any]]) -> None:
        self.form, self.tools = form, tools
        self.text, self.shown = "", 0

    def show(self, token: int, piece: str) -> str:
        """Add what a token adds to the text; return what of the text is surely not of a call, and not yet shown."""
        self.text += piece + self.form.marks.get(token, "")
        begin, text = self.form.begin, self.text
        if not begin:
            end = len(text) if text.lstrip()[:1] not in ("", "{", "[") else 0
        elif (end := text.find(begin)) < 0:
            end = len(text) - len(beginning_of([begin], text))
        shown, self.shown = text[self.shown : end], max(self.shown, end)
        return shown

    def end(self, text: str) -> tuple[str, str, tuple[ToolCall, ...]]:
        """Return the answer, given its text without special tokens: its content, what of it is new, and the calls."""
        content, calls = self.form.read(self.text, self.tools)
        content = content if calls else text
        return content, content[self.shown :], calls
