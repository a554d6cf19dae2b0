"""How the processes of a run find each other, and which network interface they listen on.

Processes on a single host listen on its loopback interface only. Processes on several hosts listen
on the interface that the user named. Without a name they listen on the interface that has the
address of the first process (MASTER_ADDR). `join` (the module processes) and the commands that start
processes call this module.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, MutableMapping
from datetime import timedelta

import psutil
import torch.distributed as dist

from tightfit.errors import InputError

CONNECT_TIMEOUT = timedelta(minutes=60)  # how long to wait for the slowest process to start
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # gloo and NCCL read it from here only


def on_one_host(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether all processes of the run are on this host, as the launcher's environment variables
    say.
    """
    world, local = environ.get("WORLD_SIZE", "1"), environ.get("LOCAL_WORLD_SIZE")
    if local is not None or world == "1":
        return (local or "1") == world
    return is_loopback(environ.get("MASTER_ADDR", ""))


def is_loopback(address: str) -> bool:
    """Whether `address` is "localhost" or a loopback IP address."""
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def addresses() -> dict[str, list[str]]:
    """The IP addresses (v4 and v6) of each network interface of this host, by the interface's name."""
    kinds = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [one.address.split("%")[0] for one in found if one.family in kinds]
        for name, found in psutil.net_if_addrs().items()
    }


def choose_interface(named: str | None, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the interface that gloo and NCCL listen on. Environment variables that the user has set
    are kept.

    named  the interface's name (`--interface`); None: loopback for a run on one host, else the
           libraries' own choice

    Raises InputError when this host has no interface of that name.
    """
    known = addresses()
    if named is not None and named not in known:
        raise InputError(
            f"--interface {named}", "this host has no such network interface", f"use one of: {', '.join(sorted(known))}"
        )
    if named is None and on_one_host(environ):
        named = next((name for name, found in known.items() if "127.0.0.1" in found), None)
    for variable in INTERFACES if named is not None else ():
        environ.setdefault(variable, str(named))


def hosts_store(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process hosts the TCP store: rank 0 does, unless the launcher (torchrun) does."""
    return environ["RANK"] == "0" and not _launcher_keeps_store(environ)


def _launcher_keeps_store(environ: Mapping[str, str]) -> bool:
    """Whether torchrun's agent hosts the store."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def join_store(environ: Mapping[str, str] = os.environ) -> dist.Store:
    """The store through which the processes of the run exchange their addresses.

    The launcher hosts it, or rank 0 does. Rank 0 then listens on the interface that
    `choose_interface` has set.
    """
    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    if on_one_host(environ) and not _launcher_keeps_store(environ):
        host = "127.0.0.1"
    if hosts_store(environ):
        store = host_store(_listening_address(host, environ), port)
    else:
        store = dist.TCPStore(host, port, is_master=False, timeout=CONNECT_TIMEOUT, wait_for_workers=False)
    return with_restart_prefix(store, environ)


def with_restart_prefix(store: dist.Store, environ: Mapping[str, str] = os.environ) -> dist.Store:
    """`store` with a key prefix for this start of the processes: a launcher that restarts them
    keeps its store.
    """
    return dist.PrefixStore(f"tightfit/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def host_store(address: str, port: int = 0, listening: socket.socket | None = None) -> dist.TCPStore:
    """A TCP store that this process hosts.

    address    the address to listen on; "": all addresses
    port       the port; 0: any free one
    listening  a socket that listens already, used in place of `address` and `port`
    """
    if listening is None:
        listening = listen(address, port)
    port = listening.getsockname()[1]
    return dist.TCPStore(
        address or "127.0.0.1",
        port,
        is_master=True,
        timeout=CONNECT_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def listen(address: str, port: int = 0) -> socket.socket:
    """A socket that listens on one address, or with "" on all addresses (IPv6 too, if the host has
    it).
    """
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=1024)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=both)


def _listening_address(host: str, environ: Mapping[str, str]) -> str:
    """The address on which rank 0 listens.

    It is the address on the named interface, else the one that the other processes use for this
    host. Returns "" (all addresses) if that is no address of this host, such as the address of a
    service in front of it.
    """
    known = addresses()
    if on_one_host(environ):
        return "127.0.0.1"
    named = known.get(environ.get(INTERFACES[0], ""))
    own = {address for found in known.values() for address in found if not is_loopback(address)}
    try:
        given = {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError:
        given = set()
    candidates = [a for a in named or () if a in given] or [a for a in named or () if ":" not in a] or [*(given & own)]
    return candidates[0] if candidates else ""


__all__ = [
    "CONNECT_TIMEOUT",
    "choose_interface",
    "host_store",
    "hosts_store",
    "join_store",
    "listen",
    "on_one_host",
    "with_restart_prefix",
]
