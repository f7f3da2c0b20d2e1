"""Laws of backward passes: each uses what its forward pass used, or is refused, and nothing is held after it."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import deltune
from tables.families import FAMILIES
from tables.methods import product
from tables.specimens import batch, build, stir

SAVED, AGAIN, AGAIN_REENTRANT = "saved", "computed again", "computed again, reentrant"
CHECKPOINTS = {SAVED: None, AGAIN: False, AGAIN_REENTRANT: True}
"""Whether layers are computed a second time in the backward pass, and in which of torch's two ways."""

TEXTS: dict[str, dict[str, str]] = {
    "beside the weights": {"a": "lora(rank=2)", "b": "parallel_adapter(rank=2)"},
    "in their places": {"a": "parallel_adapter(rank=2) + layernorm", "b": "bitfit(which='layers') + lora(rank=2)"},
    "in part": {"a": "apet(layernorm + lora(rank=2), parameters=40)", "b": "prompt(length=2)"},
}

SCOPES: dict[str, Callable[[deltune.Tuned], AbstractContextManager[Any]]] = {
    "in use": lambda tuned: nullcontext(),
    "rows": lambda tuned: tuned.rows(["b", "a"]),
}

OUTPUTS: dict[str, Callable[[Any], torch.Tensor]] = {
    "logits": lambda output: output.logits,
    "the last state": lambda output: output.hidden_states[-1],
    "a state between layers": lambda output: output.hidden_states[1],
}
"""Of what a loss may be computed. Only the first one leads through the model's last operation."""


class Case:
    """A model with the deltas a, which is in use, and b; a loss of one of its outputs."""

    def __init__(self, texts: str, output: str = "logits", way: str = SAVED) -> None:
        self.model = build(FAMILIES["bert"], "sequence")
        for name, text in TEXTS[texts].items():
            self.tuned = stir(deltune.attach(self.model, text, name=name), seed=ord(name))
        self.tuned.use("a")
        self.model.train()
        self.output, self.inputs = OUTPUTS[output], batch(self.model)
        self.parameters = dict(self.model.named_parameters())  # by the names that they have now
        if CHECKPOINTS[way] is not None:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": CHECKPOINTS[way]})
            self.model.enable_input_require_grads()  # as reentrant checkpoints of a frozen model need it

    def loss(self) -> torch.Tensor:
        return self.output(self.model(**self.inputs, output_hidden_states=True)).square().sum()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradients by parameter, which are then forgotten; those that are zero everywhere count as none."""
        grads = {n: p.grad for n, p in self.parameters.items() if p.grad is not None and bool(p.grad.any())}
        for parameter in self.parameters.values():
            parameter.grad = None
        return grads


def close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return actual.keys() == expected.keys() and all(
        torch.allclose(actual[name], value, rtol=1e-9, atol=1e-12) for name, value in expected.items()
    )


def in_a_thread(work: Callable[[], Any]) -> None:
    """As the autograd engine works for an accelerator: in a thread that has nothing of the forward pass's context."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


@pytest.mark.parametrize(("texts", "scope", "output"), product(TEXTS, SCOPES, OUTPUTS))
@pytest.mark.sample
def test_layers_that_are_computed_again(texts: str, scope: str, output: str) -> None:
    """Whatever output a loss is computed of, and in whatever thread: gradients as without gradient checkpointing."""
    gradients = []
    for way in CHECKPOINTS:
        case = Case(texts, output, way)
        runs: list[None] = []
        case.model.bert.encoder.layer[0].intermediate.dense.register_forward_hook(
            lambda *_, runs=runs: runs.append(None)
        )
        for thread in (False, True):
            runs.clear()
            with SCOPES[scope](case.tuned):
                total = case.loss()
                in_a_thread(total.backward) if thread else total.backward()
            gradients.append(case.gradients())
            assert len(runs) == (1 if way == SAVED else 2), "nothing was computed again"
    assert gradients[0] and all(close(other, gradients[0]) for other in gradients)


@pytest.mark.parametrize("way", [AGAIN, AGAIN_REENTRANT])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("texts", TEXTS)
def test_a_checkpoint_of_the_users_around_the_model(texts: str, scope: str, way: str) -> None:
    """The gradients are right. A reentrant one runs its forward pass without gradients and leaves nothing to find that
    pass by: a backward pass in another thread is refused while somebody is inside of rows() or disable()."""
    case = Case(texts)
    embedded = case.model.get_input_embeddings()(case.inputs.pop("input_ids")).detach().requires_grad_()

    def logits(embeddings: torch.Tensor) -> torch.Tensor:
        return case.model(inputs_embeds=embeddings, **case.inputs).logits

    gradients = []
    for checkpointed, thread in ((False, False), (True, False), (True, True)):
        with SCOPES[scope](case.tuned):
            use_reentrant = CHECKPOINTS[way]
            made = checkpoint(logits, embedded, use_reentrant=use_reentrant) if checkpointed else logits(embedded)
            total = made.square().sum()
            if thread and scope == "rows" and use_reentrant:
                with pytest.raises(deltune.DeltuneError, match="use_reentrant=False"):
                    in_a_thread(total.backward)
                return
            in_a_thread(total.backward) if thread else total.backward()
        gradients.append(case.gradients())
        assert gradients[0] and close(gradients[-1], gradients[0])
    assert len(gradients) == 3


