"""Kernels of Triton, compiled once and started on a stream that is given: addresses go in as numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import triton

Launch = Callable[..., None]
"""Called with (grid of three, the driver's handle of a stream, the kernel's numbers)."""


def loaded(kernel: Any, num_numbers: int, constants: Mapping[str, Any], **options: int) -> Launch:
    """Compile and load a kernel for the current device.

    Args:
        num_numbers: leading arguments that are 64-bit integers, none of which is compiled in.
        constants: all others, in order.
        options: of the compiler.
    """
    if not isinstance(kernel, triton.runtime.JITFunction):  # Triton's interpreter, which knows no streams

        def interpret(grid: tuple[int, int, int], stream: int, *numbers: int) -> None:
            kernel[grid](*numbers, **constants)

        return interpret
    compiled = kernel.warmup(*[0] * num_numbers, **constants, grid=(1,), **options)
    values = tuple(constants.values())
    compiled[(1, 1, 1)]  # loads it now, not at the first batch

    def launch(grid: tuple[int, int, int], stream: int, *numbers: int) -> None:
        compiled[grid](*numbers, *values, stream=stream)

    return launch
