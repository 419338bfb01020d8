"""Which interface carries which address."""

import socket
from types import SimpleNamespace

import psutil
import pytest

from pipeline.utils import network_interfaces
from pipeline.utils.network_interfaces import interface_of


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
    monkeypatch.setattr(network_interfaces, "_routed_address", lambda: "192.168.7.5")
    return addresses


@pytest.mark.usefixtures("machine")
def test_all_addresses_of_links_that_are_up_are_candidates_the_routed_one_first():
    assert network_interfaces.candidate_addresses() == ("192.168.7.5", "10.0.0.5", "10.1.0.5")


def test_a_machine_that_routes_nowhere_still_publishes_its_addresses(machine, monkeypatch):
    monkeypatch.setattr(network_interfaces, "_routed_address", str)
    assert network_interfaces.candidate_addresses() == ("10.0.0.5", "10.1.0.5", "192.168.7.5")


def test_a_machine_with_no_link_publishes_loopback(machine, monkeypatch):
    monkeypatch.setattr(network_interfaces, "_routed_address", str)
    for name in ("eth0", "eth1", "ib0"):
        del machine[name]
    assert network_interfaces.candidate_addresses() == ("127.0.0.1",)


def test_a_bridge_to_this_machines_own_containers_comes_last(machine, monkeypatch, tmp_path):
    machine.clear()
    machine |= {name: [_entry(f"10.{index}.0.5")] for index, name in enumerate(("docker0", "br0", "eth0"))}
    for bridge, port in (("docker0", "veth1"), ("br0", "eth1")):
        (tmp_path / bridge / "brif" / port).mkdir(parents=True)
    (tmp_path / "eth1" / "device").mkdir(parents=True)
    (tmp_path / "veth1").mkdir()
    monkeypatch.setattr(network_interfaces, "_SYSTEM", tmp_path)
    monkeypatch.setattr(network_interfaces, "_routed_address", lambda: "10.0.0.5")
    assert network_interfaces.candidate_addresses() == ("10.1.0.5", "10.2.0.5", "10.0.0.5")


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("wanted", "left"),
    [
        ("", ("192.168.7.5", "10.0.0.5", "10.1.0.5")),
        ("ib0", ("192.168.7.5",)),
        ("eth0", ("10.0.0.5", "10.1.0.5")),
        ("10.1.0.0/16", ("10.1.0.5",)),
        ("10.0.0.0/8", ("10.0.0.5", "10.1.0.5")),
        ("ib1", ()),
        ("172.16.0.0/12", ()),
    ],
)
def test_a_run_may_name_the_interface_or_the_subnet_that_it_talks_over(wanted, left):
    assert network_interfaces.addresses_on(network_interfaces.candidate_addresses(), wanted) == left


@pytest.mark.usefixtures("machine")
def test_gloo_and_nccl_stay_on_the_interface_of_the_address():
    assert network_interfaces.bound_to("192.168.7.5") == {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0"}
    assert network_interfaces.bound_to("203.0.113.9") == {}


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
