"""Names of tasks, without the imports that loading one needs."""

from nanogpt_hf.errors import UserError, did_you_mean

ARITHMETIC = "arithmetic"
GYM = "reasoning_gym:"
# their questions are conversations of `data.source`
OF_A_SOURCE = ("exact", "gsm8k", "multiple_choice", "regex")
TASKS = (ARITHMETIC, *OF_A_SOURCE, f"{GYM}NAME")


def is_generated(task: str) -> bool:
    """Whether the task has its own questions, and needs no `data.source`."""
    return task == ARITHMETIC or task.startswith(GYM)


def check_name(task: str, where: str = "rl.task") -> None:
    """Raises UserError if there is no such task."""
    if task not in TASKS and not task.startswith(GYM):
        raise UserError(
            f"{where}: {task}: no such task{did_you_mean(task, TASKS)}; known: {', '.join(TASKS)}"
        )
