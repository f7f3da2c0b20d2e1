"""Deltas without a run: every command takes what Tuned.save(), combine and PEFT write."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import deltune
import tiny
from deltune.errors import DeltuneError
from deltune.models import load_config, load_model
from deltune.train.inference import (
    evaluate,
    export_run,
    generate,
    import_adapter,
    load_run,
    merge_run,
    model_and_method,
    predict_rows,
)
from deltune.train.prediction_inputs import inputs_from_file
from deltune.train.run import train
from deltune.train.run_folder import open_run

INPUTS = [{"id": "1", "input": "the fig is old"}, {"id": "2", "input": "a saw"}]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny classifier, and a delta on it as Tuned.save(), combine and PEFT write it."""
    root = tmp_path_factory.mktemp("folders")
    tiny.model(root / "bert", "bert")
    model = load_model(str(root / "bert"), "classification", list(tiny.WORDS))
    torch.manual_seed(0)
    tuned = deltune.attach(model, "lora(rank=2)")
    for parameter in tuned.trainable_parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    tuned.save(root / "saved")
    deltune.export(model, root / "peft")
    tuned.combine("0.5*default", "halved").save(root / "combined")
    tiny.lines(root / "data.jsonl", tiny.sentences(6, 0))
    return root


@pytest.mark.parametrize("name", ["saved", "combined", "peft"])
def test_every_use_takes_it(name: str, places: Path, tmp_path: Path) -> None:
    folder, base = places / name, str(places / "bert")
    model = load_model(base, "classification", list(tiny.WORDS))
    deltune.load(model, folder)
    loaded = load_run(folder, base)
    batch = loaded.tokenizer([row["input"] for row in INPUTS], padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = model.eval()(**batch).logits.softmax(-1)
    answers = predict_rows(folder, INPUTS, base)
    torch.testing.assert_close(torch.tensor([list(row["scores"].values()) for row in answers]), expected)
    assert open_run(folder, base).labels == tuple(tiny.WORDS if name != "peft" else [f"LABEL_{i}" for i in range(3)])
    if name != "peft":
        scores = evaluate(folder, data=str(places / "data.jsonl"), base=base)
        assert list(scores) == ["test"]
    merged = load_model(str(merge_run(folder, tmp_path / "merged", base=base)), "classification")
    with torch.no_grad():
        torch.testing.assert_close(merged.eval()(**batch).logits.softmax(-1), expected)
    again = load_model(base, "classification", list(tiny.WORDS))
    deltune.load(again, export_run(folder, tmp_path / "exported", base=base))
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(**batch).logits.softmax(-1), expected)


def test_labels_without_names_are_named(places: Path, tmp_path: Path) -> None:
    """Wherever a delta of PEFT is used; and a file's columns that are read or not are said."""
    base, labels = str(places / "bert"), list(tiny.WORDS)
    assert {*predict_rows(places / "peft", INPUTS, base, labels)[0]["scores"]} == {*labels}
    expected = evaluate(places / "saved", data=str(places / "data.jsonl"), base=base)
    assert evaluate(places / "peft", data=str(places / "data.jsonl"), base=base, labels=labels) == expected
    merged = merge_run(places / "peft", tmp_path / "merged", base=base, labels=labels)
    assert [*load_config(str(merged)).id2label.values()] == labels
    import_adapter(places / "peft", tmp_path / "imported", labels=labels)  # on the base that it names
    assert open_run(tmp_path / "imported", base).labels == tuple(labels)
    assert deltune.load(base, tmp_path / "imported").model.config.num_labels == 3
    with pytest.raises(DeltuneError, match="LABEL_2: --labels names those that have no names, each once, and here are"):
        predict_rows(places / "peft", INPUTS, base, labels[:2])
    with pytest.raises(DeltuneError, match=r"has the labels .*fruit"):
        predict_rows(places / "saved", INPUTS, base, labels)


