"""Network interfaces of this machine, and the one that gloo uses."""

from __future__ import annotations

import errno
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_SIOCGIFADDR = 0x8915  # of linux/sockios.h: an interface's IPv4 address
_IPV6 = Path("/proc/net/if_inet6")
CONNECT_SECONDS = 2.0
"""How long a connection may take on one machine."""


@dataclass(frozen=True)
class GlooInterface:
    """The interface that gloo would use, and its address. ``interface`` is None if no interface is
    known to have the address, ``address`` is None if there is none that gloo could use."""

    interface: str | None
    address: str | None

    @property
    def is_loopback(self) -> bool:
        address = self.address or ""
        return address.startswith("127.") or address == "::1"


def addresses() -> dict[str, list[str]]:
    """Return the addresses of each interface, IPv4 first. An interface without one is there too."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    if fcntl is not None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
            for name in found:
                request = struct.pack("256s", name.encode()[:15])
                try:
                    answer = fcntl.ioctl(query.fileno(), _SIOCGIFADDR, request)
                except OSError:  # has none
                    continue
                found[name].append(socket.inet_ntoa(answer[20:24]))
    if _IPV6.exists():
        for line in _IPV6.read_text().splitlines():
            digits, *_, name = line.split()
            found.setdefault(name, []).append(
                socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
            )
    return found


def by_host_name() -> GlooInterface:
    """Return what gloo takes if GLOO_SOCKET_IFNAME is not set: the first address of this machine's
    host name that a socket can be bound to. torch takes 127.0.0.1 if there is none, which is then
    not in the answer."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return GlooInterface(None, None)
    for family, kind, protocol, _, where in found:
        try:
            with socket.socket(family, kind, protocol) as tried:
                tried.bind(where)
        except OSError:
            continue
        address = str(where[0])
        has = [name for name, own in addresses().items() if address in own]
        # Linux answers to all of 127.0.0.0/8.
        loopback = "lo" if address.startswith("127.") else None
        return GlooInterface(has[0] if has else loopback, address)
    return GlooInterface(None, None)


def why_no_connection(address: str, interface: str | None = None) -> str | None:
    """Return why this machine cannot connect to itself through ``address``, as gloo's ranks do.
    ``None`` if it can. ``interface`` is that which has the address."""
    try:
        where = f"{address}%{interface}" if address.startswith("fe80:") and interface else address
        found = socket.getaddrinfo(where, 0, type=socket.SOCK_STREAM)
        family, kind, protocol, _, place = found[0]
        with socket.socket(family, kind, protocol) as server:
            server.bind(place)
            server.listen()
            with socket.socket(family, kind, protocol) as client:
                client.settimeout(CONNECT_SECONDS)
                client.connect(server.getsockname())
    except OSError as error:
        return error.strerror or str(error)
    return None


def reachable() -> list[str]:
    """Return the interfaces that other machines may reach: with an address, and not the
    loopback."""
    return [
        name
        for name, own in addresses().items()
        if any(not address.startswith(("127.", "fe80:")) and address != "::1" for address in own)
    ]


def is_free(address: str, port: int) -> bool:
    """Return whether a program on this machine could listen on ``port``. True if ``address`` is
    that of another machine, about which nothing is known."""
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError:
        return True
    for family, kind, protocol, _, where in found:
        with socket.socket(family, kind, protocol) as tried:
            # As a server sets it, else a port counts as taken for a minute after its last use.
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(where)
            except OSError as error:
                return error.errno != errno.EADDRINUSE
            return True
    return True
