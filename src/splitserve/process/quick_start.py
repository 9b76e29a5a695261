"""Start of an engine process: `python -m splitserve.process.quick_start MODULE` runs `main` of that module.

Garbage collection is off during the import. torch and transformers create 600,000 objects that stay, and scanning them
repeatedly takes a sixth of the startup. If standard input ends during the import, its starter
has ended. Then the process ends, too, because it holds nothing yet.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import sys
import threading

from splitserve.process.process_end import leave


def main(module: str) -> int:
    gc.disable()
    has_imported = threading.Event()
    threading.Thread(target=_end_with_starter, args=(has_imported,), daemon=True).start()
    imported = importlib.import_module(module)
    has_imported.set()
    # Later collections, such as those while the model loads, skip the imported objects.
    gc.freeze()
    gc.enable()
    exit_code: int = imported.main()
    return exit_code


def _end_with_starter(has_imported: threading.Event) -> None:
    poll = select.poll()
    # Without events it waits for a hang-up alone. Input stays where it is, for `main` of the module.
    poll.register(sys.stdin.fileno(), 0)
    poll.poll()
    if not has_imported.is_set():
        os._exit(0)


if __name__ == "__main__":
    leave(main(sys.argv[1]))
