"""Threads of which one runs at a time, and the copies that are under way."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from typing import Any


class KernelError(AssertionError):
    """A kernel does what hardware does not define, or waits for what does not come."""


class _Stopped(BaseException):
    """Another thread has failed."""


class Machine:
    """All programs of a launch."""

    def __init__(self, programs: int, seed: int) -> None:
        self.programs, self.draw = programs, random.Random(seed)
        self.threads: list[Thread] = []
        self.copies: list[Callable[[], None]] = []
        self.error: BaseException | None = None
        self.ended = _taken_lock()

    def run(self, body: Callable[[], None]) -> None:
        """Run ``body`` as every program, and what these start, to the end."""
        for program in range(self.programs):
            self.start(body, program)
        self.go_on(None)
        self.ended.acquire()
        if self.error is not None:
            raise self.error

    def run_in_order(self, body: Callable[[], None]) -> None:
        """Run ``body`` as one program after the other, none of which waits."""
        try:
            for program in range(self.programs):
                _local.thread = Thread(self, body, program)
                body()
        finally:
            _local.thread = None  # and with it what it works on

    def start(self, body: Callable[[], None], program: int) -> Thread:
        """A new thread of a program, which waits until it may run."""
        thread = Thread(self, body, program)
        self.threads.append(thread)
        threading.Thread(target=thread.run, daemon=True).start()
        return thread

    def go_on(self, current: Thread | None) -> None:
        """Make some copies, and let a thread run that can go on."""
        ready = self._ready()
        while self.copies and (not ready or self.draw.random() < 0.3):
            try:
                self.copies.pop(self.draw.randrange(len(self.copies)))()
            except Exception as error:
                self.error = self.error or error
            ready = self._ready()
        if not self.threads:
            self.ended.release()
            return
        if not ready:
            waits = "; ".join(f"program {each.program} for {each.reason}" for each in self.threads)
            self.error, ready = KernelError(f"all wait: {waits}"), self.threads
        chosen = self.draw.choice(ready)
        if chosen is not current:
            chosen.may_run.release()
            if current is not None:
                current.may_run.acquire()
        if current is not None and self.error is not None:
            raise _Stopped

    def _ready(self) -> list[Thread]:
        if self.error is not None:
            return self.threads
        return [thread for thread in self.threads if thread.condition is None or thread.condition()]


class Thread:
    """A partition of a program."""

    def __init__(self, machine: Machine, body: Callable[[], None], program: int) -> None:
        self.machine, self.body, self.program = machine, body, program
        self.may_run = _taken_lock()
        self.condition: Callable[[], bool] | None = None
        self.reason = ""
        self.products: list[Any] = []  # issued and not waited for, in order
        self.stores: list[Any] = []  # copies out of shared memory, likewise
        self.read: list[Any] = []  # of these, what has been read and may not be in device memory yet

    def run(self) -> None:
        self.may_run.acquire()
        _local.thread = self
        with contextlib.suppress(_Stopped):
            try:
                if self.machine.error is None:
                    self.body()
                    if self.stores or self.products:
                        raise KernelError("a partition ends before its copies or products")
            except Exception as error:
                self.machine.error = self.machine.error or error
        self.machine.threads.remove(self)
        self.machine.go_on(None)

    def wait_for(self, condition: Callable[[], bool], reason: str) -> None:
        """Let others run, until a condition holds."""
        self.condition, self.reason = condition, reason
        self.machine.go_on(self)
        self.condition = None


def _taken_lock() -> threading.Lock:
    """What one thread waits for and another one releases, faster than a semaphore."""
    lock = threading.Lock()
    lock.acquire()
    return lock


_local = threading.local()


def current() -> Thread:
    """The thread that runs."""
    thread: Thread = _local.thread
    return thread
