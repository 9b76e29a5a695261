"""Two managers hand a KV cache over, and every way in which that can end."""

import itertools

import msgspec
import pytest

from splitserve.core.errors import (
    CapacityError,
    DeadlineExceededError,
    DuplicateRoomError,
    IncompatiblePeerError,
    PeerLostError,
    WorkerUnavailableError,
)
from splitserve.core.layout import Region
from splitserve.core.request import FAKE_BOOTSTRAP_HOST, BootstrapInfo, RoomKey
from splitserve.transfer.metadata import MetadataRow, RowWidths
from splitserve.transfer.peers import LookupFailure
from splitserve.transfer.receiver import KVReceiver
from splitserve.transfer.room import Room, RoomLimits
from splitserve.transfer.state import IllegalTransition, KVPoll
from splitserve.transfer.transports.backend import Memory
from splitserve.transfer.wire import PROTOCOL_VERSION, Ping, encode
from support.kv_world import BOOTSTRAP, CONFIG, NUM_ROWS, PAGE_SIZE, KVWorld, layout

FAKE = BootstrapInfo(FAKE_BOOTSTRAP_HOST, 0, RoomKey(9))


# -- the main line ------------------------------------------------------------------------------------------------


def test_chunks_arrive_in_place_and_both_ends_succeed():
    world = KVWorld()
    world.prefill.fill([1, 2, 9], seed=3)
    sender, receiver = world.paired(room=1, target=(5, 6, 20))
    sender.send([1, 2], is_last=False)
    world.clock.advance(2.0)
    world.tick()
    assert (sender.poll(), receiver.poll()) == (KVPoll.TRANSFERRING, KVPoll.TRANSFERRING)
    assert not receiver.quiescent()
    world.set_row(1, index=4, token=42)
    sender.send([9], is_last=True, metadata_index=4)
    world.clock.advance(0.5)
    world.tick()
    assert (sender.poll(), receiver.poll()) == (KVPoll.SUCCESS, KVPoll.SUCCESS)
    assert sender.quiescent()
    assert receiver.quiescent()
    assert world.decode.holds([5, 6, 20], seed=3)
    assert world.decode.metadata.get_buf(1, RoomKey(1)) == MetadataRow(RoomKey(1), 42)
    stats = sender.stats()
    assert stats.num_bytes == 3 * world.prefill.layout.bytes_per_page + world.prefill.metadata.row_bytes
    assert (stats.seconds, stats.exposed_seconds) == (2.5, 0.5)
    sender.clear()
    receiver.clear()
    assert world.prefill.manager.num_rooms == world.decode.manager.num_rooms == 0


def test_decode_expects_its_pages_before_they_arrive():
    world, expected = KVWorld(), []
    world.decode.manager._context.expect = expected.append
    world.paired(room=1, target=(5, 20, 6))
    assert expected == [20]


@pytest.mark.parametrize("num_held_pages", [0, 1, 2, 3])
def test_what_decode_holds_is_neither_sent_nor_touched(num_held_pages):
    world = KVWorld(decode={"wants_checksum": True})
    world.prefill.fill([1, 2, 9], seed=3)
    world.decode.fill([5, 6, 20], seed=4)
    sender, receiver = world.paired(target=(5, 6, 20), num_held_tokens=num_held_pages * PAGE_SIZE)
    sender.send([1, 2], is_last=False)
    world.tick()
    world.set_row(1)
    sender.send([9], is_last=True, metadata_index=0)
    world.tick()
    assert (sender.poll(), receiver.poll()) == (KVPoll.SUCCESS, KVPoll.SUCCESS)
    num_sent = 3 - num_held_pages
    assert sender.stats().num_bytes == num_sent * world.prefill.layout.bytes_per_page + world.prefill.metadata.row_bytes
    # What was there has another seed than what was sent.
    arrived = [world.decode.read(page) == world.prefill.read(ours) for page, ours in ((5, 1), (6, 2), (20, 9))]
    assert arrived == [False] * num_held_pages + [True] * num_sent
    assert world.decode.metadata.get_buf(1, RoomKey(1)) == MetadataRow(RoomKey(1), 42)


