"""`splitserve doctor`: its table, and the silence of the libraries that it opens."""

import os

import pytest

from splitserve.core.errors import ConfigError
from splitserve.tools import doctor


def noisy(backend: str, options: object) -> object:
    os.write(2, b"E1125 transfer_metadata.cpp: noise\n")
    raise ConfigError(f"{backend} is absent")


def test_libraries_write_nothing_beside_the_table(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "create_transport", noisy)
    assert doctor.run_doctor() == 1
    shown = capfd.readouterr()
    assert "tcp is absent" in shown.out
    assert shown.err == ""
    os.write(2, b"back")
    assert capfd.readouterr().err == "back"
