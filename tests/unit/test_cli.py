from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from splitserve import __version__, cli
from splitserve.cli.command import expand_lists
from splitserve.core.options import num_bytes, size_text


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(list(argv))
    code = exit_info.value.code
    return code if isinstance(code, int) else 0


@pytest.mark.parametrize(
    ("argv", "joined"),
    [
        (["router", "--prefill", "u", "8998", "--decode", "d"], ["router", "--prefill", "u 8998", "--decode", "d"]),
        (["router", "--prefill", "u", "none"], ["router", "--prefill", "u none"]),
        (["router", "--prefill", "u", "--prefill", "v", "1"], ["router", "--prefill", "u", "--prefill", "v 1"]),
        (["router", "--prefill=u", "1", "--port", "2"], ["router", "--prefill", "u 1", "--port", "2"]),
        (["router", "--prefill"], ["router", "--prefill"]),
        (["--prefill", "u", "1", "v", "w", "none"], ["--prefill", "u 1", "--prefill", "v", "--prefill", "w none"]),
        (["--decode", "u", "v", "--probe"], ["--decode", "u", "--decode", "v", "--probe"]),
        (["--prefill", "u", "v", "--prefill-bootstrap-ports", "1", "2"], ["--prefill", "u 1", "--prefill", "v 2"]),
        (["--prefill-bootstrap-ports=1", "--prefill", "u", "v"], ["--prefill", "u 1", "--prefill", "v"]),
    ],
)
def test_options_of_the_router_take_several_urls_and_ports(argv: list[str], joined: list[str]) -> None:
    assert expand_lists(argv) == joined


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve", "--dtype", "int3"], "--dtype"),
        (["serve", "--page-size", "0"], "--page-size"),
        (["serve", "--port", "70000"], "--port"),
        (["serve", "--mem-fraction-static", "2"], "--mem-fraction-static"),
        (["serve", "--attention-backend", "magic"], "--attention-backend"),
        (["serve", "--transfer-option", "device"], "--transfer-option"),
        (["serve", "--disaggregation-transfer-backend", "nccl"], "nccl"),
        (["up", "--hand-over"], "share; add --transfer-backend shm, or leave --hand-over out"),
        (["serve", "--hand-over"], "here give --shared-pool FILE and --transfer-backend shm"),
        (["serve", "--shared-pool", "f"], "(--disaggregation-mode null, --transfer-backend tcp); add --transfer-"),
        (["verify", "--hand-over"], "--hand-over needs --transfer-backend shm"),
        (["verify", "--all-transports", "--transfer-backend", "tcp"], "--all-transports chooses the transports"),
        (["serve", "--threads", "0"], "--threads"),
        (["serve", "--speculative-num-steps", "0"], "--speculative-num-steps must be at least 1"),
        (["serve", "--speculative-num-draft-tokens", "0"], "--speculative-num-draft-tokens"),
        (["serve", "--speculative-ngram-max-match", "1"], "--speculative-ngram-max-match must be at least 2"),
        (["serve", "--dp-size", "0"], "--dp-size"),
        (["serve", "--dp-size", "5000"], "--dp-size"),
        (["up", "--prefill-dp-size", "0"], "--prefill-dp-size"),
        (["up", "--decode-tp-size", "0"], "--decode-tp-size 0: it must be at least 1"),
        (["verify", "--prefill-pp-size", "-1"], "--prefill-pp-size -1: it must be at least 1"),
        (
            ["up", "--transfer-backend=shm", "--hand-over", "--decode-tp-size=2"],
            "--hand-over is between workers of one",
        ),
        (["serve", "--tp-size", "0"], "--tp-size must be at least 1"),
        (["serve", "--pp-size", "0"], "--pp-size must be at least 1"),
        (["serve", "--pp-size", "2", "--pp-layers", "3"], "(1 numbers, --pp-size 2); give as many numbers as stages"),
        (["serve", "--enable-dp-attention"], "--enable-dp-attention needs --dp-size 2 or more"),
        (
            ["serve", "--tp-size=3", "--dp-size=2", "--enable-dp-attention"],
            "share them evenly (3, --dp-size 2); give a multiple",
        ),
        (["serve", "--pp-size", "2", "--pp-layers", "3,0"], "--pp-layers must give each pipeline stage at least 1"),
        (["serve", "--pp-size", "2", "--pp-layers", "3+3"], "--pp-layers '3+3': give a number of layers"),
        (["serve", "--num-reserved-decode-tokens", "0"], "--num-reserved-decode-tokens"),
        (["serve", "--retraction-host-memory", "plenty"], "--retraction-host-memory"),
        (["serve", "--prefix-host-memory", "4X"], "--prefix-host-memory"),
        (["serve", "--request-timeout", "-1"], "--request-timeout"),
        (["serve", "--kv-events-config", "zmq"], "--kv-events-config"),
        (["serve", "--kv-events-config", '{"publisher": "pigeon"}'], "there is no publisher 'pigeon', only null, zmq"),
        (["serve", "--kv-events-config", '{"port": 5557}'], "--kv-events-config"),
        (["serve", "--kv-events-config", '{"publisher": "zmq", "endpoint": "tcp://here"}'], "has no port"),
        (
            [
                "serve",
                "--dp-size=2",
                '--kv-events-config={"publisher":"zmq","endpoint":"tcp://*:7000","replay_endpoint":"tcp://*:7001"}',
            ],
            "tcp://*:7001 would be used twice",
        ),
        (["serve", "--router", "nowhere"], "not the URL of a worker or router"),
        (["cluster", "resume", "http://h:1"], "--router: it is missing"),
        (["router", "--policy", "fastest"], "--policy"),
        (["router", "--prefill", "http://h:1", "99999"], "--prefill"),
        (["router", "--decode", "h"], "not the URL of a worker or router"),
        (["router", "--timeout", "0"], "--timeout"),
        (["router", "--cors-origin", "https://a.b/"], "--cors-origin 'https://a.b/'"),
        (["router", "--cors-origin", "a.b"], "--cors-origin 'a.b'"),
        (["router", "--ssl-certfile", "/nowhere"], "--ssl-certfile and --ssl-keyfile need each other"),
        (["router", "--ssl-certfile", __file__, "--ssl-keyfile", "/nowhere"], "--ssl-keyfile /nowhere: No such file"),
        (["router", "--ssl-certfile", "/nowhere", "--ssl-keyfile", __file__], "--ssl-certfile /nowhere: No such file"),
        (["router", "--ssl-certfile", __file__, "--ssl-keyfile", __file__], "cannot be used together"),
        (["router", "--max-running-requests", "0"], "--max-running-requests"),
        (["router", "--max-queued-requests", "-1"], "--max-queued-requests"),
        (["router", "--rate-limit", "0", "--api-key-file", "k"], "--rate-limit must be above 0"),
        (["router", "--rate-limit", "5"], "give --api-key-file, too"),
        (["router", "--rate-limit-burst", "5"], "needs --rate-limit"),
        (["router", "--port", "0", "--api-key-file", "/nowhere"], "--api-key-file /nowhere: No such file"),
        (["router", "--port", "0", "--operator-key-file", "/nowhere"], "--operator-key-file /nowhere: No such file"),
        (["serve", "--router-key-file", "/nowhere"], "--router-key-file /nowhere: No such file"),
        (["up", "--prefill", "1", "--decode", "0"], "or --prefill 0 --decode 0 --null N for N colocated workers"),
        (["up", "--prefill", "0", "--decode", "0"], "or --prefill 0 --decode 0 --null N for N colocated workers"),
        (["up", "--dtype", "int3"], "--dtype"),
        (["up", "smollm2", "another"], "(another)"),
        (["up", "smollm2", "--", "--disaggregation-mode=prefill"], "give numbers of workers: --prefill N"),
        (["up", "smollm2", "--", "--page-size", "8", "--port", "1"], "--port after --: workers take free ports"),
        (["up", "smollm2", "--pdlb-url", "http://h:1"], "--pdlb-url: workers register with the router"),
        (["up", "smollm2", "--", "--prefill", "2"], "--prefill after --: only options of workers may follow"),
        (["up", "smollm2", "--", "--api-key-file=f"], "--api-key-file after --: only options of workers may follow"),
        (["up", "smollm2", "--", "--join", "http://h:1"], "--join after --: workers register with the router"),
        (
            ["up", "--prefill=0", "--decode=0", "--null=1", "--decode-tp-size=2"],
            "their shape after --: smollm2 -- ",
        ),
        (["up", "smollm2", "--", "--dp-size", "2"], "give --prefill-dp-size and --decode-dp-size"),
        (["up", "smollm2", "--", "--tp-size=2"], "give --prefill-tp-size and --decode-tp-size"),
        (["up", "smollm2", "--", "--pp-layers=2,1"], "stages of `up` are as even as possible"),
        (["up", "--transfer-backend", "pigeon"], "--transfer-backend"),
        (["serve", "--disaggregation-transfer-backend", "pigeon"], "--transfer-backend pigeon: choose one of tcp"),
        (["up", "--log-level", "info", "--prefill", "0", "--decode", "0"], "at least one worker"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_an_unknown_option_or_command_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--no-such-option") == 2
    assert run("no-such-command") == 2


def test_a_model_that_is_not_there_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("pull", "/no/such/model") == 2
    assert capsys.readouterr().err.startswith("error: There is no folder")


def test_a_port_that_is_taken_may_be_free_when_it_is_tried_again(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert run("router", "--port", str(taken.getsockname()[1])) == 1
    assert "choose another --host or --port" in capsys.readouterr().err


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert __version__ in capsys.readouterr().out


def test_every_command_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("up", "serve", "router", "demo", "pull", "chat", "doctor", "verify", "bench"))


def test_the_command_line_loads_nothing_heavy() -> None:
    program = (
        "import sys, splitserve.cli; print(sorted({'torch', 'transformers', 'fastapi', 'openai'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.process
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "statement",
    # With a buffer the first one fails at exit, the others in the command.
    ["print('x')", "print('x' * 100_000)", "import rich; rich.print('x')", "import typer; typer.echo('x')"],
)
def test_output_that_cannot_be_written_is_one_error_line(statement: str, unbuffered: str) -> None:
    program = f"from splitserve import cli\ncli.run = lambda *_: exec({statement!r}) or 0\ncli.main([])"
    words, env = [sys.executable, "-c", program], {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, env=env)
    assert (done.returncode, done.stderr) == (1, "error: standard output: No space left on device\n")


@pytest.mark.process
def test_a_command_needs_no_standard_output() -> None:
    program = "import sys; from splitserve import cli; sys.stdout = None; cli.main(['--version'])"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_an_error_of_a_file_that_is_not_the_output_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "run", lambda *_: Path("/nowhere").read_text())
    with pytest.raises(FileNotFoundError):
        cli.main([])


