"""Runs and attempts of them, as users and agents start them."""
