"""Requests of `splitserve verify` to both systems: rounds, cold caches, batches, and errors. The systems are fakes."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from urllib.parse import urlsplit

import msgspec
import pytest

from splitserve import cli
from splitserve.core.errors import USAGE_EXIT_CODE, ConfigError, ModelLoadError, OptionError
from splitserve.tools import verify
from splitserve.tools.client import RequestFailedError
from splitserve.tools.options import VerifyOptions
from splitserve.tools.verify import Sides, compare_sides, run_verify
from splitserve.tools.verify_compare import VerifyError
from splitserve.tools.verify_report import VerifyReport

OPTIONS = VerifyOptions(model="m", max_tokens=3)
SIDES = Sides("http://colocated", "http://router", ["http://colocated", "http://p", "http://d"])


class FakeDeployment:
    """Both systems answer with tokens made of the prompt and the seed, until one is ordered to tamper."""

    def __init__(self, tampers=lambda host, body: False, refuses=False):
        self.tampers = tampers
        self.refuses = refuses
        self.dtype, self.is_exact = "bfloat16", True
        self.calls = []
        self.num_running = Counter()
        self.most_running = Counter()

    async def request(self, url, body=None):
        host, path = urlsplit(url).hostname, urlsplit(url).path
        self.calls.append((host, path, body))
        if path == "/server_info":
            return {"dtype": self.dtype, "batch_invariant": self.is_exact}
        if path == "/tokenize":
            return {"tokens": list(range(500)), "max_model_len": 70}
        if path == "/flush_cache":
            return {}
        self.num_running[host] += 1
        self.most_running[host] = max(self.most_running[host], self.num_running[host])
        await asyncio.sleep(0)
        self.num_running[host] -= 1
        if self.refuses:
            raise RequestFailedError(f"{url}: HTTP 400: too long")
        return self.answer(host, body)

    def answer(self, host, body):
        seed = body["sampling_params"].get("seed", 0)
        ids = [sum(body["input_ids"]) % 1000, 2000 + seed, 5]
        if self.tampers(host, body):
            ids[1] += 1
        meta = {
            "prompt_tokens": len(body["input_ids"]),
            "cached_tokens": 0,
            "output_token_logprobs": [[-0.1, token, None] for token in ids],
            "output_top_logprobs": [[[-0.1, token, None]] for token in ids],
        }
        return {"output_ids": ids, "meta_info": meta}


def compare(deployment, prompts=None, options=OPTIONS):
    return asyncio.run(compare_sides(options, prompts, SIDES, lambda line: None, deployment.request))


def test_honest_sides_are_equal_in_four_rounds_over_our_own_prompts():
    deployment = FakeDeployment()
    report = compare(deployment)
    assert report.equal
    assert report.numerics.is_exact
    # Those up to 67 tokens: a context of 70, less the answer.
    assert len({c.prompt for c in report.comparisons}) == 8
    # The pair's answers of each round, and the colocated worker's of the rounds after the first of a pass.
    assert (len(report.of("disaggregated")), len(report.of("colocated"))) == (4 * 8, 2 * 8)
    assert {(c.pass_name, c.setting) for c in report.of("disaggregated")} == {
        ("greedy", "cold, 8 at a time"),
        ("greedy", "warm, alone"),
        ("seeded", "cold, alone"),
        ("seeded", "warm, 8 at a time"),
    }
    assert {c.setting for c in report.of("colocated")} == {"warm, alone", "warm, 8 at a time"}


def test_progress_counts_only_the_prompts_that_the_context_holds():
    lines = []
    asyncio.run(compare_sides(OPTIONS, None, SIDES, lines.append, FakeDeployment().request))
    assert lines[0] == "comparing 8 prompts over tcp, round 1 of 4: greedy, cold, 8 at a time"


def test_sixteen_requests_are_sent_at_a_time():
    deployment = FakeDeployment()
    compare(deployment, [{"input_ids": [i]} for i in range(20)])
    assert deployment.most_running == {"colocated": 16, "router": 16}


def test_both_sides_get_the_same_bodies_with_logprobs_and_fixed_seeds():
    deployment = FakeDeployment()
    compare(deployment, [{"input_ids": [1]}, {"input_ids": [2]}])
    asked = {
        host: [b for h, path, b in deployment.calls if h == host and path == "/generate"]
        for host in ("colocated", "router")
    }
    assert asked["colocated"] == asked["router"]
    assert all(b["return_logprob"] for b in asked["router"])
    assert [b["sampling_params"] for b in asked["router"][4:6]] == [
        {"temperature": 0.8, "seed": 0, "max_new_tokens": 3},
        {"temperature": 0.8, "seed": 1, "max_new_tokens": 3},
    ]


def test_every_worker_is_flushed_before_a_cold_round_alone():
    deployment = FakeDeployment()
    compare(deployment, [{"input_ids": [1]}])
    order = "".join(
        {"/flush_cache": "f", "/generate": "g"}.get(path, "")
        for _, path, _ in deployment.calls
        if path not in ("/tokenize", "/server_info")
    )
    assert order == "fffgg" + "gg" + "fffgg" + "gg"


def test_one_tampered_answer_of_one_round_is_found():
    def tampers(host, body):
        return host == "router" and body["input_ids"] == [2] and body["sampling_params"]["temperature"] > 0

    report = compare(FakeDeployment(tampers), [{"input_ids": [1]}, {"input_ids": [2]}])
    assert not report.equal
    assert [(c.prompt, c.pass_name, c.position) for c in report.differences] == [(1, "seeded", 1)] * 2


def test_a_colocated_answer_that_depends_on_the_cache_is_found():
    asked = []

    def tampers(host, body):
        asked.append(host)
        # Its second round.
        return host == "colocated" and asked.count(host) == 2

    report = compare(FakeDeployment(tampers), [{"input_ids": [1]}])
    assert not report.equal
    assert [(c.side, c.setting, c.position) for c in report.differences] == [("colocated", "warm, alone", 1)]


@pytest.mark.parametrize(
    ("dtype", "is_exact", "options", "max_delta"),
    [
        ("bfloat16", True, OPTIONS, 0.0),
        ("bfloat16", False, OPTIONS, 0.05),
        ("bfloat16", True, msgspec.structs.replace(OPTIONS, near_ties=True), 0.05),
        ("float32", False, OPTIONS, 0.001),
    ],
)
def test_logprobs_must_be_equal_bit_for_bit_if_all_workers_are_batch_invariant(dtype, is_exact, options, max_delta):
    deployment = FakeDeployment()
    deployment.dtype, deployment.is_exact = dtype, is_exact
    assert compare(deployment, [{"input_ids": [1]}], options).numerics.max_logprob_delta == max_delta


def test_a_number_of_tokens_that_leaves_no_room_for_a_prompt_is_an_error():
    with pytest.raises(OptionError, match=r"--max-tokens 70 leaves room for 0 tokens of a prompt in the model's 70"):
        compare(FakeDeployment(), options=VerifyOptions(max_tokens=70))


def test_workers_of_different_dtypes_are_not_compared():
    deployment = FakeDeployment()
    described = deployment.request

    async def request(url, body=None):
        deployment.dtype = "float32" if url.startswith("http://d/") else "bfloat16"
        return await described(url, body)

    with pytest.raises(VerifyError, match=r"different dtypes \(bfloat16, float32\)"):
        asyncio.run(compare_sides(OPTIONS, [{"input_ids": [1]}], SIDES, lambda line: None, request))


def test_a_refused_prompt_is_named_with_the_workers_reason():
    with pytest.raises(VerifyError, match=r"prompt 0.*HTTP 400.*too long"):
        compare(FakeDeployment(refuses=True), [{"input_ids": [1]}])


def test_a_failure_has_another_exit_code_than_a_difference(monkeypatch):
    def fails(model):
        raise ModelLoadError(f"{model}: the hub does not answer")

    monkeypatch.setattr(verify, "resolve_model", fails)
    with pytest.raises(ModelLoadError) as error:
        run_verify(OPTIONS)
    assert error.value.exit_code == USAGE_EXIT_CODE != 1


def test_an_unexpected_error_has_another_exit_code_than_a_difference(monkeypatch, capsys):
    def fails(model):
        raise ValueError("a defect")

    monkeypatch.setattr(verify, "resolve_model", fails)
    assert run_verify(OPTIONS) == USAGE_EXIT_CODE
    assert "ValueError: a defect" in capsys.readouterr().err


def test_a_report_that_cannot_be_encoded_has_another_exit_code_than_a_difference(monkeypatch, capsys):
    options = VerifyOptions(model="m\udcff", as_json=True)
    monkeypatch.setattr(verify, "_compare", lambda options: VerifyReport(options, []))
    assert run_verify(options) == USAGE_EXIT_CODE
    assert "UnicodeEncodeError" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_has_another_exit_code_than_a_difference(monkeypatch, capsys):
    monkeypatch.setattr(verify, "_compare", lambda options: VerifyReport(OPTIONS, []))
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as end:
            cli.main(["verify", "m", "--json"])
        assert end.value.code == USAGE_EXIT_CODE
        assert "No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("as_json", [False, True])
def test_a_report_without_a_standard_output_keeps_the_exit_code(monkeypatch, as_json):
    monkeypatch.setattr(verify, "_compare", lambda options: VerifyReport(OPTIONS, []))
    monkeypatch.setattr(sys, "stdout", None)
    # A report without comparisons is not equal.
    assert run_verify(msgspec.structs.replace(OPTIONS, as_json=as_json)) == 1


def test_an_unknown_transfer_backend_is_refused_before_anything_starts():
    options = VerifyOptions(model="m", transfer_backend=["pigeon"])
    with pytest.raises(ConfigError, match="--transfer-backend pigeon"):
        run_verify(options)


def test_all_transports_and_a_named_one_contradict_each_other():
    options = VerifyOptions(model="m", transfer_backend=["tcp"], all_transports=True)
    with pytest.raises(ConfigError, match="--all-transports"):
        run_verify(options)


def test_all_transports_compare_tcp_through_sockets_because_shm_writes_directly(monkeypatch):
    monkeypatch.setattr(verify, "missing", lambda backend: None if backend in ("tcp", "shm") else "not here")
    options = VerifyOptions(model="m", all_transports=True)
    pairs = {backend: verify._cluster(options, backend).pair_args for backend in verify._backends(options)}
    assert pairs == {"tcp": ["--transfer-option", "direct=false"], "shm": []}
    assert verify._cluster(VerifyOptions(model="m"), "tcp").pair_args == []
