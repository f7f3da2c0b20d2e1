"""How requests are split into passes: every request once, within bounds, at the least cost; and passes in parallel."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from deltune.errors import DeltuneError
from deltune.serve.engine.concurrency import ConcurrentPasses, SafeWidths, _openmp_libraries, release_worker_threads
from deltune.serve.engine.encoding import PASS_OVERHEAD, EncodingLane, split_by_length, split_evenly
from deltune.serve.engine.requests import Answer, Request
from deltune.serve.engine.server import Server
from deltune.serve.errors import InvalidRequest, UnknownDelta

from .served import wait_until
from .specimens import Deltas, answers_of, ask, check, deltas, holding

Lengths = tuple[int, int]
LENGTHS = st.tuples(st.sampled_from([0, 0, 3, 20]), st.integers(1, 40))


def cost(parts: list[list[Lengths]], overhead: int) -> int:
    """What passes cost, in tokens."""
    return sum(overhead + size(part) for part in parts)


def size(part: list[Lengths]) -> int:
    """The tokens of a pass."""
    return len(part) * (max(prompt for prompt, _ in part) + max(text for _, text in part))


def all_splits(ordered: list[Lengths]) -> list[list[list[Lengths]]]:
    """All ways of cutting a list into consecutive parts."""
    ways = []
    for bits in range(1 << (len(ordered) - 1)):
        cuts = [0, *(i + 1 for i in range(len(ordered) - 1) if bits >> i & 1), len(ordered)]
        ways.append([ordered[begin:end] for begin, end in pairwise(cuts)])
    return ways


@given(st.lists(LENGTHS, min_size=1, max_size=7), st.integers(0, 100), st.integers(1, 300))
def test_requests_are_split_at_the_least_cost(requests: list[Lengths], overhead: int, tokens: int) -> None:
    parts = split_by_length(requests, lambda one: one, overhead, tokens)
    assert sorted(one for part in parts for one in part) == sorted(requests)
    assert all(len(part) == 1 or size(part) <= tokens for part in parts)
    allowed = [
        split for split in all_splits(sorted(requests)) if all(len(part) == 1 or size(part) <= tokens for part in split)
    ]
    assert cost(parts, overhead) == min(cost(split, overhead) for split in allowed)


def test_a_prompt_does_not_make_the_texts_of_others_longer() -> None:
    texts, prompted = [(0, 30)] * 8, [(20, 30)] * 2
    assert split_by_length(texts + prompted, lambda one: one, overhead=64) == [texts, prompted]


@given(st.lists(LENGTHS, min_size=1, max_size=8), st.integers(1, 4))
def test_passes_at_the_same_time_are_as_equal_as_possible(requests: list[Lengths], most: int) -> None:
    parts = split_evenly(requests, lambda one: one, most)
    assert [one for part in parts for one in part] == sorted(requests)
    assert len(parts) <= most
    allowed = [split for split in all_splits(sorted(requests)) if len(split) <= most]
    assert max(map(size, parts)) == min(max(map(size, split)) for split in allowed)


def test_passes_run_at_the_same_time_and_leave_the_threads_of_others_as_they_were() -> None:
    before = torch.get_num_threads()
    barrier = threading.Barrier(3, timeout=60)

    def run(number: int) -> tuple[int, int]:
        barrier.wait()
        return number, torch.get_num_threads()

    def threads_of_a_new_thread() -> int:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.get_num_threads).result()

    torch.set_num_threads(6)
    notified = threading.Semaphore(0)
    passes = ConcurrentPasses(3, notified.release)
    try:
        results: list[Any] = []
        for number in range(3):
            assert passes.free == 3 - number and not passes.any_ended
            passes.begin(partial(run, number), results.append)
        for _ in range(3):
            assert notified.acquire(timeout=60)
        assert passes.any_ended and passes.free == 3 and not results, "the thread that began them takes their results"
        passes.take_results()
        passes.take_results()  # there are no others
        assert sorted(results) == [(0, 2), (1, 2), (2, 2)] and not passes.any_ended
        assert torch.get_num_threads() == threads_of_a_new_thread() == 6
        ended = threading.Event()

        def fail() -> bool:
            raise RuntimeError("a fault")

        def end_later() -> bool:
            return ended.wait(0.2) or ended.set() is None

        passes.begin(fail, results.append)
        passes.begin(end_later, results.append)
        with pytest.raises(RuntimeError, match="a fault"):
            passes.wait()
        assert ended.is_set() and results[3:] == [True], "the other pass has its result nevertheless"
        passes.wait()
        assert len(results) == 4
    finally:
        torch.set_num_threads(before)
        passes.close()


def threads_of_this_process() -> int:
    """How many threads there are, when those that are ending have ended."""
    seen = [len(list(Path("/proc/self/task").iterdir()))]
    while len(seen) < 10 or len(set(seen[-10:])) > 1:
        time.sleep(0.01)
        seen.append(len(list(Path("/proc/self/task").iterdir())))
    return seen[-1]


def workers_made() -> int:
    """Compute something in parallel, and return how many threads this process has more since then."""
    before = threads_of_this_process()
    torch.tanh(torch.ones(1 << 20))
    return threads_of_this_process() - before


@pytest.mark.skipif(not _openmp_libraries(), reason="no OpenMP of GNU in this build of torch")
def test_a_thread_that_waits_keeps_no_workers() -> None:
    before = torch.get_num_threads()
    release_worker_threads()
    torch.set_num_threads(2)
    try:
        assert workers_made() == 1
        assert workers_made() == 0, "they are kept"
        release_worker_threads()
        assert workers_made() == 1
        with Server(deltas("bert", "sequence").model()) as server:  # which takes the worker of this thread
            seen: list[int] = []
            server._call(lambda: seen.extend((threads_of_this_process(), workers_made())))
            alone, made = seen
            assert made == 1
            deadline = time.monotonic() + 30
            while threads_of_this_process() > alone and time.monotonic() < deadline:
                time.sleep(0.01)
            assert threads_of_this_process() == alone, "an engine without work gives its workers up"
            assert workers_made() == 1, "so that this thread has none either"
    finally:
        torch.set_num_threads(before)
        release_worker_threads()


class Counting(torch.nn.Module):
    """Above a length it does what models with scaled positions do: it writes into a buffer."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(4))

    def forward(self, width: int) -> torch.Tensor:
        return self.table.fill_(width) if width > 8 else self.table


