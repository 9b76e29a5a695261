"""bfloat16, the dtype that our kernels serve: the same tokens and the same bits of logprobs in any mode and batch.

float32 is compared with transformers in test_parity.py.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from splitserve.engine.kernels.library import find_library
from support.deployment import Deployment, deploy

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(find_library() is None, reason="installed without a C compiler"),
]
# Chunk borders in the prompts, and tokens decoded beside them.
CHUNK = 64


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    yield from deploy(chunk=CHUNK, max_total_tokens=16_000)


def output_of(answer: dict[str, Any]) -> tuple[Any, ...]:
    """Return tokens, their logprobs and the ranking of each position."""
    meta = answer["meta_info"]
    return answer["output_ids"], meta["output_token_logprobs"], meta["output_top_logprobs"]


def test_output_is_equal_bit_for_bit_cold_and_warm_alone_and_together(deployment, prompts):
    chosen = [p for p in prompts if len(p) in (1, 16, 17, 65, 257)]
    params = {"max_new_tokens": 8, "ignore_eos": True}
    wanted = {"sampling_params": params, "return_logprob": True, "top_logprobs_num": 3}
    expected = [output_of(deployment.generate("colocated", p, **wanted)) for p in chosen]
    assert len(expected) == 5
    for mode in ("disaggregated", "colocated"):
        deployment.flush()
        for state in ("cold", "warm"):
            together = deployment.generate_all(mode, chosen, len(chosen), **wanted)
            assert [output_of(answer) for answer in together] == expected, (mode, state)
        assert together[-1]["meta_info"]["cached_tokens"] == (len(chosen[-1]) - 1) // 16 * 16
    warm_alone = [output_of(deployment.generate("disaggregated", p, **wanted)) for p in chosen]
    assert warm_alone == expected
    deployment.check_nothing_is_held()


def test_logprobs_of_prompts_are_equal_bit_for_bit(deployment, prompts):
    wanted = {"sampling_params": {"max_new_tokens": 1}, "return_logprob": True, "logprob_start_len": 0}
    chosen = [p for p in prompts if len(p) in (17, 129, 513)]
    found = [
        [answer["meta_info"]["input_token_logprobs"] for answer in deployment.generate_all(mode, chosen, 3, **wanted)]
        for mode in ("colocated", "disaggregated")
    ]
    assert found[0] == found[1]
    assert [len(scores) for scores in found[0]] == [len(p) for p in chosen]


def test_all_workers_map_the_same_weights_read_only(deployment):
    """Started at the same time: one of them has built the file."""
    found = set()
    for child in deployment.cluster.children:
        for pid in child.ready.scheduler_pids if child.ready else ():
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            [mapped] = [line.split() for line in lines if line.endswith(".weights")]
            assert mapped[1] == "r--s"
            # Inode and path.
            found.add((mapped[4], mapped[5]))
    assert len(found) == 1
