"""How near bounds come to the simulation: a search simulates few plans only where they come near."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from sim.pricing.prices import Prices
from tests.strategies.planner.bounds.test_bounds import CPU, EXPERTS, GPU, LINKS, OLDER, OVERHEAD, parts_of_the_answer

NODE = {"nvlink": "9 GB/s", "nic": "5 GB/s", "cpu": CPU, "gpu": GPU}
WIRES = {kind: link | {"latency": "0 s"} for kind, link in LINKS.items()}

# Thousandths of the simulated step: of all plans at once, by the schedule, with the exchange of gradients and parameters, the
# longest path | of the simulated peak: of all plans at once, by the program | GPUs of a node × nodes, what dp ranks
# share, the rest of the plan
TABLE = """
 760  770  933 1000 | 1000 1000 | 2×2 zero1 pp: 2, schedule: zb-h1, accumulation: 4
 851  855  874  979 | 1000 1000 | 4×2 ddp tp: 2, sequence_parallel: true, pp: 2, schedule: interleaved, chunks: 2, accumulation: 4
 508  508  983 1000 |  936  955 | 4×2 zero3 recompute: full, accumulation: 2
 560  560  941 1000 | 1000 1000 | 4×2 zero3 reshard: false, accumulation: 3
 376  376  830 1000 |  963  962 | 4×2 zero3 pp: 2, accumulation: 4
 473  474  762 1000 | 1000 1000 | 4×2 zero3 pp: 2, accumulation: 4, schedule: interleaved, chunks: 2, reshard: false
 540  540  592 1000 |  897 1000 | 4×2 zero3 pp: 2, accumulation: 4, schedule: gpipe, gradient_sync: last
 728  728  909 1000 | 1000 1000 | 4×2 zero2 pp: 2, accumulation: 4, gradient_sync: last
 296  296  988 1000 |  907  994 | 8×1 zero3 kernels: torch, accumulation: 2
 345  345  974 1000 |  866  995 | 4×2 zero3 kernels: torch, shard: 4, accumulation: 2
 656  540  851 1000 | 1000 1000 | 4×2 zero1 ep: 2, accumulation: 2
 399  399  676  949 |  923  964 | 4×2 zero3 ep: 2, pp: 2, accumulation: 2
 526  430  850 1000 | 1000 1000 | 4×2 zero1 cp: 2, accumulation: 2
 741  742    0  744 |  997 1000 | 4×1 ddp pp: 4, schedule: dualpipe, accumulation: 8
 897  898  930  996 |  997 1000 | 2×2 ddp pp: 2, schedule: dualpipe-v, accumulation: 8
 523  592  609  691 |  995 1000 | 4×2 ddp pp: 4, schedule: chimera, accumulation: 8
 409    0    0    0 |  921    0 | 4×2 ddp pp: 4, schedule: pipedream, accumulation: 4
 734    0    0    0 |  911    0 | 4×2 ddp pp: 4, schedule: pipedream-2bw, accumulation: 4
 872  872  936  992 | 1000 1000 | 4×2 zero1 pp: 4, schedule: zb-v, accumulation: 8
 647    0    0 1000 |  881 1000 | 4×2 local_sgd local_steps: 2, accumulation: 2
 632    0    0 1000 |  913 1000 | 4×2 diloco local_steps: 2, accumulation: 2
 891  868  947 1000 | 1000 1000 | 4×2 zero1 accumulation: 2, offload: {optimizer: cpu, tile: 1000}
 227  227  745 1000 |  972  972 | 4×2 zero3 accumulation: 2, offload: {optimizer: nvme, parameters: nvme, tile: 5000}
 602  602  853 1000 |  728 1000 | 4×2 zero3 accumulation: 2, deepspeed: {reduce_bucket_size: 50000}
 490  429  896 1000 |  928 1000 | 4×2 zero2 accumulation: 2, deepspeed: {reduce_bucket_size: 50000}
 849  849  849 1000 |  676 1000 | 4×2 ddp_powersgd accumulation: 1, kernels: torch
 458  458  799 1000 |  677  956 | 4×2 ddp_fp16 gradients: fp32, kernels: torch
 273  273  812 1000 |  709 1000 | 4×2 zero_redundancy_optimizer kernels: torch
 674  674  882 1000 | 1000 1000 | 4×2 zero1 pp: 2, accumulation: 3, overlap: false, overlap_p2p: false
 693  694  823 1000 | 1000 1000 | 4×2 zero1 pp: 2, schedule: interleaved, chunks: 2, accumulation: 4, overlap: false
 693  693  882 1000 | 1000 1000 | 4×2 zero1 pp: 2, accumulation: 3, recompute: full, recompute_method: block, recompute_layers: 1
 616  616  653 1000 | 1000 1000 | 4×2 zero1 pp: 2, layers_per_stage: [0, 6], accumulation: 3
 571  571  821  917 | 1000 1000 | 2×2 ddp pp: 2, accumulation: 3, tied: true, gradients: fp32
 332  332  972 1000 |  897 1000 | 4×2 zero3 fp8: {scaling: tensorwise, gather: true}, kernels: torch, accumulation: 2
"""


@pytest.mark.parametrize("row", TABLE.strip("\n").splitlines(), ids=lambda row: row.rpartition("| ")[2])
def test_parts_of_the_simulation(toy_job: Any, toy_profile: Any, row: str) -> None:
    """Communication takes about as long as passes. The longest path is the step itself wherever no two transfers meet on a link;
    0: not bounded in this way.
    """
    step, memory, text = row.split(" | ")
    shape, hook, fields = text.split(" ", 2)
    plan = yaml.safe_load(f"{{{fields}}}") | {"data_parallel": hook}
    model = {"layers": 6 if "layers_per_stage" in plan else 8, "tied": plan.pop("tied", False)}
    model |= {"experts": EXPERTS} if "ep" in plan else {}
    job = toy_job(*map(int, shape.split("×")), model=model, node=NODE, **plan)
    profile = toy_profile(links=WIRES, overhead=OVERHEAD, older=OLDER)
    parts = parts_of_the_answer(job, Prices(profile, job.cluster.node.gpu))
    for bounds, expected in zip(parts, (step, memory), strict=True):
        assert [1000 * bound for bound in bounds] == pytest.approx([float(part) for part in expected.split()], abs=0.6)
