"""Options: what a user can set, described once, at the field of the config that holds it.

    class CacheConfig(Config, frozen=True, kw_only=True):
        page_size: int = option(16, "Tokens per page of the KV pool.", ge=1)

The command line, `--config`, the keyword arguments of `Engine`, the checks and docs/reference/options.md follow from
these fields.
"""

from __future__ import annotations

import enum
import functools
import inspect
import math
import re
import typing
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import msgspec

from splitserve.core.errors import OptionError

T = TypeVar("T")
_BYTES = re.compile(r"(\d+)(?:([KMGT])(?:i?B)?)?", re.IGNORECASE)


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a config's field that users can set."""

    # The field's default. In the options of `options_of`: the option's default.
    default: Any
    # What it does, its unit, and when to change it. Empty: it only has a section.
    help: str = ""
    # Python name, from which the flag follows. Empty: the field's name.
    name: str = ""
    # Names on the command line. Empty: derived from `name`.
    decls: tuple[str, ...] = ()
    # Flags of vLLM and SGLang with the same meaning, and old spellings, separated by spaces; `cli/command.py`.
    aliases: str = ""
    # Environment variable with the value. Empty: none.
    env: str = ""
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    # Other spellings of choices on the command line, in lower case, and the choice that each means.
    spellings: Mapping[str, str] = {}
    # Bounds of a number. A float without any is above 0.
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    # Whether the value is a number of bytes, with an optional suffix.
    is_bytes: bool = False
    # Whether the option, a flag, sets the opposite of the field.
    negates: bool = False
    # Type of the value before `parse`. None: the field's type, or text if there is a `parse`.
    kind: Any = None
    # Converts a value, given with the option's flag, to the field's. Raises OptionError.
    parse: Callable[[Any, str], Any] | None = None
    # Whether it is an argument of the command line: without a flag.
    is_argument: bool = False
    is_hidden: bool = False
    # Title of the section of this option and of the following ones. Empty: that of the option before.
    section: str = ""
    # Field of the config, such as `cache.page_size`; set by `options_of`.
    path: str = ""

    @property
    def flag(self) -> str:
        """Return the first name on the command line."""
        return self.decls[0].partition("/")[0] if self.decls else flag_of(self.name)

    def problem(self, value: Any) -> str | None:
        """Return the rule that a value, or one in a list of values, breaks. None: it is valid, or it is None."""
        if isinstance(value, list | tuple):
            return next(filter(None, map(self.problem, value)), None)
        if isinstance(value, str) and self.choices and value not in self.choices:
            return f"{value}: choose one of {', '.join(self.choices)}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        ge, gt, le = self.ge, self.gt, self.le
        if (ge, gt, le) == (None, None, None):
            if isinstance(value, int):
                return None
            gt = 0
        low, high = gt if gt is not None else ge or 0, math.inf if le is None else le
        if (value > low if gt is not None else value >= low) and value <= high and value < math.inf:
            return None
        if le is not None:
            return f"must be in {'[' if gt is None else '('}{low:g}, {le:g}], not {value:g}"
        if gt is not None:
            return f"must be above {low:g} and finite, not {value:g}"
        return f"must be {f'at least {low:g}' if low else '0 or more'}, not {value:g}"

    def check(self, value: Any) -> Any:
        """Return `value`. Raises OptionError if it is out of range."""
        if problem := self.problem(value):
            raise OptionError(self.flag, problem)
        return value

    def field_value(self, value: Any) -> Any:
        """Return the field's value for a value of the option. Raises OptionError."""
        if self.parse is not None:
            return self.parse(value, self.flag)
        return not value if self.negates else value


def option(default: T, help: str, **description: Any) -> T:
    """Describe a field of a Config. `description`: fields of Option. Type checkers see the default."""
    return typing.cast(T, Option(default=default, help=help, **description))


def repeatable(text: str, **description: Any) -> Any:
    """Declare an option that may be given several times. Without it, the field is empty."""
    return option((), text, kind=list[str] | None, **description)


def section(title: str, default: T) -> T:
    """Give the options in the config of this field, and those after it, the title of their section."""
    return typing.cast(T, Option(default=default, section=title))


class ConfigMeta(msgspec.StructMeta):
    """Metaclass that keeps the descriptions of a class's fields, and leaves their defaults to msgspec."""

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **settings: Any) -> Any:
        described = {field: value for field, value in namespace.items() if isinstance(value, Option)}
        defaults = {field: value.default for field, value in described.items()}
        inherited = {field: value for base in bases for field, value in getattr(base, "OPTIONS", {}).items()}
        options = {field: value for field, value in inherited.items() if field not in namespace} | described
        return super().__new__(mcs, name, bases, {**namespace, **defaults, "OPTIONS": options}, **settings)


class Config(msgspec.Struct, metaclass=ConfigMeta, frozen=True, kw_only=True):
    """Base of configs with options."""

    # By the name of the field.
    OPTIONS: ClassVar[Mapping[str, Option]] = {}


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@functools.cache
def _types(config_type: type) -> Mapping[str, Any]:
    return typing.get_type_hints(config_type)


