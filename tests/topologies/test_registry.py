"""A registry is filled by the modules of a folder."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from topologies.registry import Registry


def test_a_scan_that_was_interrupted_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "things_of_a_test"
    folder.mkdir()
    for name in ("__init__", "one", "two"):
        (folder / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    load, interrupts = importlib.import_module, [KeyboardInterrupt]

    def interrupted(name: str) -> Any:
        if name.endswith("two") and interrupts:
            raise interrupts.pop()
        module = load(name)
        if name.endswith(("one", "two")) and name not in known._things:
            known(name)(name)
        return module

    monkeypatch.setattr(importlib, "import_module", interrupted)
    known: Registry[str] = Registry("thing", package=folder.name)
    with pytest.raises(KeyboardInterrupt):
        list(known)
    assert list(known) == [f"{folder.name}.one", f"{folder.name}.two"]
