"""`--config`, `--print-config`, options derived from configs, and names that users of vLLM and SGLang type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve import cli
from splitserve.cli.command import TABLES, Command
from splitserve.cli.serve import ROUTER_OPTIONS, WORKER_OPTIONS, router, serve, worker_config
from splitserve.cli.up import UpCommand, up
from splitserve.core.config import ServerConfig, WorkerConfig
from splitserve.core.errors import ConfigError
from splitserve.core.limits import LimitsConfig
from splitserve.core.options import fill
from splitserve.deploy.config import ClusterConfig
from splitserve.ranks.launch import settle_place
from splitserve.router.args import LBArgs, PrefillConfig

DOCS = Path(__file__).parents[2] / "docs"
COMMANDS = {"serve": (serve, Command), "router": (router, Command), "up": (up, UpCommand)}


WORKER_DEFAULTS = WorkerConfig(server=ServerConfig(log_level="info"))


def values_of(name: str, *words: str) -> dict[str, Any]:
    """The values of a command's options, as the command would get them."""
    function, kind = COMMANDS[name]
    app = typer.Typer(rich_markup_mode=None)
    app.command(cls=kind)(function)
    context: Any = typer.main.get_command(app).make_context(name, list(words))
    params: dict[str, Any] = context.params
    return params


def worker(*words: str) -> WorkerConfig:
    values = values_of("serve", *words)
    return worker_config(values["model"], values, settle_place(None, 0, 0, (), None))


def router_config(values: dict[str, Any]) -> LBArgs:
    config: LBArgs = fill(LBArgs(), values)
    return config


