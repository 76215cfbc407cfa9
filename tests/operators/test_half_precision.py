"""Half precision: operators multiply; whatever solves or factorises refuses at the door and says what to do."""

import pytest
import torch

import curvops as co
from tests.randomness import perceptron

X, Y = torch.randn(20, 3, generator=torch.Generator().manual_seed(1)), torch.arange(20) % 3
DTYPES = [torch.float16, torch.bfloat16]
CURVATURES = {
    "GGN": co.GGN,
    "KFAC": co.KFAC,
    "EKFAC": co.EKFAC,
    "DiagonalGGN": co.DiagonalGGN,
    "BlockDiagonal": co.BlockDiagonal,
}
REMEDY = r"too coarse.*\.to\(torch\.float32\)"


def linearized(dtype, width=4):
    model = perceptron(3, width, 3, dtype=dtype)
    return co.linearize(model, (X, Y), "classification")


def rhs(operator):
    return torch.ones(operator.shape[-1], 2, dtype=operator.dtype)


USES = {
    "solve": lambda P: P.solve(rhs(P)),
    "inverse": lambda P: P.inverse() @ rhs(P),
    "logdet": lambda P: P.logdet(),
    "inv_quad_logdet": lambda P: P.inv_quad_logdet(rhs(P), logdet=True),
    "diagonal of the inverse": lambda P: P.inverse().diagonal(),
    "draws of the inverse": lambda P: co.linalg.draw(P.inverse(), 2),
    "cg": lambda P: co.linalg.cg(P, rhs(P)),
    "lanczos": lambda P: co.linalg.lanczos(P, 3),
    "stochastic logdet": lambda P: co.linalg.logdet(P),
    "low rank": lambda P: co.low_rank(P, rank=2),
    "diagonalization": lambda P: P.diagonalization(),
    "root": lambda P: P.root_decomposition(),
    "root of the inverse": lambda P: P.root_inv_decomposition(),
    "inverse root": lambda P: P.sqrt_inv_matmul(rhs(P)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CURVATURES)
@pytest.mark.parametrize("width", [4, 40])
def test_it_is_refused_by_whatever_solves(dtype, name, width):
    A = CURVATURES[name](linearized(dtype, width))
    assert (A @ rhs(A)).isfinite().all()
    P = A.add_diagonal(1.0)
    for use in USES.values():
        with pytest.raises(TypeError, match=REMEDY):
            use(P)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["GGN", "KFAC", "DiagonalGGN"])
def test_a_posterior_refuses_it_as_a_class_and_as_an_operator(dtype, name):
    lin = linearized(dtype)
    for curvature in (CURVATURES[name], CURVATURES[name](lin)):
        with pytest.raises(TypeError, match=r"too coarse.*lin\.cast\(torch\.float32\)"):
            co.laplace(lin, curvature, 1.0, check_mode=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["GGN", "KFAC", "DiagonalGGN"])
def test_the_remedies_work(dtype, name):
    lin = linearized(dtype).cast(torch.float32)
    P = CURVATURES[name](lin).add_diagonal(1.0)
    torch.testing.assert_close(P.to_dense() @ P.solve(rhs(P)), rhs(P), rtol=1e-4, atol=1e-4)
    converted = CURVATURES[name](linearized(dtype)).to(torch.float32)
    post = co.laplace(lin, converted, 1.0, check_mode=False)
    assert post.sample(2).shape == (2, lin.num_parameters)
    assert post.predict(X).variance.isfinite().all()
