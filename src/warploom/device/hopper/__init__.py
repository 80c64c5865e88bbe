"""Device functions for Hopper: the pipeline of tiles, and attention's mainloops."""
