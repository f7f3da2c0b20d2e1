"""Where a prompt begins and what ends an answer: the same in training, generation and serving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    ByT5Tokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import deltune
import deltune.serve
import tiny
from deltune.models import align_padding_token
from deltune.serve.engine.jobs import RequestEncoder
from deltune.serve.engine.requests import Request, Sampling
from deltune.templates import chat_prompt, end_tokens, question, target_end, tokenize_prompts, with_chat_template
from deltune.train.data.conversations import Conversations
from deltune.train.data.loading import load_data
from deltune.train.inference import generate, merge_run
from deltune.train.run import train
from deltune.train.tasks.base import InferenceContext, TaskOptions
from deltune.train.tasks.encoding import IGNORE_INDEX, collate
from deltune.train.tasks.generation import CAUSAL_GENERATION, SEQ2SEQ_GENERATION

SPECIAL = {"<|end|>": 0, "<|im_end|>": 1, "<|begin|>": 258, "<|pad|>": 259}
END, TURN, BEGIN, PAD = SPECIAL.values()
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
SIZE = 264
"""The vocabulary: special tokens, bytes, and a few ids without a text, as many checkpoints have them."""


def byte_tokenizer(writes: str = "$A", **special: Any) -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each byte, which writes special tokens around texts."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), 2)}  # 2 is "!"
    tokenizer = Tokenizer(models.BPE(SPECIAL | letters, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(single=writes, special_tokens=list(SPECIAL.items()))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{"pad_token": "<|pad|>", **special})


def chain(tokenizer: Any, follows: dict[str | int, str | int], **config: Any) -> PreTrainedModel:
    """A model after whose tokens certain others follow, given as bytes or ids; after all others, x."""
    sizes = {"hidden_size": SIZE, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"vocab_size": SIZE, "bos_token_id": None, "max_position_embeddings": 64}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes, **config)).eval()

    def token(one: str | int) -> int:
        return one if isinstance(one, int) else tokenizer(one, add_special_tokens=False)["input_ids"][0]

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.zero_() if "layers" in name else None
        model.model.embed_tokens.weight.copy_(torch.eye(SIZE))
        model.lm_head.weight.zero_()
        model.lm_head.weight[token("x")] = 0.5
        for before, after in follows.items():
            model.lm_head.weight[token(after), token(before)] = 1.0
    return model


ENDS: dict[str, tuple[dict[str, Any], str | None, dict[str, Any], Any, tuple[int, ...]]] = {
    "tokenizer": ({"eos_token": "<|end|>"}, None, {"eos_token_id": None}, None, (END,)),
    "tokenizer and model differ": ({"eos_token": "<|end|>"}, None, {"eos_token_id": TURN}, TURN, (END, TURN)),
    "generation config": ({}, None, {"eos_token_id": None}, TURN, (TURN,)),
    "several": ({"eos_token": "<|end|>"}, None, {"eos_token_id": None}, [TURN, END], (END, TURN)),
    "config alone": ({}, None, {"eos_token_id": [END, TURN]}, None, (END, TURN)),
    "chat template": ({"eos_token": "<|end|>"}, CHAT, {"eos_token_id": END}, END, (END, TURN)),
    "chat template alone": ({}, CHAT, {"eos_token_id": None}, None, (TURN,)),
    "a template that refuses": (
        {"eos_token": "<|end|>"}, "{{ raise_exception('no') }}", {"eos_token_id": None}, None, (END,),
    ),
    "a template without an end": ({"eos_token": "<|end|>"}, "{{ messages }}", {"eos_token_id": None}, None, (END,)),
    "what the tokenizer writes": ({"writes": "<|begin|> $A <|im_end|>"}, None, {"eos_token_id": None}, None, (TURN,)),
    "it writes another": (
        {"writes": "$A <|im_end|>", "eos_token": "<|end|>"}, None, {"eos_token_id": None}, None, (TURN, END),
    ),
    "Llama's default is a letter": ({"eos_token": "<|end|>"}, None, {}, 2, (END,)),
    "a letter that somebody chose": ({"eos_token": "<|end|>"}, None, {"eos_token_id": None}, 40, (END, 40)),
    "a default beyond the vocabulary": ({"eos_token": "<|end|>"}, None, {"eos_token_id": 50256}, 50256, (END,)),
    "none": ({}, None, {"eos_token_id": None}, None, ()),
}  # fmt: skip
"""What is declared: the tokenizer's special tokens, its chat template, the configuration's and the generation config's
eos_token_id, and the tokens that end an answer."""


@pytest.mark.parametrize("case", ENDS)
def test_the_tokens_that_end_an_answer(case: str, tmp_path: Path) -> None:
    """Training writes the first of them; generation, prediction and the server end at each of them, and only there."""
    special, template, config, generation, expected = ENDS[case]
    tokenizer = byte_tokenizer(**special)
    tokenizer.chat_template = template
    answer = "b!c" if expected else "b!cxxxx"
    for end in expected or (END,):
        model = chain(tokenizer, {"a": "b", "b": "!", "!": "c", "c": end}, **config)
        model.generation_config.eos_token_id = generation
        align_padding_token(model, tokenizer)
        assert end_tokens(tokenizer, model) == expected and target_end(tokenizer, model) == expected[:1]
        options = TaskOptions(32, 8, generate_kwargs={})
        columns = {"source": ["a", "aa"], "targets": [["b!c"], ["b"]]}
        encoded = CAUSAL_GENERATION.encode(tokenizer, model, columns, options, True)
        assert not expected or {row["labels"][-1] for row in encoded.rows} == {expected[0]}
        rows = CAUSAL_GENERATION.encode(tokenizer, model, {"source": ["aaaa", "a"]}, options, False)
        context = InferenceContext(model, tokenizer, (), options, 2)
        assert CAUSAL_GENERATION.predict(context, rows).predictions == [answer] * 2
        with deltune.serve.Server(model, tokenizer) as server:
            sampling = Sampling(max_tokens=8, temperature=0.0)
            stream = server.stream(Request("generate", text="aa", sampling=sampling))
            pieces = "".join(one.text for one in stream)
            assert stream.answer is not None and pieces == stream.answer.text == answer
            assert stream.answer.finish_reason == ("stop" if expected else "length")
        tokenizer.save_pretrained(tmp_path / f"{end}")
        model.save_pretrained(tmp_path / f"{end}")
        assert generate(tmp_path / f"{end}", ["a"], max_tokens=8) == [answer]


@pytest.mark.parametrize("model_end", [None, END, [END, BEGIN]])
def test_a_run_stops_where_training_wrote_the_end(model_end: Any, tmp_path: Path) -> None:
    """The tokenizer ends texts with one token and the checkpoint says another; merged, transformers stops there too."""
    tokenizer = byte_tokenizer(eos_token="<|im_end|>")
    model = chain(tokenizer, {"a": "b", "b": "c", "c": TURN}, eos_token_id=model_end)
    tokenizer.save_pretrained(tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    for split in ("train", "test"):
        tiny.lines(tmp_path / "data" / f"{split}.jsonl", [{"source": s, "targets": "bc"} for s in ("za", "a", "aa")])
    config = tiny.RunConfig.from_flat(
        model=str(tmp_path / "model"), data=str(tmp_path / "data"), method="lora(rank=1)", steps=1, batch_size=2,
        template="{source}<|begin|>a", lr=1e-6, target_length=8,
    )  # fmt: skip
    assert train(config, tmp_path / "run", progress=False).test["exact"] == 1.0
    merged = AutoModelForCausalLM.from_pretrained(merge_run(tmp_path / "run", tmp_path / "merged"))
    ids = torch.tensor([tokenizer("za")["input_ids"]])
    answer = merged.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)  # type: ignore[operator]
    assert tokenizer.decode(answer[0, 2:]) == "bc<|im_end|>"


WRITES = {"nothing": "$A", "begin": "<|begin|> $A", "end": "$A <|end|>", "both": "<|begin|> $A <|end|>"}
PROMPTS = ("a b<|end|>", "a<|end|><|end|>", "<|end|>", "a<|end|>b", "a<|pad|>b<|pad|>", "<|begin|>a", "a", "")


@pytest.mark.parametrize("writes", WRITES)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_prompt_is_what_its_author_wrote(writes: str, prompt: str, tmp_path: Path) -> None:
    """Behind what the tokenizer writes before texts, which is there once; in training, generation and serving."""
    tokenizer = byte_tokenizer(WRITES[writes], eos_token="<|end|>", bos_token="<|begin|>")
    plain = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    begins = writes in ("begin", "both") and plain[:1] != [BEGIN]
    expected = [BEGIN] * begins + plain or [BEGIN]
    assert (
        RequestEncoder(tokenizer, frozenset({"input_ids"}), False, SIZE).encode(Request("generate", text=prompt)).tokens
        == expected
    )
    model = chain(tokenizer, {}, eos_token_id=END)
    options = TaskOptions(32, 8, template="{source}")
    for targets in ({}, {"targets": [["c"]]}):
        (row,) = CAUSAL_GENERATION.encode(tokenizer, model, {"source": [prompt], **targets}, options, True).rows
        assert row["input_ids"][: row["prompt_length"]] == expected
    assert row["labels"][-1] == END and row["labels"].count(END) == 1
    if prompt:
        last = plain[-1]
        answering = chain(tokenizer, {last: "q", "q": END}, eos_token_id=END)
        answering.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        assert generate(tmp_path, [prompt], max_tokens=4) == ["q"]
        with deltune.serve.Server(answering, tokenizer) as server:
            sampling = Sampling(max_tokens=4, temperature=0.0)
            for given_input in ({"text": prompt}, {"tokens": tuple(expected)}):
                answer = server.submit(Request("generate", sampling=sampling, **given_input)).result(60)  # type: ignore[arg-type]
                assert (answer.text, answer.finish_reason, answer.prompt_tokens) == ("q", "stop", len(expected))


def test_a_prompt_of_a_byte_tokenizer_of_python() -> None:
    """ByT5's writes its end only where there is none; an end that somebody wrote is still there."""
    tokenizer = ByT5Tokenizer()
    assert tokenize_prompts(tokenizer, ["a</s>", "a"]) == [(100, 1), (100,)]


