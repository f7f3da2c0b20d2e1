"""What the frozen layers of a model compute for each row of a run, on disk, so that they run once and not every epoch.

Activations are stored without padding, in files that go with the process, within a limit. If the layers above read only
the first or the last token of a row, only that token is stored, and the row is cut to it. Which tokens are needed, and
that a pass from stored activations gives what a whole pass gives, is found out by trying it on a few rows.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ..anatomy.quantization import quantization_of
from ..errors import DeltuneError
from ..files import CACHE_VARIABLE, cache_folder
from ..runtime.padding import eval_mode, padding_side
from .frozen_layers import FrozenLayers
from .tasks import token_cache
from .tasks.base import InferenceContext, autocast
from .tasks.encoding import EncodedRows, Row, collate, non_padding_mask

PROBE_ROWS = 4
"""The number of rows that are tried."""

TOLERANCES = {"fp32": 1e-3, "bf16": 3e-2}
"""How far apart logits may be, as a share of the largest: rounding stays below, another input goes beyond it."""

TokensRead = Literal["first", "last", "all"]
"""Which tokens of a row the layers above the frozen ones read."""

Activations = Mapping[str, torch.Tensor]
"""By the name of a forward argument: the activations of its tokens, in the shape (tokens, layer boundaries, width)."""

TokenShapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""By the name of a forward argument: the type of its activations, and their shape for one token."""

logger = logging.getLogger("deltune")


@dataclass(frozen=True)
class CachedRows(EncodedRows):
    """Rows whose batches have the cached activations among their inputs; a row taken alone has none.

    Attributes:
        states: The activations of all rows, one row after the other.
        starts: By the name of a forward argument: where each row begins in its activations, and the end.
        reads: Which tokens of a row are left.
    """

    states: Activations | None = None
    starts: Mapping[str, Sequence[int]] | None = None
    reads: TokensRead = "all"

    def __getitems__(self, indices: Sequence[int]) -> list[Row]:
        """Return several rows with their activations."""
        assert self.states is not None and self.starts is not None
        rows = [_cut_row(row, self.reads) for row in super().__getitems__(indices)]
        for row, i in zip(rows, indices, strict=True):
            row["states"] = {
                name: t[self.starts[name][i] : self.starts[name][i + 1]] for name, t in self.states.items()
            }
        return rows


def with_cached_activations(
    frozen_layers: FrozenLayers, context: InferenceContext, encoded: Mapping[str, EncodedRows], max_gib: float
) -> dict[str, EncodedRows]:
    """Return the splits with the activations of the frozen layers, computed now by one pass.

    If activations cannot be kept, the splits are returned as they are, and the log says why. Each of several processes
    keeps those of all rows.
    """
    folder = cache_folder()
    if folder is None or not max_gib:
        return _uncached(encoded, f"{CACHE_VARIABLE}=off" if folder is None else "trunk_cache=0")
    if quantization_of(frozen_layers.model):
        return _uncached(encoded, "the weights are quantised, so that training computes other products than evaluation")
    probed = _probe(frozen_layers, context, encoded["train"])
    if isinstance(probed, str):
        return _uncached(encoded, probed)
    reads, shapes = probed
    starts = {split: _starts(frozen_layers, rows, reads, shapes) for split, rows in encoded.items()}
    bytes_of = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in shapes.items()}
    size = sum(of_split[name][-1] * bytes_of[name] for of_split in starts.values() for name in shapes)
    if size > max_gib * 2**30:
        raise DeltuneError(
            f"the activations of the frozen layers take {size / 2**30:.3g} GiB, but trunk_cache={max_gib:g} allows "
            f"less: give trunk_cache={math.ceil(size / 2**30)}, or trunk_cache=0 to run these layers in every pass"
        )
    cached = {}
    try:
        for split, rows in encoded.items():
            states = _on_disk(frozen_layers, context, rows, reads, shapes, starts[split], folder)
            facts = {field.name: getattr(rows, field.name) for field in fields(rows)}
            cached[split] = CachedRows(**facts, states=states, starts=starts[split], reads=reads)
            cached[split].__dict__["lengths"] = rows.lengths  # of the whole rows, by which batches are ordered
    except OSError as error:  # they save time and change no number, so no run may fail because of them
        return _uncached(encoded, f"no activations can be written ({error})")
    logger.info("the activations of the frozen layers are kept: %.3g MiB in %s", size / 2**20, folder)
    return {**cached}


