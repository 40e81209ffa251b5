"""Packages that not every use needs, and the extra of the distribution that has them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

EXTRAS = {"torch": "torch", "scipy": "torch", "pandas": "pandas"}  # package -> extra


class ExtraMissingError(ImportError):
    """A package that is not installed, and how to install it, in one line."""


def how_to_install(package: str) -> str:
    """The line that says what is missing."""
    return f"{package} is not installed, and this needs it: `pip install 'shardyard[{EXTRAS[package]}]'`"


def imported(package: str) -> Any:
    """A package of an extra. Raises ExtraMissingError when it is not installed."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ExtraMissingError(how_to_install(package)) from None
