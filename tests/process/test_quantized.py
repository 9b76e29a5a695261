"""A quantized checkpoint served by real workers: disaggregated output equals colocated output."""

import json
import subprocess
import sys

import pytest
from safetensors.numpy import save_file

from splitserve.cli import main
from splitserve.engine.kernels.library import find_library
from support.quantized import SCHEMES, make_quantized

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(find_library() is None, reason="installed without a C compiler"),
]


def test_a_pair_of_workers_serves_a_4_bit_checkpoint(tmp_path, capsys):
    folder = tmp_path / "model"
    folder.mkdir()
    make_quantized(SCHEMES["awq, groups of 64"], folder)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "The capital of France is"}\n{"input_ids": [195, 28]}\n"One, two, three,"\n')
    options = ["--prompts", str(prompts), "--max-tokens", "8", "--threads", "1", "--json", "--dtype", "bfloat16"]
    # In this process, so that workers fork from the template.
    with pytest.raises(SystemExit) as end:
        main(["verify", str(folder), *options])
    printed = capsys.readouterr()
    assert end.value.code == 0, printed
    report = json.loads(printed.out)
    assert (report["equal"], report["prompts"], report["dtype"]) == (True, 3, "bfloat16")


def test_an_unsupported_scheme_ends_a_worker_before_it_starts(tmp_path):
    config = {"model_type": "llama", "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({}, tmp_path / "model.safetensors")
    done = subprocess.run(
        [sys.executable, "-m", "splitserve", "serve", str(tmp_path), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "is quantized by bitsandbytes, which is not supported" in done.stderr
