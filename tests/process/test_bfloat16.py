"""bfloat16: colocated and disaggregated logprobs agree at every position of the common prefix."""

from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest

from support.deployment import Deployment, deploy

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    yield from deploy(dtype="bfloat16", chunk=128, max_total_tokens=8_000)


def test_logprobs_differ_by_at_most_a_twentieth(deployment, prompts):
    compared = 0
    for prompt in prompts[2:15:3]:
        ours, theirs = (
            deployment.generate(mode, prompt, sampling_params={"max_new_tokens": 16}, return_logprob=True)
            for mode in ("colocated", "disaggregated")
        )
        pairs = zip(
            ours["meta_info"]["output_token_logprobs"], theirs["meta_info"]["output_token_logprobs"], strict=False
        )
        for one, other in takewhile(lambda pair: pair[0][1] == pair[1][1], pairs):
            assert abs(one[0] - other[0]) <= 0.05
            compared += 1
    assert compared >= 40
    deployment.check_nothing_is_held()


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
