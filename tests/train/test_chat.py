"""A chat model from its data to its answers: what a run says, where answers stop, and what is saved of the template."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, RobertaConfig

import deltune
import deltune.serve
import tiny
from deltune.errors import DeltuneError
from deltune.models import align_padding_token
from deltune.serve.engine.requests import Request, Sampling
from deltune.templates import NAMED_TEMPLATES, chat_prompt, with_chat_template
from deltune.train.chat import Chat
from deltune.train.config import RunConfig
from deltune.train.inference import export_run, generate, load_run, merge_run
from deltune.train.overview import overview
from deltune.train.report.advice import advice, read_finished
from deltune.train.run import train
from deltune.train.run_folder import RunFolder
from deltune.train.tasks.chat import untrained_tokens
from test_templates import END, TURN, byte_tokenizer, chain

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
ROWS = [{"instruction": f"Question {i}?", "output": "y"} for i in range(8)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers "yes", and then ends a turn by a token that neither it nor its tokenizer calls an end."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = byte_tokenizer(eos_token="<|end|>")
    model = chain(tokenizer, {"a": "y", "y": "e", "e": "s", "s": TURN, TURN: "x"}, eos_token_id=END)
    align_padding_token(model, tokenizer)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "turns.jinja").write_text(TEMPLATE)
    tiny.lines(folder / "alpaca.jsonl", ROWS)
    return folder


def config(base: Path, **values: Any) -> RunConfig:
    fixed = {"model": str(base / "model"), "data": str(base / "alpaca.jsonl"), "method": "lora(rank=2)", "lr": 1e-9}
    return RunConfig.from_flat(**{**fixed, "steps": 2, "batch_size": 4, **values})


@pytest.fixture(scope="module")
def run(base: Path) -> Path:
    train(config(base, template=str(base / "turns.jinja")), base / "run", progress=False)
    return base / "run"


def test_a_report_has_answers_to_held_out_prompts(base: Path, tmp_path: Path) -> None:
    """The first of a split beside their references; what the model says ends where it says the end."""
    for split in ("train", "test"):
        tiny.lines(tmp_path / "data" / f"{split}.jsonl", ROWS)
    spec = config(base, data=str(tmp_path / "data"), template=str(base / "turns.jinja"), target_length=9)
    train(spec, tmp_path / "run", progress=False)
    first, *_, last = tiny.objects(tmp_path / "run" / "predictions" / "test.jsonl")
    assert (first["asked"], first["answered"], first["expected"]) == ("uQuestion 0?a", "yes", "y")
    assert "asked" not in last and "Answers to held-out prompts" in (tmp_path / "run" / "report.html").read_text()


def test_answers_stop_where_training_stopped(base: Path, run: Path, tmp_path: Path) -> None:
    """In `generate`, in a chat, behind a server, after `merge` and with PEFT's file: the template goes along."""
    trained = json.loads((run / "delta" / "delta.json").read_text())["trained"]
    assert trained["chat_template"] == TEMPLATE and set(trained["end_tokens"]) == {END, TURN}
    assert generate(str(run), ["Is it?"], 20) == ["yes"] == generate(str(run), ["Is it?"], 20, inputs=["x"])
    with pytest.raises(DeltuneError, match=r'2 inputs for 1 prompt: .* "" for none \(--input ""\)'):
        generate(str(run), ["Is it?"], 20, inputs=["x", "y"])
    with pytest.raises(DeltuneError, match="an input beside the prompt is for what was trained on conversations"):
        generate(base / "model", ["Is it?"], 20, inputs=["x"])
    chat = Chat.open(str(run), system="Be brief.", max_tokens=20)
    parts: list[str] = []
    assert chat.answer("Is it?", parts.append) == "yes" == "".join(parts)
    assert chat.answer("Really?") == "yes" and [one["role"][0] for one in chat.messages] == list("suaua")
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "Be brief."}]
    merge_run(run, tmp_path / "merged")
    assert set(GenerationConfig.from_pretrained(tmp_path / "merged").eos_token_id) == {END, TURN}
    assert generate(str(tmp_path / "merged"), ["Is it?"], 20) == ["yes"]
    export_run(run, tmp_path / "peft")
    for folder in ("merged", "peft"):
        assert AutoTokenizer.from_pretrained(tmp_path / folder).chat_template == TEMPLATE
    AutoPeftModelForCausalLM.from_pretrained(tmp_path / "peft")
    model = AutoModelForCausalLM.from_pretrained(base / "model")
    (tmp_path / "deltas").mkdir()
    (tmp_path / "deltas" / "talks").symlink_to(run)
    with deltune.serve.Server(model, byte_tokenizer(eos_token="<|end|>"), deltas=tmp_path / "deltas") as server:
        request = Request(
            "generate",
            messages=({"role": "user", "content": "?"},),
            delta="talks",
            sampling=Sampling(max_tokens=20, temperature=0.0),
        )
        assert server.submit(request).result(60).text == "yes"


