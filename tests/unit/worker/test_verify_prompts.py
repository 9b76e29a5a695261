"""Prompts of `splitserve verify`: the user's file, line by line, and our own."""

from __future__ import annotations

import pytest

from splitserve.core.errors import ConfigError
from splitserve.tools.verify import CHUNK_TOKENS, LENGTHS, built_in_prompts, read_prompts


def test_a_line_is_text_or_ids_or_a_bare_string(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"text": "one", "id": 7}\n\n{"input_ids": [3, 4]}\n"zwei, \\u00fcber"\n')
    assert read_prompts(path) == [{"text": "one"}, {"input_ids": [3, 4]}, {"text": "zwei, über"}]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "17",
        "[]",
        "{}",
        '{"text": ""}',
        '""',
        '{"text": 5}',
        '{"input_ids": []}',
        '{"input_ids": [1, true]}',
        '{"input_ids": [-1]}',
        '{"input_ids": "1 2"}',
        '{"text": "a", "input_ids": [1]}',
    ],
)
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "p.jsonl"
    path.write_text(f'"fine"\n{line}\n')
    with pytest.raises(ConfigError, match="line 2"):
        read_prompts(path)


def test_a_file_that_is_missing_or_empty_or_not_text_is_named(tmp_path):
    path = tmp_path / "p.jsonl"
    for content in (None, b"\n\n", b"\xff\xfe"):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"p\.jsonl"):
            read_prompts(path)


def test_our_prompts_have_the_lengths_that_matter_and_none_begins_another():
    prompts = [p["input_ids"] for p in built_in_prompts(list(range(600)), room=4096)]
    assert tuple(map(len, prompts)) == LENGTHS
    assert {len(p) - CHUNK_TOKENS for p in prompts} >= {-1, 0, 1}
    assert len({p[0] for p in prompts}) == len(prompts)


def test_our_prompts_leave_room_for_the_answer_in_a_small_context():
    prompts = built_in_prompts(list(range(600)), room=60)
    assert max(len(p["input_ids"]) for p in prompts) == 33
