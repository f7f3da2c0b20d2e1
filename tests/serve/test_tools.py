"""Calls of tools and answers in JSON: forms of real templates, the openai client, rows beside other deltas' rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import deltune.serve
from deltune.errors import DeltuneError
from deltune.serve.engine.requests import Request, Sampling, ToolCall
from deltune.serve.engine.tools import CallReader, call_form
from test_templates import END, byte_tokenizer, chain

from .served import Served, save_delta, served

CALL = '{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}'
CALLED = ToolCall("weather", '{"city": "Oslo", "days": 2}')
PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": PROPERTIES}}
TOOLS: Any = [{"type": "function", "function": {"description": "The weather.", **WEATHER}}]
TEMPLATE = """{% if tools %}{{ tools | tojson }}
{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>
{{ c.function | tojson }}
</tool_call>{% endfor %}
{% endfor %}{% if add_generation_prompt %}A:{% endif %}"""
MISTRAL = """{% for m in messages %}{% if m.role == 'user' %}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}
[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}CALLS<|end|>{% endif %}{% endfor %}"""
LISTED = """[TOOL_CALLS] [{% for c in m.tool_calls %}{% set f = c.function %}{{ f | tojson }}{{ ', "id": "' ~ c.id }}"}
{%- endfor %}]""".replace("{{ f | tojson }}", '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}')
NAMED = (
    "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}"
)
TAGS = "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>"
FORMS: dict[str, tuple[str, str, int]] = {  # the template, an answer, and how many calls it has
    "qwen2_5": ("trl:qwen2_5", f"I ask.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>", 2),
    "qwen3": ("trl:qwen3", f"<tool_call>\n{CALL}\n</tool_call>", 1),
    "qwen3_5_nothink": ("trl:qwen3_5_nothink", f"<tool_call>\n{TAGS}\n</tool_call>", 1),
    "llama3_1": ("trl:llama3_1", CALL.replace("arguments", "parameters"), 1),
    "llama3_2": ("trl:llama3_2", f"\n{CALL}", 1),
    "mistral": (MISTRAL.replace("CALLS", LISTED), f"[TOOL_CALLS][{CALL}, {CALL}]", 2),
    "mistral by name": (MISTRAL.replace("CALLS", NAMED), f"[TOOL_CALLS]weather[ARGS]{CALLED.arguments}" * 2, 2),
}


def special_tokenizer(template: str) -> Any:
    """A tokenizer of bytes that has the control tokens of Mistral and a template, TRL's where it is named."""
    if template.startswith("trl:"):
        trl = pytest.importorskip("trl", reason="no TRL: pip install -e '.[align]'")
        file = Path(trl.__file__).parent / "chat_templates" / f"{template.removeprefix('trl:')}.jinja"
        template = file.read_text(encoding="utf-8")
    tokenizer = byte_tokenizer(eos_token="<|end|>", bos_token="<|begin|>", chat_template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "[ARGS]"]})
    return tokenizer


@pytest.mark.parametrize("name", FORMS)
def test_calls_are_read_back_in_the_form_that_the_template_writes(name: str) -> None:
    """However the answer comes in pieces, what is shown before its end is its content, and no part of a call."""
    template, answer, count = FORMS[name]
    tokenizer = special_tokenizer(template)
    form = call_form(tokenizer, None)
    for text, calls in ((answer, (CALLED,) * count), ("No: <tool", ()), (answer[:-3], ()), ('{"name": "Ada"}', ())):
        reader = CallReader(form, TOOLS)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        pieces = [tokenizer.decode([token], skip_special_tokens=True) for token in ids]
        plain = "".join(pieces)
        shown = "".join(reader.show(token, piece) for token, piece in zip(ids, pieces, strict=True))
        content, rest, read = reader.end(plain)
        assert (read, shown + rest) == (calls, content)
        assert content == (text.partition(form.begin)[0] if calls and form.begin else "" if calls else plain)