@pytest.mark.parametrize("num_held", [-1, 13])
def test_a_decode_that_holds_more_than_there_is_fails_its_room(num_held):
    world = KVWorld()
    sender, receiver = world.paired(target=(5, 6, 7), num_tokens=12, num_held_tokens=num_held)
    world.set_row(1)
    sender.send([1, 2, 3], is_last=True, metadata_index=0)
    world.tick()
    assert sender.poll() is receiver.poll() is KVPoll.FAILED
    assert f"holds {num_held} of 12" in sender.failure().message


def test_who_sees_success_from_another_thread_finds_the_room_quiescent(monkeypatch):
    """The scheduler clears it then, and a follower reports both to its driver."""
    seen = []

    def advance(room, event):
        Room.advance(room, event)
        seen.append((room.poll(), room.quiescent()))

    world = KVWorld()
    sender, _ = world.paired(room=1, target=(5,))
    monkeypatch.setattr(KVReceiver, "advance", advance)
    world.set_row(1)
    sender.send([1], is_last=True, metadata_index=0)
    world.tick()
    assert seen == [(KVPoll.SUCCESS, True)]


def test_the_last_chunk_may_carry_no_pages():
    world = KVWorld()
    sender, receiver = world.paired(target=(5,))
    sender.send([1], is_last=False)
    world.set_row(1)
    sender.send([], is_last=True, metadata_index=0)
    world.tick()
    assert receiver.poll() is KVPoll.SUCCESS


def test_the_metadata_row_lands_after_all_pages():
    world = KVWorld(step=True)
    sender, receiver = world.paired(target=(5, 9, 13))
    world.set_row(1)
    sender.send([1, 2, 3], is_last=True, metadata_index=0)
    world.tick()
    empty = world.decode.metadata.region()
    for _ in range(3 * len(world.decode.pages)):
        world.network.run_one(world.network.busy_sessions()[0])
        assert not world.decode.metadata._bytes.any(), empty
    world.land()
    world.tick()
    assert receiver.poll() is KVPoll.SUCCESS


def test_pages_announced_before_the_request_reaches_prefill_are_kept_for_it():
    world = KVWorld()
    receiver = world.receiver(7)
    world.tick()
    receiver.init([3], 2, num_tokens=4)
    world.tick()
    sender = world.sender(7)
    assert sender.poll() is KVPoll.WAITING_FOR_INPUT
    world.set_row(7)
    sender.send([0], is_last=True, metadata_index=0)
    world.tick()
    assert receiver.poll() is KVPoll.SUCCESS


def test_a_prompt_that_decode_asks_for_reaches_the_scheduler_once():
    world = KVWorld()
    receiver = world.receiver(7)
    world.tick()
    receiver.init([3], 2, num_tokens=3, prompt_ids=[5, 6, 7])
    world.tick()
    (asked,) = world.prefill.manager.take_requested_prompts()
    assert (asked.rid, asked.key, asked.token_ids) == ("d7", RoomKey(7), [5, 6, 7])
    assert world.prefill.manager.take_requested_prompts() == []
    sender = world.sender(7)
    world.set_row(7)
    sender.send([0], is_last=True, metadata_index=0)
    world.tick()
    assert receiver.poll() is KVPoll.SUCCESS


def test_a_prompt_of_a_decode_that_is_gone_is_not_computed():
    world = KVWorld()
    receiver = world.receiver(7)
    world.tick()
    receiver.init([3], 2, num_tokens=3, prompt_ids=[5, 6, 7])
    world.tick(1)
    world.decode.manager.close()
    world.tick()
    assert world.prefill.manager.take_requested_prompts() == []


def test_samples_of_one_room_are_apart():
    world = KVWorld()
    rooms = [(world.sender(1, s), world.receiver(1, s)) for s in range(3)]
    world.tick()
    assert {r.poll() for _, r in rooms} == {KVPoll.WAITING_FOR_INPUT}
    rooms[1][1].init([4], 0, num_tokens=4)
    world.tick()
    states = [s.poll() for s, _ in rooms]
    assert states == [KVPoll.BOOTSTRAPPING, KVPoll.WAITING_FOR_INPUT, KVPoll.BOOTSTRAPPING]


def test_the_prefill_is_looked_up_and_registered_with_once_for_all_rooms():
    world = KVWorld()
    receivers = [world.receiver(i) for i in range(5)]
    world.tick()
    assert world.book.requests == [BOOTSTRAP]
    assert world.prefill.manager.num_peers == 1
    assert {r.poll() for r in receivers} == {KVPoll.WAITING_FOR_INPUT}


