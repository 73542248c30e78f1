"""A client for language models that give rewards: the judge (judges.py) and the solver (solver.py).

`ChatModel.ask` sends one message and returns the replies, or raises NoReply. A model that gives no usable reply leaves
the score missing; it never makes a 0.
"""

import asyncio
import functools
import itertools
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rewards import UserError, need
from scripts.parts import hidden

# Of a request. The waits between them are openai's: 0.5, 1, 2, ... 8 s, or what the server asks for.
LLM_TRIES = 6
LLM_DELAY_S = 0.5  # before what is no reply of the protocol is asked for again
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
        super().__init__(problem)
        self.status = status
        self.problem = problem


class Reply(NamedTuple):
    """One reply of a model. cut: it ended at its limit of tokens."""

    text: str
    cut: bool


class Replies(NamedTuple):
    """The replies to one request, their number of tokens, and the share of the message that was sent
    (ChatModel.ask)."""

    replies: list[Reply]
    tokens: int
    share: float


class ChatModel:
    """A model behind servers with OpenAI's chat API. Any number of threads may ask; max_concurrency requests, of n
    replies each, run at a time. timeout_s is the time of one request with all its tries, in seconds: a server that
    sends single bytes has no more. sampling: parameters of every request."""

    def __init__(self, model: str, max_concurrency: int, timeout_s: float, n: int = 1, **sampling: Any):
        self.model = model
        self.timeout_s = timeout_s
        self.n = n
        self.sampling = sampling
        self.slots = threading.BoundedSemaphore(max_concurrency)
        self.clients: list[Any] = []

    def connect(self, base_urls: Sequence[str], api_key: str) -> None:
        """Sends a test message to every server. Raises UserError if a server is out of reach, or refuses the key, the
        model or the sampling parameters."""
        has_blank = re.search("[^!-~]", api_key) is not None
        need(not has_blank, f"the key for {self.model} has a blank, or a letter that no header can have")
        clients = []
        for url in base_urls:
            try:
                clients.append(self.client(url, api_key))
                self.in_time(self.greet(clients[-1]))
            except (NoReply, ValueError) as error:
                raise UserError(f"model {self.model} at {hidden.in_url(url)} gives no reply: {error}") from None
        # Messages with the same beginning go to one server, whose prefix cache has it. New beginnings take turns.
        turns = itertools.cycle(clients)
        self.client_for = functools.lru_cache(maxsize=4096)(lambda beginning: next(turns))
        self.clients = clients

    def client(self, url: str, api_key: str) -> Any:
        """OpenAI's client for a server. It tries again after lost connections and the statuses 408, 409, 429 and 5xx.
        Raises ValueError for what is no URL."""
        import openai
        import openai.resources.chat  # else the first request would: its import is no part of the budget

        from scripts.parts import post

        http = post.client_for(url, MAX_REPLY_BYTES * self.n)
        return openai.AsyncOpenAI(
            base_url=url, api_key=api_key, max_retries=LLM_TRIES - 1, timeout=None, http_client=http
        )

    async def greet(self, client: Any) -> None:
        """Ask for one reply, with three tries at most. Raises NoReply."""
        await self.complete(client.with_options(max_retries=2), lambda share: "Say OK.", n=1)

    def ask(self, prompt: Callable[[float], str], beginning: str = "", **parameters: Any) -> Replies:
        """n replies to the message prompt(share), or raises NoReply.

        share is the first of 1, 1/2, 1/4, ... for which the server does not refuse the message as too long. Failures
        that may pass are tried again. `beginning` is the text that the message shares with others; it chooses the
        server."""
        if not self.clients:
            raise NoReply("infra_error", f"no server of {self.model} is connected")
        client = self.client_for(beginning)
        with self.slots:
            return self.in_time(self.complete(client, prompt, n=self.n, **parameters))

    def in_time(self, request: Any) -> Any:
        """The result of a request. Raises NoReply after timeout_s."""
        from scripts.parts import post

        try:
            return post.within(request, self.timeout_s)
        except TimeoutError:
            raise NoReply("timeout", f"{self.model}: no reply within {self.timeout_s:.0f} s") from None

    async def complete(self, client: Any, prompt: Callable[[float], str], n: int, **parameters: Any) -> Replies:
        """See ask."""
        import openai

        share = 1.0
        failures = 0
        while True:
            message = prompt(share)
            turn = {"role": "user", "content": message}
            try:
                completion = await client.chat.completions.create(
                    model=self.model, messages=[turn], n=n, **self.sampling, **parameters
                )
                return read_completion(completion, n, share)
            except openai.BadRequestError as error:  # the message may be too long
                if share <= LEAST_SHARE or prompt(share / 2) == message:
                    raise NoReply("infra_error", self.problem(error)) from None
                share /= 2
            except openai.OpenAIError as error:
                raise NoReply("infra_error", self.problem(error)) from None
            except (AttributeError, TypeError, ValueError, RecursionError) as error:  # not OpenAI's JSON
                failures += 1
                if failures > client.max_retries:
                    raise NoReply("infra_error", self.problem(error)) from None
                await asyncio.sleep(LLM_DELAY_S * failures)

    def problem(self, error: Exception) -> str:
        """What a person is told of a failed request."""
        cause = f" ({error.__cause__})" if error.__cause__ else ""
        return f"{self.model}: {type(error).__name__}: {error}{cause}"[:MAX_PROBLEM]


def read_completion(completion: Any, n: int, share: float) -> Replies:
    """The n replies of a server's answer, whose fields may have any type. Raises AttributeError, TypeError or
    ValueError if they are not there."""
    replies = []
    for choice in completion.choices:
        text = choice.message.content or ""
        if not isinstance(text, str):
            raise TypeError(f"the content of a reply is {type(text).__name__}")
        replies.append(Reply(text, choice.finish_reason == "length"))
    if len(replies) != n:
        raise ValueError(f"{len(replies)} replies in place of {n}")
    tokens = getattr(completion.usage, "completion_tokens", 0)
    return Replies(replies, tokens if isinstance(tokens, int) else 0, share)