REFUSED = {
    "shows no tools": ("{% for m in messages %}{{ m.content }}{% endfor %}", "shows no tools"),
    "shows no calls": ("{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}", "cannot read back"),
    "raises": ("{% if tools %}{{ raise_exception('no tools here') }}{% endif %}", "no tools here"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_without_tools_is_refused(name: str) -> None:
    template, message = REFUSED[name]
    with pytest.raises(DeltuneError, match=message):
        call_form(special_tokenizer(template), None)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[openai.OpenAI, Served]]:
    """The client of a server whose model says Hi and calls the tool, whatever the question."""
    folder = tmp_path_factory.mktemp("caller")
    tokenizer = byte_tokenizer(eos_token="<|end|>", chat_template=TEMPLATE)
    tokenizer.add_tokens(["<tool_call>", CALL, "</tool_call>"])
    begin, call, end = range(len(tokenizer) - 3, len(tokenizer))
    model = chain(tokenizer, {":": "H", "H": "i", "i": begin, begin: call, call: end, end: END}, eos_token_id=END)
    model.config.max_position_embeddings = 4096
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    with (
        served(model=str(folder / "model"), served_name="base") as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60) as api,
    ):
        yield api, running


def test_tools_are_called_and_answered(client: tuple[openai.OpenAI, Served]) -> None:
    """The calls of an answer, streamed or not, go back to the model as the client has them, with the tool's answer."""
    api, server = client
    messages: list[Any] = [{"role": "user", "content": "Rain?"}]
    options: Any = {"model": "base", "temperature": 0, "max_tokens": 20, "tools": TOOLS}
    whole = api.chat.completions.create(messages=messages, **options)
    choice = whole.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Hi" and choice.message.tool_calls
    call: Any = choice.message.tool_calls[0]
    assert (call.type, call.function.name, call.function.arguments) == ("function", CALLED.name, CALLED.arguments)
    assert len(call.id) == 9 and call.id.isalnum()
    parts = list(api.chat.completions.create(messages=messages, **options, stream=True))
    deltas = [part.choices[0].delta for part in parts if part.choices]
    assert "".join(delta.content or "" for delta in deltas) == "Hi"
    streamed = [one for delta in deltas for one in delta.tool_calls or ()]
    assert [(one.index, one.function and one.function.arguments) for one in streamed] == [(0, CALLED.arguments)]
    assert parts[-1].choices[0].finish_reason == "tool_calls"
    with api.chat.completions.stream(messages=messages, **options) as events:
        final = events.get_final_completion().choices[0].message
    assert final.tool_calls and final.tool_calls[0].function.arguments == CALLED.arguments
    answer = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
    api.chat.completions.create(messages=[*messages, choice.message, answer], **options)
    message = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": json.loads(CALL)}]}
    prompt = server.engine._encoder.tokenizer.apply_chat_template(
        [*messages, message, {"role": "tool", "content": "Rain."}],
        tools=TOOLS,
        tokenize=False,
        add_generation_prompt=True,
    )
    again = api.chat.completions.create(messages=[*messages, choice.message, answer], **{**options, "max_tokens": 1})
    assert again.usage and again.usage.prompt_tokens == len(server.engine._encoder.tokenizer(prompt)["input_ids"]) + 2
    hidden = api.chat.completions.create(messages=messages, **options, tool_choice="none").choices[0].message
    assert hidden.tool_calls is None and hidden.content == f"Hi<tool_call>{CALL}</tool_call>"
    wrong: Any = [{"type": "function", "function": {"name": "a", "description": "<|end|>"}}]
    with pytest.raises(openai.BadRequestError, match="control tokens of the model"):
        api.chat.completions.create(messages=messages, **{**options, "tools": wrong})
    with pytest.raises(openai.BadRequestError, match="exclude each other"):
        api.chat.completions.create(messages=messages, **options, response_format={"type": "json_object"})
    number = {"id": "1", "type": "function", "function": {"name": "a", "arguments": "1"}}
    for message, problem in (
        ({"role": "user", "content": None}, "content is missing"),
        ({"role": "user", "content": "a", "tool_calls": [call.model_dump()]}, "part of messages of the assistant"),
        ({"role": "assistant", "tool_calls": [number]}, "JSON object"),
    ):
        with pytest.raises(openai.BadRequestError, match=problem):
            api.chat.completions.create(model="base", messages=[message])  # type: ignore[list-item]


SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad"]}, "stars": {"type": "integer", "minimum": 1, "maximum": 5}},
    "required": ["mood", "stars"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of a model of random weights that reads bytes, with two deltas."""
    pytest.importorskip("llguidance", reason="no llguidance: pip install -e '.[serve]'")
    folder = tmp_path_factory.mktemp("writer")
    tokenizer = byte_tokenizer(eos_token="<|end|>", chat_template="{{ messages[0].content }}")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model("llama", **sizes, vocab_size=len(tokenizer), eos_token_id=END, bos_token_id=None)
        model = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for seed, method in enumerate(("lora(rank=2)", "prefix(length=2)")):
        save_delta(model, folder / "deltas" / f"d{seed}", method, seed)
    with served(model=str(folder / "model"), deltas=str(folder / "deltas"), served_name="base") as running:
        yield running


def is_fitting(text: str) -> bool:
    value = json.loads(text)
    return value.keys() == {"mood", "stars"} and value["mood"] in ("good", "bad") and 1 <= value["stars"] <= 5


def test_a_schema_binds_its_own_row_and_no_other(writer: Served) -> None:
    """In one batch with rows of other deltas and without a schema, whose answers are those that they have alone."""
    chats = ({"role": "user", "content": "How was it?"},)
    requests = [
        Request("generate", messages=chats, delta=delta, sampling=Sampling(90, 0.8, seed=seed, json_schema=schema))
        for seed, delta in enumerate((None, "d0", "d1"))
        for schema in (None, json.dumps(SCHEMA))
    ]
    joint = [future.result(60) for future in [writer.engine.submit(request) for request in requests]]
    alone = [writer.engine.submit(request).result(60) for request in requests]
    assert [one.text for one in joint] == [one.text for one in alone]
    assert all(is_fitting(one.text) and one.finish_reason == "stop" for one in joint[1::2])
    assert not any("mood" in one.text for one in joint[::2])


def test_answers_in_json_come_through_the_client(writer: Served) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "review", "schema": SCHEMA, "strict": True}}
    options: Any = {"model": "d0", "messages": [{"role": "user", "content": "a"}], "max_tokens": 90, "temperature": 0}
    with openai.OpenAI(base_url=f"{writer.url}/v1", api_key="none", max_retries=0, timeout=60) as api:
        create = api.chat.completions.create
        whole = create(**options, response_format=schema).choices[0]
        assert is_fitting(whole.message.content or "") and whole.finish_reason == "stop"
        parts = create(**options, response_format=schema, stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.message.content
        assert create(**options, response_format={"type": "text"}) and create(**options).choices[0].finish_reason
        text = create(**options, response_format={"type": "json_object"}).choices[0].message.content or ""
        assert text.startswith("{")
        for wrong, message in (
            ({"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}, "cannot be used: Unimpl"),
            ({"type": "json_schema"}, "is given with the type json_schema"),
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                create(**options, response_format=wrong)


def test_without_the_library_json_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltune.serve.engine.grammar.is_installed", lambda name: False)
    tokenizer = byte_tokenizer(eos_token="<|end|>")
    with deltune.serve.Server(chain(tokenizer, {}), tokenizer) as server, pytest.raises(DeltuneError, match="pip inst"):
        server.submit(Request("generate", text="a", sampling=Sampling(json_schema="{}")))
