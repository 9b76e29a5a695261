"""Figures that schedulers of a pair report for the metrics: ages of queues, tokens in transfer, step times, peers."""

from splitserve.core.sampling import ResolvedSampling
from support.pair import PairWorld

GREEDY = ResolvedSampling(max_new_tokens=8, temperature=0.0)


def test_step_times_count_every_step_by_its_kind():
    world = PairWorld(0, prefill_settings={"token_budget": 24})
    world.submit("a", list(range(100)), GREEDY, room=1)
    world.run_until_idle()
    for worker, kind in ((world.prefill, "prefill"), (world.decode, "decode")):
        state = worker.scheduler.state()
        counts = {kind: sum(times.counts) for kind, times in state.step_times.items()}
        assert counts == {"decode": 0, "prefill": 0, "mixed": 0} | {kind: state.num_steps_total}


def test_queues_report_the_age_of_their_oldest_request_and_tokens_in_transfer():
    world = PairWorld(0)
    world.submit("a", list(range(64)), GREEDY, room=1)
    world.submit("b", list(range(64, 128)), GREEDY, room=2)
    oldest, tokens, queues = 0.0, 0, set()
    world.happen()
    while not (world.prefill.is_idle() and world.decode.is_idle()):
        world.happen()
        for worker in (world.prefill, world.decode):
            state = worker.scheduler.state()
            oldest = max(oldest, *state.queue_ages.values())
            tokens = max(tokens, state.num_tokens_pre_allocated)
            queues |= {name for name, age in state.queue_ages.items() if age > 0}
    assert oldest > 0
    assert 64 <= tokens <= 128
    assert {"bootstrap", "inflight", "prealloc", "transfer"} & queues
    for worker in (world.prefill, world.decode):
        state = worker.scheduler.state()
        assert set(state.queue_ages.values()) == {0.0}
        assert state.num_tokens_pre_allocated == 0


def test_a_transfer_names_the_decode_worker():
    world = PairWorld(0)
    world.submit("a", list(range(64)), GREEDY, room=1)
    world.run_until_idle()
    (stats,) = [output.transfer for output in world.prefill.outputs["a"] if output.transfer is not None]
    assert stats.peer == "decode"


def test_the_spans_of_a_transfer_have_its_backend_and_path():
    world = PairWorld(0)
    world.submit("a", list(range(64)), GREEDY, room=1)
    world.run_until_idle()
    parts = [span for span in world.prefill.outputs["a"][-1].stages.spans if span.name == "transfer"]
    assert {(part.attributes["backend"], part.attributes["path"]) for part in parts} == {("tcp", "in_process")}


def reasons(world: PairWorld, rid: str) -> set[tuple[str, str]]:
    """Return the stages of a request on decode that have a reason, with it."""
    final = world.decode.outputs[rid][-1]
    return {(span.name, str(span.attributes["reason"])) for span in final.stages.spans if "reason" in span.attributes}


def reasons_until_idle(world: PairWorld) -> list[set[str]]:
    """Run a pair; return the reasons in the states of prefill and decode. In the end they have none."""
    states = [worker.scheduler.state for worker in (world.prefill, world.decode)]
    found: list[set[str]] = [set(), set()]

    def look() -> None:
        for reasons, state in zip(found, states, strict=True):
            reasons.add(state().waiting_reason)

    world.run_until_idle(after_event=look)
    assert [state().waiting_reason for state in states] == ["", ""]
    return found


def test_a_request_that_waits_for_pages_or_a_place_has_the_reason_in_its_timeline_and_so_has_its_worker():
    crowded = PairWorld(0, decode_settings={"num_pages": 4})
    slow = PairWorld(0, decode_settings={"max_running": 1})
    scarce = PairWorld(0, num_slots=1)
    one_sender = PairWorld(0)
    slots = one_sender.prefill.scheduler.role._kit.slots
    for _ in range(slots.size - 1):
        slots.alloc()
    shown = []
    for world in (crowded, slow, scarce, one_sender):
        for room in range(1, 5):
            world.submit(str(room), [1000 * room + i for i in range(24)], GREEDY, room=room)
        shown.append(reasons_until_idle(world))
    assert [decode for _, decode in shown[:3]] == [{"", "kv_pool"}, {"", "max_running"}, {"", "metadata_slots"}]
    assert [reasons - {"budget"} for reasons in shown[3]] == [{"", "metadata_slots"}, {""}]
    assert ("prealloc", "kv_pool") in set().union(*(reasons(crowded, str(room)) for room in range(1, 5)))
    assert ("prebuilt", "max_running") in set().union(*(reasons(slow, str(room)) for room in range(1, 5)))
    assert ("prealloc", "metadata_slots") in set().union(*(reasons(scarce, str(room)) for room in range(1, 5)))