def test_a_report_can_say_how_its_command_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(
        "splitserve.tools.bench.report.run_bench", lambda options, measure: seen.append(options.command) or 0
    )
    assert run("bench", "compare", "a model", "--system", "null", "--system", "disaggregated", "--quick") == 0
    assert run("bench", "compare") == 0
    assert seen == [
        "splitserve bench compare 'a model' --system null --system disaggregated --quick",
        "splitserve bench compare",
    ]


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ((), "auto"),
        (("--decode-dp-size", "2"), "auto"),
        (("--decode-tp-size", "2"), "float32"),
        (("--dtype", "float32"), "float32"),
        (("--quantization", "int8"), "bfloat16"),
        (("--quantization", "int8", "--dtype", "auto"), "auto"),
    ],
)
def test_verify_compares_in_the_served_dtype_unless_ranks_share_matrices(
    options: tuple[str, ...], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr("splitserve.tools.verify.run_verify", lambda found: seen.append(found.used_dtype) or 0)
    assert run("verify", *options) == 0
    assert seen == [dtype]


def test_serve_has_the_default_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--help") == 0
    assert "smollm2]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("4096", 4096), ("2k", 2048), ("512M", 512 << 20), ("3GiB", 3 << 30), ("1TB", 1 << 40)],
)
def test_bytes_take_a_suffix(text: str, count: int) -> None:
    assert num_bytes(text, "--option") == count


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (12, "12 B"),
        (4096, "4 KiB"),
        (3 << 19, "1.5 MiB"),
        (1020 << 20, "1,020 MiB"),
        (1 << 50, "1,048,576 GiB"),
    ],
)
def test_bytes_are_shown_in_the_largest_unit(count: int, text: str) -> None:
    assert size_text(count) == text


