"""The demo's table of one answer."""

from __future__ import annotations

from itertools import accumulate

from splitserve.tools.bench.stats import StreamRecord
from splitserve.tools.chat import StreamedAnswer
from splitserve.tools.client import Transfers
from splitserve.tools.demo import _table


def rows_of(arrived_at: list[float]) -> dict[str, str]:
    answer = StreamedAnswer(StreamRecord(sent_at=1.0, arrived_at=arrived_at))
    names, values = _table(answer, Transfers(1, 2e6, 0.001, 0.0), 2.0, "float32", equal=True).columns
    return dict(zip(names.cells, values.cells, strict=True))


def test_the_table_has_mean_and_maximum_of_the_gaps_between_tokens() -> None:
    rows = rows_of(list(accumulate([0.01] * 98 + [0.02, 0.5], initial=1.25)))
    assert rows["time to first token"] == "250 ms"
    assert rows["inter-token latency, mean"] == "15.0 ms"
    assert rows["inter-token latency, largest"] == "500.0 ms"


def test_the_table_of_an_answer_without_tokens_has_zeros() -> None:
    rows = rows_of([])
    assert (rows["time to first token"], rows["inter-token latency, largest"]) == ("0 ms", "0.0 ms")
