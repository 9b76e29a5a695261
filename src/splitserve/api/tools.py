"""Tools of a chat: definitions of the client, choice, prompt, grammar, and the calls in the text of an answer.

1. `ToolUse.of` checks `tools`, `tool_choice` and `parallel_tool_calls`.
2. `prompt` presents the tools to the model: through its chat template if that supports tools, otherwise in a system
   message.
3. `grammar` restricts the output to well-formed calls with arguments of the tool's schema: from the first token if a
   call is required, or from the token that opens a call if it is optional.
4. ToolCallParser parses the calls from the text, which arrives in pieces. The grammar guarantees the format, so the
   parser only finds the parts.

A form (prefix, name, infix, arguments, suffix) is one that models were trained on; the grammar enforces it on any
model.
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from splitserve.api.grammars import json_grammar, without_strict_mode
from splitserve.api.schemas import ChatBody
from splitserve.api.tokenizer import ChatTemplate
from splitserve.api.validation import check_chars
from splitserve.core.errors import InvalidRequestError
from splitserve.core.grammar import MAX_JSON_WHITESPACE, GrammarKind, GrammarSpec

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolForm:
    """Text of one call: `prefix` NAME `infix` ARGUMENTS `suffix`. `trigger`: text that opens a call."""

    trigger: str
    prefix: str
    infix: str
    suffix: str

    def write(self, name: str, arguments: str) -> str:
        return f"{self.prefix}{name}{self.infix}{arguments}{self.suffix}"


# Hermes, Qwen 2.5 and 3, SmolLM; also the form for models without training on tools.
TAGGED = ToolForm("<tool_call>", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>")
# Llama 3.
BARE = ToolForm('{"name": "', '{"name": "', '", "parameters": ', "}")

# System prompt for a model with a chat template that does not support tools.
TOOL_PROMPT = """You can call these functions. Each line is one, with its parameters as a JSON schema:
{tools}
To call a function, answer with its name and arguments in this form and nothing else:
{call}
The result comes in the next message, between <tool_response> and </tool_response>."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    # The client's tools, validated.
    tools: tuple[dict[str, Any], ...]
    form: ToolForm
    # Whether a call is required. False: the model may also answer in text.
    is_required: bool
    # Whether several calls are allowed.
    is_parallel: bool
    # The one function to call. None: any.
    name: str | None = None

    @classmethod
    def of(cls, body: ChatBody, template: ChatTemplate | None) -> ToolUse | None:
        """Return the tools of a request. None: there is nothing to call. Raises InvalidRequestError."""
        tools = tuple(_checked_tool(tool, i) for i, tool in enumerate(body.tools or ()))
        names = [tool["function"]["name"] for tool in tools]
        if len(tools) > MAX_TOOLS:
            raise InvalidRequestError(f"{len(tools)} tools: send {MAX_TOOLS} at most", param="tools")
        if len(set(names)) < len(names):
            raise InvalidRequestError(f"two tools have one name (of {sorted(names)}): rename one", param="tools")
        choice, name = _choice(body.tool_choice, names)
        if choice == "none":
            return None
        is_parallel = body.parallel_tool_calls is not False and name is None
        return cls(tools, _form_of(template), choice == "required", is_parallel, name)

    def prompt(self, chat: Sequence[Message], template: ChatTemplate) -> tuple[list[Message], dict[str, Any]]:
        """Return the conversation with the tools in it, and further arguments for the template."""
        if template.knows_tools:
            return list(chat), {"tools": list(self.tools)}
        lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in self.tools)
        prompt = TOOL_PROMPT.format(tools=lines, call=self.form.write("NAME", '{"PARAMETER": VALUE}'))
        if chat[0]["role"] == "system":
            return [{**chat[0], "content": f"{chat[0]['content']}\n\n{prompt}"}, *chat[1:]], {}
        return [{"role": "system", "content": prompt}, *chat], {}

    def grammar(self, answer: GrammarSpec | None, max_chars: int) -> GrammarSpec:
        """Return the grammar of calls. `answer`: grammar of an answer in text. `max_chars`: its greatest length."""
        calls: dict[str, Any] = {
            "type": "tags_with_separator",
            "tags": [
                self._tag(tool["function"]) for tool in self.tools if self.name in (None, tool["function"]["name"])
            ],
            "separator": "\n",
            "at_least_one": True,
            "stop_after_first": not self.is_parallel,
        }
        if not self.is_required and answer is None:
            calls = {
                "type": "triggered_tags",
                "triggers": [self.form.trigger],
                "tags": calls["tags"],
                "stop_after_first": not self.is_parallel,
            }
        elif not self.is_required and answer is not None:
            calls = {"type": "or", "elements": [_text_format(answer), calls]}
        grammar = json_grammar(GrammarKind.STRUCTURAL_TAG, {"type": "structural_tag", "format": calls}, "tools")
        check_chars("tools", grammar.text, max_chars, "--max-grammar-chars")
        return grammar

    def _tag(self, function: Mapping[str, Any]) -> dict[str, Any]:
        schema = function.get("parameters") or {"type": "object", "additionalProperties": True}
        return {
            "type": "tag",
            "begin": f"{self.form.prefix}{function['name']}{self.form.infix}",
            "content": _schema_format(schema),
            "end": self.form.suffix,
        }


