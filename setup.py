"""Build of the C extensions on all cores. All else is in pyproject.toml."""

import copy
import os

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class ParallelBuild(build_ext):
    """Builds as many extensions at the same time as this process has cores."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.parallel is None:
            self.parallel = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()

    def build_extension(self, ext: Extension) -> None:
        """Build one extension, with a folder of its own for objects: several compile the same sources."""
        own = copy.copy(self)
        own.build_temp = os.path.join(self.build_temp, ext.name)
        super(ParallelBuild, own).build_extension(ext)


setup(cmdclass={"build_ext": ParallelBuild})
