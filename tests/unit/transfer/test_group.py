"""The rooms of a worker of several ranks: one state, one cause, one release, whichever rank something happens to."""

import msgspec
import pytest

from splitserve.core.errors import CapacityError, DuplicateRoomError
from splitserve.core.parallel import ParallelRank
from splitserve.core.request import FAKE_BOOTSTRAP_HOST, BootstrapInfo, RoomKey
from splitserve.ranks.kv_follower import _Followed
from splitserve.transfer.group_wire import ENCODER, ORDERS, REPORTS, GiveUp, RoomReport, SendPages
from splitserve.transfer.room import RankGroup, Room
from splitserve.transfer.state import IllegalTransition, KVPoll, RoomState
from splitserve.transfer.wire import RoomFailureCause
from support.kv_groups import GroupWorld, RankLayouts
from support.kv_world import BOOTSTRAP, CONFIG, NUM_ROWS

from .reshard_world import Cut, Kind

KINDS = [Kind(name, layer, 2, 2) for layer in range(2) for name in "kv"]


def shape(tp=1, pp=1):
    stages = ((0, 1),) if pp == 1 else ((0,), (1,))
    return RankLayouts([layout for _, layout in Cut(tp, stages, 4, 64, "NHD", "float32").ranks(KINDS)], tp)


def two_and_two(**options):
    """Two stages to two halves of the heads: every rank is paired with every rank."""
    return GroupWorld(shape(pp=2), shape(tp=2), **options)


def paired(world, room=1, target=(5, 6), **more):
    sender, receiver = world.sender(room), world.receiver(room)
    world.tick()
    receiver.init(list(target), room, num_tokens=4 * len(target), **more)
    world.tick()
    assert sender.poll() is KVPoll.WAITING_FOR_INPUT
    return sender, receiver


def send(world, sender, pages=(1, 2), room=1):
    world.set_row(room, index=room)
    sender.send(list(pages), is_last=True, metadata_index=room)


def states(*ends):
    return [end.poll() for end in ends]


FAILED = [KVPoll.FAILED] * 2


def check_both_go(world, sender, receiver):
    """Both ends become idle on every rank, and no state is left."""
    assert sender.quiescent()
    assert receiver.quiescent()
    sender.clear()
    receiver.clear()
    world.tick()
    assert world.num_rooms() == 0


# -- one state ----------------------------------------------------------------------------------------------------


def test_a_room_is_paired_when_every_rank_is():
    world = two_and_two(step=True)
    sender, receiver = world.sender(), world.receiver()
    follower = world.decode.followers[1]
    for _ in range(8):
        for turn in (turn for turn in world.turns() if turn != follower.tick):
            turn()
        for pair in world.wires.busy():
            world.wires.deliver(pair)
        for pipe in world.busy_pipes():
            pipe.let_through()
    assert receiver.state is RoomState.WAITING_FOR_INPUT
    assert receiver.poll() is KVPoll.BOOTSTRAPPING
    with pytest.raises(IllegalTransition):
        receiver.init([1], 0, num_tokens=4)
    with pytest.raises(ValueError, match="before every rank knows"):
        sender.send([1], is_last=False)


def test_a_room_that_is_under_way_never_looks_as_if_it_had_not_begun():
    world = two_and_two(step=True)
    receiver = world.receiver()
    world.tick()
    receiver.init([5, 6], 0, num_tokens=8)
    assert receiver.poll() is KVPoll.TRANSFERRING
    assert not receiver.quiescent()


def test_success_takes_all_ranks_of_both_sides():
    world = two_and_two(step=True)
    world.prefill.fill([1, 2], seed=1)
    sender, receiver = paired(world)
    send(world, sender)
    world.tick()
    sessions = world.network.busy_sessions()
    assert len(sessions) == 4
    for session in sessions:
        assert KVPoll.SUCCESS not in states(sender, receiver)
        while session in world.network.busy_sessions():
            world.network.run_one(session)
        world.tick()
    assert states(sender, receiver) == [KVPoll.SUCCESS] * 2
    assert world.decode.holds([5, 6], seed=1)
    check_both_go(world, sender, receiver)


