"""Metrics against values computed by hand."""

from __future__ import annotations

import math

import pytest

from deltune.errors import DeltuneError
from deltune.metrics import METRICS, score

REFERENCES = [0, 0, 0, 1, 1, 1]
PREDICTIONS = [0, 0, 1, 1, 1, 0]  # class 1: 2 hits, 1 false alarm, 1 miss; class 0 likewise
THREE = ([0, 1, 2, 2], [0, 1, 1, 2])  # predictions, references


@pytest.mark.parametrize(
    ("name", "predictions", "references", "labels", "expected"),
    [
        ("accuracy", PREDICTIONS, REFERENCES, None, 4 / 6),
        ("f1", PREDICTIONS, REFERENCES, None, 2 * 2 / (2 * 2 + 1 + 1)),
        ("f1", [0, 0], [0, 0], [0, 1], 0.0),  # nothing positive anywhere
        ("f1", ["a", "a", "b"], ["a", "b", "b"], ["a", "b"], 2 / 3),  # b: 1 hit, 1 miss
        ("f1", ["a", "a", "b"], ["a", "b", "b"], ["b", "a"], 2 / 3),  # a: 1 hit, 1 false alarm
        ("f1_macro", *THREE, None, (1 + 2 / 3 + 2 / 3) / 3),
        ("f1_macro", *THREE, [0, 1, 2, 3], (1 + 2 / 3 + 2 / 3 + 0) / 4),  # a class that never occurs counts as 0
        ("matthews", PREDICTIONS, REFERENCES, None, (2 * 2 - 1 * 1) / math.sqrt(3 * 3 * 3 * 3)),
        ("matthews", [1, 0], [0, 1], None, -1.0),
        ("matthews", [0, 0], [0, 1], None, 0.0),
    ],
)
def test_value(name: str, predictions: list, references: list, labels: list | None, expected: float) -> None:
    assert score([name], predictions, references, labels)[name].value == pytest.approx(expected)


def test_per_example_is_what_the_value_is_the_mean_of() -> None:
    for name, got in score(list(METRICS), PREDICTIONS, REFERENCES).items():
        if got.per_example is not None:
            assert sum(got.per_example) / len(got.per_example) == pytest.approx(got.value), name
    assert score([], PREDICTIONS, REFERENCES)["accuracy"].per_example == [1, 1, 0, 1, 1, 0]


def test_signature_names_version_and_options() -> None:
    import sklearn

    got = score(["f1_macro"], *THREE)["f1_macro"].signature
    assert got == f"f1_macro|average:macro|zero_division:0|labels:3|n:4|scikit-learn:{sklearn.__version__}"


@pytest.mark.parametrize(
    ("names", "predictions", "references", "expected"),
    [
        (
            ["acuracy", "f2"],
            [0],
            [0],
            "unknown metric 'acuracy'. Did you mean 'accuracy'? Known: accuracy, f1, f1_macro",
        ),
        (["accuracy"], [0, 1], [0], "2 predictions against 1 references"),
        (["accuracy"], [], [], "0 predictions against 0 references"),
        (["f1"], *THREE, "f1 is for two labels, here are 3. Use f1_macro"),
    ],
)
def test_error(names: list, predictions: list, references: list, expected: str) -> None:
    with pytest.raises(DeltuneError) as caught:
        score(names, predictions, references)
    assert expected in str(caught.value)
