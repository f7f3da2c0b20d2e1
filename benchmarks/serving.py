"""The server's engine beside PEFT, which switches adapters from one request to the next, and beside the bare model.

Throughput is that of requests which all wait at once, so that nothing is measured but the work.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForSequenceClassification

import deltune
from deltune.models import packaged_minilm
from deltune.serve.engine.encoding import EncodingLane
from deltune.serve.engine.requests import Answer, Request, Sampling
from deltune.serve.engine.server import Server
from deltune.serve.errors import QueueFull
from deltune.serve.loading import tune_garbage_collection
from deltune.studies.jobs.timed_model import time_interleaved

from .frame import Piece
from .peers import PAIRS, Pair
from .rows import Row, Target, compared
from .shapes import VOCABULARY, Shape, build, minilm, tiny

MORE = {
    "encoder": (Pair("lora, r=16", "lora(rank=16)", lambda s: _lora(s, 16)),
                Pair("prefix, l=8", "prefix(length=8)", lambda s: _prefix(s, 8))),
    "decoder": (Pair("lora, r=16", "lora(rank=16)", lambda s: _lora(s, 16)),
                Pair("lora, r=4", "lora(rank=4)", lambda s: _lora(s, 4)),
                Pair("prefix, l=8", "prefix(length=8)", lambda s: _prefix(s, 8))),
}  # fmt: skip
"""What makes eight methods of those that PEFT has too."""

EACH = {"encoder": 4, "decoder": 2}
"""Tenants of each method."""


def _lora(shape: Shape, rank: int) -> Any:
    import peft

    return peft.LoraConfig(task_type=shape.task, r=rank, lora_alpha=rank)


def _prefix(shape: Shape, length: int) -> Any:
    import peft

    return peft.PrefixTuningConfig(task_type=shape.task, num_virtual_tokens=length)


def pairs_of(shape: Shape) -> list[Pair]:
    """Eight methods that both libraries have for a shape."""
    pairs = [
        pair for pair in (*PAIRS, *MORE[shape.kind]) if shape.kind == "encoder" or pair.name != "biases of linears"
    ]
    return pairs[:8]


def tenants_of(shape: Shape) -> dict[str, Pair]:
    """The tenants' names, each with its method; the methods take turns."""
    pairs = pairs_of(shape)
    return {f"tenant{n}": pairs[n % len(pairs)] for n in range(EACH[shape.kind] * len(pairs))}


