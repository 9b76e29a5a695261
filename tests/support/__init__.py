"""Small complete implementations of engine, scheduler, transport and workers, for tests. They are not in the wheel."""
