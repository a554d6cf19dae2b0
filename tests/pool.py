"""Processes that train together, kept between tests: importing torch takes longer than most of
their work."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import socket
import threading
import time
import traceback
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

TIMEOUT = 240
GRACE_S = 5.0  # for the other processes, once one has failed
_pools: dict[int, Pool] = {}


class Pool:
    """`size` processes that have each other's addresses, as torchrun would start them."""

    def __init__(self, size: int, method: str = "forkserver") -> None:
        context = get_context(method)
        pairs = [context.Pipe() for _ in range(size)]
        self.ends = [mine for mine, _ in pairs]
        self.processes = [
            context.Process(target=_serve, args=(theirs, rank, size))  # not a daemon, which could start no workers
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()
        self._waiting: list[Connection] = []  # ends of processes that have not answered the last call

    def run(self, where: str, *arguments: Any, **named: Any) -> list[Any]:
        """What the function `module:name` returns in each process. Raises the error of the first that fails."""
        self.ask(where, *arguments, **named)
        results: dict[Connection, Any] = {}
        while self._waiting:
            answering = wait(self._waiting, TIMEOUT)
            if not answering:
                raise AssertionError(f"{len(self._waiting)} processes do not answer")
            for end in answering:
                kind, results[end] = self._receive(end)  # type: ignore[arg-type, index]
                if kind == "error":
                    raise results[end]  # type: ignore[index]
        self.part()
        return [results[end] for end in self.ends]

    def _receive(self, end: Connection) -> tuple[str, Any]:
        self._waiting.remove(end)
        return end.recv()

    def has_ended_call(self) -> bool:
        """Whether all processes answer within GRACE_S a call that failed in one of them. They have left
        their groups then, and can be called again; otherwise some may wait for the one that failed."""
        until = time.monotonic() + GRACE_S
        try:
            while self._waiting:
                answering = wait(self._waiting, max(until - time.monotonic(), 0))
                if not answering:
                    return False
                for end in answering:
                    self._receive(end)  # type: ignore[arg-type]
            self.part()
        except (AssertionError, EOFError, OSError):
            return False
        return True

    def ask(self, where: str, *arguments: Any, **named: Any) -> None:
        """Have each process call the function: its answer comes through its end."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for end in self.ends:
            end.send((port, where, arguments, named))
        self._waiting = list(self.ends)

    def part(self) -> None:
        """Let the processes leave their groups after a call, one after the other: gloo's thread of one could else find a
        connection closed by another while its own process takes it apart. Groups that stay cost time, because each of their
        threads wakes up a hundred times a second."""
        for end in self.ends:
            end.send(None)
        for end in self.ends:  # has let go of all that uses the groups
            _answered(end)
        for end in self.ends:
            end.send(None)
            _answered(end)

    def close(self) -> None:
        for process in self.processes:
            process.kill()


def _answered(end: Connection) -> None:
    if not end.poll(TIMEOUT):
        raise AssertionError("a process does not leave its groups")
    end.recv()


def together(size: int, where: str, *arguments: Any, **named: Any) -> list[Any]:
    """Run the function `module:name` in `size` processes that train together; what each returns, by rank."""
    if size not in _pools:
        get_context("forkserver").set_forkserver_preload(["tests.preload"])
        _pools[size] = Pool(size)
    pool = _pools[size]
    try:
        return pool.run(where, *arguments, **named)
    except BaseException:
        if not pool.has_ended_call():
            _pools.pop(size).close()
        raise


def _close_all() -> None:
    for pool in _pools.values():
        pool.close()


atexit.register(_close_all)


def _serve(end: Connection, rank: int, size: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1",
    )  # fmt: skip  # what devices they see is in the environment that they inherit: see tests/conftest.py
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            asked = end.recv()
        except EOFError:
            return
        if asked is None:
            _part(end)
            continue
        port, where, arguments, named = asked
        os.environ["MASTER_PORT"] = str(port)
        module, _, name = where.partition(":")
        try:
            end.send(("result", getattr(importlib.import_module(module), name)(*arguments, **named)))
        except Exception as error:
            error.add_note(f"in process {rank} of {size}:\n{traceback.format_exc()}")
            try:
                end.send(("error", error))
            except Exception:
                end.send(("error", AssertionError(traceback.format_exc())))


def _part(end: Connection) -> None:
    """Leave the groups, when it is this process's turn. Each has its threads as long as anything holds it."""
    import torch.distributed as dist
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    from tightfit.distributed import mesh

    mesh.forget_meshes()
    _clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    gc.collect()
    end.send(None)
    end.recv()
    if dist.is_initialized():
        dist.destroy_process_group()
    end.send(None)


def _end_with(parent: int) -> None:
    """A process that waits for others would outlive the tests that were killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
