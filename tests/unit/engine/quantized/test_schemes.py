"""Quantization by config.json: what is supported, and what is rejected by its name, with advice."""

from __future__ import annotations

from typing import Any

import pytest

from splitserve.core.errors import ModelLoadError
from splitserve.engine.quantized.schemes import QuantizationScheme, scheme_of
from support.quantized import SCHEMES


def compressed(form: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": more.pop("rows", None)}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, **more}


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}


@pytest.mark.parametrize("name", SCHEMES)
def test_supported_schemes_are_known_by_their_config(name: str) -> None:
    scheme = scheme_of({"quantization_config": SCHEMES[name].config}, "m")
    assert isinstance(scheme, QuantizationScheme)
    assert scheme.quantizes_rows == ("activations" in name)


@pytest.mark.parametrize("key", ["checkpoint_format", "format"])
def test_zero_points_of_gptq_depend_on_the_format(key: str) -> None:
    config = {"quant_method": "gptq", "bits": 4}
    schemes = [scheme_of({"quantization_config": config | {key: form}}, "m") for form in ("gptq", "gptq_v2")]
    assert [scheme and scheme.zeros_less_one for scheme in schemes] == [True, False]


@pytest.mark.parametrize("transforms", [None, {}, {"config_groups": {}}])
def test_empty_transforms_are_none(transforms: Any) -> None:
    assert scheme_of({"quantization_config": compressed("pack-quantized", INT4, transform_config=transforms)}, "m")


def test_a_checkpoint_without_quantization_has_no_scheme() -> None:
    assert scheme_of({"model_type": "llama"}, "m") is None


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "hqq"}, "HQQ"),
        ({"quant_method": "aqlm"}, "AQLM"),
        ({"quant_method": "mxfp4"}, "MXFP4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVIDIA ModelOpt"),
        ({"quant_method": "auto-round"}, "AutoRound"),
        ({"quant_method": "something-new"}, "something-new"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ with 3 bits"),
        ({"quant_method": "gptq", "bits": 2}, "GPTQ with 2 bits"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "GPTQ packed for Marlin"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "GPTQ packed for Marlin"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ in the layout gemv"),
        ({"quant_method": "awq", "bits": 4, "format": "llm-awq"}, "AWQ in the layout llm-awq"),
        ({"quant_method": "gptq", "bits": 4, "format": "marlin"}, "GPTQ packed for Marlin"),
        ({"quant_method": "awq", "bits": 3, "version": "gemm"}, "AWQ with 3 bits"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "FP8 in E5M2"),
        (compressed("nvfp4-pack-quantized", {"num_bits": 4, "type": "float"}), "nvfp4-pack-quantized with 4-bit float"),
        (compressed("marlin-24", INT4), "marlin-24 with 4-bit int"),
        (compressed("pack-quantized", INT4, rows={"num_bits": 4, "type": "int"}), "4-bit int activations"),
        (compressed("pack-quantized", INT4, sparsity_config={"format": "sparse-24"}), "sparse weights"),
        (
            compressed("pack-quantized", INT4, transform_config={"config_groups": {"R4": {"type": "hadamard"}}}),
            "transforms (transform_config)",
        ),
    ],
)
def test_others_are_rejected_by_name_with_advice(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=r"not supported\. Supported are GPTQ") as rejected:
        scheme_of({"quantization_config": config}, "some/model")
    assert "Checkpoint some/model is quantized by" in rejected.value.message
    assert named in rejected.value.message
    assert "--quantization int8" in rejected.value.message


def test_quantized_experts_and_latents_are_rejected() -> None:
    config = {"quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(ModelLoadError, match="mixture of experts"):
        scheme_of({**config, "n_routed_experts": 8}, "m")
    with pytest.raises(ModelLoadError, match="latent attention"):
        scheme_of({**config, "kv_lora_rank": 64}, "m")
