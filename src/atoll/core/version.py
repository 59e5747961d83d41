"""The version, stated once: the package's metadata, ``atoll.__version__`` and runs take it from here."""

VERSION = "0.1.0"
