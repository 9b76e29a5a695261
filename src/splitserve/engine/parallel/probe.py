"""Probe of one rank's share of a model: finds the shapes of its KV and checks its results. See `engine/probe.py`.

In addition, a stage may need nothing but hidden states from the stages before it. Models with layers that exchange
other data (embeddings that go to every layer, KV that later layers share) are rejected.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from splitserve.core.errors import EngineError
from splitserve.engine.attention.base import AttentionParams
from splitserve.engine.parallel.load import ModelShare
from splitserve.engine.parallel.refusal import cannot_cut
from splitserve.engine.probe import PROBE_TOKENS, LayerShape, Recorder, probe, run_whole


def probe_share(model: Any, share: ModelShare, name: str) -> tuple[LayerShape, ...]:
    """Return the shapes of this rank's layers, in order. All ranks of a stage call it together.

    Raises ModelLoadError or ConfigError.
    """
    found = probe(model, name, layers=share.stage.layers, run=functools.partial(_run, share))
    return tuple(_with_heads(shape, share, name) for shape in found)


def _with_heads(shape: LayerShape, share: ModelShare, name: str) -> LayerShape:
    heads = share.shards.kv_heads.get(shape.layer)
    if heads is None:
        return shape
    if shape.num_kv_heads != len(heads.held):
        raise cannot_cut(
            name,
            f"layer {shape.layer} has {shape.num_kv_heads} KV heads on this rank where {len(heads.held)} were expected",
        )
    return replace(shape, first_kv_head=heads.held.start, total_kv_heads=heads.total)


def _run(share: ModelShare, model: Any, recorder: Recorder) -> None:
    stage = share.stage
    if share.meeting is not None:
        share.meeting.begin_alike(PROBE_TOKENS)
    if stage.entry is None and stage.exit is None:
        run_whole(model, recorder)
        return
    positions = torch.arange(PROBE_TOKENS, device=model.device).unsqueeze(0)
    sent = _noise(share, model, seed=0)
    with torch.inference_mode():
        given = torch.zeros_like(positions) if stage.entry is None else sent
        hidden = stage.run(model, given, positions, recorder)
        if (hidden.shape, hidden.dtype) != (sent.shape, sent.dtype):
            raise EngineError("its layers hand on something else than hidden states")
        if stage.entry is not None:
            ahead = [_noise(share, model, seed) for seed in (1, 2)]
            one, other = (stage.run(model, sent, positions, _Mixture(), ahead=a) for a in ahead)
            if not torch.equal(one, other):
                raise EngineError("its layers need more of the layers before them than hidden states")
    if stage.exit is None and stage.entry is not None:
        # Set again for this run, because the first run has used it.
        stage.entry.given = sent
        run_whole(model, Recorder(), inputs_embeds=sent)


def _noise(share: ModelShare, model: Any, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(1, PROBE_TOKENS, share.stage.hidden_size, generator=generator)
    return noise.to(device=model.device, dtype=model.dtype)


class _Mixture:
    """StepAttention with an output that depends on each of its inputs."""

    def forward(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        group = query.shape[1] // key.shape[1]
        seen = (value + key.mean(-1, keepdim=True)).repeat_interleave(group, dim=1)
        return seen + params.scaling * query.mean(-1, keepdim=True)
