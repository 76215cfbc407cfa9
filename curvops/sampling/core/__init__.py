"""Parts shared by all samplers: states, parameters as vectors, noise, schedules, metrics, log densities, the step."""