def readable_calls(chat: Sequence[Message], template: ChatTemplate | None) -> list[Message]:
    """Return a conversation in which earlier calls and results are readable by the template.

    Templates that support tools need a call's arguments as an object, but clients send them as text. For other
    templates calls and results become text again. Raises InvalidRequestError.
    """
    knows_tools = template is not None and template.knows_tools
    form = _form_of(template)
    readable = []
    for i, message in enumerate(chat):
        given = message.get("tool_calls")
        if not isinstance(given, list | None):
            field = f"messages[{i}].tool_calls"
            raise InvalidRequestError(f"{field} must be a list of calls", param=field)
        calls = [_past_call(call, i) for call in given or ()]
        if calls and knows_tools:
            message = {**message, "tool_calls": calls}
        elif calls:
            written = [form.write(c["function"]["name"], _as_text(c["function"]["arguments"])) for c in calls]
            message = {"role": message["role"], "content": "\n".join(filter(None, [message["content"], *written]))}
        elif message["role"] == "tool" and not knows_tools:
            message = {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        readable.append(message)
    return readable


def _checked_tool(tool: dict[str, Any], i: int) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise InvalidRequestError(
            f'tools[{i}] must be {{"type": "function", "function": {{...}}}}', param=f"tools[{i}]"
        )
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"tools[{i}].function.name is {name!r}: it must be 1 to 64 of letters, digits, _ and -",
            param=f"tools[{i}].function.name",
        )
    if parameters is not None and (not isinstance(parameters, dict) or parameters.get("type", "object") != "object"):
        param = f"tools[{i}].function.parameters"
        raise InvalidRequestError(f"{param} must be a schema of type object", param=param)
    return tool


def _choice(choice: str | dict[str, Any] | None, names: Sequence[str]) -> tuple[str, str | None]:
    """Return the choice ("none", "auto" or "required") and the name of the one function to call."""
    if choice is None:
        return ("auto" if names else "none"), None
    kinds: tuple[str, ...] = ("none", "auto", "required") if isinstance(choice, str) else ("function",)
    kind = choice if isinstance(choice, str) else choice.get("type", "function")
    if kind not in kinds:
        raise InvalidRequestError(
            f"tool_choice is {kind!r}: it must be none, auto, required or name a function", param="tool_choice"
        )
    if isinstance(choice, str):
        if choice == "required" and not names:
            raise InvalidRequestError("tool_choice required needs tools: send some", param="tool_choice")
        return (choice if names else "none"), None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if name not in names:
        raise InvalidRequestError(f"tool_choice names {name!r}, but the tools are {list(names)}", param="tool_choice")
    return "required", name


def _form_of(template: ChatTemplate | None) -> ToolForm:
    if template is not None and template.knows_tools and TAGGED.trigger not in template.source:
        return BARE if '"parameters": ' in template.source else TAGGED
    return TAGGED


def _schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_JSON_WHITESPACE}


