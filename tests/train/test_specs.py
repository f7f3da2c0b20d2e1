"""RunConfig: validated all at once, read from nested and flat values, named by what decides the result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from deltune.config import read_values
from deltune.errors import DeltuneError
from deltune.methods.registry import default_learning_rate
from deltune.train.config import DOTTED, ModelSection, RunConfig, flatten, read_config
from deltune.train.presets import merge_values
from deltune.train.tasks.registry import TASKS

LEAST = {"model": "owner/model", "data": "owner/data", "method": "layernorm"}


def spec(**changes: Any) -> RunConfig:
    return RunConfig.from_flat(**{**LEAST, **changes})


RATES = [
    ("full", 5e-5),
    ("layernorm", 1e-2),
    ("layernorm(terms='gain')", 1e-2),
    ("prefix(length=3)", 1e-2),
    ("prefix + layernorm", 1e-2),
    ("prompt(length=5)", 3e-2),
    ("head", 1e-3),
    ("bitfit", 1e-3),
    ("lora(rank=2)", 1e-3),
    ("adapter", 1e-3),
    ("mam", 1e-3),
    ("prefix + scaled_parallel_adapter", 1e-3),
    ("prompt + prefix", 1e-2),
    ("lora + full", 5e-5),
    ("Modification('ffn', Bottleneck(4)) + layernorm", 1e-3),
]


@pytest.mark.parametrize(("method", "rate"), RATES)
def test_the_rate_where_none_is_given(method: str, rate: float) -> None:
    """That of a long run; `deltune train` knows the number of steps (test_rates)."""
    assert default_learning_rate(method) == rate
    assert spec(method=method).optim.lr is None and spec(method=method, lr=0.5).optim.rate == 0.5


SAME = [
    ({"method": "prefix(length=16)+layernorm"}, {"method": "prefix + layernorm(terms='both')"}),
    ({}, {"seed": 0, "head": "train"}),
    ({}, {"lr": None}),
    ({"lr": 1e-2}, {"lr": "1e-2"}),
    ({}, {"lr": 3e-3, "lr_source": "default"}),
    ({}, {"report_to": ("tensorboard",)}),
    ({}, {"device_batch_size": 4}),
    ({"batch_tokens": 900}, {"batch_tokens": 900, "batch_size": 32}),
    ({"labels": "a, b"}, {"labels": ["a", "b"]}),
    ({"columns": "text=t, label=l"}, {"columns": {"text": "t", "label": "l"}}),
]
OTHER = [
    {"seed": 1},
    {"lr": 1e-3},
    {"lr": 1e-2},
    {"epochs": 4},
    {"method": "bitfit"},
    {"head": "freeze"},
    {"pooling": "mean"},
    {"max_train_rows": 10},
    {"batch_tokens": 1000},
]


@pytest.mark.parametrize(("one", "two"), SAME)
def test_specs_that_mean_the_same_have_one_name(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert spec(**one).name == spec(**two).name
    assert spec(**one).differences(spec(**two)) == []


@pytest.mark.parametrize("change", OTHER)
def test_specs_that_differ_have_different_names(change: dict[str, Any]) -> None:
    assert spec(**change).name != spec().name
    assert [line.split(":")[0].split(".")[1] for line in spec().differences(spec(**change))] == [
        {"method": "expression"}.get(name, name) for name in change
    ]


def test_a_name_does_not_change_with_the_version() -> None:
    """Stored results are found by it: if this fails, names of old results no longer fit."""
    assert spec(lr=1e-2, pooling="model").name == "9ba9ebe97fb8cb92"
    assert (
        spec(method="prefix(length=4) + layernorm", epochs=5, lr=0.01, seed=7, pooling="model").name
        == "2f7cf4ffe3b521bb"
    )
    with_protocol = RunConfig.from_flat(
        model="owner/model", task="sick", data_root="no/such/folder", method="mam", protocol="ln_nlu",
        report_to="wandb", trunk_dropout=False, head="freeze",
    )  # fmt: skip
    assert with_protocol.name == "55036335fdb14f2d"
    series = spec(
        task="generation", method="prefix(length=4) + layernorm", columns="source=a, targets=b", lr="1e-3",
        template="{source} is", max_length=64, beams=3, metric="rouge2", metrics="rouge1, rouge2",
        metric_options={"bertscore": {"model": "m"}}, seeds="3, 4", aggregate="median", precision="bf16",
        search={"method": ["lora", "full"], "target_length": [32, 64]}, adam_betas="0.9,0.98", validate_every=50,
        steps=200, pooling="model",
    )  # fmt: skip
    assert series.name == "d2b61b516d6f6247"


@pytest.mark.parametrize("values", [{}, {"epochs": 7, "patience": 2, "warmup": 0.06, "labels": ["no", "yes"]}])
def test_yaml_gives_the_same_spec_back(values: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(spec(**values).yaml())
    assert read_config(path).name == spec(**values).name
    written = yaml.safe_load(path.read_text())
    assert [f"{section}.{field}" for section in written for field in written[section]] == list(DOTTED), "all defaults"


NESTED = {"model": {"name": "owner/model"}, "data": {"source": "owner/data"}, "method": {"expression": "layernorm"}}


@pytest.mark.parametrize(
    ("nested", "flat"),
    [
        (NESTED, {}),
        ({**NESTED, "optim": {"lr": 0.5, "steps": 3}, "runtime": {"seed": 2}}, {"lr": 0.5, "steps": 3, "seed": 2}),
        ({**LEAST, "optim.lr": 0.5, "beams": 2, "generation": {"words": None}}, {"lr": 0.5, "beams": 2}),
        ({**NESTED, "optim": None}, {}),
        ({**NESTED, "runtime": {"search": {"optim.lr": ["1e-3"]}}}, {"search": {"lr": [1e-3]}}),
        ({**NESTED, "model": ModelSection(name="owner/model")}, {}),
    ],
)
def test_nested_dotted_and_flat_values_are_one(nested: dict[str, Any], flat: dict[str, Any]) -> None:
    assert RunConfig(**nested) == spec(**flat)


def test_a_flat_file_of_an_old_run_is_read(tmp_path: Path) -> None:
    config = spec(epochs=7, labels=["no", "yes"], lr=1e-3)
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(config.flat(mode="json")))
    assert read_config(tmp_path / "spec.yaml") == config


def test_another_value_takes_the_place_of_those_that_exclude_it() -> None:
    assert spec(steps=5).replace(epochs=2).optim.steps is None
    assert spec(lr=1e-2).replace(method="full").optim.lr is None, "it was that of the method"
    assert spec(lr=0.5).replace(method="full").optim.lr == 0.5
    searched = spec(lr=0.5, lr_source="default")
    assert searched.replace(epochs=9).optim.lr is None and searched.replace(seed=9).optim == searched.optim
    assert searched.replace(lr=0.1).optim.lr_source is None
    with pytest.raises(DeltuneError, match=r"optim\.epochs"):
        spec().replace(epochs=0)


def test_folders_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "minilm").mkdir()
    assert spec(data="here").data.source == str(tmp_path / "here")
    assert spec(model="minilm").model.name == "minilm", "always the packaged model"
    assert spec(data="owner/data").data.source == "owner/data"


def test_all_problems_come_at_once() -> None:
    values = {"model": "m", "method": "prefx + lora(rnk=3)", "epochs": 0, "bach_size": 3, "head": "thaw", "lr": -1}
    with pytest.raises(DeltuneError) as caught:
        RunConfig.model_validate(values)
    message = str(caught.value)
    assert "6 problems" in message
    for part in ("data is missing", "'prefix'", "'rank'", "epochs", "'batch_size'", "'train' or 'freeze'", "lr"):
        assert part in message, part


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": 0}, {"lr": float("nan")}, {"lr": "fast"}, {"epochs": 1.5}, {"max_length": 1}, {"seed": -1},
        {"seed": 2**32}, {"patience": 0}, {"warmup": -0.1}, {"schedule": "square"}, {"precision": "fp8"},
        {"metric": "blue"}, {"report_to": "paper"}, {"model": ""}, {"method": 3}, {"clip": float("inf")},
    ],
)  # fmt: skip
def test_every_field_is_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(DeltuneError, match=next(iter(wrong))):
        spec(**wrong)


DOUBLES = (
    ({"optim": {"lr": 1e-3}, "lr": 5e-4}, "optim.lr is given twice, also as lr"),
    ({"lr": 5e-4, "optim": {"lr": 1e-3}}, "optim.lr is given twice, also as lr"),
    ({"optim.lr": 5e-4, "optim": {"lr": 1e-3}}, "optim.lr is given twice, also as lr"),
    ({"search": {"optim.lr": [1e-3], "lr": [5e-4]}}, "runtime.search: optim.lr is given twice, also as lr"),
    ({"search": {"lr": [1e-3], "optim.lr": [5e-4]}}, "runtime.search: optim.lr is given twice, also as lr"),
)


@pytest.mark.parametrize(("values", "message"), DOUBLES)
def test_a_field_that_is_given_twice(values: dict[str, Any], message: str) -> None:
    with pytest.raises(DeltuneError) as raised:
        RunConfig.model_validate({**LEAST, **values, "epochs": 0})
    assert message in str(raised.value) and "optim.epochs" in str(raised.value), "all problems at once"


@pytest.mark.parametrize(
    ("values", "message"),
    [({1: 2}, "1 is no name of an option but int"), (5, "is a mapping .*, not 5"), (None, "not None"), ([], "not")],
)
def test_values_that_are_no_config(values: Any, message: str) -> None:
    with pytest.raises(DeltuneError, match=message):
        RunConfig.model_validate(values)
    assert RunConfig.model_validate(spec()) == spec()


def test_rows_at_a_time() -> None:
    """All processes' rows, so many times, are a step's."""
    assert spec().optim.rows_per_device() == 32 and spec().optim.rows_per_device(4) == 8
    assert spec(device_batch_size=4).optim.rows_per_device() == spec(device_batch_size=4).optim.rows_per_device(4) == 4
    assert spec(batch_tokens=100).optim.rows_per_device(3) == 10, "of an evaluation"
    with pytest.raises(
        DeltuneError, match=r"batch_size=32 is no multiple of 3 processes: give a batch_size of 30 or 33$"
    ):
        spec().optim.rows_per_device(3)
    with pytest.raises(DeltuneError, match=r"2 processes of 5 rows at a time: .* 30 or 40; or .* of 1, 2, 4, 8, 16$"):
        spec(device_batch_size=5).optim.rows_per_device(2)


@pytest.mark.parametrize("rows", [{"batch_size": 8}, {"device_batch_size": 8}])
def test_rows_or_tokens(rows: dict[str, Any]) -> None:
    with pytest.raises(DeltuneError, match=f"batch_tokens: give it or {next(iter(rows))}, not both"):
        spec(batch_tokens=100, **rows)


def test_a_spec_is_frozen() -> None:
    with pytest.raises(Exception, match="frozen"):
        spec().optim = spec().optim  # type: ignore[misc]
    assert hash(spec(labels=("a", "b"))) == hash(spec(labels=("a", "b")))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a: [", "broken YAML"),
        ("- a", "no config"),
        ("", "no config"),
        ("1: a", "no"),
        (
            "lr: 1\nseed: 2\noptim: {epochs: 1, epochs: 2}\nlr: 3\n",
            "broken YAML: .*'epochs' .* lines 3 and 3; .*'lr' .* 1 and 4",
        ),
    ],
)
def test_files_that_are_no_spec(text: str, match: str, tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    with pytest.raises(DeltuneError, match=match):
        read_values(path)
    with pytest.raises(DeltuneError, match="cannot be read"):
        read_values(tmp_path / "none.yaml")


def test_yaml_runs_no_code(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("model: !!python/object/apply:os.system [true]")
    with pytest.raises(DeltuneError, match="broken YAML"):
        read_values(path)


def test_a_task_asks_for_the_options_of_its_official_script() -> None:
    """E2E counts BLEU without case; what is given wins, and another task has the defaults."""
    spec = RunConfig.from_flat(model="minilm", task="e2e_nlg", method="layernorm")
    assert spec.evaluation.metric_options == {"bleu": {"lowercase": True}}
    assert RunConfig.from_flat(**spec.canonical()) == spec
    cased = {"bleu": {"lowercase": False}, "ter": {"no_punct": True}}
    assert spec.replace(metric_options=cased).evaluation.metric_options == cased
    assert RunConfig.from_flat(model="minilm", task="dart", method="layernorm").evaluation.metric_options == {}
    assert not spec.metric_options and spec.replace(metric_options=cased).metric_options == cased


def test_options_of_metrics_are_merged_metric_by_metric() -> None:
    """What is not given stays as the task's official script has it, and does not follow to another task."""
    chosen = {"bleu": {"smooth": "exp"}, "ter": {"no_punct": True}}
    options = {"bleu": {"smooth": "exp", "lowercase": True}, "ter": {"no_punct": True}}
    spec = RunConfig.from_flat(model="minilm", task="e2e_nlg", method="layernorm", metric_options=chosen)
    assert spec.evaluation.metric_options == options and spec.metric_options == chosen
    assert spec.replace(metric_options={"ter": {"no_punct": False}}).evaluation.metric_options == {
        "bleu": options["bleu"], "ter": {"no_punct": False}
    }  # fmt: skip
    assert spec.replace(task="dart").evaluation.metric_options == chosen
    assert spec.replace(task="dart").replace(task="e2e_nlg") == spec == RunConfig.from_canonical(spec.canonical())
    layers = merge_values(flatten(yaml.safe_load(spec.yaml())), {"task": "dart", "metric_options": {"bleu": {}}})
    assert RunConfig.from_flat(**layers).evaluation.metric_options == chosen
    plain = RunConfig.from_flat(model="minilm", task="e2e_nlg", method="layernorm", pooling="model")
    plain_dart = RunConfig.from_flat(model="minilm", task="dart", method="layernorm", pooling="model")
    assert plain.name == "5b89bf8c04038389", "stored results are found by this name"
    assert plain.replace(task="dart").name == plain_dart.name
    with pytest.raises(DeltuneError, match="metric_options"):
        RunConfig.from_flat(**merge_values(spec.flat(), {"task": "dart", "metric_options": 3}))
    assert TASKS["e2e_nlg"].metrics == ("bleu", "nist", "meteor", "rougeL_coco", "cider")


def test_what_changes_a_result_is_part_of_a_name() -> None:
    """Products of another library round otherwise, and training amplifies it; the batch on a device does not count."""
    spec = RunConfig.from_flat(model="minilm", task="sick", method="layernorm")
    assert spec.replace(linear_backend="onednn").name != spec.name == spec.replace(linear_backend="torch").name
    assert spec.replace(device_batch_size=8).name == spec.name


def test_a_versioned_task_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A study's work holds the canonical values: they make the spec again, and another version another name."""
    spec = RunConfig.from_flat(model="minilm", task="sick", method="layernorm")
    monkeypatch.setitem(TASKS, "sick", replace(TASKS["sick"], version=2))
    again = RunConfig.from_flat(model="minilm", task="sick", method="layernorm")
    assert again.canonical()["task_version"] == 2
    assert RunConfig.from_flat(**again.canonical()) == again == spec
