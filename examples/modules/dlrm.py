"""DLRM (arXiv:1906.00091): a dense model on the GPUs, its embedding tables on parameter servers.

shardyard server --model examples/modules/dlrm.py:dlrm --input 13,26x128 --cluster dgx-a100 --nodes 4 \
  --set plan.microbatch=2048 --set plan.accumulation=1 --servers 8 --embedding 40000000x128:1
python examples/modules/dlrm.py
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

TABLES, WIDTH = 26, 128  # of Criteo's categories; features of an embedding


class DLRM(nn.Module):
    """The dense part: 13 numbers through an MLP, products of its result and the tables' rows with each other, and an MLP of
    these (the sizes of MLPerf's DLRM, github.com/mlcommons/training, recommendation_v2).
    """

    def __init__(self, dense: int = 13) -> None:
        super().__init__()
        self.bottom, self.top = _mlp(dense, 512, 256, WIDTH), _mlp(WIDTH + (TABLES + 1) * TABLES // 2, 1024, 1024, 512, 256)
        self.click = nn.Linear(256, 1)
        first, second = torch.tril_indices(TABLES + 1, TABLES + 1, -1, device="cpu").tolist()
        self.pairs = [row * (TABLES + 1) + column for row, column in zip(first, second, strict=True)]

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        """(batch, 13) and (batch, 26, 128), the rows' sums of each table, to (batch, 1)."""
        below = self.bottom(dense)
        every = torch.cat([below[:, None], rows], dim=1)
        products = (every @ every.transpose(1, 2)).flatten(1)[:, self.pairs]
        result: Tensor = self.click(self.top(torch.cat([below, products], dim=1)))
        return result


def _mlp(*sizes: int) -> nn.Sequential:
    layers = [(nn.Linear(before, after), nn.ReLU()) for before, after in pairwise(sizes)]
    return nn.Sequential(*(module for pair in layers for module in pair))


def dlrm() -> DLRM:
    """2,368,897 parameters beside the tables."""
    return DLRM()


def main() -> None:
    """Samples per second as servers are added: 26 tables of 4 million rows, 55 GB with their states, for 24 to 31 workers."""
    from shardyard import read_job
    from strategies.lowering.embeddings import Embeddings, Table
    from strategies.lowering.parameter_servers import parameter_servers
    from strategies.predict import prices_of

    tables = Embeddings((Table(4_000_000, WIDTH, 1),) * TABLES)
    plan = {"microbatch": 2048, "accumulation": 1, "precision": "fp32"}
    job = read_job(None, model=dlrm, input=f"13,{TABLES}x{WIDTH}", plan=plan, cluster="dgx-a100", nodes=4)
    print("servers  staleness  samples/s  pulled by a worker in MB  a server's memory in GB")
    for servers, staleness in ((1, "async"), (4, "async"), (8, "async"), (8, "sync")):
        answer = parameter_servers(job, prices_of(job), servers, staleness, steps=20, embeddings=tables)
        pulled, memory = answer.setting.parameters / 1e6, answer.server_memory / 1e9
        print(f"{servers:7}  {staleness:>9}  {answer.tokens_per_second:9,.0f}  {pulled:24.1f}  {memory:23.1f}")


if __name__ == "__main__":
    main()
