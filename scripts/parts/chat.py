"""A client for language models that give rewards: the judge (judges.py) and the solver (solver.py).

`ChatModel.ask` sends one message and returns the replies, or raises NoReply. A model that gives no usable reply leaves
the score missing; it never makes a 0.
"""

import functools
import itertools
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rewards import UserError
from scripts.parts import hidden, post

LLM_TRIES = 6  # of a request
LLM_DELAY_S = 0.5  # before the second try; it doubles with every further try, up to LLM_MAX_DELAY_S
LLM_MAX_DELAY_S = 8.0
MAX_REPLY_BYTES = 4 * 2**20  # of each of the n replies
MAX_PROBLEM = 1000  # characters of what a server says when it refuses
LEAST_SHARE = 1e-3  # a message that is refused as too long is shortened down to this share

# Tokens by which tokenizers and chat templates end a turn, end thinking, and the like.
SPECIAL_TOKEN = re.compile(
    r"<(?=[|\uff5c]|/?(?:s|bos|eos|pad|unk|mask|cls|sep|think|tool_call|tool_response|start_of_turn|end_of_turn|sop|eop"
    r"|eoa|eoh|endoftext|end_of_text|begin_of_text)>|</?SYS>>)|\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS"
    r"|TOOL_RESULTS|THINK|gMASK|MASK|CLS|SEP|PAD|UNK|BOS|EOS)\])"
)


def neutral(text: str) -> str:
    """`text` as plain text of a chat message: a space splits special tokens, and `?` replaces characters that UTF-8
    cannot encode."""
    encodable = text.encode(errors="replace").decode()
    return SPECIAL_TOKEN.sub(r"\g<0> ", encodable)


def shortened(text: str, max_characters: int) -> str:
    """The text, or about max_characters of it: its two ends, with a mark between them that counts the characters left
    out."""
    if len(text) <= max_characters:
        return text
    half = max_characters // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n[... {left_out} characters left out ...]\n{text[len(text) - half :]}"


class NoReply(Exception):
    """A model gave no usable reply. status: that of the missing score, "timeout" or "infra_error"."""

    def __init__(self, status: str, problem: str):
        super().__init__(status, problem)
        self.status = status
        self.problem = problem


class Retry(Exception):
    """A try of a request failed in a way that may pass. least_delay_s: the wait that the server asks for."""

    def __init__(self, problem: str, least_delay_s: float = 0.0):
        super().__init__(problem)
        self.least_delay_s = least_delay_s


class BadRequest(Exception):
    """The server refused a message with status 400, which may mean that the message is too long."""


class Reply(NamedTuple):
    """One reply of a model. cut: it ended at its limit of tokens."""

    text: str
    cut: bool


class Client(NamedTuple):
    """A server, and the key that it asks for."""

    url: str
    key: str


class Replies(NamedTuple):
    """The replies to one request, their number of tokens, and the share of the message that was sent
    (ChatModel.ask)."""

    replies: list[Reply]
    tokens: int
    share: float


