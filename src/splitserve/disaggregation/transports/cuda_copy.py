"""Scattered pieces of GPU memory from one place to another, by one kernel: a launch for each piece would take longer.

Any addresses that the device reaches will do: its own memory, and another process's that was mapped. None is checked.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from splitserve.disaggregation.transports.cuda_parts import Rows

# Words that a program copies at a time.
_BLOCK = 1024


def copy_rows(rows: Rows, device: torch.device) -> None:
    """Start to copy, on the current stream. Rows may be none."""
    num_rows = rows.table.shape[1]
    if not num_rows:
        return
    host = torch.from_numpy(rows.table)
    table = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
    _copy_kernel[(num_rows,)](table[0], table[1], table[2], WIDE=rows.word_bytes == 8, BLOCK=_BLOCK)


# Triton compiles the signature, too, and knows no other annotations than its own.
def _copy_words(targets, sources, counts, WIDE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    if WIDE:
        target = tl.load(targets + row).to(tl.pointer_type(tl.int64))
        source = tl.load(sources + row).to(tl.pointer_type(tl.int64))
    else:
        target = tl.load(targets + row).to(tl.pointer_type(tl.int8))
        source = tl.load(sources + row).to(tl.pointer_type(tl.int8))
    count = tl.load(counts + row)
    for first in range(0, count, BLOCK):
        places = first + tl.arange(0, BLOCK)
        inside = places < count
        tl.store(target + places, tl.load(source + places, mask=inside), mask=inside)


_copy_kernel: Any = triton.jit(_copy_words)