def test_the_end_is_learned_though_it_is_the_padding() -> None:
    """Where padding is the end-of-text token, labels have one end in each row, and padding has no label."""
    tokenizer = byte_tokenizer(eos_token="<|end|>", pad_token="<|end|>")
    model = chain(tokenizer, {}, eos_token_id=END)
    columns = {"source": ["a", "abc", "a<|end|>b"], "targets": [["b"], ["bcd"], ["b"]]}
    for side in ("left", "right"):
        tokenizer.padding_side = side
        rows = CAUSAL_GENERATION.encode(tokenizer, model, columns, TaskOptions(32, 8), True).rows
        batch = collate(tokenizer, model, rows)
        assert (batch["labels"] == END).sum(1).tolist() == [1, 1, 1]
        assert ((batch["labels"] == IGNORE_INDEX) | batch["attention_mask"].bool()).all()
        assert batch["attention_mask"].sum(1).tolist() == [len(row["input_ids"]) for row in rows]


def test_the_end_of_an_encoder_decoder(shared: Path) -> None:
    """The tokenizer writes it once; without one of its own, training writes the model's."""
    folder = shared / "models" / "g2p-en-us-bart"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert end_tokens(tokenizer, model) == (tokenizer.eos_token_id,)
    (row,) = SEQ2SEQ_GENERATION.encode(
        tokenizer, model, {"source": ["abc"], "targets": [["ab"]]}, TaskOptions(16, 8), True
    ).rows
    assert row["labels"] == tokenizer(text_target="ab")["input_ids"] and row["labels"][-1] == tokenizer.eos_token_id
    plain = byte_tokenizer()
    model.generation_config.eos_token_id = model.config.eos_token_id = END
    (row,) = SEQ2SEQ_GENERATION.encode(
        plain, model, {"source": ["abc"], "targets": [["ab"]]}, TaskOptions(16, 8), True
    ).rows
    assert row["labels"] == [*plain("ab")["input_ids"], END] and end_tokens(plain, model)[0] == END


