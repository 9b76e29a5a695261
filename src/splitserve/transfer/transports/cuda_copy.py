"""Copy of scattered pieces of GPU memory by one kernel. A launch for each piece would take longer.

Addresses may be any that the device reaches: its own memory, and mapped memory of another process. None is checked.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from splitserve.transfer.transports.cuda_parts import DeviceRows

# Words copied per iteration of a program.
_BLOCK = 1024


def copy_rows(rows: DeviceRows, device: torch.device) -> None:
    """Start to copy on the current stream. There may be no rows."""
    num_rows = rows.table.shape[1]
    if not num_rows:
        return
    host = torch.from_numpy(rows.table)
    table = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
    _copy_kernel[(num_rows,)](table[0], table[1], table[2], WIDE=rows.word_bytes == 8, BLOCK=_BLOCK)


# Triton also compiles the signature, and accepts only its own annotations.
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