def test_stats_add_bytes_up_and_take_the_longest_time():
    world = two_and_two(step=True)
    sender, _ = paired(world)
    send(world, sender)
    assert sender.stats() is None
    world.tick()
    world.clock.advance(2.0)
    world.land()
    world.tick()
    stats = sender.stats()
    # 2 layers x 2 tensors x 8 tokens x 2 heads x 2 float32, and one row.
    assert stats.num_bytes == 2 * 2 * 8 * 2 * 2 * 4 + world.prefill.metadata.row_bytes
    assert stats.seconds == 2.0


def test_what_decode_holds_is_held_on_all_ranks():
    world = two_and_two()
    world.prefill.fill([1, 2], seed=1)
    sender, receiver = paired(world, num_held_tokens=4)
    send(world, sender)
    world.tick()
    assert states(sender, receiver) == [KVPoll.SUCCESS] * 2
    assert all((component[5] == 0).all() for component in world.decode.pages)
    assert sender.stats().num_bytes == 2 * 2 * 4 * 2 * 2 * 4 + world.prefill.metadata.row_bytes


def test_pages_that_a_rank_damaged_fail_the_room_by_its_checksum():
    world = two_and_two(step=True, decode_options={"wants_checksum": True})
    world.prefill.fill([1, 2], seed=1)
    sender, receiver = paired(world)
    send(world, sender)
    world.tick(3)
    world.land()
    world.decode.workers[1].pages[3][6, 2] ^= 1
    world.tick()
    assert receiver.poll() is KVPoll.FAILED
    assert "rank tp 1 of 2, pp 0 of 1: the KV cache of room 1/0" in receiver.failure().message
    assert "arrived damaged" in receiver.failure().message


def test_a_followers_word_from_before_an_order_proves_nothing():
    world = two_and_two(step=True)
    sender, receiver = world.sender(), world.receiver()
    world.tick()
    receiver.init([5, 6], 1, num_tokens=8)
    receiver.abort("gave up")
    # All ranks receive it except decode's second rank, which has reported earlier that its pages are fenced.
    for _ in range(6):
        for worker in [*world.prefill.workers, world.decode.driver]:
            worker.manager.tick()
        world.decode.manager.tick()
        for pair in world.wires.busy():
            world.wires.deliver(pair)
    assert receiver.state is RoomState.FAILED
    assert all(report.is_quiescent for report in receiver._reports)
    assert not receiver.quiescent()
    world.tick()
    assert states(sender, receiver) == FAILED
    check_both_go(world, sender, receiver)


# -- one cause ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("stage", ["opened", "announced", "sending"])
def test_an_abort_ends_the_room_on_every_rank_of_both_sides(side, stage):
    world = two_and_two(step=True)
    if stage == "opened":
        sender, receiver = world.sender(), world.receiver()
    else:
        sender, receiver = paired(world)
    if stage == "sending":
        send(world, sender)
        world.tick(1)
    (sender if side == "prefill" else receiver).abort("the client left")
    world.tick()
    if stage == "opened" and side == "prefill":
        # It has no peer to notify until decode announces the room.
        receiver.init([5], 0, num_tokens=4)
        world.tick()
    assert states(sender, receiver) == FAILED
    for end in (sender, receiver):
        assert "the client left" in end.failure().message
        assert end.failure().http_status == 499
    world.land()
    world.tick()
    check_both_go(world, sender, receiver)


def test_what_fails_one_rank_fails_the_room_everywhere_and_the_rank_is_named():
    world = two_and_two()
    sender, receiver = paired(world)
    # Only the second half of decode has no such page.
    (part,) = [p for s in world.prefill.workers[0].manager._rooms.values() for p in s.targets[1:]]
    part.info = msgspec.structs.replace(part.info, pages=[5, 99])
    send(world, sender)
    world.tick()
    assert states(sender, receiver) == FAILED
    assert "rank tp 0 of 1, pp 0 of 2: " in sender.failure().message
    assert "target pages reach outside the pool" in sender.failure().message
    assert "target pages reach outside the pool" in receiver.failure().message
    check_both_go(world, sender, receiver)


