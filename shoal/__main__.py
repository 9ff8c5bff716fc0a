"""`python -m shoal` is the command line."""

import sys

from shoal.cli.start import start

if __name__ == "__main__":
    # the command that a run records is the one that works elsewhere too
    sys.argv[0] = "shoal"
    sys.exit(start())
