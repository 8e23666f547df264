"""The conformance class that every transport passes, for whoever writes another one."""
