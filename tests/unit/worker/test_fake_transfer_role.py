"""A worker with a fake transfer: the line that it logs, and the roles that it may have."""

from __future__ import annotations

import pytest

from splitserve.core.config import DisaggregationConfig, WorkerConfig
from splitserve.core.errors import ConfigError
from splitserve.core.request import DisaggregationMode
from splitserve.worker.exclusions import settings_in_role
from splitserve.worker.worker import fake_transfer_line

DECODE = DisaggregationConfig(mode=DisaggregationMode.DECODE, transfer_backend="fake")


def test_the_line_names_the_link_and_the_header() -> None:
    config = DisaggregationConfig(
        mode=DisaggregationMode.PREFILL, transfer_backend="fake", transfer_options={"delay": "2", "bandwidth": "10"}
    )
    assert fake_transfer_line(config) == (
        "FAKE TRANSFER: this prefill worker has no peer, and its KV cache goes to a sink (link: bandwidth=10 delay=2). "
        "Requests need the header x-splitserve-fake-transfer: yes. Use it for benchmarks and warm-up only"
    )
    assert "answers are MEANINGLESS (link: unlimited)" in str(fake_transfer_line(DECODE))


def test_a_real_transfer_has_no_such_line() -> None:
    assert fake_transfer_line(DisaggregationConfig(mode=DisaggregationMode.DECODE)) is None


def test_it_changes_between_prefill_and_decode_only() -> None:
    config = WorkerConfig(disaggregation=DECODE)
    assert settings_in_role(config, DisaggregationMode.PREFILL).mode is DisaggregationMode.PREFILL
    with pytest.raises(ConfigError, match="can be prefill or decode, not null"):
        settings_in_role(config, DisaggregationMode.NULL)
