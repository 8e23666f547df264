"""Configuration: the schema, where values come from, and the secret that the instances of a deployment share."""
