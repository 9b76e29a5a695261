"""Attention with latents (`engine/mla.py`) over tensor parallel ranks: heads are divided, rows are on each.

Plans of transformers name some of its projections, all, or none; whatever they say, this is how they are cut: the
matrices that make heads, and the one that joins them, by heads; those before, which are small, not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from splitserve.engine.mla import has_latents
from splitserve.engine.parallel.heads import Heads

# By name in the attention module.
_WORDS = {
    "q_proj": "colwise",
    "q_b_proj": "colwise",
    "kv_b_proj": "colwise",
    "o_proj": "rowwise",
    "q_a_proj": "replicate",
    "kv_a_proj_with_mqa": "replicate",
}


def latent_words(modules: Mapping[str, Any], tp_size: int, name: str) -> dict[str, str]:
    """The plan of all such attention among a model's modules, by module. Raises ConfigError if heads do not divide."""
    words: dict[str, str] = {}
    for path, module in modules.items():
        if has_latents(module):
            Heads(module.config.num_attention_heads, 1).check(tp_size, name)
            words |= {f"{path}.{child}": word for child, word in _WORDS.items() if f"{path}.{child}" in modules}
    return words
