"""Connects: Ray, Serve, gRPC, HTTP and the command line."""

_SOURCE = "0+source"


def lockstep_version() -> str:
    """The version that is installed, or what says that a checkout runs which is not."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("lockstep")
    except PackageNotFoundError:
        return _SOURCE
