"""Deltas on the Hugging Face Hub: pushed, fetched and described, by the real client against a local stand-in."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

import deltune
import hub as stand_in
import tiny
from deltune.runtime import attach
from deltune.train import inference

METHOD = "lora(rank=2) + layernorm"
BATCH = {
    "input_ids": torch.tensor([[2, 7, 8, 3], [2, 9, 3, 1]]),
    "attention_mask": torch.tensor([[1] * 4, [1, 1, 1, 0]]),
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[stand_in.Hub]:
    """The stand-in, to which huggingface_hub goes with the token of a writer and with an empty cache."""
    with stand_in.running() as running:
        constants = "huggingface_hub.constants"
        monkeypatch.setattr(f"{constants}.ENDPOINT", running.endpoint)
        template = running.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(f"{constants}.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("transformers.utils.hub._hf_api", None)  # which keeps the address of its first use
        monkeypatch.setattr(f"{constants}.HF_HUB_DISABLE_XET", True)  # LFS, as with a client that lacks hf_xet
        monkeypatch.setattr(f"{constants}.HF_HUB_DISABLE_PROGRESS_BARS", True)
        monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", stand_in.WRITER)
        monkeypatch.chdir(tmp_path)
        yield running


@pytest.fixture(scope="module")
def base() -> PreTrainedModel:
    config = AutoConfig.for_model("bert", **tiny.SIZES, vocab_size=40, id2label={0: "no", 1: "yes | <b>perhaps</b>"})
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config).eval()


@pytest.fixture
def model(base: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(base)


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(**BATCH).logits


def attached(model: PreTrainedModel, method: str = METHOD) -> deltune.Tuned:
    """A handle with a delta that changes what the model computes."""
    tuned = deltune.attach(model, method)
    with torch.no_grad():
        for number, parameter in enumerate(tuned.trainable_parameters()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    return tuned


def front_matter(card: bytes | str) -> dict[str, Any]:
    text = card if isinstance(card, str) else card.decode()
    data = yaml.safe_load(text.split("---\n", 2)[1])
    assert isinstance(data, dict)
    return data


def test_pushed_and_loaded(hub: stand_in.Hub, model: PreTrainedModel, base: PreTrainedModel, tmp_path: Path) -> None:
    """What is loaded from the hub computes what was pushed; the upload is one commit of three files."""
    tuned = attached(model)
    outputs = logits(model)
    info = tuned.push_to_hub("writer/first", commit_message="The first", commit_description="of many", private=True)
    repository = hub.repositories["writer/first"]
    assert repository.private and info.oid == repository.refs["main"] and info.pr_url is None
    assert repository.messages[info.oid] == "The first\nof many" and len(repository.commits) == 2
    assert set(repository.files()) == {".gitattributes", "README.md", "delta.json", "delta.safetensors"}
    again = deltune.load(base_copy := copy.deepcopy(base), "writer/first")
    assert torch.equal(logits(base_copy), outputs) and repr(again.method) == METHOD
    assert hub.downloaded() == {"delta.json", "delta.safetensors"}
    assert list(tmp_path.iterdir()) == [tmp_path / "cache"]


def test_branches_commits_and_pull_requests(hub: stand_in.Hub, model: PreTrainedModel, base: PreTrainedModel) -> None:
    tuned = attached(model)
    first = logits(model)
    commit = tuned.push_to_hub("writer/d").oid
    with torch.no_grad():
        for parameter in tuned.trainable_parameters():
            parameter.mul_(1.5)
    second = logits(model)
    tuned.push_to_hub("writer/d", revision="longer")
    pull = tuned.push_to_hub("writer/d", create_pr=True)
    repository = hub.repositories["writer/d"]
    assert set(repository.refs) == {"main", "longer", "refs/pr/1"} and pull.pr_url and pull.pr_num == 1
    tuned.push_to_hub("writer/d", revision="refs/pr/1")  # what is pushed to a pull request is no new branch
    assert len(repository.refs) == 3
    for revision, outputs in (
        (None, first),
        ("main", first),
        (commit, first),
        ("longer", second),
        ("refs/pr/1", second),
    ):
        loaded = copy.deepcopy(base)
        deltune.load(loaded, "writer/d", revision=revision)
        assert torch.equal(logits(loaded), outputs), revision
    with pytest.raises(deltune.DeltuneError, match="no such revision"):
        deltune.load(copy.deepcopy(base), "writer/d", revision="shorter")


def test_the_base_model_comes_from_the_hub_too(
    hub: stand_in.Hub, base: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delta of a base on the hub names it, by which `load` with the hub id alone loads both, and the card says it."""
    base.save_pretrained(tmp_path / "base")
    hub.add("someone/base", {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()})
    model = AutoModelForSequenceClassification.from_pretrained("someone/base").eval()
    tuned = attached(model)
    outputs = logits(model)
    tuned.push_to_hub("writer/delta")
    card = hub.repositories["writer/delta"].files()["README.md"].decode()
    assert front_matter(card) == {
        "base_model": "someone/base",
        "library_name": "deltune",
        "pipeline_tag": "text-classification",
        "tags": ["deltune", "parameter-efficient-fine-tuning"],
    }
    block = re.search(r"^```python\n(.*?)^```", card, re.MULTILINE | re.DOTALL)
    namespace: dict[str, Any] = {}
    assert block
    exec(block[1], namespace)  # the card's own lines
    assert torch.equal(logits(namespace["model"].eval()), outputs)
    alone = deltune.load("writer/delta")
    assert torch.equal(logits(alone.model.eval()), outputs)


