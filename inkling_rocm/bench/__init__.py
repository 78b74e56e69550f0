"""`inkling-rocm bench`: speed of ops, layers, the engine and a server."""