def _uncached(encoded: Mapping[str, EncodedRows], reason: str) -> dict[str, EncodedRows]:
    logger.info("the frozen layers run in every pass: %s", reason)
    return dict(encoded)


def _starts(
    frozen_layers: FrozenLayers, encoded: EncodedRows, reads: TokensRead, shapes: TokenShapes
) -> dict[str, list[int]]:
    """Return for each argument where each row begins in its activations, and the end."""
    lengths: dict[str, list[int]] = {name: [] for name in shapes}
    for row in encoded.rows:
        for name, of_rows in lengths.items():
            of_rows.append(sum(_sequence_lengths(row, _is_of_labels(frozen_layers, name, row), reads)))
    return {name: [0, *itertools.accumulate(of_rows)] for name, of_rows in lengths.items()}


def _on_disk(
    frozen_layers: FrozenLayers, context: InferenceContext, encoded: EncodedRows, reads: TokensRead,
    shapes: TokenShapes, starts: Mapping[str, Sequence[int]], folder: Path,
) -> Activations:  # fmt: skip
    """Compute the activations of a split in one pass, and return them memory-mapped from files without a name."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        files = {
            name: stack.enter_context(tempfile.NamedTemporaryFile(dir=folder, prefix=token_cache.TEMPORARY_PREFIX))
            for name in shapes
        }

        def write_batch(indices: list[int], batch: dict[str, torch.Tensor]) -> None:
            rows = [encoded.rows[i] for i in indices]
            by_row = _split_by_row(frozen_layers, rows, batch, reads, frozen_layers.states(batch))
            for i, states in zip(indices, by_row, strict=True):
                for name, values in states.items():
                    files[name].seek(starts[name][i] * values[0].numel() * values.itemsize)
                    files[name].write(values.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())

        context.for_each_batch(encoded, write_batch)
        mapped = {}
        for name, (dtype, shape) in shapes.items():
            files[name].flush()
            whole = (starts[name][-1], *shape)
            mapped[name] = torch.from_file(files[name].name, size=math.prod(whole), dtype=dtype).view(whole)
        return mapped


def _probe(
    frozen_layers: FrozenLayers, context: InferenceContext, encoded: EncodedRows
) -> str | tuple[TokensRead, TokenShapes]:
    """Find out on a few rows which tokens are read, and the types and shapes; or return why nothing can be cached.

    In training mode, with the same draws of dropout, logits from activations must equal the logits of a whole pass.
    """
    if padding_side(context.model) is None:
        return "padding changes the answers of this model"
    order = sorted(range(len(encoded)), key=encoded.lengths.__getitem__)
    rows = [encoded.rows[i] for i in {order[int(at)] for at in np.linspace(0, len(order) - 1, PROBE_ROWS)}]
    model, device = context.model, next(context.model.parameters()).device

    def make_batch(some_rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        return {name: tensor.to(device) for name, tensor in collate(context.tokenizer, model, some_rows).items()}

    def logits_of(forward: Callable[[], Any]) -> torch.Tensor:
        model.train()
        torch.manual_seed(0)
        try:
            logits: torch.Tensor = forward().logits.float()
        finally:
            model.eval()
        return logits

    batch = make_batch(rows)
    if "attention_mask" not in batch:
        return "without an attention_mask, tokens cannot be told from padding"
    with eval_mode(model), torch.no_grad(), torch.random.fork_rng(), autocast(device, context.precision):
        expected = logits_of(lambda: frozen_layers.examine(batch))
        if not frozen_layers.kept_states:
            return "each of these layers computes something besides its hidden state that layers above read"
        states = frozen_layers.states(batch)
        of_labels = any(_is_of_labels(frozen_layers, name, rows[0]) for name in states)
        only_all = frozen_layers.boundary.above or of_labels
        candidates: tuple[TokensRead, ...] = ("all",) if only_all else ("first", "last", "all")
        for reads in candidates:
            by_row = _split_by_row(frozen_layers, rows, batch, reads, states)
            cut = make_batch([{**_cut_row(r, reads), "states": s} for r, s in zip(rows, by_row, strict=True)])
            try:
                logits = logits_of(lambda: model(**cut))  # noqa: B023
            except (RuntimeError, ValueError, LookupError, TypeError, AttributeError):
                continue  # a cut row is refused by every model family in its own way
            if _close(logits, expected, non_padding_mask(batch, of_labels), TOLERANCES[context.precision]):
                return reads, {name: (t.dtype, tuple(t.shape[2:])) for name, t in states.items()}
    return "a pass from their activations alone does not give what a whole pass gives"


def _close(logits: torch.Tensor, expected: torch.Tensor, mask: torch.Tensor, tolerance: float) -> bool:
    """Return whether logits agree; logits of every token are compared at tokens that are not padding."""
    if logits.shape != expected.shape:
        return False
    if logits.dim() == 3 and logits.shape[:2] == mask.shape:
        logits, expected = logits[mask], expected[mask]
    return bool((logits - expected).abs().max() <= tolerance * expected.abs().max())


def _split_by_row(
    frozen_layers: FrozenLayers,
    rows: Sequence[Row],
    batch: Mapping[str, torch.Tensor],
    reads: TokensRead,
    states: Activations,
) -> list[dict[str, torch.Tensor]]:
    """Split the activations of a batch, (B, n, layer boundaries, width), by row and drop padding."""
    by_row: list[dict[str, torch.Tensor]] = [{} for _ in rows]
    for name, padded in states.items():
        labels = _is_of_labels(frozen_layers, name, rows[0])
        lengths = [_sequence_lengths(row, labels, "all") for row in rows]
        sequences = padded[non_padding_mask(batch, labels)].split([n for of_row in lengths for n in of_row])
        remaining: Iterator[torch.Tensor] = (sequence[_kept_tokens(reads)] for sequence in sequences)
        for row, of_row in zip(by_row, lengths, strict=True):
            row[name] = torch.cat([next(remaining) for _ in of_row])
    return by_row


def _kept_tokens(reads: TokensRead) -> slice:
    """Return the tokens of a sequence that are stored."""
    return {"all": slice(None), "first": slice(0, 1), "last": slice(-1, None)}[reads]


def _is_of_labels(frozen_layers: FrozenLayers, argument: str, row: Row) -> bool:
    """Return whether an argument holds activations of the labels' tokens, which a decoder reads in training."""
    return frozen_layers.is_decoder_argument(argument) and isinstance(row.get("labels"), list)


def _sequence_lengths(row: Row, labels: bool, reads: TokensRead) -> list[int]:
    """Count the stored tokens of each sequence of a row: its labels, its input, or each of its choices."""
    ids = row["labels"] if labels else row["input_ids"]
    return [len(sequence) if reads == "all" else 1 for sequence in (ids if not isinstance(ids[0], int) else [ids])]


def _cut_row(row: Row, reads: TokensRead) -> Row:
    """Return a copy of a row with the tokens that are read."""
    if reads == "all":
        return dict(row)
    tokens = _kept_tokens(reads)
    cut: Row = {
        name: row[name][tokens] if isinstance(row[name][0], int) else [choice[tokens] for choice in row[name]]
        for name in ("input_ids", "attention_mask", "token_type_ids", "position_ids")
        if name in row
    }
    return {**row, **cut}
