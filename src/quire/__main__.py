"""`python -m quire` is the command `quire`."""

from quire.cli.entry import main

main()
