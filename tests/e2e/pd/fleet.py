"""Groups of instances that tests share. One group runs at a time: an instance takes 2 GB and half a minute to start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from e2e.pd.instances import Instance, Proxy
from e2e.process import assert_no_complaints, running

__all__ = ["Fleet", "Group"]


class Group:
    """Instances that run side by side, by name, and the proxies between them."""

    def __init__(self, instances: Sequence[Instance], logs: Path) -> None:
        self.instances = list(instances)
        self._logs = logs
        self._stack = ExitStack()
        self._proxies: dict[tuple[str, ...], Proxy] = {}

    def start(self) -> None:
        """Start all, side by side."""
        self._stack.callback(self._stop)
        for instance in self.instances:
            instance.start()
        for instance in self.instances:
            instance.wait_until_ready()

    def proxy(self, prefills: Sequence[Instance], decodes: Sequence[Instance], *, order: str = "sequential") -> Proxy:
        """The proxy between these, started when it is first asked for."""
        names = (order, *(f"P{self.instances.index(one)}" for one in prefills),
                 *(f"D{self.instances.index(one)}" for one in decodes))  # fmt: skip
        if names not in self._proxies:
            proxy = Proxy(prefills, decodes, order=order, log=self._logs / f"pd-proxy-{'-'.join(names)}.log")
            self._proxies[names] = self._stack.enter_context(running(proxy))
        return self._proxies[names]

    def forget(self) -> None:
        """Every instance runs, has no KV of an earlier request, and no fault is on."""
        for instance in self.instances:
            instance.heal()
            if not instance.is_running:  # a test failed between a crash and the restart
                instance.restart()
            instance.reset_prefix_cache()

    def close(self) -> None:
        """Stop everything; raise AssertionError if an instance has logged an error."""
        self._stack.close()
        assert_no_complaints([*self.instances, *self._proxies.values()])

    def _stop(self) -> None:
        for instance in self.instances:
            instance.stop()


class Fleet:
    """Starts the group that is asked for, and stops the one that ran before."""

    def __init__(self) -> None:
        self._name: str | None = None
        self._group: Group | None = None

    def use(self, name: str, make: Callable[[], Group]) -> Group:
        if self._group is None or self._name != name:
            self.close()
            self._name, self._group = name, make()
            self._group.start()
        self._group.forget()
        return self._group

    def close(self) -> None:
        group, self._group, self._name = self._group, None, None
        if group is not None:
            group.close()
