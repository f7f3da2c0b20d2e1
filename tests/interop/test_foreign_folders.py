"""Folders of PEFT and AdapterHub from strangers: refused, or loaded and of use; the model stays what it was."""

from __future__ import annotations

import collections
import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import deltune
from deltune.interop.foreign import foreign_model_kind
from deltune.interop.tensor_files import load_float_tensors
from fuzz import judging, mutations
from fuzz.judging import Bench, Outcome
from fuzz.mutations import nested
from tables.families import FAMILIES
from tables.specimens import build

Spoil = Callable[[Path], object]

HUB = Path(__file__).parents[1] / "interop" / "adapterhub"
CLASSES = {
    "bert": transformers.BertForSequenceClassification,
    "gpt2": transformers.GPT2LMHeadModel,
    "bart": transformers.BartForConditionalGeneration,
}
HUB_FOLDERS = sorted(f for family in CLASSES for f in (HUB / family).iterdir() if f.is_dir() and f.name != "base")


@pytest.fixture(scope="module")
def peft(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    return judging.peft_folders(tmp_path_factory.mktemp("peft"))


@pytest.fixture(scope="module")
def benches() -> dict[str, Bench]:
    """A model for the folders of PEFT's kind, by family."""
    roles = {"gpt2": "causal", "bert": "sequence"}

    def bench(family: str, role: str) -> Bench:
        return Bench(lambda: build(FAMILIES[family], role, torch.float32), "adapter(rank=2)")

    return {family: bench(family, role) for family, role in roles.items()}


@pytest.fixture(scope="module")
def hubs() -> dict[str, Bench]:
    """The models that AdapterHub's folders were made for, by family."""

    def bench(family: str) -> Bench:
        recorded = load_file(HUB / family / "logits.safetensors")
        inputs = {n: t[:, :20] for n, t in recorded.items() if n.endswith(("input_ids", "attention_mask"))}
        return Bench(lambda: CLASSES[family].from_pretrained(HUB / family / "base").eval(), "adapter(rank=2)", inputs)

    return {family: bench(family) for family in CLASSES}


def fuzz(seeds: range, folders: list[tuple[str, Path]], benches: dict[str, Bench], home: Path) -> list[Any]:
    """What went wrong with the folders that the seeds make: seed, folder, mutation, outcome."""
    wrong: list[tuple[int, str, str, Outcome]] = []
    for seed in seeds:
        family, source = folders[seed % len(folders)]
        with judging.copied(source, home) as folder:
            name = mutations.spoil(seed, folder, mutations.FOREIGN, mutations.FOREIGN_WEIGHTS)
            outcome = benches[family].judge(folder)
        if not outcome.fine:
            wrong.append((seed, source.name, name, outcome))
    return wrong


def of_peft(peft: dict[str, list[Path]]) -> list[tuple[str, Path]]:
    return [(family, folder) for family, folders in peft.items() for folder in folders]


def of_hub() -> list[tuple[str, Path]]:
    return [(folder.parent.name, folder) for folder in HUB_FOLDERS]


def test_sound_folders_load(
    peft: dict[str, list[Path]], benches: dict[str, Bench], hubs: dict[str, Bench], tmp_path: Path
) -> None:
    assert {benches[family].judge(folder).kind for family, folder in of_peft(peft)} == {"sound"}
    assert {hubs[family].judge(folder).kind for family, folder in of_hub()} == {"sound"}


def test_mutated_peft_folders(peft: dict[str, list[Path]], benches: dict[str, Bench], tmp_path: Path) -> None:
    assert fuzz(range(60), of_peft(peft), benches, tmp_path) == []


def test_mutated_adapterhub_folders(hubs: dict[str, Bench], tmp_path: Path) -> None:
    assert fuzz(range(45), of_hub(), hubs, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 2000, 500))
def test_many_mutated_peft_folders(
    start: int, peft: dict[str, list[Path]], benches: dict[str, Bench], tmp_path: Path
) -> None:
    assert fuzz(range(start, start + 500), of_peft(peft), benches, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 2000, 500))
def test_many_mutated_adapterhub_folders(start: int, hubs: dict[str, Bench], tmp_path: Path) -> None:
    assert fuzz(range(start, start + 500), of_hub(), hubs, tmp_path) == []


# -- what was wrong once ----------------------------------------------------------------------------------------------


