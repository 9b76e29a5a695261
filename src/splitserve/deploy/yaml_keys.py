"""Duplicate keys of a YAML file, of which YAML parsers silently keep the last one."""

from __future__ import annotations

import yaml  # type: ignore[import-untyped]


def duplicate_key(raw: bytes) -> tuple[str, int] | None:
    """Return a key that its mapping has twice, and the line of its second occurrence. None: there is none.

    `raw`: a valid YAML document.
    """
    pending = [yaml.compose(raw, Loader=yaml.SafeLoader)]
    # Aliases refer to one node from several places, also from inside itself.
    visited: set[int] = set()
    while pending:
        node = pending.pop()
        if node is None or id(node) in visited:
            continue
        visited.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            pending += node.value
        elif isinstance(node, yaml.MappingNode):
            seen = set()
            for key, value in node.value:
                # The tag distinguishes the number 1 from the text "1".
                identity = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key)
                if identity in seen:
                    return str(key.value), key.start_mark.line + 1
                seen.add(identity)
                pending += (key, value)
    return None
