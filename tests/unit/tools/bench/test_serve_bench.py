"""`splitserve bench serve`: the keys of its JSON, ratios to colocated, what compute hid, options refused at once."""

from __future__ import annotations

import datetime
import json

import pytest
from rich.console import Console

from splitserve.core.errors import ConfigError
from splitserve.tools.bench import serve, systems
from splitserve.tools.bench.options import ServeBenchOptions
from splitserve.tools.bench.report import run_bench
from splitserve.tools.bench.serve import bench_serve, cost_figures, plan_of
from splitserve.tools.bench.serve_figures import Slo, load_figures, serve_report, transfer_figures
from splitserve.tools.bench.stats import StreamRecord
from splitserve.tools.client import Transfers

KEYS = [
    "mode",
    "transfer_backend",
    "concurrency",
    "input_tokens",
    "output_tokens",
    "ttft_ms_p50",
    "ttft_ms_p99",
    "itl_ms_mean",
    "itl_ms_p50",
    "itl_ms_p99",
    "output_tok_s",
    "total_tok_s",
    "goodput",
]
SLOS = [Slo("ttft", 500)]


def row(mode, backend, idle, *, transfers=None, errors=None, records=None):
    good = records if records is not None else [StreamRecord(0.0, [0.1, 0.2, 0.4], 10, 3)]
    return {
        "mode": mode,
        "transfer_backend": backend,
        "concurrency": 2,
        "input_tokens": 10,
        "output_tokens": 3,
        **load_figures(good, errors or {}, 1.0, SLOS),
        "request_rate": None,
        "chunked_prefill_size": 512,
        "threads": "2",
        "cores_taken_by_others": 0.25,
        "trace_cost": None,
        "idle_ttft": {
            "num_prompt_tokens": 2048,
            "num_runs": 5,
            "ttft_median": idle,
            "ttft_min": idle - 0.1,
            "ttft_max": idle + 0.1,
        },
        "transfer": None if transfers is None else transfer_figures(transfers),
    }


def report(*rows):
    return serve_report(options(), "closed loop", rows, SLOS)


@pytest.fixture
def pair():
    moved = Transfers(count=5, num_bytes=5e9, seconds=10.0, exposed_seconds=1.0)
    return row("null", None, 2.0), row("disaggregated", "tcp", 2.1, transfers=moved)


@pytest.fixture
def both(pair):
    return report(*pair)


def options(**changed):
    return ServeBenchOptions(**{"model": "/no/such/model", **changed})


def test_systems_of_one_chunk_size_run_at_once():
    systems = [serve._System("null", None, chunk, None) for chunk in (512, 512, 2048)]
    assert serve._groups(systems) == [systems[:2], systems[2:]]


def test_the_json_form_is_a_list_with_these_keys_first(both):
    found = json.loads(json.dumps(both.figures))
    assert [list(row)[: len(KEYS)] for row in found] == [KEYS, KEYS]
    null, apart = found
    assert (null["mode"], null["transfer_backend"]) == ("null", None)
    assert (apart["mode"], apart["transfer_backend"]) == ("disaggregated", "tcp")
    assert (null["ttft_ms_p50"], null["itl_ms_p99"], null["itl_ms_mean"]) == pytest.approx((100, 200, 150))
    assert (null["output_tok_s"], null["total_tok_s"], null["goodput"]) == pytest.approx((3.0, 13.0, 1.0))


def test_a_load_in_which_everything_failed_keeps_its_keys(both):
    (found,) = report(row("external", None, 2.0, errors={"no room": 4}, records=[])).figures
    assert list(found)[: len(KEYS)] == KEYS
    assert (found["ttft_ms_p50"], found["itl_ms_mean"], found["goodput"]) == (None, None, 0.0)
    assert (found["num_failed"], found["errors"]) == (4, {"no room": 4})


def test_idle_ttft_is_set_against_the_colocated_system_of_the_same_chunk_size(both):
    assert [row["idle_ttft_of_null"] for row in both.figures] == pytest.approx([1.0, 1.05])
    assert report(row("external", None, 2.0)).figures[0]["idle_ttft_of_null"] is None


