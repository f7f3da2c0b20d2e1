"""deltune: parameter-efficient fine-tuning of pretrained transformers.

The public names are listed in `__init__.pyi`. Each is imported when it is first used, so that `import deltune` loads
neither torch nor transformers.
"""

import lazy_loader

from ._version import __version__ as __version__

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
