"""Programs that stand in for ones that Debian does not have, as strict as those. Each is one file that runs alone."""
