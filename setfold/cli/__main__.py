"""python -m setfold.cli, where the script setfold is not on the path."""

from setfold.cli import main

main()
