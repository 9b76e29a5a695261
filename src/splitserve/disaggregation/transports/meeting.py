"""Two members of a group on their way to each other, one of which may have gone.

What makes torch's groups waits for the other member, and nothing interrupts it. So it waits in a thread of its own,
and whoever wants the group waits no longer than the connection over which both were told to meet. A thread that nobody
waits for any more holds no memory of ours, for nothing was handed to its group; the interpreter waits for it at exit.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from splitserve.disaggregation.transports import sockets
from splitserve.disaggregation.transports.rendezvous import ConnectionStore
from splitserve.disaggregation.transports.sockets import Deadline

# How often the connection is looked at meanwhile.
_LOOK_SECONDS = 0.01


def meet(
    make: Callable[[ConnectionStore], Any], sock: socket.socket, deadline: Deadline
) -> tuple[Any, ConnectionStore]:
    """What `make` makes, and the store over which it met the other. Raises what it raises; ConnectionError as soon as
    either end has ended the connection, TimeoutError.
    """
    store = ConnectionStore(sock, deadline)
    thread = ThreadPoolExecutor(1, "kv-meet")
    making = thread.submit(make, store)
    thread.shutdown(wait=False)
    try:
        while not wait([making], min(_LOOK_SECONDS, deadline.remaining())).done:
            if sockets.has_ended(sock):
                raise ConnectionError("the connection ended before the other member was there")
        return making.result(), store
    except BaseException:
        making.add_done_callback(lambda _: store.seal())
        raise
