"""`Server`: many deltas on one backbone, in Python without HTTP.

One thread owns the model. It takes requests from the others, reads and attaches deltas between two batches, and gives
every request its answer, so nothing that concerns the model needs a lock, and nothing process-wide changes.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..errors import DeltuneError, counted, describe_value, error_summary, unknown_name
from ..filesystem import user_path
from ..models import align_padding_token, has_trained_head, load_config, load_model, load_tokenizer
from .backbone import Backbones, LoadedDelta, PreparedDelta
from .encoding import BatchLimits, EncodingLane, LaneContext
from .errors import EngineClosed, InvalidRequest, QueueFull, RequestTimeout, UnknownDelta
from .fairness import FairShare
from .generation import GenerationLane, GenerationOptions
from .jobs import LONG_TEXT, Job, Listener, RequestEncoder, check_pair, check_task, input_size
from .prompt_cache import PromptCache
from .registry import HEAD_TASKS, FolderFacts, Signature, check_delta_name, read_facts, scan, signature
from .requests import Answer, DeltaInfo, EngineStats, Request, TokenChoice

logger = logging.getLogger(__name__)

Lane = EncodingLane | GenerationLane

IDLE = 0.2
"""Seconds after which the engine looks for timed-out requests when nothing wakes it."""
READ_ATTEMPTS = 3
"""How often a delta is read whose files change meanwhile."""
ENCODED_AT_ONCE = 512
"""Characters up to which `asubmit` reads a text in the event loop itself; longer ones are read in a thread."""
LOADS_AT_ONCE = 2
"""Deltas that are read ahead; more would take memory before there is a place for them."""


NAMED_FOLDERS = 8
"""Folders without a delta that a line of the log names."""


@dataclass(eq=False)
class Entry:
    """A delta by its name: its folder, and the version in memory.

    Attributes:
        name: Its name.
        folder: Its folder; None if it was attached before the server was made.
        facts: What its files said when they were last read.
        seen: The signature of its files at that time.
        current: The version in memory, or None.
        waiting: Requests that wait until it is in memory.
        loading: Whether it is being read for them.
        draining: Whether it takes no new requests, because another delta needs its place.
        error: Why its newest files were refused, or "".
        refused: The signature of the files that were refused.
        listed: Whether it is in the server's directory, so that it goes when its folder goes.
    """

    name: str
    folder: Path | None
    facts: FolderFacts | None = None
    seen: Signature = ()
    current: LoadedDelta | None = None
    waiting: deque[Job] = field(default_factory=deque)
    loading: bool = False
    draining: bool = False
    error: str = ""
    refused: Signature = ()
    listed: bool = False

    def refuse(self, error: DeltuneError, seen: Signature) -> None:
        """Note and log why its newest files were refused; the version in memory goes on.

        Args:
            error: The reason.
            seen: The signature of the files.
        """
        if seen != self.refused or str(error) != self.error:
            goes_on = "" if self.current is None else f"; version {self.current.version} goes on"
            logger.warning("the files of delta %s are refused: %s%s", self.name, error_summary(error), goes_on)
        self.error, self.refused = str(error), seen


@dataclass(eq=False)
class Arrival:
    """A delta that was read, on its way to the engine's thread.

    Attributes:
        entry: Its entry.
        folder: Its folder.
        prepared: The delta, or why it was refused.
        seen: The signature of its files before they were read.
        done: The result of `load`, or None if requests wait for it.
    """

    entry: Entry
    folder: Path
    prepared: PreparedDelta | DeltuneError
    seen: Signature
    done: Future[DeltaInfo] | None


class Server:
    """Many deltas on one backbone: every request is answered by its own delta, in batches with all others.

    Requests may come from any thread and from asyncio. The model belongs to the server until `close`.

    Example:
        ```python
        with deltune.Server("minilm", deltas="deltas") as server:
            answer = server.submit(Request("classify", text="I was charged twice.", delta="intent")).result()
        ```

    Args:
        model: A loaded model of transformers, or a hub id, a folder or `minilm`, which is then loaded as its
            checkpoint says.
        tokenizer: The tokenizer of the model. Without one, requests have token ids. Default: that of the model, if the
            model is given by its name.
        deltas: A folder with a folder for each delta: a saved delta, a finished run of `deltune train`, or an adapter
            folder of PEFT or AdapterHub. Its name is that of the delta. Default: deltas come by `load` alone.
        max_loaded: The most deltas in memory; of the others those stay on the disk that were not needed for longest.
        max_loaded_bytes: The most bytes of deltas in memory.
        max_batch_tokens: The most tokens in one pass, padding included.
        max_batch_size: The most requests in one batch.
        max_prefill_tokens: The most tokens of a decoder's prompt that are read in one step. A longer prompt is read in
            parts, so that the other rows of the batch wait for a part alone.
        max_pass_seconds: About how long the passes of an encoder's batch take together, by the speed of the passes
            before: so long a request of another tenant waits for it. A single request has a pass of its own, however
            long.
        max_wait: How long a request waits for a fuller batch, in seconds; a decoder's batch is joined at once.
        max_queue: The most requests that wait.
        max_queue_per_tenant: The most requests of one tenant that wait.
        max_length: The most tokens of a request, those that are generated included. Default: what the model has.
        prompt_cache_bytes: The size of the cache of prompt beginnings; 0 for none.
        watch: Look at the folder of deltas every so many seconds. Default: only `refresh` does.

    Raises:
        DeltuneError: The model or the folder cannot be used, such as a language model that remembers more than keys and
            values (Mamba and hybrids with it).
    """

    def __init__(
        self,
        model: PreTrainedModel | str | Path,
        tokenizer: Any = None,
        *,
        deltas: str | Path | None = None,
        max_loaded: int | None = 64,
        max_loaded_bytes: int | None = None,
        max_batch_tokens: int = 4096,
        max_batch_size: int = 32,
        max_prefill_tokens: int = 512,
        max_pass_seconds: float = 0.1,
        max_wait: float = 0.005,
        max_queue: int = 1024,
        max_queue_per_tenant: int = 256,
        max_length: int | None = None,
        prompt_cache_bytes: int = 64 << 20,
        watch: float | None = None,
    ) -> None:
        _check_positive(
            max_loaded=max_loaded, max_loaded_bytes=max_loaded_bytes, max_batch_tokens=max_batch_tokens,
            max_batch_size=max_batch_size, max_prefill_tokens=max_prefill_tokens, max_queue=max_queue,
            max_queue_per_tenant=max_queue_per_tenant, max_length=max_length, watch=watch,
            max_pass_seconds=max_pass_seconds,
        )  # fmt: skip
        if max_wait < 0 or prompt_cache_bytes < 0:
            raise DeltuneError("max_wait and prompt_cache_bytes must not be negative")
        self.root = None if deltas is None else user_path(deltas, "deltas")
        if self.root is not None:
            scan(self.root)  # a folder that cannot be read is reported before anything is loaded or changed
        if isinstance(model, str | Path):
            model, loaded_tokenizer = _load(str(model))
            tokenizer = loaded_tokenizer if tokenizer is None else tokenizer
        if not isinstance(model, PreTrainedModel):
            raise DeltuneError(f"a server takes a model of transformers, or its name, not {describe_value(model)}")
        self.max_loaded, self.max_loaded_bytes = max_loaded, max_loaded_bytes
        self.max_queue, self.max_queue_per_tenant, self.max_length = max_queue, max_queue_per_tenant, max_length
        self.limits = BatchLimits(max_batch_tokens, max_batch_size, max_wait, max_prefill_tokens, max_pass_seconds)
        self.tokenizer = tokenizer
        self._backbones = Backbones(model)
        first = self._backbones.first
        vocabulary = model.get_input_embeddings().get_parameter("weight").shape[0]
        self._encoder = RequestEncoder(tokenizer, first.arguments, first.is_encoder_decoder, vocabulary)
        self._options = GenerationOptions(self.limits, self._encoder, PromptCache(prompt_cache_bytes), self._count)
        if first.head == "causal-lm":
            try:
                self._options.runner(first)
            except DeltuneError:
                self._backbones.close()
                raise
        self._share = FairShare()
        self._lane_context = LaneContext(self._share, self._start, self._finish)
        self._lanes: dict[tuple[str, str, str], Lane] = {}
        self._base = first.base(HEAD_TASKS[first.head])
        self._entries = {d.name: Entry(d.name, None, current=d) for d in first.attached_before() if d.name is not None}
        self._ignored: dict[str, str] = {}  # folders without a delta, and why
        self._gone: dict[str, Entry] = {}  # unloaded by name, until they are loaded again or their folder goes
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._inbox: deque[Job] = deque()
        self._arrivals: deque[Arrival] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._cancelled: deque[Job] = deque()
        self._jobs: set[Job] = set()  # all that are neither answered nor failed
        self._queued: Counter[str] = Counter()
        self._running: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._load_seconds = 0.0
        self._rate = 0.0  # requests a second, lately
        self._last_finished = time.monotonic()
        self._retired: set[LoadedDelta] = set()
        self._closing = self._closed = False
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="deltune-reader")
        self._encoding = ThreadPoolExecutor(1, thread_name_prefix="deltune-encoder")
        self._long_encoding = ThreadPoolExecutor(1, thread_name_prefix="deltune-long-encoder")
        if self.root is not None:
            self._scan()
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
        stream = Stream()
        stream.begin(self._submit(request, stream.put))
        return stream

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
        self._reserve(request.tenant)
        return self._submit_reserved(request, listener, time.monotonic())

    async def _submit_in_thread(self, request: Request, listener: Listener | None) -> Job:
        """Submit without holding up the event loop while a tokenizer reads a long text."""
        size = input_size(request)
        if size <= ENCODED_AT_ONCE:
            return self._submit(request, listener)
        self._reserve(request.tenant)
        pool = self._long_encoding if size > LONG_TEXT else self._encoding
        try:
            encoding = pool.submit(self._submit_reserved, request, listener, time.monotonic())
        except RuntimeError:
            self._unreserve(request.tenant)
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
            self._unreserve(request.tenant)
        elif encoding.exception() is None:
            encoding.result().future.cancel()

    def _reserve(self, tenant: str) -> None:
        """Count a request of a tenant as one that waits.

        Raises:
            QueueFull: Too many wait.
            EngineClosed: The server is closing.
        """
        with self._lock:
            if self._closing:
                raise EngineClosed("the server is closing and takes no new requests")
            self._check_room(tenant)
            self._queued[tenant] += 1

    def _unreserve(self, tenant: str) -> None:
        """Count a request of a tenant no more as one that waits."""
        with self._lock:
            self._queued[tenant] -= 1
            if not self._queued[tenant]:
                del self._queued[tenant]

    def _submit_reserved(self, request: Request, listener: Listener | None, arrived: float) -> Job:
        """Make a request that was counted a job, and hand it to the engine's thread."""
        try:
            if self._closing:
                raise EngineClosed("the server is closing and takes no new requests")
            job = self._job(request, listener, arrived)
            with self._wake:
                if self._closing:
                    raise EngineClosed("the server is closing and takes no new requests")
                self._jobs.add(job)
                self._inbox.append(job)
                self._wake.notify_all()
        except BaseException:
            self._unreserve(request.tenant)
            raise
        job.future.add_done_callback(lambda future: self._on_done(job, future))
        return job

    def _job(self, request: Request, listener: Listener | None, arrived: float) -> Job:
        """Check a request, and read its text."""
        entry, facts = self._target(request.delta)
        check_task(request.task, facts.tasks, request.delta)
        if request.task == "classify":
            check_pair(request, facts.takes_pairs)
        if request.timeout is not None and not request.timeout > 0:
            raise InvalidRequest(f"a timeout is a number of seconds above 0, not {request.timeout}")
        job = self._encoder.encode(request, listener, facts.max_length)
        job.submitted = arrived
        if request.task == "generate":
            self._options.check(request.sampling)
        self._check_length(job, (None if entry is None else entry.current) or self._base)
        return job

    def _target(self, name: str | None) -> tuple[Entry | None, LoadedDelta | FolderFacts]:
        """The entry of a delta, and what is known of it: in memory, or from its files."""
        if name is None:
            return None, self._base
        with self._lock:
            entry = self._entries.get(name)
            known = None if entry is None else entry.current
        if entry is None:
            raise UnknownDelta(unknown_name("delta", name, self._entries))
        if known is not None:
            return entry, known
        return entry, self._facts(entry)

    def _check_length(self, job: Job, loaded: LoadedDelta) -> None:
        length, backbone = len(job.tokens), loaded.backbone
        generating, more = job.request.task == "generate", 0
        positions = backbone.positions(backbone.first_stack.name, loaded)
        answer_positions = positions - length
        if generating and backbone.is_encoder_decoder:
            answer_positions = backbone.positions(backbone.last_stack.name, loaded) - 1
        if generating:
            job.request = _shortened(job.request, answer_positions, self.max_length, length)
            more = job.request.sampling.max_tokens
        if self.max_length is not None and length + more > self.max_length:
            raise InvalidRequest(
                f"the request has {length} tokens{f' and max_tokens={more}' if generating else ''}, and this server "
                f"takes {self.max_length}"
            )
        needed = length + (more if not backbone.is_encoder_decoder else 0)
        if needed > positions:
            raise InvalidRequest(
                f"the request has {length} tokens{f' and max_tokens={more}' if generating else ''}, and the model has "
                f"{positions} positions for them"
            )
        if generating and more > answer_positions:
            raise InvalidRequest(
                f"max_tokens={more} is more than the {answer_positions} that the decoder has places for"
            )

    def _check_room(self, tenant: str) -> None:
        waiting = sum(self._queued.values())
        if waiting >= self.max_queue:
            raise QueueFull(f"{waiting} requests wait already, which is all that this server keeps", self._retry())
        if self._queued[tenant] >= self.max_queue_per_tenant:
            raise QueueFull(
                f"{self._queued[tenant]} requests of tenant {tenant!r} wait already, which is all that it may have",
                self._retry(),
            )

    def _retry(self) -> float:
        """In how many seconds a quarter of what waits may be done."""
        return min(60.0, max(0.1, sum(self._queued.values()) / 4 / self._rate)) if self._rate else 1.0

    def _on_done(self, job: Job, future: Future[Answer]) -> None:
        if future.cancelled():
            with self._wake:
                self._cancelled.append(job)
                self._wake.notify_all()

    # -- deltas

    def load(self, name: str, folder: str | Path | None = None) -> DeltaInfo:
        """Load a delta, or the newest version of one. It is checked before it takes traffic.

        Requests that run go on with the version that they began with. If the new version is refused, the old one goes
        on.

        Args:
            name: Its name.
            folder: Its folder. Default: the folder of this name in the server's directory.

        Returns:
            What it is.

        Raises:
            UnknownDelta: No folder is given, and the directory has none of this name.
            DeltuneError: The delta is damaged or does not fit the model.
            EngineClosed: The server is closing.
        """
        check_delta_name(name)
        where = self._folder(name, folder)
        with self._lock:
            entry = self._entries.get(name)
            fresh = entry is None
            if entry is None:
                entry = Entry(name, where)
            elif entry.folder is None:
                raise DeltuneError(
                    f"delta {name!r} was attached to the model before the server was made; give another name"
                )
        done: Future[DeltaInfo] = Future()
        self._read(entry, where, done)
        try:
            return done.result()
        except DeltuneError as error:
            if not fresh:
                entry.refuse(error, signature(where))
            raise

    def _folder(self, name: str, folder: str | Path | None) -> Path:
        if folder is not None:
            where = user_path(folder, "folder")
            listed = None if self.root is None else self.root / name
            return listed if listed is not None and listed.resolve() == where.resolve() else where
        known = self._entries.get(name) or self._gone.get(name)
        if known is not None and known.folder is not None:
            return known.folder
        if self.root is None:
            raise UnknownDelta(f"delta {name!r} is not known, and this server has no folder of deltas: give its folder")
        if name not in (names := scan(self.root).deltas):
            raise UnknownDelta(unknown_name("delta", name, names))
        return self.root / name

    def unload(self, name: str) -> None:
        """Take a delta out of the server. Requests that run are answered; those that wait for it fail.

        Args:
            name: Its name. Its folder stays; `load` brings it back.

        Raises:
            UnknownDelta: There is no such delta.
        """

        def remove() -> None:
            entry = self._entries.pop(name, None)
            if entry is None:
                raise UnknownDelta(unknown_name("delta", name, self._entries))
            if self.root is not None:
                self._gone[name] = entry
            self._forget(entry, UnknownDelta(f"delta {name!r} was unloaded before it answered"))

        self._call(remove)

    def refresh(self) -> list[DeltaInfo]:
        """Look at the directory of deltas again: new folders, changed ones, and those that are gone.

        A version in memory whose files changed is replaced. If the new files are refused, it goes on, and its
        `DeltaInfo.error` says why.

        Returns:
            All deltas.
        """
        if self.root is not None:
            changed = self._scan()
            for entry in changed:
                done: Future[DeltaInfo] = Future()
                assert entry.folder is not None
                self._read(entry, entry.folder, done)
                try:
                    done.result()
                except DeltuneError as error:
                    entry.refuse(error, signature(entry.folder))
        return self.deltas()

    def _scan(self) -> list[Entry]:
        """Find new and gone folders, and return the entries in memory whose files changed."""
        assert self.root is not None
        found = scan(self.root)
        folders = found.deltas
        self._note_ignored(found.ignored)
        changed: list[Entry] = []
        with self._lock:
            before = [(e, e.folder) for e in self._entries.values() if not e.listed or e.name in folders]
        # without the lock, which requests need: the disk may be slow
        signatures = [(entry, folder, signature(folder)) for entry, folder in before if folder is not None]
        with self._lock:
            for name in [name for name in self._gone if name not in folders]:
                del self._gone[name]
            for name, folder in folders.items():
                if name not in self._entries and name not in self._gone:
                    self._entries[name] = Entry(name, folder, listed=True)
            for entry, folder, now in signatures:
                if entry.folder != folder or now in (entry.seen, entry.refused):
                    continue
                if entry.current is not None:
                    changed.append(entry)
                else:
                    entry.facts, entry.error = None, ""
            lost = [e for e in self._entries.values() if e.listed and e.name not in folders]
            for entry in lost:
                self._entries.pop(entry.name, None)
        for entry in lost:
            error = UnknownDelta(f"the folder of delta {entry.name!r} is gone")
            self._call(lambda entry=entry, error=error: self._forget(entry, error))  # type: ignore[misc]
        return changed

    def _note_ignored(self, ignored: dict[str, str]) -> None:
        """Keep why folders hold no delta, and log those that were not known."""
        new = [name for name in ignored if name not in self._ignored]
        self._ignored = ignored
        if new:
            reasons = "; ".join(error_summary(ignored[name]) for name in new[:NAMED_FOLDERS])
            more = "; …" if len(new) > NAMED_FOLDERS else ""
            logger.warning("%s without a delta in %s: %s%s", counted(len(new), "folder"), self.root, reasons, more)

    def ignored_folders(self) -> dict[str, str]:
        """Return the folders in the directory of deltas that hold none, when it was last looked at.

        Returns:
            By name, why they are not served.
        """
        return dict(self._ignored)

    def _watch(self, seconds: float) -> None:
        while not self._stop.wait(seconds):
            try:
                self.refresh()
            except EngineClosed:
                return
            except Exception as error:
                logger.warning("the folder of deltas could not be looked at: %s", error_summary(error))

    def deltas(self) -> list[DeltaInfo]:
        """Return what is known of each delta.

        Returns:
            A fact sheet for each, sorted by name.
        """
        with self._lock:
            entries = sorted(self._entries.items())
        infos = []
        for _, entry in entries:
            if entry.current is None and entry.facts is None:
                with suppress(DeltuneError):
                    self._facts(entry)
            infos.append(self._info(entry))
        return infos

    def _info(self, entry: Entry) -> DeltaInfo:
        current, facts = entry.current, entry.facts
        folder = "" if entry.folder is None else str(entry.folder)
        if current is not None:
            return DeltaInfo(
                entry.name, folder, current.method, current.parameters, current.tasks, current.labels, current.version,
                True, current.bytes, current.loaded_at, entry.error,
            )  # fmt: skip
        if facts is None:
            return DeltaInfo(entry.name, folder, "", 0, (), error=entry.error)
        return DeltaInfo(
            entry.name, folder, facts.method, facts.parameters, facts.tasks, facts.labels, facts.version,
            error=entry.error,
        )  # fmt: skip

    def _facts(self, entry: Entry) -> FolderFacts:
        """What the files of a delta that is not in memory say."""
        facts = entry.facts
        if facts is None:
            assert entry.folder is not None
            seen = signature(entry.folder)
            if entry.error and seen == entry.refused:
                raise DeltuneError(entry.error)
            try:
                facts = read_facts(entry.folder)
                self._backbones.check(facts, entry.folder)
            except DeltuneError as error:
                entry.refuse(error, seen)
                raise
            entry.facts, entry.seen = facts, seen
        return facts

    def _read(self, entry: Entry, folder: Path, done: Future[DeltaInfo] | None) -> None:
        """Read a delta in the reader's thread, and hand it to the engine's."""

        def read() -> None:
            began = time.perf_counter()
            for attempt in range(READ_ATTEMPTS):
                seen = signature(folder)
                prepared = self._prepared(entry, folder, seen, again=done is not None)
                if isinstance(prepared, PreparedDelta) or signature(folder) == seen:
                    break
                time.sleep(0.05 * (attempt + 1))  # somebody is replacing the files
            with self._wake:
                self._load_seconds += time.perf_counter() - began
                if not self._closed:
                    self._arrivals.append(Arrival(entry, folder, prepared, seen, done))
                    self._wake.notify_all()
                elif done is not None:
                    done.set_exception(EngineClosed("the server is closed"))

        try:
            self._reader.submit(read)
        except RuntimeError:
            raise EngineClosed("the server is closing and loads no deltas") from None

    def _prepared(self, entry: Entry, folder: Path, seen: Signature, again: bool) -> PreparedDelta | DeltuneError:
        """Read and check a delta, or say why it is refused; files that were refused are read `again` or not."""
        try:
            if not again and entry.error and seen == entry.refused:
                return DeltuneError(entry.error)
            facts = read_facts(folder)
            return self._backbones.for_head(self._backbones.head_of(facts)).prepare(entry.name, folder, facts, seen)
        except DeltuneError as error:
            return error
        except Exception as error:
            logger.exception("delta %r cannot be read", entry.name)
            return DeltuneError(f"delta {entry.name!r} cannot be read: {error_summary(error)}")

    # -- numbers, and the end

    def stats(self) -> EngineStats:
        """Return how busy the server is.

        Returns:
            The numbers since the start, and what waits and runs now.
        """
        with self._lock:
            return EngineStats(
                queued={tenant: n for tenant, n in self._queued.items() if n},
                running={delta: n for delta, n in self._running.items() if n},
                finished=dict(self._finished),
                failed=dict(self._failed),
                prompt_tokens=self._totals["prompt"],
                generated_tokens=self._totals["generated"],
                cached_tokens=self._totals["cached"],
                loads=self._totals["loads"],
                evictions=self._totals["evictions"],
                load_seconds=self._load_seconds,
            )

    def close(self, drain: float = 30.0) -> None:
        """End the server: take no new requests, answer those that are here, and give the model back.

        Args:
            drain: How many seconds the requests that are here may take; after them they fail.
        """
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._stop.set()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()
        deadline = time.monotonic() + drain
        with self._wake:
            while self._jobs and self._thread.is_alive() and (left := deadline - time.monotonic()) > 0:
                self._wake.wait(min(left, IDLE))
            self._closed = True
            self._wake.notify_all()
        self._thread.join()
        for pool in (self._reader, self._encoding, self._long_encoding):
            pool.shutdown(wait=True)

    # -- the engine's thread

    def _call(self, function: Callable[[], None]) -> None:
        """Run a function in the engine's thread between two batches, and wait for it."""
        if threading.current_thread() is getattr(self, "_thread", None) or not hasattr(self, "_thread"):
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
        now = time.monotonic()
        return bool(
            self._closed or self._calls or self._inbox or self._arrivals_ready() or self._cancelled
            or any(lane.busy and lane.due(now) <= 0 for lane in self._lanes.values())
        )  # fmt: skip

    def _idle_time(self) -> float:
        now = time.monotonic()
        return max(0.0001, min([IDLE, *(lane.due(now) for lane in self._lanes.values() if lane.busy)]))

    def _arrivals_ready(self) -> bool:
        return any(not self._waits_for_room(arrival) for arrival in self._arrivals)

    def _turn(self) -> None:
        """One turn: what has ended or arrived, then a batch of every lane that is due."""
        self._sweep()
        self._take_arrivals()
        with self._lock:
            jobs, self._inbox = self._inbox, deque()
        for job in jobs:
            self._share.enter(job.tenant)
            self._place(job)
        self._begin_loads()
        now = time.monotonic()
        for key, lane in list(self._lanes.items()):
            if lane.busy and lane.due(now) <= 0:
                try:
                    lane.advance()
                except Exception as error:
                    logger.exception("a batch failed beyond repair")
                    self._lanes.pop(key, None)
                    with self._lock:  # the lane may have lost track of some of them when it failed
                        lost = [job for job in self._jobs if job.lane is lane]
                    for job in lost:
                        self._finish(job, DeltuneError(f"the engine failed: {error_summary(error)}"))

    def _place(self, job: Job) -> None:
        """Give a request the version of its delta and put it into a queue, or let it wait for its delta."""
        if job.done:
            return
        entry = None if job.request.delta is None else self._entries.get(job.request.delta)
        if job.request.delta is not None and entry is None:
            self._finish(job, UnknownDelta(unknown_name("delta", job.request.delta, self._entries)))
            return
        loaded = self._base if entry is None else entry.current
        if entry is not None and (loaded is None or entry.draining):
            entry.waiting.append(job)
            return
        assert loaded is not None
        try:
            check_task(job.request.task, loaded.tasks, job.request.delta)
            self._check_length(job, loaded)
            lane = self._lane(job, loaded)
        except Exception as error:  # such as a family whose caches cannot be served
            self._finish(job, error)
            return
        job.loaded, job.lane = loaded, lane
        loaded.users += 1
        loaded.used, loaded.last_used = True, time.monotonic()
        lane.queue.push(job)

    def _lane(self, job: Job, loaded: LoadedDelta) -> Lane:
        task = {"generate": "generate", "embed": "embed"}.get(job.request.task, "labels")
        key = (loaded.backbone.head, task, loaded.group)
        if key not in self._lanes:
            if task == "generate":
                self._lanes[key] = GenerationLane(loaded.backbone, self._options, self._lane_context)
            else:
                self._lanes[key] = EncodingLane(loaded.backbone, task, self.limits, self._lane_context)
        return self._lanes[key]

    def _start(self, job: Job) -> None:
        """Note that the first batch of a request begins."""
        if job.started is None:
            job.started = time.monotonic()
        with self._lock:
            if job.waiting:
                job.waiting = False
                self._unreserve(job.tenant)
                self._running[job.request.delta or ""] += 1

    def _finish(self, job: Job, answer: Answer | BaseException) -> None:
        """End a request, in every way in which it can end."""
        if job.done:
            return
        job.done = True
        self._share.leave(job.tenant)
        if job.loaded is not None:
            self._release(job.loaded)
        name = job.request.delta or ""
        now = time.monotonic()
        with self._wake:
            self._jobs.discard(job)
            if job.waiting:
                self._unreserve(job.tenant)
            else:
                self._running[name] -= 1
            if isinstance(answer, Answer) and not job.cancelled:
                self._finished[name] += 1
                self._totals["prompt"] += answer.prompt_tokens
                self._totals["cached"] += answer.cached_tokens
            elif not job.cancelled:
                self._failed[name] += 1
            passed = max(now - self._last_finished, 1e-6)
            self._rate += (1 / passed - self._rate) * min(1.0, passed / 5 + 0.01)
            self._last_finished = now
            self._wake.notify_all()
        if isinstance(answer, Answer):
            job.resolve(answer)
        else:
            job.fail(answer)

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
            self._share.enter(job.tenant)  # `_finish` counts it as one that has entered
            with self._lock:
                self._inbox.remove(job)
        entry = self._entries.get(job.request.delta or "")
        if entry is not None and job in entry.waiting:
            entry.waiting.remove(job)
        for lane in self._lanes.values():
            if lane.drop(job):
                break
        self._finish(job, error)

    # -- deltas in memory, in the engine's thread

    def _in_memory(self) -> list[LoadedDelta]:
        current = [e.current for e in self._entries.values() if e.current is not None and not e.current.permanent]
        return [*current, *self._retired]

    def _begin_loads(self) -> None:
        """Begin to read deltas that requests wait for, in the order in which their tenants are to be served."""
        loading = sum(entry.loading for entry in self._entries.values())
        if loading >= LOADS_AT_ONCE:
            return
        waiting_entries = [e for e in self._entries.values() if e.waiting and not e.loading and e.current is None]
        waiting_entries.sort(key=lambda e: (self._share.of(e.waiting[0].tenant), e.waiting[0].submitted))
        for entry in waiting_entries[: LOADS_AT_ONCE - loading]:
            entry.loading = True
            assert entry.folder is not None
            try:
                self._read(entry, entry.folder, None)
            except EngineClosed as error:
                entry.loading = False
                while entry.waiting:
                    self._finish(entry.waiting.popleft(), error)

    def _waits_for_room(self, arrival: Arrival) -> bool:
        prepared = arrival.prepared
        if not isinstance(prepared, PreparedDelta):
            return False
        return not self._has_room(prepared.bytes, arrival.entry) and self._victim() is None

    def _take_arrivals(self) -> None:
        with self._lock:
            arrivals, self._arrivals = self._arrivals, deque()
        left = []
        for arrival in arrivals:
            try:
                taken = self._take(arrival)
            except Exception as error:  # whoever waits for it must hear of it
                logger.exception("delta %r cannot be taken", arrival.entry.name)
                taken = True
                self._refuse(arrival, DeltuneError(f"delta {arrival.entry.name!r} failed: {error_summary(error)}"))
            if not taken:
                left.append(arrival)
        with self._lock:
            self._arrivals.extendleft(reversed(left))
        if not left:  # whoever needed their place has found another one
            for entry in [entry for entry in self._entries.values() if entry.draining]:
                entry.draining = False
                self._place_waiting(entry)

    def _take(self, arrival: Arrival) -> bool:
        """Attach a delta that was read; return False if there is no place for it yet."""
        if arrival.done is not None:  # another thread may have loaded one of this name meanwhile
            arrival.entry = self._entries.get(arrival.entry.name, arrival.entry)
        entry, prepared = arrival.entry, arrival.prepared
        if isinstance(prepared, DeltuneError):
            self._refuse(arrival, prepared)
            return True
        if arrival.done is None and self._entries.get(entry.name) is not entry:
            self._refuse(arrival, UnknownDelta(f"delta {entry.name!r} was unloaded before it answered"))
            return True
        current = entry.current
        if current is not None and current.version == prepared.facts.version and not entry.draining:
            entry.seen, entry.error = arrival.seen, ""
            self._accept(arrival)
            return True
        if self.max_loaded_bytes is not None and prepared.bytes > self.max_loaded_bytes:
            self._refuse(
                arrival,
                DeltuneError(
                    f"delta {entry.name!r} has {prepared.bytes:,} bytes, and this server keeps "
                    f"{self.max_loaded_bytes:,} bytes of deltas in memory"
                ),
            )
            return True
        if not self._make_room(prepared.bytes, entry):
            return False
        began = time.perf_counter()
        try:
            loaded = prepared.backbone.attach(prepared)
        except DeltuneError as error:
            self._refuse(arrival, error)
            return True
        except Exception as error:
            logger.exception("delta %r cannot be attached", entry.name)
            self._refuse(arrival, DeltuneError(f"delta {entry.name!r} cannot be attached: {error_summary(error)}"))
            return True
        loaded.last_used = time.monotonic()
        with self._lock:
            self._load_seconds += time.perf_counter() - began
            self._totals["loads"] += 1
            self._gone.pop(entry.name, None)
            self._entries[entry.name] = entry
            old, entry.current, entry.folder = entry.current, loaded, arrival.folder
            entry.listed = self.root is not None and arrival.folder == self.root / entry.name
            entry.facts, entry.seen, entry.error, entry.refused = prepared.facts, arrival.seen, "", ()
            entry.draining = False
        if old is not None:
            self._retire(old)
        self._accept(arrival)
        return True

    def _accept(self, arrival: Arrival) -> None:
        entry = arrival.entry
        if arrival.done is None:
            entry.loading = False
        self._place_waiting(entry)
        if arrival.done is not None:
            arrival.done.set_result(self._info(entry))

    def _place_waiting(self, entry: Entry) -> None:
        waiting, entry.waiting = entry.waiting, deque()
        for job in waiting:
            self._place(job)

    def _refuse(self, arrival: Arrival, error: DeltuneError) -> None:
        entry = arrival.entry
        if arrival.done is not None:
            if not arrival.done.done():
                arrival.done.set_exception(error)
            return
        entry.loading = False
        entry.refuse(error, arrival.seen)
        entry.facts = None
        waiting, entry.waiting = entry.waiting, deque()
        for job in waiting:
            self._finish(job, error)

    def _has_room(self, more: int, entry: Entry) -> bool:
        """Whether a version fits into memory; the one that it replaces goes when it is there."""
        inside = [loaded for loaded in self._in_memory() if loaded is not entry.current]
        if self.max_loaded is not None and len(inside) + 1 > self.max_loaded:
            return False
        return self.max_loaded_bytes is None or sum(d.bytes for d in inside) + more <= self.max_loaded_bytes

    def _victim(self) -> Entry | None:
        """The entry whose version nobody needs, and was not needed for longest; one that was just loaded stays."""
        idle = [
            e for e in self._entries.values()
            if e.current is not None and not e.current.permanent and not e.current.users
            and (e.current.used or not e.waiting)
        ]  # fmt: skip
        return min(idle, key=lambda e: e.current.last_used if e.current else 0.0, default=None)

    def _make_room(self, more: int, entry: Entry) -> bool:
        """Drop versions from memory until another one fits; if all are needed, let one take no new requests."""
        while not self._has_room(more, entry):
            victim = self._victim()
            if victim is None:
                needed = [e for e in self._entries.values() if e.current is not None and not e.current.permanent]
                if needed and not any(e.draining for e in needed):
                    min(needed, key=lambda e: e.current.last_used if e.current else 0.0).draining = True
                return False
            self._evict(victim)
        return True

    def _evict(self, entry: Entry) -> None:
        with self._lock:
            loaded, entry.current, entry.draining = entry.current, None, False
            self._totals["evictions"] += 1
        if loaded is not None:
            self._detach(loaded)

    def _retire(self, loaded: LoadedDelta) -> None:
        if loaded.permanent:
            return
        loaded.retired = True
        if loaded.users:
            self._retired.add(loaded)
        else:
            self._detach(loaded)

    def _release(self, loaded: LoadedDelta) -> None:
        loaded.users -= 1
        loaded.last_used = time.monotonic()
        if loaded.retired and not loaded.users:
            self._retired.discard(loaded)
            self._detach(loaded)
        elif not loaded.users and self._arrivals:
            with self._wake:
                self._wake.notify_all()

    def _detach(self, loaded: LoadedDelta) -> None:
        self._options.prompt_cache.forget(loaded)
        for key in [key for key in self._lanes if key[2] == loaded.internal]:
            del self._lanes[key]  # that of a delta which shares no batch
        try:
            loaded.backbone.detach(loaded)
        except Exception:  # the request that needed it last has its answer nevertheless
            logger.exception("delta %r cannot be detached", loaded.name)

    def _forget(self, entry: Entry, error: DeltuneError) -> None:
        """Drop an entry that is no longer served."""
        waiting, entry.waiting = entry.waiting, deque()
        for job in waiting:
            self._finish(job, error)
        loaded, entry.current = entry.current, None
        if loaded is not None:
            self._retire(loaded)

    def _end(self) -> None:
        """Fail what is left, and give the model back."""
        error = EngineClosed("the server was closed before it answered")
        with self._lock:
            self._closing = self._closed = True
            left = list(self._jobs)
            arrivals, self._arrivals = self._arrivals, deque()
            calls, self._calls = self._calls, deque()
        for job in left:
            self._drop(job, error)
        for arrival in arrivals:
            if arrival.done is not None:
                arrival.done.set_exception(error)
        for call in calls:
            call()
        try:
            self._backbones.close()
        except Exception:
            logger.exception("the model could not be given back")


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


