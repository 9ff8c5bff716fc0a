"""`python -m shoal` is the command line."""

import sys

from shoal.cli.start import start

if __name__ == "__main__":
    sys.exit(start())
