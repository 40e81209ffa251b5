"""Text for people with a cluster: how to start a command on all of its ranks.

torchrun sets the environment that `calibration.launch.ranks` reads; the allocator's settings must be there before a rank starts.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from calibration.launch.place import ALLOCATOR
from topologies.reading import UserError

KINDS = ("local", "slurm", "k8s")
PORT = 29500  # torchrun's default
NETWORK = """\
# several networks: export NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, by which nodes reach each other (ip -br address)
"""


def launch_text(how: str, command: Sequence[str], nodes: int, ranks_per_node: int, gpus: bool = True) -> str:
    """A ready command (local), batch script (slurm) or manifest (k8s) that starts `command` on all ranks with torchrun.

    gpus: a rank needs a GPU; otherwise a core.
    """
    write = {"local": _local_text, "slurm": _slurm_text, "k8s": _kubernetes_text}[how]
    return write(command, nodes, ranks_per_node, gpus)


def _torchrun(command: Sequence[str], options: str) -> str:
    settings = " ".join(f"{name}={value}" for name, value in ALLOCATOR.items())
    return f"env {settings} torchrun {options} -m shardyard {shlex.join(command)}"


def _local_text(command: Sequence[str], nodes: int, ranks: int, gpus: bool) -> str:
    if nodes > 1:
        raise UserError(f"--print-launch local: the job has {nodes} nodes; take slurm or k8s")
    return _torchrun(command, f"--standalone --nproc-per-node={ranks}")


def _slurm_text(command: Sequence[str], nodes: int, ranks: int, gpus: bool) -> str:
    meeting = (
        f"--nnodes={nodes} --nproc-per-node={ranks} --rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID --rdzv-endpoint=$head:{PORT}"
    )
    return f"""\
#!/bin/bash
# in an environment that has shardyard and torch; files are written on the first node, in the folder of the submission
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{f"#SBATCH --gpus-per-node={ranks}" if gpus else f"#SBATCH --cpus-per-task={ranks}"}
#SBATCH --exclusive
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
{NETWORK}# srun gives a task one core unless it is told otherwise
srun --cpus-per-task={"$SLURM_CPUS_ON_NODE" if gpus else ranks} {_torchrun(command, meeting)}"""


def _kubernetes_text(command: Sequence[str], nodes: int, ranks: int, gpus: bool) -> str:
    meeting = f"--nnodes={nodes} --nproc-per-node={ranks} --node-rank=$JOB_COMPLETION_INDEX --master-addr=shardyard-0.shardyard"
    # JSON's quotes are YAML's; NCCL's ranks of a node meet in /dev/shm, and containers have 64 MB of it
    started = json.dumps(_torchrun(command, meeting + f" --master-port={PORT}"))
    return f"""\
# replace IMAGE with one that has shardyard and torch installed; what is to stay must be written to a volume that you mount
apiVersion: v1
kind: Service
metadata: {{name: shardyard}}
spec: {{clusterIP: None, publishNotReadyAddresses: true, selector: {{job-name: shardyard}}}}
---
apiVersion: batch/v1
kind: Job
metadata: {{name: shardyard}}
spec:
  completions: {nodes}
  parallelism: {nodes}
  completionMode: Indexed
  backoffLimit: 0
  template:
    spec:
      subdomain: shardyard
      restartPolicy: Never
      containers:
        - name: shardyard
          image: IMAGE
          command: [bash, -c, {started}]
          # InfiniBand or RoCE: the RDMA resource of your cluster's device plugin goes beside the GPUs, e.g. "rdma/hca": {ranks},
          # and `capabilities: {{add: [IPC_LOCK]}}` into a securityContext
          resources: {{limits: {{{"nvidia.com/gpu" if gpus else "cpu"}: {ranks}}}}}
          volumeMounts: [{{name: shared-memory, mountPath: /dev/shm}}]
      volumes: [{{name: shared-memory, emptyDir: {{medium: Memory}}}}]"""
