"""llama.cpp's HTTP server on a GGUF file, after a conversion of its weights to the dtype of the comparison.

Usage: llama_cpp_server.py FILE.gguf CACHE_FOLDER PORT THREADS DTYPE. Runs in the peer's own environment.
"""

import signal
import sys
from pathlib import Path

import gguf
import xllamacpp

TYPES = {
    "float32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "float16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bfloat16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
}
# Tokens of the KV cache, which all sequences share, and sequences at once.
CONTEXT_TOKENS = 65536
NUM_SEQUENCES = 40


def convert(source: Path, target: Path, dtype: str) -> None:
    """Dequantise matrices into `dtype` and everything else into float32. `target` appears whole."""
    quantization, file_type = TYPES[dtype]
    reader = gguf.GGUFReader(source)
    partial = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub_type)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        kind = quantization if len(tensor.shape) > 1 else gguf.GGMLQuantizationType.F32
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)


def main() -> None:
    source, folder, port, threads, dtype = Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]
    model = folder / f"{source.stem}-{dtype}.gguf"
    if not model.exists():
        convert(source, model, dtype)
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.model_alias = "peer"
    params.hostnames = ["127.0.0.1"]
    params.port = int(port)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    params.n_ctx, params.n_parallel = CONTEXT_TOKENS, NUM_SEQUENCES
    params.kv_unified = True
    params.cache_prompt = False
    server = xllamacpp.Server(params)
    # Its own end waits for every request that it has begun.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.stderr.write(f"listening at {server.listening_address}\n")
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
