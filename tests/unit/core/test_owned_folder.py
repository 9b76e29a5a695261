"""Folders that go with their owner: in order, after a kill, and never while the owner lives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from splitserve.process import owned_folder
from splitserve.process.owned_folder import (
    LOCK_NAME,
    PREFIX,
    RUN_FOLDER_VARIABLE,
    FolderTakenError,
    OwnedFolder,
    run_folder,
    sweep,
)

OWNER = """
import sys
from pathlib import Path
from splitserve.process.owned_folder import OwnedFolder
folder = OwnedFolder(Path(sys.argv[1]) if sys.argv[1:] else None)
(folder.path / "inner").mkdir()
(folder.path / "inner" / "file").write_text("content")
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(folder / "run"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(owned_folder, "_SHORT_PARENT", folder)
    return folder


class Owner:
    """Another process that owns a folder."""

    def __init__(self, *args: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", OWNER, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.path = Path(self._process.stdout.readline().strip())

    def kill(self) -> None:
        with self._process:
            self._process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("is_named", [False, True])
def test_a_sweep_removes_the_folder_of_a_killed_owner_and_no_other(temporary: Path, is_named: bool) -> None:
    args = []
    if is_named:
        run_folder().mkdir()
        args = [str(run_folder() / "name")]
    owner = Owner(*args)
    try:
        assert sweep() == 0
        assert (owner.path / "inner" / "file").exists()
    finally:
        owner.kill()
    assert owner.path.exists()
    with OwnedFolder() as mine:
        assert sweep() == 1
        assert mine.exists()
    assert not owner.path.exists()


def test_a_folder_goes_with_its_block_and_its_content(temporary: Path) -> None:
    with OwnedFolder() as folder:
        assert folder.parent == temporary
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "file").touch()
    assert list(temporary.iterdir()) == []


def test_a_folder_that_is_kept_outlives_owner_and_sweep(temporary: Path) -> None:
    folder = OwnedFolder()
    (folder.path / "log").touch()
    folder.keep()
    folder.close()
    folder.close()
    assert sweep() == 0
    assert [path.name for path in folder.path.iterdir()] == ["log"]


def test_a_name_has_one_owner_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "name"
    with OwnedFolder(path):
        with pytest.raises(FolderTakenError, match="name"):
            OwnedFolder(path)
        assert path.exists()
    assert not path.exists()
    OwnedFolder(path).close()


def test_what_an_owner_left_before_it_had_the_lock_is_removed(temporary: Path) -> None:
    (temporary / f"{PREFIX}abcdefgh").mkdir()
    assert sweep() == 1
    assert list(temporary.iterdir()) == []


def test_a_removal_that_was_cut_off_is_finished(temporary: Path) -> None:
    folder = temporary / f"{PREFIX}abcdefgh"
    folder.mkdir()
    (folder / LOCK_NAME).touch()
    assert sweep() == 1


def test_folders_of_others_stay(temporary: Path) -> None:
    for name in ("splitserve-source", "run", f"{PREFIX}kept"):
        (temporary / name).mkdir()
        (temporary / name / "file").touch()
    (temporary / "run" / "empty").mkdir()
    (temporary / f"{PREFIX}file").touch()
    (temporary / f"{PREFIX}link").symlink_to(temporary / "splitserve-source")
    before = sorted(temporary.rglob("*"))
    assert sweep() == 0
    assert sorted(temporary.rglob("*")) == before


def test_folders_that_others_sweep_while_they_are_made_are_made_again(temporary: Path) -> None:
    """Many owners and sweeps at the same time: no owner loses its folder."""
    is_over = threading.Event()
    lost: list[Path] = []

    def sweep_on() -> None:
        while not is_over.is_set():
            sweep()

    def own() -> None:
        for _ in range(200):
            with OwnedFolder() as folder:
                if not (folder / LOCK_NAME).exists():
                    lost.append(folder)

    sweepers = [threading.Thread(target=sweep_on) for _ in range(2)]
    owners = [threading.Thread(target=own) for _ in range(2)]
    for thread in sweepers + owners:
        thread.start()
    for thread in owners:
        thread.join()
    is_over.set()
    for thread in sweepers:
        thread.join()
    assert lost == []
    sweep()
    assert list(temporary.iterdir()) == []


def test_children_do_not_hold_the_lock(temporary: Path) -> None:
    folder = OwnedFolder()
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as child:
        # As a kill does it: the lock is released, and nothing is removed.
        os.close(folder._descriptor)
        folder._descriptor = -1
        assert sweep() == 1
        child.kill()


def test_sockets_fit_where_the_temporary_directory_has_a_long_name(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = temporary / ("long" * 20)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with OwnedFolder.for_sockets() as folder:
        assert folder.parent == temporary
    assert not folder.exists()


def test_sockets_fit_where_characters_of_the_temporary_directory_have_several_bytes(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as short:
        wide = Path(short) / ("\u5b9f" * 20)
        wide.mkdir()
        monkeypatch.setenv("TMPDIR", str(wide))
        monkeypatch.setattr(tempfile, "tempdir", None)
        with OwnedFolder.for_sockets() as folder:
            assert folder.parent == temporary


def test_a_sweep_finds_folders_of_sockets_outside_of_a_long_temporary_directory(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Owner()
    owner.kill()
    long = temporary / "elsewhere"
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert sweep() == 1
    assert not owner.path.exists()


def test_a_sweep_ignores_a_folder_of_another_user(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path) -> Iterator[Path]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", fail)
    assert sweep() == 0
