"""Importing this module imports what training needs, in four fifths of the time.

It is for processes that have done nothing yet: a command, and the process that workers are forks of.
"""

from atoll.core.collector import leave_out_existing, paused

with paused():
    import numpy  # noqa: F401 (PyTorch's own import of it swallows Ctrl-C, and leaves half of it)

    import atoll.engines.executors  # noqa: F401
leave_out_existing()
