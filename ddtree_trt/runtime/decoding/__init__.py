"""The decode loop, its methods, sampling and budgets."""
