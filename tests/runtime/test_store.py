"""Folders of deltas: everything that can be wrong with one is an error that says so, and changes nothing."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import deltune
from deltune.runtime import serialization
from deltune.train.run_folder import RunFolder
from tables.families import FAMILIES
from tables.specimens import batch, build, differences, equal, facts, run, specimen, stir

METHOD = "prefix(length=2) + lora(rank=2) + layernorm"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound delta of the BERT specimen."""
    model = specimen("bert")
    folder = stir(deltune.attach(model, METHOD)).save(tmp_path_factory.mktemp("store") / "sound")
    deltune.tuned(model).detach()
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of it to spoil."""
    return Path(shutil.copytree(saved, tmp_path / "delta"))


def tree(root: Path) -> dict[str, bytes]:
    """Every file under a folder with its contents."""
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def change_facts(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((folder / serialization.FACTS).read_text())
    change(content)
    (folder / serialization.FACTS).write_text(json.dumps(content))


def change_numbers(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Other tensors, with a checksum that fits them."""
    numbers = load_file(folder / serialization.NUMBERS)
    numbers = {name: value.clone() for name, value in numbers.items()}
    change(numbers)
    save_file(numbers, folder / serialization.NUMBERS)
    digest = hashlib.sha256((folder / serialization.NUMBERS).read_bytes()).hexdigest()
    change_facts(folder, lambda f: f.update(sha256=digest))


def truncate(folder: Path, share: float) -> None:
    path = folder / serialization.NUMBERS
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def flip(folder: Path) -> None:
    path = folder / serialization.NUMBERS
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")


def rename(numbers: dict[str, torch.Tensor]) -> None:
    name = next(n for n in numbers if n.startswith("edit."))
    numbers[name + "_more"] = numbers.pop(name)


def cut(numbers: dict[str, torch.Tensor]) -> None:
    name = next(n for n in numbers if n.endswith("keys"))
    numbers[name] = numbers[name][:1].contiguous()


def append(folder: Path) -> None:
    path = folder / serialization.NUMBERS
    path.write_bytes(path.read_bytes() + b"more")


def cut_facts(folder: Path) -> None:
    path = folder / serialization.FACTS
    path.write_text(path.read_text()[:300])


DAMAGED = r"delta\.safetensors is damaged \(bytes are missing, were added"
NOT_OURS = r"delta\.json is not as deltune writes it"

SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "no numbers": (lambda f: (f / serialization.NUMBERS).unlink(), r"delta\.safetensors is missing"),
    "no facts": (lambda f: (f / serialization.FACTS).unlink(), r"holds no delta .*delta\.safetensors"),
    "empty folder": (lambda f: [p.unlink() for p in f.iterdir()], "holds no delta .*nothing"),
    "no folder": (shutil.rmtree, "there is no folder"),
    "truncated in the middle": (lambda f: truncate(f, 0.5), DAMAGED),
    "truncated in its header": (lambda f: truncate(f, 0.01), DAMAGED),
    "bytes added": (append, DAMAGED),
    "empty file": (lambda f: truncate(f, 0), DAMAGED),
    "one bit altered": (flip, "checksum differs"),
    "not safetensors": (lambda f: torch.save({}, f / serialization.NUMBERS), DAMAGED),
    "facts no JSON": (
        lambda f: (f / serialization.FACTS).write_text("{"), r"delta\.json is damaged.* at line 1, column 2"
    ),
    "facts no text": (
        lambda f: (f / serialization.FACTS).write_bytes(b"\xff\xfe\x00"), r"is damaged.*byte \d+ is not text"
    ),
    "facts of a stranger": (lambda f: (f / serialization.FACTS).write_text('{"peft_type": "LORA"}'), NOT_OURS),
    "facts a list": (lambda f: (f / serialization.FACTS).write_text("[]"), f"{NOT_OURS}.*an object of names"),
    "facts cut short": (cut_facts, r"delta\.json is damaged.* at line \d+, column \d+"),
    "a head that is a list": (
        lambda f: change_facts(f, lambda x: x.update(head=[])), f"{NOT_OURS}.*head: here an object of names"
    ),
    "newer format": (lambda f: change_facts(f, lambda x: x.update(format=2)), "format 2.*reads 1.*update deltune"),
    "unknown method": (lambda f: change_facts(f, lambda x: x.update(explicit="lora9")), "unknown name 'lora9'"),
    "a tensor missing": (lambda f: change_numbers(f, lambda n: n.pop(next(iter(n)))), "missing tensor"),
    "a tensor more": (lambda f: change_numbers(f, lambda n: n.update(more=torch.zeros(1))), "extra tensor more"),
    "a tensor renamed": (lambda f: change_numbers(f, rename), "(?s)2 problems.*missing tensor edit.*extra tensor edit"),
    "a tensor of another shape": (lambda f: change_numbers(f, cut), r"keys has shape \(1, 4, 8\).*\(2, 4, 8\)"),
    "another base": (
        lambda f: change_facts(f, lambda x: x["base"]["fingerprint"].update(layers="0" * 16)),
        "another base model.*, and the layers of this one",
    ),
    "no fingerprint": (
        lambda f: change_facts(f, lambda x: x["base"].update(fingerprint={})),
        r"delta\.json has no fingerprint of the embedding and the layers",
    ),
    "half a fingerprint": (
        lambda f: change_facts(f, lambda x: x["base"]["fingerprint"].pop("layers")), "no fingerprint of the layers of"
    ),
    "one of the two methods edited": (
        lambda f: change_facts(f, lambda x: x.update(method=METHOD.replace("rank=2", "rank=4"))),
        r"the first says .*lora\(rank=4, .* where the second says .*lora\(rank=2, .*change both or neither",
    ),
    "a term left out of one of the two methods": (
        lambda f: change_facts(f, lambda x: x.update(method="prefix(length=2) + lora(rank=2)")),
        r"the first says nothing more where the second says .*layernorm\(",
    ),
    "another family of no name": (
        lambda f: change_facts(f, lambda x: x["base"].update(family="gpt2", name="")),
        r"on a gpt2 model \(BertForSequenceClassification\); this is a bert model",
    ),
    "another family": (lambda f: change_facts(f, lambda x: x["base"].update(family="gpt2")), "on a gpt2 model"),
    "another head": (
        lambda f: change_facts(f, lambda x: x["head"].update(tensors=["score.weight"])), r"holds a head .*score\.weight"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILT)
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another"])
@pytest.mark.sample
def test_a_spoilt_folder_changes_nothing(folder: Path, case: str, beside: bool) -> None:
    spoil, says = SPOILT[case]
    spoil(folder)
    model = build(FAMILIES["bert"], "sequence")
    inputs = batch(model)
    if beside:
        stir(deltune.attach(model, "adapter(rank=2) + layernorm", name="live"))
    before, known = run(model, inputs), facts(model)
    with pytest.raises(deltune.DeltuneError, match=says):
        deltune.load(model, folder, name="spoilt")
    assert differences(known, facts(model)) == []
    assert equal(run(model, inputs), before)
    if beside:
        assert (deltune.tuned(model).names, deltune.tuned(model).active) == (("live",), "live")
        deltune.tuned(model).detach()


KEYS = ("format", "method", "explicit", "head", "labels", "base", "tensors", "sha256")


@pytest.mark.parametrize("value", [None, 3, "x", [], {}], ids=str)
@pytest.mark.parametrize("key", KEYS)
def test_facts_of_the_wrong_kind(folder: Path, key: str, value: Any) -> None:
    """A value that is not of its kind is an error of ours, or harmless; never a traceback, never a changed model."""
    change_facts(folder, lambda f: f.update({key: value}))
    model = build(FAMILIES["bert"], "sequence")
    known = facts(model)
    try:
        deltune.load(model, folder).detach()
    except deltune.DeltuneError as error:
        assert str(error)
    assert differences(known, facts(model)) == []


@pytest.mark.parametrize("where", ["", "delta"])
def test_a_run_or_its_delta(saved: Path, tmp_path: Path, where: str) -> None:
    shutil.copytree(saved, tmp_path / "run" / "delta")
    (tmp_path / "run" / "metrics.json").write_text("{}")
    model = specimen("bert")
    loaded = deltune.load(model, str(tmp_path / "run" / where))
    assert loaded.method == deltune.parse(METHOD)
    loaded.detach()


