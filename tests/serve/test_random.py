"""Random arrivals, mixes, cancellations, reloads and faults: every answer is still that of its own delta alone."""

from __future__ import annotations

import functools
import random
import shutil
import tempfile
import threading
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

import deltune
from deltune.errors import DeltuneError
from deltune.files import atomic_folder
from deltune.serve.engine.encoding import PASS_OVERHEAD
from deltune.serve.engine.requests import Answer, Request, Sampling
from deltune.serve.engine.server import Server
from tables.specimens import stir

from .specimens import Deltas, ask, check, check_one, deltas

TENANTS = ("a", "b", "c")
NAMES = ("d0", "d2", "d3", "d4", "d5", "d6")
"""Low rank, prefix, bottleneck, prompts, norms: a delta of each kind, which are reloaded in other versions."""

VERSIONS = 2


@functools.cache
def versions(of: Deltas) -> dict[tuple[str, int], Path]:
    """Each delta in two versions on the disk."""
    saved_folders: dict[tuple[str, int], Path] = {}
    for name in NAMES:
        for number in range(VERSIONS):
            folder = of.folder.parent / f"versions-{of.family}" / f"{name}-{number}"
            model = of.model()
            tuned = deltune.load(model, of.folder / name)
            if number:
                stir(tuned, seed=50 + number, size=0.4)
            tuned.save(folder)
            saved_folders[name, number] = folder
    return saved_folders


@functools.cache
def model_of(of: Deltas) -> Any:
    return of.model()


@functools.cache
def expected(of: Deltas, folder: Path | None, request: Request) -> Answer:
    """What a version answers alone, as the server itself says it when it has nothing else to do.

    That answer is compared with the model's own, so that it is known to be right.
    """
    with Server(of.model()) as server:
        name = request.delta
        if name is not None:
            assert folder is not None
            server.load(name, folder)
        answer = server.submit(request).result(60)
    model = of.model()
    if folder is not None:
        deltune.load(model, folder)
    with torch.no_grad():
        check_one(model, request, answer)
    return answer


ACTIONS = st.one_of(
    st.tuples(
        st.just("ask"), st.sampled_from([None, *NAMES]), st.integers(0, 5), st.sampled_from(TENANTS), st.booleans()
    ),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("reload"), st.sampled_from(NAMES), st.integers(0, VERSIONS - 1)),
    st.tuples(st.just("spoil"), st.sampled_from(NAMES)),
    st.tuples(st.just("fault"), st.sampled_from(NAMES)),
    st.tuples(st.just("refresh")),
    st.tuples(st.just("wait"), st.integers(0, 3)),
)


