"""Every answer under load is what the row's own delta gives it alone, whatever stands in the other rows."""

from __future__ import annotations

import random

import pytest
import torch

import deltune
import deltune.serve
from deltune.serve.engine.requests import Request, Sampling
from runtime.identity import specimens as identity
from tables.methods import METHODS

from .specimens import Deltas, answers_of, ask, check, deltas

TASKS = {"sequence": "classify", "tokens": "tag", "base": "embed", "causal": "generate", "seq2seq": "generate"}


def mixed(deltas: Deltas, each: int, seed: int = 0, **values: object) -> list[Request]:
    """Requests for every delta, in random order, of random lengths."""
    chance = random.Random(seed)
    task = TASKS[deltas.role]
    made = [
        ask(task, chance.randint(1, 24), seed + number, name, tenant=f"tenant {number % 3}", **values)
        for number, name in enumerate(name for name in deltas.names for _ in range(each))
    ]
    chance.shuffle(made)
    return made


def served(of: Deltas, requests: list[Request], **options: object) -> None:
    with deltune.serve.Server(of.model(), deltas=of.folder, **{"max_batch_size": 8, **options}) as server:  # type: ignore[arg-type]
        futures = [server.submit(request) for request in requests]
        answers = [future.result(120) for future in futures]
        stats = server.stats()
    check(of, requests, answers)
    assert sum(stats.finished.values()) == len(requests) and not stats.failed
    assert not stats.queued and not stats.running


@pytest.mark.parametrize(
    ("family", "role"),
    [
        ("bert", "sequence"), ("roberta", "sequence"), ("bert", "tokens"), ("bert", "base"), ("gpt2", "causal"),
        ("llama", "causal"), ("opt", "causal"), ("qwen3", "causal"), ("mistral", "causal"), ("gemma2", "causal"),
        ("bloom", "causal"), ("bart", "causal"), ("bart", "seq2seq"), ("t5", "seq2seq"), ("gpt2", "sequence"),
    ],
)  # fmt: skip
@pytest.mark.sample(4)
def test_all_methods_in_one_batch(family: str, role: str) -> None:
    of = deltas(family, role)
    served(of, mixed(of, each=3))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "role"), [("bert", "sequence"), ("gpt2", "causal"), ("t5", "seq2seq")])
def test_every_method_of_the_registry(family: str, role: str) -> None:
    of = deltas(family, role, all_methods=True)
    assert len(of.methods) > 0.8 * len(METHODS)
    served(of, mixed(of, each=4, seed=7), max_loaded=40)


@pytest.mark.parametrize(("family", "role"), [("gpt2", "causal"), ("bart", "seq2seq")])
def test_embeddings_of_language_models(family: str, role: str) -> None:
    """Beside their generation, on the same server."""
    of = deltas(family, role)
    requests = mixed(of, each=1)
    requests += [ask("embed", 3 + number, number, name) for number, name in enumerate(of.names)]
    served(of, requests)


