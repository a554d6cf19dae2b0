"""Where the processes of a training listen, given what their launcher sets."""

from __future__ import annotations

import pytest

from tightfit.distributed import rendezvous
from tightfit.distributed.rendezvous import INTERFACES, choose_interface, listen, on_one_host
from tightfit.errors import InputError
from tightfit.report.processes import LaunchOptions, check_start

KNOWN = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.1.2.3"], "ib0": ["10.9.9.3", "fd00::3"]}
ONE_HOST = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.1.2.3"}
SEVERAL = {**ONE_HOST, "WORLD_SIZE": "4"}


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "addresses", lambda: KNOWN)


def test_one_host_is_known_by_its_processes_or_loopback() -> None:
    assert on_one_host(ONE_HOST)
    assert not on_one_host(SEVERAL)
    assert on_one_host({})
    assert on_one_host({"WORLD_SIZE": "2", "MASTER_ADDR": "localhost"})
    assert not on_one_host({"WORLD_SIZE": "2", "MASTER_ADDR": "10.1.2.3"})
    assert not on_one_host(
        {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    )  # a pod of an operator


def test_one_host_uses_loopback_and_several_the_given_interface() -> None:
    for environ, named, chosen in (
        (ONE_HOST, None, "lo"),
        (SEVERAL, None, None),
        (SEVERAL, "ib0", "ib0"),
        ({**ONE_HOST, INTERFACES[0]: "eth0", INTERFACES[1]: "eth0"}, None, "eth0"),
    ):
        variables = dict(environ)
        choose_interface(named, variables)
        assert [variables.get(name) for name in INTERFACES] == [chosen, chosen]
    with pytest.raises(InputError, match="eth0, ib0, lo"):
        choose_interface("eth7", dict(SEVERAL))


@pytest.mark.parametrize(
    ("environ", "host", "address"),
    [
        (ONE_HOST, "10.1.2.3", "127.0.0.1"),
        (SEVERAL, "10.1.2.3", "10.1.2.3"),
        (SEVERAL, "10.77.77.77", ""),  # a service in front of it
        (SEVERAL, "127.0.0.1", ""),  # others could not reach it there
        ({**SEVERAL, INTERFACES[0]: "ib0"}, "10.77.77.77", "10.9.9.3"),
        ({**SEVERAL, INTERFACES[0]: "ib0"}, "fd00::3", "fd00::3"),
    ],
)
def test_the_store_listens_at_the_known_address(environ: dict[str, str], host: str, address: str) -> None:
    assert rendezvous._listening_address(host, environ) == address


def test_a_socket_listens_on_one_address_or_on_all() -> None:
    for address, found in (("127.0.0.1", {"127.0.0.1"}), ("", {"::", "0.0.0.0"})):
        with listen(address) as listening:
            assert listening.getsockname()[0] in found


def test_processes_are_not_started_twice() -> None:
    """A command that starts processes takes no network interface."""
    check_start(2, 1, LaunchOptions())
    check_start(1, 2, LaunchOptions(interface="eth0"))
    with pytest.raises(InputError, match="leave out --interface"):
        check_start(2, 1, LaunchOptions(interface="eth0"))
    with pytest.raises(InputError, match="4 processes have been started already"):
        check_start(2, 4, LaunchOptions())


def test_a_port_of_0_that_torchrun_passes_on_is_refused() -> None:
    """torchrun's own store has a port then, of which it tells its processes nothing."""
    with pytest.raises(InputError, match="torchrun --standalone"):
        rendezvous.join_store({**ONE_HOST, "MASTER_PORT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"})
