"""Lets `python -m commlayer` run the command `commlayer`."""

from commlayer.cli.main import run

if __name__ == "__main__":
    run()
