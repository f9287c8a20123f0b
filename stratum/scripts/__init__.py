"""Pieces of scripts that several commands share: context, running steps, and the steps themselves."""
