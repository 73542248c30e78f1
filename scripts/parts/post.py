"""One HTTP request with one budget: of seconds, from the look-up of the name to the last byte, and of bytes.

The time limits of HTTP libraries hold for a single read. A server that sends a byte now and then, of the headers or of
the body, meets each of them for ever; it does not meet this one.
"""

import asyncio
import functools
import json
import threading
import urllib.parse
from collections.abc import Mapping
from typing import Any, NamedTuple

START = threading.Lock()


class Answer(NamedTuple):
    """What a server answered, of any status."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as JSON. Raises ValueError, also for what is nested too deeply."""
        try:
            return json.loads(self.body)
        except RecursionError:
            raise ValueError("the reply is nested too deeply") from None


def post(url: str, content: dict[str, Any], seconds: float, max_bytes: int, key: str = "") -> Answer:
    """Send JSON and return the whole answer. `key` goes into the header Authorization.

    Raises TimeoutError after `seconds`, and ConnectionError for a server that cannot be reached, breaks off, or sends
    more than max_bytes. A redirect is not followed: it is an answer of its own."""
    import httpx  # noqa: F401  (its import is no part of the budget)

    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    body = json.dumps(content).encode()
    with START:
        loop = loop_of_requests()
    request = asyncio.wait_for(exchange(url, body, headers, max_bytes), seconds)
    future = asyncio.run_coroutine_threadsafe(request, loop)
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


@functools.cache
def client(through_proxy: bool) -> Any:
    """A client, which keeps connections. All requests are on the thread of the loop."""
    import httpx

    many = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    return httpx.AsyncClient(timeout=None, limits=many, trust_env=through_proxy)


def is_local(url: str) -> bool:
    """Whether a URL is on the loopback device, which a proxy from the environment does not know."""
    host = urllib.parse.urlsplit(url).hostname or ""
    return host == "localhost" or host == "::1" or host.startswith("127.")


async def exchange(url: str, body: bytes, headers: dict[str, str], max_bytes: int) -> Answer:
    """See post."""
    import httpx

    received = bytearray()
    try:
        client_of_url = client(not is_local(url))
        async with client_of_url.stream("POST", url, content=body, headers=headers) as response:
            async for chunk in response.aiter_raw():
                received += chunk
                if len(received) > max_bytes:
                    raise ConnectionError(f"the reply has more than {max_bytes} bytes")
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from None
    return Answer(response.status_code, response.headers, bytes(received))
