"""An agent as environment: the file of --env_file defines agent(base_url, row), and the policy is an OpenAI-compatible
server of chat completions at the base_url.

The agent runs in a thread of the rollout's own worker, beside a server on loopback. A request is answered with the
policy's next turn; the messages that the next request adds are the environment's answer to that turn. So no message of
the policy is tokenized again, and a rollout is token for token that of an Env which gives the same answers. What
cannot be so is refused with status 400: a request that changes or leaves out what was said before, two requests at a
time, n above 1, streams. A request's sampling options are ignored: the run's hold.

The address has a secret in it, because every user of the machine reaches loopback.
"""

import asyncio
import inspect
import json
import os
import queue
import re
import secrets
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rewards import Answer, Episode
from scripts.parts import user_files

CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)  # as Qwen's, SmolLM's and Hermes' templates


class Refused(Exception):
    """A request that cannot be a turn of the rollout."""


def give_env(module: Any) -> None:
    """Makes the file of an agent that of an environment. Its TOOLS, if it has some, go to the chat template."""
    tools = {tool["function"]["name"]: tool for tool in getattr(module, "TOOLS", [])}
    role = "tool" if tools else "user"
    module.about = lambda config: {"role": role, "schemas": tools}
    module.Env = type("Env", (Agent,), {"call": staticmethod(module.agent), "role": role})


def text_of(content: Any) -> str:
    """The text of a message's content: a text, None, or a list of parts. Raises Refused for other parts than texts."""
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise Refused("a message has a part that is no text")
        return "".join(part["text"] for part in content)
    return content or ""


def calls_of(message: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and arguments of a message's tool calls."""
    functions = [call["function"] for call in message.get("tool_calls") or []]
    return [(function["name"], function["arguments"]) for function in functions]


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    texts = [text_of(message.get("content")) for message in (one, other)]
    return one["role"] == other["role"] and texts[0] == texts[1] and calls_of(one) == calls_of(other)


def message_of(text: str) -> dict[str, Any]:
    """The policy's turn as a message: its calls in <tool_call> as `tool_calls`, if all of them can be read."""
    calls = []
    try:
        for i, found in enumerate(CALL.findall(text)):
            call = json.loads(found)
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
            calls.append({"id": f"call_{i}", "type": "function", "function": function})
    except (ValueError, KeyError, TypeError):
        calls = []
    if not calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": CALL.sub("", text).strip() or None, "tool_calls": calls}


class Agent:
    """A rollout's agent and its server. `said` is the conversation so far, as the agent has it."""

    call: Callable[..., Any]  # agent(base_url, row)
    role: str  # of messages that answer the policy
    server: ThreadingHTTPServer | None = None
    over = False  # the rollout has ended

    def __init__(self, config: dict[str, Any]) -> None:
        self.said: list[dict[str, Any]] = []
        self.asking = threading.Lock()  # held while a request waits
        self.events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()  # of the agent
        self.replies: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()  # None: the rollout is over

    def start(self, row: Episode) -> None:
        """Starts the server and the agent, whose first request has the messages of the row."""
        self.said = [dict(message) for message in row.messages]
        path = f"/{secrets.token_urlsafe()}/v1"
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, self, path))
        os.environ["NO_PROXY"] = "127.0.0.1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        base_url = f"http://127.0.0.1:{self.server.server_port}{path}"
        threading.Thread(target=self.run, args=(base_url, row), daemon=True).start()
        kind, _ = self.next_event()
        if kind == "ends":
            raise ConnectionError("the agent returned before its first request")

    def step(self, episode: Episode) -> Answer:
        """Replies with the policy's turn, and waits for the next request or for the agent's end. The first turn is made
        before the agent starts, because its first request can only be the row's messages."""
        if self.server is None:
            self.start(replace(episode, messages=episode.messages[:-1], text="", turn=0))
        message = message_of(episode.text)
        self.said.append(message)
        self.replies.put(message)
        kind, value = self.next_event()
        if kind == "ends":
            return Answer(reward=float(value or 0.0), done=True)
        return Answer(value)

    def close(self) -> None:
        """Ends the server; a request that waits is refused."""
        self.over = True
        self.replies.put(None)
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()

    def next_event(self) -> tuple[str, Any]:
        """("asks", the texts of new messages) or ("ends", the agent's reward). Raises ConnectionError for an agent that
        failed: its score is missing."""
        kind, value = self.events.get()
        if kind == "fails":
            raise ConnectionError(f"the agent failed: {value}")
        return kind, value

    def run(self, base_url: str, row: Episode) -> None:
        """Runs the agent, in a thread. What it raises is printed whole, unless the rollout ended under it."""
        try:
            reward = self.call(base_url, row)
            if inspect.iscoroutine(reward):
                reward = asyncio.run(reward)
            self.events.put(("ends", reward))
        except Exception as error:
            if not self.over:
                traceback.print_exc()
            self.events.put(("fails", user_files.told(error, inspect.getfile(self.call))))

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request, in a thread of the server. Raises Refused."""
        if request.get("stream") or request.get("n", 1) != 1:
            raise Refused("stream and n above 1 are not served")
        if not self.asking.acquire(blocking=False):
            raise Refused("another request waits: a rollout is one conversation")
        try:
            self.events.put(("asks", self.new_texts(request["messages"])))
            reply = self.replies.get()
        finally:
            self.asking.release()
        if reply is None:
            raise Refused("the rollout is over")
        reason = "tool_calls" if "tool_calls" in reply else "stop"
        choice = {"index": 0, "message": reply, "finish_reason": reason, "logprobs": None}
        made = {"id": "chatcmpl-policy", "object": "chat.completion", "created": 0, "model": request.get("model", "")}
        return made | {"choices": [choice]}

    def new_texts(self, messages: Sequence[dict[str, Any]]) -> list[str]:
        """The texts that a request adds to what was said. Raises Refused if it does not go on from there."""
        old = messages[: len(self.said)]
        goes_on = len(old) == len(self.said) and all(map(same, self.said, old))
        if not goes_on:
            said = json.dumps(self.said)
            raise Refused(f"messages must begin with all that was said, unchanged, which is {said:.2000}")
        new = messages[len(self.said) :]
        answers = self.said[-1]["role"] == "assistant"
        if answers != bool(new) or any(message["role"] != self.role for message in new):
            wanted = (
                f"at least one of role {self.role}, and no others" if answers else "none: its messages are the row's"
            )
            raise Refused(f"new messages of this request have to be: {wanted}")
        self.said = list(messages)
        return [text_of(message.get("content")) for message in new]


class Handler(BaseHTTPRequestHandler):
    def __init__(self, agent: Agent, path: str, *connection: Any) -> None:
        self.agent = agent
        self.base = path
        super().__init__(*connection)

    def do_POST(self) -> None:
        try:
            if self.path != f"{self.base}/chat/completions":
                raise Refused("there is /chat/completions alone")
            length = int(self.headers.get("Content-Length", 0))
            reply = self.agent.ask(json.loads(self.rfile.read(length)))
        except (Refused, ValueError, LookupError, TypeError, AttributeError) as error:  # or no such request at all
            self.send(400, {"error": {"message": str(error), "type": type(error).__name__}})
        else:
            self.send(200, reply)

    def send(self, status: int, reply: dict[str, Any]) -> None:
        content = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Nothing is logged: what the file prints is the user's alone."""
