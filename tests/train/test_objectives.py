"""Preferences and rewards by TRL: what is trained and said, the reference, going on, and PEFT's losses."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

import deltune
import tiny
from deltune.cli import main
from deltune.errors import DeltuneError
from deltune.models import align_padding_token
from deltune.train.chat import Chat
from deltune.train.config import RunConfig
from deltune.train.inference import evaluate, load_run
from deltune.train.overview import overview, token_facts
from deltune.train.run import train
from deltune.train.run_folder import RunFolder
from deltune.train.tasks.base import TaskOptions
from deltune.train.tasks.preferences import encode_pairs, encode_rated, split_answer
from test_templates import END, byte_tokenizer

pytest.importorskip("trl", reason="no TRL: pip install -e '.[align]' -c constraints.txt")

from deltune.train import objectives

WORDS = ["green", "tree", "stone", "river", "cloud", "apple", "bread", "chair", "light", "plant"]
PAIRS = [
    {
        "prompt": [{"role": "user", "content": f"Say {word}."}],
        "chosen": [{"role": "assistant", "content": word.upper()}],
        "rejected": [{"role": "assistant", "content": word[::-1] + "!"}],
    }
    for word in WORDS
]
RATED = [{"prompt": f"Say {w}: ", "completion": w, "label": i % 2 == 0} for i, w in enumerate(WORDS)]
QUESTIONS = [{"messages": [*row["prompt"], *row["chosen"]]} for row in PAIRS]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, and preferences and questions as files."""
    root = tmp_path_factory.mktemp("objectives")
    files(root, {"train": slice(6), "validation": slice(6, 8), "test": slice(8, 10)})
    return root


