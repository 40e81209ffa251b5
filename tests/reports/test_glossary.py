"""A word is explained by what it names."""

from __future__ import annotations

import pytest

from reports.glossary import explain
from strategies.frameworks.deepspeed.options import DeepSpeed
from strategies.plan.options import Fp8, Offload, PowerSGD
from strategies.plan.plan import Plan

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
