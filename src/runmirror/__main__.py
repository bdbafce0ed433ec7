"""``python -m runmirror``."""

from runmirror.cli import main

main()