def test_a_model_that_keeps_something_of_a_pass_has_one_at_a_time() -> None:
    model = Counting()
    widths = SafeWidths(model)
    assert not widths.includes(4)
    for width in (4, 8, 6):
        widths.observe(width, partial(model, width))
    assert [width for width in range(12) if widths.includes(width)] == [4, 5, 6, 7, 8]
    widths.observe(9, partial(model, 9))
    assert widths.keeps_state and not widths.includes(6)


def test_rows_beyond_the_length_that_scales_all_positions_are_refused() -> None:
    """One row of such a length would change the answers of all rows of its batch (Phi-3, longrope)."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 16,
        "factor": 4.0,
        **factors,
    }
    config = transformers.Phi3Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_labels=3,
        num_key_value_heads=4, max_position_embeddings=64, original_max_position_embeddings=16, pad_token_id=0,
        eos_token_id=1, bos_token_id=1, rope_parameters=rope,
    )  # fmt: skip
    model = transformers.Phi3ForSequenceClassification(config).eval()
    with Server(model, max_concurrent_passes=2, max_wait=0.2) as server:
        requests = [Request("classify", tokens=tuple(range(2, 2 + length))) for length in (5, 9, 16, 12)]
        answers = answers_of(server, requests)
        with pytest.raises(InvalidRequest, match="16"):
            server.submit(Request("classify", tokens=tuple(range(2, 19)))).result(60)
        (lane,) = server._lanes.values()
        assert isinstance(lane, EncodingLane) and lane.safe_widths.keeps_state
    for request, answer in zip(requests, answers, strict=True):
        alone = model(input_ids=torch.tensor([request.tokens])).logits.softmax(-1)[0].tolist()
        assert list(answer.scores.values()) == pytest.approx(alone, abs=1e-5)


@pytest.fixture(scope="module")
def of() -> Deltas:
    return deltas("bert", "sequence")


@pytest.mark.parametrize("names", [["d0", "d4"], [None, "d3"], ["d0", "d0"]])
def test_a_batch_is_answered_in_passes_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch, of: Deltas, names: list[str | None]
) -> None:
    """Also where all rows of a pass use the same delta, whose tensors another pass must not see."""
    monkeypatch.setitem(PASS_OVERHEAD, "cpu", 4)
    barrier = threading.Barrier(2, timeout=60)
    requests = [ask("classify", 10, number, name) for name in names for number in range(2)]
    bounds = {"max_batch_size": 4, "max_wait": 60.0, "max_pass_seconds": 60.0}
    with Server(of.model(), deltas=of.folder, max_concurrent_passes=2, **bounds) as server:
        for future in [server.submit(request) for request in requests]:  # their length is known then
            future.result(60)
        backbone: Any = server._backbones.first
        hook = backbone.model.base_model.register_forward_pre_hook(lambda *_: (barrier.wait(), None)[1])
        answers = answers_of(server, requests)
        hook.remove()
    check(of, requests, answers)


def submit_together(server: Server, requests: list[Request]) -> list[Future[Answer]]:
    """Submit requests so that the engine sees all of them at once."""
    with holding(server):
        return [server.submit(request) for request in requests]


class HeldPasses:
    """Passes in threads of their own with rows of some deltas, which wait until they may go on.

    Args:
        server: A server that has answered nothing yet.
        names: The deltas.
    """

    def __init__(self, server: Server, *names: str) -> None:
        for length in (4, 10):  # their lengths are known then
            for name in ("d0", "d2", "d3"):
                server.submit(ask("classify", length, 1, name)).result(60)
        self.waits = threading.Event()
        self.go_on = {name: threading.Event() for name in names}
        backbone: Any = server._backbones.first
        run = backbone.run

        def held(rows: Any, *arguments: Any, **options: Any) -> Any:
            for name in self.go_on.keys() & {row.name for row in rows}:
                self.waits.set()
                assert self.go_on[name].wait(60)
            return run(rows, *arguments, **options)

        backbone.run = held

    def release(self) -> None:
        """Let all of them go on."""
        for event in self.go_on.values():
            event.set()


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch, of: Deltas) -> Iterator[Callable[..., Server]]:
    """Makes a server with two threads for passes of one row each."""
    monkeypatch.setitem(PASS_OVERHEAD, "cpu", 4)
    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> Server:
            bounds = {"max_concurrent_passes": 2, "max_batch_size": 1, "max_wait": 0.0, **options}
            return stack.enter_context(Server(of.model(), deltas=of.folder, **bounds))

        yield make


@pytest.fixture
def slow_pass(two_threads: Callable[..., Server]) -> Iterator[tuple[Server, HeldPasses]]:
    """A server with two threads for passes, of which those of d0 wait."""
    server = two_threads()
    held = HeldPasses(server, "d0")
    yield server, held
    held.release()


def test_a_thread_whose_pass_has_ended_gets_the_next_one(of: Deltas, slow_pass: Any) -> None:
    server, held = slow_pass
    slow = ask("classify", 10, 0, "d0")
    quick = [ask("classify", 10, n, name) for n in range(6) for name in ("d2", "d3", None)]
    slow_future, *futures = submit_together(server, [slow, *quick])
    answers = [future.result(60) for future in futures]
    assert not slow_future.done()
    held.release()
    check(of, [slow, *quick], [slow_future.result(60), *answers])


def test_an_answer_does_not_wait_for_the_passes_that_its_delta_waits_for(of: Deltas, slow_pass: Any) -> None:
    """A version that leaves the model waits for all passes, and the last request that needed it does not."""
    server, held = slow_pass
    held.go_on["d2"] = threading.Event()
    slow, last = ask("classify", 10, 0, "d0"), ask("classify", 10, 3, "d2")
    slow_future, future = submit_together(server, [slow, last])
    assert held.waits.wait(60)
    wait_until(lambda: not server._passes.free)
    server.unload("d2")
    held.go_on["d2"].set()
    check(of, [last], [future.result(60)])
    assert not slow_future.done()
    held.release()
    check(of, [slow], [slow_future.result(60)])
    wait_until(lambda: not server._lifecycle.retired)


def test_a_delta_that_a_callback_takes_out_stays_out(of: Deltas, two_threads: Callable[..., Server]) -> None:
    """The callback runs in the engine's thread while that waits for the pass, in order to attach the delta."""
    server = two_threads(max_loaded=2)
    held = HeldPasses(server, "d0")
    slow = ask("classify", 10, 0, "d0")
    future, _ = submit_together(server, [slow, slow])
    assert held.waits.wait(60)
    future.add_done_callback(lambda _: server.unload("d4"))
    waiting = server.submit(ask("classify", 4, 1, "d4"))
    wait_until(lambda: server._lifecycle._arrivals or not server._passes.free)
    held.release()
    check(of, [slow], [future.result(60)])
    with pytest.raises(UnknownDelta, match="unloaded"):
        waiting.result(60)
    assert "d4" not in {delta.name for delta in server.deltas()} and server.unloaded() == ["d4"]
    assert "d4" not in {loaded.name for loaded in server._lifecycle.in_memory()}


