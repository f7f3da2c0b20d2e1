"""A server as a process: the address is taken first, then the model is loaded, and a signal ends it without loss."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from ..compat import is_answering
from ..errors import DeltuneError, check_extra, counted
from .api.app import configure_logs, create_app
from .api.tenants import KeyFile
from .config import HttpSection, ServeConfig
from .loading import load_server, tune_garbage_collection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .api.service import Engine, Service
    from .engine.requests import DeltaInfo

logger = logging.getLogger("deltune.serve")

BACKLOG = 2048
NAMED_DELTAS = 8  # in the line that says where the server is
MAX_HEADER_BYTES = 64 << 10
"""Bytes of a request's first line and headers."""


def serve(config: ServeConfig, quiet: bool = False) -> None:
    """Serve until a signal ends it."""
    if config.ray.ray:
        check_extra("ray", "deltune serve --ray needs")
    check_files(config.http)
    listener = bind(config.http.host, config.http.port)
    try:
        configure_logs(config.log.log)  # the engine's first look at the folder may have something to say
        if not quiet:
            print(f"loading {config.base_name}", file=sys.stderr, flush=True)
        engine = build_engine(config)
        tune_garbage_collection()
        try:
            app = create_app(engine, config)
        except BaseException:
            engine.close(0.0)
            raise
        greeting = "" if quiet else _greeting(config, engine.deltas(), listener)
        server = DrainingServer(app.state.service, uvicorn_config(app, config), greeting)
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup ignores it
            signal.signal(signal.SIGHUP, server.handle_exit)
        try:
            server.run(sockets=[listener])
        finally:
            engine.close(0.0 if server.force_exit else config.http.drain)
    finally:
        listener.close()


def check_files(http: HttpSection) -> None:
    """Read the file of keys and the certificate, so that a mistake is found before the model is loaded."""
    if http.keys is not None:
        KeyFile(http.keys)
    if http.ssl_certfile is None or http.ssl_keyfile is None:
        return
    for option, path in (("--ssl-certfile", http.ssl_certfile), ("--ssl-keyfile", http.ssl_keyfile)):
        if not Path(path).is_file():
            raise DeltuneError(f"there is no file {path}, which {option} names")
    try:
        # without a passphrase OpenSSL would ask for one on the terminal
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(http.ssl_certfile, http.ssl_keyfile, lambda: "")
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise DeltuneError(
            f"the certificate {http.ssl_certfile} with the key {http.ssl_keyfile} cannot be used: {error}. Both are "
            "PEM files, of one another, and the key has no passphrase"
        ) from error


def build_engine(config: ServeConfig) -> Engine:
    if config.ray.ray:
        from .replicas import Replicas

        return Replicas(config)
    return load_server(config)


