"""`ServerArgs` and `launch_server`: the options of `splitserve serve` as keywords, with the names of SGLang."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import splitserve
from splitserve import ServerArgs
from splitserve.cli import server_args
from splitserve.core.errors import ConfigError
from splitserve.core.request import DisaggregationMode

KEY = "k" * 20


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Return the workers that a test starts: model and values of the options. They end with exit code 7."""
    found: list[tuple[str, dict[str, Any]]] = []

    def run(model: str, values: dict[str, Any]) -> int:
        file = values["api_key_file"]
        keys = Path(file).read_text() if file else None
        mode = os.stat(file).st_mode & 0o777 if file else None
        found.append((model, {**values, "keys": keys, "mode": mode}))
        return 7

    monkeypatch.setattr(server_args, "run_serve", run)
    monkeypatch.setattr(server_args, "install", lambda: None)
    return found


def test_the_names_of_sglang_reach_the_options() -> None:
    args = ServerArgs(
        model_path="tiny",
        host="127.0.0.1",
        port=0,
        tp_size=2,
        dp_size=2,
        mem_fraction_static=0.5,
        max_running_requests=8,
        chunked_prefill_size=64,
        context_length=100,
        schedule_policy="lpm",
        served_model_name="name",
        disaggregation_mode="prefill",
        disaggregation_bootstrap_port=8998,
        disaggregation_transfer_backend="mooncake",
        disaggregation_ib_device="mlx5_0",
        speculative_algorithm="NGRAM",
        disable_radix_cache=True,
        kv_cache_dtype="auto",
        trust_remote_code=False,
        enable_metrics=True,
        log_level="error",
        quantization=None,
    )
    assert (args.model_path, args.port, args.tp_size, args.dp_size, args.context_length) == ("tiny", 0, 2, 2, 100)
    assert (args.mem_fraction_static, args.max_running_requests, args.chunked_prefill_size) == (0.5, 8, 64)
    assert (args.disaggregation_mode, args.disaggregation_bootstrap_port) == (DisaggregationMode.PREFILL, 8998)
    assert (args.disaggregation_transfer_backend, args.transfer_option) == ("mooncake", ["device=mlx5_0"])
    assert (args.speculative_algorithm, args.schedule_policy, args.log_level) == ("ngram", "lpm", "error")
    assert (args.disable_radix_cache, args.served_model_name) == (True, "name")
    assert (args.page_size, args.quantization) == (16, None)


def test_values_of_python_have_the_form_of_the_option() -> None:
    args = ServerArgs(
        "tiny",
        kv_events_config={"publisher": "null"},
        pp_layers=[1, 2],
        router=["http://a:1", "http://b:1"],
        prefix_host_memory=1 << 20,
        cluster_token_file=Path("token"),
    )
    assert (args.kv_events_config, args.pp_layers) == ('{"publisher":"null"}', "1,2")
    assert (args.router, args.prefix_host_memory) == (["http://a:1", "http://b:1"], 1 << 20)
    assert args.cluster_token_file == Path("token")


