"""The real `openai` client, curl and a parser of Prometheus against a real server."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from .served import METHODS, Served, language_model, served

PROMPTS = ("the old hammer", "a small otter was near", "my table is very")


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_models_are_the_base_and_the_deltas(client: openai.OpenAI) -> None:
    listed = {one.id: one for one in client.models.list()}
    assert set(listed) == {"base", *METHODS}
    assert client.models.retrieve("mood").model_dump()["parent"] == "base"
    assert listed["base"].model_dump()["parent"] is None
    with pytest.raises(openai.NotFoundError, match="Did you mean 'mood'"):
        client.models.retrieve("moo")


@pytest.mark.parametrize("name", ["base", *METHODS])
def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI, name: str) -> None:
    """Text, tokens, probabilities, reason and counts of a stream add up to those of the answer in one piece."""
    options = {"model": name, "prompt": PROMPTS[0], "max_tokens": 6, "temperature": 0, "logprobs": 2}
    whole = client.completions.create(**options)  # type: ignore[call-overload]
    parts = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    choices = [choice for part in parts for choice in part.choices]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    assert choices[-1].finish_reason == whole.choices[0].finish_reason in ("stop", "length")
    assert [choice.finish_reason for choice in choices[:-1]] == [None] * (len(choices) - 1)
    streamed = [value for choice in choices if choice.logprobs for value in choice.logprobs.token_logprobs]
    assert streamed == pytest.approx(whole.choices[0].logprobs.token_logprobs, abs=1e-5) and len(streamed) >= 1
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens == len(streamed)
    assert parts[-1].usage.prompt_tokens == whole.usage.prompt_tokens > 0
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert {part.id for part in parts} == {parts[0].id} and all(part.usage is None for part in parts[:-1])


def test_deltas_answer_differently(client: openai.OpenAI) -> None:
    answers = {
        name: client.completions.create(model=name, prompt=PROMPTS[0], max_tokens=8, temperature=0, logprobs=1)
        for name in ("base", *METHODS)
    }
    first = {name: tuple(answer.choices[0].logprobs.token_logprobs) for name, answer in answers.items()}  # type: ignore[union-attr, arg-type]
    assert len(set(first.values())) == len(first)
    assert {answer.model for answer in answers.values()} == {"base", *METHODS}


def test_several_inputs_and_answers_keep_their_order(client: openai.OpenAI) -> None:
    """`n` answers to each of several prompts are numbered as OpenAI numbers them, streamed or not."""
    alone = {p: client.completions.create(model="mood", prompt=p, max_tokens=5, temperature=0) for p in PROMPTS}
    options = {"model": "mood", "prompt": list(PROMPTS), "n": 2, "max_tokens": 5, "temperature": 0}
    joint = client.completions.create(**options)  # type: ignore[call-overload]
    expected = [alone[prompt].choices[0].text for prompt in PROMPTS for _ in range(2)]
    assert [choice.text for choice in joint.choices] == expected
    assert [choice.index for choice in joint.choices] == list(range(6))
    assert joint.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone.values())  # type: ignore[union-attr]
    texts = [""] * 6
    for part in client.completions.create(**options, stream=True):  # type: ignore[call-overload]
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == expected


def test_sampling_by_a_seed_can_be_repeated(client: openai.OpenAI) -> None:
    def draw(seed: int) -> list[str]:
        answer = client.completions.create(
            model="intent", prompt=PROMPTS[1], n=4, max_tokens=8, seed=seed, temperature=1.5
        )
        return [choice.text for choice in answer.choices]

    assert draw(1) == draw(1) and len(set(draw(1))) > 1 and draw(1) != draw(2)


def test_tokens_as_input(client: openai.OpenAI, decoder: tuple[Path, Path]) -> None:
    from deltune.models import load_tokenizer

    tokens = load_tokenizer(str(decoder[0]))(PROMPTS[0])["input_ids"][:-1]  # the end that the tokenizer writes
    by_tokens = client.completions.create(model="mood", prompt=tokens, max_tokens=5, temperature=0)
    by_text = client.completions.create(model="mood", prompt=PROMPTS[0], max_tokens=5, temperature=0)
    assert by_tokens.choices[0].text == by_text.choices[0].text
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="mood", prompt=[10**6], max_tokens=5)


def test_chats_go_through_the_template(client: openai.OpenAI) -> None:
    """The template of the tests puts a blank behind each message, so that a chat is a prompt without special tokens."""
    options = {"model": "mood", "messages": [{"role": "user", "content": PROMPTS[0]}], "temperature": 0}
    options |= {"max_tokens": 6, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**options)  # type: ignore[call-overload]
    parts = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    assert whole.choices[0].message.role == parts[0].choices[0].delta.role == "assistant"
    text = "".join(choice.delta.content or "" for part in parts for choice in part.choices)
    assert text == whole.choices[0].message.content
    content = whole.choices[0].logprobs.content
    assert len(content) == whole.usage.completion_tokens == parts[-1].usage.completion_tokens
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in content)
    in_parts = client.chat.completions.create(
        model="mood",
        messages=[{"role": "user", "content": [{"type": "text", "text": PROMPTS[0]}]}],
        temperature=0,
        max_completion_tokens=6,
    )
    assert in_parts.choices[0].message.content == whole.choices[0].message.content


def test_two_names_of_one_option_agree(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": PROMPTS[0]}]
    options: dict[str, Any] = {"model": "mood", "messages": messages, "temperature": 0, "max_tokens": 3}
    assert client.chat.completions.create(**options, max_completion_tokens=3).usage.completion_tokens <= 3
    with pytest.raises(openai.BadRequestError, match="two names for one option and differ"):
        client.chat.completions.create(**options, max_completion_tokens=4)


def test_images_in_a_chat_are_named(client: openai.OpenAI) -> None:
    parts: list[Any] = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(openai.BadRequestError, match=r"messages\.0\.content\.1\.type: .* images, audio .* not read"):
        client.chat.completions.create(model="mood", messages=[{"role": "user", "content": parts}])


def test_without_a_template_a_chat_is_refused(tmp_path: Path) -> None:
    model = language_model(tmp_path / "model", template=None)
    with served(model=str(model)) as running:
        answer = running.post(
            "/v1/chat/completions", {"model": "model", "messages": [{"role": "user", "content": "a"}]}
        )
    assert answer.status_code == 400 and "has no chat template" in answer.json()["error"]["message"]


def test_embeddings_as_numbers_and_as_bytes(client: openai.OpenAI) -> None:
    """The client asks for base64 unless told otherwise; both are the same numbers."""
    packed = client.embeddings.create(model="mood", input=list(PROMPTS))
    plain = client.embeddings.create(model="mood", input=list(PROMPTS), encoding_format="float")
    assert [len(one.embedding) for one in plain.data] == [32] * 3
    for one, other in zip(packed.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-4) and one.index == other.index
    base = client.embeddings.create(model="base", input=PROMPTS[0]).data[0].embedding
    assert base != pytest.approx(plain.data[0].embedding, abs=1e-3)
    with pytest.raises(openai.BadRequestError, match="have 32"):
        client.embeddings.create(model="mood", input="the", dimensions=16)


def test_asynchronous_client(server: Served) -> None:
    import asyncio

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            answers = await asyncio.gather(
                *(
                    client.completions.create(model=name, prompt=prompt, max_tokens=4, temperature=0)
                    for name in METHODS
                    for prompt in PROMPTS
                )
            )
        return [answer.choices[0].text for answer in answers]

    joint = asyncio.run(ask())
    alone = [
        server.post("/v1/completions", {"model": name, "prompt": prompt, "max_tokens": 4, "temperature": 0})
        for name in METHODS
        for prompt in PROMPTS
    ]
    assert joint == [answer.json()["choices"][0]["text"] for answer in alone]


def test_stop_texts_end_an_answer(client: openai.OpenAI) -> None:
    free = client.completions.create(model="mood", prompt=PROMPTS[0], max_tokens=8, temperature=0).choices[0].text
    words = free.split()
    stop = words[2]
    cut = client.completions.create(model="mood", prompt=PROMPTS[0], max_tokens=8, temperature=0, stop=[stop])
    assert cut.choices[0].finish_reason == "stop" and cut.choices[0].text == free[: free.index(stop)]
    parts = client.completions.create(
        model="mood", prompt=PROMPTS[0], max_tokens=8, temperature=0, stop=stop, stream=True
    )
    assert "".join(choice.text for part in parts for choice in part.choices) == cut.choices[0].text


def test_curl_reads_a_stream(server: Served) -> None:
    body = json.dumps({"model": "intent", "prompt": PROMPTS[1], "max_tokens": 4, "temperature": 0, "stream": True})
    command = ["curl", "-sN", f"{server.url}/v1/completions", "-H", "Content-Type: application/json", "-d", body]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    events = [line.removeprefix("data: ") for line in output.split("\n") if line]
    assert events[-1] == "[DONE]" and all(json.loads(event)["choices"] for event in events[:-1])
    command = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", f"{server.url}/v1/completions", "-d", body]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout == "415"


def test_metrics_are_prometheus_and_add_up(server: Served) -> None:
    def samples() -> dict[str, float]:
        answer = server.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        families = list(text_string_to_metric_families(answer.text))
        assert families and all(family.documentation for family in families)
        return {
            f"{s.name}{sorted(s.labels.items())}": s.value
            for family in families
            for s in family.samples
            if not s.name.endswith("_created")
        }

    before = samples()
    for _ in range(3):
        server.post("/v1/completions", {"model": "acme-tone", "prompt": PROMPTS[0], "max_tokens": 2, "temperature": 0})
    server.post("/v1/completions", {"model": "nobody", "prompt": PROMPTS[0]})
    after = samples()

    def gained(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    assert gained("deltune_delta_requests_total[('delta', 'acme-tone'), ('status', '200')]") == 3
    assert gained("deltune_requests_total[('endpoint', '/v1/completions'), ('status', '404')]") == 1
    assert gained("deltune_request_seconds_count[('endpoint', '/v1/completions')]") == 4
    assert gained("deltune_generated_tokens_total[]") == 6
    assert gained("deltune_prompt_tokens_total[]") > 0
    assert gained("deltune_finished_total[('delta', 'acme-tone')]") == 3
    assert after["deltune_deltas[]"] == len(METHODS)
    assert not [name for name in after if "nobody" in name]


def test_probes_and_ids(server: Served) -> None:
    assert server.get("/health").text == "ok\n" and server.get("/ready").status_code == 200
    assert server.get("/version").json()["version"]
    assert httpx.head(f"{server.url}/ready", trust_env=False).status_code == 200
    assert server.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    new_id = server.get("/health", headers={"X-Request-Id": "a b\tc"}).headers["x-request-id"]
    assert new_id.startswith("req-")
    missing = server.get("/v2/nothing")
    assert missing.status_code == 404 and set(missing.json()["error"]) == {"message", "type", "param", "code"}
    wrong = httpx.delete(server.url + "/v1/completions", trust_env=False)
    assert wrong.status_code == 405 and wrong.json()["error"]["type"] == "invalid_request_error"


def test_a_chat_goes_on_with_its_own_answer(client: openai.OpenAI) -> None:
    """The message of an answer can be sent back as the client has it, with its fields that are empty."""
    messages: list[Any] = [{"role": "user", "content": PROMPTS[0]}]
    first = client.chat.completions.create(model="mood", messages=messages, max_tokens=3, temperature=0)
    messages += [first.choices[0].message, {"role": "user", "content": "and"}]
    second = client.chat.completions.create(model="mood", messages=messages, max_tokens=3, temperature=0)
    assert second.usage is not None and first.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    called: Any = {"role": "assistant", "content": "a", "tool_calls": [call]}
    with pytest.raises(openai.BadRequestError, match="shows no tools"):
        client.chat.completions.create(model="mood", messages=[called])
    with pytest.raises(openai.BadRequestError, match="unknown option 'pictures'"):
        client.chat.completions.create(model="mood", messages=[{"role": "user", "content": "a", "pictures": 1}])  # type: ignore[typeddict-unknown-key, list-item]


def test_an_answer_is_as_long_as_there_is_room_unless_the_request_says(client: openai.OpenAI) -> None:
    """The model of the tests has 64 positions, fewer than a chat's default."""
    messages: Any = [{"role": "user", "content": "the old hammer " * 20}]
    whole = client.chat.completions.create(model="base", messages=messages)
    assert whole.usage is not None and whole.usage.prompt_tokens == 60 and whole.usage.completion_tokens <= 4
    assert whole.choices[0].finish_reason in ("length", "stop")
    with pytest.raises(openai.BadRequestError, match="max_tokens=5"):
        client.chat.completions.create(model="base", messages=messages, max_completion_tokens=5)
    with pytest.raises(openai.BadRequestError, match="can read 64"):
        client.chat.completions.create(model="base", messages=[{"role": "user", "content": "the old hammer " * 22}])


