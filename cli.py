"""The program `nanogpt-hf` as a script of a clone, for `accelerate launch cli.py COMMAND ...`."""

from nanogpt_hf.__main__ import run_program

if __name__ == "__main__":
    run_program()
