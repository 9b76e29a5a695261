"""`make walk`: print the files that one warm streamed chat request executes, by process and room.

1. A router, a prefill worker and a decode worker start with a tracer (`sitecustomize.py`) in each process.
2. Two requests warm them up. During the third one each tracer notes the functions that are called.
3. The files are printed by process, in order of first call, then the totals over all processes.
A comprehension, generator expression or lambda counts as a part of the function around it.
Work that a process does all the time, such as heartbeats, is in the window, too.
"""

import collections
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import splitserve
from splitserve.core.request import DisaggregationMode
from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.local import LocalCluster
from splitserve.engine.sources import resolve_model
from splitserve.tools.chat import stream_chat

MODEL = "smollm2"
PROMPT = "What is the capital of France? Answer in one sentence."
READY_SECONDS = 300.0
WRITE_SECONDS = 10.0
SOURCE = Path(splitserve.__file__).parent


def ask(url: str) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    answer = stream_chat(url, MODEL, messages, max_tokens=16, temperature=0.0, on_text=lambda _: None)
    assert answer.record.num_output_tokens > 0


def trace(folder: Path) -> dict[str, list[tuple[float, str, str]]]:
    """Return the calls of each process by its name: (clock reading, file, function)."""
    os.environ |= {"WALK_DIR": str(folder), "PYTHONPATH": str(Path(__file__).parent)}
    resolve_model(MODEL)
    with LocalCluster(LocalDeployment(model=MODEL, worker_args=["--served-model-name", MODEL])) as cluster:
        cluster.wait_ready(READY_SECONDS)
        fronts = {
            child.pid: f"{role}: front end"
            for role in (DisaggregationMode.PREFILL, DisaggregationMode.DECODE)
            for child in cluster.children_of(role)
        }
        for _ in range(2):
            ask(cluster.router_url)
        (folder / "on").touch()
        time.sleep(0.1)
        ask(cluster.router_url)
        (folder / "on").unlink()
        processes: dict[str, list[tuple[float, str, str]]] = {}
        deadline = time.monotonic() + WRITE_SECONDS
        while time.monotonic() < deadline and len(processes) < 5:
            for file in folder.glob("*.json"):
                note = json.loads(file.read_text())
                processes[name_of(int(file.stem), fronts)] = [tuple(call) for call in note["calls"]]
            time.sleep(0.1)
    return processes


def name_of(pid: int, fronts: dict[int, str]) -> str:
    if pid in fronts:
        return fronts[pid]
    parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return fronts[parent].replace("front end", f"scheduler {pid}") if parent in fronts else f"router {pid}"


def named(function: str) -> str:
    """Return the qualified name of the function with a name of its own: `f` for `f.<locals>.<genexpr>`."""
    while function.endswith(">"):
        function = function.rpartition(".<locals>.")[0]
    return function


def report(processes: dict[str, list[tuple[float, str, str]]]) -> None:
    all_functions, all_files = set(), set()
    for name, calls in sorted(processes.items()):
        files: dict[str, set[str]] = {}
        for _, file, function in sorted(calls):
            files.setdefault(str(Path(file).relative_to(SOURCE)), set()).add(named(function))
        count = sum(map(len, files.values()))
        sys.stdout.write(f"\n{name}: {len(files)} files, {count} functions\n")
        rooms = collections.defaultdict(list)
        for file, functions in files.items():
            rooms[file.split("/")[0]].append(f"{file.split('/', 1)[-1]} ({len(functions)})")
        for room, entries in rooms.items():
            sys.stdout.write(f"  {room}: {', '.join(entries)}\n")
        all_files |= set(files)
        all_functions |= {(file, function) for file, functions in files.items() for function in functions}
    sys.stdout.write(f"\none warm streamed chat request: {len(all_files)} files, {len(all_functions)} functions\n")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="splitserve-walk-") as folder:
        report(trace(Path(folder)))


if __name__ == "__main__":
    main()
