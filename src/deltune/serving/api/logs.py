"""Structured logs: a line of JSON for each request on standard error, without inputs or answers unless asked for."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

MAX_TEXT = 10_000


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON; the facts of a request are its fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)[-MAX_TEXT:]
        return json.dumps(line, ensure_ascii=True, default=str)


def configure_logs(level: str) -> None:
    """Write the logs of the server, and warnings of uvicorn, on standard error as JSON.

    Args:
        level: "requests", "errors" or "off", as in the config.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name, shown in (("deltune.serving", level), ("uvicorn", "errors")):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel({"requests": logging.INFO, "errors": logging.WARNING, "off": logging.CRITICAL + 1}[shown])
