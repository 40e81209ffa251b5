"""A registry is a dictionary filled by a decorator: adding a thing is writing a function, no other file changes.

`Registry("schedule", package="strategies.schedules")` imports every module of that folder when it is first asked for a name, so a
new file is found by being there; with `module="settings"` the file settings.py of every folder in it that has one.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from topologies.reading import UserError, folded, nearest

T = TypeVar("T")


class Registry(Generic[T]):
    """Named things of one sort, e.g. schedules. `sort` is the word used in error messages."""

    def __init__(self, sort: str, package: str | None = None, module: str = "") -> None:
        self.sort = sort
        self._package, self._module = package, module
        self._things: dict[str, T] = {}

    def __call__(self, name: str) -> Callable[[T], T]:
        """Decorator that registers what it decorates under `name`."""

        def register(thing: T) -> T:
            if name in self._things:
                raise RuntimeError(f"two {self.sort}s are called '{name}'")
            self._things[name] = thing
            return thing

        return register

    def __getitem__(self, name: str) -> T:
        self._scan()
        try:
            return self._things[name]
        except KeyError:
            raise UserError(f"unknown {self.sort} '{name}'{nearest(name, self._things)}") from None

    def named(self, name: str) -> str:
        """The registered name that `name` is but for capitals, hyphens, underscores and spaces. Raises UserError."""
        if name not in self:
            name = next((known for known in self if folded(known) == folded(name)), name)
        self[name]
        return name

    def __iter__(self) -> Iterator[str]:
        self._scan()
        return iter(sorted(self._things))

    def __contains__(self, name: object) -> bool:
        self._scan()
        return name in self._things

    def _scan(self) -> None:
        if self._package is None:
            return
        package, self._package = importlib.import_module(self._package), None  # its modules may ask while they are imported
        try:
            for module in pkgutil.iter_modules(package.__path__):
                if not self._module:
                    importlib.import_module(f"{package.__name__}.{module.name}")
                elif module.ispkg and importlib.util.find_spec(f"{package.__name__}.{module.name}.{self._module}"):
                    importlib.import_module(f"{package.__name__}.{module.name}.{self._module}")
        except BaseException:  # whoever asks next goes on
            self._package = package.__name__
            raise
