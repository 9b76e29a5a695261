"""A cluster on this machine with mutual TLS between router and workers, with certificates of `certs init`."""

from __future__ import annotations

import json
import re
import signal
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from splitserve.api.tls import worker_tls
from support.commands import DEADLINE, running_command
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.process

# `up` with options of the router and of the workers.
RUN_UP = """
import json, sys
from splitserve.core.environment import set_compile_cache
from splitserve.process.process_end import install, leave
install()
set_compile_cache()
from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.up import run_cluster_up
model, worker_args, router_args = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
deployment = LocalDeployment(model=model, threads=1, worker_args=worker_args, router_args=router_args)
leave(run_cluster_up(deployment.config()))
"""
BODY = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}


def certificate_options(folder: Path, name: str, prefix: str = "--ssl") -> list[str]:
    return [f"{prefix}-certfile", str(folder / f"{name}.pem"), f"{prefix}-keyfile", str(folder / f"{name}-key.pem")]


def test_a_cluster_serves_over_mutual_tls_and_rejects_clients_without_a_certificate(tmp_path: Path) -> None:
    certs, authority = tmp_path / "certs", str(tmp_path / "certs" / "ca.pem")
    subprocess.run([sys.executable, "-m", "splitserve", "certs", "init", str(certs)], check=True, timeout=DEADLINE)
    model = make_tiny_model("llama", tmp_path / "llama")
    worker_args = [*certificate_options(certs, "worker"), "--ssl-ca-certs", authority, "--max-total-tokens", "4096"]
    router_args = [*certificate_options(certs, "router"), *certificate_options(certs, "router", "--worker-ssl")]
    arguments = (json.dumps(worker_args), json.dumps([*router_args, "--worker-ssl-ca-certs", authority]))
    program = [sys.executable, "-c", RUN_UP]
    with running_command(str(model), *arguments, folder=tmp_path, program=program) as command:
        command.wait_for("Ctrl-C drains and stops")
        command.children()
        router, *workers = sorted(
            set(re.findall(r"https://127\.0\.0\.1:\d+", command.output)), key=command.output.index
        )
        assert f"ready at {router} " in command.output
        assert len(workers) == 2
        trusting = ssl.create_default_context(cafile=authority)
        with httpx.Client(verify=trusting, timeout=DEADLINE) as client:
            answer = client.post(f"{router}/generate", json=BODY)
            assert answer.status_code == 200, answer.text
            for url in workers:
                for refused in (url, url.replace("https", "http")):
                    with pytest.raises(httpx.TransportError):
                        client.get(f"{refused}/health")
        own = worker_tls(Path(authority), certs / "router.pem", certs / "router-key.pem")
        assert own is not None
        with httpx.Client(verify=own, timeout=DEADLINE) as client:
            assert [client.get(f"{url}/health").status_code for url in workers] == [200, 200]
        command.send(signal.SIGINT)
        # The supervisor has probed the workers.
        command.wait_for("draining: no requests are running")
        assert command.exit_code() == 130
        command.check_nothing_is_left()