def test_probabilities_have_the_token_that_was_drawn(client: openai.OpenAI) -> None:
    """Under the same text as among the likeliest ones, and beside them where it is none of them."""
    options: Any = {"model": "base", "prompt": PROMPTS[0], "max_tokens": 8, "seed": 5, "stop": ["no such text"]}
    drawn = client.completions.create(**options, temperature=20, logprobs=2).choices[0].logprobs
    assert drawn is not None and drawn.tokens and drawn.top_logprobs and drawn.token_logprobs
    for token, value, likely in zip(drawn.tokens, drawn.token_logprobs, drawn.top_logprobs, strict=True):
        assert likely[token] == value and len(likely) in (2, 3)
    assert any(len(likely) == 3 for likely in drawn.top_logprobs), "at this temperature an unlikely one is drawn"
    chat: Any = {"model": "base", "messages": [{"role": "user", "content": PROMPTS[0]}], "max_tokens": 5}
    answer = client.chat.completions.create(**chat, temperature=0, logprobs=True, top_logprobs=1).choices[0]
    greedy = answer.logprobs
    assert greedy is not None and greedy.content
    assert "".join(one.token for one in greedy.content) == answer.message.content, "with the blanks between words"
    for one in greedy.content:
        assert (one.token, one.logprob) == (one.top_logprobs[0].token, one.top_logprobs[0].logprob)
