"""The import path of the wheel in a checkout: `shardyard.sim.program` is `sim.program`, the same module and not another copy."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:  # importing them takes as long as a tenth of `--help`: tempfile, shutil, zipfile come with them
    Loader = MetaPathFinder = object

ROOMS = ("topologies", "sim", "strategies", "calibration", "reports")


class _Same(Loader):
    """Loads `shardyard.sim` by importing `sim`."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module that is there."""
        module = import_module(spec.name.partition(".")[2])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is run again; the module keeps its own name and specification."""
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Of names below `shardyard` that begin with a room."""
        package, _, name = fullname.partition(".")
        if package != "shardyard" or name.partition(".")[0] not in ROOMS:
            return None
        return ModuleSpec(fullname, _Same())


def rooms_below_shardyard() -> None:
    """From now on `import shardyard.sim` imports `sim`."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