def test_a_tick_says_whether_a_room_changed():
    world = KVWorld()
    world.receiver()
    changes = []
    for _ in range(4):
        changes.append(world.decode.manager.tick())
        world.prefill.manager.tick()
    assert changes.count(True) == 1


def test_a_full_transport_queue_holds_chunks_back_until_there_is_room(monkeypatch):
    world = KVWorld(step=True)
    sender, receiver = world.paired(target=(5, 6))
    monkeypatch.setattr("support.fake_transport.MAX_PENDING_WRITES", 1)
    world.prefill.fill([1, 2], seed=1)
    world.set_row(1)
    sender.send([1], is_last=False)
    sender.send([2], is_last=True, metadata_index=0)
    for _ in range(3):
        world.tick()
        world.land()
    world.tick()
    assert receiver.poll() is KVPoll.SUCCESS
    assert world.decode.holds([5, 6], seed=1)


# -- aborts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["bootstrapping", "waiting", "transferring"])
def test_prefills_abort_reaches_decode_with_its_cause(stage):
    world = KVWorld(step=True)
    if stage == "bootstrapping":
        sender, receiver = world.sender(), world.receiver()
        sender.abort("prompt too long", status_code=400)
        world.tick()
        receiver.init([5, 6, 7], 1, num_tokens=12)
    else:
        sender, receiver = world.paired()
        if stage == "transferring":
            sender.send([1], is_last=False)
            world.tick()
        sender.abort("prompt too long", status_code=400)
    world.tick()
    assert receiver.poll() is KVPoll.FAILED
    assert "prompt too long" in receiver.failure().message
    assert (receiver.failure().http_status, receiver.failure().reason) == (400, "aborted")
    assert receiver.quiescent() == (stage != "transferring")
    world.land()
    world.tick()
    assert receiver.quiescent()
    assert sender.quiescent()


@pytest.mark.parametrize("stage", ["resolving", "bootstrapping", "waiting", "transferring"])
def test_decodes_abort_reaches_prefill_with_its_cause(stage):
    world = KVWorld(step=True)
    if stage in ("resolving", "bootstrapping"):
        sender, receiver = world.sender(), world.receiver()
        if stage == "bootstrapping":
            world.tick()
    else:
        sender, receiver = world.paired()
        if stage == "transferring":
            sender.send([1], is_last=False)
            world.tick()
    receiver.abort("the client left")
    assert receiver.quiescent() == (stage in ("resolving", "bootstrapping"))
    world.tick()
    assert sender.poll() is KVPoll.FAILED
    assert "the client left" in sender.failure().message
    assert sender.failure().http_status == 499
    world.land()
    world.tick()
    assert sender.quiescent()
    assert receiver.quiescent()


def test_decodes_abort_reaches_a_request_that_prefill_gets_only_later():
    world = KVWorld()
    receiver = world.receiver()
    world.tick()
    receiver.init([5], 1, num_tokens=4)
    receiver.abort("the client left")
    world.tick()
    assert receiver.quiescent()
    sender = world.sender()
    assert sender.poll() is KVPoll.FAILED
    assert "the client left" in sender.failure().message


def test_an_abort_after_the_end_changes_nothing():
    world = KVWorld()
    sender, receiver = world.paired(target=(5,))
    world.set_row(1)
    sender.send([1], is_last=True, metadata_index=0)
    world.tick()
    sender.abort("late")
    receiver.abort("late")
    world.tick()
    assert (sender.poll(), receiver.poll()) == (KVPoll.SUCCESS, KVPoll.SUCCESS)


def test_a_lost_abort_is_repeated_until_prefill_answers():
    world = KVWorld(step=True)
    sender, receiver = world.paired()
    receiver.abort("the client left")
    world.decode.manager.tick()
    world.wires.deliver(("decode", "prefill"), drop=True)
    world.tick()
    assert sender.poll() is KVPoll.WAITING_FOR_INPUT
    world.pass_time(CONFIG.heartbeat_interval + 1)
    assert sender.poll() is KVPoll.FAILED
    assert receiver.quiescent()


def test_an_abort_that_crosses_success_is_answered_with_what_happened():
    world = KVWorld(step=True)
    sender, receiver = world.paired(target=(5,))
    world.set_row(1)
    sender.send([1], is_last=True, metadata_index=0)
    world.prefill.manager.tick()
    world.land()
    world.prefill.manager.tick()
    assert sender.poll() is KVPoll.SUCCESS
    sender.clear()
    receiver.abort("the client left")
    world.wires.deliver(("prefill", "decode"), drop=True)
    world.tick()
    assert receiver.poll() is KVPoll.FAILED
    assert receiver.quiescent()


