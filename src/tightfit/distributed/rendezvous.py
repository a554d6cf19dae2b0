"""Let the processes of a run find each other, and choose the network interface on which they
listen.

Processes on a single host listen on its loopback interface only. Processes on several hosts listen
on the interface that the user named with `--interface`. If the user named none, the first process
listens on the interface that has its address (MASTER_ADDR), and gloo and NCCL choose their own
interfaces. `join` (in `processes.py`) and the commands that start processes call this module.
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
    """Return whether all processes of the run are on this host.

    environ  environment variables, among them those that the launcher has set (WORLD_SIZE,
             LOCAL_WORLD_SIZE and MASTER_ADDR)
    """
    world, local = environ.get("WORLD_SIZE", "1"), environ.get("LOCAL_WORLD_SIZE")
    if local is not None or world == "1":
        return (local or "1") == world
    return is_loopback(environ.get("MASTER_ADDR", ""))


def is_loopback(address: str) -> bool:
    """Return whether `address` is "localhost" or a loopback IP address."""
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def addresses() -> dict[str, list[str]]:
    """Return interface name -> list of IP addresses (v4 and v6), for each network interface of this
    host.
    """
    kinds = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [one.address.split("%")[0] for one in found if one.family in kinds]
        for name, found in psutil.net_if_addrs().items()
    }


def choose_interface(named: str | None, environ: MutableMapping[str, str] = os.environ) -> None:
    """Tell gloo and NCCL on which network interface to listen, by setting their environment
    variables.

    A variable that is set already keeps its value.

    named    the interface's name (`--interface`). None: the loopback interface if all processes are
             on this host; otherwise set nothing, so that the libraries choose
    environ  the environment variables to read and to change

    Raises InputError if this host has no interface with this name.
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
    """Return whether this process hosts the TCP store. Rank 0 does, unless the launcher (torchrun)
    hosts it.
    """
    return environ["RANK"] == "0" and not _launcher_keeps_store(environ)


def _launcher_keeps_store(environ: Mapping[str, str]) -> bool:
    """Return whether the launcher (torchrun's agent) hosts the TCP store."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def join_store(environ: Mapping[str, str] = os.environ) -> dist.Store:
    """Return the store through which the processes of the run exchange their addresses.

    If the launcher does not host the store, rank 0 creates it in this call. All other processes
    connect to it, at MASTER_ADDR and MASTER_PORT.

    environ  environment variables, among them those that the launcher and `choose_interface` have
             set

    Raises InputError if the launcher hosts the store and gives the port 0.
    """
    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    if port == 0 and _launcher_keeps_store(environ):
        raise InputError(
            "torchrun --master-port 0",
            "torchrun listens on a free port and tells its processes 0, so they cannot find it",
            "use torchrun --standalone on one host, or give a port",
        )
    if on_one_host(environ) and not _launcher_keeps_store(environ):
        host = "127.0.0.1"
    if hosts_store(environ):
        store = host_store(_listening_address(host, environ), port)
    else:
        store = dist.TCPStore(host, port, is_master=False, timeout=CONNECT_TIMEOUT, wait_for_workers=False)
    return with_restart_prefix(store, environ)


def with_restart_prefix(store: dist.Store, environ: Mapping[str, str] = os.environ) -> dist.Store:
    """Return `store` with a prefix for all keys. The prefix contains how often the launcher has
    restarted the processes.

    A launcher keeps its store when it restarts the processes. With the prefix they do not read
    entries of an earlier start.
    """
    return dist.PrefixStore(f"tightfit/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def host_store(address: str, port: int = 0, listening: socket.socket | None = None) -> dist.TCPStore:
    """Return a new TCP store that this process hosts.

    address    the address to listen on; "": all addresses
    port       the port; 0: any free one
    listening  a socket that already listens, which is used in place of `address` and `port`; None:
               open one
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
    """Return a new socket that listens for TCP connections.

    address  the address to listen on; "": all addresses, IPv6 too if the host has it
    port     the port; 0: any free one
    """
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=1024)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=both)


def _listening_address(host: str, environ: Mapping[str, str]) -> str:
    """Return the address on which rank 0 listens for the other processes.

    On a single host this is 127.0.0.1. Otherwise it is an address of the network interface that
    `choose_interface` has set, or else the address of this host to which `host` resolves. Returns
    "" (all addresses) if neither exists. For example, `host` may be the address of a service in
    front of this host.

    host  MASTER_ADDR: the name or address of this host, as the other processes use it
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
