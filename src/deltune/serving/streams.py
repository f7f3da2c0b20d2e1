"""The tokens of one answer, for a thread that reads them as they come."""

from __future__ import annotations

import queue
from collections.abc import Iterator

from .jobs import Job
from .requests import Answer, TokenChoice


class Stream:
    """The tokens of an answer as they come.

    Attributes:
        answer: The whole answer, after the last token.
    """

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[TokenChoice | None] = queue.SimpleQueue()
        self._job: Job | None = None
        self.answer: Answer | None = None

    def put(self, item: TokenChoice) -> None:
        """Add a token; the engine calls this."""
        self._items.put(item)

    def begin(self, job: Job) -> None:
        """Set the request whose tokens these are."""
        self._job = job
        job.future.add_done_callback(lambda _: self._items.put(None))

    def __iter__(self) -> Iterator[TokenChoice]:
        return self

    def __next__(self) -> TokenChoice:
        """Wait for the next token.

        Raises:
            DeltuneError: Why the request has no answer.
            CancelledError: It was cancelled.
        """
        if self.answer is not None or self._job is None:
            raise StopIteration
        item = self._items.get()
        if item is None:
            self.answer = self._job.future.result()
            raise StopIteration
        return item

    def close(self) -> None:
        """Take the request out of its batch, if it is not answered."""
        if self._job is not None:
            self._job.future.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