@pytest.mark.parametrize("weights", ["adapter_model.safetensors", "adapter_model.bin"])
def test_only_the_files_that_are_read_are_downloaded(
    weights: str, hub: stand_in.Hub, model: PreTrainedModel, base: PreTrainedModel, tmp_path: Path
) -> None:
    """A folder of PEFT on the hub, between files of all kinds."""
    attached(model, "lora(rank=2)")
    outputs = logits(model)
    deltune.export(model, tmp_path / "peft")
    files = {path.name: path.read_bytes() for path in (tmp_path / "peft").iterdir()}
    if weights.endswith(".bin"):
        tensors = __import__("safetensors.torch").torch.load(files.pop("adapter_model.safetensors"))
        torch.save(tensors, tmp_path / weights)
        files[weights] = (tmp_path / weights).read_bytes()
    others = {name: b"nothing" for name in ("model.safetensors", "setup.py", "x/delta.json", "training_args.bin")}
    hub.add("someone/peft", {**others, **files})
    deltune.load(loaded := copy.deepcopy(base), "someone/peft")
    torch.testing.assert_close(logits(loaded), outputs)
    assert hub.downloaded() == set(files)


def test_what_comes_from_the_hub_is_checked(hub: stand_in.Hub, model: PreTrainedModel, base: PreTrainedModel) -> None:
    """A changed file, another base model and a pickle are refused as in a folder, and nothing is attached."""
    attached(model).push_to_hub("writer/good")
    good = hub.repositories["writer/good"].files()
    changed = bytearray(good["delta.safetensors"])
    changed[-1] ^= 1
    facts = json.loads(good["delta.json"])
    facts["base"]["fingerprint"]["layers"] = "0" * 16
    options = {"peft_type": "LORA", "task_type": "SEQ_CLS", "r": 2, "lora_alpha": 2, "target_modules": ["query"]}
    bad = {
        "checksum": {**good, "delta.safetensors": bytes(changed)},
        "another base model": {**good, "delta.json": json.dumps(facts).encode()},
        "adapter_model.bin": {
            "adapter_config.json": json.dumps(options).encode(),
            "adapter_model.bin": b"\x80\x02cos\n",
        },
        "is missing": {"delta.json": good["delta.json"]},
        "holds no delta": {"model.safetensors": b"x", "README.md": b"# A model"},
    }
    for number, (message, files) in enumerate(bad.items()):
        hub.add(f"someone/bad{number}", files)
        with pytest.raises(deltune.DeltuneError, match=message):
            deltune.load(fresh := copy.deepcopy(base), f"someone/bad{number}")
        assert "deltune" not in fresh._modules and torch.equal(logits(fresh), logits(base))


