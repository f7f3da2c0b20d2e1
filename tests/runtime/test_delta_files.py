"""Folders of deltas from strangers: each is refused in words, or loaded and of use, and the model stays what it was."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import shutil
import stat
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import deltune
from fuzz import judging, mutations
from fuzz.judging import Bench, Outcome
from fuzz.mutations import nested, sealed
from tables.families import FAMILIES
from tables.specimens import batch, build, equal, run, specimen, stir

Spoil = Callable[[Path], object]
Facts = dict[str, Any]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return judging.saved_deltas(tmp_path_factory.mktemp("sound"))


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(lambda: build(FAMILIES["bert"], "sequence", torch.float32), "adapter(rank=2) + layernorm")


def fuzz(seeds: range, folders: list[Path], bench: Bench, home: Path) -> list[tuple[int, str, Outcome]]:
    """What went wrong with the folders that the seeds make: seed, mutation, outcome."""
    wrong = []
    for seed in seeds:
        with judging.copied(folders[seed % len(folders)], home) as folder:
            name = mutations.spoil(seed, folder, mutations.DELTA, mutations.WEIGHTS)
            outcome = bench.judge(folder)
        if not outcome.fine:
            wrong.append((seed, name, outcome))
    return wrong


def test_sound_folders_load(folders: list[Path], bench: Bench) -> None:
    assert [bench.judge(folder).kind for folder in folders] == ["sound"] * len(folders)


def _exact(shape: torch.Size, period: int) -> torch.Tensor:
    """Eighths, which no processor rounds."""
    return ((torch.arange(shape.numel()) % period - period // 2) / 8).view(shape)


def test_format_1_is_read_as_it_was_written() -> None:
    """The folder was saved before 0.1.0 was released, and is never written again; the logits are of that day.

    Its tensors are eighths with a period of 9, gains one more, and those of the model with a period of 13.
    """
    model = build(FAMILIES["bert"], "sequence", torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(_exact(parameter.shape, 13))
    tuned = deltune.load(model, Path(__file__).parent / "format-1", name="golden")
    assert str(tuned.method) == "lora(rank=1, layers='upper half') + prefix(length=1) + layernorm(terms='gain')"
    trained = dict(tuned.named_trainable_parameters())
    assert len(trained) == 15
    for name, tensor in trained.items():
        assert torch.equal(tensor, _exact(tensor.shape, 9) + ("LayerNorm" in name))
    inputs = {"input_ids": torch.arange(5, 17).view(2, 6), "attention_mask": torch.ones(2, 6, dtype=torch.long)}
    with torch.no_grad():
        logits = model(**inputs).logits
    expected = torch.tensor([[-0.26593, 1.30024], [-0.13079, 1.37341]])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-3)  # half a lora is 0.01 and more


def test_mutated_deltas(folders: list[Path], bench: Bench, tmp_path: Path) -> None:
    assert fuzz(range(100), folders, bench, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 3000, 1000))
@pytest.mark.parametrize("beside", [None, "adapter(rank=2) + layernorm"], ids=["alone", "beside another"])
def test_many_mutated_deltas(start: int, beside: str | None, folders: list[Path], tmp_path: Path) -> None:
    alone = Bench(lambda: build(FAMILIES["bert"], "sequence", torch.float32), beside)
    assert fuzz(range(start, start + 1000), folders, alone, tmp_path) == []


# -- what was wrong once ----------------------------------------------------------------------------------------------

PREFIX, MASKED, GATED, TIED, PROMPT, MIXTURE = range(len(judging.SAVED))


def facts(**changes: Any) -> Spoil:
    """Fields of delta.json with other values; a field inside another one is written outer__inner."""

    def change(folder: Path) -> None:
        value: Facts = json.loads((folder / "delta.json").read_text())
        for key, new in changes.items():
            *outer, last = key.split("__")
            inside = value
            for name in outer:
                inside = inside[name]
            inside[last] = new
        (folder / "delta.json").write_text(json.dumps(value))

    return change


def text(make: Callable[[str], str | bytes]) -> Spoil:
    def change(folder: Path) -> None:
        raw = make((folder / "delta.json").read_text())
        (folder / "delta.json").write_bytes(raw if isinstance(raw, bytes) else raw.encode())

    return change


def method(expression: str) -> Spoil:
    return facts(method=expression, explicit=expression)


def tensors(ending: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Spoil:
    """The tensors whose names end in this way, changed, with the checksum and the shapes that fit them."""

    def change(folder: Path) -> None:
        loaded = {
            n: make(t.clone()) if n.endswith(ending) else t for n, t in load_file(folder / "delta.safetensors").items()
        }
        save_file(loaded, folder / "delta.safetensors")
        sealed(folder, "shapes")

    return change


def raw(make: Callable[[bytes, bytes], bytes]) -> Spoil:
    """The bytes of delta.safetensors, of its header and its data, with the checksum that fits them."""

    def change(folder: Path) -> None:
        whole = (folder / "delta.safetensors").read_bytes()
        end = 8 + struct.unpack("<Q", whole[:8])[0]
        (folder / "delta.safetensors").write_bytes(make(whole[8:end], whole[end:]))
        sealed(folder)

    return change


def headed(header: bytes, data: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def with_value(at: int, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[at] = value
        return tensor

    return change


def bit_wide(folder: Path) -> None:
    """A tensor of no number in a shape beyond every memory, and a rank that fits it."""
    method("lora(rank=1000000000, at='query')")(folder)
    loaded = load_file(folder / "delta.safetensors")
    wide = {f"edit.0_encoder_{i}_self_query.{leaf}": torch.empty(shape)
            for i in (0, 1) for leaf, shape in (("down", (10**9, 0)), ("up", (0, 10**9)))}  # fmt: skip
    save_file(
        {**{n: t for n, t in loaded.items() if n.startswith("base.classifier")}, **wide}, folder / "delta.safetensors"
    )
    sealed(folder, "shapes")


def leading_out(name: str) -> Spoil:
    def change(folder: Path) -> None:
        os.replace(folder / name, folder.parent / name)
        (folder / name).symlink_to(folder.parent / name)

    return change


def instead(name: str, make: Callable[[Path], object]) -> Spoil:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


NOT_OURS = "is not as deltune writes it"
NO_FILE = "not a file that can be read"
REGRESSIONS: dict[str, tuple[int, Spoil, str]] = {
    # raw exceptions
    "JSON nested too deeply": (PREFIX, text(lambda t: nested(100_000)), "nested too deeply"),
    "objects nested too deeply": (PREFIX, text(lambda t: '{"a":' * 100_000), "nested too deeply"),
    "one field nested too deeply": (PREFIX, text(lambda t: t.replace('"train"', nested(5000))), "nested too deeply"),
    "an endless number": (
        PREFIX, text(lambda t: t.replace('"format": 1', f'"format": {"9" * 6000}')), "cannot be read",
    ),
    "huge JSON": (PREFIX, text(lambda t: b" " * (17 << 20) + t.encode()), "longer than 16 MiB"),
    "head.tensors holds a list": (PREFIX, facts(head__tensors=[["x"]]), f"{NOT_OURS}.*head.tensors.0"),
    "head.tensors holds an object": (PREFIX, facts(head__tensors=[{}]), f"{NOT_OURS}.*head.tensors.0"),
    "head.tensors holds null": (PREFIX, facts(head__tensors=[None]), f"{NOT_OURS}.*head.tensors.0"),
    "a head tensor twice": (PREFIX, facts(head__tensors=["classifier.weight"] * 2), f"{NOT_OURS}.*named twice"),
    "an unknown mode of the head": (PREFIX, facts(head__mode="x"), f"{NOT_OURS}.*head.mode"),
    "id2label is a list": (PREFIX, facts(labels__id2label=["a", "b", "c"]), f"{NOT_OURS}.*labels.id2label"),
    "id2label is a text": (PREFIX, facts(labels__id2label="abc"), f"{NOT_OURS}.*labels.id2label"),
    "id2label is true": (PREFIX, facts(labels__id2label=True), f"{NOT_OURS}.*labels.id2label"),
    "ids that are no numbers": (PREFIX, facts(labels__id2label={"x": "a"}), "'x' is no label id"),
    "an id written in another way": (PREFIX, facts(labels__id2label={"1": "a", "01": "b"}), "'01' is no label id"),
    "a label that is a list": (PREFIX, facts(labels__id2label={"0": []}), "the name of label 0 is no text"),
    "ids that are no outputs": (
        PREFIX, facts(labels__id2label={"7": "a", "-3": "b", "900": "c"}), "'-3' is no label id; .* labels are 0 to 2",
    ),
    "ids with a gap": (PREFIX, facts(labels__id2label={"0": "a", "2": "b", "3": "c"}), "'3' is no label id"),
    **{
        f"a label that is {name}": (
            PREFIX, text(lambda t, name=name: re.sub(r'"0": "[^"]*"', f'"0": {name}', t, count=1)),  # type: ignore[misc]
            "the name of label 0 is no text",
        )
        for name in ("null", "true", "1e400", "3")
    },
    "labels without id2label": (PREFIX, facts(labels={"x": 1}), f"{NOT_OURS}.*labels.id2label: Field required"),
    "an unknown problem_type": (PREFIX, facts(labels__problem_type="x"), f"{NOT_OURS}.*problem_type"),
    "a fingerprint of lists": (PREFIX, facts(base__fingerprint={"layers": []}), f"{NOT_OURS}.*base.fingerprint.layers"),
    "a head tensor without axes": (
        PREFIX, tensors("classifier.bias", lambda t: t.sum()), r"head tensor classifier.bias .*\(\)",
    ),
    "a number that is no float": (PREFIX, method(f"lora(scale={'9' * 400})"), "more than 40 digits"),
    "a number beyond printing": (PREFIX, method(f"prefix(length={'9' * 4000})"), "more than 40 digits"),
    "a hexadecimal number": (PREFIX, method(f"prefix(length=0x{'f' * 4000})"), "more than 40 digits"),
    # loaded, and then a forward pass failed
    "a negative position": (MASKED, tensors("index", with_value(0, -1)), "positions from -1"),
    "a position far out of range": (
        MASKED, tensors("index", with_value(-1, 2**40)), r"positions from \d+ to 1099511627776",
    ),
    "positions in another order": (MASKED, tensors("index", lambda t: t.flip(0)), "not sorted, or twice"),
    "a position twice": (GATED, tensors("index", with_value(1, 0)), "not sorted, or twice|positions from"),
    "a gated position out of range": (
        GATED, tensors("index", with_value(-1, 10**9)), r"positions from \d+ to 1000000000",
    ),
    "a negative gated position": (GATED, tensors("index", with_value(0, -3)), "positions from -3"),
    "a tied position out of range": (
        TIED, tensors("gate.index", with_value(-1, 32)), r"positions from \d+ to 32",
    ),
    "positions as floats": (MASKED, tensors("index", lambda t: t.float()), "is of type F32, not I64"),
    "numbers as integers": (PREFIX, tensors("keys", lambda t: t.long()), "is of type I64, not a float"),
    "complex numbers": (PREFIX, tensors("keys", lambda t: t.to(torch.complex64)), "is of type C64, not a float"),
    "fewer labels than outputs": (
        PREFIX, facts(labels__id2label={"0": "a"}), "names 1 labels, but its head .* outputs",
    ),
    "parts of a head that disagree": (
        PREFIX, lambda f: (tensors("classifier.bias", lambda t: torch.zeros(5))(f),
                           facts(labels__id2label={str(i): "a" for i in range(5)})(f)), "head",
    ),
    # values
    "NaN": (PREFIX, tensors("keys", with_value(0, float("nan"))), "keys is not finite"),
    "infinity in a norm": (PREFIX, tensors("LayerNorm.weight", with_value(3, float("inf"))), "holds NaN or infinity"),
    "infinity in the head": (
        PREFIX, tensors("classifier.weight", with_value(3, -float("inf"))), "classifier.weight is not",
    ),
    "NaN under a mask": (MASKED, tensors("values", with_value(0, float("nan"))), "values is not finite"),
    "NaN under gates": (GATED, tensors("values", with_value(0, float("nan"))), "gated.0.values is not finite"),
    "infinite in this precision": (PREFIX, tensors("down", lambda t: t.double() * 1e300), "down is not finite"),
    # time
    "a header of 100 MB": (
        PREFIX, raw(lambda h, d: headed(h, d, 99_999_999)), "header would end after byte 100,000,007",
    ),
    "a header beyond every file": (PREFIX, raw(lambda h, d: headed(h, d, 2**64 - 1)), "header would end after byte"),
    "a header to the last byte": (
        PREFIX, raw(lambda h, d: headed(h, d, len(h + d) + 1)), "header would end after byte",
    ),
    "a header of spaces": (PREFIX, raw(lambda h, d: headed(b" " * 34_000_000, d)), "longer than 32 MiB"),
    "a nested header": (PREFIX, raw(lambda h, d: headed(b'{"a":' * 100_000, d)), "is damaged"),
    "twenty thousand terms": (PREFIX, method("ia3" + "+ia3" * 20_000), "far more terms than its file has tensors"),
    "a megabyte of parentheses": (PREFIX, method("(" * 900_000), "far more terms"),
    "more parts than tensors": (PREFIX, method("+".join(["ia3"] * 120)), "has 360 parts, its file"),
    # memory
    "a prefix of 99,999,999": (
        PREFIX, method("prefix(length=99999999)"), r"(?s)keys has shape .*needs \(99999999, 4, 8\)",
    ),
    "a rank of 99,999,999": (PREFIX, method("lora(rank=99999999)"), "missing tensor"),
    "a rank that overflows": (PREFIX, method(f"lora(rank={10**30})"), "too large"),
    "a prompt of 99,999,999": (PROMPT, method("adapter(rank=2) + prompt(length=99999999)"), r"needs \(99999999, 32\)"),
    "a mask over a wide product": (MASKED, method("apet(lora(rank=99999999), parameters=41)"), "spans .* scalars"),
    "a mask along wide ranks": (
        MASKED, method("apet(lora(rank=99999999), parameters=9, pattern='adjacent')"), "spans .* scalars",
    ),
    "a mask that the method does not say": (
        MASKED, facts(method="apet(lora(rank=2, at='output') + layernorm, parameters=40)"), "must be the same method",
    ),
    "a mask of many scalars": (
        MASKED, method("apet(layernorm, parameters=320)"), "holds 0 masked values|needs|masked values",
    ),
    "a wide tensor without numbers": (PREFIX, bit_wide, "(?s)does not fit this model.* has shape"),
    "shapes that only delta.json has": (
        PREFIX, facts(tensors={"edit.x": [99_999_999, 99_999_999]}),
        "(?s)not the file that delta.json describes.*missing",
    ),
    # files
    "delta.json is a link outside": (PREFIX, leading_out("delta.json"), "leads out of its folder"),
    "delta.safetensors is a link outside": (PREFIX, leading_out("delta.safetensors"), "leads out of its folder"),
    "a link to itself": (PREFIX, instead("delta.safetensors", lambda p: p.symlink_to(p)), NO_FILE),
    "a broken link": (PREFIX, instead("delta.json", lambda p: p.symlink_to("nothing")), NO_FILE),
    "a folder for a file": (PREFIX, instead("delta.safetensors", Path.mkdir), NO_FILE),
    "a pipe for a file": (PREFIX, instead("delta.json", os.mkfifo), NO_FILE),
    "a device for a file": (PREFIX, instead("delta.json", lambda p: p.symlink_to("/dev/zero")), NO_FILE),
}  # fmt: skip
"""Every kind of folder that once gave a traceback, a delta of no use, a long wait or a large allocation."""


@pytest.mark.parametrize("case", REGRESSIONS)
def test_what_was_wrong_once(case: str, folders: list[Path], bench: Bench, tmp_path: Path) -> None:
    number, spoil, words = REGRESSIONS[case]
    with judging.copied(folders[number], tmp_path) as folder:
        spoil(folder)
        outcome = bench.judge(folder)
    assert outcome.kind == "refused", outcome
    with pytest.raises(deltune.DeltuneError, match=words):
        raise deltune.DeltuneError(outcome.words)
    assert len(outcome.words) < 5000


def test_a_head_of_other_labels_changes_its_last_linear_alone(tmp_path: Path) -> None:
    """The dense layer of a head has as many rows as there are labels in the file, and is refused none the less."""
    model = build(FAMILIES["roberta"], "sequence", torch.float32)
    deltune.attach(model, "layernorm").save(tmp_path / "delta")
    tensors("dense.weight", lambda t: t[:5].contiguous() if t.shape == (32, 32) else t)(tmp_path / "delta")
    facts(labels__id2label={str(i): str(i) for i in range(5)})(tmp_path / "delta")
    deltune.tuned(model).detach()
    with pytest.raises(deltune.DeltuneError, match=r"head tensor classifier\.dense\.weight has shape \(5, 32\)"):
        deltune.load(model, tmp_path / "delta")


def test_values_that_are_not_finite_on_request(folders: list[Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders[PREFIX], tmp_path / "delta"))
    tensors("keys", with_value(0, float("nan")))(folder)
    model = build(FAMILIES["bert"], "sequence", torch.float32)
    tuned = deltune.load(model, folder, allow_nonfinite=True)
    assert sum(int(p.isnan().sum()) for p in tuned.trainable_parameters()) == 2  # one in each of two layers


def test_labels_of_a_delta_without_a_head(tmp_path: Path) -> None:
    """A delta of the bare model says nothing of labels, so a classifier keeps its own."""
    bare = build(FAMILIES["bert"], "base", torch.float32, num_labels=5)
    stir(deltune.attach(bare, "lora(rank=2)")).save(tmp_path / "delta")
    model = build(FAMILIES["bert"], "sequence", torch.float32)
    model.base_model.load_state_dict({k: v for k, v in deltune.tuned(bare).detach().state_dict().items()})
    before = dict(model.config.id2label)
    tuned = deltune.load(model, tmp_path / "delta")
    assert model.config.id2label == before and model.num_labels == len(before)
    tuned.detach()


def test_a_model_whose_labels_could_not_be_saved() -> None:
    model = build(FAMILIES["bert"], "sequence", torch.float32)
    model.config.id2label = {1: "a", 2: "b", 4: "c"}
    with pytest.raises(deltune.DeltuneError, match=r"has the ids \[1, 2, 4\]; name its 3 labels by the ids 0 to 2"):
        deltune.attach(model, "lora(rank=2)")
    assert "deltune" not in dict(model.named_children())


def test_a_snapshot_of_the_hub(folders: list[Path], tmp_path: Path) -> None:
    """The cache keeps a snapshot's files as links to blobs; those of the same repository are followed, others not."""
    repository = tmp_path / "models--someone--delta"
    snapshot, blobs = repository / "snapshots" / "0123", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, name in enumerate(("delta.json", "delta.safetensors")):
        shutil.copy(folders[PREFIX] / name, blobs / str(number))
        (snapshot / name).symlink_to(Path("..", "..", "blobs", str(number)))
    model = build(FAMILIES["bert"], "sequence", torch.float32)
    deltune.load(model, snapshot).detach()
    (blobs / "1").rename(tmp_path / "elsewhere")
    (blobs / "1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(deltune.DeltuneError, match="leads out of its folder"):
        deltune.load(model, snapshot)


def test_a_link_within_a_run(folders: list[Path], tmp_path: Path) -> None:
    """A run's `delta` may be a link to a folder inside the run, and not to one outside."""
    shutil.copytree(folders[PREFIX], tmp_path / "run" / "runs" / "best" / "delta")
    (tmp_path / "run" / "delta").symlink_to(Path("runs", "best", "delta"))
    model = build(FAMILIES["bert"], "sequence", torch.float32)
    deltune.load(model, tmp_path / "run").detach()
    deltune.load(model, tmp_path / "run" / "delta").detach()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "delta").symlink_to(folders[PREFIX])
    with pytest.raises(deltune.DeltuneError, match="leads out of its folder"):
        deltune.load(model, tmp_path / "other")


