"""A progress bar on one line."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

_WIDTH = 30


class Progress:
    """`with Progress(total, stream) as bar: bar.advance(n)`. Draws only on a terminal.

    shown: draws anywhere, or nowhere. clock: seconds that only go forward.
    """

    def __init__(
        self,
        total: int,
        stream: TextIO,
        *,
        shown: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._stream = stream
        self._shown = stream.isatty() if shown is None else shown
        self._clock = clock
        self._start = clock()
        self._done = 0

    def __enter__(self) -> Self:
        self._draw()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            self._stream.write("\n")
            self._stream.flush()

    def advance(self, count: int) -> None:
        """`count` more are done."""
        self._done += count
        self._draw()

    def line(self) -> str:
        """The bar as it stands, with the rate so far and the time that is left at it."""
        filled = _WIDTH * self._done // self._total
        line = f"[{'#' * filled}{'.' * (_WIDTH - filled)}] {self._done}/{self._total}"
        elapsed = self._clock() - self._start
        if not self._done or elapsed <= 0:
            return line
        rate = self._done / elapsed
        return f"{line}  {rate:.1f}/s  {(self._total - self._done) / rate:.0f} s left"

    def _draw(self) -> None:
        if self._shown:
            self._stream.write(f"\r{self.line():<70}")
            self._stream.flush()
