"""`python -m nanogpt_hf COMMAND ...`, from any folder."""

from nanogpt_hf.commands import console

if __name__ == "__main__":
    console()