def options(**changes: Any) -> Spoil:
    """Options of adapter_config.json, or of the configuration inside it where there is one, with other values."""

    def change(folder: Path) -> None:
        value = json.loads((folder / "adapter_config.json").read_text())
        inside = value["config"] if isinstance(value.get("config"), dict) else value
        for key, new in changes.items():
            (value if key in ("config", "name", "model_type", "peft_type") else inside)[key] = new
        (folder / "adapter_config.json").write_text(json.dumps(value))

    return change


def file_of(folder: Path) -> Path:
    """The file with the tensors of an adapter."""
    names = ("adapter_model.safetensors", "adapter.safetensors", "adapter_model.bin", "pytorch_adapter.bin")
    return next(folder / name for name in names if (folder / name).exists())


def read(folder: Path) -> dict[str, torch.Tensor]:
    path = file_of(folder)
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)


def tensors(ending: str, make: Callable[[torch.Tensor], torch.Tensor], archive: bool | None = None) -> Spoil:
    """The tensors whose names end in this way, changed; as a file of torch.save by choice."""

    def change(folder: Path) -> None:
        loaded = {name: make(t.clone()) if name.endswith(ending) else t for name, t in read(folder).items()}
        path = file_of(folder)
        if archive is False or (archive is None and path.suffix == ".safetensors"):
            save_file(loaded, path)
        else:
            pickled(loaded)(folder)

    return change


def torch_file(folder: Path) -> Path:
    """Where a file of torch.save is looked for, the safetensors gone."""
    path = file_of(folder)
    hub = path.name in ("adapter.safetensors", "pytorch_adapter.bin")
    path.unlink()
    return folder / ("pytorch_adapter.bin" if hub else "adapter_model.bin")


def pickled(value: Any, **how: Any) -> Spoil:
    """A file of torch.save with any value in it."""
    return lambda folder: torch.save(value, torch_file(folder), **how)


def archived(data: bytes, compression: int = zipfile.ZIP_STORED) -> Spoil:
    """An archive like that of torch.save around any pickle."""

    def change(folder: Path) -> None:
        with zipfile.ZipFile(torch_file(folder), "w", compression) as archive:
            for name, content in (("data.pkl", data), ("byteorder", b"little"), ("version", b"3\n")):
                archive.writestr(f"archive/{name}", content)

    return change


def repacked(folder: Path) -> None:
    """What torch.save wrote, compressed."""
    saved = io.BytesIO()
    torch.save(read(folder), saved)
    with zipfile.ZipFile(saved) as source, zipfile.ZipFile(torch_file(folder), "w", zipfile.ZIP_DEFLATED) as archive:
        for name in source.namelist():
            archive.writestr(name, source.read(name))


def claiming(folder: Path) -> None:
    """A storage that claims a thousand times the numbers that its record has."""
    saved = io.BytesIO()
    torch.save({"base_model.model.x.lora_A.weight": torch.zeros(200)}, saved)
    with zipfile.ZipFile(saved) as source, zipfile.ZipFile(torch_file(folder), "w") as archive:
        for name in source.namelist():
            data = source.read(name)
            if name.endswith("data.pkl"):  # the pickle's two-byte numbers: of the storage, and of the shape
                data = data.replace(b"K\xc8", b"J\x00\x00\x03\x00")
            archive.writestr(name, data)


def leading_out(name: str) -> Spoil:
    def change(folder: Path) -> None:
        os.replace(folder / name, folder.parent / name)
        (folder / name).symlink_to(folder.parent / name)

    return change


class Running:
    """What unpickling would run."""

    def __reduce__(self) -> Any:
        return (os.system, ("touch /tmp/a-pickle-ran",))


BYTES = b"\x80\x02c__builtin__\nbytearray\n\x8a\x05\x00\x00\x00\x00\x10\x85R."
"""A pickle that makes 64 GiB of zeros."""

WORDS = "has options that cannot be read"
PICKLE = "is damaged, or holds more than tensors"
FLOATS = "does not hold floating-point tensors only"
PEFT_LORA, PEFT_IA3, PEFT_LN = (("bert", number) for number in range(3))
ROWS, PREFIX = ("gpt2", 2), ("gpt2", 3)

