"""Errors of Ray as operators read them. Real actors are in `process/test_cluster.py`."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("ray")

from ray.exceptions import RayError

from splitserve.core.errors import ConfigError
from splitserve.deploy.ray_placer import RayPlacer, _cause

DIED = """The actor died unexpectedly before finishing this task.
\tclass_name: NodeActor
\tactor_id: e7b86a42015ecd05967d36fa01000000
\tip: 10.0.0.2
"""
NODE = """The actor died because its node has died. Node Id: 53b3
\tthe actor's node was terminated unexpectedly: health check failed due to missing too many heartbeats"""
KILLED = (
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker "
    "unexpectedly exits with a connection error code 2. End of file."
)
CREATION = """The actor died because of an error raised in its creation task, \x1b[36mray::NodeActor.__init__()\x1b[39m
  At least one of the input arguments for this task could not be computed:
ModuleNotFoundError: No module named 'splitserve'

"""


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (DIED + NODE, NODE.splitlines()[1].strip()),
        (f"{DIED}{KILLED} Some common causes include: (1) the process was killed by the OOM killer", KILLED),
        (CREATION, "ModuleNotFoundError: No module named 'splitserve'"),
        ("", "RayError"),
    ],
)
def test_the_cause_of_a_lost_actor_is_in_the_last_line(text: str, cause: str) -> None:
    assert _cause(RayError(text)) == cause


def test_an_http_server_is_no_ray_cluster_which_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.init", lambda *args, **options: pytest.fail("Ray tries for minutes"))
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            with pytest.raises(ConfigError, match="this is an HTTP server, not the port of Ray's head"):
                RayPlacer(f"127.0.0.1:{server.server_port}", "test")
        finally:
            server.shutdown()