def test_a_send_after_failure_is_ignored_and_writes_nothing():
    world = KVWorld()
    sender, _ = world.paired(target=(5,))
    sender.abort("stop")
    sender.send([1], is_last=True, metadata_index=0)
    world.tick()
    assert not any(p.any() for p in world.decode.pages)


# -- deadlines ----------------------------------------------------------------------------------------------------


def test_a_prefill_that_is_never_found_runs_into_the_bootstrap_deadline():
    world = KVWorld()
    del world.book.entries[BOOTSTRAP]
    receiver = world.receiver(5)
    world.pass_time(CONFIG.bootstrap_timeout + 2)
    assert isinstance(receiver.failure(), DeadlineExceededError)
    for word in ("room 5/0", "d5", "reaching the prefill at bootstrap address prefill.test:8998", "bootstrap_timeout"):
        assert word in receiver.failure().message


def test_decode_without_free_pages_runs_into_the_bootstrap_deadline_and_prefill_hears_of_it():
    world = KVWorld()
    sender, receiver = world.sender(), world.receiver()
    world.pass_time(CONFIG.bootstrap_timeout - 1)
    assert receiver.poll() is KVPoll.WAITING_FOR_INPUT
    world.pass_time(3)
    assert "waiting for free pages" in receiver.failure().message
    assert sender.poll() is KVPoll.FAILED
    assert sender.failure().http_status == 504


def test_a_decode_that_never_announces_runs_into_the_bootstrap_deadline():
    world = KVWorld()
    sender = world.sender()
    world.pass_time(CONFIG.bootstrap_timeout + 2)
    assert "waiting for a decode worker to announce its pages" in sender.failure().message


@pytest.mark.parametrize("chunks", [0, 1], ids=["nothing sent", "half sent"])
def test_a_prefill_that_does_not_finish_runs_into_the_transfer_deadline(chunks):
    world = KVWorld()
    sender, receiver = world.paired()
    for _ in range(chunks):
        sender.send([1], is_last=False)
    world.pass_time(CONFIG.transfer_timeout + 2)
    assert sender.poll() is receiver.poll() is KVPoll.FAILED
    assert "504" in str(sender.failure().http_status)
    assert receiver.failure().http_status == 504
    assert receiver.quiescent()


def test_a_request_that_never_reaches_prefill_fails_its_decode_with_the_reason():
    world = KVWorld()
    receiver = world.receiver()
    world.pass_time(30)
    receiver.init([5], 1, num_tokens=4)
    world.pass_time(CONFIG.bootstrap_timeout - 1)
    assert receiver.poll() is KVPoll.TRANSFERRING
    world.pass_time(3)
    assert receiver.poll() is KVPoll.FAILED
    assert receiver.quiescent()


# -- wrong use and bounds -----------------------------------------------------------------------------------------


def test_a_room_that_is_open_cannot_be_opened_again():
    world = KVWorld()
    world.sender(1)
    world.receiver(1)
    with pytest.raises(DuplicateRoomError, match="room 1/0"):
        world.sender(1)
    with pytest.raises(DuplicateRoomError, match="room 1/0"):
        world.receiver(1)


def test_a_room_number_may_be_used_again_once_it_is_closed():
    world = KVWorld()
    for token in (1, 2):
        receiver = world.receiver()
        world.tick()
        receiver.init([5], 1, num_tokens=4)
        world.tick()
        sender = world.sender()
        world.set_row(1, token=token)
        sender.send([1], is_last=True, metadata_index=0)
        world.tick()
        assert world.decode.metadata.get_buf(1, RoomKey(1)).output_id == token
        sender.clear()
        receiver.clear()


def test_tables_are_bounded():
    world = KVWorld(
        prefill={"limits": RoomLimits(max_rooms=2, max_early=1)}, decode={"limits": RoomLimits(max_rooms=4)}
    )
    receivers = [world.receiver(i) for i in range(4)]
    with pytest.raises(CapacityError):
        world.receiver(4)
    world.tick()
    for i, receiver in enumerate(receivers[:2]):
        receiver.init([i], i, num_tokens=4)
    world.tick()
    assert [r.poll() for r in receivers[:2]] == [KVPoll.TRANSFERRING, KVPoll.FAILED]
    assert receivers[1].failure().http_status == 503
    world.sender(10)
    world.sender(11)
    with pytest.raises(CapacityError):
        world.sender(12)