REGRESSIONS: dict[str, tuple[tuple[str, int | str], Spoil, str]] = {
    # raw exceptions, of PEFT's folders
    "JSON nested too deeply": (
        PEFT_LORA, lambda f: (f / "adapter_config.json").write_text(nested(100_000)), "nested too deeply",
    ),
    "an option nested too deeply": (
        PEFT_LORA, lambda f: (f / "adapter_config.json").write_text('{"peft_type": ' + nested(5000) + "}"), "nested",
    ),
    "lora_alpha is missing a number": (PEFT_LORA, options(lora_alpha=None), "option lora_alpha=None is no number"),
    "lora_alpha is a text": (PEFT_LORA, options(lora_alpha="8"), f"{WORDS}: option lora_alpha"),
    "lora_alpha is an object": (PEFT_LORA, options(lora_alpha={}), f"{WORDS}: option lora_alpha"),
    "lora_alpha is NaN": (PEFT_LORA, options(lora_alpha=float("nan")), f"{WORDS}: option lora_alpha"),
    "lora_alpha is beyond floats": (PEFT_LORA, options(lora_alpha=10**400), f"{WORDS}: option lora_alpha"),
    "lora_dropout is an object": (PEFT_LORA, options(lora_dropout={}), f"{WORDS}: option lora_dropout"),
    "alpha_pattern is a list": (PEFT_LORA, options(alpha_pattern=[1]), f"{WORDS}: option alpha_pattern"),
    "alpha_pattern of no number": (PEFT_LORA, options(alpha_pattern={".*": "x"}), f"{WORDS}: option alpha_pattern"),
    "a pattern that is none": (PEFT_LORA, options(alpha_pattern={"(": 3}), "a pattern that is no regular expression"),
    "peft_type is a list": (PEFT_LORA, options(peft_type=["LORA"]), f"{WORDS}: option peft_type"),
    "a factor without axes": (
        PEFT_LORA, tensors("lora_A.weight", lambda t: t.sum()), r"has shape \(\), by the options and this model it is",
    ),
    "a factor of one axis": (PEFT_LORA, tensors("lora_B.weight", lambda t: t.flatten()), r"shape \(64,\), by "),
    "a rank of nothing": (PEFT_LORA, tensors("lora_A.weight", lambda t: t[:0].contiguous()), f"{FLOATS}.*is empty"),
    "a vector without axes": (PEFT_IA3, tensors("ia3_l", lambda t: t.sum()), "it should have 2 axes"),
    "a vector of one axis": (PEFT_IA3, tensors("ia3_l", lambda t: t.flatten()), "it should have 2 axes"),
    "a vector of another length": (
        PEFT_IA3, tensors("ia3_l", lambda t: t.repeat(3, 1)), "does not fit|IA3 on the input",
    ),
    "rows without axes": (ROWS, tensors("prompt_embeddings", lambda t: t.sum()), "missing tensor prompt_embeddings"),
    "a prefix of another width": (PREFIX, tensors("prompt_embeddings", lambda t: t[:, :-1].contiguous()), "rows of"),
    "a norm of other axes": (PEFT_LN, tensors("weight", lambda t: t[None]), r"has shape \(1, 32\)"),
    # of AdapterHub's
    "a scaling that is a list": (("bert", "par_bn"), options(scaling=[1]), f"{WORDS}.*option scaling"),
    "a scaling that is null": (("bert", "par_bn"), options(scaling=None), f"{WORDS}.*option scaling"),
    "a scaling that is no word": (("bert", "par_bn"), options(scaling="x"), f"{WORDS}.*option scaling"),
    "leave_out is a number": (("bert", "seq_bn"), options(leave_out=3), f"{WORDS}.*option leave_out"),
    "leave_out of lists": (("bert", "seq_bn"), options(leave_out=[[]]), f"{WORDS}.*option leave_out.0"),
    "no rank": (("bert", "lora"), options(r=0), f"{WORDS}.*option r"),
    "a rank that is null": (("bert", "lora"), options(r=None), f"{WORDS}.*option r"),
    "alpha is null": (("bert", "lora"), options(alpha=None), f"{WORDS}.*option alpha"),
    "attn_matrices is a number": (("bert", "lora"), options(attn_matrices=3), f"{WORDS}.*option attn_matrices"),
    "a prefix of no length": (("bert", "prefix_flat"), options(prefix_length="x"), f"{WORDS}.*option prefix_length"),
    "an architecture that is a list": (("bert", "seq_bn"), options(architecture=[]), "is not a name"),
    "a union of a number": (
        ("bert", "mam"), options(config={"architecture": "union", "configs": 3}), f"{WORDS}.*option configs",
    ),
    "a union of texts": (
        ("bert", "mam"), options(config={"architecture": "union", "configs": ["x"]}), f"{WORDS}.*option configs.0",
    ),
    "a union without any": (("bert", "mam"), options(config={"architecture": "union"}), f"{WORDS}.*option configs"),
    "a union in a union": (
        ("bert", "mam"),
        options(config={"architecture": "union", "configs": [{"architecture": "union", "configs": []}]}),
        "union in a union",
    ),
    "a name that is a list": (("bert", "seq_bn"), options(name=[]), f"{WORDS}.*option name"),
    "a down projection without axes": (
        ("bert", "seq_bn"), tensors("adapter_down.0.weight", lambda t: t.sum()), "it should have 2 axes",
    ),
    "a learned scale of many": (
        ("bert", "learned_par_bn"), tensors("scaling", lambda t: t.repeat(5)), "it should be one number",
    ),
    "factors of one axis": (("bert", "lora"), tensors("lora_A", lambda t: t.flatten()), "it should have 2 axes"),
    "factors of another rank": (("gpt2", "lora"), tensors("lora_A", lambda t: t[:1].contiguous()), "factors of shapes"),
    "an MLP that does not fit": (
        ("bert", "prefix_mlp"), tensors("control_trans.0.weight", lambda t: t[:, :-1].contiguous()),
        "do not fit each other",
    ),
    # time
    "a pattern that never ends": (
        PEFT_LORA, options(alpha_pattern={"(.|.)*(.|.)*(.|.)*[xz]": 3}), "patterns that take longer than 0.5 s",
    ),
    "a pattern of a thousand letters": (PEFT_LORA, options(alpha_pattern={"x" * 1001: 3}), f"{WORDS}.*alpha_pattern"),
    # memory
    "a rank beyond its numbers": (
        PEFT_LORA, tensors("lora_A.weight", lambda t: torch.empty(10**9, 0)), f"{FLOATS}.*is empty",
    ),
    "a view of one number": (
        PEFT_LORA, tensors("lora_A.weight", lambda t: torch.zeros(1).expand(10**6, 10**6), True),
        f"{PICKLE}.*claims more",
    ),
    "a storage that claims more": (PEFT_LORA, claiming, PICKLE),
    "a tensor without storage": (
        PEFT_LORA, tensors("lora_A.weight", lambda t: torch.empty(10**6, 10**6, device="meta"), True), PICKLE,
    ),
    "a prefix of a few numbers": (
        ("bert", "prefix_mlp"),
        lambda f: (tensors("wte.weight", lambda t: t[:1, :1].repeat(200_000, 1))(f), options(prefix_length=200_000)(f),
                   tensors("control_trans.0.weight", lambda t: t[:, :1].contiguous())(f)),
        "numbers, far more than it has",
    ),
    # pickles
    "a pickle that runs": (PEFT_LORA, pickled({"x": Running()}), f"{PICKLE}: it refers to"),
    "a pickle that runs, of the old kind": (
        PEFT_LORA, pickled({"x": Running()}, _use_new_zipfile_serialization=False), PICKLE,
    ),
    "a pickle with no archive": (
        PEFT_LORA, lambda f: torch_file(f).write_bytes(pickle.dumps({"x": Running()})), PICKLE,
    ),
    "bytes without end": (PEFT_LORA, archived(BYTES), f"{PICKLE}: it refers to '__builtin__ bytearray'"),
    "a name from the stack": (
        PEFT_LORA, archived(b"\x80\x04\x8c\x02os\x8c\x06system\x93."), "it refers to 'STACK_GLOBAL'",
    ),
    "a pickle that is none": (PEFT_LORA, archived(b"\x00" * 1000), PICKLE),
    "a list of tensors without end": (PEFT_LORA, archived(b"\x80\x02" + b"N0" * 600_000 + b"N."), "longer than 1 MiB"),
    "a compressed file": (PEFT_LORA, repacked, f"{PICKLE}: it is compressed"),
    "a sparse tensor": (PEFT_LORA, tensors("lora_A.weight", lambda t: t.to_sparse(), True), PICKLE),
    "tensors by numbers": (PEFT_LORA, pickled({3: torch.zeros(2)}), "does not hold a dictionary of tensors by name"),
    "a list of tensors": (PEFT_LORA, pickled([torch.zeros(2)]), "does not hold a dictionary of tensors by name"),
    "a counter of tensors": (PEFT_LORA, pickled(collections.Counter(a=3)), PICKLE),
    # values
    "NaN": (PEFT_LORA, tensors("lora_B.weight", lambda t: t * float("nan")), "holds NaN or infinity"),
    "NaN in a torch file": (
        PEFT_LORA, tensors("lora_B.weight", lambda t: t * float("nan"), True), "holds NaN or infinity",
    ),
    "infinity in a norm": (PEFT_LN, tensors("weight", lambda t: t / 0), "holds NaN or infinity"),
    "whole numbers": (PEFT_LORA, tensors("lora_B.weight", lambda t: t.long()), f"{FLOATS}.*is of type I64"),
    # files
    "options are a link outside": (PEFT_LORA, leading_out("adapter_config.json"), "leads out of its folder"),
    "tensors are a link outside": (PEFT_LORA, leading_out("adapter_model.safetensors"), "leads out of its folder"),
}  # fmt: skip
"""Every kind of folder that once gave a traceback, a delta of no use, a long wait or a large allocation."""


