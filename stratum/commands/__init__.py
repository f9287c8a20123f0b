"""One module for each subcommand: scripts of steps, no mechanism."""
