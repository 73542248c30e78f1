"""Where the ranks of grpo_fast.py meet."""

import os
import socket
import sys
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist


class Meeting:
    """The store in which all ranks meet. Where grpo_fast.py started the ranks, it is a file of this user. With torchrun
    rank 0 hosts it, on a port that the system chooses, and on one node on the loopback device only. Its address is kept
    in the store of torchrun's agents, which outlives restarts of the ranks."""

    def __init__(self, timeout: timedelta):
        self.timeout = timeout
        self.file = os.environ.get("GRPO_MEETING", "")
        if self.file:
            self.store = self.connect()
            self.restarted = False
            return
        self.host = os.environ["MASTER_ADDR"]
        self.one_node = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
        agents = dist.TCPStore(self.host, int(os.environ["MASTER_PORT"]), is_master=False, timeout=self.timeout)
        if self.one_node:
            self.host = "127.0.0.1"
            if sys.platform == "linux":
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if os.environ["RANK"] == "0":
            self._open(agents)
        self.store = self._find(agents)
        self.store.set_timeout(self.timeout)
        self.restarted = int(self.store.get("starts")) > 1

    def _open(self, agents: dist.TCPStore) -> None:
        """Host the store, and write its address into that of the agents."""
        key = uuid.uuid4().hex
        # torch's own socket listens on all interfaces
        self.listener = socket.create_server(("127.0.0.1", 0)) if self.one_node else None
        descriptor = self.listener.fileno() if self.listener else None
        port = self.listener.getsockname()[1] if self.listener else 0
        self.server = dist.TCPStore(
            self.host, port, is_master=True, wait_for_workers=False, timeout=self.timeout, master_listen_fd=descriptor
        )
        self.server.set("key", key)
        self.server.set("starts", str(agents.add("grpo/starts", 1)))
        agents.set("grpo/meeting", f"{self.server.port} {key}")

    def _find(self, agents: dist.TCPStore) -> dist.TCPStore:
        """Connect to the store. The address may still be that of a rank 0 before a restart: then look again."""
        while True:
            port, key = agents.get("grpo/meeting").decode().split()
            self.port = int(port)
            try:
                store = self.connect(timedelta(seconds=5))
                if store.get("key").decode() == key:
                    return store
            except dist.DistError:
                time.sleep(0.5)

    def connect(self, timeout: timedelta | None = None) -> Any:
        """Another connection, for a thread: a client that waits blocks all who use it."""
        timeout = timeout or self.timeout
        if not self.file:
            return dist.TCPStore(self.host, self.port, is_master=False, timeout=timeout)
        store = dist.FileStore(self.file)
        store.set_timeout(timeout)
        return store