@pytest.mark.parametrize("case", REGRESSIONS)
def test_what_was_wrong_once(
    case: str, peft: dict[str, list[Path]], benches: dict[str, Bench], hubs: dict[str, Bench], tmp_path: Path
) -> None:
    (family, which), spoil, words = REGRESSIONS[case]
    source = HUB / family / which if isinstance(which, str) else peft[family][which]
    with judging.copied(source, tmp_path) as folder:
        spoil(folder)
        outcome = (hubs if isinstance(which, str) else benches)[family].judge(folder)
    assert outcome.kind == "refused", outcome
    with pytest.raises(deltune.DeltuneError, match=f"(?s){words}"):
        raise deltune.DeltuneError(outcome.words)
    assert len(outcome.words) < 5000 and not Path("/tmp/a-pickle-ran").exists()


def test_a_torch_file_loads(peft: dict[str, list[Path]], benches: dict[str, Bench], tmp_path: Path) -> None:
    for family, source in of_peft(peft):
        with judging.copied(source, tmp_path) as folder:
            pickled(read(folder))(folder)
            assert benches[family].judge(folder).kind == "sound"


def test_patterns_go_by_the_rule_of_peft(peft: dict[str, list[Path]], tmp_path: Path) -> None:
    """The first pattern that is the end of a module's path, as a regular expression."""
    folder = Path(shutil.copytree(peft["bert"][0], tmp_path / "peft"))
    patterns = {r"layer\.0\..*query": 4, "value": 8, r".*\.query": 16, "alue": 32, "other": 64}
    options(alpha_pattern=patterns, lora_alpha=2)(folder)
    model = build(FAMILIES["bert"], "sequence", torch.float32)
    tuned = deltune.load(model, folder)
    scales = {edit.place.name: edit.factor for edit in tuned.delta().all_edits()}
    assert scales == {
        "encoder.0.self.query": 2.0, "encoder.1.self.query": 8.0,
        "encoder.0.self.value": 4.0, "encoder.1.self.value": 4.0,
    }  # fmt: skip