def test_what_it_was_tuned_on(saved: Path) -> None:
    """Other values, other sizes, another family, another class: refused, each with its reason."""
    other = build(FAMILIES["bert"], "sequence")
    with torch.no_grad():
        other.bert.encoder.layer[1].output.dense.weight[0, 0] += 1  # the first value is among those looked at
    wider = build(FAMILIES["bert"], "sequence", intermediate_size=128)
    for model, says in (
        (other, "another base model.*, and the layers of this one"),
        (wider, "another base model .*: the names or shapes of the tensors of this one"),
        (build(FAMILIES["gpt2"], "sequence"), "on a bert model .*; this is a gpt2 model"),
        (_as("base"), "holds a head of BertForSequenceClassification .*BertModel has none"),
        (_as("masked"), "holds a head of BertForSequenceClassification .*BertForMaskedLM has none"),
    ):
        known = facts(model)
        with pytest.raises(deltune.DeltuneError, match=says):
            deltune.load(model, saved)
        assert differences(known, facts(model)) == []


def _as(role: str) -> PreTrainedModel:
    """The same base model in another class."""
    model = build(FAMILIES["bert"], role)
    model.base_model.load_state_dict(specimen("bert").base_model.state_dict(), strict=False)
    return model


def test_half_precision_is_the_same_base(saved: Path) -> None:
    model = specimen("bert")
    expected = run(deltune.load(model, saved).model, batch(model))["logits"]
    deltune.tuned(model).detach()
    half = build(FAMILIES["bert"], "sequence", torch.bfloat16)
    logits = run(deltune.load(half, saved).model, batch(model))["logits"]
    assert logits.dtype == torch.bfloat16
    assert (logits.double() - expected).norm() < 0.05 * expected.norm()


