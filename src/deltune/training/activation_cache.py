"""The states of a frozen trunk, once for each row, on the disk: memory-mapped, by content, within a limit.

Of a row its real tokens are kept, one after the other; where what is above the trunk reads one token alone, that is all
that is kept and the row is cut to it. Which it is, and that a pass from states gives what a whole pass gives, is found
out by trying on a few rows.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..errors import DeltuneError
from ..runtime.attaching import tuned
from ..runtime.frozen_layers import FrozenLayers
from ..runtime.handle import base_value
from ..tasks import token_cache
from ..tasks.base import InferenceContext, autocast_to
from ..tasks.encoding import EncodedRows, Row, collate, count_tokens, non_padding_mask
from . import distributed

VERSION = 1
"""Raised when the same content gives other states."""
PROBE = 4  # rows to try on
CLOSE = {"fp32": 1e-3, "bf16": 3e-2}
"""How far logits may be apart, as a share of the largest: rounding is below, another input above."""
TYPES = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.float16: "F16"}
"""As safetensors calls them."""

Reads = Literal["first", "last", "all"]
"""Which of a row's tokens are read above the trunk."""

told = logging.getLogger("deltune")


@dataclass(frozen=True)
class CachedRows(EncodedRows):
    """Rows whose batches go into passes with the trunk's states. One row alone is as it was.

    states: argument of a pass -> (tokens, states, width); starts: argument -> where each row begins there, and the end.
    """

    states: Mapping[str, torch.Tensor] | None = None
    starts: Mapping[str, Sequence[int]] | None = None
    reads: Reads = "all"

    def __getitems__(self, indices: Sequence[int]) -> list[Row]:
        assert self.states is not None and self.starts is not None
        rows = [_cut(row, self.reads) for row in super().__getitems__(indices)]
        for row, i in zip(rows, indices, strict=True):
            row["states"] = {
                name: t[self.starts[name][i] : self.starts[name][i + 1]] for name, t in self.states.items()
            }
        return rows


def with_cached_activations(
    trunk: FrozenLayers, use: InferenceContext, encoded: Mapping[str, EncodedRows], gib: float
) -> dict[str, EncodedRows]:
    """The splits with their states, from the disk or made now by one pass; as they are if none can be kept, and told.

    gib: the most that the folder may hold, in GiB; what was used longest ago goes. Error: these splits alone are more.
    """
    place = token_cache.cache_folder()
    if place is None or not gib:
        return _told(encoded, f"{token_cache.VARIABLE}=off" if place is None else "trunk_cache=0")
    place = place / "trunk"
    tried = _tried(trunk, use, encoded["train"])
    if isinstance(tried, str):
        return _told(encoded, tried)
    reads, shapes = tried
    base = _identity(trunk, use.precision)
    plans = {split: _Plan(base, trunk, rows, reads, shapes) for split, rows in encoded.items()}
    needed = sum(plan.size for plan in plans.values())
    if needed > gib * 2**30:
        raise DeltuneError(
            f"the states of the frozen trunk take {needed / 2**30:.3g} GiB, and trunk_cache={gib:g} allows less: give "
            f"trunk_cache={math.ceil(needed / 2**30)}, or trunk_cache=0 to run the trunk in every pass"
        )

    def make() -> str | None:
        """What hinders: states save time and change no number, so that nothing may fail for them."""
        try:
            for split, plan in plans.items():
                with token_cache.exclusive_creation(plan.path(place)):
                    if plan.read(place) is None:
                        plan.write(place, trunk, use, encoded[split])
                    elif use.advance is not None:
                        use.advance(len(encoded[split]))
        except OSError as error:
            return f"no states can be written ({error})"
        token_cache.evict_old_files(place, ".safetensors", [plan.path(place) for plan in plans.values()], gib * 2**30)
        return None

    if (why := distributed.broadcast_from_main(make)) is not None:
        return _told(encoded, why)
    found = {split: plan.over(place, encoded[split]) for split, plan in plans.items()}
    whole = {split: rows for split, rows in found.items() if rows is not None}
    if len(whole) < len(plans):
        return _told(encoded, f"states in {place} were removed by somebody else")
    told.info("states of the frozen trunk: %.3g MiB in %s", needed / 2**20, place)
    return whole


def _told(encoded: Mapping[str, EncodedRows], why: str) -> dict[str, EncodedRows]:
    told.info("the frozen trunk is run in every pass: %s", why)
    return dict(encoded)