def test_what_a_folder_wants_is_bounded_too(peft: dict[str, list[Path]], tmp_path: Path) -> None:
    """`deltune import` asks a folder for its number of labels before there is a model."""
    folder = Path(shutil.copytree(peft["bert"][0], tmp_path / "peft"))
    assert foreign_model_kind(folder) == ("classification", 2)
    tensors("classifier.weight", lambda t: torch.empty(10**9, 0))(folder)
    with pytest.raises(deltune.DeltuneError, match="is empty"):
        foreign_model_kind(folder)


def test_a_folder_of_another_family_is_said_to_be_one(peft: dict[str, list[Path]]) -> None:
    lora = next(
        folder
        for folder in peft["bert"]
        if json.loads((folder / "adapter_config.json").read_text())["peft_type"] == "LORA"
    )
    with pytest.raises(
        deltune.DeltuneError, match=r"was trained on another model.*it has base_model\.model.*GPT2LMHead"
    ):
        deltune.load(build(FAMILIES["gpt2"], "causal"), lora)


def test_a_head_that_is_not_in_the_folder_stays(peft: dict[str, list[Path]], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(peft["bert"][0], tmp_path / "peft"))
    save_file({n: t for n, t in read(folder).items() if "classifier" not in n}, file_of(folder))
    options(modules_to_save=None)(folder)
    model = build(FAMILIES["bert"], "sequence", torch.float32)
    before = model.classifier.weight.clone()
    assert torch.equal(deltune.load(model, folder).model.classifier.weight, before)


def test_tensors_do_not_depend_on_a_file_that_is_written_over(tmp_path: Path) -> None:
    """A file that was mapped into memory and is cut ends the process, and with it a server."""
    path, values = tmp_path / "adapter_model.safetensors", {"weight": torch.arange(20_000.0)}
    save_file(values, path)
    tensors = load_float_tensors(path)
    path.write_bytes(b"")
    assert torch.equal(tensors["weight"], values["weight"])
