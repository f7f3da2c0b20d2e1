"""Conversations as people have them: the formats of files, what of them is trained, what is said, what is refused.

The cases are reports of what went wrong elsewhere. What is trained is written between ⟦ and ⟧.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, PreTrainedTokenizerFast

import tiny
from deltune.anatomy.tracing import meta_model
from deltune.errors import DeltuneError
from deltune.train.config import RunConfig
from deltune.train.data.loading import load_data
from deltune.train.overview import data_notes
from deltune.train.tasks.base import TaskOptions
from deltune.train.tasks.chat import check_lengths, encode_chat, notes
from deltune.train.tasks.encoding import IGNORE_INDEX

MARKERS = ("<|s|>", "<|u|>", "<|a|>", "<|t|>", "<|e|>", "<|b|>", "<pad>", "<end>")
ROLE = "{{ {'system': '<|s|>', 'user': '<|u|>', 'assistant': '<|a|>', 'tool': '<|t|>'}[m['role']] }}"
ASKS = "{% if add_generation_prompt %}<|a|>{% endif %}"
PLAIN = "{% for m in messages %}" + ROLE + "{{ m['content'] }}<|e|>{% endfor %}" + ASKS
ANSWER = "m['role'] == 'assistant'"
TEMPLATES = {
    "plain": PLAIN,
    "marked": "{% for m in messages %}{% if " + ANSWER + " %}<|a|>{% generation %}{{ m['content'] }}<|e|>"
    "{% endgeneration %}{% else %}" + ROLE + "{{ m['content'] }}<|e|>{% endif %}{% endfor %}" + ASKS,
    "begin": "{{ bos_token }}" + PLAIN,
    "default": "{% if messages[0]['role'] != 'system' %}<|s|>You help.<|e|>{% endif %}" + PLAIN,
    "no system": "{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system!') }}{% endif %}" + PLAIN,
    "drops": PLAIN.replace(
        "{{ m['content'] }}",
        "{% if " + ANSWER + " and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
        "{% else %}{{ m['content'] }}{% endif %}",
    ),
    "thinks": PLAIN.replace("%}<|a|>{% endif", "%}<|a|><think></think>{% endif"),
    "trims": PLAIN.replace("m['content']", "m['content'] | trim"),
    "calls": PLAIN.replace(
        "{{ m['content'] }}",
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
        "{{ m['content'] }}",
    ),
    "bare": "{% for m in messages %}{% if " + ANSWER + " %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}<|u|>{{ m['content'] }}<|a|>{% endif %}{% endfor %}",
    "lines": "{% for m in messages %}" + ROLE + "{{ m['content'] }}<|e|>{{ '\n' }}{% endfor %}" + ASKS,
}  # fmt: skip


def byte_tokenizer(template: str | None = None, writes: str = "$A", merges: Sequence[tuple[str, str]] = ()) -> Any:
    """A tokenizer with a token for each byte, "!" being token 0, and for each marker."""
    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges), *MARKERS]
    numbers = {name: i for i, name in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(numbers, list(merges)))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(list(MARKERS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=writes, special_tokens=[(name, numbers[name]) for name in MARKERS]
    )
    end = "<end>" if template is None else "<|e|>"
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token=end, bos_token="<|b|>")
    made.chat_template = None if template is None else TEMPLATES[template]
    return made


def encode(rows: Path | str, tokenizer: Any, **options: Any) -> tuple[list[str], list[str], Any]:
    """Return the rows as a model sees them, with what is trained between brackets, what is said, and the encoded."""
    data = load_data(str(rows))
    config = AutoConfig.for_model("llama", **tiny.FAMILIES["llama"], vocab_size=len(tokenizer))
    model = meta_model(config)
    encoded = encode_chat(tokenizer, model, data.splits["train"].to_dict(), TaskOptions(2048, **options), True)
    seen = []
    for row in encoded.rows:
        text, inside = "", False
        for token, label in zip(row["input_ids"], row["labels"], strict=True):
            if (label != IGNORE_INDEX) != inside:
                inside, text = not inside, text + ("⟧" if inside else "⟦")
            text += tokenizer.decode([token])
        seen.append(text + ("⟧" if inside else ""))
    return seen, [*data.notes, *notes(encoded, "train", 2048)], encoded


def u(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def a(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def s(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def m(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **more}


OPEN = m(u("Is it open?"), a("Yes."))
SEEN = "<|u|>Is it open?<|e|><|a|>⟦Yes.<|e|>⟧"
CALL = {"type": "function", "function": {"name": "clock", "arguments": {"at": 7}}}
WOKEN = '<|u|>Wake me.<|e|><|a|>⟦clock{"at": 7}<|e|>⟧'
TOOLS = {
    "conversations": [
        {"from": "human", "value": "When?"},
        {"from": "function_call", "value": '{"name": "lamp", "arguments": {"room": 2}}'},
        {"from": "observation", "value": "18:00"},
        {"from": "gpt", "value": "At six."},
    ],
    "system": "Be brief.", "tools": '[{"name": "lamp"}]',
}  # fmt: skip
TOOLS_SEEN = '<|s|>Be brief.<|e|><|u|>When?<|e|><|a|>⟦lamp{"room": 2}<|e|>⟧<|t|>18:00<|e|><|a|>⟦At six.<|e|>⟧'
GREEN = {"instruction": "Name a colour.", "output": "Green."}
GREEN_SEEN = "<|u|>Name a colour.<|e|><|a|>⟦Green.<|e|>⟧"
THOUGHTS = m(u("2+2?"), a("<think>2</think>4"), u("+1?"), a("<think>4</think>5"))

TRAINED: dict[str, tuple[str | None, list[Any], list[str], str]] = {
    # ShareGPT
    "roles of tools": ("calls", [TOOLS], [TOOLS_SEEN], ""),
    # Alpaca
    "no input": ("plain", [{**GREEN, "input": None}, GREEN, {**GREEN, "input": ""}], [GREEN_SEEN] * 3, ""),
    "input and system": (
        "plain", [{"instruction": "Translate.", "input": "blau", "output": "blue", "system": "Be brief."}],
        ["<|s|>Be brief.<|e|><|u|>Translate.\nblau<|e|><|a|>⟦blue<|e|>⟧"], "",
    ),
    "history": (
        "plain", [{**GREEN, "history": [["Hi.", "Ho."]]}],
        ["<|u|>Hi.<|e|><|a|>⟦Ho.<|e|>⟧" + GREEN_SEEN], "",
    ),
    # messages
    "arguments of several types": (
        "calls",
        [m(u("Go."), a("", tool_calls=[{"function": {"name": "c", "arguments": x}}])) for x in ({"at": "7"}, {"at": 7})]
        + [m(u("Go."), a("", tool_calls=[{"function": {"name": "c", "arguments": '{"b": 1, "a": 2}'}}]))],
        [f"<|u|>Go.<|e|><|a|>⟦c{x}<|e|>⟧" for x in ('{"at": "7"}', '{"at": 7}', '{"b": 1, "a": 2}')], "",
    ),
    "a call without content": (
        "calls",
        [m(u("Wake me."), one) for one in (
            a(None, tool_calls=[CALL]), {"role": "assistant", "tool_calls": [CALL]}, a("", tool_calls=[CALL]),
        )],
        [WOKEN] * 3, "",
    ),
    "content in parts": ("plain", [m(u([{"type": "text", "text": "Is it open?"}]), a("Yes.")), OPEN], [SEEN] * 2, ""),
    "an empty answer": ("plain", [m(u("Hm."), a(""))], ["<|u|>Hm.<|e|><|a|>⟦<|e|>⟧"], "1 empty answer"),
    "the assistant begins": (
        "plain", [m(a("What?"), u("Open."), a("Done.")), m(s("Hm."), a("Hi."))],
        ["<|a|>⟦What?<|e|>⟧<|u|>Open.<|e|><|a|>⟦Done.<|e|>⟧", "<|s|>Hm.<|e|><|a|>⟦Hi.<|e|>⟧"], "",
    ),
    "a question at the end": (
        "plain", [m(*OPEN["messages"], u("When?"))], [SEEN + "<|u|>When?<|e|>"],
        "1 conversation with a question at the end",
    ),
    "messages as text": (
        "plain", [{"messages": json.dumps(OPEN["messages"])}], [SEEN], "messages read from text",
    ),
    "weight 0": (
        "plain", [m(u("2+2?"), a("5.", weight=0), u("Again?"), a("4.", weight=1))],
        ["<|u|>2+2?<|e|><|a|>5.<|e|><|u|>Again?<|e|><|a|>⟦4.<|e|>⟧"], "",
    ),
    "weight 0 beside marks": (
        "marked", [m(u("2+2?"), a("5.", weight=0), u("Again?"), a("4."))],
        ["<|u|>2+2?<|e|><|a|>5.<|e|><|u|>Again?<|e|><|a|>⟦4.<|e|>⟧"], "",
    ),
    "repeated": (
        "plain", [OPEN, m(u("Is it open?"), a("No.")), OPEN], [SEEN, SEEN.replace("Yes", "No"), SEEN],
        "3 rows with a question that other rows answer differently; 1 repeated row",
    ),
    # templates
    "a begin token": ("begin", [OPEN], ["<|b|>" + SEEN], ""),
    "a default system message": (
        "default", [OPEN, m(a("Hi."))],
        ["<|s|>You help.<|e|>" + SEEN, "<|s|>You help.<|e|><|a|>⟦Hi.<|e|>⟧"], "",
    ),
    "thoughts that are dropped": (
        "drops", [THOUGHTS],
        [
            "<|u|>2+2?<|e|><|a|>⟦<think>2</think>4<|e|>⟧",
            "<|u|>2+2?<|e|><|a|>4<|e|><|u|>+1?<|e|><|a|>⟦<think>4</think>5<|e|>⟧",
        ],
        "so each answer of 1 conversation is a row of its own",
    ),
    "another prompt in use": ("thinks", [OPEN], [SEEN], "generation will see another prompt than training"),
    "trimmed": ("trims", [m(u("Say. "), a("  yes \n"))], ["<|u|>Say.<|e|><|a|>⟦yes<|e|>⟧"], ""),
    "control tokens in a question": (
        "plain", [m(u("What is <|e|><|a|>Five.<|e|>?"), a("A token."))],
        ["<|u|>What is <|e|><|a|>Five.<|e|>?<|e|><|a|>⟦A token.<|e|>⟧"], "a question contains control tokens",
    ),
    "marks": ("marked", [OPEN], [SEEN], ""),
    "token 0, and no end": (
        "bare", [m(a("!"), u("bbbb"), a("!"))], ["⟦!⟧<|u|>bbbb<|a|>⟦!⟧"], "2 answers without an end",
    ),
    "a line end behind the end": ("lines", [OPEN], [SEEN.replace("<|e|><|a|>", "<|e|>\n<|a|>") + "\n"], ""),
    "all answers": (
        "plain", [m(s("Hm."), u("1?"), a("2."), u("3?"), a("4."))],
        ["<|s|>Hm.<|e|><|u|>1?<|e|><|a|>⟦2.<|e|>⟧<|u|>3?<|e|><|a|>⟦4.<|e|>⟧"], "",
    ),
    # no template
    "prompt and completion": (None, [{"prompt": "ab", "completion": "cd"}], ["ab⟦cd<end>⟧"], ""),
    "messages as prompt": (
        "plain", [{"prompt": [u("1?"), a("2."), u("3?")], "completion": [a("4.")]}],
        ["<|u|>1?<|e|><|a|>2.<|e|><|u|>3?<|e|><|a|>⟦4.<|e|>⟧"], "",
    ),
    "texts": (None, [{"text": "ab"}, {"text": "ab<end>"}], ["⟦ab<end>⟧"] * 2, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", TRAINED)
def test_what_is_trained(tmp_path: Path, case: str) -> None:
    template, rows, expected, note = TRAINED[case]
    seen, lines, encoded = encode(tiny.lines(tmp_path / "rows.jsonl", rows), byte_tokenizer(template))
    assert seen == expected and note in "; ".join(lines)
    if "control" in case:
        controls = [token for token in encoded.rows[0]["input_ids"] if token >= 256]
        assert len(controls) == 4, "the question's are text"


@pytest.mark.parametrize(("loss_on", "expected"), [
    ("all", "⟦<|u|>1?<|e|><|a|>2.<|e|><|u|>3?<|e|><|a|>4.<|e|>⟧"),
    ("last", "<|u|>1?<|e|><|a|>2.<|e|><|u|>3?<|e|><|a|>⟦4.<|e|>⟧"),
])  # fmt: skip
@pytest.mark.parametrize("template", ["plain", "marked"])
def test_loss_on_other_tokens(tmp_path: Path, template: str, loss_on: str, expected: str) -> None:
    rows = tiny.lines(tmp_path / "rows.jsonl", [m(u("1?"), a("2."), u("3?"), a("4."))])
    assert encode(rows, byte_tokenizer(template), loss_on=loss_on)[0] == [expected]


def test_the_tokenizer_writes_its_tokens_once(tmp_path: Path) -> None:
    """A tokenizer that writes a begin or an end by itself does so once, and never between prompt and answer."""
    rows = tiny.lines(tmp_path / "prompts.jsonl", [{"prompt": "ab", "completion": "cd"}])
    assert encode(rows, byte_tokenizer(None, "$A <end>"))[0] == ["ab⟦cd<end>⟧"]
    texts = tiny.lines(tmp_path / "texts.jsonl", [{"text": "ab"}, {"text": "<|b|>ab"}])
    assert [one.count("<|b|>") for one in encode(texts, byte_tokenizer(None, "<|b|> $A"))[0]] == [1, 1]
    chats = tiny.lines(tmp_path / "chats.jsonl", [OPEN])
    assert encode(chats, byte_tokenizer("begin", "<|b|> $A"))[0] == ["<|b|>" + SEEN]


REFUSED: dict[str, tuple[str | None, list[Any], tuple[str, ...]]] = {
    "an object as output": ("plain", [{"instruction": "Read.", "output": {"a": 1}}], ("line 1 (row 1)", "output")),
    "an unknown role": ("plain", [OPEN, m({"role": "narrator", "content": "Hm."})], ("row 2", "'narrator'", "user")),
    "no role": ("plain", [m({"content": "Hm."})], ("row 1", "does not say who speaks")),
    "an image": (
        "plain", [m(u([{"type": "image_url", "image_url": "x"}]), a("A cat."))], ("row 1", "an image (image_url)"),
    ),
    "sound": ("plain", [m(u([{"type": "input_audio"}]), a("A cat."))], ("row 1", "sound")),
    "a column of images": ("plain", [m(u("<image>?"), a("A cat."), images=["a.png"])], ("row 1", "images", "an image")),
    "no content": ("plain", [m(u("Hm."), a(None))], ("row 1", "content must be a text, not missing")),
    "no messages": ("plain", [m()], ("row 1", "no messages")),
    "a weight of 0.5": ("plain", [m(u("Hm."), a("Ho.", weight=0.5))], ("row 1", "weight must be 0")),
    "half text, half messages": ("plain", [{"prompt": "a", "completion": [a("b")]}], ("row 1", "both be texts")),
    "no template": (None, [OPEN], ("no chat template", "--template: roles, alpaca")),
    "the template's own words": ("no system", [OPEN, m(s("Hm."), a("Ho."))], ("row 2", "No system!")),
    "calls that the template does not write": ("plain", [TOOLS], ("row 1", "does not write calls of tools")),
    "every row that is wrong": (
        "plain", [m(), OPEN, m({"role": "x", "content": ""})], ("row 1", "row 3", "2 problems"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(tmp_path: Path, case: str) -> None:
    template, rows, expected = REFUSED[case]
    with pytest.raises(DeltuneError) as caught:
        encode(tiny.lines(tmp_path / "rows.jsonl", rows), byte_tokenizer(template))
    assert [part for part in expected if part not in str(caught.value)] == []


def test_a_token_on_both_sides_is_refused(tmp_path: Path) -> None:
    rows = tiny.lines(tmp_path / "rows.jsonl", [{"prompt": "ab", "completion": "cd"}])
    with pytest.raises(DeltuneError, match=r"row 1\): the token 'bc' belongs to both sides"):
        encode(rows, byte_tokenizer(None, merges=[("b", "c")]))


@pytest.mark.parametrize("trim", [False, True])
def test_a_blank_belongs_to_the_word_behind_it(tmp_path: Path, trim: bool) -> None:
    """Also where the tokenizer leaves the blank out of the places that it gives for its tokens."""
    tokenizer = byte_tokenizer(merges=[("Ġ", "c")])
    if trim:
        tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    behind = tiny.lines(tmp_path / "behind.jsonl", [{"prompt": "ab", "completion": " cd"}])
    assert encode(behind, tokenizer)[0] == ["ab⟦ cd<end>⟧"]
    before = tiny.lines(tmp_path / "before.jsonl", [{"prompt": "ab ", "completion": "cd"}])
    with pytest.raises(DeltuneError, match=r"the token ' c' belongs to both sides of 'ab ' \| 'cd'"):
        encode(before, tokenizer)


def test_what_is_cut_is_counted_and_refused_above_a_share(tmp_path: Path) -> None:
    rows = [m(u("Read: " + "la " * 60), a("Done."))] * 4
    data = load_data(str(tiny.lines(tmp_path / "rows.jsonl", rows)))
    tokenizer = byte_tokenizer("plain")
    model = meta_model(AutoConfig.for_model("llama", **tiny.FAMILIES["llama"], vocab_size=len(tokenizer)))
    columns = data.splits["train"].to_dict()
    cut = encode_chat(tokenizer, model, columns, TaskOptions(64), True)
    assert (cut.truncated, cut.truncated_tokens, cut.untrained, len(cut)) == (4, 4 * (cut.longest - 64), 4, 4)
    with pytest.raises(DeltuneError, match=r"every answer is cut away: 4 of 4 rows .*--max-length.* 195 tokens"):
        check_lengths(cut, "train", 64, 1.0)
    some = encode_chat(tokenizer, model, columns, TaskOptions(192), True)
    with pytest.raises(DeltuneError, match=r"4 of 4 rows .* share of 0\.1"):
        check_lengths(some, "train", 192, 0.1)
    check_lengths(some, "train", 192, 1.0)
    assert "4 of 4 rows are cut to 192 tokens, by 12 tokens in all" in notes(some, "train", 192)[-1]


FILES: dict[str, tuple[str, str, str]] = {
    "messages.jsonl": (json.dumps(OPEN), "messages", SEEN),
    "mark.jsonl": ("\ufeff" + json.dumps(OPEN), "messages", SEEN),
    "array.json": (json.dumps([OPEN], indent=2), "messages", SEEN),
    "sharegpt.jsonl": (json.dumps(TOOLS), "ShareGPT", TOOLS_SEEN),
    "alpaca.json": (json.dumps([GREEN]), "Alpaca", GREEN_SEEN),
    "alpaca.csv": ("instruction,input,output\nName a colour.,,Green.\n", "Alpaca", GREEN_SEEN),
    "alpaca.tsv": ("instruction\toutput\nName a colour.\tGreen.\n", "Alpaca", GREEN_SEEN),
    "completions.csv": ("prompt,completion\nab,cd\n", "prompt and completion", "ab⟦cd<|e|>⟧"),
    "texts.jsonl": ('{"text": "ab"}', "texts", "⟦ab<|e|>⟧"),
}
"""File -> its contents, the format as which it is recognised, and what of it is trained."""


@pytest.mark.parametrize("name", FILES)
def test_files_and_their_formats(tmp_path: Path, name: str) -> None:
    text, form, expected = FILES[name]
    (tmp_path / name).write_text(text)
    assert load_data(str(tmp_path / name)).format == form
    assert encode(tmp_path / name, byte_tokenizer("calls"))[0] == [expected]


def test_parquet_gives_back_the_keys_that_were_there(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(
        pyarrow.Table.from_pylist([m(u("Wake me."), a("", tool_calls=[CALL])), OPEN]), tmp_path / "a.parquet"
    )
    assert encode(tmp_path / "a.parquet", byte_tokenizer("calls"))[0] == [WOKEN, SEEN]


def test_columns_may_have_other_names_and_splits_share_rows(tmp_path: Path) -> None:
    rows = [{"question": "ab", "reply": "cd"}, {"question": "ef", "reply": "gh"}]
    tiny.lines(tmp_path / "train.jsonl", rows)
    tiny.lines(tmp_path / "test.jsonl", [rows[0], {"question": "ef", "reply": "x"}])
    data = load_data(str(tmp_path), {"prompt": "question", "completion": "reply"})
    assert data.kind == "chat" and [json.loads(x)["completion"] for x in data.splits["train"]["conversation"]] == [
        "cd",
        "gh",
    ]
    assert data_notes(data) == [
        "1 row of test with a question of train, and another answer",
        "1 row of test also in train",
    ]
    with pytest.raises(DeltuneError, match=r"chat is read from one of these formats: messages \(messages\); ShareGPT"):
        load_data(str(tmp_path), kind="chat")


PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "texts": ({"prompt": "p", "chosen": "a", "rejected": "b"}, {"prompt": "p", "chosen": "a", "rejected": "b"}),
    "a prompt that both have": (
        {"chosen": "Head cover: hat", "rejected": "Head cover: helmet"},
        {"prompt": "Head cover:", "chosen": " hat", "rejected": " helmet"},
    ),
    "lines that both have": (
        {"chosen": "Q: hat?\n\nA: yes  it is", "rejected": "Q: hat?\n\nA: yes  no"},
        {"prompt": "Q: hat?\n\nA: yes", "chosen": "  it is", "rejected": "  no"},
    ),
    "nothing that both have": (
        {"chosen": "hat", "rejected": "cap"}, {"prompt": "", "chosen": "hat", "rejected": "cap"}),
    "messages": (
        {"chosen": [u("p"), a("x")], "rejected": [u("p"), a("y")]},
        {"prompt": [u("p")], "chosen": [a("x")], "rejected": [a("y")]},
    ),
    "a prompt before messages": (
        {"prompt": "p", "chosen": [a("x")], "rejected": [a("y")]},
        {"prompt": [u("p")], "chosen": [a("x")], "rejected": [a("y")]},
    ),
    "rated": ({"prompt": "p", "completion": "x", "label": True}, {"prompt": "p", "completion": "x", "label": True}),
}  # fmt: skip


@pytest.mark.parametrize("case", PAIRS)
def test_preferences_are_recognised(tmp_path: Path, case: str) -> None:
    row, expected = PAIRS[case]
    data = load_data(str(tiny.lines(tmp_path / "rows.jsonl", [row])))
    assert data.kind == "preference" and json.loads(data.splits["train"]["conversation"][0]) == expected


def test_pairs_that_are_equal_are_named(tmp_path: Path) -> None:
    pair, equal = {"prompt": "p", "chosen": "a", "rejected": "b"}, {"prompt": "q", "chosen": "a", "rejected": "a"}
    data = load_data(str(tiny.lines(tmp_path / "some.jsonl", [pair, equal])))
    assert "row 2: chosen equals rejected" in data.notes
    with pytest.raises(DeltuneError, match="chosen equals rejected in all rows"):
        load_data(str(tiny.lines(tmp_path / "all.jsonl", [equal])))


def test_a_mixture_has_its_shares_by_the_seed(tmp_path: Path) -> None:
    tiny.lines(tmp_path / "a" / "train.jsonl", [{"prompt": f"a{i}", "completion": "x"} for i in range(60)])
    tiny.lines(tmp_path / "b" / "train.jsonl", [m(u(f"b{i}"), a("y")) for i in range(20)])
    tiny.lines(tmp_path / "b" / "test.jsonl", [m(u("c"), a("y"))])
    source = f"{tmp_path / 'a'}=.5,{tmp_path / 'b'}=0.5"
    data = load_data(source)
    rows = data.splits["train"]["conversation"]
    assert [sum('"prompt"' in row for row in rows), len(rows), len(set(rows)), len(data.splits["test"])] == [
        40,
        80,
        60,
        1,
    ]
    assert data.notes[0] == f"40 rows of an epoch are from the 60 of {tmp_path / 'a'}"
    assert load_data(source).fingerprint == data.fingerprint != load_data(source, seed=1).fingerprint
    assert len(load_data(source, max_rows={"train": 10}).splits["train"]) == 10
    config = RunConfig.from_flat(model="minilm", data=source, method="lora")
    assert RunConfig.from_flat(**config.flat()) == config and config.data.source == source.replace("=.5", "=0.5")
    tiny.data(tmp_path / "c")
    with pytest.raises(DeltuneError, match="is classification"):
        load_data(f"{tmp_path / 'b'}=1,{tmp_path / 'c'}=1")
    rows = [{"text": "t", "text2": "p", "label": str(i)} for i in range(2)]
    pairs = [
        str(tiny.lines(tmp_path / "pairs.jsonl", rows)),
        str(tiny.lines(tmp_path / "texts.jsonl", [{"text": "t", "label": str(i), "more": i} for i in range(2)])),
    ]
    for first, second in (pairs, pairs[::-1]):
        with pytest.raises(DeltuneError, match=r"has text, pair and label|has text and label"):
            load_data(f"{first}=1,{second}=1", training=True)
    assert load_data(f"{pairs[0]}=1,{pairs[1]}=1", {"text": "text", "label": "label"}, training=True).splits
