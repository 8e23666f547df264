"""The refusal that all of the adapter raises, apart from it so that the device path can be used without vLLM."""


class Unsupported(Exception):
    """Why the pool cannot serve this model or setting; the text is the one log line a person sees."""
