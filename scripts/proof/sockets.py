"""The sockets on which a run listens: which process, at which address, and who can reach it.

    python scripts/proof/sockets.py PID

PID is the process that started the run: of `python grpo_fast.py`, `torchrun` or `python grpo.py`. It and all processes
below it are looked at, once, so run this when training has begun. On several nodes run it on each. Needs Linux (/proc).
"""

import argparse
import ipaddress
import sys
from pathlib import Path
from typing import NamedTuple

LISTENS = "0A"  # the state of a TCP socket
ACCEPTS = 1 << 16  # the flag of a Unix socket


class Socket(NamedTuple):
    """A socket that listens. kind: tcp, tcp6 or unix. address: of a Unix socket its file; @name has no file."""

    kind: str
    address: str
    port: int

    @property
    def reach(self) -> str:
        """Who can connect to it."""
        if self.kind == "unix":
            return "users of this machine" if self.address.startswith("@") else "whom its directory lets in"
        address = ipaddress.ip_address(self.address.removeprefix("::ffff:"))  # IPv4 on a socket of IPv6
        if address.is_loopback:
            return "users of this machine"
        return "every network" if address.is_unspecified else "the network of this address"


def family(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = file.read_text().split()
        except OSError:  # the process has ended
            continue
        for child in children:
            found += family(int(child))
    return found


def listeners(pids: list[int]) -> set[Socket]:
    """The sockets on which these processes listen."""
    owned = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                owned.add(str(link.readlink()))
            except OSError:  # closed meanwhile
                continue
    found = set()
    for kind in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == LISTENS and f"socket:[{columns[9]}]" in owned:
                address, _, port = columns[1].partition(":")
                found.add(Socket(kind, readable(address), int(port, 16)))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        columns = line.split(maxsplit=7)
        if int(columns[3], 16) & ACCEPTS and f"socket:[{columns[6]}]" in owned:
            found.add(Socket("unix", columns[7] if columns[7:] else "@", 0))
    return found


def readable(digits: str) -> str:
    """The address of /proc's hexadecimal digits, whose words of 4 bytes are those of this machine."""
    words = [digits[i : i + 8] for i in range(0, len(digits), 8)]
    packed = b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)
    return str(ipaddress.ip_address(packed))


def program_of(pid: int) -> str:
    """What a process runs, in a word or two."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "has ended"
    names = [Path(word).name for word in words if word.endswith(".py")]
    return names[0] if names else " ".join(words)[:40].strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pid", metavar="PID", type=int)
    pid = parser.parse_args().pid
    if not Path(f"/proc/{pid}").exists():
        print(f"sockets.py: there is no process {pid} here", file=sys.stderr)
        return 1
    print(f"{'process':>8}  {'program':<24}  {'socket':<6}  {'address':<40}  who can reach it")
    for member in family(pid):
        for found in sorted(listeners([member])):
            address = f"{found.address} {found.port or ''}".strip()
            print(f"{member:>8}  {program_of(member):<24.24}  {found.kind:<6}  {address:<40}  {found.reach}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
