"""Release of an engine's memory while it does not serve, and replacement of its weights.

- The KV pool keeps its addresses. On a CPU its pages are returned to the kernel. For a GPU see `memory_saver.py`.
- Weights are dropped with the whole model: mappings of shared files and private copies. They return by another load.
- An update loads another model by the ordinary loader, beside the old one, and replaces it as a whole. The new model
  must have the shape of the old one, because pool, page tables and limits stay.
- A draft model stays during an update. A draft head reads the served model, so it is loaded again.
- Weights in shared memory are a safetensors file. `weights_source.py` makes a model folder around it.

If several ranks compute the model, each has its own memory. `ranks/group_memory.py` keeps them together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from splitserve.core.config import ModelConfig
from splitserve.core.errors import ConfigError, EngineError, clause
from splitserve.core.memory import MemoryTag, WeightsSource
from splitserve.engine.build import BuiltEngine
from splitserve.engine.draft_model import LoadedDraft
from splitserve.engine.loader import LoadedModel
from splitserve.engine.shared_weights import return_memory
from splitserve.engine.sources import check_form
from splitserve.engine.weights_source import folder_around
from splitserve.process.owned_folder import OwnedFolder


@dataclass(frozen=True, slots=True)
class _Weights:
    """Models, how to load them again, and their temporary folder, if this rank owns one."""

    loaded: LoadedModel
    draft: LoadedDraft | None
    config: ModelConfig
    # Folder of the model on disk: of config, tokenizer and names of the weights.
    base: Path
    folder: OwnedFolder | None = None

    def drop(self) -> None:
        if self.folder is not None:
            self.folder.close()

    def without_models(self) -> _Weights:
        draft = self.draft
        if draft is not None and draft.loaded is not None:
            draft = dataclasses.replace(draft, loaded=dataclasses.replace(draft.loaded, model=None))
        return dataclasses.replace(self, loaded=dataclasses.replace(self.loaded, model=None), draft=draft)


class BuiltEngineMemory:
    """EngineMemory of one rank."""

    closes_role = False

    def __init__(self, engine: BuiltEngine) -> None:
        self._engine = engine
        # For later loads: the process has its cores already.
        self._config = msgspec.structs.replace(engine.config, elastic_cores=False, cpu_affinity=None)
        draft = None
        if engine.draft_fingerprint:
            loaded = engine.draft.loaded if engine.draft else None
            draft = LoadedDraft(engine.draft_fingerprint, loaded, engine.draft_state_size)
        self._current = _Weights(engine.loaded, draft, self._config, engine.loaded.folder)
        self._num_heads = _num_heads(engine.loaded)
        # Shapes of the weights of this rank's share.
        self._shapes = _shapes(engine.loaded.model) if engine.loaded.share else {}
        # Loaded weights that are not in use yet.
        self._next: _Weights | None = None
        # Weights that `use` has replaced, and the tags that were released before. None: nothing to undo.
        self._replaced: tuple[_Weights, frozenset[MemoryTag]] | None = None
        self._released: frozenset[MemoryTag] = frozenset()

    @property
    def released(self) -> frozenset[MemoryTag]:
        return self._released

    @property
    def fingerprint(self) -> str:
        return f"{self._engine.fingerprint} {self._engine.draft_fingerprint}".rstrip()

    @property
    def has_next(self) -> bool:
        """Whether weights are loaded that are not in use."""
        return self._next is not None

    @property
    def state(self) -> str:
        """Return the weights in use, those that are loaded, and what is released: equal on all ranks of a group."""
        loaded = "" if self._next is None else self._next.loaded.fingerprint
        return f"{self.fingerprint}, {loaded}, {' '.join(sorted(self._released))}"

    def load(self, source: WeightsSource) -> None:
        self.discard()
        folder = self.folder_of(source)
        try:
            self.load_from(source.name if folder is None else str(folder.path), is_shared_memory=folder is not None)
        except BaseException:
            if folder is not None:
                folder.close()
            raise
        self.own(folder)

    def own(self, folder: OwnedFolder | None) -> None:
        """Remove the folder of the loaded weights when they are dropped."""
        assert self._next is not None
        self._next = dataclasses.replace(self._next, folder=folder)

    def folder_of(self, source: WeightsSource) -> OwnedFolder | None:
        """Return a folder around weights in shared memory. None: the source is a model. Raises ConfigError."""
        return folder_around(source.name, self._current.base) if source.is_shared_memory else None

    def load_from(self, model: str, *, is_shared_memory: bool) -> None:
        """Load a model, or the one in a folder around weights in shared memory. Raises SplitserveError."""
        self.discard()
        config = msgspec.structs.replace(self._config, model=model)
        check_form(model, self._current.loaded.quantization)
        if is_shared_memory:
            # Each of many updates would add a file to the cache of packed weights.
            config = msgspec.structs.replace(config, share_weights=False)
        loaded = self._load(config)
        base = self._current.base if is_shared_memory else loaded.folder
        self._next = _Weights(loaded, self._load_draft(config, loaded), config, base)

    def use(self) -> None:
        if self._next is None:
            raise EngineError("no weights were loaded for this update: begin it anew")
        self._replaced = self._current, self._released
        self._current, self._next = self._next, None
        self._released -= {MemoryTag.WEIGHTS}
        self._install()

    def undo(self) -> None:
        if self._replaced is None:
            return
        self._next = self._current
        (self._current, self._released), self._replaced = self._replaced, None
        self._install()

    def confirm(self) -> None:
        if self._replaced is not None:
            self._replaced[0].drop()
            self._replaced = None
            _return_memory(self._engine.loaded.device)

    def discard(self) -> None:
        if self._next is not None:
            self._next.drop()
            self._next = None
            _return_memory(self._engine.loaded.device)

    def release(self, tags: Collection[MemoryTag]) -> None:
        for tag in set(tags) - self._released:
            if tag is MemoryTag.WEIGHTS:
                self._current = self._current.without_models()
                self._install()
                _return_memory(self._engine.loaded.device)
            else:
                _of_pool("released", self._engine.pool.discard)
            self._released |= {tag}

    def resume(self, tags: Collection[MemoryTag]) -> None:
        for tag in self._released & set(tags):
            if tag is MemoryTag.WEIGHTS:
                config = self._current.config
                loaded = self._load(config)
                draft = self._load_draft(config, loaded)
                self._current = dataclasses.replace(self._current, loaded=loaded, draft=draft)
                self._install()
            else:
                _of_pool("allocated again", self._engine.pool.resume)
            self._released -= {tag}

    def close(self) -> None:
        """Remove temporary folders. The engine is not used any more."""
        self.confirm()
        self.discard()
        self._current.drop()

    def _install(self) -> None:
        self._engine.use(self._current.loaded, self._current.draft)

    def _load(self, config: ModelConfig) -> LoadedModel:
        """Load a model. Raises ConfigError unless it fits pool, page tables and limits."""
        check = partial(self._check_share, config.model) if self._shapes else None
        old, loaded = self._current.loaded, self._engine.source.load(config, check)
        for what, found, needed in (
            ("KV shapes of its layers", loaded.layers, old.layers),
            ("number of attention heads", _num_heads(loaded), self._num_heads),
            ("vocabulary size", loaded.vocab_size, old.vocab_size),
            ("dtype", loaded.dtype_name, old.dtype_name),
            ("context length", loaded.context_length, old.context_length),
            ("end tokens (generation_config.json)", loaded.eos_token_ids, old.eos_token_ids),
        ):
            if found != needed:
                raise self._misfit(config.model, what)
        return loaded

    def _check_share(self, name: str, model: Any) -> None:
        """Raise ConfigError unless this rank's share of another model has the old one's shapes."""
        found = _shapes(model)
        if different := sorted(
            name for name in found.keys() | self._shapes if found.get(name) != self._shapes.get(name)
        ):
            raise self._misfit(name, f"shape of {different[0]}")

    def _misfit(self, name: str, what: str) -> ConfigError:
        return ConfigError(
            f"model {name} cannot replace {self._current.loaded.name}, because it differs in the {what}. Update with "
            "weights of the same architecture, or start another worker."
        )

    def _load_draft(self, config: ModelConfig, loaded: LoadedModel) -> LoadedDraft | None:
        """Return the draft for `loaded`; all ranks decide alike. Raises ConfigError if it does not fit the pool."""
        source, old = self._engine.source, self._current.draft
        if old is None or (source.draft_head is None and MemoryTag.WEIGHTS not in self._released):
            return old
        draft = source.load_draft(config, loaded)
        assert draft is not None
        if draft.loaded is not None and old.loaded is not None and draft.loaded.layers != old.loaded.layers:
            raise ConfigError(
                f"the draft for model {config.model} has other KV shapes than the old one. Restart the worker."
            )
        return draft


def _num_heads(loaded: LoadedModel) -> int:
    num_heads: int = loaded.model.config.get_text_config().num_attention_heads
    return num_heads


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _return_memory(device: torch.device) -> None:
    return_memory()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _of_pool(what: str, run: Callable[[], Any]) -> None:
    try:
        run()
    except OSError as error:
        raise EngineError(f"the KV pool cannot be {what}: {clause(error)}. Restart the worker.") from error
