"""How the ranks of an attempt find each other: cards, one leader, one world."""
