"""Loading, replacing and taking out deltas over HTTP, and folders that a request cannot reach."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import deltune
import deltune.serve
from deltune.models import load_model
from deltune.serve.api.delta_routes import delta_folder
from deltune.serve.errors import OPERATOR_ADVICE, InvalidRequest

from .served import METHODS, Served, save_delta, served

ASK = {"prompt": "the old hammer", "max_tokens": 4, "temperature": 0, "logprobs": 1}


@pytest.fixture(scope="module")
def changeable(
    decoder: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Served, Path, Path]]:
    """A server over a folder of deltas that the tests may change, and the folder of its model."""
    model, deltas = decoder
    folder = tmp_path_factory.mktemp("own") / "deltas"
    shutil.copytree(deltas, folder)
    with served(model=str(model), deltas=str(folder), served_name="base") as running:
        yield running, folder, model


def probabilities(server: Served, model: str) -> list[float]:
    answer = server.post("/v1/completions", {"model": model, **ASK})
    assert answer.status_code == 200, answer.text
    values: list[float] = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
    return values


def test_a_delta_comes_and_goes_under_vllms_names(changeable: tuple[Served, Path, Path]) -> None:
    server, folder, _ = changeable
    shutil.copytree(folder / "mood", folder / "later")
    assert server.post("/v1/completions", {"model": "later", **ASK}).status_code == 404
    body = {"lora_name": "later", "lora_path": str(folder / "later")}
    loaded = server.post("/v1/load_lora_adapter", body)
    assert loaded.status_code == 200 and loaded.text == "Success: LoRA adapter 'later' added successfully."
    assert probabilities(server, "later") == pytest.approx(probabilities(server, "mood"), abs=1e-5)
    again = server.post("/v1/load_lora_adapter", body)
    assert again.status_code == 400 and again.json()["error"]["code"] == "already_loaded"
    assert server.post("/v1/load_lora_adapter", {**body, "load_inplace": True}).status_code == 200
    gone = server.post("/v1/unload_lora_adapter", {"lora_name": "later"})
    assert gone.status_code == 200 and gone.text == "Success: LoRA adapter 'later' removed successfully."
    unknown = server.post("/v1/completions", {"model": "later", **ASK})
    assert unknown.status_code == 404 and "unknown model 'later'" in unknown.text
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "later"}).status_code == 404
    assert (folder / "later" / "delta.json").exists(), "its files stay"


def test_a_delta_is_described(changeable: tuple[Served, Path, Path]) -> None:
    server, folder, _ = changeable
    listed = {one["name"]: one for one in server.get("/v1/deltas").json()["data"]}
    assert set(METHODS) <= set(listed)
    for name, method in METHODS.items():
        one = server.get(f"/v1/deltas/{name}").json()
        assert {**one, "loaded": None, "loaded_at": None} == {**listed[name], "loaded": None, "loaded_at": None}
        assert one["folder"] == name and str(folder) not in json.dumps(one) and one["parameters"] > 0
        assert one["method"].partition("(")[0] == method.partition("(")[0] and "generate" in one["tasks"]
    assert server.get("/v1/deltas/none").status_code == 404


def test_a_new_version_takes_over_and_a_bad_one_does_not(
    changeable: tuple[Served, Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    server, folder, model = changeable
    shutil.copytree(folder / "mood", folder / "changing")
    first = server.post("/v1/deltas", {"name": "changing"})
    assert first.status_code == 201, first.text
    before = probabilities(server, "changing")
    save_delta(load_model(str(model), "causal-lm"), folder / "new", METHODS["mood"], seed=77)
    for file in ("delta.json", "delta.safetensors"):
        os.replace(folder / "new" / file, folder / "changing" / file)
    shutil.rmtree(folder / "new")
    second = server.post("/v1/deltas", {"name": "changing"})
    assert second.status_code == 201 and second.json()["version"] != first.json()["version"]
    after = probabilities(server, "changing")
    assert after != pytest.approx(before, abs=1e-3)

    broken = folder / "changing" / "delta.safetensors"
    broken.write_bytes(broken.read_bytes()[:-8])
    with caplog.at_level("WARNING", "deltune"):
        refused = server.post("/v1/deltas", {"name": "changing"})
    assert "the files of delta changing are refused" in caplog.text and "goes on" in caplog.text
    assert refused.status_code == 400 and str(folder) not in refused.text, refused.text
    assert probabilities(server, "changing") == pytest.approx(after, abs=1e-6), "the old one goes on"
    assert server.delete("/v1/deltas/changing").json() == {"name": "changing", "deleted": True}


def test_a_relative_folder_of_deltas_is_hidden_and_nothing_else(
    decoder: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is a word in the paths of the API, and may be one in a name."""
    model, deltas = decoder
    shutil.copytree(deltas, tmp_path / "deltas")
    monkeypatch.chdir(tmp_path)
    with served(model=str(model), deltas="deltas", served_name="base") as server:
        message = server.post("/v1/refresh", {}).json()["error"]["message"]
        assert message.startswith("unknown path '/v1/refresh'. Did you mean '/v1/deltas/refresh'?")
        message = server.post("/v1/completions", {"model": "deltas/mood", **ASK}).json()["error"]["message"]
        assert message.startswith("unknown model 'deltas/mood'. Did you mean 'mood'?")
        message = server.post("/v1/deltas", {"name": "x", "folder": "deltas/mood"}).json()["error"]["message"]
        assert message.startswith("'deltas/mood' is not a folder below the server's folder of deltas")
        truncated(tmp_path / "deltas" / "mood", model)
        refused = server.post("/v1/deltas", {"name": "mood"})
        assert "mood/delta.safetensors" in refused.text and str(tmp_path) not in refused.text
        assert server.get("/v1/deltas/mood").json()["folder"] == "mood"
        (tmp_path / "deltas").rename(tmp_path / "elsewhere")
        assert server.get("/nowhere").status_code == 404, "errors need no folder"