@pytest.mark.parametrize("method", [METHOD, "prefix(length=2)"])
def test_a_trainer_pushes_the_delta_beside_what_from_pretrained_reads(
    hub: stand_in.Hub, model: PreTrainedModel, base: PreTrainedModel, method: str, tmp_path: Path
) -> None:
    """Its own push uploads what save_model writes: the merged model where there is one, the delta, and a card."""
    attached(model, method)
    outputs = logits(model)
    arguments = TrainingArguments(str(tmp_path / "out"), hub_model_id="writer/pushed", report_to=[], use_cpu=True)
    merges = method == METHOD
    with contextlib.nullcontext() if merges else pytest.warns(UserWarning, match="holds the delta alone"):
        Trainer(model, arguments).push_to_hub()
    files = hub.repositories["writer/pushed"].files()
    assert {"delta/delta.json", "delta/delta.safetensors", "README.md"} <= files.keys()
    assert ("model.safetensors" in files) is merges
    (tmp_path / "whole").mkdir()
    for name, content in files.items():
        if "/" not in name:
            (tmp_path / "whole" / name).write_bytes(content)
    if merges:
        whole = type(model).from_pretrained(tmp_path / "whole").eval()
        torch.testing.assert_close(logits(whole), outputs)
    hub.requests.clear()
    deltune.load(loaded := copy.deepcopy(base), "writer/pushed")
    assert torch.equal(logits(loaded), outputs)
    assert hub.downloaded() == {"delta/delta.json", "delta/delta.safetensors"}


