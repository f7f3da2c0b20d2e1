"""One training run, from a config to a run directory."""

from ..errors import check_extra

check_extra("cli", "training and evaluating runs need")
