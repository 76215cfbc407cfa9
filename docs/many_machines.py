"""A Laplace posterior of data that several processes share.

torchrun --nproc-per-node 2 docs/many_machines.py
"""

import torch
import torch.distributed as dist
from torch import nn

import curvops as co

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", rank % torch.cuda.device_count())

torch.manual_seed(0)  # the same network and the same draws on all ranks
model = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 3)).double().to(device)
x = 2 * torch.randn(301, 2, dtype=torch.float64)
y = (x[:, 0] > x[:, 1].sin()).long() + (x[:, 1] > 1)
# of your data: what this rank read from its own disk
shard = x[rank::size].to(device), y[rank::size].to(device)

lin = co.linearize(model, shard, "classification", process_group=dist.group.WORLD)
post = co.laplace(lin, co.KFAC, prior_precision=1.0, check_mode=False)
best = co.evidence.maximize(post)
new = torch.tensor([[0.0, 0.0], [30.0, -30.0]], dtype=torch.float64, device=device)
spread = best.predict(new).stddev

if rank == 0:
    print(f"{size} processes, {lin.num_data} points, this one has {len(shard[0])}")
    print(f"prior precision {float(best.prior_precision):.4g}")
    print("standard deviations of the logits", *(f"{float(s):.4f}" for s in spread.flatten()))
dist.destroy_process_group()
