"""Tasks of lm-evaluation-harness on a run or a model, with the tokens that it was trained on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import DeltuneError, check_extra, error_summary
from ..templates import end_tokens, tokenize_prompts
from .inference import open_language_model


def evaluate_harness(
    source: str | Path, tasks: Sequence[str], limit: int | None = None, batch_size: int = 8, base: str | None = None
) -> dict[str, dict[str, float]]:
    """Score a run, or a language model as it is, on tasks of lm-evaluation-harness, by name or from files in YAML.

    Texts begin as in training: with what the tokenizer writes before a text, once. A run on conversations is asked by
    its chat template. A file may name Python functions, which are run.
    """
    check_extra("harness", "--harness needs")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    loaded, model, tokenizer = open_language_model(source, base)
    if base is not None and loaded is None:
        raise DeltuneError(f"--model is the base of a run or a delta, and {source} is a model itself: leave it out")
    if loaded is not None and loaded.kind.head != "causal-lm":
        raise DeltuneError(f"{source} answers {loaded.kind.name}, and the harness asks decoders")
    templated = loaded is not None and loaded.is_conversational
    files = [name for name in tasks if name.endswith((".yaml", ".yml"))]
    folders = sorted({str(Path(name).resolve().parent) for name in files})
    manager = TaskManager(include_path=folders or None, include_defaults=len(files) < len(tasks))
    chosen = [_task_of(Path(name)) if name in files else name for name in tasks]
    if unknown := [name for name in chosen if name not in manager.all_tasks]:
        raise DeltuneError(f"lm-evaluation-harness has no task {', '.join(unknown)}: `lm-eval ls tasks` lists them")
    try:
        results = simple_evaluate(
            _harness_model(model, tokenizer, templated, batch_size),
            tasks=chosen, task_manager=manager, limit=limit, apply_chat_template=templated, bootstrap_iters=0,
            log_samples=False,
        )  # fmt: skip
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise DeltuneError(f"--harness {','.join(tasks)}: {error_summary(error)}") from error
    return {
        task: {name.removesuffix(",none"): float(value) for name, value in scores.items() if _is_score(name, value)}
        for task, scores in results["results"].items()
    }


def _task_of(file: Path) -> str:
    """Return the name of the task that a file holds."""
    try:
        name = re.search(r"^task:\s*[\"']?([\w.-]+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, ValueError) as error:
        raise DeltuneError(f"--harness {file}: {error_summary(error)}") from error
    if name is None:
        raise DeltuneError(f"--harness {file}: it names no task (task: NAME)")
    return name[1]


def _is_score(name: str, value: Any) -> bool:
    return isinstance(value, int | float) and "stderr" not in name and name not in ("sample_len", "alias")


def _harness_model(model: Any, tokenizer: Any, templated: bool, batch_size: int) -> Any:
    """Return a model as the harness asks it."""
    from lm_eval.models.huggingface import HFLM

    class WithTokensOfTraining(HFLM):
        """A model whose texts begin as they did in training."""

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, left_truncate_len: int | None = None, **_: Any
        ) -> list[int]:
            if templated or add_special_tokens is False:  # a template has written what begins a text
                ids = [int(i) for i in tokenizer(string, add_special_tokens=False, verbose=False)["input_ids"]]
            else:
                ids = list(tokenize_prompts(tokenizer, [string])[0])
            return ids[-left_truncate_len:] if left_truncate_len else ids

        def tok_batch_encode(
            self, strings: list[str], padding_side: str = "left", left_truncate_len: int | None = None, **_: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            rows = [self.tok_encode(text, left_truncate_len=left_truncate_len) for text in strings]
            longest, padding = max(map(len, rows)), model.config.pad_token_id or 0
            ids = torch.tensor([[padding] * (longest - len(row)) + row for row in rows])
            mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
            return ids, mask

    model.eval()
    model.generation_config.eos_token_id = list(end_tokens(tokenizer, model)) or None
    return WithTokensOfTraining(
        pretrained=model, tokenizer=tokenizer, batch_size=batch_size, device=str(model.device), backend="causal"
    )
