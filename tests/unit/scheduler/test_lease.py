"""A lease ends when no peer can write any more: never before, and always then."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from splitserve.core.request import Request
from splitserve.core.sampling import ResolvedSampling
from splitserve.scheduler.roles.role import LeaseTable, RoomEntry


class End:
    """A room with a writer until that is proven gone or fenced."""

    def __init__(self):
        self.writer_lives = True

    def quiescent(self):
        return not self.writer_lives


class Leases(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.table = LeaseTable()
        self.held = []
        self.next_page = 0

    @rule(num_pages=st.integers(0, 5))
    def a_request_ends(self, num_pages):
        pages = list(range(self.next_page, self.next_page + num_pages))
        self.next_page += num_pages
        entry = RoomEntry(Request("r", [1], ResolvedSampling(), pages=pages), End())
        self.held.append(entry)
        self.table.append(entry)

    @rule(data=st.data())
    def a_writer_ends(self, data):
        if self.held:
            data.draw(st.sampled_from(self.held)).end.writer_lives = False

    @rule()
    def pages_come_back(self):
        due = [entry for entry in self.held if not entry.end.writer_lives]
        assert self.table.reclaim() == due
        self.held = [entry for entry in self.held if entry.end.writer_lives]

    @invariant()
    def everything_held_is_accounted_for(self):
        assert self.table == self.held
        assert self.table.num_pages == sum(len(entry.request.pages) for entry in self.held)


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
