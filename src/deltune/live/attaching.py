"""Attaching a method to a live model, attaching what a folder holds, and writing one for others."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from ..algebra.catalogue import parse
from ..algebra.counting import base_size
from ..algebra.elements import Method
from ..algebra.planning import Plan, plan
from ..anatomy.observe import inspect
from ..anatomy.trace import configurations
from ..dialects.foreign import is_foreign
from ..errors import DeltuneError, unknown
from ..mathematics.stacks import Prompt
from . import store
from .attention import extended_name
from .edits import Delta, Labels, slot_key
from .handle import NAME, Tuned
from .interchange import translated, write


def attach(
    model: PreTrainedModel, method: str | Method, name: str = "default", head: Literal["train", "freeze"] = "train"
) -> Tuned:
    """Attach a method to a model in place, under a name, and put it in use; the rest of the model is frozen.

    method: an expression ("prefix(length=16) + layernorm") or a method object. head: train the task head or freeze it;
    it is saved with the delta either way. Initial values come from torch's global generator.
    Errors (DeltuneError, the model unchanged): an unknown method, a site this model does not have, a name in use.
    """
    _check_model(model)
    parsed = parse(method)
    if head not in ("train", "freeze"):
        raise DeltuneError(unknown("head", head, ("train", "freeze")))
    handle = existing(model)
    check_name(name, handle.names if handle else ())
    planned = plan(handle.anatomy if handle else inspect(model), parsed, lambda: base_size(model)[1])
    if any(edit.modification.form.needs == "attention" for edit in planned.edits):
        for config in configurations(model):
            extended_name(config._attn_implementation)
    with _attaching(model) as handle:
        _attach(handle, parsed, planned, name, head)
    return handle


@contextlib.contextmanager
def _attaching(model: PreTrainedModel) -> Iterator[Tuned]:
    """The model's handle, made if need be; on any failure a handle that was made goes again."""
    before = existing(model)
    handle = before or Tuned(model)
    try:
        yield handle
    except BaseException:
        if before is None and existing(model) is handle:
            handle.detach()
        raise


def _attach(handle: Tuned, parsed: Method, planned: Plan, name: str, head: str) -> None:
    heads = tuple(t.name for t in handle.anatomy.tensors if t.area == "head")
    delta = handle.settle(Delta(parsed, planned, heads, head))
    delta.start()
    for name_in_model, sparse in delta.masked():
        sparse.start(handle.original(name_in_model).detach())
    _start_rows(handle, delta)
    for owned in delta.owned:
        delta.held[slot_key(owned)] = nn.Parameter(handle.original(owned).detach().clone())
    coarse = [n for n in delta.selected if handle.original(n).dtype in (torch.bfloat16, torch.float16)]
    if coarse:
        kind = handle.original(coarse[0]).dtype
        warnings.warn(
            f"{parsed!r} trains {len(coarse)} tensors of {kind} in place, in which small steps are lost: load the "
            "model in float32 and use autocast",
            stacklevel=4,
        )
    handle.add(name, delta, handle.base_labels)


@torch.no_grad()
def _start_rows(handle: Tuned, delta: Delta) -> None:
    """Prompt rows that start from the embeddings of given token ids, repeated up to the prompt's length."""
    for edit in delta.all_edits():
        form = edit.modification.form
        if isinstance(form, Prompt) and form.init_from:
            words = handle.model.get_submodule(handle.anatomy.stacks[0].words or "")
            ids = [form.init_from[i % len(form.init_from)] for i in range(form.length)]
            edit.begin_at("rows", words(torch.tensor(ids, device=next(words.parameters()).device)))


def load(model: PreTrainedModel, folder: str | Path, name: str = "default") -> Tuned:
    """Attach a saved delta (a RUN, its delta folder, any folder that save wrote, or one of PEFT or AdapterHub) under a
    name, whatever it was called when it was saved, and put it in use.

    Errors (DeltuneError; the model stays as it was): no delta there, a truncated, altered or foreign file, another base
    model, missing or extra tensors, a head that this model class does not have, what another library's options say and
    no method here.
    """
    _check_model(model)
    if is_foreign(folder) and not (Path(folder) / store.FACTS).is_file():
        return _load_foreign(model, Path(folder), name)
    where = store.delta_folder(folder)
    facts, numbers = store.read(where)
    handle = existing(model)
    check_name(name, handle.names if handle else ())
    with _attaching(model) as handle:
        delta, labels = _read_delta(handle, facts, numbers, where)
        handle.add(name, delta, labels or handle.base_labels)
    return handle


def _read_delta(
    handle: Tuned, facts: dict[str, Any], numbers: dict[str, torch.Tensor], where: Path
) -> tuple[Delta, Labels | None]:
    """The delta of a folder for this model, after every check."""
    store.check_base(facts, store.base_facts(handle.model, handle.anatomy, handle.original), where)
    head = tuple(facts["head"]["tensors"])
    own = tuple(t.name for t in handle.anatomy.tensors if t.area == "head")
    if head and head != own:
        raise DeltuneError(
            f"{where} holds a head for {facts['base']['model']} ({', '.join(head)}); {type(handle.model).__name__} has "
            f"{', '.join(own) or 'none'}: load the base model as {facts['base']['model']}"
        )
    method = parse(facts["explicit"])
    planned = plan(handle.anatomy, method, lambda: base_size(handle.model)[1])
    delta = handle.settle(Delta(method, planned, head, facts["head"]["mode"], folded=True))
    _fill(handle, delta, numbers, len((facts.get("labels") or {}).get("id2label") or ()), where)
    delta.method = parse(facts["method"])
    if delta.method.parts != method.parts:
        raise DeltuneError(f"{where}: the method {facts['method']!r} is not what {facts['explicit']!r} says")
    labels = facts.get("labels")
    if not labels:
        return delta, None
    pairs = tuple(sorted((int(k), str(v)) for k, v in labels["id2label"].items()))
    return delta, Labels(pairs, labels.get("problem_type"))


