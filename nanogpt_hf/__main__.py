"""The program: `nanogpt-hf COMMAND ...`, or `python -m nanogpt_hf COMMAND ...` from any folder."""

import signal
import sys

# Until `run_program` has a handler, Ctrl-C ends the process without a word. Python's own handler
# prints a traceback.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_program() -> None:
    """Run the command line of this process, and end with its status."""
    from nanogpt_hf import interrupts

    try:
        # One may be waiting already.
        interrupts.handle_ctrl_c()
        # Only now, since this takes a tenth of a second.
        from nanogpt_hf.commands import entry_point

        status = entry_point()
    except KeyboardInterrupt:
        interrupts.show_interrupted()
        status = interrupts.EXIT_INTERRUPTED
    interrupts.handle_ctrl_c_at_the_end()
    sys.exit(status)


if __name__ == "__main__":
    run_program()
