"""Requests with one budget of time and of bytes, and the language models that give rewards (judges.py, solver.py).

The time limits of HTTP libraries hold for a single read: a server that sends a byte now and then never exceeds them.
"""

import asyncio
import functools
import itertools
import re
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple

import httpx2

from rewards import UserError, need

LLM_TRIES = 6  # of a request. openai waits 0.5, 1, 2, ... 8 s between them, or as long as the server asks for
LLM_DELAY_S = 0.5  # before what is no reply of the protocol is asked for again
MAX_REPLY_BYTES = 4 * 2**20  # of each of the n replies
MAX_PROBLEM = 1000  # characters of what a server says when it refuses

# --- A budget of time and of bytes ------------------------------------------------------------------------------------

LOOPBACK = ("all://localhost", "all://127.0.0.1", "all://[::1]")  # which a proxy does not know
LOOP = asyncio.new_event_loop()  # in a thread of its own, it can end a request at any moment
threading.Thread(target=LOOP.run_forever, daemon=True).start()


def within(request: Coroutine[Any, Any, Any], seconds: float) -> Any:
    """The result of a request, which is ended after `seconds`: TimeoutError."""
    future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(request, seconds), LOOP)
    try:
        return future.result()
    except BaseException:  # also a caller's own deadline, by a signal
        future.cancel()
        raise


@functools.cache
def http_client(max_bytes: int) -> httpx2.AsyncClient:
    """A client that follows no redirect. A response has at most max_bytes, and is not unpacked: a gigabyte of blanks is
    a megabyte when packed."""

    async def read_all(response: httpx2.Response) -> None:
        response.headers.pop("content-encoding", None)
        stream: Any = response.stream
        body = bytearray()
        async for chunk in stream:
            body += chunk
            if len(body) > max_bytes:
                raise httpx2.ReadError(f"the reply has more than {max_bytes} bytes")
        await stream.aclose()
        response.stream = httpx2.ByteStream(bytes(body))

    return httpx2.AsyncClient(
        timeout=None,
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=100),
        headers={"Accept-Encoding": "identity"},
        event_hooks={"response": [read_all]},
        mounts=dict.fromkeys(LOOPBACK),
    )


def post(url: str, content: dict[str, Any], seconds: float, max_bytes: int) -> httpx2.Response:
    """Send JSON and return the whole answer, of any status. Raises TimeoutError after `seconds`, and ConnectionError
    for a server that cannot be reached, breaks off, or sends more than max_bytes."""
    try:
        return within(http_client(max_bytes).post(url, json=content), seconds)
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from None


# --- Texts of a message -----------------------------------------------------------------------------------------------

# Tokens by which tokenizers and chat templates end a turn, end thinking, and the like.
SPECIAL_TOKEN = re.compile(
    r"<(?=[|\uff5c]|/?(?:s|bos|eos|pad|unk|mask|cls|sep|think|tool_call|tool_response|start_of_turn|end_of_turn|sop|eop"
    r"|eoa|eoh|endoftext|end_of_text|begin_of_text)>|</?SYS>>)|\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS"
    r"|TOOL_RESULTS|THINK|gMASK|MASK|CLS|SEP|PAD|UNK|BOS|EOS)\])"
)


def neutral(text: str) -> str:
    """`text` without special tokens, which a space splits, and with `?` for what UTF-8 cannot encode."""
    encodable = text.encode(errors="replace").decode()
    return SPECIAL_TOKEN.sub(r"\g<0> ", encodable)


def shortened(text: str, max_characters: int) -> str:
    """The text, or its two ends, of about max_characters together, and how many are left out between them."""
    if len(text) <= max_characters:
        return text
    half = max_characters // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n[... {left_out} characters left out ...]\n{text[len(text) - half :]}"


# --- Models -----------------------------------------------------------------------------------------------------------


class NoReply(Exception):
    """A model gave no usable reply. status: that of the missing score, "timeout" or "infra_error"."""

    def __init__(self, status: str, problem: str):
        super().__init__(problem)
        self.status = status


class Reply(NamedTuple):
    text: str
    cut: bool  # at its limit of tokens


class Replies(NamedTuple):
    """The replies to a request, and their number of tokens."""

    replies: list[Reply]
    tokens: int


