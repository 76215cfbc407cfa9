"""The GGN against its dense definition under each engine and budget, its gradients, copies and conversions.

Tests `jacobian.py`.
"""

import copy
import pickle

import pytest
import torch
from torch import nn

import curvops as co


def mlp(outputs=3, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def data(n=11, outputs=3, likelihood="classification"):
    x = torch.randn(n, 4, dtype=torch.float64)
    return x, torch.randint(0, outputs, (n,)) if likelihood == "classification" else torch.randn(n, outputs).double()


def dense_jacobian(model, x):
    """(N, C, D) row by row by reverse mode."""
    outputs, parameters = model(x), [p for p in model.parameters() if p.requires_grad]
    rows = [torch.autograd.grad(entry, parameters, retain_graph=True) for entry in outputs.flatten()]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]).unflatten(0, outputs.shape)


def dense_ggn(model, x, likelihood, weights=None):
    J, f = dense_jacobian(model, x), model(x).detach()
    n, c = f.shape
    if isinstance(likelihood, co.likelihoods.Gaussian):
        H = torch.eye(c, dtype=f.dtype).expand(n, c, c) / likelihood.noise
    else:
        p = f.softmax(-1)
        H = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    if weights is not None:
        H = H * weights[:, None, None]
    return torch.einsum("ncd,nce,nef->df", J, H, J)


@pytest.mark.parametrize(
    ("engine", "likelihood"),
    [("auto", "classification"), ("autodiff", "regression"), ("layerwise", "classification")],
)
@pytest.mark.parametrize("budget", [0, 10**8])
def test_products_equal_the_dense_definition(engine, likelihood, budget):
    model, (x, y) = mlp(), data(likelihood=likelihood)
    lin = co.linearize(model, (x, y), likelihood, memory_budget=budget, engine=engine)
    expected = dense_ggn(model, x, lin.likelihood)
    V = torch.randn(lin.num_parameters, 3, dtype=torch.float64)
    for _ in range(4):  # streamed first, then recorded or layerwise
        torch.testing.assert_close(co.GGN(lin) @ V, expected @ V, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(co.GGN(lin) @ V[:, 0], expected @ V[:, 0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("engine", ["autodiff", "layerwise"])
def test_a_subnetwork_by_index_and_by_mask(engine):
    model, (x, y) = mlp(), data()
    whole = co.GGN(co.linearize(model, (x, y), "classification")).to_dense()
    index = torch.tensor([40, 3, 17, 28])
    lin = co.linearize(model, (x, y), "classification", parameters=index, engine=engine)
    torch.testing.assert_close(co.GGN(lin).to_dense(), whole[index][:, index], rtol=1e-10, atol=1e-10)
    mask = torch.zeros(len(whole), dtype=torch.bool)
    mask[index] = True
    lin = co.linearize(model, (x, y), "classification", parameters=mask, engine=engine)
    torch.testing.assert_close(co.GGN(lin).to_dense(), whole[mask][:, mask], rtol=1e-10, atol=1e-10)


def test_gradients_through_vectors_noise_and_prior():
    x, y = data(likelihood="regression")
    noise = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    prior = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    v = torch.randn(51, 2, dtype=torch.float64, requires_grad=True)
    model = mlp()

    def product(noise, prior, v):
        lin = co.linearize(model, (x, y), co.likelihoods.Gaussian(noise))
        return (co.GGN(lin).add_diagonal(prior) @ v).sin().sum()

    assert torch.autograd.gradcheck(lambda noise, prior: product(noise, prior, v), (noise, prior))
    lin = co.linearize(model, (x, y), co.likelihoods.Gaussian(noise))  # once for the entries of v
    P = co.GGN(lin).add_diagonal(prior)
    assert torch.autograd.gradcheck(lambda v: (P @ v).sin().sum(), v)


def test_a_solve_has_gradients_in_noise_prior_and_right_hand_side():
    x, y = data(likelihood="regression")
    model = mlp()
    args = [torch.tensor(0.7).double(), torch.tensor(1.3).double(), torch.randn(51).double()]
    noise, prior, b = (a.requires_grad_() for a in args)

    def solution(noise, prior, b):
        lin = co.linearize(model, (x, y), co.likelihoods.Gaussian(noise))
        return co.GGN(lin).add_diagonal(prior).solve(b).square().sum()

    assert torch.autograd.gradcheck(lambda noise, prior: solution(noise, prior, b), (noise, prior))
    lin = co.linearize(model, (x, y), co.likelihoods.Gaussian(noise))  # once for the entries of b
    P = co.GGN(lin).add_diagonal(prior)
    assert torch.autograd.gradcheck(lambda b: P.solve(b).square().sum(), b)


def test_conversion_to_another_dtype_makes_a_new_linearisation():
    model, (x, y) = mlp(), data()
    G = co.GGN(co.linearize(model, (x, y), "classification"))
    single = G.to(torch.float32)
    assert single.dtype == torch.float32 and G.dtype == torch.float64
    torch.testing.assert_close(single.to_dense().double(), G.to_dense(), rtol=1e-4, atol=1e-4)
    assert next(model.parameters()).dtype == torch.float64


def test_pickles_and_copies_work_and_drop_caches():
    model, (x, y) = mlp(), data()
    G = co.GGN(co.linearize(model, (x, y), "classification"))
    dense = G.to_dense()
    for twin in (pickle.loads(pickle.dumps(G)), copy.deepcopy(G)):
        assert not twin.lin.plan.in_use
        torch.testing.assert_close(twin.to_dense(), dense, rtol=1e-12, atol=1e-12)


def test_to_scipy_serves_scipys_eigensolver():
    from scipy.sparse.linalg import eigsh

    model, (x, y) = mlp(), data()
    G = co.GGN(co.linearize(model, (x, y), "classification"))
    top = eigsh(G.to_scipy(), k=2, return_eigenvectors=False)
    torch.testing.assert_close(torch.tensor(top), torch.linalg.eigvalsh(G.to_dense())[-2:], rtol=1e-8, atol=1e-10)


@pytest.mark.gpu
def test_gpu_products_equal_the_cpu_ones():
    model, (x, y) = mlp(), data()
    expected = co.GGN(co.linearize(model, (x, y), "classification")).to_dense()
    lin = co.linearize(model.cuda(), (x, y), "classification")
    torch.testing.assert_close(co.GGN(lin).to_dense().cpu(), expected, rtol=1e-10, atol=1e-10)
