"""Commands and groups of the command line: sections in the help, one-line errors, and names of vLLM and SGLang.

A familiar name has an option here, or a reason why there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from splitserve.core.config import WorkerConfig
from splitserve.core.errors import ConfigError, OptionError, did_you_mean
from splitserve.core.options import Config, option_of, options_of
from splitserve.ranks.launch import LaunchConfig
from splitserve.router.args import LBArgs

POSITIONAL = "MODEL"
PORT_NUMBER = "give a port number between 0 and 65535"
# Names of options in another form: name -> option. Text after "=" is the value, or a prefix of the user's value.
_WORKER = {
    "--model": POSITIONAL,
    "--model-path": POSITIONAL,
    "--async-scheduling": "--no-disable-overlap-schedule",
    "--disaggregation-ib-device": "--transfer-option=device=",
}
_ROUTER = {"--prefill-bootstrap-ports": "--prefill-bootstrap-ports", "--disable-retries": "--max-retries=0"}
# Flags for behaviour that Splitserve always has: accepted, without effect.
ALWAYS = {
    "--enable-chunked-prefill",
    "--enable-metrics",
    "--disable-log-stats",
    "--disable-log-requests",
    "--enable-cache-report",
    "--enable-mixed-chunk",
    "--no-enable-log-requests",
    "--skip-server-warmup",
    "--pd-disaggregation",
    "--mini-lb",
}
# Values of such a flag that request the behaviour it always has.
_ON = ("true", "1", "yes", "on")
_CHUNK_SIZE = "--chunked-prefill-size sets the tokens per step, at least those of the longest prompt for one chunk"
_HANDSHAKE = "prefill and decode workers exchange their sizes in the handshake; leave it out"
NO_MEANING = {
    "--disaggregation-decode-tp": _HANDSHAKE,
    "--disaggregation-decode-dp": _HANDSHAKE,
    "--disaggregation-prefill-pp": _HANDSHAKE,
    "--load-balance-method": "a sample goes to the rank with the fewest outstanding tokens; leave it out",
    "--schedule-conservativeness": "--num-reserved-decode-tokens sets the tokens left free for each running request",
    "--enable-torch-compile": "kernels are compiled ahead; leave it out",
    "--cuda-graph-bs": "--cuda-graph-max-bs sets the largest batch; the sizes below it follow",
    "--sampling-backend": "there is one sampler; leave it out",
    "--hicache-size": "--prefix-host-memory BYTES keeps prefixes in host memory",
    "--admin-api-key": "write it to a file and give it to the router: --operator-key-file FILE",
    "--log-requests": "the router logs a line per request; leave it out",
    "--no-enable-chunked-prefill": f"prefill is always chunked; {_CHUNK_SIZE}",
    "--trust-remote-code": "code from a model's folder is never run; use an architecture that transformers has",
    "--api-key": "other users can read keys on a command line; write it to a file and give --api-key-file FILE",
    "--kv-transfer-config": "give --disaggregation-mode, --transfer-backend and --transfer-option instead",
    "--speculative-config": "give --speculative-algorithm and the other --speculative options instead",
    "--speculative-eagle-topk": "draft tokens form a chain, as with the value 1; leave it out",
    "--compilation-config": "kernels are compiled ahead; leave it out",
    "--tokenizer": "the tokenizer is the one in the model's folder; leave it out",
    "--tokenizer-path": "the tokenizer is the one in the model's folder; leave it out",
    "--skip-tokenizer-init": "workers need the tokenizer; leave it out, requests may still have input_ids",
    "--chat-template": "the chat template is the one in the model's folder; put chat_template.jinja there",
    "--kv-cache-dtype": "the KV pool has the model's dtype; --transfer-dtype narrows what decode workers receive",
    "--download-dir": "set the environment variable SPLITSERVE_CACHE to the folder",
    "--load-format": "weights are safetensors or GGUF, found by their files; leave it out",
    "--revision": "fetch that revision, and name its folder as MODEL",
    "--seed": "give each request its own seed",
    "--random-seed": "give each request its own seed",
    "--cpu-offload-gb": "weights are not offloaded; choose a smaller model or --tp-size 2 or more",
    "--swap-space": "--retraction-host-memory keeps the KV of retracted requests in host memory",
    "--enable-hierarchical-cache": "--prefix-host-memory BYTES keeps prefixes in host memory",
    "--enable-lora": "LoRA adapters are not supported; merge the adapter into the weights",
    "--tool-call-parser": "tool calls are parsed by the model's chat template; leave it out",
    "--reasoning-parser": "reasoning is not separated from the answer; leave it out",
    "--prefill-bootstrap-ports": "it follows --prefill, with one port per URL",
    "--base-gpu-id": "give --device cuda:N",
    "--ep-size": "give --enable-expert-parallel: each tensor parallel rank then has its own experts",
    "--max-prefill-tokens": "--chunked-prefill-size bounds the tokens computed per step",
    "--stream-interval": "every token is streamed; leave it out",
    "--grammar-backend": "grammars are compiled by xgrammar; leave it out",
    "--guided-decoding-backend": "grammars are compiled by xgrammar; leave it out",
    "--watchdog-timeout": "the router's --hang-timeout ends requests to a worker that hangs",
    "--service-discovery": "workers register themselves: splitserve serve --router URL",
    "--prometheus-port": "GET /metrics has the metrics, at --port",
    "--log-dir": "logs go to standard error; redirect it to a file",
}
# Values of such a name that request what Splitserve always does: accepted, without effect.
_AS_ALWAYS = {
    "--kv-cache-dtype": ("auto",),
    "--load-format": ("auto", "safetensors", "gguf"),
    "--stream-interval": ("1",),
    "--grammar-backend": ("xgrammar",),
    "--guided-decoding-backend": ("auto", "xgrammar"),
    "--speculative-eagle-topk": ("1",),
    "--base-gpu-id": ("0",),
    "--ep-size": ("1",),
    "--cpu-offload-gb": ("0",),
    "--swap-space": ("0",),
}
_DIFFERENT = {
    "--gpu-memory-utilization": "share of the memory that is free after the weights are loaded, not of all memory"
}


def _aliases(*configs: Config) -> dict[str, str]:
    """Return the options of configs by their aliases."""
    options = (option for config in configs for option in options_of(config))
    return {alias: option.flag for option in options for alias in option.aliases.split()}


_OF_WORKERS = {**_aliases(WorkerConfig(), LaunchConfig()), **_WORKER}
TABLES: Mapping[str, Mapping[str, str]] = {
    "serve": _OF_WORKERS,
    "up": {**_OF_WORKERS, "--disable-log-requests": option_of(LBArgs, "access_log").flag},
    "router": {**_aliases(LBArgs()), **_ROUTER},
}


def renamed(command: str, name: str) -> str:
    """Return the option for a familiar name, and any other name unchanged. Raises ConfigError if there is no option."""
    if name in (table := TABLES.get(command, {})):
        return table[name]
    if name in NO_MEANING and command in TABLES:
        raise ConfigError(f"{name}: {NO_MEANING[name]}")
    return name


def with_own_names(command: str, words: Sequence[str]) -> list[str]:
    """Return the words of a command line with own option names. Raises ConfigError for names without meaning here."""
    found: list[str] = []
    models: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if command in TABLES and (value if equals or not rest else rest[0]) in _AS_ALWAYS.get(name, ()):
            del rest[: not equals]
            continue
        target = renamed(command, name) if name.startswith("--") else name
        if name in ALWAYS and target == name and command in TABLES:
            if equals and value.lower() not in _ON:
                remedy = _CHUNK_SIZE if name == "--enable-chunked-prefill" else "leave it out"
                raise ConfigError(f"{word}: this flag is always on; {remedy}")
            continue
        if name in _DIFFERENT and target != name:
            typer.echo(f"note: {name} is {target} here: {_DIFFERENT[name]}", err=True)
        if target == name:
            found.append(word)
        elif target == POSITIONAL:
            models.append(value if equals or not rest else rest.pop(0))
        elif target.endswith("="):
            found.append(target + (value if equals or not rest else rest.pop(0)))
        else:
            found.append(target + equals + value)
    return models + found


def expand_lists(words: Sequence[str]) -> list[str]:
    """Return a router's words with one value per option: `--prefill A B` is `--prefill A --prefill B`.

    A port, or `none`, after the URL of a prefill worker is part of its value, and `--prefill-bootstrap-ports` gives
    these ports in the order of the URLs.
    """
    found: list[list[str]] = []
    ports: list[str] = []
    option = ""
    for word in words:
        name, equals, value = word.partition("=")
        if name == "--prefill-bootstrap-ports":
            option = name
            ports += [value] if equals else []
        elif word.startswith("-"):
            option = name
            found.append([name, value] if equals else [word])
        elif option == "--prefill-bootstrap-ports":
            ports.append(word)
        elif option == "--prefill" and (word.isdecimal() or word.lower() == "none") and len(found[-1]) == 2:
            found[-1][1] += f" {word}"
        elif option in ("--prefill", "--decode", "--worker", "--cors-origin") and len(found[-1]) == 2:
            found.append([option, word])
        elif found and len(found[-1]) == 1 and option:
            found[-1].append(word)
        else:
            found.append([word])
    urls = [entry for entry in found if entry[0] == "--prefill" and len(entry) == 2]
    if len(ports) > len(urls):
        raise OptionError("--prefill-bootstrap-ports", f"{' '.join(ports)}: there are {len(urls)} --prefill URLs")
    for entry, port in zip(urls, ports, strict=False):
        entry[1] += f" {port}"
    return [word for entry in found for word in entry]


# Remedies for options of another command, by command and option.
_OPTION_REMEDIES = {"serve --hand-over": "; here give --shared-pool FILE and --transfer-backend shm to both workers"}
# Options for colocated workers, of which each command has one at most.
_COLOCATED = ("--null N", "--disaggregation-mode null", "--worker URL")
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


def _commands_with(option: str, ctx: Any) -> list[str]:
    """Return the commands of the program that have this option."""
    root = None if ctx is None else ctx.find_root()
    if root is None or not hasattr(root.command, "list_commands"):
        return []
    commands = {name: root.command.get_command(root, name) for name in root.command.list_commands(root)}
    return [name for name, command in commands.items() if any(option in param.opts for param in command.params)]


def usage_problem(error: Any) -> str:
    """Return the problem of a command line, in one line without a period at its end."""
    command = error.ctx.command if error.ctx is not None else None
    wrong: str = getattr(error, "option_name", "")
    if wrong and error.message.startswith("No such option"):
        flags = [flag for param in command.params for flag in (*param.opts, *param.secondary_opts)] if command else []
        names = (*flags, *TABLES.get(getattr(command, "name", ""), {}))
        path = error.ctx.command_path if error.ctx is not None else "splitserve"
        colocated = next((text for text in _COLOCATED if text.split()[0] in flags), "")
        # Without dashes, which make short names look alike.
        bare = (name.lstrip("-") for name in (*names, *(["colocated"] if colocated else [])))
        hint = did_you_mean(wrong.lstrip("-"), bare, f"{path} --help lists them", form="--{}")
        hint = hint.replace("--colocated?", f"{colocated}?")
        if owners := _commands_with(wrong, error.ctx):
            hint = f"it belongs to {', '.join(f'splitserve {name}' for name in owners[:2])}"
            hint += _OPTION_REMEDIES.get(f"{getattr(command, 'name', '')} {wrong}", "")
        return f"{wrong}: no such option; {hint}"
    if (param := getattr(error, "param", None)) is not None and param.param_type_name == "option":
        # Click's error of a missing option has no message.
        message = " ".join(error.message.split()).rstrip(".") or "it is missing"
        if param.opts[0].endswith("port") and "integer" in message:
            message = PORT_NUMBER
        return f"{param.opts[0]}: {message[:1].lower()}{message[1:]}"
    return " ".join(error.format_message().split()).rstrip(".")


def run(program: Any, words: list[str]) -> int:
    """Run a command line and return its exit code. Raises ConfigError if it is wrong."""
    try:
        code = program(args=words, prog_name="splitserve", standalone_mode=False)
    except USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(error.format_message(), err=True)
            return int(error.exit_code)
        raise ConfigError(usage_problem(error)) from None
    return code if isinstance(code, int) else 0
