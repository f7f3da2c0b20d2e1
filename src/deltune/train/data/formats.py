"""Conversations, answered prompts, texts and preferences in the formats that people have them in, in one form.

A row becomes a JSON text with either "messages" (and "tools"), or "prompt" and "completion", or "text"; a row of
preferences has "prompt", "chosen" and "rejected". JSON keeps what a table would change: absent keys stay absent, and
an argument of a tool is a number in one row and a text in another.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DeltuneError, counted, excerpt, unknown_name
from ...files import parse_json
from ...templates import question
from .columns import ID_COLUMN_NAMES, ColumnNames
from .readers import DataFile, has_lone_surrogate, short_repr
from .rows import Row

ROLES = {
    "system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant",
    "tool": "tool", "observation": "tool", "function_response": "tool", "tool_response": "tool",
    "function_call": "call", "tool_call": "call",
}  # fmt: skip
"""Names of those who speak -> the role in a chat template; the text of a "call" is the call of a tool in JSON."""

MEDIA = {
    "image": "an image", "images": "an image", "image_url": "an image", "input_image": "an image",
    "audio": "sound", "audios": "sound", "audio_url": "sound", "input_audio": "sound",
    "video": "a video", "videos": "a video", "file": "a file",
}  # fmt: skip
"""Types of parts of a message, and columns, that are no text."""


COLUMN = "conversation"
"""The column of rows in the one form."""


class FormatError(Exception):
    """A row is not of its format; the message says why."""


@dataclass(frozen=True)
class Format:
    """A format of rows.

    Attributes:
        name: What messages call it.
        kind: The kind of task that it is for.
        needed: The columns by which it is recognised.
        read: read(row) returns the row in the one form.
        only: Whether it is recognised only where no other column stands beside those needed, but for keys.
        others: Columns that it may have as well.
    """

    name: str
    kind: str
    needed: tuple[str, ...]
    read: Callable[[Row], dict[str, Any]]
    only: bool = False
    others: tuple[str, ...] = ()

    @property
    def has_messages(self) -> bool:
        """Whether its rows are lists of messages."""
        return self.needed[0] in ("messages", "conversations")


def recognise(columns: Sequence[str], kind: str | None = None) -> Format | None:
    """Return the format of rows with these columns, among the formats for a kind of task or of all."""
    keys = {*ID_COLUMN_NAMES, "", "unnamed: 0"}
    return next(
        (
            one
            for one in FORMATS
            if {*one.needed} <= {*columns}
            and kind in (None, one.kind)
            and not (one.only and kind is None and {name.lower() for name in columns} - {*one.needed} - keys)
        ),
        None,
    )


def described(kind: str | None = None) -> str:
    """Return the formats for a kind of task, each with its columns, for messages."""
    shown = [f"{one.name} ({', '.join(one.needed)})" for one in FORMATS if kind in (None, one.kind)]
    return "; ".join(shown)


def choose(first: DataFile, kind: str | None, names: ColumnNames | None) -> tuple[Format, dict[str, str]] | None:
    """Return the format of a file and its columns, format's name -> file's; None for what is no conversation.

    The kind of task and the columns, by the format's names, may be given.
    """
    if kind not in (None, *KINDS) or ".txt" in first.name or not (names is None or isinstance(names, Mapping) or kind):
        return None
    by_name = dict(names) if isinstance(names, Mapping) else None
    form = recognise(first.columns if by_name is None else list(by_name), kind)
    if form is None and kind is not None:
        raise DeltuneError(
            f"{first.name} has the columns {', '.join(first.columns)}, and {kind} is read from one of these formats: "
            f"{described(kind)}. Say which column is which: --columns {form_example(kind)}"
        )
    if form is None or (form.only and by_name is not None and kind is None):
        return None
    known = (*form.needed, *form.others)
    return form, by_name or {name: name for name in known if name in first.columns}


def form_example(kind: str) -> str:
    """Return an example of --columns for a kind of task."""
    return "prompt=…,completion=…" if kind == "chat" else "prompt=…,chosen=…,rejected=…"


def read_files(
    files: Mapping[str, DataFile], form: Format, columns: Mapping[str, str], problems: list[str]
) -> dict[str, DataFile]:
    """Return files whose rows have the row in the one form as JSON, and its place; `columns` are those of `choose`."""

    def read(file: DataFile) -> Iterator[tuple[int, Row]]:
        for i, (number, row) in enumerate(file.rows, 1):
            try:
                named = {**row, **{name: row.get(column) for name, column in columns.items()}}
                value = json.dumps(form.read(named), ensure_ascii=False)
                if has_lone_surrogate(value):
                    raise FormatError("it holds half a character (a lone surrogate)")
            except FormatError as error:
                problems.append(f"{row_place(file, number, i)}: {error}")
                continue
            kept = {"id": row["id"]} if isinstance(row.get("id"), str | int) else {}
            yield number, {**kept, COLUMN: value, "place": row_place(file, number, i)}

    return {split: file.with_rows(read(file)) for split, file in files.items()}


def row_place(file: DataFile, number: int, row: int) -> str:
    """Return the file, the line and the number of a row."""
    return file.location(number) + (f" (row {row})" if file.unit != "row" else "")


# -- formats


def _read_list(name: str) -> Callable[[Row], dict[str, Any]]:
    """Return what reads a row whose messages stand in one column."""
    return lambda row: _conversation(_value(row, name), row)


def _read_alpaca(row: Row) -> dict[str, Any]:
    instruction, answer = _text(row, "instruction"), _text(row, "output")
    more = _text(row, "input") if row.get("input") is not None else ""
    messages = []
    for turn in _value(row, "history") or ():
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)):
            raise FormatError(f"history must be pairs of texts, a question and its answer each, not {short_repr(turn)}")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    messages.append(question(instruction, more))
    return _conversation([*messages, {"role": "assistant", "content": answer}], row)


def _read_prompt_completion(row: Row) -> dict[str, Any]:
    prompt, completion = _value(row, "prompt"), _value(row, "completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return {"prompt": prompt, "completion": completion}
    if not (isinstance(prompt, list) and isinstance(completion, list)):
        raise FormatError(
            f"prompt and completion must both be texts or both be messages, not {short_repr(prompt)} and "
            f"{short_repr(completion)}"
        )
    before = [{**one, "weight": 0} if _role(one) == "assistant" else one for one in prompt]
    return _conversation([*before, *completion], row)


def _read_preference(row: Row) -> dict[str, Any]:
    prompt, chosen, rejected = (_value(row, name) for name in ("prompt", "chosen", "rejected"))
    if isinstance(chosen, str) and isinstance(rejected, str) and isinstance(prompt, str | None):
        if prompt is None:  # it ends behind the last word that both have; the blank is a part of the next word's token
            letters = zip(chosen, rejected, strict=False)
            shared = chosen[: next((i for i, (a, b) in enumerate(letters) if a != b), len(chosen))]
            if chosen != rejected:
                shared = shared[: max((i + 1 for i, letter in enumerate(shared) if letter.isspace()), default=0)]
                shared = shared.rstrip(" ")
            prompt, chosen, rejected = shared, chosen[len(shared) :], rejected[len(shared) :]
        return {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        raise FormatError(
            f"chosen and rejected must both be texts or both be messages, as the prompt is, not {short_repr(chosen)} "
            f"and {short_repr(rejected)}"
        )
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    before = _conversation(prompt, row)["messages"] if prompt else []
    pair = [[*before, *_conversation(one, {})["messages"]] for one in (chosen, rejected)]
    if not before:
        different = (i for i, (a, b) in enumerate(zip(*pair, strict=False)) if a != b)
        before = pair[0][: next(different, min(map(len, pair)) - 1)]
    return {"prompt": before, "chosen": pair[0][len(before) :], "rejected": pair[1][len(before) :]}


def _read_unpaired(row: Row) -> dict[str, Any]:
    if not isinstance(row.get("label"), bool):
        raise FormatError(f"label must be true or false, not {short_repr(row.get('label'))}")
    return {**_read_prompt_completion({**row, "label": None}), "label": row["label"]}


FORMATS = (
    Format("messages", "chat", ("messages",), _read_list("messages"), others=("system", "tools")),
    Format("ShareGPT", "chat", ("conversations",), _read_list("conversations"), others=("system", "tools")),
    Format("preferences", "preference", ("chosen", "rejected"), _read_preference, others=("prompt",)),
    Format("Alpaca", "chat", ("instruction", "output"), _read_alpaca, others=("input", "system", "history")),
    Format("rated answers", "preference", ("prompt", "completion", "label"), _read_unpaired),
    Format("prompt and completion", "chat", ("prompt", "completion"), _read_prompt_completion, others=("tools",)),
    Format("texts", "chat", ("text",), lambda row: {"text": _text(row, "text")}, only=True),
)
"""The formats, the first that fits being that of a file."""


KINDS = {one.kind for one in FORMATS}
"""The kinds of task whose rows are in the one form."""


def as_conversations(text: str) -> list[str]:
    """Return a row in the one form as conversations: of a preference each of its answers behind the prompt."""
    row = json.loads(text)
    answers = [row[name] for name in ("chosen", "rejected") if name in row]
    if not answers:
        return [text]
    if isinstance(row["prompt"], str):
        values: list[Any] = [{"prompt": row["prompt"], "completion": answer} for answer in answers]
    else:
        before = [{**one, "weight": 0} for one in row["prompt"]]
        values = [{"messages": [*before, *answer]} for answer in answers]
    return [json.dumps(value, ensure_ascii=False) for value in values]


def readable(text: str) -> str:
    """Return a row in the one form as a text that people read."""
    row = json.loads(text)
    if "messages" in row:
        return "\n".join(f"{one['role']}: {one['content']}" for one in row["messages"])
    return str(row["text"] if "text" in row else row["prompt"] + row["completion"])


# -- parts of rows


def _value(row: Row, name: str) -> Any:
    """Return a value of a row; messages and tools that are a text are parsed."""
    value = row.get(name)
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    always = name in ("messages", "conversations", "tools", "history")
    try:
        parsed = parse_json(value)
    except ValueError as error:
        if always:
            raise FormatError(f"{name} is a text that is not JSON ({error})") from error
        return value
    return parsed if always or (parsed and all(map(_role, parsed))) else value


def _text(row: Row, name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise FormatError(f"{name} must be a text, not {_described(value)}")
    return value


def _described(value: Any) -> str:
    if value is None:
        return "missing"
    return f"{'an object' if isinstance(value, dict) else short_repr(value)}"


def _conversation(messages: Any, row: Row) -> dict[str, Any]:
    """Return messages in the form of chat templates, with the row's own `system` and `tools`."""
    if media := [name for name in row if name in MEDIA and row[name] not in (None, "", [], {})]:
        raise FormatError(f"its column {media[0]} holds {MEDIA[media[0]]}, and deltune reads text alone")
    if not isinstance(messages, list):
        raise FormatError(f"its messages must be a list, not {_described(messages)}")
    if not messages:
        raise FormatError("it has no messages")
    result = [_message(one, i) for i, one in enumerate(messages, 1)]
    system, tools = row.get("system"), _value(row, "tools")
    if system is not None and not isinstance(system, str):
        raise FormatError(f"system must be a text, not {_described(system)}")
    if system:
        if result[0]["role"] == "system":
            raise FormatError("it has a system message in its messages and another one in the column system")
        result.insert(0, {"role": "system", "content": system})
    if tools is not None and not isinstance(tools, list) and tools != "":
        raise FormatError(f"tools must be a list of tools, not {_described(tools)}")
    return {"messages": result, **({"tools": tools} if tools else {})}


