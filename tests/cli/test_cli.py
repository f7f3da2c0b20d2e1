"""The whole command: facts on standard output, everything else on standard error, 2 for a mistake of the user."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from typer.main import get_command

import deltune as library
import tiny
from deltune.cli import app as cli
from deltune.cli.train import train_app
from deltune.methods import registry
from deltune.train import run_folder
from deltune.train.config import PLACES, SECTIONS, RunConfig
from deltune.train.inference import load_run
from deltune.train.run_folder import RunFolder


class Told(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Told]


@pytest.fixture
def deltune(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs a command line in this process."""

    def run(*arguments: object) -> Told:
        monkeypatch.setattr(sys, "argv", ["deltune", *map(str, arguments)])
        capsys.readouterr()
        try:
            cli.main()
            code: Any = 0
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return Told(int(code or 0), captured.out, captured.err)

    return run


def options(root: Path, **changes: object) -> list[object]:
    """The least options of a training on the tiny parts."""
    values = {"model": root / "model", "data": root / "data", "method": "lora(rank=2)", "epochs": 1, "max-length": 16}
    return [part for name, value in {**values, **changes}.items() for part in (f"--{name}", value)]


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


# -- facts


def test_inspect(deltune: Command, root: Path) -> None:
    assert "layers 0 to 1, each" in deltune("inspect", root / "model").out
    facts = json.loads(deltune("inspect", root / "model" / "config.json", "--json").out)
    assert facts["family"] == "bert" and len(facts["layers"]) == 2


def test_inspect_a_quantised_model(deltune: Command, root: Path) -> None:
    pytest.importorskip("bitsandbytes")
    assert "linears quantised by bitsandbytes nf4" in deltune("inspect", root / "model", "--quantize", "nf4").out
    assert "quantised" not in deltune("inspect", root / "model").out
    facts = json.loads(deltune("inspect", root / "model", "--quantize", "nf4", "--json").out)
    forms = {t["name"]: t["quantized"] for t in facts["tensors"]}
    assert forms["encoder.layer.0.attention.self.query.weight"] == "bitsandbytes nf4"
    assert not forms["embeddings.word_embeddings.weight"]
    wrong = deltune("inspect", root / "model", "--quantize", "nf5")
    assert wrong.code == 2 and "unknown quantize 'nf5'" in wrong.err and not wrong.out


def test_a_setting_that_is_nested_too_deeply(deltune: Command) -> None:
    """The values of --set are read within the same bounds as a file."""
    run = deltune("train", "--set", f"data.labels={'[' * 3000}{']' * 3000}")
    assert run.code == 2 and "data.labels is nested too deeply" in run.err and not run.out


def test_methods(deltune: Command) -> None:
    output = deltune("methods").out
    assert all(name in output for name in ("layernorm", "prefix", "lora", "mam"))
    page = deltune("methods", "prefix").out
    assert "prefix(length=16" in page and "UV eq. 5" in page and "0.01" in page and "example: deltune count" in page
    assert json.loads(deltune("methods", "lora", "--json").out)["rate"] == 1e-3
    assert set(json.loads(deltune("methods", "--json").out)) > {"full", "head"}
    wrong = deltune("methods", "lroa")
    assert wrong.code == 2 and "Did you mean 'lora'" in wrong.err and not wrong.out


@pytest.mark.slow  # test_readme counts each of them too
def test_every_example_can_be_counted(deltune: Command, root: Path) -> None:
    for name, fact in json.loads(deltune("methods", "--json").out).items():
        result = deltune("count", root / "model", fact["example"])
        assert result.code == 0 and name in fact["example"], result.err


TERMS = {
    "Bottleneck": "sigmoid",
    "LowRank": "Kaiming uniform",
    "Scale": "one scalar for each place",
    "Modification": "ffn_inner      the FFN's inner activation",
    "Selection": "norm.gain",
}


@pytest.mark.parametrize("term", TERMS)
def test_terms_of_the_algebra_have_pages(deltune: Command, term: str) -> None:
    assert term in deltune("methods").out
    page = deltune("methods", term)
    assert page.code == 0 and page.out.startswith(f"{term}(") and TERMS[term] in page.out
    assert json.loads(deltune("methods", term, "--json").out)["name"] == term


BASES = {
    "Form": "def initialize(self, tensors, at)",
    "Composition": "How Δh joins h",
    "Widths": "in_width: The width of u",
    "TensorSpec": "seed: The seed from which `draw`",
    "WeightForm": "def weight(self, tensors, at)",
    "FactorForm": "def factors(self, tensors)",
    "MatrixForm": "def matrix(self, tensors)",
    "Routed": "def weights(self, tensors, u, at)",
    "Schedule": "penalty: Compute what is added to the loss",
    "Place": "weight: The weight W (d_out, d_in)",
}


@pytest.mark.parametrize("base", BASES)
def test_what_parts_of_the_users_own_derive_from_has_pages(deltune: Command, base: str) -> None:
    assert "deltune methods Form" in deltune("methods").out
    page = deltune("methods", base)
    assert page.code == 0 and BASES[base] in page.out
    assert json.loads(deltune("methods", base, "--json").out)["name"] == base


def test_every_class_that_the_guide_names_has_a_page(deltune: Command) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "library" / "define.md").read_text(encoding="utf-8")
    named = [
        name
        for name in library.__all__
        if name[0].isupper() and re.search(rf"(?:deltune\.|`|, |import ){name}\b", guide)
    ]
    parts = [name for name in named if getattr(library, name).__module__.startswith("deltune.methods.")]
    assert len(parts) > 12 and [name for name in parts if deltune("methods", name).code] == []


