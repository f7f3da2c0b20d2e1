"""Loading, replacing and dropping deltas while others are served; requests that end early; the end of a server."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import deltune
from deltune.errors import DeltuneError
from deltune.serve.engine.requests import Answer, DeltaInfo, Request, Sampling, TokenChoice
from deltune.serve.engine.server import Server
from deltune.serve.errors import EngineClosed, InvalidRequest, QueueFull, RequestTimeout, UnknownDelta
from tables.families import FAMILIES
from tables.specimens import build, stir

from .served import wait_until
from .specimens import answers_of, ask, check, check_one, deltas, greedy

BERT, GPT = ("bert", "sequence"), ("gpt2", "causal")


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Makes a folder with copies of some deltas."""

    def made(of: tuple[str, str], *names: str) -> Path:
        for name in names:
            shutil.copytree(deltas(*of).folder / name, tmp_path / "deltas" / name)
        return tmp_path / "deltas"

    return made


def changed(of: tuple[str, str], name: str, target: Path, seed: int = 77) -> None:
    """Save another version of a delta over the one that is there."""
    model = deltas(*of).model()
    tuned = stir(deltune.load(model, target / name), seed=seed, size=0.5)
    tuned.save(target / name)


class Gate:
    """Stops a server before each pass of its model until it is opened."""

    def __init__(self, server: Server) -> None:
        self.passes, self.open = 0, threading.Event()
        self.waits = threading.Event()
        self._steps = threading.Semaphore(0)
        backbone: Any = server._backbones.first
        run = backbone.run

        def gated(rows: Any, call: Any, *place: Any, **options: Any) -> Any:
            self.passes += 1
            if not self.open.is_set():
                self.waits.set()
                self._steps.acquire(timeout=60)
            return run(rows, call, *place, **options)

        backbone.run = gated

    def step(self, passes: int = 1) -> None:
        """Let so many passes run."""
        for _ in range(passes):
            assert self.waits.wait(60)
            self.waits.clear()  # by this thread, so that the same pass is not released twice
            self._steps.release()

    def release(self) -> None:
        """Let all passes run."""
        self.open.set()
        self._steps.release()


def load_beside_passes(server: Server, gate: Gate, name: str) -> DeltaInfo:
    """Load a delta while the gate lets one pass run after the other."""
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(server.load, name)
        while not loading.done():
            gate.step() if gate.waits.wait(0.05) else None
        return loading.result(60)


def warm(server: Server, request: Request) -> None:
    """Answer a request, so that what is measured once is measured."""
    server.submit(request).result(60)


def test_a_new_version_takes_over_between_two_requests(folder: Any) -> None:
    """A request that runs goes on with its version; the next one has the new one."""
    of, root = deltas(*GPT), folder(GPT, "d0", "d2")
    request = ask("generate", 6, 1, "d2", max_tokens=12)
    with Server(of.model(), deltas=root) as server:
        warm(server, request)
        gate = Gate(server)
        stream = server.stream(request)
        gate.step(4)
        changed(GPT, "d2", root)
        info = load_beside_passes(server, gate, "d2")
        later = server.submit(request)
        gate.release()
        list(stream)
        old, new = stream.answer, later.result(60)
        assert old is not None and old.version != new.version == info.version and info.loaded
        wait_until(lambda: len(server._backbones.first.attached.names) == 1)  # the old one goes with its last request
    check(of, [request], [old])
    model = of.model()
    deltune.load(model, root / "d2")
    with torch.no_grad():
        check_one(model, request, new)
    assert [c.token for c in old.tokens] != [c.token for c in new.tokens]