def _role(message: Any) -> str:
    """Return the role of a message, "" for one without."""
    name = message.get("role", message.get("from")) if isinstance(message, dict) else None
    return ROLES.get(name, "") if isinstance(name, str) else ""


def _message(message: Any, number: int) -> dict[str, Any]:
    """Return a message with its role, its content as a text, and its calls of tools."""
    if not isinstance(message, dict):
        raise FormatError(f"message {number} is no object but {short_repr(message)}")
    role, name = _role(message), message.get("role", message.get("from"))
    if name is None:
        raise FormatError(f"message {number} does not say who speaks (role or from)")
    if not role:
        raise FormatError(f"message {number}: {unknown_name('role', name, ROLES)}")
    kept = {k: v for k, v in message.items() if k not in ("role", "from", "content", "value") and v is not None}
    content = message.get("content", message.get("value"))
    if role == "call":
        return {"role": "assistant", "content": "", **kept, "tool_calls": [_call(content, number)]}
    if "tool_calls" in kept:
        if not isinstance(kept["tool_calls"], list):
            raise FormatError(f"message {number}: tool_calls must be a list, not {_described(kept['tool_calls'])}")
        if not kept["tool_calls"]:
            del kept["tool_calls"]
        else:
            kept["tool_calls"] = [_call(one, number) for one in kept["tool_calls"]]
    if "weight" in kept and kept["weight"] not in (0, 1):
        raise FormatError(f"message {number}: weight must be 0 (not trained) or 1, not {excerpt(kept['weight'])}")
    if content is None and "tool_calls" in kept:
        content = ""
    return {"role": role, "content": _content(content, number), **kept}


