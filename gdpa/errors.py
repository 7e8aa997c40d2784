"""The errors gdpa raises. All derive from `GdpaError`, itself a `ValueError`.

Each message names the argument, what came and what was expected.
"""


class GdpaError(ValueError):
    """An argument of a gdpa call is wrong; the message names it."""


class BackendUnavailable(GdpaError):
    """The backend that was asked for by name cannot run this call; the message says why."""


class UnsupportedActivation(GdpaError):
    """A user-written activation cannot be translated; the message names the operation and lists what can be used."""