def _text_format(answer: GrammarSpec) -> dict[str, Any]:
    match answer.kind:
        case GrammarKind.JSON_SCHEMA:
            schema = json.loads(answer.text)
            # xgrammar compiles the schema of a tag in strict mode only.
            return _schema_format(schema if answer.strict else without_strict_mode(schema))
        case GrammarKind.REGEX:
            return {"type": "regex", "pattern": answer.text}
        case GrammarKind.EBNF:
            return {"type": "grammar", "grammar": answer.text}
        case GrammarKind.STRUCTURAL_TAG:
            form: dict[str, Any] = json.loads(answer.text).get("format", {})
            return form


def _past_call(call: object, i: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        param = f"messages[{i}].tool_calls"
        raise InvalidRequestError(f"{param} holds a call without function.name", param=param)
    arguments = function.get("arguments")
    with contextlib.suppress(ValueError, RecursionError):
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {**call, "function": {**function, "arguments": arguments if arguments is not None else {}}}


def _as_text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class CallDelta:
    """Change of call number `index`: its id and name first, then pieces of its arguments' JSON."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class Parsed:
    text: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class ToolCallParser:
    """Incremental parser: `push` text, then `finish`. Each returns the text and calls that are final."""

    def __init__(self, form: ToolForm) -> None:
        self.num_calls = 0
        self._form = form
        self._step: Callable[[Parsed], bool] = self._take_text
        # Unparsed text: the start of a prefix, an infix or a suffix.
        self._held = ""
        self._arguments = _JsonEnd()

    def push(self, text: str) -> Parsed:
        parsed = Parsed()
        self._held += text
        while self._step(parsed):
            pass
        return parsed

    def finish(self) -> Parsed:
        """Return the text held back at the end of the answer. The beginning of a call without a name is dropped."""
        held, self._held = self._held, ""
        # After a call, the held text is the beginning of another one.
        return Parsed(held if self._step == self._take_text and not self.num_calls else "")

    def _take_text(self, parsed: Parsed) -> bool:
        """Consume text before a call. Like all steps, return whether to continue with the next."""
        before, prefix, rest = self._held.partition(self._form.prefix)
        if prefix:
            # White space before a call is not part of the answer.
            parsed.text += before.rstrip()
            self._held, self._step = rest, self._take_name
            return True
        keep = overlap(self._held, self._form.prefix)
        shown = self._held[: len(self._held) - keep].rstrip()
        parsed.text += shown
        self._held = self._held[len(shown) :]
        return False

    def _take_name(self, parsed: Parsed) -> bool:
        name, infix, rest = self._held.partition(self._form.infix)
        if infix:
            parsed.calls.append(CallDelta(self.num_calls, id=f"call_{uuid.uuid4().hex[:24]}", name=name))
            self.num_calls += 1
            self._held, self._step, self._arguments = rest, self._take_arguments, _JsonEnd()
        return bool(infix)

    def _take_arguments(self, parsed: Parsed) -> bool:
        end = self._arguments.find(self._held)
        piece = self._held[:end]
        if piece:
            parsed.calls.append(CallDelta(self.num_calls - 1, piece))
        self._held = self._held[len(piece) :]
        if end is not None:
            self._step = self._take_suffix
        return end is not None

    def _take_suffix(self, _: Parsed) -> bool:
        is_whole = len(self._held) >= len(self._form.suffix)
        if is_whole:
            self._held, self._step = self._held[len(self._form.suffix) :], self._take_text
        return is_whole


class _JsonEnd:
    """Finder of the end of a JSON object that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def find(self, piece: str) -> int | None:
        """Return the end of the object within this piece. None: it continues after it."""
        for i, character in enumerate(piece):
            if self._in_string:
                self._in_string = self._is_escaped or character != '"'
                self._is_escaped = character == "\\" and not self._is_escaped
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return i + 1
        return None


def overlap(text: str, prefix: str) -> int:
    """Return the length of the longest end of `text` that is a proper prefix of `prefix`."""
    return next((n for n in range(min(len(text), len(prefix) - 1), 0, -1) if prefix.startswith(text[-n:])), 0)
