"""`python -m moereg`: the same as the `moereg` command."""

import sys

from moereg.cli import main

if __name__ == "__main__":
    sys.exit(main())
