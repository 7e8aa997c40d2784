"""`python -m gdpa` is the command line."""

from gdpa.cli import run

if __name__ == "__main__":
    run()
