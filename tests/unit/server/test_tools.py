"""Tools: accepted requests, the prompt and the constraint of a model, and calls parsed from text in any pieces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from splitserve.api.schemas import ChatBody
from splitserve.api.tokenizer import ChatTemplate, Tokenizer
from splitserve.api.tools import BARE, TAGGED, CallDelta, ToolCallParser, ToolForm, ToolUse, readable_calls
from splitserve.core.errors import InvalidRequestError
from splitserve.core.grammar import GrammarKind, GrammarSpec
from splitserve.core.limits import LimitsConfig
from splitserve.engine.grammar_process import XGrammarCompiler
from splitserve.server.openai import _call_chunks

MAX_CHARS = LimitsConfig().max_grammar_chars
USER = {"role": "user", "content": "Hi"}
PLAIN = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}", {})
TAGS = ChatTemplate(
    "{{ tools | tojson }}<tool_call>{% for m in messages %}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments.x }}{% endif %}{% endfor %}",
    {},
)
BARES = ChatTemplate('{{ tools }}{"name": x, "parameters": {}}', {})


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}, **more}}


def use(template: ChatTemplate = PLAIN, **fields: Any) -> ToolUse | None:
    return ToolUse.of(ChatBody(messages=[USER], **fields), template)


def form_of(grammar: GrammarSpec) -> dict[str, Any]:
    assert grammar.kind is GrammarKind.STRUCTURAL_TAG
    form: dict[str, Any] = json.loads(grammar.text)["format"]
    return form


def begins(form: dict[str, Any]) -> list[str]:
    return [tag["begin"] for tag in form["tags"]]


def test_no_tools_and_tool_choice_none_are_nothing_to_call() -> None:
    assert use() is use(tool_choice="auto") is use(tools=[tool("a")], tool_choice="none") is None


def test_auto_lets_the_model_choose_required_does_not_and_a_name_leaves_one() -> None:
    tools = [tool("a"), tool("b")]
    auto, required = use(tools=tools), use(tools=tools, tool_choice="required", parallel_tool_calls=False)
    named = use(tools=tools, tool_choice={"type": "function", "function": {"name": "b"}})
    assert auto is not None
    assert required is not None
    assert named is not None
    free = form_of(auto.grammar(None, MAX_CHARS))
    assert (free["type"], free["triggers"], free["stop_after_first"]) == ("triggered_tags", ["<tool_call>"], False)
    forced = form_of(required.grammar(None, MAX_CHARS))
    assert (forced["type"], forced["at_least_one"], forced["stop_after_first"]) == ("tags_with_separator", True, True)
    assert begins(free) == begins(forced) == [f'<tool_call>\n{{"name": "{n}", "arguments": ' for n in "ab"]
    one = form_of(named.grammar(None, MAX_CHARS))
    assert begins(one) == ['<tool_call>\n{"name": "b", "arguments": ']
    assert one["stop_after_first"]


def test_the_grammar_of_many_tools_has_a_limit() -> None:
    found = use(tools=[tool("a")])
    assert found is not None
    text = found.grammar(None, MAX_CHARS).text
    assert found.grammar(None, len(text)).text == text
    with pytest.raises(InvalidRequestError, match=f"tools has {len(text)} characters") as caught:
        found.grammar(None, len(text) - 1)
    assert caught.value.param == "tools"


def test_a_response_format_is_the_alternative_to_a_call() -> None:
    auto, required = use(tools=[tool("a")]), use(tools=[tool("a")], tool_choice="required")
    assert auto is not None
    assert required is not None
    answer = GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type":"null"}')
    form = form_of(auto.grammar(answer, MAX_CHARS))
    assert form["type"] == "or"
    assert form["elements"][0]["json_schema"] == {"type": "null"}
    assert form["elements"][1]["at_least_one"]
    assert form_of(required.grammar(answer, MAX_CHARS)) == form_of(required.grammar(None, MAX_CHARS))


@pytest.mark.parametrize(("template", "form"), [(PLAIN, TAGGED), (TAGS, TAGGED), (BARES, BARE), (None, TAGGED)])
def test_the_form_is_the_one_the_template_was_trained_with(template: ChatTemplate, form: ToolForm) -> None:
    found = use(template, tools=[tool("a")])
    assert found is not None
    assert found.form == form


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": [{"type": "web"}]}, "tools[0]", "tools[0]"),
        ({"tools": [tool("no spaces")]}, "tools[0].function.name", "'no spaces'"),
        ({"tools": [tool("a"), tool("a")]}, "tools", "one name"),
        ({"tools": [tool(f"t{i}") for i in range(129)]}, "tools", "128 at most"),
        ({"tools": [tool("a", parameters={"type": "string"})]}, "tools[0].function.parameters", "type object"),
        ({"tools": [tool("a")], "tool_choice": "always"}, "tool_choice", "'always'"),
        ({"tools": [tool("a")], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "'allowed_tools'"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [tool("a")], "tool_choice": {"type": "function", "function": {"name": "b"}}}, "tool_choice", "'b'"),
    ],
)
def test_tools_that_cannot_be_meant_are_refused_with_their_field(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        use(**fields)
    assert caught.value.param == param
    assert says in caught.value.message


def test_a_template_that_knows_tools_gets_them_and_another_gets_a_system_message() -> None:
    found = use(TAGS, tools=[tool("a")])
    assert found is not None
    assert found.prompt([USER], TAGS) == ([USER], {"tools": [tool("a")]})
    chat, variables = found.prompt([USER], PLAIN)
    assert (variables, chat[1]) == ({}, USER)
    assert '{"name": "a"' in chat[0]["content"]
    assert '<tool_call>\n{"name": "NAME", "arguments": ' in chat[0]["content"]
    own = {"role": "system", "content": "Be brief."}
    chat, _ = found.prompt([own, USER], PLAIN)
    assert [m["role"] for m in chat] == ["system", "user"]
    assert chat[0]["content"].startswith("Be brief.\n\nYou can call")


PAST = [
    {
        "role": "assistant",
        "content": "One moment.",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "a", "arguments": '{"x": 5}'}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "done"},
]


def test_earlier_calls_and_results_reach_a_template_that_knows_none_as_text() -> None:
    call, result = readable_calls(PAST, PLAIN)
    assert call["content"] == 'One moment.\n<tool_call>\n{"name": "a", "arguments": {"x": 5}}\n</tool_call>'
    assert result == {"role": "user", "content": "<tool_response>\ndone\n</tool_response>"}


def test_earlier_arguments_reach_a_template_that_knows_tools_as_an_object() -> None:
    chat = readable_calls(PAST, TAGS)
    assert TAGS.render(chat, template_variables={"tools": []}) == "[]<tool_call>5"
    assert chat[1] == PAST[1]


def test_an_earlier_call_without_a_name_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"function\.name"):
        readable_calls([{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}], PLAIN)


@pytest.mark.parametrize("calls", [5, True, "text", {"id": "1"}])
def test_earlier_calls_that_are_no_list_are_refused(calls: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.tool_calls must be a list"):
        readable_calls([{"role": "assistant", "content": "", "tool_calls": calls}], PLAIN)


def parse(form: ToolForm, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = ToolCallParser(form)
    parsed = [*(parser.push(piece) for piece in pieces), parser.finish()]
    calls: list[tuple[str, str]] = []
    for delta in [delta for part in parsed for delta in part.calls]:
        if delta.name is not None:
            assert delta.id is not None
            assert delta.index == len(calls)
            calls.append((delta.name, ""))
        calls[delta.index] = (calls[delta.index][0], calls[delta.index][1] + delta.arguments)
    return "".join(part.text for part in parsed), calls


TRICKY = r'{"x": "}\"{</tool_call>", "y": [{"z": "\\"}, {}]}'
CASES = [
    (TAGGED, "Only text, with < and <tool.", "Only text, with < and <tool.", []),
    (TAGGED, "  padded  ", "  padded  ", []),
    (TAGGED, TAGGED.write("a", TRICKY), "", [("a", TRICKY)]),
    (
        TAGGED,
        f"Let me see.\n{TAGGED.write('a', '{}')}\n{TAGGED.write('b_2', TRICKY)}",
        "Let me see.",
        [("a", "{}"), ("b_2", TRICKY)],
    ),
    (BARE, BARE.write("a", TRICKY), "", [("a", TRICKY)]),
    (BARE, 'Just {"name" in text', 'Just {"name" in text', []),
    # Cut off by max_tokens: within the prefix, the name, the arguments, the suffix.
    (TAGGED, "Hm <tool_call>\n{", "Hm <tool_call>\n{", []),
    (TAGGED, '<tool_call>\n{"name": "ab', "", []),
    (TAGGED, 'Hm <tool_call>\n{"name": "ab', "Hm", []),
    (TAGGED, TAGGED.write("a", "{}") + '\n<tool_call>\n{"', "", [("a", "{}")]),
    (TAGGED, '<tool_call>\n{"name": "a", "arguments": {"x": "}', "", [("a", '{"x": "}')]),
    (TAGGED, '<tool_call>\n{"name": "a", "arguments": {}}\n</to', "", [("a", "{}")]),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_calls_are_found_however_the_text_is_cut(
    form: ToolForm, text: str, content: str, calls: list[tuple[str, str]], size: int
) -> None:
    assert parse(form, [text[i : i + size] for i in range(0, len(text), size)]) == (content, calls)


def test_text_that_cannot_be_a_call_is_shown_at_once_and_arguments_as_they_come() -> None:
    parser = ToolCallParser(TAGGED)
    assert parser.push("Hello").text == "Hello"
    assert parser.push(" <tool").text == ""
    assert parser.push("box>").text == " <toolbox>"
    assert [c.name for c in parser.push('<tool_call>\n{"name": "a", "arguments": ').calls] == ["a"]
    assert [c.arguments for c in parser.push('{"x": 1').calls] == ['{"x": 1']


X = tool(
    "a",
    parameters={
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/n"}},
        "required": ["x"],
        "$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    },
)
CALL, OTHER, WRONG = TAGGED.write("a", '{"x": 1}'), TAGGED.write("b", "{}"), TAGGED.write("a", '{"x": 99}')
NULL = GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type":"null"}')
NAMED = {"type": "function", "function": {"name": "a"}}
LOOSE = GrammarSpec(
    GrammarKind.JSON_SCHEMA,
    '{"properties":{"x":{"prefixItems":[{"type":"null"}]},"y":{"additionalProperties":false,"type":"object"}}}',
    strict=False,
)


@pytest.mark.parametrize(
    ("template", "fields", "answer", "takes", "refuses"),
    [
        (PLAIN, {}, None, ["Hello.", CALL, f"Now: {CALL}\n{OTHER} Done."], [WRONG, TAGGED.write("c", "{}")]),
        (PLAIN, {"parallel_tool_calls": False}, None, ["Hello.", CALL], [f"{CALL}\n{OTHER}"]),
        (PLAIN, {"tool_choice": "required"}, None, [CALL, f"{OTHER}\n{CALL}"], ["Hello.", "", WRONG]),
        (PLAIN, {"tool_choice": NAMED}, None, [CALL], [OTHER, f"{CALL}\n{CALL}", "null"]),
        (PLAIN, {}, NULL, ["null", CALL], ["Hello.", WRONG]),
        (PLAIN, {}, LOOSE, ['{"x": [null, 1], "y": {}, "z": 2}', CALL], ['{"y": {"z": 2}}']),
        (PLAIN, {}, GrammarSpec(GrammarKind.REGEX, "ab?"), ["a", "ab", CALL], ["b"]),
        (PLAIN, {}, GrammarSpec(GrammarKind.EBNF, 'root ::= "yes"'), ["yes", CALL], ["no"]),
        (BARES, {}, None, ["Hello {.", BARE.write("a", '{"x": 1}')], [BARE.write("a", '{"x": 99}')]),
        (BARES, {"tool_choice": "required"}, None, [BARE.write("b", '{"any": []}')], ["Hello."]),
    ],
)
def test_the_library_takes_every_grammar_of_ours_and_holds_calls_to_it(
    tokenizer_folder: Path,
    template: ChatTemplate,
    fields: dict[str, Any],
    answer: GrammarSpec | None,
    takes: list[str],
    refuses: list[str],
) -> None:
    found = use(template, tools=[X, tool("b", parameters=None)], **fields)
    assert found is not None
    grammar = XGrammarCompiler(tokenizer_folder, 258, frozenset([257])).compile(found.grammar(answer, MAX_CHARS))
    encode = Tokenizer.load(tokenizer_folder).encode

    def is_taken(text: str) -> bool:
        matcher = grammar.matcher()
        return all(matcher.accept_token(token) for token in [*encode(text), 257])

    assert [text for text in takes if not is_taken(text)] == []
    assert [text for text in refuses if is_taken(text)] == []


def test_a_chunk_of_a_stream_has_one_entry_for_each_call() -> None:
    """Many clients read the first entry only."""
    deltas = [CallDelta(0, '"}'), CallDelta(1, id="b", name="g"), CallDelta(1, "{"), CallDelta(1, '"x"')]
    assert _call_chunks(deltas) == [
        {"index": 0, "function": {"arguments": '"}'}},
        {"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": '{"x"'}},
    ]