def _fill(handle: Tuned, delta: Delta, numbers: dict[str, torch.Tensor], labels: int, where: Path) -> None:
    """Give a new delta the numbers of a file, after checking that they are the ones it needs."""
    shapes = {t.name: t.shape for t in handle.anatomy.tensors}
    wanted: dict[str, tuple[int, ...] | None] = {name: tuple(t.shape) for name, t in delta.kept().items()}
    wanted |= {f"base.{name}": None if name in delta.head else shapes[name] for name in delta.owned}
    store.check_tensors(wanted, numbers, where)
    _check_head(labels, {name: (numbers[f"base.{name}"].shape, shapes[name]) for name in delta.head}, where)
    with torch.no_grad():
        for name, tensor in delta.kept().items():
            tensor.copy_(numbers[name])
        for name in delta.owned:
            like = handle.original(name)
            value = numbers[f"base.{name}"].to(device=like.device, dtype=like.dtype)
            delta.held[slot_key(name)] = nn.Parameter(value.clone())  # the file's memory is unaligned: other last bits


def _load_foreign(model: PreTrainedModel, where: Path, name: str) -> Tuned:
    """Attach what a folder of PEFT or AdapterHub says; a head that is not in it stays the model's own, and frozen."""
    handle = existing(model)
    check_name(name, handle.names if handle else ())
    with _attaching(model) as handle:
        found = translated(handle, where)
        planned = plan(handle.anatomy, found.method, lambda: base_size(model)[1])
        head = tuple(t.name for t in handle.anatomy.tensors if t.area == "head")
        if found.head and (missing := [n for n in head if n not in found.head]):
            raise DeltuneError(f"{where} has a part of a head; missing: {', '.join(missing)}")
        own = {n: found.head.get(n, handle.original(n).detach()) for n in head}
        delta = handle.settle(Delta(found.method, planned, head, "train" if found.head else "freeze", folded=True))
        labels = handle.base_labels
        if found.head:
            width = own[head[-1]].shape[0]  # the last linear's outputs
            named = found.labels or tuple(label for _, label in labels.id2label)
            named = named if len(named) == width else tuple(f"LABEL_{i}" for i in range(width))
            labels = Labels(tuple(enumerate(named)), labels.problem_type)
        _fill(handle, delta, found.numbers | {f"base.{n}": t for n, t in own.items()}, len(labels.id2label), where)
        handle.add(name, delta, labels)
    return handle


def export(model: PreTrainedModel, folder: str | Path, format: str = "peft", name: str | None = None) -> Path:
    """Write the delta in use (or the one named) for another library, into a new folder, all or nothing.

    format: "peft". Errors: a folder that holds anything, everything that the format cannot express, with the reasons.
    """
    return write(tuned(model), folder, format, name)


def _check_head(labels: int, shapes: dict[str, tuple[Any, Any]], where: Path) -> None:
    """Error when a head's tensors differ from this model's in more than the number of labels, the first axis."""
    for name, (found, own) in shapes.items():
        if tuple(found[1:]) != tuple(own[1:]) or (found[0] != own[0] and found[0] != labels):
            raise DeltuneError(
                f"{where}: head tensor {name} has shape {tuple(found)}, this model's head has {tuple(own)}; only the "
                f"number of labels may differ, and the file names {labels}"
            )


def _check_model(model: object) -> None:
    """Errors for what is no model of transformers, such as one that PEFT has wrapped."""
    if isinstance(model, PreTrainedModel):
        return
    wrapped = (
        ": take PEFT's layers off first (its unload()), or save it and deltune.load its folder"
        if hasattr(model, "peft_config")
        else ", as in attach(model, method)"
    )
    raise DeltuneError(f"a method is attached to a model of transformers, not to a {type(model).__name__}{wrapped}")


def check_name(name: str, taken: Iterable[str]) -> None:
    """Errors for a delta name that cannot be a module's name or is in use."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", name) or hasattr(nn.ModuleDict, name):
        raise DeltuneError(f"name {name!r}: use letters, digits, '-' and '_' (and no name of a dict method)")
    if name in taken:
        raise DeltuneError(f"a delta named {name!r} is attached already; detach it or choose another name")


def existing(model: nn.Module) -> Tuned | None:
    """The tuned object of a model, or None."""
    found: Any = model._modules.get(NAME)
    return found if isinstance(found, Tuned) else None


def tuned(model: nn.Module) -> Tuned:
    """The handle of a model with deltas. Error: nothing is attached to it."""
    found = existing(model)
    if found is None:
        raise DeltuneError(f"nothing is attached to this {type(model).__name__}; deltune.attach(model, method) first")
    return found
