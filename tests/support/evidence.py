"""Evidence that production code uses a symbol: the functions that ran, and the names that their code loads.

A function serves if it ran. A class serves if one of its methods ran. Data, such as a message or a constant, serves if
a function that ran loads its name.
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import msgspec
import pydantic

import splitserve

SOURCE = Path(splitserve.__file__).parent
# File and qualified name of a code object.
Place = tuple[str, str]
_LOADS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"}


def read_trace(folder: Path) -> set[Place]:
    """Return what all traced processes ran: see `call_trace/sitecustomize.py`."""
    lines = {line for file in folder.iterdir() for line in file.read_text().splitlines()}
    return {(file, name) for file, _, name in (line.partition("\t") for line in lines)}


def all_places() -> set[Place]:
    """Return all code objects of the package."""
    return {(str(path), name) for path in SOURCE.rglob("*.py") for name in _codes(str(path))}


@dataclasses.dataclass(frozen=True)
class Symbol:
    """A symbol like `package.module:Class.method`, and where it is defined."""

    path: str
    target: Any
    file: str
    # Qualified name of its code, or of its class. A constant has none: its name.
    code: str

    @property
    def is_function(self) -> bool:
        return _function(self.target) is not None

    @classmethod
    def of(cls, text: str) -> Symbol:
        name, _, path = text.partition(":")
        module = importlib.import_module(name)
        target = functools.reduce(getattr, path.split("."), module)
        if (function := _function(target)) is not None:
            return cls(path, target, function.__code__.co_filename, function.__code__.co_qualname)
        if inspect.isclass(target):
            return cls(path, target, str(sys.modules[target.__module__].__file__), target.__qualname__)
        return cls(path, target, str(module.__file__), path)


def serves(symbol: Symbol, places: Iterable[Place]) -> bool:
    """Return whether the code objects that ran prove that the symbol is in use."""
    names = [name for file, name in places if file == symbol.file]
    if symbol.is_function:
        return symbol.code in names
    has_run = any(name.startswith(f"{symbol.code}.") for name in names)
    return has_run or (not _needs_method(symbol) and is_loaded(symbol, places))


def _needs_method(symbol: Symbol) -> bool:
    """Return whether it is a class that does work, in contrast to data: then one of its methods must have run."""
    is_data = dataclasses.is_dataclass(symbol.target) or (
        inspect.isclass(symbol.target) and issubclass(symbol.target, msgspec.Struct | pydantic.BaseModel | enum.Enum)
    )
    return not is_data and any(name.startswith(f"{symbol.code}.") for name in _codes(symbol.file))


def is_loaded(symbol: Symbol, places: Iterable[Place]) -> bool:
    """Return whether one of the code objects loads the symbol's name. Its own code and its definition do not count."""
    name = symbol.path.rpartition(".")[2]
    for file, place in places:
        is_own = file == symbol.file and (place == "<module>" or f"{place}.".startswith(f"{symbol.code}."))
        if is_own or name not in _codes(file).get(place, ()):
            continue
        # A member is found by its name alone. A global name must be the same object.
        if "." in symbol.path or _is_same(file, name, symbol.target):
            return True
    return False


def _function(target: Any) -> FunctionType | None:
    """Return the function of a function, a method or a property. None: it is something else."""
    target = target.fget if isinstance(target, property) else getattr(target, "__func__", target)
    target = inspect.unwrap(target) if callable(target) else target
    return target if isinstance(target, FunctionType) else None


def _is_same(file: str, name: str, target: Any) -> bool:
    parts = Path(file).relative_to(SOURCE.parent).with_suffix("").parts
    module = importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    # A name that the module lacks is imported inside the function.
    return getattr(module, name, target) is target


@functools.cache
def _codes(file: str) -> dict[str, frozenset[str]]:
    """Return the names that each code object of a file loads, by its qualified name."""
    found: dict[str, frozenset[str]] = {}
    for code in _walk(compile(Path(file).read_text(), file, "exec")):
        names = {str(step.argval) for step in dis.get_instructions(code) if step.opname in _LOADS}
        if code.co_name == "<module>":
            names -= {str(step.argval) for step in dis.get_instructions(code) if step.opname == "IMPORT_FROM"}
        found[code.co_qualname] = found.get(code.co_qualname, frozenset()) | names
    return found


def _walk(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _walk(inner)
