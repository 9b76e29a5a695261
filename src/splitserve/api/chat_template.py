"""Renderer of a conversation to the prompt that its model was trained on, with the model's own Jinja template.

The template language is that of transformers: sandboxed, blocks trimmed, with `raise_exception`, `strftime_now`, a
`tojson` that does not escape HTML, loop controls and `{% generation %}`. Templates come with models and are not
trusted. This module does not know tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from splitserve.core.errors import InvalidRequestError, clause

Messages = Sequence[Mapping[str, Any]]

# Marks the end of the final message's text, so that the prompt can be cut there. No model generates it.
_END_OF_FINAL_MESSAGE = "\ue000end-of-final-message\ue000"


class ChatTemplate:
    """Chat template of a model. `variables`: special tokens by name. `knows_tools`: it supports tools."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        environment = _environment()
        self.source = source
        self.knows_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(source))
        self._template = environment.from_string(source)
        self._variables = dict(variables)

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt. Raises InvalidRequestError if the template rejects the messages.

        `template_variables`: further variables of this model's template.
        """
        chat = [dict(m) for m in messages]
        if continue_final_message:
            chat[-1]["content"] = f"{chat[-1]['content']}{_END_OF_FINAL_MESSAGE}"
            add_generation_prompt = False
        variables = self._variables | {"tools": None, "documents": None} | dict(template_variables or {})
        try:
            prompt = self._template.render(
                variables | {"messages": chat, "add_generation_prompt": add_generation_prompt}
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {clause(error)}; check roles, their order and the "
                "contents",
                param="messages",
            ) from error
        if not continue_final_message:
            return prompt
        prompt, mark, _ = prompt.rpartition(_END_OF_FINAL_MESSAGE)
        if not mark:
            raise InvalidRequestError(
                "the model's chat template drops the final message, so it cannot be continued",
                param="continue_final_message",
            )
        return prompt


class _GenerationTag(jinja2.ext.Extension):
    """Tag `{% generation %}...{% endgeneration %}`: marks text for training. Here it yields its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=lineno)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    environment.filters["tojson"] = _to_json
    return environment


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
