"""Opening of the C libraries of this package, and addresses of the tables passed to them."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray


def open_library(name: str, declare: Callable[[ctypes.CDLL], None]) -> ctypes.CDLL | None:
    """Open a library and declare its functions; None if it was not built. Raises ImportError for an outdated build."""
    spec = importlib.util.find_spec(f"splitserve._native.{name}")
    if spec is None or spec.origin is None:
        return None
    library = ctypes.CDLL(spec.origin)
    try:
        declare(library)
    except AttributeError as error:
        raise ImportError(f"{spec.origin} was built from other sources, install splitserve again: {error}") from error
    return library


class Int64Array:
    """A fixed array of 64-bit integers with its address stored: numpy needs a microsecond to return an address."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self.array = np.array(list(numbers), dtype=np.uint64)
        self.address = self.array.ctypes.data
        self.count = len(self.array)


def address_of(table: NDArray[Any]) -> int:
    """Return the address of a contiguous table. numpy's own way takes three times as long, measurable for one page."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(table.data))
    except (TypeError, ValueError):
        # The table has no row, or is read-only.
        return int(table.ctypes.data)
