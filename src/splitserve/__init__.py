"""Splitserve: LLM serving with prefill and decode disaggregated.

The names for Python programs load when they are first used, so that importing the package stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splitserve.cli.server_args import ServerArgs as ServerArgs
    from splitserve.cli.server_args import launch_server as launch_server
    from splitserve.core.errors import ConfigError as ConfigError
    from splitserve.offline import BatchError as BatchError
    from splitserve.offline import Chunk as Chunk
    from splitserve.offline import Engine as Engine
    from splitserve.offline import Output as Output
    from splitserve.offline import SamplingParams as SamplingParams

__version__ = "0.1.0"

# Module of each name.
_LAZY = {
    **dict.fromkeys(("BatchError", "Chunk", "Engine", "Output", "SamplingParams"), "splitserve.offline"),
    **dict.fromkeys(("ServerArgs", "launch_server"), "splitserve.cli.server_args"),
    "ConfigError": "splitserve.core.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
