"""The shipped profiles: files beside this module, found by being there."""

from __future__ import annotations

import functools
from pathlib import Path

from sim.pricing.prices import Profile
from sim.pricing.profile_file import verified
from topologies.reading import UserError, build, load_yaml, nearest

FOLDER = Path(__file__).parent / "profiles"
GENERIC = "generic"


@functools.cache
def _shipped(name: str) -> Profile:
    path = FOLDER / f"{name}.yaml"
    return _read(path)


def _read(path: Path) -> Profile:
    return build(Profile, verified(load_yaml(path), path), str(path))


def profile_names() -> list[str]:
    """Names of the shipped profiles, sorted."""
    return list(_names(FOLDER.stat().st_mtime_ns))


@functools.lru_cache(maxsize=1)
def _names(_changed: int) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def load_profile(name_or_path: str | Path) -> Profile:
    """The shipped profile of that name, or the profile in that file. Raises UserError."""
    text = str(name_or_path)
    if text in profile_names():
        return _shipped(text)
    if isinstance(name_or_path, Path) or "/" in text or text.endswith((".yaml", ".yml", ".json")):
        return _read(Path(name_or_path))
    raise UserError(f"unknown profile '{text}'{nearest(text, profile_names())}")


def profile_for(gpu_name: str) -> Profile:
    """The shipped profile whose `applies_to` lists `gpu_name`; the generic one, which says so, when none does."""
    for name in profile_names():
        if gpu_name in _text(name) and serves(_shipped(name), gpu_name):  # reading a file as YAML takes longest
            return _shipped(name)
    return _shipped(GENERIC)


@functools.cache
def _text(name: str) -> str:
    return (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")


def serves(profile: Profile, gpu_name: str) -> bool:
    """Whether a profile names a GPU."""
    return gpu_name == profile.gpu or gpu_name in profile.applies_to


def describe_profile(profile: Profile) -> str:
    """Name, machine, date and error of a profile, on one line."""
    gemm = profile.provenance.get("gemm")
    if gemm is None or not gemm.measured:
        return f"{profile.name} (not measured)"
    error = f", matrix products within {gemm.heldout_error:.1%} (median, held out)" if gemm.heldout_error is not None else ""
    return f"{profile.name} ({gemm.machine}, {gemm.date}{error})"
