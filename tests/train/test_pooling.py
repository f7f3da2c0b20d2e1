"""Which pooling a run trains, what it says of it, and a merged run as sentence-transformers and deltune read it."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import tiny
from deltune import DeltuneError
from deltune.models import load_model
from deltune.train.inference import evaluate, evaluate_untuned, export_run, load_run, merge_run, predict
from deltune.train.run import train

TEXTS = ["the old hammer", "a plum is near the very small table and my otter was here", "fig"]


def modules_json(model: Path, options: dict[str, Any]) -> None:
    tiny.lines(model / "modules.json", [])
    listed = [{"type": "sentence_transformers.models.Transformer", "path": ""},
              {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]  # fmt: skip
    (model / "modules.json").write_text(json.dumps(listed))
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text(json.dumps(options))


def without_pooler(model: Path) -> None:
    kept = {name: t for name, t in load_file(model / "model.safetensors").items() if "pooler" not in name}
    save_file(kept, model / "model.safetensors", metadata={"format": "pt"})


OLD = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
CASES: dict[str, tuple[list[Any], dict[str, Any], str, str]] = {
    "given": ([without_pooler], {"pooling": "last"}, "last", "last of the last hidden states, as asked for"),
    "the class's own, given": ([(modules_json, OLD)], {"pooling": "model"}, "model", "the pooler.*, as asked for"),
    "a file": ([(modules_json, OLD)], {}, "mean", "mean of the last hidden states, as the model's modules.json says"),
    "a newer file": ([(modules_json, {"pooling_mode": "cls"}), without_pooler], {}, "first", "first .*modules.json"),
    "another pooling": ([(modules_json, {"pooling_mode": "max"})], {}, "model", "weights have; modules.json says max"),
    "no pooler": ([without_pooler], {}, "mean", "mean of the last hidden states, as its weights have no pooler"),
    "a pooler": ([], {}, "model", "the pooler of the model's class, which its weights have"),
    "a head that reads none": (["roberta"], {}, "model", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_which_pooling(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    changes, options, expected, line = CASES[case]
    model = tiny.model(tmp_path / "model", *(change for change in changes if isinstance(change, str)))
    for change in changes:
        if isinstance(change, tuple):
            change[0](model, change[1])
        elif callable(change):
            change(model)
    caplog.set_level(logging.INFO)
    train(tiny.spec(tmp_path, method="head", steps=1, **options), tmp_path / "run", progress=False)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("the head reads")]
    assert len(lines) == (line != "") and all(one.endswith("(--pooling)") for one in lines)
    assert json.loads((tmp_path / "run" / "delta" / "delta.json").read_text()).get("pooling", "model") == expected
    if line:
        assert re.search(line, lines[0])


def test_its_name() -> None:
    """Stored results keep their names: those of runs with the class's own pooler, which all had."""
    least = {"model": "m", "data": "d", "method": "lora", "lr": 0.1}
    stored = tiny.RunConfig.from_flat(**least, pooling="model")
    assert "pooling" not in stored.canonical() and tiny.RunConfig.from_canonical(stored.canonical()) == stored
    for pooling in (None, "mean"):
        config = tiny.RunConfig.from_flat(**least, pooling=pooling)
        assert config.canonical()["pooling"] == (pooling or "default") and config.name != stored.name
        assert tiny.RunConfig.from_canonical(config.canonical()) == config


def test_a_merged_run(tmp_path: Path) -> None:
    """sentence-transformers, `evaluate` and a further `train` read the folder with equal outputs."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    run, merged = tmp_path / "run", tmp_path / "merged"
    train(tiny.spec(tmp_path, method="lora(rank=2)", pooling="mean", epochs=1, max_length=8), run, progress=False)
    merge_run(run, merged)
    probabilities = [list(answer["scores"].values()) for answer in predict(run, TEXTS)]
    logits = torch.tensor(sentence_transformers.SentenceTransformer(str(merged), device="cpu").encode(TEXTS))
    assert torch.allclose(logits.softmax(-1), torch.tensor(probabilities), atol=1e-6)
    data = str(tmp_path / "data")
    untuned = tiny.RunConfig.from_flat(model=str(merged), data=data, method="head", max_length=8)
    scores, again = evaluate(run), evaluate_untuned(untuned)
    assert all(again[split] == pytest.approx(scores[split], abs=1e-5) for split in ("validation", "test"))
    further = tiny.spec(tmp_path, model=str(merged), method="bitfit", steps=1, lr=1e-12, max_length=8)
    assert train(further, tmp_path / "further", progress=False).test["loss"] == pytest.approx(
        scores["test"]["loss"], abs=1e-5
    )
    assert load_run(tmp_path / "further").model.deltune.delta().pooling == "mean"
    head = load_model(str(merged), "classification", load_run(run).labels).classifier.weight
    assert not torch.equal(head, load_file(merged / "2_Dense" / "model.safetensors")["linear.weight"]), "a fresh one"
    with pytest.raises(DeltuneError, match=r"--pooling model"):
        export_run(run, tmp_path / "peft")


ANSWERS: dict[str, dict[str, Any]] = {
    "classification": {"label": "yes"}, "multilabel": {"labels": ["yes", "maybe"]}, "regression": {"score": 2.5},
}  # fmt: skip


@pytest.mark.parametrize("kind", ANSWERS)
def test_transformers_sees_no_head_in_a_merged_run(kind: str, tmp_path: Path) -> None:
    """The labels stand beside the linear of sentence-transformers; deltune predicts by them as the run does."""
    (name, answer), *_ = ANSWERS[kind].items()
    other = {"label": "no", "labels": [], "score": 0.5}[name]
    rows = [{"text": text, name: answer if i % 2 else other} for i, text in enumerate(TEXTS * 8)]
    for split in ("train", "validation"):
        tiny.lines(tmp_path / "data" / f"{split}.jsonl", rows)
    run, merged = tmp_path / "run", tmp_path / "merged"
    train(tiny.spec(tmp_path, method="lora(rank=2)", pooling="mean", steps=2, task=kind), run, progress=False)
    merge_run(run, merged)
    config = AutoConfig.from_pretrained(merged)
    assert not {"id2label", "label2id", "problem_type"} & {*json.loads((merged / "config.json").read_text())}
    assert config.num_labels == 2 and config.architectures == ["BertModel"]
    key = "label" if kind == "classification" else "prediction"
    for before, after in zip(predict(run, TEXTS), predict(merged, TEXTS), strict=True):
        assert after[key] == (pytest.approx(before[key], abs=1e-5) if kind == "regression" else before[key])
        assert after["scores"] == (before["scores"] and pytest.approx(before["scores"], abs=1e-5))
    assert load_run(merged).kind.name == kind
    head = merged / "2_Dense"
    for labels in ({"labels": "yes"}, {"labels": ["no", "yes"], "problem_type": "nonsense"}):
        (head / "labels.json").write_text(json.dumps(labels))
        with pytest.raises(DeltuneError, match=r"labels\.json is not as deltune merge writes it"):
            load_run(merged)
    (head / "labels.json").write_text(json.dumps({"labels": [f"label {i}" for i in range(7)]}))
    with pytest.raises(DeltuneError, match="is no head over the labels"):
        load_run(merged)
    (head / "model.safetensors").unlink()
    with pytest.raises(DeltuneError, match=r"beside the model\.safetensors"):
        load_run(merged)
