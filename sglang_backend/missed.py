"""Why pages of the prompt that is looked up now were missing."""

from __future__ import annotations

import threading

from mooncake_connector.misses import Miss


class Missed(threading.local):
    """Tokens by reason, of the last lookup by the thread that asks: SGLang looks up in one thread for requests, in
    another for its scheduler, and loads in a third. Of one prompt those further on are noted first.
    """

    def __init__(self) -> None:
        self.tokens: dict[Miss, int] = {}
        """From the end of the prompt to its beginning."""

    def note(self, why: Miss, tokens: int) -> None:
        self.tokens[why] = self.tokens.pop(why, 0) + tokens

    def take(self) -> dict[Miss, int]:
        """From the beginning of the prompt to its end; what was noted is forgotten."""
        taken, self.tokens = self.tokens, {}
        return dict(reversed(taken.items()))
