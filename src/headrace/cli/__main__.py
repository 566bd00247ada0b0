"""`python -m headrace.cli`: the same as `headrace`, for processes that start another one."""

from headrace.cli.app import main

main()