@pytest.mark.parametrize(
    ("name", "value", "option", "expected"),
    [
        ("decode_prefix_cache", False, "decode_prefix_cache", False),
        ("disable_overlap_schedule", False, "disable_overlap_schedule", False),
        ("async_scheduling", True, "disable_overlap_schedule", False),
        ("async_scheduling", False, "disable_overlap_schedule", True),
        ("enable_prefix_caching", False, "disable_radix_cache", True),
        ("enforce_eager", True, "disable_cuda_graph", True),
    ],
)
def test_a_flag_may_be_on_or_off(name: str, value: bool, option: str, expected: bool) -> None:
    assert getattr(ServerArgs("tiny", **{name: value}), option) is expected


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"disagregation_mode": "prefill"}, "no option 'disagregation_mode'; did you mean disaggregation_mode?"),
        ({"tensor_paralel_size": 2}, "did you mean tensor_parallel_size?"),
        ({"api_kye": KEY}, "did you mean api_key?"),
        ({"zz": 1}, "no option 'zz'; splitserve serve --help lists the options"),
        ({"print_config": True}, "no option 'print_config'"),
        ({"trust_remote_code": True}, "code from a model's folder is never run"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--transfer-dtype narrows what decode workers receive"),
        ({"disaggregation_decode_tp": 2}, "exchange their sizes in the handshake"),
        ({"enable_chunked_prefill": False}, "--chunked-prefill-size sets the tokens per step"),
        ({"tp_size": 2, "tensor_parallel_size": 4}, "tp_size and tensor_parallel_size are the same option"),
        ({"transfer_backend": "tcp", "disaggregation_transfer_backend": "shm"}, "are the same option; give one of"),
        ({"async_scheduling": True, "disable_overlap_schedule": True}, "are the same option; give one of them"),
        ({"disagregation_mode": None}, "did you mean disaggregation_mode?"),
        ({"install_completion": "bash"}, "no option 'install_completion'"),
        ({"api_key": "short"}, "ServerArgs: api_key: a key has at least 16 characters"),
        ({"page_size": 0}, "--page-size must be at least 1"),
        ({"page_size": "many"}, "--page-size: input should be a valid integer"),
        ({"attention_backend": "fa3"}, "choose one of auto, torch, flashinfer"),
        ({"api_key": KEY, "api_key_file": "keys"}, "give one of them"),
    ],
)
def test_a_wrong_keyword_is_refused_with_the_remedy(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerArgs("tiny", **options)
    assert problem in caught.value.message


def test_each_name_of_the_constructor_can_be_read() -> None:
    given = {
        "transfer_backend": "shm",
        "enable_prefix_caching": False,
        "async_scheduling": True,
        "disaggregation_ib_device": "mlx5_0",
        "kv_cache_dtype": "auto",
        "trust_remote_code": False,
        "enable_mixed_chunk": True,
        "block_size": 8,
    }
    args = ServerArgs("tiny", **given)
    assert {name: getattr(args, name) for name in given} == given
    known = {
        **server_args._params(),
        **server_args._NAMES,
        **dict.fromkeys((*server_args.ALWAYS, *server_args.NO_MEANING)),
    }
    for flag in known:
        if flag.startswith("--") and flag not in server_args._NOT_HERE:
            getattr(args, flag[2:].replace("-", "_"))
    assert ServerArgs("tiny").disaggregation_ib_device is None


def test_what_is_always_on_may_be_false_and_a_note_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert ServerArgs("tiny", enable_metrics=False).enable_metrics is True
    assert capsys.readouterr().err == "note: enable_metrics=False has no effect: this is always on\n"


def test_equal_options_are_equal_and_repr_has_what_was_given() -> None:
    args = ServerArgs("tiny", tp_size=2, quantization=None)
    assert args == ServerArgs("tiny", tensor_parallel_size=2)
    assert args != ServerArgs("tiny")
    assert args != ServerArgs("tiny", tp_size=2, api_key=KEY)
    assert repr(args) == "ServerArgs(model_path='tiny', tp_size=2)"
    assert eval(repr(args)) == args
    assert repr(ServerArgs("tiny", api_key=KEY)) == "ServerArgs(model_path='tiny', api_key=...)"


def test_an_option_cannot_be_set_without_an_effect() -> None:
    args = ServerArgs("tiny")
    with pytest.raises(AttributeError, match="port: options cannot be changed; create another ServerArgs"):
        args.port = 1
    assert args.port is None


def test_other_processes_get_the_same_options() -> None:
    args = ServerArgs("tiny", disaggregation_mode="decode", api_key=KEY)
    copy = pickle.loads(pickle.dumps(args))
    assert (copy.values, copy.api_key) == (args.values, KEY)
    with pytest.raises(AttributeError, match="no option 'zz'"):
        _ = copy.zz


@pytest.mark.parametrize(
    ("args", "options"), [(({"model_path": "tiny"},), {}), ((), {"model_path": "tiny"}), ((), {}), (("tiny",), {})]
)
def test_a_server_needs_server_args(args: Any, options: Any) -> None:
    with pytest.raises(splitserve.ConfigError, match=r"launch_server takes a ServerArgs: launch_server\(ServerArgs\("):
        server_args.launch_server(*args, **options)


def test_a_server_starts_with_the_values_and_ends_the_program(started: list[tuple[str, dict[str, Any]]]) -> None:
    with pytest.raises(SystemExit) as end:
        server_args.launch_server(ServerArgs("tiny", page_size=8))
    ((model, values),) = started
    assert end.value.code == 7
    assert (model, values["page_size"], values["keys"]) == ("tiny", 8, None)


def test_a_key_is_in_no_repr_and_in_a_private_file_while_the_server_runs(
    started: list[tuple[str, dict[str, Any]]],
) -> None:
    args = ServerArgs("tiny", api_key=KEY)
    assert KEY not in repr(args)
    with pytest.raises(SystemExit):
        server_args.launch_server(args)
    ((_, values),) = started
    assert values["keys"].split() == [KEY, "api_key"]
    assert values["mode"] == 0o600
    assert not Path(values["api_key_file"]).exists()


def test_the_example_of_the_docs_starts_a_prefill_worker(started: list[tuple[str, dict[str, Any]]]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
    example = page.split("```python\n")[1].split("```")[0].replace("from splitserve", f"from {server_args.__name__}")
    with pytest.raises(SystemExit):
        exec(compile(example, "migrating.md", "exec"), {"__name__": "__main__"})
    ((model, values),) = started
    assert (model, values["disaggregation_mode"], values["port"]) == ("smollm2", DisaggregationMode.PREFILL, 30000)
    assert (values["disaggregation_bootstrap_port"], values["mem_fraction_static"]) == (8998, 0.5)


def test_importing_the_package_loads_no_command_line() -> None:
    code = "import splitserve, sys; print([m for m in sys.modules if m.startswith('splitserve.') or m == 'typer'])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
