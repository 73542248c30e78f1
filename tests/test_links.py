"""How engines and learner 0 find each other, and what they take from each other: nothing that a stranger could use."""

import collections
import multiprocessing
import os
import pickle
import socket
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError

import pytest

import grpo_fast
import utils
from rewards import UserError
from scripts.parts import addresses
from tests import programs
from tests.gpu_contract.test_start import Store


@pytest.fixture
def two_nodes(monkeypatch):
    """Learner 0 on one of two nodes, both of which are this machine."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("GROUP_RANK", "0")
    return types.SimpleNamespace(host="127.0.0.1", port=1, store=Store())


def test_a_stranger_is_sent_away_and_the_engine_comes(two_nodes, capsys):
    """One that has another key, or says nothing for a while, once ended the run."""
    with ThreadPoolExecutor() as threads:
        learner = threads.submit(addresses.meet_engines, two_nodes, 1, 16)
        host, port, _ = two_nodes.store.get("address").decode().split()
        false_key = types.SimpleNamespace(store={"address": f"{host} {port} {'0' * 32}".encode()})
        with pytest.raises((AuthenticationError, EOFError, ConnectionError)):
            addresses.meet_learner(false_key, 0)
        socket.create_connection((host, int(port))).close()
        engine = addresses.meet_learner(two_nodes, 0)
        (link,) = learner.result()
        engine.send("here")
        assert link.recv() == "here"
    assert capsys.readouterr().out.count("a stranger asked to be an engine") == 2


def test_a_silent_stranger_is_not_waited_for(two_nodes, monkeypatch):
    monkeypatch.setattr(addresses, "HANDSHAKE_S", 1)
    with ThreadPoolExecutor() as threads:
        learner = threads.submit(addresses.meet_engines, two_nodes, 1, 16)
        host, port, _ = two_nodes.store.get("address").decode().split()
        with socket.create_connection((host, int(port))):
            addresses.meet_learner(two_nodes, 0)
            assert len(learner.result()) == 1


def test_a_stranger_that_drips_has_no_more_time(two_nodes, monkeypatch):
    """Each of its bytes came in time, so that engines waited for half an hour."""
    monkeypatch.setattr(addresses, "HANDSHAKE_S", 1)
    with ThreadPoolExecutor() as threads:
        learner = threads.submit(addresses.meet_engines, two_nodes, 1, 16)
        host, port, _ = two_nodes.store.get("address").decode().split()
        stranger = socket.create_connection((host, int(port)))
        engine = threads.submit(addresses.meet_learner, two_nodes, 0)
        sent = 0
        with pytest.raises(OSError):
            for byte in (200).to_bytes(4, "big") + b"x" * 100:
                stranger.sendall(bytes([byte]))
                sent += 1
                time.sleep(0.2)
        assert sent < 50 and engine.result() and len(learner.result()) == 1


@pytest.mark.parametrize("index", [1, -1, "0", None, [0], 10**30])
def test_an_engine_that_does_not_exist_is_sent_away(two_nodes, index, capsys):
    """The list of engines had a hole, and the run ended with a KeyError."""
    with ThreadPoolExecutor() as threads:
        learner = threads.submit(addresses.meet_engines, two_nodes, 1, 16)
        stranger = addresses.meet_learner(two_nodes, index)
        with pytest.raises((EOFError, OSError)):
            stranger.recv()
        addresses.meet_learner(two_nodes, 0)
        assert len(learner.result()) == 1
    assert "there is no engine" in capsys.readouterr().out


def test_the_place_of_an_engine_is_taken_once(two_nodes):
    with ThreadPoolExecutor() as threads:
        learner = threads.submit(addresses.meet_engines, two_nodes, 2, 16)
        first = addresses.meet_learner(two_nodes, 0)
        second = addresses.meet_learner(two_nodes, 0)
        with pytest.raises((EOFError, OSError)):
            second.recv()
        addresses.meet_learner(two_nodes, 1)
        learner.result()[0].send("yours")
        assert first.recv() == "yours"


def test_a_secret_that_can_be_guessed_is_refused(two_nodes, monkeypatch):
    """Whoever sees one handshake can try all short ones."""
    monkeypatch.setenv("GRPO_SECRET", "letmein")
    with pytest.raises(UserError, match="GRPO_SECRET has 7 characters"):
        addresses.meet_engines(two_nodes, 1, 16)


def test_the_key_of_several_nodes_is_in_no_store(two_nodes, monkeypatch, capsys):
    """What torch's store holds everybody on the network can read."""
    monkeypatch.setenv("GRPO_SECRET", "a long secret of the test")
    with ThreadPoolExecutor() as threads:
        learner = threads.submit(addresses.meet_engines, two_nodes, 1, 16)
        host, port, key = two_nodes.store.get("address").decode().split()
        assert key == "-"
        monkeypatch.setenv("GRPO_SECRET", "a guess that is as long")
        guess = threads.submit(addresses.meet_learner, two_nodes, 0)
        assert guess.exception() is not None
        monkeypatch.setenv("GRPO_SECRET", "a long secret of the test")
        addresses.meet_learner(two_nodes, 0)
        assert len(learner.result()) == 1
    assert "GRPO_SECRET" not in capsys.readouterr().out


