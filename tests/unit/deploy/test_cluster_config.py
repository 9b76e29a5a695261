from __future__ import annotations

import json
import logging
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from splitserve import cli
from splitserve.api.http_server import bind, port_of
from splitserve.cli.serve import check_cluster
from splitserve.core.errors import ConfigError
from splitserve.core.kv_events import KVEventsConfig
from splitserve.deploy import deployment as deployment_module
from splitserve.deploy.commands import Credentials, check_startable, option_value, router_spec, threads_of, worker_spec
from splitserve.deploy.config import check_replicas, load_config, parse_config
from splitserve.deploy.deployment import LocalDeployment
from splitserve.deploy.placer import NODE_ADDRESS
from splitserve.deploy.up import outward_url, run_cluster_up
from splitserve.offline.engine import _cluster as offline_cluster
from support import ray_nodes

CREDENTIALS = Credentials(b"t" * 32, clients=b"c", operators=b"o", workers=b"w", operator_key="op-key-0123456789")


@pytest.mark.parametrize("text", [b"", b"\n", b"# only a comment\n", b"---\n", b"null", b"{}"])
def test_an_empty_file_is_refused(text: bytes) -> None:
    with pytest.raises(ConfigError, match="the file is empty: name at least the model"):
        parse_config(text)


def test_a_file_with_a_model_alone_is_a_pair():
    config = parse_config(b"model: smollm2")
    assert {name: pool.replicas for name, pool in config.pools.by_name().items()} == {"prefill": 1, "decode": 1}
    assert config.model == "smollm2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pools: {prefill: {tp_size: x}}", "pools.prefill.tp_size: Expected `int`, got `str`"),
        ("pools: {prefill: {tpsize: 2}}", "pools.prefill: Object contains unknown field `tpsize`"),
        ("pools: {encode: {}}", "pools: Object contains unknown field `encode`"),
        ("pools: {prefill: {tpsize: 2}}", "docs/cluster.md has those there are"),
        ("pools: {prefill: {}}", "pools: prefill and decode need each other"),
        ("pools: {prefill: {}, decode: }", "one with all defaults is `decode: {}`"),
        ("pools: {}", "pools: name one at least"),
        ("worker_args: [--page-size, 8]", "worker_args[1]: Expected `str`, got `int`; put it in quotes"),
        ("worker_args: --page-size", "worker_args: Expected `array`, got `str`; write a list: [--option, value]"),
        ("worker_args: [--page-size 8]", "'--page-size 8' is one word; write the option and its value as two"),
        ("pools: {colocated: {replicas: 0}}", "pools: one worker at least"),
        ("pools: {colocated: {replicas: -1}}", "pools.colocated.replicas: must be in"),
        ("pools: {colocated: {pp_size: 3, nodes: 2}}", "pools.colocated.nodes: 3 ranks (tp 1, pp 3) cannot be"),
        ("pools: {colocated: {cpus: 0}}", "pools.colocated.cpus: must be in [1, 1024]"),
        ("pools: {colocated: {args: [--port=1]}}", "pools.colocated.args: --port cannot be set here"),
        ("pools: {colocated: {args: [--tp-size, '2']}}", "set pools.NAME.tp_size"),
        ("worker_args: [--join, x]", "worker_args: --join cannot be set here"),
        ("router: {args: [--port, '1']}", "router.args: --port cannot be set here; set router.port"),
        ("router: {port: 70000}", "router.port: must be in"),
        ("supervision: {backoff: 0}", "supervision.backoff: must be above 0 and finite, not 0"),
        ("supervision: {scale_down: never}", "scale_down: Invalid enum value 'never'; choose one of complete, migrate"),
        ("name: A b", "name: small letters"),
        ("pools: [", "it is no YAML"),
        ("name: 2026-02-30", "it is no YAML: day is out of range for month"),
        ("[" * 3000, "it is no YAML: maximum recursion depth exceeded"),
        ("model: a\nmodel: b", "CONFIG.yaml, line 2: the key 'model' occurs twice"),
        ("model: a\npools:\n  prefill: {}\n  prefill: {}", "CONFIG.yaml, line 4: the key 'prefill' occurs twice"),
        ("- 1", "Expected `object`, got `array`"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(text, message):
    with pytest.raises(ConfigError, match="CONFIG") as caught:
        parse_config(text.encode())
    assert message in caught.value.message


def test_files_are_found_beside_the_config(tmp_path):
    (tmp_path / "c.yaml").write_text("cluster_token_file: token\nkeys: {operators: /etc/operators}\n")
    config = load_config(tmp_path / "c.yaml")
    assert config.cluster_token_file == str(tmp_path / "token")
    assert config.keys.operators == "/etc/operators"
    assert config.keys.clients is None


def test_a_file_that_is_not_there_is_an_error_with_a_remedy(tmp_path):
    with pytest.raises(ConfigError, match=r"docs/cluster\.md"):
        load_config(tmp_path / "none.yaml")


def test_secrets_travel_beside_the_command_line():
    config = parse_config(b"pools: {prefill: {}, decode: {tp_size: 2, gpus: 1, cpus: 3, args: [--page-size, '32']}}")
    router = router_spec(config, CREDENTIALS, "10.0.0.1", 8000)
    worker = worker_spec(config, CREDENTIALS, "decode-0", "decode", threads=3, router_url="http://10.0.0.1:8000")
    assert set(router.secrets) == {"--api-key-file", "--operator-key-file", "--worker-key-file"}
    assert worker.secrets == {
        "--cluster-token-file": b"t" * 32,
        # The first key alone: a worker need not have the others.
        "--router-key-file": b"op-key-0123456789",
        "--api-key-file": b"w",
    }
    for spec in (router, worker):
        shown = repr(spec) + repr(CREDENTIALS)
        assert not any(secret in shown for secret in ("tttt", "op-key"))
    assert worker.args[-2:] == ("--router", "http://10.0.0.1:8000")
    assert worker.args[worker.args.index("--host") + 1] == NODE_ADDRESS
    assert worker.args[worker.args.index("--tp-size") + 1] == "2"
    assert (worker.num_cpus, worker.num_gpus) == (6, 2)
    assert "--device" not in worker.args


@pytest.mark.parametrize("pool", ["prefill", "decode", "colocated"])
@pytest.mark.parametrize("policy", ["--policy", "--prefill-policy", "--decode-policy"])
def test_workers_publish_kv_events_if_a_policy_needs_them(policy: str, pool: str) -> None:
    def events(router_args: list[str], *worker_args: str) -> str | None:
        content = {
            "pools": {"prefill": {}, "decode": {}, "colocated": {}},
            "router": {"args": router_args},
            "worker_args": worker_args,
        }
        config = parse_config(json.dumps(content).encode())
        spec = worker_spec(config, CREDENTIALS, f"{pool}-0", pool, threads=1, router_url=None)
        assert sum(word.startswith("--kv-events-config") for word in spec.args) <= 1
        return option_value(spec.args, "--kv-events-config")

    found = events([policy, "cache_aware"])
    assert found is not None
    config = KVEventsConfig.from_cli(found, "--kv-events-config")
    assert (config.publisher, config.endpoint) == ("zmq", f"tcp://{NODE_ADDRESS}:0")
    assert events([f"{policy}=cache_aware"]) == found
    assert events([policy, "least_load"]) is None
    assert events([policy, "cache_aware"], "--kv-events-config", "{}") == "{}"
    assert events([policy, "cache_aware"], "--kv-events-config={}") == "{}"


def test_level_and_form_of_logs_apply_to_every_process():
    config = parse_config(b"{log_level: debug, log_format: json}")
    router = router_spec(config, CREDENTIALS, "10.0.0.1", 8000)
    worker = worker_spec(config, CREDENTIALS, "decode-0", "decode", threads=3, router_url=None)
    for spec in (router, worker):
        assert " --log-level debug --log-format json " in " ".join(spec.args)


def test_a_pool_without_gpus_computes_on_the_cpu_unless_it_says_where():
    config = parse_config(b"pools: {prefill: {}, decode: {args: [--device, cuda:1]}}")
    prefill, decode = (
        worker_spec(config, CREDENTIALS, f"{name}-0", name, threads=1, router_url="http://r:1").args
        for name in ("prefill", "decode")
    )
    assert prefill[prefill.index("--device") + 1] == "cpu"
    assert [word for word in decode if word in ("cpu", "cuda:1")] == ["cuda:1"]


@pytest.mark.parametrize(("args", "num_ranks"), [("", 8), ("--enable-dp-attention", 4)])
def test_data_parallel_attention_counts_its_ranks_once(args: str, num_ranks: int) -> None:
    pool = f"{{tp_size: 4, dp_size: 2, gpus: 1, args: [{args}]}}"
    config = parse_config(f"pools: {{prefill: {{}}, decode: {pool}}}".encode())
    worker = worker_spec(config, CREDENTIALS, "decode-0", "decode", threads=1, router_url=None)
    assert (worker.num_gpus, config.num_ranks) == (num_ranks, num_ranks + 1)


@pytest.mark.parametrize(("cores", "threads"), [(16, 4), (2, 1), (None, 1)])
def test_cores_of_one_machine_are_shared_and_those_set_aside_are_not(cores, threads):
    config = parse_config(b"pools: {prefill: {tp_size: 2}, decode: {replicas: 2}}")
    assert threads_of(config, config.pools.by_name()["prefill"], cores) == threads


@pytest.mark.parametrize(
    ("text", "ray", "host"),
    [
        ("router: {host: 0.0.0.0}", None, "0.0.0.0"),
        ("router: {host: 0.0.0.0}\nkeys: {clients: KEYS}", None, None),
        ("router: {host: 0.0.0.0}\nkeys: {operators: KEYS}", None, None),
        ("router: {host: 127.0.0.2}", None, None),
        ("model: m", None, None),
        ("model: m", "auto", "its node's address"),
    ],
)
def test_a_router_that_others_reach_without_keys_is_warned_of_once(tmp_path, monkeypatch, caplog, text, ray, host):
    (tmp_path / "keys").write_text("sk-" + "0" * 40 + "\n")
    (tmp_path / "keys").chmod(0o600)

    async def run(*_: object) -> int:
        return 0

    monkeypatch.setattr("splitserve.deploy.up._Up.run", run)
    monkeypatch.setattr("splitserve.deploy.up.setup_logger", lambda *settings: None)
    run_cluster_up(parse_config(text.replace("KEYS", str(tmp_path / "keys")).encode()), ray)
    expected = f"the router listens on {host} without keys: every client that reaches it may use and operate it; "
    expected += "restrict it with --api-key-file and --operator-key-file (in a cluster file: keys)"
    assert caplog.messages == ([] if host is None else [expected])


def test_the_printed_url_of_a_router_on_all_addresses_is_one_that_others_reach():
    assert outward_url("http://127.0.0.1:8000", None) == "http://127.0.0.1:8000"
    assert outward_url("http://127.0.0.2:8000", "127.0.0.2") == "http://127.0.0.2:8000"
    address = outward_url("http://127.0.0.1:8000", "0.0.0.0").removeprefix("http://").removesuffix(":8000")
    others = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    assert address in others
    assert outward_url("https://[::1]:8000", "::").startswith("https://[")


def test_a_token_is_made_where_none_is_given_and_read_where_one_is(tmp_path):
    assert len(Credentials.read(parse_config(b"model: smollm2")).token) == 64
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    token.chmod(0o600)
    assert Credentials.read(parse_config(f"cluster_token_file: {token}".encode())).token == b"0123456789abcdef"
    with pytest.raises(ConfigError, match=r"keys\.clients"):
        Credentials.read(parse_config(f"keys: {{clients: {tmp_path / 'none'}}}".encode()))


def test_ranks_on_several_nodes_are_for_kubernetes():
    config = parse_config(b"pools: {colocated: {pp_size: 2, nodes: 2}}")
    with pytest.raises(ConfigError, match=r"pools\.colocated\.nodes is 2"):
        check_startable(config, is_local=True)


def test_gpus_are_reserved_on_ray_and_kubernetes_only():
    config = parse_config(b"pools: {prefill: {gpus: 1}, decode: {}}")
    check_startable(config, is_local=False)
    with pytest.raises(
        ConfigError, match=r"pools.prefill.gpus is 1: .*leave it out and give args: \[--device, cuda:N\]"
    ):
        check_startable(config, is_local=True)
    with pytest.raises(ConfigError, match=r"pools.prefill.gpus"):
        run_cluster_up(config)


def test_scaling_names_pools_that_are_there():
    config = parse_config(b"model: smollm2")
    now = {"prefill": 1, "decode": 1}
    assert check_replicas(config, {"decode": 3}, now) == {"decode": 3}
    for wrong in ({"encode": 1}, {"decode": -1}, {"decode": 5000}, {"colocated": 1}):
        with pytest.raises(ConfigError):
            check_replicas(config, wrong, now)


@pytest.mark.parametrize("wrong", [{"decode": 0}, {"prefill": 0}, {"prefill": 0, "decode": 0}])
def test_scaling_to_what_serves_nothing_is_refused(wrong):
    config = parse_config(b"model: smollm2")
    with pytest.raises(ConfigError, match=r"nothing could be served with .*cluster down"):
        check_replicas(config, wrong, {"prefill": 1, "decode": 2})


def test_a_pair_may_be_scaled_to_nothing_beside_colocated_workers_and_back():
    config = parse_config(b"pools: {prefill: {}, decode: {}, colocated: {}}")
    now = {"prefill": 1, "decode": 1, "colocated": 1}
    assert check_replicas(config, {"prefill": 0, "decode": 0}, now)
    now = {"prefill": 0, "decode": 0, "colocated": 1}
    assert check_replicas(config, {"prefill": 1, "decode": 2}, now)
    with pytest.raises(ConfigError, match="need each other"):
        check_replicas(config, {"prefill": 1}, now)


def test_the_examples_are_good():
    examples = sorted((Path(__file__).parents[3] / "examples" / "cluster").glob("*.yaml"))
    assert len(examples) >= 3
    for path in examples:
        load_config(path)


def test_ray_that_is_not_installed_is_an_error_with_a_hint(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'splitserve\[ray\]'"):
        run_cluster_up(parse_config(b"model: smollm2"), "auto")


@pytest.mark.skipif(ray_nodes.missing() is not None, reason=str(ray_nodes.missing()))
def test_ray_that_does_not_listen_is_an_error_at_once():
    with bind("127.0.0.1", 0) as sock:
        address = f"127.0.0.1:{port_of(sock)}"
    with pytest.raises(ConfigError, match=rf"--ray {address}: .*Connection refused.*ray start --head"):
        run_cluster_up(parse_config(b"model: smollm2"), address)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("worker_args: [--transfer-backend, fake]", "--transfer-backend fake is for one worker without a router"),
        ("worker_args: [--no-such-option]", "pools.prefill.args or worker_args: --no-such-option: no such option"),
        ("pools: {colocated: {args: [--page-size, many]}}", "pools.colocated.args or worker_args: --page-size: "),
        ("router: {args: [--polisy, cache_aware]}", "router.args: --polisy: no such option; did you mean --policy?"),
    ],
)
@pytest.mark.parametrize("command", [["up"], ["render", "k8s"]], ids=" ".join)
def test_options_that_no_process_would_take_are_refused_before_any_starts(tmp_path, command, text, message):
    """A supervisor would start such a process again and again."""
    (tmp_path / "c.yaml").write_text(text)
    done = CliRunner().invoke(cli.app, ["cluster", *command, str(tmp_path / "c.yaml")])
    assert isinstance(done.exception, ConfigError)
    assert message in done.exception.message


