"""The requests, answers and endpoints of the OpenAI API."""