def test_several_nodes_without_a_secret_are_warned(two_nodes, monkeypatch, capsys):
    monkeypatch.delenv("GRPO_SECRET", raising=False)
    addresses.meet_engines(two_nodes, 0, 16)
    assert "export the same random GRPO_SECRET on all nodes" in capsys.readouterr().out


CONNECT = """
import os, sys, types
from scripts.parts import addresses
os.setuid(60001)
store = types.SimpleNamespace(get=lambda _: sys.argv[1].encode())
addresses.meet_learner(types.SimpleNamespace(store=store), 0).connection.recv_bytes()
"""


@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="only root can be another user on Linux")
def test_another_user_of_the_machine_is_no_engine(monkeypatch, capsys, tmp_path):
    """Through loopback everybody on the machine reaches a port, and with torchrun the key was in an open store."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    meeting = types.SimpleNamespace(store=Store())
    with ThreadPoolExecutor() as threads:
        learner = threads.submit(addresses.meet_engines, meeting, 1, 2)
        place = meeting.store.get("address").decode()
        assert place.startswith("unix ")
        stranger = programs.Program(["-c", CONNECT, place], tmp_path / "out", address=programs.serve())
        assert stranger.wait(60) != 0
        addresses.meet_learner(meeting, 0)
        assert len(learner.result()) == 1
    assert "it is a process of user 60001" in capsys.readouterr().out


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
        (pickle.dumps((0, Harmful())), "asks for builtins.exec"),
        (pickle.dumps((0, collections.Counter())), "asks for collections.Counter"),
        (pickle.dumps((0, utils.World)), "asks for utils.World"),
        (b"\x80\x04cutils\nos.system\n.", "asks for utils.os.system"),
        (b"garbage", "cannot be read"),
        (pickle.dumps(5), "cannot be read"),
        (pickle.dumps((1, "late")), "message 1 came for message 0"),
        (pickle.dumps((-1, "early")), "message -1 came for message 0"),
        (pickle.dumps((None, "unnumbered")), "message None came"),
        (pickle.dumps((0, "two", "more")), "cannot be read"),
        (b"\x80\x04\x82\x01.", "cannot be read"),  # a class by its number in copyreg
        (b"\x80\x04Pid\n.", "cannot be read"),  # an object that somebody else keeps
        (b"(" * 10_000, "cannot be read"),
        (b"\x80\x04\x8d" + b"\xff" * 8, "cannot be read"),  # a text of 2^64 bytes
        (b"", "cannot be read"),
    ],
)
def test_what_no_engine_says_ends_the_link(link, data, problem):
    raw, reader = link
    raw.send_bytes(data)
    with pytest.raises(OSError, match=problem):
        reader.recv()


def test_a_message_that_is_too_long_is_not_read(link, monkeypatch):
    raw, reader = link
    monkeypatch.setattr(addresses, "MAX_BYTES", 100)
    raw.send_bytes(b"x" * 101)
    with pytest.raises(OSError, match="bad message length"):
        reader.recv()


def test_a_message_that_comes_twice_ends_the_link(link):
    raw, reader = link
    for _ in range(2):
        raw.send_bytes(pickle.dumps((0, "ready")))
    assert reader.recv() == "ready"
    with pytest.raises(OSError, match="message 0 came for message 1"):
        reader.recv()
