"""A lease ends when nobody can write any more: never before, and always then."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from splitserve.transfer.lease import LeaseTable


class End:
    """A room whose writer lives until it is proven gone or fenced out."""

    def __init__(self):
        self.writer_lives = True

    def quiescent(self):
        return not self.writer_lives


class Leases(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.table = LeaseTable()
        self.held = {}
        self.next_page = 0

    @rule(num_pages=st.integers(0, 5))
    def a_request_ends(self, num_pages):
        pages = tuple(range(self.next_page, self.next_page + num_pages))
        self.next_page += num_pages
        end = End()
        entry = (pages, end)
        self.held[entry] = end
        self.table.hold(entry, end, num_pages)

    @rule(data=st.data())
    def a_writer_ends(self, data):
        if self.held:
            self.held[data.draw(st.sampled_from(list(self.held)))].writer_lives = False

    @rule()
    def pages_come_back(self):
        due = {entry for entry, end in self.held.items() if not end.writer_lives}
        released = self.table.reclaim()
        assert set(released) == due
        assert len(released) == len(due)
        for entry in released:
            del self.held[entry]

    @invariant()
    def everything_held_is_accounted_for(self):
        assert set(self.table.items()) == set(self.held)
        assert len(self.table) == len(self.held)
        assert self.table.num_pages == sum(len(pages) for pages, _ in self.held)


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
