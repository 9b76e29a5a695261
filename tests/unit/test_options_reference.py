"""The pages of docs/reference that follow from the options in the code.

`python tests/unit/test_options_reference.py` writes them.
"""

from __future__ import annotations

import itertools
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from splitserve.cli.command import NO_MEANING, POSITIONAL, TABLES
from splitserve.cli.serve import ROUTER_OPTIONS, WORKER_OPTIONS
from splitserve.core.options import Option, options_of, short_bytes
from splitserve.deploy.config import ClusterConfig, PoolConfig, PoolsConfig
from splitserve.offline.terms import ENGINE_OPTIONS

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
WRITE = "run: python tests/unit/test_options_reference.py"
GENERATED = f"<!-- Generated from the code; {WRITE} -->\n"
KINDS = {int: "integer", float: "number", bool: "flag", str: "text", dict: "map", list: "repeatable", tuple: "list"}


def value_of(option: Option) -> str:
    """Return what a user may write."""
    if option.choices:
        return ", ".join(f"`{choice}`" for choice in option.choices)
    if option.is_bytes:
        return "bytes, such as `512M`"
    kinds = [typing.get_origin(kind) or kind for kind in (option.kind, *typing.get_args(option.kind))]
    name = next((KINDS[kind] for kind in kinds if kind in KINDS), "text")
    if option.metavar is not None:
        return f"`{option.metavar}`"
    if option.le is not None:
        return f"{name} up to {option.le:g}"
    return f"{name}, at least {option.ge:g}" if option.ge else name


def default_of(option: Option) -> str:
    value = option.default
    if option.is_bytes and value is not None:
        return short_bytes(value)
    if value is None or value == () or value == {} or value == "":
        return ""
    if isinstance(value, bool):
        return "on" if value else ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def cell(text: str) -> str:
    return text.replace("|", r"\|")


def table(head: list[str], rows: Iterable[list[str]]) -> Iterator[str]:
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(row)} |".replace("| --- ", "|---").replace("|--- |", "|---|")


def option_tables(options: Iterable[Option]) -> Iterator[str]:
    """Yield a table for each section of the help."""
    order = dict.fromkeys(option.section for option in options)
    for title in order:
        yield from ("", f"### {title}", "")
        rows = []
        for option in options:
            if option.section == title and not option.is_hidden:
                flags = option.decls or (option.flag,)
                names = ", ".join(f"`{name}`" for decl in flags for name in decl.split("/"))
                env = f" Environment variable: `{option.env}`." if option.env else ""
                rows.append([names, cell(value_of(option)), default_of(option), cell(option.help) + env])
        yield from table(["option", "value", "default", "meaning"], rows)


def options_page() -> str:
    lines = [
        "# Reference of the options",
        "",
        "After this page you know every option of a worker; the [router](router-options.md) has its own.",
        "[Options](../options.md) explains files with options, `splitserve up` and errors.",
        "[Other names](other-names.md) has the names of vLLM and SGLang, and",
        "[the cluster file](cluster-file.md) the fields of a cluster.",
        "",
        "A flag also exists as `--no-NAME`, if no other name for the opposite is listed. `Engine` of the",
        "[offline API](../offline.md) takes these options by their Python names:",
        "",
        *wrapped(f"`{name}`" for name in ENGINE_OPTIONS),
        "",
        "## Workers: `splitserve serve`",
        *option_tables(WORKER_OPTIONS),
    ]
    return finished(lines)


def router_page() -> str:
    router = [option for option in ROUTER_OPTIONS if option.section != "Limits"]
    lines = [
        "# Reference of the router's options",
        "",
        "After this page you know every option of `splitserve router`. `splitserve up` has them, too. The router also",
        "has the limits of [workers](options.md), with the same names and defaults.",
        *option_tables(router),
    ]
    return finished(lines)


def wrapped(words: Iterable[str]) -> Iterator[str]:
    line = ""
    for word in words:
        if len(line) + len(word) > 116:
            yield f"{line},"
            line = ""
        line += f", {word}" if line else word
    yield f"{line}."


def cluster_page() -> str:
    # All pools have the same fields. Fields of the cluster itself come first.
    fields = sorted(options_of(ClusterConfig(pools=PoolsConfig(colocated=PoolConfig()))), key=lambda o: "." in o.path)
    lines = [
        "# Reference of the cluster file",
        "",
        "After this page you know every field of the file of `splitserve cluster`. [Clusters](../cluster.md) explains",
        "the file.",
    ]
    for where, options in itertools.groupby(fields, key=lambda option: option.path.rpartition(".")[0]):
        title = "`pools.prefill`, `pools.decode`, `pools.colocated`" if where.startswith("pools") else f"`{where}`"
        rows = [[f"`{o.name}`", cell(value_of(o)), default_of(o), cell(o.help)] for o in options]
        lines += ["", f"## {title if where else 'The cluster'}", ""]
        lines += table(["field", "value", "default", "meaning"], rows)
    return finished(lines)


def names_page() -> str:
    lines = [
        "# Names from vLLM and SGLang",
        "",
        "After this page you can start Splitserve with the option names of vLLM and SGLang. Names that are the same",
        "here are not listed. [Options](../options.md) explains how they are read.",
    ]
    for command in ("serve", "router"):
        rows = [
            [f"`{name}`", f"`{option}`" if option != POSITIONAL else "the argument MODEL"]
            for name, option in sorted(TABLES[command].items())
            if name != option
        ]
        lines += ["", f"## `splitserve {command}`{' and `splitserve up`' if command == 'serve' else ''}", ""]
        lines += table(["name", "option here"], rows)
    lines += [
        "",
        "## Names without a meaning here",
        "",
        "They end a command with this reason, unless it has such an option.",
        "",
    ]
    lines += table(["name", "reason"], ([f"`{name}`", cell(reason)] for name, reason in sorted(NO_MEANING.items())))
    return finished(lines)


def finished(lines: list[str]) -> str:
    return GENERATED + "\n".join(lines) + "\n"


PAGES = {
    "options.md": options_page,
    "router-options.md": router_page,
    "cluster-file.md": cluster_page,
    "other-names.md": names_page,
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_the_reference_is_that_of_the_code(name: str) -> None:
    assert (FOLDER / name).read_text() == PAGES[name](), WRITE


if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())