def test_the_columns_of_a_file_that_are_read_are_said(places: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert len(inputs_from_file(places / "data.jsonl", places / "saved", str(places / "bert"))) == 6
    assert "data.jsonl: columns that are read: text (text); written with each prediction: label" in caplog.text


def test_what_a_delta_alone_does_not_say_is_asked(places: Path) -> None:
    with pytest.raises(DeltuneError, match="has no data of its own: give --data"):
        evaluate(places / "saved")
    with pytest.raises(DeltuneError, match="answers classification by a head and generates no text"):
        generate(places / "saved", ["a"])
    with pytest.raises(DeltuneError, match=r"spec\.yaml is missing"):
        open_run(places)


def test_a_run_begins_with_the_weights_of_another(places: Path, tmp_path: Path) -> None:
    """At a rate that changes nothing it ends with their values, its head too where the labels are the same."""
    start = tiny.spec(tmp_path, model=str(places / "bert"), method="lora(rank=2) + layernorm", epochs=2, lr=1e-2)
    further = start.replace(init_from=str(tmp_path / "one"), lr=1e-12, epochs=1)
    renamed = further.replace(relabel={name: f"new {name}" for name in tiny.WORDS})
    for name, spec in (("one", start), ("two", further), ("three", renamed)):
        train(spec, tmp_path / name, report=False)
    one, two, three = (load_file(tmp_path / name / "delta" / "delta.safetensors") for name in ("one", "two", "three"))
    torch.testing.assert_close(two, one)
    assert {name for name in one if not torch.allclose(three[name], one[name])} == {
        "base.classifier.bias", "base.classifier.weight",
    }  # fmt: skip
    with pytest.raises(DeltuneError, match=r"is lora\(rank=2\) \+ layernorm, and this run is bitfit"):
        train(further.replace(method="bitfit"), tmp_path / "four")


def test_what_a_run_trained_is_not_held_out_later(places: Path, tmp_path: Path) -> None:
    """A single file is split by the seed and by its rows, so neither may change under weights that are used again."""
    rows = tiny.sentences(60, 0)
    file = tiny.lines(tmp_path / "rows.jsonl", rows)
    start = tiny.spec(tmp_path, model=str(places / "bert"), method="bitfit", steps=1, data=str(file))
    train(start, tmp_path / "one", report=False)
    assert list(evaluate(tmp_path / "one")) == ["validation", "test"]
    further = start.replace(init_from=str(tmp_path / "one"))
    train(further.replace(relabel={name: f"new {name}" for name in tiny.WORDS}), tmp_path / "two", report=False)
    for i, spec in enumerate((further.replace(seed=1), further.replace(split_seed=1))):
        with pytest.raises(DeltuneError, match=r"that would be held out were trained by .*: give --split-seed 0, or"):
            train(spec, tmp_path / f"three {i}", report=False)
    train(further.replace(seed=1, split_seed=0), tmp_path / "as it says", report=False)
    tiny.lines(file, [*rows, *tiny.sentences(20, 1)])
    for use in (lambda: evaluate(tmp_path / "one"), lambda: train(further, tmp_path / "four", report=False)):
        with pytest.raises(DeltuneError, match=r"train \(48 rows then, 64 now\).*Bring back what it was, or give"):
            use()


def test_a_fresh_head_for_numbers_begins_with_their_mean(places: Path, tmp_path: Path) -> None:
    numbers = tiny.lines(
        tmp_path / "numbers.jsonl",
        [{"text": row["text"], "score": 20 + i % 3 / 2} for i, row in enumerate(tiny.sentences(30, 0))],
    )
    start = tiny.spec(tmp_path, model=str(places / "bert"), method="bitfit", steps=1, lr=1e-12)
    train(start, tmp_path / "labels", report=False)
    scores = start.replace(data=str(numbers), init_from=str(tmp_path / "labels"))
    train(scores, tmp_path / "numbers", report=False)
    assert load_file(tmp_path / "numbers" / "delta" / "delta.safetensors")["base.classifier.bias"].item() > 20


def test_a_run_begins_with_the_ranks_that_were_left(places: Path, tmp_path: Path) -> None:
    start = tiny.spec(tmp_path, model=str(places / "bert"), method="adalora(rank=1, initial_rank=4)", steps=12)
    train(start, tmp_path / "one", report=False)
    further = start.replace(init_from=str(tmp_path / "one"), lr=1e-12, steps=1)
    with pytest.raises(DeltuneError, match="whose ranks were cut in training: give the former"):
        train(further, tmp_path / "two", report=False)
    model, method = model_and_method(tmp_path / "one")
    train(further.replace(model=model, method=method), tmp_path / "two", report=False)
    one, two = (load_file(tmp_path / name / "delta" / "delta.safetensors") for name in ("one", "two"))
    torch.testing.assert_close(two, one)


def test_a_run_begins_with_a_delta_that_names_no_base(places: Path, tmp_path: Path) -> None:
    """The run's own model is its base."""
    shutil.copytree(places / "peft", tmp_path / "peft")
    file = tmp_path / "peft" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": ""}))
    _, method = model_and_method(tmp_path / "peft", str(places / "bert"))
    values = {"model": str(places / "bert"), "method": method, "init_from": str(tmp_path / "peft"), "steps": 1}
    assert train(tiny.spec(tmp_path, **values), tmp_path / "run", report=False).scores


def test_a_run_begins_with_an_adapter_of_peft(places: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    base = str(places / "bert")
    spec = tiny.spec(tmp_path, model=base, method=model_and_method(places / "peft", base)[1], steps=1, lr=1e-12)
    train(spec.replace(init_from=str(places / "peft")), tmp_path / "run", report=False)
    assert "the pooler of the model's class, as the delta of --init-from has it (--pooling)" in caplog.text
    assert f"the head goes on, with labels without names: LABEL_0 is {sorted(tiny.WORDS)[0]}, LABEL_1" in caplog.text
    batch = load_run(tmp_path / "run").tokenizer([row["input"] for row in INPUTS], padding=True, return_tensors="pt")
    with torch.no_grad():
        one, two = (
            load_run(place, base if place == places / "peft" else None).model.bert(**batch).last_hidden_state
            for place in (places / "peft", tmp_path / "run")
        )
    torch.testing.assert_close(one, two)
