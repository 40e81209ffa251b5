"""PEFT's `adapter_config.json` as the fields of `plan.lora`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from topologies.reading import UserError, load_yaml, shown

READ = {"r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "targets", "use_dora": "dora"}
# What changes no work: where the adapter comes from and goes to, how it begins, and how its result is scaled.
WITHOUT_WORK = frozenset(
    """peft_type peft_version task_type base_model_name_or_path inference_mode auto_mapping revision fan_in_fan_out use_rslora
    init_lora_weights loftq_config eva_config corda_config runtime_config ensure_weight_tying""".split()
)
PLAIN: Mapping[str, object] = {
    "bias": "none"
}  # what other keys have where nothing is asked for; otherwise nothing, false or empty


def read_adapter_config(file: str) -> dict[str, Any]:
    """Fields of `plan.lora`. Raises UserError for another method than LoRA, and for what is not simulated."""
    data = load_yaml(Path(file))
    if str(data.get("peft_type", "LORA")).upper() != "LORA":
        raise UserError(f"{file}: peft_type={shown(data['peft_type'])} is not simulated: only LORA is")
    for key, value in data.items():
        if key not in READ and key not in WITHOUT_WORK and value and value != PLAIN.get(key):
            raise UserError(f"{file}: {key}={shown(value)} is not simulated: adapters are plain ones, in all layers alike")
    return {field: data[key] for key, field in READ.items() if data.get(key) is not None}
