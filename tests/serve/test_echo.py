"""Prompts with their probabilities: beside transformers, for every method, in parts, and lm-evaluation-harness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import deltune.serve
import tiny
from deltune.models import align_padding_token, load_model, load_tokenizer
from deltune.serve.engine.requests import Request, Sampling
from deltune.serve.errors import InvalidRequest
from test_templates import END, byte_tokenizer, chain
from train.test_harness import TASK

from .served import METHODS, Served, served

PROMPT = "the old hammer is near a small otter"


@pytest.mark.parametrize("name", ["base", *METHODS])
def test_a_prompt_has_the_probabilities_of_the_model_with_its_delta(
    name: str, server: Served, decoder: tuple[Path, Path]
) -> None:
    """By text and by tokens, with an answer and without, beside transformers' own pass."""
    tokenizer = load_tokenizer(str(decoder[0]))
    ids = tokenizer(PROMPT)["input_ids"][:-1]
    model = load_model(str(decoder[0]), "causal-lm").eval()
    align_padding_token(model, tokenizer)
    if name != "base":
        deltune.load(model, decoder[1] / name)
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0, -len(ids) :].float().log_softmax(-1)
    expected = [float(row[token]) for row, token in zip(logprobs, ids[1:], strict=False)]
    body = {"model": name, "echo": True, "logprobs": 2, "temperature": 0}
    for prompt, tokens in ((PROMPT, 1), (ids, 1), (PROMPT, 0)):
        choice = server.post("/v1/completions", {**body, "prompt": prompt, "max_tokens": tokens}).json()["choices"][0]
        values = choice["logprobs"]
        assert len(values["tokens"]) == len(values["text_offset"]) == len(ids) + tokens
        assert values["token_logprobs"][0] is values["top_logprobs"][0] is None
        assert values["token_logprobs"][1 : len(ids)] == pytest.approx(expected, abs=1e-4)
        for row, top in zip(logprobs, values["top_logprobs"][1:], strict=False):
            assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-4)
        assert PROMPT in choice["text"] and choice["finish_reason"] in ("length", "stop")
    several = server.post("/v1/completions", {**body, "prompt": [PROMPT, "a saw"], "max_tokens": 0, "logprobs": None})
    assert [one["text"] for one in several.json()["choices"]] == [PROMPT, "a saw"]


def test_a_long_prompt_is_read_in_parts_beside_others(decoder: tuple[Path, Path]) -> None:
    model, tokenizer = load_model(str(decoder[0]), "causal-lm"), load_tokenizer(str(decoder[0]))
    sampling = Sampling(2, 0.0, logprobs=1, prompt_logprobs=True)
    requests = [Request("generate", text=PROMPT, delta=name, sampling=sampling) for name in METHODS]
    others = [Request("generate", text=PROMPT, delta=name, sampling=Sampling(4, 0.0)) for name in METHODS]
    answers = []
    for size in (3, 512):
        with deltune.serve.Server(model, tokenizer, deltas=decoder[1], max_prefill_tokens=size) as server:
            futures = [server.submit(request) for pair in zip(requests, others, strict=True) for request in pair]
            answers.append([future.result(60) for future in futures])
    for one, other in zip(*answers, strict=True):
        assert one.text == other.text and len(one.prompt) == len(other.prompt)
        for a, b in zip(one.prompt[1:], other.prompt[1:], strict=True):
            assert a.chosen and b.chosen and a.chosen.logprob == pytest.approx(b.chosen.logprob, abs=1e-4)


def test_an_end_is_reported_and_what_cannot_be_is_refused(server: Served) -> None:
    tokenizer = byte_tokenizer(eos_token="<|end|>")
    with deltune.serve.Server(chain(tokenizer, {"a": END}, eos_token_id=END), tokenizer) as engine:
        sampling = Sampling(1, 0.0, logprobs=0, prompt_logprobs=True)
        answer = engine.submit(Request("generate", text="ba", sampling=sampling)).result(60)
        assert [one.token for one in answer.tokens] == [END] and answer.text == "" and answer.finish_reason == "stop"
        for wrong in (Sampling(0), Sampling(1, logprobs=6, prompt_logprobs=True)):
            with pytest.raises(InvalidRequest, match="prompt_logprobs"):
                engine.submit(Request("generate", text="a", sampling=wrong))
    for options, message in (({"max_tokens": 0}, "needs echo"), ({"echo": True, "stream": True}, "not for a stream")):
        answered = server.post("/v1/completions", {"model": "base", "prompt": "a", **options})
        assert answered.status_code == 400 and message in answered.json()["error"]["message"]


@pytest.mark.slow
def test_the_harness_asks_a_served_delta(tmp_path: Path) -> None:
    """Its ranking tasks over local-completions give the number of `deltune evaluate RUN --harness`."""
    pytest.importorskip("lm_eval", reason="no lm-evaluation-harness: pip install -e '.[harness]'")
    pytest.importorskip("tenacity", reason="no tenacity: pip install 'lm_eval[api]'")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from transformers import AutoConfig, AutoModelForCausalLM

    from deltune.train.config import RunConfig
    from deltune.train.harness import evaluate_harness
    from deltune.train.run import train

    tokenizer = byte_tokenizer("<|begin|> $A", eos_token="<|end|>", bos_token="<|begin|>")
    sizes = {**tiny.FAMILIES["llama"], "max_position_embeddings": 128, "pad_token_id": None}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes, vocab_size=len(tokenizer)))
    align_padding_token(model, tokenizer)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    tiny.lines(tmp_path / "data.jsonl", [{"prompt": f"Say {c}: ", "completion": "zzz"} for c in "abcdefgh"])
    spec = {"model": str(tmp_path / "model"), "data": str(tmp_path / "data.jsonl"), "method": "lora(rank=4)"}
    train(RunConfig.from_flat(**spec, lr=1e-2, steps=40, batch_size=8), tmp_path / "runs" / "run", progress=False)
    rows = [{"question": f"Say {q}: ", "choices": [c * 3 for c in "abcdz"], "answer": 4} for q in "abcdefgh"]
    tiny.lines(tmp_path / "rows.jsonl", rows)
    file = tmp_path / "letters.yaml"
    file.write_text(TASK.format(rows=tmp_path / "rows.jsonl"))
    expected = evaluate_harness(tmp_path / "runs" / "run", [str(file)])["letters"]["acc"]
    manager = TaskManager(include_path=[str(tmp_path)], include_defaults=False)
    scores: dict[str, float] = {}
    with served(model=str(tmp_path / "model"), deltas=str(tmp_path / "runs"), served_name="base") as running:
        for name in ("run", "base"):
            arguments: dict[str, Any] = {
                "model": name, "base_url": f"{running.url}/v1/completions", "tokenizer": str(tmp_path / "model"),
                "tokenizer_backend": "huggingface", "add_bos_token": True, "batch_size": 4, "max_length": 127,
            }  # fmt: skip
            results = simple_evaluate(
                "local-completions", model_args=arguments, tasks=["letters"], task_manager=manager, bootstrap_iters=0
            )
            scores[name] = results["results"]["letters"]["acc,none"]
    assert scores["run"] == expected > scores["base"]
