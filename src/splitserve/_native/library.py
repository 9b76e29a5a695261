"""What every C library here is opened with, and how tables are handed to it."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray


def open_library(name: str, declare: Callable[[ctypes.CDLL], None]) -> ctypes.CDLL | None:
    """With its functions declared; None where it was not built. Raises ImportError for a build of other sources."""
    spec = importlib.util.find_spec(f"splitserve._native.{name}")
    if spec is None or spec.origin is None:
        return None
    library = ctypes.CDLL(spec.origin)
    try:
        declare(library)
    except AttributeError as error:
        raise ImportError(f"{spec.origin} was built from other sources, install splitserve again: {error}") from error
    return library


class Numbers:
    """A fixed array of 64-bit numbers whose address is at hand: numpy takes a microsecond to say it."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self.array = np.array(list(numbers), dtype=np.uint64)
        self.address = self.array.ctypes.data
        self.count = len(self.array)


def address_of(table: NDArray[Any]) -> int:
    """Where a contiguous table begins; numpy's own way takes three times as long, which one page notices."""
    try:
        return ctypes.addressof(ctypes.c_char.from_buffer(table.data))
    except (TypeError, ValueError):
        # Without a row, or read-only.
        return int(table.ctypes.data)
