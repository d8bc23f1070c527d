"""`python -m commlayer` is the command `commlayer`."""

from commlayer.cli.main import run

if __name__ == "__main__":
    run()
