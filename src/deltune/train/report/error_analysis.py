"""Where a model is right and where it is wrong, from the lines of a prediction file, by kind of task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from math import exp
from typing import Any

from ...errors import DeltuneError, counted, error_summary
from ..data.tag_schemes import PLAIN
from ..metrics.labels import entities

MAX_WRONG, MAX_RIGHT = 6, 6
"""The most examples that are shown."""
MAX_MATRIX = 20
"""The most labels of a confusion matrix; of more labels only the most frequent confusions are listed."""
MAX_CONFUSIONS = 10
ANSWER = ("asked", "answered", "expected")
"""What a line of predictions has of a conversation that the model answered."""
MAX_TEXT = 700
"""Characters of a text that are shown."""
FEW_WORDS = 4
"""Below that many words, two answers are compared by characters."""

Line = Mapping[str, Any]
"""A line of predictions/SPLIT.jsonl."""


@dataclass(frozen=True)
class Example:
    """One row as it is shown: its id, its input by role, the answer, the right one, and a remark.

    `marked` has the input in pieces where it has entities: text, type and "found" or "missed"; "" for the text between.
    """

    id: str
    input: tuple[tuple[str, str], ...]
    prediction: str
    reference: str
    remark: str = ""
    marked: tuple[tuple[str, str, str], ...] = ()


@dataclass(frozen=True)
class ErrorTable:
    """A small table: its title, columns, rows (the first cell is a name), a note, and whether it is of texts."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    has_texts: bool = False


@dataclass(frozen=True)
class Confusion:
    """How often each right label got each answer: `counts[i][j]` rows of `labels[i]` got `answers[j]`."""

    labels: tuple[str, ...]
    answers: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Analysis:
    """Errors and successes among the predictions of a split.

    Attributes:
        constant: The answer that every row got, if all got the same one although their right answers differ.
        baseline: The accuracy of the most frequent right answer for every row, for tasks where that is a measure.
        majority: That most frequent right answer.
        nothing_right: Whether there are entities, and none of them was found.
    """

    rows: int
    summary: str
    constant: str | None = None
    baseline: float | None = None
    accuracy: float | None = None
    majority: str = ""
    nothing_right: bool = False
    confusion: Confusion | None = None
    tables: tuple[ErrorTable, ...] = ()
    wrong: tuple[Example, ...] = ()
    wrong_title: str = "Wrong"
    wrong_order: str = ""
    right: tuple[Example, ...] = ()
    right_title: str = "Right"
    right_order: str = ""


def analyse(kind: str, lines: Sequence[Line], labels: Sequence[str] = (), tag_scheme: str | None = None) -> Analysis:
    """Analyse the predictions of a split."""
    if not lines:
        return Analysis(0, "There are no predictions.")
    try:
        if kind == "tagging":
            return _analyse_words(lines, labels) if tag_scheme == PLAIN else _analyse_tags(lines, tag_scheme or "IOB2")
        return ANALYSES[kind](lines, labels)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise DeltuneError(f"the predictions are not those of {kind} ({error_summary(error)})") from error


def _analyse_labels(lines: Sequence[Line], labels: Sequence[str]) -> Analysis:
    """Analyse answers that are one of a few: labels, or the number of a choice."""
    references = [str(line["reference"]) for line in lines]
    predictions = [str(line["prediction"]) for line in lines]
    names = [*labels, *sorted({*references, *predictions} - {*labels})]
    count = Counter(zip(references, predictions, strict=True))
    right = sum(n for (reference, prediction), n in count.items() if reference == prediction)
    majority, most = Counter(references).most_common(1)[0]
    confusion = None
    if len(names) <= MAX_MATRIX:
        rows = tuple(name for name in names if name in labels or name in references)
        counts = tuple(tuple(count[row, column] for column in names) for row in rows)
        confusion = Confusion(rows, tuple(names), counts)
    confused = [(pair, n) for pair, n in count.most_common() if pair[0] != pair[1]]
    table = ErrorTable(
        "Most frequent confusions",
        ("right label", "answer", "rows"),
        tuple((reference, prediction, str(n)) for (reference, prediction), n in confused[:MAX_CONFUSIONS]),
        f"{len(confused) - MAX_CONFUSIONS} more kinds of confusion" if len(confused) > MAX_CONFUSIONS else "",
    )
    order = sorted(range(len(lines)), key=lambda i: -_confidence(lines[i]))
    wrong = [i for i in order if references[i] != predictions[i]]
    correct = [i for i in reversed(order) if references[i] == predictions[i]]
    return Analysis(
        rows=len(lines),
        summary=_share_right(right, len(lines)),
        constant=_constant(predictions, references),
        baseline=most / len(lines),
        accuracy=right / len(lines),
        majority=majority,
        confusion=confusion,
        tables=(table,) if confused and confusion is None else (),
        wrong=tuple(_label_example(lines[i]) for i in wrong[:MAX_WRONG]),
        wrong_order="the most confident first",
        right=tuple(_label_example(lines[i]) for i in correct[:MAX_RIGHT]),
        right_order="the least confident first",
    )