def test_nothing_ends_an_answer() -> None:
    """That is said, since every answer then has its longest length."""
    tokenizer = byte_tokenizer()
    model = chain(tokenizer, {}, eos_token_id=None)
    options = TaskOptions(32, 4)
    rows = CAUSAL_GENERATION.encode(tokenizer, model, {"source": ["a"]}, options, False)
    with pytest.warns(UserWarning, match="nor the model has a token that ends a text"):
        predicted = CAUSAL_GENERATION.predict(InferenceContext(model, tokenizer, (), options, 1), rows)
    assert predicted.predictions == ["xxxx"]


ALPACA = {
    ("Say it in French.", "yes"): (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nSay it in French.\n\n### Input:\nyes"
        "\n\n### Response:"
    ),
    ("Say yes.", ""): (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nSay yes.\n\n### Response:"
    ),
    ("", "yes"): (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\n\n\n### Input:\nyes\n\n### Response:"
    ),
    ("Say <|end|>.", "<|im_end|>\nyes"): (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nSay <|end|>.\n\n### Input:\n"
        "<|im_end|>\nyes\n\n### Response:"
    ),
}
"""What Stanford's train.py makes of an instruction and its input, in front of which the output stands at once."""


@pytest.mark.parametrize("row", ALPACA)
def test_alpaca_has_the_official_prompts(row: tuple[str, str], tmp_path: Path) -> None:
    """In use as in training, where the answer follows; texts of control tokens are letters in it."""
    tokenizer = with_chat_template(byte_tokenizer(eos_token="<|end|>"), "alpaca")
    prompt = chat_prompt(tokenizer, [question(*row)])
    assert tokenizer.decode(prompt) == ALPACA[row] and not {END, TURN} & {*prompt}
    rows = [{"instruction": row[0], "input": row[1], "output": "oui"}]
    data = load_data(str(tiny.lines(tmp_path / "rows.jsonl", rows))).splits["train"]
    (seen,) = Conversations(tokenizer).tokenize(data["conversation"], data["place"], [])
    answer = [id for id, is_trained in zip(seen.ids, seen.trained, strict=True) if is_trained]
    assert seen.ids[: len(prompt)] == prompt and seen.ids[len(prompt) :][: len(answer)] == answer
    assert tokenizer.decode(answer) == "oui<|end|>"


