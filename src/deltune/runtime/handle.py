"""`Tuned`: the handle of a model with deltas. It switches, combines, saves, merges and detaches them."""

from __future__ import annotations

import copy
import functools
import operator
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from ..anatomy.inspection import inspect
from ..anatomy.skeleton import HANDLE_NAME
from ..anatomy.types import Anatomy, html_table
from ..compat import submodules_of
from ..errors import DeltuneError, excerpt
from ..files import user_path
from ..methods.counting import Count, base_size, count_resolved, with_storage
from ..methods.forms.mix import Weights
from ..methods.other_names import hint_for_function
from ..methods.parser import explain_arguments
from ..methods.spec import Method
from . import hub, serialization
from .attached import Attached
from .combine import How, combine, with_allocated_ranks
from .model_card import render_card
from .model_methods import plain_copy
from .modules import Delta, up_projections
from .offloading import follow_offloading
from .pass_manager import Scope, condition
from .pooling import gives_up_pooling
from .row_assignment import Names, Use, each_name
from .sharding import refuse_sharded, reshard, write_once

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo


class Tuned(nn.Module):
    """The handle of a model with attached deltas.

    It is the sub-module `deltune` of the model; `deltune.tuned(model)` returns it. The model itself is called and
    trained as before.

    Attributes:
        anatomy: Where the layers, projections, norms and head of the model are.
        deltas: The attached deltas by name.
        base: The model's own tensors that the delta in use replaces at the moment.
    """

    def __init__(self, model: PreTrainedModel, anatomy: Anatomy | None = None) -> None:
        super().__init__()
        self.anatomy: Anatomy = anatomy or inspect(model)
        self.deltas = nn.ModuleDict()
        self.base = nn.ParameterDict()
        self.attached = Attached(self, model, self.anatomy, self.deltas, self.base)  # what deltune itself works with

    def __dir__(self) -> list[str]:
        """The names that a user needs; torch's own for modules exist too."""
        return sorted(
            {
                "anatomy",
                "deltas",
                "base",
                *(name for name in vars(Tuned) if not name.startswith("_") and not hasattr(nn.Module, name)),
            }
        )

    def __repr__(self) -> str:
        attached = ", ".join(f"{name}: {self.delta(name).method!r}" for name in self.names)
        in_use = ", ".join(" + ".join(each_name(names)) or "None" for names in self.mixed or (self.active,))
        return f"Tuned({attached or 'nothing'}; in use: {in_use})"

    def _repr_html_(self) -> str:
        used = self.attached.passes.assignment_of_new_pass().used.deltas
        rows = [
            (name, repr(self.delta(name).method), f"{self.count(name=name).trained:,}", "yes" if name in used else "no")
            for name in self.names
        ]
        return html_table("Attached deltas", ("delta", "method", "trainable parameters", "in use"), rows)

    def _replicate_for_data_parallel(self) -> Any:
        raise DeltuneError(
            "a model with deltas does not run under torch.nn.DataParallel, whose replicas would use the first device's "
            "tensors: use DistributedDataParallel, or merge() first"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the handle as a reference to its model."""
        model = self.attached.live_model
        if model is None:
            return super().__reduce_ex__(protocol)
        return _handle_of, (model,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the handle together with its model, while no other thread moves tensors."""
        model = self.attached.live_model
        if model is not None and id(model) not in memo:
            copy.deepcopy(model, memo)
        return memo[id(self)] if id(self) in memo else plain_copy(self, memo)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error: call the model itself, which uses the delta in use.

        Args:
            *args: Ignored.
            **kwargs: Ignored.

        Returns:
            Nothing.

        Raises:
            DeltuneError: Always.
        """
        raise DeltuneError("the handle cannot be called: call the model itself, which uses the delta in use")

    # -- what a PeftModel would do for the whole model, and torch would do for the tensors of deltas alone

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters of the whole model, as `model.named_parameters()` does.

        Args:
            prefix: Put before each name.
            recurse: Whether those of sub-modules come too. False: those of the handle itself, which has none.
            remove_duplicate: Whether a parameter with several names comes once.

        Returns:
            An iterator over (name, parameter).
        """
        of: nn.Module | None = self.attached.live_model
        if of is None or not recurse:
            return super().named_parameters(prefix, recurse, remove_duplicate)
        return of.named_parameters(prefix, recurse, remove_duplicate)

    def train(self, mode: bool = True) -> Tuned:
        """Set the whole model to training, or with `mode=False` to evaluation, as `model.train(mode)` does.

        Args:
            mode: Whether to train.

        Returns:
            The handle itself.
        """
        of: nn.Module | None = self.attached.live_model
        if of is not None and of.training != mode:
            of.train(mode)  # which calls this again, for the handle is a sub-module
        else:
            super().train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        """Of a name that a PeftModel has, say what it is called here."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            hint = hint_for_function(name)
            raise AttributeError(f"{error}{(hint and f'. {hint}') or ''}") from None

    # -- what is attached and in use

    @property
    def model(self) -> PreTrainedModel:
        """The model that the deltas are attached to; after `detach()` or `merge()` reading it is a `DeltuneError`."""
        return self.attached.model

    @property
    def active(self) -> Names:
        """The name of the delta that all rows use, the names of several, or None, as in `rows()` and `disable()`."""
        return self.attached.active

    @property
    def mixed(self) -> tuple[Names, ...]:
        """The delta, or the deltas, of each row inside `rows()`; outside, an empty tuple."""
        return self.attached.passes.assignment_of_new_pass().rows

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the attached deltas."""
        return tuple(self.deltas)

    @property
    def method(self) -> Method | None:
        """The method of the delta in use, the sum of the methods of several, or None."""
        methods = [self.delta(name).method for name in each_name(self.active)]
        return functools.reduce(operator.add, methods) if methods else None

    @explain_arguments
    def delta(self, name: str | None = None) -> Delta:
        """Return the module that holds the tensors of a delta.

        Args:
            name: The delta's name. Default: the delta in use.

        Returns:
            The delta.

        Raises:
            DeltuneError: No delta has this name, or none is in use.
        """
        return self.attached.delta(name)

    @explain_arguments
    def count(self, denominator: str | int = "model", name: str | None = None) -> Count:
        """Count the trainable parameters of a delta exactly.

        Args:
            denominator: What `Count.percent` is a share of: the name of a denominator, such as "model" (the default,
                all parameters of the model), or a number of parameters.
            name: The delta's name. Default: the delta in use.

        Returns:
            The counts of the method, the head, and what is saved.

        Raises:
            DeltuneError: No delta has this name or none is in use, or the denominator is unknown.
        """
        delta = self.delta(name)
        size = base_size(self.model, denominator)
        heads = sum(self.attached.state.delta_value(delta, tensor).numel() for tensor in delta.head)
        counted = count_resolved(self.anatomy, delta.planned, *size, delta.head_mode, delta.folded, heads)
        return with_storage(counted, self.model)

    def trainable_parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters to give to an optimizer: those that train with the delta in use.

        They include the head and the tensors of the model that the delta trains in place, and leave out the deltas
        that are not in use. Inside `rows()` they are those of every delta that is named there. (`parameters()` has all
        parameters of the model, trained or not.)

        Returns:
            An iterator over parameters; none where no delta is in use.
        """
        yield from (parameter for _, parameter in self.named_trainable_parameters())

    def named_trainable_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters of `trainable_parameters()` with their names in the model.

        Returns:
            An iterator over (name, parameter); the names are those of `model.named_parameters()`.
        """
        state = self.attached.state
        groups = self.attached.passes.assignment_of_new_pass().groups
        used = {id(delta) for group in groups for delta in group.trained}
        if not used:
            return
        follow_offloading(state, every_module=False)
        reshard(self.model)  # an optimizer must have the shards and not what a pass has left gathered
        with state.mutex:
            unused = [self.delta(name) for name in self.names if id(self.delta(name)) not in used]
            excluded = {id(parameter) for delta in unused for parameter in state.parameters_of(delta)}
            parameters = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad and id(p) not in excluded]
        yield from parameters

    def parameter_groups(self, lr: float, ratio: float = 16.0) -> list[dict[str, Any]]:
        """Return groups of parameters for an optimizer, in which LoRA's up-projections learn faster (LoRA+).

        LoRA's change of a weight is W_up W_down. Hayou et al. (2024) show that W_up, which starts at 0, should have a
        higher learning rate than W_down: ratio × lr. Everything else that is trained has lr.

        Args:
            lr: The learning rate of everything but the up-projections.
            ratio: By which their learning rate is greater. LoRA+ recommends 16.

        Returns:
            Two groups, {"params": …, "lr": …}: the up-projections, then the rest of `trainable_parameters()`.

        Raises:
            DeltuneError: `lr` or `ratio` is not a positive number, or no LoRA is trained.
        """
        for name, value in (("lr", lr), ("ratio", ratio)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise DeltuneError(f"{name}={excerpt(value)}: must be a positive number")
        up = {id(p) for delta in self.deltas.children() if isinstance(delta, Delta) for p in up_projections(delta)}
        parameters = list(self.trainable_parameters())
        if not (faster := [p for p in parameters if id(p) in up]):
            raise DeltuneError(
                f"{self!r} trains no LoRA, so there is nothing to give another learning rate to: give the optimizer "
                "trainable_parameters()"
            )
        rest = [p for p in parameters if id(p) not in up]
        return [{"params": faster, "lr": ratio * lr}, {"params": rest, "lr": lr}]

    # -- switching, mixing, removing and saving

    @explain_arguments
    def use(
        self, name: str | Sequence[str] | None, *, train: str | Sequence[str] | None = None, head_of: str | None = None
    ) -> Tuned:
        """Put a delta in use for the whole model, its head and labels included; or several, which act together.

        Several act as one method that is the sum of theirs in this order: their changes of the hidden states one after
        another, their values of a tensor of the model as W + Σ (W_i - W), and prefixes and prompts beside each other.
        Functions of a weight (DoRA) read the base model's.

        This holds for every thread that is not inside `rows()` or `disable()`. The call waits until no forward pass
        and no `generate` of this model runs. Which parameters of a delta are trainable is remembered while it is not
        in use. Switch between training steps, not between a forward pass and its backward pass.

        Args:
            name: The delta's name, a list of names, or None for the base model.
            train: Those of them that train; the others are frozen, as for learning on top of what was learned before.
                Default: all.
            head_of: The delta whose head answers. Needed where several have a head that trains.

        Returns:
            The handle itself.

        Raises:
            DeltuneError: No delta has this name, the deltas cannot act together, or the call is inside `rows()` or a
                forward pass.
        """
        self.attached.use(name, train, head_of)
        return self

    def advance(self, share: float) -> None:
        """Tell the delta in use how much of its training is done, after each optimizer.step() and before zero_grad().

        Only methods with a schedule need it: `adalora` prunes ranks, and a learned mask (`sparsity`) has a penalty that
        grows during the first half of training, then its gates are fixed. `deltune train` calls it, and so does
        `ScheduleCallback` in a Trainer; a training loop of your own must call it too. A penalty is added to the
        gradients as they are, so a loss that a GradScaler scales (fp16) makes it too weak: train in bf16.

        Args:
            share: The share of the training steps that are done, from 0 to 1: `(step + 1) / steps`.

        Raises:
            DeltuneError: `share` is not a number from 0 to 1, no delta is in use, or gradients that a schedule needs
                were removed.
        """
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise DeltuneError(
                f"advance takes the share of the training that is done, a number from 0 to 1, not {excerpt(share)}: "
                "advance((step + 1) / steps)"
            )
        some = self.attached.training()
        if any(len(delta.schedules) or len(delta.gated) for delta in some):
            refuse_sharded(self.model, "a schedule and learned gates read whole tensors", "train another method")
        for delta in some:
            for _, gates in delta.learned_masks():
                gates.advance(share)
            for state in delta.schedule_states():
                state.advance(share)

    def condition(self, *, task_ids: Sequence[int] | torch.Tensor) -> AbstractContextManager[None]:
        """Say inside a `with` block which task each row of the batch has, for methods with tasks, such as `poly`.

        It holds for the passes of this model in the thread or asyncio task that enters it, `generate` included.

        Args:
            task_ids: The number of the task of each row (B,), from 0 on.

        Returns:
            A context manager.

        Raises:
            DeltuneError: They are no whole numbers from 0 on, one for each row.
        """
        ids = torch.as_tensor(task_ids)
        if ids.dim() != 1 or not len(ids) or ids.dtype not in (torch.int64, torch.int32) or int(ids.min()) < 0:
            raise DeltuneError(f"task_ids={excerpt(task_ids)}: give the number of a task, from 0 on, for each row")
        return condition(self.attached.passes, {"task_ids": ids.long()})

    @explain_arguments
    def disable(self) -> Scope:
        """Use the base model inside a `with` block, in the thread or asyncio task that enters it.

        Returns:
            A context manager, which gives the handle.

        Raises:
            DeltuneError: The handle was detached or merged.
        """
        _ = self.model  # raises after detach() and merge()
        return Scope(self.attached.passes, self, lambda: self.attached.assign(Use()))

    @explain_arguments
    def rows(self, names: Sequence[str | Sequence[str] | None], *, head_of: str | None = None) -> Scope:
        """Give each row of a batch its own delta inside a `with` block, in training and in generation.

        It holds for the thread or asyncio task that enters the block; a pass in a thread that is in no block is an
        error meanwhile, unless that thread has called `use()`. Logits are as wide as the widest head, with -inf where a
        row's own head has no label; the loss of class labels is each row's own. In `generate` the prompts are the rows,
        and the beams of a prompt follow it.
        Inside, `trainable_parameters()` are those of all deltas that are named; run the backward pass there too.

        Args:
            names: For each row of the batch the name of its delta, a list of several that act together as in `use`, or
                None for the base model.
            head_of: Of several that act together, the delta whose head answers.

        Returns:
            A context manager, which gives the handle.

        Raises:
            DeltuneError: No delta has one of the names, a delta trains tensors that all rows share (`full`), or it
                changes modules that do not keep the order of the rows (`Anatomy.not_by_row`). A batch of another size,
                and a backward pass outside the block, are errors too, when they run.
        """
        _ = self.model  # raises after detach() and merge()
        return Scope(self.attached.passes, self, lambda: self.attached.assign_each_row(names, head_of))

    @explain_arguments
    def detach(self, name: str | None = None) -> PreTrainedModel:
        """Remove one delta, or all, and return the model; with none left it has exactly the weights it had before.

        The call waits until no forward pass of this model runs.

        Args:
            name: The delta's name. Default: all deltas.

        Returns:
            The model.

        Raises:
            DeltuneError: No delta has this name, `rows()` in another thread or task uses it, or the call is inside
                `rows()` or a forward pass.
        """
        return self.attached.detach(name)

    @explain_arguments
    def merge(
        self,
        name: str | Sequence[str] | None = None,
        *,
        head_of: str | None = None,
        dequantize: bool = False,
        pooling: Literal["model"] | None = None,
    ) -> PreTrainedModel:
        """Fold a delta, or several, into the weights and detach everything, all other deltas included.

        The merged weight of a quantised linear is quantised again, which rounds it; a warning has the error.

        Args:
            name: The delta's name, or a list of names whose deltas act together as in `use`. Default: what is in use.
            head_of: Of several, the delta whose head is kept.
            dequantize: Put plain linears in floating point in place of all quantised ones, so that nothing is rounded.
            pooling: "model" has a head that was trained on another pooling read the class's pooler, which gives other
                outputs. Default: such a delta is refused.

        Returns:
            The model, which gives the tuned outputs without deltune.

        Raises:
            DeltuneError: A term of the method cannot be expressed as weights (a prefix, an adapter, a prompt); the
                message names it. Or no delta has this name or none is in use, a weight cannot be quantised again,
                weights are offloaded, or another thread or task is inside `rows()` or `disable()`. Nothing is changed.
        """
        model, warning = self.attached.merge(name, head_of, dequantize, gives_up_pooling(pooling))
        if warning:
            warnings.warn(warning, stacklevel=3)
        return model

    @explain_arguments
    def combine(
        self,
        expression: str,
        name: str,
        *,
        rank: int | None = None,
        how: How | None = None,
        head_of: str | None = None,
        mixing: Weights | str = "scalar",
    ) -> Tuned:
        """Attach a weighted sum of deltas, or their average, as a new delta and put it in use.

        A sum adds what each delta changes of the base model's weights, and never one delta's factors to another's: it
        is exact, whatever the methods are. Low ranks stay low ranks, whose ranks add up; vectors that scale or shift
        stay such vectors; tensors that are trained in place become W + Σ w (V - W); every other change of a weight
        becomes a low rank, of its full rank where it needs that.

        Args:
            expression: A sum such as "0.5*a + b - 2*'my-task'", in which a name with '-' or of digits stands in quotes;
                or "average(a, b)", which has the mean parameters of deltas of one method, whatever that is; or
                "mix(a, b)", which trains the weights of their changes at each place and nothing else.
            name: The new delta's name.
            rank: The rank of every linear's change, instead of an exact one: the best approximation of this rank, whose
                loss is said in a warning. It makes a LoRA of any method that can be merged.
            how: `Ties`, `Dare` or `Magnitude`, which join the changes of each weight in another way than by adding.
            head_of: The delta whose head it gets, or "average". Needed where several deltas have a head that trains.
            mixing: The weights of a mix: "scalar" (a number for each, 1/n at first), "softmax" (positive, in all 1),
                "attention" (for each token), "fusion" (the same of full width and with values, as in AdapterFusion),
                "arrow" (nothing is trained: each token takes the three changes whose direction is nearest to it, or as
                in "arrow(top_k=2, temperature=0.5)"), or "xlora" (for each token, by a classifier of what a first pass
                ends with, or as in "xlora(depth=2)"). Adapters of one activation are mixed by attention or fusion.

        Returns:
            The handle itself.

        Raises:
            DeltuneError: The expression cannot be read, a weight is not finite, a name is unknown or the new one is
                taken, a term cannot be expressed as weights (a prefix, an adapter), or the methods or labels of what is
                averaged differ. Nothing is attached.
        """
        combine(self.attached, expression, name, rank, how, head_of, mixing)
        return self

    @explain_arguments
    def save(self, folder: str | Path, name: str | None = None, *, model_card: bool = False) -> Path:
        """Write a delta to a folder, as `delta.json` and `delta.safetensors`, completely or not at all.

        Of a model that FSDP2 has sharded every process must call it, and the first one writes; so too `export`.

        Args:
            folder: A new folder, an empty one, or one that holds a delta, which is replaced.
            name: The delta's name. Default: the delta in use.
            model_card: Also write a `README.md` as the hub shows it: method, counts, base model and how to load it. If
                there is one, only the lines and the metadata that deltune writes are replaced.

        Returns:
            The folder.

        Raises:
            DeltuneError: No delta has this name or none is in use, or the folder holds other files or cannot be
                written. What was there before is kept.
        """
        title = user_path(folder, "folder").resolve().name or "delta"
        path, _ = self._write(folder, name, (title, title) if model_card else None)
        return path

    @explain_arguments
    def push_to_hub(
        self,
        repo_id: str,
        name: str | None = None,
        *,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
    ) -> CommitInfo:
        """Upload a delta and its model card to the Hugging Face Hub, in one commit; the base model is not uploaded.

        `deltune.load(model, repo_id)` loads it from there. The arguments are those of transformers and PEFT.

        Args:
            repo_id: The repository, OWNER/NAME, which is made if it does not exist.
            name: The delta's name. Default: the delta in use.
            commit_message: The first line of the commit's message. Default: "Upload a delta".
            commit_description: The rest of the message.
            private: Whether a new repository is private. Default: what the hub does by default.
            token: An access token. Default: the one of `hf auth login`.
            revision: The branch, which is made if it does not exist. Default: main.
            create_pr: Open a pull request in place of a commit to the branch.

        Returns:
            What huggingface_hub says about the commit, with its address and its hash (`oid`).

        Raises:
            DeltuneError: As `save`; or the hub refuses or cannot be reached, `HF_HUB_OFFLINE` is set, or `private` is
                True and the repository is public.
        """
        commit = hub.Commit(commit_message or "Upload a delta", commit_description, revision, create_pr)
        if not isinstance(repo_id, str):
            raise DeltuneError(f"repo_id must be OWNER/NAME, not {excerpt(repo_id)}")
        with tempfile.TemporaryDirectory() as folder:
            path, card = self._write(Path(folder) / "delta", name, (repo_id.rpartition("/")[2], repo_id))
            assert card is not None
            return hub.push_delta(path, card, repo_id, commit, private=private, token=token)

    def _write(
        self, folder: str | Path, name: str | None, card: tuple[str, str] | None = None
    ) -> tuple[Path, str | None]:
        """Write a delta, with a model card of a title and a folder to load from; return the folder and the card."""
        metadata, tensors = self.attached.contents(name, with_allocated_ranks)
        text = None
        if card is not None:
            title, source = card
            text = render_card(title, metadata, self.count(name=name), source)
        return write_once(self.model, lambda: serialization.write_delta(folder, metadata, tensors, text)), text


def _of_whole_model(name: str) -> Callable[..., Tuned]:
    """Return a method of a handle that does to the whole model what torch's method of this name does."""

    @functools.wraps(getattr(nn.Module, name))
    def method(self: Tuned, *args: Any, **kwargs: Any) -> Tuned:
        getattr(self.model, name)(*args, **kwargs)
        return self

    return method


for _name in ("to", "cuda", "cpu", "half", "float", "double", "bfloat16"):
    setattr(Tuned, _name, _of_whole_model(_name))


def _handle_of(model: PreTrainedModel) -> nn.Module | None:
    return submodules_of(model)[HANDLE_NAME]