class _Plan:
    """What is kept of one split: its name by content, its size, and where each row's tokens begin."""

    def __init__(
        self,
        base: str,
        trunk: FrozenLayers,
        encoded: EncodedRows,
        reads: Reads,
        shapes: Mapping[str, tuple[Any, tuple[int, ...]]],
    ) -> None:
        self.reads, self.shapes = reads, shapes
        content = hashlib.sha256(json.dumps([base, reads, [[n, str(s)] for n, s in shapes.items()]]).encode())
        lengths: dict[str, list[int]] = {name: [] for name in shapes}
        for row in encoded.rows:
            labels = {name: _of_labels(trunk, name, row) for name in shapes}
            for name, own in labels.items():
                lengths[name].append(sum(_lengths(row, own, reads)))
            for field in sorted(_tokens(row, any(labels.values()))):
                content.update(f"{field} {count_tokens(row[field])} ".encode() + _flat(row[field]).tobytes())
        self.starts = {name: [0, *itertools.accumulate(own)] for name, own in lengths.items()}
        self.name = content.hexdigest()[: token_cache.NAME]

    def path(self, place: Path) -> Path:
        return place / f"{self.name}.safetensors"

    def tensors(self) -> dict[str, dict[str, Any]]:
        """The header of the file: argument -> type, shape, and where its bytes are."""
        found, at = {}, 0
        for name, (dtype, shape) in self.shapes.items():
            whole = [self.starts[name][-1], *shape]
            stop = at + math.prod(whole) * dtype.itemsize
            found[name] = {"dtype": TYPES[dtype], "shape": whole, "data_offsets": [at, stop]}
            at = stop
        return found

    @property
    def size(self) -> int:
        return max(facts["data_offsets"][1] for facts in self.tensors().values())

    def read(self, place: Path) -> dict[str, torch.Tensor] | None:
        """The states, memory-mapped; None where there are none that can be read."""
        path = self.path(place)
        if not path.is_file():
            return None
        try:
            found = load_file(path)
            os.utime(path)
        except (OSError, SafetensorError):
            return None
        whole = {name: facts["shape"] for name, facts in self.tensors().items()}
        return found if {name: list(t.shape) for name, t in found.items()} == whole else None

    def over(self, place: Path, encoded: EncodedRows) -> EncodedRows | None:
        """The rows, with their states; None where these cannot be read."""
        states = self.read(place)
        if states is None:
            return None
        cut = (encoded.truncated, encoded.texts, encoded.truncated_targets)
        made = CachedRows(encoded.rows, *cut, states, self.starts, self.reads)
        made.__dict__["lengths"] = encoded.lengths  # of the whole rows: the order of batches goes by them
        return made

    def write(self, place: Path, trunk: FrozenLayers, use: InferenceContext, encoded: EncodedRows) -> None:
        """One pass over the split, into a file that is whole or not there. safetensors wants all tensors at once."""
        header = json.dumps(facts := self.tensors()).encode()
        header += b" " * (-len(header) % 8)
        begin = 8 + len(header)
        with token_cache.is_complete(self.path(place)) as file:
            file.write(len(header).to_bytes(8, "little") + header)

            def take(indices: list[int], batch: dict[str, torch.Tensor]) -> None:
                rows = [encoded.rows[i] for i in indices]
                for i, states in zip(indices, _parts(trunk, rows, batch, self.reads), strict=True):
                    for name, part in states.items():
                        of_row = part[0].numel() * part.itemsize
                        file.seek(begin + facts[name]["data_offsets"][0] + self.starts[name][i] * of_row)
                        file.write(_bytes(part))

            use.over(encoded, take)


def _tried(
    trunk: FrozenLayers, use: InferenceContext, encoded: EncodedRows
) -> str | tuple[Reads, dict[str, tuple[torch.dtype, tuple[int, ...]]]]:
    """Which tokens are read above the trunk, and type and shape of a token's states by argument; or why there are none.

    In training mode, with the same draws of dropout, logits from the states must be those of a whole pass.
    """
    order = sorted(range(len(encoded)), key=encoded.lengths.__getitem__)
    rows = [encoded.rows[i] for i in {order[int(at)] for at in np.linspace(0, len(order) - 1, PROBE)}]
    model, device = use.model, next(use.model.parameters()).device
    training = model.training

    def batch(some: Sequence[Row]) -> dict[str, torch.Tensor]:
        return {name: tensor.to(device) for name, tensor in collate(use.tokenizer, some).items()}

    def logits(run: Any) -> torch.Tensor:
        model.train()
        torch.manual_seed(0)
        found: torch.Tensor = run().logits.float()
        return found

    whole = batch(rows)
    if "attention_mask" not in whole:
        return "without an attention_mask nobody can tell tokens from padding"
    try:
        with torch.no_grad(), torch.random.fork_rng(), autocast_to(device, use.precision):
            expected = logits(lambda: trunk.examine(whole))
            if not trunk.kept_states:
                return "each of its layers gives something besides its state that is read above"
            model.eval()
            states = trunk.states(whole)
            spoken = any(_of_labels(trunk, name, rows[0]) for name in states)
            able: tuple[Reads, ...] = ("all",) if trunk.boundary.above or spoken else ("first", "last", "all")
            for reads in able:
                parts = _parts(trunk, rows, whole, reads, states)
                short = batch([{**_cut(row, reads), "states": part} for row, part in zip(rows, parts, strict=True)])
                try:
                    found = logits(lambda: model(**short))  # noqa: B023
                except (RuntimeError, ValueError, LookupError, TypeError, AttributeError):  # whatever the family says
                    continue
                if _same(found, expected, non_padding_mask(whole, spoken), CLOSE[use.precision]):
                    return reads, {name: (t.dtype, tuple(t.shape[2:])) for name, t in states.items()}
    finally:
        model.train(training)
    return "a pass from its states alone does not give what a whole pass gives"