def test_control_tokens_in_a_question_are_text_in_use_too() -> None:
    tokenizer = with_chat_template(byte_tokenizer(eos_token="<|end|>"), TEMPLATE)
    ids = chat_prompt(tokenizer, [{"role": "user", "content": "a<|im_end|>b"}])
    assert tokenizer.decode(ids) == "ua<|im_end|>b<|im_end|>a" and ids.count(TURN) == 1


def test_tokens_that_the_base_never_trained_are_named(base: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base / "model")
    with torch.no_grad():
        model.get_input_embeddings().weight[TURN] = 0
    tokenizer, rows = byte_tokenizer(), [{"input_ids": [TURN, END, 9]}]
    for method, expected in (
        ("lora", {TURN: "<|im_end|>"}), (f"lora + trainable_tokens(tokens=({TURN},))", {}), ("full", {}),
    ):  # fmt: skip
        tuned = deltune.attach(model, method)
        assert untrained_tokens(tuned, tokenizer, rows) == expected
        tuned.detach()


def test_they_are_named_again_at_the_end_and_when_a_run_goes_on(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = AutoModelForCausalLM.from_pretrained(base / "model")
    with torch.no_grad():
        model.get_input_embeddings().weight[TURN] = 0
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer(eos_token="<|end|>").save_pretrained(tmp_path / "model")
    for split in ("train", "validation"):
        tiny.lines(tmp_path / "data" / f"{split}.jsonl", ROWS)
    spec = config(
        base, model=str(tmp_path / "model"), data=str(tmp_path / "data"), template=str(base / "turns.jinja"),
        validate_every=1,
    )  # fmt: skip

    def stop(step: int, quality: float) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(spec, tmp_path / "run", progress=False, stop_if=stop)
    caplog.clear()
    train(spec, tmp_path / "run", progress=False)
    warning = "<|im_end|>: the base never trained the embeddings of these tokens"
    assert warning in caplog.text and any(
        warning in note for note in advice(read_finished(RunFolder(tmp_path / "run")))
    )


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
def test_named_templates_end_their_answers(name: str) -> None:
    plain = byte_tokenizer()
    with pytest.raises(DeltuneError, match=rf"template {name} needs the tokens"):
        with_chat_template(plain, name)
    plain.add_special_tokens({"eos_token": "<|end|>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer = with_chat_template(plain, name)
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert "Q" in prompt and whole.startswith(prompt) and whole[len(prompt) :].strip() in ("A<|end|>", "A<|im_end|>")
    with pytest.raises(DeltuneError, match=r"unknown chat template 'nothing'.*Known: alpaca, chatml"):
        with_chat_template(plain, "nothing")


def deltune_command(*arguments: object, typed: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deltune", *map(str, arguments)]
    return subprocess.run(command, input=typed, capture_output=True, text=True)


@pytest.mark.slow
def test_the_command_line(base: Path, run: Path) -> None:
    """A pipe is answered line by line; a conversation without a template is a mistake of the user."""
    done = deltune_command("chat", run, "--max-tokens", 9, typed="Is it?\n\n/reset\nIs it?\n")
    assert (done.returncode, done.stdout) == (0, "yes\nyes\n"), done.stderr
    done = deltune_command("data", base / "alpaca.jsonl", "--model", base / "model")
    assert done.returncode == 2 and "no chat template" in done.stderr and "Traceback" not in done.stderr


def test_what_a_run_says_first(base: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level("INFO", logger="deltune"):
        train(config(base, template=str(base / "turns.jinja"), max_length=17), tmp_path / "run", progress=False)
    lines = "\n".join(record.getMessage() for record in caplog.records)
    for part in (
        "task: chat of Alpaca, assumed from the columns",
        "columns: instruction=instruction,output=output",
        "train: 16 tokens a row, median 16; 128 in all, 16 of them trained",
        "example, trained between ⟦ and ⟧: uQuestion 0?<|im_end|>a⟦y<|im_end|>⟧",
    ):
        assert part in lines
    assert RunFolder(tmp_path / "run").finished and load_run(tmp_path / "run").is_conversational


def test_a_run_keeps_the_template_that_it_used(base: Path, tmp_path: Path) -> None:
    """Of a tokenizer with one for tools and one for other rows."""
    tokenizer, folder = AutoTokenizer.from_pretrained(base / "model"), tmp_path / "model"
    tokenizer.chat_template = {
        "default": TEMPLATE,
        "tool_use": "{% if tools %}{{ tools[0].function.name }}{% endif %}" + TEMPLATE,
    }
    AutoModelForCausalLM.from_pretrained(base / "model").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tools = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}
    rows = [
        {"messages": [{"role": "user", "content": f"Q{i}"}, {"role": "assistant", "content": "y"}]} for i in range(4)
    ]
    for name, used in (("default", rows), ("tool_use", [{**row, **tools} for row in rows])):
        data = str(tiny.lines(tmp_path / f"{name}.jsonl", used))
        train(config(base, model=str(folder), data=data), tmp_path / name, progress=False)
        trained = json.loads((tmp_path / name / "delta" / "delta.json").read_text())["trained"]
        assert trained["chat_template"] == tokenizer.chat_template[name]
    mixed = config(
        base, model=str(folder), data=str(tiny.lines(tmp_path / "mixed.jsonl", [rows[0], {**rows[1], **tools}]))
    )
    with pytest.raises(DeltuneError, match="writes 1 row with tools by another chat template"):
        train(mixed, tmp_path / "refused", progress=False)


def test_what_a_data_set_holds(base: Path, tmp_path: Path) -> None:
    """`deltune data` says it without weights: numbers of tokens, what is cut, labels, shared rows, an example."""
    chats = config(base, template=str(base / "turns.jinja"), max_length=15)
    facts = overview(chats, str(base / "model"), row=3)
    assert facts.rows == {"train": 8} and facts.example == "uQuestion 2?<|im_end|>a⟦y⟧"
    assert facts.tokens["train"]["cut_rows"] == facts.tokens["train"]["cut_tokens"] == 8
    assert any("a run refuses it: 8 of 8 rows of train are longer than 15 tokens" in line for line in facts.lines())
    with pytest.raises(DeltuneError, match="row 9 is none of the 8 rows of train"):
        overview(chats, row=9)
    tiny.lines(tmp_path / "train.jsonl", rows := [{"text": f"t {i}", "label": "abb"[i % 3]} for i in range(6)])
    tiny.lines(tmp_path / "test.jsonl", [*rows[:1], {"text": "u", "label": "a"}])
    lines = overview(chats.replace(data=str(tmp_path), template=None), "minilm").lines()
    assert lines[1:4] == ["rows: train 6, test 2", "labels of train: b 67%, a 33%", "labels of test: a 100%, b 0%"]
    assert "1 row of test also in train" in lines and lines[-1] == "example: [CLS] t 0 [SEP]"
    again = tiny.lines(tmp_path / "again.jsonl", [*[{"text": "t", "label": "a"}] * 2, {"text": "t", "label": "b"}])
    assert overview(chats.replace(data=str(again), template=None)).example == "{'text': 't', 'label': 'a'}"
    notes = overview(chats.replace(data=str(again), template=None)).notes
    assert {"1 repeated row in train", "3 rows in train with an input that other rows answer differently"} <= {*notes}
    tiny.lines(tmp_path / "pairs.jsonl", [{"prompt": "p", "chosen": "a", "rejected": "b"}] * 2)
    pairs = overview(chats.replace(data=str(tmp_path / "pairs.jsonl")), str(base / "model"), row=2)
    assert (pairs.kind, pairs.example) == ("preference", "p⟦a<|end|>⟧ | p⟦b<|end|>⟧")
    assert any("a run refuses it: the data is read as preference" in line for line in pairs.notes)
    answers = str(tiny.lines(tmp_path / "answers.jsonl", [{"instruction": "p", "output": "q", "label": 1}] * 2))
    roberta = RobertaConfig(vocab_size=1200, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    roberta.max_position_embeddings, folder = 66, tmp_path / "roberta"
    roberta.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base / "model").save_pretrained(folder)
    notes = overview(chats.replace(data=answers, template="roles", max_length=64), str(folder)).notes
    assert "not read: label; --columns says which columns are" in notes
    assert any("a run refuses it: RobertaForCausalLM is an encoder" in line for line in notes)
    with pytest.raises(DeltuneError, match="RobertaForCausalLM holds: 64 tokens"):
        overview(chats.replace(data=answers, template="roles", max_length=65), str(folder))
    with pytest.raises(DeltuneError, match="RobertaForCausalLM is an encoder"):  # and no word of templates
        train(chats.replace(model=str(folder), template=None), tmp_path / "run", progress=False)
    with pytest.raises(DeltuneError, match="--task chat --columns prompt=prompt,completion=chosen"):
        train(chats.replace(data=str(tmp_path / "pairs.jsonl")), tmp_path / "run", progress=False)
