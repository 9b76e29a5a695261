"""Tracer of one process, loaded by Python at startup if its folder is on PYTHONPATH.

The process appends each code object of splitserve to CALL_TRACE_DIR/PID when it runs for the first time: its file and
its qualified name. `<module>` and class bodies are code objects, too. Forked processes write files of their own.
"""

import os
import sys
import threading
from pathlib import Path

_FOLDER = Path(os.environ["CALL_TRACE_DIR"])
_MARK = f"{os.sep}src{os.sep}splitserve{os.sep}"
# Code objects by id. They are kept, so that no id is used twice.
_seen: dict[int, object] = {}
# Process id, and descriptor of its file.
_output = (0, -1)


def _note(frame, event, _arg) -> None:
    code = frame.f_code
    if event == "call" and id(code) not in _seen:
        _seen[id(code)] = code
        if _MARK in code.co_filename:
            _write(f"{code.co_filename}\t{code.co_qualname}\n")


def _write(line: str) -> None:
    global _output
    pid = os.getpid()
    if _output[0] != pid:
        _output = pid, os.open(_FOLDER / str(pid), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(_output[1], line.encode())


# A profiler would also run for each return and for each function in C.
threading.settrace(_note)
sys.settrace(_note)
