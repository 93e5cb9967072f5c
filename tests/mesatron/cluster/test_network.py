"""Addresses and ports on this machine's own network; the way to another machine is tried in tests/slurm."""

import socket

from mesatron.cluster.network import (
    EPHEMERAL_PORTS,
    endpoint,
    free_port,
    host_of,
    interface_of,
    node_variables,
    source_address,
)


def test_a_loopback_way_is_none() -> None:
    assert source_address(["localhost", "127.0.0.1", "::1", "no.such.name.invalid"]) is None
    assert interface_of("127.0.0.1") == "lo"


def test_a_port_that_is_taken_is_passed_over() -> None:
    port = free_port(1234)
    with socket.create_server(("", port)):
        assert free_port(1234) != port
    low, high = map(int, EPHEMERAL_PORTS.read_text().split())
    assert not any(low <= free_port(job) <= high for job in range(0, 10**6, 99_991))


def test_an_endpoint_and_its_host() -> None:
    assert endpoint("10.0.0.1", 5) == "10.0.0.1:5"
    assert endpoint("fd00::1", 5) == "[fd00::1]:5"
    assert host_of("[fd00::1]:5") == "fd00::1"
    assert host_of("head:5") == "head"


def test_a_node_alone_stays_on_its_loopback() -> None:
    assert node_variables("127.0.0.1:12345") == {"address": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "is_host": "1"}