def printed(name: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        cli.main([name, *words, "--print-config"])
    assert end.value.code == 0
    return capsys.readouterr().out


def error_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert ".." not in error
    assert "::" not in error
    return error


def test_without_options_configs_have_their_defaults() -> None:
    assert worker() == msgspec.structs.replace(
        WORKER_DEFAULTS,
        server=msgspec.structs.replace(WORKER_DEFAULTS.server, port=0),
        disaggregation=msgspec.structs.replace(WORKER_DEFAULTS.disaggregation, bootstrap_port=0),
    )
    assert router_config(values_of("router")) == LBArgs()


def test_each_field_of_a_config_has_at_most_one_option_and_each_option_a_help_text() -> None:
    for options in (WORKER_OPTIONS, ROUTER_OPTIONS):
        paths = [option.path for option in options if option.path]
        assert len(set(paths)) == len(paths)
        assert all(option.help for option in options if not option.is_hidden)
    limits = {f"server.limits.{field.name}" for field in msgspec.structs.fields(LimitsConfig)}
    assert limits <= {option.path for option in WORKER_OPTIONS}


def test_values_reach_their_fields() -> None:
    config = worker(
        "tiny",
        *("--page-size", "8", "--disable-radix-cache", "--prefix-host-memory", "2G", "--pp-size", "2"),
        *("--pp-layers", "3,4", "--max-request-memory", "1M", "--max-messages", "7", "--disable-cuda-graph"),
        *("--transfer-option", "threads=2", "--transfer-backend", "shm", "--schedule-policy", "lpm"),
        *("--prefix-host-memory", "0"),
    )
    assert config.model.model == "tiny"
    assert (config.cache.page_size, config.cache.enable_prefix_cache, config.cache.prefix_host_memory) == (8, False, 0)
    assert config.parallel.pp_layers == (3, 4)
    assert (config.server.limits.max_request_memory, config.server.limits.max_messages) == (1 << 20, 7)
    assert config.model.cuda_graph_max_batch == 0
    assert config.disaggregation.transfer_options == {"threads": "2"}
    assert config.scheduler.schedule_policy == "lpm"


def test_the_values_of_a_router_reach_their_fields() -> None:
    words = ["--prefill", "http://a:1", "8998", "http://b:1", "--decode", "http://c:1", "http://d:1"]
    words += ["--cors-origin", "http://a", "--cors-origin", "*", "--workers-file", "workers", "--api-key-file", "keys"]
    words += ["--policy", "random", "--rate-limit", "0.5", "--rate-limit-burst", "3", "--max-running-requests", "8"]
    config = router_config(values_of("router", *words, "--disable-access-log", "--max-request-bytes", "5K"))
    assert config.prefill == (PrefillConfig("http://a:1", 8998), PrefillConfig("http://b:1"))
    assert config.decode == ("http://c:1", "http://d:1")
    assert config.cors_origins == ("http://a", "*")
    assert (config.workers_file, config.api_key_file) == (Path("workers"), Path("keys"))
    assert (config.policy, config.rate_limit, config.rate_limit_burst, config.max_running_requests) == (
        "random",
        0.5,
        3,
        8,
    )
    assert not config.access_log
    assert config.limits.max_request_bytes == 5 << 10


def test_fill_leaves_what_no_option_gives() -> None:
    values = {option.name: None for option in WORKER_OPTIONS} | {"page_size": 4}
    filled = fill(WORKER_DEFAULTS, values)
    assert filled.cache.page_size == 4
    assert filled.model == WORKER_DEFAULTS.model


WORDS = {
    "--page-size": st.integers(1, 64).map(str),
    "--dtype": st.sampled_from(["auto", "bfloat16"]),
    "--mem-fraction-static": st.floats(0.01, 1.0).map(str),
    "--served-model-name": st.text("abc: #'\"{}-", min_size=1).filter(lambda text: not text.startswith("-")),
    "--prefix-host-memory": st.sampled_from(["0", "3K", "512M"]),
    "--schedule-policy": st.sampled_from(["lpm", "spf"]),
    "--kv-events-config": st.just('{"publisher": "null"}'),
    "--transfer-option": st.sampled_from(["threads=1", "device=mlx5_0:1"]),
    "--request-timeout": st.sampled_from(["1", "0.5"]),
    "--cluster-token-file": st.sampled_from(["/a/token", "b"]),
}


@given(st.fixed_dictionaries({}, optional=WORDS), st.booleans(), st.sampled_from(["serve", "up"]))
@settings(max_examples=40, deadline=None)
def test_the_printed_config_reads_back_to_the_same_values(
    tmp_path_factory: pytest.TempPathFactory, given_words: dict[str, str], flag: bool, name: str
) -> None:
    words = [word for pair in given_words.items() for word in pair] + ["--disable-radix-cache"] * flag
    values = values_of(name, "tiny", *words)
    file = tmp_path_factory.mktemp("config") / "c.yaml"
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr(typer, "echo", lambda text, nl: lines.append(text))
        with pytest.raises(SystemExit):
            cli.main([name, "tiny", *words, "--print-config"])
    file.write_text(lines[0])
    assert values_of(name, "--config", str(file)) == {**values, "config": str(file)}


def test_the_printed_config_of_a_router_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--prefill", "http://a:1", "1", "http://b:1", "--worker", "http://c:1", "--no-probe"]
    file = tmp_path / "c.yaml"
    file.write_text(printed("router", words, capsys))
    assert router_config(values_of("router", "--config", str(file))) == router_config(values_of("router", *words))


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--policy", "cache_aware", "--page-size", "32"),
        ("--transfer-backend", "cuda_ipc", "--prefill-tp-size", "2"),
        ("--prefill", "0", "--decode", "0", "--null", "2", "--tp-size", "2"),
    ],
    ids=" ".join,
)
def test_up_starts_the_same_cluster_from_the_config_that_it_prints(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[ClusterConfig] = []
    monkeypatch.setattr("splitserve.deploy.up.run_cluster_up", lambda config: configs.append(config) or 0)
    monkeypatch.setattr("splitserve.engine.sources.resolve_model", Path)
    monkeypatch.setattr("splitserve.worker.preflight.check_preflight", lambda worker, folder: None)
    monkeypatch.setattr("splitserve.worker.checks.missing", lambda backend: None)
    (tmp_path / "c.yaml").write_text(printed("up", ["m", *words], capsys))
    for given_words in (["m", *words], ["--config", str(tmp_path / "c.yaml")]):
        with pytest.raises(SystemExit) as end:
            cli.main(["up", *given_words, "--port", "9000"])
        assert end.value.code == 0, capsys.readouterr().err
    assert configs[0] == configs[1]


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("page-size: 8\nmax_model_len: 100\nmodel: tiny\ndisable-radix-cache: true\nkernels: null\n")
    config = worker("--config", str(file))
    assert (config.cache.page_size, config.model.context_length, config.model.model) == (8, 100, "tiny")
    assert not config.cache.enable_prefix_cache
    config = worker("other", "--config", str(file), "--page-size", "4", "--enable-prefix-caching")
    assert (config.cache.page_size, config.model.context_length, config.model.model) == (4, 100, "other")
    assert config.cache.enable_prefix_cache


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("page-siz: 8", "no option 'page-siz'; did you mean page-size?"),
        ("zzz: 8", "splitserve serve --help lists the options"),
        ("page-size: [8]", "page-size: expected int, got array"),
        ("page-size: '8'", "page-size: expected int, got str"),
        ("served-model-name: 8", "served-model-name: expected str, got int"),
        ("disable-radix-cache: maybe", "disable-radix-cache: expected bool, got str"),
        ("transfer-option: threads=1", "transfer-option: expected array, got str"),
        ("quantization: fp8", "--quantization fp8: choose one of int8, w8a8"),
        ("trust-remote-code: true", "code from a model's folder is never run"),
        ("- page-size", "--config"),
        ("page-size: 8\n\npage-size: 16", "c.yaml, line 3: the key 'page-size' occurs twice; keep one of them"),
        ("page-size: 8\npage_size: 16", "c.yaml: page-size and page_size are the same option; keep one of them"),
        ("tp: 1\ntensor-parallel-size: 2", "c.yaml: tp and tensor-parallel-size are the same option"),
        ("a: b: c", "write one option per line"),
    ],
)
def test_a_wrong_config_file_is_refused(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    error = error_of(["serve", "--config", str(file)], capsys)
    assert message in error
    assert error.startswith(f"error: --config {file}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-failed-starts: 0", "--max-failed-starts must be at least 1"),
        ("threads: 0", "--threads must be in [1, 1024], not 0"),
        ("prefix-host-memory: 4X", "--prefix-host-memory"),
        ("request-timeout: -1.0", "--request-timeout must be above 0"),
        ("hand-over: true", "--hand-over needs --transfer-backend shm"),
        ("policy: fastest", "--policy"),
        (" \n", "the file has no option: write one option per line"),
        ("# page-size: 32\n", "the file has no option: write one option per line"),
    ],
)
def test_errors_of_values_name_the_config_file(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    assert error_of(["up", "--config", str(file)], capsys).startswith(f"error: --config {file}: {message}")


def test_errors_of_the_command_line_do_not_name_the_config_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("threads: 2\npage-size: 8")
    assert error_of(["up", "--config", str(file), "--threads", "0"], capsys).startswith("error: --threads must be in ")


def test_a_config_file_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--config /nowhere: No such file" in error_of(["serve", "--config", "/nowhere"], capsys)


@pytest.mark.parametrize(
    ("words", "same"),
    [
        (["--model-path", "m"], ["m"]),
        (["--page-size", "8", "--model=m"], ["m", "--page-size", "8"]),
        (["--max-model-len", "100"], ["--context-length", "100"]),
        (["--tp", "2"], ["--tp-size", "2"]),
        (["--tensor-parallel-size=2"], ["--tp-size", "2"]),
        (["--pipeline-parallel-size", "2"], ["--pp-size", "2"]),
        (["--data-parallel-size", "2"], ["--dp-size", "2"]),
        (["--max-num-seqs", "3"], ["--max-running-requests", "3"]),
        (["--max-num-batched-tokens", "64"], ["--chunked-prefill-size", "64"]),
        (["--gpu-memory-utilization", "0.5"], ["--mem-fraction-static", "0.5"]),
        (["--block-size", "8"], ["--page-size", "8"]),
        (["--no-enable-prefix-caching"], ["--disable-radix-cache"]),
        (["--enable-prefix-caching"], []),
        (["--enforce-eager"], ["--disable-cuda-graph"]),
        (["--enable-chunked-prefill"], []),
        (["--enable-chunked-prefill=True", "--enable-metrics=1"], []),
        (["--disaggregation-ib-device", "mlx5_0"], ["--transfer-option", "device=mlx5_0"]),
        (["--pdlb-url", "http://r:1"], ["--router", "http://r:1"]),
        (["--speculative-algo", "draft"], ["--speculative-algorithm", "draft"]),
        (["--speculative-algorithm", "EAGLE3"], ["--speculative-algorithm", "eagle3"]),
        (["--speculative-algorithm", "NEXTN"], ["--speculative-algorithm", "mtp"]),
        (["--speculative-eagle-topk", "1"], []),
        (["--speculative-algorithm", "STANDALONE"], ["--speculative-algorithm", "draft"]),
        (["--speculative-draft-model-path", "m"], ["--speculative-draft-model", "m"]),
        (["--disable-log-requests", "--disable-log-stats"], []),
        (["--uvicorn-log-level", "debug"], ["--log-level", "debug"]),
    ],
)
def test_familiar_names_are_options_here(words: list[str], same: list[str]) -> None:
    assert values_of("serve", *words) == values_of("serve", *same)


@pytest.mark.parametrize(
    ("words", "same"),
    [
        (["--worker-urls", "http://a:1", "http://b:1"], ["--worker", "http://a:1", "--worker", "http://b:1"]),
        (["--pd-disaggregation", "--queue-size", "3"], ["--max-queued-requests", "3"]),
        (["--disable-retries", "--disable-log-requests"], ["--max-retries", "0", "--disable-access-log"]),
        (["--max-payload-size", "2M"], ["--max-request-bytes", "2M"]),
        (
            ["--prefill", "http://a:1", "http://b:1", "--prefill-bootstrap-ports", "5", "6"],
            ["--prefill", "http://a:1", "5", "--prefill", "http://b:1", "6"],
        ),
    ],
)
def test_familiar_names_of_routers_are_options_here(words: list[str], same: list[str]) -> None:
    assert values_of("router", *words) == values_of("router", *same)


@pytest.mark.parametrize(
    ("command", "word", "remedy"),
    [
        ("serve", "--enable-chunked-prefill=false", "--chunked-prefill-size sets the tokens per step"),
        ("up", "--enable-metrics=false", "leave it out"),
        ("router", "--mini-lb=no", "leave it out"),
    ],
)
def test_a_flag_that_is_always_on_cannot_be_turned_off(command: str, word: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"^{word}: this flag is always on; {remedy}"):
        values_of(command, word)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_limit_is_an_option_and_in_the_docs(command: str) -> None:
    page = (DOCS / "limits.md").read_text()
    values = values_of(command)
    for name in LimitsConfig.__struct_fields__:
        assert name in values
        assert f"`--{name.replace('_', '-')}`" in page


def test_strict_fields_are_an_option_of_workers() -> None:
    assert not worker().server.strict_fields
    assert worker("--strict-fields").server.strict_fields
    assert values_of("up", "--strict-fields")["strict_fields"]


def test_the_docs_list_every_familiar_name() -> None:
    page = (DOCS / "reference" / "other-names.md").read_text()
    names = [name for table in TABLES.values() for name in table]
    assert [name for name in names if f"{name}`" not in page and f"`{name} " not in page] == []


def test_a_name_with_another_meaning_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    values_of("serve", "--gpu-memory-utilization", "0.5")
    assert "note: --gpu-memory-utilization is --mem-fraction-static here: share of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "--trust-remote-code"], "--trust-remote-code: code from a model's folder is never run"),
        (["up", "--api-key", "sk-1"], "write it to a file and give --api-key-file FILE"),
        (["serve", "--kv-transfer-config", "{}"], "give --disaggregation-mode"),
        (
            ["serve", "--enable-chunked-prefill=false"],
            "--enable-chunked-prefill=false: this flag is always on; --chunked-prefill",
        ),
        (["serve", "--no-enable-chunked-prefill"], "--no-enable-chunked-prefill: prefill is always chunked; --chunked"),
        (["serve", "--ep-size", "2"], "--ep-size: give --enable-expert-parallel"),
        (["router", "--service-discovery"], "workers register themselves"),
        (["serve", "--tensor-paralel-size", "2"], "no such option; did you mean --tensor-parallel-size?"),
        (["up", "--polcy", "random"], "no such option; did you mean --policy?"),
        (["serve", "--page-sise", "8"], "--page-sise: no such option; did you mean --page-size?"),
        (["serve", "--max-model-length", "8"], "did you mean --max-model-len?"),
        (["serve", "--prefill-policy", "random"], "no such option; it belongs to splitserve up, splitserve router"),
        (["router", "--context-length", "9"], "no such option; it belongs to splitserve up, splitserve serve"),
        (["up", "--colocated", "1"], "--colocated: no such option; did you mean --null N?"),
        (["up", "--num-colocated=1"], "did you mean --null N?"),
        (["serve", "--colocated"], "did you mean --disaggregation-mode null?"),
        (["router", "--colocated", "http://h:1"], "did you mean --worker URL?"),
        (["cluster", "up", "--colocated", "1"], "splitserve cluster up --help lists them"),
        (["serve", "--zzz"], "--zzz: no such option; splitserve serve --help lists them"),
        (["serve", "--bogus"], "--bogus: no such option; splitserve serve --help lists them"),
        (["serve", "M", "--port", "80x"], "--port: give a port number between 0 and 65535"),
        (
            ["serve", "M", "--nnodes", "2", "--tp-size", "2", "--enable-memory-saver"],
            "does not go together with --nnodes",
        ),
        (["serve", "M", "--nnodes", "2", "--tp-size", "2"], "--dist-init-addr HOST:PORT"),
        (["serve", "--page-size"], "requires an argument"),
        (["serve", "--page-size", "many"], "--page-size: "),
        (["router", "--prefill-bootstrap-ports", "5"], "there are 0 --prefill URLs"),
        (["sreve"], "Did you mean 'serve'?"),
    ],
)
def test_what_has_no_meaning_here_is_refused_with_what_to_do(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in error_of(words, capsys)
