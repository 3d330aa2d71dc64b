"""The Triton model: its export, and the code behind `triton_repo/model/1/model.py`, which reads requests, runs them on
an engine, answers, and counts.

No module here imports Triton: the server's modules exist only inside the server, so the model passes in what is needed.
"""

ENGINE_FOLDER = "engine"  # inside the model's version directory; exported models import it from here
