"""`python -m gdpa` is the command line."""

import sys

from gdpa.cli import main

if __name__ == "__main__":
    sys.exit(main())
