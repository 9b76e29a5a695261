"""Methods of an Engine that release its memory and replace its weights; names as in SGLang."""

from __future__ import annotations

from collections.abc import Collection

from splitserve.core.memory import WeightsSource
from splitserve.offline.backends import EngineBackend
from splitserve.offline.runs import Bridge
from splitserve.offline.terms import engine_terms
from splitserve.server.memory import running_requests, tags_of


class MemoryCalls:
    """Part of Engine. All raise SplitserveError.

    Running requests block a change, unless `drain` lets them end within `timeout` seconds, or `abort` ends them.
    """

    _backend: EngineBackend
    _bridge: Bridge

    @engine_terms()
    def release_memory_occupation(
        self, tags: Collection[str] | None = None, *, abort: bool = False, drain: bool = False, timeout: float = 60.0
    ) -> None:
        """Return memory to the system. `tags`: kv_cache, weights. None: both. Until it is resumed all calls fail."""
        running = running_requests(abort=abort, drain=drain, timeout=timeout)
        self._bridge.wait(self._backend.memory.release(tags_of(tags), running))

    @engine_terms()
    def resume_memory_occupation(self, tags: Collection[str] | None = None) -> None:
        """Make released memory usable again."""
        self._bridge.wait(self._backend.memory.resume(tags_of(tags)))

    def update_weights_from_disk(
        self, model_path: str, *, abort: bool = False, drain: bool = False, timeout: float = 60.0
    ) -> None:
        """Replace the weights by those of a model of the same shape."""
        self._update(WeightsSource(model_path), abort, drain, timeout)

    def update_weights_from_shared_memory(
        self, name: str, *, abort: bool = False, drain: bool = False, timeout: float = 60.0
    ) -> None:
        """Replace the weights by those in the safetensors file `name` in /dev/shm."""
        self._update(WeightsSource(name, is_shared_memory=True), abort, drain, timeout)

    @engine_terms()
    def _update(self, source: WeightsSource, abort: bool, drain: bool, timeout: float) -> None:
        running = running_requests(abort=abort, drain=drain, timeout=timeout)
        self._bridge.wait(self._backend.memory.update(source, running))
