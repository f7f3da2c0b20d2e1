"""What one request, client or tenant does harms no other: long texts and prompts, slow clients, bad bodies, faults."""

from __future__ import annotations

import asyncio
import copy
import json
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from pydantic import ValidationError
from transformers import AutoConfig, AutoModelForCausalLM

import deltune
from deltune.errors import DeltuneError
from deltune.models import load_model, load_tokenizer
from deltune.runtime.attach import find_tuned
from deltune.serve.api.schemas import EmbeddingBody
from deltune.serve.engine import jobs, runners
from deltune.serve.engine.jobs import LONG_TEXT, RequestEncoder
from deltune.serve.engine.requests import Request, Sampling
from deltune.serve.engine.server import Server
from deltune.serve.errors import InvalidRequest, QueueFull, RequestTimeout
from tables.families import FAMILIES
from tables.specimens import build, stir

from .served import Served, served, wait_until
from .specimens import Deltas, answers_of, ask, check, deltas, greedy, holding
from .test_lifecycle import Gate, warm

LONG = "the old hammer " * (LONG_TEXT // 10)


class SlowTokenizer:
    """A tokenizer that waits until it is opened."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.reached, self.open = tokenizer, threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.reached.set()
        assert self.open.wait(60)
        return self.tokenizer(*arguments, **options)


def slow_down(engine: Any) -> SlowTokenizer:
    """Let the tokenizer for long texts wait."""
    encoder = engine._encoder
    encoder._long_tokenizer = SlowTokenizer(copy.deepcopy(encoder.tokenizer))
    slow: SlowTokenizer = encoder._long_tokenizer
    return slow


# -- texts


def test_chats_and_cut_texts_do_not_change_each_other(server: Served) -> None:
    """A tokenizer keeps whether it cuts texts, so that a chat must not be read while a text is."""
    encoder: RequestEncoder = server.engine._encoder
    text = "the old hammer " * 20
    chat = Request("generate", messages=({"role": "user", "content": text},))
    whole = len(encoder.encode(chat).tokens)
    classified = Request("classify", text=text)
    ended, cut = threading.Event(), []

    def classify() -> None:
        while not ended.is_set():
            cut.append(len(encoder.encode(classified, max_length=8).tokens))

    thread, interval = threading.Thread(target=classify), sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        thread.start()
        chats = {len(encoder.encode(chat).tokens) for _ in range(1000)}
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        thread.join()
    assert chats == {whole} and set(cut) == {8}


def test_a_long_text_holds_nobody_up(decoder: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "MOST_CHARACTERS", 10**6)
    with served(decoder, served_name="base") as running:
        slow = slow_down(running.engine)
        statuses: list[int] = []
        body = {"model": "mood", "prompt": LONG, "max_tokens": 2, "n": 3}
        thread = threading.Thread(target=lambda: statuses.append(running.post("/v1/completions", body).status_code))
        thread.start()
        assert slow.reached.wait(60)
        assert httpx.get(running.url + "/health", timeout=20, trust_env=False).status_code == 200
        short = running.post("/v1/completions", {"model": "mood", "prompt": "the old hammer", "max_tokens": 3})
        assert short.status_code == 200 and not statuses
        slow.open.set()
        thread.join(60)
        assert statuses == [400], "it has more tokens than the model has positions"
        wait_until(lambda: not running.engine.stats().queued and not running.engine._jobs)


def test_a_text_that_is_being_read_counts_as_waiting(
    decoder: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is bounded by the queue, ends by its timeout, and is taken back when nobody waits for it."""
    monkeypatch.setattr(jobs, "MOST_CHARACTERS", 10**6)
    model = load_model(str(decoder[0]), "causal-lm")
    request = Request("embed", text=LONG, tenant="a")

    async def main(server: Server, slow: SlowTokenizer) -> None:
        first, second = (asyncio.ensure_future(server.asubmit(request)) for _ in range(2))
        while not slow.reached.is_set():
            await asyncio.sleep(0.01)
        assert server.stats().queued == {"a": 2}
        with pytest.raises(QueueFull):
            await server.asubmit(request)
        first.cancel()  # it is being read
        second.cancel()  # it waits to be read
        assert {type(one) for one in await asyncio.gather(first, second, return_exceptions=True)} == {
            asyncio.CancelledError
        }
        assert server.stats().queued == {"a": 1}
        with pytest.raises(RequestTimeout):
            await server.asubmit(Request("embed", text=LONG, tenant="a", timeout=0.05))
        slow.open.set()
        wait_until(lambda: not server.stats().queued and not server._jobs)

    with Server(model, load_tokenizer(str(decoder[0])), max_queue_per_tenant=2) as server:
        asyncio.run(main(server, slow_down(server)))


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_long_texts_of_one_tenant_do_not_hold_up_those_of_another(
    decoder: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """They are read in turn, whatever their number."""
    monkeypatch.setattr(jobs, "MOST_CHARACTERS", 10**6)
    model, tokenizer = load_model(str(decoder[0]), "causal-lm"), load_tokenizer(str(decoder[0]))
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    read: list[str] = []

    async def main(server: Server, slow: SlowTokenizer) -> None:
        async def submit(tenant: str) -> None:
            long: Any = {"text": LONG} if kind == "text" else {"messages": ({"role": "user", "content": LONG},)}
            with pytest.raises(InvalidRequest, match="can read 64"):
                await server.asubmit(Request("generate", tenant=tenant, **long))
            read.append(tenant)

        burst = [asyncio.ensure_future(submit("a")) for _ in range(8)]
        while not slow.reached.is_set():
            await asyncio.sleep(0.01)
        late = asyncio.ensure_future(submit("b"))
        while server.stats().queued != {"a": 8, "b": 1}:
            await asyncio.sleep(0.01)
        slow.open.set()
        await asyncio.gather(*burst, late)

    with Server(model, tokenizer) as server:
        asyncio.run(main(server, slow_down(server)))
    assert read.index("b") <= 1 and len(read) == 9


def test_a_chat_of_many_empty_messages_is_as_long_as_it_is(decoder: tuple[Path, Path]) -> None:
    """What a template writes for each message counts, so that it is not read where everybody waits."""
    chat = Request("generate", messages=tuple({"role": "user", "content": ""} for _ in range(5000)))
    assert jobs.input_size(chat) > LONG_TEXT
    model, tokenizer = load_model(str(decoder[0]), "causal-lm"), load_tokenizer(str(decoder[0]))
    tokenizer.chat_template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    with Server(model, tokenizer) as server:
        slow_down(server)
        with pytest.raises(InvalidRequest, match="characters, and the model can read 64 tokens"):
            server.submit(chat)


def test_a_text_far_beyond_what_a_model_reads_is_not_read_by_its_tokenizer(decoder: tuple[Path, Path]) -> None:
    """It is refused at once, or its end is cut off where that was asked for; what is left of it is the same."""
    model, tokenizer = load_model(str(decoder[0]), "causal-lm"), load_tokenizer(str(decoder[0]))
    with Server(model, tokenizer) as server:
        slow_down(server)
        for task in ("generate", "embed"):
            with pytest.raises(InvalidRequest, match=r"characters, and the model can read 64 tokens"):
                server.submit(Request(task, text=LONG))  # type: ignore[arg-type]
        cut = server.submit(Request("embed", text=LONG, truncate_prompt_tokens=-1)).result(60)
        tokens = tuple(tokenizer(LONG, truncation=True, max_length=64)["input_ids"])
        assert cut.prompt_tokens == 64
        assert cut.embedding == server.submit(Request("embed", tokens=tokens)).result(60).embedding


# -- prompts


@pytest.mark.parametrize("family", ["gpt2", "llama", "bloom"])
def test_long_prompts_are_read_in_parts(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer is what its row gets alone, no pass reads more of a prompt, and others go on between two parts."""
    of = deltas(family, "causal")
    widths: list[int] = []
    forward = runners.DecoderRunner._forward

    def measured(self: Any, rows: Any, cache: Any, ids: Any, *more: Any, **options: Any) -> torch.Tensor:
        widths.extend([] if options else [len(ids[0])])  # a pass over a delta's prompt reads no request
        return forward(self, rows, cache, ids, *more, **options)

    requests = [
        ask("generate", (3, 21, 38)[number % 3], number, name, max_tokens=12)
        for number, name in enumerate([*of.names, *of.names])
    ]
    with Server(of.model(), deltas=of.folder, max_prefill_tokens=5) as server:
        monkeypatch.setattr(runners.DecoderRunner, "_forward", measured)
        futures = [server.submit(request) for request in requests]
        answers = [future.result(120) for future in futures]
        repeated = server.submit(requests[1]).result(60)
    check(of, requests, answers)
    assert repeated.cached_tokens == 16 and repeated.tokens == answers[1].tokens
    assert max(widths) == 5
    between = [widths[i] for i in range(1, len(widths)) if widths[i - 1] == 5]
    assert between.count(1) > len(between) / 2, "after most parts, the rows that run get a token"


def test_long_prompts_leave_room_for_others() -> None:
    """Neither those of another tenant nor one's own long prompts keep a short one from its answer, or starve."""
    of = deltas("gpt2", "causal")
    one, short = Sampling(max_tokens=1, temperature=0.0), Sampling(max_tokens=3, temperature=0.0)
    ended: list[str] = []
    with Server(of.model(), deltas=of.folder, max_prefill_tokens=2, max_batch_size=4, prompt_cache=0) as server:
        with holding(server) as opened:
            long = [server.submit(ask("generate", 50, seed, None, tenant="a", sampling=one)) for seed in range(8)]
            brief = [
                server.submit(ask("generate", 2, seed, None, tenant="a", sampling=short)) for seed in range(20, 26)
            ]
            other = [server.submit(ask("generate", 2, seed, None, tenant="b", sampling=short)) for seed in (30, 31)]
            for name, futures in (("long", long), ("brief", brief), ("other", other)):
                for future in futures:
                    future.add_done_callback(lambda _, name=name: ended.append(name))  # type: ignore[misc]
            opened.set()
        for future in (*long, *brief, *other):
            future.result(60)
    assert ended[:4].count("other") == 2, ended
    assert "long" not in ended[:8], ended
    assert ended[8:] == ["long"] * 8


def test_a_cancelled_prompt_is_not_read_to_its_end() -> None:
    of = deltas("gpt2", "causal")
    with Server(of.model(), deltas=of.folder, max_prefill_tokens=1, max_batch_size=1) as server:
        for seed in range(3):
            future = server.submit(ask("generate", 50, seed, None))
            wait_until(lambda: server.stats().running)
            future.cancel()
            wait_until(lambda: not server._jobs)
        assert server.submit(ask("generate", 5, 9, None)).result(60).tokens
        assert not any(lane.busy for lane in server._lanes.values())


# -- families

SIZES = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2
}  # fmt: skip
ATTENTION = {**SIZES, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
RECURRENT: dict[str, dict[str, Any]] = {
    "mamba": {**SIZES, "state_size": 8},
    "mamba2": {**SIZES, "state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 16},
    "rwkv": {**SIZES, "attention_hidden_size": 32, "context_length": 64},
    "recurrent_gemma": {**ATTENTION, "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 16},
    "falcon_h1": {
        **ATTENTION, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1,
        "mamba_chunk_size": 16, "head_dim": 8,
    },
    "bamba": {
        **ATTENTION, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1,
        "mamba_chunk_size": 16, "attn_layer_indices": [1],
    },
    "jamba": {
        **ATTENTION, "mamba_d_state": 8, "mamba_dt_rank": 4, "num_experts": 2, "use_mamba_kernels": False,
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    },
}  # fmt: skip
"""Families that remember more of a text than keys and values."""


@pytest.mark.parametrize("family", RECURRENT)
def test_families_that_remember_more_than_keys_are_refused_at_the_start(family: str) -> None:
    """Between two tokens a server keeps keys and values alone, and an answer without the rest would be wrong."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **RECURRENT[family])).train()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    modules = [type(module) for module in model.modules()]
    with pytest.raises(DeltuneError, match=r"cannot generate on a server.*head: base"):
        Server(model)
    assert model.training and find_tuned(model) is None and [type(module) for module in model.modules()] == modules
    with Server(model.base_model) as server:
        embedding = server.submit(Request("embed", tokens=(5, 9, 11, 23))).result(60).embedding
    with torch.no_grad():
        states = model.base_model.eval()(input_ids=torch.tensor([[5, 9, 11, 23]]))[0][0]
    assert torch.allclose(torch.tensor(embedding), states.mean(0), atol=1e-4)


def test_a_server_that_cannot_start_leaves_the_model_alone(tmp_path: Path) -> None:
    model = deltas("gpt2", "causal").model().train()
    with pytest.raises(DeltuneError, match="none"):
        Server(model, deltas=tmp_path / "none")
    assert model.training and find_tuned(model) is None


# -- what deltas put before a text


def test_a_cache_holds_what_a_delta_puts_before_every_text() -> None:
    """A prompt is computed once for a delta, no later pass applies its edits, and its bytes count as the delta's."""
    of = deltas("gpt2", "causal")
    whole = {"prefix(length=3)": 3, "prompt(length=3)": 3, "prompt(length=5) + prefix(length=2)": 7, "layernorm": 0,
             "prefix(length=2, shift_positions=True)": 2,
             "prefix(length=2, shift_positions=True, layers='upper half')": 0, "unipelt": 0}  # fmt: skip
    names = {text: name for name, text in of.methods.items()}
    with Server(of.model(), deltas=of.folder) as server:
        for text, held in whole.items():
            loaded = server.load(names[text])
            before = loaded.bytes
            requests = [ask("generate", 3 + n, n, names[text]) for n in range(3)]
            check(of, requests, answers_of(server, requests))
            (lane,) = server._lanes.values()
            runner: Any = lane.runner  # type: ignore[union-attr]
            (now,) = [one for one in server._lifecycle.in_memory() if one.name == names[text]]
            preamble = now.preamble
            assert preamble is not None and preamble.columns == held and bool(preamble.edits) == bool(held)
            sizes = [tensor.nbytes for pair in preamble.prompt if pair is not None for tensor in pair]
            assert now.bytes - before == sum(sizes)
            assert runner.preamble(now) is preamble
        server.unload(names["prefix(length=3)"])
        assert all(one.preamble is not None for one in server._lifecycle.in_memory())


HOLDS = {
    "gpt2": True, "opt": True, "gpt_neox": True, "llama": True, "qwen2": True, "qwen3": True, "phi": True,
    "olmo2": True, "granite": True, "mistral": False, "gemma2": False, "bloom": False, "bart": False,
}  # fmt: skip
"""Families, and whether their caches hold prefixes and prompts: not where attention has windows, or rows no padding."""


@pytest.mark.parametrize("family", HOLDS)
def test_which_families_hold_prefixes_in_their_caches(family: str) -> None:
    """A fault in what measures it would make every family slower, and be seen nowhere else."""
    with Server(build(FAMILIES[family], "causal")) as server:
        warm(server, ask("generate", 3, 1, None))
        (lane,) = server._lanes.values()
        runner: Any = lane.runner  # type: ignore[union-attr]
        assert runner.holds == HOLDS[family]
        assert not HOLDS[family] or runner.caches_prefixes
        assert not server._backbones.first.attached.names  # the trial is gone


def test_families_that_compute_with_the_values_of_their_cache_keep_prefixes_out_of_it() -> None:
    """DiffLlama repeats values after the cache: a prefix there would be another function."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model("diffllama", **ATTENTION)).double().eval()
    with tempfile.TemporaryDirectory() as folder:
        stir(deltune.attach(copy.deepcopy(made), "prefix(length=3)"), seed=1, size=0.5).save(Path(folder) / "p")
        with Server(copy.deepcopy(made), deltas=folder) as server:
            requests = [ask("generate", 4 + n, n, name) for n in range(2) for name in ("p", None)]
            answers = answers_of(server, requests)
            (lane,) = server._lanes.values()
            assert not lane.runner.caches_prefixes  # type: ignore[union-attr]
        for request, answer in zip(requests, answers, strict=True):
            model = copy.deepcopy(made)
            if request.delta is not None:
                deltune.load(model, Path(folder) / "p")
            expected = greedy(model, torch.tensor([request.tokens]), request.sampling.max_tokens)
            assert [choice.token for choice in answer.tokens] == expected


def test_a_pass_that_fails_for_several_rows_is_right_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row whose beginning is cached reads alone what it could not read beside another."""
    of = deltas("gpt2", "causal")
    start = ask("generate", 20, 1, None).tokens
    assert start is not None
    with Server(of.model(), deltas=of.folder, max_batch_size=4) as server:
        first = Request(
            "generate", tokens=start, delta="d2", tenant="a", sampling=Sampling(max_tokens=4, temperature=0.0)
        )
        check(of, [first], [server.submit(first).result(60)])
        (lane,) = server._lanes.values()
        runner: Any = lane.runner  # type: ignore[union-attr]
        forward, gate, failed = runner._forward, Gate(server), list[int]()

        def failing(rows: Any, *args: Any, **options: Any) -> Any:
            if len(rows) > 1:
                failed.append(len(rows))
                raise RuntimeError("no room for two")
            return forward(rows, *args, **options)

        monkeypatch.setattr(runner, "_forward", failing)
        again = replace(first, tokens=(*start[:17], 5, 9, 11))
        requests = [again, ask("generate", 6, 3, "d3")]
        blocker = server.submit(ask("generate", 3, 5, None, max_tokens=2))
        futures = [server.submit(request) for request in requests]
        gate.release()
        blocker.result(60)
        answers = [future.result(60) for future in futures]
        assert answers[0].cached_tokens == 16 and failed
        check(of, requests, answers)


def test_prompts_with_and_without_positions_in_one_delta(tmp_path: Path) -> None:
    """Positions are shifted where all of its prompts shift them."""
    model = build(FAMILIES["gpt2"], "causal")
    text = "prompt(length=3) + prompt(length=2, positions='none')"
    stir(deltune.attach(model, text), seed=1, size=0.3).save(tmp_path / "p")
    of = Deltas("gpt2", "causal", tmp_path, {"p": text})
    with Server(of.model(), deltas=tmp_path) as server:
        requests = [ask("generate", 3 + n, n, "p") for n in range(3)]
        check(of, requests, answers_of(server, requests))


def test_what_caches_hold_counts_against_the_bytes_of_deltas(tmp_path: Path) -> None:
    """Versions that nobody needs go when those in memory have grown too large."""
    for number in range(4):
        model = build(FAMILIES["gpt2"], "causal")
        stir(deltune.attach(model, "prompt(length=8)"), seed=number, size=0.3).save(tmp_path / f"p{number}")
    with Server(build(FAMILIES["gpt2"], "causal"), deltas=tmp_path) as server:
        size = server.load("p0").bytes
    limit = 4 * size + 10
    with Server(build(FAMILIES["gpt2"], "causal"), deltas=tmp_path, max_loaded_bytes=limit) as server:
        for number in range(4):
            server.load(f"p{number}")
        assert server.stats().evictions == 0
        for number in range(4):
            assert server.submit(ask("generate", 4, number, f"p{number}")).result(60).tokens
        wait_until(lambda: sum(one.bytes for one in server._lifecycle.in_memory()) <= limit)
        assert server.stats().evictions > 0


# -- faults


def test_a_fault_between_two_steps_loses_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """When rows cannot be put into one batch, such as for want of memory, each of them hears of it."""
    of = deltas("gpt2", "causal")
    join = runners.assemble
    faults = iter([MemoryError("no room")])

    def failing(*arguments: Any, **options: Any) -> Any:
        for fault in faults:
            raise fault
        return join(*arguments, **options)

    with Server(of.model(), deltas=of.folder) as server:
        long = Sampling(max_tokens=50, temperature=0.0)
        futures = []
        with server.stream(ask("generate", 4, 1, None, sampling=long)) as stream:
            next(stream)
            monkeypatch.setattr(runners, "assemble", failing)
            futures = [server.submit(ask("generate", 5, seed, None, sampling=long)) for seed in (2, 3)]
            with pytest.raises(DeltuneError, match="no room"):
                list(stream)
        for future in futures:
            error = future.exception(30)
            assert error is None or "no room" in str(error)
        request = ask("generate", 5, 4, None)
        check(of, [request], [server.submit(request).result(30)])
        wait_until(lambda: not server._jobs)
        assert not server.stats().queued and not server.stats().running


# -- clients


@pytest.fixture(scope="module")
def impatient(decoder: tuple[Path, Path]) -> Iterator[Served]:
    with served(decoder, watch=0, served_name="base", log="off", header_timeout=0.5) as running:
        yield running


def connect(to: Served) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(to.url.rsplit(":", 1)[1])))
    connection.settimeout(20)
    return connection


def receive_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def receive_answer(connection: socket.socket) -> tuple[int, bytes]:
    """The status and the whole body of one answer, which may arrive in several pieces."""
    answer = HTTPResponse(connection)
    answer.begin()
    return answer.status, answer.read()


def test_slow_headers_end_a_connection(impatient: Served) -> None:
    begun = time.monotonic()
    with connect(impatient) as idle, connect(impatient) as slow:
        with pytest.raises(OSError):
            for byte in b"GET /health HTTP/1.1\r\n" + b"X-A: b\r\n" * 1000:
                slow.sendall(bytes([byte]))
                time.sleep(0.02)
        assert receive_all(idle) == b""
    assert 0.4 < time.monotonic() - begun < 15


def test_a_connection_that_is_kept_waits_for_its_next_request(impatient: Served) -> None:
    with connect(impatient) as connection:
        for pause in (0.0, 0.9):
            time.sleep(pause)
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert receive_answer(connection) == (200, b"ok\n")
        connection.sendall(b"GET /heal")
        assert receive_all(connection).startswith(b"HTTP/1.1 408")


def test_headers_without_end_are_refused(impatient: Served) -> None:
    with connect(impatient) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX: " + b"a" * 100_000)
        assert receive_all(connection).startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))


def test_long_answers_outlive_the_time_for_headers(impatient: Served) -> None:
    with connect(impatient) as connection:
        body = json.dumps({"model": "base", "prompt": "the", "max_tokens": 2}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body))
        time.sleep(0.9)  # a body has a time of its own
        connection.sendall(body)
        assert receive_answer(connection)[0] == 200


def test_a_body_of_many_mistakes_is_refused_soon(impatient: Served) -> None:
    body = {"model": "base", "input": "x", **{f"option{i}": i for i in range(100_000)}}
    answer = impatient.post("/v1/embeddings", body)
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(
        "the request has 100,000 mistakes"
    )
    assert len(answer.text) < 5000
    for values in ([1] * 10_000 + ["x"], ["x"] * 10_000 + [1], [[]] * 10_000 + [3]):
        with pytest.raises(ValidationError) as caught:
            EmbeddingBody.model_validate_json(json.dumps({"model": "base", "input": values}))
        assert caught.value.error_count() < 10
