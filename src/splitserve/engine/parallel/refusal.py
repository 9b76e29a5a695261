"""Error for models that cannot be split over tensor parallel ranks. Front ends use it, too: imports no torch."""

from __future__ import annotations

from splitserve.core.errors import ConfigError


def cannot_cut(name: str, why: str, remedy: str = "Use pipeline stages, or one rank") -> ConfigError:
    return ConfigError(f"Model {name} cannot be cut over tensor parallel ranks: {why}. {remedy}.")
