"""A folder of descriptions that are asked for by name, by a path, or by fields that may be based on one of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from topologies.reading import Config, UserError, build, load_yaml, nearest, shown

C = TypeVar("C", bound=Config)


class Catalogue(Generic[C]):
    """Descriptions of one class in the YAML files of `folder`.

    word: what they are called in errors; merged: fields that are mappings, of which a description that is based on another may
    give single entries.
    """

    def __init__(self, described: type[C], folder: Path, word: str, merged: tuple[str, ...] = ()) -> None:
        self._described, self._folder, self._word, self._merged = described, folder, word, merged

    def names(self) -> list[str]:
        """Names in the catalogue, sorted."""
        return sorted(path.stem for path in self._folder.glob("*.yaml"))

    def load(self, given: object, where: str) -> C:
        """What a name, a path or fields describe. Raises UserError."""
        if isinstance(given, self._described):
            return given
        if isinstance(given, Mapping):
            own = {field: value for field, value in given.items() if field != "based_on"}
            if isinstance(described := given.get("based_on"), self._described):
                changed = build(self._described, own, where)
                return described.model_copy(update={field: getattr(changed, field) for field in changed.model_fields_set})
            base = self._file(given["based_on"], where) if "based_on" in given else {}
            for field in self._merged:
                if isinstance(own.get(field), Mapping):
                    own[field] = {**base.get(field, {}), **own[field]}
            return build(self._described, {**base, **own}, where)
        if not isinstance(given, str):
            raise UserError(f"{where}={shown(given)}: must be a name, a file or fields; known: {', '.join(self.names())}")
        return build(self._described, self._file(given, where), where if given in self.names() else given)

    def _file(self, name: object, where: str) -> dict[str, Any]:
        """The fields behind a name or a path."""
        known = self.names()
        if name in known:
            return {"name": name, **load_yaml(self._folder / f"{name}.yaml")}
        if isinstance(name, str) and ("/" in name or "." in name):
            return {"name": Path(name).stem, **load_yaml(Path(name))}
        raise UserError(f"{where}: unknown {self._word} '{name}'{nearest(str(name), known)}")