def test_a_trainer_pushes_while_it_trains(
    hub: stand_in.Hub, model: PreTrainedModel, base: PreTrainedModel, tmp_path: Path
) -> None:
    """Its copies of the last checkpoint are no model that the delta of the end could not stand beside."""
    attached(model, "prefix(length=2)")
    arguments = TrainingArguments(
        str(tmp_path / "out"), hub_model_id="writer/pushed", push_to_hub=True, save_steps=1, max_steps=2, report_to=[],
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    rows = [{name: tensor[0] for name, tensor in BATCH.items()} | {"labels": torch.tensor(0)}] * 4
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    with pytest.warns(UserWarning, match="holds the delta alone"):
        trainer.push_to_hub()
    deltune.load(loaded := copy.deepcopy(base), "writer/pushed")
    assert torch.equal(logits(loaded), logits(model.eval()))


def test_offline(
    hub: stand_in.Hub, model: PreTrainedModel, base: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With HF_HUB_OFFLINE nothing is asked; what is in the cache is loaded, and everything else is a clear error."""
    tuned = attached(model)
    outputs = logits(model)
    tuned.push_to_hub("writer/kept")
    deltune.load(copy.deepcopy(base), "writer/kept")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub.requests.clear()
    deltune.load(loaded := copy.deepcopy(base), "writer/kept")
    assert torch.equal(logits(loaded), outputs)
    with pytest.raises(deltune.DeltuneError, match=r"HF_HUB_OFFLINE is set.* unset it"):
        deltune.load(copy.deepcopy(base), "writer/other")
    with pytest.raises(deltune.DeltuneError, match=r"cannot be pushed .*HF_HUB_OFFLINE is set.* unset it"):
        tuned.push_to_hub("writer/kept")
    assert hub.requests == []


def test_no_connection(hub: stand_in.Hub, base: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(deltune.DeltuneError, match=r"no folder 'someone/x' here.*127\.0\.0\.1:9"):
        deltune.load(copy.deepcopy(base), "someone/x")


def test_rights(hub: stand_in.Hub, model: PreTrainedModel, base: PreTrainedModel) -> None:
    """A token is used where it is given; whoever lacks a right reads what to do, and no message has a token."""
    tuned = attached(model)
    tuned.push_to_hub("writer/secret", private=True)
    failures = {
        "does not let you.*hf auth login": lambda: tuned.push_to_hub("writer/mine", token=stand_in.READER),
        "no such repository, or it is private.*hf auth login": lambda: deltune.load(
            copy.deepcopy(base), "writer/secret", token=stand_in.READER
        ),
        "no folder 'someone/nothing' here.*no such repository": lambda: deltune.load(
            copy.deepcopy(base), "someone/nothing"
        ),
        "cannot be a repository": lambda: tuned.push_to_hub("only-a-name"),
        "must be OWNER/NAME": lambda: tuned.push_to_hub(Path("writer/x")),  # type: ignore[arg-type]
        "writer/--x": lambda: tuned.push_to_hub("writer/--x"),
    }
    for message, failure in failures.items():
        with pytest.raises(deltune.DeltuneError, match=message) as caught:
            failure()
        assert stand_in.READER not in str(caught.value) and stand_in.WRITER not in str(caught.value)
    assert set(hub.repositories) == {"writer/secret"}
    tuned.push_to_hub("writer/open")
    commits = len(hub.repositories["writer/open"].commits)
    with pytest.raises(deltune.DeltuneError, match=r"is public, and private=True .*nothing was pushed"):
        tuned.push_to_hub("writer/open", private=True)
    assert len(hub.repositories["writer/open"].commits) == commits


def test_a_folder_here_is_never_looked_up(
    hub: stand_in.Hub, model: PreTrainedModel, base: PreTrainedModel, tmp_path: Path
) -> None:
    """A folder of that name, a `Path`, `./`, runs and what a server loads: nothing is asked of the hub."""
    hub.add("someone/delta", {})
    attached(model).save("someone/delta")
    deltune.load(copy.deepcopy(base), "someone/delta")
    with pytest.raises(deltune.DeltuneError, match=r"revision='main' is for a delta on the hub.*is a folder here"):
        deltune.load(copy.deepcopy(base), "someone/delta", revision="main")
    shutil.rmtree("someone")
    handle = deltune.tuned(model)
    ways = (
        lambda: deltune.load(base, Path("someone/delta")),
        lambda: deltune.load(base, "./someone/delta"),
        lambda: deltune.load(base, str(tmp_path / "someone/delta")),
        lambda: attach.read_delta(handle, Path("someone/delta")),
        lambda: inference.load_run("someone/delta"),
        lambda: inference.export_run("someone/delta", tmp_path / "x"),
    )
    for way in ways:
        with pytest.raises(deltune.DeltuneError, match=r"someone/delta"):
            way()
    assert hub.requests == [] and "deltune" not in base._modules


def test_the_card_in_a_folder(model: PreTrainedModel, tmp_path: Path) -> None:
    """The card says what was tuned, escapes what others named, and is brought up to date without losing other text."""
    tuned = attached(model)
    plain = tuned.save(tmp_path / "delta")
    assert {path.name for path in plain.iterdir()} == {"delta.json", "delta.safetensors"}
    tuned.save(plain, model_card=True)
    card = (plain / "README.md").read_text()
    count = tuned.count()
    assert f"{count.method:,}" in card and f"head {count.head:,}" in card and "BertForSequenceClassification" in card
    assert "yes &#124; &lt;b&gt;perhaps&lt;/b&gt;" in card and "<b>" not in card and "# delta\n" in card
    assert "base_model" not in front_matter(card)  # it was loaded from nowhere
    edited = (
        card.replace("tags:\n", "license: mit\ntags:\n- german\n").replace("# delta", "# Ours\n\nBefore.")
        + "\nAfter.\n"
    )
    (plain / "README.md").write_text(edited)
    tuned.detach()
    other = attached(model, "lora(rank=4)")
    with pytest.raises(deltune.DeltuneError, match=r"README\.md.*model_card=True"):
        other.save(plain)
    other.save(plain, model_card=True)
    again = (plain / "README.md").read_text()
    assert "lora(rank=4)" in again and METHOD.replace("_", "&#95;") not in again and again.count("| method |") == 1
    assert "Before." in again and again.rstrip().endswith("After.") and "# Ours" in again
    assert front_matter(again)["license"] == "mit"
    assert front_matter(again)["tags"] == ["german", "deltune", "parameter-efficient-fine-tuning"]
    (plain / "README.md").write_text("---\ntags: [\n---\n# Broken\n")
    before = {path.name: path.read_bytes() for path in plain.iterdir()}
    with pytest.raises(deltune.DeltuneError, match="no valid YAML"):
        other.save(plain, model_card=True)
    assert before == {path.name: path.read_bytes() for path in plain.iterdir()}
    (plain / "README.md").unlink()
    assert repr(deltune.load(copy.deepcopy(other.detach()), plain).method) == "lora(rank=4)"


def test_a_card_on_the_hub_that_others_wrote_is_kept(hub: stand_in.Hub, model: PreTrainedModel) -> None:
    hub.add("writer/d", {"README.md": b"---\nlicense: mit\n---\n# By hand\n", "notes.txt": b"kept"})
    tuned = attached(model)
    for _ in range(2):
        tuned.push_to_hub("writer/d")
        files = hub.repositories["writer/d"].files()
        assert files["README.md"].endswith(b"# By hand\n") and files["notes.txt"] == b"kept"
        assert front_matter(files["README.md"])["library_name"] == "deltune"
        assert front_matter(files["README.md"])["license"] == "mit"
