"""`ServerArgs` and `launch_server`: `splitserve serve` for Python programs, with the option names of SGLang.

A keyword is the name of an option with underscores. It becomes a word of the command line, so the names, checks and
reasons are those of `splitserve serve`.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

import msgspec

from splitserve.api.api_keys import key_problem
from splitserve.cli.command import ALWAYS, NO_MEANING, POSITIONAL, TABLES
from splitserve.cli.serve import click_command, run_serve, serve, values_of
from splitserve.core.errors import ConfigError, SplitserveError, did_you_mean
from splitserve.core.options import flag_of
from splitserve.process.owned_folder import OwnedFolder, sweep
from splitserve.process.process_end import install, watch_starter

_NAMES = TABLES["serve"]
# Words of a command line that are no options of a worker.
_NOT_HERE = ("--print-config", "--help")
# Seconds from the end of the parent process until a worker that still starts is ended by force.
_END_GRACE = 60.0


class ServerArgs:
    """Options of one worker. An option that is None, or not given, has its default.

    `api_key`: key that clients must present; `api_key_file` is the option for several. Options can be read as
    attributes, by each name that the constructor accepts, and not be set. Two objects with the same values are equal.
    Raises ConfigError for an unknown name, a name without a meaning here, two names of one option, or a value that is
    out of range.
    """

    # Keywords of the caller, without those that are None.
    given: Mapping[str, Any]
    # Key that clients must present. None: no key, or the keys of `api_key_file`.
    api_key: str | None
    # Values of the options, by their names here.
    values: Mapping[str, Any]

    def __init__(self, model_path: str | None = None, *, api_key: str | None = None, **options: Any) -> None:
        if api_key is not None and options.get("api_key_file") is not None:
            raise ConfigError("ServerArgs: api_key and api_key_file: give one of them")
        if api_key is not None and (problem := key_problem(api_key)):
            raise ConfigError(f"ServerArgs: api_key: {problem}")
        given = {"model_path": model_path, **options}
        words: list[str] = []
        names: dict[str, str] = {}
        for name, value in given.items():
            _, param = _option(name)
            if value is None:
                continue
            if param is not None and not param.multiple and (other := names.setdefault(param.name, name)) != name:
                raise ConfigError(f"ServerArgs: {other} and {name} are the same option; give one of them")
            words += _words(name, value)
        vars(self).update(
            given={name: value for name, value in given.items() if value is not None},
            api_key=api_key,
            values=values_of(serve, ["serve", *words], "ServerArgs"),
        )

    def __getattr__(self, name: str) -> Any:
        """Return the value of an option. A name without an option has the value that was given."""
        try:
            target, param = _option(name)
        except ConfigError:
            raise AttributeError(f"ServerArgs has no option {name!r}") from None
        if param is None:
            return True if flag_of(name) in ALWAYS else self.given.get(name)
        value = self.values[param.name]
        if target in param.secondary_opts:
            return not value
        _, is_part, prefix = target.partition("=")
        if not is_part:
            return value
        return next((text.removeprefix(prefix) for text in reversed(value or ()) if text.startswith(prefix)), None)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"{name}: options cannot be changed; create another ServerArgs")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ServerArgs):
            return NotImplemented
        return (self.values, self.api_key) == (other.values, other.api_key)

    def __repr__(self) -> str:
        words = [f"{name}={value!r}" for name, value in self.given.items()]
        return f"ServerArgs({', '.join([*words, *(['api_key=...'] if self.api_key is not None else [])])})"


def launch_server(server_args: ServerArgs | None = None, **options: Any) -> NoReturn:
    """Run the worker in this process until a signal or a failure ends it, then exit with its code.

    Call it in the main thread. Raises ConfigError for anything but one ServerArgs; SystemExit: for an option that
    cannot work with one line on stderr and the exit code of `splitserve serve`.
    """
    if options or not isinstance(server_args, ServerArgs):
        raise ConfigError("launch_server takes a ServerArgs: launch_server(ServerArgs(model_path=...))")
    try:
        code = _serve(server_args)
    except SplitserveError as error:
        sys.stderr.write(f"error: {error.message}\n")
        code = error.exit_code
    raise SystemExit(code)


def _serve(server_args: ServerArgs) -> int:
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("launch_server needs the main thread of a process: start it in multiprocessing.Process")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        install()
    if (parent := multiprocessing.parent_process()) is not None:
        # While the worker starts, a signal ends it in order; while it serves, it stops (`process/lifecycle.py`).
        watch_starter(lambda: os.kill(os.getpid(), signal.SIGTERM), _END_GRACE, lambda: _wait_for(parent))
    sweep()
    with _key_file(server_args.api_key) as key_file:
        values = dict(server_args.values)
        if key_file is not None:
            values["api_key_file"] = key_file
        return run_serve(values.pop("model"), values)


@functools.cache
def _params() -> Mapping[str, Any]:
    """Return the parameters of `splitserve serve` by their names on the command line."""
    return {name: param for param in click_command(serve).params for name in (*param.opts, *param.secondary_opts)}


def _option(name: str) -> tuple[str, Any]:
    """Return the option that a keyword means, and its parameter. Raises ConfigError if there is no such keyword.

    The option may be negated (`--no-...`) or have a part of the value, after "=". Parameter None: the command line
    accepts or rejects the name without an option.
    """
    flag = flag_of(name)
    target = _NAMES.get(flag, flag)
    param = _params().get("model" if target == POSITIONAL else target.partition("=")[0])
    if target in _NOT_HERE or (param is None and flag not in ALWAYS and flag not in NO_MEANING):
        raise ConfigError(f"ServerArgs has no option {name!r}; {_hint(name)}")
    return target, param


def _wait_for(parent: BaseProcess) -> None:
    """Return when the parent process has ended, also if a signal killed it."""
    try:
        ends: list[Any] = [os.pidfd_open(parent.pid or 0)]
    except (AttributeError, OSError):
        # Not on Linux, or it has ended. Processes that it forked later keep this pipe open, too.
        ends = [parent.sentinel]
    wait(ends)


def _words(name: str, value: Any) -> list[str]:
    """Return an option as words of the command line. Raises ConfigError if there is no such option."""
    flag = flag_of(name)
    target, param = _option(name)
    if param is None:
        if value is not False:
            # The command line has the reason.
            return [flag if flag in ALWAYS and value is True else f"{flag}={value}"]
        if flag in ALWAYS:
            if flag == "--enable-chunked-prefill":
                return [f"{flag}=false"]
            sys.stderr.write(f"note: {name}=False has no effect: this is always on\n")
        # The behaviour of the others is off in any case.
        return []
    if isinstance(value, bool) and param.secondary_opts:
        names = (param.opts, param.secondary_opts)
        return [names[(target in param.opts) is not value][0]]
    return [f"{flag}={text}" for text in _texts(value, param.multiple)]


def _texts(value: Any, is_repeatable: bool) -> list[str]:
    """Return a value as one text, or as several for a repeatable option."""
    if isinstance(value, Mapping):
        if not is_repeatable:
            return [msgspec.json.encode(value).decode()]
        return [f"{key}={item}" for key, item in value.items()]
    if isinstance(value, list | tuple):
        texts = [str(item) for item in value]
        return texts if is_repeatable else [",".join(texts)]
    return [str(value)]


def _hint(name: str) -> str:
    flags = (*_params(), *_NAMES, *ALWAYS, *NO_MEANING)
    known = [flag[2:].replace("-", "_") for flag in flags if flag.startswith("--") and flag not in _NOT_HERE]
    return did_you_mean(name, ["api_key", *known], "splitserve serve --help lists the options")


@contextmanager
def _key_file(api_key: str | None) -> Iterator[str | None]:
    """Keep a key in a file that only this user can read, for as long as the worker runs."""
    if api_key is None:
        yield None
        return
    with OwnedFolder() as folder:
        file = folder / "api-key"
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            stream.write(f"{api_key} api_key\n")
        yield str(file)
