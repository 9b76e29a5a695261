"""Facts about the engine that a scheduler receives."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from splitserve.engine.pool import layout_for
from splitserve.engine.probe import LayerShape
from splitserve.worker.scheduler_process import has_windows, window_of


@pytest.mark.parametrize(
    ("windows", "num_layers", "expected"),
    [([16, 16], 2, 16), ([16, 8], 2, 16), ([16, None], 2, None), ([None, None], 2, None), ([16, 16], 4, None)],
)
def test_pages_are_forgotten_only_where_all_layers_have_windows_those_of_other_stages_too(
    windows, num_layers, expected
):
    layers = [LayerShape(i, 1, 8, 8, window) for i, window in enumerate(windows)]
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=num_layers))
    loaded = SimpleNamespace(layers=layers, model=SimpleNamespace(config=config))
    engine = SimpleNamespace(loaded=loaded, layout=layout_for(layers, "float32", page_size=4, num_pages=2))
    assert window_of(engine) == expected


@pytest.mark.parametrize(
    ("here", "config", "expected"),
    [
        (None, {"layer_types": ["full_attention", "full_attention"]}, False),
        (None, {"layer_types": ["sliding_attention", "full_attention"]}, True),
        (None, {}, False),
        (None, {"sliding_window": 16}, True),
        (None, {"sliding_window": 16, "use_sliding_window": False}, False),
        (16, {}, True),
    ],
)
def test_windows_of_other_stages_count_where_prefill_sends_less_than_a_prefix_needs(here, config, expected):
    """The last stage, which has the scheduler, may have none of them."""
    loaded = SimpleNamespace(
        model=SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(**config)))
    )
    layout = layout_for([LayerShape(1, 1, 8, 8, here)], "float32", page_size=4, num_pages=2)
    assert has_windows(SimpleNamespace(loaded=loaded, layout=layout)) == expected


# A forked worker has the environment of its template, with one thread, and sets its own number.
_THREADS = """
import ctypes
import torch
from splitserve.worker.scheduler_process import engine_thread
torch.set_num_threads(2)
library = next(line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line)
print(engine_thread().submit(ctypes.CDLL(library).omp_get_max_threads).result())
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_engines_thread_computes_with_the_threads_of_the_process():
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, "-c", _THREADS], env=env, capture_output=True, text=True, timeout=120)
    assert found.stdout.split() == ["2"], found.stderr
