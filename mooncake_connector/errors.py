"""The errors a person can meet.

Every message names the thing, the value seen, and what is allowed or what to do next. Nothing in here ever reaches
an engine's scheduler or forward pass: an adapter turns it into a miss, a counter and one log line.
"""


class MooncakeConnectorError(Exception):
    """Base of all errors that this package raises on purpose. `str(error)` is fit to be shown to a person."""


class ConfigError(MooncakeConnectorError):
    """A configuration that cannot be used: unknown key, wrong type, impossible value, unreadable file."""


class NamespaceError(MooncakeConnectorError):
    """A namespace with an impossible field, or one read from elsewhere that this version does not know."""


class ModelIdentityError(MooncakeConnectorError):
    """A model or adapter folder from which no identity can be derived."""


class PageError(MooncakeConnectorError):
    """A page or a buffer whose geometry does not fit what was announced."""


class PoolError(MooncakeConnectorError):
    """A pool folder that cannot be opened or used: permissions, space, format, damage."""


class SnapshotError(PoolError):
    """A snapshot of a pool that cannot be written, read or replaced: another folder, another format, damage, space."""
