"""One training run, from a configuration to a folder; studies use the names here and no others."""

import lazy_loader

from ..errors import check_extra

check_extra("train", "training and evaluating runs need")

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