@pytest.mark.parametrize("group", ["bench", "cluster", "certs"])
def test_the_help_of_a_group_has_whole_sentences(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(group, "--help") == 0
    assert "..." not in capsys.readouterr().out.replace("[ARGS]...", "")


def test_the_help_of_up_tells_the_sizes_of_both_roles_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("up", "--help") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "--prefill-tp-size <int> Tensor parallel ranks of each prefill worker." in out
    assert "--decode-pp-size <int> Pipeline stages of each decode worker." in out


def test_the_help_of_up_names_all_aliases(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("up", "--help") == 0
    assert "smollm2 or smollm2-q4" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("up", "--threads", "0"), "--threads"),
        (("up", "--transfer-backend", "fake"), "error: --transfer-backend fake is for one worker without a router"),
        (("serve", "--transfer-backend", "fake"), "fake needs --disaggregation-mode prefill or decode"),
        (
            (
                "serve",
                "--disaggregation-mode=decode",
                "--transfer-backend=fake",
                "--router=http://127.0.0.1:1",
            ),
            "--router does not go together with --transfer-backend fake",
        ),
        (
            (
                "serve",
                "--disaggregation-mode=decode",
                "--transfer-backend=fake",
                "--transfer-option=bandwidth=x",
            ),
            "--transfer-option bandwidth=x: a number of GB/s",
        ),
        (("bench", "serve", "--url", "http://127.0.0.1:1", "--header", "x"), "--header 'x': give NAME=VALUE"),
        (("router", "--port", "99999"), "--port"),
        (("serve", "--schedule-policy", "lifo"), "--schedule-policy"),
        (("serve", "--max-total-tokens", "0"), "--max-total-tokens"),
        (("serve", "--bootstrap-timeout", "-1"), "--bootstrap-timeout"),
        (("up", "--cluster-token-file", "/no/such/file"), "openssl rand"),
        (("serve", "--disaggregation-mode", "decode", "--cluster-token-file", "/no/such/file"), "openssl rand"),
        (("serve", "--disaggregation-mode", "decode", "--disaggregation-host", "192.0.2.1"), "--cluster-token-file"),
        (("bench", "serve", "--slo", "speed=1"), "--slo"),
        (("bench", "serve", "--concurrency", "2", "--request-rate", "1"), "--request-rate"),
        (("bench", "serve", "--trace", "/no/such/file"), "--trace"),
        (("bench", "serve", "--trace-speed", "0"), "--trace-speed"),
        (("bench", "serve", "--url", "http://127.0.0.1:1", "--extra-body", "[]"), "--extra-body"),
        (("bench", "serve", "--url", "http://127.0.0.1:1", "--prompt-format", "x"), "--prompt-format"),
        (("bench", "compare", "--transfer-backend", "fake"), "tcp"),
        (("serve", "--host", "0.0.0.0", "--router", "http://127.0.0.1:1"), "--disaggregation-host"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    args: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*args) == 2
    assert named in capsys.readouterr().err


def test_no_name_of_an_option_is_cut_however_narrow_the_terminal_is():
    narrow = {"COLUMNS": "60", "TERMINAL_WIDTH": "60"}
    for command in ("serve", "up", "router"):
        out = CliRunner().invoke(cli.app, [command, "--help"], env=narrow).output
        assert "…" not in out
    assert "--disaggregation-transfer-backend" in CliRunner().invoke(cli.app, ["serve", "--help"], env=narrow).output
