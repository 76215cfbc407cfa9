"""Inputs are numbers, whatever their dtype; `test_calls` has their forms."""

import pytest
import torch

from curvops.network.data import as_inputs


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_bad_number_is_found(dtype: torch.dtype, bad: float) -> None:
    x = torch.ones(50, 7, dtype=dtype)
    as_inputs(x)
    x[31, 2] = bad
    with pytest.raises(ValueError, match="NaN or inf"):
        as_inputs(x)
