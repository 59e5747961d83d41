"""The order in which jobs start, and the times from which it follows."""

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.engines.job_times import JobTimes, Schedule
from atoll.engines.jobs import Job


def jobs_of(clients, epochs=1):
    return [Job({"client": client, "epochs": epochs}) for client in clients]


def finish(jobs, times, held, workers, seconds):
    """Simulate a round: the clients in the order in which they start, and the time at which the last job ends."""
    schedule = Schedule(jobs, times, held)
    busy, done, order, now, used = [], set(), [], 0.0, 0
    while used < len(jobs):
        while len(busy) < workers and (job := schedule.next(used)):
            heapq.heappush(busy, (now + seconds[job.client], job.client))
            order.append(job.client)
            assert len(order) - used <= held
        if jobs[used].client in done:
            used += 1
            continue
        now, client = heapq.heappop(busy)
        done.add(client)
    assert schedule.next(used) is None
    return order, now


@given(st.lists(st.integers(1, 100), min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 20))
def test_every_job_starts_once_and_the_memory_is_kept(sizes, workers, held):
    order, _ = finish(jobs_of(range(len(sizes))), JobTimes(sizes), held, workers, sizes)
    assert sorted(order) == list(range(len(sizes)))


@given(st.lists(st.integers(1, 100), min_size=1, max_size=9), st.integers(1, 3))
def test_with_enough_memory_the_longest_start_first(sizes, workers):
    order, end = finish(jobs_of(range(len(sizes))), JobTimes(sizes), len(sizes), workers, sizes)
    assert [sizes[c] for c in order] == sorted(sizes, reverse=True)
    least = max(max(sizes), sum(sizes) / workers)
    assert end <= (4 / 3) * max(least, end_of_best(sizes, workers))  # Graham 1969


def end_of_best(sizes, workers):
    """The shortest possible round, by trying every assignment."""
    best = {tuple([0] * workers)}
    for size in sizes:
        best = {
            tuple(sorted(size * (i == k) + load for i, load in enumerate(loads)))
            for loads in best
            for k in range(workers)
        }
    return min(max(loads) for loads in best)


def test_a_large_last_client_no_longer_ends_the_round_alone():
    sizes = [10] * 6 + [60]
    jobs = jobs_of(range(7))
    assert finish(jobs, JobTimes(sizes), 7, 2, sizes)[1] == 60
    assert finish(jobs, JobTimes([1] * 7), 7, 2, sizes)[1] == 90  # in the order of the jobs


def test_times_are_learned_and_relative():
    times = JobTimes([100, 100, 100])
    jobs = jobs_of(range(3))
    times.learn({0: 1.0, 1: 2.0, 2: 3.0}, jobs)
    predicted = [times.predict(job) for job in jobs]
    assert predicted == pytest.approx([50.0, 100.0, 150.0])
    times.learn({0: 10.0, 1: 20.0, 2: 30.0}, jobs)  # everything is ten times as slow: nothing changes
    assert [times.predict(job) for job in jobs] == pytest.approx(predicted)
    following = JobTimes([10, 20, 30], times.paces)  # another run: other images, the same paces
    assert following.predict(jobs_of([2], epochs=2)[0]) == pytest.approx(30 * 2 * 1.5)


def test_a_round_without_training_teaches_nothing():
    times = JobTimes([100, 0])
    times.learn({0: 1.0, 1: 1.0}, jobs_of(range(2), epochs=0))
    assert times.paces == {}
    times.learn({0: 1.0, 1: 1.0}, jobs_of(range(2)))
    assert times.paces == {0: 1.0}
