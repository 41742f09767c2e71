"""Names of tasks, without the imports that loading one needs."""

ARITHMETIC = "arithmetic"
GYM = "reasoning_gym:"


def is_generated(task: str) -> bool:
    """Whether the task has its own questions, and needs no `data.source`."""
    return task == ARITHMETIC or task.startswith(GYM)
