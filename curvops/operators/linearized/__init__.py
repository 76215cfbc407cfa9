"""The linearised network: `linearize`, its Jacobian and gradients, and the bases of its operators."""
