"""Loading backbones: the packaged model, small real models, and one clear error for every way a model can be wrong."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers

import deltune
from deltune import models
from deltune.errors import DeltuneError
from deltune.interop.foreign import foreign_base

MINILM = models.packaged_minilm()


def small(kind: str = "BertModel", **sizes: object) -> torch.nn.Module:
    """A tiny model of random weights."""
    dimensions = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.AutoConfig.for_model("bert", vocab_size=50, **{**dimensions, **sizes})
    return getattr(transformers, kind)(config)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole model folder: tiny BERT with the tokenizer of MiniLM."""
    small().save_pretrained(tmp_path / "tiny")
    shutil.copy(MINILM / "tokenizer.json", tmp_path / "tiny")
    return tmp_path / "tiny"


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def message(call: Callable[..., object], *args: object, **kwargs: object) -> str:
    with pytest.raises(DeltuneError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def test_minilm() -> None:
    config = models.load_config("minilm")
    assert (config.model_type, config.hidden_size, config.num_hidden_layers) == ("bert", 384, 6)
    tokenizer = models.load_tokenizer("minilm")
    model = models.load_model("minilm", "classification", labels=["no", "yes", "perhaps"])
    assert model.config.num_labels == 3
    assert model.config.id2label == {0: "no", 1: "yes", 2: "perhaps"}
    assert model.config.label2id == {"no": 0, "yes": 1, "perhaps": 2}
    assert model(**tokenizer("a real sentence", return_tensors="pt")).logits.shape == (1, 3)


def test_minilm_has_a_name_for_other_libraries(tmp_path: Path) -> None:
    """An export names the packaged model as the hub does, and a folder of PEFT with that name is for the packaged."""
    model = models.load_model("minilm", "classification", labels=["no", "yes"])
    deltune.attach(model, "lora(rank=1)")
    deltune.export(model, tmp_path / "peft")
    named = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == models.MINILM_ON_HUB == "sentence-transformers/all-MiniLM-L6-v2"
    assert foreign_base(tmp_path / "peft")[1] == "minilm"
    for name in ("minilm", str(MINILM), named):
        assert models.name_on_hub(name) == named and models.name_here(name) in ("minilm", str(MINILM))
    for name in ("owner/name", str(tmp_path)):
        assert models.name_on_hub(name) == models.name_here(name) == name


def test_config_from_file_and_folder(folder: Path) -> None:
    assert (
        models.load_config(str(folder)).to_diff_dict() == models.load_config(str(folder / "config.json")).to_diff_dict()
    )
    assert len(models.load_tokenizer(str(folder / "config.json"))) == 30522
    assert "has no weights" in message(models.load_model, str(folder / "config.json"), "base")


def test_head_is_seeded_and_the_callers_random_state_is_kept(recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    heads = [models.load_model("minilm", "classification", ["a", "b"], seed=s).classifier.weight for s in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert not [w for w in recwarn if "initialised" in str(w.message)]


def test_loading_is_quiet_and_leaves_transformers_settings(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    models.load_model("minilm", "classification", ["a", "b"])
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
    assert transformers.utils.logging.is_progress_bar_enabled()


def test_head_of_another_size_is_replaced_and_of_the_same_size_kept(tmp_path: Path) -> None:
    trained = small("BertForSequenceClassification", num_labels=3)
    trained.save_pretrained(tmp_path)
    same = models.load_model(str(tmp_path), "classification", ["a", "b", "c"])
    assert torch.equal(same.classifier.weight, trained.classifier.weight)
    other = models.load_model(str(tmp_path), "classification", list("abcde"))
    assert other.classifier.weight.shape == (5, 16)
    assert torch.equal(other.bert.pooler.dense.weight, trained.bert.pooler.dense.weight)


@pytest.mark.parametrize("dtype", [torch.float16, "bfloat16", None])
def test_dtype(folder: Path, dtype: torch.dtype | str | None) -> None:
    expected = torch.float32 if dtype is None else getattr(torch, str(dtype).removeprefix("torch."))
    assert models.load_model(str(folder), "base", dtype=dtype).dtype == expected


@pytest.mark.parametrize(
    ("name", "kind", "cls"),
    [
        ("g2p-en-us-bart", "seq2seq-lm", "BartForConditionalGeneration"),
        ("aren-translit-blenderbot", "seq2seq-lm", "BlenderbotForConditionalGeneration"),
        ("stories260k-llama", "causal-lm", "LlamaForCausalLM"),
        ("stories260k-llama", "classification", "LlamaForSequenceClassification"),
        ("minilm-d128", "base", "BertModel"),
    ],
)
def test_small_real_models(shared: Path, name: str, kind: str, cls: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = models.load_model(str(shared / "models" / name), kind)
    assert type(model).__name__ == cls


def test_threads_that_load_models_at_once(shared: Path) -> None:
    """transformers ties no weights while it loads; what one thread loads is tied whatever the others do."""
    names = [str(shared / "models" / name) for name in ("g2p-en-us-bart", "stories260k-llama")] * 4
    heads = ["seq2seq-lm", "causal-lm"] * 4
    with ThreadPoolExecutor(8) as pool:
        loaded = [*pool.map(models.load_model, names, heads)]
    for model in (*loaded, *map(models.load_model, names[:2], heads[:2])):
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_padding_of_a_decoder_only_classifier(shared: Path) -> None:
    name = str(shared / "models" / "stories260k-llama")
    tokenizer, model = models.load_tokenizer(name), models.load_model(name, "classification", ["a", "b"])
    tokenizer.pad_token = None
    model.config.pad_token_id = None
    models.align_padding_token(model, tokenizer)
    assert tokenizer.pad_token == tokenizer.eos_token
    assert model.config.pad_token_id == tokenizer.pad_token_id
    alone = model(**tokenizer(["Once"], return_tensors="pt")).logits
    batch = model(**tokenizer(["Once", "Once upon a time"], padding=True, return_tensors="pt")).logits
    torch.testing.assert_close(batch[:1], alone)


def test_padding_without_any_token(folder: Path) -> None:
    tokenizer = models.load_tokenizer(str(folder))
    tokenizer.pad_token = tokenizer.eos_token = None
    assert "pad_token" in message(models.align_padding_token, models.load_model(str(folder), "base"), tokenizer)


# --- what can be wrong ------------------------------------------------------------------------------------------


def test_no_such_folder_names_the_nearest_and_the_hub(folder: Path) -> None:
    text = message(models.load_model, str(folder.parent / "tyni"), "base")
    assert f"unknown model '{folder.parent / 'tyni'}'" in text
    assert f"Did you mean '{folder}'?" in text and "minilm" in text and "hub id" in text


def test_hub_id_that_cannot_be_had() -> None:
    """Offline: cannot be reached; online: not on the hub. Either way at once, without transformers' retries."""
    text = message(models.load_config, "deltune-tests/no-such-model")
    assert "'deltune-tests/no-such-model'" in text and "no such file or folder here" in text
    assert "cannot be reached" in text or "hub has no such model" in text


def test_offline_mode_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in message(models.load_tokenizer, "deltune-tests/no-such-model")


def test_cached_hub_model_works_offline(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy in the hub's cache, laid out as huggingface_hub does it, is read when the hub cannot be reached."""
    for module in ("huggingface_hub.constants", "huggingface_hub.file_download"):
        monkeypatch.setattr(f"{module}.HF_HUB_CACHE", str(tmp_path / "cache"), raising=False)
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repo = tmp_path / "cache" / "models--some--tiny"
    commit = "0" * 40
    shutil.copytree(folder, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    assert models.load_model("some/tiny", "base").config.hidden_size == 16
    assert "Did you mean 'some/tiny'?" in message(models.load_config, "some/tyni")


def test_packaged_model_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "MINILM_PACKAGE", "no_such_package")
    assert "pip install 'deltune[demo]'" in message(models.load_config, "minilm")


@pytest.mark.parametrize(
    ("library", "version", "oldest"), [("transformers", "5.16.1", "5.17"), ("torch", "2.10.0+cpu", "2.11")]
)
def test_an_old_version_is_refused(library: str, version: str, oldest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    current = sys.modules[library]  # transformers replaces itself there when it imports its own processors
    monkeypatch.setattr(current, "__version__", version)
    for call in (lambda: models.load_config("minilm"), lambda: deltune.attach(torch.nn.Linear(2, 2), "lora")):
        text = message(call)
        assert (
            f"{library} {version} is too old" in text
            and f"needs {oldest} or newer" in text
            and "pip install -U" in text
        )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{\n"model_type": "bert",\n', "is not JSON"),
        ('{\n"model_type": "bert",\n', "line 3, column 1"),
        ('{"model_type": ' + "[" * 100_000, "nested too deeply"),
        (" " * (17 << 20), "longer than 16 MiB"),
        ('{"model_type": "bert", "model_type": "brt"}', "unknown model_type 'brt'"),
        ('{"hidden_size": 4}', 'no "model_type"'),
        ("[1]", 'no "model_type"'),
        ('{"model_type": "brt"}', "unknown model_type 'brt'. Did you mean 'bert'"),
        ('{"model_type": "bert", "hidden_size": "wide"}', "hidden_size"),
        ('{"model_type": "mine", "auto_map": {"AutoConfig": "code.Config"}}', "trust_remote_code=True"),
    ],
)
def test_bad_config(folder: Path, text: str, expected: str) -> None:
    (folder / "config.json").write_text(text)
    for call in (models.load_config, lambda name: models.load_model(name, "base")):
        error = message(call, str(folder))
        assert str(folder / "config.json") in error and expected in error


def test_own_code_runs_only_when_asked(folder: Path) -> None:
    edit(folder, model_type="mine", auto_map={"AutoConfig": "code.Mine"})
    (folder / "code.py").write_text(
        "from transformers import PretrainedConfig\nclass Mine(PretrainedConfig):\n    model_type = 'mine'\n"
    )
    assert "its own Python code" in message(models.load_config, str(folder))
    assert models.load_config(str(folder), trust_remote_code=True).model_type == "mine"


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def lose_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    small().save_pretrained(folder, max_shard_size="4KB")
    next(folder.glob("model-00002*")).unlink()


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "model.safetensors").unlink(), "has no weights"),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "truncated"),
        (truncate, "truncated"),
        (lose_shard, "incomplete"),
        (only_pickle, "only as pickle (pytorch_model.bin)"),
        (lambda f: edit(f, num_hidden_layers=3), "encoder.layer.2"),
        (lambda f: edit(f, vocab_size=60), "word_embeddings.weight (50, 16) for (60, 16)"),
        (lambda f: edit(f, num_attention_heads=3), "multiple of the number of attention heads"),
    ],
)
def test_bad_folder(folder: Path, damage: Callable[[Path], object], expected: str) -> None:
    damage(folder)
    text = message(models.load_model, str(folder), "classification", ["a", "b"])
    assert str(folder) in text and expected in text


def test_fresh_pooler_is_a_warning(tmp_path: Path) -> None:
    small("BertForMaskedLM").save_pretrained(tmp_path)
    with pytest.warns(
        UserWarning, match=r"freshly initialised: bert\.pooler\.dense\.bias, bert\.pooler\.dense\.weight"
    ):
        models.load_model(str(tmp_path), "classification", ["a", "b"])


def test_tokenizer_missing_or_broken(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version"')
    assert "no readable tokenizer" in message(models.load_tokenizer, str(folder))
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink(missing_ok=True)
    assert "no tokenizer" in message(models.load_tokenizer, str(folder))


def test_wrong_arguments() -> None:
    assert "Did you mean 'classification'?" in message(models.load_model, "minilm", "clasification")
    assert "Did you mean 'bfloat16'?" in message(models.load_model, "minilm", "base", dtype="bfloat")
    assert "only a classifier or tagger has labels" in message(models.load_model, "minilm", "base", ["a", "b"])
    text = message(models.load_model, "minilm", "seq2seq-lm")
    assert "(bert) cannot be loaded as seq2seq-lm" in text
    assert "classification, tagging, choice, question-answering, base" in text


def test_module_is_light() -> None:
    """Importing deltune.models brings in neither torch nor transformers."""
    import subprocess

    code = "import sys, deltune.models; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


NAMES = (
    "import deltune; deltune.parse('lora + prefix'), deltune.methods()",
    "from deltune import attach, count, export, fit, inspect, load, tuned",
    "import deltune; [getattr(deltune, name) for name in deltune.__all__]",
)


@pytest.mark.parametrize("code", NAMES)
def test_importing_public_names_prints_nothing(code: str) -> None:
    """Nor does it import an optional library itself; transformers does, and what that says is not for our users."""
    import os
    import subprocess

    finds = (
        "import sys; assert 'parse' not in sys.argv[1] or not {'torchao', 'peft', 'bitsandbytes'} & sys.modules.keys()"
    )
    command = [sys.executable, "-W", "ignore", "-c", f"{code}; {finds}", code]
    quiet = {name: value for name, value in os.environ.items() if name != "TRANSFORMERS_VERBOSITY"}
    ran = subprocess.run(command, env=quiet, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
