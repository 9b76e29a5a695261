"""Options of a command, derived from a config: type and default from its field, the rest from a table.

A command that takes such options also takes `--config FILE` and `--print-config` (`config_file.py`).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import math
import typing
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Annotated, Any

import msgspec
import typer

from splitserve.cli.config_file import print_config, read_config
from splitserve.core.config import LimitsConfig
from splitserve.core.errors import ConfigError
from splitserve.worker.checks import num_bytes

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


@dataclasses.dataclass(frozen=True)
class Option:
    """Option of a command.

    `path`: field of the config that it sets, such as `cache.page_size`. Empty: the command itself reads the value.
    """

    path: str
    help: str
    # Python name of the parameter. Empty: the name of the field.
    name: str = ""
    # Type and default, if they differ from those of the field.
    kind: Any = None
    default: Any = None
    choices: Sequence[str] = ()
    # Converter from the option's value to the field's value.
    convert: Callable[[Any], Any] | None = None
    is_bytes: bool = False
    # Names on the command line. Empty: derived from `name`.
    decls: tuple[str, ...] = ()
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    section: str = ""

    @property
    def key(self) -> str:
        return self.name or self.path.rpartition(".")[2]

    @property
    def flag(self) -> str:
        """Return the first name on the command line."""
        return self.decls[0].partition("/")[0] if self.decls else f"--{self.key.replace('_', '-')}"


def in_sections(sections: Mapping[str, Sequence[Option]]) -> tuple[Option, ...]:
    """Return all options, each with the title of its section in the help."""
    return tuple(
        dataclasses.replace(option, section=title) for title, options in sections.items() for option in options
    )


# Help of the fields of LimitsConfig.
_LIMITS = {
    "max_request_bytes": "Bytes of a request body. Default: max(1 MiB, 256 x context length).",
    "max_header_bytes": "Bytes of the request line and headers together.",
    "header_timeout": "Seconds from the first byte of a request to the end of its headers.",
    "body_timeout": "Seconds from the end of the headers to the end of the body.",
    "keep_alive_timeout": "Seconds a connection may stay open between two requests.",
    "max_idle_connections": "Connections per client address without a request in progress.",
    "max_request_memory": "Estimated memory of all requests that are read, parsed or tokenized. Beyond that: 503.",
    "max_json_depth": "Levels of nested objects and arrays in a body.",
    "max_messages": "Messages per chat request.",
    "max_stop_strings": "Entries of `stop`.",
    "max_stop_chars": "Characters per entry of `stop`.",
    "max_stop_token_ids": "Entries of `stop_token_ids`.",
    "max_logit_bias": "Entries of `logit_bias`.",
    "max_n": "Samples per prompt (`n`).",
    "max_samples": "Samples per request, over all its prompts.",
    "max_rid_chars": "Characters of a request id.",
    "max_grammar_chars": "Characters of a JSON schema, regex, EBNF or structural tag.",
}


def limits(path: str) -> tuple[Option, ...]:
    """Return an option for each field of LimitsConfig. `path`: field of the config that holds the LimitsConfig."""
    return tuple(
        Option(
            f"{path}.{field.name}",
            _LIMITS.get(field.name, "See docs/limits.md."),
            is_bytes=field.name.endswith(("_bytes", "_memory")),
        )
        for field in msgspec.structs.fields(LimitsConfig)
    )


def takes(*groups: tuple[Any, Sequence[Option]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the options of each config to a command. The command's signature needs a `ctx`."""

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
            *(_parameter(option, config) for config, options in groups for option in options),
            _keyword("config", _CONFIG, None),
            _keyword("print_config", _PRINT, False),
        ]
        vars(command)["__signature__"] = inspect.Signature(parameters)
        command.__annotations__ = {}
        return command

    return decorate


def fill(config: Any, options: Sequence[Option], values: Mapping[str, Any]) -> Any:
    """Return `config` with the values of options in their fields. None leaves a field as it is."""
    changes: dict[str, Any] = {}
    for option in options:
        if option.path and (value := values[option.key]) is not None:
            changes[option.path] = value if option.convert is None else option.convert(value)
    return replaced(config, changes)


def replaced(config: Any, changes: Mapping[str, Any]) -> Any:
    nested: dict[str, dict[str, Any]] = defaultdict(dict)
    fields: dict[str, Any] = {}
    for path, value in changes.items():
        head, _, rest = path.partition(".")
        if rest:
            nested[head][rest] = value
        else:
            fields[head] = value
    fields |= {head: replaced(getattr(config, head), inner) for head, inner in nested.items()}
    replace = msgspec.structs.replace if isinstance(config, msgspec.Struct) else dataclasses.replace
    return replace(config, **fields)


def _parameter(option: Option, config: Any) -> inspect.Parameter:
    kind, default = (option.kind, option.default) if option.kind is not None else _field(option.path, config)
    settings: dict[str, Any] = {"help": option.help, "rich_help_panel": option.section, **option.settings}
    choices, enum_type = option.choices, _enum_in(kind)
    if enum_type is not None:
        choices, kind = tuple(enum_type), kind if default is None else enum_type
    if option.is_bytes:
        settings |= {"parser": _bytes_parser(option.flag), "metavar": "BYTES"}
        kind, default = int | None, default if default is None else _short_bytes(default)
    elif choices:
        settings |= {"parser": _chooser(option.flag, choices, enum_type or str), "metavar": "|".join(choices)}
    elif float in (kind, *typing.get_args(kind)):
        settings["callback"] = _number_check(option.flag, is_zero_allowed=settings.pop("min", None) == 0)
    if typing.get_origin(kind) is tuple:
        kind, default = list[str] | None, None
    decls = option.decls or ((f"{option.flag}/--no-{option.flag[2:]}",) if kind is bool else (option.flag,))
    return _keyword(option.key, Annotated[kind, typer.Option(*decls, **settings)], default)


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _field(path: str, config: Any) -> tuple[Any, Any]:
    """Return the type and the default of a config's field."""
    *heads, last = path.split(".")
    for head in heads:
        config = getattr(config, head)
    return typing.get_type_hints(type(config))[last], getattr(config, last)


def _enum_in(kind: Any) -> type[enum.StrEnum] | None:
    kinds = [k for k in (kind, *typing.get_args(kind)) if k is not NoneType]
    return next((k for k in kinds if inspect.isclass(k) and issubclass(k, enum.StrEnum)), None)


def _chooser(flag: str, choices: Sequence[str], cast: Callable[[str], Any]) -> Callable[[str], Any]:
    def choice(text: str) -> Any:
        if text not in choices:
            raise ConfigError(f"{flag} {text}: choose one of {', '.join(choices)}")
        return cast(text)

    return choice


def _bytes_parser(flag: str) -> Callable[[str | int], int]:
    def number_of_bytes(text: str | int) -> int:
        return num_bytes(str(text), flag)

    return number_of_bytes


def _number_check(flag: str, *, is_zero_allowed: bool) -> Callable[[float | None], float | None]:
    def check(value: float | None) -> float | None:
        if value is None or 0 < value < math.inf or (is_zero_allowed and value == 0):
            return value
        raise ConfigError(f"{flag} must be {'0 or more' if is_zero_allowed else 'above 0'} and finite, not {value:g}")

    return check


def _short_bytes(count: int) -> str:
    for i, suffix in reversed(list(enumerate(("", "K", "M", "G", "T")))):
        if count and count % (1 << 10 * i) == 0:
            return f"{count >> 10 * i}{suffix}"
    return "0"
