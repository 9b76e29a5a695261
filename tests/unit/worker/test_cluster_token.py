"""The file with the cluster token, who sees what is in it, and where a worker may listen without one."""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.pretty import pretty_repr

from splitserve.core.config import ClusterToken, DisaggregationConfig, WorkerConfig
from splitserve.core.errors import ConfigError
from splitserve.core.request import DisaggregationMode
from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.local import LocalCluster
from splitserve.process.cluster_token import read_token_file, settle_host
from splitserve.ranks.scheduler_start import SchedulerStart
from support.tokens import write_token_file

SECRET = b"0123456789abcdef"
PD = [DisaggregationMode.PREFILL, DisaggregationMode.DECODE]


def config(host: str, mode: DisaggregationMode, secret: bytes = b"") -> DisaggregationConfig:
    return DisaggregationConfig(mode=mode, host=host, cluster_token=ClusterToken(secret))


# -- the file -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [SECRET, b" \n" + SECRET + b"\r\n"])
def test_the_token_is_the_files_content_without_white_space_around_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    assert read_token_file(path) == ClusterToken(SECRET)


@pytest.mark.parametrize("content", [b"", b"\n", b"tiny!", SECRET[1:] + b"\n"])
def test_a_token_that_is_too_short_is_refused_with_a_recipe(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"at least 16.*openssl rand -hex 32 > {re.escape(str(path))}") as caught:
        read_token_file(path)
    assert not content.strip() or content.strip().decode() not in caught.value.message


def test_a_file_that_is_not_there_is_refused_with_a_recipe(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match=r"--cluster-token-file .*openssl rand"):
            read_token_file(path)


@pytest.mark.parametrize(("mode", "is_told"), [(0o600, False), (0o400, False), (0o640, True), (0o604, True)])
def test_a_file_that_others_may_read_is_taken_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, is_told: bool
) -> None:
    path = tmp_path / "token"
    path.write_bytes(SECRET)
    path.chmod(mode)
    assert read_token_file(path).secret == SECRET
    assert (f"chmod 600 {path}" in caplog.text) == is_told
    assert SECRET.decode() not in caplog.text


def test_a_new_token_is_random_and_for_this_user_alone(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    before = os.umask(0)
    try:
        for path in paths:
            write_token_file(path)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(before)
    assert read_token_file(paths[0]) != read_token_file(paths[1])
    with pytest.raises(FileExistsError):
        write_token_file(paths[0])


# -- who sees it --------------------------------------------------------------------------------------------------


def test_the_token_shows_in_no_repr_and_reaches_the_scheduler_whole() -> None:
    worker = WorkerConfig(disaggregation=config("h", DisaggregationMode.DECODE, SECRET))
    start = SchedulerStart(config=worker, model_folder="m", to_scheduler="a", from_scheduler="b")
    for text in (repr(start), str(worker.disaggregation.cluster_token), pretty_repr(start)):
        assert SECRET.decode() not in text
    assert msgspec.json.decode(msgspec.json.encode(start), type=SchedulerStart) == start
    assert repr(ClusterToken()) == "ClusterToken(none)"


class FakeChild:
    """A child that only records how it was started."""

    started: list[FakeChild]
    ready = exit_code = None

    def __init__(self, name: str, args: Sequence[str], folder: Path, **_: Any) -> None:
        self.name, self.args, self.folder = name, list(args), folder
        self.token = self.token_file.read_bytes() if self.token_file is not None else None
        self.started.append(self)

    pid = 0

    def send_signal(self) -> None:
        """It does not run."""

    def wait(self, timeout: float) -> bool:
        return True

    def let_go(self) -> None:
        """It does not run."""

    def bound_log(self) -> None:
        """It has no log."""

    def close(self) -> None:
        """It does not run."""

    @property
    def token_file(self) -> Path | None:
        option = "--cluster-token-file"
        return Path(self.args[self.args.index(option) + 1]) if option in self.args else None


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[FakeChild]:
    FakeChild.started = []
    monkeypatch.setattr("splitserve.deploy.placer.ChildProcess", FakeChild)
    return FakeChild.started


@pytest.mark.parametrize("fails", [False, True])
def test_a_local_cluster_generates_a_token_in_private_files_that_go_with_it(
    children: list[FakeChild], fails: bool
) -> None:
    cluster = LocalCluster(LocalDeployment(model="m", prefill=1, decode=1, null=1))
    with cluster:
        folder = cluster.log_folder
        files = {child.name: child.token_file for child in children}
        assert files.pop("router") is None
        # A colocated worker may become one of a pair.
        assert set(files) == {"prefill-0", "decode-0", "colocated-0"}
        for path in files.values():
            assert path is not None
            assert folder in path.parents
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        (secret,) = {child.token for child in children if child.token is not None}
        assert len(secret) >= 32
        assert not any(secret.decode() in word for child in children for word in child.args)
        if fails:
            cluster.keep_logs()
    assert not any(path.exists() for path in files.values() if path is not None)
    assert folder.exists() == fails
    if fails:
        folder.rmdir()


def test_a_local_cluster_that_others_join_has_the_token_of_the_given_file(
    children: list[FakeChild], tmp_path: Path
) -> None:
    path = tmp_path / "token"
    path.write_bytes(SECRET)
    with LocalCluster(LocalDeployment(model="m", cluster_token_file=path)):
        assert {child.token for child in children} == {None, SECRET}
    assert path.read_bytes() == SECRET


# -- where to listen ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", PD)
@pytest.mark.parametrize("host", ["10.1.2.3", "2001:db8::1"])
def test_a_worker_that_others_can_reach_refuses_to_start_without_a_token(host: str, mode: DisaggregationMode) -> None:
    with pytest.raises(ConfigError) as caught:
        settle_host(config(host, mode))
    for word in (host, str(mode), "no loopback address", "--cluster-token-file", "--disaggregation-host 127.0.0.1"):
        assert word in caught.value.message
    assert settle_host(config(host, mode, SECRET)).host == host


@pytest.mark.parametrize("mode", PD)
@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1"])
def test_on_the_loopback_address_a_token_is_optional(host: str, mode: DisaggregationMode) -> None:
    assert settle_host(config(host, mode)).host == host


def test_a_colocated_worker_has_no_peers_to_keep_out() -> None:
    assert settle_host(config("10.1.2.3", DisaggregationMode.NULL)).host == "10.1.2.3"


def test_a_name_is_resolved_once_and_judged_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"here": "127.0.0.1", "there": "10.1.2.3"}

    def look_up(host: str, *_: Any) -> list[Any]:
        if host not in addresses:
            raise socket.gaierror("Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (addresses[host], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert settle_host(config("here", PD[0])).host == "127.0.0.1"
    assert settle_host(config("there", PD[0], SECRET)).host == "10.1.2.3"
    with pytest.raises(ConfigError, match="on there, which is no loopback address"):
        settle_host(config("there", PD[0]))
    with pytest.raises(ConfigError, match="'nowhere' has no address: Name or service not known"):
        settle_host(config("nowhere", PD[0]))


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_that_nobody_can_be_told_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="no address that others can reach"):
        settle_host(config(host, PD[0], SECRET))