def test_a_follower_that_has_no_room_for_another_fails_it_with_its_own_status():
    world = two_and_two()
    follower = world.decode.workers[1].manager
    own = [follower.receiver(f"x{n}", BootstrapInfo("elsewhere", 1, RoomKey(100 + n))) for n in range(3)]
    follower._context.limits = type(follower._context.limits)(max_rooms=3)
    receiver = world.receiver()
    world.tick()
    assert receiver.poll() is KVPoll.FAILED
    assert receiver.failure().http_status == CapacityError.http_status
    assert receiver.failure().reason == CapacityError.reason
    receiver.clear()
    world.tick()
    assert world.decode.manager.num_rooms == 0
    assert follower.num_rooms == len(own)


def test_a_room_that_the_driver_refuses_is_opened_nowhere():
    world = two_and_two()
    world.receiver()
    with pytest.raises(DuplicateRoomError):
        world.receiver()
    world.tick()
    assert [worker.manager.num_rooms for worker in world.decode.workers] == [1, 1]


def test_a_rank_that_is_gone_fails_all_rooms_and_their_pages_stay():
    world = two_and_two()
    sender, receiver = paired(world)
    world.decode.kill(1)
    world.tick(1)
    assert receiver.poll() is KVPoll.FAILED
    assert "rank tp 1 of 2, pp 0 of 1 of this worker is gone" in receiver.failure().message
    world.pass_time(3 * CONFIG.heartbeat_interval * CONFIG.heartbeat_misses)
    assert not receiver.quiescent()
    # Prefill receives it from the live ranks.
    assert sender.poll() is KVPoll.FAILED
    assert sender.quiescent()
    assert world.receiver(2).poll() is KVPoll.FAILED


def test_followers_without_a_driver_give_their_rooms_up():
    world = two_and_two()
    sender, receiver = paired(world)
    follower = world.decode.followers[1]
    follower._link.is_open = False
    follower.tick()
    world.tick()
    assert states(sender, receiver) == FAILED
    assert "the driver of this worker is gone" in receiver.failure().message


# -- peers --------------------------------------------------------------------------------------------------------


def test_one_source_that_is_silent_is_the_loss_of_its_whole_worker_and_the_next_room_meets_the_successor():
    world = two_and_two(step=True)
    sender, receiver = paired(world)
    send(world, sender)
    # One of prefill's ranks has stopped, the other is well.
    world.prefill.dead.add(0)
    world.pass_time(3 * CONFIG.heartbeat_interval * CONFIG.heartbeat_misses)
    assert receiver.poll() is KVPoll.FAILED
    assert "rank tp 0 of 1, pp 0 of 2 was lost" in receiver.failure().message
    assert receiver.quiescent()
    world.replace_prefill(epoch=7000)
    late_sender, late = world.sender(2), world.receiver(2)
    world.pass_time(60)
    assert late.poll() is KVPoll.WAITING_FOR_INPUT
    late.init([7], 2, num_tokens=4)
    world.tick()
    send(world, late_sender, pages=[3], room=2)
    world.tick(3)
    world.land()
    world.tick()
    assert states(late_sender, late) == [KVPoll.SUCCESS] * 2


def test_pages_are_free_only_when_every_source_is_fenced():
    world = two_and_two(step=True, late_fences=True)
    sender, receiver = paired(world)
    send(world, sender)
    world.tick(3)
    for session in world.network.busy_sessions():
        world.network.run_one(session)
    world.replace_prefill(epoch=7000)
    world.pass_time(3 * CONFIG.heartbeat_interval * CONFIG.heartbeat_misses)
    assert receiver.poll() is KVPoll.FAILED
    busy = world.network.busy_sessions()
    assert len(busy) == 4
    for session in busy:
        assert not receiver.quiescent()
        while session in world.network.busy_sessions():
            world.network.run_one(session)
        world.tick()
    assert receiver.quiescent()


