"""The embedded host: page pools, rings, scheduler, sampler, Python API."""
