"""How learner 0 and the engines of grpo_fast.py reach each other, over a Unix socket, IPv4 or IPv6.

On one node the kernel says that the other side is a process of the same user. On several nodes both sides must know a
key: that of the variable GRPO_SECRET, which is on no network, or else one in the store of the run, which everybody who
reaches the nodes' network can read. What is received is bounded, and unpickled into a few plain classes only.
"""

import contextlib
import io
import os
import pickle
import socket
import struct
import sys
import threading
import uuid
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from rewards import UserError

MAX_BYTES = 2**30  # of a message
HANDSHAKE_S = 10  # for a stranger to show that it is an engine
CLASSES = ("Request", "Generation", "Clock")  # of utils and grpo_fast, which is __main__ as a script
MODULES = ("utils", "grpo_fast", "__main__")


class MessageUnpickler(pickle.Unpickler):
    """Makes the classes of the messages, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if module not in MODULES or name not in CLASSES:
            raise pickle.UnpicklingError(f"a message asks for {module}.{name}")
        return super().find_class(module, name)


class Link:
    """One side of a connection. One thread may send while another one receives.

    After a message that is too long or of other classes nothing that comes can be trusted: recv raises OSError, and the
    run ends."""

    def __init__(self, connection: Connection):
        self.connection = connection
        self.poll = connection.poll

    def send(self, content: Any) -> None:
        self.connection.send_bytes(pickle.dumps(content, pickle.HIGHEST_PROTOCOL))

    def recv(self) -> Any:
        """The next content. Raises EOFError if the other side is gone."""
        data = self.connection.recv_bytes(MAX_BYTES)
        try:
            return MessageUnpickler(io.BytesIO(data)).load()
        except Exception as error:  # of whatever class: pickles raise all
            raise OSError(f"a message cannot be read: {error}") from None


def meet_engines(meeting: Any, engines: int, ranks: int) -> list[Link]:
    """Learner 0's link to the first rank of each engine. Waits until all engines have loaded. Where all `ranks` of the
    run are on this node, only this user's processes can connect. Strangers are sent away."""
    one_node = ranks == int(os.environ["LOCAL_WORLD_SIZE"])
    key = own_secret() or uuid.uuid4().hex
    links: dict[int, Link] = {}
    with listen(one_node) as server:
        meeting.store.set("address", address(server, meeting, key))
        while len(links) < engines:
            accepted, _ = server.accept()
            too_late = threading.Timer(HANDSHAKE_S, accepted.shutdown, (socket.SHUT_RDWR,))
            with accepted:
                too_late.start()
                try:
                    link = shake_hands(accepted.dup(), key, leads=True)
                    index = link.recv()
                    if index not in range(engines) or index in links:
                        raise ConnectionError(f"there is no engine {index!r:.80} to come")
                except (OSError, EOFError, AuthenticationError) as error:
                    print(f"WARNING: a stranger asked to be an engine: {error!r}", flush=True)
                    with contextlib.suppress(OSError):  # it may be gone
                        accepted.shutdown(socket.SHUT_RDWR)
                    continue
                finally:
                    too_late.cancel()
            links[index] = link
    return [links[index] for index in range(engines)]


def listen(one_node: bool) -> socket.socket:
    """A listening socket, with a name or a port that the system chooses."""
    if one_node and sys.platform == "linux":
        server = socket.socket(socket.AF_UNIX)
        server.bind("")  # an abstract name: no file
        server.listen(128)
        return server
    if one_node:
        return socket.create_server(("127.0.0.1", 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def address(server: socket.socket, meeting: Any, key: str) -> str:
    """What the engines read in the store: `unix NAME -`, or `HOST PORT KEY`, in which KEY is - if GRPO_SECRET is."""
    name = server.getsockname()
    if server.family == socket.AF_UNIX:
        return f"unix {name.hex()} -"
    host = name[0] if name[0] == "127.0.0.1" else own_address(meeting)
    if own_secret():
        key = "-"
    elif host != name[0]:
        print(
            "WARNING: whoever reaches the nodes' network can join this run: export the same random GRPO_SECRET on all "
            "nodes (scripts/train/README.md, Who may reach a run)",
            flush=True,
        )
    return f"{host} {name[1]} {key}"


def shake_hands(reached: socket.socket, secret: str, leads: bool) -> Link:
    """The link over a new connection, once the other side has shown who it is. Raises OSError, EOFError or
    AuthenticationError."""
    if reached.family == socket.AF_UNIX:
        credentials = reached.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, user, _ = struct.unpack("3i", credentials)
        if user != os.getuid():
            raise AuthenticationError(f"it is a process of user {user}")
        return Link(Connection(reached.detach()))

    connection = Connection(reached.detach())
    first, second = (deliver_challenge, answer_challenge) if leads else (answer_challenge, deliver_challenge)
    first(connection, secret.encode())
    second(connection, secret.encode())
    return Link(connection)


def own_secret() -> str:
    """GRPO_SECRET, the same random text on all nodes; "" if it is not set."""
    return os.environ.get("GRPO_SECRET", "")


def meet_learner(meeting: Any, engine: int) -> Link:
    """The link of an engine's first rank to learner 0. Waits until that listens."""
    host, port, key = meeting.store.get("address").decode().split()
    if host == "unix":
        reached = socket.socket(socket.AF_UNIX)
        reached.connect(bytes.fromhex(port))
    else:
        reached = socket.create_connection((host, int(port)))
    link = shake_hands(reached, own_secret() or key, leads=False)
    link.send(engine)
    return link


def own_address(meeting: Any) -> str:
    """The address of this node, as the node that hosts the meeting reaches it."""
    if os.environ["GROUP_RANK"] == "0":
        return meeting.host
    with socket.create_connection((meeting.host, meeting.port)) as connection:
        return connection.getsockname()[0]


def check_name_of_node() -> None:
    """On several nodes: refuse a name of this node that means 127.0.1.1, as Debian has it. Gloo and NCCL take the
    interface of the name's address, which other nodes cannot reach. Where the first node's name is such an address
    too, all nodes of the run are on this machine."""
    own = address_of(socket.gethostname())
    first = address_of(os.environ["MASTER_ADDR"])
    if "GLOO_SOCKET_IFNAME" in os.environ or not is_loopback(own) or is_loopback(first):
        return
    interfaces = " or ".join(name for _, name in socket.if_nameindex() if name != "lo")
    raise UserError(
        f"this node's name, {socket.gethostname()}, means {own}, where no other node can reach it: export "
        f"GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME with the interface of the nodes' network ({interfaces})"
    )


def address_of(name: str) -> str:
    """The first address of a name, "" if it has none."""
    try:
        return str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError:
        return ""


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
