"""Small complete implementations of engine, scheduler, transport and workers, for tests and benchmarks."""
