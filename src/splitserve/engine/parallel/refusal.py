"""What says that a model is not for tensor parallel ranks. Front ends say it, too: imports no torch."""

from __future__ import annotations

from splitserve.errors import ConfigError


def cannot_cut(name: str, why: str, remedy: str = "Use pipeline stages, or one rank") -> ConfigError:
    return ConfigError(f"Model {name} cannot be cut over tensor parallel ranks: {why}. {remedy}.")
