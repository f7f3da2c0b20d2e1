"""Deltas of every method on tiny models, and what each of them answers alone."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import deltune
from deltune.errors import DeltuneError
from deltune.methods.spec import Modification
from deltune.serve.engine.requests import Answer, Request, Sampling
from deltune.serve.engine.server import Server
from tables.families import FAMILIES
from tables.methods import METHODS
from tables.specimens import build, stir

FEW = (
    "layernorm", "bitfit(which='norm')", "lora(rank=2)", "prefix(length=3)", "parallel_adapter(rank=4)",
    "prompt(length=3)", "prompt(length=5) + prefix(length=2)", "ia3",
    "apet(lora(rank=2, at='output') + layernorm, parameters=41)", "mam(length=3, rank=4)", "full",
    "prefix(length=2, shift_positions=True)", "prefix(length=2, shift_positions=True, layers='upper half')", "unipelt",
)  # fmt: skip
"""Methods of every kind: norms, low rank, prefixes, bottlenecks, prompts, rescaling, sparse, sums, all weights.

A cache can hold the prefix of some, but not of those with a gate or without a prefix in some layer."""


@dataclass(frozen=True, eq=False)
class Deltas:
    """A base model, and deltas for it on the disk.

    Attributes:
        family: The family of the model.
        role: The class of the model, as in `laws.specimens`.
        folder: The folder of the deltas.
        methods: Their expressions, by name.
    """

    family: str
    role: str
    folder: Path
    methods: dict[str, str]

    def model(self) -> PreTrainedModel:
        """A fresh model in float64, in which rounding changes no greedy token."""
        return build(FAMILIES[self.family], self.role)

    @property
    def names(self) -> list[str | None]:
        """All that can be asked: the base model and every delta."""
        return [None, *self.methods]


@functools.cache
def deltas(family: str, role: str, all_methods: bool = False) -> Deltas:
    """Deltas of a few methods, or of all methods that the family has; each classifier has its own number of labels.

    The folder is removed when the process ends.
    """
    folder = Path(_folders().name) / f"{family}-{role}-{all_methods}"
    made: dict[str, str] = {}
    for number, text in enumerate(METHODS if all_methods else FEW):
        parts = [part for part in deltune.parse(text).parts if isinstance(part, Modification)]
        reads = any(part.positions != "all" or part.form.reads_text or part.form.reads_first_pass for part in parts)
        if role in ("causal", "seq2seq") and reads:  # which a server that generates refuses
            continue
        labels = {"num_labels": 2 + number % 4} if role in ("sequence", "tokens") else {}
        model = build(FAMILIES[family], role, **labels)
        if labels:  # the weights that are drawn after the head's would differ
            inner = build(FAMILIES[family], role).base_model.state_dict()
            model.base_model.load_state_dict(inner)
        try:
            tuned = stir(deltune.attach(model, text), seed=number, size=0.3)
        except DeltuneError:
            continue
        made[f"d{number}"] = text
        tuned.save(folder / f"d{number}")
    assert made
    return Deltas(family, role, folder, made)


@functools.cache
def _folders() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="deltune-serving-")


def ask(task: str, length: int, seed: int, delta: str | None, max_tokens: int | None = None, **values: Any) -> Request:
    """A request with random tokens; to generate, greedily, unless sampling is given."""
    made = torch.Generator().manual_seed(seed)
    tokens = tuple(torch.randint(5, 99, (length,), generator=made).tolist())
    values = {"sampling": Sampling(max_tokens=max_tokens or 2 + seed % 6, temperature=0.0), **values}
    return Request(task, tokens=tokens, delta=delta, **values)  # type: ignore[arg-type]


def answers_of(server: Server, requests: Sequence[Request], seconds: float = 60) -> list[Answer]:
    """The answers to requests that wait at once."""
    return [future.result(seconds) for future in [server.submit(request) for request in requests]]


@contextlib.contextmanager
def holding(server: Server) -> Iterator[threading.Event]:
    """Hold the server's thread between two steps, until the event is set or the block ends."""
    opened, entered = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        assert opened.wait(60)

    thread = threading.Thread(target=server._call, args=(wait,))
    thread.start()
    assert entered.wait(60)
    try:
        yield opened
    finally:
        opened.set()
        thread.join()


@contextlib.contextmanager
def alone(model: PreTrainedModel, deltas: Deltas, name: str | None) -> Iterator[PreTrainedModel]:
    """The model with one delta and nothing else."""
    tuned = None if name is None else deltune.load(model, deltas.folder / name)
    try:
        with torch.no_grad():
            yield model
    finally:
        if tuned is not None:
            tuned.detach()


def check(deltas: Deltas, requests: Sequence[Request], answers: Sequence[Answer]) -> None:
    """Check that every answer is what the row's own delta gives it alone."""
    model = deltas.model()
    for name in deltas.names:
        mine = [(r, a) for r, a in zip(requests, answers, strict=True) if r.delta == name]
        if mine:
            with alone(model, deltas, name):
                for request, answer in mine:
                    check_one(model, request, answer)


def check_one(model: PreTrainedModel, request: Request, answer: Answer) -> None:
    assert answer.delta == request.delta
    assert request.tokens is not None
    assert answer.prompt_tokens == len(request.tokens)
    ids = torch.tensor([request.tokens])
    mask = torch.ones_like(ids)
    if request.task == "generate":
        assert [choice.token for choice in answer.tokens] == greedy(model, ids, request.sampling.max_tokens)
        return
    if request.task == "embed":
        encoder: Any = model.get_encoder() if model.config.is_encoder_decoder else model.base_model
        states = encoder(input_ids=ids, attention_mask=mask)[0][0, -len(request.tokens) :]
        assert torch.allclose(torch.tensor(answer.embedding).double(), states.mean(0), rtol=1e-5, atol=1e-5)
        return
    logits = model(input_ids=ids, attention_mask=mask).logits[0]
    names = [model.config.id2label[i] for i in range(logits.shape[-1])]
    if request.task == "tag":
        assert [tag for _, tag in answer.tags] == [names[i] for i in logits.argmax(-1).tolist()]
        return
    assert list(answer.scores) == names
    scores = torch.tensor(list(answer.scores.values())).double()
    assert torch.allclose(scores, logits.softmax(-1), rtol=1e-5, atol=1e-6)
    assert answer.label == names[int(logits.argmax())]


def greedy(model: PreTrainedModel, ids: torch.Tensor, tokens: int) -> list[int]:
    """What `generate` gives one prompt, without the prompt and without the token that ended it."""
    made: Any = model
    output = made.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, num_beams=1
    )[0].tolist()
    answer: list[int] = output[1:] if model.config.is_encoder_decoder else output[ids.shape[1] :]
    end = made.generation_config.eos_token_id
    ends = end if isinstance(end, list) else [end]
    return answer[:-1] if answer and answer[-1] in ends else answer
