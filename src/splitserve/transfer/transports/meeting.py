"""Creation of a group of two members, one of which may be gone.

To create a torch group, both members wait for each other without a way to interrupt them. So the wait runs in a thread
of its own, and the caller waits only until the data connection ends. An abandoned thread holds none of our memory,
because none was passed to its group. The interpreter waits for the thread at exit.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from splitserve.transfer.transports import sockets
from splitserve.transfer.transports.rendezvous import ConnectionStore
from splitserve.transfer.transports.sockets import Deadline

# Seconds between two checks of the connection.
_LOOK_SECONDS = 0.01


def meet(
    make: Callable[[ConnectionStore], Any], sock: socket.socket, deadline: Deadline
) -> tuple[Any, ConnectionStore]:
    """Return the result of `make`, and the store of the rendezvous.

    Raises the errors of `make`, ConnectionError as soon as either end has ended the connection, TimeoutError.
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