def files(root: Path, splits: dict[str, slice]) -> None:
    tokenizer = byte_tokenizer(eos_token="<|end|>")
    sizes = {**tiny.FAMILIES["llama"], "max_position_embeddings": 512, "pad_token_id": None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = AutoConfig.for_model("llama", **sizes, vocab_size=len(tokenizer), eos_token_id=END)
        model = AutoModelForCausalLM.from_config(config)
    align_padding_token(model, tokenizer)
    model.save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    for name, rows in {"pairs": PAIRS, "rated": RATED, "questions": QUESTIONS}.items():
        for split, part in splits.items():
            tiny.lines(root / name / f"{split}.jsonl", rows[part])


def config(root: Path, objective: str, **changes: Any) -> RunConfig:
    data = {"kto": "rated", "grpo": "questions"}.get(objective, "pairs")
    values = {"model": str(root / "model"), "data": str(root / data), "method": "lora(rank=2)", "template": "roles"}
    more = {"generations": 2, "target_length": 6} if objective == "grpo" else {}
    values |= {"objective": objective, "lr": 1e-2, "batch_size": 2, "epochs": 2, **more}
    return RunConfig.from_flat(**{**values, **changes})


def letters(completions: list[list[dict[str, str]]], reference: list[str]) -> list[float]:
    """How many of the letters that are right an answer has."""
    pairs = zip(completions, reference, strict=True)
    return [float(sum(letter in right for letter in answer[0]["content"])) for answer, right in pairs]


def measured_once(run: Path) -> bool:
    """Whether the log has the memory of one step; what was freed later made it two."""
    return (run / "log.jsonl").read_text().count('"event": "memory"') == 1


def logged(run: Path) -> list[dict[str, Any]]:
    return [line for line in tiny.objects(run / "log.jsonl") if "loss" in line]


def test_dpo(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first loss is log 2; the best delta is scored, saved with template and ends, and answers in a chat."""
    caplog.set_level("INFO", "deltune")
    run = tmp_path / "run"
    metrics = train(config(root, "dpo"), run, progress=False)
    assert logged(run)[0]["loss"] == pytest.approx(math.log(2), abs=1e-6) and measured_once(run)
    assert metrics.scores["test"].keys() == {"loss", "accuracy", "margin"} and metrics.best.metric == "loss"
    assert metrics.best.value == metrics.validation["loss"] < math.log(2)
    assert "dpo; beta 0.1; the reference is the model without its delta; by TRL" in caplog.text
    trained = json.loads((run / "delta" / "delta.json").read_text())["trained"]
    assert "Assistant" in trained["chat_template"] and trained["end_tokens"] == [END]
    assert isinstance(Chat.open(str(run), max_tokens=3).answer("Say tree."), str)
    assert "objective" in (run / "report.html").read_text() and not (run / "predictions").exists()
    with pytest.raises(DeltuneError, match="was scored by its objective when it ended"):
        evaluate(run)


@pytest.mark.parametrize(
    "objective, measures, note",
    [
        ("kto", {"loss", "margin", "kl"}, "kto; beta 0.1; the reference is the model without its delta"),
        ("orpo", {"loss", "accuracy", "margin", "nll"}, "where it is experimental"),
        ("reward", {"loss", "accuracy", "margin"}, "reward; by TRL"),
        ("grpo", {"loss", "reward", "length"}, "grpo; by TRL"),
    ],
)
@pytest.mark.slow
def test_objectives(
    objective: str, measures: set[str], note: str, root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "deltune")
    run = tmp_path / "run"
    reward = letters if objective == "grpo" else None
    metrics = train(config(root, objective), run, progress=False, reward=reward)
    assert metrics.scores["validation"].keys() == metrics.scores["test"].keys() == measures and note in caplog.text
    assert metrics.best.value == metrics.validation["reward" if objective == "grpo" else "loss"] and measured_once(run)
    if objective == "kto":
        assert logged(run)[0]["loss"] == pytest.approx(0.5)
    if objective == "reward":
        model = AutoModelForSequenceClassification.from_pretrained(root / "model", num_labels=1)
        assert deltune.load(model, run).count().trained == metrics.count["trained"]
        with pytest.raises(DeltuneError, match="is a reward model, which rates answers in Python"):
            load_run(run)
    else:
        assert isinstance(Chat.open(str(run), max_tokens=3).answer("Say tree."), str)


@pytest.mark.slow
def test_a_run_that_never_rewards_says_so(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its last lines and in its report."""
    (tmp_path / "rewards.py").write_text("def nothing(completions):\n    return [0.0] * len(completions)\n")
    (tmp_path / "spec.yaml").write_text(config(root, "grpo").yaml())
    words = ["deltune", "train", str(tmp_path / "spec.yaml"), "--output", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", [*words, "--reward", f"{tmp_path / 'rewards.py'}:nothing"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    note = "no answer was rewarded above another: in all 6 steps"
    assert note in capsys.readouterr().out and note in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize("objective", ["dpo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_an_interrupted_run_goes_on(
    objective: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the losses of an uninterrupted run, from the checkpoint of its delta."""
    spec, reward = config(root, objective), letters if objective == "grpo" else None
    whole = train(spec, tmp_path / "whole", progress=False, reward=reward)
    replace, states = os.replace, []

    def strike(source: Any, target: Any) -> None:
        states.append(Path(target).name == "3" and Path(target).parent.name == "checkpoint")
        replace(source, target)
        if states[-1]:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", strike)
        train(spec, tmp_path / "run", progress=False, reward=reward)
    assert RunFolder(tmp_path / "run").checkpoint.exists()
    metrics = train(spec, tmp_path / "run", progress=False, reward=reward)
    assert metrics.scores == whole.scores
    losses = [[line["loss"] for line in logged(tmp_path / name)] for name in ("whole", "run")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-7)


# -- the reference


def trl_rows(objective: str) -> Any:
    import datasets

    prompts = [f"Say {word}: " for word in WORDS[:8]]
    if objective == "grpo":
        return datasets.Dataset.from_dict({"prompt": prompts})
    if objective == "kto":
        answers = [word[:: 1 if i % 2 else -1] for i, word in enumerate(WORDS[:8])]
        return datasets.Dataset.from_dict({"prompt": prompts, "completion": answers, "label": [True, False] * 4})
    words = WORDS[:8]
    return datasets.Dataset.from_dict({"prompt": prompts, "chosen": words, "rejected": [w[::-1] for w in words]})


def count_letters(completions: Sequence[str], **_: Any) -> list[float]:
    return [float(len(set(text))) for text in completions]


def trl_losses(objective: str, trainer_class: Any, model: Any, out: Path) -> list[tuple[float, float]]:
    """The losses and gradients of three steps."""
    options: dict[str, Any] = {"beta": 0.1} if objective != "reward" else {}
    options |= {"precompute_ref_log_probs": True} if objective in ("dpo", "kto") else {}
    options |= {"num_generations": 2, "max_completion_length": 4} if objective == "grpo" else {}
    arguments = objectives.arguments_class(objective)(
        str(out), max_steps=3, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1, report_to="none",
        disable_tqdm=True, seed=0, bf16=False, use_cpu=True, save_strategy="no", gradient_checkpointing=None, **options,
    )  # fmt: skip
    tokenizer = byte_tokenizer(eos_token="<|end|>")
    more = {"reward_funcs": count_letters} if objective == "grpo" else {}
    trainer = trainer_class(
        model=model, args=arguments, train_dataset=trl_rows(objective), processing_class=tokenizer, **more
    )
    trainer.train()
    return [(line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("tuned_before", [False, True], ids=["fresh", "tuned before"])
@pytest.mark.parametrize(
    "objective", ["dpo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("kto", "orpo", "grpo", "reward"))]
)
def test_losses_are_those_of_peft(objective: str, tuned_before: bool, root: Path, tmp_path: Path) -> None:
    """From the same LoRA: PEFT's reference is a copy of the adapter, which fresh computes what the base does."""
    kind = AutoModelForSequenceClassification if objective == "reward" else AutoModelForCausalLM
    options = {"num_labels": 1} if objective == "reward" else {}

    def base() -> Any:
        torch.manual_seed(3)
        return kind.from_pretrained(root / "model", **options)

    model = base()
    torch.manual_seed(0)
    handle = deltune.attach(model, "lora(rank=2)")  # PEFT too trains the head of a reward
    if tuned_before:
        with torch.no_grad():
            for parameter in handle.trainable_parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape))
    deltune.export(model, tmp_path / "peft")
    names, weights = handle.names, sum(p.numel() for p in model.parameters())
    trainer = objectives.trainer_class(objective, "start" if tuned_before else "base")
    ours = trl_losses(objective, trainer, model, tmp_path / "ours")
    theirs = PeftModel.from_pretrained(base(), str(tmp_path / "peft"), is_trainable=True)
    expected = trl_losses(objective, objectives._from_trl(objective, "Trainer"), theirs, tmp_path / "theirs")
    assert ours == [pytest.approx(pair, abs=2e-5, rel=1e-3) for pair in expected]
    if objective == "dpo":
        assert ours[0][0] == pytest.approx(math.log(2), abs=1e-6)
    copy = objective == "grpo" and tuned_before
    assert handle.names == (*names, *([objectives.REFERENCE] if copy else []))
    trained = sum(p.numel() for p in handle.trainable_parameters())
    assert sum(p.numel() for p in model.parameters()) == weights + (trained if copy else 0), "no second base"


@pytest.mark.parametrize("reference", ["base", "start"])
def test_the_reference_of_drawn_answers_has_no_dropout(reference: objectives.Reference) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **tiny.FAMILIES["gpt2"], vocab_size=99))
    deltune.attach(model, "lora(rank=2, dropout=0.5)")
    objectives._keep_copy(model)
    model.train()
    model.lm_head.eval()
    passes = objectives._ReferencePass(model, reference)
    ids = torch.arange(8)[None]
    modes = [module.training for module in model.modules()]
    assert torch.equal(passes(input_ids=ids).logits, passes(input_ids=ids).logits)
    assert [module.training for module in model.modules()] == modes
    assert not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("rows", "size", "others"), [(4, 2, [1, 0, 3, 2]), (5, 2, [1, 0, 3, 2, 3]), (5, 4, [3, 0, 1, 2, 3]), (1, 2, [0])]
)
def test_no_prompt_of_kto_has_its_own_answer_as_the_other(rows: int, size: int, others: list[int]) -> None:
    assert [objectives._other_answer(i, size, rows) for i in range(rows)] == others


