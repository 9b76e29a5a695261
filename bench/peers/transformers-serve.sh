#!/bin/sh
# `transformers serve` with continuous batching, of the very transformers that Splitserve runs on: nothing to install.
# See README.md for what the verbs and variables mean.
set -eu

install() {
    "$PEER_PYTHON" -c "
from transformers.utils.import_utils import is_serve_available as there
import sys; sys.exit(None if there() else 'transformers serve lacks packages: pip install transformers[serving]')"
}

# MODEL_FOLDER PORT THREADS DTYPE
serve() {
    export OMP_NUM_THREADS="$3" HF_HUB_OFFLINE=1
    exec "$PEER_PYTHON" -m transformers.cli.transformers serve "$1" --host 127.0.0.1 --port "$2" \
        --device auto --dtype "$4" --continuous-batching
}

"$@"
