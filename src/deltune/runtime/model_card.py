"""The model card of a delta: the README.md with which it is shown on the Hugging Face Hub."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import DeltuneError, error_summary, first_names
from ..methods.counting import Count
from ..models import HEADS, is_in_table

README = "README.md"

BEGIN = "<!-- deltune writes the lines from here -->"
END = "<!-- to here anew at each save; what stands elsewhere is left as it is -->"

MAX_LISTED_LABELS, MAX_EXPLICIT = 30, 1000
"""How many labels a card lists, and the length of the longest expression that it shows with every argument."""

HUB_ID = r"[\w-][\w.-]*/[\w-][\w.-]*"
"""The pattern of the name of a repository on the hub: OWNER/NAME."""

OTHER_PIPELINES = {
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "fill-mask",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": "image-classification",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES": "image-text-to-text",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES": "automatic-speech-recognition",
    "MODEL_FOR_CTC_MAPPING_NAMES": "automatic-speech-recognition",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES": "audio-classification",
}
"""The hub's name for the task of models that deltune does not load by itself, by the table of their classes."""


def pipeline_of_class(model_class: str) -> str | None:
    """Return the hub's name for the task of a model class, or None."""
    pipelines = {head.table: head.pipeline for head in HEADS.values() if head.table and head.pipeline}
    tables = {**pipelines, **OTHER_PIPELINES}
    return next((pipeline for table, pipeline in tables.items() if is_in_table(model_class, table)), None)


def hub_id_of_base(base: Mapping[str, Any]) -> str | None:
    """Return the hub id of a base model, or None for one that was loaded from elsewhere."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    name = str(base["name"])
    if Path(name).exists() or not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        return None
    if "/" in name:
        return name
    try:
        return name if isinstance(try_to_load_from_cache(name, "config.json"), str) else None
    except HFValidationError:
        return None


def render_card(title: str, metadata: Mapping[str, Any], count: Count, source: str) -> str:
    """Return the model card of a delta."""
    from huggingface_hub import ModelCardData

    base = metadata["base"]
    base_id = hub_id_of_base(base)
    data = ModelCardData(
        base_model=base_id,
        library_name="deltune",
        pipeline_tag=pipeline_of_class(base["model"]),
        tags=["deltune", "parameter-efficient-fine-tuning"],
    )
    described = _code(base_id) if base_id else "a base model that its author loaded from a folder"
    rows = [("method", _code(metadata["method"]))]
    if metadata["explicit"] != metadata["method"] and len(metadata["explicit"]) <= MAX_EXPLICIT:
        rows.append(("with every argument", _code(metadata["explicit"])))
    share = f"{count.method:,}, {count.percent:.4f} % of {count.denominator_size:,}"
    rows.append(("trained parameters", share + (f"; head {count.head:,}" if count.head else "")))
    if "pooling" in metadata:
        rows.append(("the head reads", f"pooling={_code(metadata['pooling'])} of the last hidden states"))
    if (labels := metadata["labels"]) and metadata["head"]["tensors"]:
        names = [_cell(name) for name in labels["id2label"].values()]
        rows.append((f"labels ({len(names):,})", first_names(names, MAX_LISTED_LABELS)))
    rows.append(("base model", f"{described}, as {_code(base['model'])}"))
    rows += [(key, _code(base[key])) for key in ("revision", "quantization") if base[key]]
    rows.append(("made with", f"deltune {_cell(metadata['deltune'])}"))
    name = base_id or "the folder or hub id of the base model"
    lines = [
        BEGIN,
        "",
        f"A delta of {described}: the parameters that were tuned, without the base model.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {key} | {value} |" for key, value in rows),
        "",
        "## Load it",
        "",
        "```python",
        f"from transformers import {base['model']}",
        "",
        "import deltune",
        "",
        f"model = {base['model']}.from_pretrained({json.dumps(name)})",
        f"tuned = deltune.load(model, {json.dumps(source, ensure_ascii=False)})",
        "```",
        "",
        END,
    ]
    body = "\n".join(lines)
    return f"---\n{data.to_yaml()}\n---\n\n# {_cell(title)}\n\n{body}\n"


def update_card(old: str | None, new: str, where: str) -> str:
    """Return a model card that is kept up to date where there is one already.

    Of the old card's metadata everything stays that the new one does not have; of its text everything outside of the
    lines that deltune writes. A card without such lines keeps its text.
    """
    if old is None or not old.strip():
        return new
    import yaml
    from huggingface_hub import ModelCard

    try:
        card, fresh = ModelCard(old), ModelCard(new)
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise DeltuneError(
            f"the metadata at the top of {where} are no valid YAML ({error_summary(error)}): mend or delete them"
        ) from error
    for key, value in fresh.data.to_dict().items():
        if key == "tags":
            value = list(dict.fromkeys([*(card.data.get("tags") or ()), *value]))
        setattr(card.data, key, value)
    before, begin, rest = card.text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if begin and end:
        _, _, lines = fresh.text.partition(BEGIN)
        card.text = f"{before}{BEGIN}{lines.partition(END)[0]}{END}{after}"
    return str(card)


def _cell(text: str) -> str:
    """Text as it stands in a cell of a table in Markdown, whatever is in it."""
    escaped = html.escape(" ".join(str(text).split()), quote=False)  # a quote is &#x27;, whose # is escaped below
    return re.sub(r"[|`\\*_\[\]#~]", lambda match: f"&#{ord(match[0])};", escaped)


def _code(text: str) -> str:
    return f"<code>{_cell(text)}</code>"