def _load(name: str) -> tuple[PreTrainedModel, Any]:
    """Load a model with the head that its checkpoint was saved with, or without one, and its tokenizer."""
    config = load_config(name)
    heads = ("seq2seq-lm", "causal-lm", "classification", "tagging")
    head = next((head for head in heads if has_trained_head(config, head)), "base")
    tokenizer = load_tokenizer(name)
    model = load_model(name, head)
    align_padding_token(model, tokenizer)
    return model, tokenizer


def _shortened(request: Request, positions: int, max_length: int | None, length: int) -> Request:
    """Return a request whose answer is as long as there is room, if it leaves that to the server."""
    sampling = request.sampling
    if not sampling.shorten:
        return request
    room = positions if max_length is None else min(positions, max_length - length)
    return replace(request, sampling=replace(sampling, max_tokens=max(1, min(sampling.max_tokens, room))))


def _late(request: Request) -> RequestTimeout:
    return RequestTimeout(f"the request took longer than its timeout of {request.timeout:g} seconds")


def _check_positive(**values: float | None) -> None:
    if problems := [f"{name}={value}" for name, value in values.items() if value is not None and not value > 0]:
        raise DeltuneError(f"a server needs numbers above 0, not {', '.join(problems)}")


__all__ = ["Server", "Stream"]
