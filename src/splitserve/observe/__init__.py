"""What an operator or an indexer can see: metrics of a worker, KV events, leaks.

`worker_metrics.py` has the figures that `/metrics` serves. `events/` publishes what the prefix cache holds.
"""
