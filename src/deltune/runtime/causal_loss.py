"""The loss of a language model without its logits: head and cross-entropy are computed together, some tokens at a time.

A model's own loss holds its logits, tokens × vocabulary, several times. Here the projection to the vocabulary is asked
for a few tokens alone, and a hook at it computes the loss of all tokens from the hidden states that it was to read.
What the model makes of these few tokens in the first batch, its logits and its own loss, shows whether anything stands
between the hidden states and the loss: a cap, a scale, a loss of the router. Then the plain way is taken. It is tried
again when what it depends on has changed, and in every batch without gradients; with them the graph of every batch
shows whether what is trained acts at the head.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel

from ..anatomy.inspection import inspect
from ..compat import (
    FakeTensor,
    class_name,
    count_forward_hooks,
    model_functions_set,
    storage_id,
    transforms_active,
    uncompiled,
)
from ..errors import DeltuneError
from ..models import head_of_class_name
from .attach import find_tuned

IGNORE_INDEX = -100
"""The label of a token that is not trained on."""
CHUNK, MIN_CHUNK = 5.3, 32
"""At most how many times as many logits exist at a time as the hidden states of all tokens have numbers, which is less
than one layer keeps for its backward pass; and of how many tokens they are at least."""
WINDOW = 2
"""Consecutive tokens of a row of which the model computes logits and loss, to be compared."""

logger = logging.getLogger("deltune")


@dataclass
class LanguageHead:
    """Where a language model projects to its vocabulary, and what it predicts."""

    path: str  # the path of the projection; "" if none is known
    shifts: bool  # whether each token is predicted from those before it
    decodes: bool  # whether a decoder reads the labels, one place to the right
    # by what is in use, the assignment of deltas or the model: what else the trial of the first batch depends on,
    # and why the loss is computed from all logits; "" where it is computed at the head
    tried: weakref.WeakKeyDictionary[Any, tuple[Any, str]] = field(default_factory=weakref.WeakKeyDictionary)
    own_loss_shifts: bool | None = None  # whether the model's own loss is of the next tokens, once that is known

    @property
    def reasons(self) -> list[str]:
        """Why the loss is computed from all logits, with what has been in use."""
        return [reason for _, reason in self.tried.values() if reason]


_HEADS: weakref.WeakKeyDictionary[nn.Module, LanguageHead] = weakref.WeakKeyDictionary()


def language_head(model: PreTrainedModel) -> LanguageHead:
    """Return a model's head; what was found is kept as long as the model."""
    if model not in _HEADS:
        handle = find_tuned(model)
        anatomy = inspect(model) if handle is None else handle.anatomy
        stack = anatomy.stacks[-1]
        path = anatomy.vocabulary.path if anatomy.vocabulary is not None else ""
        decodes = len(anatomy.stacks) > 1
        shifts = head_of_class_name(class_name(model)) == "causal-lm" or (stack.causal and not decodes)
        _HEADS[model] = LanguageHead(path, shifts, decodes)
    return _HEADS[model]


@dataclass
class _Capture:
    """Arguments and results of the hooks at a head, in one call."""

    targets: torch.Tensor  # what each position is to predict, (B, T)
    trained: torch.Tensor  # which of them are trained on, in the order of all positions
    window: tuple[slice, slice]  # the rows and the positions whose logits the model computes
    tries: bool  # whether what the model makes of the window is compared
    by_row: bool  # whether the loss of each row is asked for, without gradients
    # the loss, summed over all trained tokens, or of each row the loss and the tokens that are likeliest; None if
    # the head was not reached as expected
    total: torch.Tensor | None = None
    logits: torch.Tensor | None = None  # what head and bias alone say at the window
    hidden: torch.Tensor | None = field(default=None, repr=False)
    # why the loss cannot be computed at the head
    why: str = "its head is not called once with the hidden states of all tokens"


_CAPTURE: ContextVar[_Capture | None] = ContextVar("capture at the head", default=None)


