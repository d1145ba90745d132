"""A thread that steps shards on the host."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Collection, Sequence
from weakref import WeakSet

import torch

from fsdp_overlap.tensor.pending_steps import PENDING


class Job:
    """What a :class:`HostThread` is to run."""

    def __init__(self, run: Callable[[], None], label: str, thread: HostThread) -> None:
        self.run: Callable[[], None] | None = run
        """``None`` once it ran, so that what it holds is freed."""
        self.label = label
        self._thread = thread

    def wait(self) -> None:
        """Block until it is done.

        Raises:
            RuntimeError: it, or another one, failed.
        """
        self._thread.wait(self)


class HostThread:
    """Runs jobs one after the other, the newest first: gradients arrive in the reverse of forward,
    so the next forward needs first what arrived last.

    After a job failed, no other runs until :meth:`reset`."""

    def __init__(self) -> None:
        self._waiting: list[Job] = []
        self._running: Job | None = None
        self._failure: tuple[Job, BaseException] | None = None
        self.changed = threading.Condition()
        """Guards what the thread and others change, and is notified when a job is done."""
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def submit(self, calls: Sequence[tuple[Callable[[], None], str]]) -> list[Job]:
        """Have the thread run ``calls``, each with the name of its unit, the last first."""
        jobs = [Job(run, label, self) for run, label in calls]
        with self.changed:
            PENDING.update(jobs)
            self._waiting += jobs
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="host step", daemon=True)
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
            job.run = None

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

    @torch.no_grad()
    def _work(self) -> None:
        while True:
            with self.changed:
                while not self._waiting or self._failure is not None:
                    if self._is_closed:
                        return
                    self.changed.wait()
                job = self._running = self._waiting.pop()
            failure = None
            try:
                assert job.run is not None
                job.run()
            except BaseException as error:
                failure = job, error
            with self.changed:
                self._running = None
                job.run = None
                self._failure = failure
                if failure is None:
                    PENDING.discard(job)
                self.changed.notify_all()
            del job


_threads: WeakSet[HostThread] = WeakSet()


@atexit.register
def _finish_all() -> None:
    """Let steps that were accepted be done before torch ends."""
    for thread in list(_threads):
        thread.finish()