def _same(found: torch.Tensor, expected: torch.Tensor, mask: torch.Tensor, close: float) -> bool:
    """Whether logits agree; those of tokens, at the real ones."""
    if found.shape != expected.shape:
        return False
    if found.dim() == 3 and found.shape[:2] == mask.shape:
        found, expected = found[mask], expected[mask]
    return bool((found - expected).abs().max() <= close * expected.abs().max())


def _parts(
    trunk: FrozenLayers,
    rows: Sequence[Row],
    batch: Mapping[str, torch.Tensor],
    reads: Reads,
    states: Mapping[str, torch.Tensor] | None = None,
) -> list[dict[str, torch.Tensor]]:
    """The kept states of each row of a batch: argument -> (tokens, states, width)."""
    found: list[dict[str, torch.Tensor]] = [{} for _ in rows]
    for name, whole in (trunk.states(batch) if states is None else states).items():
        labels = _of_labels(trunk, name, rows[0])
        lengths = [_lengths(row, labels, "all") for row in rows]
        tokens = whole[non_padding_mask(batch, labels)].split([n for own in lengths for n in own])
        at = iter(part if reads == "all" else part[:1] if reads == "first" else part[-1:] for part in tokens)
        for row, own in zip(found, lengths, strict=True):
            row[name] = torch.cat([next(at) for _ in own])
    return found


def _of_labels(trunk: FrozenLayers, name: str, row: Row) -> bool:
    """Whether the states of an argument are of the labels' tokens: a decoder's that is told them."""
    return trunk.is_decoder_argument(name) and isinstance(row.get("labels"), list)


def _lengths(row: Row, labels: bool, reads: Reads) -> list[int]:
    """Tokens that are kept of each sequence of a row: of its labels, its input or each of its choices."""
    ids = row["labels"] if labels else row["input_ids"]
    return [len(own) if reads == "all" else 1 for own in (ids if not isinstance(ids[0], int) else [ids])]


def _tokens(row: Row, labels: bool) -> list[str]:
    """The fields of a row that hold something for each token of its input; and its labels, where these are read."""
    own = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
    return [name for name in row if name in own or (labels and name == "labels")]


def _cut(row: Row, reads: Reads) -> Row:
    """A row of which one token is left."""
    if reads == "all":
        return dict(row)
    part = slice(0, 1) if reads == "first" else slice(-1, None)
    short = {
        name: row[name][part] if isinstance(row[name][0], int) else [own[part] for own in row[name]]
        for name in _tokens(row, labels=False)
    }
    return {**row, **short}


def _flat(values: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    nested = [values] if isinstance(values[0], int) else values
    return np.fromiter(itertools.chain.from_iterable([len(own), *own] for own in nested), dtype=np.int64)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


LABELS = ("id2label", "label2id", "problem_type", "architectures", "_name_or_path", "name_or_path")
"""What a configuration says of other things than the trunk."""


def _identity(trunk: FrozenLayers, precision: str) -> str:
    """What a trunk gives, apart from rows: its tensors, configuration, and which states are kept."""
    content = hashlib.sha256()
    model, anatomy = trunk.model, trunk.anatomy
    said = {name: value for name, value in model.config.to_dict().items() if name not in LABELS}
    facts = [
        VERSION,
        transformers.__version__,
        type(model).__name__,
        precision,
        sorted(trunk.kept_states.items()),
        said,
    ]
    content.update(json.dumps(facts, sort_keys=True, default=str).encode())
    for tensor in anatomy.tensors:
        if tensor.area not in ("head", "pooler", "vocabulary") and (tensor.layer or 0) < len(trunk.boundary.layers):
            content.update(tensor.name.encode() + _bytes(base_value(tuned(model), tensor.name)))
    return content.hexdigest()