def _content(content: Any, number: int) -> str:
    """Return the text of a message, which may be given in parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise FormatError(f"message {number}: its content must be a text, not {_described(content)}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind in MEDIA:
            raise FormatError(f"message {number} holds {MEDIA[kind]} ({kind}), and deltune reads text alone")
        else:
            raise FormatError(f"message {number}: a part of its content is no text but {short_repr(part)}")
    return "".join(texts)


def _call(call: Any, number: int) -> dict[str, Any]:
    """Return the call of a tool as chat templates read it, with its arguments as an object."""
    try:
        call = parse_json(call) if isinstance(call, str) else call
        function = call.get("function", call)
        name, arguments = function["name"], function.get("arguments", {})
        arguments = parse_json(arguments) if isinstance(arguments, str) and arguments.strip() else arguments or {}
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise FormatError(
            f'message {number}: the call of a tool must be {{"name": …, "arguments": {{…}}}}, not {short_repr(call)}'
        ) from error
    rest = {key: value for key, value in call.items() if key in ("id", "index") and value is not None}
    return {**rest, "type": "function", "function": {"name": name, "arguments": arguments}}


# -- what is said about the rows


def notes_on_rows(files: Mapping[str, DataFile]) -> list[str]:
    """Return what a user should know about rows in the one form: empty answers, open questions, repetitions."""
    count = empty = open_ends = 0
    equal: list[str] = []
    for _, stored in (row for file in files.values() for row in file.rows):
        row, place, count = json.loads(stored[COLUMN]), stored["place"], count + 1
        chat = row.get("messages", [])
        empty += sum(one["role"] == "assistant" and not (one["content"] or "tool_calls" in one) for one in chat)
        empty += row.get("completion") == ""
        open_ends += bool(chat) and chat[-1]["role"] != "assistant"
        if "chosen" in row and row["chosen"] == row["rejected"]:
            equal.append(place.split("(")[-1].rstrip(")") if "(" in place else place)
    notes = []
    if empty:
        notes.append(f"{counted(empty, 'empty answer')}, of which the end is trained")
    if open_ends:
        notes.append(f"{counted(open_ends, 'conversation')} with a question at the end, which is not trained")
    if equal:
        if len(equal) == count:
            raise DeltuneError("chosen equals rejected in all rows, so there is no preference to learn")
        notes.append(f"{', '.join(equal[:10])}{' …' if len(equal) > 10 else ''}: chosen equals rejected")
    return [*notes, *_notes_on_repetitions(files)]


def _notes_on_repetitions(files: Mapping[str, DataFile]) -> list[str]:
    """Return which rows and questions occur more than once, in a split and in several."""
    notes = []
    hashes = {split: _hashes(file) for split, file in files.items()}
    for split, (rows, questions, answers) in hashes.items():
        where = f" in {split}" if len(files) > 1 else ""
        repeated, differing = count_repetitions(rows, questions[questions != 0], answers[questions != 0])
        if differing:
            notes.append(f"{counted(differing, 'row')}{where} with a question that other rows answer differently")
        if repeated:
            notes.append(f"{counted(repeated, 'repeated row')}{where}")
    if "train" in hashes:
        known, known_questions, _ = hashes.pop("train")
        for split, (rows, questions, _) in hashes.items():
            new = questions[(questions != 0) & ~np.isin(rows, known)]
            if answered := np.isin(new, known_questions).sum():
                notes.append(f"{counted(answered, 'row')} of {split} with a question of train, and another answer")
    return notes


def count_repetitions(
    rows: NDArray[np.int64], questions: NDArray[np.int64], answers: NDArray[np.int64]
) -> tuple[int, int]:
    """Return how many rows have stood before, and how many questions stand beside another answer, from hashes."""
    values, of_answers = np.unique(np.unique(np.stack([questions, answers]), axis=1)[0], return_counts=True)
    return len(rows) - len(np.unique(rows)), int(np.isin(questions, values[of_answers > 1]).sum())


def _hashes(file: DataFile) -> NDArray[np.int64]:
    """Return hashes of the rows of a file, their questions, 0 for none, and their answers."""
    numbers = array("q")
    for _, stored in file.rows:
        row = json.loads(stored[COLUMN])
        question = question_of(row)
        numbers.extend((hash(stored[COLUMN]), 0 if question is None else hash(question), hash(_answer(row))))
    return np.frombuffer(numbers, np.int64).reshape(-1, 3).T


def question_of(row: Mapping[str, Any]) -> str | None:
    """Return what is answered in a row: all before the last answer; None where nothing is."""
    before = row["messages"][: _last_answer(row)] if "messages" in row else row.get("prompt")
    return json.dumps(before) if before else None


def _answer(row: Mapping[str, Any]) -> str:
    """Return the last answer of a row, or both of a preference."""
    if "messages" in row:
        return json.dumps(row["messages"][_last_answer(row)])
    return json.dumps([row.get(name) for name in ("completion", "chosen", "rejected")])


def _last_answer(row: Mapping[str, Any]) -> int:
    return max((i for i, one in enumerate(row["messages"]) if one["role"] == "assistant"), default=0)
