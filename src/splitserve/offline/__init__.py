"""A model inside a Python program: no HTTP of one's own, no server to start first.

Follow one call through it in this order: `engine` is what the user holds, `requests` checks what it was given,
`runs` has them under way, `backends` takes each to a scheduler or to a router, `outputs` is what comes back.
"""

from splitserve.offline.engine import Engine
from splitserve.offline.outputs import BatchError, Chunk, Output
from splitserve.offline.requests import SamplingParams

__all__ = ["BatchError", "Chunk", "Engine", "Output", "SamplingParams"]
