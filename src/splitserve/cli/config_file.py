"""`--config FILE`: options of a command in a YAML file, and `--print-config`, which writes such a file."""

from __future__ import annotations

import inspect
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import msgspec
import typer

from splitserve.cli.familiar import POSITIONAL, renamed
from splitserve.core.errors import ConfigError, OptionError
from splitserve.deploy.config import duplicate_key


def read_config(ctx: typer.Context, file: str | None) -> str | None:
    """Make the options in `file` defaults of the command. Raises ConfigError for an unknown option."""
    if file is None:
        return None
    try:
        raw = Path(file).read_bytes()
        found = msgspec.yaml.decode(raw, type=dict[Any, Any]) if raw.strip() else {}
        duplicate = duplicate_key(raw)
    except OSError as error:
        raise OptionError("--config", f"{file}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        reason = " ".join(str(error).split())
        raise OptionError("--config", f"{file}: {reason}: write one option per line, such as page-size: 32") from None
    if duplicate is not None:
        raise OptionError(
            "--config", f"{file}, line {duplicate[1]}: the key {duplicate[0]!r} occurs twice; keep one of them"
        )
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
            near = get_close_matches(name, params)
            hint = f"did you mean {near[0]}?" if near else f"splitserve {ctx.command.name} --help lists the options"
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
        raise ConfigError(f"{where}: {str(error).lower().replace('`', '')}") from None