def causal_loss(
    model: nn.Module, batch: Mapping[str, Any], *, num_items_in_batch: float | torch.Tensor | None = None
) -> torch.Tensor:
    """Return the loss of a language model on a batch, without holding its logits.

    Decoders predict the next token, whatever the loss of their class does; encoder-decoders and masked language models
    the labels themselves. Where something else stands between the hidden states and the model's own loss, such as
    soft-capped logits, a delta at the head or a loss of a router, and where the pass is compiled or mapped by
    torch.func, the loss is computed the plain way from all logits, and the log says why.

    Args:
        model: A tuned or a plain model of transformers with a language modelling head, or a wrapper such as DDP.
        batch: The model's inputs with `labels` of shape (B, T), in which -100 is not trained on.
        num_items_in_batch: What the sum of the tokens' losses is divided by; None for the number of trained tokens in
            this batch.

    Returns:
        A scalar; 0 for a batch without a trained token.

    Raises:
        DeltuneError: If the batch has no labels, or the model no language modelling head.
    """
    inner = unwrapped(model)
    labels = batch.get("labels")
    if labels is None:
        raise DeltuneError("the batch has no labels; causal_loss needs them, with -100 for tokens that are not trained")
    head = language_head(inner)
    targets = _targets(head, labels)
    count: float | torch.Tensor
    total, count = _tried_at_head(model, inner, head, batch, targets)
    if total is None:
        total, count = _plain_total(model, head, batch, targets)
    if num_items_in_batch is not None:
        count = num_items_in_batch
    return total / (count.clamp(min=1) if isinstance(count, torch.Tensor) else max(count, 1))


