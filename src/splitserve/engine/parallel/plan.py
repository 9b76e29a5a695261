"""Sharding of a model on the meta device to one tensor parallel rank's part: smaller weights. Nothing is loaded yet.

`cut_weights` shrinks linear layers and experts by transformers' `tp_plan`, attention by whole heads, the vocabulary by
rows of the embedding and the head. When the weights are loaded, `Shards.connect` has the modules exchange what they
must.

Models that would be computed wrongly are rejected (ConfigError): those without a plan, or with unknown words in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from splitserve.core.parallel import ParallelRank
from splitserve.engine.fit import Heads, cannot_cut
from splitserve.engine.mla import has_latents
from splitserve.engine.parallel.dp_attention import Meeting
from splitserve.engine.parallel.ranks import Ranks
from splitserve.engine.parallel.shards import (
    STYLES,
    Style,
    VocabularyShard,
    WeightShard,
    connect,
    cut_of,
    even_range,
    even_sizes,
)
from splitserve.engine.parallel.stages import Absent


@dataclass(frozen=True, slots=True)
class KVHeads:
    """KV heads of one layer: those on this rank, by their global numbers, and the number of all."""

    held: range
    total: int


@dataclass(slots=True)
class Shards:
    """The result of `cut_weights`."""

    # Shards by name of the parameter. Parameters without an entry are whole.
    cuts: dict[str, WeightShard] = field(default_factory=dict)
    # KV heads by layer. Layers without an entry have all KV heads on each rank.
    kv_heads: dict[int, KVHeads] = field(default_factory=dict)
    # Modules that exchange something, with their whole inputs and outputs.
    connected: list[tuple[torch.nn.Module, Style, tuple[int, int]]] = field(default_factory=list)
    vocab_size: int = 0

    def connect(self, model: Any, ranks: Ranks, meeting: Meeting | None = None) -> None:
        """Add the exchanges between ranks to the modules. `meeting`: for the experts, with data parallel attention."""
        for module, style, sizes in self.connected:
            if meeting is not None and style.before == "deal":
                meeting.connect(module)
            else:
                connect(module, style, sizes, ranks)
        if ranks.rank.tp_size == 1:
            return
        if ranks.rank.is_first_stage:
            held = even_range(self.vocab_size, ranks.rank.tp_rank, ranks.rank.tp_size)
            model.set_input_embeddings(VocabularyShard(model.get_input_embeddings(), held, ranks))
        if ranks.rank.is_last_stage:
            # Rank 0 returns all logits, in the order of the vocabulary; the others return those of their rows.
            shares = even_sizes(self.vocab_size, ranks.rank.tp_size)
            head = model.get_output_embeddings()
            head.register_forward_hook(lambda _module, _args, out: ranks.join_on_first(out, shares))


def cut_weights(
    model: Any, rank: ParallelRank, name: str, *, expert_parallel: bool = False, experts: ParallelRank | None = None
) -> Shards:
    """Shrink the weights to this rank's part. Raises ConfigError.

    `expert_parallel`: a rank has some experts, whole, instead of a part of each. `experts`: with data parallel
    attention, the place of this rank among those that share the experts; `rank` is then its place in its group.
    """
    shards = Shards(vocab_size=int(model.config.get_text_config().vocab_size))
    is_alone = rank.tp_size == 1
    if is_alone and experts is None:
        return shards
    plan = _plan_of(model, name, expert_parallel or experts is not None)
    latents: dict[str, str] = {}
    if is_alone:
        plan = {path: word for path, word in plan.items() if path in model.ep_plan}
    else:
        latents = _words_of_latents(dict(model.named_modules()), rank.tp_size, name)
    cutter = _Cutter(model, rank, name, shards, plan, latents, experts or rank)
    if not is_alone:
        cutter.cut_vocabulary()
    styles = dict(cutter.styles())
    for path in styles:
        cutter.cut_heads(path, styles)
    for path, style in styles.items():
        cutter.cut(path, style)
    return shards


def _plan_of(model: Any, name: str, expert_parallel: bool) -> dict[str, str]:
    """Return the styles of transformers' plan, by name with "*" for numbers."""
    plan = dict(model.tp_plan or {})
    if expert_parallel:
        if not model.ep_plan:
            why = "transformers has no ep_plan that distributes its experts"
            raise cannot_cut(name, why, "Leave expert parallelism out, then each rank has a part of every expert")
        plan |= model.ep_plan
    return plan