def options_of(config: Config, path: str = "", title: str = "") -> tuple[Option, ...]:
    """Return the options of a config's fields and of the configs in it. Their defaults are the values in `config`.

    `path`: prefix of the paths of fields. `title`: section of the first options.
    """
    found: list[Option] = []
    for field in config.__struct_fields__:
        value, described = getattr(config, field), config.OPTIONS.get(field)
        title = (described and described.section) or title
        if described is not None and described.help:
            found.append(_bound(described, path + field, _types(type(config))[field], value, title))
        elif isinstance(value, Config):
            found += options_of(value, f"{path}{field}.", title)
    return tuple(found)


def _bound(described: Option, path: str, field_type: Any, value: Any, title: str) -> Option:
    kind = described.kind
    # A value of another type than the option's has no text.
    has_text = kind is None and described.parse is None
    if kind is None:
        kind = bool if described.negates else field_type if has_text else str | None
    return msgspec.structs.replace(
        described,
        default=None if not has_text else not value if described.negates else value,
        name=described.name or path.rpartition(".")[2],
        choices=described.choices or tuple(enum_in(kind) or ()),
        kind=kind,
        section=title,
        path=path,
    )


def enum_in(kind: Any) -> type[enum.StrEnum] | None:
    """Return the enumeration in the type of an option. None: it has none."""
    kinds = (kind, *typing.get_args(kind))
    return next((k for k in kinds if inspect.isclass(k) and issubclass(k, enum.StrEnum)), None)


def option_of(config_type: type[Config], field: str) -> Option:
    """Return the option of one field, for a command with a similar option of its own."""
    return next(option for option in options_of(config_type()) if option.path.rpartition(".")[2] == field)


def like(config_type: type[Config], field: str, **changes: Any) -> Any:
    """Declare an option that has the description of another config's field, with `changes`."""
    described: Option = msgspec.structs.replace(option_of(config_type, field), section="", kind=None, **changes)
    return described


def problems_of(config: Config) -> Iterator[tuple[Option, str]]:
    """Yield the options that have a value out of range in `config`, each with the rule it breaks."""
    for option in options_of(config):
        # A field with a `parse` has a value of another type than the option's.
        value = None if option.parse else functools.reduce(getattr, option.path.split("."), config)
        if problem := option.problem(value):
            yield option, problem


def check_ranges(config: Config) -> None:
    """Raise OptionError for the first value that is out of range."""
    for option, problem in problems_of(config):
        raise OptionError(option.flag, problem)


def fill(config: Any, values: Mapping[str, Any]) -> Any:
    """Return `config` with the values of options, by their names. None leaves a field as it is. Raises OptionError."""
    return replaced(
        config,
        {
            option.path: option.field_value(value)
            for option in options_of(config)
            if (value := values.get(option.name)) is not None
        },
    )


def replaced(config: Any, changes: Mapping[str, Any]) -> Any:
    """Return `config` with new values of fields. `changes`: by path, such as `cache.page_size`."""
    nested: dict[str, dict[str, Any]] = defaultdict(dict)
    fields: dict[str, Any] = {}
    for path, value in changes.items():
        head, _, rest = path.partition(".")
        if rest:
            nested[head][rest] = value
        else:
            fields[head] = value
    fields |= {head: replaced(getattr(config, head), inner) for head, inner in nested.items()}
    return msgspec.structs.replace(config, **fields)


def num_bytes(text: str, option: str) -> int:
    """Return the bytes of a number with an optional suffix K, M, G or T (also KB or KiB), powers of 1024.

    Raises OptionError.
    """
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise OptionError(option, f"{text!r}: give a number of bytes, such as 512M or 4G")
    number, suffix = match.groups()
    return int(number) << (10 * (" KMGT".index(suffix.upper()) if suffix else 0))


def short_bytes(count: int) -> str:
    """Return a number of bytes in the form that `num_bytes` reads."""
    for i, suffix in reversed(list(enumerate(("", "K", "M", "G", "T")))):
        if count and count % (1 << 10 * i) == 0:
            return f"{count >> 10 * i}{suffix}"
    return "0"


def size_text(count: float) -> str:
    """Format a number of bytes for people, in the largest unit that leaves at least one: 326 MiB."""
    for unit, bytes_of_unit in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)):
        value = count / bytes_of_unit
        if value >= 1:
            return f"{value:,.0f} {unit}" if value >= 999.5 else f"{value:.3g} {unit}"
    return "0 B"


def stage_sizes(text: str, option: str) -> tuple[int, ...]:
    """Return numbers separated by commas. Raises OptionError."""
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise OptionError(option, f"{text!r}: give a number of layers for each stage, such as 10,20") from None


def named_values(words: Sequence[str], option: str) -> dict[str, str]:
    """Return the values of words NAME=VALUE, by name. Raises OptionError."""
    values = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals):
            raise OptionError(option, f"{word!r}: give NAME=VALUE")
        values[name] = value
    return values
