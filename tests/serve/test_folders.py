"""What a server knows of the folders of its deltas: when their files are read, refused, and looked for again."""

from __future__ import annotations

import asyncio
import builtins
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import deltune
from deltune.errors import DeltuneError
from deltune.serve.engine import catalog, folders, lifecycle
from deltune.serve.engine.folders import read_facts
from deltune.serve.engine.requests import Sampling
from deltune.serve.engine.server import Server
from deltune.serve.errors import EngineClosed, RequestTimeout
from tables.specimens import stir

from .specimens import ask, check, deltas
from .test_lifecycle import BERT, GPT, Gate, changed, corrupted, of_another_model, warm


def copies(target: Path, *names: str) -> Path:
    """Copy deltas of the tests into a folder; "d2=a" copies d2 as a."""
    for name in names:
        source, _, other = name.partition("=")
        shutil.copytree(deltas(*BERT).folder / source, target / (other or source))
    return target


def test_a_delta_is_served_alone(tmp_path: Path) -> None:
    """By the name of its folder, whose siblings are not seen; taken out, it comes back by its name, and changes."""
    of, root = deltas(*BERT), copies(tmp_path / "deltas", "d1", "d2")
    request = ask("classify", 6, 1, "d2")
    with Server(of.model(), deltas=root) as server:
        expected = server.submit(request).result(60).scores
    with Server(of.model(), deltas=root / "d2") as server:
        assert [one.name for one in server.deltas()] == ["d2"]
        assert server.submit(request).result(60).scores == expected
        server.unload("d2")
        assert server.deltas() == [] and server.refresh() == []
        server.load("d2")
        assert server.submit(request).result(60).scores == expected
        with pytest.raises(DeltuneError, match="d1"):
            server.load("d1")
        corrupted(root / "d2")
        (info,) = server.refresh()
        assert info.error and info.loaded
    with Server(of.model(), deltas=root) as server:
        shutil.copy(root / "d1" / "delta.json", root)  # which does not make it the folder of one
        server.refresh()
        assert {one.name for one in server.deltas()} == {"d1", "d2"}
    with Server(of.model(), deltas=root / "d1") as server:
        shutil.rmtree(root / "d1")
        with pytest.raises(DeltuneError):
            server.refresh()


def test_one_delta_stays_one_and_has_a_name_that_clients_can_write(tmp_path: Path) -> None:
    """A run that loses spec.yaml is no folder of deltas, of which "delta" is one."""
    of, run = deltas(*BERT), copies(tmp_path / "run", "d2=delta")
    for name, text in (("spec.yaml", "model: minilm"), ("metrics.json", "{}")):
        (run / name).write_text(text)
    with Server(of.model(), deltas=run) as server:
        assert server.submit(ask("classify", 6, 1, "run")).result(60).scores
        (run / "spec.yaml").unlink()
        assert [(info.name, info.error, info.loaded) for info in server.refresh()] == [("run", "", True)]
    with pytest.raises(DeltuneError, match="'my run!' cannot name a delta"):
        Server(of.model(), deltas=copies(tmp_path / "deltas", "d2=my run!") / "my run!")


# -- why files are refused, and which


@pytest.mark.parametrize("loaded", [False, True])
def test_files_that_come_back_after_others_were_refused_are_served_again(tmp_path: Path, loaded: bool) -> None:
    """A version that is rolled back by renaming folders has the very files that the server has seen before."""
    of, root = deltas(*BERT), copies(tmp_path / "deltas", "d2")
    with Server(of.model(), deltas=root) as server:
        request = ask("classify", 6, 1, "d2")
        before = server.submit(request).result(60).scores if loaded else None
        shutil.copytree(root / "d2", tmp_path / "bad")
        (tmp_path / "bad" / "delta.json").write_text("{broken")
        (root / "d2").rename(tmp_path / "good")
        (tmp_path / "bad").rename(root / "d2")
        (info,) = server.refresh()
        assert "delta.json" in info.error and info.loaded == loaded
        (root / "d2").rename(tmp_path / "bad")
        (tmp_path / "good").rename(root / "d2")
        (info,) = server.refresh()
        assert info.error == ""
        answer = server.submit(request).result(60)
        assert before is None or answer.scores == before
    check(of, [request], [answer])


