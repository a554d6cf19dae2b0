"""Rendezvous: how the processes that train together find each other, and on which network interface they listen.

Processes of one host listen on its loopback interface only. Those of several hosts listen on the interface that was named, else
on the one with the address that they were given for the first process (MASTER_ADDR).
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

CONNECT = timedelta(minutes=60)  # for the slowest process to start
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # torch's libraries take an interface in no other way


def on_one_host(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether all processes that train together are on this host."""
    world, local = environ.get("WORLD_SIZE", "1"), environ.get("LOCAL_WORLD_SIZE")
    if local is not None or world == "1":
        return (local or "1") == world
    return is_loopback(environ.get("MASTER_ADDR", ""))


def is_loopback(address: str) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def addresses() -> dict[str, list[str]]:
    """The IP addresses of each of this host's network interfaces."""
    kinds = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [one.address.split("%")[0] for one in found if one.family in kinds]
        for name, found in psutil.net_if_addrs().items()
    }


def choose_interface(named: str | None, environ: MutableMapping[str, str] = os.environ) -> None:
    """Tell torch's libraries which interface to listen on. What the user has told them stays. Raises InputError."""
    known = addresses()
    if named is not None and named not in known:
        raise InputError(
            f"--interface {named}", "this host has no such network interface", f"use one of: {', '.join(sorted(known))}"
        )
    if named is None and on_one_host(environ):
        named = next((name for name, found in known.items() if "127.0.0.1" in found), None)
    for variable in INTERFACES if named is not None else ():
        environ.setdefault(variable, str(named))


def keeps_store(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process keeps the store: the first one, unless the launcher does."""
    return environ["RANK"] == "0" and not _launchers(environ)


def _launchers(environ: Mapping[str, str]) -> bool:
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def meet(environ: Mapping[str, str] = os.environ) -> dist.Store:
    """The store in which the processes that train together leave each other notes: the launcher's, else the first process keeps
    it, listening where `choose_interface` said."""
    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    if on_one_host(environ) and not _launchers(environ):
        host = "127.0.0.1"
    if keeps_store(environ):
        store = keep_store(_address_of(host, environ), port)
    else:
        store = dist.TCPStore(host, port, is_master=False, timeout=CONNECT, wait_for_workers=False)
    return within(store, environ)


def within(store: dist.Store, environ: Mapping[str, str] = os.environ) -> dist.Store:
    """Notes of one start of the processes: a launcher that starts them again keeps the store."""
    return dist.PrefixStore(f"tightfit/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def keep_store(address: str, port: int = 0, listening: socket.socket | None = None) -> dist.TCPStore:
    """A store that this process keeps, listening on one address, or with "" on all; or on a socket that listens already."""
    if listening is None:
        listening = listen(address, port)
    port = listening.getsockname()[1]
    return dist.TCPStore(
        address or "127.0.0.1",
        port,
        is_master=True,
        timeout=CONNECT,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def listen(address: str, port: int = 0) -> socket.socket:
    """A socket that listens on one address, or with "" on all."""
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=1024)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=both)


def _address_of(host: str, environ: Mapping[str, str]) -> str:
    """Where the first process listens: its address on the named interface, else the one the others know it by; "" where that is
    no address of this host, as of a service in front of it."""
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


__all__ = ["CONNECT", "choose_interface", "keep_store", "keeps_store", "listen", "meet", "on_one_host", "within"]
