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
            tokens = max(tokens, state.num_tokens_in_transfer)
            queues |= {name for name, age in state.queue_ages.items() if age > 0}
    assert oldest > 0
    assert 64 <= tokens <= 128
    assert {"bootstrap", "inflight", "prealloc", "transfer"} & queues
    for worker in (world.prefill, world.decode):
        state = worker.scheduler.state()
        assert set(state.queue_ages.values()) == {0.0}
        assert state.num_tokens_in_transfer == 0


def test_a_transfer_names_the_decode_worker():
    world = PairWorld(0)
    world.submit("a", list(range(64)), GREEDY, room=1)
    world.run_until_idle()
    (stats,) = [output.transfer for output in world.prefill.outputs["a"] if output.transfer is not None]
    assert stats.peer == "decode"