def test_rows_that_arrive_while_others_run() -> None:
    """Requests join a running batch one by one and leave it at different times."""
    of = deltas("gpt2", "causal")
    requests = mixed(of, each=2, sampling=Sampling(max_tokens=9, temperature=0.0))
    with deltune.serve.Server(of.model(), deltas=of.folder, max_batch_size=6) as server:
        futures = []
        for request in requests:
            futures.append(server.submit(request))
            futures[len(futures) // 2].exception(0.02) if futures[len(futures) // 2].done() else None
            while len(server._jobs) > 4:  # so that hardly two of them have the same length
                next(iter(server._jobs)).future.exception(60)
        answers = [future.result(60) for future in futures]
    check(of, requests, answers)


@pytest.mark.parametrize("cached", [0, 1 << 20])
def test_prompts_with_the_same_beginning(cached: int) -> None:
    """Its keys and values are read from the cache, only by the same delta and tenant, and change no answer."""
    of = deltas("gpt2", "causal")
    start = ask("generate", 20, 1, None).tokens
    assert start is not None
    requests = [
        Request("generate", tokens=(*start, *(ask("generate", 1 + n, n, None).tokens or ())), delta=name, tenant="a",
                sampling=Sampling(max_tokens=4, temperature=0.0))
        for name in of.names for n in range(3)
    ]  # fmt: skip
    with deltune.serve.Server(of.model(), deltas=of.folder, prompt_cache=cached) as server:
        first = [server.submit(request).result(60) for request in requests]
        again = [server.submit(request) for request in requests]
        second = [future.result(60) for future in again]
        stranger = Request(
            "generate", tokens=requests[0].tokens, tenant="b", sampling=Sampling(max_tokens=1, temperature=0.0)
        )
        assert server.submit(stranger).result(60).cached_tokens == 0
    check(of, requests, first)
    check(of, requests, second)
    if cached:
        assert [answer.cached_tokens for answer in first] == [0, 16, 16] * len(of.names)
        assert all(answer.cached_tokens >= 16 for answer in second)
    else:
        assert not any(answer.cached_tokens for answer in (*first, *second))


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_draws_do_not_depend_on_neighbours(family: str) -> None:
    """A seed gives the same tokens alone, in company and when asked again; another seed gives others."""
    of = deltas(family, "causal" if family == "gpt2" else "seq2seq")
    sampling = [Sampling(max_tokens=8, temperature=1.5, top_p=0.95, top_k=50, seed=seed) for seed in range(3)]
    requests = [
        ask("generate", 5 + n, n, name, sampling=sampling[n % 3]) for n, name in enumerate(of.names) for _ in range(2)
    ]
    with deltune.serve.Server(of.model(), deltas=of.folder) as server:
        alone = [server.submit(request).result(60).tokens for request in requests]
        futures = [server.submit(request) for request in requests]
        assert [future.result(60).tokens for future in futures] == alone
        assert alone[::2] == alone[1::2]
        other = ask("generate", 5, 0, None, sampling=Sampling(max_tokens=8, temperature=1.5, seed=99))
        assert server.submit(other).result(60).tokens != alone[0]


def test_heads_of_several_classes_share_the_weights() -> None:
    """Classifiers, taggers and bare deltas are served by one server over the parameters of one model."""
    parts = [deltas("bert", role) for role in ("sequence", "tokens", "base")]
    base = parts[0].model()
    for part in parts[1:]:  # these specimens were made with weights of their own
        assert part.model().base_model.config.hidden_size == base.config.hidden_size
    of = parts[0]
    with deltune.serve.Server(of.model(), deltas=of.folder) as server:
        first = server._backbones.first.model
        other = server._backbones.for_head("base").model
        shared = {id(parameter) for parameter in first.base_model.parameters()}
        assert all(id(parameter) in shared for parameter in other.base_model.parameters())
        request = ask("embed", 7, 3, "d2")
        answer = server.submit(request).result(60)
    check(of, [request], [answer])


def test_the_model_is_given_back() -> None:
    """After `close` it has its own weights, and nothing of the server."""
    of = deltas("bert", "sequence")
    model = of.model().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    flags = [parameter.requires_grad for parameter in model.parameters()]
    with deltune.serve.Server(model, deltas=of.folder) as server:
        for name in of.names:
            server.submit(ask("classify", 4, 1, name)).result(60)
    assert model.training and "deltune" not in dict(model.named_children())
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("task", ["classify", "embed"])
@pytest.mark.parametrize(
    "family", ["GPT2", "XLNet", "FNet", "ConvBert"], ids=["right", "left", "no mask", "neither side"]
)
def test_padding_is_where_the_family_has_it(family: str, task: str) -> None:
    """Texts beside longer ones: on the side where the family is exact, or in a pass with texts of the same length."""
    entry = next(e for e in identity.entries() if e.class_name == f"{family}ForSequenceClassification")
    model = identity.build(entry)
    generator = random.Random(0)
    texts = [tuple(generator.choices(range(5, 90), k=n)) for n in (2, 30, 9, 9, 17, 5, 2, 40)]
    requests = [Request(task, tokens=tokens) for tokens in texts]  # type: ignore[arg-type]
    with deltune.serve.Server(model, max_wait=0.2) as server:
        alone = [server.submit(request).result(60) for request in requests]
        in_batch = answers_of(server, requests)
    for one, other in zip(in_batch, alone, strict=True):
        assert one.scores == (other.scores and pytest.approx(other.scores, abs=1e-5))
        assert one.embedding == (other.embedding and pytest.approx(other.embedding, abs=1e-4))
