"""Benchmarks: each command measures one thing and prints one table or JSON."""