@pytest.mark.parametrize(("family", "role"), [("bert", "sequence"), ("gpt2", "causal"), ("t5", "seq2seq")])
@settings(deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    actions=st.lists(ACTIONS, min_size=5, max_size=40), loaded=st.integers(1, 6), rows=st.integers(1, 6),
    cache=st.sampled_from([0, 5000, 1 << 20]), part=st.sampled_from([2, 5, 512]),
)  # fmt: skip
@pytest.mark.sample(1)
def test_no_answer_depends_on_others(
    monkeypatch: pytest.MonkeyPatch, family: str, role: str, actions: list[tuple[Any, ...]], loaded: int, rows: int,
    cache: int, part: int,
) -> None:  # fmt: skip
    monkeypatch.setitem(PASS_OVERHEAD, "cpu", 4)  # so that batches as small as these are split
    of = deltas(family, role)
    task = "classify" if role == "sequence" else "generate"
    submitted: list[tuple[Request, Future[Answer]]] = []
    faulty: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in NAMES:
            shutil.copytree(versions(of)[name, 0], root / name)
        with Server(
            of.model(),
            deltas=root,
            max_loaded=loaded,
            max_batch_size=rows,
            max_prefill_tokens=part,
            max_wait=0.0,
            prompt_cache=cache,
        ) as server:
            backbone: Any = server._backbones.first
            run = backbone.run

            def failing(versions_of_rows: Any, call: Any, *place: Any, **options: Any) -> Any:
                if any(row.name in faulty for row in versions_of_rows):
                    raise RuntimeError("a fault")
                return run(versions_of_rows, call, *place, **options)

            backbone.run = failing
            for action, *values in actions:
                if action == "ask":
                    name, number, tenant, timed = values
                    sampling = Sampling(max_tokens=1 + 2 * number, temperature=0.0)
                    request = ask(task, 3 + 4 * number, number, name, tenant=tenant, sampling=sampling)
                    with_timeout = ask(
                        task, 3 + 4 * number, number, name, tenant=tenant, sampling=sampling,
                        timeout=60.0 if timed else None,
                    )  # fmt: skip
                    try:
                        submitted.append((request, server.submit(with_timeout)))
                    except DeltuneError as error:
                        assert "checksum" in str(error) or "unknown" in str(error)
                elif action == "cancel" and submitted:
                    submitted[values[0] % len(submitted)][1].cancel()
                elif action == "reload":
                    name, number = values
                    replaced(root / name, versions(of)[name, number])
                    server.load(name)
                elif action == "spoil":
                    file = root / values[0] / "delta.safetensors"
                    numbers = bytearray((versions(of)[values[0], 0] / file.name).read_bytes())
                    numbers[-1] ^= 1
                    spoiled = file.with_name("spoiled")
                    spoiled.write_bytes(numbers)
                    spoiled.replace(file)  # in one step, lest a read falls between two
                    with pytest.raises(DeltuneError):
                        server.load(values[0])
                elif action == "fault":
                    faulty ^= {values[0]}
                elif action == "refresh":
                    server.refresh()
                elif submitted:
                    for _, future in submitted[-values[0] :]:
                        finished(future)
            results = [(request, finished(future)) for request, future in submitted]
            settle(server)
            assert not server._jobs and not any(server.stats().queued.values())
            assert all(d.users == 0 for d in server._lifecycle.in_memory()) and not server._lifecycle.retired
            assert len(server._lifecycle.in_memory()) <= loaded
            lanes: Any = list(server._lanes.values())
            assert not any(lane.busy or any(lane.jobs()) for lane in lanes)
    folders = {"": None} | {_digest(server, path): path for path in versions(of).values()}
    answered = 0
    for request, answer in results:
        if isinstance(answer, Answer):
            alone = expected(of, folders[answer.version], request_of(request))
            assert answer.delta == request.delta
            assert [c.token for c in answer.tokens] == [c.token for c in alone.tokens]
            assert answer.scores == pytest.approx(alone.scores, abs=1e-6)
            answered += 1
        elif not isinstance(answer, CancelledError):
            assert "a fault" in str(answer) or "checksum" in str(answer), answer
    note(f"{answered} of {len(results)} answered")


def replaced(folder: Path, source: Path) -> None:
    """Put another version in the place of a folder, as saving does."""
    with atomic_folder(folder) as fresh:
        for file in source.iterdir():
            shutil.copy(file, fresh)


def settle(server: Server) -> None:
    """Wait until the engine has taken out what was cancelled."""
    for _ in range(600):
        if not server._jobs and not server._lifecycle.retired:
            return
        threading.Event().wait(0.05)


def request_of(request: Request) -> Request:
    """The same question of nobody in particular."""
    return Request(request.task, tokens=request.tokens, delta=request.delta, sampling=request.sampling)


@functools.cache
def _digest_of(folder: Path) -> str:
    from deltune.serve.engine.folders import read_facts

    return read_facts(folder).version


def _digest(server: Server, folder: Path) -> str:
    return _digest_of(folder)


def finished(future: Future[Answer]) -> Answer | BaseException:
    try:
        return future.result(120)
    except (CancelledError, Exception) as error:
        return error


@pytest.mark.slow
@pytest.mark.parametrize(("family", "role", "number"), [("bert", "sequence", 2_000), ("gpt2", "causal", 500)])
def test_many_requests(family: str, role: str, number: int) -> None:
    """All methods mixed, at random times, more deltas than fit into memory: all answers are right."""
    of = deltas(family, role, all_methods=True)
    task, chance = ("classify" if role == "sequence" else "generate"), random.Random(0)
    names = of.names
    requests = [
        ask(task, chance.randint(1, 30), n % 200, chance.choice(names), tenant=str(chance.randrange(5)))
        for n in range(number)
    ]
    with Server(
        of.model(), deltas=of.folder, max_loaded=30, max_queue=number, max_queue_per_tenant=number, max_batch_size=24,
    ) as server:  # fmt: skip
        answers = [future.result(3600) for future in [server.submit(request) for request in requests]]
        stats = server.stats()
    assert sum(stats.finished.values()) == number and not stats.failed
    check(of, requests, answers)
