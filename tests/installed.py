"""The first five lines of a user, run where a wheel or an sdist is installed: python tests/installed.py"""

import torch

import curvops as co

model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
lin = co.linearize(model, (torch.randn(20, 2), torch.arange(20) % 3), "classification")
post = co.laplace(lin, co.GGN, prior_precision=1.0, check_mode=False)
print(post, "with torch", torch.__version__)
assert post.probabilities(torch.randn(4, 2)).sum(1).allclose(torch.ones(4))
