"""A mark on the context that imports deltune."""

from contextvars import ContextVar

descends_from_import: ContextVar[bool] = ContextVar("descends_from_import", default=False)
"""True in contexts that descend from the one that imported deltune, such as asyncio's tasks: they have the `rows()` and
`disable()` blocks that they belong to. A thread of its own begins with an empty context."""