def test_every_method_is_listed_in_one_group(deltune: Command) -> None:
    names = [name for group in registry.GROUPS.values() for name in group]
    assert sorted(names) == sorted(registry.REGISTRY)
    out = deltune("methods").out
    assert all(group.partition(":")[0].upper() in out for group in registry.GROUPS)
    assert json.loads(deltune("methods", "hra", "--json").out)["group"] == "orthogonal"


WAVE = """
from __future__ import annotations
from dataclasses import dataclass
import deltune, torch

@deltune.register
@dataclass(frozen=True, repr=False)
class Wave(deltune.Form):
    size: float = 1.0

    def tensors(self, widths):
        return {"w": deltune.TensorSpec((widths.in_width,))}

    def initialize(self, tensors, at):
        tensors["w"].zero_()

    def __call__(self, tensors, u, at):
        return self.size * torch.sin(tensors["w"] * u)
"""
WAVES = "Modification(ffn, Wave(2), 'sequential')"


@pytest.fixture
def wave(tmp_path: Path) -> Iterator[Path]:
    """A file that registers a form, which is unknown again after the test."""
    file = tmp_path / "wave.py"  # the standard library has such a module too
    file.write_text(WAVE)
    yield file
    forget(file)


def forget(file: Path) -> None:
    """Make this process as one that did not import a file."""
    registry.VOCABULARY.pop("Wave", None)
    registry._parse_cached.cache_clear()
    sys.modules.pop(str(file), None)