def bind(host: str, port: int) -> socket.socket:
    """Take an address, before anything else is done."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise DeltuneError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; give another --port"
        ) from error
    return listener


def bounded_protocol(seconds: float) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol, which closes a connection where the head of a request does not arrive in time.

    uvicorn itself waits for ever: clients that send a byte now and then could hold all connections there are. The
    seconds count from a connection, or from the first byte of a further request on it.
    """

    class BoundedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        header_timer: asyncio.TimerHandle | None = None
        header_bytes = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.connection = transport
            self.start_timer()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if is_answering(self):  # the head has arrived
                self.stop_timer()
                return
            self.header_bytes += len(data)
            if self.header_bytes > MAX_HEADER_BYTES:
                self.refuse(b"431 Request Header Fields Too Large")
            elif self.header_timer is None:
                self.start_timer()

        def connection_lost(self, error: Exception | None) -> None:
            self.stop_timer()
            super().connection_lost(error)

        def start_timer(self) -> None:
            self.header_timer = asyncio.get_running_loop().call_later(seconds, self.refuse, b"408 Request Timeout")

        def stop_timer(self) -> None:
            if self.header_timer is not None:
                self.header_timer.cancel()
            self.header_timer, self.header_bytes = None, 0

        def refuse(self, status: bytes) -> None:
            if not self.connection.is_closing():
                if self.header_bytes:
                    self.connection.write(b"HTTP/1.1 %s\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % status)
                self.connection.close()

    return BoundedProtocol


def uvicorn_config(app: Any, config: ServeConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=bounded_protocol(config.limits.header_timeout),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        date_header=True,
        backlog=BACKLOG,
        timeout_keep_alive=30,
        ssl_certfile=config.http.ssl_certfile,
        ssl_keyfile=config.http.ssl_keyfile,
        proxy_headers=False,
        ws="none",
    )


LAST_ANSWERS = 1.0
"""Seconds in which clients can take the errors of requests that have not ended."""


class DrainingServer(uvicorn.Server):
    """A server that a signal ends in three steps: /ready says no, no new request is taken, the running ones end.

    Those that have not ended after `drain` seconds, or at a second signal, are answered with a 503. A third signal ends
    the process, whatever it waits for.
    """

    def __init__(self, service: Service, config: uvicorn.Config, greeting: str = "") -> None:
        super().__init__(config)
        self.service, self.greeting = service, greeting
        self._loop: asyncio.AbstractEventLoop | None = None
        self._second_signal = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.greeting:
            print(self.greeting, file=sys.stderr, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end. The signal is not raised again afterwards, so that the exit code is 0."""
        if self.service.draining:
            if self._second_signal.is_set():
                signal.signal(sig, signal.SIG_DFL)
                signal.raise_signal(sig)
            self.should_exit = True
            if self._loop is None:
                self.force_exit = True
            else:
                self._loop.call_soon_threadsafe(self._second_signal.set)
            return
        self.service.draining = True
        logger.warning("ending after %s: running requests are finished first", signal.Signals(sig).name)
        delay = self.service.config.http.drain_delay
        if delay:
            timer = threading.Timer(delay, self._stop_accepting)
            timer.daemon = True
            timer.start()
        else:
            self._stop_accepting()

    def _stop_accepting(self) -> None:
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no new connections, and wait for the requests that run."""
        ending = asyncio.create_task(self._end_requests())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_requests(self) -> None:
        """Answer the requests with an error that have not ended in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.service.config.http.drain):
                await self._second_signal.wait()
        self._second_signal.set()
        if running := len(self.server_state.tasks):
            logger.warning("%s that had not ended: the answer is a 503", counted(running, "request"))
        try:
            await asyncio.to_thread(self.service.engine.close, 0.0)
            await asyncio.sleep(LAST_ANSWERS)
            for task in self.server_state.tasks:  # what waits for its client and not for the engine
                task.cancel()
            await asyncio.sleep(LAST_ANSWERS if self.server_state.tasks else 0)
        finally:
            self.force_exit = True
            for connection in list(self.server_state.connections):  # Python 3.12 would wait for these clients
                connection.transport.abort()


def _names(deltas: Sequence[DeltaInfo]) -> str:
    """The number of deltas, and the names of the first ones."""
    names = ", ".join(delta.name for delta in deltas[:NAMED_DELTAS]) + (", …" if len(deltas) > NAMED_DELTAS else "")
    return counted(len(deltas), "delta") + (f" ({names})" if deltas else "")


def _greeting(config: ServeConfig, deltas: Sequence[DeltaInfo], listener: socket.socket) -> str:
    """Return the line that says where the server is and what it has."""
    address = listener.getsockname()
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    scheme = "https" if config.http.ssl_certfile else "http"
    served = [delta for delta in deltas if delta.loaded or not delta.error]
    line = f"serving {config.base_name} with {_names(served)} at {scheme}://{host}:{address[1]}"
    if refused := [delta for delta in deltas if delta.error]:
        line += f"; the files of {_names(refused)} were refused: GET /v1/deltas says why"
    if config.http.keys is None and not config.is_local:
        line += "\nnote: everybody who reaches this address may ask; --keys FILE makes a key necessary"
    return line
