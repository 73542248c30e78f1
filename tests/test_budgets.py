"""Servers that drip, flood, hang or answer nonsense: a request has one budget of time and one of bytes."""

import contextlib
import socketserver
import threading
import time
import zlib
from typing import Any

import pytest

from scripts.parts import chat
from tests.test_tools import environment, step

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@pytest.fixture
def serve():
    """Function behave -> a server on loopback, which does behave(connection) once it has read a request. Keeps
    requests."""
    servers = []

    def start(behave):
        class Answer(socketserver.BaseRequestHandler):
            def handle(self):
                data = b""
                while b"\r\n\r\n" not in data:
                    data += self.request.recv(65536)
                server.requests.append(data)
                with contextlib.suppress(OSError):  # the client has gone
                    behave(self.request)

        server: Any = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answer)
        server.daemon_threads = True
        server.block_on_close = False
        server.requests = []
        server.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def drip(first):
    """After `first`, a byte each twentieth of a second, for as long as anybody listens."""

    def behave(connection):
        connection.sendall(first)
        for _ in range(400):
            connection.sendall(b" ")
            time.sleep(0.05)

    return behave


DRIPS = {
    "body": HEAD + b"Content-Length: 100000\r\n\r\n",
    "chunks": HEAD + b"Transfer-Encoding: chunked\r\n\r\nFFFF\r\n",
    "headers": HEAD + b"X-Slow:",
    "status": b"HTTP/1.1 200 ",
}


@pytest.mark.parametrize("part", DRIPS)
def test_a_server_that_drips_has_no_more_time(serve, part):
    server = serve(drip(DRIPS[part]))
    with pytest.raises(TimeoutError):
        chat.post(server.url, {}, 0.5, 1000)


def test_a_flood_is_cut(serve):
    def behave(connection):
        connection.sendall(b"HTTP/1.1 500 X\r\nContent-Length: 655360000\r\n\r\n")
        for _ in range(10_000):
            connection.sendall(b" " * 2**16)

    with pytest.raises(ConnectionError, match="more than 100000 bytes"):
        chat.post(serve(behave).url, {}, 30, 100_000)


def test_what_was_packed_is_not_unpacked(serve):
    """A gigabyte of blanks is a megabyte when packed. The request asks for plain bytes."""
    packed = zlib.compress(b" " * 2**24)
    head = HEAD + b"Content-Encoding: deflate\r\nContent-Length: %d\r\n\r\n" % len(packed)
    server = serve(lambda connection: connection.sendall(head + packed))
    assert chat.post(server.url, {}, 30, 2**20).content == packed
    assert b"accept-encoding: identity" in server.requests[0].lower()


def reply(text):
    body = text.encode()
    return HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"choices": [{"message": {"content": 7}}]}',
        '{"choices": [{"message": {"content": "x"}}], "usage": {"completion_tokens": "many"}}',
        "null",
    ],
)
def test_a_reply_of_nonsense_is_missing(serve, monkeypatch, text):
    monkeypatch.setattr(chat, "LLM_TRIES", 2)
    monkeypatch.setattr(chat, "LLM_DELAY_S", 0.01)
    server = serve(lambda connection: connection.sendall(reply(text)))
    judge = chat.ChatModel("m", 4, 30.0)
    judge.clients = [judge.client(server.url, "key")]
    judge.client_for = lambda beginning: judge.clients[0]
    if "usage" in text:
        assert judge.ask("Why?").tokens == 0
        return
    with pytest.raises(chat.NoReply):
        judge.ask("Why?")
    assert len(server.requests) == 2


def test_a_proxy_does_not_get_what_is_for_loopback(serve, monkeypatch):
    proxy = serve(lambda connection: connection.sendall(reply("{}")))
    server = serve(lambda connection: connection.sendall(reply("{}")))
    monkeypatch.setenv("http_proxy", proxy.url)
    chat.http_client.cache_clear()
    assert chat.post(server.url, {}, 30, 1000).status_code == 200
    assert not proxy.requests
    assert chat.post("http://retriever.invalid/retrieve", {}, 30, 1000).status_code == 200
    assert len(proxy.requests) == 1
    chat.http_client.cache_clear()


def test_a_retriever_that_hangs_makes_the_sample_missing(serve):
    """Its tries took longer than the call's deadline, which was told to the policy as its own error."""
    server = serve(drip(DRIPS["chunks"]))
    env = environment("search", tool_configs=[{"url": server.url, "deadline": 0.6, "timeout": 0.3}])
    with pytest.raises(ConnectionError, match="no answer within"):
        step(env, "<search>Paris</search>")
    assert 1 <= len(server.requests) <= 3
