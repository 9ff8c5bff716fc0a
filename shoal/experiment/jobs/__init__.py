"""Several processes that share the runs of one grid.

`pool` sends orders and `worker` carries them out. They exchange lines of JSON through pipes, so
that nothing is ever unpickled. A run resumes after any kill, so a worker may die at any moment. The
pool may die too, and its workers then end.
"""

from shoal.experiment.jobs.pool import run_jobs

__all__ = ["run_jobs"]