def test_what_compute_hid_is_what_was_not_exposed(pair):
    assert pair[0]["transfer"] is None
    expected = {"num_bytes": 1e9, "seconds": 2.0, "exposed_seconds": 0.2, "hidden": 0.9, "gb_per_s": 0.5}
    assert pair[1]["transfer"] == pytest.approx(expected)


def test_the_cost_of_traces_is_the_median_of_the_rounds_ratios():
    cost = cost_figures([1.01, 0.5, 0.99, 0.98, 2.0])
    assert cost == {"ratio": 0.99, "ratio_low": 0.98, "ratio_high": 1.01, "ratios": [1.01, 0.5, 0.99, 0.98, 2.0]}
    table = report(row("null", None, 2.0) | {"trace_cost": cost}).tables[0]
    assert ["throughput with / without traces", "0.9900 (0.9800-1.0100)"] in [list(cells) for cells in table.rows]


def test_no_hand_over_hides_nothing_and_has_no_speed():
    nothing = Transfers(0, 0.0, 0.0, 0.0)
    assert (nothing.hidden, nothing.gb_per_s) == (0.0, 0.0)


def test_hand_overs_of_the_runs_are_those_since_the_warm_up():
    assert Transfers(7, 70.0, 7.0, 0.7) - Transfers(2, 20.0, 2.0, 0.2) == Transfers(5, 50.0, 5.0, pytest.approx(0.5))


def test_the_report_has_a_row_a_figure_and_a_column_a_system(both):
    section = both.markdown(datetime.date(2031, 2, 3))
    lines = [line for line in section.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert "| idle TTFT, ms | 2,000 (1,900-2,100) | 2,100 (2,000-2,200) |" in lines
    assert lines.index("| idle TTFT / null's | 1.000 | 1.050 |") == 1 + lines.index(
        "| idle TTFT, ms | 2,000 (1,900-2,100) | 2,100 (2,000-2,200) |"
    )
    assert "| hidden | - | 90% |" in lines
    assert "| cores taken by others | 0.2 | 0.2 |" in lines
    assert "TTFT <= 500 ms" in section


def test_figures_that_no_system_has_get_no_row():
    alone = report(row("null", None, 2.0))
    assert not any(row[0] in ("hidden", "KV moved, MB") for row in alone.tables[0].rows)


def test_the_title_names_the_dtype_of_our_systems_only():
    rows = [row("external", None, 2.0)]
    assert serve_report(options(dtype="bfloat16"), "closed loop", rows, SLOS).title.startswith(
        "Serving /no/such/model in bfloat16: "
    )
    foreign = serve_report(options(url="http://h:1"), "closed loop", rows, SLOS).title
    assert foreign == "Serving /no/such/model at http://h:1, dtype unknown: closed loop"


def test_failed_requests_are_remarks(both):
    failing = report(row("null", None, 2.0, errors={"HTTP 503: no room": 2}))
    assert failing.remarks == ["null, chunks of 512: 2 of 3 requests failed: 2 x HTTP 503: no room"]
    assert failing.remarks[0] in failing.markdown(datetime.date(2031, 2, 3))
    assert not both.remarks


def test_the_legend_defines_only_the_figures_of_the_table(pair):
    null, apart = pair
    terms = ("Goodput", "fewer than 100", "Idle TTFT", "Transfer, of", "With / without traces")

    def defined(*rows):
        return [term for term in terms if term in report(*rows).legend]

    assert defined(null | {"idle_ttft": None, "num_requests": 100}) == ["Goodput"]
    assert defined(null) == ["Goodput", "fewer than 100", "Idle TTFT"]
    assert defined(null, apart) == ["Goodput", "fewer than 100", "Idle TTFT", "Transfer, of"]
    assert defined(null | {"trace_cost": cost_figures([1.0])}) == [*defined(null), "With / without traces"]


def test_many_tokens_that_arrive_together_are_a_remark_but_no_failure():
    def found(*arrived_at, num_tokens):
        return report(row("null", None, 2.0, records=[StreamRecord(0.0, arrived_at, 10, num_tokens)]))

    read_at_once = found(0.1, 0.10001, 0.2, 0.20001, 0.3, num_tokens=5)
    assert read_at_once.remarks[0].startswith("null, chunks of 512: 50% of the tokens arrived within 0.1 ms of")
    assert (read_at_once.figures[0]["tokens_together"], read_at_once.failed) == (0.5, False)
    assert "75% of the tokens" in found(0.1, 0.3, num_tokens=5).remarks[0]
    assert "100% of the tokens" in found(0.1, num_tokens=5).remarks[0]
    assert not found(0.1, 0.2, 0.3, num_tokens=3).remarks
    assert not found(0.1, num_tokens=1).remarks


def test_a_load_without_requests_has_failed():
    found = report(row("null", None, 2.0, records=[]))
    assert found.failed
    assert found.remarks == ["null, chunks of 512: no request was sent within --duration: give a longer one"]


def test_a_running_server_may_have_the_prompts_of_an_earlier_run_in_its_prefix_cache_so_each_run_has_its_own_seed():
    seeds = {plan_of(options(url="http://h:1")).options.seed for _ in range(5)}
    assert len(seeds) > 1
    assert plan_of(options(url="http://h:1", seed=7)).options.seed == 7
    assert plan_of(options()).options.seed == 0


def test_wrong_options_are_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="--dtype auto"):
        run_bench(options(dtype="auto"), bench_serve)
    with pytest.raises(ConfigError, match="--mode pigeon: choose one of null, disaggregated"):
        run_bench(options(mode=("null", "pigeon")), bench_serve)
    with pytest.raises(ConfigError, match="--transfer-backend pigeon: unknown"):
        run_bench(options(transfer_backend=["pigeon"]), bench_serve)