def test_a_form_of_the_users_own_on_the_command_line(
    deltune: Command, root: Path, tmp_path: Path, wave: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = options(root, method=WAVES, output=tmp_path / "run")
    refused = deltune("train", *trained)
    assert refused.code == 2 and "--import FILE" in refused.err and "deltune.register(Wave)" in refused.err
    assert deltune("train", *trained, "--import", wave).code == 0
    commands: list[list[object]] = [
        ["count", root / "model", WAVES],
        ["fit", root / "model", f"{WAVES} + lora(rank=?)", "--budget", 3000],
        ["methods", "Wave"],
        ["evaluate", tmp_path / "run"],
        ["predict", tmp_path / "run", "--text", "a plum"],
        ["report", tmp_path / "run"],
        ["train", *trained],
    ]
    for command in commands:
        assert deltune(*command, "--import", wave).code == 0, command
        forget(wave)
        without = deltune(*command)
        assert without.code == 0 or "--import" in without.err, without.err
        assert without.code == 2 or command[0] == "report"
    for command in ("merge", "export"):  # neither can express it, which only who knows it can say
        result = deltune(command, tmp_path / "run", "--output", tmp_path / "to", "--import", wave)
        assert result.code == 2 and "Wave" in result.err and "--import" not in result.err
    forget(wave)
    monkeypatch.syspath_prepend(tmp_path)
    wave.rename(tmp_path / "my_waves.py")
    assert deltune("count", root / "model", WAVES, "--import", "my_waves").code == 0
    assert registry.VOCABULARY.pop("Wave").__module__ == sys.modules.pop("my_waves").__name__


IMPORTS = {
    "no file": (None, "wave.py", "there is no such file"),
    "no module": (None, "no_such_forms", "there is no such module on Python's path.*--import no_such_forms.py"),
    "an error": ("import deltune\n1 / 0", "wave.py", r"ZeroDivisionError: division by zero \(.*wave.py, line 2\)"),
    "a syntax error": ("def", "wave.py", "SyntaxError"),
    "another module is missing": ("import no_such", "wave.py", "ModuleNotFoundError: No module named 'no_such'"),
    "a form without methods": (WAVE.partition("    def tensors")[0], "wave.py", "the form Wave has no tensors"),
}


@pytest.mark.parametrize("case", IMPORTS)
def test_what_cannot_be_imported(case: str, deltune: Command, root: Path, tmp_path: Path) -> None:
    text, name, match = IMPORTS[case]
    if text is not None:
        (tmp_path / name).write_text(text)
    result = deltune("count", root / "model", "lora", "--import", tmp_path / name if name.endswith(".py") else name)
    assert result.code == 2 and not result.out and "--import" in result.err and re.search(match, result.err)


def test_words_of_others(deltune: Command) -> None:
    assert "Here it is called layernorm." in deltune("methods", "ln_tuning").err
    wrong = deltune("train", "--model", "m", "--per-device-train-batch-size", "8")
    assert wrong.code == 2 and "Here it is --device-batch-size." in wrong.err
    assert deltune("--version").out.startswith("deltune 0.")


def test_count(deltune: Command, root: Path) -> None:
    counts = json.loads(deltune("count", root / "model", "lora(rank=2)", "--json").out)
    assert counts["method"] == 2 * 2 * (32 * 2 + 2 * 32) and counts["denominator"] == "model"
    assert json.loads(deltune("count", root / "model", "head", "--denominator", 100, "--json").out)["percent"] == 0
    assert "512 scalars" in deltune("count", root / "model", "lora(rank=2)").out
    options = ("--step-memory", "--batch-size", 2, "--max-length", 8)
    memory = json.loads(deltune("count", root / "model", "lora(rank=2)", *options, "--json").out)["memory"]
    assert memory["weights"] > memory["step"] > sum(memory["activations"].values()) > 0
    shown = deltune("count", root / "model", "lora(rank=2)", *options).out
    assert "at the peak of a step" in shown and "activations of bert.encoder.layer.0" in shown
    assert "half" in deltune("count", root / "model", "lora", *options, "--activation-checkpointing", "of").err
    vocabulary = json.loads((root / "model" / "config.json").read_text())["vocab_size"]
    counts = json.loads(deltune("count", root / "model", "lora(rank=2, at='lm_head')", "--json").out)
    assert counts["method"] == 2 * (32 + vocabulary)


def test_count_of_a_quantised_model(deltune: Command, root: Path) -> None:
    pytest.importorskip("bitsandbytes")
    plain = json.loads(deltune("count", root / "model", "lora(rank=2)", "--json").out)
    counts = json.loads(deltune("count", root / "model", "lora(rank=2)", "--quantize", "nf4", "--json").out)
    assert counts["quantization"] == "bitsandbytes nf4" and 0 < counts["base_bytes"] < 4 * counts["denominator_size"]
    assert {name: counts[name] for name in plain} == plain
    wrong = deltune("count", root / "model", "lora(at='lm_head')", "--quantize", "nf4")
    assert wrong.code == 2 and "load the quantised model, and count the method on it" in wrong.err
    wrong = deltune("count", root / "model", "lora(rank=2)", "--quantize", "nf5")
    assert wrong.code == 2 and "unknown quantize 'nf5'" in wrong.err


# -- training


def test_train_evaluate_predict_merge(deltune: Command, root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = deltune("train", *options(root, output=run), "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out) == RunFolder(run).metrics.as_json()
    for line in (
        "task: classification of text into 3 labels (beast, fruit, tool), assumed from the columns; --task ",
        "columns: text=text,label=label; --columns ",
        "training: 48 rows, 1 epoch of 2 steps; rate 0.01, the default of the method for 2 steps (--epochs, "
        "--batch-size, --lr)",
        "step 2/2, epoch 1, loss ",
    ):
        assert f"\n{line}" in f"\n{result.err}"
    assert re.search(r"validation accuracy 0\.\d+ best, .* elapsed, \d+:\d\d left", result.err)
    assert re.search(r"\nnote: .*--lr ", result.err), "one epoch at the default teaches this model nothing"
    report = deltune("report", run)
    assert report.code == 0 and "95 % interval" in report.out and "note: " in report.out
    assert f"the page is {run / 'report.html'}" in report.err
    facts = json.loads(deltune("report", run, run, "--output", tmp_path / "both.html", "--json").out)
    assert facts[0]["scores"] == RunFolder(run).metrics.scores and (tmp_path / "both.html").is_file()
    reads: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("read_record", "read_jsonl"):  # the path is the last argument of both
            read = getattr(run_folder, name)
            patch.setattr(run_folder, name, lambda *args, read=read: reads.append(args[-1].name) or read(*args))
        again = deltune("train", *options(root, output=run))
    assert again.code == 0 and "is finished" in again.err and "accuracy" in again.out
    assert [reads.count(name) for name in ("metrics.json", "test.jsonl", "log.jsonl")] == [1, 1, 1]

    scores = json.loads(deltune("evaluate", run, "--json").out)
    assert scores == RunFolder(run).metrics.scores
    assert "test" in deltune("evaluate", run, "--split", "test", "--output", tmp_path / "out").out
    assert names(tmp_path / "out") == {"test.jsonl"}
    more = ("--data", root / "data", "--split", "test", "--json")
    assert (
        json.loads(deltune("evaluate", run, *more, "--columns", "text=text,label=label").out)["test"] == scores["test"]
    )
    assert "unknown column 'txt'" in deltune("evaluate", run, *more, "--columns", "text=txt,label=label").err
    untrained = deltune("evaluate", root / "model", *more)
    assert untrained.code == 2 and "has no trained head for classification" in untrained.err
    assert "deltune evaluate MODEL" in deltune("train", *options(root, output=tmp_path / "no", epochs=0)).err

    predictions = json.loads(deltune("predict", run, "--text", "a plum", "--text", "[b]the[/b] saw", "--json").out)
    assert [row["input"] for row in predictions] == ["a plum", "[b]the[/b] saw"]
    assert set(predictions[0]) == {"id", "input", "prediction", "scores"}
    assert "[b]the[/b] saw" in deltune("predict", run, "--text", "[b]the[/b] saw").out

    result = deltune("merge", run, "--output", tmp_path / "plain")
    assert result.code == 0 and "model.safetensors" in names(tmp_path / "plain")
    again = json.loads(deltune("predict", tmp_path / "plain", "--text", "a plum", "--json").out)
    assert again[0]["scores"] == pytest.approx(predictions[0]["scores"], abs=1e-5)
    tiny.lines(tmp_path / "fruit.jsonl", [{"text": "a plum", "label": "fruit"}] * 2)
    scored = deltune("evaluate", tmp_path / "plain", "--data", tmp_path / "fruit.jsonl", "--json")
    assert scored.code == 0 and set(json.loads(scored.out)) == {"test"}
    assert "test: no row of beast, tool, whose F1 counts as 0 in f1_macro" in scored.err


def test_another_pooling_is_given_up_by_name(deltune: Command, tmp_path: Path) -> None:
    """`export` and `merge` with --pooling model write what PEFT and transformers read: the head behind the pooler."""
    peft, run = pytest.importorskip("peft"), tmp_path / "run"
    spec = tiny.spec(tmp_path, method="lora(rank=2)", pooling="mean", steps=2, lr=0.1, max_length=8)
    (tmp_path / "run.yaml").write_text(spec.yaml())
    assert deltune("train", tmp_path / "run.yaml", "--output", run).code == 0
    refused = deltune("export", run, "--output", tmp_path / "export")
    assert refused.code == 2 and "--pooling model" in refused.err and not (tmp_path / "export").exists()
    assert deltune("export", run, "--output", tmp_path / "export", "--pooling", "mean").code == 2
    for name in ("export", "merge"):
        written = deltune(name, run, "--output", tmp_path / name, "--pooling", "model")
        assert written.code == 0 and "trained on the mean of the hidden states" in written.err
    loaded = load_run(run)
    model = loaded.model.eval()
    batch = loaded.tokenizer(["the old hammer", "a plum is near the table"], padding=True, return_tensors="pt")
    exported = peft.AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "export", num_labels=3)
    with torch.no_grad():
        states = model.bert(**batch).last_hidden_state
        expected = model.classifier(model.bert.pooler(states))
        for other in (exported, AutoModelForSequenceClassification.from_pretrained(tmp_path / "merge")):
            torch.testing.assert_close(other.eval()(**batch).logits, expected)
        assert not torch.allclose(model(**batch).logits, expected, atol=1e-2)


def test_sums_and_differences_of_folders(deltune: Command, tmp_path: Path) -> None:
    """What is merged is extracted again, and added; deltas of another base are refused and nothing is written."""
    base = tiny.model(tmp_path / "base", "gpt2")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base)).save_pretrained(base)
    for number in (1, 2):
        torch.manual_seed(number)
        handle = library.attach(AutoModelForCausalLM.from_pretrained(base), "lora(rank=2)")
        for parameter in handle.trainable_parameters():
            torch.nn.init.normal_(parameter)
        handle.save(tmp_path / f"d{number}")
    handle.merge().save_pretrained(tmp_path / "tuned")
    extracted = deltune("extract", base, tmp_path / "tuned", "--output", tmp_path / "extracted", "--json")
    assert json.loads(extracted.out)["method"] == "lora(rank=2)", extracted.err
    command = (
        "combine",
        "0.5*a - b + 'c-1'",
        f"a={tmp_path / 'd1'}",
        f"b={tmp_path / 'd2'}",
        f"c-1={tmp_path / 'extracted'}",
    )
    result = deltune(*command, "--output", tmp_path / "sum", "--json")
    assert json.loads(result.out)["method"] == "lora(rank=6)", result.err
    model = AutoModelForCausalLM.from_pretrained(base)
    ids = torch.tensor([[5, 7, 9, 11]])
    for name in ("d1", "sum"):
        library.load(model, tmp_path / name, name=name)
    expected = library.tuned(model).combine("0.5*d1", name="halved").model(ids).logits
    assert torch.allclose(library.tuned(model).use("sum").model(ids).logits, expected, atol=1e-4)
    result = deltune(*command, "--output", tmp_path / "rank", "--rank", 1, "--model", base)
    assert result.code == 0 and "rank=1 approximates" in result.err and "lora(rank=1)" in result.out
    assert deltune(*command, "--output", tmp_path / "ties", "--how", "ties", "--density", 0.5).code == 0
    other = library.attach(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base)), "lora(rank=2)")
    other.save(tmp_path / "other")
    for arguments, says in (
        (("combine", "a + b", f"a={tmp_path / 'd1'}", f"b={tmp_path / 'other'}"), "base"),
        (("combine", "a + z", f"a={tmp_path / 'd1'}"), "unknown delta 'z'"),
        (("combine", "a", f"a={tmp_path / 'd1'}", "--model", tmp_path / "nowhere"), "nowhere"),
        (("combine", "a", tmp_path / "d1"), "NAME=DIR"),
        (("combine", "a", f"a={tmp_path / 'd1'}", "--how", "mean"), "dare, magnitude, ties"),
    ):
        result = deltune(*arguments, "--output", tmp_path / "no")
        assert result.code == 2 and says in result.err and not (tmp_path / "no").exists(), result.err