def requests_of(shape: Shape, number: int, new: int) -> list[Request]:
    """Requests of random tenants, with random tokens, from a quarter of the shape's tokens to all."""
    chance, names = random.Random(0), list(tenants_of(shape))
    made = torch.Generator().manual_seed(0)
    requests = []
    for _ in range(number):
        name = chance.choice(names)
        tokens = torch.randint(5, VOCABULARY, (chance.randint(shape.tokens // 4, shape.tokens),), generator=made)
        sampling = Sampling(max_tokens=new, temperature=0.0)
        task = "classify" if shape.kind == "encoder" else "generate"
        requests.append(Request(task, tokens=tuple(tokens.tolist()), delta=name, tenant=name, sampling=sampling))  # type: ignore[arg-type]
    return requests


def saved(shape: Shape, folder: Path) -> Path:
    """The tenants' deltas on the disk."""
    for name, pair in tenants_of(shape).items():
        deltune.attach(build(shape), pair.ours).save(folder / name)
    return folder


def served(shape: Shape, folder: Path | None, **options: Any) -> Server:
    """A server with all of the tenants in memory, or without any; it generates as many tokens as it is asked to."""
    model = build(shape)
    if model.can_generate():
        model.config.use_cache = True
        model.generation_config.eos_token_id = None
    bounds = {
        "max_queue": 100_000,
        "max_queue_per_tenant": 100_000,
        "prompt_cache": 0,
    }
    server = Server(model, deltas=folder, **{**bounds, **options})
    for name in tenants_of(shape) if folder is not None else ():
        server.load(name)
    return server


def all_at_once(server: Server, requests: Sequence[Request]) -> list[Answer]:
    """Answers to requests that wait at once, in a process that computes nothing but them."""
    return [future.result() for future in [server.submit(request) for request in requests]]


def theirs(shape: Shape) -> dict[str, Any]:
    """PEFT's model of each method, over the same weights, with an adapter for each of its tenants."""
    import peft

    like, models, of_method = build(shape), {}, {}
    for name, pair in tenants_of(shape).items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if pair.name not in of_method:
                of_method[pair.name] = peft.get_peft_model(build(shape, like), pair.peft(shape), adapter_name=name)
            else:
                of_method[pair.name].add_adapter(name, pair.peft(shape))
        models[name] = of_method[pair.name].eval()
    return models


def switched(models: Mapping[str, Any], requests: Sequence[Request], new: int) -> None:
    """PEFT's answers, one request after the other, each with its own adapter."""
    for request in requests:
        model = models[str(request.delta)]
        model.set_adapter(request.delta)
        ids = torch.tensor([request.tokens])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with torch.no_grad():
            if request.task == "classify":
                model(**inputs).logits.softmax(-1).tolist()
            else:
                model.generate(**inputs, max_new_tokens=new, min_new_tokens=new, do_sample=False, num_beams=1)


def recorded(server: Server, requests: Sequence[Request]) -> list[dict[str, torch.Tensor]]:
    """The batches in which a server that runs one pass at a time, on all cores, answers requests."""
    all_at_once(server, requests)
    batches: list[dict[str, torch.Tensor]] = []
    (lane,) = server._lanes.values()
    assert isinstance(lane, EncodingLane)
    make = lane._batch

    def record(jobs: Any) -> dict[str, torch.Tensor]:
        batches.append(make(jobs))
        return batches[-1]

    lane._batch = record  # type: ignore[method-assign]
    all_at_once(server, requests)
    return batches


def classified(shape: Shape, number: int = 256, rounds: int = 7) -> list[Row]:
    """Throughput of classification beside PEFT's and that of the bare model with the same batches."""
    requests = requests_of(shape, number, 0)
    with tempfile.TemporaryDirectory() as folder, served(shape, saved(shape, Path(folder)), max_wait=0.0) as server:
        all_at_once(server, requests)
        batches = recorded(server, requests)
        bare, models = build(shape).eval(), theirs(shape)

        def run_bare() -> None:
            with torch.inference_mode():
                for batch in batches:
                    bare(**batch)

        gc.collect()
        cases: dict[str, Callable[[], object]] = {
            "ours": partial(all_at_once, server, requests),
            "theirs": partial(switched, models, requests, 0),
            "bare": run_bare,
        }
        seconds = time_interleaved(cases, rounds)
    what = f"{len(tenants_of(shape))} tenants, 8 methods, {number} requests; {shape.name}"
    note = f"{number / statistics.median(seconds['ours']):,.0f} requests a second"
    name, ours = f"classification, throughput / {{}}: {what}", seconds["ours"]
    return [
        compared(name.format("PEFT switching adapters"), seconds["theirs"], ours, Target(4, "at least"), note),
        compared(
            name.format("the bare model with the same batches"),
            seconds["bare"],
            ours,
            Target(0.8, "at least"),
            "the batches of a server that runs one pass at a time",
        ),
    ]


def generated(shape: Shape, number: int = 32, new: int = 24, rounds: int = 5) -> list[Row]:
    """Tokens a second beside PEFT's, and beside the same engine with the bare model."""
    requests = requests_of(shape, number, new)
    plain = [replace(request, delta=None) for request in requests]
    with (
        tempfile.TemporaryDirectory() as folder,
        served(shape, saved(shape, Path(folder)), max_batch_size=16) as server,
        served(shape, None, max_batch_size=16) as bare,
    ):
        models = theirs(shape)
        gc.collect()
        cases: dict[str, Callable[[], object]] = {
            "ours": partial(all_at_once, server, requests),
            "theirs": partial(switched, models, requests, new),
            "bare": partial(all_at_once, bare, plain),
        }
        seconds = time_interleaved(cases, rounds)
    what = f"{len(tenants_of(shape))} tenants, 8 methods, {number} requests of {new} tokens; {shape.name}"
    note = f"{number * new / statistics.median(seconds['ours']):,.0f} tokens a second"
    name, ours = f"generation, throughput / {{}}: {what}", seconds["ours"]
    return [
        compared(name.format("PEFT switching adapters"), seconds["theirs"], ours, Target(3, "at least"), note),
        compared(name.format("the bare model's continuous batch"), seconds["bare"], ours, Target(0.8, "at least")),
    ]


def arrivals(
    server: Server, requests: Sequence[Request], rate: float, stop: threading.Event, tenant: str
) -> list[float]:
    """Send requests of one tenant at random times until `stop`; return how long each answered one took."""
    chance, took, futures = random.Random(tenant), [], []

    def sent(request: Request) -> None:
        began = time.perf_counter()
        try:
            future: Future[Answer] = server.submit(replace(request, tenant=tenant))
        except QueueFull:
            return
        future.add_done_callback(lambda _: took.append(time.perf_counter() - began))
        futures.append(future)

    due = time.perf_counter()
    for request in itertools.cycle(requests):
        due += chance.expovariate(rate)
        if stop.wait(max(0.0, due - time.perf_counter())):
            break
        sent(request)
    for future in futures:
        future.result(120)
    return took


def shared(shape: Shape, seconds: float = 60.0, tenants: int = 4) -> list[Row]:
    """The 99th percentile of a light tenant's latency while another sends ten times its share, over that without it."""
    requests = requests_of(shape, 256, 0)
    options = {"max_queue_per_tenant": 256}
    with tempfile.TemporaryDirectory() as folder, served(shape, saved(shape, Path(folder)), **options) as server:
        all_at_once(server, requests)
        tune_garbage_collection()  # as `deltune serve` does
        began = time.perf_counter()
        all_at_once(server, requests)
        share = len(requests) / (time.perf_counter() - began) / tenants
        percentiles = {}
        for case, heavy in (("without", 0.5), ("with", 10.0)):
            stop, results = threading.Event(), dict[str, Any]()
            rates = {"light": 0.25 * share, "heavy": heavy * share}
            rates |= {f"other{n}": 0.5 * share for n in range(tenants - 2)}

            def send(name: str, rate: float, results: dict[str, list[float]] = results, stop: Any = stop) -> None:
                results[name] = arrivals(server, requests, rate, stop, name)

            threads = [threading.Thread(target=send, args=pair) for pair in rates.items()]
            for thread in threads:
                thread.start()
            stop.wait(seconds)
            stop.set()
            for thread in threads:
                thread.join()
            percentiles[case] = sorted(results["light"])
    p99 = {case: took[int(0.99 * (len(took) - 1))] for case, took in percentiles.items()}
    note = ", ".join(f"{case} {1000 * p99[case]:.0f} ms of {len(took)} requests" for case, took in percentiles.items())
    name = f"99th percentile of a light tenant, another sends ten times its share / half of it: {shape.name}"
    return [Row(name, p99["with"] / p99["without"], Target(2.0), note=note)]


def stored(shape: Shape, deltas: int = 1000, loaded: int = 64, number: int = 2000) -> list[Row]:
    """A thousand deltas on the disk, of which 64 are in memory, and requests by Zipf's law."""
    methods = ("lora(rank=8)", "layernorm", "ia3", "prefix(length=16)")
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for number_of_method, method in enumerate(methods):
            deltune.attach(build(shape), method).save(root / f"d{number_of_method}")
        for n in range(len(methods), deltas):
            source, target = root / f"d{n % len(methods)}", root / f"d{n}"
            target.mkdir()
            shutil.copy(source / "delta.json", target)
            os.link(source / "delta.safetensors", target / "delta.safetensors")
        began = time.perf_counter()
        bounds = {"max_loaded": loaded, "max_queue": 100_000, "max_queue_per_tenant": 100_000}
        with Server(build(shape), deltas=root, **bounds) as server:
            tune_garbage_collection()  # as `deltune serve` does
            server.submit(Request("classify", tokens=(5, 6), delta="d0")).result()
            first = time.perf_counter() - began
            weights = [1 / (rank + 1) for rank in range(deltas)]
            names = chance.choices([f"d{n}" for n in range(deltas)], weights, k=number)
            before = server.stats()
            for start in range(0, number, 32):
                some = names[start : start + 32]
                all_at_once(server, [Request("classify", tokens=tuple(range(5, 21)), delta=name) for name in some])
            stats = server.stats()
    misses = stats.loads - before.loads
    what = f"{deltas:,} deltas on the disk, {loaded} loaded, Zipf; {shape.name}"
    each = 1000 * (stats.load_seconds - before.load_seconds) / max(misses, 1)
    return [
        Row(f"hit ratio: {what}", 1 - misses / number, unit="", note=f"{number:,} requests, {misses} misses"),
        Row(f"time to load a miss: {what}", each, Target(5.0), unit="ms", note="mean of the misses"),
        Row(f"first answer after the start: {what}", first, Target(8.0), unit="s", note="the model is in memory"),
    ]


MIXED = (
    "layernorm", "bitfit", "lora(rank=4)", "ia3", "adapter(rank=8)", "scaled_parallel_adapter(rank=8)",
    "multi_head_parallel_adapter(length=4)", "prefix(length=4)", "prompt(length=4)", "prefix(length=3) + layernorm",
    "mam(length=4, rank=4)", "unipelt", "apet(lora, parameters=200)", "full",
)  # fmt: skip
"""Methods of every kind, whose answers under load are compared with those of the row alone."""


def alone(model: Any, request: Request, new: int) -> torch.Tensor:
    """What a model answers to one request, with the delta that is in use: its probabilities, or its greedy tokens."""
    ids = torch.tensor([request.tokens])
    with torch.no_grad():
        if request.task == "classify":
            return model(input_ids=ids).logits[0].softmax(-1)
        mask = torch.ones_like(ids)
        return model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False)[0, ids.shape[1] :]


def equal(shape: Shape, number: int, new: int = 6) -> list[Row]:
    """Answers under load beside those of each row alone, with all methods in the same batches, in float64.

    Probabilities may differ by rounding; greedy tokens must be the same.
    """
    chance, made = random.Random(0), torch.Generator().manual_seed(0)
    build_one = partial(_decided, shape)
    with tempfile.TemporaryDirectory() as folder:
        names: list[str | None] = [None]
        for method in MIXED:
            tuned = deltune.attach(build_one(), method)
            with torch.no_grad():
                for parameter in tuned.trainable_parameters():
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=made).to(parameter.dtype))
            names.append(f"d{len(names)}")
            tuned.save(Path(folder) / str(names[-1]))
        task = "classify" if shape.kind == "encoder" else "generate"
        sampling = Sampling(max_tokens=new, temperature=0.0)
        requests = [
            Request(
                task,  # type: ignore[arg-type]
                tokens=tuple(torch.randint(5, VOCABULARY, (chance.randint(2, shape.tokens),), generator=made).tolist()),
                delta=chance.choice(names),
                tenant=f"tenant{chance.randrange(8)}",
                sampling=sampling,
            )
            for _ in range(number)
        ]
        bounds = {"max_queue": number, "max_queue_per_tenant": number, "max_loaded": 12}
        with Server(build_one(), deltas=folder, **bounds) as server:
            answers = all_at_once(server, requests)
        model, different, largest = build_one(), 0, 0.0
        for name in names:
            if name is not None:
                deltune.load(model, Path(folder) / name)
            for request, answer in zip(requests, answers, strict=True):
                if request.delta != name:
                    continue
                expected = alone(model, request, new)
                if task == "classify":
                    largest = max(largest, float((expected - torch.tensor(list(answer.scores.values()))).abs().max()))
                else:
                    different += expected.tolist() != [choice.token for choice in answer.tokens]
            if name is not None:
                deltune.tuned(model).detach()
    what = f"{number:,} requests, {len(names)} deltas of all kinds of methods and the base model mixed"
    if task == "classify":
        return [Row(f"classification under load, difference to the row alone: {what}", largest, Target(1e-6), unit="")]
    return [Row(f"generation under load, answers unlike the row alone: {what}", different, Target(0), unit="")]


