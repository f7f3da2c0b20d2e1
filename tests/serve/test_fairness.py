"""No tenant waits for another's burst beyond its share. Counted in passes and tokens, not in seconds."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import deltune
import deltune.serve
from deltune.serve.engine.encoding import PASS_OVERHEAD
from deltune.serve.engine.jobs import Job
from deltune.serve.engine.lifecycle import Lifecycle
from deltune.serve.engine.queue import FairQueue, FairShare
from deltune.serve.engine.requests import Answer, Request, Sampling
from deltune.serve.engine.server import Server

from .specimens import ask, check, deltas
from .test_lifecycle import Gate, warm


def counted(server: Server) -> list[list[str]]:
    """The tenants of each pass; rows of no request are left out."""
    passes: list[list[str]] = []
    for lane in server._lanes.values():
        runner: Any = lane.runner  # type: ignore[union-attr]
        step, read = runner.step, runner.read

        def stepped(batch: Any, step: Any = step) -> Any:
            passes.append([row.job.tenant for row in batch.rows])
            return step(batch)

        def prompted(rows: Any, read: Any = read) -> Any:
            passes.append([row.job.tenant for row in rows])
            return read(rows)

        runner.step, runner.read = stepped, prompted
    return passes


def passes_until_answered(server: Server, gate: Gate, delta: str, burst: list[Future[Answer]]) -> int:
    """How many passes begin until a light tenant, who asks while a burst of another is answered, has its answer."""
    gate.step(2)
    assert gate.waits.wait(60)
    began = gate.passes
    light = server.submit(ask("classify", 8, 1, delta, tenant="light"))
    done: list[int] = []
    light.add_done_callback(lambda _: done.append(gate.passes))
    gate.release()
    for future in (light, *burst):
        future.result(60)
    return done[0] - began


@pytest.mark.parametrize("burst", [8, 40])
def test_a_light_tenant_does_not_wait_for_a_burst_of_generation(burst: int) -> None:
    """Its rows enter at once: a row of the other tenant is put aside, and goes on later where it was."""
    of = deltas("gpt2", "causal")
    long = [ask("generate", 4, n, "d2", tenant="heavy", max_tokens=30) for n in range(burst)]
    light = ask("generate", 4, 99, "d3", tenant="light", max_tokens=5)
    with Server(of.model(), deltas=of.folder, max_batch_size=4) as server:
        for request in (light, long[0]):
            warm(server, ask("generate", 3, 1, request.delta, tenant="warm", sampling=Sampling(max_tokens=1)))
        passes = counted(server)
        gate = Gate(server)
        futures = [server.submit(request) for request in long]
        gate.step(12)
        before = len(passes)
        future = server.submit(light)
        done: list[int] = []
        future.add_done_callback(lambda _: done.append(len(passes)))
        gate.release()
        answer = future.result(60)
        answers = [f.result(60) for f in futures]
        length = len(answer.tokens)
    with_light = [p for p in passes[before - 1 :] if "light" in p]
    assert len(with_light) <= length
    assert done[0] - before <= 2 * length + 4, "the two kinds of rows are in the same passes, or take turns"
    assert all(len(p) <= 4 for p in passes)
    check(of, [*long[:6], light], [*answers[:6], answer])


def test_a_light_tenant_does_not_wait_for_a_burst_of_classification() -> None:
    of = deltas("bert", "sequence")
    many = [ask("classify", 8, n, "d2", tenant="heavy") for n in range(60)]
    with Server(of.model(), deltas=of.folder, max_batch_size=4, max_wait=0.0) as server:
        for name in ("d2", "d3"):
            warm(server, ask("classify", 3, 1, name, tenant="warm"))
        gate = Gate(server)
        futures = [server.submit(request) for request in many]
        assert passes_until_answered(server, gate, "d3", futures) <= 1, "it is in the next batch"
        assert gate.passes >= 15


def test_light_tenants_share_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would otherwise have one of its own, with requests of the heavy tenant that are of similar length."""
    monkeypatch.setitem(PASS_OVERHEAD, "cpu", 1)  # so that requests of other lengths have a pass of their own
    of = deltas("bert", "sequence")
    many = [ask("classify", 3 + n % 4, n, "d2", tenant="heavy") for n in range(60)]
    few = [ask("classify", length, length, "d3", tenant=f"light{length}") for length in (6, 9, 12)]
    with Server(of.model(), deltas=of.folder, max_batch_size=8, max_wait=0.0, max_pass_seconds=60.0) as server:
        for name in ("d2", "d3"):
            warm(server, ask("classify", 3, 1, name, tenant="warm"))
        gate = Gate(server)
        futures = [server.submit(request) for request in many]
        gate.step(2)
        assert gate.waits.wait(60)
        began, done = gate.passes, list[int]()
        for request in few:
            futures.append(server.submit(request))
            futures[-1].add_done_callback(lambda _: done.append(gate.passes))
        gate.release()
        answers = [future.result(60) for future in futures]
    assert done == [began + 1] * 3
    check(of, [*many, *few], answers)


