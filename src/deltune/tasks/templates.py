"""What a model that answers in words is given: a template filled with the inputs of every row."""

from __future__ import annotations

from string import Formatter

from ..errors import DeltuneError, unknown
from ..sources.columns import INPUTS
from .kinds import Columns


def prompts(columns: Columns, template: str) -> list[str]:
    """The template filled with every row's inputs, a list of texts as one with blanks between.

    Without a template: the texts of a row, or its tokens where these are all. Errors: a template with a lone brace, a
    role that is no input of the rows.
    """
    inputs = {role: columns[role] for role in INPUTS if role in columns}
    texts = [role for role in inputs if INPUTS[role] == "text"] or list(inputs)
    template = template or " ".join(f"{{{role}}}" for role in texts)
    try:
        parts = [part for part in Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise DeltuneError(f"template {template!r}: {error}; a brace that is meant is doubled") from error
    asked = [str(name) for _, name, _, _ in parts]
    if styled := [name for _, name, style, conversion in parts if style or conversion]:
        raise DeltuneError(f"template {template!r}: {{{styled[0]}}} takes no format after its name")
    if wrong := [unknown("role", name, inputs, where="template") for name in asked if name not in inputs]:
        raise DeltuneError(" ".join(wrong))
    told = {role: [v if isinstance(v, str) else " ".join(v) for v in inputs[role]] for role in dict.fromkeys(asked)}
    return [template.format(**{r: told[r][i] for r in told}) for i in range(len(next(iter(inputs.values()))))]