def test_an_abort_that_one_source_did_not_hear_is_repeated_to_that_one_alone():
    world = two_and_two(step=True)
    _, receiver = paired(world)
    receiver.abort("gave up")
    world.decode.driver.manager.tick()
    world.wires.deliver(("decode-0", "prefill-0"), drop=True)
    world.wires.deliver(("decode-0", "prefill-1"))
    world.prefill.driver.manager.tick()
    world.wires.deliver(("prefill-1", "decode-0"))
    while ("prefill-1", "decode-0") in world.wires.busy():
        world.wires.deliver(("prefill-1", "decode-0"))
    world.decode.driver.manager.tick()
    first, _ = receiver.peer.sources
    assert receiver.loans == {first.session_id}
    world.clock.advance(CONFIG.heartbeat_interval)
    world.decode.driver.manager.tick()
    again = {to: frames for (sender, to), frames in world.wires.under_way.items() if sender == "decode-0"}
    # A ping to each, and the abort to the one.
    assert {to: len(frames) for to, frames in again.items() if to.startswith("prefill")} == {
        "prefill-0": 2,
        "prefill-1": 1,
    }


def test_announcements_that_come_before_the_request_are_kept_until_all_are_there():
    world = two_and_two()
    receiver = world.receiver()
    world.tick()
    receiver.init([5, 6], 1, num_tokens=8)
    world.tick()
    sender = world.sender()
    assert sender.state is RoomState.WAITING_FOR_INPUT
    world.tick()
    world.prefill.fill([1, 2], seed=4)
    send(world, sender)
    world.tick()
    assert states(sender, receiver) == [KVPoll.SUCCESS] * 2
    assert world.decode.holds([5, 6], seed=4)


def test_early_announcements_of_which_one_is_given_up_are_all_answered():
    world = two_and_two()
    receiver = world.receiver()
    world.tick()
    receiver.init([5, 6], 1, num_tokens=8)
    world.tick()
    receiver.abort("gave up")
    world.tick()
    assert receiver.quiescent()
    sender = world.sender()
    world.tick()
    assert "gave up" in sender.failure().message


def test_a_request_that_never_comes_ends_the_room_on_all_ranks():
    world = two_and_two()
    receiver = world.receiver()
    world.tick()
    receiver.init([5, 6], 1, num_tokens=8)
    world.pass_time(CONFIG.bootstrap_timeout + 2)
    assert receiver.poll() is KVPoll.FAILED
    assert receiver.quiescent()


def test_a_rank_of_decode_that_never_announces_runs_into_the_deadline():
    world = GroupWorld(shape(), shape(tp=2))
    sender = world.sender()
    world.pass_time(5)
    receiver = world.receiver()
    world.tick()
    world.decode.dead.add(1)
    receiver.init([5], 0, num_tokens=4)
    world.pass_time(CONFIG.bootstrap_timeout + 2)
    assert "waiting for all ranks of a decode worker to announce their pages" in sender.failure().message


def test_ranks_that_announce_different_prompts_fail_the_room():
    world = GroupWorld(shape(), shape(tp=2))
    sender, receiver = world.sender(), world.receiver()
    world.tick()
    receiver.init([5], 0, num_tokens=4)
    for pipe in world.decode.pipes:
        pipe.take()
    other = next(iter(world.decode.workers[1].manager._rooms.values()))
    other.init([5], 0, num_tokens=3)
    world.tick()
    assert "ranks of decode announce 4 and 3 tokens" in sender.failure().message


# -- the rest of the port -----------------------------------------------------------------------------------------


