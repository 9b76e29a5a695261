"""The comparison behind `splitserve verify`: what counts as equal, and that every kind of tampering is found."""

from __future__ import annotations

import copy
import io
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from splitserve.tools.options import VerifyOptions
from splitserve.tools.verify_compare import Comparison, Numerics, VerifiedAnswer, VerifyError
from splitserve.tools.verify_report import TransportReport, VerifyReport, render, report_object

IDS = [7, 8, 9, 10]


def body(ids=IDS, logprobs=None, tops=None):
    logprobs = logprobs or [-0.5] * len(ids)
    tops = tops or [{token: logprob, 99: -4.0} for token, logprob in zip(ids, logprobs, strict=True)]
    return {
        "output_ids": list(ids),
        "meta_info": {
            "prompt_tokens": 3,
            "cached_tokens": 0,
            "output_token_logprobs": [[lp, token, None] for lp, token in zip(logprobs, ids, strict=True)],
            "output_top_logprobs": [[[lp, token, None] for token, lp in top.items()] for top in tops],
        },
    }


def comparison(ours=None, theirs=None):
    return Comparison(
        0,
        "greedy",
        "cold, alone",
        "disaggregated",
        VerifiedAnswer.of(ours or body()),
        VerifiedAnswer.of(theirs or body()),
    )


def report(*comparisons, dtype="float32", exact=False, near_ties=False):
    numerics = Numerics(dtype, exact, near_ties)
    return VerifyReport(VerifyOptions(model="m"), [TransportReport("tcp", numerics, comparisons)])


