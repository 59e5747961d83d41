"""The version, stated once: the package's metadata, ``atoll.__version__`` and runs take it from here."""

VERSION = "0.2.0.dev0"
