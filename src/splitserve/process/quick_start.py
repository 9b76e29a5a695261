"""Start of an engine process: `python -m splitserve.process.quick_start MODULE` runs `main` of that module.

If standard input ends during the import, its starter has ended. Then this process ends, too.
"""

from __future__ import annotations

import gc
import importlib
import sys

from splitserve.process.import_structure import keep_import_structure
from splitserve.process.process_end import ending_with, leave


def import_modules(fd: int, *modules: str) -> None:
    """Import modules quickly. If the peer of `fd` hangs up meanwhile, this process ends.

    Garbage collection is off meanwhile. torch and transformers create 600,000 objects that stay, and scanning them
    repeatedly takes a sixth of the startup. Later collections skip these objects.
    """
    gc.disable()
    keep_import_structure()
    with ending_with(fd):
        for module in modules:
            importlib.import_module(module)
    gc.freeze()
    gc.enable()


def main(module: str) -> int:
    import_modules(sys.stdin.fileno(), module)
    exit_code: int = sys.modules[module].main()
    return exit_code


if __name__ == "__main__":
    leave(main(sys.argv[1]))
