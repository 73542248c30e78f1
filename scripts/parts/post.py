"""HTTP requests with one budget: of seconds, from the look-up of the name to the last byte, and of bytes.

The time limits of HTTP libraries hold for a single read. A server that sends a byte now and then, of the headers or of
the body, meets each of them for ever; it does not meet this one.
"""

import asyncio
import functools
import threading
import urllib.parse
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import httpx2

START = threading.Lock()


def within(request: Coroutine[Any, Any, Any], seconds: float) -> Any:
    """The result of a request, which is ended after `seconds`: TimeoutError."""
    with START:
        loop = loop_of_requests()
    future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(request, seconds), loop)
    try:
        return future.result()
    except BaseException:  # also a caller's own deadline, by a signal
        future.cancel()
        raise


@functools.cache
def loop_of_requests() -> asyncio.AbstractEventLoop:
    """An event loop in a thread of its own, which can end a request at any moment."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


class Bounded(httpx2.AsyncByteStream):
    """The bytes of a response. Raises httpx2.ReadError where there are more than max_bytes."""

    def __init__(self, stream: Any, max_bytes: int):
        self.stream = stream
        self.max_bytes = max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        received = 0
        async for chunk in self.stream:
            received += len(chunk)
            if received > self.max_bytes:
                raise httpx2.ReadError(f"the reply has more than {self.max_bytes} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self.stream.aclose()


@functools.cache
def client(through_proxy: bool, max_bytes: int) -> httpx2.AsyncClient:
    """A client, which keeps connections and follows no redirect. A response has at most max_bytes, and is not unpacked:
    a gigabyte of blanks is a megabyte when packed."""

    async def bound(response: httpx2.Response) -> None:
        response.headers.pop("content-encoding", None)
        response.stream = Bounded(response.stream, max_bytes)

    return httpx2.AsyncClient(
        timeout=None,
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=100),
        headers={"Accept-Encoding": "identity"},
        event_hooks={"response": [bound]},
        trust_env=through_proxy,
    )


def client_for(url: str, max_bytes: int) -> httpx2.AsyncClient:
    """The client for a URL. A proxy from the environment does not know the loopback device. Raises ValueError."""
    host = urllib.parse.urlsplit(url).hostname or ""
    is_local = host == "localhost" or host == "::1" or host.startswith("127.")
    return client(not is_local, max_bytes)


def post(url: str, content: dict[str, Any], seconds: float, max_bytes: int) -> httpx2.Response:
    """Send JSON and return the whole answer, of any status. Raises TimeoutError after `seconds`, and ConnectionError
    for a server that cannot be reached, breaks off, or sends more than max_bytes."""
    try:
        return within(client_for(url, max_bytes).post(url, json=content), seconds)
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from None
