"""`python -m cluster.cli`."""

from cluster.cli.main import main

main()
