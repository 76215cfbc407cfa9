"""Data, parameters and vectors that processes share; other code knows of them by the walk and by `vectors`."""