@pytest.mark.parametrize(("chunks", "sent"), [([[1]], 1), ([[1, 2], [3, 4]], 4)], ids=["too few", "too many"])
def test_other_than_the_announced_number_of_pages_fails_the_room_on_both_sides(chunks, sent):
    world = KVWorld()
    sender, receiver = world.paired(target=(5, 6, 7))
    for i, pages in enumerate(chunks):
        is_last = i == len(chunks) - 1
        sender.send(pages, is_last=is_last, metadata_index=0 if is_last else None)
    world.tick()
    assert f"prefill has {sent} pages of 4 tokens for room 1/0, decode announced 12 tokens" in sender.failure().message
    assert receiver.poll() is KVPoll.FAILED
    assert receiver.quiescent()


@pytest.mark.parametrize(("pages", "row"), [([5, 999], 1), ([5, 6], NUM_ROWS)], ids=["page", "row"])
def test_targets_decode_does_not_have_fail_the_room(pages, row):
    world = KVWorld()
    sender, receiver = world.sender(), world.receiver()
    world.tick()
    receiver.init(pages, row, num_tokens=8)
    world.tick()
    sender.send([1, 2], is_last=True, metadata_index=0)
    world.tick()
    assert sender.poll() is receiver.poll() is KVPoll.FAILED


def test_a_port_refuses_moves_out_of_order():
    world = KVWorld()
    sender, receiver = world.sender(), world.receiver()
    with pytest.raises(IllegalTransition):
        receiver.init([1], 0, num_tokens=4)
    with pytest.raises(ValueError, match="out of order"):
        sender.send([1], is_last=False)
    with pytest.raises(RuntimeError, match="not quiescent"):
        sender.clear()
    with pytest.raises(RuntimeError, match="not quiescent"):
        receiver.clear()
    with pytest.raises(RuntimeError, match="no failure"):
        sender.failure()


# -- peers that do not fit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefill", "words"),
    [
        ({"model": "other"}, "model fingerprint other against tiny"),
        ({"draft_model": "small"}, "draft model fingerprint small against none"),
        ({"backend": "tcp"}, "transfer backend tcp against fake"),
        ({"pool": layout(heads=2)}, "KV heads in all of layer 0 (k) 2 against 1"),
        ({"pool": layout(layers=1)}, "head 0 of layer 1 (k) is held by no source"),
        ({"pool": layout(dtype="bfloat16")}, "KV dtype bfloat16 against float32, which this prefill cannot convert to"),
        ({"metadata_row_bytes": 64}, "metadata row bytes 64 against"),
        (
            {"metadata_widths": RowWidths(hidden_state=64)},
            "width of hidden_state in the metadata row 64 against 0: give both workers the same "
            "--enable-return-hidden-states",
        ),
        (
            {"metadata_widths": RowWidths(top_logprobs=20)},
            "width of top_logprobs in the metadata row 20 against 128: give both workers the same --max-top-logprobs",
        ),
    ],
)
def test_a_prefill_that_does_not_fit_is_refused_with_both_values(prefill, words):
    world = KVWorld(prefill=prefill)
    sender, receiver = world.sender(), world.receiver()
    world.tick()
    assert isinstance(receiver.failure(), IncompatiblePeerError)
    assert words in receiver.failure().message
    assert receiver.quiescent()
    assert words in sender.failure().message


def test_another_protocol_version_is_refused_with_both_versions(monkeypatch):
    world = KVWorld()
    info = world.book.entries[BOOTSTRAP][0]
    world.book.entries[BOOTSTRAP] = [msgspec.structs.replace(info, version=PROTOCOL_VERSION + 1)]
    receiver = world.receiver()
    world.tick()
    assert f"control protocol version {PROTOCOL_VERSION} against {PROTOCOL_VERSION + 1}" in receiver.failure().message


def test_a_registration_in_another_protocol_version_is_answered_with_both_versions():
    world = KVWorld(step=True)
    world.receiver()
    world.decode.manager.tick()
    pair = ("decode", "prefill")
    frame = world.wires.under_way[pair][0]
    world.wires.under_way[pair][0] = frame[:4] + (99).to_bytes(2, "little") + frame[6:]
    world.wires.deliver(pair)
    world.prefill.manager.tick()
    assert (
        f"control protocol version {PROTOCOL_VERSION} against 99".encode()
        in world.wires.under_way["prefill", "decode"][0]
    )
    assert world.prefill.manager.num_undecodable == 1


