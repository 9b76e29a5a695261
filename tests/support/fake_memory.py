"""Memory of a fake engine: its pool loses its content, and its weights are a number."""

from __future__ import annotations

from collections.abc import Collection

from splitserve.core.errors import ConfigError, EngineError
from splitserve.core.memory import MemoryTag, WeightsSource
from support.fake_engine import FakeEngine

ALL = frozenset(MemoryTag)


class FakeMemory:
    """EngineMemory. The name of a source is a number, by which all KV changes."""

    def __init__(self, engine: FakeEngine, *, closes_role: bool = False) -> None:
        self.closes_role = closes_role
        self._engine = engine
        self.released: frozenset[MemoryTag] = frozenset()
        self._next: int | None = None
        self._old: tuple[int, frozenset[MemoryTag]] | None = None

    @property
    def fingerprint(self) -> str:
        return f"fake-{self._engine.weights} draft"

    @property
    def is_settled(self) -> bool:
        """Whether only the weights in use are in memory."""
        return self._next is None and self._old is None

    def load(self, source: WeightsSource) -> None:
        if not source.name.isdecimal():
            raise ConfigError(f"there is no model {source.name}")
        self._next = int(source.name)

    def use(self) -> None:
        if self._next is None:
            raise EngineError("no weights were loaded")
        self._old = self._engine.weights, self.released
        self._engine.weights, self._next = self._next, None
        self.released -= {MemoryTag.WEIGHTS}

    def undo(self) -> None:
        if self._old is not None:
            self._next = self._engine.weights
            (self._engine.weights, self.released), self._old = self._old, None

    def confirm(self) -> None:
        self._old = None

    def discard(self) -> None:
        self._next = None

    def release(self, tags: Collection[MemoryTag]) -> None:
        if MemoryTag.KV_CACHE in tags:
            self._engine.lose_pool()
        self.released |= frozenset(tags)

    def resume(self, tags: Collection[MemoryTag]) -> None:
        self.released -= frozenset(tags)