def test_a_fresh_prefix_is_not_the_base(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "deltune")
    train(config(root, "dpo", method="prefix(length=2)", steps=1), tmp_path / "run", progress=False)
    assert "changes the model from the start, so it is not the reference" in caplog.text
    assert abs(logged(tmp_path / "run")[0]["loss"] - math.log(2)) > 1e-6


# -- rows


def encode(encoder: Any, rows: list[dict[str, Any]], **options: Any) -> Any:
    from deltune.train.data.formats import COLUMN, recognise

    form = recognise(list(rows[0]))
    assert form is not None
    columns = {COLUMN: [json.dumps(form.read(row)) for row in rows]}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **tiny.FAMILIES["llama"], vocab_size=300))
    tokenizer = byte_tokenizer(eos_token="<|end|>")
    return tokenizer, encoder(tokenizer, model, columns, TaskOptions(**{"max_length": 64, **options}), True)


ENCODERS = (encode_pairs, encode_rated)
PAIR = {"prompt": "Say a: ", "chosen": "aaa", "rejected": "b"}


@pytest.mark.parametrize(
    "encoder, rows, options, answers, note",
    [
        (encode_pairs, [PAIR], {}, [("Say a: ", "aaa<|end|>", "b<|end|>")], ""),
        (encode_pairs, [{"chosen": "Hi a", "rejected": "Hi b"}], {}, [("Hi", " a<|end|>", " b<|end|>")], ""),
        (encode_pairs, [PAIR, {**PAIR, "rejected": "aaa"}], {}, None, "1 row whose two answers are the same: row 2"),
        (encode_pairs, [{**PAIR, "rejected": "aaa"}], {}, None, DeltuneError("both answers are the same")),
        (encode_pairs, [PAIR], {"max_length": 5}, None, DeltuneError("an answer is cut away.*--max-length 11")),
        (encode_pairs, RATED, {}, None, DeltuneError("--objective kto")),
        (encode_rated, [PAIR], {}, [("Say a: ", "aaa<|end|>", True), ("Say a: ", "b<|end|>", False)], ""),
        (encode_rated, RATED[1:2], {}, [("Say tree: ", "tree<|end|>", False)], ""),
    ],
)
def test_rows(encoder: Any, rows: list[Any], options: dict[str, Any], answers: Any, note: Any) -> None:
    """Where an answer begins and ends, in pairs and rated ones; equal answers and those that are cut away are named."""
    if isinstance(note, DeltuneError):
        with pytest.raises(DeltuneError, match=str(note)):
            encode(encoder, rows, **options)
        return
    tokenizer, encoded = encode(encoder, rows, **options)
    assert note in " ".join(encoded.notes)
    for row, (prompt, answer, other) in zip(encoded.rows, answers or (), strict=bool(answers)):
        assert tuple(map(tokenizer.decode, split_answer(row))) == (prompt, answer)
        assert (tokenizer.decode(row["rejected_ids"]) if "rejected_ids" in row else row["desirable"]) == other