def test_a_folder_with_the_name_of_the_base_model_is_ignored_with_the_reason(
    changeable: tuple[Served, Path, Path],
) -> None:
    server, folder, _ = changeable
    shutil.copytree(folder / "mood", folder / "base")
    ignored = {one["folder"]: one["error"] for one in server.post("/v1/deltas/refresh", {}).json()["ignored"]}
    assert "the base model has this name" in ignored["base"]
    assert "the base model has this name" in server.get("/v1/deltas/base").json()["error"]["message"]
    shutil.rmtree(folder / "base")
    assert "base" not in {one["folder"] for one in server.post("/v1/deltas/refresh", {}).json()["ignored"]}


def test_an_adapter_of_peft_without_a_task_type_is_asked_what_its_model_is_asked(
    changeable: tuple[Served, Path, Path],
) -> None:
    """PEFT then writes the class of the model."""
    server, folder, source = changeable
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    torch.manual_seed(0)  # the answer is not an end alone
    peft.get_peft_model(load_model(str(source), "causal-lm"), config).save_pretrained(folder / "untyped")
    assert json.loads((folder / "untyped" / "adapter_config.json").read_text())["task_type"] is None
    assert server.post("/v1/deltas", {"name": "untyped"}).json()["tasks"] == ["generate", "embed"]
    assert probabilities(server, "untyped") != pytest.approx(probabilities(server, "base"), abs=1e-3)


def test_refreshing_finds_new_folders(changeable: tuple[Served, Path, Path]) -> None:
    server, folder, _ = changeable
    shutil.copytree(folder / "intent", folder / "found")
    assert "found" not in {one["id"] for one in server.get("/v1/models").json()["data"]}
    listed = {one["name"] for one in server.post("/v1/deltas/refresh", {}).json()["data"]}
    assert "found" in listed and probabilities(server, "found") == pytest.approx(
        probabilities(server, "intent"), abs=1e-5
    )


