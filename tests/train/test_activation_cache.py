"""Runs whose frozen layers run once for each row: the same numbers as without the cache, found again by content."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tiny
from deltune.errors import DeltuneError
from deltune.files import CACHE_VARIABLE
from deltune.models import align_padding_token, load_model, load_tokenizer
from deltune.runtime.attach import attach
from deltune.train import checkpoints
from deltune.train.activation_cache import CachedRows, with_cached_activations
from deltune.train.config import RunConfig
from deltune.train.frozen_layers import FrozenLayers
from deltune.train.run import train
from deltune.train.run_folder import RunFolder
from deltune.train.tasks.base import InferenceContext, TaskOptions
from deltune.train.tasks.classification import CLASSIFICATION
from deltune.train.tasks.encoding import collate
from processes import killed_training

UPPER = "layernorm(layers='upper half')"
COLUMNS = {
    "id": [str(i) for i in range(20)],
    "text": [row["text"] for row in tiny.sentences(20, 0)],
    "label": [i % 3 for i in range(20)],
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own; where the states go."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "trunk"


def spec(root: Path, **changes: Any) -> RunConfig:
    return tiny.spec(root, **{"method": UPPER, "trunk_dropout": "off", "epochs": 2, **changes})


def alike(one: RunFolder, two: RunFolder) -> None:
    """Two runs of the same numbers, up to rounding, all along."""
    for split in ("validation", "test"):
        assert one.metrics.scores[split] == pytest.approx(two.metrics.scores[split], abs=1e-5)
    assert one.metrics.best.step == two.metrics.best.step
    assert tiny.losses(one.folder) == pytest.approx(tiny.losses(two.folder), abs=1e-5)
    mine, theirs = (load_file(run.delta / "delta.safetensors") for run in (one, two))
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-5)


def files(place: Path) -> dict[str, int]:
    """The files of states, and when each was written."""
    return {path.name: path.stat().st_ctime_ns for path in place.glob("*.safetensors")}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("bert", {}),
        ("bert", {"method": "three_vectors", "patience": 1}),
        ("bert", {"method": "head", "precision": "bf16"}),
        ("bert", {"method": f"{UPPER} + three_vectors", "batch_tokens": 64, "batch_size": 32}),
        ("gpt2", {"method": "lora(rank=2, dropout=0.1, layers='upper half')", "device_batch_size": 3, "batch_size": 6}),
        ("gpt2", {"method": "head", "label_smoothing": 0.1}),
        ("gpt2", {"method": "ladder(width=4, heads=2)"}),
        ("roberta", {"method": "prefix(length=2, layers='upper half')", "seeds": (0, 1)}),
    ],
    ids=lambda value: value if isinstance(value, str) else ", ".join(map(str, value.values())),
)
@pytest.mark.sample(2)
def test_a_run_from_states_is_the_same_run(
    family: str, changes: dict[str, Any], root: Path, place: Path, tmp_path: Path
) -> None:
    """Training with dropout above, validation and test; one name, whether or not states are kept."""
    model = root / family
    if not model.exists():
        tiny.model(model, family)
    run_spec = spec(root, model=str(model), **changes)
    without = run_spec.replace(trunk_cache=0.0)
    assert run_spec.name == without.name != run_spec.replace(trunk_dropout="on").name
    train(run_spec, tmp_path / "kept")
    assert len(files(place)) == 3
    train(without, tmp_path / "run")
    runs = [sorted(path.parent for path in (tmp_path / name).rglob("log.jsonl")) for name in ("kept", "run")]
    for one, two in zip(*runs, strict=True):
        alike(RunFolder(one), RunFolder(two))


def test_dropout_of_the_frozen_layers_is_what_off_takes_away(root: Path, tmp_path: Path) -> None:
    train(spec(root), tmp_path / "off")
    train(spec(root, trunk_dropout="on"), tmp_path / "on")
    assert tiny.losses(tmp_path / "off") != pytest.approx(tiny.losses(tmp_path / "on"), abs=1e-4)


@pytest.mark.slow
def test_killed_and_run_again(root: Path, place: Path, tmp_path: Path) -> None:
    """SIGKILL after the first checkpoint: the same numbers as without; the states are not made again."""
    run_spec = spec(root, epochs=60)
    run = RunFolder(tmp_path / "run")
    killed_training(run_spec, run.folder, lambda: checkpoints.latest_checkpoint(run.checkpoint) is not None)
    assert not run.finished
    made = {path.name: path.read_bytes() for path in place.glob("*.safetensors")}
    train(run_spec, run.folder)
    train(run_spec.replace(trunk_cache=0.0), tmp_path / "whole")
    alike(RunFolder(tmp_path / "whole"), run)
    assert {path.name: path.read_bytes() for path in place.glob("*.safetensors")} == made


def test_runs_share_states_by_content(root: Path, place: Path, tmp_path: Path) -> None:
    """Cached states depend on the layers' tensors, their end and their rows; not on seed, rate or what is above."""

    def made(**changes: Any) -> int:
        before = set(files(place))
        train(spec(root, epochs=1, **changes), tmp_path / f"{len(list(tmp_path.iterdir()))}")
        return len(set(files(place)) - before)

    assert made() == 3
    assert made(seed=5, lr=1e-4) == made(method="lora(rank=2, layers=(1,))") == made(head="freeze") == 0
    assert made(max_length=8) == 3, "other rows"
    assert made(max_train_rows=20) == 1, "validation and test are the same"
    assert made(method="head") == 3, "another end"
    other = tiny.model(tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    model = load_model(str(other), "base")
    with torch.no_grad():
        model.get_submodule("encoder.layer.0.output.dense").bias += 0.1
    model.save_pretrained(other)
    assert weights.keys() == load_file(other / "model.safetensors").keys()
    assert made(model=str(other)) == 3, "another weight below"


# -- what is kept


def parts(root: Path, family: str, method: str) -> tuple[FrozenLayers, InferenceContext, Any]:
    model_folder = root / family
    if not model_folder.exists():
        tiny.model(model_folder, family)
    tokenizer = load_tokenizer(str(model_folder))
    model = load_model(str(model_folder), "classification", ["a", "b", "c"], "float32")
    align_padding_token(model, tokenizer)
    tuned = attach(model, method)
    encoded = CLASSIFICATION.encode(tokenizer, model, COLUMNS, TaskOptions(max_length=16), True)
    return FrozenLayers(tuned), InferenceContext(model, tokenizer, ["a", "b", "c"], batch_size=4), encoded


@pytest.mark.parametrize(
    ("family", "method", "reads", "states"),
    [
        ("bert", UPPER, "all", 1), ("bert", "three_vectors", "first", 3), ("bert", "head", "first", 1),
        ("gpt2", "three_vectors", "last", 3), ("llama", "head", "last", 1), ("llama", UPPER, "all", 1),
        ("gpt2", "ladder(width=4, heads=2)", "all", 3),
    ],
)  # fmt: skip
def test_as_little_as_is_read_is_kept(
    family: str, method: str, reads: str, states: int, root: Path, place: Path
) -> None:
    """Real tokens alone, of one layer boundary; of the one token, where a head reads one; memory-mapped."""
    frozen_layers, use, encoded = parts(root, family, method)
    cached = with_cached_activations(frozen_layers, use, {"train": encoded}, 1)["train"]
    assert isinstance(cached, CachedRows) and cached.states is not None
    (tensor,) = cached.states.values()
    tokens = len(encoded) if reads != "all" else sum(encoded.lengths)
    assert cached.reads == reads and tuple(tensor.shape) == (tokens, states, 32)
    assert cached.lengths == encoded.lengths and cached[3] == encoded[3]
    (file,) = place.glob("*.safetensors")
    mapped = Path("/proc/self/maps")
    assert not mapped.exists() or file.name in mapped.read_text()
    rows = cached.__getitems__([5, 2])
    batch = collate(use.tokenizer, use.model, rows)
    assert batch["input_ids"].shape[1] == (1 if reads != "all" else max(encoded.lengths[5], encoded.lengths[2]))
    use.model.eval()
    with torch.no_grad():
        short = use.model(**batch).logits
        whole = use.model(**collate(use.tokenizer, use.model, encoded.__getitems__([5, 2]))).logits
    torch.testing.assert_close(short, whole, rtol=1e-4, atol=1e-5)
    frozen_layers.remove()


def test_more_than_is_allowed_is_an_error_before_anything(root: Path, place: Path, tmp_path: Path) -> None:
    with pytest.raises(DeltuneError, match="trunk_cache=1, or trunk_cache=0 to run these layers in every pass"):
        train(spec(root, trunk_cache=1e-6), tmp_path / "run")
    assert not files(place) and not list((tmp_path / "run").glob("[a-z]*"))


def test_a_finished_run_outlives_a_refusal(root: Path, place: Path, tmp_path: Path) -> None:
    first = train(spec(root, trunk_dropout="on", epochs=1), tmp_path / "run")
    with pytest.raises(DeltuneError, match="trunk_cache=1"):
        train(spec(root, trunk_cache=1e-6), tmp_path / "run", resume=False)
    assert RunFolder(tmp_path / "run").metrics == first


def test_a_folder_that_cannot_be_written_costs_time_alone(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    frozen_layers, use, encoded = parts(root, "bert", "three_vectors")
    with caplog.at_level("INFO", logger="deltune"):
        assert with_cached_activations(frozen_layers, use, {"train": encoded}, 1) == {"train": encoded}
    frozen_layers.remove()
    assert "no activations can be written" in caplog.text


def test_a_torn_file_is_made_anew(root: Path, place: Path) -> None:
    frozen_layers, use, encoded = parts(root, "bert", UPPER)
    with_cached_activations(frozen_layers, use, {"train": encoded}, 1)
    (file,) = place.glob("*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:200])
    with_cached_activations(frozen_layers, use, {"train": encoded}, 1)
    assert file.read_bytes() == whole


def test_what_cannot_be_kept_is_told(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is kept where nobody wants it, nor where a pass from states would give something else."""
    monkeypatch.setenv(CACHE_VARIABLE, "off")
    frozen_layers, use, encoded = parts(root, "bert", UPPER)
    with caplog.at_level(logging.INFO, "deltune"):
        assert with_cached_activations(frozen_layers, use, {"train": encoded}, 1)["train"] is encoded
        monkeypatch.setenv(CACHE_VARIABLE, str(root / "cache"))
        assert with_cached_activations(frozen_layers, use, {"train": encoded}, 0)["train"] is encoded
        upper = use.model.get_submodule("bert.encoder.layer.1")
        lower = use.model.get_submodule("bert.encoder.layer.0.attention.self.value")
        handles = [  # a layer that minds what another computes, past the graph of layers
            use.model.register_forward_pre_hook(lambda *_: upper.__dict__.pop("seen", None) and None),
            lower.register_forward_hook(lambda *_: upper.__dict__.update(seen=2.0)),
            upper.register_forward_hook(lambda m, a, o: o * upper.__dict__.pop("seen", 1.0)),
        ]
        assert with_cached_activations(frozen_layers, use, {"train": encoded}, 1)["train"] is encoded
    for handle in handles:
        handle.remove()
    frozen_layers.remove()
    whys = ("DELTUNE_CACHE=off", "trunk_cache=0", "does not give what a whole pass gives")
    assert [why in text for why, text in zip(whys, caplog.messages, strict=True)] == [True] * 3


def test_a_run_without_frozen_layers_is_an_error_that_leaves_nothing(root: Path, tmp_path: Path) -> None:
    with pytest.raises(DeltuneError, match="trunk_dropout=off needs frozen layers"):
        train(spec(root, method="layernorm"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_option_in_a_file(root: Path, tmp_path: Path) -> None:
    """YAML says false for off."""
    values = {"model": "minilm", "data": str(root / "data"), "method": "head"}
    assert RunConfig.from_flat(**values, trunk_dropout=False).method.trunk_dropout == "off"
    assert RunConfig.from_flat(**values, trunk_dropout=True) == RunConfig.from_flat(**values)
    assert RunConfig.from_flat(**values, trunk_cache=1).canonical() == RunConfig.from_flat(**values).canonical()
    with pytest.raises(DeltuneError, match="trunk_dropout"):
        RunConfig.from_flat(**values, trunk_dropout="some")
