"""Start of an engine process: `python -m splitserve.process.quick_start MODULE` runs `main` of that module.

Garbage collection is off during the import. torch and transformers create 600,000 objects that stay, and scanning them
repeatedly takes a sixth of the startup. The list of transformers' modules comes from the cache folder. If standard
input ends during the import, its starter has ended. Then this process ends, too.
"""

from __future__ import annotations

import gc
import importlib
import sys

from splitserve.process.import_structure import keep_import_structure
from splitserve.process.process_end import ending_with, leave


def main(module: str) -> int:
    gc.disable()
    keep_import_structure()
    with ending_with(sys.stdin.fileno()):
        imported = importlib.import_module(module)
    # Later collections, such as those while the model loads, skip the imported objects.
    gc.freeze()
    gc.enable()
    exit_code: int = imported.main()
    return exit_code


if __name__ == "__main__":
    leave(main(sys.argv[1]))