def test_running_text(deltune: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text files are tuned on, scored with the model as it is and with the delta, and gone on with; 64 positions do."""
    monkeypatch.setenv("DELTUNE_CACHE", str(tmp_path / "cache"))
    model = tiny.model(tmp_path / "model", "gpt2")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)
    text = "\n\n".join(row["text"] for row in tiny.sentences(30, 0))
    (tmp_path / "data").mkdir()
    for split in ("train", "validation"):
        (tmp_path / "data" / f"{split}.txt").write_text(text)
    run, source = tmp_path / "run", ("--model", model, "--data", tmp_path / "data")
    result = deltune("train", *source, "--method", "lora(rank=2)", "--steps", 1, "--lr", 1e-6, "--output", run)
    assert result.code == 0 and "max_length is 64 and not the default" in result.err, result.err
    scores = [json.loads(deltune(*command, "--json").out)["validation"] for command in (
        ("evaluate", run), ("evaluate", model, *source[2:]))
    ]  # fmt: skip
    assert scores[0]["perplexity"] == pytest.approx(scores[1]["perplexity"], rel=1e-3) and scores[0] != scores[1]
    for folder in (run, model):
        options = ("--prompt", "the old", "--max-tokens", 4)
        (answer,) = json.loads(deltune("generate", folder, *options, "--json").out)
        assert answer["prompt"] == "the old" and re.fullmatch(r"( \w+){4}", answer["text"])  # prompt + text is a text
        assert deltune("generate", folder, *options).out.strip() == answer["text"].strip()
        several = deltune("generate", folder, *options, "--prompt", "a new").out
        assert several.startswith(f"> the old\n{answer['text'].strip()}") and "\n> a new\n" in several
        long = [("--prompt", " ".join(["old"] * length)) for length in (62, 70)]
        refused = deltune("generate", folder, *options, *itertools.chain(*long))
        assert refused.code == 2 and "> the old" not in refused.out, "nothing is generated before all are checked"
        assert re.findall(r"prompt (\d) of 3: its", refused.err) == ["2", "3"]
        assert "give prompts of at most 60 tokens" in refused.err
    contents = json.loads(deltune("cache", "--json").out)["contents"]
    assert contents["tokenised rows"]["files"] >= 2
    assert deltune("cache", "--clear").code == 0 and not list((tmp_path / "cache").rglob("*.*"))


def test_a_spec_file_and_options_over_it(deltune: Command, root: Path, tmp_path: Path) -> None:
    values = {"model": str(root / "model"), "data": str(root / "data"), "method": "layernorm", "epochs": 1}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**values, "max_length": 16, "output": str(tmp_path / "run")}))
    assert deltune("train", path, "--seed", 4, "--quiet").code == 0
    assert (
        RunFolder(tmp_path / "run").config.runtime.seed == 4
        and RunFolder(tmp_path / "run").config.method.expression == "layernorm"
    )
    assert deltune("train", tmp_path / "run" / "spec.yaml", "--output", tmp_path / "again").code == 0
    assert RunFolder(tmp_path / "again").metrics.test == RunFolder(tmp_path / "run").metrics.test
    other = deltune("train", path)
    assert other.code == 2 and "seed: 4 there, 0 now" in other.err
    assert deltune("train", path, "--fresh").code == 0 and RunFolder(tmp_path / "run").config.runtime.seed == 0


def test_every_field_of_the_config_is_an_option(deltune: Command, root: Path, tmp_path: Path) -> None:
    """Hidden or not, and whatever is given arrives in the config, by an option as by --set."""
    command = get_command(train_app())
    assert {parameter.name for parameter in command.params} >= set(PLACES)
    values: dict[str, object] = {
        "adam-betas": "0.9,0.98", "adam-epsilon": "1e-6", "test-rows": "5",
        "relabel": "beast=alive,fruit=alive,tool=not",
    }  # fmt: skip
    settings = [f"{'.'.join(PLACES[name.replace('-', '_')])}={value}" for name, value in values.items()]
    both = [(values, []), ({}, [part for item in settings for part in ("--set", item)])]
    for i, (by_option, more) in enumerate(both):
        assert deltune("train", *options(root, output=tmp_path / f"{i}", **by_option), *more).code == 0
        config = RunFolder(tmp_path / f"{i}").config
        assert (config.optim.adam_betas, config.optim.adam_epsilon, config.data.test_rows) == ((0.9, 0.98), 1e-6, 5)
        assert len(RunFolder(tmp_path / f"{i}").environment["data"]["labels"]) == 2
    assert RunFolder(tmp_path / "0").config == RunFolder(tmp_path / "1").config
    assert deltune("train", *options(root, output=tmp_path / "bad"), "--adam-betas", "0.9").code == 2


def test_print_config(deltune: Command, tmp_path: Path) -> None:
    """A config, resolved; options without a value are comments. It reads back the same, and nothing is trained."""
    file = tmp_path / "run.yaml"
    file.write_text("model: m\ndata: {source: d, columns: [text, label]}\noptim: {lr: 0.5}\nmethod: lora\n")
    more = ["--lr", "null", "--set", "generation.template={source}", "--set", "evaluation.metric_options={bleu: {}}"]
    result = deltune("train", file, "--output", tmp_path / "run", "--print-config", *more)
    assert result.code == 0 and not result.err and names(tmp_path) == {"run.yaml"}
    values = yaml.safe_load(result.out)
    unset = {field: note for field, note in re.findall(r"^  # (\w+):  # (.+)$", result.out, re.MULTILINE)}
    for section, kind in SECTIONS.items():
        fields = values.get(section, {})
        assert set(kind.model_fields) == {*fields, *(unset.keys() & kind.model_fields)}
        assert not any(value in (None, [], {}) for value in fields.values())
    assert "lora" in values["method"]["expression"]
    assert "0.01 for 320 steps or fewer, down to 0.001 for 5,000" in unset["lr"], "a run knows its steps, and the rate"
    assert values["generation"]["template"] == "{source}" and values["data"]["columns"] == ["text", "label"]
    file.write_text(result.out)
    assert deltune("train", file, "--print-config").out == result.out


@pytest.mark.parametrize(
    "options",
    [("--protocol", "uv_glue", "--lr", "null"), ("--protocol", "uv_glue"), ("--steps", "7"),
     ("--search", "lr=1e-3"), ("--task", "tagging", "--labels", "a,b")],
    ids=" ".join,
)  # fmt: skip
def test_a_printed_config_means_the_same_run(options: tuple[str, ...], deltune: Command, tmp_path: Path) -> None:
    """Also where a null undoes a value of the protocol."""
    basis = ("--model", "m", "--data", "d", "--method", "prefix + layernorm")
    printed = deltune("train", *basis, *options, "--print-config").out
    values = {name.removeprefix("--"): value for name, value in zip(options[::2], options[1::2], strict=True)}
    search = {"search": {"lr": ["1e-3"]}} if "search" in values else {}
    flat = {name: None if value == "null" else value for name, value in values.items()} | search
    config = RunConfig.from_flat(model="m", data="d", method="prefix + layernorm", **flat)
    assert RunConfig.model_validate(yaml.safe_load(printed)) == config
    everything = re.sub(r"^(  )?# (\w+:)(  # .*)?$", r"\1\2", printed, flags=re.MULTILINE)
    assert set(yaml.safe_load(everything)) == set(SECTIONS), "a comment becomes an option without its #"


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (["optim.clip"], "give SECTION.FIELD=VALUE"),
        (["optim.clp=1"], "unknown option 'clp' in optim. Did you mean 'clip'"),
        (["optim=1"], "optim is a section"),
        (["lr=1", "optim.lr=2"], "optim.lr is given twice"),
        (["evaluation.metric_options={bleu"], "evaluation.metric_options is broken YAML"),
    ],
)
def test_wrong_settings(settings: list[str], match: str, deltune: Command, tmp_path: Path) -> None:
    more = [part for item in settings for part in ("--set", item)]
    result = deltune("train", "--model", "m", "--data", "d", "--method", "head", "--output", tmp_path / "run", *more)
    assert result.code == 2 and match in result.err and not names(tmp_path)


def test_the_help_of_train_fits_two_screens(deltune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The common options, by section; and no other."""
    monkeypatch.setenv("COLUMNS", "100")
    result = deltune("train", "--help")
    assert result.code == 0 and len(result.out.splitlines()) <= 100
    for part in ("--lr", "--set", "--print-config", *(f"─ {section} ─" for section in SECTIONS)):
        assert part in result.out, part
    assert "--adam-betas" not in result.out


def test_predict_from_files(deltune: Command, root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    deltune("train", *options(root, output=run, **{"max-train-rows": 8}))
    (tmp_path / "texts.txt").write_text("a plum\n\nthe saw\n")
    refused = deltune("predict", run, "--file", tmp_path / "texts.txt", "--output", tmp_path / "out.csv")
    assert refused.code == 2 and "give --output FILE.jsonl" in refused.err and not (tmp_path / "out.csv").exists()
    result = deltune("predict", run, "--file", tmp_path / "texts.txt", "--output", tmp_path / "new" / "out.jsonl")
    rows = tiny.objects(tmp_path / "new" / "out.jsonl")
    assert result.code == 0 and not result.out and [row["input"] for row in rows] == ["a plum", "the saw"]
    assert [row["id"] for row in rows] == ["1", "3"]
    table = deltune("predict", run, "--file", root / "data" / "test.jsonl", "--json")
    assert len(json.loads(table.out)) == 24
    (tmp_path / "x.csv").write_text("sentence\na\n")
    for file, match in [("x.csv", "unknown column 'text'"), ("none.txt", "unknown file 'none.txt'")]:
        wrong = deltune("predict", run, "--file", tmp_path / file)
        assert wrong.code == 2 and match in wrong.err
    for suffix, text in (
        ("csv", "id,text,label\nk1,a plum,fruit\nk2,,tool\n"),
        ("jsonl", '{"id": 7, "text": "a plum", "more": {"a": [1]}}\n{"id": 7, "text": " ", "more": null}\n'),
        ("tsv", "prediction\ttext\tkey\n7\ta plum\t3\n8\t\t4\n"),
    ):
        (tmp_path / f"keys.{suffix}").write_text(text)
    for suffix, kept, replaced in (
        ("csv", [{"id": "k1", "label": "fruit"}, {"id": "k2", "label": "tool"}], ""),
        ("jsonl", [{"id": "1", "more": {"a": [1]}}, {"id": "2", "more": None}], "id"),
        ("tsv", [{"id": "1", "key": "3"}, {"id": "2", "key": "4"}], "prediction"),
    ):
        with_keys = deltune("predict", run, "--file", tmp_path / f"keys.{suffix}", "--json")
        answers = ("input", "prediction", "scores")
        assert [{k: v for k, v in row.items() if k not in answers} for row in json.loads(with_keys.out)] == kept
        assert f"1 row of the input without text: {kept[1]['id']}" in with_keys.err
        assert "written with each prediction" in with_keys.err
        assert with_keys.err.partition("left out, as the result has its own: ")[2].partition("\n")[0] == replaced
    (tmp_path / "empty.txt").write_text("\n")
    assert "empty" in deltune("predict", run, "--file", tmp_path / "empty.txt").err
    for wrong_options in ([], ["--text", "a", "--file", "b"], ["--text", "a", "--pair", "b", "--pair", "c"]):
        assert deltune("predict", run, *wrong_options).code == 2


# -- mistakes: exit code 2, one clear message, nothing written


def broken(root: Path, folder: Path, **files: str) -> Path:
    """The tiny data with some files replaced."""
    tiny.data(folder)
    for stem, text in files.items():
        (folder / f"{stem}.jsonl").write_text(text)
    return folder


ROWS = '{"text": "a plum", "label": "fruit"}\n{"text": "a saw", "label": "tool"}\n'
BAD_DATA = {
    "empty file": ({"train": ""}, {}, r"train.jsonl is empty"),
    "empty test": ({"test": "\n"}, {}, r"test.jsonl is empty"),
    "missing column": ({"test": '{"sentence": "a", "label": "fruit"}\n'}, {}, "unknown column 'text'"),
    "asked column": ({}, {"columns": "txt,label"}, "unknown column 'txt'"),
    "unknown label": ({}, {"labels": "fruit,tool,best"}, "unknown label 'beast'"),
    "label only in test": ({"test": '{"text": "a", "label": "stone"}\n'}, {}, "'stone' is in test.jsonl line 1"),
    "broken JSON": ({"validation": ROWS + '{"text"'}, {}, "validation.jsonl line 3"),
    "no text": ({"train": ROWS + '{"text": 7, "label": "tool"}\n'}, {}, "line 3"),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data(case: str, deltune: Command, root: Path, tmp_path: Path) -> None:
    files, more, match = BAD_DATA[case]
    data = broken(root, tmp_path / "data", **files)
    result = deltune("train", *options(root, data=data, output=tmp_path / "run", **more))
    assert result.code == 2 and match in result.err and not result.out
    assert names(tmp_path) == {"data"}, "nothing half-written"


def test_what_the_harness_does_not_take_is_named(deltune: Command, root: Path) -> None:
    result = deltune("evaluate", root / "model", "--harness", "x", "--columns", "a,b", "--max-length", 8, "--rescore")
    assert result.code == 2 and "leave --columns, --max-length, --rescore out" in " ".join(result.err.split())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"data": "/none/such"}, "unknown data set '/none/such'"),
        ({"model": "/none/such"}, "unknown model '/none/such'"),
        ({"method": "lora(rnk=2)"}, "Did you mean 'rank'"),
        ({"method": "prefix(length=0)"}, "length"),
        ({"lr": -1}, "lr"),
        ({"lr": "1e38", "clip": 0}, "diverged"),
        ({"max-length": 65}, "64 tokens"),
        ({"method": "prompt(length=50)", "max-length": 30}, "14 tokens"),
        ({"head": "freeze", "method": "head"}, "trains nothing"),
        ({"metric": "f1"}, "f1_macro"),
        ({"epochs": "many"}, "optim.epochs: input should be a valid integer"),
        ({"report-to": "paper"}, "report_to"),
    ],
    ids=str,
)
def test_bad_options(change: dict[str, object], match: str, deltune: Command, root: Path, tmp_path: Path) -> None:
    result = deltune("train", *options(root, output=tmp_path / "run", **change))
    assert result.code == 2 and match in result.err and not result.out
    assert names(tmp_path) == set(), "nothing half-written"


