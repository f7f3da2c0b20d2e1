"""Every study of the papers by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..errors import DeltuneError, unknown
from .ap import AP_STUDIES
from .ln import LN_STUDIES
from .scales import Place
from .study import Study
from .uv import UV_STUDIES

STUDIES: Mapping[str, Callable[[Place], Study]] = {**LN_STUDIES, **UV_STUDIES, **AP_STUDIES}
"""Name -> what makes the study of a place. Nothing is loaded and no hub is asked to make one."""


def study(name: str, place: Place) -> Study:
    """The study of a name. Errors: no such study; at small scale, data and models that are missing."""
    if name not in STUDIES:
        raise DeltuneError(unknown("study", name, STUDIES))
    return STUDIES[name](place)