def test_prefill_refuses_what_decode_overlooked():
    world = KVWorld()
    world.prefill.manager._context.args = world.decode.manager._context.args.__class__(
        backend="fake", model="other", layout=layout(), metadata_row_bytes=1, num_metadata_rows=1
    )
    receiver = world.receiver()
    world.tick()
    assert "prefill refuses: model fingerprint other against tiny" in receiver.failure().message


def test_noise_on_the_control_port_is_counted_and_dropped():
    world = KVWorld()
    for frame in (b"", b"\xc1", b"hello", b"\x80" * 1000):
        world.wires.inboxes["prefill"].append(frame)
    sender, _ = world.paired()
    assert world.prefill.manager.num_undecodable == 4
    assert sender.poll() is KVPoll.WAITING_FOR_INPUT


# -- messages to others, and noise ----------------------------------------------------------------------------------


def test_a_frame_to_a_predecessor_is_answered():
    world = KVWorld(step=True)
    world.wires.inboxes["prefill"].append(encode(Ping(session_id="s"), epoch=5, to_epoch=999, sender="decode"))
    world.prefill.manager.tick()
    assert b"Unregistered" in world.wires.under_way["prefill", "decode"][0]


def test_a_flood_of_strangers_leaves_few_lines_in_the_log(caplog):
    world = KVWorld()
    world.wires.inboxes["prefill"].extend([b"noise"] * 1000)
    world.prefill.manager.tick()
    assert world.prefill.manager.num_undecodable == 1000
    assert 1 <= len(caplog.records) <= 10


def test_a_directory_that_says_no_fails_the_room_and_one_that_gives_up_is_asked_again():
    world = KVWorld()
    world.book.entries[BOOTSTRAP] = LookupFailure("no such rank", is_definitive=True)
    receiver = world.receiver(1)
    world.tick()
    assert isinstance(receiver.failure(), WorkerUnavailableError)
    assert "no such rank" in receiver.failure().message
    world.book.entries[BOOTSTRAP] = LookupFailure("not there")
    receiver = world.receiver(2)
    world.tick()
    assert receiver.poll() is KVPoll.BOOTSTRAPPING
    world.book.entries[BOOTSTRAP] = [world.prefill.manager.prefill_info()]
    world.tick()
    assert receiver.poll() is KVPoll.WAITING_FOR_INPUT


# -- peers that are lost or replaced ------------------------------------------------------------------------------


def test_pages_of_a_lost_prefill_are_quiescent_only_behind_the_fence():
    world = KVWorld(step=True)
    world.prefill.fill([1, 2, 3], seed=1)
    sender, receiver = world.paired(target=(5, 6, 7))
    sender.send([1, 2, 3], is_last=False)
    world.prefill.manager.tick()
    world.network.run_one(world.network.busy_sessions()[0])
    del world.wires.inboxes["prefill"]
    seen = []
    for _ in range(20):
        world.clock.advance(1.0)
        world.decode.manager.tick()
        while world.wires.busy():
            world.wires.deliver(world.wires.busy()[0])
        seen.append((receiver.poll(), receiver.quiescent()))
    assert seen[0] == (KVPoll.TRANSFERRING, False)
    assert seen[-1] == (KVPoll.FAILED, True)
    assert isinstance(receiver.failure(), PeerLostError)
    assert "did not answer for 10 s" in receiver.failure().message
    before = [p.copy() for p in world.decode.pages]
    world.land()
    assert all((a == b).all() for a, b in zip(before, world.decode.pages, strict=True))


def test_a_replaced_prefill_is_found_again_without_restarting_decode():
    world = KVWorld(step=True)
    sender, receiver = world.paired()
    sender.send([1], is_last=False)
    world.prefill.manager.tick()
    world.replace_prefill(epoch=33)
    world.pass_time(2 * CONFIG.heartbeat_interval)
    assert isinstance(receiver.failure(), PeerLostError)
    assert receiver.quiescent()
    receiver.clear()
    sender, receiver = world.paired(room=2, target=(8,))
    world.set_row(2)
    sender.send([1], is_last=True, metadata_index=0)
    world.tick()
    world.land()
    world.tick()
    assert receiver.poll() is KVPoll.SUCCESS