FOREIGN: dict[str, Callable[[Path], object]] = {
    "other files": lambda target: (target.mkdir(), (target / "notes.txt").write_text("mine")),
    "a RUN": lambda target: ((target / "delta").mkdir(parents=True), (target / "metrics.json").write_text("{}")),
    "a file": lambda target: target.write_text("mine"),
    "a delta and more": lambda target: (
        target.mkdir(),
        *((target / n).write_text("") for n in (serialization.FACTS, "x")),
    ),
    "under a file": lambda target: target.parent.joinpath("file").write_text("mine"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_saving_never_takes_what_is_not_a_delta(case: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    FOREIGN[case](target)
    if case == "under a file":
        target = tmp_path / "file" / "target"
    before = tree(tmp_path)
    model = specimen("bert")
    tuned = stir(deltune.attach(model, METHOD))
    outputs = run(model, batch(model))
    with pytest.raises(deltune.DeltuneError):
        tuned.save(target)
    assert tree(tmp_path) == before
    assert equal(run(model, batch(model)), outputs)
    tuned.detach()


def test_saving_again_replaces(saved: Path, folder: Path) -> None:
    model = specimen("bert")
    tuned = stir(deltune.attach(model, "adapter(rank=2)"), seed=9)
    outputs = run(model, batch(model))
    assert tuned.save(folder) == folder
    tuned.detach()
    assert sorted(p.name for p in folder.iterdir()) == [serialization.FACTS, serialization.NUMBERS]
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]  # nothing is left over
    loaded = deltune.load(model, folder)
    assert equal(run(model, batch(model)), outputs) and repr(loaded.method) == "adapter(rank=2)"
    loaded.detach()


@pytest.mark.parametrize("failing", [1, 2])
def test_a_replacement_that_fails_leaves_the_old(folder: Path, failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fails at the first or the second of the two renames: what was there is there, whole."""
    before = tree(folder.parent)
    model = specimen("bert")
    tuned = deltune.attach(model, "adapter(rank=2)")
    real, calls = os.replace, []

    def replace(source: Any, target: Any) -> None:
        calls.append(target)
        if len(calls) == failing:
            raise OSError(5, "Input/output error")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(deltune.DeltuneError, match=r"cannot be written.*Input/output error"):
        tuned.save(folder)
    tuned.detach()
    assert tree(folder.parent) == before


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_killed_while_one_delta_takes_the_place_of_another(saved: Path, tmp_path: Path, renames: int) -> None:
    """SIGKILL before the first of the two renames, between them, or after them: a run finds its delta again."""
    run = RunFolder(tmp_path / "run")
    shutil.copytree(saved, run.delta)
    before = tree(run.delta)
    model = specimen("bert")
    tuned = stir(deltune.attach(model, "adapter(rank=2)"), seed=9)
    child = os.fork()
    if child == 0:
        try:
            rename, left = os.replace, iter(range(renames))

            def replace(source: Any, target: Any) -> None:
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                rename(source, target)

            os.replace = replace
            tuned.save(run.delta)
        finally:
            os._exit(0)
    tuned.detach()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if renames == 1:
        for where in (run.folder, run.delta):
            with pytest.raises(deltune.DeltuneError, match=r"a save was interrupted .*/\.delta-old-\w+ now\. Rename"):
                deltune.load(model, where)
    assert status == (0 if renames == 2 else -signal.SIGKILL) and run.delta.exists() == (renames != 1)
    run.recover_delta()
    assert (tree(run.delta) == before) == (renames < 2)
    run.recover_delta()
    run.remove_leftovers()
    assert [path.name for path in run.folder.iterdir()] == ["delta"], "nothing is left over"
    loaded = deltune.load(model, run.folder)
    assert repr(loaded.method) == (METHOD if renames < 2 else "adapter(rank=2)")
    loaded.detach()


def test_saving_through_a_link_replaces_the_folder_that_it_leads_to(folder: Path) -> None:
    model = specimen("bert")
    tuned = deltune.attach(model, "adapter(rank=2)")
    link, broken = folder.with_name("link"), folder.with_name("broken")
    link.symlink_to(folder.name)
    broken.symlink_to("new")
    for target in (link, broken):
        assert tuned.save(target) == target and target.is_symlink()
        assert repr(serialization.read_metadata(target).method) == "'adapter(rank=2)'"
    assert sorted(p.name for p in folder.parent.iterdir()) == sorted(["broken", "new", "link", folder.name])
    tuned.detach()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    tuned = deltune.attach(specimen("bert"), "layernorm")
    with pytest.raises(deltune.DeltuneError, match="cannot be written"):
        tuned.save(closed / "delta")
    tuned.detach()


def test_files_hold_no_code(saved: Path) -> None:
    assert sorted(p.name for p in saved.iterdir()) == [serialization.FACTS, serialization.NUMBERS]
    content = json.loads((saved / serialization.FACTS).read_text())
    assert content["method"] == METHOD and deltune.parse(content["explicit"]).parts == deltune.parse(METHOD).parts
    numbers = load_file(saved / serialization.NUMBERS)
    assert {name: list(t.shape) for name, t in numbers.items()} == content["tensors"]


PLACES: dict[str, tuple[str | Path, str]] = {
    "a repository of the hub": ("someone/a-delta.v2", r"no folder 'someone/a-delta.v2' here, and .* from the hub: "),
    "a path like one": (Path("someone/a-delta.v2"), r"there is no folder 'someone/a-delta.v2'.*snapshot_download\("),
    "a name": ("somewhere", r"there is no folder 'somewhere' here; a delta is loaded from a folder on this machine$"),
    "a path": ("/no/such/folder", r"there is no folder '/no/such/folder' here; [^.]*$"),
    "one of its files": (serialization.NUMBERS, r"is a file, not a folder; a delta is a folder with delta\.json and"),
}


@pytest.mark.parametrize("case", PLACES)
def test_no_delta_there(saved: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    place, says = PLACES[case]
    with pytest.raises(deltune.DeltuneError, match=says):
        deltune.load(specimen("bert"), place)


def test_what_may_be_edited_by_hand(saved: Path, folder: Path) -> None:
    """A number that no tensor depends on, such as a scale: what is loaded is what the file says."""
    change_facts(folder, lambda f: f.update(method=METHOD.replace("rank=2", "rank=2, scale=3")))
    change_facts(folder, lambda f: f.update(explicit=f["explicit"].replace("scale=1,", "scale=3,")))
    model = specimen("bert")
    expected = run(deltune.load(model, saved).model, batch(model))
    deltune.tuned(model).detach()
    edited = deltune.load(model, folder)
    assert "lora(rank=2, scale=3)" in repr(edited.method) and not equal(run(model, batch(model)), expected)
    edited.detach()


def test_without_numbers_there_is_no_base_to_compare(saved: Path) -> None:
    model = build(FAMILIES["bert"], "sequence").to("meta")
    with pytest.raises(deltune.DeltuneError, match="on the meta device"):
        deltune.load(model, saved)
    assert "deltune" not in model._modules
