"""The program: `nanogpt-hf COMMAND ...`, or `python -m nanogpt_hf COMMAND ...` from any folder."""

import sys

from nanogpt_hf.interrupts import (
    EXIT_INTERRUPTED,
    handle_ctrl_c,
    handle_ctrl_c_at_the_end,
    show_interrupted,
)


def run_program() -> None:
    """Run the command line of this process, and end with its status."""
    handle_ctrl_c()
    try:
        # Only now, since this takes a tenth of a second.
        from nanogpt_hf.commands import entry_point

        status = entry_point()
    except KeyboardInterrupt:
        show_interrupted()
        status = EXIT_INTERRUPTED
    handle_ctrl_c_at_the_end()
    sys.exit(status)


if __name__ == "__main__":
    run_program()
