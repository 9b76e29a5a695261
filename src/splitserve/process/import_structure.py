"""transformers' list of what its modules define, kept between starts.

At each import, transformers reads its 3,000 model files twice for that list ("import structure"): a fifth of the start
of an engine process. After `keep_import_structure`, an import reads the list from `import-structures` in the cache
folder, in two files per installation. A new or changed installation gets new files.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import xxhash

from splitserve.core.environment import cache_dir, store_in_cache
from splitserve.core.errors import UNREADABLE, ConfigError

# Names by module, by the libraries that they need.
ImportStructure = dict[frozenset[str], dict[str, set[str]]]
# The module of transformers that lists names, and its function for that.
_LISTING_MODULE = "transformers.utils.import_utils"
_LISTING_FUNCTION = "define_import_structure"


def keep_import_structure() -> None:
    """Have later imports of transformers read the list from the cache folder. Call it before the first import."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _LISTING_MODULE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(name, spec.origin)
        return spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        listing = getattr(module, _LISTING_FUNCTION, None)
        # ConfigError: this user has no home folder.
        with suppress(OSError, ConfigError):
            package = Path(self.path).parents[1]
            if listing is not None and (installed := _installation(package)) is not None:
                file = cache_dir() / "import-structures" / installed
                setattr(module, _LISTING_FUNCTION, _kept(listing, package / "models", file))


def _installation(package: Path) -> str | None:
    """Return a digest of an installed package. None: its files are those of a developer, who can change them."""
    for record in package.parent.glob(f"{package.name}-*.dist-info/RECORD"):
        status = record.stat()
        return xxhash.xxh3_64_hexdigest(f"{record} {status.st_mtime_ns} {status.st_size}".encode())
    return None


def _kept(listing: Callable[..., ImportStructure], models: Path, file: Path) -> Callable[..., ImportStructure]:
    """Return `listing`, but with results from files for the folder of all models. Their names begin as `file`."""

    def kept(path: str | Path, prefix: str | None = None, *args: Any, **named: Any) -> ImportStructure:
        if Path(path) not in (models, models / "__init__.py") or args or named:
            return listing(path, prefix, *args, **named)
        entry = file.with_name(f"{file.name}-{prefix}.json")
        found = _read(entry)
        if not found:
            found = listing(path, prefix)
            # Errors of a version with another kind of result, which is not kept.
            with suppress(AttributeError, TypeError):
                store_in_cache(entry, msgspec.json.encode(list(found.items())))
        return found

    return kept


def _read(entry: Path) -> ImportStructure | None:
    with suppress(OSError, *UNREADABLE):
        pairs = msgspec.json.decode(entry.read_bytes(), type=list[tuple[frozenset[str], dict[str, set[str]]]])
        return dict(pairs)
    return None