def test_what_is_not_served_is_listed_with_the_reason(changeable: tuple[Served, Path, Path]) -> None:
    """A delta of another base model before anybody asks for it, and a folder without a delta."""
    server, folder, source = changeable
    model = load_model(str(source), "causal-lm")
    with torch.no_grad():
        model.get_input_embeddings().get_parameter("weight").add_(1.0)
    save_delta(model, folder / "foreign", "lora(rank=2)", seed=1)
    (folder / "notes").mkdir()
    os.mkdir(os.fsencode(folder / "caf") + b"\xe9")  # no UTF-8, as old disks have it
    listed = server.post("/v1/deltas/refresh", {})
    assert listed.json() == server.get("/v1/deltas").json() and str(folder) not in listed.text
    errors = {one["name"]: one["error"] for one in listed.json()["data"]}
    assert "tuned on another base model" in errors["foreign"] and errors["mood"] is None
    assert "caf\\udce9" in {one["folder"] for one in listed.json()["ignored"]}
    notes = next(one for one in listed.json()["ignored"] if one["folder"] == "notes")
    assert "holds no delta" in notes["error"]
    models = {one["id"] for one in server.get("/v1/models").json()["data"]}
    assert "mood" in models and not models & {"notes", "foreign"}
    stats = server.get("/stats")
    assert errors["foreign"] in [one["error"] for one in stats.json()["deltas"]] and str(folder) not in stats.text
    assert notes in stats.json()["ignored"]
    shutil.rmtree(folder / "foreign")
    shutil.rmtree(folder / "notes")


def other_weights(path: Path, source: Path) -> None:
    model = load_model(str(source), "causal-lm")
    with torch.no_grad():
        model.get_input_embeddings().get_parameter("weight").add_(1.0)
    save_delta(model, path, "lora(rank=2)", seed=1)


def more_tokens(path: Path, source: Path) -> None:
    model = load_model(str(source), "causal-lm")
    model.resize_token_embeddings(model.config.vocab_size + 2)
    save_delta(model, path, "lora(rank=2)", seed=1)


def rows_of_added_tokens(path: Path, source: Path) -> None:
    model = load_model(str(source), "causal-lm")
    size = model.config.vocab_size
    model.resize_token_embeddings(size + 2)
    save_delta(model, path, f"trainable_tokens(tokens=({size}, {size + 1}))", seed=1)


def other_shapes(path: Path, source: Path) -> None:
    save_delta(load_model(str(source), "causal-lm"), path, "lora(rank=4)", seed=1)
    text = (path / "delta.json").read_text().replace("rank=4", "rank=3")
    (path / "delta.json").write_text(text)


def not_finite(path: Path, source: Path) -> None:
    save_delta(load_model(str(source), "causal-lm"), path, "lora(rank=2)", seed=1, scale=float("nan"))


def damaged_facts(path: Path, source: Path) -> None:
    not_finite(path, source)
    (path / "delta.json").write_text("{}")


def truncated(path: Path, source: Path) -> None:
    not_finite(path, source)
    numbers = (path / "delta.safetensors").read_bytes()
    (path / "delta.safetensors").write_bytes(numbers[:-8])


def newer_format(path: Path, source: Path) -> None:
    change_facts(path, source, format=99)


def no_fingerprint(path: Path, source: Path) -> None:
    facts = change_facts(path, source)
    change_facts(path, source, base={**facts["base"], "fingerprint": {}})


def form_of_ones_own(path: Path, source: Path) -> None:
    facts = change_facts(path, source)
    change_facts(path, source, **{key: facts[key].replace("LowRank(", "MyForm(") for key in ("method", "explicit")})


def unknown_type(path: Path, source: Path) -> None:
    as_peft(path, source, peft_type="NOBODYS")


def another_width(path: Path, source: Path) -> None:
    as_peft(path, source)
    weights = load_file(path / "adapter_model.safetensors")
    save_file(
        {name: torch.cat([value, value], -1) for name, value in weights.items()}, path / "adapter_model.safetensors"
    )


def change_facts(path: Path, source: Path, **changes: Any) -> dict[str, Any]:
    """Save a delta, change its delta.json, and return what that says."""
    save_delta(load_model(str(source), "causal-lm"), path, "Modification(query, LowRank(rank=2))", seed=1)
    facts: dict[str, Any] = {**json.loads((path / "delta.json").read_text()), **changes}
    (path / "delta.json").write_text(json.dumps(facts))
    return facts


