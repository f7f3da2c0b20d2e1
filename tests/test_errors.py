"""Messages of a length that can be read, with each thing said once."""

from __future__ import annotations

import re
from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

import deltune
from deltune.errors import (
    MAX_LISTED_PROBLEMS,
    MAX_MESSAGE_LENGTH,
    DeltuneError,
    error_from_problems,
    unknown_name,
)
from tables.families import FAMILIES
from tables.specimens import build

NEARLY = MAX_MESSAGE_LENGTH + 60


@given(
    st.lists(st.text(st.sampled_from("abc déф"), max_size=400), min_size=1, max_size=200),
    st.sampled_from(["", "\n", " "]),
)
def test_any_message_is_bounded_and_keeps_its_ends(parts: list[str], between: str) -> None:
    text = "asked: " + between.join(parts * 7) + " do this."
    message = str(DeltuneError(text))
    assert message == text if len(text) <= MAX_MESSAGE_LENGTH else len(message) <= NEARLY and "left out" in message
    assert message.startswith("asked:"[:6]) and message.endswith("is.")


@pytest.mark.parametrize("length", [1, 999, 1000, 1001, 5000, 2_000_000])
def test_what_is_left_out_of_a_line_is_counted(length: int) -> None:
    message = str(DeltuneError("x" * length))
    left = re.search(r" … ([\d,]+) characters? left out … ", message)
    assert len(message) <= NEARLY and bool(left) == (length > MAX_MESSAGE_LENGTH)
    assert message.count("x") + (int(left[1].replace(",", "")) if left else 0) == length


def test_what_is_left_out_of_many_lines_is_counted() -> None:
    message = str(DeltuneError("\n".join(["y" * 9] * 5000)))
    left = re.search(r"… ([\d,]+) lines left out …", message)
    assert left and message.count("y" * 9) + int(left[1].replace(",", "")) == 5000


def test_advice_is_kept_whole() -> None:
    error = DeltuneError("z" * 5000, in_python="Call this.")
    assert str(error).endswith("Call this.") and len(str(error)) <= NEARLY and len(error.without_python) <= NEARLY


@pytest.mark.parametrize("number", [2, 20, 21, 5000])
@pytest.mark.parametrize("length", [5, 80, 3000])
def test_problems_that_do_not_fit_are_counted(number: int, length: int) -> None:
    message = str(error_from_problems("these", [f"p{i} {'q' * length}" for i in range(number)]))
    shown = len(re.findall(r"^  - p\d+ ", message, re.MULTILINE))
    more = re.search(r"… and ([\d,]+) more", message)
    assert len(message) <= NEARLY and 2 <= shown <= MAX_LISTED_PROBLEMS
    assert shown + (int(more[1].replace(",", "")) if more else 0) == number


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("lroa", deltune.methods(), None),
        ("name-11x", [f"name-{i}" for i in range(50)], None),
        ("p", [f"q{i}" for i in range(400)], "Do r."),
    ],
)
def test_a_hint_makes_the_list_short(name: str, known: Collection[str], hint: str | None) -> None:
    message = unknown_name("thing", name, known, hint=hint)
    assert "Did you mean" in message or "Do r." in message
    assert len(message) < 300 and re.search(r", and [\d,]+ more\.", message)


@pytest.mark.parametrize("number", [1, 50, 5000])
def test_names_that_do_not_fit_are_counted(number: int) -> None:
    message = unknown_name("thing", "no", [f"name-{i}" for i in range(number)])
    more = re.search(r", and ([\d,]+) more\.", message)
    assert len(message) <= MAX_MESSAGE_LENGTH
    assert message.count("name-") + (int(more[1].replace(",", "")) if more else 0) == number


REPEATED = (
    "three_vectors + three_vectors + three_vectors + three_vectors",
    "layernorm + layernorm + layernorm",
    "apet(layernorm, 10) + apet(layernorm, 10)",
    "apet(layernorm + layernorm, 10) + apet(layernorm + layernorm, 10)",
    "apet(lora, 99999999) + apet(lora, 99999999) + apet(lora, 99999999)",
    "diff_pruning + diff_pruning + diff_pruning",
    "lora(at='lm_head') + lora(at='lm_head') + lora(at='lm_head')",
    "quary + quary + quary",
    "lora(rnk=2) + lora(rnk=2) + lora(rnk=3)",
    "apet(quary, 10) + apet(quary, 10)",
)


@pytest.mark.parametrize("expression", REPEATED)
def test_a_term_that_stands_several_times_is_answered_once(expression: str) -> None:
    with pytest.raises(DeltuneError) as caught:
        deltune.attach(build(FAMILIES["bert"], "sequence"), expression)
    message = str(caught.value)
    assert "problems" not in message, message
    assert len(message) <= NEARLY


@pytest.mark.parametrize(
    "expression",
    [
        " + ".join(f"quary{i}" for i in range(500)),
        f"lora({', '.join(f'name{i}=1' for i in range(500))})",
        f"lora(at={tuple(f'site{i}' for i in range(900))!r})",
        f"lora(init={'x' * 20_000!r})",
        " + ".join(["diff_pruning"] * 300),
        f"prefix(length={'9' * 5000})",
    ],
)
def test_long_expressions_get_short_answers(expression: str) -> None:
    with pytest.raises(DeltuneError) as caught:
        deltune.attach(build(FAMILIES["bert"], "sequence"), expression)
    assert len(str(caught.value)) <= NEARLY
