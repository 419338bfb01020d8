"""Which interface carries which address."""

import socket
from types import SimpleNamespace

import psutil
import pytest

from pipeline.network import interface_of
from slurm import preflight


def _entry(address, netmask="255.255.255.0", family=socket.AF_INET):
    return SimpleNamespace(family=family, address=address, netmask=netmask)


@pytest.fixture
def machine(monkeypatch):
    """Ethernet with two addresses, InfiniBand, a link that is down, loopback; it calls out over ib0."""
    addresses = {
        "lo": [_entry("127.0.0.1", "255.0.0.0"), _entry("::1", family=socket.AF_INET6)],
        "eth0": [_entry("10.0.0.5"), _entry("10.1.0.5"), _entry("fe80::5%eth0", family=socket.AF_INET6)],
        "eth1": [_entry("10.2.0.5")],
        "ib0": [_entry("192.168.7.5", None)],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(
        psutil, "net_if_stats", lambda: {name: SimpleNamespace(isup=name != "eth1") for name in addresses}
    )
    monkeypatch.setattr(preflight, "_routed_address", lambda: ["192.168.7.5"])
    return addresses


@pytest.mark.usefixtures("machine")
def test_all_addresses_of_links_that_are_up_are_candidates_the_routed_one_first():
    assert preflight.candidate_addresses() == ("192.168.7.5", "10.0.0.5", "10.1.0.5")


def test_a_machine_that_routes_nowhere_still_publishes_its_addresses(machine, monkeypatch):
    monkeypatch.setattr(preflight, "_routed_address", list)
    assert preflight.candidate_addresses() == ("10.0.0.5", "10.1.0.5", "192.168.7.5")


def test_a_machine_with_no_link_publishes_loopback(machine, monkeypatch):
    monkeypatch.setattr(preflight, "_routed_address", list)
    for name in ("eth0", "eth1", "ib0"):
        del machine[name]
    assert preflight.candidate_addresses() == ("127.0.0.1",)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("address", "interface"),
    [("10.0.0.5", "eth0"), ("10.1.0.5", "eth0"), ("192.168.7.5", "ib0"), ("127.0.0.1", "lo"), ("127.0.1.9", "lo")],
)
def test_an_address_is_carried_by_the_interface_that_has_it(address, interface):
    assert interface_of(address) == interface


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("address", ["10.0.0.6", "10.2.0.5", "192.0.2.1"])
def test_no_interface_carries_a_neighbours_address_or_that_of_a_link_that_is_down(address):
    assert interface_of(address) is None


def test_this_machines_loopback_carries_the_addresses_of_virtual_nodes():
    assert interface_of("127.0.0.2") == "lo"
