"""A deployment as files for others to run: `compose` for containers of one host, `kubernetes` for pods.

The commands are those of `up`. `containers` has what both need: commands without this machine's paths, secrets that
stay out of the files, YAML.
"""
