"""`python -m nanogpt_hf COMMAND ...`, from any folder."""

from nanogpt_hf.commands import entry_point

if __name__ == "__main__":
    entry_point()
