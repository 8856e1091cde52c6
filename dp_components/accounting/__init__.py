"""Accounting: what a set of privacy events costs, in closed form where one exists."""
