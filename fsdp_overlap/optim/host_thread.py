"""A thread that steps shards on the host."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple
from weakref import WeakSet

import torch

from fsdp_overlap.comm.threads import make_thread
from fsdp_overlap.tensor.pending_steps import PENDING


def _at_once() -> bool:
    return True


class Call(NamedTuple):
    """What a :class:`HostThread` is to run: ``label`` names the unit, and ``is_ready`` returns
    whether ``run`` would begin without waiting for the device."""

    run: Callable[[], None]
    label: str
    is_ready: Callable[[], bool] = _at_once


class Job:
    """A :class:`Call` that was submitted."""

    def __init__(self, call: Call, thread: HostThread) -> None:
        self.run: Callable[[], None] | None = call.run
        """``None`` once it ran, so that what it holds is freed."""
        self.is_ready = call.is_ready
        self.label = call.label
        self._thread = thread

    def wait(self) -> None:
        """Block until it is done.

        Raises:
            RuntimeError: it, or another one, failed.
        """
        self._thread.wait(self)


class HostThread:
    """Runs jobs one after the other, of those that are ready the newest first: gradients arrive in
    the reverse of forward, so the next forward needs first what arrived last. If none is ready, the
    oldest one waits for the device, where copies end in the order in which they were enqueued.

    After a job failed, no other runs until :meth:`reset`."""

    def __init__(self) -> None:
        self._waiting: list[Job] = []
        self._running: Job | None = None
        self._failure: tuple[Job, BaseException] | None = None
        self.changed = threading.Condition()
        """Guards what the thread and others change, and is notified when a job is done."""
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def submit(self, calls: Sequence[Call], device: torch.device | None = None) -> list[Job]:
        """Have the thread run ``calls``, of those that are ready the last first. They wait for
        ``device``, which is the same in all calls."""
        jobs = [Job(call, self) for call in calls]
        with self.changed:
            PENDING.update(jobs)
            self._waiting += jobs
            if self._thread is None and jobs:
                self._thread = make_thread(self._work, "host step", device)
                _threads.add(self)
                self._thread.start()
            self.changed.notify_all()
        return jobs

    def wait(self, job: Job) -> None:
        """Block until ``job`` is done. Raise RuntimeError if one failed."""
        self.wait_until(lambda: job.run is None)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Block until ``is_so()``, which is asked whenever a job is done. Raise RuntimeError if one
        failed."""
        with self.changed:
            while self._failure is None and not is_so():
                self.changed.wait()
            self.check()

    def check(self) -> None:
        """Raise RuntimeError if a job failed."""
        if self._failure is not None:
            job, error = self._failure
            raise RuntimeError(
                f"the optimizer's step of unit {job.label!r} failed in its thread: {error}. Some "
                "units are stepped and others not: call ctx.reset() on every rank, and load a "
                "checkpoint"
            ) from error

    def reset(self, dropped: Collection[Job]) -> None:
        """Drop those of ``dropped`` that have not begun, and finish all others. After a failure,
        which is forgotten, drop all."""
        with self.changed:
            self._drop([job for job in self._waiting if job in dropped])
            while self._failure is None and (self._waiting or self._running is not None):
                self.changed.wait()
            self._drop(self._waiting)
            if self._failure is not None:
                PENDING.discard(self._failure[0])
            self._failure = None
            self.changed.notify_all()

    def _drop(self, jobs: Collection[Job]) -> None:
        PENDING.difference_update(jobs)
        self._waiting = [job for job in self._waiting if job not in jobs]
        for job in jobs:
            job.run, job.is_ready = None, _at_once

    def close(self) -> None:
        """End the thread after its jobs, because nobody submits more. The collector of garbage
        calls this, in any thread and at any point, so it does not wait."""
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()

    def finish(self) -> None:
        """End the thread. Block until it has done its jobs, or one failed, but no longer than a
        minute: a copy may be behind a collective that nobody ends."""
        self.close()
        if self._thread is not None:
            self._thread.join(60)

    def _next(self) -> Job | None:
        """Wait for a job, and return the one to run. ``None`` if there will be none."""
        while True:
            with self.changed:
                while not self._waiting or self._failure is not None:
                    if self._is_closed:
                        return None
                    self.changed.wait()
                waiting = list(self._waiting)
            # Nobody else waits for the driver's answers.
            job = next(filter(_is_ready, reversed(waiting)), waiting[0])
            with self.changed:
                if job in self._waiting:  # else it was dropped meanwhile
                    self._waiting.remove(job)
                    self._running = job
                    return job

    @torch.no_grad()
    def _work(self) -> None:
        while (job := self._next()) is not None:
            failure = None
            try:
                assert job.run is not None
                job.run()
            except BaseException as error:
                failure = job, error
            with self.changed:
                self._running = None
                job.run, job.is_ready = None, _at_once
                self._failure = failure
                if failure is None:
                    PENDING.discard(job)
                self.changed.notify_all()
            del job


def _is_ready(job: Job) -> bool:
    try:
        return job.is_ready()
    except Exception:  # of the device, which fails what the job runs too
        return True


_threads: WeakSet[HostThread] = WeakSet()


@atexit.register
def _finish_all() -> None:
    """Let steps that were accepted be done before torch ends."""
    for thread in list(_threads):
        thread.finish()
