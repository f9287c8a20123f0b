"""The host: what it must provide and what is changed on it."""
