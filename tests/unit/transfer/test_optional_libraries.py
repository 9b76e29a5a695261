"""Tests without the optional libraries of transports: modules that tests import first must not need them."""

import subprocess
import sys
from pathlib import Path

import support

# Importing a module that is None raises ImportError.
IMPORT_ALL = """
import importlib, sys
for name in ("mooncake", "nixl", "nixl_cu12"):
    sys.modules[name] = None
for name in sys.argv[1:]:
    importlib.import_module(f"support.{name}")
"""


def test_every_support_module_can_be_imported_without_optional_transports():
    names = [path.stem for path in sorted(Path(support.__path__[0]).glob("[a-z]*.py"))]
    assert "fake_device" in names
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
