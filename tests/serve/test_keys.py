"""API keys: the file, what it keeps, and that a tenant sees nothing of what is not its own."""

from __future__ import annotations

import json
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from deltune.errors import DeltuneError
from deltune.models import align_padding_token, load_model, load_tokenizer
from deltune.serve.api import tenants
from deltune.serve.api.tenants import KeyFile, KeyFileContents, add_key, read_keys, revoke_key

from .served import METHODS, Served, decoder_with_deltas, save_delta, served


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_key_is_kept_as_a_salted_hash(tmp_path: Path) -> None:
    file = tmp_path / "keys" / "keys.json"
    keys = [add_key(file, "acme", {"deltas": ("acme-*",)}) for _ in range(2)]
    text = file.read_text()
    assert all(key not in text and key.split("-", 2)[2] not in text for key in keys)
    stored = read_keys(file).tenants[0].keys
    assert len({key.salt for key in stored}) == 2 and len({key.hash for key in stored}) == 2
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    known = KeyFile(file)
    for key in keys:
        tenant = known.tenant(key)
        assert tenant is not None and tenant.name == "acme" and tenant.deltas == ("acme-*",)
    for wrong in (
        "",
        "dt-",
        keys[0][:-1],
        keys[0] + "A",
        keys[0][:-1] + ("A" if keys[0][-1] != "A" else "B"),
        "é" * 60,
    ):
        assert known.tenant(wrong) is None


