"""Part 2."""

from benchmarks.gpu_acceptance.tasks import Task

TASKS: tuple[Task, ...] = ()
