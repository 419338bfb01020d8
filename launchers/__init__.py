"""The scripts that a user starts, and the command `rollcall` of an installed package, which starts the same ones."""