def test_a_second_key_keeps_what_is_not_said_again(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    add_key(file, "acme", {"deltas": ("acme-*",), "manage": True})
    add_key(file, "zeta", {})
    add_key(file, "acme", {"requests_per_minute": 5.0})
    tenants = {tenant.name: tenant for tenant in read_keys(file).tenants}
    assert tenants["acme"].manage and tenants["acme"].deltas == ("acme-*",) and len(tenants["acme"].keys) == 2
    assert tenants["zeta"].deltas == () and not tenants["zeta"].manage


def test_keys_that_are_made_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    read, waiting = tenants.read_keys, threading.Barrier(4)

    def slow(path: Path) -> KeyFileContents:
        contents = read(path)
        time.sleep(0.05)  # the others read meanwhile, if they may
        return contents

    def make(number: int) -> str:
        waiting.wait(20)
        return add_key(file, f"tenant{number}", {})

    add_key(file, "first", {})
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(4) as pool:
        patch.setattr(tenants, "read_keys", slow)
        keys = list(pool.map(make, range(4)))
    known = KeyFile(file)
    assert [tenant.name for key in keys if (tenant := known.tenant(key))] == [f"tenant{n}" for n in range(4)]
    assert read_keys(file).tenants[0].name == "first"


def test_a_running_server_notices_new_and_revoked_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltune.serve.api.tenants.LOOK_AGAIN", 0.0)
    file = tmp_path / "keys.json"
    first = add_key(file, "acme", {})
    known = KeyFile(file)
    second = add_key(file, "acme", {})
    assert known.tenant(second) is not None
    assert revoke_key(file, first.split("-")[1]) == "acme"
    assert known.tenant(first) is None and known.tenant(second) is not None
    file.write_text("{broken")
    assert known.tenant(second) is not None, "a broken file changes nothing"
    with pytest.raises(DeltuneError, match="cannot be read as a file of keys"):
        read_keys(file)


@pytest.mark.parametrize(
    ("contents", "problem"),
    [
        ("[]", "not a JSON object"),
        ('{"tenants": [{"name": "a b"}]}', "name"),
        ('{"tenants": [{"name": "a", "password": "x"}]}', "password"),
        ('{"tenants": [{"name": "a"}, {"name": "a"}]}', "a twice"),
        ('{"tenants": [{"name": "a", "keys": [{"id": "x", "salt": "", "hash": ""}]}]}', "keys.0"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, contents: str, problem: str) -> None:
    file = tmp_path / "keys.json"
    file.write_text(contents)
    with pytest.raises(DeltuneError, match=problem):
        KeyFile(file)
    with pytest.raises(DeltuneError, match="there is no file of keys"):
        KeyFile(tmp_path / "none.json")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    made = {
        "acme": add_key(file, "acme", {"deltas": ("acme-*", "mood"), "base": False}),
        "zeta": add_key(file, "zeta", {"deltas": ("zeta-*",), "manage": True}),
        "boss": add_key(file, "boss", {"deltas": ("*",), "manage": True, "admin": True}),
    }
    return {**made, "file": str(file)}


@pytest.fixture(scope="module")
def guarded(decoder: tuple[Path, Path], keys: dict[str, str]) -> Iterator[Served]:
    model, deltas = decoder
    options = {"model": str(model), "deltas": str(deltas), "keys": keys["file"], "served_name": "base", "watch": 0}
    with served(**options) as running:
        yield running


ASKS: tuple[tuple[str, str, Any], ...] = (
    ("GET", "/v1/models", None), ("GET", "/v1/models/mood", None), ("GET", "/v1/deltas", None), ("GET", "/stats", None),
    ("GET", "/metrics", None), ("POST", "/v1/completions", {"model": "mood", "prompt": "the"}),
    ("POST", "/v1/chat/completions", {"model": "mood", "messages": [{"role": "user", "content": "the"}]}),
    ("POST", "/v1/embeddings", {"model": "mood", "input": "the"}),
    ("POST", "/classify", {"model": "mood", "input": "a"}), ("POST", "/tag", {"model": "mood", "input": "the"}),
    ("POST", "/generate", {"model": "mood", "input": "the"}), ("POST", "/v1/deltas", {"name": "mood"}),
    ("POST", "/v1/load_lora_adapter", {"lora_name": "mood", "lora_path": "mood"}),
    ("POST", "/v1/unload_lora_adapter", {"lora_name": "mood"}), ("POST", "/v1/deltas/refresh", None),
    ("DELETE", "/v1/deltas/mood", None), ("GET", "/v1/deltas/mood", None),
)  # fmt: skip


def ask(server: Served, method: str, path: str, body: Any, headers: dict[str, str]) -> Any:
    import httpx

    return httpx.request(method, server.url + path, json=body, headers=headers, timeout=60, trust_env=False)


def test_the_table_has_every_route_that_needs_a_key(guarded: Served) -> None:
    from deltune.serve.api import delta_routes, operation_routes
    from deltune.serve.api import routes as answer_routes

    open_to_all = {"/health", "/ready", "/version", "/"}
    routes = {
        (method, route.path)
        for module in (answer_routes, delta_routes, operation_routes)
        for route in module.router.routes
        for method in route.methods  # type: ignore[attr-defined]
        if route.path not in open_to_all and not route.path.startswith(("/v1/classify", "/v1/tag", "/v1/generate"))  # type: ignore[attr-defined]
    }
    named = {(m, p.replace("models/mood", "models/{name:path}").replace("/mood", "/{name}")) for m, p, _ in ASKS}
    assert named == routes


@pytest.mark.parametrize(("method", "path", "body"), ASKS, ids=lambda part: str(part)[:30])
def test_nothing_is_answered_without_a_key(guarded: Served, method: str, path: str, body: Any) -> None:
    for headers in ({}, bearer("dt-000000000000-" + "A" * 43), {"Authorization": "Basic YTpi"}, {"X-API-Key": "x"}):
        answer = ask(guarded, method, path, body, headers)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"


def test_a_tenant_sees_its_own_deltas_only(guarded: Served, keys: dict[str, str]) -> None:
    listed = {
        name: {one["id"] for one in guarded.get("/v1/models", headers=bearer(keys[name])).json()["data"]}
        for name in ("acme", "zeta", "boss")
    }
    assert listed["acme"] == {"acme-reviews", "acme-tone", "mood"}
    assert listed["zeta"] == {"base", "zeta-news"}
    assert listed["boss"] == {"base", *METHODS}


def test_others_deltas_look_as_if_they_did_not_exist(guarded: Served, keys: dict[str, str]) -> None:
    """But for the name that was asked, the answers about a delta of others and about none are the same bytes."""

    def answers(name: str) -> list[tuple[int, str]]:
        headers = bearer(keys["zeta"])
        responses = [
            guarded.get(f"/v1/models/{name}", headers=headers),
            guarded.get(f"/v1/deltas/{name}", headers=headers),
            guarded.post("/v1/completions", {"model": name, "prompt": "the"}, headers=headers),
            guarded.post("/classify", {"model": name, "input": "the"}, headers=headers),
            guarded.post("/v1/unload_lora_adapter", {"lora_name": name}, headers=headers),
            guarded.post("/v1/load_lora_adapter", {"lora_name": "zeta-x", "lora_path": name}, headers=headers),
        ]
        return [(answer.status_code, answer.text.replace(name, "NAME")) for answer in responses]

    seen = answers("acme-tone")
    assert seen == answers("acme-none") and all(400 <= status < 500 for status, _ in seen)
    assert not any("acme" in text or "mood" in text for _, text in seen)


def test_folders_without_a_delta_are_shown_to_those_who_can_mend_them(
    decoder: tuple[Path, Path], keys: dict[str, str], tmp_path: Path
) -> None:
    """A tenant that manages sees those under its own names, an admin all, and others none."""
    for name in ("acme-new", "zeta-new", "notes"):
        (tmp_path / "deltas" / name).mkdir(parents=True)
    options = {"model": str(decoder[0]), "deltas": str(tmp_path / "deltas"), "keys": keys["file"], "watch": 0}
    with served(**options) as running:
        seen = {
            name: [one["folder"] for one in running.get("/v1/deltas", headers=bearer(keys[name])).json()["ignored"]]
            for name in ("acme", "zeta", "boss")
        }
        described = {
            name: running.get("/v1/deltas/zeta-new", headers=bearer(keys[name])).json()["error"]["message"]
            for name in ("acme", "zeta", "boss")
        }
    assert seen == {"acme": [], "zeta": ["zeta-new"], "boss": ["acme-new", "notes", "zeta-new"]}
    assert described["acme"].startswith("unknown delta") and "holds no delta" not in described["acme"]
    assert "holds no delta" in described["zeta"] and described["zeta"] == described["boss"]


def test_numbers_and_management_need_a_right(guarded: Served, keys: dict[str, str]) -> None:
    for path in ("/metrics", "/stats"):
        assert guarded.get(path, headers=bearer(keys["acme"])).status_code == 403
        assert guarded.get(path, headers=bearer(keys["boss"])).status_code == 200
    load = {"lora_name": "acme-tone", "lora_path": "acme-tone", "load_inplace": True}
    refused = guarded.post("/v1/load_lora_adapter", load, headers=bearer(keys["acme"]))
    assert refused.status_code == 403 and "--manage" in refused.json()["error"]["message"]
    refused = guarded.post("/v1/load_lora_adapter", load, headers=bearer(keys["zeta"]))
    assert refused.status_code == 403 and "acme-tone" in refused.json()["error"]["message"]
    assert guarded.post("/v1/load_lora_adapter", load, headers=bearer(keys["boss"])).status_code == 200


def test_the_cache_tells_a_tenant_nothing_of_others(guarded: Served, keys: dict[str, str]) -> None:
    """A prompt that another tenant has asked comes as little from the cache as one that nobody has asked."""
    body = {
        "model": "mood",
        "prompt": "the old hammer was near my very small table and the otter is here " * 2,
        "max_tokens": 2,
    }

    def cached(name: str) -> int:
        usage = guarded.post("/v1/completions", body, headers=bearer(keys[name])).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached("boss") == 0 and cached("boss") > 0
    assert cached("acme") == 0


def test_the_command_makes_lists_and_revokes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import typer

    from deltune.cli.app import app

    def run(*arguments: object) -> str:
        typer.main.get_command(app)(
            ["serve-key", str(tmp_path / "keys.json"), *map(str, arguments)], standalone_mode=False
        )
        return capsys.readouterr().out

    key = run("acme", "--delta", "acme-*", "--delta", "mood", "--manage").strip()
    (listed,) = json.loads(run("--json"))
    assert listed["deltas"] == ["acme-*", "mood"] and listed["keys"] == [key.split("-")[1]] and "hash" not in listed
    line = run()
    run("acme", "--requests-per-minute", "5", "--admin", "--no-manage", "--no-base")
    assert "deltas acme-*, mood; base model; manage; keys " in line and "admin" not in line
    assert "deltas acme-*, mood; admin; 5 requests a minute; keys " in " ".join(run().split())
    second = json.loads(run("--json"))[0]["keys"][1]
    run("--revoke", second)
    assert run("--revoke", key.split("-")[1]).startswith("revoked a key of acme")
    assert json.loads(run("--json"))[0]["keys"] == []
    with pytest.raises(DeltuneError, match="unknown key"):
        run("--revoke", "0" * 12)


def test_nothing_is_read_of_a_request_without_a_key(decoder: tuple[Path, Path], tmp_path: Path) -> None:
    add_key(tmp_path / "keys.json", "acme", {})
    with served(decoder, keys=str(tmp_path / "keys.json")) as running:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/classify", "/tag", "/generate"):
            assert running.post(path, {"wrong": 1}).status_code == 401


def test_a_refusal_does_not_say_where_models_are(tmp_path: Path) -> None:
    """A base model that is a folder is named by the last part of its path, in the list of deltas and in answers."""
    model, deltas = decoder_with_deltas(tmp_path / "private")
    changed = load_model(str(model), "causal-lm")
    align_padding_token(changed, load_tokenizer(str(model)))
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    changed.save_pretrained(tmp_path / "private" / "other-model")
    load_tokenizer(str(model)).save_pretrained(tmp_path / "private" / "other-model")
    other = load_model(str(tmp_path / "private" / "other-model"), "causal-lm")
    align_padding_token(other, load_tokenizer(str(model)))
    save_delta(other, deltas / "wrong", "lora(rank=2)", 1)
    with served(model=str(model), deltas=str(deltas), served_name="base") as running:
        texts = [
            running.get("/v1/deltas/wrong").json()["error"],
            running.post("/v1/completions", {"model": "wrong", "prompt": "the"}).json()["error"]["message"],
        ]
        assert str(tmp_path) not in running.get("/v1/deltas").text
    for text in texts:
        assert "it was other-model, and the" in text and "of this one (model) differ" in text, text
        assert str(tmp_path) not in text and "private" not in text
