"""Stand-ins for what a test must control: clocks, directories, schedulers."""
