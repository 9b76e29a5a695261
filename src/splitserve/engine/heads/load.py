"""Loading of a draft head beside the served model.

If several ranks compute the served model, the driver has the head, whole, and a copy of the embedding and the language
head if its own are shards. The other ranks have only the list of the hidden states that it reads.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from splitserve.core.errors import ConfigError
from splitserve.core.speculative import SpeculativeAlgorithm
from splitserve.engine.draft_model import LoadedDraft
from splitserve.engine.fingerprint import model_fingerprint
from splitserve.engine.heads.eagle3 import layers_to_read, load_eagle3, read_config
from splitserve.engine.heads.head import DraftHead, probe_head, use_kernels_in_head
from splitserve.engine.heads.mtp import load_mtp
from splitserve.engine.heads.states import HiddenStateTap
from splitserve.engine.loader import LoadedModel
from splitserve.engine.parallel.load import load_ends
from splitserve.engine.sources import resolve_model


def load_head(algorithm: SpeculativeAlgorithm, name: str | None, target: LoadedModel) -> LoadedDraft:
    """Load a draft head for `target`, in its dtype and on its device. Raises ModelLoadError or ConfigError.

    All ranks of `target` call it. `name`: of the head's checkpoint. None: it is in the checkpoint of `target`.
    """
    began = time.monotonic()
    served, share = target.model.config.get_text_config(), target.share
    after_layers: Sequence[int] = ()
    if algorithm is SpeculativeAlgorithm.MTP:
        name, folder, fingerprint = target.name, target.folder, f"mtp of {target.fingerprint}"
        state_size = served.hidden_size
    else:
        if name is None:
            raise ConfigError(
                f"--speculative-algorithm {algorithm}: give --speculative-draft-model, the head's checkpoint."
            )
        folder = resolve_model(name)
        config, fingerprint = read_config(folder, name, served), model_fingerprint(folder)
        state_size, after_layers = config.hidden_size, layers_to_read(config, served.num_hidden_layers)
    if share is not None:
        share.stage.tap = HiddenStateTap(target.model, after_layers, share.stage.layers)
        if not share.step_ranks.rank.is_driver:
            return LoadedDraft(fingerprint, None, state_size)
    head: DraftHead
    if algorithm is SpeculativeAlgorithm.MTP:
        head = load_mtp(folder, name, _with_whole_ends(target, has_head=True), target.dtype, target.device)
    else:
        head = load_eagle3(folder, name, _with_whole_ends(target, has_head=False), target.dtype, target.device)
    layers = probe_head(head, name, target.device, target.dtype)
    num_parameters = sum(p.numel() for p in head.parameters())
    use_kernels_in_head(head, layers, target.kernels)
    loaded = dataclasses.replace(
        target,
        model=head,
        name=name,
        folder=folder,
        layers=layers,
        num_parameters=num_parameters,
        fingerprint=fingerprint,
        load_seconds=time.monotonic() - began,
    )
    return LoadedDraft(fingerprint, loaded, state_size)


def _with_whole_ends(target: LoadedModel, *, has_head: bool) -> Any:
    """Return the served model if its embedding and language head are whole on this rank, or else a copy of these.

    `has_head`: whether the language head is needed.
    """
    share = target.share
    if share is None or share.step_ranks.rank.group_size == 1:
        return target.model
    # The last stage has the language head.
    is_whole = share.step_ranks.rank.tp_size == 1
    ends = load_ends(target.folder, target.model, target.dtype, target.device, has_head=has_head and not is_whole)
    if has_head and is_whole:
        ends.set_output_embeddings(target.model.get_output_embeddings())
    return ends
