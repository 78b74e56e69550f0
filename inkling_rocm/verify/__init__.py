"""`inkling-rocm verify`: every Triton kernel, compiled for AMD and run on the emulator.

    register  ->  cases.run_row      compile with the row's constants, execute, compare
              ->  metrics            what the compiled code and the executed instructions say
              ->  report             JSON and the Markdown table of docs/verify.md

The evidence is "emulated": it says nothing about time, and no GPU took part.
"""

from inkling_rocm.verify.run import verify

__all__ = ["verify"]
