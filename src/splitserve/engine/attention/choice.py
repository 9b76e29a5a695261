"""Choice of the attention backend of a pool."""

from __future__ import annotations

import logging
from typing import Any

import torch

from splitserve.core.errors import OptionError
from splitserve.engine.attention.base import AttentionBackend, PagedKV
from splitserve.engine.attention.flashinfer import FlashInferBackend, problem_with
from splitserve.engine.attention.kernels import KernelBackend, is_supported
from splitserve.engine.attention.latents import LatentBackend, are_latents_supported
from splitserve.engine.attention.torch_sdpa import TorchSdpaBackend
from splitserve.engine.kernels.library import has_fast_bfloat16
from splitserve.engine.loader import LoadedModel

logger = logging.getLogger(__name__)

_HINT = "pip install 'splitserve[cuda]'"


def choose_attention(
    name: str, loaded: LoadedModel, pool: PagedKV, *, in_fixed_order: bool = False
) -> AttentionBackend:
    """Return the backend. `name`: one of ATTENTION_BACKENDS. Raises ConfigError if the named one is not available."""
    if name == "flashinfer" and pool.device.type != "cuda":
        raise OptionError("--attention-backend", f"flashinfer is for GPUs, and this pool is on {pool.device}: use auto")
    if name != "torch" and pool.device.type == "cuda":
        library, problem = find_flashinfer()
        problem = problem or problem_with(pool)
        if name == "auto" and pool.latents:
            problem = (
                problem or "its kernel for latents failed our test on an H100; --attention-backend flashinfer uses it"
            )
        if problem is None:
            return FlashInferBackend(pool, library, in_fixed_order=in_fixed_order)
        if name == "flashinfer":
            raise OptionError("--attention-backend", f"flashinfer cannot serve {loaded.name}: {problem}. Use auto.")
        logger.warning("attention is torch's, and decode steps are not replayed as CUDA graphs: %s", problem)
    # Without instructions for bfloat16, torch converts its numbers one by one.
    widen = pool.device.type == "cpu" and loaded.dtype != torch.float32 and not has_fast_bfloat16()
    num_heads = loaded.model.config.get_text_config().num_attention_heads
    if name == "auto" and loaded.kernels is not None:
        if is_supported(pool, num_heads, loaded.kernels):
            return KernelBackend(pool, loaded.kernels)
        if are_latents_supported(pool, {shape.v_dim for shape in loaded.layers}, loaded.kernels):
            return LatentBackend(pool, loaded.kernels, widen=widen)
    return TorchSdpaBackend(pool, widen=widen)


def find_flashinfer() -> tuple[Any, str | None]:
    """Return the library, or why it is not available."""
    try:
        # Imported here, because the package is for GPUs and searches for one on import.
        import flashinfer as library
    except ModuleNotFoundError as error:
        return None, f"the Python package {error.name!r} is missing: {_HINT}"
    except Exception as error:
        # Its errors for a broken CUDA installation have no common class.
        return None, f"FlashInfer does not load ({type(error).__name__}: {error}): {_HINT}"
    return library, None