def as_peft(path: Path, source: Path, **changes: Any) -> None:
    model = load_model(str(source), "causal-lm")
    tuned = deltune.attach(model, "lora(rank=2, at='ffn_up')")
    deltune.export(model, path)
    tuned.detach()
    options = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**options, **changes}))


@pytest.mark.parametrize(
    ("spoil", "words", "todo"),
    [
        (other_weights, "tuned on another base model", OPERATOR_ADVICE["model"]),
        (more_tokens, "token embeddings and this one", OPERATOR_ADVICE["model"]),
        (rows_of_added_tokens, "has rows for tokens that were added to its base model", OPERATOR_ADVICE["tokens"]),
        (other_shapes, "does not fit this model", OPERATOR_ADVICE["files"]),
        (not_finite, "holds NaN or infinity", OPERATOR_ADVICE["files"]),
        (damaged_facts, "is not as deltune writes it", OPERATOR_ADVICE["files"]),
        (truncated, "is damaged", OPERATOR_ADVICE["files"]),
        (another_width, "does not fit this model", OPERATOR_ADVICE["model"]),
        (form_of_ones_own, "its method has parts that are not registered here: 'MyForm'", OPERATOR_ADVICE["part"]),
        (newer_format, "has format 99", "update deltune"),
        (no_fingerprint, "has no fingerprint", "use the file as it was saved"),
        (unknown_type, "unknown peft_type 'NOBODYS'", "."),
    ],
)
def test_a_refusal_says_what_an_operator_can_do(
    changeable: tuple[Served, Path, Path], spoil: Callable[[Path, Path], None], words: str, todo: str
) -> None:
    """And nothing that only a caller of Python can do, wherever a client reads it."""
    server, folder, source = changeable
    spoil(folder / "refused", source)
    try:
        server.post("/v1/deltas/refresh", {})
        answered = server.post("/v1/completions", {"model": "refused", **ASK})
        loaded = server.post("/v1/deltas", {"name": "refused"})
        assert answered.status_code == loaded.status_code == 400
        described = server.get("/v1/deltas/refused").json()["error"]
        for message in (answered.json()["error"]["message"], loaded.json()["error"]["message"], described):
            assert words in message and message.endswith(todo) and str(folder) not in message, message
            every = OPERATOR_ADVICE.values()
            assert todo in every or not any(advice in message for advice in every), message
            python = re.search(r"deltune\.|load\(|save\(|base=|allow_nonfinite|resize_token_embeddings", message)
            assert python is None, message
    finally:
        shutil.rmtree(folder / "refused")
        server.post("/v1/deltas/refresh", {})


def test_the_base_keeps_its_name(changeable: tuple[Served, Path, Path]) -> None:
    server, _, _ = changeable
    taken = server.post("/v1/deltas", {"name": "base", "folder": "mood"})
    assert taken.status_code == 400 and taken.json()["error"]["code"] == "name_taken"


def test_others_are_served_while_a_delta_is_replaced(changeable: tuple[Served, Path, Path]) -> None:
    """Requests for one delta get the same answers all the time while another is loaded again and again."""
    server, folder, _ = changeable
    shutil.copytree(folder / "mood", folder / "busy")
    expected = probabilities(server, "acme-tone")

    def replace(_: int) -> int:
        return server.post(
            "/v1/load_lora_adapter", {"lora_name": "busy", "lora_path": "busy", "load_inplace": True}
        ).status_code

    with ThreadPoolExecutor(3) as pool:
        loads = pool.map(replace, range(10))
        answers = list(pool.map(lambda _: probabilities(server, "acme-tone"), range(20)))
    assert set(loads) == {200}
    assert all(answer == pytest.approx(expected, abs=1e-5) for answer in answers)


