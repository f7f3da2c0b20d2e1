"""Every study of the papers by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...errors import DeltuneError, unknown_name
from ..claims.claims import Claim
from ..scales import StudySetup
from ..study import Study
from .apet import AP_CLAIMS, AP_STUDIES
from .ln import LN_CLAIMS, LN_STUDIES
from .uv import UV_CLAIMS, UV_STUDIES

CLAIMS: dict[str, tuple[Claim, ...]] = {**LN_CLAIMS, **UV_CLAIMS, **AP_CLAIMS}


STUDIES: Mapping[str, Callable[[StudySetup], Study]] = {**LN_STUDIES, **UV_STUDIES, **AP_STUDIES}
"""Name -> what makes the study of a place. Nothing is loaded and no hub is asked to make one."""


def study(name: str, place: StudySetup) -> Study:
    """The study of a name. Errors: no such study; at small scale, data and models that are missing."""
    if name not in STUDIES:
        raise DeltuneError(unknown_name("study", name, STUDIES))
    return STUDIES[name](place)
