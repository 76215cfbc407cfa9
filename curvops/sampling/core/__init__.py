"""Parts that all samplers share: states, parameters as vectors, noise, schedules, metrics, log densities, the step."""
