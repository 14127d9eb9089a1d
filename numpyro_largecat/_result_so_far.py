# SPDX-License-Identifier: Apache-2.0
"""A fit that is interrupted is not lost: its result so far goes with what is raised."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any


class attach_result:
    """Give what is raised in a ``with`` block the attribute ``result_so_far``, and a note of it.

    That is any exception, ``KeyboardInterrupt`` and ``SystemExit`` too; the same object goes on.
    Signals wait while the result is put together, and what their handlers raise then has it too.

    Args:
        result_so_far: Returns the result, and in words how far the fit came, for the note; None
            if there is nothing yet, as the attribute then is, and as it is by default.
    """

    def __init__(self, result_so_far: Callable[[], tuple[Any, str] | None] = lambda: None) -> None:
        self._result_so_far = result_so_far

    def __enter__(self) -> None:
        """Nothing is there to be kept yet."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            return
        found = None
        try:
            with held_signals():
                found = self._result_so_far()
                _attach(error, found)
        except BaseException as another:
            _attach(another, found)
            raise


def _attach(error: BaseException, found: tuple[Any, str] | None) -> None:
    # Past `__setattr__` of the exception's class, which may be frozen.
    object.__setattr__(error, "result_so_far", None if found is None else found[0])
    if found is not None:
        note = f"The attribute `result_so_far` of this exception is the fit after {found[1]}."
        object.__setattr__(error, "__notes__", [*getattr(error, "__notes__", ()), note])


def handled_signals() -> tuple[int, ...]:
    """Signals that have a handler in Python, which may raise; Ctrl-C first. It takes 0.1 ms."""
    numbers = (signal.SIGINT, *(signal.valid_signals() - {signal.SIGINT}))
    return tuple(number for number in numbers if callable(signal.getsignal(number)))


class exit_at_sigterm:
    """Raise ``SystemExit`` at SIGTERM in a ``with`` block, where it would end the process at once.

    A handler that is there is left alone. Outside of the main thread this does nothing.

    Args:
        applies: Whether to do it at all.
    """

    def __init__(self, applies: bool) -> None:
        self._applies = applies

    def __enter__(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        self._applies &= is_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        if self._applies:
            signal.signal(signal.SIGTERM, _exit)

    def __exit__(self, *_: object) -> None:
        if self._applies:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(number: int, _: object) -> None:
    raise SystemExit(128 + number)  # as a shell reports a process that a signal ended


class held_signals:
    """Let handlers of signals, such as that of Ctrl-C, wait until the end of a ``with`` block.

    While a step runs whose memory is donated, its old state is gone and its new one is not yet
    there; nothing must be raised in between. Compiled code does not look at signals either. Outside
    of the main thread, which alone handles signals, this does nothing.

    Args:
        numbers: What ``handled_signals`` gave, to save its time where steps are short.
    """

    def __init__(self, numbers: tuple[int, ...] | None = None) -> None:
        self._numbers = handled_signals() if numbers is None else numbers
        self._handlers: dict[int, Callable[[int, Any], Any]] = {}
        self._waiting: list[tuple[int, Any]] = []
        self._holds = True

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            # Ctrl-C first here, and last at the end: it cannot come in the middle.
            for number in self._numbers:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._handle)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            for number in reversed(self._handlers):
                signal.signal(number, self._handlers[number])
        finally:
            self._holds = False
        with ExitStack() as last_first:  # each is called, also if one raises
            for number, frame in reversed(self._waiting):
                last_first.callback(self._handlers[number], number, frame)

    def _handle(self, number: int, frame: Any) -> None:
        if self._holds:
            self._waiting.append((number, frame))
        else:
            self._handlers[number](number, frame)
