"""AMD's aiter kernels behind the gate and experts of this package.

    layout     the weight order aiter's bf16 kernels want, and its inverse
    features   what the installed aiter can do
    refusals   why it cannot be used here
    calls      prepared weights and the calls themselves
    selftest   the first run on a machine, in a subprocess, against the Triton kernels
    untuned    the shapes to hand to aiter's tuner

aiter cannot be emulated: its calls are checked against the signatures of released versions and a
    fake that reproduces layout, preconditions and rounding. Nothing here has run on an AMD GPU.
"""
