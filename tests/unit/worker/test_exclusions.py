"""Rejected combinations of options: each row of the table rejects its own example, and the page lists all rows.

`python tests/unit/worker/test_exclusions.py` writes the page's table.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from splitserve.core.config import ClusterToken, WorkerConfig
from splitserve.core.errors import OptionError
from splitserve.core.options import replaced
from splitserve.core.speculative import SpeculativeAlgorithm
from splitserve.worker.checks import check_worker
from splitserve.worker.exclusions import EXCLUSIONS, Exclusion, given_exclusions

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "exclusions.md"
BEGIN, END = "<!-- exclusions: begin -->\n", "<!-- exclusions: end -->\n"
WRITE = "run: python tests/unit/worker/test_exclusions.py"

DP_ATTENTION = {"model.dp_attention": True, "dp_size": 2}
RANKS = {"parallel.tp_size": 2}
DRAFT = {"speculative.algorithm": SpeculativeAlgorithm.DRAFT, "speculative.draft_model": "m"}
MTP = {"speculative.algorithm": SpeculativeAlgorithm.MTP}
POOL = {"cache.shared_pool": "f", "disaggregation.transfer_backend": "shm", "disaggregation.mode": "decode"}
FAKE = {"disaggregation.transfer_backend": "fake", "disaggregation.mode": "decode"}
INT8 = {"model.quantization": "int8"}
SAVER = {"cache.enable_memory_saver": True}
NODES = {"parallel.nnodes": 2, "disaggregation.cluster_token": ClusterToken(b"s")}
# Settings that only one row rejects, by the option of the row and the first words of its rule.
EXAMPLES: dict[tuple[str, str], dict[str, Any]] = {
    ("--speculative-draft-model", "needs"): {"speculative.draft_model": "m"},
    ("--speculative-algorithm", "draft or eagle3 needs"): {"speculative.algorithm": SpeculativeAlgorithm.DRAFT},
    ("--speculative-num-draft-tokens", "needs"): {"speculative.num_draft_tokens": 6},
    ("--speculative-num-steps", "needs"): {"speculative.num_steps": 2},
    ("--speculative-ngram-max-match", "needs"): {"speculative.ngram_max_match": 5},
    ("--transfer-dtype", "needs"): {"disaggregation.transfer_dtype": "float16", "disaggregation.mode": "prefill"},
    ("--shared-pool", "needs"): POOL | {"disaggregation.mode": "null"},
    ("--disaggregation-transfer-backend", "fake needs"): FAKE | {"disaggregation.mode": "null"},
    ("--router", "does not go together with --transfer-backend fake"): FAKE | {"server.router_urls": ("http://r",)},
    ("--pp-layers", "needs"): {"parallel.pp_size": 2, "parallel.pp_layers": (3,)},
    ("--enable-expert-parallel", "needs"): {"model.expert_parallel": True},
    ("--shared-pool", "does not go together with --tp"): RANKS | POOL,
    ("--quantization", "does not go together with --tp"): RANKS | INT8,
    ("--prefix-host-memory", "does not go together with --tp"): RANKS | {"cache.prefix_host_memory": 1},
    ("--enable-dp-attention", "needs"): {"model.dp_attention": True},
    ("--tp-size", "must be a multiple"): DP_ATTENTION | {"parallel.tp_size": 3},
    ("--pp-size", "does not go together with --enable"): DP_ATTENTION | {"parallel.pp_size": 2},
    ("--shared-pool", "does not go together with --enable"): DP_ATTENTION | POOL,
    ("--quantization", "does not go together with --enable"): DP_ATTENTION | INT8,
    ("--nnodes", "does not go together with --enable"): DP_ATTENTION | NODES | {"parallel.tp_size": 2},
    ("--nnodes", "must divide"): NODES | {"parallel.tp_size": 3},
    ("--cluster-token-file", "is needed"): RANKS | {"parallel.nnodes": 2},
    ("--dtype", "does not go together with --quantization"): INT8 | {"model.dtype": "float16"},
    ("--kernels", "does not go together with --quantization"): INT8 | {"model.kernels": "torch"},
    ("--enable-memory-saver", "does not go together with --nnodes"): NODES | RANKS | SAVER,
    ("--enable-memory-saver", "does not go together with --shared"): POOL | SAVER,
    ("--enable-memory-saver", "does not go together with the backends"): SAVER
    | {"disaggregation.transfer_backend": "nixl", "model.device": "cuda"},
    ("--device", "does not go together with --quantization"): INT8 | {"model.device": "cuda"},
}


# Words of the error of each other check, by the option and the start of the rule on the page.
OTHER_ERRORS = {
    ("--tp-size", "must divide the query heads"): "needs as many of both as any other, or one KV head",
    ("--pp-size", "at most the model's layers"): "layers cannot be divided into {} pipeline stages: {} at most",
    ("--enable-dp-attention", "needs a model"): "distributes a model's experts over ranks, and {} has none",
    ("--enable-expert-parallel, --enable-dp-attention", "need an ep_plan"): "transformers has no ep_plan",
    ("--enable-expert-parallel, --enable-dp-attention", "at most"): "{} is only {} wide, and there are {} of them",
    ("--tp-size", "needs a tp_plan"): "transformers has no tp_plan for it",
    ("--pp-size", "needs a pp_plan"): "transformers has no pp_plan for it",
    ("--tp-size, --pp-size", "do not go together with a checkpoint"): "has quantized weights, which cannot be cut",
    ("--tp-size, --pp-size", "at most the GPUs"): "GPUs, and this machine has {}: choose {}, or --device cpu",
    ("--device cuda:N", "does not go"): "is one GPU, and {}: give --device cuda (CUDA_VISIBLE_DEVICES",
    ("--quantization", "does not go together with a quantized"): "is already quantized ({}). Remove this option",
    ("--quantization", "needs our compiled kernels"): "quantization {} needs our kernels",
    ("--context-length", "at most the positions"): "context_length is {}: for model {} it must be in [1, {}]",
    ("--attention-backend flashinfer", "needs a KV pool"): "flashinfer is for GPUs, and this pool is on {}",
    ("--speculative-draft-model", "needs the vocabulary"): "has a vocabulary of {} tokens, model {} one of {}",
    ("--speculative-algorithm eagle3", "needs a head"): "and the served model one of {}: give the head that was",
    ("--speculative-algorithm mtp", "needs a checkpoint"): "has no layer for multi-token prediction: no tensor",
    ("--shared-pool", "needs the same model"): "was laid out for another KV cache",
    ("--transfer-backend tcp, shm, gloo, nixl", "need a KV pool on the CPU"): "and the KV pool is on a GPU: use",
    ("--transfer-backend cuda_ipc, nccl", "need a KV pool on a GPU"): "and the KV pool is on the CPU: use",
    ("--transfer-dtype", "needs a KV pool on the CPU"): "needs a KV pool on the CPU, and this one is on {}",
    ("--transfer-option", "must be one"): "the transfer backend {} has no option {}: it takes {}",
    ("--kv-events-config", "needs distinct ports"): "would be used twice: each of the {} data parallel ranks",
    ("--nnodes above 1", "needs --dist-init-addr"): "(of node 0, on all nodes) need each other",
    ("--nnodes above 1", "needs equal options"): "{} is {} on node 0 and {} on node {}",
    ("--disaggregation-host, --host beyond loopback", "need"): "which is no loopback address, without a cluster token",
    ("--host 0.0.0.0", "needs --disaggregation-host"): "no address that others can reach: give that as --disagg",
    ("--ssl-certfile, --ssl-keyfile", "need each other"): "and --ssl-keyfile need each other",
    ("--ssl-ca-certs", "needs --ssl-certfile"): "needs --ssl-certfile and --ssl-keyfile",
    ("--rate-limit", "needs --api-key-file"): "holds for each key: give --api-key-file, too",
    ("--rate-limit-burst", "needs --rate-limit"): "needs --rate-limit",
    ("--hand-over", "needs --transfer-backend shm"): "needs --transfer-backend shm, not {}",
    ("--hand-over", "does not go together"): "is between workers of one rank each",
    ("--prefill-tp-size and the like", "need prefill"): "--prefill-*-size and --decode-*-size are for pairs",
    ("--tp-size, --pp-size, --dp-size", "do not go together"): ": give --prefill-{} and --decode-{}",
    ("--pp-layers", "does not go together with up"): "stages of `up` are as even as possible",
    ("--nnodes", "does not go together with up"): "workers of `up` are on this machine",
    ("nodes above 1 in the cluster file", "needs Kubernetes"): "(`cluster render k8s` is for more)",
    ("--all-transports", "does not go together"): "chooses the transports: leave out --transfer-backend",
    ("hand_over of Engine", "needs prefill and decode"): "applies to the KV transfer between prefill and decode",
    ("POST /role", "does not go together with --tp-size"): "a worker with a model sharded over ranks",
    ("POST /role null", "does not go together with --transfer-backend"): "can be prefill or decode, not null: start",
    ("POST /role null", "does not go together with --shared-pool"): "(--shared-pool) hands its pages over",
}


def config_of(settings: dict[str, Any]) -> WorkerConfig:
    config: WorkerConfig = replaced(WorkerConfig(), settings)
    return config


def settings_for(exclusion: Exclusion) -> dict[str, Any]:
    found = [
        s for (option, rule), s in EXAMPLES.items() if option == exclusion.option and exclusion.rule.startswith(rule)
    ]
    assert len(found) == 1, f"{exclusion.option} {exclusion.rule}: EXAMPLES has {len(found)} settings for it, not one"
    return found[0]


@pytest.mark.parametrize("exclusion", EXCLUSIONS, ids=lambda e: f"{e.option} {e.rule}")
def test_a_row_rejects_its_example_and_no_other_row_does(exclusion: Exclusion, monkeypatch: pytest.MonkeyPatch) -> None:
    # Some rows need a transport with an optional library, which the machine of the test may lack.
    monkeypatch.setattr("splitserve.worker.checks.missing", lambda backend: None)
    config = config_of(settings_for(exclusion))
    assert list(given_exclusions(config)) == [exclusion]
    with pytest.raises(OptionError) as error:
        check_worker(config)
    assert error.value.message.startswith(f"{exclusion.option} {exclusion.rule}: {exclusion.reason}")
    assert error.value.message.endswith(f"; {exclusion.remedy}")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        DRAFT,
        POOL,
        INT8,
        RANKS | {"speculative.algorithm": SpeculativeAlgorithm.NGRAM, "model.expert_parallel": True},
        RANKS | NODES,
        RANKS | MTP,
        DP_ATTENTION | MTP,
        DP_ATTENTION,
        DP_ATTENTION | {"parallel.tp_size": 2, "cache.prefix_host_memory": 1},
        DP_ATTENTION | {"parallel.tp_size": 6},
        {"parallel.pp_size": 2, "parallel.pp_layers": (3, 1)},
    ],
)
def test_other_combinations_are_accepted(settings: dict[str, Any]) -> None:
    assert not list(given_exclusions(config_of(settings)))


@pytest.mark.parametrize("name", ["num_draft_tokens", "num_steps", "ngram_max_match"])
def test_settings_of_speculation_need_an_algorithm(name: str) -> None:
    assert [e.option for e in given_exclusions(config_of({f"speculative.{name}": 3}))] == [
        f"--speculative-{name.replace('_', '-')}"
    ]
    assert not list(given_exclusions(config_of({f"speculative.{name}": 3} | MTP)))


def rows() -> str:
    lines = ["| option | rule | reason | remedy |", "|---|---|---|---|"]
    lines += [f"| {e.option} | {e.rule} | {e.reason} | {e.remedy} |" for e in EXCLUSIONS]
    return (
        re.sub(r"--[a-z][a-z-]+", r"`\g<0>`", "\n".join(lines).replace("|---", "|   ")).replace("|   ", "|---") + "\n"
    )


def test_the_page_lists_every_row() -> None:
    _, begin, rest = PAGE.read_text().partition(BEGIN)
    written, end, _ = rest.partition(END)
    assert begin
    assert end
    assert written == rows(), WRITE


def other_rows() -> dict[tuple[str, str], str]:
    """Return the files of the page's second table by option and rule, without backticks."""
    _, _, rest = PAGE.read_text().partition(END)
    table, _, _ = rest.partition("\n## Accepted")
    lines = [line.replace("`", "").strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {(option, rule): file for option, rule, _, _, file in lines[1:]}


def texts_of(path: Path) -> list[str]:
    """Return the texts in the code of a file, docstrings aside. Values in an f-string are {}."""
    tree = ast.parse(path.read_text())
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts | docstrings:
            found.append(node.value)
    return found


@pytest.mark.parametrize("row", OTHER_ERRORS, ids=" ".join)
def test_the_file_of_another_check_has_the_words_of_its_error(row: tuple[str, str]) -> None:
    (file,) = [file for (option, rule), file in other_rows().items() if option == row[0] and rule.startswith(row[1])]
    path = ROOT / "src" / "splitserve" / file
    assert [text for text in texts_of(path) if OTHER_ERRORS[row] in text], f"{file} has no error {OTHER_ERRORS[row]!r}"


def test_each_row_of_the_other_checks_has_an_error() -> None:
    missing = [
        (option, rule)
        for option, rule in other_rows()
        if not any(option == known and rule.startswith(start) for known, start in OTHER_ERRORS)
    ]
    assert not missing, "add the words of their errors to OTHER_ERRORS"
    assert len(other_rows()) == len(OTHER_ERRORS)


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + rows() + END + rest.partition(END)[2])
