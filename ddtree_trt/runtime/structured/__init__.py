"""Structured output: constraints on a request's text, and the matchers that hold a sequence to them."""
