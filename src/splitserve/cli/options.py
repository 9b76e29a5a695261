"""Options of commands, derived from those of configs (`core/options.py`), and those that several commands share.

A command that takes the options of configs also takes `--config FILE`, options in a YAML file, and `--print-config`,
which writes such a file.
"""

from __future__ import annotations

import functools
import inspect
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec
import typer

from splitserve.cli.command import PORT_NUMBER, POSITIONAL, renamed
from splitserve.core.errors import ConfigError, OptionError, did_you_mean
from splitserve.core.options import Option, enum_in, num_bytes, option_of, short_bytes
from splitserve.deploy.config import load_yaml
from splitserve.tools.options import VerifyOptions


def read_config(ctx: typer.Context, file: str | None) -> str | None:
    """Make the options in `file` defaults of the command. Raises ConfigError for an unknown option."""
    if file is None:
        return None
    try:
        raw = Path(file).read_bytes()
    except OSError as error:
        raise OptionError("--config", f"{file}: {error.strerror}") from None
    remedy = "write one option per line, such as page-size: 32"
    loaded = load_yaml(raw, f"--config {file}", remedy)
    if loaded is None:
        raise OptionError("--config", f"{file}: the file has no option: {remedy}")
    try:
        found = msgspec.convert(loaded, dict[Any, Any])
    except msgspec.ValidationError as error:
        raise OptionError("--config", f"{file}: {error}: {remedy}") from None
    params = {name: param for param in _params(ctx) for name in _names(param)}
    defaults = {}
    keys: dict[str, Any] = {}
    for word, value in found.items():
        # YAML parses a key `null` as None, not as text.
        key = "null" if word is None else str(word).replace("_", "-")
        try:
            name = renamed(ctx.command.name or "", f"--{key}").removeprefix("--").replace(POSITIONAL, "model")
        except ConfigError as error:
            raise OptionError("--config", f"{file}: {error.message}") from None
        if name not in params:
            hint = did_you_mean(name, params, f"splitserve {ctx.command.name} --help lists the options")
            raise OptionError("--config", f"{file}: no option {key!r}; {hint}")
        option = str(params[name].name)
        if (other := keys.setdefault(option, word)) != word:
            raise OptionError("--config", f"{file}: {other} and {word} are the same option; keep one of them")
        if value not in (None, []):
            defaults[option] = _checked(ctx, params[name], value, f"--config {file}: {key}")
    ctx.default_map = defaults
    return file


def print_config(ctx: typer.Context) -> None:
    """Print the options of a command and their values. Of secrets, only file names are printed."""
    values = {_names(param)[0]: ctx.params[str(param.name)] for param in _params(ctx)}
    typer.echo(msgspec.yaml.encode(values, enc_hook=str).decode(), nl=False)


def _params(ctx: typer.Context) -> list[Any]:
    """Return the parameters that a file may set."""
    hidden = (p for p in ctx.command.params if p.is_eager or getattr(p, "hidden", False) or p.name == "print_config")
    skipped = {p.name for p in hidden}
    return [param for param in ctx.command.params if param.name not in skipped]


def _names(param: Any) -> list[str]:
    """Return the names of a parameter in a file. The first one is used for writing."""
    return [str(name).removeprefix("--").replace("_", "-") for name in param.opts]


def _checked(ctx: typer.Context, param: Any, value: Any, where: str) -> Any:
    annotation = inspect.signature(ctx.command.callback).parameters[param.name].annotation  # type: ignore[arg-type]
    hint, *_ = get_args(annotation)
    kinds = [kind for kind in (hint, *get_args(hint)) if kind in (int, float, bool, list[str])]
    kind = kinds[0] if kinds else str
    if annotation.__metadata__[0].metavar == "BYTES":
        kind = int | str
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem = PORT_NUMBER if param.opts[0].endswith("port") else str(error).lower().replace("`", "")
        raise ConfigError(f"{where}: {problem}") from None


MODEL = option_of(VerifyOptions, "model")
ModelArgument = Annotated[str, typer.Argument(help=MODEL.help)]
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


def takes(*options: Option) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that makes a command of a function, with these options and a config file."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def command(ctx: typer.Context, **values: Any) -> None:
            values.pop("config")
            if values.pop("print_config"):
                print_config(ctx)
                raise typer.Exit
            function(ctx=ctx, **values)

        return with_options(command, options, config=(_CONFIG, None), print_config=(_PRINT, False))

    return decorate


def with_options(command: Callable[..., Any], options: Iterable[Option], **more: tuple[Any, Any]) -> Callable[..., Any]:
    """Return `command` with the signature from which typer creates its options. `more`: annotations and defaults."""
    described = {"ctx": (typer.Context, inspect.Parameter.empty)}
    described |= {option.name: _described(option) for option in options} | more
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in described.items()
    ]
    vars(command)["__signature__"] = inspect.Signature(parameters)
    command.__annotations__ = {}
    return command


def _described(option: Option) -> tuple[Any, Any]:
    """Return the annotation and the default of an option's parameter. A model with a default is an argument."""
    kind, default, enum_type = option.kind, option.default, enum_in(option.kind)
    if option.is_argument:
        return Annotated[kind, typer.Argument(help=option.help, metavar=option.metavar)], default
    if option.name == "model" and default is not None:
        return ModelArgument, default
    if option.is_bytes:
        kind, default = int | None, None if default is None else short_bytes(default)
    elif enum_type is not None and default is not None:
        kind = enum_type
    settings: dict[str, Any] = {"metavar": option.metavar, "callback": option.check}
    if option.is_bytes:
        settings |= {"parser": lambda text: num_bytes(str(text), option.flag), "metavar": "BYTES"}
    elif option.choices:
        cast = enum_type or str
        settings |= {
            "parser": lambda text: cast(option.check(_known_choice(option, text))),
            "metavar": "|".join(option.choices),
        }
    described = typer.Option(
        *(option.decls or ((f"{option.flag}/--no-{option.flag[2:]}",) if kind is bool else (option.flag,))),
        help=option.help,
        envvar=option.env or None,
        hidden=option.is_hidden,
        rich_help_panel=option.section or None,
        **settings,
    )
    return Annotated[kind, described], default


def _known_choice(option: Option, text: str) -> str:
    """Return the choice for a word of the command line, which may be capitals or the name in another system."""
    word = option.spellings.get(text.lower(), text.lower())
    return word if word in option.choices else text


def typed_again(ctx: typer.Context) -> str:
    """Return the command line with the given options, to repeat a run."""
    words = ctx.command_path.split()
    for param in ctx.command.params:
        value, source = ctx.params.get(str(param.name)), ctx.get_parameter_source(str(param.name))
        if source is None or source.name != "COMMANDLINE":
            continue
        words += words_of(param, value)
    return shlex.join(words)


def words_of(param: Any, value: Any) -> list[str]:
    """Return a parameter and its value as words of a command line."""
    if param.param_type_name == "argument":
        return [str(value)]
    if isinstance(value, bool):
        return [(param.opts if value else param.secondary_opts)[0]]
    values = value if isinstance(value, list | tuple) else [value]
    return [word for one in values for word in (param.opts[0], str(one))]
