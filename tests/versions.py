"""Versions of libraries that a test needs."""

import pytest


def at_least(library, *version):
    """Whether a library has this version or a later one."""
    return tuple(map(int, library.__version__.split(".")[: len(version)])) >= version


def since(library, *version, reason):
    """Skip a test with an older version of a library, for this reason."""
    words = f"{library.__name__} before {'.'.join(map(str, version))} {reason}"
    return pytest.mark.skipif(not at_least(library, *version), reason=words)