def test_a_version_serves_until_there_is_room_for_the_next_one() -> None:
    """It is not dropped to make room for its own successor, for which another one must go first."""
    of = deltas(*GPT)
    (full,) = (of.folder / name for name, method in of.methods.items() if method == "full")
    with Server(of.model(), deltas=of.folder) as server:
        small, large = server.load("d0").bytes, server.load("large", full).bytes
    long, short = (Sampling(max_tokens=n, temperature=0.0) for n in (40, 1))
    with Server(of.model(), deltas=of.folder, max_loaded_bytes=small + large - 1) as server:
        for name in ("d0", "d2"):
            warm(server, ask("generate", 6, 1, name, sampling=short))
        gate = Gate(server)
        busy = server.submit(ask("generate", 6, 2, "d0", sampling=long))
        gate.step()
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(server.load, "d2", full)
            while not server._lifecycle._arrivals:
                time.sleep(0.01)
            gate.step(3)  # the engine looks for room before each of them
            assert {info.name for info in server.deltas() if info.loaded} == {"d0", "d2"} and not busy.done()
            answer = server.submit(ask("generate", 6, 3, "d2", sampling=short))
            gate.step(4)
            assert answer.result(60).tokens and not busy.done() and server.stats().evictions == 0
            gate.release()
            assert loading.result(60).version != answer.result().version
        busy.result(60)


def test_files_that_are_mended_while_they_are_refused_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that were refused are those that were read, and not those that are there when the refusal arrives."""
    of, root = deltas(*BERT), copies(tmp_path, "d2")
    good = (root / "d2" / "delta.safetensors").read_bytes()
    with Server(of.model(), deltas=root) as server:
        first = server.submit(ask("classify", 6, 1, "d2")).result(60)
        changed(BERT, "d2", root)
        new = (root / "d2" / "delta.safetensors").read_bytes()
        (root / "d2" / "delta.safetensors").write_bytes(good)  # an upload of which only delta.json is there
        refuse = server._lifecycle._refuse

        def mended(*arguments: Any) -> None:
            (root / "d2" / "delta.safetensors").write_bytes(new)
            refuse(*arguments)

        monkeypatch.setattr(server._lifecycle, "_refuse", mended)
        (info,) = server.refresh()
        assert "checksum" in info.error and info.version == first.version
        monkeypatch.undo()
        (info,) = server.refresh()
        assert info.error == "" and info.version != first.version
        corrupted(root / "d2")
        monkeypatch.setattr(server._lifecycle, "_refuse", mended)
        with pytest.raises(DeltuneError, match="checksum"):
            server.load("d2")
        monkeypatch.undo()
        assert [info.error for info in server.refresh()] == [""]


def test_what_is_wrong_with_another_folder_is_no_error_of_the_delta(tmp_path: Path) -> None:
    of, root = deltas(*BERT), copies(tmp_path / "served", "d2", "d3")
    bad = copies(tmp_path, "d0=bad") / "bad"
    corrupted(bad)
    with Server(of.model(), deltas=root, max_loaded=1) as server:
        server.submit(ask("classify", 4, 1, "d2")).result(60)
        with pytest.raises(DeltuneError, match="checksum"):
            server.load("d2", bad)
        with pytest.raises(DeltuneError, match="checksum"):
            server.load("new", bad)
        assert [info.error for info in server.deltas()] == ["", ""]
        server.submit(ask("classify", 4, 1, "d3")).result(60)
        request = ask("classify", 4, 1, "d2")
        check(of, [request], [server.submit(request).result(60)])


# -- when files are read


def test_only_the_files_of_a_delta_are_read_for_its_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of PEFT hold whole checkpoints, with the state of an optimizer beside the adapter."""
    model = deltas(*BERT).model()
    stir(deltune.attach(model, "lora(rank=2)"))
    deltune.export(model, tmp_path / "peft")
    version = read_facts(tmp_path / "peft").version
    (tmp_path / "peft" / "optimizer.pt").write_bytes(bytes(1000))
    (tmp_path / "peft" / "a-link").symlink_to("/dev/zero")
    opened: list[str] = []

    def noted(file: Path, mode: str) -> Any:
        opened.append(file.name)
        return builtins.open(file, mode)

    monkeypatch.setattr(folders, "open", noted, raising=False)
    assert read_facts(tmp_path / "peft").version == version
    assert set(opened) == {"adapter_config.json", "adapter_model.safetensors"}
    options = tmp_path / "peft" / "adapter_config.json"
    options.write_bytes(options.read_bytes() + b" ")
    assert read_facts(tmp_path / "peft").version != version


