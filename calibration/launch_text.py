"""Text for people with a cluster: how to start a command on all of its ranks.

torchrun sets the environment that `calibration.launch` reads; the allocator's settings must be there before a rank starts.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from calibration.launch import ALLOCATOR
from topologies.reading import UserError

KINDS = ("local", "slurm", "k8s")
PORT = 29500  # torchrun's default


def launch_text(how: str, command: Sequence[str], nodes: int, ranks_per_node: int) -> str:
    """A ready command (local), batch script (slurm) or manifest (k8s) that starts `command` on all ranks with torchrun."""
    return {"local": _local_text, "slurm": _slurm_text, "k8s": _kubernetes_text}[how](command, nodes, ranks_per_node)


def _torchrun(command: Sequence[str], options: str) -> str:
    settings = " ".join(f"{name}={value}" for name, value in ALLOCATOR.items())
    return f"env {settings} torchrun {options} -m shardyard {shlex.join(command)}"


def _local_text(command: Sequence[str], nodes: int, ranks: int) -> str:
    if nodes > 1:
        raise UserError(f"--print-launch local: the job has {nodes} nodes; take slurm or k8s")
    return _torchrun(command, f"--standalone --nproc-per-node={ranks}")


def _slurm_text(command: Sequence[str], nodes: int, ranks: int) -> str:
    meeting = (
        f"--nnodes={nodes} --nproc-per-node={ranks} --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=$head:{PORT}"
    )
    return f"""\
#!/bin/bash
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={ranks}
#SBATCH --exclusive
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun {_torchrun(command, meeting)}"""


def _kubernetes_text(command: Sequence[str], nodes: int, ranks: int) -> str:
    meeting = f"--nnodes={nodes} --nproc-per-node={ranks} --node-rank=$JOB_COMPLETION_INDEX --master-addr=shardyard-0.shardyard"
    return f"""\
# replace IMAGE with one that has shardyard and torch installed
apiVersion: v1
kind: Service
metadata: {{name: shardyard}}
spec: {{clusterIP: None, selector: {{job-name: shardyard}}}}
---
apiVersion: batch/v1
kind: Job
metadata: {{name: shardyard}}
spec:
  completions: {nodes}
  parallelism: {nodes}
  completionMode: Indexed
  template:
    spec:
      subdomain: shardyard
      restartPolicy: Never
      containers:
        - name: shardyard
          image: IMAGE
          command: [bash, -c, "{_torchrun(command, meeting + f" --master-port={PORT}")}"]
          resources: {{limits: {{nvidia.com/gpu: {ranks}}}}}"""
