"""``python -m atoll`` is the ``atoll`` command."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        sys.path.pop(0)  # the working folder, from which the `atoll` command takes no modules either
    from atoll.cli.main import main

    sys.exit(main())
