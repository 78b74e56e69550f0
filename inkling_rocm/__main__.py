"""`python -m inkling_rocm`: the command line where the console script is not on the path."""

from inkling_rocm.cli.main import main

if __name__ == "__main__":
    main()
