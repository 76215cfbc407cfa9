"""Mixtures of experts, whose grouped products of matrices refuse vectors that are not stored as parameters are."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvops as co
from tests.network.products import WAYS, agree, require_curvature
from tests.zoo import dense_jacobian

pytestmark = pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="torch has no grouped_mm before 2.10")
N, WIDTH, EXPERTS = 6, 8, 4


class Experts(nn.Module):
    """Each point goes to two experts; `grouped` multiplies those of one expert together, which float32 allows alone."""

    def __init__(self, grouped: bool) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, 3)
        self.up = nn.Parameter(0.3 * torch.randn(EXPERTS, 16, WIDTH))
        self.down = nn.Parameter(0.3 * torch.randn(EXPERTS, WIDTH, 16))
        self.grouped = grouped

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = self.gate(x).softmax(1).topk(2, 1)
        order = chosen.flatten().argsort(stable=True)
        points, counts = order // 2, chosen.flatten().bincount(minlength=EXPERTS)
        h = F.silu(self._product(x[points], self.up, counts))
        h = self._product(h, self.down, counts) * shares.flatten()[order].unsqueeze(1)
        return self.head(torch.zeros_like(x).index_add(0, points, h))

    def _product(self, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        if self.grouped:
            return F.grouped_mm(rows, weight.mT, offs=counts.cumsum(0).int())
        return torch.cat([part @ w.mT for part, w in zip(rows.split(counts.tolist()), weight)])


@pytest.mark.parametrize("way", WAYS)
def test_products_in_every_form_of_a_block(way: str) -> None:
    model, x = Experts(grouped=True).eval(), torch.randn(N, WIDTH)
    same = Experts(grouped=False).double().eval()
    same.load_state_dict(model.state_dict())
    J = dense_jacobian(same, x.double())
    lin = co.linearize(model, (x, torch.zeros(N, 3)), co.likelihoods.Gaussian(noise=1.0), **WAYS[way])
    require_curvature(lin, J, tolerance=1e-5)
    block = torch.randn(2, J.shape[1])
    for V in (block[0], block.mT.contiguous()):
        assert agree((co.GGN(lin) @ V).double(), J.mT @ (J @ V.double()), 1e-5)
    H = co.Hessian(lin)
    assert agree(H @ block.mT.contiguous(), torch.stack([H @ v for v in block], 1), 1e-5)
