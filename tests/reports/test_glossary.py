"""A word is explained by what it names."""

from __future__ import annotations

import pytest

from reports.glossary import explain
from strategies.frameworks.deepspeed.options import DeepSpeed
from strategies.plan.options import Fp8, Offload, PowerSGD
from strategies.plan.plan import Plan
from strategies.resilience.loop_settings import InputSettings, Reduction
from strategies.resilience.settings import CheckpointSettings, RepairSettings, RunSettings

GROUPS = {"powersgd": PowerSGD, "offload": Offload, "deepspeed": DeepSpeed, "fp8": Fp8}


@pytest.mark.parametrize(
    "field", [*Plan.model_fields, *(f"{group}.{name}" for group, kind in GROUPS.items() for name in kind.model_fields)]
)
def test_a_field_of_a_plan_is_explained_as_itself(field: str) -> None:
    """plan.optimizer is not plan.offload.optimizer."""
    assert explain(f"plan.{field}").splitlines()[0] == f"plan.{field}"


def test_a_field_of_a_group_is_known_by_its_own_name() -> None:
    assert explain("stage3_prefetch_bucket_size").startswith("plan.deepspeed.stage3_prefetch_bucket_size\n")


def test_an_effect_is_explained_with_its_source() -> None:
    assert "lognormal" in explain("jitter")
    assert "arXiv:2208.11035" in explain("speed")


@pytest.mark.parametrize(
    "field",
    [
        *(name for name in RunSettings.model_fields),
        *(f"checkpoint.{name}" for name in CheckpointSettings.model_fields),
        *(f"repair.{name}" for name in RepairSettings.model_fields),
        *(f"input.{name}" for name in InputSettings.model_fields),
        *(f"loss.{name}" for name in Reduction.model_fields),
    ],
)
def test_a_field_of_a_run_is_explained_with_its_default(field: str) -> None:
    first, meaning, default = explain(f"run.{field}").splitlines()
    assert first == f"run.{field}"
    assert len(meaning) > 15
    assert default.startswith("  default   ")


def test_defaults_of_a_run_have_units() -> None:
    assert explain("heartbeat").endswith("default   30.0 s")
    assert explain("run.repair.automatic").endswith("default   exponential 24.0 h")