def test_a_room_that_knew_only_the_predecessor_finds_the_successor():
    world = KVWorld()
    world.receiver(1)
    world.tick()
    world.replace_prefill(epoch=33, address="prefill-2")
    del world.wires.inboxes["prefill"]
    world.pass_time(CONFIG.heartbeat_interval + 1)
    world.pass_time(CONFIG.heartbeat_interval)
    receiver, sender = world.receiver(2), world.sender(2)
    world.pass_time(CONFIG.heartbeat_interval)
    receiver.init([4], 0, num_tokens=4)
    world.tick()
    assert sender.poll() is KVPoll.WAITING_FOR_INPUT


def test_a_room_that_goes_on_with_a_successor_keeps_its_pages_until_the_successor_lets_go():
    world = KVWorld(step=True)
    sender, receiver = world.sender(1), world.receiver(1)
    world.decode.manager.tick()
    assert receiver.poll() is KVPoll.BOOTSTRAPPING
    world.replace_prefill(epoch=33)
    world.tick(8)
    sender = world.sender(1)
    receiver.init([4, 5], 0, num_tokens=2 * PAGE_SIZE)
    world.tick()
    sender.send([1], is_last=False)
    world.prefill.manager.tick()
    receiver.abort("the client left")
    assert not receiver.quiescent()
    world.land()
    world.tick()
    assert receiver.quiescent()


def test_a_prefill_that_never_answers_is_looked_up_less_and_less_often():
    world = KVWorld()
    asked_at = []
    for room in range(1, 40):
        world.receiver(room)
        while len(world.book.requests) > len(asked_at):
            asked_at.append(world.clock.now())
        for _ in range(40):
            world.clock.advance(0.125)
            world.decode.manager.tick()
            while len(world.book.requests) > len(asked_at):
                asked_at.append(world.clock.now())
    # Each time it takes two heartbeats to detect the silence; the rest is the pause.
    silence = CONFIG.heartbeat_interval * CONFIG.heartbeat_misses
    pauses = [b - a - silence for a, b in itertools.pairwise(asked_at)]
    assert pauses[0] < 1.0
    assert pauses[-1] > pauses[0] + 1.0
    assert pauses[:4] == sorted(pauses[:4])


def test_a_message_for_the_predecessor_is_answered_and_fences_it():
    world = KVWorld(step=True)
    _, receiver = world.paired()
    world.replace_prefill(epoch=33)
    receiver.abort("the client left")
    world.tick()
    assert receiver.quiescent()
    assert world.decode.manager.num_peers == 0


def test_a_lost_decode_fails_its_rooms_on_prefill_and_frees_their_pages():
    world = KVWorld(step=True)
    sender, _ = world.paired()
    sender.send([1, 2], is_last=False)
    world.prefill.manager.tick()
    assert not sender.quiescent()
    for _ in range(int(CONFIG.heartbeat_interval * 3) + 2):
        world.clock.advance(1.0)
        world.prefill.manager.tick()
    assert isinstance(sender.failure(), PeerLostError)
    assert sender.quiescent()
    assert world.prefill.manager.num_peers == 0


def test_two_sides_that_lost_each_other_for_a_while_meet_again():
    world = KVWorld(step=True)
    sender, receiver = world.paired()
    sender.send([1], is_last=False)
    world.tick()
    for _ in range(30):
        world.clock.advance(1.0)
        world.prefill.manager.tick()
    assert sender.poll() is KVPoll.FAILED
    world.pass_time(CONFIG.heartbeat_interval)
    assert receiver.poll() is KVPoll.FAILED
    assert receiver.quiescent()
    sender, receiver = world.paired(room=2)
    assert receiver.poll() is KVPoll.TRANSFERRING


def test_a_connection_that_breaks_half_way_fences_the_session_and_the_next_room_works():
    world = KVWorld(step=True)
    sender, receiver = world.paired(target=(5, 6, 7))
    sender.send([1, 2, 3], is_last=False)
    world.prefill.manager.tick()
    session = world.network.busy_sessions()[0]
    world.network.run_one(session)
    world.network.break_session(session)
    world.prefill.manager.tick()
    assert not receiver.quiescent()
    assert "lost half-way" in sender.failure().message
    world.tick()
    assert receiver.poll() is KVPoll.FAILED
    assert receiver.quiescent()
    assert world.network.busy_sessions() == []
    world.paired(room=2)