@pytest.mark.parametrize("max_loaded", [2, None])
def test_a_lane_that_fails_while_a_delta_is_loaded_fails_alone(
    of: Deltas, two_threads: Callable[..., Server], max_loaded: int | None
) -> None:
    server = two_threads(max_loaded=max_loaded)
    held = HeldPasses(server, "d0")
    slow = ask("classify", 10, 0, "d0")
    lost = submit_together(server, [slow, slow])
    assert held.waits.wait(60)
    wait_until(lambda: not server._passes.free)

    def fail(_: object) -> None:
        raise RuntimeError("a broken result")

    server._passes._running = dict.fromkeys(server._passes._running, fail)
    other = ask("classify", 4, 1, "d4")
    future = server.submit(other)
    held.release()
    for one in lost:
        with pytest.raises(DeltuneError, match=r"the engine failed: .*a broken result"):
            one.result(60)
    check(of, [other, slow], [future.result(60), server.submit(slow).result(60)])
    wait_until(lambda: len(server._backbones.first.attached.names) == len(server._lifecycle.in_memory()))


def test_an_answered_request_is_freed_without_the_garbage_collector(of: Deltas) -> None:
    with Server(of.model(), deltas=of.folder, max_wait=0.0) as server:
        gc.disable()
        try:
            job = server._submit(ask("classify", 4, 1, "d2"), None)
            reference, future = weakref.ref(job), job.future
            del job
            future.result(60)
            wait_until(lambda: reference() is None)
        finally:
            gc.enable()