def test_a_new_version_is_served_while_requests_need_the_old_one_though_both_are_too_large(folder: Any) -> None:
    of, root = deltas(*GPT), folder(GPT, "d2")
    request = ask("generate", 6, 1, "d2", max_tokens=12)
    with Server(of.model(), deltas=root) as server:
        size = server.load("d2").bytes
    with Server(of.model(), deltas=root, max_loaded_bytes=int(1.5 * size)) as server:
        warm(server, request)
        gate = Gate(server)
        old = server.submit(request)
        gate.step(2)
        changed(GPT, "d2", root)
        load_beside_passes(server, gate, "d2")
        new = server.submit(request)
        while server.stats().running != {"d2": 2}:
            gate.step() if gate.waits.wait(0.05) else None
            assert not old.done(), "the new one did not wait for it"
        gate.release()
        assert old.result(60).version != new.result(60).version
        assert server.stats().evictions == 0


def corrupted(path: Path) -> None:
    numbers = bytearray((path / "delta.safetensors").read_bytes())
    numbers[-3] ^= 255
    (path / "delta.safetensors").write_bytes(numbers)


def not_finite(path: Path) -> None:
    model = deltas(*BERT).model()
    tuned = deltune.load(model, path)
    with torch.no_grad():
        next(tuned.trainable_parameters()).fill_(torch.nan)
    tuned.save(path)


