"""Conversion of a body's prompt to token ids. Workers compute these; routers use them to find cached prefixes.

Pure except for the tokenizer: workers and routers get equal ids from equal bodies and model folders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from splitserve.api import validation
from splitserve.api.schemas import ChatBody, CompletionBody, GenerateBody
from splitserve.api.tokenizer import Tokenizer
from splitserve.api.tools import ToolUse, readable_calls
from splitserve.core.errors import InvalidRequestError

_CHAT_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Roles of messages without content: an assistant's may have only tool calls, and OpenAI's schema permits null for the
# result of a function.
_WITHOUT_CONTENT = ("assistant", "function")
# Maximum number of characters of an invalid value that an error repeats.
_MAX_ECHO = 32


def chat_messages(
    messages: Sequence[Mapping[str, Any]], *, continue_final_message: bool = False
) -> list[dict[str, Any]]:
    """Return the messages with their contents as plain text, ready for a chat template."""
    if not messages:
        raise InvalidRequestError("messages is empty: send at least one", param="messages")
    chat = []
    for i, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise InvalidRequestError(f"messages[{i}].role is missing or no string", param=f"messages[{i}].role")
        if message["role"] not in _CHAT_ROLES:
            raise InvalidRequestError(
                f"messages[{i}].role is {message['role'][:_MAX_ECHO]!r}: give one of {', '.join(_CHAT_ROLES)}",
                param=f"messages[{i}].role",
            )
        content = message.get("content")
        if content is None and message["role"] not in _WITHOUT_CONTENT:
            raise InvalidRequestError(
                f"messages[{i}].content is missing: send a string or a list of text parts",
                param=f"messages[{i}].content",
            )
        chat.append({**message, "content": _content_text(content, i)})
    if continue_final_message and chat[-1]["role"] != "assistant":
        raise InvalidRequestError(
            "continue_final_message needs a final message of the assistant to continue", param="continue_final_message"
        )
    return chat


def _content_text(content: object, i: int) -> str:
    """Return the text of a string, a list of text parts, or null. Raises InvalidRequestError."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        problem = f"messages[{i}].content must be a string or a list of parts"
        raise InvalidRequestError(problem, param=f"messages[{i}].content")
    texts = []
    for j, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequestError(
                f"messages[{i}].content[{j}] is of type {kind!r}: this model takes parts "
                '{"type": "text", "text": "..."} only',
                param=f"messages[{i}].content[{j}]",
            )
        texts.append(part["text"])
    return "\n".join(texts)


def chat_tokens(
    tokenizer: Tokenizer, body: ChatBody, max_tokens: int | None = None
) -> tuple[list[int], ToolUse | None]:
    """Return the tokens of a conversation and its callable tools. Raises InvalidRequestError as Tokenizer.encode."""
    continues = bool(body.continue_final_message)
    template = tokenizer.chat_template
    chat = chat_messages(body.messages, continue_final_message=continues)
    chat = readable_calls(chat, template)
    use = ToolUse.of(body, template)
    variables: dict[str, Any] = {}
    if use is not None and template is not None:
        chat, variables = use.prompt(chat, template)
    token_ids = tokenizer.encode_chat(
        chat,
        max_tokens=max_tokens,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=continues,
        template_variables=variables | (body.chat_template_kwargs or {}),
    )
    return token_ids, use


def prompts_of(
    path: str,
    body: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    max_tokens: int | None = None,
    at_most: int | None = None,
) -> list[list[int]] | None:
    """Return the tokens of the first `at_most` prompts of a body for this route. Raises InvalidRequestError.

    None: a tokenizer is needed. `at_most` None: all prompts.
    """
    if path == "/v1/chat/completions":
        chat = validation.parse(ChatBody, body)
        return None if tokenizer is None else [chat_tokens(tokenizer, chat, max_tokens)[0]]
    if path == "/v1/completions":
        name = "prompt"
        prompts, _ = validation.prompt_list(validation.parse(CompletionBody, body).prompt, name)
    else:
        native = validation.parse(GenerateBody, body)
        name, value = "text", native.input_ids if native.text is None else native.text
        prompts, _ = validation.prompt_list([] if value is None else value, name)
    token_ids: list[list[int]] = []
    for prompt in prompts[:at_most]:
        if isinstance(prompt, list):
            token_ids.append(prompt)
        elif tokenizer is None:
            return None
        else:
            token_ids.append(tokenizer.encode(prompt, max_tokens=max_tokens, name=name))
    return token_ids
