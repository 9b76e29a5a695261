"""Control messages survive the trip, and nothing else gets in."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.core.errors import DeadlineExceededError, KVTransferError
from splitserve.core.messages import TransferStats
from splitserve.core.request import RoomKey
from splitserve.transfer import wire
from splitserve.transfer.pairing import HeadPair
from splitserve.transfer.transports.base import PeerAddress
from support.kv_world import layout

ARGS = wire.KVArgs(backend="tcp", model="m", layout=layout(), metadata_row_bytes=640, num_metadata_rows=8)
CAUSE = wire.RoomFailureCause(message="why", http_status=400, reason="invalid_request")
KEY = RoomKey((1 << 63) - 1, 3)
BODIES = [
    wire.KVArgsRegisterInfo(
        args=ARGS, session=PeerAddress("s", "127.0.0.1:1"), pairs=(HeadPair(0, 1, 2, 3),), num_targets=2
    ),
    wire.RegisterReply(session_id="s", refusal="no"),
    wire.TransferInfo(
        session_id="s", key=KEY, attempt=(1 << 62) + 5, rid="r", pages=[3, 1, 2], metadata_index=7, num_tokens=33
    ),
    wire.TransferInfo(
        session_id="s", key=KEY, attempt=1, rid="r", pages=[3], metadata_index=0, num_tokens=2, prompt_ids=[9, 8]
    ),
    wire.AbortRoom(key=KEY, attempt=1, cause=CAUSE),
    wire.TransferStatus(key=KEY, attempt=1, stats=TransferStats(num_bytes=1, seconds=0.5, exposed_seconds=0.25)),
    wire.TransferStatus(key=KEY, attempt=1, failure=CAUSE),
    wire.Ping(session_id="s"),
    wire.Pong(session_id="s"),
    wire.Unregistered(session_id="s", why="restarted"),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda b: type(b).__name__)
def test_every_message_survives_the_trip(body):
    epoch = wire.new_epoch()
    mail = wire.decode(wire.encode(body, epoch=epoch, to_epoch=7, sender="tcp://127.0.0.1:5"))
    assert mail == wire.Mail(epoch, 7, "tcp://127.0.0.1:5", body)


@given(st.binary(max_size=200))
def test_noise_is_a_wire_error(noise):
    for frame in (noise, wire.encode(BODIES[0], epoch=1, to_epoch=2, sender="a")[:6] + noise):
        with pytest.raises(wire.WireError):
            wire.decode(frame)


@given(st.data())
def test_a_damaged_frame_is_a_wire_error_or_a_whole_message(data):
    frame = bytearray(wire.encode(data.draw(st.sampled_from(BODIES)), epoch=1, to_epoch=2, sender="a"))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(wire.WireError):
        assert isinstance(wire.decode(bytes(frame)), wire.Mail)


def test_another_version_is_named_and_its_sender_known_even_if_the_body_makes_no_sense():
    envelope = wire.Envelope(epoch=1, to_epoch=2, sender="there", body=msgspec.Raw(b"\xc0"))
    frame = b"SSKC" + (99).to_bytes(2, "little") + msgspec.msgpack.encode(envelope)
    with pytest.raises(wire.VersionMismatch, match=f"version {wire.PROTOCOL_VERSION} against 99") as caught:
        wire.decode(frame)
    assert caught.value.envelope.sender == "there"


def test_a_cause_keeps_status_and_reason_and_does_not_repeat_its_prefix():
    error = wire.RoomFailureCause.of(DeadlineExceededError("too slow")).to_error(KEY)
    assert isinstance(error, KVTransferError)
    assert (error.http_status, error.reason) == (504, "deadline_exceeded")
    assert wire.RoomFailureCause.of(error).message == "too slow"
    assert KVTransferError.http_status == 500


def test_what_prefill_registers_survives_json():
    info = wire.PrefillInfo(epoch=wire.new_epoch(), control_address="tcp://h:1", args=ARGS)
    assert msgspec.json.decode(msgspec.json.encode(info), type=wire.PrefillInfo) == info
