"""The mpress planning compiler: a library that never prints.  Start reading at `mpress.driver`."""

__version__ = "0.1.0"
