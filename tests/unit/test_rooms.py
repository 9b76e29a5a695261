"""Rooms: the packages of splitserve, lowest first. A module imports from its own room and from lower ones."""

import ast
import functools
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "splitserve"
MAP_PAGE = ROOT / "docs" / "architecture.md"
MAP_BEGIN, MAP_END = "<!-- rooms: begin -->\n", "<!-- rooms: end -->\n"

ROOMS = (
    "core",
    "_native",
    "api",
    "process",
    "observe",
    "cache",
    "transfer",
    "engine",
    "scheduler",
    "server",
    "router",
    "ranks",
    "worker",
    "deploy",
    "offline",
    "tools",
    "cli",
)
ABOVE_ALL = {"__main__"}
# Bookkeeping without torch and sockets, and its exceptions.
PURE_ROOMS = ("core", "_native", "cache", "transfer", "observe.events.schema")
IMPURE = ("transfer.transports", "transfer.bootstrap", "transfer.directory", "transfer.control")
PURE_AGAIN = ("transfer.transports.base",)
FORBIDDEN_IN_PURE = {"torch", "transformers", "socket", "zmq", "aiohttp", "httpx", "fastapi", "uvicorn", "xgrammar"}
MODULES = sorted(SOURCE.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def is_pure(module: str) -> bool:
    return is_in(module, PURE_AGAIN) or (is_in(module, PURE_ROOMS) and not is_in(module, IMPURE))


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def rooms_imported(path: Path) -> set[str]:
    names = (name.removeprefix("splitserve.") for name in imports_of(path) if name.startswith("splitserve."))
    return {room for name in names if (room := name.split(".")[0]) in ROOMS}


def libraries_of(path: Path) -> set[str]:
    """Return the top level packages that a module imports."""
    return {name.split(".")[0] for name in imports_of(path)}


def test_a_module_imports_from_its_room_or_lower_ones():
    for path in MODULES:
        module = name_of(path)
        if module == "" or module in ABOVE_ALL:
            continue
        room = module.split(".")[0]
        assert room in ROOMS, f"{module} is in no room: move it into one, or enter the room in ROOMS"
        upward = {other for other in rooms_imported(path) if ROOMS.index(other) > ROOMS.index(room)}
        assert not upward, f"{module} imports from higher rooms: {sorted(upward)}"


def test_bookkeeping_uses_neither_torch_nor_sockets():
    pure = [path for path in MODULES if is_pure(name_of(path))]
    assert pure
    assert not {name_of(path): found for path in pure if (found := libraries_of(path) & FORBIDDEN_IN_PURE)}


def test_the_lowest_room_needs_only_the_standard_library_and_msgspec():
    allowed = {"splitserve", "msgspec", *sys.stdlib_module_names}
    lowest = [path for path in MODULES if is_in(name_of(path), ("core",))]
    assert lowest
    assert not {name_of(path): found for path in lowest if (found := libraries_of(path) - allowed)}


def test_engine_and_transfer_never_import_each_other():
    for path in MODULES:
        room = name_of(path).split(".")[0]
        assert not (room == "engine" and "transfer" in rooms_imported(path)), name_of(path)
        assert not (room == "transfer" and "engine" in rooms_imported(path)), name_of(path)


def imported_rooms() -> dict[str, set[str]]:
    """Return the rooms that each room imports from, without itself."""
    return {
        room: set().union(*(rooms_imported(path) for path in (SOURCE / room).rglob("*.py"))) - {room} for room in ROOMS
    }


def diagram(imports: dict[str, set[str]]) -> list[str]:
    """Return a Mermaid graph of the rooms. An arrow that follows from two or more others is left out."""
    below: dict[str, set[str]] = {}
    for room in ROOMS:
        below[room] = imports[room].union(*(below[other] for other in imports[room]))
    arrows = [
        f"  {room} --> {other}"
        for room in reversed(ROOMS)
        for other in sorted(imports[room], key=ROOMS.index)
        if not any(other in below[between] for between in imports[room] - {other})
    ]
    return ["```mermaid", "flowchart TD", *arrows, "```"]


def room_map() -> str:
    """Return the map of the rooms for architecture.md: a diagram, then name, job, and the rooms it imports from."""
    imports = imported_rooms()
    lines = [*diagram(imports), "", "| room | job | imports |", "|---|---|---|"]
    for room in reversed(ROOMS):
        docstring = ast.get_docstring(ast.parse((SOURCE / room / "__init__.py").read_text()))
        assert docstring, f"{room} has no docstring"
        names = ", ".join(sorted(imports[room], key=ROOMS.index)) or "-"
        lines.append(f"| `{room}` | {docstring.splitlines()[0]} | {names} |")
    return "\n".join(lines) + "\n"


def test_the_map_in_the_docs_is_that_of_the_code():
    page = MAP_PAGE.read_text()
    written = page[page.index(MAP_BEGIN) + len(MAP_BEGIN) : page.index(MAP_END)]
    assert written == room_map(), "run: python tests/unit/test_rooms.py"


def names_used(path: Path) -> set[str]:
    """Every name and every dotted name that the code uses."""
    return {ast.unparse(n) for n in nodes_of(path) if isinstance(n, ast.Name | ast.Attribute)}


def test_no_module_executes_what_it_reads():
    libraries = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    functions = {"eval", "exec", "torch.load", "builtins.eval", "builtins.exec"}
    methods = {"send_pyobj", "recv_pyobj", "load_pickle"}
    for path in MODULES:
        used = names_used(path)
        assert not libraries_of(path) & libraries, name_of(path)
        assert not used & functions, name_of(path)
        assert not {name.rsplit(".", 1)[-1] for name in used} & methods, name_of(path)
        assert "allow_pickle=True" not in path.read_text(), name_of(path)


def test_the_grammar_library_is_loaded_by_the_first_grammar_and_by_no_import():
    for path in MODULES:
        at_import = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.Import | ast.ImportFrom)]
        assert "import xgrammar" not in [ast.unparse(n) for n in at_import], name_of(path)


if __name__ == "__main__":
    text = MAP_PAGE.read_text()
    begin, end = text.index(MAP_BEGIN) + len(MAP_BEGIN), text.index(MAP_END)
    MAP_PAGE.write_text(text[:begin] + room_map() + text[end:])