class ChatModel:
    """A model behind servers with OpenAI's chat API. max_concurrency requests, of n replies each, run at a time, of
    whatever threads. timeout_s is the time of one with all its tries. sampling: parameters of every request."""

    def __init__(self, model: str, max_concurrency: int, timeout_s: float, n: int = 1, **sampling: Any):
        self.model = model
        self.timeout_s = timeout_s
        self.n = n
        self.sampling = sampling
        self.slots = threading.BoundedSemaphore(max_concurrency)
        self.clients: list[Any] = []

    def connect(self, base_urls: Sequence[str], api_key: str) -> None:
        """Sends a test message to every server. Raises UserError if one is out of reach or refuses it."""
        has_blank = re.search("[^!-~]", api_key) is not None
        need(not has_blank, f"the key for {self.model} has a blank, or a letter that no header can have")
        clients = []
        for url in base_urls:
            try:
                client = self.client(url, api_key)
                self.in_time(self.complete(client.with_options(max_retries=2), "Say OK.", n=1))
            except (NoReply, httpx2.InvalidURL) as error:
                raise UserError(
                    f"model {self.model} at {url.rpartition('@')[2].partition('?')[0]} gives no reply: {error}"
                ) from None
            clients.append(client)
        # Messages with the same beginning go to one server, whose prefix cache has it. New beginnings take turns.
        turns = itertools.cycle(clients)
        self.client_for = functools.lru_cache(maxsize=4096)(lambda beginning: next(turns))
        self.clients = clients

    def client(self, url: str, api_key: str) -> Any:
        """OpenAI's client for a server. It tries again after lost connections and the statuses 408, 409, 429, 5xx."""
        import openai
        import openai.resources.chat  # else the first request would: its import is no part of the budget

        retries = LLM_TRIES - 1
        http = http_client(MAX_REPLY_BYTES * self.n)
        return openai.AsyncOpenAI(base_url=url, api_key=api_key, max_retries=retries, timeout=None, http_client=http)

    def ask(self, message: str, beginning: str = "", **parameters: Any) -> Replies:
        """n replies to a message, or raises NoReply. A model that gives none never makes a 0. `beginning` is the text
        that the message shares with others; it chooses the server."""
        if not self.clients:
            raise NoReply("infra_error", f"no server of {self.model} is connected")
        client = self.client_for(beginning)
        with self.slots:
            return self.in_time(self.complete(client, message, n=self.n, **parameters))

    def in_time(self, request: Any) -> Any:
        try:
            return within(request, self.timeout_s)
        except TimeoutError:
            raise NoReply("timeout", f"{self.model}: no reply within {self.timeout_s:.0f} s") from None

    async def complete(self, client: Any, message: str, n: int, **parameters: Any) -> Replies:
        """See ask. What is not OpenAI's JSON is asked for again here, all else that may pass by the client."""
        import openai

        turn = {"role": "user", "content": message}
        create = client.chat.completions.create
        failures = 0
        while True:
            try:
                completion = await create(model=self.model, messages=[turn], n=n, **self.sampling, **parameters)
                return read_completion(completion, n)
            except (openai.OpenAIError, AttributeError, TypeError, ValueError, RecursionError) as error:
                failures += 1
                if isinstance(error, openai.OpenAIError) or failures > client.max_retries:
                    cause = f" ({error.__cause__})" if error.__cause__ else ""
                    kind = type(error).__name__
                    problem = f"{self.model}: {kind}: {error}{cause}"
                    raise NoReply("infra_error", problem[:MAX_PROBLEM]) from None
            await asyncio.sleep(LLM_DELAY_S * failures)


def read_completion(completion: Any, n: int) -> Replies:
    """The n replies of a server's answer. Raises AttributeError, TypeError or ValueError if they are not there."""
    replies = []
    for choice in completion.choices:
        text = choice.message.content or ""
        if not isinstance(text, str):
            raise TypeError(f"the content of a reply is {type(text).__name__}")
        replies.append(Reply(text, choice.finish_reason == "length"))
    if len(replies) != n:
        raise ValueError(f"{len(replies)} replies in place of {n}")
    tokens = getattr(completion.usage, "completion_tokens", 0)
    return Replies(replies, tokens if isinstance(tokens, int) else 0)