@pytest.mark.parametrize("name", ["kubernetes.yaml", "ray.yaml"])
def test_libraries_of_other_machines_are_not_looked_for_on_this_one(monkeypatch, name):
    monkeypatch.setattr("splitserve.worker.checks.missing", lambda backend: f"{backend} needs libibverbs.so.1")
    config = load_config(Path(__file__).parents[3] / "examples" / "cluster" / name)
    check_cluster(config, is_local=False)
    monkeypatch.setattr("splitserve.engine.sources.resolve_model", Path)
    with pytest.raises(ConfigError, match=r"libibverbs"):
        check_cluster(config, is_local=True)


def test_options_of_the_router_that_need_a_key_file_accept_that_of_the_cluster():
    text = b"router: {args: [--rate-limit, '5']}\n"
    with pytest.raises(ConfigError, match="give --api-key-file, too"):
        check_cluster(parse_config(text), is_local=False)
    check_cluster(parse_config(text + b"keys: {clients: clients.keys}"), is_local=False)


@pytest.mark.parametrize(
    "deployment",
    [
        LocalDeployment(),
        LocalDeployment(prefill=0, decode=0, null=1),
        offline_cluster("m", 1, 1, "tcp", False, {})._deployment,
    ],
    ids=["up", "up with a colocated worker", "offline pair"],
)
def test_workers_of_one_machine_always_have_a_token_of_their_cluster(deployment):
    config = deployment.config()
    first, second = Credentials.read(config), Credentials.read(config)
    assert first.token != second.token
    for name, pool in config.pools.by_name().items():
        if pool.replicas:
            spec = worker_spec(config, first, f"{name}-0", name, threads=1, router_url=None)
            assert spec.secrets["--cluster-token-file"] == first.token
            assert len(first.token) == 64


