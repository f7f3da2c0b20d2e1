"""deltune: parameter-efficient fine-tuning of pretrained transformers.

The public names are listed in `__init__.pyi`. Each is imported when it is first used, so that `import deltune` loads
neither torch nor transformers.
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import lazy_loader

from ._version import __version__ as __version__

_public_name, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Silence, in a block, what torchao and bitsandbytes say of kernels that a machine lacks.

    transformers imports them where they are installed, whether anybody uses them or not.
    """
    loggers = [logging.getLogger(name) for name in ("torchao", "bitsandbytes", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def __getattr__(name: str) -> Any:
    """Import a public name; of a name of another library, say what it is called here."""
    try:
        with quiet_imports():
            return _public_name(name)
    except AttributeError as error:
        from .methods.other_names import hint_for_function, hint_for_name

        hint = None if name.startswith("_") else hint_for_function(name) or hint_for_name(name, __all__)
        raise AttributeError(f"module 'deltune' has no attribute {name!r}{(hint and f'. {hint}') or ''}") from error
