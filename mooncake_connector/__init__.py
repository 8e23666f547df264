"""The ground that both floors stand on: page keys, namespaces, the page format, configuration, errors.

Imports no engine, no store and no transfer. `mooncake_connector.cli` alone looks down from the roof.
"""

__version__ = "0.1.0"
