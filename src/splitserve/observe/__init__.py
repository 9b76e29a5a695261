"""What an operator or an indexer can see: metrics of a worker, traces of requests, KV events, leaks.

`worker_metrics.py` has the figures that `/metrics` serves. `trace.py` joins the times of a request, and `perfetto.py`
writes them in Perfetto's format. `events/` publishes what the prefix cache holds.
"""