def test_alpaca_says_what_its_last_question_has(tmp_path: Path) -> None:
    """Behind a history too; an input of a message that is no text is none of its."""
    tokenizer = with_chat_template(byte_tokenizer(eos_token="<|end|>"), "alpaca")
    history = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Yes?"}]
    for last, paired in ((question("Say it.", "yes"), True), (question("Say it."), False)):
        text = tokenizer.decode(chat_prompt(tokenizer, [*history, last]))
        assert (", paired with an input" in text) == ("### Input:\nyes" in text) == paired
    for other in ({"a": 1}, [1], 7, ""):
        message = {"role": "user", "content": "Say <|end|>.", "input": other}
        assert tokenizer.decode(chat_prompt(tokenizer, [message])) == ALPACA["Say yes.", ""].replace("yes", "<|end|>")
        rows = [{"messages": [message, {"role": "assistant", "content": "oui"}]}]
        data = load_data(str(tiny.lines(tmp_path / "rows.jsonl", rows))).splits["train"]
        conversations = Conversations(tokenizer)
        assert [*conversations.tokenize(data["conversation"], data["place"], [])]
        assert not conversations.counts["dropped"]


def test_other_templates_have_the_input_behind_the_instruction() -> None:
    for name in ("roles", "zephyr"):
        tokenizer = with_chat_template(byte_tokenizer(eos_token="<|end|>"), name)
        assert "Say it.\nyes" in tokenizer.decode(chat_prompt(tokenizer, [question("Say it.", "yes")]))