def test_two_loads_of_a_new_name_wait_for_the_passes_that_run(of: Deltas, two_threads: Callable[..., Server]) -> None:
    """The second one was submitted when the name was not known, and replaces what the first one has loaded."""
    server = two_threads(max_loaded=1)
    held = HeldPasses(server, "x")
    attach = server._backbones.first.attach
    running: list[bool] = []

    def attached(prepared: Any) -> Any:
        running.append(server._passes.are_running)
        return attach(prepared)

    server._backbones.first.attach = attached  # type: ignore[method-assign]
    reading, go_on = threading.Event(), threading.Event()
    prepare = server._lifecycle._prepared

    def prepared(entry: Any, folder: Path, *arguments: Any, **options: Any) -> Any:
        if folder.name == "d3":
            reading.set()
            assert go_on.wait(60)
        return prepare(entry, folder, *arguments, **options)

    server._lifecycle._prepared = prepared  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(server.load, "x", of.folder / "d2")
        wait_until(lambda: server._lifecycle._loads or first.done())
        second = pool.submit(server.load, "x", of.folder / "d3")
        first.result(60)
        assert reading.wait(60)
        request = ask("classify", 10, 0, "x")
        futures = submit_together(server, [request, request])
        assert held.waits.wait(60)
        read = server._lifecycle.load_seconds
        go_on.set()
        wait_until(lambda: server._lifecycle.load_seconds > read)
        threading.Event().wait(0.3)  # in which it would be attached
        held.release()
        assert second.result(60).loaded and [future.result(60).delta for future in futures] == ["x", "x"]
    assert running == [False, False]


