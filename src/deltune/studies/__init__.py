"""The papers' experiments, and the choice of a method for one's own data; an extra of its own."""

import lazy_loader

from ..errors import check_extra

check_extra("studies", "studies need")

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
