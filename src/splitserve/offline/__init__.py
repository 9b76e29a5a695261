"""A model inside a Python program: no HTTP of one's own, no server to start first.

Follow one call: `engine.py` has the user's class, `calls.py` the arguments and the results, `runs.py` the requests in
flight, and `backends.py` sends each to a scheduler or to a router.
"""

from splitserve.offline.calls import BatchError, Chunk, Output, SamplingParams
from splitserve.offline.engine import Engine

__all__ = ["BatchError", "Chunk", "Engine", "Output", "SamplingParams"]