def test_a_long_text_of_a_light_tenant_has_a_pass_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PASS_OVERHEAD, "cpu", 1)
    of = deltas("bert", "sequence")
    requests = [ask("classify", 4, n, "d2", tenant="heavy") for n in range(40)]
    requests.insert(8, ask("classify", 30, 1, "d2", tenant="light"))
    with Server(of.model(), deltas=of.folder, max_batch_size=8, max_wait=0.0, max_pass_seconds=60.0) as server:
        warm(server, ask("classify", 3, 1, "d2", tenant="warm"))
        gate = Gate(server)
        futures = [server.submit(request) for request in requests]
        gate.release()
        answers = [future.result(60) for future in futures]
        assert gate.passes <= 7, "the first, one with the long text, and five with those of the heavy tenant"
    check(of, requests, answers)


def test_tenants_are_light_beside_others_only() -> None:
    queue: FairQueue[Any] = FairQueue(FairShare())
    for tenant, requests in (("a", 16), ("b", 2), ("c", 18)):
        for _ in range(requests):
            queue.push(Job(Request("classify", tenant=tenant), {"input_ids": [1]}))
    assert not queue.light_tenants(), "b has a sixth of the mean"
    for _ in range(16):
        queue.push(Job(Request("classify", tenant="c"), {"input_ids": [1]}))
    assert queue.light_tenants() == {"b"}
    equal: FairQueue[Any] = FairQueue(FairShare())
    assert not equal.light_tenants()
    for tenant in "ab":
        equal.push(Job(Request("classify", tenant=tenant), {"input_ids": [1]}))
    assert not equal.light_tenants()


@pytest.mark.parametrize(("seconds", "passes"), [(1e-6, 12), (3600.0, 4)])
def test_a_pass_is_as_long_as_it_may_be(seconds: float, passes: int) -> None:
    """By the speed of the passes before, which the warm request shows."""
    of = deltas("bert", "sequence")
    many = [ask("classify", 8, n, "d2") for n in range(12)]
    with Server(of.model(), deltas=of.folder, max_batch_size=4, max_wait=0.0, max_pass_seconds=seconds) as server:
        warm(server, ask("classify", 3, 1, "d2", tenant="warm"))
        gate = Gate(server)
        first = server.submit(many[0])
        assert gate.waits.wait(60)
        futures = [first, *(server.submit(request) for request in many[1:])]
        gate.release()
        answers = [future.result(60) for future in futures]
        assert gate.passes == passes
    check(of, many, answers)


