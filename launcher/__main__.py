"""Run `launch` as `python -m launcher`."""

from launcher.cli import main

main()
