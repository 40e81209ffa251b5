"""What determined a prediction, for people and reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strategies.job import Job

VERSION = "0.1.0"  # of the distribution, which takes it from here: looking through what is installed takes milliseconds


def describe(job: Job, command: str = "") -> dict[str, Any]:
    """The job's inputs, its hash, the profile, and the command that asked."""
    from sim.pricing.shipped import describe_profile
    from strategies.predict import profiles_of

    plan = job.resolve()
    return {
        "name": job.name,
        "model": job.model.name,
        "parameters": job.model.parameters,
        "cluster": job.cluster.described,
        "gpu": " + ".join(gpu.name for gpu in job.cluster.gpu_kinds),
        "gpus": job.cluster.gpus,
        "gpus_per_node": max(len(group.gpus) for group in job.cluster.groups),
        "profile": "; ".join(describe_profile(profile) for profile in profiles_of(job)),
        "plan": {
            **job.plan.model_dump(mode="json"),
            "dp": plan.dp,
            "sequence": plan.sequence,
            "global_batch": plan.global_batch,
            "accumulation": plan.microbatches,
            "layers_per_stage": list(plan.layers),
        },
        **({"effects": [str(effect) for effect in job.effects]} if job.effects else {}),
        "ignored": list(job.ignored),
        "notes": list(job.notes),
        "hash": job.hash,
        "version": VERSION,
        "command": command,
    }
