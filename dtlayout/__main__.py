"""The `dtlayout` command as `python -m dtlayout`."""

from dtlayout.cli import run

if __name__ == "__main__":
    run()