@torch.no_grad()
def row_losses(model: nn.Module, batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return of every row the summed cross-entropy of its tokens, their number, and how many are likeliest; each (B,).

    It holds logits where `causal_loss` does. What a model adds to its own loss is left out.
    """
    head = language_head(unwrapped(model))
    targets = _targets(head, batch["labels"])
    scores, _ = _tried_at_head(model, unwrapped(model), head, batch, targets, by_row=True)
    if scores is None:
        scores = _token_scores(model(**batch).logits.flatten(0, 1), targets.flatten()).view(2, *targets.shape).sum(2)
    return scores[0], (targets != IGNORE_INDEX).sum(1), scores[1].long()


def _targets(head: LanguageHead, labels: torch.Tensor) -> torch.Tensor:
    """Return what each position is to predict."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX) if head.shifts else labels


def _tried_at_head(
    model: nn.Module,
    inner: PreTrainedModel,
    head: LanguageHead,
    batch: Mapping[str, Any],
    targets: torch.Tensor,
    by_row: bool = False,
) -> tuple[torch.Tensor | None, float]:
    """Return the sum of the losses, or the scores of each row, computed at the head, and the number of trained tokens.

    The first is None where it takes all logits.
    """
    if torch.compiler.is_compiling() or uncompiled(model) is not None or transforms_active() or "shift_labels" in batch:
        return None, 0
    used, state = _in_use(inner), _state(inner, head, batch)
    before, reason = head.tried.get(used, (None, ""))
    if reason and before == state:
        return None, 0
    tries = before != state or not torch.is_grad_enabled()  # without gradients no graph shows what acts at the head
    trained = (targets.flatten() != IGNORE_INDEX).nonzero().squeeze(1)
    total, reason = _total_at_head(model, inner, head, dict(batch), targets, trained, tries, by_row)
    if reason or (tries and len(trained) and not by_row):
        head.tried[used] = state, reason
    if reason:
        logger.info("%s: the loss is computed from all logits, because %s", type(inner).__name__, reason)
    return total, len(trained)


def _state(model: PreTrainedModel, head: LanguageHead, batch: Mapping[str, Any]) -> Any:
    """Return what decides, beside the deltas in use, what a model makes of its hidden states and of labels."""
    options = {name: None if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    hooks = [count_forward_hooks(module) for module in (model, model.get_submodule(head.path))]
    replaced = model_functions_set(model)
    mode = model.training, torch.is_autocast_enabled(model.device.type)
    return *mode, options, _settings(model.config), hooks, replaced


def _settings(config: PreTrainedConfig) -> dict[str, Any]:
    """Return what a configuration has, and those inside it, as it is now."""
    return {
        name: _settings(value) if isinstance(value, PreTrainedConfig) else value for name, value in vars(config).items()
    }


class CausalLossMixin:
    """For a Trainer: training steps compute the loss without logits, as `causal_loss` does.

    Put it first: `class MyTrainer(CausalLossMixin, SFTTrainer): pass`. The first batch is computed both ways: where the
    Trainer's own loss is another one (smoothed labels, a function of its own, TRL's other losses), it stays, and the
    log says so. Evaluation, which returns logits, is unchanged.
    """

    args: Any
    accelerator: Any
    model_accepts_loss_kwargs: bool
    _loss_is_own: bool | None = None

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, num_items_in_batch: Any = None, **options: Any
    ) -> Any:
        """Return the loss of a batch; where anything else is asked for, such as outputs, the Trainer's own answer.

        Args:
            model: The Trainer's model.
            inputs: The batch.
            args: What else a Trainer gives by its place.
            num_items_in_batch: How many tokens of the step are trained on.
            options: What else a Trainer gives by name, such as return_outputs.

        Returns:
            A scalar, or what the Trainer's own method returns.
        """
        trainer: Any = super()
        if args or options or self._loss_is_own:
            return trainer.compute_loss(model, inputs, *args, num_items_in_batch=num_items_in_batch, **options)
        if self._loss_is_own is None:
            with torch.no_grad(), torch.random.fork_rng():
                theirs = trainer.compute_loss(model, dict(inputs), num_items_in_batch=num_items_in_batch)
            with torch.no_grad(), torch.random.fork_rng():
                ours = self._without_logits(model, inputs, num_items_in_batch)
            half = unwrapped(model).dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled()
            self._loss_is_own = not bool((theirs - ours).abs() <= (5e-4 if half else 1e-5) * theirs.abs())
            if self._loss_is_own:
                logger.warning(
                    "%s computes another loss than causal_loss (%.5g and %.5g on the first batch), so its own is used, "
                    "with all logits",
                    type(self).__name__, theirs, ours,
                )  # fmt: skip
            return self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        return self._without_logits(model, inputs, num_items_in_batch)

    def _without_logits(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any) -> torch.Tensor:
        items = num_items_in_batch if self.model_accepts_loss_kwargs else None
        loss = causal_loss(model, inputs, num_items_in_batch=items)
        if items is not None and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes  # the gradients of the processes are averaged
        return loss


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """Return the model of transformers inside wrappers such as DDP and torch.compile's."""
    while not isinstance(model, PreTrainedModel):
        inner = getattr(model, "module", uncompiled(model))
        if not isinstance(inner, nn.Module):
            raise DeltuneError(f"{type(model).__name__} is no model of transformers and has none as .module")
        model = inner
    return model


def _in_use(model: PreTrainedModel) -> Any:
    """Return what stands for the deltas in use, or the model where there are none."""
    handle = find_tuned(model)
    return model if handle is None else handle.attached.passes.assignment_of_new_pass()


def _total_at_head(
    model: nn.Module,
    inner: PreTrainedModel,
    head: LanguageHead,
    batch: dict[str, Any],
    targets: torch.Tensor,
    trained: torch.Tensor,
    tries: bool,
    by_row: bool,
) -> tuple[torch.Tensor | None, str]:
    """Return the sum of the losses, computed at the head, or None and why it has to be computed from all logits."""
    if not head.path:
        return None, "its projection to the vocabulary is no linear that the forward pass shows"
    labels = batch["labels"]
    if head.decodes and "decoder_input_ids" not in batch and "decoder_inputs_embeds" not in batch:
        shift_right = getattr(inner, "prepare_decoder_input_ids_from_labels", None)
        if shift_right is None:
            return None, "it does not say what its decoder reads"
        batch["decoder_input_ids"] = shift_right(labels=labels)
    row, start = divmod(int(trained[0]), targets.shape[1]) if len(trained) and tries else (0, 0)
    rows = slice(None) if getattr(_in_use(inner), "rows", ()) else slice(row, row + 1)  # a delta of each row reads all
    capture = _Capture(targets, trained, (rows, slice(start, start + (WINDOW if tries else 1))), tries, by_row)
    if tries or head.decodes:
        batch["labels"] = labels[capture.window].contiguous()
    else:
        del batch["labels"]
    with _hooks(inner.get_submodule(head.path), capture):
        outputs = model(**batch)
    if capture.total is None:
        return None, capture.why
    if capture.logits is None:
        return capture.total, ""
    if not _same_logits(outputs.logits, capture.logits):
        return None, "its logits are more than the projection of its hidden states"
    if isinstance(outputs.loss, FakeTensor):
        same = not leaves_between(outputs.loss, outputs.logits)
    else:
        same = by_row or not len(trained) or _same_loss(outputs.loss, capture.logits, batch["labels"], head.shifts)
    if not same:
        return None, "its loss is more than the cross-entropy of its logits"
    return capture.total, ""


def _plain_total(
    model: nn.Module, head: LanguageHead, batch: Mapping[str, Any], targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the losses from all logits, where its class does not shift of the next tokens, and how many."""
    outputs, count = model(**batch), (targets != IGNORE_INDEX).sum()
    if not count:
        return outputs.logits.sum() * 0, count
    if head.shifts and head.own_loss_shifts is None:
        head.own_loss_shifts = _own_loss_shifts(model, batch, outputs)
    loss = _mean(outputs.logits, targets) if head.shifts and not head.own_loss_shifts else outputs.loss
    return loss * count, count


@torch.no_grad()
def _own_loss_shifts(model: nn.Module, batch: Mapping[str, Any], outputs: Any) -> bool:
    """Whether a model's own loss is of the next tokens; BartForCausalLM and others leave shifting to the caller.

    The change of its loss with the labels tells, from which whatever else it adds drops out.
    """
    labels = batch["labels"]
    others = torch.where(labels == IGNORE_INDEX, labels, (labels + 1) % outputs.logits.shape[-1])
    again = model(**{**batch, "labels": others})
    change = outputs.loss - again.loss
    same = _mean(outputs.logits, labels) - _mean(again.logits, others)
    after = _mean(outputs.logits[:, :-1], labels[:, 1:]) - _mean(again.logits[:, :-1], others[:, 1:])
    return bool((change - after).abs() <= (change - same).abs())


@contextmanager
def _hooks(module: nn.Module, capture: _Capture) -> Iterator[None]:
    """Let a head compute the window alone, and the loss of everything, in passes of this context."""

    def before(module: nn.Module, args: tuple[Any, ...]) -> Any:
        if _CAPTURE.get() is not capture:
            return None
        if not args or args[0].shape[:2] != capture.targets.shape or capture.hidden is not None:
            capture.hidden, capture.total = None, None
            return None
        capture.hidden = args[0]
        return (args[0][capture.window].contiguous(), *args[1:])

    def after(module: Any, args: tuple[Any, ...], output: torch.Tensor) -> None:
        if _CAPTURE.get() is not capture or capture.hidden is None:
            return
        if type(module).forward is not nn.Linear.forward or not module.weight.is_floating_point():
            capture.why = f"its head is a {type(module).__name__}, not a plain linear"
            return
        if not leaves_between(output, args[0]) <= {module.weight, module.bias}:
            capture.why = "what is trained acts at its head"
            return
        dtype = output.dtype  # under autocast the linear computes in it
        weight = module.weight.to(dtype)
        bias = None if module.bias is None else module.bias.to(dtype)
        if capture.tries:
            with torch.no_grad():
                without_numbers = isinstance(output, FakeTensor)
                capture.logits = output.detach() if without_numbers else F.linear(args[0].to(dtype), weight, bias)
        hidden, targets = capture.hidden.to(dtype).flatten(0, 1), capture.targets.flatten()
        if capture.by_row:
            chunk = _chunk(hidden, weight)
            parts = zip(hidden.split(chunk), targets.split(chunk), strict=True)
            scores = [_token_scores(F.linear(part, weight, bias), target) for part, target in parts]
            capture.total = torch.cat(scores, 1).view(2, *capture.targets.shape).sum(2)
        else:
            capture.total = _Fused.apply(hidden, weight, bias, targets, capture.trained)

    handles = [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    token = _CAPTURE.set(capture)
    try:
        yield
    finally:
        _CAPTURE.reset(token)
        for handle in handles:
            handle.remove()


def leaves_between(output: torch.Tensor, start: torch.Tensor) -> set[torch.Tensor]:
    """Return the tensors that get a gradient from an output, those before the input left out.

    A delta that has not been trained changes no value, so only the graph shows that it acts.
    """
    nodes, seen, leaves = [output.grad_fn], {start.grad_fn, None}, set()
    while nodes:
        node: Any = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(node.variable)
        nodes += [following for following, _ in node.next_functions]
    return leaves


class _Fused(torch.autograd.Function):
    """The sum of the cross-entropies of all tokens, from hidden states (N, d), weight, bias and targets (N,).

    The last input says which of them are trained on. The gradients are made with the loss, some tokens at a time, and
    given out once; who asks for them again, or for second derivatives, has them computed from all logits. torch's
    `linear_cross_entropy` (2.13) does not take half precision in float32, gives wrong second derivatives, and holds the
    gradient of a trained head twice.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        hidden, weight, bias, targets, trained = inputs
        of_hidden, of_weight, of_bias, *_ = ctx.needs_input_grad
        states, words = hidden.index_select(0, trained), targets.index_select(0, trained).unsqueeze(1)
        losses = torch.empty(words.shape, dtype=_at_least_float32(states[:0]).dtype, device=hidden.device)
        grad_weight = torch.zeros_like(weight) if of_weight else None
        grad_bias = torch.zeros_like(bias) if of_bias else None
        minus_one = losses.new_full((1, 1), -1.0)
        for start in range(0, len(states), size := _chunk(states, weight)):
            part = slice(start, start + size)
            scores = _at_least_float32(F.linear(states[part], weight, bias))
            torch.log_softmax(scores, 1, out=scores)
            torch.gather(scores, 1, words[part], out=losses[part])
            if not any(ctx.needs_input_grad):
                continue
            scores.exp_().scatter_add_(1, words[part], minus_one.expand_as(words[part]))
            scores = scores.to(hidden.dtype)
            if grad_weight is not None:
                grad_weight.addmm_(scores.t(), states[part])
            if grad_bias is not None:
                grad_bias += scores.sum(0)
            if of_hidden:
                torch.mm(scores, weight, out=states[part])
            del scores  # before the next ones are made
        grad_hidden = torch.zeros_like(hidden).index_copy_(0, trained, states) if of_hidden else None
        ctx.gradients = [grad_hidden, grad_weight, grad_bias, None, None]
        ctx.save_for_backward(*inputs[:4])
        return losses.sum().neg()

    @staticmethod
    def backward(ctx: Any, upstream: Any) -> Any:
        again = torch.is_grad_enabled()
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is not None and not again:
            return tuple(None if one is None else one.mul_(upstream) for one in gradients)
        needed = [x for x in ctx.saved_tensors[:3] if x is not None and x.requires_grad]
        with torch.enable_grad():
            total = _cross_entropy(*ctx.saved_tensors)
            remaining = iter(torch.autograd.grad(total, needed, upstream, create_graph=again))
        return tuple(next(remaining) if need else None for need in ctx.needs_input_grad)


def _cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    logits = _at_least_float32(F.linear(hidden, weight, bias))
    return F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORE_INDEX)


def _chunk(hidden: torch.Tensor, weight: torch.Tensor) -> int:
    """Return how many tokens have logits at a time."""
    words, width = weight.shape
    chunks = math.ceil(words / (CHUNK * width))
    return max(MIN_CHUNK, math.ceil(len(hidden) / chunks))


def _token_scores(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return of N tokens the cross-entropy and whether each is likeliest (2, N); 0 for those that are not trained."""
    losses = F.cross_entropy(_at_least_float32(logits), targets, reduction="none", ignore_index=IGNORE_INDEX)
    return torch.stack([losses, (logits.argmax(-1) == targets).to(losses.dtype)])


def _at_least_float32(logits: torch.Tensor) -> torch.Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def _same_logits(logits: torch.Tensor, projected: torch.Tensor) -> bool:
    """Whether a model's logits are exactly what its head alone says; without numbers, whether they are its output."""
    if isinstance(logits, FakeTensor):
        return storage_id(logits) == storage_id(projected)
    return logits.shape == projected.shape and torch.equal(logits.detach().to(projected.dtype), projected)


def _same_loss(loss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, shifts: bool) -> bool:
    """Whether a model's own loss is a mean of cross-entropies, of the next tokens or of the same ones."""
    next_labels = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    candidates = (next_labels, labels) if shifts else (labels,)
    tolerance = 16 * torch.finfo(loss.dtype).eps
    means = (_mean(logits, one) for one in candidates if (one != IGNORE_INDEX).any())
    return any(bool((loss.detach() - mean).abs() <= tolerance * mean.abs().clamp(min=1)) for mean in means)


def _mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    flat = _at_least_float32(logits.reshape(-1, logits.shape[-1]))
    return F.cross_entropy(flat, labels.reshape(-1), ignore_index=IGNORE_INDEX)
