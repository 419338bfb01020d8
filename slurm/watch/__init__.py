"""What a user looks at while runs live: what is the case, and how it looks in a terminal."""
