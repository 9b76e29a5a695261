"""Splitserve: LLM serving with prefill and decode disaggregated.

The names of offline use load when they are first asked for, so that importing the package stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splitserve.offline import BatchError as BatchError
    from splitserve.offline import Chunk as Chunk
    from splitserve.offline import Engine as Engine
    from splitserve.offline import Output as Output
    from splitserve.offline import SamplingParams as SamplingParams

__version__ = "0.1.0"

_OFFLINE = ("BatchError", "Chunk", "Engine", "Output", "SamplingParams")


def __getattr__(name: str) -> Any:
    if name not in _OFFLINE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from splitserve import offline

    return getattr(offline, name)
