"""Forms of log lines: every JSON line is one object, with the values of the event."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from splitserve.core.config import LOG_FORMATS
from splitserve.process.child import ChildProcess
from splitserve.process.log_format import FORMATTERS, text_of, values_in
from splitserve.router import access_log


def line(message: str, *args: object, **fields: Any) -> Any:
    record = logging.makeLogRecord(
        {"name": "splitserve.router", "levelname": "INFO", "msg": message, "args": args, "created": 1.5, **fields}
    )
    text = FORMATTERS["json"]().format(record)
    assert "\n" not in text
    return json.loads(text)


def test_every_choice_of_the_option_has_a_formatter() -> None:
    assert set(FORMATTERS) == set(LOG_FORMATS)


def test_a_json_line_has_the_values_of_its_event() -> None:
    assert line("worker url=%s healthy=%s", "http://h:1", True) == {
        "time": "1970-01-01T00:00:01.500Z",
        "level": "info",
        "logger": "splitserve.router",
        "message": "worker url=http://h:1 healthy=True",
        "values": {"url": "http://h:1", "healthy": "True"},
    }


def test_a_json_line_can_be_shown_as_text_with_its_exception() -> None:
    fields = {"name": "splitserve.worker", "levelname": "ERROR", "msg": "failed\ttwice", "created": 1.5}
    record = logging.makeLogRecord({**fields, "exc_info": (ValueError, ValueError("no"), None)})
    text = text_of(FORMATTERS["json"]().format(record))
    assert text == "1970-01-01T00:00:01.500Z ERROR [splitserve.worker] failed\ttwice\nValueError: no"


@pytest.mark.parametrize("other", ["error: no such model", '{"a": 1}', '{"level": 3, "time": 1}', "[1]", "", "{"])
def test_other_lines_are_shown_as_they_are(other: str) -> None:
    assert text_of(other) == other


def test_the_end_of_the_log_of_a_process_that_logs_json_is_text(tmp_path: Path) -> None:
    entry = {"time": "t", "level": "error", "logger": "splitserve", "message": "lost", "exception": "a\nb"}
    code = f"print({json.dumps(entry)!r}); print('Killed')"
    child = ChildProcess("worker", ["-c", code], tmp_path, program=[sys.executable])
    try:
        assert child.wait(60)
        assert child.log_tail() == "t ERROR [splitserve] lost\na\nb\nKilled"
        assert child.log_tail(2) == "b\nKilled"
    finally:
        child.close()


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_end_of_a_log_has_no_lines_about_single_requests(tmp_path: Path, form: str) -> None:
    fields = {"levelname": "INFO", "created": 1.5}
    lost, request = (
        FORMATTERS[form]().format(logging.makeLogRecord({**fields, "name": name, "msg": text}))
        for name, text in (("splitserve.router.health", "worker lost"), (access_log.logger.name, "request rid=1"))
    )
    # In the second case more lines than are read.
    for num_requests, expected in ((30, ["worker lost"]), (3000, [])):
        code = f"print({lost!r}); print({request + chr(10)!r} * {num_requests})"
        child = ChildProcess(f"router-{num_requests}", ["-c", code], tmp_path, program=[sys.executable])
        try:
            assert child.wait(60)
            assert [line.partition("] ")[2] for line in child.log_tail().splitlines()] == expected
        finally:
            child.close()


def test_a_message_without_values_has_none() -> None:
    assert "values" not in line("the role is decode now")


def test_given_values_precede_those_of_the_message() -> None:
    assert line("decode batch: running 3", values={"running": 3})["values"] == {"running": 3}


def test_a_quoted_value_is_one_value_with_its_spaces_and_escapes() -> None:
    assert values_in(r'lost reason="no heartbeat for \"10\" s" rooms=3') == {
        "reason": 'no heartbeat for "10" s',
        "rooms": "3",
    }
    # Not JSON: the value stays as it is.
    assert values_in(r'x="\d"') == {"x": r'"\d"'}


def test_text_of_a_client_stays_inside_its_line() -> None:
    answer = line("request rid=%s", 'a\n{"level":"error"}')
    assert answer["message"] == 'request rid=a\n{"level":"error"}'


def test_a_failure_has_its_traceback() -> None:
    try:
        raise ValueError("bad page")
    except ValueError:
        assert "ValueError: bad page" in line("step failed", exc_info=sys.exc_info())["exception"]


def test_text_lines_stay_as_they_were() -> None:
    record = logging.makeLogRecord({"name": "a", "levelname": "INFO", "msg": "ready url=%s", "args": ("u",)})
    assert FORMATTERS["text"]().format(record).endswith(" INFO [a] ready url=u")
