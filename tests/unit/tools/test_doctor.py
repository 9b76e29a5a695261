"""`splitserve doctor`: its table, and the silence of the libraries that it opens."""

import os
from io import StringIO

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


def test_a_taken_port_names_its_option_and_the_fake_transport_its_purpose(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "create_transport", lambda *_: StringIO())
    monkeypatch.setattr(doctor, "_is_free", lambda port: port == 8000)
    doctor.run_doctor()
    rows = {
        line.split("│")[1].strip(): line.split("│")[2].strip()
        for line in capfd.readouterr().out.splitlines()
        if "│" in line
    }
    assert rows["port 8000"] == "free"
    assert rows["port 30000"] == "taken: choose another --port"
    assert rows["port 8998"] == "taken: choose another --disaggregation-bootstrap-port"
    assert rows["transport tcp"] == "works"
    assert rows["transport fake"] == "for benchmarks of one worker: no KV cache moves"
