"""Addresses by which the nodes of a job reach each other, and a port that is free."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable
from pathlib import Path

import psutil

from mesatron.errors import ConfigError

FIRST_PORT, LAST_PORT = 10_000, 65_535
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def source_address(peers: Iterable[str]) -> str | None:
    """This machine's own address on the way to the first of `peers` (names or addresses) that the network reaches.

    What a name says of the machine it belongs to is often a loopback address; the route to another machine is not.
    IPv4 is taken before IPv6. None if every way is a loopback or there is none.
    """
    for peer in peers:
        try:
            found = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)
        except OSError:
            continue
        for family, kind, protocol, _, destination in sorted(found, key=lambda entry: entry[0] != socket.AF_INET):
            with socket.socket(family, kind, protocol) as probe:
                try:
                    probe.connect(destination)  # of a datagram socket: chooses the route and sends nothing
                except OSError:
                    continue
                own = str(probe.getsockname()[0])
            if not ipaddress.ip_address(own.partition("%")[0]).is_loopback:
                return own
    return None


def interface_of(address: str) -> str:
    """Name of the network interface that has an address. Raises ConfigError if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return name
    raise ConfigError(f"No network interface of {socket.gethostname()} has the address {address}; check its network.")


def free_port(number: int) -> int:
    """A port that nothing listens on, found from `number` (of a job) on, outside the range of outgoing connections.

    Different numbers begin at different ports, so that jobs that start together on one node do not race for one.
    """
    low, high = (int(word) for word in EPHEMERAL_PORTS.read_text().split())
    ports = [port for port in range(FIRST_PORT, LAST_PORT + 1) if not low <= port <= high]
    for step in range(len(ports)):
        port = ports[(number + step) % len(ports)]
        try:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            socket.create_server(("", port), family=family, dualstack_ipv6=dual).close()
        except OSError:
            continue
        return port
    raise ConfigError(f"No port of {socket.gethostname()} is free between {FIRST_PORT} and {LAST_PORT}.")


def endpoint(address: str, port: int) -> str:
    """ADDRESS:PORT, with brackets around an IPv6 address."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def host_of(endpoint: str) -> str:
    """The address or name in ADDRESS:PORT."""
    return endpoint.rpartition(":")[0].strip("[]")


def node_variables(endpoint: str) -> dict[str, str]:
    """Shell variables with which a node's torchrun and processes take the network that leads to `endpoint`.

    By themselves they would take the address that the node's own name stands for, which may be a loopback one. Raises
    ConfigError when there is no way to `endpoint`.
    """
    host = host_of(endpoint)
    alone = host in ("localhost", "127.0.0.1")
    address = "127.0.0.1" if alone else source_address([host])
    if address is None:
        raise ConfigError(f"{socket.gethostname()} has no way to {host}, the first node; check its name and network.")
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or interface_of(address)
    return {"address": address, "GLOO_SOCKET_IFNAME": interface, "is_host": str(int(_is_own(host)))}


def _is_own(host: str) -> bool:
    """Whether a name or address is one of this machine."""
    own = {entry.address for addresses in psutil.net_if_addrs().values() for entry in addresses}
    found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    return any(address in own or ipaddress.ip_address(address).is_loopback for address in found)
