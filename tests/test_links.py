"""How engines and learner 0 find each other, and what they take from each other: nothing that a stranger could use."""

import multiprocessing
import os
import pickle
import socket
import sys
import threading
import time
import types
from concurrent.futures import Future
from multiprocessing import AuthenticationError

import pytest

import grpo_fast
import utils
from scripts.parts import addresses
from tests import programs


class Store(dict):
    """The store of the ranks, in which a key that nobody has set yet is waited for."""

    def __init__(self):
        super().__init__()
        self.is_set = threading.Event()

    def set(self, key, value):
        self[key] = value.encode()
        self.is_set.set()

    def get(self, key):
        assert self.is_set.wait(20)
        return self[key]


@pytest.fixture
def two_nodes(monkeypatch):
    """Learner 0 on one of two nodes, both of which are this machine."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("GROUP_RANK", "0")
    return types.SimpleNamespace(host="127.0.0.1", port=1, store=Store())


def start(work, *arguments):
    """The future of a call in a thread that nobody has to wait for."""
    future = Future()

    def run():
        try:
            future.set_result(work(*arguments))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def address_of(meeting):
    host, port, key = meeting.store.get("address").decode().split()
    return (host, int(port)), key


@pytest.mark.parametrize("host, ranks", [("127.0.0.1", 2), ("127.0.0.1", 16), ("::1", 16)])
def test_engines_reach_learner_0_over_either_ip(two_nodes, host, ranks):
    """On a cluster that has IPv6 alone, both ends once raised: multiprocessing takes every address for IPv4."""
    if ":" in host and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    two_nodes.host = host
    engines = {index: start(addresses.meet_learner, two_nodes, index) for index in (1, 0)}
    links = addresses.meet_engines(two_nodes, 2, ranks)
    for index, engine in engines.items():
        engine.result(60).send(f"engine {index}")
        assert links[index].recv() == f"engine {index}"


def test_strangers_are_sent_away_and_the_engine_comes(two_nodes, monkeypatch):
    """With another key, gone again at once, or with a byte now and then, each of which comes in time."""
    monkeypatch.setattr(addresses, "HANDSHAKE_S", 0.5)
    learner = start(addresses.meet_engines, two_nodes, 1, 16)
    where, _ = address_of(two_nodes)
    false_key = types.SimpleNamespace(store={"address": f"{where[0]} {where[1]} {'0' * 32}".encode()})
    with pytest.raises((AuthenticationError, EOFError, ConnectionError)):
        addresses.meet_learner(false_key, 0)
    socket.create_connection(where).close()
    stranger = socket.create_connection(where)
    engine = start(addresses.meet_learner, two_nodes, 0)
    sent = 0
    with pytest.raises(OSError):
        for byte in (200).to_bytes(4, "big") + b"x" * 100:
            stranger.sendall(bytes([byte]))
            sent += 1
            time.sleep(0.1)
    engine.result(60).send("here")
    assert sent < 50 and learner.result(60)[0].recv() == "here"


def assert_sent_away(link):
    assert link.poll(20), "it waits"
    with pytest.raises((EOFError, OSError)):
        link.recv()


@pytest.mark.parametrize("index", [1, "0", [0]])
def test_an_engine_that_does_not_exist_or_is_there_already_is_sent_away(two_nodes, index):
    """The list of engines had a hole, and the run ended with a KeyError."""
    learner = start(addresses.meet_engines, two_nodes, 1, 16)
    assert_sent_away(addresses.meet_learner(two_nodes, index))
    addresses.meet_learner(two_nodes, 0)
    assert len(learner.result(60)) == 1


def test_the_key_of_several_nodes_is_in_no_store(two_nodes, monkeypatch, capsys):
    """What torch's store holds everybody on the network can read."""
    monkeypatch.delenv("GRPO_SECRET", raising=False)
    addresses.meet_engines(two_nodes, 0, 16)
    assert "GRPO_SECRET" in capsys.readouterr().out and address_of(two_nodes)[1] != "-"
    two_nodes.store = Store()
    monkeypatch.setenv("GRPO_SECRET", "a long secret of the test")
    learner = start(addresses.meet_engines, two_nodes, 1, 16)
    assert address_of(two_nodes)[1] == "-"
    monkeypatch.setenv("GRPO_SECRET", "a guess that is as long")
    assert start(addresses.meet_learner, two_nodes, 0).exception() is not None
    monkeypatch.setenv("GRPO_SECRET", "a long secret of the test")
    addresses.meet_learner(two_nodes, 0)
    assert len(learner.result(60)) == 1
    assert "GRPO_SECRET" not in capsys.readouterr().out


CONNECT = """
import os, sys, types
from scripts.parts import addresses
os.setuid(60001)
store = types.SimpleNamespace(get=lambda _: sys.argv[1].encode())
addresses.meet_learner(types.SimpleNamespace(store=store), 0).connection.recv_bytes()
"""


@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="only root can be another user on Linux")
def test_another_user_of_the_machine_is_no_engine(two_nodes, capsys, tmp_path):
    """Through loopback everybody on the machine reaches a port, and with torchrun the key was in an open store."""
    learner = start(addresses.meet_engines, two_nodes, 1, 2)
    place = two_nodes.store.get("address").decode()
    stranger = programs.Program(["-c", CONNECT, place], tmp_path / "out", address=programs.serve())
    assert stranger.wait(60) != 0
    addresses.meet_learner(two_nodes, 0)
    assert len(learner.result(60)) == 1
    assert "user 60001" in capsys.readouterr().out


@pytest.fixture
def link():
    """(what writes raw bytes, the link that reads them)."""
    ours, theirs = multiprocessing.Pipe()
    return theirs, addresses.Link(ours)


def test_messages_are_those_of_engines(link):
    raw, reader = link
    writer = addresses.Link(raw)
    clock, request = grpo_fast.Clock(busy=1.0), utils.Request((1, 2), 3, 1.0, 4)
    generation = utils.Generation([1, 2], [-0.5, -1.0], "stop", [0, 0])
    for content in (("generate", [("0/0", request)]), ("weights", 3, [[("w", (2, 2))]]), ("done", [generation], clock)):
        writer.send(content)
        received = reader.recv()
        assert received[0] == content[0]
    assert received[1][0].token_ids.tolist() == [1, 2] and received[2] == clock


class Harmful:
    def __reduce__(self):
        return exec, ("raise SystemExit('run')",)


@pytest.mark.parametrize(
    "data, problem",
    [
        (pickle.dumps(Harmful()), "asks for builtins.exec"),
        (pickle.dumps(utils.World), "asks for utils.World"),
        (b"\x80\x04cutils\nos.system\n.", "asks for utils.os.system"),
        (b"\x80\x04\x82\x01.", "cannot be read"),  # a class by its number in copyreg
        (b"\x80\x04Pid\n.", "cannot be read"),  # an object that somebody else keeps
        (b"(" * 10_000, "cannot be read"),
        (b"\x80\x04\x8d" + b"\xff" * 8, "cannot be read"),  # a text of 2^64 bytes
        (b"x" * 30_000, "bad message length"),
    ],
)
def test_what_no_engine_says_ends_the_link(link, monkeypatch, data, problem):
    monkeypatch.setattr(addresses, "MAX_BYTES", 20_000)
    raw, reader = link
    raw.send_bytes(data)
    with pytest.raises(OSError, match=problem):
        reader.recv()
