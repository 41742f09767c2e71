"""The one entry: `python cli.py COMMAND ...` or `accelerate launch cli.py COMMAND ...`."""

from nanogpt_hf.commands import entry_point

if __name__ == "__main__":
    entry_point()
