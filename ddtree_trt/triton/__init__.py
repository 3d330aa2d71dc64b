"""The Triton model: its export, and the code behind `triton_repo/model/1/model.py`, which has the server's modules."""

ENGINE_FOLDER = "engine"  # inside the model's version directory; exported models import it from here
