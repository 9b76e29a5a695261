"""transformers' list of what its modules define, kept between starts.

At each import, transformers reads its 3,000 model files twice for that list ("import structure"): a fifth of the start
of an engine process. After `keep_import_structure`, an import reads the list from `import-structures` in the cache
folder, in a file per installation. A new or changed installation gets a new file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType

import msgspec
import xxhash

from splitserve.core.environment import cache_dir, store_in_cache

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
        package = Path(self.path).parents[1]
        # None: the function has another name in this version, or the cache has no folder.
        with suppress(RuntimeError):
            if (installed := _installation(package)) and hasattr(module, _LISTING_FUNCTION):
                kept = _kept(getattr(module, _LISTING_FUNCTION), package / "models", installed)
                setattr(module, _LISTING_FUNCTION, kept)


def _installation(package: Path) -> str | None:
    """Return a digest of an installed package. None: its files are those of a developer, who can change them."""
    for record in package.parent.glob(f"{package.name}-*.dist-info/RECORD"):
        status = record.stat()
        return xxhash.xxh3_64_hexdigest(f"{record} {status.st_mtime_ns} {status.st_size}".encode())
    return None


def _kept(listing: Callable[..., ImportStructure], models: Path, installed: str) -> Callable[..., ImportStructure]:
    """Return `listing`, but with a result from the cache folder for the folder of all models.

    Raises RuntimeError: this user has no home folder.
    """
    file = cache_dir() / "import-structures" / f"{installed}.json"

    def kept(path: str | Path, prefix: str | None = None) -> ImportStructure:
        if Path(path) not in (models, models / "__init__.py"):
            return listing(path, prefix)
        found = _read(file)
        if found is None:
            found = listing(path)
            store_in_cache(file, msgspec.json.encode(list(found.items())))
        # The caller adds to it.
        return {k: {f"{prefix}.{m}" if prefix else m: n for m, n in v.items()} for k, v in found.items()}

    return kept


def _read(file: Path) -> ImportStructure | None:
    with suppress(OSError, msgspec.DecodeError):
        pairs = msgspec.json.decode(file.read_bytes(), type=list[tuple[frozenset[str], dict[str, set[str]]]])
        return dict(pairs)
    return None
