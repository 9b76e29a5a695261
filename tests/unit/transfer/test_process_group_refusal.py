"""A receiver that refuses a write closes its group. The error is the refusal, not that of the sender's library."""

import socket

import numpy as np
import pytest
import torch

from splitserve.core.layout import Region
from splitserve.transfer.copies import copy_table
from splitserve.transfer.transports.backend import Memory
from splitserve.transfer.transports.base import TransportOptions, WriteRefused
from splitserve.transfer.transports.frames import send_reply
from splitserve.transfer.transports.process_group import GlooBackend, ProcessGroupOutgoing
from splitserve.transfer.transports.sockets import Deadline

TICKET = 7


class BrokenGroup:
    device = torch.device("cpu")

    def send(self, tensor):
        raise ConnectionError("writing to a closed pair")


@pytest.fixture
def outgoing_and_peer():
    bytes_ = np.zeros(64, dtype=np.uint8)
    backend = GlooBackend(TransportOptions())
    backend.register(Memory([Region(bytes_.ctypes.data, 64)]))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ProcessGroupOutgoing(backend, ours, BrokenGroup()), theirs
    del bytes_


def test_a_refusal_stands_though_its_group_broke_before_it_was_read(outgoing_and_peer):
    outgoing, peer = outgoing_and_peer
    send_reply(peer, TICKET, "region 3 does not exist")
    with pytest.raises(WriteRefused, match="region 3"):
        outgoing.write(TICKET, copy_table([(0, 0, 0, 0, 64)]), Deadline(20.0))


def test_a_group_that_breaks_without_a_refusal_is_a_lost_peer(outgoing_and_peer):
    outgoing, peer = outgoing_and_peer
    peer.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionError, match="closed pair"):
        outgoing.write(TICKET, copy_table([(0, 0, 0, 0, 64)]), Deadline(20.0))


def test_a_group_that_breaks_after_the_frame_was_accepted_is_a_lost_peer(outgoing_and_peer):
    outgoing, peer = outgoing_and_peer
    send_reply(peer, TICKET)
    peer.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionError, match="closed pair"):
        outgoing.write(TICKET, copy_table([(0, 0, 0, 0, 64)]), Deadline(20.0))
