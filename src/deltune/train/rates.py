"""The learning rate of a run that gives none: its method's for the number of steps."""

from __future__ import annotations

from ..methods.registry import default_learning_rate
from .config import RunConfig
from .presets import DEFAULT


def with_default_rate(config: RunConfig, steps: int) -> RunConfig:
    """Return a config with its method's learning rate for that many steps, where it has none and asks for no search."""
    if config.optim.lr is not None:
        return config
    return config.replace(lr=usual_rate(config, steps), lr_source=DEFAULT)


def usual_rate(config: RunConfig, steps: int | None) -> float:
    """Return the learning rate of a config's method for that many steps; a policy takes a twentieth of it.

    TRL's own defaults are 2e-5 for SFT and 1e-6 for DPO, KTO, ORPO and GRPO.
    """
    share = 1.0 if config.objective.kind in ("sft", "reward") else 0.05
    return share * default_learning_rate(config.method.expression, steps)
