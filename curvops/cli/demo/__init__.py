"""The demo: what a posterior adds to a regression, to a classifier of wrong labels, and to inputs never seen."""
