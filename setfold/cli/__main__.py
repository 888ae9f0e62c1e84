"""Run the command line as `python -m setfold.cli`."""

from setfold.cli import main

main()