def test_a_prompt_that_decode_asks_for_is_taken_once_and_its_room_is_found_on_every_rank():
    world = two_and_two()
    receiver = world.receiver()
    world.tick()
    receiver.init([5, 6], 1, num_tokens=8, prompt_ids=list(range(8)))
    world.tick()
    (asked,) = world.prefill.manager.take_requested_prompts()
    assert asked.token_ids == list(range(8))
    assert world.prefill.manager.take_requested_prompts() == []
    assert world.prefill.workers[0].manager.take_requested_prompts() == []
    sender = world.prefill.manager.sender(asked.rid, BootstrapInfo(*BOOTSTRAP[:2], asked.key))
    world.tick()
    send(world, sender)
    world.tick()
    assert states(sender, receiver) == [KVPoll.SUCCESS] * 2


def test_a_fake_room_succeeds_on_all_ranks():
    world = two_and_two()
    info = BootstrapInfo(FAKE_BOOTSTRAP_HOST, 1, RoomKey(1))
    sender, receiver = world.prefill.manager.sender("p", info), world.decode.manager.receiver("d", info)
    world.tick()
    sender.send([1], is_last=True, metadata_index=0)
    receiver.init([1], 0, num_tokens=4)
    world.tick()
    assert states(sender, receiver) == [KVPoll.SUCCESS] * 2
    assert sender.stats().num_bytes == 0
    assert world.decode.metadata.get_buf(0, RoomKey(1)).output_id == 0
    check_both_go(world, sender, receiver)


def test_a_room_number_may_be_used_again_once_it_is_closed():
    world = two_and_two()
    for page in range(3):
        sender, receiver = paired(world, target=(page, page + 10))
        send(world, sender)
        world.tick()
        assert states(sender, receiver) == [KVPoll.SUCCESS] * 2
        check_both_go(world, sender, receiver)


def test_a_room_is_not_forgotten_before_it_is_at_rest():
    world = two_and_two()
    sender, receiver = paired(world)
    for end in (sender, receiver):
        with pytest.raises(RuntimeError, match="not quiescent on all ranks"):
            end.clear()
        with pytest.raises(RuntimeError, match="no failure"):
            end.failure()


def test_the_driver_needs_a_link_to_every_follower():
    driver = ParallelRank(tp_size=2)
    with pytest.raises(ValueError, match="0 links for the 1 followers"):
        RankGroup(driver, [])
    with pytest.raises(ValueError, match="links"):
        RankGroup(ParallelRank(tp_rank=1, tp_size=2), [None])


def test_orders_and_reports_survive_the_link():
    order = SendPages(number=3, pages=[1, 2], is_last=True, metadata_index=NUM_ROWS - 1)
    cause = RoomFailureCause(message="m", http_status=499, reason="r")
    assert ORDERS.decode(ENCODER.encode(order)) == order
    assert ORDERS.decode(ENCODER.encode(GiveUp(number=1, cause=cause))) == GiveUp(number=1, cause=cause)
    report = RoomReport(number=3, num_orders=2, state=KVPoll.FAILED, is_quiescent=True, failure=cause)
    assert REPORTS.decode(ENCODER.encode(report)) == report


# -- work ---------------------------------------------------------------------------------------------------------


def looks_of_one_life(num_others, monkeypatch):
    """How often a room is looked at, on both sides, beside so many that wait: when nothing happens, and in one life."""
    world = two_and_two()
    for room in range(2, 2 + num_others):
        paired(world, room=room, target=(7,))
    looks = []

    def counting(cls, name):
        method = getattr(cls, name)

        def counted(self, *args):
            looks.append(name)
            return method(self, *args)

        monkeypatch.setattr(cls, name, counted)

    counting(Room, "advance")
    counting(Room, "take_report")
    counting(_Followed, "report")
    world.tick()
    idle = len(looks)
    sender, receiver = paired(world)
    send(world, sender)
    world.tick()
    assert states(sender, receiver) == [KVPoll.SUCCESS] * 2
    sender.clear()
    receiver.clear()
    world.tick()
    monkeypatch.undo()
    return idle, len(looks) - idle


def test_rooms_that_wait_cost_nothing(monkeypatch):
    assert looks_of_one_life(1, monkeypatch) == looks_of_one_life(40, monkeypatch)
    assert looks_of_one_life(40, monkeypatch)[0] == 0
