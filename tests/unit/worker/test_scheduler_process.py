"""Facts about the engine that a scheduler receives."""

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
