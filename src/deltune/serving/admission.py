"""What is refused before it waits: requests beyond the bounds of the queue, and those that are too long."""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import replace

from ..errors import excerpt
from .backbone import LoadedDelta
from .errors import InvalidRequest, QueueFull
from .jobs import Job
from .requests import Request

COUNTED_ENDS = 256
"""Requests that ended lately, by whose rate a refused one is told when to come again."""


class Admission:
    """How many requests of each tenant wait, and whether another one may. Any thread may call it.

    Args:
        most: The most requests that wait.
        most_per_tenant: The most requests of one tenant that wait.
        lock: The engine's, so that a request which begins is never seen neither waiting nor running.
    """

    def __init__(self, most: int, most_per_tenant: int, lock: threading.RLock) -> None:
        self.most, self.most_per_tenant = most, most_per_tenant
        self.queued: Counter[str] = Counter()
        self._lock = lock
        self._ends: deque[float] = deque(maxlen=COUNTED_ENDS)

    def enter(self, tenant: str) -> None:
        """Count a request of a tenant as one that waits.

        Raises:
            QueueFull: Too many wait.
        """
        with self._lock:
            waiting = sum(self.queued.values())
            if waiting >= self.most:
                raise QueueFull(
                    f"{waiting} inputs wait already, which is the most that this server keeps", self._retry_after()
                )
            if self.queued[tenant] >= self.most_per_tenant:
                raise QueueFull(
                    f"{self.queued[tenant]} inputs of tenant {tenant!r} wait already, which is the most that it may "
                    "have",
                    self._retry_after(),
                )
            self.queued[tenant] += 1

    def leave(self, tenant: str) -> None:
        """Count a request of a tenant no more as one that waits."""
        with self._lock:
            self.queued[tenant] -= 1
            if not self.queued[tenant]:
                del self.queued[tenant]

    def note_end(self, now: float) -> None:
        """Note that a request has ended, by which the next refusal says when to come again.

        Args:
            now: The time, on the monotonic clock.
        """
        with self._lock:
            self._ends.append(now)

    def _retry_after(self) -> float:
        """In how many seconds a quarter of what waits may be done."""
        if len(self._ends) < 2:
            return 1.0
        seconds_each = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return min(60.0, max(0.1, sum(self.queued.values()) / 4 * seconds_each))


def readable_length(loaded: LoadedDelta, max_length: int | None) -> int:
    """Return the number of tokens that can be read at most.

    Args:
        loaded: The version of a delta, or the base model where that is not in memory.
        max_length: The most tokens that the server takes; None for no bound.
    """
    positions = loaded.backbone.positions(loaded.backbone.first_stack.name, loaded)
    return positions if max_length is None else min(positions, max_length)


def cut_length(request: Request, trained: int | None, readable: int) -> int | None:
    """Return the number of tokens to which a text is cut, or None if it is not.

    Args:
        request: The request.
        trained: The length to which texts were cut in the training of its delta, if that is known.
        readable: The number of tokens that can be read at most.

    Raises:
        InvalidRequest: It asks for something that is no length, or to cut what is never cut.
    """
    length = request.truncate_prompt_tokens
    if length is None:
        return None
    if request.task == "generate" or request.tokens is not None:
        what = "the prompt of an answer is" if request.task == "generate" else "token ids are"
        raise InvalidRequest(f"{what} never cut; leave truncate_prompt_tokens out")
    if isinstance(length, bool) or not isinstance(length, int) or (length < 1 and length != -1):
        raise InvalidRequest(f"truncate_prompt_tokens is a number of tokens, or -1, and not {excerpt(length)}")
    trained = readable if trained is None else min(trained, readable)
    return trained if length == -1 else min(length, readable)


def check_length(job: Job, loaded: LoadedDelta, max_length: int | None) -> None:
    """Check that the model has positions for a request and its answer, and shorten the answer where it may be shorter.

    Args:
        job: The request.
        loaded: The version of its delta, or the base model where that is not in memory.
        max_length: The most tokens that the server takes, those that are generated included; None for no bound.

    Raises:
        InvalidRequest: It is too long.
    """
    length, backbone = len(job.tokens), loaded.backbone
    generating, more = job.request.task == "generate", 0
    advice = "" if generating or job.request.tokens is not None else "; truncate_prompt_tokens: -1 cuts the text"
    positions = backbone.positions(backbone.first_stack.name, loaded)
    answer_positions = positions - length
    if generating and backbone.is_encoder_decoder:
        answer_positions = backbone.positions(backbone.last_stack.name, loaded) - 1
    if generating:
        job.request = _shortened(job.request, answer_positions, max_length, length)
        more = job.request.sampling.max_tokens
    if max_length is not None and length + more > max_length:
        raise InvalidRequest(
            f"the request has {length} tokens{f' and max_tokens={more}' if generating else ''}, and this server "
            f"takes {max_length}{advice}"
        )
    needed = length + (more if not backbone.is_encoder_decoder else 0)
    if needed > positions:
        raise InvalidRequest(
            f"the request has {length} tokens{f' and max_tokens={more}' if generating else ''}, and the model can "
            f"read {positions}{advice}"
        )
    if generating and more > answer_positions:
        raise InvalidRequest(f"max_tokens={more} is more than the {answer_positions} that the decoder has places for")


def _shortened(request: Request, positions: int, max_length: int | None, length: int) -> Request:
    """Return a request whose answer is as long as there is room, if it leaves that to the server."""
    sampling = request.sampling
    if not sampling.shorten:
        return request
    room = positions if max_length is None else min(positions, max_length - length)
    return replace(request, sampling=replace(sampling, max_tokens=max(1, min(sampling.max_tokens, room))))
