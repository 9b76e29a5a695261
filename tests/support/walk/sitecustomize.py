"""Tracer of one process, loaded by Python at startup if its folder is on PYTHONPATH: see walk.py.

While the file `on` exists in WALK_DIR, the process notes each function of splitserve at its first call. A daemon thread
writes the notes to WALK_DIR/PID.json when the file is removed.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

_FOLDER = Path(os.environ["WALK_DIR"])
_MARK = f"{os.sep}splitserve{os.sep}"
_POLL_SECONDS = 0.01

# Code object of a function -> clock reading of its first call. Empty outside of the window.
_calls: dict[object, float] = {}
_is_on = False


def _note(frame, event, _arg) -> None:
    if _is_on and event == "call" and frame.f_code not in _calls and _MARK in frame.f_code.co_filename:
        _calls[frame.f_code] = time.monotonic()


def _watch() -> None:
    global _is_on
    while True:
        is_on = (_FOLDER / "on").exists()
        if _is_on and not is_on:
            _is_on = False
            notes = [(at, code.co_filename, code.co_qualname) for code, at in list(_calls.items())]
            part = _FOLDER / f"{os.getpid()}.part"
            part.write_text(json.dumps({"command": sys.argv, "calls": notes}))
            part.rename(part.with_suffix(".json"))
            _calls.clear()
        _is_on = is_on
        time.sleep(_POLL_SECONDS)


threading.Thread(target=_watch, daemon=True, name="walk").start()
threading.setprofile(_note)
sys.setprofile(_note)