@pytest.mark.parametrize(
    ("deployment", "workers"),
    [
        (LocalDeployment(backend="cuda_ipc", null=1), "3"),
        (LocalDeployment(backend="cuda_ipc", worker_args=["--device", "cuda"]), "2"),
        (LocalDeployment(backend="cuda_ipc", worker_args=["--workers-per-gpu", "1"]), "1"),
        (LocalDeployment(prefill=0, decode=0, null=1), None),
        # These compute on the CPU.
        (LocalDeployment(backend="tcp"), None),
    ],
)
def test_workers_that_may_share_a_gpu_divide_its_memory(deployment, workers):
    assert option_value(deployment.config().worker_args, "--workers-per-gpu") == workers


@pytest.mark.parametrize(
    ("deployment", "has_gpu", "lines"),
    [
        (LocalDeployment(), True, 1),
        (LocalDeployment(), False, 0),
        (LocalDeployment(backend="cuda_ipc"), True, 0),
        (LocalDeployment(worker_args=["--device", "cpu"]), True, 0),
        (LocalDeployment(prefill=0, decode=0, null=1), True, 0),
    ],
)
def test_a_gpu_that_the_backend_leaves_unused_is_noted_once(deployment, has_gpu, lines, monkeypatch, caplog):
    monkeypatch.setattr(deployment_module, "has_gpu", lambda: has_gpu)
    deployment_module._note_unused_gpu.cache_clear()
    with caplog.at_level(logging.WARNING):
        deployment.config()
        deployment.config()
    expected = (
        "the GPU of this machine is not used: the transfer backend tcp cannot move KV in its memory; "
        "--transfer-backend cuda_ipc computes on the GPU"
    )
    assert caplog.messages == [expected] * lines
