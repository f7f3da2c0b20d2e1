"""`Server`: many deltas on one backbone, in Python without HTTP.

One thread owns the model. It takes requests from the others, attaches and detaches deltas between two passes, and gives
every request its answer. Here are the ways in, the loop of that thread, and the end. Which requests may wait is in
`queue`, which delta is meant in `catalog`, how deltas come into memory and go in `lifecycle`, what a batch is in
`encoding` and `generation`, and what makes the steps of the latter in `runners`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ...errors import (
    DeltuneError,
    check_booleans,
    describe_value,
    error_from_problems,
    error_summary,
    excerpt,
)
from ...files import user_path
from ...runtime.padding import padding_side
from ..errors import UNANSWERED, EngineClosed, InvalidRequest, RequestTimeout, UnknownDelta
from .backbone import Backbones, LoadedDelta, load_to_serve
from .catalog import Catalog, Entry, State
from .encoding import BatchLimits, EncodingLane
from .folders import HEAD_TASKS, DeltasFolder
from .generation import EngineContext, GenerationLane
from .grammar import Grammars
from .jobs import (
    LONG_TEXT,
    Job,
    Listener,
    RequestEncoder,
    Stream,
    check_pair,
    check_request,
    check_task,
    input_size,
    row_task,
)
from .lifecycle import Lifecycle
from .prompt_cache import PromptCache
from .queue import Admission, FairShare, FairThread, check_length, cut_length, readable_length
from .requests import Answer, DeltaInfo, EngineStats, Request, Task, TokenChoice
from .sampling import check_sampling

logger = logging.getLogger(__name__)

Lane = EncodingLane | GenerationLane

FORGOTTEN = 64
"""Deltas that were taken out and whose counts are kept, at least."""
IDLE = 0.2
"""Seconds after which the engine looks for timed-out requests when nothing wakes it."""
ENCODED_AT_ONCE = 512
"""Characters up to which `asubmit` reads a text in the event loop itself; a thread reads longer ones and schemas."""
SECONDS = ("max_pass_seconds", "max_wait", "watch")
"""The numbers of a server that may have a fraction."""
FROM_ZERO = ("max_wait", "prompt_cache")
"""The numbers of a server that may be 0."""
OPTIONAL = ("max_loaded", "max_loaded_bytes", "max_names", "max_request_tokens", "watch")
"""The numbers of a server that may be None."""


class Server:
    """Many deltas on one backbone: every request is answered by its own delta, in batches with all others.

    Requests may come from any thread and from asyncio. The model belongs to the server until `close`.

    Example:
        ```python
        with deltune.serve.Server("minilm", deltas="deltas") as server:
            answer = server.submit(Request("classify", text="I was charged twice.", delta="intent")).result()
        ```

    Args:
        model: A loaded model of transformers, or a hub id, a folder or `minilm`, which is then loaded as its
            checkpoint says.
        tokenizer: The tokenizer of the model. Without one, requests have token ids. Default: that of the model, if the
            model is given by its name.
        deltas: A folder with a folder for each delta: a saved delta, a finished run of `deltune train`, or an adapter
            folder of PEFT or AdapterHub; or one of these alone. The name of its folder is that of the delta. Default:
            deltas come by `load` alone.
        max_loaded: The most deltas in memory; of the others those stay on the disk that were not needed for longest.
        max_loaded_bytes: The most bytes of deltas in memory.
        max_names: The most deltas that `load` may serve under another name than that of their folder in `deltas`.
        max_batch_tokens: The most tokens in one pass, padding included.
        max_batch_size: The most requests in one batch.
        max_prefill_tokens: The most tokens of a decoder's prompt that are read in one step. A longer prompt is read in
            parts, so that the other rows of the batch wait for a part alone.
        max_pass_seconds: About how long a pass of an encoder takes at most, by the speed of the passes before: so long
            a request of another tenant waits for it. A long request has a pass of its own, however long.
        max_wait: How long a request waits for a fuller batch, in seconds; a decoder's batch is joined at once.
        max_queue: The most requests that wait.
        max_queue_per_tenant: The most requests of one tenant that wait.
        max_request_tokens: The most tokens of a request, generated ones included. Default: what the model has.
        prompt_cache: The size of the cache of prompt beginnings; 0 for none.
        watch: Look at the folder of deltas every so many seconds. Default: only `refresh` does.

    Raises:
        DeltuneError: A number is no number or out of its range, or the model or the folder cannot be used, such as a
            language model that remembers more than keys and values (Mamba and hybrids with it).
    """

    def __init__(
        self,
        model: PreTrainedModel | str | Path,
        tokenizer: Any = None,
        *,
        deltas: str | Path | None = None,
        max_loaded: int | None = 64,
        max_loaded_bytes: int | None = None,
        max_names: int | None = None,
        max_batch_tokens: int = 4096,
        max_batch_size: int = 32,
        max_prefill_tokens: int = 512,
        max_pass_seconds: float = 0.1,
        max_wait: float = 0.005,
        max_queue: int = 1024,
        max_queue_per_tenant: int = 256,
        max_request_tokens: int | None = None,
        prompt_cache: int = 64 << 20,
        watch: float | None = None,
    ) -> None:
        max_loaded_bytes, prompt_cache = _as_integer(max_loaded_bytes), _as_integer(prompt_cache)
        _check_numbers(
            max_loaded=max_loaded, max_loaded_bytes=max_loaded_bytes, max_names=max_names,
            max_batch_tokens=max_batch_tokens, max_batch_size=max_batch_size, max_prefill_tokens=max_prefill_tokens,
            max_queue=max_queue, max_queue_per_tenant=max_queue_per_tenant, max_request_tokens=max_request_tokens,
            watch=watch, max_pass_seconds=max_pass_seconds, max_wait=max_wait,
            prompt_cache=prompt_cache,
        )  # fmt: skip
        self.root = None if deltas is None else user_path(deltas, "deltas").absolute()
        # A folder that cannot be read is reported before anything is loaded or changed.
        folder = None if self.root is None else DeltasFolder.at(self.root)
        if isinstance(model, str | Path):
            model, loaded_tokenizer = load_to_serve(str(model))
            tokenizer = loaded_tokenizer if tokenizer is None else tokenizer
        if not isinstance(model, PreTrainedModel):
            raise DeltuneError(f"a server takes a model of transformers, or its name, not {describe_value(model)}")
        self.max_request_tokens = max_request_tokens
        self.limits = BatchLimits(max_batch_tokens, max_batch_size, max_wait, max_prefill_tokens, max_pass_seconds)
        self.tokenizer = tokenizer
        self._backbones = Backbones(model)
        first = self._backbones.first
        vocabulary = model.get_input_embeddings().get_parameter("weight").shape[0]
        self._encoder = RequestEncoder(tokenizer, first.arguments, first.is_encoder_decoder, vocabulary)
        self._grammars = Grammars(tokenizer)
        self._share = FairShare()
        self._context = EngineContext(
            self.limits, self._share, self._start, self._finish, self._encoder, PromptCache(prompt_cache), self._count
        )
        if first.head == "causal-lm":
            try:
                self._context.runner(first)
            except DeltuneError:
                self._backbones.close()
                raise
        self._lanes: dict[tuple[str, str, str], Lane] = {}
        """Ordered by last turn."""
        self._last_lane: Lane | None = None
        self._base = first.base_entry(HEAD_TASKS[first.head])
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        attached = {loaded.name: loaded for loaded in first.attached_before() if loaded.name is not None}
        self._catalog = Catalog(folder, attached, self._backbones.check, self._lock)
        self._lifecycle = Lifecycle(
            self._catalog, self._backbones, max_loaded, max_loaded_bytes, max_names, wake=self._wake, place=self._place,
            finish=self._finish, before_detach=self._before_detach,
        )  # fmt: skip
        self._admission = Admission(max_queue, max_queue_per_tenant, self._lock)
        self._inbox: deque[Job] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._cancelled: deque[Job] = deque()
        self._jobs: set[Job] = set()  # all that are neither answered nor failed
        self._running: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._closing = self._closed = False
        self._encoding, self._long_encoding = FairThread("deltune-encoder"), FairThread("deltune-long-encoder")
        if self.root is not None:
            self._catalog.look()
        self._thread = threading.Thread(target=self._run, name="deltune-engine", daemon=True)
        self._thread.start()
        self._watcher: threading.Thread | None = None
        self._stop = threading.Event()
        if watch is not None and self.root is not None:
            self._watcher = threading.Thread(target=self._watch, args=(watch,), name="deltune-watcher", daemon=True)
            self._watcher.start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close(0.0 if exception[0] is not None else 30.0)

    # -- requests

    def submit(self, request: Request) -> Future[Answer]:
        """Ask, and return the future of the answer. Cancelling it takes the request out of its batch.

        Args:
            request: The request.

        Returns:
            The future of the answer.

        Raises:
            UnknownDelta: There is no such delta.
            InvalidRequest: The request cannot be answered.
            QueueFull: Too many requests wait.
            EngineClosed: The server is closing.
        """
        return self._submit(request, None).future

    def stream(self, request: Request) -> Stream:
        """Ask, and return an iterator over the tokens of the answer as they come.

        Args:
            request: The request, to generate.

        Returns:
            An iterator over `TokenChoice`; after the last one its `answer` has the whole. Closing it cancels.

        Raises:
            UnknownDelta: There is no such delta.
            InvalidRequest: The request cannot be answered.
            QueueFull: Too many requests wait.
            EngineClosed: The server is closing.
        """
        items: queue.SimpleQueue[TokenChoice | None] = queue.SimpleQueue()
        return Stream(self._submit(request, items.put), items)

    async def asubmit(self, request: Request) -> Answer:
        """Ask, and wait for the answer. Cancelling the task takes the request out of its batch.

        Args:
            request: The request.

        Returns:
            The answer.

        Raises:
            DeltuneError: As `submit`, or why the request has no answer.
        """
        job = await self._submit_in_thread(request, None)
        return await asyncio.wrap_future(job.future)

    async def astream(self, request: Request) -> AsyncIterator[TokenChoice | Answer]:
        """Ask, and yield the tokens of the answer as they come, then the answer.

        Closing the iterator, or cancelling its task, takes the request out of its batch.

        Args:
            request: The request, to generate.

        Returns:
            An asynchronous iterator over `TokenChoice`, and at last the `Answer`.

        Raises:
            DeltuneError: As `submit`, or why the request has no answer.
        """
        loop = asyncio.get_running_loop()
        items: asyncio.Queue[TokenChoice | None] = asyncio.Queue()

        def put(item: TokenChoice | None) -> None:
            with suppress(RuntimeError):  # the loop was closed, and nobody listens any more
                loop.call_soon_threadsafe(items.put_nowait, item)

        job = await self._submit_in_thread(request, put)
        job.future.add_done_callback(lambda _: put(None))
        try:
            while (item := await items.get()) is not None:
                yield item
            answer: Answer = await asyncio.wrap_future(job.future)
            yield answer
        finally:
            job.future.cancel()

    def _submit(self, request: Request, listener: Listener | None) -> Job:
        check_request(request)
        self._reserve(request.tenant)
        return self._submit_reserved(request, listener, time.monotonic())

    async def _submit_in_thread(self, request: Request, listener: Listener | None) -> Job:
        """Submit without holding up the event loop while a tokenizer reads a long text."""
        check_request(request)
        size = input_size(request)
        if size <= ENCODED_AT_ONCE and request.sampling.json_schema is None:
            return self._submit(request, listener)
        self._reserve(request.tenant)
        thread = self._long_encoding if size > LONG_TEXT else self._encoding
        try:
            submit = partial(self._submit_reserved, request, listener, time.monotonic())
            encoding = thread.submit(request.tenant, size, submit)
        except RuntimeError:
            self._admission.leave(request.tenant)
            raise EngineClosed("the server is closing and takes no new requests") from None
        try:
            async with asyncio.timeout(request.timeout):
                return await asyncio.wrap_future(encoding)
        except BaseException as error:
            encoding.cancel()
            encoding.add_done_callback(lambda done: self._abandon(request, done))
            if isinstance(error, TimeoutError):
                raise _late(request) from None
            raise

    def _abandon(self, request: Request, encoding: Future[Job]) -> None:
        """Take back a request for which nobody waits any more, whether its text was read or not."""
        if encoding.cancelled():
            self._admission.leave(request.tenant)
        elif encoding.exception() is None:
            encoding.result().future.cancel()

    def _check_open(self) -> None:
        if self._closing:
            raise EngineClosed("the server is closing and takes no new requests")

    def _reserve(self, tenant: str) -> None:
        """Count a request of a tenant as one that waits, unless too many wait or the server is closing."""
        with self._lock:
            self._check_open()
            self._admission.enter(tenant)

    def _submit_reserved(self, request: Request, listener: Listener | None, arrived: float) -> Job:
        """Make a request that was counted a job, and hand it to the engine's thread."""
        try:
            self._check_open()
            job = self._job(request, listener, arrived)
            with self._wake:
                self._check_open()
                self._jobs.add(job)
                self._inbox.append(job)
                self._wake.notify_all()
        except BaseException:
            self._admission.leave(request.tenant)
            raise
        reference = weakref.ref(job)  # a job that is answered is freed at once, and not when garbage is collected
        job.future.add_done_callback(lambda future: self._on_done(reference(), future))
        return job

    def _job(self, request: Request, listener: Listener | None, arrived: float) -> Job:
        """Check a request, and read its text."""
        entry = self._catalog.known(request.delta)
        facts = self._base if entry is None else self._catalog.facts(entry)
        check_task(request.task, facts.tasks, request.delta)
        if request.task == "classify":
            check_pair(request, facts.trained.takes_pairs)
        if request.timeout is not None and not request.timeout > 0:
            raise InvalidRequest(f"a timeout is a number of seconds above 0, not {request.timeout}")
        loaded = (None if entry is None else entry.current) or self._base
        readable = readable_length(loaded, self.max_request_tokens)
        cut = cut_length(request, facts.trained.max_length, readable)
        job = self._encoder.encode(request, listener, cut, readable, facts.trained)
        job.submitted = arrived
        if request.task == "generate":
            check_sampling(request.sampling, self.tokenizer is not None)
            if request.sampling.prompt_logprobs and loaded.backbone.is_encoder_decoder:
                raise InvalidRequest("the tokens of a prompt are reported (echo) by decoders; here an encoder reads it")
            if request.sampling.json_schema is not None:
                job.grammar = self._grammars.grammar(request.sampling.json_schema)
        check_length(job, loaded, self.max_request_tokens)
        return job

    def _on_done(self, job: Job | None, future: Future[Answer]) -> None:
        if job is not None and future.cancelled():
            with self._wake:
                self._cancelled.append(job)
                self._wake.notify_all()

    # -- deltas

    @check_booleans
    def load(
        self, name: str, folder: str | Path | None = None, timeout: float | None = None, *, replace: bool = True
    ) -> DeltaInfo:
        """Load a delta, or the newest version of one. It is checked before it takes traffic.

        Requests that run go on with the version that they began with. If the new version is refused, the old one goes
        on.

        Args:
            name: Its name.
            folder: Its folder. Default: the folder of this name in the server's directory.
            timeout: Seconds after which it is given up: there may be no room in memory before requests have ended.
                Default: never.
            replace: Whether it may take the place of a delta that `load` has given this name, or of one of the
                server's directory whose folder is another one. Default: yes.

        Returns:
            What it is.

        Raises:
            NameTaken: There is such a delta, which was not to be replaced.
            UnknownDelta: No folder is given, and the directory has none of this name.
            RequestTimeout: It took longer than `timeout`.
            DeltuneError: The delta is damaged or does not fit the model, or there are `max_names` already.
            EngineClosed: The server is closing.
        """
        self._refuse_own_thread("load")
        return self._lifecycle.load(name, folder, timeout, replace=replace)

    def unload(self, name: str) -> None:
        """Take a delta out of the server. Requests that run are answered; those that wait for it fail.

        Args:
            name: Its name. Its folder stays; `load` brings it back.

        Raises:
            UnknownDelta: There is no such delta.
        """
        folder = self._catalog.root  # looked at in this thread, since the disk may be slow
        stays = folder is not None and folder.locate(name).is_dir()
        reason = f"delta {name!r} was unloaded before it answered"
        self._call(lambda: self._forget(self._catalog.remove(name, stays), reason))

    def refresh(self, timeout: float | None = None) -> list[DeltaInfo]:
        """Look at the directory of deltas again: new folders, changed ones, and those that are gone.

        A version in memory whose files changed is replaced. If the new files are refused, it goes on, and its
        `DeltaInfo.error` says why.

        Args:
            timeout: Seconds after which it is given up. Default: never.

        Returns:
            All deltas.

        Raises:
            RequestTimeout: It took longer than `timeout`; some deltas may have been replaced.
            EngineClosed: The server is closing.
        """
        self._refuse_own_thread("refresh")
        if self.root is not None:
            self._lifecycle.refresh(
                lambda entry: self._call(lambda: self._forget(entry, f"the folder of delta {entry.name!r} is gone")),
                timeout,
            )
        return self.deltas()

    def deltas(self) -> list[DeltaInfo]:
        """Return what is known of each delta, sorted by name."""
        return self._catalog.infos()

    def has(self, name: str) -> bool:
        """Return whether there is a delta of a name, whether its files are sound or not."""
        return self._catalog.get(name) is not None

    def ignored_folders(self) -> dict[str, str]:
        """Return why folders in the directory of deltas held none when it was last looked at, by name."""
        return self._catalog.ignored_folders()

    def unloaded(self) -> list[str]:
        """Return the names, sorted, that `unload` has taken out while their folders stay; `load` brings them back."""
        return self._catalog.unloaded()

    def _watch(self, seconds: float) -> None:
        while not self._stop.wait(seconds):
            try:
                self.refresh()
            except EngineClosed:
                return
            except Exception as error:
                logger.warning("the folder of deltas could not be looked at: %s", error_summary(error))

    # -- numbers, and the end

    def base_tasks(self) -> tuple[Task, ...]:
        """Return what the base model can be asked for: the tasks of its head."""
        return self._base.tasks

    def is_alive(self) -> bool:
        """Return at once whether the server is open and the thread that computes runs."""
        return self._thread.is_alive() and not self._closing

    def stats(self) -> EngineStats:
        """Return how busy the server is: the numbers since its start, and what waits and runs now."""
        with self._lock:
            return EngineStats(
                queued={tenant: n for tenant, n in self._admission.queued.items() if n},
                running={delta: n for delta, n in self._running.items() if n},
                finished=dict(self._finished),
                failed=dict(self._failed),
                prompt_tokens=self._totals["prompt"],
                generated_tokens=self._totals["generated"],
                cached_tokens=self._totals["cached"],
                loads=self._lifecycle.loads,
                evictions=self._lifecycle.evictions,
                load_seconds=self._lifecycle.load_seconds,
            )

    def take_usage(self) -> dict[str, int]:
        """Return tenant -> tokens, read and generated since the last call, for requests that failed or left too.

        The first call begins to count, and returns nothing.
        """
        return self._share.take_usage()

    def close(self, drain: float = 30.0) -> None:
        """End the server: take no new requests, answer those that are here, and give the model back.

        Args:
            drain: How many seconds the requests that are here may take; after them they fail. Calls of `load` and
                `refresh` fail at once.
        """
        self._refuse_own_thread("close")
        deadline = time.monotonic() + drain
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._stop.set()
        self._lifecycle.refuse_loads(EngineClosed("the server is closing and loads no deltas"))
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()
        with self._wake:
            while self._jobs and self._thread.is_alive() and (left := deadline - time.monotonic()) > 0:
                self._wake.wait(min(left, IDLE))
            self._closed = True
            self._wake.notify_all()
        self._thread.join()
        self._lifecycle.close()
        for thread in (self._encoding, self._long_encoding):
            thread.close()

    # -- the engine's thread

    def _refuse_own_thread(self, method: str) -> None:
        """Refuse what would wait for the engine's thread in that thread."""
        if threading.current_thread() is self._thread:
            raise DeltuneError(
                f"{method}() waits for the server's own thread, which runs the callbacks of futures: call it from "
                "another thread"
            )

    def _call(self, function: Callable[[], None]) -> None:
        """Run a function in the engine's thread between two turns, and wait for it; in that thread, run it at once."""
        if threading.current_thread() is self._thread:
            function()
            return
        done: Future[None] = Future()

        def run() -> None:
            try:
                function()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        with self._wake:
            if self._closed:
                raise EngineClosed("the server is closed")
            self._calls.append(run)
            self._wake.notify_all()
        done.result()

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    if self._closed:
                        break
                    if not self._pending():
                        self._wake.wait(self._idle_time())
                    calls, self._calls = self._calls, deque()
                for call in calls:
                    call()
                try:
                    self._turn()
                except Exception:  # a mistake of the engine itself: it goes on with the other requests
                    logger.exception("a step of the engine failed")
        finally:
            self._end()

    def _pending(self) -> bool:
        return bool(
            self._closed or self._calls or self._inbox or self._lifecycle.has_arrivals or self._cancelled
            or self._next_lane() is not None
        )  # fmt: skip

    def _idle_time(self) -> float:
        now = time.monotonic()
        later = [seconds for lane in self._lanes.values() if lane.busy and (seconds := lane.due(now)) > 0]
        return min([IDLE, *later])

    def _turn(self) -> None:
        """One turn: what has ended or arrived, then a batch of the lane whose tenants were served least."""
        self._sweep()
        self._lifecycle.take_arrivals()
        with self._lock:
            jobs, self._inbox = self._inbox, deque()
        for job in jobs:
            self._place(job)
        self._lifecycle.begin_loads(self._share)
        try:
            self._advance()
        except Exception as error:
            self._give_up_lane(error)
        self._lifecycle.drop_unneeded()  # after all answers that are ready

    def _give_up_lane(self, error: Exception) -> None:
        """Fail the requests of the lane that had the last turn."""
        logger.error("a batch failed beyond repair", exc_info=error)
        lane, self._last_lane = self._last_lane, None
        if lane is None:
            return
        self._lanes = {key: other for key, other in self._lanes.items() if other is not lane}
        with self._lock:  # the lane may have lost track of some of them when it failed
            lost = [job for job in self._jobs if job.lane is lane]
        for job in lost:
            self._finish(job, DeltuneError(f"the engine failed: {error_summary(error)}"))

    def _advance(self) -> None:
        """Let the next lane run a pass or make a step, if one is due."""
        if (key := self._next_lane()) is None:
            return
        lane = self._last_lane = self._lanes[key] = self._lanes.pop(key)
        lane.advance()

    def _next_lane(self) -> tuple[str, str, str] | None:
        """The due lane with the tenant that was served least, then with the longest wait.

        Otherwise a tenant with many deltas that share no batch would have a batch in each turn for each of them.
        """
        now = time.monotonic()
        orders = {
            key: min((self._share.order(job.tenant) for job in lane.jobs()), default=(0, 0))
            for key, lane in self._lanes.items()
            if lane.busy and lane.due(now) <= 0
        }
        return min(orders, key=orders.__getitem__, default=None)

    def _place(self, job: Job) -> None:
        """Give a request the version of its delta and put it into a queue, or let it wait for its delta."""
        if job.done:
            return
        try:
            entry = self._catalog.known(job.request.delta)
        except UnknownDelta as error:
            self._finish(job, error)
            return
        loaded = self._base if entry is None else entry.current
        if entry is not None and entry.state is not State.SERVING:
            self._lifecycle.wait(entry, job)
            return
        assert loaded is not None
        job.loaded = loaded
        loaded.users += 1  # so that it stays, whatever happens meanwhile
        self._share.enter(job.tenant)  # not before: what waits for its delta says nothing about what is served
        try:
            check_task(job.request.task, loaded.tasks, job.request.delta)
            check_length(job, loaded, self.max_request_tokens)
            job.row_task = row_task(job, loaded)
            job.lane = lane = self._lane(job, loaded)
        except Exception as error:  # such as a family whose caches cannot be served
            self._finish(job, error)
            return
        loaded.used, loaded.last_used = True, time.monotonic()
        lane.queue.push(job)

    def _lane(self, job: Job, loaded: LoadedDelta) -> Lane:
        task = {"generate": "generate", "embed": "embed"}.get(job.request.task, "labels")
        key = (loaded.backbone.head, task, loaded.group)
        if key not in self._lanes:
            if task == "generate":
                self._lanes[key] = GenerationLane(loaded.backbone, self._context)
            else:  # the base model of another head than the server's has none, by which answers could be compared
                side = loaded.backbone.run([loaded] * 2, lambda: padding_side(loaded.backbone.model))
                self._lanes[key] = EncodingLane(loaded.backbone, task, side, self._context)
        return self._lanes[key]

    def _start(self, job: Job) -> None:
        """Note that the first batch of a request begins."""
        if job.started is None:
            job.started = time.monotonic()
        with self._lock:
            if job.waiting:
                job.waiting = False
                self._admission.leave(job.tenant)
                self._running[job.request.delta or ""] += 1

    def _finish(self, job: Job, answer: Answer | BaseException) -> None:
        """End a request, in every way in which it can end."""
        if job.done:
            return
        job.done = True
        if job.loaded is not None:
            self._share.leave(job.tenant)
            self._lifecycle.release(job.loaded)
        name = job.request.delta or ""
        now = time.monotonic()
        with self._wake:
            self._jobs.discard(job)
            if job.waiting:
                self._admission.leave(job.tenant)
            else:
                self._running[name] -= 1
                if not self._running[name]:
                    del self._running[name]
            if isinstance(answer, Answer) and not job.cancelled:
                self._finished[name] += 1
                self._totals["prompt"] += answer.prompt_tokens
                self._totals["cached"] += answer.cached_tokens
            elif not job.cancelled:
                self._failed[name] += 1
            self._admission.note_end(now)
            self._wake.notify_all()
        job.end(answer)

    def _count(self, tokens: int) -> None:
        """Count tokens that were generated."""
        with self._lock:
            self._totals["generated"] += tokens

    def _sweep(self) -> None:
        """Take out requests that were cancelled or have waited too long."""
        with self._lock:
            cancelled, self._cancelled = self._cancelled, deque()
            now = time.monotonic()
            late = [job for job in self._jobs if job.deadline is not None and job.deadline <= now]
        for job in cancelled:
            self._drop(job, DeltuneError("the request was cancelled"))
        for job in late:
            self._drop(job, _late(job.request))

    def _drop(self, job: Job, error: DeltuneError) -> None:
        if job.done:
            return
        if job in self._inbox:
            with self._lock:
                self._inbox.remove(job)
        entry = self._catalog.get(job.request.delta)
        if entry is not None:
            self._lifecycle.stop_waiting(entry, job)
        for lane in self._lanes.values():
            if lane.drop(job):
                break
        self._finish(job, error)

    def _before_detach(self, loaded: LoadedDelta) -> None:
        """Drop what belongs to a version that leaves the model: beginnings of prompts, and a lane of its own."""
        self._context.prompt_cache.forget(loaded)
        for key in [key for key in self._lanes if key[2] == loaded.internal]:
            if self._lanes[key] is self._last_lane:
                self._last_lane = None
            del self._lanes[key]  # that of a delta which shares no batch

    def _forget(self, entry: Entry, reason: str) -> None:
        """Drop a delta that is served no more, and its counts once there are many of them."""
        self._lifecycle.forget(entry, UnknownDelta(reason))
        with self._lock:
            names = self._catalog.entries
            for counts in (self._finished, self._failed):
                if len(counts) > 2 * len(names) + FORGOTTEN:
                    for name in [name for name in counts if name and name not in names]:
                        del counts[name]

    def _end(self) -> None:
        """Fail what is left, and give the model back."""
        error = EngineClosed(UNANSWERED)
        with self._lock:
            self._closing = self._closed = True
            left = list(self._jobs)
            calls, self._calls = self._calls, deque()
        for job in left:
            self._drop(job, error)
        self._lifecycle.refuse_loads(error)
        for call in calls:
            call()
        try:
            self._backbones.close()
        except Exception:
            logger.exception("the model could not be given back")


def _late(request: Request) -> RequestTimeout:
    return RequestTimeout(f"the request took longer than its timeout of {request.timeout:g} seconds")


def _as_integer(value: Any) -> Any:
    """Return a float without a fraction, such as 2e9 bytes, as an integer; leave other values alone."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _check_numbers(**values: object) -> None:
    """Raise one error that lists all numbers of a server that are wrong, with what each of them may be."""
    problems = []
    for name, value in values.items():
        kind: Any = Real if name in SECONDS else Integral
        is_number = isinstance(value, kind) and not isinstance(value, bool) and 0 <= value < math.inf
        if (value is None and name in OPTIONAL) or (is_number and (value or name in FROM_ZERO)):
            continue
        allowed = "a number of seconds" if name in SECONDS else "a whole number"
        allowed += ", at least 0" if name in FROM_ZERO else " above 0"
        problems.append(f"{name}: give {allowed}{', or None' if name in OPTIONAL else ''}, not {excerpt(value)}")
    if problems:
        raise error_from_problems("a server cannot be made", problems)


__all__ = ["Server"]