def of_another_model(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(deltas("roberta", "sequence").folder / "d2", path)


def without_numbers(path: Path) -> None:
    (path / "delta.safetensors").unlink()


@pytest.mark.parametrize("spoil", [corrupted, not_finite, of_another_model, without_numbers])
def test_a_bad_delta_is_refused_and_the_old_one_goes_on(spoil: Callable[[Path], None], folder: Any) -> None:
    of, root = deltas(*BERT), folder(BERT, "d0", "d2")
    request = ask("classify", 6, 1, "d2")
    with Server(of.model(), deltas=root) as server:
        first = server.submit(request).result(60)
        spoil(root / "d2")
        with pytest.raises(DeltuneError):
            server.load("d2")
        infos = {info.name: info for info in server.refresh()}
        assert infos["d2"].error and infos["d2"].loaded and infos["d2"].version == first.version
        assert server.submit(request).result(60).scores == pytest.approx(first.scores, abs=1e-6)
        with pytest.raises(DeltuneError):
            server.load("new", root / "d2")
        assert "new" not in {info.name for info in server.deltas()}
        shutil.rmtree(root / "d2")
        shutil.copytree(of.folder / "d0", root / "d2")
        assert server.refresh()[1].error == ""
        assert server.submit(request).result(60).version != first.version
    check(of, [request], [first])


def test_a_bad_delta_that_was_never_loaded_fails_its_requests_alone(folder: Any) -> None:
    of, root = deltas(*BERT), folder(BERT, "d0", "d2", "d3")
    corrupted(root / "d2")
    requests = [ask("classify", 5, n, name) for n, name in enumerate(["d0", "d2", "d3", "d2"])]
    with Server(of.model(), deltas=root) as server:
        futures = [server.submit(request) for request in requests]
        for future in futures[1::2]:
            with pytest.raises(DeltuneError, match="checksum"):
                future.result(60)
        check(of, requests[::2], [future.result(60) for future in futures[::2]])
        assert server.stats().failed == {"d2": 2}


def test_the_least_recently_used_delta_is_dropped() -> None:
    of = deltas(*BERT)
    with Server(of.model(), deltas=of.folder, max_loaded=2) as server:
        for name, loaded in (("d0", "d0"), ("d1", "d0 d1"), ("d0", "d0 d1"), ("d2", "d0 d2"), ("d1", "d1 d2")):
            server.submit(ask("classify", 4, 1, name)).result(60)
            assert {info.name for info in server.deltas() if info.loaded} == set(loaded.split())
        assert server.stats().loads == 4 and server.stats().evictions == 2
        handle = server._backbones.first.attached
        assert len(handle.names) == 2


def test_more_deltas_than_fit_at_once() -> None:
    """All requests are there at once, for more deltas than may be in memory; each is answered."""
    of = deltas(*BERT)
    requests = [ask("classify", 1 + n % 9, n, name) for n, name in enumerate([*of.names] * 4)]
    with Server(of.model(), deltas=of.folder, max_loaded=1, max_batch_size=4) as server:
        answers = answers_of(server, requests)
        assert server.stats().loads >= len(of.methods)
    check(of, requests, answers)


def test_bytes_of_deltas_in_memory() -> None:
    of = deltas(*BERT)
    with Server(of.model(), deltas=of.folder) as server:
        size = max(server.load(name).bytes for name in ("d0", "d2"))
    with Server(of.model(), deltas=of.folder, max_loaded_bytes=size) as server:
        for name in ("d0", "d2", "d0"):
            server.submit(ask("classify", 4, 1, name)).result(60)
            assert sum(info.bytes for info in server.deltas() if info.loaded) <= size
    with (
        Server(of.model(), deltas=of.folder, max_loaded_bytes=10) as server,
        pytest.raises(DeltuneError, match="10 bytes of deltas in memory"),
    ):
        server.submit(ask("classify", 4, 1, "d0")).result(60)


def test_folders_that_come_and_go(folder: Any) -> None:
    of, root = deltas(*BERT), folder(BERT, "d0")
    (root / ".hidden").mkdir()
    with Server(of.model(), deltas=root) as server:
        assert [info.name for info in server.deltas()] == ["d0"] and server.ignored_folders() == {}
        with pytest.raises(UnknownDelta, match="d2"):
            server.submit(ask("classify", 4, 1, "d2"))
        folder(BERT, "d2")
        assert [(info.name, info.loaded) for info in server.refresh()] == [("d0", False), ("d2", False)]
        request = ask("classify", 4, 1, "d2")
        check(of, [request], [server.submit(request).result(60)])
        server.unload("d2")
        with pytest.raises(UnknownDelta):
            server.submit(request)
        assert [info.name for info in server.refresh()] == ["d0"], "what was unloaded stays away"
        assert server.load("d2").loaded
        shutil.rmtree(root / "d2")
        assert [info.name for info in server.refresh()] == ["d0"]
        with pytest.raises(UnknownDelta):
            server.load("d2")
        with pytest.raises(UnknownDelta):
            server.unload("d2")
        for name in ("../d0", ".hidden", "", "a/b", "x" * 300):
            with pytest.raises(DeltuneError):
                server.load(name)


def test_a_delta_of_another_base_is_refused_when_it_is_first_seen(
    folder: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list says why, and so does the log, once; its tensors are not read for that, and others are served."""
    of, root = deltas(*BERT), folder(BERT, "d0", "d2")
    of_another_model(root / "d2")
    monkeypatch.setattr("deltune.serve.engine.backbone.read_delta", lambda *_: pytest.fail("the tensors were read"))
    with Server(of.model(), deltas=root) as server:
        for _ in range(2):
            infos = {info.name: info for info in server.deltas()}
            assert "was tuned on a roberta model" in infos["d2"].error and infos["d0"].error == ""
        folder(BERT, "d3")
        model = of.model()
        with torch.no_grad():
            next(model.base_model.parameters()).add_(1.0)
        stir(deltune.attach(model, "lora(rank=2)")).save(root / "d3")
        infos = {info.name: info for info in server.refresh()}
        assert "was tuned on another base model" in infos["d3"].error, "the same shapes, and other weights"
        with pytest.raises(DeltuneError, match="another base model"):
            server.submit(ask("classify", 4, 1, "d3"))
        shutil.rmtree(root / "d2")
        folder(BERT, "d2")
        assert {info.name: info.error for info in server.refresh()}["d2"] == "", "good files make it good"
    refused = [record.getMessage() for record in caplog.records if "are refused" in record.getMessage()]
    assert len(refused) == 2 and "delta d2" in refused[0] and "delta d3" in refused[1]


def test_a_delta_for_a_head_that_the_model_cannot_have_is_refused_when_it_is_first_seen(tmp_path: Path) -> None:
    shutil.copytree(deltas(*GPT).folder / "d2", tmp_path / "d2")
    model = deltas("gpt2", "sequence").model()
    model.base_model.load_state_dict(deltas(*GPT).model().base_model.state_dict())
    with Server(model, deltas=tmp_path) as server:
        (info,) = server.deltas()
        expected = info.error
        with pytest.raises(DeltuneError) as caught:
            server.submit(ask("generate", 4, 1, "d2"))
    assert str(caught.value) == expected and "causal-lm" in expected


def test_what_a_request_does_not_say_is_needed_by_no_delta(tmp_path: Path) -> None:
    tuned = deltune.attach(deltas(*GPT).model(), "loreft(rank=2, positions='last 2')")
    tuned.save(tmp_path / "d2")
    says = "a server that generates"
    with Server(deltas(*GPT).model(), deltas=tmp_path) as server, pytest.raises(DeltuneError, match=says):
        server.load("d2")
    with pytest.raises(DeltuneError, match=says):
        Server(tuned.model)


@pytest.mark.parametrize("method", ["poly(rank=2, tasks=2)", "mtl_lora(rank=2, tasks=2) + prefix(length=2)"])
def test_answers_are_of_the_task_that_a_request_names(method: str, tmp_path: Path) -> None:
    """Together, and with the beginning of a prompt in the cache, whose keys are of one task."""
    of = deltas(*GPT)
    tuned = stir(deltune.attach(of.model(), method), size=0.5)
    for name, parameter in tuned.named_trainable_parameters():
        if name.endswith("logits"):
            parameter.data.copy_(torch.tensor([[9.0, -9, -9, -9], [-9, -9, -9, 9]])[:, : parameter.shape[1]])
    tuned.save(tmp_path / "many")
    prompt = torch.randint(5, 99, (1, 40), generator=torch.Generator().manual_seed(1))
    expected = {}
    for number in (0, 1):
        with tuned.condition(task_ids=[number]), torch.no_grad():
            expected[str(number)] = greedy(tuned.model, prompt, 6)
    assert expected["0"] != expected["1"]
    with Server(of.model(), deltas=tmp_path) as server:
        for tasks in (("0",), ("1", "0", "1"), ("0", "1")):
            sampling = Sampling(max_tokens=6, temperature=0.0)
            requests = [
                Request("generate", tokens=tuple(prompt[0].tolist()), delta="many", row_task=t, sampling=sampling)
                for t in tasks
            ]
            answers = answers_of(server, requests)
            assert [[one.token for one in answer.tokens] for answer in answers] == [expected[task] for task in tasks]


def test_deltas_with_rows_of_tokens_and_for_other_heads_are_not_refused_when_they_are_first_seen(
    tmp_path: Path,
) -> None:
    """What is compared first is what is compared when they are loaded."""
    made, base = [], deltas(*BERT).model().base_model.state_dict()
    for role in ("sequence", "tokens", "base"):
        model = build(FAMILIES["bert"], role)
        model.base_model.load_state_dict(base, strict=False)  # a tagger has no pooler
        rows = () if role == "base" else ("trainable_tokens(tokens=(98,))",)  # of the server's own class, they fit
        for text in ("lora(rank=2)", *rows):
            made.append(f"{role}-{text.partition('(')[0]}")
            tuned = stir(deltune.attach(model, text))
            tuned.save(tmp_path / made[-1])
            tuned.detach()
    with Server(deltas(*BERT).model(), deltas=tmp_path) as server:
        first = {info.name: info.error for info in server.deltas()}
        assert first == dict.fromkeys(sorted(made), "")
        for name in made:
            assert server.load(name).error == ""


def test_folders_without_a_delta_are_named(folder: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Each is in the log once, with the reason; hidden ones are not, and what becomes a delta is served."""
    of, root = deltas(*BERT), folder(BERT, "d0")
    for name in ("empty", "notes", "two words", ".hidden", ".d0-3f", ".d0-3f/delta"):
        (root / name).mkdir()
    (root / "notes" / "readme.txt").write_text("x")
    (root / "file.txt").write_text("x")
    (root / "way-out").symlink_to("/etc")
    with Server(of.model(), deltas=root) as server:
        assert [info.name for info in server.deltas()] == ["d0"]
        reasons = server.ignored_folders()
        assert list(reasons) == ["empty", "notes", "two words", "way-out"]
        assert "it holds nothing" in reasons["empty"] and "readme.txt" in reasons["notes"]
        assert "cannot name a delta" in reasons["two words"]
        assert reasons["way-out"] == f"{str(root / 'way-out')!r} is a link to a folder that holds no delta"
        server.refresh()
        lines = [record.getMessage() for record in caplog.records if "without a delta" in record.getMessage()]
        assert len(lines) == 1 and "4 folders" in lines[0] and "readme.txt" in lines[0], lines
        with pytest.raises(UnknownDelta):
            server.submit(ask("classify", 4, 1, "empty"))
        shutil.copytree(of.folder / "d2", root / "empty", dirs_exist_ok=True)
        (root / "later").mkdir()
        assert [info.name for info in server.refresh()] == ["d0", "empty"]
        assert list(server.ignored_folders()) == ["later", "notes", "two words", "way-out"]
        lines = [record.getMessage() for record in caplog.records if "without a delta" in record.getMessage()]
        assert len(lines) == 2 and "1 folder" in lines[1] and "later" in lines[1], lines


def test_watching(folder: Any) -> None:
    of, root = deltas(*BERT), folder(BERT, "d0")
    request = ask("classify", 4, 1, "d0")
    with Server(of.model(), deltas=root, watch=0.05) as server:
        first = server.submit(request).result(60)
        changed(BERT, "d0", root)
        folder(BERT, "d2")
        for _ in range(1200):
            threading.Event().wait(0.05)
            if server.submit(request).result(60).version != first.version and len(server.deltas()) == 2:
                break
        else:
            pytest.fail("the change was not noticed")


def test_a_run_and_an_adapter_of_peft(tmp_path: Path) -> None:
    """A folder of deltas may hold finished runs and folders of other libraries; an unfinished run says so."""
    of = deltas(*BERT)
    model = of.model()
    deltune.attach(model, "lora(rank=2)")
    stir(deltune.tuned(model))
    deltune.export(model, tmp_path / "peft")
    shutil.copytree(of.folder / "d2", tmp_path / "run" / "delta")
    (tmp_path / "run" / "spec.yaml").write_text("model: x\n")
    request = ask("embed", 5, 1, "peft")
    with Server(of.model(), deltas=tmp_path) as server:
        with torch.no_grad():
            check_one(model, request, server.submit(request).result(60))
        with pytest.raises(DeltuneError, match="not finished"):
            server.submit(ask("embed", 5, 1, "run"))
        assert "not finished" in {info.name: info.error for info in server.deltas()}["run"]
        (tmp_path / "run" / "metrics.json").write_text("{}")
        file = tmp_path / "run" / "delta" / "delta.json"
        trained = {"max_length": 9, "columns": {"text": "text"}}
        file.write_text(json.dumps({**json.loads(file.read_text()), "trained": trained}))
        (info,) = [info for info in server.refresh() if info.name == "run"]
        assert info.error == "" and info.max_length == 9
        with pytest.raises(InvalidRequest, match="single texts"):
            server.submit(Request("classify", text="a", second_text="b", delta="run"))


# -- requests that end early


def test_cancelled_requests_leave_the_batch() -> None:
    of = deltas(*GPT)
    long = [ask("generate", 4, n, name, max_tokens=40) for n, name in
            enumerate(["d0", "d2", "d5"])]  # fmt: skip
    short = ask("generate", 9, 5, "d3", max_tokens=6)
    with Server(of.model(), deltas=of.folder) as server:
        for request in (*long, short):
            warm(server, ask("generate", 3, 1, request.delta, max_tokens=1))
        gate = Gate(server)
        futures = [server.submit(request) for request in long]
        other = server.submit(short)
        gate.step(3)
        assert all(future.cancel() for future in futures)
        gate.release()
        answer = other.result(60)
        assert all(future.cancelled() for future in futures)
        assert gate.passes < 15
        stats = server.stats()
        assert not stats.running and not stats.queued
        assert not any(d.users for d in server._lifecycle.in_memory())
    check(of, [short], [answer])


def test_timeouts() -> None:
    of = deltas(*GPT)
    slow = ask("generate", 4, 1, "d0", max_tokens=50, timeout=0.3)
    other = ask("generate", 5, 2, "d2", max_tokens=8)
    with Server(of.model(), deltas=of.folder) as server:
        warm(server, other)
        warm(server, ask("generate", 4, 1, "d0", max_tokens=1))
        gate = Gate(server)
        futures = [server.submit(slow), server.submit(other)]
        assert gate.waits.wait(60)
        threading.Event().wait(0.4)
        gate.release()
        with pytest.raises(RequestTimeout, match=r"0\.3 seconds"):
            futures[0].result(60)
        check(of, [other], [futures[1].result(60)])
        with pytest.raises(InvalidRequest, match="timeout"):
            server.submit(ask("generate", 3, 1, None, timeout=-1.0))


@pytest.mark.parametrize("of", [BERT, GPT])
def test_an_error_fails_the_guilty_request_alone(of: tuple[str, str]) -> None:
    """A pass that fails is run again row by row; the engine goes on."""
    made, task = deltas(*of), "classify" if of is BERT else "generate"
    requests = [ask(task, 3 + n, n, name) for n, name in enumerate(made.names)]
    with Server(made.model(), deltas=made.folder) as server:
        for request in requests:
            warm(server, request)
        backbone: Any = server._backbones.first
        run, passes = backbone.run, 0

        def failing(rows: Any, call: Any, *place: Any, **options: Any) -> Any:
            nonlocal passes
            passes += 1
            if any(row.name == "d3" for row in rows) and (of is BERT or passes > 2):
                raise RuntimeError("out of order")
            return run(rows, call, *place, **options)

        backbone.run = failing
        futures = [server.submit(request) for request in requests]
        for request, future in zip(requests, futures, strict=True):
            if request.delta == "d3":
                with pytest.raises(RuntimeError, match="out of order"):
                    future.result(60)
        others = [(r, f.result(60)) for r, f in zip(requests, futures, strict=True) if r.delta != "d3"]
        backbone.run = run
        again = server.submit(requests[4]).result(60)
        assert server.stats().failed == {"d3": 1}
    check(made, [*(r for r, _ in others), requests[4]], [*(a for _, a in others), again])


def test_a_failed_step_leaves_no_trace() -> None:
    """Half of a step's keys are written when it fails; then it is run again."""
    of = deltas(*GPT)
    requests = [ask("generate", 3 + n, n, name, max_tokens=7) for n, name in enumerate(of.names)]
    with Server(of.model(), deltas=of.folder) as server:
        for request in requests:
            warm(server, request)
        layer = server._backbones.first.model.transformer.h[1].attn
        calls = 0

        def fail(*_: Any) -> None:
            nonlocal calls
            calls += 1
            if calls % 5 == 0:
                raise RuntimeError("out of memory")

        layer.register_forward_pre_hook(fail)
        futures = [server.submit(request) for request in requests]
        done = [(r, f) for r, f in zip(requests, futures, strict=True) if f.exception(60) is None]
        assert 0 < len(done) < len(requests)
    check(of, [r for r, _ in done], [f.result() for _, f in done])


def test_numbers_that_are_not_finite_are_no_answer() -> None:
    of = deltas(*GPT)
    with Server(of.model(), deltas=of.folder) as server:
        warm(server, ask("generate", 3, 1, "d2"))
        entry = server._catalog.entries["d2"]
        assert entry.current is not None and entry.current.internal is not None
        delta = server._backbones.first.attached.delta(entry.current.internal)
        with torch.no_grad():
            for parameter in delta.edits.parameters():
                parameter.fill_(torch.inf)
        futures = [server.submit(ask("generate", 4, n, name)) for n, name in enumerate(["d0", "d2", None])]
        with pytest.raises(DeltuneError, match=r"d2.*not finite"):
            futures[1].result(60)
        assert futures[0].result(60).tokens and futures[2].result(60).tokens


# -- what is refused at once


def test_bytes_may_be_a_float_without_a_fraction() -> None:
    with Server(deltas(*BERT).model(), max_loaded_bytes=2e9, prompt_cache=1e6) as server:  # type: ignore[arg-type]
        assert repr(server._lifecycle.max_loaded_bytes) == "2000000000"
    for value in (2.5, float("inf")):
        with pytest.raises(DeltuneError, match=r"max_loaded_bytes: give a whole number above 0, or None, not "):
            Server(deltas(*BERT).model(), max_loaded_bytes=value)  # type: ignore[arg-type]


def test_all_wrong_numbers_of_a_server_are_listed() -> None:
    with pytest.raises(DeltuneError) as caught:
        Server(deltas(*BERT).model(), max_wait="soon", prompt_cache=-1, max_loaded=0, watch=0)  # type: ignore[arg-type]
    lines = str(caught.value).splitlines()
    assert lines[0] == "a server cannot be made: 4 problems" and sorted(lines[1:]) == [
        "  - max_loaded: give a whole number above 0, or None, not 0",
        "  - max_wait: give a number of seconds, at least 0, not 'soon'",
        "  - prompt_cache: give a whole number, at least 0, not -1",
        "  - watch: give a number of seconds above 0, or None, not 0",
    ]


def test_requests_that_are_refused(folder: Any) -> None:
    of = deltas(*GPT)
    with Server(of.model(), deltas=of.folder, max_request_tokens=50) as server:
        for request, message in (
            (Request("generate"), "none of them"),
            (Request("generate", text="a", tokens=(1,)), "text and tokens"),
            (Request("generate", text="a"), "no tokenizer"),
            (Request("generate", tokens=()), "empty"),
            (Request("generate", tokens=(5, 99)), "token 99 is not in the vocabulary"),
            (Request("generate", tokens=(5, -1)), "token -1"),
            (Request("classify", tokens=(5,)), "cannot be asked to classify"),
            (Request("tag", tokens=(5,), delta="d0"), "delta 'd0' cannot be asked to tag"),
            (Request("say", tokens=(5,)), "unknown task"),  # type: ignore[arg-type]
            (ask("generate", 45, 1, None, sampling=Sampling(max_tokens=10)), "takes 50"),
            (ask("generate", 5, 1, None, sampling=Sampling(max_tokens=0, top_p=0, temperature=-1)), "top_p.*temp|max"),
            (ask("generate", 5, 1, None, sampling=Sampling(stop=("x",))), "no tokenizer"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                server.submit(request)
        with pytest.raises(UnknownDelta, match="Known"):
            server.submit(ask("generate", 4, 1, "dd"))
    with Server(of.model(), deltas=of.folder) as server:
        with pytest.raises(InvalidRequest, match="can read 64"):
            server.submit(ask("generate", 60, 1, None, sampling=Sampling(max_tokens=10)))
        with pytest.raises(InvalidRequest, match="can read 61"):  # a prompt of 3 takes its own
            server.submit(ask("generate", 60, 1, "d5", sampling=Sampling(max_tokens=3))).result(60)
        server.submit(ask("generate", 58, 1, "d5", sampling=Sampling(max_tokens=3))).result(60)


def test_bounds_of_the_queue() -> None:
    of = deltas(*GPT)
    with Server(of.model(), max_queue=6, max_queue_per_tenant=3, max_batch_size=1) as server:
        warm(server, ask("generate", 3, 1, None))
        gate = Gate(server)
        futures = [server.submit(ask("generate", 3, 1, None, tenant="a"))]
        assert gate.waits.wait(60)
        futures += [server.submit(ask("generate", 3, n, None, tenant="a")) for n in range(3)]
        with pytest.raises(QueueFull, match="tenant 'a'") as full:
            server.submit(ask("generate", 3, 1, None, tenant="a"))
        assert full.value.retry_after > 0
        futures += [server.submit(ask("generate", 3, n, None, tenant="b")) for n in range(3)]
        with pytest.raises(QueueFull, match="6 inputs"):
            server.submit(ask("generate", 3, 1, None, tenant="c"))
        assert server.stats().queued == {"a": 3, "b": 3}
        assert futures[2].cancel()
        for _ in range(200):
            if server.stats().queued == {"a": 2, "b": 3}:
                break
            gate.step()
        gate.release()
        assert all(f.result(60).tokens for f in futures if not f.cancelled())


# -- threads, asyncio, the end


def test_threads_and_tasks() -> None:
    of = deltas(*GPT)
    requests = [ask("generate", 2 + n % 9, n, name, tenant=str(n % 4)) for n, name in enumerate([*of.names] * 3)]

    async def streamed(server: Server, request: Request) -> Answer:
        items: list[TokenChoice | Answer] = [item async for item in server.astream(request)]
        *tokens, answer = items
        assert isinstance(answer, Answer) and tuple(tokens) == answer.tokens
        return answer

    async def tasks(server: Server) -> list[Answer]:
        return await asyncio.gather(*(
            server.asubmit(request) if number % 2 else streamed(server, request)
            for number, request in enumerate(requests)
        ))  # fmt: skip

    with Server(of.model(), deltas=of.folder, max_loaded=4) as server, ThreadPoolExecutor(4) as pool:
        by_threads = [pool.submit(lambda r=request: server.submit(r).result(60)) for request in requests]
        by_tasks = asyncio.run(tasks(server))
        check(of, requests, by_tasks)
        check(of, requests, [future.result(60) for future in by_threads])


def test_a_cancelled_task_and_a_closed_stream_leave_the_batch() -> None:
    of = deltas(*GPT)
    request = ask("generate", 3, 1, "d0", max_tokens=50)

    async def cancelled(server: Server) -> None:
        task = asyncio.create_task(server.asubmit(request))
        stream = server.astream(request)
        assert isinstance(await anext(stream), TokenChoice)
        await stream.aclose()  # type: ignore[attr-defined]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with Server(of.model(), deltas=of.folder) as server:
        asyncio.run(cancelled(server))
        stream = server.stream(request)
        next(stream)
        stream.close()
        with pytest.raises(CancelledError):
            list(stream)
        for _ in range(400):
            if not server.stats().running:
                break
            threading.Event().wait(0.05)
        assert not server.stats().running and not server._jobs
        assert server.submit(ask("generate", 3, 1, None)).result(60).tokens


def test_close_drains() -> None:
    of = deltas(*GPT)
    server = Server(of.model(), deltas=of.folder)
    requests = [ask("generate", 4, n, name) for n, name in enumerate(of.names)]
    futures = [server.submit(request) for request in requests]
    server.close(60)
    check(of, requests, [future.result(0) for future in futures])
    with pytest.raises(EngineClosed):
        server.submit(requests[0])
    with pytest.raises(EngineClosed):
        server.load("d0")
    with pytest.raises(EngineClosed):
        server.unload("d0")
    server.close()


def test_close_without_time_fails_what_is_left() -> None:
    of = deltas(*GPT)
    model = of.model()
    server = Server(model, deltas=of.folder, max_batch_size=2)
    warm(server, ask("generate", 3, 1, "d0"))
    gate = Gate(server)
    futures = [server.submit(ask("generate", 4, n, name)) for n, name in enumerate(of.names)]
    assert gate.waits.wait(60)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(server.close, 0.0)
        gate.release()
        closing.result(60)
    assert all(isinstance(future.exception(0), EngineClosed) for future in futures if future.exception(0) is not None)
    assert any(future.exception(0) is not None for future in futures)
    assert "deltune" not in dict(model.named_children())


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("deltune-")]
