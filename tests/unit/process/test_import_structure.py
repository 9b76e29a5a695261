"""transformers' list of names: the same from the cache folder, without its model files, and new with a new package."""

import json
import os
import subprocess
import sys

import pytest

IMPORT = """
import json, sys
opened = []
sys.addaudithook(lambda name, args: name == "open" and opened.append(str(args[0])))
if sys.argv[1] == "keep":
    from splitserve.process.import_structure import keep_import_structure
    keep_import_structure()
import transformers
import transformers.models
modules = (transformers, transformers.models)
facts = ("_class_to_module", "_import_structure", "_object_missing_backend")
def ordered(thing):
    if isinstance(thing, dict):
        return {str(key): ordered(value) for key, value in thing.items()}
    return sorted(thing) if isinstance(thing, (list, set, frozenset, tuple)) else thing
names = [[ordered(getattr(module, name)) for name in facts] for module in modules]
print(json.dumps([names, sum("/transformers/models/" in path and path.endswith(".py") for path in opened)]))
"""
# A package with the parts that are used: it prints the folders that it lists.
FAKE = """
def define_import_structure(path, prefix=None):
    print("listed", prefix)
    return {frozenset(): {f"{prefix}.llama" if prefix else "llama": {"Llama"}}}
"""
IMPORT_FAKE = """
from splitserve.process.import_structure import keep_import_structure
keep_import_structure()
from pathlib import Path
from transformers.utils.import_utils import define_import_structure
for args in ((Path(PACKAGE, "models"), "models"), (PACKAGE + "/models/__init__.py",)):
    found = define_import_structure(*args)
    found[frozenset()]["more"] = set()
    print(sorted(found[frozenset()]))
print(define_import_structure(PACKAGE + "/models/llama/__init__.py") == {frozenset(): {"llama": {"Llama"}}})
"""


def run(code, cache, *args, path=()):
    env = {
        **os.environ,
        "SPLITSERVE_CACHE": str(cache),
        "PYTHONPATH": os.pathsep.join((*map(str, path), os.environ["PYTHONPATH"])),
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=120, check=True, env=env
    )
    return done.stdout


def test_names_are_those_of_an_import_without_it_and_later_imports_read_no_model_file(tmp_path):
    without, first, later = (json.loads(run(IMPORT, tmp_path, word)) for word in ("", "keep", "keep"))
    assert first[0] == without[0]
    assert later[0] == without[0]
    assert len(without[0][0][0]) > len(without[0][1][0]) > 1000
    assert without[1] > 2 * 1000
    assert later[1] < 10


@pytest.fixture
def package(tmp_path):
    site = tmp_path / "site"
    (site / "transformers" / "utils").mkdir(parents=True)
    (site / "transformers-5.0.dist-info").mkdir()
    for name in ("", "utils/"):
        (site / "transformers" / name / "__init__.py").touch()
    (site / "transformers" / "utils" / "import_utils.py").write_text(FAKE)
    (site / "transformers-5.0.dist-info" / "RECORD").write_text("one")
    return site


def listed(package):
    """Import the package; check what it lists; return the number of times that it listed all models."""
    code = f"PACKAGE = {str(package / 'transformers')!r}\n{IMPORT_FAKE}"
    lines = run(code, package.parent / "cache", path=[package]).splitlines()
    results = [line for line in lines if not line.startswith("listed")]
    assert results == ["['models.llama', 'more']", "['llama', 'more']", "True"]
    # The last one is the folder of one model, which no file keeps.
    return len(lines) - len(results) - 1


def kept(package):
    return sorted((package.parent / "cache").rglob("*.json"))


def test_a_new_installation_is_listed_anew(package):
    assert [listed(package), listed(package)] == [2, 0]
    (package / "transformers-5.0.dist-info" / "RECORD").write_text("another")
    assert [listed(package), listed(package)] == [2, 0]
    assert len(kept(package)) == 4


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"[[", b"[[[],{}]", b'[[["torch"], {"llama": 3}]]', b"\xff", b'[[["\xff"], {}]]']
)
def test_a_damaged_file_is_replaced(package, content):
    listed(package)
    files = kept(package)
    whole = [file.read_bytes() for file in files]
    for file in files:
        file.write_bytes(content)
    assert listed(package) == 2
    assert [file.read_bytes() for file in files] == whole


def test_files_of_a_developer_are_listed_at_each_import(package):
    (package / "transformers-5.0.dist-info" / "RECORD").unlink()
    assert [listed(package), listed(package)] == [2, 2]
    assert kept(package) == []


def test_a_cache_that_cannot_be_written_only_costs_time(package):
    (package.parent / "cache").write_text("a file, not a folder")
    assert [listed(package), listed(package)] == [2, 2]
    assert kept(package) == []


@pytest.mark.parametrize(
    ("listing", "num_kept"),
    [
        ("another_name = None", 0),
        ("def define_import_structure(folder, prefix, *, depth=1): return {frozenset(): {}}", 0),
        ("def define_import_structure(path, prefix=None): return [(path, prefix)]", 0),
        ("def define_import_structure(path, prefix=None): return {frozenset(): {'llama': {'Llama'}}}", 1),
    ],
)
def test_another_version_of_transformers_is_imported_as_without_it(package, listing, num_kept):
    (package / "transformers" / "utils" / "import_utils.py").write_text(listing)
    code = """
import sys
if sys.argv[1]:
    from splitserve.process.import_structure import keep_import_structure
    keep_import_structure()
from transformers.utils import import_utils
listing = getattr(import_utils, "define_import_structure", None)
options = {"depth": 2} if "depth" in LISTING else {}
print(listing and listing(PACKAGE + "/models", "models", **options))
"""
    code = f"PACKAGE, LISTING = {str(package / 'transformers')!r}, {listing!r}\n{code}"
    without, first, later = (run(code, package.parent / "cache", word, path=[package]) for word in ("", "keep", "keep"))
    assert first == later == without
    assert len(kept(package)) == num_kept
