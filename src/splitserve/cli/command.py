"""Commands and groups of the command line: familiar names, sections in the help, one-line errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from splitserve.cli.familiar import expand_lists, familiar_names, with_own_names
from splitserve.core.errors import ConfigError, OptionError

# Typer brings its own click, of which it exports only some classes.
USAGE_ERROR: Any = typer.BadParameter.__base__


class Command(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = with_own_names(self.name or "", args)
        with _config_file_in_errors(ctx):
            return super().parse_args(ctx, expand_lists(words) if self.name == "router" else words)

    def invoke(self, ctx: Any) -> Any:
        with _config_file_in_errors(ctx):
            return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        records = ((_section(param), param.get_help_record(ctx)) for param in self.get_params(ctx))
        _write_sections(formatter, ((title, record) for title, record in records if record is not None))


class CommandGroup(TyperGroup):
    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = (command for command in self.commands.values() if not command.hidden)
        rows = ((_section(c, "Commands"), (c.name, c.get_short_help_str(limit=200))) for c in commands)
        _write_sections(formatter, rows)


@contextmanager
def _config_file_in_errors(ctx: Any) -> Iterator[None]:
    """Name the file of `--config` in errors about options that it gives."""
    try:
        yield
    except USAGE_ERROR as error:
        option = getattr(error, "param", None)
        if option is not None and _is_from_config_file(ctx, option.opts[0]):
            raise OptionError("--config", f"{ctx.params['config']}: {usage_problem(error)}") from None
        raise
    except OptionError as error:
        if _is_from_config_file(ctx, error.option):
            error.message = f"--config {ctx.params['config']}: {error.message}"
        raise


def _is_from_config_file(ctx: Any, name: str) -> bool:
    """Return whether the option of this name has its value from the file of `--config`."""
    for param in ctx.command.params:
        if name in (*param.opts, *param.secondary_opts):
            source = ctx.get_parameter_source(param.name)
            return source is not None and source.name == "DEFAULT_MAP"
    return False


def _section(thing: Any, default: str = "Options") -> str:
    if getattr(thing, "param_type_name", "") == "argument":
        return "Arguments"
    return getattr(thing, "rich_help_panel", None) or default


def _write_sections(formatter: Any, rows: Iterable[tuple[str, Any]]) -> None:
    sections: dict[str, list[Any]] = {}
    for title, row in rows:
        sections.setdefault(title, []).append(row)
    for title, found in sections.items():
        with formatter.section(title):
            formatter.write_dl(found)


def usage_problem(error: Any) -> str:
    """Return the problem of a command line, in one line without a period at its end."""
    command = error.ctx.command if error.ctx is not None else None
    wrong: str = getattr(error, "option_name", "")
    if wrong and error.message.startswith("No such option"):
        flags = [flag for param in command.params for flag in (*param.opts, *param.secondary_opts)] if command else []
        near = get_close_matches(wrong, [*flags, *familiar_names(getattr(command, "name", ""))], n=1)
        path = error.ctx.command_path if error.ctx is not None else "splitserve"
        return f"{wrong}: no such option; " + (f"did you mean {near[0]}?" if near else f"{path} --help lists them")
    if (param := getattr(error, "param", None)) is not None and param.param_type_name == "option":
        message = " ".join(error.message.split()).rstrip(".")
        return f"{param.opts[0]}: {message[:1].lower()}{message[1:]}"
    return " ".join(error.format_message().split()).rstrip(".")


def run(app: typer.Typer, words: list[str]) -> int:
    """Run a command line and return its exit code. Raises ConfigError if it is wrong."""
    try:
        code = app(args=words, prog_name="splitserve", standalone_mode=False)
    except USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(error.format_message(), err=True)
            return int(error.exit_code)
        raise ConfigError(usage_problem(error)) from None
    return code if isinstance(code, int) else 0