def job(tenant: str, tokens: int) -> Job:
    return Job(Request("embed", tokens=(1,) * tokens, tenant=tenant), {"input_ids": [1] * tokens})


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), min_size=1, max_size=60), st.integers(1, 40))
def test_tenants_that_wait_are_served_alike(arrivals: list[tuple[str, int]], number: int) -> None:
    """As long as two tenants have requests, the tokens that they were served differ by less than two requests."""
    share = FairShare()
    queue = FairQueue(share)
    for tenant, tokens in arrivals:
        share.enter(tenant)
        queue.push(job(tenant, tokens))
    waiting = Counter(tenant for tenant, _ in arrivals)
    largest = max(tokens for _, tokens in arrivals)
    order: dict[str, list[int]] = {tenant: [] for tenant in waiting}
    assert len(queue) == len(arrivals)
    foreseen = queue.next_jobs(number, lambda job: len(job.tokens))
    assert len(foreseen) == min(number, len(arrivals))
    assert len(queue) == len(arrivals) and not any(share.of(tenant) for tenant in waiting), "nothing has changed"
    while len(queue):
        next_job = queue.peek()
        taken = queue.pop()
        assert taken is next_job
        assert not foreseen or taken is foreseen.pop(0)
        share.charge(taken.tenant, len(taken.tokens))
        order[taken.tenant].append(len(taken.tokens))
        waiting[taken.tenant] -= 1
        still = [share.of(tenant) for tenant, left in waiting.items() if left]
        assert not still or max(still) - min(still) <= largest
    for tenant, lengths in order.items():
        assert lengths == [tokens for other, tokens in arrivals if other == tenant], "in order within a tenant"


def test_who_comes_back_has_saved_nothing() -> None:
    share = FairShare()
    for tenant in ("idle", "busy"):
        share.enter(tenant)
    share.charge("idle", 10)
    share.leave("idle")
    share.charge("busy", 1000)
    share.enter("idle")
    assert share.of("idle") == 1000
    share.leave("idle")
    share.leave("busy")
    share.enter("busy")
    assert share.of("busy") == 1000
    for number in range(500):
        share.enter(str(number))
        share.leave(str(number))
    assert len(share.served) < 200


def test_who_was_served_alone_does_not_pay_for_it() -> None:
    """What the machine did for a tenant while nobody else wanted it is no debt to one that comes later."""
    share = FairShare()
    for tenant in ("alone", "burst", "alone"):
        share.enter(tenant)
        share.charge(tenant, 1000)
        share.leave(tenant)
    share.enter("burst")
    share.enter("alone")
    assert share.of("burst") == share.of("alone") == 3000


def test_a_tenant_with_many_deltas_that_share_no_batch_has_one_share() -> None:
    """Each of them has batches of its own, and a light tenant waits for one of these and not for all."""
    of = deltas("bert", "sequence")
    (full,) = (of.folder / name for name, method in of.methods.items() if method == "full")
    heavy = [f"full{n}" for n in range(8)]
    with Server(of.model(), deltas=of.folder, max_wait=0.0) as server:
        for name in heavy:
            server.load(name, full)
        for name in (*heavy, "d0"):
            warm(server, ask("classify", 3, 1, name, tenant="warm"))
        gate = Gate(server)
        futures = [server.submit(ask("classify", 8, n, name, tenant="heavy")) for n, name in enumerate(heavy * 4)]
        assert passes_until_answered(server, gate, "d0", futures) <= 1, "it is in the next batch"


def test_who_waits_for_a_delta_pulls_nobody_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant begins where those are who are being served, and not where one is whose delta is not there yet."""
    of = deltas("bert", "sequence")
    read = Lifecycle._prepared
    opened = threading.Event()

    def slow(self: Any, entry: Any, *arguments: Any, **options: Any) -> Any:
        assert entry.name != "d2" or opened.wait(60)
        return read(self, entry, *arguments, **options)

    monkeypatch.setattr(Lifecycle, "_prepared", slow)
    with Server(of.model(), deltas=of.folder, max_wait=0.0) as server:
        warm(server, ask("classify", 3, 1, "d0", tenant="served"))
        waits = server.submit(ask("classify", 6, 1, "d2", tenant="waits"))
        for number in range(5):
            server.submit(ask("classify", 40, number, "d0", tenant="served")).result(60)
        server.submit(ask("classify", 6, 1, "d0", tenant="new")).result(60)
        assert server._share.of("new") == server._share.of("served") + 6
        opened.set()
        waits.result(60)


def test_the_server_is_public() -> None:
    assert deltune.serve.Server is Server
