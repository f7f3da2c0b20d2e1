"""study -> the claims that its paper makes about it."""

from __future__ import annotations

from .claims import Claim
from .claims_ap import AP_CLAIMS
from .claims_ln import LN_CLAIMS
from .claims_uv import UV_CLAIMS

CLAIMS: dict[str, tuple[Claim, ...]] = {**LN_CLAIMS, **UV_CLAIMS, **AP_CLAIMS}
