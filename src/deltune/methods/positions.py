"""Which tokens of a text a modification acts at: all, its first and last ones, or those from a sequence of ids on."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..errors import DeltuneError

if TYPE_CHECKING:
    import torch

Positions = str | tuple[int, ...]
"""What chooses tokens: "all", ends such as "first 2 + last 2", or the ids of a sequence from whose last occurrence on
tokens are chosen."""

ALL = "all"
_END = re.compile(r"\s*(first|last) ([1-9][0-9]{0,5})\s*")


def check_positions(positions: Positions) -> None:
    """Check that positions have one of their forms.

    Raises:
        DeltuneError: They have none.
    """
    if isinstance(positions, tuple):
        wrong = not positions or min(positions) < 0
    else:
        wrong = positions != ALL and not all(map(_END.fullmatch, positions.split("+")))
    if wrong:
        raise DeltuneError(
            f'positions={positions!r}: give "all", ends such as "first 2", "last 3" or "first 2 + last 2", or the '
            "token ids of a sequence, from whose last occurrence on it acts"
        )


def chosen_tokens(positions: Positions, ids: torch.Tensor | None, shown: torch.Tensor) -> torch.Tensor:
    """Return which tokens of texts are chosen.

    Args:
        positions: What chooses them; not "all".
        ids: The token ids (B, n), which a sequence is looked for in.
        shown: Which tokens are no padding (B, n).

    Returns:
        Whether each token is chosen (B, n). Where a row lacks the sequence, none of it is.
    """
    import torch

    if isinstance(positions, str):
        number, mask = shown.cumsum(1), torch.zeros_like(shown)
        for match in map(_END.fullmatch, positions.split("+")):
            assert match is not None
            end, size = match[1], int(match[2])
            mask = mask | (number <= size if end == "first" else number > number[:, -1:] - size)
        return mask & shown
    assert ids is not None
    if ids.shape[1] < len(positions):
        return torch.zeros_like(shown)
    begins = (ids.unfold(1, len(positions), 1) == torch.tensor(positions, device=ids.device)).all(-1)
    columns = torch.arange(ids.shape[1], device=ids.device)
    last = columns[: begins.shape[1]].mul(begins).amax(1, keepdim=True)
    return (columns >= last) & begins.any(1, keepdim=True)