def test_what_waits_for_the_servers_thread_is_refused_in_it(of: Deltas) -> None:
    with Server(of.model(), deltas=of.folder, max_wait=0.0) as server:
        errors: list[Exception] = []

        def call_all(_: object) -> None:
            for call in (server.close, server.refresh, partial(server.load, "d3")):
                try:
                    call()
                except DeltuneError as error:
                    errors.append(error)

        gate = threading.Event()
        server._submit(ask("classify", 4, 1, "d2"), None).future.add_done_callback(lambda _: gate.wait(60))
        future = server.submit(ask("classify", 4, 1, "d2"))
        future.add_done_callback(call_all)
        gate.set()
        future.result(60)
        wait_until(lambda: len(errors) == 3)
        assert all("call it from another thread" in str(error) for error in errors)
        assert server.submit(ask("classify", 4, 1, "d3")).result(60).delta == "d3"


def test_a_request_that_is_cancelled_in_its_pass_and_a_delta_that_is_taken_out_meanwhile(
    of: Deltas, slow_pass: Any
) -> None:
    """The pass goes on with its delta, which goes when the pass has ended; nobody else hears of it."""
    server, held = slow_pass
    slow, beside = ask("classify", 10, 0, "d0"), ask("classify", 10, 3, "d2")
    future, other = submit_together(server, [slow, beside])
    assert held.waits.wait(60)
    names = set(server._backbones.first.attached.names)
    assert future.cancel()
    check(of, [beside, beside], [other.result(60), server.submit(beside).result(60)])
    server.unload("d0")
    assert set(server._backbones.first.attached.names) == names, "the pass needs it"
    held.release()
    wait_until(lambda: not server._jobs and not server._lifecycle.retired)
    assert len(server._backbones.first.attached.names) == len(names) - 1
    assert not server.stats().running and server.stats().finished["d0"] == 2, "as often as it was warmed up"
    assert server.load("d0").loaded
    check(of, [slow], [server.submit(slow).result(60)])


def test_requests_of_two_lanes_run_in_both_threads(monkeypatch: pytest.MonkeyPatch, of: Deltas) -> None:
    """A lane whose turn it is begins as many passes as threads are free."""
    monkeypatch.setitem(PASS_OVERHEAD, "cpu", 4)
    barrier = threading.Barrier(2, timeout=60)
    requests = [ask(task, 10, n, "d2") for n in range(4) for task in ("classify", "embed")]
    bounds = {"max_batch_size": 1, "max_wait": 0.0}
    with Server(of.model(), deltas=of.folder, max_concurrent_passes=2, **bounds) as server:
        for request in requests[:2]:  # their length is known then
            server.submit(request).result(60)
        backbone: Any = server._backbones.first
        hook = backbone.model.base_model.register_forward_pre_hook(lambda *_: (barrier.wait(), None)[1])
        answers = [future.result(60) for future in submit_together(server, requests)]
        hook.remove()
    check(of, requests, answers)


def test_a_pass_that_fails_says_nothing_about_the_speed(of: Deltas) -> None:
    with Server(of.model(), deltas=of.folder, max_wait=0.0) as server:
        server.submit(ask("classify", 4, 1, "d2")).result(60)
        (lane,) = server._lanes.values()
        assert isinstance(lane, EncodingLane)
        speed = lane.speed

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("a fault")

        lane.backbone.run = fail  # type: ignore[method-assign, assignment]
        with pytest.raises(RuntimeError, match="a fault"):
            server.submit(ask("classify", 4, 1, "d2")).result(60)
        assert lane.speed == speed


def test_a_server_that_closes_waits_for_the_passes_that_run(of: Deltas, slow_pass: Any) -> None:
    server, held = slow_pass
    slow = [ask("classify", 10, n, "d0") for n in range(2)]
    futures = [server.submit(request) for request in slow]
    assert held.waits.wait(60)
    closing = threading.Thread(target=server.close, args=(0.0,))
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    held.release()
    closing.join(60)
    assert not closing.is_alive()
    check(of, slow, [future.result(60) for future in futures])
