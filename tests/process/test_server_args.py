"""Two scripts that call `launch_server`, as users of SGLang write them, and a router: a pair that serves."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from splitserve.process.child import POLL_INTERVAL
from support.processes import running, wait_ready
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.process

KEY = "a-key-of-this-test-1"
SCRIPT = """\
import sys

from splitserve import ServerArgs, launch_server

if __name__ == "__main__":
    launch_server(
        ServerArgs(
            model_path={model!r},
            host="127.0.0.1",
            port=0,
            disaggregation_mode={mode!r},
            disaggregation_bootstrap_port=0,
            disaggregation_transfer_backend="tcp",
            max_total_tokens=4096,
            trust_remote_code=False,
            api_key={key!r},
            pdlb_url={router!r},
            threads=1,
            exit_with_parent=True,
            ready_file=sys.argv[-1],
        )
    )
"""


def test_a_pair_of_scripts_serves_and_ends_when_a_signal_drains_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    model = str(make_tiny_model("llama", tmp_path / "llama", dtype=torch.bfloat16))
    key_file = tmp_path / "key"
    key_file.write_text(f"{KEY}\n")
    key_file.chmod(0o600)
    with ExitStack() as stack:
        router_args = ["router", "--port", "0", "--worker-key-file", str(key_file)]
        router = wait_ready(stack.enter_context(running(router_args, tmp_path, name="router")))
        workers = []
        for mode in ("prefill", "decode"):
            script = tmp_path / f"{mode}.py"
            script.write_text(SCRIPT.format(model=model, mode=mode, router=router.url, key=KEY))
            child = running([], tmp_path, name=mode, program=(sys.executable, str(script)))
            workers.append(stack.enter_context(child))
        urls = [wait_ready(worker, 300.0).url for worker in workers]
        client = stack.enter_context(httpx.Client(timeout=60))
        assert [client.get(f"{url}/server_info").status_code for url in urls] == [401, 401]
        body = {"text": "abc", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
        answer = client.post(f"{router.url}/generate", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["meta_info"]["completion_tokens"] == 4
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
        for worker in workers:
            assert worker.wait(60)
        assert [worker.exit_code for worker in workers] == [0, 0]
    assert list((tmp_path / "temporary").iterdir()) == []


@contextmanager
def script_of_docs(folder: Path, model: str, router: str, method: str) -> Iterator[psutil.Popen]:
    """Run the pair of docs/migrating.md, with a tiny model, free ports and a start method of multiprocessing."""
    page = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
    text = page.split("```python\n")[2].split("```")[0]
    changes = {
        '"smollm2"': repr(model),
        "http://127.0.0.1:8000": router,
        "port=30000": "port=0",
        "port=30001": "port=0",
        "bootstrap_port=8998": "bootstrap_port=0",
        "mem_fraction_static=0.25": "max_total_tokens=4096, threads=1",
        "    pair = [": f"    multiprocessing.set_start_method({method!r})\n    pair = [",
    }
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    script = folder / "pair.py"
    script.write_text(text)
    with (folder / "pair.log").open("wb") as log:
        parent = psutil.Popen([sys.executable, str(script)], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield parent
    finally:
        left = [parent, *parent.children(recursive=True)] if parent.is_running() else []
        for process in left:
            process.kill()
        parent.wait()


@pytest.mark.parametrize(
    ("method", "number"),
    [("fork", signal.SIGTERM), pytest.param("spawn", signal.SIGKILL, marks=pytest.mark.soak)],
)
def test_workers_of_a_script_end_with_it_when_a_signal_ends_it(
    tmp_path: Path, method: str, number: signal.Signals
) -> None:
    model = str(make_tiny_model("llama", tmp_path / "llama", dtype=torch.bfloat16))
    with ExitStack() as stack:
        router = wait_ready(stack.enter_context(running(["router", "--port", "0"], tmp_path, name="router")))
        parent = stack.enter_context(script_of_docs(tmp_path, model, router.url, method))
        client = stack.enter_context(httpx.Client(base_url=router.url, timeout=60))
        deadline = time.monotonic() + 300.0
        body = {"text": "abc", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
        while (answer := client.post("/generate", json=body)).status_code != 200:
            assert time.monotonic() < deadline, (answer.text, (tmp_path / "pair.log").read_text())
            assert parent.poll() is None, (tmp_path / "pair.log").read_text()
            time.sleep(POLL_INTERVAL)
        family = parent.children(recursive=True)
        # Two workers and their schedulers.
        assert len(family) >= 4
        parent.send_signal(number)
        _, alive = psutil.wait_procs(family, timeout=60)
        for process in alive:
            process.kill()
        assert not alive
