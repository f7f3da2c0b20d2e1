"""Models of other heads over a server's weights, which are made while deltas are in use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import deltune
from deltune.serve.engine import backbone as backbone_module
from deltune.serve.engine.backbone import Backbone, sibling
from tables.specimens import stir

from .specimens import deltas


def test_a_sibling_has_the_base_models_weights_whatever_is_in_use_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A delta comes into the model before each module whose parameters are shared, and leaves it before the next."""
    model = deltas("bert", "sequence").model()
    base = {name: value.clone() for name, value in model.base_model.state_dict().items()}
    labels = dict(model.config.id2label)
    stir(deltune.attach(model, "full", name="other"), seed=1, size=0.3).use(None)
    first = Backbone(model, "classification")
    walk, swaps = backbone_module.base_modules, 0

    def interrupted(*arguments: Any, **options: Any) -> Iterator[Any]:
        nonlocal swaps
        for item in walk(*arguments, **options):
            first.attached.use("other" if swaps % 2 == 0 else None)
            swaps += 1
            yield item

    for begin in (0, 1):
        swaps = begin
        monkeypatch.setattr(backbone_module, "base_modules", interrupted)
        made = sibling(first, "tagging")
        monkeypatch.undo()
        shared = {name: value for name, value in made.base_model.state_dict().items() if name in base}
        assert swaps > len(shared) > 10
        assert [name for name, value in shared.items() if not torch.equal(value, base[name])] == []
        assert made.config.id2label == labels
    first.attached.use(None)
    owned = {id(parameter) for parameter in model.base_model.parameters()}
    assert {id(parameter) for parameter in made.base_model.parameters()} <= owned, "the weights are in memory once"


def test_a_sibling_has_the_labels_of_the_base_model() -> None:
    """Its empty head would have the outputs of another tenant's classifier."""
    made = deltas("bert", "sequence")
    model = made.model()
    labels = dict(model.config.id2label)
    tuned = deltune.load(model, made.folder / "d1", name="other")
    assert model.config.id2label != labels, "it has another number of them"
    tuned.use(None)
    first = Backbone(model, "classification")
    tuned.use("other")
    assert sibling(first, "tagging").config.id2label == labels
    tuned.use(None)
