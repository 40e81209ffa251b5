"""Settings of training frameworks: a file in each one's folder, which reads them as a job and writes a job as them.

A reader returns fields of a job and says which keys it did not use: `Keys` remembers what was asked for. A writer says what it
can; what it cannot is found by reading the settings again, and comparing (`strategies.frameworks.export`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strategies.job import Job
from strategies.models.importers import Reader
from strategies.plan.options import Offload
from topologies.registry import Registry

EVERYTHING = Offload.model_validate({"optimizer": "cpu", "parameters": "cpu"})  # FSDP's CPU offload


@dataclass(frozen=True)
class ReadSettings:
    """What a file of settings says: fields of a plan and of a model, the number of nodes and of all GPUs where it has them; what
    was ignored, and what else a reader should know.
    """

    where: str
    plan: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    nodes: int | None = None
    gpus: int | None = None
    ignored: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class WrittenSettings:
    """Settings for one framework: the text of its file, the line that starts it, and what has to be added by hand."""

    text: str
    launch: str
    more: tuple[str, ...] = ()


@dataclass(frozen=True)
class Framework:
    """How one framework's settings are read and written. file: the usual name of its file; script: fields of the plan that it
    leaves to the training script; keys: what only its file says, by which it is known.
    """

    file: str
    read: Callable[[Path], ReadSettings]
    write: Callable[[Job], WrittenSettings]
    script: tuple[str, ...] = ()
    keys: frozenset[str] = frozenset()


class Keys(Reader):
    """The keys of one (nested) section of a file; what was not asked for is ignored and said so."""

    def __init__(self, data: Mapping[str, Any], where: str, prefix: str = "") -> None:
        super().__init__(data, where)
        self._prefix = prefix
        self._sections: dict[str, Keys] = {}

    def section(self, key: str) -> Keys:
        """The mapping under `key`; empty when it is not there."""
        from topologies.reading import UserError, shown

        value = self.value(key) or {}
        if not isinstance(value, Mapping):
            raise UserError(f"{self.where}: {self._prefix}{key}={shown(value)} must be a mapping")
        return self._sections.setdefault(key, Keys(value, self.where, f"{self._prefix}{key}."))

    def says(self, key: str, value: Any) -> bool:
        """Whether the key has this value; another one is not used."""
        return key in self._data and self._data[key] == value and self.value(key) == value

    def choice(self, key: str, known: Mapping[Any, Any], absent: Any = None) -> Any:
        """What `known` makes of the value, or of `absent` when the key is not there. Raises UserError for another value."""
        from topologies.reading import UserError, shown

        value = self.value(key, absent)
        is_truth = isinstance(value, bool) and not any(key is value for key in known)  # which equals 0 or 1 in Python
        if isinstance(value, list | dict) or is_truth or value not in known:
            names = ", ".join(str(name) for name in known)
            raise UserError(f"{self.where}: {self._prefix}{key}={shown(value)} is not known here; known: {names}")
        return known[value]

    @property
    def ignored(self) -> tuple[str, ...]:
        """Dotted names of keys that say something and that nobody asked for, sorted."""
        own = [self._prefix + key for key, value in self._data.items() if key not in self.read and value not in (None, {}, [])]
        return tuple(sorted([*own, *(key for section in self._sections.values() for key in section.ignored)]))


def of_pytorch(plan: dict[str, Any], compiled: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The plan of a framework whose models are PyTorch's own operators, with its kernels, and what a reader should know."""
    unknown = [
        name
        for name, there in (("recompute=selective", plan.get("recompute") == "selective"), ("cp", plan.get("cp", 1) > 1))
        if there
    ]
    said = f"kernels=compiled in place of PyTorch's own operators, which are not simulated with {' and '.join(unknown)}"
    remarks = (said,) if unknown and not compiled else ()
    return plan | {"kernels": "compiled" if compiled or unknown else "torch"}, remarks


frameworks: Registry[Framework] = Registry("framework", package="strategies.frameworks", module="settings")