def _decided(shape: Shape) -> Any:
    """A model in float64, in which rounding decides no greedy token."""
    return build(shape).double().eval()


def killed(methods: Sequence[str] = MIXED) -> list[Row]:
    """`deltune serve` is killed while it answers, and started again; the time includes Python and loading the model."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model = AutoModelForSequenceClassification.from_pretrained(packaged_minilm(), num_labels=2)
        for number, method in enumerate(methods):
            tuned = deltune.attach(model, method)
            tuned.save(root / f"d{number}")
            tuned.detach()
        before = _digests(root)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "deltune", "serve", "minilm", "--deltas", folder, "--port", str(port)]
        first_answers = []
        for _ in range(2):
            began = time.perf_counter()
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
                    _ask_until_answered(client, process)
                    first_answers.append(time.perf_counter() - began)
                    with contextlib.suppress(httpx.TimeoutException):  # it is killed while it answers this
                        client.post("/classify", json={"model": "d1", "input": ["a waste of time"] * 200}, timeout=0.2)
            finally:
                process.kill()
                process.wait()
        after = _digests(root)
    harmed = sum(digest != after.get(file) for file, digest in before.items())
    what = f"kill -9 under load, {len(methods)} deltas, packaged MiniLM"
    return [
        Row(f"first answer after a restart: {what}", first_answers[1], Target(8.0), unit="s"),
        Row(f"files of the folder that were harmed: {what}", harmed, Target(0), unit=""),
    ]


def _ask_until_answered(client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    while True:
        if process.poll() is not None:
            raise RuntimeError(f"the server has ended with exit code {process.returncode}")
        with contextlib.suppress(httpx.ConnectError):
            answer = client.post("/classify", json={"model": "d0", "input": "a wonderful evening"})
            if answer.status_code == 200:
                return
        time.sleep(0.05)


def _digests(root: Path) -> dict[Path, str]:
    return {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in root.rglob("*") if file.is_file()}


def pieces() -> list[Piece]:
    encoder, decoder = (
        replace(minilm("encoder", True, 0.0), tokens=64),
        replace(minilm("decoder", True, 0.0), tokens=32),
    )
    return [
        Piece("serving: classification", partial(classified, encoder), 60.0),
        Piece("serving: generation", partial(generated, decoder), 120.0),
        Piece("serving: a light tenant", partial(shared, encoder), 130.0),
        Piece("serving: deltas on the disk", partial(stored, encoder), 40.0),
        Piece("serving: every answer, classification", partial(equal, replace(tiny("encoder"), tokens=48), 8000), 90.0),
        Piece("serving: every answer, generation", partial(equal, replace(tiny("decoder"), tokens=24), 2000), 120.0),
        Piece("serving: kill -9", killed, 30.0),
    ]