def test_the_same_answers_are_equal():
    found = report_object(report(comparison()))
    assert found["equal"] is True
    assert found["mismatches"] == []
    assert found["max_logprob_delta"] == 0.0
    assert found["prompts"] == 1


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.data())
def test_any_tampered_token_makes_answers_unequal_and_is_located(ids, data):
    position = data.draw(st.integers(0, len(ids) - 1))
    tampered = [*ids[:position], ids[position] + 1, *ids[position + 1 :]]
    dtype = data.draw(st.sampled_from(["float32", "bfloat16"]))
    found = report_object(report(comparison(body(ids), body(tampered)), dtype=dtype))
    assert found["equal"] is False
    assert found["mismatches"] == [
        {
            "transfer_backend": "tcp",
            "prompt": 0,
            "pass": "greedy",
            "setting": "cold, alone",
            "side": "disaggregated",
            "position": position,
            "expected": ids[position],
            "found": ids[position] + 1,
            "logprob_position": None,
            "max_logprob_delta": 3.5,
        }
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("is_ours", [True, False])
def test_an_answer_cut_short_is_unequal_in_every_dtype(dtype, is_ours):
    short, whole = body(IDS[:2]), body()
    compared = comparison(short, whole) if is_ours else comparison(whole, short)
    found = report_object(report(compared, dtype=dtype, near_ties=True))
    assert found["equal"] is False
    (mismatch,) = found["mismatches"]
    assert mismatch["position"] == 2
    assert (mismatch["expected"], mismatch["found"]) == ((None, 9) if is_ours else (9, None))


@pytest.mark.parametrize(
    ("dtype", "delta", "equal"),
    [("float32", 0.0009, True), ("float32", 0.0011, False), ("bfloat16", 0.049, True), ("bfloat16", 0.051, False)],
)
def test_logprobs_may_differ_by_the_tolerance_of_the_dtype_without_our_kernels(dtype, delta, equal):
    moved = body(logprobs=[-0.5, -0.5, -0.5 - delta, -0.5])
    result = report(comparison(body(), moved), dtype=dtype)
    assert result.equal is equal
    (transport,) = result.transports
    assert transport.max_logprob_delta == pytest.approx(delta)
    assert transport.num_equal("disaggregated") == 1


@pytest.mark.parametrize("delta", [0.0, 1e-9])
def test_with_our_kernels_logprobs_must_be_equal_bit_for_bit(delta):
    moved = body(logprobs=[-0.5, -0.5, -0.5 - delta, -0.5])
    result = report(comparison(body(), moved), dtype="bfloat16", exact=True)
    assert result.equal is (delta == 0.0)
    if delta:
        (mismatch,) = report_object(result)["mismatches"]
        assert (mismatch["position"], mismatch["logprob_position"], mismatch["found"]) == (None, 2, None)
        assert "logprobs differ from output position 2; max logprob delta 1.0e-09" in text_of(result)
        assert "rounding differs" in text_of(result)


def test_near_ties_are_accepted_on_request_but_listed():
    ours = body([7, 8], [-0.5, -0.70], [{7: -0.5, 99: -4.0}, {8: -0.70, 5: -0.71}])
    theirs = body([7, 5], [-0.5, -0.69], [{7: -0.5, 99: -4.0}, {5: -0.69, 8: -0.72}])
    result = report(comparison(ours, theirs), dtype="bfloat16", near_ties=True)
    assert result.equal
    (transport,) = result.transports
    assert [c.position for c in transport.differences] == [1]
    assert transport.max_logprob_delta == pytest.approx(0.02)
    assert not report(comparison(ours, theirs), dtype="bfloat16").equal
    assert not report(comparison(ours, theirs), dtype="float32", near_ties=True).equal


def test_a_wrong_first_token_is_no_near_tie():
    result = report(comparison(body([7]), body([8])), dtype="bfloat16", near_ties=True)
    assert not result.equal
    assert result.transports[0].max_logprob_delta == pytest.approx(3.5)
    assert "rounding differs" not in text_of(result)


def test_logprobs_after_the_place_where_the_answers_part_do_not_count():
    ours = body([7, 8, 3], [-0.5, -0.70, -0.1], [{7: -0.5}, {8: -0.70, 5: -0.71}, {3: -0.1}])
    theirs = body([7, 5, 3], [-0.5, -0.69, -9.0], [{7: -0.5}, {5: -0.69, 8: -0.72}, {3: -9.0}])
    assert comparison(ours, theirs).max_logprob_delta == pytest.approx(0.02)


def test_one_unequal_answer_among_many_makes_the_whole_unequal():
    assert not report(comparison(), comparison(body(), body([7, 8, 9, 11])), comparison()).equal


def test_nothing_compared_is_not_equal():
    assert not report().equal
    assert not VerifyReport(VerifyOptions(model="m"), []).equal


def test_one_transport_that_differs_makes_the_whole_unequal():
    numerics = Numerics("bfloat16", is_exact=True)
    same, other = comparison(), comparison(body(), body([7, 8, 9, 11]))
    transports = [TransportReport("tcp", numerics, [same]), TransportReport("shm", numerics, [same, other])]
    result = VerifyReport(VerifyOptions(model="m"), transports)
    assert not result.equal
    found = report_object(result)
    assert [(m["transfer_backend"], m["position"]) for m in found["mismatches"]] == [("shm", 3)]
    assert [t["equal"] for t in found["transports"]] == [True, False]
    assert found["transports"][1]["equal_answers"] == {"colocated": 0, "disaggregated": 1}
    shown = text_of(result)
    assert "\nEQUAL: m in bfloat16 over tcp, 1 of 1 answers" in shown
    assert "NOT EQUAL: m in bfloat16 over shm, 1 of 2 answers" in shown


def test_a_logprob_that_is_no_number_is_not_equal_and_null_in_json():
    broken = report(comparison(body(), body(logprobs=[-0.5, math.nan, -0.5, -0.5])))
    assert not broken.equal
    assert json.loads(json.dumps(report_object(broken)))["max_logprob_delta"] is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda b: b.pop("meta_info"),
        lambda b: b["meta_info"].pop("output_token_logprobs"),
        lambda b: b["meta_info"]["output_token_logprobs"].pop(),
        lambda b: b["meta_info"]["output_top_logprobs"].pop(),
        lambda b: b["meta_info"]["output_top_logprobs"][0].clear(),
        lambda b: b["meta_info"]["output_token_logprobs"][0].__setitem__(0, None),
        lambda b: b["meta_info"]["output_token_logprobs"][0].__setitem__(1, 1234),
        lambda b: b["output_ids"].clear(),
    ],
)
def test_an_answer_without_a_logprob_for_each_token_is_an_error(spoil):
    spoilt = copy.deepcopy(body())
    spoil(spoilt)
    with pytest.raises(VerifyError):
        VerifiedAnswer.of(spoilt)


def text_of(result):
    out = io.StringIO()
    Console(file=out, width=200).print(render(result))
    return out.getvalue()


def test_the_table_shows_the_verdict_and_where_answers_part():
    assert "\nEQUAL: m in float32" in text_of(report(comparison()))
    shown = text_of(report(comparison(), comparison(body(), body([7, 8, 9, 11]))))
    assert "NOT EQUAL" in shown
    assert "1 of 2" in shown
    assert "(disaggregated over tcp, greedy, cold, alone): at output position 3 token 11, expected token 10" in shown
    assert "ended, expected token 8" in text_of(report(comparison(body(), body(IDS[:1]))))