PARTS: dict[str, Callable[[Any], Any]] = {
    "a layer": lambda layer: layer,
    "an attention": lambda layer: layer.attention,
}


def checkpoint_forward(module: torch.nn.Module) -> None:
    """Compute a module's forward again in the backward pass, as a user may, in whose recomputation no pass begins."""
    forward = module.forward
    module.forward = lambda h, *args, **kwargs: checkpoint(  # type: ignore[method-assign]
        lambda again: forward(again, *args, **kwargs), h, use_reentrant=False
    )


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("texts", TEXTS)
def test_parts_of_two_passes_that_are_computed_again_in_one_backward_pass(texts: str, part: str) -> None:
    """Each as its own forward pass computed it, whatever is in use when the backward pass runs."""
    case, gradients = Case(texts), []
    for checkpointed in (False, True):
        if checkpointed:
            for layer in case.model.bert.encoder.layer:
                checkpoint_forward(PARTS[part](layer))
        with case.tuned.rows(["a", "b"]):
            one = case.output(case.model(**case.inputs))
        with case.tuned.rows(["b", None]):
            two = case.output(case.model(**case.inputs))
            with case.tuned.rows(["a", "b"]):
                (one * two).sum().backward()
        gradients.append(case.gradients())
    assert gradients[0] and close(gradients[1], gradients[0])


def test_a_part_that_is_computed_again_without_its_tensors() -> None:
    """The weights that a delta trains in place are back in the model by then."""
    case = Case("in their places")
    for layer in case.model.bert.encoder.layer:
        checkpoint_forward(layer.attention)
    total = case.loss()
    with case.tuned.disable(), pytest.raises(deltune.DeltuneError, match="no longer holds the tensors"):
        total.backward()


def passing(scope: AbstractContextManager[Any]) -> None:
    with scope:
        pass


LATE: dict[str, tuple[Callable[[deltune.Tuned], Any], str]] = {
    "nothing": (lambda tuned: None, ""),
    "use and back": (lambda tuned: (tuned.use("b"), tuned.use("a")), ""),
    "disable for a moment": (lambda tuned: passing(tuned.disable()), ""),
    "rows for a moment": (lambda tuned: passing(tuned.rows(["b", "b"])), ""),
    "detach the other": (lambda tuned: tuned.detach("b"), ""),
    "use the other": (lambda tuned: tuned.use("b"), "not in use any more"),
    "use none": (lambda tuned: tuned.use(None), "not in use any more"),
    "detach": (lambda tuned: tuned.detach("a"), "not in use any more|was detached after"),
}  # fmt: skip
"""What comes between a forward pass and its backward pass, and how the latter is refused."""


@pytest.mark.parametrize(("texts", "moment"), product(TEXTS, itertools.product(LATE, CHECKPOINTS)))
@pytest.mark.sample(13)
def test_a_change_before_the_backward_pass(texts: str, moment: tuple[str, str]) -> None:
    """Right gradients, or an error: a gradient is never dropped without a word. The loss is of a hidden state, so that
    no head, which every delta trains, has part in it."""
    late, way = moment
    case = Case(texts, "the last state", way)
    case.loss().backward()
    expected = case.gradients()
    change, refused = LATE[late]
    total = case.loss()
    change(case.tuned)
    if refused:
        with pytest.raises(deltune.DeltuneError, match=refused):
            total.backward()
        case.gradients()
        if late != "detach":
            case.tuned.use("a")
            case.loss().backward()
            assert close(case.gradients(), expected)
    else:
        total.backward()
        assert expected and close(case.gradients(), expected)


@pytest.mark.parametrize("way", CHECKPOINTS)
def test_a_backward_pass_outside_its_rows(way: str) -> None:
    case = Case("beside the weights", "the last state", way)
    with case.tuned.rows(["b", "b"]):
        total = case.loss()
    with pytest.raises(deltune.DeltuneError, match="not in use any more"):
        total.backward()


@pytest.mark.parametrize("way", CHECKPOINTS)
@pytest.mark.parametrize("scope", SCOPES)
def test_nothing_is_held_after_a_backward_pass(scope: str, way: str) -> None:
    """What lets a backward pass find its forward pass keeps neither the model alive nor its deltas."""
    case = Case("in their places", "the last state", way)
    held = [weakref.ref(thing) for thing in (case.model, case.tuned, case.tuned.delta("a"), case.tuned.delta("b"))]
    with SCOPES[scope](case.tuned):
        case.loss().backward()
    del case
    gc.collect()
    assert [one() for one in held] == [None] * 4
