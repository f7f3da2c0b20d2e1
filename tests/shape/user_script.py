"""What an editor and a type checker see of deltune; `make lint` checks it, and nothing runs it.

A line with a comment `type: ignore` is a mistake that the checker must report: mypy reports an ignore without one.
"""

from pathlib import Path

from transformers import PreTrainedModel

import deltune


def tune(model: PreTrainedModel, folder: Path) -> float:
    method: deltune.Modification | deltune.Selection = deltune.lora(rank=8, at=("query", "value")).parts[0]
    total = deltune.lora(rank=8) + deltune.layernorm(of="ffn") + deltune.bitfit(which="ffn", layers=(-1, -2))
    deltune.lora(rnk=8)  # type: ignore[call-arg]
    deltune.lora(rank="8")  # type: ignore[arg-type]
    deltune.layernorm(terms="gains")  # type: ignore[arg-type]
    deltune.Bottleneck(rnk=8)  # type: ignore[call-arg]
    deltune.ln_tuning()  # type: ignore[attr-defined]
    tuned: deltune.Tuned = deltune.attach(model, total + method, name="news")
    deltune.attach(model, "lora", head="freez")  # type: ignore[arg-type]
    with tuned.rows(["news", None]):
        model(input_ids=None)
    names: tuple[str, ...] = tuned.names
    saved: Path = tuned.save(folder / names[0])
    base: PreTrainedModel = deltune.load(saved).model
    return deltune.load(base, saved, name="again", use=False).count().percent
