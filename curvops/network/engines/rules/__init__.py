"""One file per family of layers; the table of them all is `curvops.network.engines.layers`."""