def _analyse_label_sets(lines: Sequence[Line], labels: Sequence[str]) -> Analysis:
    """Analyse answers of several labels each, label by label."""
    pairs = [({*line["prediction"]}, {*line["reference"]}) for line in lines]
    rows = []
    for name in labels:
        predicted, true = (sum(name in pair[side] for pair in pairs) for side in (0, 1))
        correct = sum(name in p & r for p, r in pairs)
        rows.append((name, str(true), str(predicted), *_precision_recall(correct, predicted, true)))
    table = ErrorTable("Labels", ("label", "rows", "answered", "precision", "recall", "F1"), tuple(rows))
    texts = [tuple(", ".join(sorted(side)) or "no label" for side in pair) for pair in pairs]
    order = sorted(range(len(lines)), key=lambda i: -len(pairs[i][0] ^ pairs[i][1]))
    examples = [_example(lines[i], *texts[i]) for i in order]
    right = sum(p == r for p, r in pairs)
    return Analysis(
        rows=len(lines),
        summary=_share_right(right, len(lines)),
        constant=_constant([text[0] for text in texts], [text[1] for text in texts]),
        tables=(table,),
        wrong=tuple(examples[: min(MAX_WRONG, len(lines) - right)]),
        wrong_order="the most wrong labels first",
        right=tuple(examples[len(lines) - right :][:MAX_RIGHT]),
    )


