"""Order in which a round's jobs start: the longest first, according to times learned from earlier rounds.

A round ends when its last job does. If the longest jobs start first, the last ones are short, and the processes end
at nearly the same time (as in Pollen, Sani et al. 2023, arXiv 2306.17453). The order has no influence on results,
which are used in the order of the jobs.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from atoll.engines.jobs import Job

SMOOTHING = 0.5  # share of the newest time; single times are noisy


class JobTimes:
    """Predicts the time of clients' jobs relative to each other.

    A job's time is its number of images times its client's pace. Paces are relative to the mean of their round, so
    they remain useful in the next run, whose method may take longer per image.

    Args:
        sizes: Number of images of each client.
        paces: Paces by client, from an earlier run; `learn` updates them.
    """

    def __init__(self, sizes: Sequence[int], paces: dict[int, float] | None = None) -> None:
        self._sizes = sizes
        self.paces = {} if paces is None else paces

    def predict(self, job: Job) -> float:
        """Predict a job's time, in an arbitrary unit; a client without a pace has the mean pace, 1."""
        return self._work(job) * self.paces.get(job.client, 1.0)

    def learn(self, seconds: Mapping[int, float], jobs: Sequence[Job]) -> None:
        """Learn the paces of clients from the seconds that their jobs took in a round."""
        work = {job.client: self._work(job) for job in jobs if self._work(job) and job.client in seconds}
        mean = sum(seconds[client] for client in work) / max(1, sum(work.values()))
        if mean <= 0:
            return
        for client, amount in work.items():
            pace = seconds[client] / amount / mean
            self.paces[client] = SMOOTHING * pace + (1 - SMOOTHING) * self.paces.get(client, pace)

    def _work(self, job: Job) -> int:
        return self._sizes[job.client] * job.message["epochs"]


class Schedule:
    """Decides which job starts next: the longest one whose result will not wait too long for its turn.

    Results are used in the order of the jobs, and early results are held in memory. At most ``held`` jobs are
    therefore started before the result of the first of them is used.

    Args:
        jobs: The round's jobs, in the order in which their results are used.
        times: Predicts their times.
        held: Number of jobs that may be started but not yet used, at least 1.
    """

    def __init__(self, jobs: Sequence[Job], times: JobTimes, held: int) -> None:
        self._jobs = jobs
        self._times = times
        self._held = held
        self._open: list[tuple[float, int]] = []  # a heap of jobs that may start now: −time and position
        self._opened = 0  # number of jobs that were ever in it

    def next(self, used: int) -> Job | None:
        """Return the job to start now; None if the memory is full, or if no job is left.

        Args:
            used: Number of results that were used.
        """
        for position in range(self._opened, min(used + self._held, len(self._jobs))):
            heapq.heappush(self._open, (-self._times.predict(self._jobs[position]), position))
            self._opened = position + 1
        return self._jobs[heapq.heappop(self._open)[1]] if self._open else None