class ChatModel:
    """A model behind servers with OpenAI's chat API. Any number of threads may ask; max_concurrency requests run at a
    time. timeout_s is the time of one request with all its tries, in seconds: a server that sends
    single bytes has no more. sampling: parameters of every request."""

    def __init__(self, model: str, max_concurrency: int, timeout_s: float, **sampling: Any):
        self.model = model
        self.timeout_s = timeout_s
        self.sampling = sampling
        self.slots = threading.BoundedSemaphore(max_concurrency)
        self.clients: list[Client] = []

    def connect(self, base_urls: Sequence[str], api_key: str) -> None:
        """Sends a test message to every server. Raises UserError if a server is out of reach, or refuses the key, the
        model or the sampling parameters."""
        clients = [Client(url.rstrip("/"), api_key) for url in base_urls]
        for client in clients:
            self.greet(client)
        # Messages with the same beginning go to one server, whose prefix cache has it. New beginnings take turns.
        turns = itertools.cycle(clients)
        self.client_for = functools.lru_cache(maxsize=4096)(lambda beginning: next(turns))
        self.clients = clients

    def greet(self, client: Client) -> None:
        """Sends a test message, three times at most. Raises UserError."""
        deadline = time.monotonic() + self.timeout_s
        for last_try in (False, False, True):
            try:
                self.attempt(client, "Say OK.", deadline, 1, {})
                return
            except (BadRequest, Retry, NoReply) as error:
                if last_try or not isinstance(error, Retry):
                    raise UserError(
                        f"model {self.model} at {hidden.in_url(client.url)} gives no reply: {error}"
                    ) from None
            time.sleep(LLM_DELAY_S)

    def ask(self, prompt: Callable[[float], str], beginning: str = "", n: int = 1, **parameters: Any) -> Replies:
        """n replies to the message prompt(share), or raises NoReply.

        share is the first of 1, 1/2, 1/4, ... for which the server does not refuse the message as too long. Failures
        that may pass are tried again: lost connections, overload, errors of the server, replies in the wrong form.
        `beginning` is the text that the message shares with others; it chooses the server."""
        if not self.clients:
            raise NoReply("infra_error", f"no server of {self.model} is connected")
        client = self.client_for(beginning)
        share = 1.0
        failures = 0
        with self.slots:
            deadline = time.monotonic() + self.timeout_s
            while True:
                message = prompt(share)
                try:
                    replies, tokens = self.attempt(client, message, deadline, n, parameters)
                    return Replies(replies, tokens, share)
                except BadRequest as error:
                    if share <= LEAST_SHARE or prompt(share / 2) == message:
                        raise NoReply("infra_error", f"{self.model}: {error}") from error
                    share /= 2
                except Retry as error:
                    delay = min(LLM_DELAY_S * 2**failures, LLM_MAX_DELAY_S) * random.uniform(0.75, 1.0)
                    delay = max(delay, error.least_delay_s)
                    failures += 1
                    if failures == LLM_TRIES or time.monotonic() + delay >= deadline:
                        raise NoReply("infra_error", f"{self.model}: {error}") from error
                    time.sleep(delay)

    def attempt(
        self, client: Client, message: str, deadline: float, n: int, parameters: dict[str, Any]
    ) -> tuple[list[Reply], int]:
        """n replies and their number of tokens from one try. Raises BadRequest, Retry or NoReply."""
        request = {"model": self.model, "messages": [{"role": "user", "content": message}], "n": n}
        request |= self.sampling | parameters
        seconds = max(deadline - time.monotonic(), 0.1)
        try:
            answer = post.post(f"{client.url}/chat/completions", request, seconds, MAX_REPLY_BYTES * n, client.key)
        except TimeoutError:
            raise NoReply("timeout", f"{self.model}: no reply within {self.timeout_s:.0f} s") from None
        except ConnectionError as error:  # out of reach, or cut off
            raise Retry(str(error)) from None
        if answer.status != 200:
            raise self.refusal(answer)
        try:
            replies, tokens = read_completion(answer.json())
        except (AttributeError, KeyError, TypeError, ValueError) as error:  # not OpenAI's JSON
            raise Retry(f"{type(error).__name__}: {error}") from error
        if len(replies) != n:
            raise Retry(f"{len(replies)} replies in place of {n}")
        return replies, tokens

    def refusal(self, answer: post.Answer) -> Exception:
        """The exception for an answer with another status than 200: BadRequest, Retry or NoReply."""
        text = answer.body[:MAX_PROBLEM].decode(errors="replace")
        problem = f"status {answer.status}: {text}"
        if answer.status == 400:
            return BadRequest(problem)
        if answer.status not in (408, 409, 429) and answer.status < 500:
            return NoReply("infra_error", f"{self.model}: {problem}")
        try:
            least_delay_s = float(answer.headers.get("retry-after", 0))
        except ValueError:  # it may be a date
            least_delay_s = 0.0
        return Retry(problem, least_delay_s)


def read_completion(completion: dict[str, Any]) -> tuple[list[Reply], int]:
    """The replies of a server's JSON and their number of tokens, 0 if it does not say. Raises what indexing raises."""
    replies = []
    for choice in completion["choices"]:
        text = choice["message"].get("content") or ""
        if not isinstance(text, str):
            raise TypeError(f"the content of a reply is {type(text).__name__}")
        replies.append(Reply(text, choice.get("finish_reason") == "length"))
    usage = completion.get("usage") or {}
    tokens = usage.get("completion_tokens")
    return replies, tokens if isinstance(tokens, int) else 0
