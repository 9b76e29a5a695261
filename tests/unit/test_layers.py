"""Imports point down only: each module may import from its own layer and those below."""

import ast
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "splitserve"

# The longest matching prefix decides. A `disaggregation` module is pure unless it is named here.
LAYERS = {
    "errors": 0,
    "clock": 0,
    "core": 0,
    "messages": 1,
    "config": 1,
    "_native": 2,
    "cache": 2,
    "disaggregation": 2,
    "disaggregation.transports": 3,
    # The contract itself is pure data and Protocols.
    "disaggregation.transports.base": 2,
    "disaggregation.bootstrap": 3,
    "disaggregation.directory": 3,
    "disaggregation.control": 3,
    "disaggregation.waker": 3,
    "engine": 3,
    "events": 3,
    # What events say, and what is made of them, is pure data.
    "events.schema": 2,
    "events.index": 2,
    "metrics": 3,
    "scheduler": 4,
    "api": 4,
    "server": 5,
    "router": 5,
    "launch": 6,
    "bench": 6,
    "offline": 6,
    "chaos": 6,
    "cluster": 6,
    "chaos.faulty": 7,
    "chaos.faulty_scheduler": 7,
    "testing": 6,
    # As a command of its own.
    "testing.failing_follower": 7,
    "cli": 7,
    "__main__": 7,
}
PURE = {"torch", "transformers", "socket", "zmq", "aiohttp", "httpx", "fastapi", "uvicorn", "xgrammar"}
MODULES = sorted(SOURCE.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> int | None:
    parts = module.split(".")
    prefixes = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((LAYERS[p] for p in prefixes if p in LAYERS), None)


def modules_up_to(layer: int) -> list[Path]:
    layers = {path: layer_of(name_of(path)) for path in MODULES}
    return [path for path, found in layers.items() if found is not None and found <= layer]


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_from_its_layer_or_below(path):
    module = name_of(path)
    if module == "":
        return
    layer = layer_of(module)
    assert layer is not None, f"{module} has no layer: enter it in LAYERS"
    ours = {name.removeprefix("splitserve.") for name in imports_of(path) if name.startswith("splitserve.")}
    upward = {name for name in ours if (found := layer_of(name)) is not None and found > layer}
    assert not upward, f"{module} (layer {layer}) imports upward: {sorted(upward)}"


@pytest.mark.parametrize("path", modules_up_to(2), ids=name_of)
def test_the_pure_layers_know_neither_torch_nor_sockets(path):
    assert not {name.split(".")[0] for name in imports_of(path)} & PURE


@pytest.mark.parametrize("path", modules_up_to(0), ids=name_of)
def test_the_lowest_layer_needs_the_standard_library_and_msgspec_alone(path):
    ours = {"splitserve", "msgspec"}
    foreign = {name.split(".")[0] for name in imports_of(path)} - set(sys.stdlib_module_names) - ours
    assert not foreign


def names_used(path: Path) -> set[str]:
    """Every name and every dotted name that the code uses."""
    return {ast.unparse(n) for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Name | ast.Attribute)}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_that_runs_what_it_reads_is_used(path):
    assert not {name.split(".")[0] for name in imports_of(path)} & {
        "pickle",
        "marshal",
        "shelve",
        "dill",
        "cloudpickle",
    }
    used = names_used(path)
    assert not used & {"eval", "exec", "torch.load", "builtins.eval", "builtins.exec"}
    assert not {name.rsplit(".", 1)[-1] for name in used} & {"send_pyobj", "recv_pyobj", "load_pickle"}
    assert "allow_pickle=True" not in path.read_text()


def test_the_grammar_library_is_loaded_by_the_first_grammar_and_by_no_import():
    for path in MODULES:
        at_import = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.Import | ast.ImportFrom)]
        assert "import xgrammar" not in [ast.unparse(n) for n in at_import], name_of(path)


def test_engine_and_transports_never_import_each_other():
    for path in MODULES:
        module = name_of(path)
        if module.startswith("engine"):
            assert not any("splitserve.disaggregation" in name for name in imports_of(path)), module
        if module.startswith("disaggregation"):
            assert not any("splitserve.engine" in name for name in imports_of(path)), module
