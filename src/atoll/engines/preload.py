"""Importing this module imports everything that training needs, in four fifths of the usual time.

It is for processes that have just started: a command, and the fork server of the workers.
"""

from atoll.core.collector import leave_out_existing, paused

with paused():
    import numpy  # noqa: F401 (PyTorch's own import of it swallows Ctrl-C, and leaves half of it)

    import atoll.engines.worker_pool  # noqa: F401
leave_out_existing()