@pytest.mark.parametrize("is_closed", [False, True])
def test_prefill_does_not_vouch_for_a_room_of_which_a_write_was_lost(is_closed):
    """A decode worker that requests a lost session learns of the loss, and gets no final status of the room."""
    world = KVWorld(step=True, late_fences=True)
    sender, receiver = world.paired(1, (5, 6))
    world.set_row(1)
    sender.send([1, 2], is_last=True, metadata_index=0)
    world.tick(1)
    (session,) = world.network.busy_sessions()
    world.network.run_one(session)
    world.network.break_session(session)
    world.prefill.manager.tick()
    assert sender.quiescent()
    if is_closed:
        sender.clear()
    world.wires.deliver(("prefill", "decode"), drop=True)
    receiver.abort("gave up")
    world.tick()
    assert not receiver.quiescent()
    world.land()
    world.tick()
    assert receiver.quiescent()
    receiver.clear()


def test_a_room_announced_through_a_lost_session_ends_on_both_sides_at_once():
    world = KVWorld(step=True)
    sender, _ = world.paired(1, (5, 6, 7))
    late_sender, late_receiver = world.sender(2), world.receiver(2)
    world.tick()
    sender.send([1, 2, 3], is_last=False)
    world.prefill.manager.tick()
    session = world.network.busy_sessions()[0]
    world.network.run_one(session)
    world.network.break_session(session)
    late_receiver.init([9], 2, num_tokens=PAGE_SIZE)
    world.prefill.manager.tick()
    world.tick()
    assert (late_sender.poll(), late_receiver.poll()) == (KVPoll.FAILED, KVPoll.FAILED)


def test_a_refused_write_fails_its_room_alone():
    world = KVWorld(step=True)
    (a, ra), (b, rb) = world.paired(1, (5,)), world.paired(2, (6,))
    (part,) = a.targets
    part.info = msgspec.structs.replace(part.info, pages=[5])
    world.decode.transport.memory = Memory(
        [
            Region(r.address, 6 * world.decode.pages[0].shape[1]) if i < len(world.decode.pages) else r
            for i, r in enumerate(world.decode.transport.memory.regions)
        ]
    )
    world.set_row(1)
    a.send([1], is_last=True, metadata_index=0)
    b.send([2], is_last=True, metadata_index=0)
    world.tick()
    world.land()
    world.tick()
    assert (ra.poll(), rb.poll()) == (KVPoll.SUCCESS, KVPoll.FAILED)
    assert rb.quiescent()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_worker_that_shuts_down_tells_its_peers_at_once(side):
    world = KVWorld()
    sender, receiver = world.paired()
    getattr(world, side).manager.close()
    world.tick(1)
    other = receiver if side == "prefill" else sender
    assert other.poll() is KVPoll.FAILED
    assert "shutting down" in other.failure().message
    assert other.quiescent()


# -- rooms without a peer -----------------------------------------------------------------------------------------


def test_a_fake_room_succeeds_on_prefill_right_after_the_last_chunk():
    sender = KVWorld().prefill.manager.sender("health", FAKE)
    assert sender.poll() is KVPoll.WAITING_FOR_INPUT
    sender.send([1], is_last=False)
    assert sender.poll() is KVPoll.TRANSFERRING
    sender.send([], is_last=True, metadata_index=0)
    assert sender.poll() is KVPoll.SUCCESS
    assert sender.stats().num_bytes == 0
    assert sender.quiescent()
    sender.clear()


def test_a_fake_room_succeeds_on_decode_with_a_valid_row_of_its_own():
    world = KVWorld()
    receiver = world.decode.manager.receiver("health", FAKE)
    assert receiver.poll() is KVPoll.WAITING_FOR_INPUT
    receiver.init([1], 3, num_tokens=PAGE_SIZE)
    assert receiver.poll() is KVPoll.SUCCESS
    assert world.decode.metadata.get_buf(3, FAKE.key).output_id == 0
    receiver.clear()


def test_a_fake_room_can_be_aborted():
    receiver = KVWorld().decode.manager.receiver("health", FAKE)
    receiver.abort("never mind")
    receiver.init([1], 3, num_tokens=PAGE_SIZE)
    assert receiver.poll() is KVPoll.FAILED
    assert receiver.quiescent()
