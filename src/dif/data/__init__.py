"""Data that come with dif, for the demo and the examples. Only data belong here."""