def test_a_family_that_is_unknown(deltune: Command, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "brt"}')
    for command in (["inspect"], ["count"], ["train", "--model"]):
        more = ["head"] if command == ["count"] else []
        if command[0] == "train":
            tiny.data(tmp_path / "data")
            more = ["--data", str(tmp_path / "data"), "--method", "head", "--output", str(tmp_path / "run")]
        result = deltune(*command, tmp_path, *more)
        assert result.code == 2 and "unknown model_type 'brt'" in result.err and "'bert'" in result.err, result.err
    assert not (tmp_path / "run").exists()


def test_everything_wrong_with_a_spec_at_once(deltune: Command, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: m\nmethod: lroa\nepoch: 3\nbatch_size: 0\n")
    result = deltune("train", path, "--output", tmp_path / "run")
    assert result.code == 2 and "4 problems" in result.err
    for part in ("data is missing", "'lora'", "Did you mean 'epochs'", "batch_size"):
        assert part in result.err, part
    assert "--output" in deltune("train", "--model", "m", "--data", "d", "--method", "head").err
    options_of = {"--model": "m", "--method": "head", "--data": "d"}
    for name in ("--model", "--method"):
        others = [part for option, value in options_of.items() if option != name for part in (option, value)]
        assert f"({name}) is missing" in deltune("train", *others, "--output", tmp_path / "run").err


def test_what_is_not_a_run(deltune: Command, root: Path, tmp_path: Path) -> None:
    for command in (["evaluate"], ["report"], ["merge", "--output", tmp_path / "x"]):
        result = deltune(*command, root / "model")
        assert result.code == 2 and f"(deltune evaluate {root / 'model'} --data FILE)" in result.err
    result = deltune("predict", "--text", "a", root / "model")
    assert result.code == 2 and "a model without a trained head over labels" in result.err
    result = deltune("train", *options(root, output=root / "data"))
    assert result.code == 2 and "is not a RUN folder" in result.err
    for command in (["evaluate"], ["predict", "--text", "a"], ["merge", "--output", tmp_path / "x"]):
        result = deltune(*command, "owner/name")  # it may be meant as a hub id
        assert result.code == 2 and "no such folder" in result.err
        assert "hf download owner/name" in result.err and "deltune evaluate owner/name --data FILE" in result.err
    result = deltune("evaluate", "owner/name", "--data", root / "data")
    assert result.code == 2 and "no such file or folder here, and the hub" in result.err
    for name, file in (("tickets", "spec.yaml"), ("orders", "delta.json"), ("mails", "adapter_config.json")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / file).write_text("")
    for command, says in (
        (["evaluate"], "there is no such folder. Did you mean"),
        (["predict", "--text", "a"], "there is no such folder. Did you mean"),
        (["merge", "--output", tmp_path / "x"], "there is no such folder. Did you mean"),
        (["generate", "--prompt", "a"], "There is no such file or folder here"),
        (["evaluate", "--data", root / "data"], "There is no such file or folder here"),
    ):
        result = deltune(*command, tmp_path / "runs" / "tickts")
        assert (
            result.code == 2 and says in result.err and f"Did you mean '{tmp_path / 'runs' / 'tickets'}'?" in result.err
        )
        assert "orders" in result.err and "hf download" not in result.err


def test_export_and_import(deltune: Command, root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    deltune("train", *options(root, output=run, **{"max-train-rows": 8}))
    result = deltune("export", run, "--output", tmp_path / "peft")
    assert result.code == 0 and "written for peft" in result.out, result.err
    assert names(tmp_path / "peft") == {"adapter_config.json", "adapter_model.safetensors"}
    assert f"its base model as {root / 'model'}, a folder of this machine" in result.err
    result = deltune("export", run, "--output", tmp_path / "hubs", "--format", "adapterhub")
    options_written = json.loads((tmp_path / "hubs" / "adapter_config.json").read_text())
    assert result.code == 0 and "base_model_name_or_path" not in options_written, result.err
    assert "a folder of this machine" not in result.err
    for folder in (run, run / "delta", tmp_path / "peft"):
        config = yaml.safe_load(deltune("serve", folder, "--print-config").out)
        assert (config["model"]["name"], config["deltas"]["folder"]) == (str(root / "model"), str(folder))
    result = deltune("import", tmp_path / "peft", "--model", root / "model", "--output", tmp_path / "ours", "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["method"] == "lora(rank=2)" and names(tmp_path / "ours") == names(run / "delta")
    before, after = (load_file(folder / "delta.safetensors") for folder in (run / "delta", tmp_path / "ours"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)

    folder = Path(__file__).parents[1] / "interop" / "adapterhub" / "bert"
    result = deltune("import", folder / "seq_bn", "--model", folder / "base", "--output", tmp_path / "hub")
    assert result.code == 0 and result.out.startswith("adapter(style='pfeiffer', rank=2, bias=True)"), result.err
    facts = json.loads((tmp_path / "hub" / "delta.json").read_text())
    assert facts["head"]["tensors"] == ["classifier.weight", "classifier.bias"]
    assert len(facts["labels"]["id2label"]) == 3

    result = deltune("export", run, "--output", tmp_path / "other", "--format", "gguf")
    assert result.code == 2 and "unknown format" in result.err
    result = deltune("export", run, "--output", tmp_path / "other", "--format", "vllm")
    assert result.code == 2 and "in a causal language model" in result.err and "Traceback" not in result.err
    result = deltune("import", run, "--model", root / "model", "--output", tmp_path / "other")
    assert result.code == 2 and "is a delta already" in result.err
    result = deltune(
        "import", tmp_path / "peft", "--model", root / "model", "--output", tmp_path / "other", "--kind", "?"
    )
    assert result.code == 2 and "unknown kind" in result.err
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("arguments", [[], ["fly"], ["train", "--lrr", "3"], ["count", "minilm"]])
def test_usage(arguments: list[str], deltune: Command) -> None:
    assert deltune(*arguments).code in (0, 2)


# -- as a process


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


def test_help_loads_no_torch() -> None:
    completed = python("-X", "importtime", "-m", "deltune", "--help")
    loaded = {line.rpartition("|")[2].strip() for line in completed.stderr.splitlines()}
    assert completed.returncode == 0 and "quickstart" in completed.stdout
    assert "typer" in loaded and not loaded & {"torch", "transformers", "pydantic"}


@pytest.mark.parametrize("command", ["train --help", "methods lora"])
def test_what_needs_no_model_loads_no_model_class(command: str) -> None:
    """transformers imports torchao with its model classes, which prints lines where the two do not fit."""
    completed = python("-X", "importtime", "-m", "deltune", *command.split())
    loaded = {line.rpartition("|")[2].strip() for line in completed.stderr.splitlines()}
    assert completed.returncode == 0 and "typer" in loaded
    assert not loaded & {"transformers.modeling_utils", "torchao", "peft", "bitsandbytes"}


def test_a_method_is_made_and_explained_without_torch() -> None:
    code = "import deltune, sys; from deltune.cli import formatting as f; m = deltune.parse('lora + prefix'); "
    code += "pages = [*map(f.method_page, f.method_facts().values())]; print(m, 'torch' in sys.modules)"
    assert python("-c", code).stdout == "lora + prefix False\n"


def test_a_closed_pipe_is_no_traceback() -> None:
    shell = f"{sys.executable} -m deltune methods | true"
    completed = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=False)
    assert "Traceback" not in completed.stderr and "Exception" not in completed.stderr


PATHS = {"no user": "~nosuch/x", "a long name": "x" * 300}
TRAIN = ("train", "--model", "m", "--data", "d", "--method", "lora(rank=2)", "--output", "o")


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "PATH"),
        ("count", "PATH", "lora"),
        ("fit", "PATH", "lora(rank=?)", "--budget", "1%"),
        ("train", "PATH", "--output", "o"),
        (*TRAIN, "--model", "PATH"),
        (*TRAIN, "--data", "PATH"),
        (*TRAIN, "--output", "PATH"),
        ("train", "--model", "m", "--task", "sick", "--data-root", "PATH", "--method", "lora", "--output", "o"),
        ("evaluate", "PATH"),
        ("evaluate", "PATH", "--rescore"),
        ("predict", "PATH", "--text", "a"),
        ("predict", "r", "--file", "PATH"),
        ("predict", "r", "--file", "PATH.jsonl"),
        ("merge", "PATH", "--output", "t"),
        ("merge", "r", "--output", "PATH"),
        ("export", "PATH", "--output", "t"),
        ("export", "r", "--output", "PATH"),
        ("import", "PATH", "--model", "m", "--output", "o"),
        ("import", "d", "--model", "m", "--output", "PATH"),
        ("study", "run", "PATH.yaml"),
        ("study", "run", "ln/nlu", "--dry-run", "--store", "PATH"),
        ("study", "run", "ln/nlu", "--data-root", "PATH"),
        ("study", "status", "ln/nlu", "--model-root", "PATH"),
        ("study", "report", "ln/nlu", "--store", "PATH"),
        ("study", "report", "ln/nlu", "--html", "PATH"),
        ("study", "report", "ln/nlu", "--to", "PATH"),
    ],
    ids=lambda arguments: "-".join(arguments),
)
@pytest.mark.sample(20)
def test_paths_that_the_file_system_refuses(
    arguments: tuple[str, ...], path: str, deltune: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = deltune(*(argument.replace("PATH", path) for argument in arguments))
    assert result.code == 2 and result.err.startswith("deltune: ") and len(result.err) < 3000
    assert not list(tmp_path.iterdir()), "nothing was made"
