"""The linearised network: `linearize`, its Jacobian and gradients, and what operators read of it."""
