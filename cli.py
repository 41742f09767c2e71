"""The program `nanogpt-hf` as a script of a clone, for `accelerate launch cli.py COMMAND ...`."""

from nanogpt_hf.commands import entry_point

if __name__ == "__main__":
    entry_point()
