"""Several processes that share the runs of one grid.

`pool` gives the orders and `worker` carries them out; they talk in lines of JSON through pipes, so
that nothing is ever unpickled. A run is a folder that resumes after any kill, hence a worker may
die at any moment, and so may the process that gives the orders: workers end with it.
"""

from shoal.experiment.jobs.pool import run_jobs

__all__ = ["run_jobs"]
