"""`python -m mesatron`, as launchers call it."""

from mesatron.cli import main

main()
