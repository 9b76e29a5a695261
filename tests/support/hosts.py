"""Two fake hosts on this machine: network namespaces, with a link between them that tests can cut.

Needs root and the program `ip`.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_CLONE_NEWNET = 0x40000000
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class FakeHost:
    # Names of its network namespace and of its end of the link.
    name: str
    wire: str
    address: str

    @property
    def program(self) -> tuple[str, ...]:
        """Return the command that starts Splitserve on this host."""
        return ("ip", "netns", "exec", self.name, sys.executable, "-m", "splitserve")


class Wire:
    """Link between two hosts. While it is cut, packets are dropped without an error at either end."""

    def __init__(self, first: FakeHost, second: FakeHost) -> None:
        self.hosts = (first, second)

    def cut(self) -> None:
        for host in self.hosts:
            _ip("-n", host.name, "link", "set", host.wire, "down")

    def heal(self) -> None:
        for host in self.hosts:
            _ip("-n", host.name, "link", "set", host.wire, "up")


def missing() -> str | None:
    """Return why this machine cannot make fake hosts. None: it can."""
    if shutil.which("ip") is None:
        return "the program `ip` is missing"
    name = f"ss{os.getpid()}x"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return f"network namespaces are not permitted: {done.stderr.strip()}"
    _ip("netns", "delete", name)
    return None


@contextmanager
def two_hosts() -> Iterator[Wire]:
    number = next(_numbers)
    net = f"10.{os.getpid() % 250}.{number}"
    # Names of network devices have at most 15 characters.
    hosts = [
        FakeHost(f"ss{os.getpid()}{side}{number}", f"w{os.getpid()}{side}", f"{net}.{i}")
        for i, side in ((1, "a"), (2, "b"))
    ]
    with ExitStack() as closing:
        for host in hosts:
            _ip("netns", "add", host.name)
            closing.callback(_ip, "netns", "delete", host.name)
        first, second = hosts
        peer = ("peer", "name", second.wire, "netns", second.name)
        _ip("link", "add", first.wire, "netns", first.name, "type", "veth", *peer)
        for host in hosts:
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.wire)
            _ip("-n", host.name, "link", "set", "lo", "up")
            _ip("-n", host.name, "link", "set", host.wire, "up")
        yield Wire(first, second)


@contextmanager
def standing_on(host: FakeHost) -> Iterator[Callable[..., R]]:
    """Yield a caller of functions: it runs one in a thread with sockets on `host` and returns its result."""
    with ThreadPoolExecutor(1, initializer=_enter, initargs=(host.name,)) as pool:

        def call(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
            return pool.submit(function, *args, **kwargs).result()

        yield call


def _enter(name: str) -> None:
    """Move the calling thread, and no other, into the namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {name}")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)
