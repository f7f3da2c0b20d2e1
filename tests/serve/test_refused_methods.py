"""Methods that read more of a text than the cache of a server has are refused before they are attached."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

import deltune
from deltune.serve.engine.backbone import Backbone
from tables.families import FAMILIES
from tables.specimens import build


@pytest.mark.parametrize("method", ["xlora(number=2)", "ladder(width=4, heads=2)", "alora(invocation=(5,))"])
def test_a_server_that_generates_refuses(method: str) -> None:
    tuned = deltune.attach(build(FAMILIES["llama"], "causal"), method)
    with pytest.raises(deltune.DeltuneError, match=r"call model\.generate"):
        Backbone._check(cast("Any", SimpleNamespace(head="causal-lm")), tuned.delta())
    Backbone._check(cast("Any", SimpleNamespace(head="base")), tuned.delta())
