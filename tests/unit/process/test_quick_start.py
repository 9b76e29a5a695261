"""The start of engine processes: the module's `main` runs, with the collector on and the imported objects left out."""

import os
import subprocess
from pathlib import Path

from splitserve.process.engine_start import QUICK_START

MODULE = """
import gc, sys
COLLECTS_AT_IMPORT = gc.isenabled()
def main():
    print(COLLECTS_AT_IMPORT, gc.isenabled(), gc.get_freeze_count() > 0)
    print(any(type(finder).__module__ == "splitserve.process.import_structure" for finder in sys.meta_path))
    return 7
"""


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), os.environ["PYTHONPATH"]))}


def test_the_list_of_transformers_is_kept_and_collection_is_off_during_the_import_alone(tmp_path):
    (tmp_path / "module_to_start.py").write_text(MODULE)
    done = subprocess.run(
        [*QUICK_START, "module_to_start"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment(tmp_path),
    )
    assert (done.returncode, done.stdout.split()) == (7, ["False", "True", "True", "True"]), done.stderr


def test_it_ends_during_the_import_if_its_input_ends(tmp_path):
    (tmp_path / "module_to_start.py").write_text(
        "print('importing', flush=True)\nimport threading\nthreading.Event().wait()"
    )
    process = subprocess.Popen(
        [*QUICK_START, "module_to_start"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(tmp_path),
    )
    with process:
        assert process.stdout.readline() == b"importing\n"
        process.stdin.close()
        assert process.wait(60) == 0
