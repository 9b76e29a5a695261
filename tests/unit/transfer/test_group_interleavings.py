"""Random orders of everything that can happen between workers of several ranks; what must hold in all of them.

What `test_manager_interleavings.py` does to two managers, done to groups of unequal shape: each rank's manager has its
turn when it has it, and so have the messages of each link inside a worker. A rank may die, and some time later its
whole worker is replaced.
"""

import pytest

from splitserve.core.layout import KVComponent, KVLayout
from splitserve.transfer.state import KVPoll
from support.kv_groups import GroupWorld, RankLayouts
from support.kv_world import NUM_PAGES, PAGE_SIZE

from .test_manager_interleavings import EVENTS, Chaos, check_quiet_runs, check_runs

# tp x pp of prefill, and of decode; heads.
SHAPES = [
    ((2, 1), (1, 1), 4),
    ((1, 1), (2, 1), 4),
    ((2, 1), (2, 1), 4),
    ((1, 2), (1, 1), 4),
    ((1, 1), (1, 2), 4),
    ((1, 2), (2, 1), 4),
    ((2, 2), (1, 1), 2),
    ((1, 1), (2, 2), 2),
    ((4, 1), (2, 1), 2),
    ((2, 1), (1, 2), 1),
]
# Layers of each stage, by the number of stages.
STAGES = {1: [range(3)], 2: [range(1), range(1, 3)]}


def shape(tp, pp, num_heads, page_size, num_pages):
    layouts = []
    for layers in STAGES[pp]:
        for rank in range(tp):
            held = max(1, num_heads // tp)
            first = rank * num_heads // tp
            names = ("k", "v") if num_heads > 1 else ("latent",)
            components = (
                KVComponent(n, layer, "float32", held, first, num_heads, 1) for layer in layers for n in names
            )
            layouts.append(KVLayout(page_size, num_pages, tuple(components)))
    return RankLayouts(layouts, tp)


class GroupChaos(Chaos):
    num_steps = 1500

    def make_world(self):
        prefill, decode, num_heads = self.rng.choice(SHAPES)
        self.source_pages = self.rng.choice([1, 2])
        world = GroupWorld(
            shape(*prefill, num_heads, PAGE_SIZE // self.source_pages, NUM_PAGES * self.source_pages),
            shape(*decode, num_heads, PAGE_SIZE, NUM_PAGES),
            step=True,
            late_fences=self.rng.random() < 0.5,
        )
        busy = len(world.turns()) / 2
        self.events = EVENTS | {
            "tick": EVENTS["tick"] * busy,
            "frame": EVENTS["frame"] * busy,
            "bytes": EVENTS["bytes"] * busy,
            "word": EVENTS["frame"] * busy,
            "death": 0.2,
        }
        return world

    def happen(self, event):
        match event:
            case "word" if busy := self.world.busy_pipes():
                self.rng.choice(busy).let_through()
            case "death":
                self.kill_one()

    def kill_one(self):
        group = self.rng.choice([self.world.prefill, self.world.decode])
        if alive := [i for i in group.followers if i not in group.dead]:
            group.kill(self.rng.choice(alive))

    def may_fail_alone(self, cause):
        """The driver gave it up, or lost a rank, before all ranks had reported their part."""
        return cause.endswith(": chaos") or "is gone" in cause

    def run_out(self):
        """What has lost a rank is a worker no more."""
        if self.world.prefill.dead:
            self.replace_prefill()
        if self.world.decode.dead:
            self.replace_decode()
        super().run_out()


def test_in_any_order_every_room_ends_on_every_rank_and_no_byte_lands_in_a_released_page(caplog):
    check_group_runs(range(12), caplog)


@pytest.mark.soak
@pytest.mark.parametrize("block", range(20))
def test_ten_thousand_runs(block, caplog):
    check_group_runs(range(block * 500, block * 500 + 500), caplog)


def check_group_runs(seeds, caplog):
    outcomes = set()
    for seed in seeds:
        outcomes |= check_runs([seed], GroupChaos)
        # No follower was ordered what it could not do.
        assert not [record for record in caplog.records if record.levelname == "ERROR"], f"seed {seed}"
        caplog.clear()
    assert outcomes == {KVPoll.SUCCESS, KVPoll.FAILED}


def test_without_disturbances_every_room_succeeds_in_any_order():
    check_quiet_runs(range(6), GroupChaos)