def test_tokens_of_both_answers_are_counted() -> None:
    """A pair has as many tokens as its two answers would have, each rated alone."""
    pairs, rated = (token_facts(encode(encoder, [PAIR, {**PAIR, "rejected": "bbbb"}])[1]) for encoder in ENCODERS)
    assert pairs == rated and pairs["total"] == 4 * len("Say a: ") + len("aaabaaabbbb") + 4


# -- what is refused


@pytest.mark.parametrize(
    "objective, changes, reason",
    [
        ("dpo", {"packing": True, "label_smoothing": 0.1}, "dpo is learned without packing, label_smoothing"),
        ("dpo", {"data": "questions"}, "learns from preferences, and the data is read as chat"),
        ("grpo", {}, "--reward FILE.py:function"),
        ("kto", {"batch_size": 1}, "kto compares the rows of a device batch"),
        ("reward", {"beta": 0.1}, "beta is for dpo, kto, orpo and grpo"),
        *(
            (
                objective,
                {"method": method},
                "acts at lm_head, whose weight TRL's trainer of .* reads without calling it",
            )
            for objective in ("dpo", "kto")
            for method in ("lora + trainable_tokens(tokens=(5,))", "lora(at='lm_head')")
        ),
        ("sft", {}, "say what is learned of them, --objective dpo, kto, orpo or reward"),
    ],
)
def test_refused(objective: str, changes: dict[str, Any], reason: str, root: Path, tmp_path: Path) -> None:
    changes = changes | ({"data": str(root / changes["data"])} if "data" in changes else {})
    with pytest.raises(DeltuneError, match=reason):
        train(config(root, objective, **changes), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("objective", ["kto", "grpo"])
def test_several_processes_are_refused_before_they_start(
    objective: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltune.cli.train.launch", lambda *_: pytest.fail("it was launched"))
    words = ["deltune", "train", "--model", "m", "--data", "d", "--method", "lora", "--output", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", [*words, "--objective", objective, "--launch", "2"])
    with pytest.raises(SystemExit) as ended:
        main()
    message = capsys.readouterr().err
    assert ended.value.code == 2 and f"--objective {objective}" in message and "leave --launch" in message


def test_without_trl(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deltune import errors

    monkeypatch.setattr(errors, "_missing_packages", lambda extra: ["trl"] if extra == "align" else [])
    with pytest.raises(DeltuneError, match=r"--objective dpo needs trl: pip install 'deltune\[align\]'"):
        train(config(root, "dpo"), tmp_path / "run", progress=False)


def test_an_overview_says_how_preferences_are_learned(root: Path) -> None:
    facts = overview(config(root, "sft"), str(root / "model"))
    assert any("--objective dpo" in note for note in facts.notes)


REWARDS = """
def right(completions, **kwargs):
    return [float(len(answer[0]["content"])) for answer in completions]

def short(completions):
    return [1.0]

def broken(completions, reference):
    return [reference[0] / 2]
"""


@pytest.mark.slow
def test_reward_of_the_command_line(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the rules of --import: a file that the command names, whose mistakes are said with their place."""
    file = tmp_path / "rewards.py"
    file.write_text(REWARDS)
    words = [
        "deltune", "train", "--model", str(root / "model"), "--data", str(root / "questions"), "--method", "lora",
        "--objective", "grpo", "--batch-size", "2", "--steps", "1", "--template", "roles", "--target-length", "4",
        "--set", "objective.generations=2",
    ]  # fmt: skip
    for name, code, message in (
        ("wrong", 2, "unknown function 'wrong'"),
        ("short", 2, "short returned 1 numbers for 4 completions"),
        ("broken", 2, "TypeError: unsupported operand.*rewards.py, line 9"),
        ("right", 0, ""),
    ):
        arguments = [*words, "--reward", f"{file}:{name}", "--output", str(tmp_path / name)]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as ended:
            main()
        assert (ended.value.code or 0) == code and re.search(message, capsys.readouterr().err)
    assert json.loads((tmp_path / "right" / "environment.json").read_text())["reward"] == f"{file}:right"
