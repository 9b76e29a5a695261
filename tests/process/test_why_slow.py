"""The example that causes slow requests, with real workers: their traces show the expected stage."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.soak]
EXAMPLE = Path(__file__).parents[2] / "examples" / "why_slow.py"


# The others depend on the speed of the machine.
@pytest.mark.parametrize("case", ["decode", "pool"])
def test_the_stage_that_waits_for_the_missing_resource_takes_most_of_the_time(case):
    done = subprocess.run([sys.executable, EXAMPLE, case], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(": found\n")
