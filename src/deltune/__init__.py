"""deltune: parameter-efficient fine-tuning of pretrained transformers.

The public names are listed in `__init__.pyi`. Each is imported when it is first used, so that `import deltune` loads
neither torch nor transformers.
"""

from typing import Any

import lazy_loader

from ._version import __version__ as __version__

_public_name, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    """Import a public name; of a name of another library, say what it is called here."""
    try:
        return _public_name(name)
    except AttributeError as error:
        from .methods.other_names import hint_for_function, hint_for_name

        hint = None if name.startswith("_") else hint_for_function(name) or hint_for_name(name, __all__)
        raise AttributeError(f"module 'deltune' has no attribute {name!r}{(hint and f'. {hint}') or ''}") from error
