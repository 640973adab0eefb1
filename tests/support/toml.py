"""tomllib, which Python has from 3.11 on."""

import sys

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # import-linter brings it

__all__ = ["tomllib"]