# -- folders that a request cannot reach


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of deltas, with ways out of it."""
    home = tmp_path_factory.mktemp("home")
    (home / "outside" / "delta").mkdir(parents=True)
    root = home / "deltas"
    (root / "good" / "inner").mkdir(parents=True)
    (root / "file").write_text("x")
    (root / "link").symlink_to(home / "outside")
    (root / "good" / "link").symlink_to("/")
    (root / "self").symlink_to(root / "good")
    return root


def test_folders_below_are_found(root: Path) -> None:
    for path in ("good", "good/inner", "./good", "good/", "good//inner", str(root / "good")):
        assert delta_folder(root, path).is_relative_to(root / "good")


OUT = (
    "..", "../outside/delta", "good/../../outside/delta", "link", "link/delta", "good/link/etc", "self", "file", "",
    ".", "/", "/etc", "~", "~root", "good\0", "none", "good/none", "//etc", "\\..\\..", "x" * 5000, "a/" * 2000,
)  # fmt: skip


@pytest.mark.parametrize("path", OUT, ids=lambda path: repr(path)[:24])
def test_folders_outside_are_refused(root: Path, path: str) -> None:
    with pytest.raises(InvalidRequest, match="folder below the server's folder of deltas"):
        delta_folder(root, path)
    with pytest.raises(InvalidRequest):
        delta_folder(root, str(root.parent / "outside" / "delta"))
    with pytest.raises(InvalidRequest, match="has no folder of deltas"):
        delta_folder(None, path)


parts = st.sampled_from(
    ("good", "inner", "link", "self", "..", ".", "", "/", "file", "outside", "delta", "~", "\0", "é")
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(parts, max_size=6), st.booleans())
def test_no_path_leads_out(root: Path, names: list[str], absolute: bool) -> None:
    """Whatever is joined, the result is a real folder inside, and no link was followed on the way."""
    path = ("/" if absolute else "") + "/".join(names)
    try:
        inside = delta_folder(root, path)
    except InvalidRequest:
        return
    assert inside.is_dir() and inside.resolve() == inside and inside.is_relative_to(root.resolve()) and inside != root


@pytest.mark.parametrize("path", OUT[:8], ids=repr)
def test_requests_cannot_reach_out(changeable: tuple[Served, Path, Path], path: str) -> None:
    server, folder, _ = changeable
    if not (folder / "link").is_symlink():
        (folder / "link").symlink_to("/etc")
        (folder / "self").symlink_to(folder / "mood")
    for body, url in (
        ({"lora_name": "out", "lora_path": path}, "/v1/load_lora_adapter"),
        ({"name": "out", "folder": path}, "/v1/deltas"),
    ):
        answer: Any = server.post(url, body)
        assert answer.status_code == 400 and "folder below" in answer.json()["error"]["message"], answer.text
        assert str(folder) not in answer.text


def test_a_delta_that_was_taken_out_stays_out_and_a_changed_one_is_noticed(
    decoder: tuple[Path, Path], tmp_path: Path
) -> None:
    """However the server was told its folder, and whether a request or a look at the folder found the delta."""
    model, deltas = decoder
    shutil.copytree(deltas, tmp_path / "real")
    folder = tmp_path / "deltas"
    folder.symlink_to(tmp_path / "real")
    with served(model=str(model), deltas=str(folder), served_name="base") as server:
        shutil.copytree(deltas / "mood", folder / "later")
        for _ in range(2):
            assert server.post("/v1/deltas", {"name": "later"}).status_code == 201
            assert server.delete("/v1/deltas/later").status_code == 200
            server.post("/v1/deltas/refresh", {})
            assert server.get("/v1/deltas/later").status_code == 404
        for name, source in (("later", "later"), ("intent", "mood")):
            first = server.post("/v1/deltas", {"name": name, "folder": source})
            assert first.status_code == 201
            save_delta(load_model(str(model), "causal-lm"), folder / source, METHODS["mood"], seed=len(name))
            server.post("/v1/deltas/refresh", {})
            assert server.get(f"/v1/deltas/{name}").json()["version"] != first.json()["version"]
        shutil.rmtree(tmp_path / "real" / "later")
        server.post("/v1/deltas/refresh", {})
        assert server.get("/v1/deltas/later").status_code == 404