def test_no_request_reads_files_in_the_thread_that_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a list of deltas: an event loop would stand still for all clients. Refused ones are not looked at."""
    of, root = deltas(*BERT), copies(tmp_path, "d0", "d2", "d3")
    of_another_model(root / "d2")
    with Server(of.model(), deltas=root) as server:
        threads: list[int] = []

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                threads.append(threading.get_ident())
                return function(*arguments)

            return call

        for module in (catalog, lifecycle, folders):
            for name in ("signature", "read_facts"):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, counted(getattr(module, name)))
        for name in ("d0", "d3"):
            os.utime(root / name / "delta.json", ns=(1, 1))
        server.refresh()
        assert threads and set(threads) == {threading.get_ident()}
        threads.clear()

        async def asked() -> list[Any]:
            names = ("d0", "d2", "d3", "d2")
            requests = [server.asubmit(ask("classify", 4, 1, name)) for name in names]
            return await asyncio.gather(*requests, return_exceptions=True)

        answers = asyncio.run(asked())
        assert isinstance(answers[1], DeltuneError) and isinstance(answers[3], DeltuneError)
        check(of, [ask("classify", 4, 1, name) for name in ("d0", "d3")], answers[::2])
        assert len(server.deltas()) == 3
        assert threading.get_ident() not in threads and threads, "the reader's thread has read those that were asked"


def test_a_link_that_the_operator_puts_there_is_served_as_its_folder(tmp_path: Path) -> None:
    of, root = deltas(*BERT), tmp_path / "deltas"
    root.mkdir()
    copies(tmp_path / "elsewhere", "d2=d3")
    (root / "d2").symlink_to(tmp_path / "elsewhere" / "d3")
    with Server(of.model(), deltas=root) as server:
        request = ask("classify", 4, 1, "d2")
        check(of, [request], [server.submit(request).result(60)])


# -- how many names and counts there may be


def test_names_beside_those_of_the_folders_are_bounded(tmp_path: Path) -> None:
    root = copies(tmp_path, "d0", "d2")
    with Server(deltas(*BERT).model(), deltas=root, max_names=2) as server:
        server.load("a", root / "d0")
        server.load("b", root / "d0")
        with pytest.raises(DeltuneError, match=r"2 deltas have another name than their folder.*max_names"):
            server.load("c", root / "d0")
        server.load("a", root / "d2")
        server.load("d0"), server.load("d2", root / "d2")
        copies(root, "d3")
        assert [info.name for info in server.refresh()] == ["a", "b", "d0", "d2", "d3"]
        server.unload("a")
        server.load("c", root / "d0")


def test_names_that_are_loaded_at_the_same_time_are_bounded(tmp_path: Path) -> None:
    root = copies(tmp_path, "d0")
    with Server(deltas(*BERT).model(), deltas=root, max_names=3) as server, ThreadPoolExecutor(8) as pool:
        loads = [pool.submit(server.load, f"n{number}", root / "d0") for number in range(8)]
        refused = [load.exception(60) for load in loads]
        assert sum(error is None for error in refused) == 3 and len(server.deltas()) == 4


def test_counts_of_deltas_that_are_gone_are_dropped(tmp_path: Path) -> None:
    root = copies(tmp_path, "d0")
    with Server(deltas(*BERT).model(), deltas=root) as server:
        for number in range(100):
            server.load(f"n{number}", root / "d0")
            server.submit(ask("classify", 3, 1, f"n{number}")).result(60)
            server.unload(f"n{number}")
        stats = server.stats()
        assert 0 < len(stats.finished) < 80 and not server._running
        assert len(server._catalog._gone) == 0, "their folders have other names"
        assert not server._lifecycle._active


# -- loads that wait for room


@pytest.fixture
def crowded() -> Any:
    """A server with place for one delta, which a request needs that does not end before the gate is opened."""
    of = deltas(*GPT)
    with Server(of.model(), deltas=of.folder, max_loaded=1) as server:
        warm(server, ask("generate", 3, 1, "d2"))
        gate = Gate(server)
        busy = server.submit(ask("generate", 4, 1, "d2", max_tokens=30))
        assert gate.waits.wait(60)
        try:
            yield server, gate, busy
        finally:
            gate.release()


def test_a_load_that_finds_no_room_is_given_up_in_time(crowded: tuple[Server, Gate, Future[Any]]) -> None:
    """And leaves nothing behind: the delta in memory goes on, and the next load has the place when it is free."""
    server, gate, busy = crowded
    with pytest.raises(RequestTimeout, match=r"'d0' was not loaded within 0\.5 seconds"):
        server.load("d0", timeout=0.5)
    later = server.submit(ask("generate", 3, 1, "d2"))
    gate.release()
    assert busy.result(60).tokens and later.result(60).tokens
    assert not server._lifecycle._arrivals and not server._lifecycle._loads
    assert server._catalog.entries["d2"].state is catalog.State.SERVING
    assert {info.name for info in server.deltas() if info.loaded} == {"d2"}
    assert server.load("d0", timeout=60).loaded


def test_closing_fails_loads_that_wait_and_answers_requests(crowded: tuple[Server, Gate, Future[Any]]) -> None:
    """A request for a delta that is not in memory is answered before the end; a call of `load` fails at once."""
    server, gate, busy = crowded
    with ThreadPoolExecutor(2) as pool:
        loading = pool.submit(server.load, "d0")
        other = server.submit(ask("generate", 3, 1, "d3"))
        while not server._lifecycle._arrivals:
            gate.step()
        closing = pool.submit(server.close, 60.0)
        with pytest.raises(EngineClosed):
            loading.result(10)
        assert not busy.done()
        gate.release()
        closing.result(60)
    assert busy.result(0).tokens and other.result(0).tokens
    assert server._lifecycle._reader._shutdown
