"""Honest small implementations of the big parts, for tests and benchmarks."""