class _Cutter:
    def __init__(
        self,
        model: Any,
        rank: ParallelRank,
        name: str,
        shards: Shards,
        plan: dict[str, str],
        latent_words: dict[str, str],
        experts: ParallelRank,
    ) -> None:
        self._rank = rank
        # The place of this rank among those that share the experts.
        self._experts = experts
        self._name = name
        self._shards = shards
        self._plan = plan
        # Placeholders have no weights.
        self._modules: dict[str, Any] = {
            path: module for path, module in model.named_modules() if not isinstance(module, Absent)
        }
        self._latent_words = latent_words
        # None: another stage has it.
        self._embedding, self._head = (
            None if isinstance(found, Absent) else found
            for found in (model.get_input_embeddings(), model.get_output_embeddings())
        )
        self._paths = {module: path for path, module in self._modules.items()}
        self._parameters = dict(model.named_parameters())
        self._vocabulary = {path for path, module in self._modules.items() if module in (self._embedding, self._head)}

    def styles(self) -> Iterator[tuple[str, Style]]:
        """Yield the plan's styles, by module or parameter. The vocabulary has rules of its own."""
        found = False
        for path in (*self._modules, *self._parameters):
            word = self._latent_words.get(path) or self._plan.get(re.sub(r"(?<=\.)\d+(?=\.)", "*", path))
            if word is None or path in self._vocabulary:
                continue
            if word not in STYLES:
                raise cannot_cut(self._name, f"its plan has the style {word!r} for {path}, which is not known here")
            found = True
            yield path, STYLES[word]
        if not found:
            raise cannot_cut(self._name, "transformers has no tp_plan for it")

    def cut_heads(self, path: str, styles: dict[str, Style]) -> None:
        """Shard the four projections of an attention if `path` is its query projection and its heads are divided."""
        parent, _, last = path.rpartition(".")
        if last != "q_proj" or styles[path] != STYLES["colwise"] or path in self._latent_words:
            return
        attention: Any = self._modules[parent]
        q, k, v, o = (self._modules.get(f"{parent}.{p}") for p in ("q_proj", "k_proj", "v_proj", "o_proj"))
        if k is None or v is None or o is None or not hasattr(attention, "head_dim"):
            return
        heads = Heads(o.in_features // attention.head_dim, k.out_features // attention.head_dim)
        heads.check(self._rank.tp_size, self._name)
        query = heads.query(self._rank.tp_rank, self._rank.tp_size)
        kv = heads.kv(self._rank.tp_rank, self._rank.tp_size)
        for linear, held, total in (
            (q, query, heads.num_query),
            (k, kv, heads.num_kv),
            (v, kv, heads.num_kv),
            (o, query, heads.num_query),
        ):
            self._cut_linear(linear, styles, held, total)
        self._shards.kv_heads[int(attention.layer_idx)] = KVHeads(kv, heads.num_kv)

    def _cut_linear(self, linear: Any, styles: dict[str, Style], held: range, total: int) -> None:
        """Shard a projection with equally many rows (or columns) per head of `total` to the heads `held`."""
        path = self._paths[linear]
        for name, parameter in linear.named_parameters():
            whole = cut_of(styles.get(path, Style()), parameter, 0, 1)
            if whole is not None:
                each = len(whole.parts[0]) // total
                self._shards.cuts[f"{path}.{name}"] = WeightShard(
                    whole.dim, (range(held.start * each, held.stop * each),)
                )

    def cut(self, path: str, style: Style) -> None:
        module = self._modules.get(path)
        if module is None:
            self._cut_parameter(path, style)
            return
        self._check_attention(path, style)
        sizes = (getattr(module, "in_features", 0), getattr(module, "out_features", 0))
        self._shards.connected.append((module, style, sizes))
        for name, _ in list(module.named_parameters(recurse=False)):
            self._cut_parameter(f"{path}.{name}", style)
        if style.held == "inputs" and self._rank.tp_rank > 0 and getattr(module, "bias", None) is not None:
            module.bias = None
        if isinstance(module, torch.nn.Linear):
            module.out_features, module.in_features = module.weight.shape

    def _check_attention(self, path: str, style: Style) -> None:
        """Raise ConfigError if an attention's heads are divided in a way that is not supported."""
        if path in self._latent_words:
            return
        attention: Any = self._modules[path.rpartition(".")[0]]
        divides = style in (STYLES["colwise"], STYLES["rowwise"]) and hasattr(attention, "is_causal")
        if divides and attention.layer_idx not in self._shards.kv_heads:
            raise cannot_cut(self._name, f"{type(attention).__name__} has heads that are not known here")

    def cut_vocabulary(self) -> None:
        """Shard the embedding and the head by rows, both alike."""
        embedding: Any = self._embedding
        head: Any = self._head
        is_tied = embedding is not None and head is not None and head.weight is embedding.weight
        size = self._shards.vocab_size
        for path in self._vocabulary:
            module = self._modules[path]
            if module.weight.shape[0] != size:
                rows = module.weight.shape[0]
                raise cannot_cut(self._name, f"{path} has {rows} rows where the vocabulary has {size} tokens")
            for name, _ in list(module.named_parameters(recurse=False)):
                self._cut_parameter(f"{path}.{name}", STYLES["colwise"])
        if is_tied:
            head.weight = embedding.weight

    def _cut_parameter(self, path: str, style: Style) -> None:
        parent, _, name = path.rpartition(".")
        module = self._modules[parent]
        parameter = getattr(module, name)
        rank = self._experts if style.held == "experts" else self._rank
        tp_rank, tp_size = rank.tp_rank, rank.tp_size
        cut = self._shards.cuts.get(path) or cut_of(style, parameter, tp_rank, tp_size)
        if cut is None:
            return
        if parameter.shape[cut.dim] < tp_size:
            raise cannot_cut(
                self._name,
                f"{path} is only {parameter.shape[cut.dim]} wide, and there are {tp_size} of them",
                "Use fewer",
            )
        self._shards.cuts[path] = cut
        setattr(module, name, torch.nn.Parameter(parameter.new_empty(cut.shape(parameter.shape)), requires_grad=False))


# Plan of latent attention (`engine/mla.py`) by name in the attention module. It replaces the model's own plan: matrices
# that make heads or join them are sharded by heads, the small ones before are not sharded.
_LATENT_WORDS = {
    "q_proj": "colwise",
    "q_b_proj": "colwise",
    "kv_b_proj": "colwise",
    "o_proj": "rowwise",
    "q_a_proj": "replicate",
    "kv_a_proj_with_mqa": "replicate",
}


def _words_of_latents(modules: Mapping[str, Any], tp_size: int, name: str) -> dict[str, str]:
    """Return the plan for all latent attention in a model, by module. Raises ConfigError if heads cannot be divided."""
    words: dict[str, str] = {}
    for path, module in modules.items():
        if has_latents(module):
            Heads(module.config.num_attention_heads, 1).check(tp_size, name)
            words |= {f"{path}.{child}": word for child, word in _LATENT_WORDS.items() if f"{path}.{child}" in modules}
    return words
