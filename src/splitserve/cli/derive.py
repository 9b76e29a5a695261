"""Options of a command, derived from those of configs (`core/options.py`).

A command that takes such options also takes `--config FILE` and `--print-config` (`config_file.py`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
import typer

from splitserve.cli.config_file import print_config, read_config
from splitserve.core.options import Config, Option, enum_in, num_bytes, option_of, short_bytes

_CONFIG = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        is_eager=True,
        callback=read_config,
        help="YAML file with options, such as `page-size: 32`. The command line wins over the file.",
    ),
]
_PRINT = Annotated[bool, typer.Option("--print-config", help="Print all options as YAML for --config and exit.")]


def takes(*groups: Sequence[Option]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds options to a command. The command's signature needs a `ctx`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def command(ctx: typer.Context, **values: Any) -> None:
            values.pop("config")
            if values.pop("print_config"):
                print_config(ctx)
                raise typer.Exit
            function(ctx=ctx, **values)

        own = inspect.signature(function, eval_str=True).parameters.values()
        parameters = [
            *(p.replace(kind=p.KEYWORD_ONLY) for p in own if p.kind is not p.VAR_KEYWORD),
            *(parameter_of(option) for options in groups for option in options),
            keyword("config", _CONFIG, None),
            keyword("print_config", _PRINT, False),
        ]
        return with_parameters(command, parameters)

    return decorate


def with_parameters(command: Callable[..., Any], parameters: Sequence[inspect.Parameter]) -> Callable[..., Any]:
    """Return `command` with the signature from which typer creates its options."""
    vars(command)["__signature__"] = inspect.Signature(parameters)
    command.__annotations__ = {}
    return command


def like(config: type[Config], field: str, *decls: str, **changes: Any) -> Any:
    """Return the typer option of a config's field, for a command's own signature. `changes`: of fields of Option."""
    return _typer_option(msgspec.structs.replace(option_of(config, field), decls=decls, section="", **changes))


def described_like(config: type[Config], field: str) -> Any:
    """Return a typer option with the help text of a config's field. The command checks its value."""
    return typer.Option(help=option_of(config, field).help)


def parameter_of(option: Option) -> inspect.Parameter:
    """Return the parameter of a command from which typer creates the option."""
    kind, default, enum_type = option.kind, option.default, enum_in(option.kind)
    if option.is_bytes:
        kind, default = int | None, None if default is None else short_bytes(default)
    elif enum_type is not None and default is not None:
        kind = enum_type
    flag = option.flag
    decls = option.decls or ((f"{flag}/--no-{flag[2:]}",) if kind is bool else (flag,))
    described = _typer_option(msgspec.structs.replace(option, decls=decls))
    return keyword(option.name, Annotated[kind, described], default)


def _typer_option(option: Option) -> Any:
    settings: dict[str, Any] = {"metavar": option.metavar, "callback": option.check}
    if option.is_bytes:
        settings |= {"parser": _bytes_parser(option.flag), "metavar": "BYTES"}
    elif option.choices:
        settings |= {"parser": _chooser(option), "metavar": "|".join(option.choices)}
    return typer.Option(
        *option.decls,
        help=option.help,
        envvar=option.env or None,
        hidden=option.is_hidden,
        rich_help_panel=option.section or None,
        **settings,
    )


def keyword(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _chooser(option: Option) -> Callable[[str], str]:
    cast = enum_in(option.kind) or str

    def choice(text: str) -> str:
        return cast(option.check(text))

    return choice


def _bytes_parser(flag: str) -> Callable[[str | int], int]:
    def number_of_bytes(text: str | int) -> int:
        return num_bytes(str(text), flag)

    return number_of_bytes