@pytest.mark.parametrize(
    "given",
    [
        {"mode": ("null",)},
        {"transfer_backend": ("tcp",)},
        {"chunked_prefill_size": (512,)},
        {"trace_rounds": 2},
        {"threads": 1},
    ],
)
def test_options_of_our_systems_are_refused_beside_a_running_server(given):
    (name,) = given
    with pytest.raises(
        ConfigError, match=f"^--{name.replace('_', '-')} applies to systems that this command starts: leave it out"
    ):
        bench_serve(options(url="http://h:1", **given), Console(quiet=True))


@pytest.mark.parametrize(
    "given", [{"served_model": "m"}, {"prompt_format": "text"}, {"extra_body": "{}"}, {"header": ("a=b",)}]
)
def test_options_of_a_running_server_are_refused_without_one(given):
    (name,) = given
    with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')} is for the server of --url: give --url"):
        bench_serve(options(**given), Console(quiet=True))


def test_a_backend_asked_for_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(systems, "missing", lambda backend: "it needs a library: pip install it")
    with pytest.raises(ConfigError, match=r"--transfer-backend nixl: .*pip install it"):
        run_bench(options(transfer_backend=["nixl"]), bench_serve)


def load_plan(**given):
    return plan_of(options(**given)).options


def test_a_load_is_a_closed_loop_unless_a_rate_or_a_trace_is_named(tmp_path):
    assert (load_plan().concurrency, load_plan().num_prompts) == (4, 16)
    assert load_plan(concurrency=3).num_prompts == 12
    rate = load_plan(request_rate=2.0)
    assert (rate.concurrency, rate.num_prompts) == (None, 60)
    assert load_plan(duration=5.0).num_prompts is None
    trace = tmp_path / "trace"
    trace.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1}')
    assert load_plan(trace=trace).concurrency is load_plan(trace=trace).num_prompts is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"concurrency": 2, "request_rate": 1.0}, "one of them"),
        ({"request_rate": 0.0}, "--request-rate must be above 0"),
        ({"burstiness": -1.0}, "--burstiness must be above 0"),
        ({"duration": float("inf")}, "--duration must be above 0 and finite"),
        ({"chunked_prefill_size": [512, 0]}, "--chunked-prefill-size must be at least 1"),
    ],
)
def test_loads_that_contradict_themselves_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        run_bench(options(**given), bench_serve)
