"""`python -m infinity.config`: print the reference of the config (docs/config.md)."""

import sys

from infinity.config.reference import render_reference

if __name__ == "__main__":
    sys.stdout.write(render_reference())
