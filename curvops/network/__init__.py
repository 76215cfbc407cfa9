"""The network floor: parameters, likelihoods, data, and the two engines behind J."""
