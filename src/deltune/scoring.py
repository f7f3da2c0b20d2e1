"""A classifier's answers to encoded rows, their scores against the labels, and both as lines of a file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from .attaching import tuned
from .encoding import Encoded, collate
from .metrics import METRICS, score

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Scored:
    """A split with the model's answers: metrics (loss included), class ids and probabilities, row by row."""

    metrics: dict[str, float]
    signatures: dict[str, str]
    predictions: list[int]
    scores: list[list[float]]


@torch.no_grad()
def logits(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    encoded: Encoded,
    batch_size: int,
    precision: str = "fp32",
    advance: Callable[[int], None] | None = None,
    deltas: Sequence[str | None] | None = None,
) -> torch.Tensor:
    """(rows, labels) in float32, in the order of the rows; computed in batches of similar length.

    deltas: the delta that each row uses; then labels beyond a row's own are -inf.
    """
    device = next(model.parameters()).device
    order = sorted(range(len(encoded)), key=lambda i: -len(encoded[i]["input_ids"]))
    parts = []
    cast = torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
    training = model.training
    model.eval()
    try:
        with cast:
            for start in range(0, len(order), batch_size):
                these = order[start : start + batch_size]
                rows = [encoded[i] for i in these]
                batch = {n: t.to(device) for n, t in collate(tokenizer, rows).items() if n != "labels"}
                with tuned(model).rows([deltas[i] for i in these]) if deltas else contextlib.nullcontext():
                    parts.append(model(**batch).logits.float().cpu())
                if advance is not None:
                    advance(len(rows))
    finally:
        model.train(training)
    width = max(part.shape[-1] for part in parts)
    found = torch.cat([functional.pad(p, (0, width - p.shape[-1]), value=-torch.inf) for p in parts])
    result = torch.empty_like(found)
    result[torch.tensor(order)] = found
    return result


def scored(found: torch.Tensor, encoded: Encoded) -> Scored:
    """Metrics of logits against the labels of the rows; f1 where there are two labels."""
    references = [int(row["labels"]) for row in encoded.rows]
    predictions = found.argmax(-1).tolist()
    loss = functional.cross_entropy(found, torch.tensor(references)).item()
    count = found.shape[-1]
    names = [n for n, metric in METRICS.items() if metric.kind == "classes" and (n != "f1" or count == 2)]
    results = score(names, predictions, references, list(range(count)))
    return Scored(
        {"loss": loss} | {name: result.value for name, result in results.items()},
        {name: result.signature for name, result in results.items()},
        predictions,
        found.softmax(-1).tolist(),
    )


def lines(columns: Mapping[str, Sequence[Any]], result: Scored, labels: Sequence[str]) -> list[dict[str, Any]]:
    """The predictions of a split as lines of JSON: id, input, prediction, reference, scores."""
    inputs = columns["text"] if "pair" not in columns else list(zip(columns["text"], columns["pair"], strict=True))
    return [
        {
            "id": columns["id"][i],
            "input": inputs[i],
            "prediction": labels[result.predictions[i]],
            "reference": labels[columns["label"][i]],
            "scores": dict(zip(labels, scores, strict=True)),
        }
        for i, scores in enumerate(result.scores)
    ]
