"""How learner 0 and the engines of grpo_fast.py reach each other, over IPv4 or IPv6."""

import os
import socket
import uuid
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from rewards import UserError


def meet_engines(meeting: Any, engines: int, ranks: int) -> list[Connection]:
    """Learner 0's connection to the first rank of each engine. Waits until all engines have loaded. Where all `ranks`
    of the run are on this node, only this node can connect."""
    key = uuid.uuid4().hex
    one_node = ranks == int(os.environ["LOCAL_WORLD_SIZE"])
    host = "127.0.0.1" if one_node else own_address(meeting)
    connections: dict[int, Connection] = {}
    with listen(one_node) as server:
        meeting.store.set("address", f"{host} {server.getsockname()[1]} {key}")
        while len(connections) < engines:
            accepted, _ = server.accept()
            connection = Connection(accepted.detach())
            deliver_challenge(connection, key.encode())
            answer_challenge(connection, key.encode())
            connections[connection.recv()] = connection
    return [connections[index] for index in range(engines)]


def listen(one_node: bool) -> socket.socket:
    """A listening socket, on a port that the system chooses."""
    if one_node:
        return socket.create_server(("127.0.0.1", 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def meet_learner(meeting: Any, engine: int) -> Connection:
    """The connection of an engine's first rank to learner 0. Waits until that listens."""
    host, port, key = meeting.store.get("address").decode().split()
    reached = socket.create_connection((host, int(port)))
    connection = Connection(reached.detach())
    answer_challenge(connection, key.encode())
    deliver_challenge(connection, key.encode())
    connection.send(engine)
    return connection


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