def _analyse_numbers(lines: Sequence[Line], labels: Sequence[str]) -> Analysis:
    """Analyse predicted numbers by how far they are off."""
    errors = [float(line["prediction"]) - float(line["reference"]) for line in lines]
    order = sorted(range(len(lines)), key=lambda i: -abs(errors[i]))
    numbers = [(f"{float(line['prediction']):.3f}", f"{float(line['reference']):.3f}") for line in lines]
    examples = [_example(lines[i], *numbers[i], f"off by {errors[i]:+.3f}") for i in order]
    middle = sorted(map(abs, errors))[len(errors) // 2]
    return Analysis(
        rows=len(lines),
        summary=f"{counted(len(lines), 'row')}, half of them off by at most {middle:.3f}.",
        constant=_constant(*map(list, zip(*numbers, strict=True))),
        wrong=tuple(examples[:MAX_WRONG]),
        wrong_title="Farthest off",
        right=tuple(examples[MAX_WRONG:][::-1][:MAX_RIGHT]),
        right_title="Nearest",
    )


def _analyse_words(lines: Sequence[Line], labels: Sequence[str]) -> Analysis:
    """Analyse plain tags as the classes of words."""
    words = []
    for line in lines:
        scores = line["scores"] if isinstance(line.get("scores"), list) else [None] * len(line["reference"])
        for i, (answer, right, score) in enumerate(zip(line["prediction"], line["reference"], scores, strict=True)):
            shown = {"word": line["input"][i], "text": line["input"]}
            scores_of = {} if score is None else {answer: score}
            words.append({**line, "input": shown, "prediction": answer, "reference": right, "scores": scores_of})
    analysis = _analyse_labels(words, labels)
    return replace(analysis, summary=analysis.summary.replace("rows", "words"))


def _analyse_tags(lines: Sequence[Line], scheme: str) -> Analysis:
    """Analyse tagged tokens by their entities: what is missed, what is none, and what has the wrong type or ends."""
    pairs = [(entities(line["reference"], scheme), entities(line["prediction"], scheme)) for line in lines]
    true, predicted, correct, errors = (Counter[str]() for _ in range(4))
    wrong: list[tuple[int, int, str]] = []
    for i, (references, predictions) in enumerate(pairs):
        for counter, one_side in ((true, references), (predicted, predictions), (correct, references & predictions)):
            counter.update(kind for kind, _, _ in one_side)
        remarks = Counter(_entity_error(entity, references, predictions) for entity in references ^ predictions)
        remarks.pop("", None)
        errors.update(remarks)
        if remarks:
            wrong.append((sum(remarks.values()), i, ", ".join(f"{n} {what}" for what, n in remarks.most_common())))
    types = sorted({*true, *predicted}, key=lambda kind: -true[kind])
    rows = tuple(
        (kind, str(true[kind]), str(predicted[kind]), *_precision_recall(correct[kind], predicted[kind], true[kind]))
        for kind in types
    )
    by_type = ErrorTable(
        "Entities by type", ("type", "entities", "answered", "precision", "recall", "F1"), rows, "Type and ends count."
    )
    by_error = ErrorTable(
        "Kinds of error", ("error", "entities"), tuple((what, str(n)) for what, n in errors.most_common(MAX_CONFUSIONS))
    )
    wrong.sort(key=lambda one: (-one[0], one[1]))
    erring = {i for _, i, _ in wrong}
    right = sorted((i for i in range(len(lines)) if i not in erring and pairs[i][0]), key=lambda i: -len(pairs[i][0]))
    constant = "no entity" if not predicted and true else None
    return Analysis(
        rows=len(lines),
        summary=_share_right(len(lines) - len(wrong), len(lines))
        + f" Of {true.total():,} entities {correct.total():,} were found.",
        constant=constant,
        nothing_right=bool(true) and not correct,
        tables=tuple(table for table in (by_type, by_error) if table.rows),
        wrong=tuple(_tag_example(lines[i], *pairs[i], remark) for _, i, remark in wrong[:MAX_WRONG]),
        wrong_order="the most errors first",
        right=tuple(_tag_example(lines[i], *pairs[i], "") for i in right[:MAX_RIGHT]),
        right_order="the most entities first",
    )


def _analyse_texts(lines: Sequence[Line], labels: Sequence[str]) -> Analysis:
    """Analyse generated texts by their likeness to the nearest right answer."""
    accepted = [[str(text) for text in _as_list(line["reference"])] for line in lines]
    predictions = [str(line["prediction"]) for line in lines]
    nearest = [
        max(((_likeness(prediction, text), text) for text in texts), default=(0.0, ""), key=lambda pair: pair[0])
        for prediction, texts in zip(predictions, accepted, strict=True)
    ]
    order = sorted(range(len(lines)), key=lambda i: nearest[i][0])
    exact = [i for i in order if predictions[i].strip() in {text.strip() for text in accepted[i]}]
    bounds = (0.25, 0.5, 0.75, 0.999)
    names = ("below 25 %", "25 to 50 %", "50 to 75 %", "75 to 100 %", "the same")
    bins = Counter(sum(value >= bound for bound in bounds) for value, _ in nearest)
    table = ErrorTable(
        "Likeness to the nearest right answer",
        ("likeness", "rows"),
        tuple((name, str(bins[i])) for i, name in enumerate(names)),
        "Twice the words in common (of short answers: characters), in order, over the words of both.",
    )

    def example(i: int) -> Example:
        return _example(lines[i], predictions[i], nearest[i][1], f"{nearest[i][0]:.0%} alike")

    wrong = [i for i in order if i not in set(exact)]
    best = exact or [i for i in reversed(order[MAX_WRONG:]) if nearest[i][0] > 0]
    return Analysis(
        rows=len(lines),
        summary=_share_right(len(exact), len(lines)).replace("right", "exactly right"),
        constant=_constant(predictions, [texts[0] if texts else "" for texts in accepted]),
        tables=(table,),
        wrong=tuple(map(example, wrong[:MAX_WRONG])),
        wrong_order="the least alike first",
        right=tuple(map(example, best[:MAX_RIGHT])),
        right_title="Right" if exact else "Nearest to right",
        right_order="" if exact else "the most alike first",
    )


def _analyse_running_text(lines: Sequence[Line], labels: Sequence[str]) -> Analysis:
    """Analyse texts of a language model by their perplexity."""
    sized = [(i, int(line["reference"]), float(line["prediction"])) for i, line in enumerate(lines)]
    losses = sorted(((-nats / tokens, i, tokens) for i, tokens, nats in sized if tokens), reverse=True)

    def example(loss: float, i: int, tokens: int) -> Example:
        return _example(lines[i], "", "", f"perplexity {exp(min(loss, 700.0)):.4g} over {tokens} tokens")

    answered = [tuple(_cut(str(line[name])) for name in ANSWER) for line in lines if {*ANSWER} <= line.keys()]
    columns = ("prompt", "answer", "reference")
    answers = ErrorTable("Answers to held-out prompts", columns, tuple(answered), has_texts=True)
    tokens = sum(count for _, count, _ in sized)
    others = losses[MAX_WRONG:]
    return Analysis(
        rows=len(lines),
        summary=f"{counted(len(lines), 'text')} of {counted(tokens, 'predicted token')}.",
        tables=(answers,) if answered else (),
        wrong=tuple(example(*one) for one in losses[:MAX_WRONG]),
        wrong_title="Worst" if others else "Texts",
        wrong_order="the highest perplexity first" if len(losses) > 1 else "",
        right=tuple(example(*one) for one in others[::-1][:MAX_RIGHT]),
        right_title="Best",
        right_order="the lowest perplexity first",
    )


ANALYSES: Mapping[str, Callable[[Sequence[Line], Sequence[str]], Analysis]] = {
    "classification": _analyse_labels,
    "multilabel": _analyse_label_sets,
    "regression": _analyse_numbers,
    "choice": _analyse_labels,
    "generation": _analyse_texts,
    "language": _analyse_running_text,
    "chat": _analyse_running_text,
}
"""Kind of task -> what analyses its predictions."""

Entity = tuple[str, int, int]
"""Type, first token, and the token after the last one."""


def _entity_error(entity: Entity, references: set[Entity], predictions: set[Entity]) -> str:
    """Name the error that an entity of only one side is part of; "" if its counterpart counts it."""
    kind, start, end = entity
    others = predictions if entity in references else references
    same_span = [one for one in others if one[1:] == (start, end)]
    overlapping = [one for one in others if one[1] < end and start < one[2]]
    if entity in references:
        if same_span:
            return f"{kind} taken for {same_span[0][0]}"
        return f"{kind} with wrong ends" if overlapping else f"{kind} missed"
    return "" if overlapping else f"{kind} where there is none"


def _precision_recall(correct: int, predicted: int, true: int) -> tuple[str, str, str]:
    """Return precision, recall and F1 as texts; "–" where there is nothing to divide by."""
    values = ((correct, predicted), (correct, true), (2 * correct, predicted + true))
    precision, recall, f1 = (f"{part / whole:.3f}" if whole else "–" for part, whole in values)
    return precision, recall, f1


def _tag_example(line: Line, references: set[Entity], predictions: set[Entity], remark: str) -> Example:
    tokens = [str(token) for token in line["input"]]

    def names(one_side: set[Entity]) -> str:
        ordered = sorted(one_side, key=lambda entity: entity[1:])
        return "; ".join(f"{' '.join(tokens[start:end])} ({kind})" for kind, start, end in ordered) or "no entity"

    marked, before = [], 0
    for entity in sorted(references, key=lambda entity: entity[1:]):
        kind, start, end = entity
        marked.append((" ".join(tokens[before:start]), "", ""))
        marked.append((" ".join(tokens[start:end]), kind, "found" if entity in predictions else "missed"))
        before = end
    marked.append((" ".join(tokens[before:]), "", ""))
    pieces = tuple(piece for piece in marked if piece[0]) if len(" ".join(tokens)) <= MAX_TEXT else ()
    return replace(_example(line, names(predictions), names(references), remark), marked=pieces)


def _label_example(line: Line) -> Example:
    confidence = _confidence(line)
    choices = line["input"].get("choices", ()) if isinstance(line.get("input"), Mapping) else ()

    def name(answer: Any) -> str:
        known = isinstance(answer, int) and 0 <= answer < len(choices)
        return f"{answer}: {choices[answer]}" if known else str(answer)

    sure = f"{confidence:.0%} sure" if 0 < confidence <= 1 else ""
    return _example(line, name(line["prediction"]), name(line["reference"]), sure)


def _example(line: Line, prediction: str, reference: str, remark: str = "") -> Example:
    return Example(str(line["id"]), _input(line), _cut(prediction), _cut(reference), remark)


def _confidence(line: Line) -> float:
    """Return the score of the answer: by its label, or by its number; 0 where there is none."""
    scores, answer = line.get("scores"), line["prediction"]
    if isinstance(scores, Mapping):
        value = scores.get(answer, 0.0)
    elif isinstance(scores, Sequence) and isinstance(answer, int) and answer < len(scores):
        value = scores[answer]
    else:
        value = 0.0
    return float(value) if isinstance(value, int | float) else 0.0


def _input(line: Line) -> tuple[tuple[str, str], ...]:
    """Return the texts of a row by role; the role is "" where there is only one text."""
    value = line.get("input", "")
    if isinstance(value, Mapping):
        return tuple((str(role), _cut(_flat(part, " · "))) for role, part in value.items())
    if isinstance(value, list) and line.get("prediction") is not None and not isinstance(line["prediction"], list):
        return tuple(("", _cut(str(text))) for text in value)  # a pair of texts, and not the tokens of one
    return (("", _cut(_flat(value))),)


def _flat(value: Any, separator: str = " ") -> str:
    return separator.join(map(str, value)) if isinstance(value, list) else str(value)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _likeness(one: str, two: str) -> float:
    """Return 2 · matches / (size of both), by words, or by characters where there are few words."""
    words = one.split(), two.split()
    if min(map(len, words)) < FEW_WORDS:
        return SequenceMatcher(None, one.strip(), two.strip(), autojunk=False).ratio()
    return SequenceMatcher(None, *words, autojunk=False).ratio()


def _constant(predictions: Sequence[str], references: Sequence[str]) -> str | None:
    """Return the one answer to all rows, if their right answers differ."""
    return predictions[0] if len(set(predictions)) == 1 and len(set(references)) > 1 else None


def _share_right(right: int, rows: int) -> str:
    return f"{right:,} of {rows:,} rows are right ({right / rows:.1%})."