@pytest.mark.parametrize("folder", ["no such folder", "x" * 5000, "nul\0", ""])
def test_a_folder_that_cannot_be(folder: str) -> None:
    with pytest.raises(deltune.DeltuneError):
        deltune.load(specimen("bert"), folder)


# -- writing ----------------------------------------------------------------------------------------------------------


UMASKS = (0o027, 0o022, 0o077, 0o002)


def save_under_each(folder: Path) -> None:
    torch.set_num_threads(1)
    tuned = deltune.attach(build(FAMILIES["bert"], "base"), "lora(rank=2)")
    for umask in UMASKS:
        os.umask(umask)
        tuned.save(folder / oct(umask) / "delta")
        tuned.save(folder / oct(umask) / "delta")
        deltune.export(tuned.model, folder / oct(umask) / "peft")


def test_the_umask_is_honoured(tmp_path: Path) -> None:
    """In a process of its own, because the umask is that of all threads."""
    process = multiprocessing.get_context("fork").Process(target=save_under_each, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 0
    for umask in UMASKS:
        made = sorted((tmp_path / oct(umask)).rglob("*"))
        assert [p.name for p in made] == [
            "delta", "delta.json", "delta.safetensors", "peft", "adapter_config.json", "adapter_model.safetensors",
        ]  # fmt: skip
        for path in made:
            whole = 0o777 if path.is_dir() else 0o666
            assert stat.S_IMODE(path.stat().st_mode) == whole & ~umask, path


def test_everything_is_flushed_before_and_after_the_renaming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, replace = os.fsync, os.replace

    def fsync(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        done.append("fresh" if path.name.startswith(".delta-") else path.name)
        sync(handle)

    def replacing(source: Any, target: Any) -> None:
        done.append(f"to {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replacing)
    (tmp_path / "home").mkdir()
    deltune.attach(model := specimen("bert"), "lora(rank=2)").save(tmp_path / "home" / "delta")
    deltune.tuned(model).detach()
    assert sorted(done[:2]) == ["delta.json", "delta.safetensors"]
    assert done[2:] == ["fresh", "to delta", "home"]


@pytest.mark.parametrize("number", range(4))
def test_a_disk_that_cannot_flush_leaves_the_old(
    number: int, folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the flushes fails: of a file, of the fresh folder, of the folder around it."""
    folder = Path(shutil.copytree(folders[PREFIX], tmp_path / "home" / "delta"))
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    tuned = deltune.attach(specimen("bert"), "lora(rank=2)")
    calls = []

    def fsync(handle: int) -> None:
        calls.append(handle)
        if len(calls) == number + 1:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(deltune.DeltuneError, match="Input/output error; nothing was changed there"):
        tuned.save(folder)
    tuned.detach()
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert [p.name for p in folder.parent.iterdir()] == ["delta"]


def test_saving_from_several_threads(tmp_path: Path) -> None:
    """Into folders beside each other, whose parents are made on the way: each is whole."""
    model = specimen("bert")
    tuned = stir(deltune.attach(model, "lora(rank=2)"))
    outputs = run(model, batch(model))
    jobs = [threading.Thread(target=tuned.save, args=(tmp_path / "new" / f"delta{i}",)) for i in range(8)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    tuned.detach()
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == [f"delta{i}" for i in range(8)]
    for i in range(8):
        loaded = deltune.load(model, tmp_path / "new" / f"delta{i}")
        assert equal(run(model, batch(model)), outputs)
        loaded.detach()
