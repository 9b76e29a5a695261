"""A model inside a Python program: no HTTP of one's own, no server to start first.

Follow one call: `engine.py` has the user's class, `requests.py` checks the arguments, `runs.py` has the requests in
flight, `backends.py` sends each to a scheduler or to a router, `outputs.py` has the results.
"""

from splitserve.offline.engine import Engine
from splitserve.offline.outputs import BatchError, Chunk, Output
from splitserve.offline.requests import SamplingParams

__all__ = ["BatchError", "Chunk", "Engine", "Output", "SamplingParams"]
