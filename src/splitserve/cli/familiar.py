"""Option names of vLLM and SGLang: the option here, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import typer

from splitserve.core.config import WorkerConfig
from splitserve.core.errors import ConfigError, OptionError
from splitserve.core.options import Config, option_of, options_of
from splitserve.ranks.launch import LaunchConfig
from splitserve.router.args import LBArgs

POSITIONAL = "MODEL"
# Names of options in another form: name -> option. Text after "=" is the value, or a prefix of the user's value.
_WORKER = {
    "--model": POSITIONAL,
    "--model-path": POSITIONAL,
    "--async-scheduling": "--no-disable-overlap-schedule",
    "--disaggregation-ib-device": "--transfer-option=device=",
}
_ROUTER = {"--prefill-bootstrap-ports": "--prefill-bootstrap-ports", "--disable-retries": "--max-retries=0"}
# Flags for behaviour that Splitserve always has: accepted, without effect.
_ALWAYS = {
    "--enable-chunked-prefill",
    "--enable-metrics",
    "--disable-log-stats",
    "--disable-log-requests",
    "--no-enable-log-requests",
    "--pd-disaggregation",
    "--mini-lb",
}
# Values of such a flag that request the behaviour it always has.
_ON = ("true", "1", "yes", "on")
_CHUNK_SIZE = "--chunked-prefill-size sets the tokens per step, at least those of the longest prompt for one chunk"
NO_MEANING = {
    "--no-enable-chunked-prefill": f"prefill is always chunked; {_CHUNK_SIZE}",
    "--trust-remote-code": "code from a model's folder is never run; use an architecture that transformers has",
    "--api-key": "other users can read keys on a command line; write it to a file and give --api-key-file FILE",
    "--kv-transfer-config": "give --disaggregation-mode, --transfer-backend and --transfer-option instead",
    "--speculative-config": "give --speculative-algorithm and the other --speculative options instead",
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
_DIFFERENT = {
    "--gpu-memory-utilization": "share of the memory that is free after the weights are loaded, not of all memory",
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


def familiar_names(command: str) -> list[str]:
    return list(TABLES.get(command, {}))


def with_own_names(command: str, words: Sequence[str]) -> list[str]:
    """Return the words of a command line with own option names. Raises ConfigError for names without meaning here."""
    found: list[str] = []
    models: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        target = renamed(command, name) if name.startswith("--") else name
        if name in _ALWAYS and target == name and command in TABLES:
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
