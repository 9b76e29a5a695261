"""Settings of the process after a command that ran inside a test."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from splitserve.core.environment import set_compile_cache
from splitserve.process.settings import setup_logger
from support.process_settings import restored_settings


def test_a_command_inside_a_test_leaves_nothing_that_writes_to_a_later_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("SPLITSERVE_CACHE", str(tmp_path))
    root = logging.getLogger()
    level, source = root.level, logging._srcfile
    with restored_settings():
        setup_logger("info")
        set_compile_cache()
    assert logging.StreamHandler not in map(type, root.handlers)
    assert (root.level, logging._srcfile) == (level, source)
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
