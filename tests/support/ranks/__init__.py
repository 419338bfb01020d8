"""What processes of a torch world run for tests, importable by name."""
