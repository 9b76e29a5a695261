"""The start of engine processes: the module's `main` runs, with the collector on and the imported objects left out."""

import os
import subprocess

from splitserve.ranks.processes import QUICK_START

MODULE = """
import gc
COLLECTS_AT_IMPORT = gc.isenabled()
def main():
    print(COLLECTS_AT_IMPORT, gc.isenabled(), gc.get_freeze_count() > 0)
    return 7
"""


def test_collection_is_off_during_the_import_alone(tmp_path):
    (tmp_path / "module_to_start.py").write_text(MODULE)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [*QUICK_START, "module_to_start"], capture_output=True, text=True, timeout=60, check=False, env=env
    )
    assert (done.returncode, done.stdout.split()) == (7, ["False", "True", "True"]), done.stderr
